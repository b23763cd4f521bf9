"""The broken promises of a simulated run."""

from __future__ import annotations


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
