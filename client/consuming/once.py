"""`once=`: the layer around a handler that skips messages whose ids a store of the application's database has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ..errors import ConfigError, get_logger
from ..message import Message
from .handling import Middleware, Outcome

log = get_logger("rocketlet.once")


class HandledIds(Protocol):
    """A store of the ids of messages that were handled, such as a table with a unique column."""

    def once(self, message_id: str, /) -> AbstractAsyncContextManager[bool]:
        """Return a context manager that is entered with True if the id is new, and with False if the store has it.

        At the end of the block, a new id must be stored, unless the block raises. If the handler uses the same transaction
        for its effect, effect and id are stored together, or neither is.
        """
        ...


class _NotHandled(Exception):
    """Ends the block of a message that is retried or rejected, so that its id is not stored."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def layer(store: HandledIds) -> Middleware:
    async def once(message: Message, call: Callable[[Any], Awaitable[Outcome]]) -> Outcome:
        try:
            async with store.once(message.message_id) as is_new:
                if not is_new:
                    log.info(
                        "message_skipped", message=message.message_id, hint="its id is in the store of handled ids"
                    )
                    return None
                outcome = await call(message)
                if outcome is not None:
                    raise _NotHandled(outcome)
        except _NotHandled as ended:
            return ended.outcome
        return None

    return once


def check_store(name: str, store: Any) -> None:
    if store is not None and not callable(getattr(store, "once", None)):
        raise ConfigError(f"{name}: {store!r} has no method `once`; give an object with `once(message_id)`")
