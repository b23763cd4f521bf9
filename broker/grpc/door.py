"""Takes the calls of one socket read to their handlers, and the answers back.

As in the other door, sends are staged one by one and committed together: before any other call of the same read is looked at,
and before anything is written. Every call is authorized before it is staged or handled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from ...protocol.config import MAX_ID_CHARS
from ...protocol.grpc import CallFault, Status
from ...protocol.http2.flow import Stream
from ...protocol.work import Work
from ..access.acl import Acl
from ..broker import Broker
from ..clock import MACHINE
from ..config import CLIENT_GONE_S, TURN_S, LimitExceeded
from ..listening.carrier import Carrier
from ..sessions.callers import Callers
from ..sessions.refusal import Refusal
from ..sessions.shares import Shares
from ..store.files import StoreError
from .authentication import authorize
from .calls import Call, Method, set_status
from .clients import GrpcClient, GrpcClients
from .codes import Code, Fault, refused
from .connection import GrpcConnection, Ready
from .hall import Hall
from .schema import SERVICE
from .sends import Sends
from .table import METHODS, SEND
from .telemetry import tell

log = structlog.get_logger("rocketlet.grpc")

_CLIENT_FAULTS = (LimitExceeded, StoreError, OverflowError)


ServeCalls = Callable[[Ready], None]


class Door:
    """The door of a broker, or of a name server alone, which serves no call and says so. tap: makes another function of the
    one that serves calls."""

    def __init__(self, broker: Broker | None, acl: Acl | None, tap: Callable[[ServeCalls], ServeCalls]) -> None:
        self.serve = tap(self._serve_ready)
        self._acl = acl
        self._hall: Hall | None = None
        self._sends: Sends | None = None
        self._methods: Mapping[bytes, Method] = {}
        self._answering = Shares(broker.limits.max_answering if broker is not None else 0)
        self.callers = broker.callers if broker is not None else Callers(MACHINE)
        self.now_s = MACHINE.monotonic_s
        if broker is not None:
            self._hall = Hall(broker, GrpcClients(partial(tell, broker.turns.do), self._gone, broker.limits), acl)
            self._sends = Sends(self._hall)
            self._methods = {f"/{SERVICE}/{name}".encode(): method for name, method in METHODS.items()}
            self.now_s = broker.clock.monotonic_s

    def _gone(self, client: GrpcClient) -> None:
        """A client has said good-bye, or its connection is gone; then it may come back."""
        if self._hall is not None:
            broker = self._hall.broker
            broker.clients.drop(client)
            if client.group:
                broker.pops.connection_lost(client.pop_client, client.connection.heard_s)
                broker.clock.call_later(CLIENT_GONE_S, self._look_for, client)

    def _look_for(self, client: GrpcClient) -> None:
        if self._hall is not None and self._hall.clients.get(client.account, client.client_id) is None:
            self._hall.broker.pops.client_gone(client.pop_client)

    def turned_away(self, connection: Carrier, reason: str) -> None:
        if self._hall is not None:
            self._hall.broker.note_turned_away(connection.address, reason)

    def protocol(self, connection: Carrier) -> GrpcConnection:
        return GrpcConnection(self, connection)

    def method_of(self, stream: Stream) -> Method:
        """Raises CallFault."""
        path = stream.fields[b":path"]
        method = self._methods.get(path)
        if method is not None:
            return method
        if self._hall is None:
            raise CallFault(Status.UNAVAILABLE, "this is a name server; give the client the address of a broker")
        raise CallFault(Status.UNIMPLEMENTED, f"{path[:100].decode(errors='replace')} is not served here")

    def _serve_ready(self, ready: Ready) -> None:
        sends = self._sends
        assert sends is not None
        end_s = time.perf_counter() + TURN_S
        try:
            while ready:
                call, message = ready.popleft()
                if call.is_over:
                    continue
                if sends.staged and call.method.name != SEND:
                    sends.settle()
                work = self._continue(call, message) if isinstance(message, Generator) else self._serve(call, message)
                if work is not None:
                    ready.appendleft((call, work))
                if time.perf_counter() > end_s:
                    return
        finally:  # staged messages belong to this read
            if sends.staged:
                sends.settle()

    def _serve(self, call: Call, message: bytes | None) -> Work[None] | None:
        """Serve the call; return the work that is left to be done in pieces."""
        method = call.method
        assert self._hall is not None
        try:
            request = None if message is None else method.request.FromString(message)
            if not call.client_id:
                raise Fault(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
            if len(call.client_id) > MAX_ID_CHARS:
                raise Fault(Code.BAD_REQUEST, f"the client id has more than {MAX_ID_CHARS} characters")
            if self._acl is not None and request is not None:
                authorize(self._acl, call, request)
            if method.name == SEND:
                assert self._sends is not None
                return self._sends.stage(call, request)
            response = method.handler(self._hall, call, request)
            if asyncio.iscoroutine(response):
                self._answer_later(call, response)
            elif response is not None:
                call.answer(response)
        except Exception as error:
            self._fault(call, error)
        return None

    def _continue(self, call: Call, work: Work[None]) -> Work[None] | None:
        """Do the next piece of the work on a call; return the work that is left."""
        try:
            next(work)
        except StopIteration:
            return None
        except Exception as error:
            self._fault(call, error)
            return None
        return work

    def _answer_later(self, call: Call, response: Coroutine[Any, Any, Any]) -> None:
        """Raises LimitExceeded."""
        assert self._hall is not None
        address = call.session.address
        if not self._answering.has_room(address):
            response.close()
            raise LimitExceeded(f"{self._answering.count} long requests are being answered; try again later")
        self._answering.take(address)
        self._hall.broker.tasks.spawn(self._answer(call, response))

    async def _answer(self, call: Call, response: Coroutine[Any, Any, Any]) -> None:
        try:
            call.answer(await response)
        except Exception as error:
            self._fault(call, error)
        finally:
            self._answering.give_back(call.session.address)

    def _fault(self, call: Call, error: Exception) -> None:
        """The answer to a call that cannot be served: the client's fault, a full disk's, or a defect of ours."""
        name = call.method.name
        if isinstance(error, DecodeError):
            call.end(Status.INTERNAL, f"the {name} message cannot be decoded")
        elif isinstance(error, Fault):
            self._refuse(call, error.code, str(error))
        elif isinstance(error, Refusal):
            self._refuse(call, refused(error).code, str(error))
        elif isinstance(error, _CLIENT_FAULTS):
            self._refuse(call, Code.INTERNAL_SERVER_ERROR, str(error))
        else:
            if call.session.is_news(f"request_failed {name}"):
                log.error("request_failed", request=name, peer=call.session.peer, exc_info=error)
            self._refuse(call, Code.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _refuse(self, call: Call, code: int, reason: str) -> None:
        if not call.method.is_stream:
            call.refuse(code, reason)
            return
        response: Any = call.method.response()
        set_status(response.status, code, reason)
        call.send(response)
        call.end()
