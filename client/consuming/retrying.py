"""A retry policy: which exceptions of a handler are tried again, how often, and after which times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..arguments import check_count, check_delay
from ..config import RETRY_DELAYS_S
from ..errors import ConfigError
from ..message import Message
from .handling import Outcome, Reject, RetryLater
from .reasons import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`Consumer(..., retry=RetryPolicy(attempts=4, delays_s=(1, 30, 600), on=(ConnectionError, TimeoutError)))`

    - `attempts`: how often a message is handled at most, the first time included; then it is a dead letter.
    - `delays_s`: before the second try, the third, and so on; the last one is for all that follow. A SharedConsumer takes
      any times up to 12 hours, a Consumer the 18 that brokers know: 1, 5, 10, 30 s, 1 to 10, 20, 30 min, 1 and 2 h.
      Default: longer each time, from 10 s on.
    - `on`: the exceptions that are tried again; any other makes a dead letter at once, with its text. Default: all.
    - `never`: exceptions that are not, though `on` has them.

    A handler's return value goes before the policy. In order, `suspend_queue_s` is the time between two tries.
    """

    attempts: int = 17
    delays_s: Sequence[float] = ()
    on: tuple[type[Exception], ...] = (Exception,)
    never: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts, 1)
        if not isinstance(self.delays_s, Sequence) or isinstance(self.delays_s, str):
            raise ConfigError(f"delays_s: {self.delays_s!r} is not a tuple of seconds, such as (1, 30, 600)")
        for delay in self.delays_s:
            check_delay(delay, "delays_s")
        if len(self.delays_s) >= self.attempts:
            raise ConfigError(
                f"delays_s: {len(self.delays_s)} delays are more than {self.attempts} attempts have between them"
            )
        for name in ("on", "never"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(isinstance(item, type) for item in kinds):
                raise ConfigError(f"{name}: {kinds!r} is not a tuple of exceptions, such as (ConnectionError,)")

    def outcome_by_level(self, messages: Sequence[Message], error: BaseException) -> Outcome:
        """Decides about a Consumer's messages whose handler raised."""
        found = self.outcome(max(messages, key=lambda message: message.reconsume_times), error)
        if isinstance(found, RetryLater) and found.delay is not None:
            return RetryLater(delay_level=RETRY_DELAYS_S.index(found.delay) + 1, reason=found.reason)
        return found

    def outcome(self, message: Message, error: BaseException) -> Outcome:
        """Decides about a message whose handler raised."""
        reason = reason_of(error)
        if isinstance(error, Exception) and (not isinstance(error, self.on) or isinstance(error, self.never)):
            return Reject(reason)
        if not self.delays_s:
            return RetryLater(reason=reason)
        return RetryLater(reason=reason, delay=self.delays_s[min(message.reconsume_times, len(self.delays_s) - 1)])


def check_levels(name: str, policy: RetryPolicy) -> None:
    """Raises ConfigError for delays that only a SharedConsumer can keep."""
    odd = [delay for delay in policy.delays_s if delay not in RETRY_DELAYS_S]
    if odd:
        known = ", ".join(map(str, RETRY_DELAYS_S))
        raise ConfigError(f"{name}: delays_s: brokers do not know {odd[0]!r} s for a Consumer; there are {known}")


__all__ = ["RetryPolicy", "check_levels"]
