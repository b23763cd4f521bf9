"""The clock that a broker reads and waits by: what is due when a test moves it, on a real broker without waiting."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import ssl
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from rocketlet.broker.config import (
    DELAY_LEVELS_MS,
    GARBAGE_SWEEP_S,
    IDLE_LIMIT_S,
    MAX_HOLD_S,
    RETENTION_SWEEP_S,
    TRANSACTION_SWEEP_S,
)
from rocketlet.broker.machine import Garbage
from rocketlet.broker.runtime import MovableClock, Tasks
from rocketlet.broker.tls import Tls
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import Heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.message import decode_records
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.certificates import Certificates
from ...support.requests import bodies_of, half, pull, send, send_v2
from ...support.turns import heartbeat_of


async def advance(node: Node, wire: Wire, seconds: float) -> None:
    """In steps, and with a request after each, so that the connection is not idle."""
    while seconds > 0:
        node.clock.advance(min(seconds, IDLE_LIMIT_S / 2))
        seconds -= IDLE_LIMIT_S / 2
        await wire.call(RequestCode.GET_BROKER_CONFIG)


def test_what_is_due_runs_in_order_each_at_its_time() -> None:
    clock = MovableClock(stands=True)
    began_s = clock.monotonic_s()
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.monotonic_s() - began_s))

    def again() -> None:
        note("again")
        clock.call_later(2, note, "made due")

    clock.call_later(3, note, "three")
    clock.call_later(1, again)
    clock.call_later(1, note, "one")
    clock.call_later(2, note, "cancelled").cancel()
    clock.advance(2.5)
    assert [name for name, _ in seen] == ["again", "one"]
    clock.advance(7.5)
    assert seen == [("again", 1), ("one", 1), ("three", 3), ("made due", 3)]
    assert clock.monotonic_s() - began_s == 10


async def test_a_timer_that_fails_does_not_stop_the_others() -> None:
    clock = MovableClock(stands=True)
    seen: list[str] = []
    clock.call_later(1, lambda: 1 // 0)
    clock.call_later(1, seen.append, "second")

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
    clock.advance(1)
    assert seen == ["second"]
    assert isinstance(faults[0], ZeroDivisionError)


async def test_a_clock_that_is_not_moved_continues_on_its_own() -> None:
    clock = MovableClock()
    seen: list[int] = []
    clock.call_later(0.001, seen.append, 1)
    await eventually(lambda: seen == [1])


async def test_every_delay_level_comes_when_the_clock_is_moved(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    queue = node.broker.store.queue("t", 0)
    for level, delay_ms in enumerate(DELAY_LEVELS_MS, 1):
        before, due_s = queue.next, node.clock.monotonic_s() + delay_ms / 1000
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(i=f"DELAY\x01{level}"), b"%d" % level)
        await advance(node, wire, delay_ms / 1000 - 0.5)
        is_there = queue.next != before
        assert not is_there or node.clock.monotonic_s() >= due_s, (
            "not before its time; the machine may have stood meanwhile"
        )
        node.clock.advance(0.6)
        assert queue.next == before + 1
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=0, max_msg_nums=32))
    records = list(decode_records(answer.body))
    assert [record.body for record in records] == [b"%d" % level for level in range(1, 19)]
    assert records[-1].store_ms - records[0].store_ms > 3 * 3_600_000, "messages are stamped by the same clock"


async def test_a_held_pull_is_answered_when_its_time_is_over(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    asked = wire.send(RequestCode.PULL_MESSAGE, pull(flags=6))
    await eventually(lambda: node.broker.held_pulls.count > 0)
    node.clock.advance(MAX_HOLD_S)
    assert (await wire.answer(asked)).code == ResponseCode.PULL_NOT_FOUND


async def test_segments_expire_when_the_clock_is_moved(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(retain_hours=2, segment_bytes=1000)
    wire = await connect(node.address)
    store = node.broker.store
    await create_topic(wire, "t", 1)
    for _ in range(5):
        await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"x" * 1000)
    node.clock.advance(3600)
    assert store.begin == 0
    node.clock.advance(3601 + RETENTION_SWEEP_S)
    await eventually(lambda: store.begin > 0)


class TurnedClock(MovableClock):
    """The machine's clock was ahead by this much until somebody set it right."""

    back_s = 0.0

    def time_s(self) -> float:
        return super().time_s() - self.back_s


async def test_what_was_stored_by_a_clock_that_was_ahead_waits_no_longer_than_its_level(
    nodes: Nodes, connect: Connect
) -> None:
    """All retries of a level stand in one line: a first message that is due tomorrow would hold up those of all groups."""
    clock = TurnedClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for seconds in (0, 0.4, 40):
        clock.advance(seconds)
        await send(wire, properties="DELAY\x012")  # 5 s
    clock.back_s = 86_400.0
    await send(wire, properties="DELAY\x012")
    with capture_logs() as logs:
        clock.advance(5)
        assert len(await bodies_of(wire)) == 2, "what came before the clock was set back"
        clock.advance(5)
    assert len(await bodies_of(wire)) == 4
    assert [(log["level"], log["ahead_s"]) for log in logs if log["event"] == "clock_set_back"] == [(2, 86_395.0)]


async def test_an_outcome_is_asked_for_also_if_the_clock_was_set_back(nodes: Nodes, connect: Connect) -> None:
    clock = TurnedClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    body = bodies.encode_heartbeat(Heartbeat("c1", producer_groups=("p",)))
    await wire.call(RequestCode.HEART_BEAT, body=body)
    await half(wire)
    clock.back_s = 86_400.0
    await advance(node, wire, 2 * TRANSACTION_SWEEP_S)
    await wire.request(RequestCode.CHECK_TRANSACTION_STATE)


# A broker's background tasks end with it.


async def test_what_has_not_begun_when_the_broker_stops_is_closed() -> None:
    """Else Python says of each that it was never awaited."""

    async def answered() -> None: ...

    tasks, work = Tasks(MovableClock()), answered()
    tasks.spawn(work)
    await tasks.stop()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


# The collector of circular garbage does not scan everything while a server runs, and need not: there is none.


SOME_MB = 100 * 1024 * 1024


class Circle:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are collected; the rest of the process' objects are set aside, so that they cost nothing."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.freeze()
    gc.collect()  # how many objects there were counts for when all are scanned the next time
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()


async def test_what_stays_is_not_scanned_again(collections: list[int]) -> None:
    async with Garbage(MovableClock(stands=True)):
        kept = [[number] for number in range(200_000)]
    assert (0 in collections, 2 in collections) == (True, False)
    collections.clear()
    kept += [[number] for number in range(200_000)]
    assert 2 in collections, "without it, all is scanned"


async def test_a_circle_among_what_stays_is_found_when_memory_has_doubled(collections: list[int]) -> None:
    used_bytes = SOME_MB
    clock = MovableClock(stands=True)
    async with Garbage(clock, lambda: used_bytes):
        circle: Circle | None = Circle()
        is_there = weakref.ref(circle)
        clock.advance(GARBAGE_SWEEP_S)
        circle = None
        clock.advance(GARBAGE_SWEEP_S)
        assert (is_there() is None, 2 in collections) == (False, False)
        used_bytes = 2 * SOME_MB
        clock.advance(GARBAGE_SWEEP_S)
        assert is_there() is not None, "small growth is none"
        used_bytes = 4 * SOME_MB
        clock.advance(GARBAGE_SWEEP_S)
        assert is_there() is None
        collections.clear()
        clock.advance(GARBAGE_SWEEP_S)
        assert 2 not in collections, "it has to double again"


async def test_the_collector_is_left_as_it_was(collections: list[int]) -> None:
    before = gc.get_threshold()
    async with Garbage():
        assert gc.get_threshold() != before
    async with Garbage(memory_bytes=lambda: 0):
        assert gc.get_threshold() == before, "without knowing how much memory there is"
    assert gc.get_threshold() == before


# Circles that a server leaves


def _ask(code: int, ext: dict[str, Any] | None = None, body: bytes = b"") -> bytes:
    return encode(Frame(code, 1, {key: str(value) for key, value in (ext or {}).items()}, body))


LAST_WORDS = {
    "nothing": b"",
    "half a frame": _ask(Code.GET_BROKER_CLUSTER_INFO)[:-2],
    "no frame": bytes(8),
    "no TLS": b"\x16 this is no handshake",
    "half a handshake": b"\x16\x03\x01\x02",
    "member": _ask(Code.HEART_BEAT, body=heartbeat_of("c")),
    "long answer": _ask(Code.GET_ALL_TOPIC_CONFIG),
    "refused": _ask(Code.GET_TOPIC_STATS_INFO, {"topic": "missing"}),
    "held pull": _ask(Code.HEART_BEAT, body=heartbeat_of("c")) + _ask(Code.PULL_MESSAGE, pull(flags=6)),
}


def _circles() -> list[str]:
    """The types of ours, and of the sockets, that are garbage in a circle."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted({type(item).__qualname__ for item in gc.garbage if _is_of_server(item)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _is_of_server(item: object) -> bool:
    kind = type(item)
    return kind.__module__.startswith("rocketlet.broker") or kind.__name__ == "TCPTransport"


@pytest.fixture
async def taken(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, Certificates]:
    certificates = Certificates.make(tmp_path_factory.mktemp("certificates"))
    return await nodes.start(tls=Tls("permissive", certificates.files)), certificates


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
async def test_clients_leave_no_circles_behind(
    taken: tuple[Node, Certificates], uncollected: None, resets: bool
) -> None:
    node, certificates = taken
    for words in LAST_WORDS.values():
        await _come_and_go(node, None, words, resets)
        if words[:1] != b"\x16":
            await _come_and_go(node, certificates.client_context(), words, resets)
    assert _circles() == []


async def _come_and_go(node: Node, context: ssl.SSLContext | None, words: bytes, resets: bool) -> None:
    """A client that sends this much, and hangs up when it has an answer or is closed, or immediately if none comes."""
    host, _, port = node.address.rpartition(":")
    is_answered = len(words) > 8 and words[0] == 0 and words != LAST_WORDS["half a frame"]

    def talk() -> None:
        with socket.create_connection((host, int(port))) as plain:
            if resets:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection = context.wrap_socket(plain, server_hostname=host) if context else plain
            with connection, suppress(OSError):
                connection.sendall(words)
                if is_answered:
                    connection.recv(65_536)

    await asyncio.to_thread(talk)
    await eventually(lambda: not node.server.connections)
    await node.broker.turns.done()
    await asyncio.sleep(0)
