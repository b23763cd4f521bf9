"""Handlers that get a body's content in place of the message.

A body that cannot be decoded now cannot be decoded the next time, either: its message is rejected with the reason, and is not
tried again. In a batch that message alone is rejected; the handler gets the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..arguments import takes_message
from ..config import DEAD_LETTER_LEVEL
from ..log import get_logger
from ..message import Message
from .calling import Called
from .handling import Outcome, Reject, SendBack
from .reasons import reason_of

log = get_logger("rocketlet.handler")

Value = TypeVar("Value")
Result = Awaitable[Outcome] | Outcome
Decode = Callable[[bytes], Value]
ValueHandler = Callable[[Value], Result] | Callable[[Value, Message], Result]
ValuesHandler = Callable[[list[Value]], Result] | Callable[[list[Value], list[Message]], Result]


class _Undecodable(Exception):
    """The text says why."""


class Decoding:
    """`send_back(message, delay_level, reason)` hands a message of a batch to the broker; one alone is its consumer's."""

    def __init__(self, decode: Decode[Any], handler: Callable[..., Any], send_back: SendBack | None = None) -> None:
        self._decode = decode
        self._with_message = takes_message(handler)
        self._send_back = send_back

    def around(self, call: Callable[..., Awaitable[Any]]) -> Called:
        """Calls `call` with the content of the bodies."""

        async def decoded(argument: Message | list[Message]) -> Any:
            if isinstance(argument, Message):
                try:
                    value: Any = self._decoded(argument)
                except _Undecodable as error:
                    return Reject(str(error))
            else:
                value, argument = await self._all_decoded(argument)
                if not argument:
                    return None
            return await (call(value, argument) if self._with_message else call(value))

        return decoded

    async def _all_decoded(self, messages: list[Message]) -> tuple[list[Any], list[Message]]:
        """Those that can be. Raises RocketletError if the broker does not take one of the others."""
        values: list[Any] = []
        kept: list[Message] = []
        for message in messages:
            if message.is_given_up:  # by a try before this one
                continue
            try:
                values.append(self._decoded(message))
            except _Undecodable as error:
                assert self._send_back is not None
                await self._send_back(message, DEAD_LETTER_LEVEL, str(error))
                message.is_given_up = True
            else:
                kept.append(message)
        return values, kept

    def _decoded(self, message: Message) -> Any:
        try:
            return self._decode(message.body)
        except Exception as error:
            reason = f"the body cannot be decoded: {reason_of(error)}"
            log.error(
                "message_undecodable", queue=str(message.queue), offset=message.queue_offset, reason=reason,
                hint="it is a dead letter",
            )  # fmt: skip
            raise _Undecodable(reason) from error


__all__ = ["Decode", "Decoding", "Value", "ValueHandler", "ValuesHandler"]
