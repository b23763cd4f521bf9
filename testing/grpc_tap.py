"""The tap of the gRPC server: it records the messages of clients' calls and the status of each, and lets faults act.

A fault names a call as clients do: `Fault.answer("SendMessage", response="TOO_MANY_REQUESTS")`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from ..broker.grpc.calls import GrpcCall, ResponseWriter
from ..broker.grpc.server import Ready, ServeCalls
from ..broker.pops.requests import PopClient
from ..broker.runtime.clock import Clock
from ..protocol.http2 import Stream
from .faults import Fault, Faults, Seen
from .tap import AFTER, BEFORE, PIECES_PER_S, Request

_PREFIX_BYTES: Final = 5  # the prefix of a message: a compression flag, and the size


class GrpcTap:
    """Wraps the gRPC server's `serve`. `record` adds a call's message to the list of requests."""

    def __init__(self, serve: ServeCalls, faults: Faults, clock: Clock, record: Callable[[Request], None]) -> None:
        self._serve = serve
        self._faults = faults
        self._clock = clock
        self._record = record
        self._frozen: dict[str, Ready] = {}
        self.unsent: dict[str, list[Callable[[], None]]] = {}
        self._calls: dict[str, GrpcCall] = {}  # the last call of each client

    def serve(self, ready: Ready) -> None:
        passed: Ready = deque()
        while ready:
            call, message = ready.popleft()
            self._calls[call.client_id] = call
            if self.is_frozen(call):
                self._frozen.setdefault(call.client_id, deque()).append((call, message))
            elif not isinstance(message, bytes) or self._is_served(call, message):
                passed.append((call, message))
        while passed:  # one call of `serve` handles calls for a limited time
            self._serve(passed)

    def _is_served(self, call: GrpcCall, message: bytes) -> bool:
        """Record a call's message, and let faults act on it. Return True if the server must serve it."""
        seen = _fields_of(call, message)
        request = Request(
            seen.name, 0, seen.client, call.session.peer, seen.group, seen.topic, seen.queue_id, {}, message
        )
        self._record(request)
        fault = self._faults.acting(BEFORE, seen)
        if fault is None:
            call.answers = TappedAnswers(self, call, request, self._faults.acting(AFTER, seen))
            return True
        if fault.action == "close":
            call.session.abort()
        elif fault.action == "answer":
            request.response, request.remark = fault.response, fault.remark
            call.refuse(fault.response, fault.remark)
        return False

    def is_frozen(self, call: GrpcCall) -> bool:
        return call.client_id in self._faults.frozen()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._clock.call_later(delay_s, action)

    def thaw(self) -> None:
        """Resume clients that are no longer frozen: write the responses that were held back, and serve their calls."""
        frozen = self._faults.frozen()
        for client_id in [client_id for client_id in self.unsent if client_id not in frozen]:
            for action in self.unsent.pop(client_id):
                action()
        for client_id in [client_id for client_id in self._frozen if client_id not in frozen]:
            self.serve(self._frozen.pop(client_id))

    def active_clients(self) -> list[PopClient]:
        """Return the connected clients that are not frozen."""
        self._calls = {name: call for name, call in self._calls.items() if not call.session.is_closed}
        return [call.client for name, call in self._calls.items() if name not in self._faults.frozen()]


class TappedAnswers:
    """Writer of a call's response, on which a fault may act."""

    def __init__(self, tap: GrpcTap, call: GrpcCall, request: Request, fault: Fault | None) -> None:
        self._tap = tap
        self._call = call
        self._answers: ResponseWriter = (
            call.answers._answers if isinstance(call.answers, TappedAnswers) else call.answers
        )
        self._request = request
        self._fault = fault
        self._delay_s = fault.delay_s if fault is not None and fault.action == "late" else 0.0

    def send_headers(self, stream: Stream, block: bytes) -> None:
        self._send(partial(self._answers.send_headers, stream, block))

    def send_data(self, stream: Stream, data: bytes) -> None:
        self._record(data)
        fault = self._fault
        if fault is None or fault.action != "slow":
            self._send(partial(self._answers.send_data, stream, data))
            return
        size = max(fault.bytes_per_s // PIECES_PER_S, 1)
        for begin in range(0, len(data), size):
            piece = data[begin : begin + size]
            self._delay_s += len(piece) / fault.bytes_per_s
            self._send(partial(self._answers.send_data, stream, piece))

    def send_end(self, stream: Stream, block: bytes) -> None:
        if self._fault is not None and self._fault.action == "close_after":
            self._call.session.abort()
            return
        self._send(partial(self._answers.send_end, stream, block))

    def _record(self, data: bytes) -> None:
        if self._request.response is None:
            status = getattr(self._call.method.response.FromString(data[_PREFIX_BYTES:]), "status", None)
            if status is not None and status.code:
                self._request.response, self._request.remark = status.code, status.message

    def _send(self, action: Callable[[], None]) -> None:
        if self._fault is not None and self._fault.action in ("silence", "close_after"):
            return
        if self._tap.is_frozen(self._call):
            self._tap.unsent.setdefault(self._call.client_id, []).append(partial(self._run_and_flush, action))
        elif self._delay_s:
            self._tap.later(self._delay_s, partial(self._send_late, action))
        else:
            action()

    def _send_late(self, action: Callable[[], None]) -> None:
        self._delay_s = 0.0
        self._send(partial(self._run_and_flush, action))

    def _run_and_flush(self, action: Callable[[], None]) -> None:
        action()
        self._call.flush_soon()


def _fields_of(call: GrpcCall, message: bytes) -> Seen:
    try:
        request = call.method.request.FromString(message)
    except DecodeError:
        return Seen(call.method.name, call.client_id, None, None, None)
    queue = getattr(request, "message_queue", None)
    of = next(iter(getattr(request, "messages", ())), queue if queue is not None else request)
    queue_id = queue.id if queue is not None and queue.id >= 0 else None
    return Seen(call.method.name, call.client_id, _name(request, "group"), _name(of, "topic"), queue_id)


def _name(of: Any, field: str) -> str | None:
    named = getattr(of, field, None)
    return None if named is None else named.name or None
