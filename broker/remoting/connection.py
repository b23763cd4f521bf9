"""One client's socket: bytes in, frames to the dispatch, buffers out."""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from ...protocol.bodies import Heartbeat
from ...protocol.codes import ResponseCode
from ...protocol.config import MAX_REQUEST_HEADER_BYTES
from ...protocol.frame import Frame, FrameError, FrameReader
from ...protocol.message import encode_host
from ..config import (
    HELD_PULL_BYTES,
    KEPT_BEAT_BYTES,
    KEPT_FIELD_BYTES,
    KEPT_FRAME_BYTES,
    LARGE_HOLDING_BYTES,
    TURN_S,
    WRITE_HIGH_BYTES,
)
from ..listening.client import Client, Decryption
from ..running.turns import OneATurn
from ..sessions.events import Event, Question
from ..sessions.memory import Memory
from ..sessions.reports import Reports
from . import events
from .answers import Buffers, answer
from .kept_pulls import KeptPulls

log = structlog.get_logger("rocketlet.connection")


_numbers = itertools.count(1)
_SMALL_BYTES = 65_536
_UNREACHED = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)  # the client need not know of these


def _kept_bytes(frame: Frame) -> int:
    return KEPT_FRAME_BYTES + KEPT_FIELD_BYTES * len(frame.ext) + len(frame.body)


class Host(Protocol):
    """The server: knows its connections, and serves the frames that they read."""

    behind: OneATurn
    memory: Memory
    reports: Reports

    def now_s(self) -> float: ...

    def opened(self, connection: Connection) -> None: ...

    def serve(self, connection: Connection, frames: list[Frame]) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Cancellable(Protocol):
    """Waits on behalf of a client."""

    def cancel(self) -> None: ...


class Connection(Client):
    """`active_s` is when it was last read from or written to, in the loop's time; `known` belongs to the check of accounts.
    `is_left`: if it is gone, the client has ended it, and knows. `number` rises with each connection. `beat`: the body of
    its last heartbeat, and its content. `read_bytes` have come from the client, of TLS those that were decrypted; `records`
    has them decrypted. `broker_name`: of the broker that has said that it speaks here; `is_proving`: one is being asked.
    `receives`: those that wait for messages to pop.
    `pulls`: those that were checked."""

    __slots__ = (
        "_answering_bytes",
        "_farewell",
        "_had_much",
        "_host",
        "_later",
        "_lost",
        "_reader",
        "_transport",
        "active_s",
        "beat",
        "born_host",
        "broker_name",
        "charged_bytes",
        "counted_bytes",
        "heard_s",
        "held_pulls",
        "is_external",
        "is_held",
        "is_left",
        "is_paused",
        "is_proving",
        "is_vip",
        "kept",
        "known",
        "number",
        "pulls",
        "receives",
    )

    def __init__(self, host: Host, *, is_external: bool = False, is_vip: bool = False) -> None:
        self._host = host
        self.number = next(_numbers)
        self.is_vip = is_vip
        self.is_external = is_external
        self.is_encrypted = False
        self.is_paused = self.is_proving = False
        self.is_held = False
        self.is_left = True
        self.kept: list[Frame] = []
        self._reader = FrameReader(MAX_REQUEST_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._lost: list[Callable[[Connection], None]] = []
        self.born_host = b""
        self.peer = self.broker_name = ""
        self.known: object = None
        self.beat: tuple[bytes, Heartbeat] | None = None
        self.active_s = self.heard_s = 0.0
        self.counted_bytes = self.charged_bytes = self.held_pulls = self.read_bytes = 0
        self.pulls = KeptPulls()
        self.receives: set[Cancellable] = set()
        self.records: Decryption | None = None
        self._farewell: Callable[[], None] | None = None
        self._answering_bytes = 0
        self._had_much = False  # the last answers were large, as in a drain
        self._later: deque[Callable[[], None]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername") or ("0.0.0.0", 0)
        host = str(address[0]).removeprefix("::ffff:")
        self.peer = f"{host}:{address[1]}"
        self.born_host = encode_host(host, int(address[1]))
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self.active_s = self.heard_s = self._host.now_s()
        self._host.opened(self)

    def encrypted(self, transport: asyncio.Transport) -> None:
        """The client has set up TLS; from now on everything goes through there."""
        self.is_encrypted = True
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def plain_refusal(self, data: bytes, remark: str) -> bytes:
        try:
            frames = FrameReader().feed(data)
        except FrameError:
            return b""
        asked = [frame for frame in frames[:1] if not frame.is_response]
        return b"".join(b"".join(answer(frame, ResponseCode.NO_PERMISSION, remark=remark)) for frame in asked)

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def is_reading(self) -> bool:
        """Whether requests are read; otherwise those that were read wait."""
        return not (self.is_paused or self.is_held or self.kept)

    @property
    def address(self) -> str:
        """The client's, without the port."""
        return self.peer.rpartition(":")[0]

    @property
    def reached(self) -> str:
        """The address of ours that the client has connected to, as `host:port`; empty once the connection is gone."""
        found = None if self._transport is None else self._transport.get_extra_info("sockname")
        if not found:
            return ""
        host = str(found[0]).removeprefix("::ffff:")
        return f"[{host}]:{found[1]}" if ":" in host else f"{host}:{found[1]}"

    @property
    def channel(self) -> str:
        """A value that both ends of this TLS connection know, and no other connection has (RFC 5929: tls-unique), in hex;
        empty without TLS."""
        tls = self._transport.get_extra_info("ssl_object") if self.is_encrypted and self._transport else None
        binding: bytes | None = tls.get_channel_binding("tls-unique") if tls is not None else None
        return binding.hex() if binding else ""

    def data_received(self, data: bytes) -> None:
        self.active_s = self.heard_s = self._host.now_s()
        self.read_bytes += len(data)
        try:
            frames = self._reader.feed(data)
        except FrameError as error:
            if self.is_news("connection_closed_not_a_frame"):
                log.warning("connection_closed_not_a_frame", peer=self.peer, reason=str(error))
            self.close()
            return
        if frames and (self.is_paused or self.is_held or self.kept):
            self.keep(frames)
        elif frames and self._had_much:  # small requests of others go first
            self._had_much = False
            self.kept = frames
            self._host.behind.call(self._go_on)
        elif frames:
            self._serve(frames)
        # Memory beside its pulls changes with a read, and counts at once. Held pulls wait for the sweep.
        idle_bytes = self.charged_bytes + self.held_pulls * HELD_PULL_BYTES
        if self._reader.waiting or self.counted_bytes > idle_bytes or self.kept:
            self._host.memory.count(self)
        else:
            self._host.memory.mark(self)  # a pull may be held now

    def is_news(self, event: str) -> bool:
        """Whether the log does not have this event of the client's address already: a client that repeats it does not fill
        the log."""
        return self._host.reports.is_due(self.peer, event)

    def charge(self, size: int) -> None:
        """Others keep so much more, or less, for this client until it hangs up: its memberships, and the queues that it
        reads."""
        self.charged_bytes += size
        if not size or self._transport is None or self._transport.is_closing():
            return
        if self.charged_bytes + self.held_pulls * HELD_PULL_BYTES - self.counted_bytes > LARGE_HOLDING_BYTES:
            self._host.memory.count(self)
        else:
            self._host.memory.mark(self)

    def keep_beat(self, beat: tuple[bytes, Heartbeat] | None) -> None:
        """Remembers the last heartbeat's bytes, so that an identical one is not parsed again. They count here; a member's
        data counts with the member."""
        known = self.beat
        if beat is not None and len(beat[0]) > KEPT_BEAT_BYTES:
            beat = None
        self.beat = beat
        self.charge((len(beat[0]) if beat else 0) - (len(known[0]) if known else 0))

    def held_bytes(self) -> int:
        """Bytes that wait here in both directions, and that others keep for the client."""
        kept = sum(map(_kept_bytes, self.kept)) if self.kept else 0
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if self.records is not None:
            unread += self.records.held_bytes
        return len(self._reader.waiting) + kept + unread + self.held_pulls * HELD_PULL_BYTES + self.charged_bytes

    def is_changing(self) -> bool:
        """Whether it will hold less by itself: when its client reads, or its requests have their turn."""
        if self.kept or (self.records is not None and self.records.held_bytes):
            return True
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def _serve(self, frames: list[Frame]) -> None:
        try:
            self._host.serve(self, frames)
        except Exception:  # a defect of ours: the client that met it connects again, nobody else notices
            log.exception("connection_closed_requests_failed", peer=self.peer)
            self.abort()

    def write(self, buffers: Buffers) -> None:
        """Writes all buffers in one go; does nothing on a closed connection."""
        transport = self._transport
        if transport is None or transport.is_closing() or not buffers:
            return
        if not self.is_paused:  # unread bytes do not keep a connection alive
            self.active_s = self._host.now_s()
        self._host.memory.mark(self)
        if len(buffers) == 1:
            transport.write(buffers[0])
            if len(buffers[0]) > _SMALL_BYTES:
                self._host.memory.count(self)
        elif sum(map(len, buffers)) <= _SMALL_BYTES:
            transport.write(b"".join(buffers))
        else:
            transport.writelines(buffers)
            self._had_much = True
            self._host.memory.count(self)

    def tell(self, event: Event) -> None:
        self.write([events.told(event)])

    def ask(self, number: int, question: Question) -> None:
        self.write([events.asked(number, question)])

    def when_read(self, action: Callable[[], None]) -> None:
        """Calls `action`, which writes, as soon as the client reads."""
        if self.is_paused:
            self._later.append(action)
        else:
            action()

    def keep(self, frames: list[Frame]) -> None:
        """Requests that wait until the client has read its answers."""
        self.kept += frames

    def put_off(self, frames: list[Frame]) -> None:
        """Requests that wait until the other connections had their turn. No more are read meanwhile."""
        self.kept = [*frames, *self.kept]
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._go_on)

    def hold(self, frames: list[Frame], size: int = 0) -> None:
        """Requests that wait, with all that come, until `go_on`: an answer before them takes some turns. size: of the
        request that is being answered, which is kept until then."""
        self.is_held = True
        self._answering_bytes = size
        self.charge(size)
        self.kept = [*frames, *self.kept]
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def go_on(self) -> None:
        self.is_held = False
        self.charge(-self._answering_bytes)
        self._answering_bytes = 0
        self._go_on()

    def pause_writing(self) -> None:
        """The client reads slower than it asks: its requests wait, and no more are read."""
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()
            self._host.memory.count(self)

    def resume_writing(self) -> None:
        self.is_paused = False
        self._go_on()

    def _go_on(self) -> None:
        """Serves waiting frames, unless the client does not read again, or is gone."""
        if self.is_paused or self.is_held or self._transport is None or self._transport.is_closing():
            return
        end_s = time.perf_counter() + TURN_S
        while self._later and not self.is_paused:
            self._later.popleft()()
            if time.perf_counter() > end_s:  # the rest of very many held pulls gets the next turns
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if self.is_paused:
            return
        # In the order in which they came: a client may rely on it, as with one that is read at once.
        kept, self.kept = self.kept, []
        if kept:
            self._serve(kept)
        if self.is_reading and not self._transport.is_closing():
            self._transport.resume_reading()
            if self.records is not None:
                self.records.go_on()

    def on_farewell(self, action: Callable[[], None]) -> None:
        """Calls `action` when the broker ends the connection, before the socket is closed: the other door says good-bye."""
        self._farewell = action

    def on_lost(self, action: Callable[[Connection], None]) -> None:
        """Calls `action(connection)` once when the connection is gone."""
        if action not in self._lost:
            self._lost.append(action)

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, OSError) and error.errno in _UNREACHED:
            self.is_left = False
        self.kept = []
        self.records = None
        self._later.clear()
        for action in self._lost:
            action(self)
        self._host.closed(self)

    def pause_reading(self) -> None:
        """Reads nothing more until `go_on`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """The socket's bytes go there from now on."""
        if self._transport is not None:
            self._transport.set_protocol(protocol)

    def close(self) -> None:
        self.is_left = False
        if self._farewell is not None:
            self._farewell()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self.is_left = False
        if self._transport is not None:
            self._transport.abort()
