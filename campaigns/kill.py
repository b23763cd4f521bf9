"""A broker under full load is killed with SIGKILL at any moment and started again over the same folder, again and again.

A fault is: a message that was acknowledged and is gone or at another place than was said, messages of a sender out of their
order, a broker that does not start again, one that says that it lost something.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import uvloop
from rocketlet.client import Producer, RocketletError
from rocketlet.testing.ports import free_port

from ._ledger import Place
from ._process import BrokerProcess, pull_all
from .common import Limit, Outcome

DEFAULT_COUNT = 20
QUEUES = 8
SENDERS = 32
LOAD_S = (0.02, 0.5)  # how long there is load before the kill
LIVES = 10  # kills in one flush mode, before the broker ends cleanly and the other mode has its turn
LOSSES = (b"messages_lost", b"commit_log_damaged", b"Traceback")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_run(limit, random.Random(seed), folder))


async def _run(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "slowest_start_s": 0.0, "kills_sync": 0})
    modes = [_Lives(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        lives, other = modes[number // LIVES % 2], modes[number // LIVES % 2 - 1]
        try:
            await other.end()
            await lives.cycle()
        except Exception as error:
            outcome.fault(f"{lives.flush}: {type(error).__name__}: {error}")
            await lives.forget()
        outcome.tried += 1
        outcome.figures["kills_sync"] += lives.flush == "sync"
    for lives in modes:
        await lives.end()
    return outcome


class _Lives:
    """Brokers of one flush mode, one after the other over the same folder. The next one must have all messages of the
    killed one; it then takes load until it is killed itself."""

    def __init__(self, folder: Path, flush: str, chance: random.Random, outcome: Outcome) -> None:
        self.flush = flush
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._port = free_port()
        self._ends = dict.fromkeys(range(QUEUES), 0)
        self._broker: BrokerProcess | None = None

    async def cycle(self) -> None:
        """Load, a kill, a start, and a look at what is there."""
        acknowledged: dict[Place, bytes] = {}
        broker = self._broker or await self._start()
        await _load(broker, self._chance.uniform(*LOAD_S), acknowledged)
        self._note_log(broker)
        began_s = time.monotonic()
        self._broker = broker = await self._start()
        figures, took_s = self._outcome.figures, round(time.monotonic() - began_s, 2)
        figures["slowest_start_s"] = max(figures["slowest_start_s"], took_s)
        found = await pull_all(broker.address, "t", self._ends)
        if any(found.get(place) != body for place, body in acknowledged.items()):
            self._outcome.fault(f"{self.flush}: an acknowledged message is gone or elsewhere")
        if _out_of_order(found):
            self._outcome.fault(f"{self.flush}: messages of a sender are out of their order")
        figures["acknowledged"] += len(acknowledged)

    async def _start(self) -> BrokerProcess:
        options = ("--flush", self.flush, "--queues", str(QUEUES), "--segment-bytes", "2M", "--retain-bytes", "64M")
        return await BrokerProcess(self._folder, self._port, *options).__aenter__()

    def _note_log(self, broker: BrokerProcess) -> None:
        if any(words in broker.log for words in LOSSES):
            self._outcome.fault(f"{self.flush}: the broker says that it lost something")

    async def end(self) -> None:
        """A clean end, if a broker runs."""
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.end()
            self._note_log(broker)

    async def forget(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.__aexit__()


async def _load(broker: BrokerProcess, seconds: float, acknowledged: dict[Place, bytes]) -> None:
    """Many senders, each with one message on the way, until the broker is killed."""

    async def send(producer: Producer, sender: int) -> None:
        with contextlib.suppress(RocketletError):
            for number in range(1_000_000):
                body = b"%d %d" % (sender, number)
                result = await producer.send("t", body, queue_key=str(sender))
                acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

    async with Producer(broker.address, "p", retries=0, timeout_s=5) as producer:
        senders = [asyncio.create_task(send(producer, number)) for number in range(SENDERS)]
        await asyncio.sleep(seconds)
        await broker.kill()
        await asyncio.gather(*senders)


def _out_of_order(found: dict[Place, bytes]) -> bool:
    last: dict[bytes, int] = {}
    for _, body in sorted(found.items()):
        sender, number = body.split(b" ")
        if int(number) <= last.get(sender, -1):
            return True
        last[sender] = int(number)
    return False
