"""Mistakes that change nothing that anybody could see, or only what costs: why each may survive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ._operators import Mutant

REASONS: Final[dict[tuple[str, str], str]] = {
    ("Commits.__init__", "1 in `self._looks = 0`"): "looks are only compared with each other",
    ("ConsumerGroup.sees_others", "without `self._seen_counts.clear()`"): "found anew with the queues that are seen",
    (
        "Moves._finding_of",
        "without `self._is_finding = True`",
    ): "several topics at a time take more memory for a moment",
    (
        "Moves._finding_of",
        "False in `self._is_finding = True`",
    ): "several topics at a time take more memory for a moment",
    ("StickyShares.__init__", "1 in `self._count = 0`"): "it is counted before anybody has a share",
    ("StickyShares.__init__", "without `self._count = 0`"): "it is counted before anybody has a share",
    ("Notifications.tell", "`len(told) > SLICE` with GtE"): "a turn in which nobody is left to be told",
}
"""By the function and the mistake in words, which both survive a move of the lines."""


def reason_of(mutant: Mutant) -> str:
    """Empty if there is none."""
    return REASONS.get((mutant.function, mutant.what), "")


def stale(mutants: Iterable[Mutant]) -> list[str]:
    """The reasons of mistakes that are not there."""
    there = {(mutant.function, mutant.what) for mutant in mutants}
    return [f"{function}: {what}" for function, what in REASONS if (function, what) not in there]
