"""A client's remoting connection, the encoding of requests and responses, permission rules, and authorization."""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, Protocol, cast

import structlog

from ...protocol import admin_bodies, bodies, fast, group_bodies, names
from ...protocol import properties as props
from ...protocol.bodies import Heartbeat, Work
from ...protocol.codes import (
    EXT_ACCEPT_ENCODING,
    EXT_CHANNEL,
    EXT_PLACES,
    EXT_SHARES,
    ONEWAY_FLAG,
    RESPONSE_FLAG,
    VERSION,
    Language,
    RequestCode,
    ResponseCode,
    request_name,
)
from ...protocol.config import MAX_REQUEST_HEADER_BYTES, MAX_TABLE_BYTES
from ...protocol.frame import (
    MSGPACK,
    Ext,
    ExtValue,
    Frame,
    FrameCursor,
    FrameError,
    FrameReader,
    encode,
    encode_head,
    encode_msgpack,
)
from ...protocol.group_bodies import decode_topics
from ...protocol.headers import (
    ACCESS_KEY,
    CREDENTIALS,
    SIGNATURE,
    CheckTransaction,
    ConsumerGroupHeader,
    EndTransaction,
    LiteTopicTaken,
    LogOffset,
    SendBack,
    Signer,
    read,
    write,
)
from ...protocol.message import Record, encode_host, encode_record
from ..access import Acl, Need, Permission, Unauthorized, group, topic
from ..config import (
    CHECKED_PULL_BYTES,
    HELD_PULL_BYTES,
    KEPT_BEAT_BYTES,
    LARGE_HOLDING_BYTES,
    MAX_CHECKED_PULLS,
    NOTED_S,
    PIECE_S,
    SMALL_READ_BYTES,
    WRITE_HIGH_BYTES,
)
from ..groups.pulling import CheckedPull
from ..messages.appender import real_queue
from ..messages.transactions import CHECK_TIMES
from ..runtime import Moment, OnePerIteration, Turns
from ..sessions import (
    Answer,
    ClientRequest,
    Event,
    ForwardedRequest,
    GroupChanged,
    HandlingWanted,
    LiteTaken,
    Memory,
    OffsetsReset,
    OffsetsWanted,
    OutcomeWanted,
    Reason,
    Refusal,
    Reports,
    RunningWanted,
    Session,
)
from ..tls import Client, Decryption

log = structlog.get_logger("rocketlet.connection")


# ------------------------------------------------------------------------------
# One client's socket: bytes in, frames to the dispatch, buffers out.


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
    """A client's connection to the remoting port, and the `Session` of this client.

    Attributes:
        active_s: Monotonic time of the last read, or of the last write while the client read its responses.
        beat: The body of the last heartbeat and its decoded content; None if it was too large to keep.
        broker_name: The name of the peer broker that has confirmed that it sends on this connection; empty without one.
        heard_s: Monotonic time of the last read.
        was_closed_by_client: False if the broker has closed the connection or it was lost with one of `_UNREACHED`.
        is_proving: True while the name of a peer broker is being confirmed.
        known: The result of authentication, which `access` stores here.
        number: A number that no other connection of this process has.
        pulls: The checked pulls.
        read_bytes: The number of bytes from the client, decrypted if it uses TLS.
        records: Passes the client's TLS records to the decryption; None without TLS.
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
        "beat",
        "born_host",
        "broker_name",
        "charged_bytes",
        "counted_bytes",
        "heard_s",
        "held_pulls",
        "is_external",
        "is_held",
        "was_closed_by_client",
        "is_paused",
        "is_proving",
        "is_vip",
        "known",
        "number",
        "pulls",
        "requests",
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
        self.known: object = None
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
                self._host.behind.call(self._go_on)
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
            self._host.memory.mark(self)

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
            self._host.memory.mark(self)

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
        self._host.memory.mark(self)
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

    def send_event(self, event: Event) -> None:
        self.write([encode_event(event)])

    def send_request(self, number: int, request: ClientRequest) -> None:
        self.write([encode_request(number, request)])

    def when_read(self, action: Callable[[], None]) -> None:
        if self.is_paused:
            self._later.append(action)
        else:
            action()

    def hold(self, size: int = 0) -> None:
        """Let the client's further requests wait until `go_on`, because the response to an earlier one is made in
        several event-loop iterations. `size` is the size of that earlier request, which is charged until then."""
        self.is_held = True
        self._answering_bytes = size
        self.charge(size)
        self.pause_reading()

    def go_on(self) -> None:
        self.is_held = False
        self.charge(-self._answering_bytes)
        self._answering_bytes = 0
        self._go_on()

    def pause_writing(self) -> None:
        """Stop reading and serving requests, because the client does not read its responses fast enough."""
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()
            self._host.memory.count(self)

    def resume_writing(self) -> None:
        self.is_paused = False
        self._go_on()

    def _go_on(self) -> None:
        """Make the calls that `when_read` has delayed, then serve waiting requests. Stop where the client no longer reads
        its responses, and do nothing while a response is in progress or if the connection is closed."""
        if self.is_paused or self.is_held or self._transport is None or self._transport.is_closing():
            return
        end_s = time.perf_counter() + PIECE_S
        while self._later and not self.is_paused:
            self._later.popleft()()
            if time.perf_counter() > end_s:  # the remaining calls follow in the next event-loop iteration
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if self._has_more and not self._is_in_line:
            self._serve_now()
        self._join_line()
        self._read_on()

    def _read_on(self) -> None:
        if self.is_reading and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if self.records is not None:
                self.records.go_on()

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


# ------------------------------------------------------------------------------
# The pulls of a connection that have passed the checks. A client repeats its pull of a queue with other offsets; such a
# pull is not checked again until the generation has changed (`Generation` in `runtime`).


_Place = tuple[ExtValue, ExtValue, ExtValue]  # group, topic, queue id as the client writes them
_VARYING: Final = frozenset(("queueOffset", "commitOffset", SIGNATURE))
_check_offsets = Struct(">qq").pack


class _Kept(NamedTuple):
    """A checked pull that may be repeated: `constant` has its header fields except the offsets and the signature,
    `size` is its charge in bytes."""

    constant: Mapping[str, ExtValue]
    language: int
    serialize_type: int
    checked: CheckedPull
    size: int


class Again(NamedTuple):
    """A pull that repeats a checked pull, with the offsets of the repetition."""

    checked: CheckedPull
    offset: int
    commit_offset: int


class KeptPulls:
    """The last checked pull of each group and queue, up to `MAX_CHECKED_PULLS`; the oldest is dropped first. Pulls are
    charged to their session.

    `named` has those that the compiled module may repeat, by the bytes of the header without the offsets: at most one key
    for each group and queue. Keys are charged, too."""

    __slots__ = ("_is_new", "_names", "_pulls", "named")

    def __init__(self) -> None:
        self._pulls: dict[_Place, _Kept] = {}
        self._is_new = False  # True if a pull was kept since the last call of `name`
        self.named: dict[bytes, CheckedPull] = {}
        self._names: dict[_Place, bytes] = {}

    def name(self, session: Session, data: bytes, at: int, frame: Frame) -> None:
        """Let the compiled module repeat a pull that was just kept, if its response has the encoding of the request, it has
        no filter, and the module can read it (`fast.pull_key`). Do nothing if no pull was kept.

        Args:
            session: the client that is charged
            data: received bytes
            at: position of the pull
            frame: the pull
        """
        if not self._is_new:
            return
        self._is_new = False
        again = self.like(frame) if reply_type(frame) == frame.serialize_type else None
        if again is None or not again.checked.is_unfiltered:
            return
        key = fast.pull_key(data, at, MAX_REQUEST_HEADER_BYTES)
        if key is not None:
            ext = frame.ext
            place = ext["consumerGroup"], ext["topic"], ext["queueId"]
            self._forget_name(session, place)
            self.named[key], self._names[place] = again.checked, key
            session.charge(len(key))

    def like(self, frame: Frame) -> Again | None:
        """Return the checked pull that a pull repeats, with the offsets of the repetition. Return None if no such pull is
        kept, an offset is invalid, or something else than the offsets and the signature differs."""
        ext = dict(frame.ext)
        try:
            kept = self._pulls[ext["consumerGroup"], ext["topic"], ext["queueId"]]
            offset, commit_offset = int(ext.pop("queueOffset")), int(ext.pop("commitOffset"))
            _check_offsets(offset, commit_offset)
        except (KeyError, ValueError, StructError):  # the caller decodes the pull, and refuses an invalid one
            return None
        ext.pop(SIGNATURE, None)  # the signature of this pull was verified before
        if ext != kept.constant or (frame.language, frame.serialize_type) != (kept.language, kept.serialize_type):
            return None
        return Again(kept.checked, offset, commit_offset)

    def keep(self, session: Session, frame: Frame, checked: CheckedPull | None) -> None:
        """Keep a pull in place of the last one of its group and queue. If `checked` is None, only forget the last one."""
        ext = frame.ext
        place = ext["consumerGroup"], ext["topic"], ext["queueId"]
        self._forget(session, place)
        if checked is None:
            return
        if len(self._pulls) >= MAX_CHECKED_PULLS:
            self._forget(session, next(iter(self._pulls)))
        constant = {name: value for name, value in ext.items() if name not in _VARYING}
        texts = (text for pair in constant.items() for text in pair if isinstance(text, str))
        size = CHECKED_PULL_BYTES + sum(map(len, texts))
        self._pulls[place] = _Kept(constant, frame.language, frame.serialize_type, checked, size)
        self._is_new = True
        session.charge(size)

    def _forget(self, session: Session, place: _Place) -> None:
        kept = self._pulls.pop(place, None)
        if kept is not None:
            session.charge(-kept.size)
            self._forget_name(session, place)

    def _forget_name(self, session: Session, place: _Place) -> None:
        key = self._names.pop(place, None)
        if key is not None:
            session.charge(-len(key))
            self.named.pop(key, None)


# ------------------------------------------------------------------------------
# Events and requests to clients (`sessions`), encoded as remoting requests. The headers are in JSON, which every client
# can decode.


_opaques = itertools.count(1)
MAX_OPAQUE = 0x7FFF_FFFF  # 32 bits with a sign, as Java clients read it


class Content(NamedTuple):
    code: int
    ext: Ext
    body: bytes = b""


def encode_event(event: Event) -> bytes:
    """Return the frame of a one-way request."""
    code, ext, body = _event_content(event)
    return encode(Frame(code, next(_opaques) & MAX_OPAQUE, ext, body, ONEWAY_FLAG))


def encode_request(number: int, request: ClientRequest) -> bytes:
    """Return the frame of a request. Its number identifies the client's response."""
    code, ext, body = _request_content(request)
    return encode(Frame(code, number, ext, body))


def read_response(frame: Frame) -> Answer:
    return Answer(frame.code == 0, frame.body, frame)


def _event_content(event: Event) -> Content:
    match event:
        case GroupChanged():
            return Content(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, _group_changed(event))
        case OutcomeWanted(half, checks):
            key = props.find(half.properties, props.UNIQUE_KEY)
            header = CheckTransaction(half.queue_offset, half.physical_offset, key, key, half.offset_id)
            return Content(RequestCode.CHECK_TRANSACTION_STATE, write(header), _for_producer(half, checks))
        case LiteTaken(group, lite_topic, client_id):
            return Content(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, write(LiteTopicTaken(lite_topic, group, client_id)))
        case OffsetsReset():
            return _offsets_reset(event)


def _group_changed(event: GroupChanged) -> Ext:
    ext = {**write(ConsumerGroupHeader(event.group, event.topic))}
    if event.places is not None:  # only Rocketlet clients read these fields
        ext[EXT_PLACES] = group_bodies.encode_places(event.places)
    if event.shares is not None:
        ext[EXT_SHARES] = group_bodies.encode_shares(event.shares)
    return ext


def _offsets_reset(event: OffsetsReset) -> Content:
    ext: Ext = {
        "topic": event.topic,
        "group": event.group,
        "timestamp": event.timestamp_ms,
        "isForce": event.is_force,
    }
    encode_offsets = admin_bodies.encode_offsets_for_cpp if event.is_for_cpp else admin_bodies.encode_offsets
    return Content(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, encode_offsets(event.offsets))


def _request_content(request: ClientRequest) -> Content:
    match request:
        case RunningWanted(by):
            return Content(RequestCode.GET_CONSUMER_RUNNING_INFO, _handed_on(by))
        case HandlingWanted(by, record):
            return Content(RequestCode.CONSUME_MESSAGE_DIRECTLY, _handed_on(by), record)
        case OffsetsWanted(group, topic):
            return Content(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": topic, "group": group})
        case _:
            return Content(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, write(request.push), request.body)


def _handed_on(by: ForwardedRequest) -> Ext:
    """Return the tool's header fields for the client to which the request is forwarded, with the group and client id, and
    without the tool's credentials, which the client could use."""
    fields: Ext = {name: value for name, value in by.fields.items() if name not in CREDENTIALS}
    return {**fields, "consumerGroup": by.group, "clientId": by.client_id}


def _for_producer(record: Record, checks: int) -> bytes:
    """Return the record of a half message with the topic and queue to which its producer sent it, and with the number
    of checks."""
    topic, queue_id = real_queue(record)
    name = topic.encode()
    text = props.appended(props.without(record.properties, CHECK_TIMES), CHECK_TIMES, str(checks))
    return encode_record(
        queue_id,
        record.flag,
        record.queue_offset,
        record.physical_offset,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.store_ms,
        record.store_host,
        record.reconsume_times,
        record.prepared_offset,
        record.body,
        bytes((len(name),)) + name,
        text.encode(),
    )


# ------------------------------------------------------------------------------
# Responses: they have the request's number, and its encoding or MessagePack (`reply_type`). `Refused` is a response
# that is raised.


Buffer = bytes | memoryview
Buffers = list[Buffer]
Reply = Buffers | Work[Buffers] | Coroutine[Any, Any, Buffers] | None
"""A handler's result: the bytes to write; or work or a coroutine that makes them and has not started; or None if
another event brings the response, such as the end of a held pull, or if there is no response."""

JAVA = int(Language.JAVA)  # the language in responses of Java brokers; Go clients do not know every other one
_NONE: Ext = {}
_new_tuple = tuple.__new__


class Refused(Exception):
    """The refusal of a request, with the response's code and remark. `Dispatch` catches it from handlers."""

    def __init__(self, code: int, remark: str, ext: Ext = _NONE) -> None:
        super().__init__(remark)
        self.code = code
        self.ext = ext

    def answer(self, request: Frame) -> Buffers:
        return answer(request, self.code, self.ext, remark=str(self))


_CODES: Mapping[Reason, int] = {
    Reason.NOT_PERMITTED: ResponseCode.NO_PERMISSION,
    Reason.NO_TOPIC: ResponseCode.TOPIC_NOT_EXIST,
    Reason.NO_GROUP: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    Reason.ILLEGAL_MESSAGE: ResponseCode.MESSAGE_ILLEGAL,
    Reason.ILLEGAL: ResponseCode.SYSTEM_ERROR,
    Reason.BAD_EXPRESSION: ResponseCode.SUBSCRIPTION_PARSE_FAILED,
    Reason.NOT_SUBSCRIBED: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.UNKNOWN_MEMBER: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.SUBSCRIPTION_NOT_LATEST: ResponseCode.SUBSCRIPTION_NOT_LATEST,
    Reason.TOO_MANY_LITE_TOPICS: ResponseCode.LMQ_QUOTA_EXCEEDED,
    Reason.LITE_GROUP: ResponseCode.NO_PERMISSION,
    Reason.NOT_LITE: ResponseCode.INVALID_PARAMETER,
    Reason.ILLEGAL_LITE_TOPIC: ResponseCode.INVALID_PARAMETER,
    Reason.ILLEGAL_OFFSET: ResponseCode.INVALID_PARAMETER,
    Reason.TOO_MANY_LITE_SUBSCRIPTIONS: ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    Reason.BUSY: ResponseCode.SYSTEM_BUSY,
}


def refused(refusal: Refusal, ext: Ext = _NONE) -> Refused:
    """Return the remoting error for a refusal by the state."""
    return Refused(_CODES[refusal.reason], str(refusal), ext)


def answer(request: Frame, code: int = 0, ext: Ext = _NONE, body: bytes = b"", remark: str | None = None) -> Buffers:
    """Return the response to a request. Raises Refused for a body of more than `MAX_TABLE_BYTES`."""
    if len(body) > MAX_TABLE_BYTES:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"the response has {len(body)} bytes; maximum {MAX_TABLE_BYTES}")
    if remark is None and request.serialize_type == MSGPACK:  # the most frequent case with Rocketlet clients
        return [encode_msgpack(code, RESPONSE_FLAG, request.opaque, JAVA, ext, body)]
    return [encode(_frame(request, code, ext, body, remark))]


def answer_pieces(request: Frame, ext: Ext, pieces: list[Buffer], remark: str) -> Buffers:
    """Return a successful response whose body consists of these pieces, which are not joined."""
    frame = _frame(request, 0, ext, b"", remark)
    return [encode_head(frame, sum(map(len, pieces))), *pieces]


def _frame(request: Frame, code: int, ext: Ext, body: bytes, remark: str | None) -> Frame:
    # called very often, and a Frame's own constructor takes twice as long
    fields = code, request.opaque, ext, body, RESPONSE_FLAG, remark, JAVA, VERSION, reply_type(request)
    return _new_tuple(Frame, fields)


def small(request: Frame) -> Frame:
    """Return a copy of a request without its header fields and body, with all that its response needs, so that a request
    that waits takes little memory."""
    code, opaque, _, _, flag, remark, language, version, _ = request
    # called for each held pull, and `_replace` takes three times as long
    return _new_tuple(Frame, (code, opaque, _NONE, b"", flag, remark, language, version, reply_type(request)))


def reply_type(request: Frame) -> int:
    """Return the encoding of the response: that of the request, or MessagePack for a Rocketlet client that offers
    it."""
    if request.serialize_type != MSGPACK and request.ext.get(EXT_ACCEPT_ENCODING) == "MSGPACK":
        return MSGPACK
    return request.serialize_type


# ------------------------------------------------------------------------------
# The rules beside the handlers in the table: the permissions that each request needs.
#
# Where Apache's PlainAccessValidator has a rule for a code, the rule is the same here, except that
# CONSUMER_SEND_MSG_BACK needs permission for the message's topic, too. Apache's broker accepts signed requests with other
# codes without a permission. Here, most of them need permission for the topic or group that they name, or for the topic of
# the message at the position that they name, or an administrator (see the tables in `dispatch`).


PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY


class StoredRecords(Protocol):
    """The part of the broker's store that rules use."""

    def record_at(self, position: int) -> Record | None: ...


Needs = Callable[[Frame, StoredRecords | None], Iterable[Need]]


class Rule(NamedTuple):
    """The rule of a request code. A request from a white address passes. Other requests need an account that has the
    permissions of `needs` (`Account.may`), and that is an administrator if `is_admin`. `needs` raises the same errors as a
    handler for headers and bodies that cannot be decoded."""

    is_admin: bool
    needs: Needs | None = None


KNOWN = Rule(is_admin=False)
ADMIN = Rule(is_admin=True)


def needing(needs: Needs) -> Rule:
    return Rule(False, needs)


def named(frame: Frame, field: str) -> str:
    """Return the text that a handler reads from a header field; empty if the field is missing."""
    value = frame.ext.get(field)
    return "" if value is None else str(value)


def fields(*, topics: Iterable[str] = (), groups: Iterable[str] = (), permission: Permission = SUB) -> Rule:
    """Return a rule from the header fields that contain topics and groups. A field that is missing or empty needs no
    permission, because the handler refuses the request or does not need the field."""
    topic_fields, group_fields = tuple(topics), tuple(groups)

    def needs(frame: Frame, records: StoredRecords | None) -> list[Need]:
        found = [topic(name, permission) for field in topic_fields if (name := named(frame, field))]
        return found + [group(name) for field in group_fields if (name := named(frame, field))]

    return needing(needs)


def _sends_to(field: str) -> Rule:
    def needs(frame: Frame, records: StoredRecords | None) -> tuple[Need]:
        name = frame.ext.get(field)
        name = name if type(name) is str else named(frame, field)
        return (_new_tuple(Need, (name, SUB if name.startswith(names.RETRY_PREFIX) else PUB)),)

    return needing(needs)


def _heartbeat(frame: Frame, records: StoredRecords | None) -> Iterable[Need]:
    for consumer in bodies.decode_heartbeat(frame.body).consumers:
        yield group(consumer.group)
        for subscription in consumer.subscriptions:
            yield topic(subscription.topic, SUB)


def _locks(frame: Frame, records: StoredRecords | None) -> list[Need]:
    request = group_bodies.decode_lock_request(frame.body)
    return [group(request.group), *(topic(name, SUB) for name in {queue.topic for queue in request.queues})]


def _assignment(frame: Frame, records: StoredRecords | None) -> list[Need]:
    request = group_bodies.decode_assignment_request(frame.body)
    return [group(request.group), topic(request.topic, SUB)]


def _client_check(frame: Frame, records: StoredRecords | None) -> list[Need]:
    return [group(group_bodies.decode_client_check(frame.body).group)]


def _extents(frame: Frame, records: StoredRecords | None) -> list[Need]:
    asked = named(frame, "consumerGroup")
    return [*(topic(name, ANY) for name in decode_topics(frame.body)), *([group(asked)] if asked else [])]


def _corrected(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permissions for QUERY_CORRECTION_OFFSET: the topic, and the named groups. Without `filterGroups`, the
    handler compares all groups of the topic, and only the topic's permission is needed for them."""
    others = [name for name in named(frame, "filterGroups").split(",") if name]
    compared = named(frame, "compareGroup")
    return [topic(named(frame, "topic"), SUB), *(group(name) for name in (compared, *others) if name)]


def _message_at(position: int, records: StoredRecords | None) -> list[Need]:
    """Return the permission for a message named by its position in the log; none if there is no message. For a delayed or
    half message, the permission is that of the system topic where the message waits, because the message may never be
    delivered to its destination."""
    record = records.record_at(position) if records is not None else None
    return [topic(record.topic, SUB)] if record is not None else []


def _ended(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permission to send to the topic for which a half message is meant, or to the topic of a message that is
    no half message; none if there is no message."""
    position = read(EndTransaction, frame.ext).commit_log_offset
    record = records.record_at(position) if records is not None else None
    if record is None:
        return []
    meant = props.find(record.properties, props.REAL_TOPIC) if record.topic == names.HALF_TOPIC else None
    return [topic(meant or record.topic, PUB)]


def _sent_back(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permissions for the group and for the topic of the message, if there is one. The message is redelivered
    to the group, so without the topic's permission a group could read any message."""
    header = read(SendBack, frame.ext)
    return [group(header.group), *_message_at(header.offset, records)]


def _batch_ack(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permissions for the topics and groups of the acknowledgements."""
    acks = group_bodies.decode_batch_acks(frame.body)
    return [need for ack in acks for need in (group(ack.group), topic(ack.topic, SUB))]


def _lite_syncs(frame: Frame, records: StoredRecords | None) -> list[Need]:
    syncs = group_bodies.decode_lite_subscriptions(frame.body)
    return [need for sync in syncs for need in (group(sync.group), topic(sync.topic, SUB))]


SEND = _sends_to("topic")
SEND_V2 = _sends_to("b")
READS = fields(topics=("topic",), groups=("consumerGroup",))
SEND_BACK = needing(_sent_back)
VIEW = needing(lambda frame, records: _message_at(read(LogOffset, frame.ext).offset, records))
END_TRANSACTION = needing(_ended)
BATCH_ACK = needing(_batch_ack)
LITE_SYNCS = needing(_lite_syncs)
HEARTBEAT = needing(_heartbeat)
LOCKS = needing(_locks)
ASSIGNMENT = needing(_assignment)
CLIENT_CHECK = needing(_client_check)
EXTENTS = needing(_extents)
CORRECTION = needing(_corrected)
READS_TOPIC = fields(topics=("topic",))
MAY_KNOW_TOPIC = fields(topics=("topic",), permission=ANY)  # producers ask for offsets, too
OF_GROUP = fields(groups=("consumerGroup",))
GROUP = fields(groups=("group",))
PARENT_TOPIC = fields(topics=("parentTopic",))
OF_GROUP_AND_TOPIC = fields(topics=("topic",), groups=("group",))
CLONE = fields(topics=("topic",), groups=("srcGroup", "destGroup"))


# ------------------------------------------------------------------------------
# Finds the account of a request, which contains the account's access key and is signed with its secret, unless it comes
# from a white address.
#
# With TLS, a Rocketlet client authenticates its connection once (IDENTIFY): it signs the channel binding of this
# connection, so that the signature is useless on another one. The connection's other requests then need no signature
# until the account is deleted or its secret is replaced.


def authorize(
    acl: Acl, connection: RemotingConnection, frame: Frame, rule: Rule, records: StoredRecords | None
) -> None:
    """Check the account and permissions of a request. Raises Refused, and a handler's errors for a request that cannot
    be decoded. `records` is the broker's store; None in a process without a broker."""
    try:
        account = acl.account_of(connection, frame.ext.get(ACCESS_KEY), partial(_has_signed, frame))
        if account is not None:
            needs = rule.needs(frame, records) if rule.needs is not None else None
            acl.check(account, frame.code, needs, is_admin=rule.is_admin)
    except Unauthorized as fault:
        acl.note_refusal(connection, request_name(frame.code), fault)
        # as Apache's brokers: SYSTEM_ERROR with the text of their AclException
        raise Refused(ResponseCode.SYSTEM_ERROR, f"AclException: {fault}") from None


def _has_signed(frame: Frame, signer: Signer) -> bool:
    try:
        return signer.has_signed(frame.ext, frame.body)
    except (TypeError, ValueError):  # MessagePack fields whose names have types that cannot be sorted
        return False


def identify(acl: Acl, connection: RemotingConnection, frame: Frame) -> None:
    """IDENTIFY: authenticate the connection as an account. Raises Refused without TLS, for an unknown account, or for a
    signature that does not match; the client then continues to sign each request."""
    channel = connection.channel
    account = acl.file.policy.accounts.get(str(frame.ext.get(ACCESS_KEY)))
    is_proven = (
        account is not None
        and channel != ""
        and hmac.compare_digest(str(frame.ext.get(EXT_CHANNEL)).encode(), channel.encode())
        and acl.identify(connection, account, partial(_has_signed, frame))
    )
    if not is_proven:
        raise Refused(
            ResponseCode.NO_PERMISSION,
            "IDENTIFY needs TLS, a known account, and its signature of the connection's channel binding",
        )
