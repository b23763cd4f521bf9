"""A Consumer that is asked for messages, instead of giving them to a handler."""

from __future__ import annotations

from collections.abc import Awaitable

from .any_consumer import AnyConsumer
from .consuming.deliveries import Batches, Deliveries, Messages
from .consuming.handling import Reject, RetryLater, check_has_level
from .errors import ConfigError
from .lifecycle import Stage
from .message import Message


class Receiver(AnyConsumer):
    """A Consumer's methods when it has no handler: iteration, and messages one by one that are settled by hand."""

    _takes_batches: bool
    _has_handler: bool
    _deliveries: Deliveries | None = None  # once a consumer without a handler has started
    _messages: Messages | None = None

    def __aiter__(self) -> Messages:
        """Messages one by one. A message is acknowledged when you ask for the next, unless `retry` or `reject` was called for
        it. If you leave the loop by `break` or an exception, the last one is delivered again."""
        return Messages(self._handed_out())

    def __anext__(self) -> Awaitable[Message]:
        """The next message, as in an iteration that lasts as long as the consumer. A wait that is cancelled loses nothing."""
        if self._messages is None:
            self._messages = Messages(self._handed_out())
        return self._messages.__anext__()

    def batches(self) -> Batches:
        """Lists of up to `batch_size` messages of one queue. A list is acknowledged when you ask for the next."""
        return Batches(self._handed_out())

    async def receive(self, *, timeout_s: float | None = None) -> Message:
        """The next message. Settle it by `ack`, `retry` or `reject`; any number may be unsettled at a time.

        Raises TimeoutError, and ConfigError if the consumer has a handler or a batch_size, or does not run.
        """
        deliveries = self._handed_out()
        if self._takes_batches:
            raise ConfigError("receive: this consumer has a batch_size; iterate over batches()")
        hand = await self._taken(deliveries.take(), timeout_s)
        return deliveries.hold(hand, is_received=True)

    async def ack(self, message: Message) -> None:
        """Acknowledges a message that was received, or that an iteration is at. Raises ConfigError for any other."""
        self._handed_out().acknowledge(message)

    async def retry(self, message: Message, outcome: RetryLater = RetryLater()) -> None:  # noqa: B008 (it is frozen)
        """Delivers a message again later, as a handler's RetryLater: `retry(message, RetryLater(delay_level=3))`. Raises
        ConfigError, and RocketletError if the broker does not take it; you can then settle it once more."""
        check_has_level(outcome)
        await self._handed_out().retry(message, outcome)

    async def reject(self, message: Message, *, reason: str = "") -> None:
        """Gives a message up, as a handler's Reject. Raises as `retry` does."""
        await self._handed_out().reject(message, Reject(reason))

    def is_in_hand(self, message: Message) -> bool:
        """Whether a message was received or iterated to, and is not settled yet."""
        return self._deliveries is not None and self._deliveries.is_held(message)

    def forsake(self, message: Message | None = None) -> None:
        """Gives back this message, or all in hand, to be delivered again: their holders work on them no more."""
        if self._deliveries is not None:
            self._deliveries.forsake(message)

    def _handed_out(self) -> Deliveries:
        if self._deliveries is None:
            reason = self._idle_reason
            if self._has_handler and self._stage is not Stage.FAILED:
                reason = "has a handler, which gets its messages; make one without to ask for messages"
            raise ConfigError(f"this consumer {reason}")
        return self._deliveries
