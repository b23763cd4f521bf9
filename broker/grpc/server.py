"""The gRPC server: HTTP/2 connections, the table of methods, authorization, dispatch to handlers."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError

from ...protocol import grpc
from ...protocol.bodies import Work
from ...protocol.config import MAX_ID_CHARS, MAX_UNFINISHED_BYTES
from ...protocol.grpc import CallFault, Status
from ...protocol.headers import Signer
from ...protocol.hpack import encode
from ...protocol.http2 import Aborted, ErrorCode, Http2, Opened, Stream
from ..access import Acl, Unauthorized
from ..broker import BrokerController
from ..config import (
    ANSWERED_BYTES,
    CALL_WORK,
    CLIENT_GONE_S,
    FIELD_FACTOR,
    KEPT_RECEIVES,
    PENDING_BYTES,
    PIECE_S,
    STREAM_BYTES,
    LimitExceeded,
)
from ..runtime.clock import MACHINE
from ..sessions.grpc_stats import GrpcClientStats
from ..sessions.refusal import Refusal
from ..sessions.shares import AddressShares
from ..store.files import StoreError
from ..tls import ClientTransport
from . import consuming, lite, producing, routes, schema, telemetry
from .calls import GrpcCall, Method, Needs, set_status
from .clients import GrpcClient, GrpcClients, HandlerContext
from .producing import GrpcSends
from .schema import SERVICE, Code, StatusError, has_control, status_code

log = structlog.get_logger("rocketlet.grpc")


# ------------------------------------------------------------------------------
# One client's socket, once its first bytes were an HTTP/2 preface.
#
# The socket's `RemotingConnection` stays: it is counted, charged and closed like all others. `GrpcConnection` replaces it as
# the socket's asyncio protocol, reads calls, and writes through it.


Ready = deque[tuple[GrpcCall, bytes | Work[None] | None]]

_TEXT: Final = b"This port speaks gRPC (RocketMQ 5) and RocketMQ's remoting protocol, and no other kind of HTTP.\n"
_NO_GRPC: Final = encode(
    (b":status", b"415"), (b"content-type", b"text/plain"), (b"content-length", str(len(_TEXT)).encode())
)


class GrpcConnection(asyncio.Protocol):
    """A client's HTTP/2 connection. `ready` has, by call, messages that are not served yet and work that has begun; None as a
    message means that the client sends no more of them."""

    def __init__(self, server: GrpcServer, connection: ClientTransport) -> None:
        self.server = server
        self.connection = connection
        self.http2 = Http2()
        self.ready: Ready = deque()
        # by stream, oldest first: the function to call if the client cancels a call after its response
        self._answered: dict[int, Callable[[], None]] = {}
        self._unfinished_bytes = 0
        self._charged_bytes = 0
        self._is_serving = self._is_flush_due = self._is_in_line = False
        connection.on_farewell(self._send_goaway)
        server.callers.connections += 1

    def data_received(self, data: bytes) -> None:
        connection, now_s = self.connection, self.server.now_s()
        connection.active_s = connection.heard_s = now_s
        connection.read_bytes += len(data)
        if self._is_in_line or not connection.may_serve:
            self.http2.receive(data, now_s, 0)
            self.serve_rest()
            return
        began_s = time.perf_counter()
        if not self._serve_some(data, began_s + PIECE_S):
            self.serve_rest()
        connection.note_served(time.perf_counter() - began_s)

    def _serve_some(self, data: bytes, end_s: float) -> bool:
        """Read and serve calls until `end_s`. Return False if the time was over before all input was served."""
        connection = self.connection
        self._is_serving = True
        try:
            while not connection.is_closed:
                for event in self.http2.receive(data, connection.heard_s, CALL_WORK):
                    if isinstance(event, Opened):
                        self._open(event.stream)
                    elif isinstance(event, Aborted):
                        self._abort(event.stream)
                    else:
                        self._receive(event.stream, event.data, event.is_end)
                for stream_id in self.http2.take_given_up():
                    self._give_up(stream_id)
                data = b""
                if self.ready and not connection.is_paused:
                    self.server.serve(self.ready)
                if not self._has_more:
                    return True
                if time.perf_counter() > end_s:
                    return False
        except Exception:  # a defect of the broker: close only this client's connection, so that the client reconnects
            log.exception("connection_closed_requests_failed", peer=connection.peer)
            connection.abort()
        finally:
            self._is_serving = False
            self.flush()
        return True

    @property
    def _has_more(self) -> bool:
        """True if there is input to read or serve. Input of a client that does not read its responses waits."""
        is_waiting = bool(self.ready) or self.http2.is_behind
        return is_waiting and not (self.connection.is_paused or self.connection.is_closed)

    # Calls

    def _open(self, stream: Stream) -> None:
        fields = stream.fields
        if not grpc.is_grpc(fields.get(b"content-type", b"")):
            return  # the error is sent when the request has ended
        try:
            stream.call = call = self._call_of(stream)
        except CallFault as fault:
            self.http2.answers.send_end(stream, grpc.only_trailers(fault.status, str(fault)))
            return
        if call.method.is_open:
            call.begin()

    def _call_of(self, stream: Stream) -> GrpcCall:
        """Return the call of a request. Raises CallFault for an unknown method or an invalid timeout."""
        method = self.server.method_of(stream)
        left_s = grpc.timeout_s(stream.fields.get(b"grpc-timeout"))
        due_s = None if left_s is None else self.connection.heard_s + left_s
        answers, callers = self.http2.answers, self.server.callers
        return GrpcCall(self.connection, stream, method, due_s, answers, self.flush_soon, callers, self._keep_answered)

    def _keep_answered(self, stream_id: int, given_up: Callable[[], None]) -> None:
        """Call `given_up` if the client cancels the call after its response was written. The last KEPT_RECEIVES functions are
        kept."""
        self._answered[stream_id] = given_up
        self.connection.charge(ANSWERED_BYTES)
        if len(self._answered) > KEPT_RECEIVES:
            self._forget_answered(next(iter(self._answered)))

    def _forget_answered(self, stream_id: int) -> Callable[[], None] | None:
        given_up = self._answered.pop(stream_id, None)
        if given_up is not None:
            self.connection.charge(-ANSWERED_BYTES)
        return given_up

    def _give_up(self, stream_id: int) -> None:
        if (given_up := self._forget_answered(stream_id)) is not None:
            given_up()

    def _receive(self, stream: Stream, data: bytes, is_end: bool) -> None:
        call = stream.call
        if not isinstance(call, GrpcCall):
            if is_end and not stream.is_answer_ended:
                self._refuse_http(stream)
            return
        before = call.reader.waiting_bytes
        try:
            messages = call.reader.feed(data)
            self._unfinished_bytes += call.reader.waiting_bytes - before
            self._check_messages(call, messages, is_end)
        except CallFault as fault:
            call.end(fault.status, str(fault))
            self._forget(call)
            return
        self.ready.extend((call, message) for message in messages)
        if is_end:
            self._unfinished_bytes -= call.reader.waiting_bytes
            if call.method.is_open:
                self.ready.append((call, None))

    def _check_messages(self, call: GrpcCall, messages: list[bytes], is_end: bool) -> None:
        if self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            reason = f"incomplete messages of this connection have over {MAX_UNFINISHED_BYTES} bytes, the maximum"
            raise CallFault(Status.RESOURCE_EXHAUSTED, reason)
        if call.method.is_open:
            return
        if len(messages) > 1 or (messages and call.has_request):
            raise CallFault(Status.INTERNAL, "the call has more than one message")
        if messages:
            call.has_request = True
        elif is_end and not call.has_request:
            raise CallFault(Status.INTERNAL, "the call has no message")

    def _forget(self, call: GrpcCall) -> None:
        self._unfinished_bytes -= call.reader.waiting_bytes
        call.reader.clear()

    def _refuse_http(self, stream: Stream) -> None:
        answers = self.http2.answers
        answers.send_headers(stream, _NO_GRPC)
        if stream.fields[b":method"] != b"HEAD":
            answers.send_data(stream, _TEXT)
        answers.send_end(stream, b"")

    def _abort(self, stream: Stream) -> None:
        """Handle a call that the client cancelled, or that broke the protocol."""
        call, stream.call = stream.call, None
        if isinstance(call, GrpcCall):
            self._forget(call)
            call.abort()

    # Turns

    def serve_rest(self) -> None:
        """Serve the remaining input in the turns of the client's address, with reading paused until then. Without such input,
        resume reading."""
        connection = self.connection
        if self._is_in_line or connection.is_closed:
            return
        if self._has_more:
            self._is_in_line = connection.is_held = True
            connection.pause_reading()
            connection.in_turn(self._serving())
        elif connection.is_held and not connection.is_paused:
            connection.is_held = False
            connection.resume()

    def _serving(self) -> Work[None]:
        while self._has_more:
            self._serve_some(b"", time.perf_counter() + PIECE_S)
            yield
        self._is_in_line = False
        self.serve_rest()

    # Writing

    def flush_soon(self) -> None:
        """Write the added responses together: after the calls that are being served, or else in the next event-loop
        iteration."""
        if not (self._is_serving or self._is_flush_due):
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self.flush()

    def flush(self) -> None:
        http2, connection = self.http2, self.connection
        data = http2.take()
        if data:
            connection.write([data])
        answers, streams = http2.answers, len(http2.streams)
        held = http2.waiting_bytes + self._unfinished_bytes + streams * STREAM_BYTES
        held += answers.pending_bytes + answers.pending * PENDING_BYTES + answers.field_bytes * FIELD_FACTOR
        if self.ready:
            held += len(self.ready) * STREAM_BYTES + sum(len(item) for _, item in self.ready if isinstance(item, bytes))
        if held != self._charged_bytes:
            connection.charge(held - self._charged_bytes)
            self._charged_bytes = held
        if http2.is_over and not connection.is_closed:
            self._close()

    def _close(self) -> None:
        fault = self.http2.fault
        if fault is not None:
            self.server.turned_away(self.connection, f"it broke a rule of HTTP/2: {fault}")
            if self.connection.is_news("http2_connection_closed"):
                log.warning("http2_connection_closed", peer=self.connection.peer, reason=str(fault))
        self.connection.close()

    def _send_goaway(self) -> None:
        self.http2.end(ErrorCode.NO_ERROR)
        self.connection.write([self.http2.take()])

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()
        self.serve_rest()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.server.callers.connections -= 1
        self.ready.clear()
        for stream in self.http2.lost():
            self._abort(stream)
        for stream_id in list(self._answered):
            self._forget_answered(stream_id)
        self.connection.connection_lost(error)


# ------------------------------------------------------------------------------
# Passes the calls of one socket read to their handlers.
#
# As in the remoting server, consecutive sends are staged, and committed together before the next other call is handled and
# before their responses are written. With accounts, a request is authorized before it is staged or handled.


_CLIENT_FAULTS = (LimitExceeded, StoreError, OverflowError)


ServeCalls = Callable[[Ready], None]


class GrpcServer:
    """The gRPC server of a broker, or of a process that is only a name server and refuses all calls.

    Args:
        tap: Wraps the function that serves calls; the test kit uses it.
    """

    def __init__(
        self, broker: BrokerController | None, acl: Acl | None, tap: Callable[[ServeCalls], ServeCalls]
    ) -> None:
        self.serve = tap(self._serve_ready)
        self._acl = acl
        self._context: HandlerContext | None = None
        self._sends: GrpcSends | None = None
        self._methods: Mapping[bytes, Method] = {}
        self._answering = AddressShares(broker.limits.max_answering if broker is not None else 0)
        self.callers = broker.callers if broker is not None else GrpcClientStats(MACHINE)
        self.now_s = MACHINE.monotonic_s
        if broker is not None:
            self._context = HandlerContext(
                broker, GrpcClients(partial(telemetry.send_event, broker.turns.do), self._lost, broker.limits), acl
            )
            self._sends = GrpcSends(self._context)
            self._methods = {f"/{SERVICE}/{name}".encode(): method for name, method in METHODS.items()}
            self.now_s = broker.clock.monotonic_s

    def _lost(self, client: GrpcClient, heard_s: float) -> None:
        """Handle a client that terminated or lost a connection. Without any, it has CLIENT_GONE_S to reconnect."""
        if self._context is not None:
            broker = self._context.broker
            if client.group:
                broker.pops.connection_lost(client.pop_client, heard_s)
            if not client.connections:
                broker.clients.drop(client)
                broker.client_requests.drop(client)
                if client.group:
                    broker.clock.call_later(CLIENT_GONE_S, self._look_for, client)

    def _look_for(self, client: GrpcClient) -> None:
        if self._context is not None and self._context.clients.get(client.account, client.client_id) is None:
            self._context.broker.pops.client_gone(client.pop_client)

    def turned_away(self, connection: ClientTransport, reason: str) -> None:
        if self._context is not None:
            self._context.broker.note_turned_away(connection.address, reason)

    def protocol(self, connection: ClientTransport) -> GrpcConnection:
        return GrpcConnection(self, connection)

    def method_of(self, stream: Stream) -> Method:
        """Return the method of a request. Raises CallFault if it is unknown, or if this process has no broker."""
        path = stream.fields[b":path"]
        method = self._methods.get(path)
        if method is not None:
            return method
        if self._context is None:
            raise CallFault(Status.UNAVAILABLE, "this is a name server; give the client the address of a broker")
        raise CallFault(Status.UNIMPLEMENTED, f"{path[:100].decode(errors='replace')} is not served here")

    def _serve_ready(self, ready: Ready) -> None:
        """Serve calls for up to `PIECE_S`, at least one piece of the first."""
        sends = self._sends
        assert sends is not None
        end_s = time.perf_counter() + PIECE_S
        try:
            while ready:
                call, message = ready.popleft()
                if call.is_over:
                    continue
                if sends.staged and call.method.name != SEND:
                    sends.commit()
                work = self._continue(call, message) if isinstance(message, Generator) else self._serve(call, message)
                if work is not None:
                    ready.appendleft((call, work))
                if time.perf_counter() > end_s:
                    return
        finally:  # messages that were staged in this read are committed with it
            if sends.staged:
                sends.commit()

    def _serve(self, call: GrpcCall, message: bytes | None) -> Work[None] | None:
        """Serve the call; return the work that is left to be done in pieces."""
        method = call.method
        assert self._context is not None
        try:
            request = None if message is None else method.request.FromString(message)
            if not call.client_id:
                raise StatusError(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
            if len(call.client_id) > MAX_ID_CHARS:
                raise StatusError(Code.BAD_REQUEST, f"the client id has more than {MAX_ID_CHARS} characters")
            if has_control(call.client_id):
                raise StatusError(Code.BAD_REQUEST, "the client id has control characters")
            if self._acl is not None and request is not None:
                authorize(self._acl, call, request)
            response: Any
            if method.name == SEND:
                assert self._sends is not None
                response = self._sends.stage(call, request)
            else:
                response = method.handler(self._context, call, request)
            if isinstance(response, Generator):
                # The first piece is done immediately, so that the request is charged before others are decoded.
                size = len(message or b"")
                return self._continue(call, call.charging(response, lambda: size))
            if asyncio.iscoroutine(response):
                self._answer_later(call, response, len(message or b""))
            elif response is not None:
                call.answer(response)
        except Exception as error:
            self._refuse_for(call, error)
        return None

    def _continuing(self, call: GrpcCall, work: Work[None]) -> Work[None]:
        try:
            yield from work
        except Exception as error:
            self._refuse_for(call, error)

    def _continue(self, call: GrpcCall, work: Work[None]) -> Work[None] | None:
        """Do the next piece of the work on a call; return the work that is left."""
        try:
            next(work)
        except StopIteration:
            return None
        except Exception as error:
            self._refuse_for(call, error)
            return None
        return work

    def _answer_later(self, call: GrpcCall, response: Coroutine[Any, Any, Work[None]], size: int) -> None:
        """Respond in a task, with the size of the request charged until then. Raises LimitExceeded if too many responses are
        being made."""
        assert self._context is not None
        address = call.session.address
        if not self._answering.has_room(address):
            response.close()
            raise LimitExceeded(f"{self._answering.count} long requests are being answered; retry later")
        self._answering.acquire(address)
        call.session.charge(size)
        self._context.broker.tasks.spawn(self._answer(call, response, size))

    async def _answer(self, call: GrpcCall, response: Coroutine[Any, Any, Work[None]], size: int) -> None:
        assert self._context is not None
        try:
            self._context.broker.turns.do(self._continuing(call, await response), call.session.address)
        except Exception as error:
            self._refuse_for(call, error)
        finally:
            self._answering.release(call.session.address)
            call.session.charge(-size)

    def _refuse_for(self, call: GrpcCall, error: Exception) -> None:
        """Refuse a call because of an error of the client, of the disk, or of the broker itself. The latter is logged, unless
        the client's address has repeated it."""
        name = call.method.name
        if isinstance(error, DecodeError):
            call.end(Status.INTERNAL, f"the {name} message cannot be decoded")
        elif isinstance(error, StatusError | Refusal):
            self._refuse(call, status_code(error), str(error))
        elif isinstance(error, _CLIENT_FAULTS):
            self._refuse(call, Code.INTERNAL_SERVER_ERROR, str(error))
        else:
            if call.session.is_news(f"request_failed {name}"):
                log.error("request_failed", request=name, peer=call.session.peer, exc_info=error)
            self._refuse(call, Code.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _refuse(self, call: GrpcCall, code: int, reason: str) -> None:
        if not call.method.is_stream:
            call.refuse(code, reason)
            return
        response: Any = call.method.response()
        set_status(response.status, code, reason)
        call.send(response)
        call.end()


# ------------------------------------------------------------------------------
# Authentication: `authorization: MQv2-HMAC-SHA1 Credential=<key>[/...], SignedHeaders=x-mq-date-time,
# Signature=<hex>`.
#
# Accounts and permissions are shared with the remoting server. A client signs only the time in its header, which is its own
# clock in its own time zone, so a replayed header cannot be detected. Only TLS protects against a man in the middle.


def authorize(acl: Acl, call: GrpcCall, request: Any) -> None:
    """Authenticate a call and check its permissions. Raises StatusError if it is refused."""
    fields = _credentials(call.text(b"authorization"))
    access_key = fields.get("Credential", "").partition("/")[0]
    try:
        has_signed = partial(_has_signed, call, fields.get("Signature", "").lower())
        account = acl.account_of(call.session, access_key or None, has_signed)
        if account is not None:
            call.account = account.access_key
            acl.check(account, call.method.name, call.method.needs(request))
    except Unauthorized as fault:
        acl.note_refusal(call.session, call.method.name, fault)
        raise StatusError(Code.UNAUTHORIZED, str(fault)) from None


def _has_signed(call: GrpcCall, shown: str, signer: Signer) -> bool:
    signature = signer.signature_of(call.fields.get(b"x-mq-date-time", b""))
    return hmac.compare_digest(signature.encode(), shown.encode())


def _credentials(text: str) -> dict[str, str]:
    """Return the name=value pairs after the name of the algorithm."""
    _, _, pairs = text.partition(" ")
    return dict(pair.strip().partition("=")[::2] for pair in pairs.split(","))


# ------------------------------------------------------------------------------
# The table of methods: each with its handler and the permissions that it needs. A new method also gets a line in
# docs/compatibility.md.


SEND: Final = "SendMessage"


def _staged(*_: object) -> None:
    """SendMessage has no handler, because `GrpcSends` stages it."""
    raise AssertionError("a send is staged")


def _method(name: str, handler: Callable[..., Any], needs: Needs, *, is_stream: bool = False) -> Method:
    request, response = getattr(schema, f"{name}Request"), getattr(schema, f"{name}Response")
    return Method(name, request, response, handler, needs, is_stream)


_COMMAND: Final = schema.TelemetryCommand
METHODS: Final[Mapping[str, Method]] = {
    method.name: method
    for method in (
        # names
        _method("QueryRoute", routes.query_route, schema.knows),
        _method("QueryAssignment", routes.query_assignment, schema.consumes),
        # methods for the registration of a client
        Method("Telemetry", _COMMAND, _COMMAND, telemetry.telemetry, schema.settings_needs, True, is_open=True),
        _method("Heartbeat", telemetry.heartbeat, schema.is_of_group),
        _method("NotifyClientTermination", telemetry.notify_termination, schema.is_of_group),
        _method("SyncLiteSubscription", lite.sync_lite_subscription, schema.consumes),
        # producers
        _method(SEND, _staged, schema.sends),
        _method("EndTransaction", producing.end_transaction, schema.publishes),
        _method("RecallMessage", producing.recall_message, schema.publishes),
        # consumers
        _method("ReceiveMessage", consuming.receive_message, schema.receives, is_stream=True),
        _method("AckMessage", consuming.ack_message, schema.consumes),
        _method("ChangeInvisibleDuration", consuming.change_invisible_duration, schema.consumes),
        _method("ForwardMessageToDeadLetterQueue", consuming.forward_to_dead_letters, schema.consumes),
    )
}
