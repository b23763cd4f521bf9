"""The parts that the adapters of task queues share: tasks that are due late, and the reason of a failed task."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from ..client.errors import BrokerRefused
from ..client.message import SendResult
from ..protocol.codes import ResponseCode

MAX_DELAY: Final = timedelta(days=39)  # below the 40 days of Rocketlet's brokers, because clocks differ
MAX_FOREIGN_DELAY: Final = timedelta(
    days=3
)  # the limit of Apache's brokers, used once a broker has refused a longer delay
EARLY: Final = timedelta(seconds=1)  # a task that arrives earlier before its time is delayed again

_PLACE: Final = re.compile(r'File "(?:.*/)?([^/"]+)", line (\d+), in (\S+)')  # a line of a traceback


class DelayLimit:
    """The longest delay that the brokers accept. A task that is due later arrives at the limit, and is delayed again."""

    def __init__(self) -> None:
        self.longest = MAX_DELAY

    def send(self, send: Callable[[datetime | None], SendResult], due: datetime | None) -> None:
        """Call `send` with the time of delivery of a task; None for immediately. If a broker refuses it because the delay is
        too long, use the limit of Apache's brokers from now on. Raises what `send` raises."""
        now = datetime.now(UTC)
        try:
            send(due and min(due, now + self.longest))
        except BrokerRefused as error:
            if due is None or error.code != ResponseCode.MESSAGE_ILLEGAL or due - now <= MAX_FOREIGN_DELAY:
                raise
            send(now + MAX_FOREIGN_DELAY)
            self.longest = MAX_FOREIGN_DELAY


def is_early(due: datetime | None) -> bool:
    """Return True for a task that has arrived at the limit, and is due later."""
    return due is not None and due - datetime.now(UTC) > EARLY


def reason_of(error: BaseException, text: str, traceback: str) -> str:
    """Return the kind and text of an exception and the places of its traceback, the innermost first, in one line for a
    dead letter."""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    places = [f"{name}:{line} in {function}" for name, line, function in _PLACE.findall(traceback)]
    return "; ".join((text, *reversed(places)))


__all__ = ["DelayLimit", "is_early", "reason_of"]
