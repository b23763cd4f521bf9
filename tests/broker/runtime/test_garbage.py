"""The collector of circular garbage does not scan everything while a server runs, and need not: there is none."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from rocketlet.broker.config import GARBAGE_SWEEP_S
from rocketlet.broker.machine import Garbage
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.tls import Tls
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, encode

from ...conftest import Node, Nodes, eventually
from ...support.certificates import Certificates
from ...support.requests import pull
from ...support.turns import heartbeat_of

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
