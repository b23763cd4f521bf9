"""A client, whichever door it came in by.

State keeps sessions as the identity of members, owners, readers and waiters. It charges them for its memory, and tells and
asks them in values (`events`). A door writes those, and decides what a session is: a connection of the remoting protocol,
or a client id over several HTTP/2 connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .events import Event, Question


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


class Session(Protocol):
    """Hashable by identity. Its charges count against `--memory` until it is gone.

    `known` belongs to the check of accounts. `held_pulls` is how many of its pulls wait.
    """

    held_pulls: int

    @property
    def number(self) -> int:
        """Rises with each session."""
        ...

    @property
    def peer(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def born_host(self) -> bytes:
        """The peer's address in the form of a message's record."""
        ...

    @property
    def known(self) -> object: ...

    @known.setter
    def known(self, known: object) -> None: ...

    @property
    def is_left(self) -> bool:
        """Whether the client has ended the session itself; only counts once it is gone."""
        ...

    @property
    def is_external(self) -> bool:
        """Whether it came by the port for clients outside of the brokers' network."""
        ...

    @property
    def address(self) -> str:
        """The client's, without the port."""
        ...

    @property
    def reached(self) -> str:
        """The address of ours that the client has connected to, as `host:port`; empty once it is gone."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether it is gone, or will be at once: events for it are lost."""
        ...

    def tell(self, event: Event) -> None:
        """Tells it something that needs no answer; does nothing if it is closed."""
        ...

    def ask(self, number: int, question: Question) -> None:
        """Asks it something. The door gives the answer to `Clients.answer` under the same number."""
        ...

    def charge(self, size: int) -> None:
        """State keeps so many bytes more, or less, for this client."""
        ...

    def is_news(self, event: str) -> bool:
        """Whether the log does not have this event of the client's address yet; it counts as logged then."""
        ...

    def when_read(self, action: Callable[[], None]) -> None:
        """Calls `action`, which answers, as soon as the client reads."""
        ...

    def on_lost(self, action: Callable[[Session], None]) -> None:
        """Calls `action(session)` once when it is gone."""
        ...

    def close(self) -> None:
        """Ends it when all that was written is sent."""
        ...

    def abort(self) -> None:
        """Ends it at once."""
        ...
