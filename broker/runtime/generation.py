"""The number by which cached checks are invalidated."""

from __future__ import annotations

import itertools

# The checks of a request depend on topics, groups and their members, permissions, leases and drains. A change of these that
# may refuse a request that has passed increments the generation. A passed check is valid for the same request until the
# generation differs from the one that was read before the check. Results that depend on the current time are not cached.


class Generation:
    """The number. Call `increment` after such a change; any thread may call it."""

    __slots__ = ("_numbers", "number")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.number = 0

    def increment(self) -> None:
        self.number = next(self._numbers)
