"""A connected client as the state sees it, whether it connected by remoting or by gRPC.

Groups, leases and waiting pulls keep a session as the identity of a member, owner or reader. These parts charge
memory to the session, and send it events and requests as values, which the protocol servers encode. A session is a
connection of the remoting protocol, a gRPC client id, which may have several HTTP/2 connections, or the broker's
stand-in for clients that pop (`pops/division.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .events import ClientRequest, SessionEvent


class Session(Protocol):
    """A client, hashable by identity. The session's charges count against `--memory` until they are released or the session
    is gone.

    Attributes:
        known: The result of authentication, which `access` keeps here.
        held_pulls: The number of its pulls that wait for messages.
    """

    held_pulls: int

    @property
    def number(self) -> int:
        """The number of the session; later sessions have greater numbers."""
        ...

    @property
    def peer(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def born_host(self) -> bytes:
        """The peer's address as a record has it."""
        ...

    @property
    def authentication(self) -> object: ...

    @authentication.setter
    def authentication(self, authentication: object) -> None: ...

    @property
    def was_closed_by_client(self) -> bool:
        """True unless the broker has closed the connection or the client became unreachable; always True for gRPC
        clients. Only valid once the session is gone."""
        ...

    @property
    def is_external(self) -> bool:
        """True if the client connected to the port for clients outside of the brokers' network."""
        ...

    @property
    def address(self) -> str: ...

    @property
    def reached(self) -> str:
        """The broker's address that the client connected to, as `host:port`; empty if it is unknown, which it may be once the
        session is gone."""
        ...

    @property
    def is_closed(self) -> bool:
        """True if the session is gone or closing, so that events for it are lost."""
        ...

    def send_event(self, event: SessionEvent) -> None:
        """Send an event, which has no response. Ignored if the session is closed, or its protocol has no such event."""
        ...

    def send_request(self, number: int, request: ClientRequest) -> None:
        """Send a request. The protocol server passes the response, if there is one, to `ClientRequests.answer` with this
        number."""
        ...

    def charge(self, size: int) -> None:
        """Add to the memory that the broker keeps for this client, in bytes; negative to release some."""
        ...

    def is_news(self, event: str) -> bool:
        """Return True if this event is to be logged for the client's address (`Reports`). The event then counts as logged."""
        ...

    def when_read(self, action: Callable[[], None]) -> None:
        """Call `action`, which writes a response: immediately, unless the client does not read its responses. Then call it
        once the client reads again, or never if the session is gone before."""
        ...

    def on_lost(self, action: Callable[[Session], None]) -> None:
        """Call `action(session)` once when the session is gone."""
        ...

    def close(self) -> None:
        """Close the client's connection when everything written has been sent."""
        ...

    def abort(self) -> None:
        """Close the client's connection immediately."""
        ...
