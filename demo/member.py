"""One member of the group `departures`: writes down the number of each flight before it acknowledges it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import orjson
import uvloop

from ..client import Consumer, Message
from ..command.plumbing import logs
from .replay import TOPIC

BATCH_SIZE = 64
_TOLD = frozenset(("queue_assigned", "queue_handed_over"))


class Notes(logging.Handler):
    """Writes down the client's log events about queues that come and go, for the picture of the rebalance."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.client_id = ""

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        if event in _TOLD:
            note = {
                "ms": int(record.created * 1000),
                "event": event,
                "client": self.client_id,
                "fields": record.__dict__["fields"],
            }
            os.write(self._file, orjson.dumps(note) + b"\n")


def notes_to(path: Path) -> Notes:
    notes = Notes(path)
    logger = logging.getLogger("rocketlet.membership")
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    return notes


async def run(name_server: str, group: str, received: Path | None, notes: Notes | None) -> None:
    """Consumes until SIGTERM or SIGINT, then leaves."""
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    count = 0
    file = os.open(received, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if received is not None else None

    async def handle(messages: Sequence[Message]) -> None:
        nonlocal count
        count += len(messages)
        if file is not None:
            os.write(file, array("I", [orjson.loads(message.body)["id"] for message in messages]).tobytes())

    me = Consumer(name_server, group, TOPIC, handle, batch_size=BATCH_SIZE, start="first", commit_interval_s=1.0)
    if notes is not None:
        notes.client_id = me.client_id
    async with me:
        print(f"ready {me.client_id}", flush=True)
        while not done.is_set():
            try:
                async with asyncio.timeout(10):
                    await done.wait()
            except TimeoutError:
                print(f"{me.client_id}: {count} flights, {len(me.assignment())} queues", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="a member of a consumer group over the flights")
    parser.add_argument("--nameserver", required=True)
    parser.add_argument("--group", default="departures")
    parser.add_argument("--received", type=Path, help="where to write the numbers of the flights")
    parser.add_argument("--notes", type=Path, help="where to write when queues came and went, as JSON lines")
    parser.add_argument("--log-level", choices=logs.LEVELS, default="warning")
    options = parser.parse_args()
    logs.configure(options.log_level)
    notes = notes_to(options.notes) if options.notes is not None else None
    uvloop.run(run(options.nameserver, options.group, options.received, notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
