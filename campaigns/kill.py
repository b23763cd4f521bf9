"""Brokers that are processes: killed with SIGKILL at any moment, again and again, or short of open files.

kill         Under full load, in both flush modes. A fault: an acknowledged message is gone or elsewhere, messages of a sender
             are out of order, a broker does not start again or reports a loss.
pop          While clients pop messages; each may settle after a kill what another client had in flight before it. A fault: an
             acknowledged message is delivered again, one in flight at a client is delivered to another, one is delivered to
             nobody, a restart has made a handle void.
descriptors  With 64 to 1,024 open files, more queues than that, and idle connections that take what is left. A fault: an
             acknowledged message is gone, a broker dies or loses something, a client that was connected before is not
             served, connections are refused without a reason in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rocketlet.client import Producer, RocketletError
from rocketlet.demo.processes import Child
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import AckMessage, ChangeInvisibleTime, PopMessage, PullMessage, write
from rocketlet.protocol.message import POP_CK, decode_records
from rocketlet.protocol.properties import find
from rocketlet.testing.ports import free_port

from tests.conftest import Wire

from .common import Limit, Outcome
from .store import Place

PROGRAM = ("-m", "rocketlet.command.cli")
READY_S = 60.0
SUBSCRIBED = 4  # the pull brings its subscription
LOSSES = (b"messages_lost", b"commit_log_damaged", b"Traceback")
LIVES = 10  # kills in one flush mode, before the other mode's turn


class BrokerProcess:
    """`async with`: started, ready, and killed at the end if it still runs."""

    def __init__(
        self, folder: Path, port: int, *options: str, open_files: int | None = None, command: str = "start"
    ) -> None:
        self._command = command
        self._folder = folder
        self._options = options
        self._open_files = open_files
        self._child: Child | None = None
        self._log = folder.with_name(f"{folder.name}.log")
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        self.move(port)

    def move(self, port: int) -> None:
        """Set the port of the next start."""
        self._port = port
        self.address = f"127.0.0.1:{port}"

    @property
    def log(self) -> bytes:
        """What this broker wrote to stderr."""
        return self._log.read_bytes()[self._log_begin :]

    @property
    def _running(self) -> Child:
        assert self._child is not None
        return self._child

    async def __aenter__(self) -> BrokerProcess:
        command = (
            sys.executable, *PROGRAM, self._command, "--host", "127.0.0.1", "--port", str(self._port), "--no-vip",
            "--data", str(self._folder), *self._options,
        )  # fmt: skip
        self._child = await Child.start(command, self._log, prepare=self._limit())
        await self._child.wait_for("ready", READY_S)
        return self

    def _limit(self) -> Callable[[], None] | None:
        limit = self._open_files
        return None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    async def __aexit__(self, *exception: object) -> None:
        if self._child is not None and self._child.exit_status is None:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL."""
        self._running.kill()
        await self._running.wait(READY_S)

    def signal(self, number: int) -> None:
        self._running.signal(number)

    async def end(self) -> int:
        """SIGTERM; return the exit code."""
        self.signal(signal.SIGTERM)
        return await self._running.wait(READY_S)


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


def kill(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_kill(limit, random.Random(seed), folder))


async def _kill(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "slowest_start_s": 0.0, "kills_sync": 0})
    modes = [_Killed(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        killed, other = modes[number // LIVES % 2], modes[number // LIVES % 2 - 1]
        try:
            await other.end()
            await killed.cycle()
        except Exception as error:
            outcome.fault(f"{killed.flush}: {type(error).__name__}: {error}")
            await killed.forget()
        outcome.tried += 1
        outcome.figures["kills_sync"] += killed.flush == "sync"
    for killed in modes:
        await killed.end()
    return outcome


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
        self._broker: BrokerProcess | None = None

    async def cycle(self) -> None:
        acknowledged: dict[Place, bytes] = {}
        broker = self._broker or await self._start()
        await self._load(broker, acknowledged)
        self._check_log(broker)
        began_s = time.monotonic()
        self._broker = broker = await self._start()
        figures, took_s = self._outcome.figures, round(time.monotonic() - began_s, 2)
        figures["slowest_start_s"] = max(figures["slowest_start_s"], took_s)
        found = await pull_all(broker.address, "t", self._ends)
        if any(found.get(place) != body for place, body in acknowledged.items()):
            self._outcome.fault(f"{self.flush}: an acknowledged message is gone or elsewhere")
        if _is_out_of_order(found):
            self._outcome.fault(f"{self.flush}: messages of a sender are out of order")
        figures["acknowledged"] += len(acknowledged)

    async def _start(self) -> BrokerProcess:
        options = ("--flush", self.flush, "--queues", str(QUEUES), "--segment-bytes", "2M", "--retain-bytes", "64M")
        return await BrokerProcess(self._folder, self._port, *options).__aenter__()

    async def _load(self, broker: BrokerProcess, acknowledged: dict[Place, bytes]) -> None:
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

    def _check_log(self, broker: BrokerProcess) -> None:
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


# Killed while clients pop

GROUP, TOPIC = "g", "t"
CLIENTS = 8
INVISIBLE_S = 10.0
SURE_S = 5.0  # how long a message is acknowledged: later, another client may get it at the same time
UNWRITTEN_S = 0.4  # before the kill: what was popped so late need not be on the disk


def pop(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_pop(limit, random.Random(seed), folder))


async def _pop(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    figures = ("sent", "popped", "acknowledged", "delivered_again", "kept_handles")
    outcome = Outcome(figures=dict.fromkeys(figures, 0))
    modes = [_Popped(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        popped = modes[number // LIVES % 2]
        try:
            await popped.cycle()
        except Exception as error:
            outcome.fault(f"{popped.flush}: {type(error).__name__}: {error}")
        outcome.tried += 1
    await asyncio.gather(*(popped.drain() for popped in modes))
    return outcome


class _Refused(Exception):
    """The broker has responded with this code."""


class _Message(NamedTuple):
    body: bytes
    queue_id: int
    offset: int
    handle: str

    def place(self) -> tuple[str, str, int, str, int]:
        return GROUP, TOPIC, self.queue_id, self.handle, self.offset


@dataclass(slots=True)
class _Delivery:
    """A message in flight, requested at `since_s` and received at `taken_s`. is_free: others may get it."""

    message: _Message
    since_s: float
    taken_s: float
    is_free: bool = False


class _Popper:
    """A client. Its calls raise _Refused, and OSError or EOFError once the broker is gone."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def pop(self, count: int, wait_ms: int) -> list[_Message]:
        header = PopMessage(GROUP, TOPIC, -1, count, int(INVISIBLE_S * 1000), wait_ms, init_mode=0)
        answer = await self._wire.call(RequestCode.POP_MESSAGE, write(header))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            await asyncio.sleep(0.01)
        elif answer.code not in (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT):
            raise _Refused(answer.code)
        records = decode_records(answer.body) if answer.code == ResponseCode.SUCCESS else ()
        return [
            _Message(record.body, record.queue_id, record.queue_offset, str(find(record.properties, POP_CK)))
            for record in records
        ]

    async def settle(self, code: RequestCode, header: Any) -> None:
        answer = await self._wire.call(code, write(header))
        if answer.code != ResponseCode.SUCCESS:
            raise _Refused(answer.code)


class _Popped:
    """Brokers of one flush mode, and what their clients know of messages."""

    def __init__(self, folder: Path, flush: str, chance: random.Random, outcome: Outcome) -> None:
        self.flush = flush
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._port = free_port()
        self._began = 0
        self._sent: set[bytes] = set()
        self._done: set[bytes] = set()  # acknowledged, and the broker has confirmed it
        self._delivered: set[bytes] = set()
        self._in_flight: dict[bytes, _Delivery] = {}

    def _fault(self, text: str) -> None:
        self._outcome.fault(f"{self.flush}: {text}")

    def _broker(self) -> BrokerProcess:
        return BrokerProcess(self._folder, self._port, "--flush", self.flush, "--queues", "4")

    async def cycle(self) -> None:
        """A start, load, and a kill."""
        broker = await self._broker().__aenter__()
        self._began += 1
        async with Producer(broker.address, "p", retries=0, timeout_s=5) as producer:
            work = [asyncio.create_task(self._send(producer, number)) for number in range(CLIENTS)]
            work += [asyncio.create_task(self._share(broker.address)) for number in range(CLIENTS)]
            await asyncio.sleep(self._chance.uniform(0.05, 1.0))
            killed_s = time.monotonic()
            await broker.kill()
            for found in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(found, BaseException) and not isinstance(found, (OSError, EOFError)):
                    self._fault(f"a client: {type(found).__name__}: {found}")
        if b"Traceback" in broker.log:
            self._fault("the broker had an exception")
        for delivery in self._in_flight.values():
            if killed_s - delivery.taken_s < UNWRITTEN_S:
                delivery.is_free = True

    async def _send(self, producer: Producer, sender: int) -> None:
        with contextlib.suppress(RocketletError):
            for number in range(1_000_000):
                body = b"%d-%d-%d" % (self._began, sender, number)
                await producer.send(TOPIC, body)
                self._sent.add(body)
                self._outcome.figures["sent"] += 1

    async def _share(self, address: str) -> None:
        """Pop and settle until the broker is killed."""
        wire = await connect(address)
        popper = _Popper(wire)
        try:
            await self._use_kept(popper)
            while True:
                for message in await self._take(popper, self._chance.choice((1, 4, 32)), 200):
                    await self._handle(popper, message)
        finally:
            with contextlib.suppress(OSError):
                await wire.close()

    async def _use_kept(self, popper: _Popper) -> None:
        """Acknowledge messages that this client, or another one, had in flight before the kill."""
        kept = [body for body, delivery in self._in_flight.items() if not delivery.is_free]
        for body in self._chance.sample(kept, len(kept) // 2):
            if body in self._in_flight and not self._in_flight[body].is_free:
                self._outcome.figures["kept_handles"] += 1
                await self._ack(popper, self._in_flight[body].message)

    async def _take(self, popper: _Popper, count: int, wait_ms: int) -> list[_Message]:
        asked_s = time.monotonic()
        try:
            found = await popper.pop(count, wait_ms)
        except _Refused as fault:
            self._fault(f"a receive gets the response {fault}")
            return []
        for message in found:
            body, now_s = message.body, time.monotonic()
            if body in self._done:
                self._fault("an acknowledged message is delivered again")
            before = self._in_flight.get(body)
            if before is not None and now_s < before.since_s + INVISIBLE_S and not before.is_free:
                self._fault("a message in flight is delivered to another client")
            self._outcome.figures["delivered_again"] += body in self._delivered
            self._delivered.add(body)
            self._in_flight[body] = _Delivery(message, asked_s, now_s)
        self._outcome.figures["popped"] += len(found)
        return found

    async def _handle(self, popper: _Popper, message: _Message) -> None:
        chance = self._chance.random()
        if chance < 0.8:
            await self._ack(popper, message)
        elif chance < 0.95:
            if delivery := self._in_flight.get(message.body):  # another client may have acknowledged it
                delivery.is_free = True
            with contextlib.suppress(_Refused):  # it may have expired
                header = ChangeInvisibleTime(*message.place(), 20)
                await popper.settle(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)

    async def _ack(self, popper: _Popper, message: _Message) -> None:
        delivery = self._in_flight.get(message.body)
        if delivery is None or delivery.message is not message or time.monotonic() > delivery.since_s + SURE_S:
            return
        try:
            await popper.settle(RequestCode.ACK_MESSAGE, AckMessage(*message.place()))
        except _Refused as fault:
            self._fault(f"an acknowledgement gets the response {fault}")
            return
        if time.monotonic() < delivery.since_s + INVISIBLE_S:
            self._done.add(message.body)
            self._in_flight.pop(message.body, None)
            self._outcome.figures["acknowledged"] += 1

    async def drain(self) -> None:
        """In the end everything that was sent is delivered, and gone when it was acknowledged."""
        async with self._broker() as broker:
            wire = await connect(broker.address)
            popper = _Popper(wire)
            await asyncio.sleep(INVISIBLE_S)  # now everything that is not acknowledged is visible
            while found := await self._take(popper, 32, 1000):
                for message in found:
                    await self._ack(popper, message)
            if not self._sent <= self._delivered:
                self._fault(f"{len(self._sent - self._delivered)} messages are delivered to nobody")
            await wire.close()
            await broker.end()


# Short of open files

FILES = (64, 96, 128, 256, 512, 1024)
MESSAGES = 1500
REFUSALS = (b"connection refused", b"connection_refused")


def descriptors(limit: Limit, seed: int, folder: Path) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return uvloop.run(_descriptors(limit, random.Random(seed), folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _descriptors(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "idle_connections": 0, "refused_sends": 0})
    for number in limit:
        allowed = FILES[number] if number < len(FILES) else chance.randrange(FILES[0], FILES[-1] + 1)
        try:
            await _with_files(folder / str(number), allowed, chance.randrange(16, 400), outcome)
        except Exception as error:
            outcome.fault(f"with {allowed} files: {type(error).__name__}: {error}")
        outcome.tried += 1
    return outcome


async def _with_files(folder: Path, allowed: int, queues: int, outcome: Outcome) -> None:
    acknowledged: dict[Place, bytes] = {}
    port, options, faults = free_port(), ("--queues", str(queues)), list[str]()
    async with BrokerProcess(folder, port, *options, open_files=allowed) as broker:
        await _load(broker, allowed, acknowledged, outcome)
        if not acknowledged:
            faults.append("a client that was connected before is not served")
        if await broker.end() != 0:
            faults.append("the broker died")
    if not any(words in broker.log for words in REFUSALS):
        faults.append("connections were refused without a reason in the log")
    async with BrokerProcess(folder, port, *options) as again:
        found = await pull_all(again.address, "t", dict.fromkeys(range(queues), 0))
        await again.end()
    if any(found.get(place) != body for place, body in acknowledged.items()):
        faults.append("an acknowledged message is gone or elsewhere")
    if any(words in broker.log + again.log for words in (*LOSSES, b"log_torn")):
        faults.append("the broker reports a loss or an exception")
    for fault in faults:
        outcome.fault(f"with {allowed} files: {fault}")
    outcome.figures["acknowledged"] += len(acknowledged)


async def _load(broker: BrokerProcess, allowed: int, acknowledged: dict[Place, bytes], outcome: Outcome) -> None:
    idle: list[asyncio.StreamWriter] = []

    async def send(producer: Producer, sender: int) -> None:
        for number in range(sender, MESSAGES, 16):
            body = b"%d" % number
            try:
                result = await producer.send("t", body)
            except RocketletError:
                outcome.figures["refused_sends"] += 1
            else:
                acknowledged[result.queue.topic, result.queue.queue_id, result.queue_offset] = body

    async with Producer(broker.address, "p", retries=0, timeout_s=20) as producer:
        await producer.send("t", b"first")
        host, _, port = broker.address.rpartition(":")
        for _ in range(allowed + 50):
            with contextlib.suppress(OSError):
                idle.append((await asyncio.open_connection(host, int(port)))[1])
        await asyncio.gather(*(send(producer, number) for number in range(16)))
        outcome.figures["idle_connections"] += len(idle)
    for writer in idle:
        writer.close()
