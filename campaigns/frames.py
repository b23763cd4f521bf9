"""Fuzzed frames of every request code in three encodings, against a broker with its name server.

Most frames are nearly right: headers with every field that any handler reads, bodies of the right shape, and something odd
in one place; some have bytes changed, lengths that lie, or are cut into pieces. They enter where a socket's bytes do, many
connections at once. A fault is: an exception that the broker did not expect, an answer that nobody can read or that another
connection asked for, an honest client whose message is not stored, a topic or group that may not be, memory without a limit,
a file outside of the data folder, and a folder that the broker does not start from again.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import uvloop
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import MAX_QUEUES_PER_TOPIC, MAX_RETRY_QUEUES, WRITE_HIGH_BYTES, BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, FrameError, FrameReader, encode
from rocketlet.protocol.headers import PullMessage, write

from ._fuzz import Fuzz
from .common import Limit, Outcome

FRAMES_PER_TURN = 50
LAZY_EVERY = 20  # turns
LAZY_PULLS = 200
LARGE_BYTES = 60_000
MAX_UNREAD_BYTES = WRITE_HIGH_BYTES + (1 << 20)  # otherwise it would be 12 MB
HOLDS, SUBSCRIBED = 2, 4
LEGAL = re.compile(r"[%|a-zA-Z0-9_-]{1,127}\Z").match
MAX_MIB = 400  # resident, of which half is what the campaign itself keeps
MAX_TURNS = 500  # turns of the loop, a few ms each, in which a request must be done


class Socket(asyncio.Transport):
    """A connection's socket, in memory."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__({"peername": (host, port)})
        self.written: list[bytes] = []
        self.is_closed = False
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, data: Any) -> None:
        self.written.extend(map(bytes, data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Peer:
    """A connection of the broker's, driven without a socket."""

    socket_type = Socket

    def __init__(self, server: Server, port: int, host: str = "127.0.0.1") -> None:
        self.socket = self.socket_type(port, host)
        self.connection = RemotingConnection(server)
        self.connection.connection_made(self.socket)
        self._reader = FrameReader()

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def received(self) -> list[Frame]:
        """Raises FrameError for answers that cannot be read."""
        data, self.socket.written = b"".join(self.socket.written), []
        return self._reader.feed(data)

    def hang_up(self) -> None:
        self.socket.close()
        self.connection.connection_lost(None)


class UnreadSocket(Socket):
    """Nobody reads what is written; the broker is told when that is much."""

    unread = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._count(len(data))

    def writelines(self, data: Any) -> None:
        self._count(sum(map(len, data)))

    def _count(self, size: int) -> None:
        was_full, self.unread = self.unread > WRITE_HIGH_BYTES, self.unread + size
        if self.unread > WRITE_HIGH_BYTES and not was_full:
            self.is_full()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_full(self) -> None: ...


class LazyPeer(Peer):
    """Holds pulls and does not read."""

    socket: UnreadSocket
    socket_type = UnreadSocket

    def hold(self, queue_offset: int) -> None:
        self.socket.is_full = self.connection.pause_writing  # type: ignore[method-assign]
        header = PullMessage("lazy", "honest", 0, queue_offset, 32, HOLDS | SUBSCRIBED, 0, 60_000, subscription="*")
        ext = {name: str(value) for name, value in write(header).items()}
        self.send(b"".join(encode(Frame(RequestCode.PULL_MESSAGE, number, ext)) for number in range(LAZY_PULLS)))


class Attack:
    def __init__(self, outcome: Outcome, config: BrokerConfig, seed: int) -> None:
        self._outcome = outcome
        self._config = config
        self._fuzz = Fuzz(seed)
        self._random = random.Random(~seed)
        self.stored: list[bytes] = []
        self.slowest_s = 0.0

    async def run(self, limit: Limit) -> None:
        async with self.serving():
            for number in limit:
                await self.step(number, self._some_frames())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """A broker with an honest client."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._outcome.fault(f"escaped: {context.get('exception')!r}"))
        routes = Routes()
        self._broker = broker = BrokerController(self._config, routes)
        async with Server(Listening("127.0.0.1", 0), broker=broker, routes=routes) as server:
            self._server = server
            server.reports.is_due = lambda *_: True  # type: ignore[method-assign] # each fault counts, not the first of its kind
            self._honest = Peer(server, 1)
            self._hostile: list[Peer] = []
            self._make_topics(self._honest)
            yield
            for peer in (self._honest, *self._hostile):
                peer.hang_up()

    async def step(self, number: int, data: bytes) -> None:
        """One of the hostile connections reads these bytes; now and then the others have their turn."""
        if number % FRAMES_PER_TURN == 0:
            await self._turn(self._server, self._honest, self._hostile, number)
            await self._finish(self._broker, self._hostile)
            self._check_limits(self._broker)
        self._attack(self._random.choice(self._hostile), data)
        self._outcome.tried += 1

    def _check_limits(self, broker: BrokerController) -> None:
        """Nothing came into being that may not be."""
        for topic in broker.topics:
            if not LEGAL(topic.name) or max(topic.read_queues, topic.write_queues) > MAX_QUEUES_PER_TOPIC:
                self._outcome.fault("there is a topic that may not be")
        for group in broker.group_configs:
            if not LEGAL(group.name) or not 0 <= group.retry_queues <= MAX_RETRY_QUEUES:
                self._outcome.fault("there is a group that may not be")

        peak_mib = _peak_mib()
        self._outcome.figures["peak_mib"] = max(self._outcome.figures.get("peak_mib", 0), peak_mib)
        if peak_mib > MAX_MIB:
            self._outcome.fault(f"more than {MAX_MIB} MiB of memory")
            _forget_peak()

    async def _finish(self, broker: BrokerController, hostile: list[Peer]) -> None:
        """Lets the work of requests come to an end."""
        turns = 0
        while broker.turns.waiting and turns < MAX_TURNS:
            await asyncio.sleep(0)
            turns += 1
        if broker.turns.waiting:
            self._outcome.fault(f"a request is not done after {MAX_TURNS} turns of the loop")
            broker.turns._own.clear()
            broker.turns._of_clients.clear()
            broker.turns.waiting = 0
            for peer in hostile:
                peer.socket.close()

    def _make_topics(self, honest: Peer) -> None:
        for topic in ("t", "u", "honest"):
            ext = {"topic": topic, "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
            honest.send(encode(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, 1, ext)))
        honest.received()

    async def _turn(self, server: Server, honest: Peer, hostile: list[Peer], number: int) -> None:
        """Others connect, an honest client sends a message, and the loop runs its timers."""
        await asyncio.sleep(0)
        for peer in [peer for peer in hostile if peer.socket.is_closed]:
            hostile.remove(peer)
            peer.connection.connection_lost(None)
        while len(hostile) < 8:
            hostile.append(Peer(server, 1000 + self._random.randrange(60_000)))
        if self._random.random() < 0.05:
            hostile.pop().hang_up()
            hostile.append(Peer(server, 999))
        if number // FRAMES_PER_TURN % LAZY_EVERY == 0:
            await self._wake(server, honest, number)
        else:
            self._honest_send(honest, b"honest %d" % number, number)

    async def _wake(self, server: Server, honest: Peer, number: int) -> None:
        """A message comes for a client that does not read: it waits there, not in our memory."""
        lazy = LazyPeer(server, 998)
        lazy.hold(len(self.stored))
        self._honest_send(honest, b"honest %d" % number + bytes(LARGE_BYTES), number)
        await server._turns.done()
        if lazy.socket.unread > MAX_UNREAD_BYTES:
            self._outcome.fault("answers are made for a client that does not read")
        lazy.hang_up()

    def _honest_send(self, honest: Peer, body: bytes, number: int) -> None:
        ext = {
            "a": "p",
            "b": "honest",
            "c": "TBW102",
            "d": "4",
            "e": "0",
            "f": "0",
            "g": "1",
            "h": "0",
            "i": "",
        }
        honest.send(encode(Frame(RequestCode.SEND_MESSAGE_V2, number & 0xFFFFFFF, ext, body)))
        answers = [frame for frame in honest.received() if frame.is_response]
        if len(answers) != 1 or answers[0].opaque != number & 0xFFFFFFF:
            self._outcome.fault(f"an honest client got {len(answers)} answers, which were others'")
        elif answers[0].code == 0 and int(answers[0].ext["queueOffset"]) != len(self.stored):
            self._outcome.fault("an honest client was told another offset than its message's")
        if answers and answers[0].code == 0:
            self.stored.append(body)
        elif answers:
            self._outcome.fault(f"an honest send was refused: {answers[0].remark}")

    def _some_frames(self) -> bytes:
        opaque = self._random.randrange(1 << 31)
        data = self._fuzz.frame(opaque)
        return data + self._fuzz.frame(opaque + 1) if self._random.random() < 0.1 else data  # two in one read

    def _attack(self, peer: Peer, data: bytes) -> None:
        begin_s = time.perf_counter()
        try:
            if self._random.random() < 0.05:
                for at in range(0, len(data), max(len(data) // 3, 1)):
                    peer.send(data[at : at + max(len(data) // 3, 1)])
            else:
                peer.send(data)
        except Exception as error:
            self._outcome.fault(f"escaped: {error!r}")
        took_s = time.perf_counter() - begin_s
        if took_s > self.slowest_s:
            self.slowest_s = took_s
            self._outcome.figures["slowest_ms"] = round(took_s * 1000, 1)
            self._outcome.figures["slowest_frame"] = data[:160].decode("latin-1")
        try:
            peer.received()
        except FrameError as error:
            self._outcome.fault(f"an answer cannot be read: {error}")


def config_in(folder: Path) -> BrokerConfig:
    """Timers that are quick."""
    config = BrokerConfig(folder / "data", "127.0.0.1:9", vip_channel=False, transaction_sweep_s=0.5)
    return replace(config, delay_levels_ms=(5,) * 18, transaction_timeout_s=0.1)


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    before = structlog.get_config()
    structlog.configure(processors=[faults_of(outcome)], logger_factory=structlog.ReturnLoggerFactory())
    begin_s = time.perf_counter()
    try:
        config = config_in(folder)
        attack = Attack(outcome, config, seed)
        uvloop.run(attack.run(limit))
        outcome.figures["per_second"] = round(outcome.tried / (time.perf_counter() - begin_s))
        uvloop.run(_check_folder(outcome, config, attack.stored))
    finally:
        structlog.configure(**before)
    outcome.figures["honest"] = len(attack.stored)
    for path in folder.iterdir():
        if path.name != "data":
            outcome.fault(f"a file outside of the data folder: {path.name}")
    return outcome


def faults_of(outcome: Outcome) -> Callable[[Any, str, Any], str]:
    """A processor of log events: what a request may not cause is a fault."""

    def look(logger: Any, method: str, event: Any) -> str:
        text = str(event.get("event", ""))
        if method in ("error", "exception", "critical") or "failed" in text:
            import sys

            error = sys.exc_info()[1]
            where = ""
            if error is not None and error.__traceback__ is not None:
                last = error.__traceback__
                while last.tb_next is not None:
                    last = last.tb_next
                where = f" at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
            outcome.fault(
                f"{text} {event.get('request', event.get('action', ''))}: {type(error).__name__}: {str(error)[:80]}{where}"
            )
        return ""

    return look


async def _check_folder(outcome: Outcome, config: BrokerConfig, stored: list[bytes]) -> None:
    """The broker starts again, and has every message of the honest client."""
    try:
        broker = BrokerController(config)
    except Exception as error:
        outcome.fault(f"the broker does not start again: {error!r}")
        return
    queue = broker.store.queue("honest", 0)
    found = [broker.store.message(queue, offset).body for offset in range(queue.begin, queue.next)]
    if found != stored:
        outcome.fault(f"{len(found)} messages of an honest client are stored, {len(stored)} were acknowledged")
    await broker.stop()


def _peak_mib() -> int:
    """This process's peak memory. Not ru_maxrss: a child begins with its parent's memory at the fork, before it ran this
    program."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def _forget_peak() -> None:
    """Counts the peak from now on (proc(5): clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
