"""One gRPC call: its method, its client, and its response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ...protocol import grpc
from ...protocol.bodies import Work
from ...protocol.grpc import MessageReader, Status
from ...protocol.http2 import Fields, Stream
from ..access import Need
from ..config import MAX_NAMED_CHARS
from ..pops.requests import PopClient
from ..sessions.grpc_stats import GrpcClientStats
from ..tls import ClientTransport
from .schema import OK_TEXT, Code

Needs = Callable[[Any], list[Need]]


class Method(NamedTuple):
    """A gRPC method that the broker serves.

    Attributes:
        needs: Returns the permissions that a request needs.
        is_stream: True if the response may have several messages.
        is_open: True if the client may send several messages; each is handled when it arrives.
    """

    name: str
    request: Any
    response: Any
    handler: Callable[..., Any]
    needs: Needs
    is_stream: bool = False
    is_open: bool = False


class ResponseWriter(Protocol):
    """The HTTP/2 side of a response."""

    def send_headers(self, stream: Stream, block: bytes) -> None: ...

    def send_data(self, stream: Stream, data: bytes) -> None: ...

    def send_end(self, stream: Stream, block: bytes) -> None: ...


class GrpcCall:
    """A gRPC call of a client: its metadata, its deadline, and the response.

    Attributes:
        account: The access key that the call was authenticated with; empty without one.
        session: The client's connection.
        due_s: The client's deadline by the broker's monotonic clock, in seconds; None without one.
        answers: Writes the response. The test kit may replace it.
        callers: Counts responses for the metrics, and records failed calls and outdated clients for `doctor`.
        namespace: The resource namespace of the topics in messages for the client.
        keep_answered: Registers a function for `on_given_up`.
    """

    __slots__ = (
        "_aborted",
        "_has_begun",
        "account",
        "answers",
        "callers",
        "due_s",
        "flush_soon",
        "has_request",
        "keep_answered",
        "method",
        "namespace",
        "reader",
        "session",
        "stream",
    )

    def __init__(
        self,
        session: ClientTransport,
        stream: Stream,
        method: Method,
        due_s: float | None,
        answers: ResponseWriter,
        flush_soon: Callable[[], None],
        callers: GrpcClientStats,
        keep_answered: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self.keep_answered = keep_answered
        self.session = session
        self.stream = stream
        self.method = method
        self.reader = MessageReader()
        self.due_s = due_s
        self.account = self.namespace = ""
        self._aborted: Callable[[], None] | None = None
        self.has_request = False
        self._has_begun = False
        self.answers = answers
        self.callers = callers
        self.flush_soon = flush_soon

    @property
    def fields(self) -> Fields:
        return self.stream.fields

    @property
    def is_over(self) -> bool:
        return self.stream.is_answer_ended

    def text(self, name: bytes) -> str:
        """Return a request header; empty if it is missing."""
        value = self.stream.fields.get(name)
        return "" if value is None else value.decode("utf-8", "replace")

    @property
    def client_id(self) -> str:
        return self.text(b"x-mq-client-id")

    @property
    def client(self) -> PopClient:
        """The key of the calling client in the pop pools."""
        client_id = self.client_id
        return PopClient(client_id, account_id=(self.account, client_id))

    def answer(self, response: Any) -> None:
        """Send the only message of a response, and end it."""
        self.send(response)
        self.end()

    def refuse(self, code: int, reason: str) -> None:
        """Send a response that has only a status."""
        response = self.method.response()
        set_status(response.status, code, reason)
        self.answer(response)

    def charging(self, work: Work[None], size: Callable[[], int]) -> Work[None]:
        """Do the work of a request. The memory that it needs is charged to the connection until it has ended or is dropped.

        Args:
            size: Returns the size in bytes, which may grow with each piece.
        """
        charged_bytes = size()
        self.session.charge(charged_bytes)
        try:
            for _ in work:
                more = size() - charged_bytes
                charged_bytes += more
                self.session.charge(more)
                yield
        finally:
            self.session.charge(-charged_bytes)

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.answers.send_headers(self.stream, grpc.HEAD)
            self.flush_soon()

    def send(self, message: Any) -> None:
        if not self._has_begun:  # the first message carries the status
            self._count(message.status)
        self.begin()
        self.answers.send_data(self.stream, grpc.encode_message(message.SerializeToString()))
        self.flush_soon()

    def _count(self, status: Any) -> None:
        client = f"{self.client_id[:MAX_NAMED_CHARS]} ({self.session.peer})"
        self.callers.answered(self.method.name, status.code, status.message, client)

    def answering(self, status: Any, parts: list[bytes]) -> Work[None]:
        """Send the only message of a response in parts. The parts are encoded messages, which protobuf merges into one."""
        self._count(status)
        self.begin()
        self.answers.send_data(self.stream, grpc.message_head(sum(map(len, parts))))
        for part in parts:
            if self.is_over:
                return
            self.answers.send_data(self.stream, part)
            self.flush_soon()
            yield
        self.end()

    def on_abort(self, action: Callable[[], None]) -> None:
        """Call `action` if the client cancels the call, or the connection is lost, before the response has ended. Only the
        last `action` is called."""
        self._aborted = action

    def on_given_up(self, action: Callable[[], None]) -> None:
        """Call `action` if the client cancels the call after its response was written, unless KEPT_RECEIVES later responses
        were registered since. The loss of the connection does not call it."""
        self.keep_answered(self.stream.id, action)

    def is_late(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def abort(self) -> None:
        if self._aborted is not None:
            self._aborted()

    def end(self, status: int = Status.OK, reason: str = "") -> None:
        if not self._has_begun:
            self.callers.ended(self.method.name, int(status))
        block = grpc.trailers(status, reason) if self._has_begun else grpc.only_trailers(status, reason)
        self._has_begun = True
        self.answers.send_end(self.stream, block)
        self.flush_soon()


def set_status(status: Any, code: int = Code.OK, reason: str = OK_TEXT) -> None:
    status.code = code
    status.message = reason
