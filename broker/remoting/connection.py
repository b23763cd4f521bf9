"""A client's remoting connection: bytes in, frames to the dispatch, buffers out."""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from ...protocol.bodies import Heartbeat, Work
from ...protocol.codes import ResponseCode
from ...protocol.config import MAX_REQUEST_HEADER_BYTES
from ...protocol.frame import FrameCursor, FrameError, FrameReader
from ...protocol.message import encode_host
from ..config import (
    HELD_PULL_BYTES,
    KEPT_BEAT_BYTES,
    LARGE_HOLDING_BYTES,
    NOTED_S,
    PIECE_S,
    SMALL_READ_BYTES,
    WRITE_HIGH_BYTES,
)
from ..memory import Memory
from ..runtime.turns import Moment, OnePerIteration, Turns
from ..sessions.events import ClientRequest, SessionEvent
from ..sessions.reports import Reports
from ..tls import Client, Decryption
from .events import encode_event, encode_request
from .kept_pulls import KeptPulls
from .responses import Buffers, answer

log = structlog.get_logger("rocketlet.connection")


_numbers = itertools.count(1)
_SMALL_BYTES = 65_536
_JOINED_BYTES = 16_384  # joining more bytes takes longer than a write of several buffers
_UNREACHED = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)  # errors of a lost connection that the client may still consider open


class Host(Protocol):
    """The server of the connections: it registers them, and serves the requests that they have read."""

    behind: OnePerIteration
    turns: Turns
    moment: Moment
    memory: Memory
    reports: Reports

    def now_s(self) -> float: ...

    def opened(self, connection: RemotingConnection) -> None: ...

    def serve(self, connection: RemotingConnection) -> None: ...

    def closed(self, connection: RemotingConnection) -> None: ...


class RemotingConnection(Client):
    """A client's connection to the remoting port: the `Session` and the `ClientTransport` of this client.

    Attributes:
        beat: The body of the last heartbeat and its decoded content; None if it was too large to keep.
        broker_name: The name of the peer broker that has confirmed that it sends on this connection; empty without one.
        was_closed_by_client: False if the broker has closed the connection or it was lost with one of `_UNREACHED`.
        is_proving: True while the name of a peer broker is being confirmed.
        number: A number that no other connection of this process has.
        pulls: The checked pulls.
        requests: The bytes that are read and not served yet.
    """

    __slots__ = (
        "_answering_bytes",
        "_farewell",
        "_had_much",
        "_host",
        "_is_in_line",
        "_later",
        "_lost",
        "_transport",
        "active_s",
        "authentication",
        "beat",
        "born_host",
        "broker_name",
        "charged_bytes",
        "counted_bytes",
        "heard_s",
        "held_pulls",
        "is_external",
        "is_held",
        "is_paused",
        "is_proving",
        "is_vip",
        "number",
        "pulls",
        "requests",
        "was_closed_by_client",
    )

    def __init__(self, host: Host, *, is_external: bool = False, is_vip: bool = False) -> None:
        self._host = host
        self.number = next(_numbers)
        self.is_vip = is_vip
        self.is_external = is_external
        self.is_encrypted = False
        self.is_paused = self.is_proving = False
        self.is_held = False
        self.was_closed_by_client = True
        self.requests = FrameCursor(MAX_REQUEST_HEADER_BYTES)
        self._is_in_line = False
        self._transport: asyncio.Transport | None = None
        self._lost: list[Callable[[RemotingConnection], None]] = []
        self.born_host = b""
        self.peer = self.broker_name = ""
        self.authentication: object = None
        self.beat: tuple[bytes, Heartbeat] | None = None
        self.active_s = self.heard_s = 0.0
        self.counted_bytes = self.charged_bytes = self.held_pulls = self.read_bytes = 0
        self.pulls = KeptPulls()
        self.records: Decryption | None = None
        self._farewell: Callable[[], None] | None = None
        self._answering_bytes = 0
        self._had_much = False  # True if a large response was written since the last read
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
        """Send and receive through the TLS transport from now on."""
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
        """True if nothing keeps the socket from being read: unread responses, a response in progress (`hold`), or
        requests that wait to be served."""
        return not (self.is_paused or self.is_held or self.requests.has_frame or self._is_in_line)

    @property
    def address(self) -> str:
        return self.peer.rpartition(":")[0]

    @property
    def reached(self) -> str:
        found = None if self._transport is None else self._transport.get_extra_info("sockname")
        if not found:
            return ""
        host = str(found[0]).removeprefix("::ffff:")
        return f"[{host}]:{found[1]}" if ":" in host else f"{host}:{found[1]}"

    @property
    def channel(self) -> str:
        """The channel binding in hex: a value that both ends of this TLS connection can compute, and that identifies it
        (RFC 5929: tls-unique); empty without TLS, and where TLS has no such value."""
        tls = self._transport.get_extra_info("ssl_object") if self.is_encrypted and self._transport else None
        binding: bytes | None = tls.get_channel_binding("tls-unique") if tls is not None else None
        return binding.hex() if binding else ""

    def data_received(self, data: bytes) -> None:
        self.active_s = self.heard_s = self._host.now_s()
        self.read_bytes += len(data)
        requests = self.requests
        has_kept = requests.data and requests.has_frame  # earlier requests wait to be served
        if requests.feed(data) and not (has_kept or self.is_paused or self.is_held):
            if self._had_much:  # requests of other clients go first
                self._had_much = False
                self._host.behind.call(self._continue)
            else:
                if len(data) > SMALL_READ_BYTES and requests.has_several:
                    self._serve_now()
                else:
                    self._serve()
                if requests.data:
                    self._join_line()
        # What remains of the read is counted immediately. If nothing remains, the next sweep counts the connection,
        # because the read may have led to a held pull.
        idle_bytes = self.charged_bytes + self.held_pulls * HELD_PULL_BYTES
        if requests.data or requests.waiting or self.counted_bytes > idle_bytes:
            self._host.memory.count(self)
        else:
            self._host.memory.note_change(self)

    # Turns

    @property
    def may_serve(self) -> bool:
        return not self._host.moment.is_over(self.address)

    def note_served(self, used_s: float) -> None:
        self._host.moment.record(self.address, used_s)

    def in_turn(self, work: Work[None]) -> None:
        self._host.turns.do_later(work, self.address)

    @property
    def _has_more(self) -> bool:
        """True if a request was read and can be served now."""
        return self.requests.has_frame and not (self.is_paused or self.is_held or self.is_closed)

    def _serve_now(self) -> None:
        if self._host.moment.used_s and not self.may_serve:
            return
        began_s = time.perf_counter()
        self._serve()
        used_s = time.perf_counter() - began_s
        if used_s > NOTED_S:
            self.note_served(used_s)

    def _join_line(self) -> None:
        """If requests wait that can be served, serve them in later event-loop iterations, in turn with other addresses,
        and pause reading until then."""
        if self._has_more and not self._is_in_line:
            self._is_in_line = True
            self.pause_reading()
            self.in_turn(self._serving())

    def _serving(self) -> Work[None]:
        while self._has_more:
            self._serve()
            yield
        self._is_in_line = False
        self._read_on()

    def is_news(self, event: str) -> bool:
        return self._host.reports.is_due(self.peer, event)

    def charge(self, size: int) -> None:
        self.charged_bytes += size
        if not size or self._transport is None or self._transport.is_closing():
            return
        if self.charged_bytes + self.held_pulls * HELD_PULL_BYTES - self.counted_bytes > LARGE_HOLDING_BYTES:
            self._host.memory.count(self)
        else:
            self._host.memory.note_change(self)

    def keep_beat(self, beat: tuple[bytes, Heartbeat] | None) -> None:
        """Keep a heartbeat in place of the last one, so that an identical one is not parsed again; only forget the last
        one if `beat` is None or has more than `KEPT_BEAT_BYTES`. The kept bytes are charged to this connection."""
        known = self.beat
        if beat is not None and len(beat[0]) > KEPT_BEAT_BYTES:
            beat = None
        self.beat = beat
        self.charge((len(beat[0]) if beat else 0) - (len(known[0]) if known else 0))

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes in the transport's write buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def held_bytes(self) -> int:
        """Return the memory that is counted for the connection, in bytes: requests that are not served, TLS records that
        are not decrypted, the write buffer, held pulls, and charges (`charge`)."""
        unread = self.unsent_bytes
        if self.records is not None:
            unread += self.records.held_bytes
        return self.requests.held_bytes + unread + self.held_pulls * HELD_PULL_BYTES + self.charged_bytes

    def is_changing(self) -> bool:
        if self.requests.has_frame or (self.records is not None and self.records.held_bytes):
            return True
        return self.unsent_bytes > 0

    def _serve(self) -> None:
        try:
            self._host.serve(self)
        except FrameError as error:
            if self.is_news("connection_closed_not_a_frame"):
                log.warning("connection_closed_not_a_frame", peer=self.peer, reason=str(error))
            self.requests.clear()
            self.close()
        except Exception:  # a defect of the broker: close only this client's connection, so that the client reconnects
            log.exception("connection_closed_requests_failed", peer=self.peer)
            self.abort()

    def write(self, buffers: Buffers) -> None:
        """Pass the buffers to the transport; do nothing on a closed connection."""
        transport = self._transport
        if transport is None or transport.is_closing() or not buffers:
            return
        if not self.is_paused:  # a client that does not read its responses does not count as active
            self.active_s = self._host.now_s()
        self._host.memory.note_change(self)
        if len(buffers) == 1:
            transport.write(buffers[0])
            if len(buffers[0]) > _SMALL_BYTES:
                self._had_much = True
                self._host.memory.count(self)
        elif (size := sum(map(len, buffers))) <= _JOINED_BYTES:
            transport.write(b"".join(buffers))
        else:
            transport.writelines(buffers)
            if size > _SMALL_BYTES:
                self._had_much = True
                self._host.memory.count(self)

    def send_event(self, event: SessionEvent) -> None:
        self.write([encode_event(event)])

    def send_request(self, number: int, request: ClientRequest) -> None:
        self.write([encode_request(number, request)])

    def when_read(self, action: Callable[[], None]) -> None:
        if self.is_paused:
            self._later.append(action)
        else:
            action()

    def hold(self, size: int = 0) -> None:
        """Let the client's further requests wait until `resume`, because the response to an earlier one is made in
        several event-loop iterations. `size` is the size of that earlier request, which is charged until then."""
        self.is_held = True
        self._answering_bytes = size
        self.charge(size)
        self.pause_reading()

    def resume(self) -> None:
        self.is_held = False
        self.charge(-self._answering_bytes)
        self._answering_bytes = 0
        self._continue()

    def pause_writing(self) -> None:
        """Stop reading and serving requests, because the client does not read its responses fast enough."""
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()
            self._host.memory.count(self)

    def resume_writing(self) -> None:
        self.is_paused = False
        self._continue()

    def _continue(self) -> None:
        """Make the calls that `when_read` has delayed, then serve waiting requests. Stop where the client no longer reads
        its responses, and do nothing while a response is in progress or if the connection is closed."""
        if self.is_paused or self.is_held or self._transport is None or self._transport.is_closing():
            return
        end_s = time.perf_counter() + PIECE_S
        while self._later and not self.is_paused:
            self._later.popleft()()
            if time.perf_counter() > end_s:  # the remaining calls follow in the next event-loop iteration
                asyncio.get_running_loop().call_soon(self._continue)
                return
        if self._has_more and not self._is_in_line:
            self._serve_now()
        self._join_line()
        self._read_on()

    def _read_on(self) -> None:
        if self.is_reading and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if self.records is not None:
                self.records.decrypt_more()

    def on_farewell(self, action: Callable[[], None]) -> None:
        """Call `action` when `close` closes the connection, before the socket is closed; `abort` does not call it. The
        gRPC server sends GOAWAY in `action`."""
        self._farewell = action

    def on_lost(self, action: Callable[[RemotingConnection], None]) -> None:
        """Call `action(connection)` when the connection is lost: once, even if it was added several times."""
        if action not in self._lost:
            self._lost.append(action)

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, OSError) and error.errno in _UNREACHED:
            self.was_closed_by_client = False
        self.requests.clear()
        self.records = None
        self._later.clear()
        for action in self._lost:
            action(self)
        self._host.closed(self)

    def pause_reading(self) -> None:
        """Pause reading until `_read_on`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        if self._transport is not None:
            self._transport.set_protocol(protocol)

    def close(self) -> None:
        self.was_closed_by_client = False
        if self._farewell is not None:
            self._farewell()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self.was_closed_by_client = False
        if self._transport is not None:
            self._transport.abort()
