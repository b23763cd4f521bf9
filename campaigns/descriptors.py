"""Brokers that may open 64 to 1,024 files, with more queues than that, and idle connections that take what is left.

A fault is: a message that was acknowledged and is gone after a clean end and a start, a broker that dies, loses something or
does not start, a client that was connected before and is not served, connections refused without a reason in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from pathlib import Path

import uvloop
from rocketlet.client import Producer, RocketletError
from rocketlet.testing.ports import free_port

from ._ledger import Place
from ._process import BrokerProcess, pull_all
from .common import Limit, Outcome

DEFAULT_COUNT = 20
LIMITS = (64, 96, 128, 256, 512, 1024)
MESSAGES = 1500
SENDERS = 16
REFUSALS = (b"connection refused", b"connection_refused")
LOSSES = (b"cut off", b"log_torn", b"messages are lost", b"messages_lost", b"log_damaged", b"Traceback")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return uvloop.run(_run(limit, random.Random(seed), folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _run(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "idle_connections": 0, "refused_sends": 0})
    for number in limit:
        allowed = LIMITS[number] if number < len(LIMITS) else chance.randrange(LIMITS[0], LIMITS[-1] + 1)
        try:
            await _try(folder / str(number), allowed, chance, outcome)
        except Exception as error:
            outcome.fault(f"with {allowed} files: {type(error).__name__}: {error}")
        outcome.tried += 1
    return outcome


async def _try(folder: Path, allowed: int, chance: random.Random, outcome: Outcome) -> None:
    queues = chance.randrange(16, 400)
    acknowledged: dict[Place, bytes] = {}
    port = free_port()
    options = ("--queues", str(queues))
    async with BrokerProcess(folder, port, *options, open_files=allowed) as broker:
        await _load(broker, port, allowed, queues, acknowledged, outcome)
        if await broker.end() != 0:
            outcome.fault(f"with {allowed} files: the broker died")
    if not any(words in broker.log for words in REFUSALS):
        outcome.fault(f"with {allowed} files: connections were refused without a reason in the log")
    async with BrokerProcess(folder, port, *options) as again:
        found = await pull_all(again.address, "t", dict.fromkeys(range(queues), 0))
        await again.end()
    gone = [place for place, body in acknowledged.items() if found.get(place) != body]
    if gone:
        outcome.fault(f"with {allowed} files: an acknowledged message is gone or elsewhere")
    if any(words in broker.log + again.log for words in LOSSES):
        outcome.fault(f"with {allowed} files: the broker says that it lost or did something wrong")
    outcome.figures["acknowledged"] += len(acknowledged)


async def _load(
    broker: BrokerProcess, port: int, allowed: int, queues: int, acknowledged: dict[Place, bytes], outcome: Outcome
) -> None:
    idle: list[asyncio.StreamWriter] = []

    async def send(producer: Producer, sender: int) -> None:
        for number in range(sender, MESSAGES, SENDERS):
            body = b"%d" % number
            try:
                result = await producer.send("t", body)
            except RocketletError:
                outcome.figures["refused_sends"] += 1
            else:
                acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

    async with Producer(broker.address, "p", retries=0, timeout_s=20) as producer:
        await producer.send("t", b"first")
        for _ in range(allowed + 50):
            with contextlib.suppress(OSError):
                idle.append((await asyncio.open_connection("127.0.0.1", port))[1])
        await asyncio.gather(*(send(producer, number) for number in range(SENDERS)))
        outcome.figures["idle_connections"] += len(idle)
        if not acknowledged:
            outcome.fault(f"with {allowed} files: a client that was connected before is not served")
    for writer in idle:
        writer.close()
