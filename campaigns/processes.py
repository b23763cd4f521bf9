"""Brokers that are processes: killed with SIGKILL at any moment, again and again, or short of open files.

kill         Under full load, in both flush modes. A fault: an acknowledged message is gone or elsewhere, messages of a sender
             are out of order, a broker does not start again or reports a loss.
descriptors  With 64 to 1,024 open files, more queues than that, and idle connections that take what is left. A fault: an
             acknowledged message is gone, a broker dies or loses something, a client that was connected before is not
             served, connections are refused without a reason in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from pathlib import Path

from rocketlet.client import Producer, RocketletError
from rocketlet.demo.processes import ServerProcess
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import PullMessage, write
from rocketlet.protocol.message import decode_records
from rocketlet.testing.ports import free_port

from tests.conftest import Wire

from .common import Limit, Outcome
from .store import Place

SUBSCRIBED = 4  # the pull brings its subscription
LOSSES = (b"messages_lost", b"commit_log_damaged", b"Traceback")
LIVES = 10  # kills in one flush mode, before the other mode's turn


async def connect(address: str) -> Wire:
    host, _, port = address.rpartition(":")
    return Wire(*await asyncio.open_connection(host, int(port)))


async def pull_all(address: str, topic: str, ends: dict[int, int]) -> dict[Place, bytes]:
    """Return the messages of queues from the offsets in `ends` on, which move to the queues' ends."""
    wire, found = await connect(address), dict[Place, bytes]()
    try:
        for queue in ends:
            while True:
                header = PullMessage("check", topic, queue, ends[queue], 32, SUBSCRIBED, 0, 0, subscription="*")
                answer = await wire.call(RequestCode.PULL_MESSAGE, write(header))
                offset = int(str(answer.ext.get("nextBeginOffset", ends[queue])))
                for record in decode_records(answer.body) if answer.code == 0 else ():
                    found[topic, queue, record.queue_offset] = record.body
                if offset <= ends[queue]:
                    break
                ends[queue] = offset
    finally:
        await wire.close()
    return found


# Killed under load

QUEUES = 8
SENDERS = 32


async def kill(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    chance = random.Random(seed)
    modes = [_Killed(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        killed, other = modes[number // LIVES % 2], modes[number // LIVES % 2 - 1]
        try:
            await other.end()
            await killed.cycle()
        except Exception as error:
            outcome.fault(f"{killed.flush}: {type(error).__name__}: {error}")
            await killed.forget()
        outcome.add(kills_sync=killed.flush == "sync")
    for killed in modes:
        await killed.end()


class _Killed:
    """Brokers of one flush mode, one after the other over the same folder. Each must have all messages of the one before,
    and takes load until it is killed itself."""

    def __init__(self, folder: Path, flush: str, chance: random.Random, outcome: Outcome) -> None:
        self.flush = flush
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._port = free_port()
        self._ends = dict.fromkeys(range(QUEUES), 0)
        self._broker: ServerProcess | None = None

    async def cycle(self) -> None:
        acknowledged: dict[Place, bytes] = {}
        broker = self._broker or await self._start()
        await self._load(broker, acknowledged)
        self._check_log(broker)
        start_s = time.monotonic()
        self._broker = broker = await self._start()
        self._outcome.highest("slowest_start_s", time.monotonic() - start_s)
        found = await pull_all(broker.address, "t", self._ends)
        if any(found.get(place) != body for place, body in acknowledged.items()):
            self._outcome.fault(f"{self.flush}: an acknowledged message is gone or elsewhere")
        if _is_out_of_order(found):
            self._outcome.fault(f"{self.flush}: messages of a sender are out of order")
        self._outcome.add(acknowledged=len(acknowledged))

    async def _start(self) -> ServerProcess:
        options = ("--flush", self.flush, "--queues", str(QUEUES), "--segment-bytes", "2M", "--retain-bytes", "64M")
        return await ServerProcess(self._folder, self._port, *options).__aenter__()

    async def _load(self, broker: ServerProcess, acknowledged: dict[Place, bytes]) -> None:
        """Let many senders, each with one message in flight, send until the broker is killed."""

        async def send(producer: Producer, sender: int) -> None:
            with contextlib.suppress(RocketletError):
                for number in range(1_000_000):
                    body = b"%d %d" % (sender, number)
                    result = await producer.send("t", body, queue_key=str(sender))
                    acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

        async with Producer(broker.address, "p", retries=0, timeout_s=5) as producer:
            senders = [asyncio.create_task(send(producer, number)) for number in range(SENDERS)]
            await asyncio.sleep(self._chance.uniform(0.02, 0.5))
            await broker.kill()
            await asyncio.gather(*senders)

    def _check_log(self, broker: ServerProcess) -> None:
        if any(words in broker.log for words in LOSSES):
            self._outcome.fault(f"{self.flush}: the broker reports a loss")

    async def end(self) -> None:
        """End the broker in order, if one runs."""
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.end()
            self._check_log(broker)

    async def forget(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.__aexit__()


def _is_out_of_order(found: dict[Place, bytes]) -> bool:
    last: dict[bytes, int] = {}
    for _, body in sorted(found.items()):
        sender, number = body.split(b" ")
        if int(number) <= last.get(sender, -1):
            return True
        last[sender] = int(number)
    return False


# Short of open files

FILES = (64, 96, 128, 256, 512, 1024)
MESSAGES = 1500
REFUSALS = (b"connection refused", b"connection_refused")


async def descriptors(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    chance, hard = random.Random(seed), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for number in limit:
        allowed = FILES[number] if number < len(FILES) else chance.randrange(FILES[0], FILES[-1] + 1)
        try:
            await _with_files(folder / str(number), allowed, chance.randrange(16, 400), outcome)
        except Exception as error:
            outcome.fault(f"with {allowed} files: {type(error).__name__}: {error}")


async def _with_files(folder: Path, allowed: int, queues: int, outcome: Outcome) -> None:
    acknowledged: dict[Place, bytes] = {}
    port, options, faults = free_port(), ("--queues", str(queues)), list[str]()
    async with ServerProcess(folder, port, *options, limits={resource.RLIMIT_NOFILE: allowed}) as broker:
        await _load(broker, allowed, acknowledged, outcome)
        if not acknowledged:
            faults.append("a client that was connected before is not served")
        if await broker.end() != 0:
            faults.append("the broker died")
    if not any(words in broker.log for words in REFUSALS):
        faults.append("connections were refused without a reason in the log")
    async with ServerProcess(folder, port, *options) as again:
        found = await pull_all(again.address, "t", dict.fromkeys(range(queues), 0))
        await again.end()
    if any(found.get(place) != body for place, body in acknowledged.items()):
        faults.append("an acknowledged message is gone or elsewhere")
    if any(words in broker.log + again.log for words in (*LOSSES, b"log_torn")):
        faults.append("the broker reports a loss or an exception")
    for fault in faults:
        outcome.fault(f"with {allowed} files: {fault}")
    outcome.add(acknowledged=len(acknowledged))


async def _load(broker: ServerProcess, allowed: int, acknowledged: dict[Place, bytes], outcome: Outcome) -> None:
    idle: list[asyncio.StreamWriter] = []

    async def send(producer: Producer, sender: int) -> None:
        for number in range(sender, MESSAGES, 16):
            body = b"%d" % number
            try:
                result = await producer.send("t", body)
            except RocketletError:
                outcome.add(refused_sends=1)
            else:
                acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

    async with Producer(broker.address, "p", retries=0, timeout_s=20) as producer:
        await producer.send("t", b"first")
        host, _, port = broker.address.rpartition(":")
        for _ in range(allowed + 50):
            with contextlib.suppress(OSError):
                idle.append((await asyncio.open_connection(host, int(port)))[1])
        await asyncio.gather(*(send(producer, number) for number in range(16)))
        outcome.add(idle_connections=len(idle))
    for writer in idle:
        writer.close()
