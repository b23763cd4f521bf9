"""One call: its request, its client, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ...protocol import grpc
from ...protocol.grpc import MessageReader, Status
from ...protocol.http2.fields import Fields
from ...protocol.http2.flow import Stream
from ..access.needs import Need
from ..config import MAX_NAMED_CHARS
from ..listening.carrier import Carrier
from ..pops.values import PopClient
from ..sessions.callers import Callers
from .codes import OK_TEXT, Code

Needs = Callable[[Any], list[Need]]


class Method(NamedTuple):
    """`needs`: the permissions that a request needs. `is_stream`: its answer may be several messages. `is_open`: its
    requests may be several, too, and each is handled as it comes."""

    name: str
    request: Any
    response: Any
    handler: Callable[..., Any]
    needs: Needs
    is_stream: bool = False
    is_open: bool = False


class Way(Protocol):
    """Takes an answer to a client."""

    def send_headers(self, stream: Stream, block: bytes) -> None: ...

    def send_data(self, stream: Stream, data: bytes) -> None: ...

    def send_end(self, stream: Stream, block: bytes) -> None: ...


class Call:
    """`account`: the access key of the account that asks; empty without one. `session`: the client's connection. `aborted` is
    called if the call is over before it was answered; `due_s`: when its client gives up, in the loop's time. `answers`: the
    way to the client, in which the test kit may stand. `callers`: hears of answers."""

    __slots__ = (
        "_aborted",
        "_has_begun",
        "account",
        "answers",
        "callers",
        "due_s",
        "flush_soon",
        "has_request",
        "method",
        "reader",
        "session",
        "stream",
    )

    def __init__(
        self,
        session: Carrier,
        stream: Stream,
        method: Method,
        due_s: float | None,
        answers: Way,
        flush_soon: Callable[[], None],
        callers: Callers,
    ) -> None:
        self.session = session
        self.stream = stream
        self.method = method
        self.reader = MessageReader()
        self.due_s = due_s
        self.account = ""
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
        """A header field; empty without it."""
        value = self.stream.fields.get(name)
        return "" if value is None else value.decode("utf-8", "replace")

    @property
    def client_id(self) -> str:
        return self.text(b"x-mq-client-id")

    @property
    def client(self) -> PopClient:
        """The client whose call this is, as the shared state knows it."""
        client_id = self.client_id
        return PopClient(client_id, account_id=(self.account, client_id))

    def answer(self, response: Any) -> None:
        """The only message of an answer."""
        self.send(response)
        self.end()

    def refuse(self, code: int, reason: str) -> None:
        """An answer that has a status only."""
        response = self.method.response()
        set_status(response.status, code, reason)
        self.answer(response)

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.answers.send_headers(self.stream, grpc.HEAD)
            self.flush_soon()

    def send(self, message: Any) -> None:
        if not self._has_begun:  # its first message has the status
            status = message.status
            client = f"{self.client_id[:MAX_NAMED_CHARS]} ({self.session.peer})"
            self.callers.answered(self.method.name, status.code, status.message, client)
        self.begin()
        self.answers.send_data(self.stream, grpc.encode_message(message.SerializeToString()))
        self.flush_soon()

    def on_abort(self, action: Callable[[], None]) -> None:
        """Calls `action` if the client gives the call up."""
        self._aborted = action

    def abort(self) -> None:
        """The client has given the call up."""
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
