"""The broken promises of a simulated run."""

from __future__ import annotations

import asyncio
from typing import Any


class Violation(AssertionError):
    """An invariant does not hold."""


_raised: list[Violation] = []


def raise_later(violation: Violation) -> None:
    """Callbacks of clients and brokers swallow exceptions; the world raises them."""
    _raised.append(violation)


def check_raised() -> None:
    """Raises the first one."""
    if _raised:
        raise _raised[0]


def forget_raised() -> None:
    _raised.clear()


def note_raised(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For a loop that only logs what a callback raises. Exceptions of tasks are told to those that ask for them."""
    if "exception" in context and {"future", "task"}.isdisjoint(context):
        raise_later(Violation(f"a callback raised {context['exception']!r}"))
