"""The tap between the sockets and the broker: it records requests and their responses, and lets faults act on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ..broker.remoting.connection import Host, RemotingConnection
from ..broker.remoting.responses import Buffers, answer
from ..broker.runtime.clock import Clock
from ..broker.server import Serve
from ..protocol import bodies, properties
from ..protocol.bodies import BodyError
from ..protocol.codes import ONEWAY_FLAG, RESPONSE_FLAG, RequestCode, request_name
from ..protocol.frame import Ext, Frame, FrameCursor, FrameError, FrameReader, encode
from ..protocol.headers import HeaderError, read_send_v2
from .config import KEPT_REQUESTS
from .faults import Fault, Faults, Seen, answer_name

_SENDS_V2: Final = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
BEFORE: Final = ("answer", "drop", "close")
AFTER: Final = ("late", "silence", "close_after", "slow", "route")
PIECES_PER_S: Final = 20


@dataclass(slots=True)
class Request:
    """A decoded request of a client. For a gRPC call, `code` is 0, and `body` is the message. `response` is the code of
    the response, None if there is none yet."""

    name: str
    code: int
    client: str
    peer: str
    group: str | None
    topic: str | None
    queue_id: int | None
    ext: Ext
    body: bytes
    response: int | None = None
    remark: str | None = None
    at_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        answered = "no response" if self.response is None else answer_name(self.code, self.response)
        fields = " ".join(f"{name}={value}" for name, value in self._named_fields().items())
        return f"{self.client or self.peer} {self.name} -> {answered}: {fields[:300]} ({len(self.body)} bytes)"

    def _named_fields(self) -> Mapping[str, object]:
        """Return the fields by their full names; SEND_MESSAGE_V2 abbreviates them to single letters."""
        if self.code not in _SENDS_V2:
            return self.ext
        try:
            header = read_send_v2(self.ext)._asdict()
        except HeaderError:
            return self.ext
        return header | {"properties": properties.decode(header["properties"])}


class Tap:
    """Wraps a server's `serve`.

    Args:
        client_of: returns the client id of a connection
        faults: the faults in force
        clock: the broker's clock
        requests: the list to which requests are added
    """

    def __init__(
        self,
        client_of: Callable[[RemotingConnection], str],
        faults: Faults,
        clock: Clock,
        requests: list[Request],
    ) -> None:
        self._client_of = client_of
        self._faults = faults
        self._clock = clock
        self.requests = requests

    def on(self, serve: Serve) -> Serve:
        """Wrap a server's `serve` function, and return the wrapper."""
        self._serve = serve
        return self.serve

    def serve(self, connection: RemotingConnection) -> None:
        assert isinstance(connection, TappedConnection)
        connection.tap = self
        frames = _taken(connection.requests)
        connection.client = _client_in([frame for frame, _ in frames]) or connection.client
        client = self._client_of(connection)
        if client in self._faults.frozen():
            connection.frozen += b"".join(raw for _, raw in frames)
            return
        passed: list[bytes] = []
        unserved_bytes = connection.unserved_bytes
        for frame, raw in frames:
            if unserved_bytes > 0 or frame.flag & RESPONSE_FLAG:
                unserved_bytes -= len(raw)
                passed.append(raw)
                continue
            seen = _fields_of(frame, client)
            request = self._record(connection, frame, seen)
            fault = self._faults.acting(BEFORE, seen)
            if fault is None:
                after = self._faults.acting(AFTER, seen)
                connection.expected[frame.opaque] = (request, after)
                passed.append(raw)
                continue
            if fault.action == "close":
                self._pass(connection, passed)
                connection.abort()
                return
            if fault.action == "answer" and not frame.flag & ONEWAY_FLAG:
                request.response, request.remark = fault.response, fault.remark
                connection.write(answer(frame, fault.response, remark=fault.remark))
        self._pass(connection, passed)

    def _pass(self, connection: TappedConnection, passed: list[bytes]) -> None:
        """Let the broker serve requests. It serves for a limited time in each event-loop iteration, and then calls `serve`
        for the rest, which must be neither recorded nor subject to faults again."""
        requests = connection.requests
        incomplete_bytes = len(requests.data) - requests.at
        requests.put_back(b"".join(passed))
        if requests.has_frame:
            self._serve(connection)
        connection.unserved_bytes = len(requests.data) - requests.at - incomplete_bytes

    def _record(self, connection: RemotingConnection, frame: Frame, seen: Seen) -> Request:
        request = Request(
            request_name(frame.code).partition(" ")[0],
            frame.code,
            seen.client,
            connection.peer,
            seen.group,
            seen.topic,
            seen.queue_id,
            dict(frame.ext),
            bytes(frame.body),
        )
        self.record(request)
        return request

    def record(self, request: Request) -> None:
        self.requests.append(request)
        if len(self.requests) > KEPT_REQUESTS:
            del self.requests[: KEPT_REQUESTS // 10]

    def sent(self, connection: TappedConnection, buffers: Buffers) -> None:
        """Process bytes that the broker writes: responses, and requests of its own."""
        client = self._client_of(connection)
        data = b"".join(buffers)
        if client in self._faults.frozen():
            connection.unsent.append(data)
            return
        if not connection.expected and self._faults.is_empty:
            connection.pass_on([data])
            return
        out: list[bytes] = []
        for frame, raw in _frames(data):
            if not frame.flag & RESPONSE_FLAG:
                if self._faults.acting(("lose",), _fields_of(frame, client)) is None:
                    out.append(raw)
                continue
            request, fault = connection.expected.pop(frame.opaque, (None, None))
            if request is not None:
                request.response, request.remark = frame.code, frame.remark
            if fault is None:
                out.append(raw)
            else:
                connection.pass_on(out)
                out = []
                if not self._act(connection, fault, frame, raw):
                    return
        connection.pass_on(out)

    def _act(self, connection: TappedConnection, fault: Fault, frame: Frame, raw: bytes) -> bool:
        """Let a fault act on a response. Return False if the connection was closed."""
        if fault.action == "close_after":
            connection.abort()
            return False
        if fault.action == "late":
            self._clock.call_later(fault.delay_s, connection.pass_on, [raw])
        elif fault.action == "slow":
            self._trickle(connection, raw, fault.bytes_per_s)
        elif fault.action == "route":
            connection.pass_on([_changed_route(fault, frame, raw)])
        return True

    def _trickle(self, connection: TappedConnection, raw: bytes, bytes_per_s: int) -> None:
        size = max(bytes_per_s // PIECES_PER_S, 1)
        for number, begin in enumerate(range(0, len(raw), size)):
            piece = [raw[begin : begin + size]]
            self._clock.call_later(number * size / bytes_per_s, partial(connection.pass_on, piece))

    def thaw(self, connection: TappedConnection) -> None:
        """Resume a frozen client: deliver its requests, and the bytes that were written to it."""
        requests, connection.frozen = connection.frozen, b""
        unsent, connection.unsent = connection.unsent, []
        if unsent:
            connection.pass_on(unsent)
        if requests:
            connection.requests.put_back(requests)
            self.serve(connection)


class TappedConnection(RemotingConnection):
    """A connection whose writes pass through the tap.

    Attributes:
        client: client id of the last heartbeat, which the broker may not have processed yet
        expected: requests whose responses are pending, by opaque id, with the fault that will act on the response
        frozen: requests of a frozen client
        unsent: bytes for a frozen client
        unserved_bytes: size of the next requests that the tap has recorded, and that the broker has not served yet
    """

    __slots__ = ("client", "expected", "frozen", "tap", "unsent", "unserved_bytes")

    def __init__(self, host: Host, *, is_external: bool = False, is_vip: bool = False) -> None:
        super().__init__(host, is_external=is_external, is_vip=is_vip)
        self.client = ""
        self.expected: dict[int, tuple[Request | None, Fault | None]] = {}
        self.frozen = b""
        self.unsent: list[bytes] = []
        self.unserved_bytes = 0
        self.tap: Tap | None = None

    def write(self, buffers: Buffers) -> None:
        if self.tap is None or not buffers:
            super().write(buffers)
        else:
            self.tap.sent(self, buffers)

    def pass_on(self, buffers: list[bytes]) -> None:
        if buffers:
            super().write([*buffers])


def _client_in(frames: list[Frame]) -> str:
    """Return the client id of the last heartbeat that can be decoded, or an empty text."""
    for frame in reversed(frames):
        if frame.code == RequestCode.HEART_BEAT and not frame.flag & RESPONSE_FLAG:
            try:
                return bodies.decode_heartbeat(frame.body).client_id
            except BodyError:
                continue
    return ""


def _taken(requests: FrameCursor) -> list[tuple[Frame, bytes]]:
    """Take all whole frames, and return each with its bytes."""
    found: list[tuple[Frame, bytes]] = []
    with suppress(FrameError):  # the dispatch finds the bytes that are not a frame, and reports them
        data, at = requests.data, requests.at
        while (frame := requests.next()) is not None:
            end = requests.at if requests.data else len(data)  # the last frame takes the bytes with it
            found.append((frame, data[at:end]))
            at = end
    return found


def _frames(data: bytes) -> list[tuple[Frame, bytes]]:
    """Return each frame with its bytes."""
    found: list[tuple[Frame, bytes]] = []
    begin = 0
    while begin < len(data):
        size = 4 + int.from_bytes(data[begin : begin + 4], "big")
        raw = data[begin : begin + size]
        found += [(frame, raw) for frame in FrameReader().feed(raw)]
        begin += size
    return found


def _fields_of(frame: Frame, client: str) -> Seen:
    ext = frame.ext
    if frame.code in _SENDS_V2:
        try:
            header = read_send_v2(ext)
        except HeaderError:
            return Seen(frame.code, client, None, None, None)
        return Seen(frame.code, client, header.producer_group, header.topic, header.queue_id)
    group = ext.get("consumerGroup") or ext.get("group") or ext.get("producerGroup")
    topic, queue_id = ext.get("topic"), ext.get("queueId")
    return Seen(
        frame.code,
        client,
        None if group is None else str(group),
        None if topic is None else str(topic),
        int(queue_id) if queue_id is not None and str(queue_id).isdigit() else None,
    )


def _changed_route(fault: Fault, frame: Frame, raw: bytes) -> bytes:
    if frame.code:
        return raw
    try:
        route = bodies.decode_route(frame.body)
    except BodyError:
        return raw
    return encode(frame._replace(body=bodies.encode_route(fault.changed(route))))
