"""A cluster that is well, under load: two brokers, members of every kind, and what happens on an ordinary day.

Members come and go, handlers fail and succeed when they are tried again, messages wait for their time, and a group reads one
message in a thousand. Nothing of that may be called wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from rocketlet.client import Consumer, Message, Producer, RetryLater, SharedConsumer
from rocketlet.testing.ports import free_port

from bench.peers import listening, process

from ._incidents import Stage

RATE_S = 0.01  # between two messages
ROLL_S = 45.0  # between two members that are replaced
SLOW_S = 0.3
OBSERVE = Path(__file__).parent.parent / "docker" / "observe"


async def started(stage: Stage) -> None:
    ns = await stage.start("ns", "nameserver")
    for name in ("a", "b"):
        await stage.start(name, "broker", "--nameserver", ns)
    admin = await stage.admin()
    while len(await admin.brokers()) < 2:
        await asyncio.sleep(0.1)
    for topic in ("orders", "ledger"):
        await admin.create_topic(topic, queues=4)


@asynccontextmanager
async def working(stage: Stage) -> AsyncIterator[None]:
    """The members, the load on them and the replacing of members, until the block ends."""
    producer = await stage.producer()
    for group, topics in (("audit", {"orders": "rare"}), ("slow", {"orders": "rare || timed"})):
        await stage.consumer(group, topics, _slowly)
    await stage.enter(Consumer(stage.address, "booking", "ledger", _note, orderly=True, start="first"))
    await stage.enter(
        Consumer(
            stage.address, "archive", "orders", lambda batch: None, batch_size=200, batch_wait_s=1.0, start="first"
        )
    )
    for _ in range(2):
        await stage.enter(
            SharedConsumer(stage.address, "couriers", "orders", _now_and_then(RetryLater(delay=2.0)), start="first")
        )
    async with asyncio.TaskGroup() as work:
        tasks = [work.create_task(_load(producer)), work.create_task(_rolls(stage))]
        yield
        for task in tasks:
            task.cancel()


def _note(message: Message) -> None:
    """Handles it at once."""


async def _slowly(message: Message) -> None:
    await asyncio.sleep(SLOW_S)


def _now_and_then(later: RetryLater) -> Callable[[Message], RetryLater | None]:
    """A handler that fails once in 500 messages; the message is tried again, and then it succeeds."""
    numbers: Iterator[int] = itertools.count(1)

    def handle(message: Message) -> RetryLater | None:
        if next(numbers) % 500 == 0 and message.reconsume_times == 0:
            return later
        return None

    return handle


async def _load(producer: Producer) -> None:
    for number in itertools.count():
        body = b"x" * 500
        await producer.send("orders", body, tag="rare" if number % 1_000 == 0 else "common", keys=f"k{number}")
        if number % 10 == 0:
            await producer.send("ledger", body, queue_key=f"account-{number % 7}")
        if number % 300 == 0:
            await producer.send("orders", body, tag="timed", delay=20.0)
        await asyncio.sleep(RATE_S)


async def _rolls(stage: Stage) -> None:
    """Two members of `shop`, of which the older one is replaced, as a deployment does it."""
    older = Consumer(stage.address, "shop", "orders", _now_and_then(RetryLater(delay_level=1)), start="first")
    await older.start()
    try:
        while True:
            newer = Consumer(stage.address, "shop", "orders", _now_and_then(RetryLater(delay_level=1)), start="first")
            await newer.start()
            try:
                await asyncio.sleep(ROLL_S)
            finally:
                await older.stop()
                older = newer
    finally:
        await older.stop()


class Alerts:
    """Prometheus with the rules that we ship. Without Prometheus on the machine it names nothing."""

    def __init__(self, address: str) -> None:
        self._address = address

    def named(self, seconds: float) -> set[str]:
        """The alerts that fired in the last `seconds`."""
        if not self._address:
            return set()
        query = urllib.parse.urlencode({"query": f'max_over_time(ALERTS{{alertstate="firing"}}[{int(seconds) + 1}s])'})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return {series["metric"]["alertname"] + f" {series['metric'].get('group', '')}".rstrip() for series in found}


@asynccontextmanager
async def watched(stage: Stage) -> AsyncIterator[Alerts]:
    if shutil.which("prometheus") is None:
        yield Alerts("")
        return
    folder = stage.folder / "prometheus"
    folder.mkdir()
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in stage.metrics.values())
    config = re.sub(r"targets: .*", f"targets: [{targets}]", (OBSERVE / "prometheus.yml").read_text())
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(OBSERVE / "alerts.yml", folder)
    port = free_port()
    arguments = (
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    async with process(arguments, folder / "prometheus.txt") as pid:
        await listening(port, pid=pid)
        yield Alerts(f"127.0.0.1:{port}")
