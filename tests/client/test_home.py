"""Clients that are used elsewhere than where they live: in another loop, thread or process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from rocketlet.client import AdminClient, ConfigError, Consumer, Producer, RequestTimeout, SharedConsumer
from rocketlet.client.config import CLIENT_LIMITS, CONNECT_TIMEOUT_S, TIMEOUT_TICK_S, ClientLimits
from rocketlet.client.errors import ConnectionFailed
from rocketlet.client.wire.cluster import Lifecycle
from rocketlet.client.wire.connection import Access, Connection, Connections
from rocketlet.protocol.codes import RESPONSE_FLAG, RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode

from ..client.conftest import only_connection, tasks_named
from ..conftest import PATIENCE_S, Node, Wire, create_topic, eventually
from ..support.handlers import Inbox


def elsewhere(work: Callable[[], Awaitable[object]]) -> str:
    """The text of the error that the work raises in a loop of its own."""

    async def run() -> None:
        await work()

    with pytest.raises(ConfigError) as raised:
        asyncio.run(run())
    return str(raised.value)


async def test_a_client_says_so_in_another_loop_and_continues_in_its_own(node: Node, one_queue: None) -> None:
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", start="first") as consumer,
        AdminClient(node.address) as admin,
    ):
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await admin.topics()
        message = await consumer.receive(timeout_s=PATIENCE_S)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: producer.send("t", b"x"),
            lambda: producer.send("t", b"x" * 5000),
            lambda: producer.send_batch("t", [b"x"]),
            lambda: producer.send_oneway("t", b"x"),
            producer.stop,
            consumer.receive,
            lambda: consumer.ack(message),
            lambda: anext(consumer),
            consumer.resume,
            consumer.commit,
            lambda: consumer.seek("first"),
            consumer.stop,
            admin.topics,
        ]
        for call in calls:
            assert "another event loop" in await asyncio.to_thread(elsewhere, call)
        await consumer.ack(message)
        await producer.send("t", b"4")
        assert [(await consumer.receive(timeout_s=PATIENCE_S)).body for _ in range(3)] == [b"2", b"3", b"4"]


async def test_what_was_made_before_a_fork_is_not_started_after_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of a server would have one client id, and each would believe that it owns all queues."""
    consumer, producer = Consumer(node.address, "g", "t"), Producer(node.address)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 4711)
        for start in (consumer.start, producer.start):
            with pytest.raises(
                ConfigError, match="is used in process 4711; create a client in each process, after the fork"
            ):
                await start()
    async with producer:
        pass


async def test_a_child_of_a_fork_does_not_use_its_parents_client(node: Node, one_queue: None) -> None:
    """Its copy of the parent's loop looks as if it ran."""
    async with Producer(node.address) as producer:
        await producer.send("t", b"1")
        child = os.fork()
        if not child:
            said = 1
            try:
                said = 0 if "is used in" in elsewhere(lambda: producer.send("t", b"x")) else 2
            finally:
                os._exit(said)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await producer.send("t", b"2")


# The start of a client that is thrown away: its loop ends, or its coroutine is closed.


CLIENTS: dict[str, Callable[[str], Lifecycle]] = {
    "producer": lambda address: Producer(address),
    "consumer": lambda address: Consumer(address, "g", "t", Inbox()),
    "shared consumer": lambda address: SharedConsumer(address, "g", "t", Inbox()),
}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_start_that_is_thrown_away_waits_for_nothing_and_leaves_nothing_behind(node: Node, kind: str) -> None:
    """A coroutine that is closed may await nothing more: Python raises RuntimeError if it does."""
    client = CLIENTS[kind](node.address)
    starting = client.start()
    starting.send(None)
    starting.close()
    assert client.has_ended
    undoing = tasks_named("undo")
    assert undoing
    await asyncio.gather(*undoing)
    assert not tasks_named("routes")


def test_a_start_that_is_thrown_away_with_its_loop_is_no_error() -> None:
    client = Producer("127.0.0.1:1")
    loop = asyncio.new_event_loop()
    starting = client.start()

    async def begin() -> None:
        starting.send(None)

    loop.run_until_complete(begin())
    starting.close()
    assert client.has_ended
    assert not [task for task in asyncio.all_tasks(loop) if task.get_name() == "undo"]
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


# A client's words that need no answer arrive, also when it closes right behind that.


PULL, NOTIFY = RequestCode.PULL_MESSAGE, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


class Peer(asyncio.Protocol):
    """Reads when the test allows it. hangs_up: as servers do, when the client has nothing more to say."""

    def __init__(self) -> None:
        self.address = ""
        self.taken = asyncio.Event()
        self.lost = asyncio.Event()
        self.hangs_up = True
        self.heard: list[tuple[int, int]] = []
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.taken.set()

    def data_received(self, data: bytes) -> None:
        self.heard += [(frame.code, len(frame.body)) for frame in self._reader.feed(data)]

    def eof_received(self) -> bool:
        return not self.hangs_up

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()

    def say(self, frame: Frame) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode(frame))


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0)
    peer.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield peer
    peer.transport.abort()
    server.close()


async def connected(
    peer: Peer, asked: list[Frame], limits: ClientLimits = CLIENT_LIMITS
) -> tuple[Connections, Connection]:
    connections = Connections(Access(), lambda _, frame: asked.append(frame), lambda _: None, limits)
    connection = await connections.get(peer.address)
    await asyncio.wait_for(peer.taken.wait(), PATIENCE_S)
    peer.transport.pause_reading()
    return connections, connection


@pytest.mark.parametrize("size", [0, 8 << 20], ids=["small", "large"])
@pytest.mark.parametrize("unread", [0, 1])
async def test_a_peer_that_still_writes_reads_all_that_was_said(peer: Peer, unread: int, size: int) -> None:
    """Closed with answers unread, a socket is reset: whoever writes to it then does not read on."""
    asked: list[Frame] = []
    connections, connection = await connected(peer, asked)
    pull = connection.request_unchecked(PULL, {})
    connection.write_now()
    for _ in range(unread):
        peer.say(Frame(0, 1, flag=RESPONSE_FLAG))
    connection.oneway(RequestCode.UNLOCK_BATCH_MQ, {})
    connection.oneway(RequestCode.SEND_MESSAGE_V2, {}, bytes(size))
    closing = asyncio.create_task(connections.close())
    await asyncio.sleep(0)
    for opaque in range(5):
        peer.say(Frame(NOTIFY, opaque))
        await asyncio.sleep(0)
    connection.respond(Frame(NOTIFY, 0))  # whose handler took until now
    peer.transport.resume_reading()
    await asyncio.wait_for(closing, PATIENCE_S)
    await asyncio.wait_for(peer.lost.wait(), PATIENCE_S)
    assert peer.heard == [(PULL, 0), (RequestCode.UNLOCK_BATCH_MQ, 0), (RequestCode.SEND_MESSAGE_V2, size)]
    assert asked == []
    await asyncio.wait({pull})
    assert isinstance(pull.exception(), ConnectionFailed) or unread  # an answer that came in time


async def test_a_peer_that_never_hangs_up_holds_up_no_close(peer: Peer) -> None:
    connections, connection = await connected(peer, [], ClientLimits(close_timeout_s=0.01))
    peer.hangs_up = False
    peer.transport.resume_reading()
    await asyncio.wait_for(connections.close(), PATIENCE_S)
    assert not connection.is_open
    assert connections.find(peer.address) is None


# The client where Python has no more than on Windows: modules and sockets' options of POSIX are missing.


PROGRAM = """
import asyncio
import os
import socket
import sys

for name in "crypt fcntl grp posix_ipc pty pwd resource syslog termios tty uvloop".split():
    sys.modules[name] = None
del os.fork, os.register_at_fork
for name in ("SO_REUSEPORT", "TCP_USER_TIMEOUT"):
    if hasattr(socket, name):
        delattr(socket, name)


class WindowsLoop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, *arguments):
        raise NotImplementedError

    def add_reader(self, *arguments):
        raise NotImplementedError


import rocketlet.sync
from rocketlet import AdminClient, Consumer, Producer, SharedConsumer


async def main(address):
    seen, done = [], asyncio.Event()

    async def handle(message):
        seen.append(message.body)
        if len(seen) == 10:
            done.set()

    async with Producer(address) as producer, Consumer(address, "g", "t", handle, start="first"):
        for number in range(10):
            await producer.send("t", b"%d" % number)
        await done.wait()
    async with SharedConsumer(address, "shared", "t", start="first") as consumer:
        await consumer.ack(await consumer.receive(timeout_s=60))
    async with AdminClient(address) as admin:
        print(len(seen), len(await admin.brokers()))


with asyncio.Runner(loop_factory=WindowsLoop) as runner:
    runner.run(main(sys.argv[1]))
"""


async def test_client_works_without_the_modules_of_posix(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, node.address), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, errors = await asyncio.wait_for(child.communicate(), PATIENCE_S)
    assert said.split() == [b"10", b"1"], errors.decode()


# Timeouts count the time for which the event loop runs, whatever the clock says meanwhile.


NEVER_S = 3600.0


class Ticks:
    """The ticks of timeouts, which the test runs by hand: the clock does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def kept(delay_s: float, action: Any, *arguments: Any, **rest: Any) -> asyncio.TimerHandle:
            if getattr(action, "__qualname__", "").startswith("running_timeout."):
                self.waiting.append((delay_s, action))
                delay_s = NEVER_S
            return call_later(delay_s, action, *arguments, **rest)

        monkeypatch.setattr(loop, "call_later", kept)

    def run(self) -> float:
        """Runs the next tick; how long after the one before it was meant to come, s."""
        delay_s, action = self.waiting.pop(0)
        action()
        return delay_s


@pytest.fixture
async def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(monkeypatch)


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Connections are made once it is set."""
    loop, is_open = asyncio.get_running_loop(), asyncio.Event()
    create = loop.create_connection

    async def behind_the_door(*arguments: Any, **rest: Any) -> Any:
        await is_open.wait()
        return await create(*arguments, **rest)

    monkeypatch.setattr(loop, "create_connection", behind_the_door)
    return is_open


async def test_a_connection_has_its_time_however_late_the_clock_says_it_is(
    node: Node, ticks: Ticks, door: asyncio.Event
) -> None:
    producer = Producer(node.address)
    starting = asyncio.create_task(producer.start())
    await eventually(lambda: bool(ticks.waiting))
    passed_s = 0.0
    while passed_s < CONNECT_TIMEOUT_S - 2 * TIMEOUT_TICK_S:
        passed_s += ticks.run()
    door.set()
    await starting
    await producer.stop()


async def test_a_connection_that_takes_longer_fails(node: Node, ticks: Ticks, door: asyncio.Event) -> None:
    starting = asyncio.create_task(Producer(node.address).start())
    await eventually(lambda: bool(ticks.waiting))
    passed_s = 0.0
    while ticks.waiting:
        passed_s += ticks.run()
    assert passed_s == pytest.approx(CONNECT_TIMEOUT_S)
    with pytest.raises(ConnectionFailed, match=r"did not accept a connection within 3\.0 s"):
        await starting


async def test_what_waits_for_a_broker_that_reads_nothing_has_its_time_too(node: Node, four_queues: None) -> None:
    """The timer of a process that was suspended is due before its sockets say that the broker takes more."""
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        connection, accumulator = only_connection(producer), producer._accumulator
        assert accumulator is not None
        connection.pause_writing()
        sending = asyncio.create_task(producer.send("t", b"x"))
        await eventually(lambda: connection in accumulator._waiting)
        accumulator._expire(connection)
        connection.resume_writing()
        assert (await sending).status == "ok"
        connection.pause_writing()
        late = asyncio.create_task(producer.send("t", b"x"))
        await eventually(lambda: connection in accumulator._waiting)
        connection._blocked_s -= NEVER_S  # this much more of the time that passed was the process's own
        accumulator._expire(connection)
        with pytest.raises(RequestTimeout, match="did not read the message in time"):
            await late
        connection.resume_writing()
