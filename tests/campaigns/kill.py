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
LOAD_S = (0.05, 1.0)  # how long there is load before the kill
LOSSES = (b"messages_lost", b"commit_log_damaged", b"Traceback")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_run(limit, random.Random(seed), folder))


async def _run(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "slowest_start_s": 0.0})
    ends: dict[str, dict[int, int]] = {}
    port = free_port()
    for _ in limit:
        flush = chance.choice(("os", "sync"))
        seen = ends.setdefault(flush, dict.fromkeys(range(QUEUES), 0))
        try:
            await _cycle(folder / flush, port, flush, seen, chance, outcome)
        except Exception as error:
            outcome.fault(f"{flush}: {type(error).__name__}: {error}")
        outcome.tried += 1
    return outcome


async def _cycle(
    folder: Path, port: int, flush: str, ends: dict[int, int], chance: random.Random, outcome: Outcome
) -> None:
    acknowledged: dict[Place, bytes] = {}
    options = ("--flush", flush, "--queues", str(QUEUES), "--segment-bytes", "2M")
    async with BrokerProcess(folder, port, *options) as broker:
        await _load(broker, chance.uniform(*LOAD_S), acknowledged)
    began_s = time.monotonic()
    async with BrokerProcess(folder, port, *options) as broker:
        taken_s = time.monotonic() - began_s
        outcome.figures["slowest_start_s"] = max(outcome.figures["slowest_start_s"], round(taken_s, 2))
        found = await pull_all(broker.address, "t", ends)
        await broker.end()
    if any(found.get(place) != body for place, body in acknowledged.items()):
        outcome.fault(f"{flush}: an acknowledged message is gone or elsewhere")
    if _out_of_order(found):
        outcome.fault(f"{flush}: messages of a sender are out of their order")
    if any(words in broker.log for words in LOSSES):
        outcome.fault(f"{flush}: the broker says that it lost something")
    outcome.figures["acknowledged"] += len(acknowledged)


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
