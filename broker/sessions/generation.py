"""The number by which a check that was passed once counts again.

The checks of a request look at topics, groups and their members, permissions, leases and drains. Every change of these raises
the number, which is made here alone. A check that has passed counts for the same request as long as the number is the one
that was read before the check began. Nothing that time alone changes may be kept so.
"""

from __future__ import annotations

import itertools


class Generation:
    """`number` is never the same again after a change. Call `rise` behind the change: a thread may make it."""

    __slots__ = ("_numbers", "number")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.number = 0

    def rise(self) -> None:
        self.number = next(self._numbers)
