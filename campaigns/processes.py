"""Brokers that are processes: killed with SIGKILL at any moment, again and again, or short of open files.

kill         Under full load, in both flush modes, with a member of a lite group that stays over all kills. A fault: an
             acknowledged message is gone or elsewhere, messages of a sender are out of order, the member does not get each
             message of a lite topic in order, a broker does not start again or reports a loss.
descriptors  With 64 to 1,024 open files, more queues than that, and idle connections that take what is left. A fault: an
             acknowledged message is gone, a broker dies or loses something, a client that was connected before is not
             served, connections are refused without a reason in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from rocketlet.client import AdminClient, LiteConsumer, Message, Producer, RocketletError
from rocketlet.demo.processes import ServerProcess
from rocketlet.testing.ports import free_port

from tests.conftest import Wire

from .common import Limit, Outcome
from .store import Place

LOSSES = (b"messages_lost", b"commit_log_damaged", b"Traceback")


async def connect(address: str) -> Wire:
    host, _, port = address.rpartition(":")
    return Wire(*await asyncio.open_connection(host, int(port)))


class Load:
    """Senders of the topic t, each with one message in flight and, if `is_ordered`, a queue of its own, and what was
    acknowledged."""

    def __init__(self, broker: ServerProcess, outcome: Outcome, *, is_ordered: bool) -> None:
        self._broker = broker
        self._outcome = outcome
        self._is_ordered = is_ordered
        self.acknowledged: dict[Place, bytes] = {}

    async def send(self, producer: Producer, sender: int, numbers: Iterable[int]) -> None:
        """Send messages while the broker runs."""
        for number in numbers:
            if self._broker.child.exit_status is not None:
                return
            body = b"%d %d" % (sender, number)
            try:
                result = await producer.send("t", body, queue_key=str(sender) if self._is_ordered else None)
            except RocketletError:
                self._outcome.add(refused_sends=1)
            else:
                self.acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

    async def faults(self, address: str, ends: dict[int, int]) -> list[str]:
        """Compare with what a broker has after its next start, from the offsets in `ends` on, which move to the ends."""
        found: dict[Place, bytes] = {}
        async with AdminClient(address) as admin:
            if "t" not in await admin.topics():  # the broker was killed before the first message
                return ["an acknowledged message is gone"] if self.acknowledged else []
            for queue, stored in (await admin.topic("t")).ranges.items():
                async for messages in admin.read(queue, ends.get(queue.queue_id, 0), stored.end):
                    found |= {("t", queue.queue_id, message.queue_offset): message.body for message in messages}
                ends[queue.queue_id] = stored.end
        self._outcome.add(acknowledged=len(self.acknowledged))
        faults = []
        if any(found.get(place) != body for place, body in self.acknowledged.items()):
            faults.append("an acknowledged message is gone or elsewhere")
        sent = [tuple(map(int, body.split())) for _, body in sorted(found.items())]
        if self._is_ordered and sorted(sent, key=lambda item: item[0]) != sorted(set(sent)):
            faults.append("messages of a sender are out of order")
        return faults


class LiteLoad:
    """Senders of lite topics, and a member that handles their messages while brokers are killed. `sent` has what was
    acknowledged, and `handled` what the member got, by lite topic."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.sent: dict[str, list[bytes]] = {f"s{number}": [] for number in range(LITE_TOPICS)}
        self.handled: dict[str, list[bytes]] = {name: [] for name in self.sent}
        self._consumer: LiteConsumer | None = None
        self._numbers = itertools.count()

    async def open(self, address: str) -> None:
        """Start the member with the first broker."""
        if self._consumer is None:
            async with AdminClient(address) as admin:
                await admin.create_topic(PARENT, message_type="LITE")
            self._consumer = LiteConsumer(
                address, self._group, PARENT, self._handle, lite_topics=self.sent, invisible_s=10
            )
            await self._consumer.start()

    async def _handle(self, message: Message) -> None:
        self.handled[str(message.lite_topic)].append(message.body)

    async def send(self, broker: ServerProcess, producer: Producer, name: str) -> None:
        while broker.child.exit_status is None:
            body = b"%d" % next(self._numbers)
            with contextlib.suppress(RocketletError):
                await producer.send(PARENT, body, lite_topic=name)
                self.sent[name].append(body)

    async def faults(self) -> list[str]:
        """Wait until the member has everything that was acknowledged, and compare."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LITE_WAIT_S):
                while any(set(bodies) - set(self.handled[name]) for name, bodies in self.sent.items()):
                    await asyncio.sleep(0.1)
        if self._consumer is not None:
            await self._consumer.stop()
        faults = []
        for name, sent in self.sent.items():
            known, firsts = set(sent), dict.fromkeys(self.handled[name])
            if missing := known - firsts.keys():
                faults.append(f"{len(missing)} acknowledged messages of the lite topic {name} were not handled")
            elif [body for body in firsts if body in known] != sent:
                faults.append(f"messages of the lite topic {name} were first handled out of order")
        return faults


# Killed under load

LITE_TOPICS = 4
LITE_WAIT_S = 90.0  # maximum time until the member of the lite group has everything
PARENT = "killed-lite"
QUEUES = 8
SENDERS = 32
LIVES = 10  # kills in one flush mode, before the other mode's turn


async def kill(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    chance = random.Random(seed)
    modes = [_Killed(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        killed = modes[number // LIVES % 2]
        await killed.live(is_last=False)
        outcome.add(kills_sync=killed.flush == "sync")
    for killed in modes:
        await killed.live(is_last=True)


class _Killed:
    """Brokers of one flush mode, one after the other over the same folder. Each must have all messages of the one before,
    and takes load until it is killed itself; the last one ends in order."""

    def __init__(self, folder: Path, flush: str, chance: random.Random, outcome: Outcome) -> None:
        self.flush = flush
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._port = free_port()
        self._ends: dict[int, int] = {}
        self._load: Load | None = None
        self._lite = LiteLoad(f"lite-{flush}")

    async def live(self, *, is_last: bool) -> None:
        try:
            for fault in await self._live(is_last=is_last):
                self._outcome.fault(f"{self.flush}: {fault}")
        except Exception as error:
            self._outcome.fault(f"{self.flush}: {type(error).__name__}: {error}")

    async def _live(self, *, is_last: bool) -> list[str]:
        options = ("--flush", self.flush, "--queues", str(QUEUES), "--segment-bytes", "2M", "--retain-bytes", "64M")
        faults, before, start_s = list[str](), self._load, time.monotonic()
        async with ServerProcess(self._folder, self._port, *options) as broker:
            self._outcome.highest("slowest_start_s", time.monotonic() - start_s)
            if before is not None:
                faults += await before.faults(broker.address, self._ends)
            self._load = load = Load(broker, self._outcome, is_ordered=True)
            await self._lite.open(broker.address)
            if is_last:
                faults += await self._lite.faults()
                self._outcome.add(lite_acknowledged=sum(map(len, self._lite.sent.values())))
                await broker.end()
            else:
                await self._kill_under(load, broker)
        if any(words in broker.log for words in LOSSES):
            faults.append("the broker reports a loss")
        return faults

    async def _kill_under(self, load: Load, broker: ServerProcess) -> None:
        async with Producer(broker.address, "p", retries=0, timeout_s=5) as producer:
            senders = [asyncio.create_task(load.send(producer, at, itertools.count())) for at in range(SENDERS)]
            senders += [asyncio.create_task(self._lite.send(broker, producer, name)) for name in self._lite.sent]
            await asyncio.sleep(self._chance.uniform(0.02, 0.5))
            await broker.kill()
            await asyncio.gather(*senders)


# Short of open files

FILES = (64, 96, 128, 256, 512, 1024)
MESSAGES = 94  # of each of 16 senders
REFUSALS = (b"connection refused", b"connection_refused")


async def descriptors(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    chance, hard = random.Random(seed), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for number in limit:
        allowed = FILES[number] if number < len(FILES) else chance.randrange(FILES[0], FILES[-1] + 1)
        try:
            faults = await _with_files(folder / str(number), allowed, chance.randrange(16, 400), outcome)
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        for fault in faults:
            outcome.fault(f"with {allowed} files: {fault}")


async def _with_files(folder: Path, allowed: int, queues: int, outcome: Outcome) -> list[str]:
    port, options, faults = free_port(), ("--queues", str(queues)), list[str]()
    idle: list[asyncio.StreamWriter] = []
    async with ServerProcess(folder, port, *options, limits={resource.RLIMIT_NOFILE: allowed}) as broker:
        load = Load(broker, outcome, is_ordered=False)
        async with Producer(broker.address, "p", retries=0, timeout_s=20) as producer:
            await load.send(producer, 16, [0])
            for _ in range(allowed + 50):
                with contextlib.suppress(OSError):
                    idle.append((await asyncio.open_connection("127.0.0.1", port))[1])
            await asyncio.gather(*(load.send(producer, at, range(MESSAGES)) for at in range(16)))
        for writer in idle:
            writer.close()
        outcome.add(idle_connections=len(idle))
        if len(load.acknowledged) < 2:
            faults.append("a client that was connected before is not served")
        if await broker.end() != 0:
            faults.append("the broker died")
    if not any(words in broker.log for words in REFUSALS):
        faults.append("connections were refused without a reason in the log")
    async with ServerProcess(folder, port, *options) as again:
        faults += await load.faults(again.address, {})
        await again.end()
    if any(words in broker.log + again.log for words in (*LOSSES, b"log_torn")):
        faults.append("the broker reports a loss or an exception")
    return faults
