"""Floods over HTTP/2: clients that cause much work with few bytes, or do not read what they have requested.

Each try is one flood, of a random size, on a connection of its own: calls that are cancelled immediately, header blocks
without an end, frames that carry nothing, windows that never open or change without end, thousands of calls that wait,
messages whose end never comes. A fault is: a flood above its limit whose connection stays, one below it whose connection
ends, memory above the budget, a read that takes long, an honest client that gets no response meanwhile, and a message or
memory that is counted for the attacker after it has gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rocketlet.broker.config import MAX_POP_BYTES
from rocketlet.broker.grpc import schema
from rocketlet.protocol import http2
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.config import (
    MAX_CANCELLED_CALLS,
    MAX_CONTROL_FRAMES,
    MAX_HEADER_FRAMES,
    MAX_RESETS,
    MAX_STREAMS,
)
from rocketlet.protocol.grpc import encode_message
from rocketlet.protocol.http2 import Setting

from .common import Limit, Outcome, Serving, config_in, serving
from .fuzz import Feed, Honest, check_nothing_left, quick
from .peers import GrpcPeer, head_block

READ_BYTES = 262_144  # the most that one read of a socket returns
END_CHECKS = 5000
"""How often it is checked whether the server has closed a flood's connection, 1 ms apart."""
MAX_READ_MS = 250  # the processor time of one read: 30 to 120 on two busy cores
BUDGET_BYTES = 64 << 20
SENT = 200  # messages that there are to receive
BODY_BYTES = 20_000
HEAD = head_block("Heartbeat", (b"x-mq-client-id", b"flood"))


class Flood(NamedTuple):
    """The bytes of a flood. ends: True if the connection must end, False if it must stay, None for either."""

    data: bytes
    ends: bool | None


def _opening(stream_id: int, flags: int = http2.END_HEADERS) -> bytes:
    return http2.encode(http2.HEADERS, flags, stream_id, HEAD)


def _resets(chance: random.Random) -> Flood:
    count = chance.choice((MAX_RESETS // 2, MAX_RESETS - 1, MAX_RESETS + 1, 3 * MAX_RESETS))
    ids = range(1, 2 * count, 2)
    return Flood(b"".join(_opening(item) + http2.encode_reset(item, 8) for item in ids), count > MAX_RESETS)


def _cancelled(chance: random.Random) -> Flood:
    """Whole requests that are cancelled immediately."""
    count = chance.choice((2 * MAX_RESETS, MAX_CANCELLED_CALLS, MAX_CANCELLED_CALLS + 1))
    request = schema.HeartbeatRequest(client_type=1).SerializeToString()
    data = http2.encode(http2.DATA, http2.END_STREAM, 1, encode_message(request))
    parts = [
        _opening(item) + data[:5] + item.to_bytes(4, "big") + data[9:] + http2.encode_reset(item, 8)
        for item in range(1, 2 * count, 2)
    ]
    return Flood(b"".join(parts), count > MAX_CANCELLED_CALLS)


def _blocks(chance: random.Random) -> Flood:
    """HEADERS, and CONTINUATION that never ends them."""
    count, size = chance.choice((2, MAX_HEADER_FRAMES + 1, 5000)), chance.choice((0, 0, 1, 900))
    begin = http2.encode(http2.HEADERS, 0, 1, b"")
    part = http2.encode(http2.CONTINUATION, 0, 1, bytes(size))
    return Flood(begin + count * part, count >= MAX_HEADER_FRAMES)


def _empty(chance: random.Random) -> Flood:
    """Frames that carry nothing."""
    count = chance.choice((MAX_CONTROL_FRAMES // 2, MAX_CONTROL_FRAMES + 2, 10 * MAX_CONTROL_FRAMES))
    frame = chance.choice(
        (
            http2.encode(http2.PING, 0, 0, bytes(8)),
            http2.encode(http2.PING, http2.ACK, 0, bytes(8)),
            http2.encode_settings({}),
            http2.encode_settings({Setting.INITIAL_WINDOW_SIZE: 70_000}),
            http2.encode(http2.PRIORITY, 0, 1, b"\0\0\0\x03\x10"),
            http2.encode(http2.DATA, 0, 1, b""),
            http2.encode(0xFE, 0, 0, b""),
        )
    )
    return Flood(_opening(1) + count * frame, count > MAX_CONTROL_FRAMES)


def _updates(chance: random.Random) -> Flood:
    """Windows that open byte by byte and are not used, perhaps while many responses wait for another window."""
    count = chance.choice((MAX_CONTROL_FRAMES // 2, 2 * MAX_CONTROL_FRAMES, 10 * MAX_CONTROL_FRAMES))
    waiting = _receives(chance, "t") if chance.random() < 0.5 else b""
    return Flood(waiting + count * http2.encode_window_update(0, 1), count > MAX_CONTROL_FRAMES)


def _resized(chance: random.Random) -> Flood:
    """Very many calls whose windows change with each setting, many settings in one frame."""
    opened = b"".join(_opening(item) for item in range(1, 2 * MAX_STREAMS, 2))
    names = Setting.INITIAL_WINDOW_SIZE.to_bytes(2, "big")
    sizes = b"".join(
        names + chance.randrange(1 << 20).to_bytes(4, "big") for _ in range(chance.choice((1, 10, 10_000)))
    )
    count = chance.choice((1, 10, 1000))
    return Flood(opened + count * http2.encode(http2.SETTINGS, 0, 0, sizes), None)


def _receives(chance: random.Random, topic: str) -> bytes:
    """Return many receives of a client whose windows are closed, so that no response is ever read."""
    request = schema.ReceiveMessageRequest(
        group={"name": "g"}, message_queue={"topic": {"name": topic}, "id": -1}, batch_size=32, auto_renew=True
    )
    request.long_polling_timeout.FromSeconds(20)
    data = http2.encode(http2.DATA, http2.END_STREAM, 1, encode_message(request.SerializeToString()))
    head = head_block("ReceiveMessage", (b"x-mq-client-id", b"flood%d" % chance.randrange(3)))
    found = [http2.encode_settings({Setting.INITIAL_WINDOW_SIZE: 0})]
    for item in range(1, chance.choice((3, 100, 2 * MAX_STREAMS + 500)), 2):
        found.append(http2.encode(http2.HEADERS, http2.END_HEADERS, item, head))
        found.append(data[:5] + item.to_bytes(4, "big") + data[9:])
    return b"".join(found)


def _closed(chance: random.Random) -> Flood:
    return Flood(_receives(chance, "t"), None)


def _waiting(chance: random.Random) -> Flood:
    return Flood(_receives(chance, "empty"), None)


def _halves(chance: random.Random) -> Flood:
    """Messages whose last byte never comes."""
    size, found = 1_000_000, b""
    for item in range(1, chance.choice((3, 40, 200)), 2):
        found += _opening(item) + http2.encode(http2.DATA, 0, item, b"\0" + size.to_bytes(4, "big"))
        found += 15 * http2.encode(http2.DATA, 0, item, bytes(65_000))
    return Flood(found, None)


FLOODS: dict[str, Callable[[random.Random], Flood]] = {
    "cancelled calls": _resets,
    "cancelled requests": _cancelled,
    "header blocks": _blocks,
    "empty frames": _empty,
    "window updates": _updates,
    "windows that change": _resized,
    "windows that never open": _closed,
    "calls that wait": _waiting,
    "half messages": _halves,
}


class Attack:
    def __init__(self, running: Serving, outcome: Outcome, chance: random.Random) -> None:
        self._running = running
        self._outcome = outcome
        self._chance = chance
        self._feed = Feed(outcome)
        self._honest = Honest(running, outcome)
        running.broker.topics.put(TopicConfig("empty", 4, 4), running.broker.store.end)

    async def fill(self) -> None:
        for _ in range(SENT):
            await self._honest.call("t", bytes(BODY_BYTES))
        self._honest.hang_up()

    async def flood(self, name: str) -> None:
        flood, memory = FLOODS[name](self._chance), self._running.server.memory
        peer = GrpcPeer(self._running.server, 1000 + self._chance.randrange(60_000))
        for at in range(0, len(flood.data), READ_BYTES):
            if self._feed(peer, flood.data[at : at + READ_BYTES], name) > MAX_READ_MS:
                self._outcome.fault(f"{name}: a read takes more than {MAX_READ_MS} ms")
            await self._serve(peer)
        for _ in range(END_CHECKS):  # the server reads a flood in pieces, each in an event-loop iteration of its own
            if flood.ends is not True or peer.socket.is_closed:
                break
            await self._serve(peer)
            await asyncio.sleep(0.001)
        if flood.ends is not None and flood.ends != peer.socket.is_closed:
            self._outcome.fault(
                f"{name}: the connection {'ends below' if peer.socket.is_closed else 'stays above'} the limit"
            )
        self._outcome.highest("held_mib", memory.used_bytes >> 20)
        if memory.used_bytes > BUDGET_BYTES + MAX_POP_BYTES:
            self._outcome.fault(f"{name}: more memory is held than the budget")
        await self._honest.call(about=name)
        peer.hang_up()
        await self._end(name)

    async def _serve(self, peer: GrpcPeer) -> None:
        """Serve the calls that were read, some in each event-loop iteration."""
        for _ in range(3):
            await asyncio.sleep(0)
        while peer.protocol.ready and not peer.socket.is_closed:
            await asyncio.sleep(0)
        peer.take()

    async def _end(self, name: str) -> None:
        """The attacker has gone, and nothing of it is left."""
        await self._running.broker.turns.done()
        for _ in range(3):
            await asyncio.sleep(0)
        check_nothing_left(self._running, self._outcome, name)
        pools = self._running.broker.pops.pools.all
        if count := sum(item.in_hand for pool in pools for item in pool.queues.values()):
            self._outcome.fault(f"{name}: {count} messages stay in flight at a client that has gone")


async def floods(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    names = list(FLOODS)
    async with serving(quick(config_in(folder, memory_bytes=BUDGET_BYTES))) as running:
        attack = Attack(running, outcome, random.Random(seed))
        await attack.fill()
        for number in limit:
            await attack.flood(names[number % len(names)])
