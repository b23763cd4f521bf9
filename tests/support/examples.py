"""How many examples a Hypothesis test gets that is too slow for 100."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return the number of examples: `count` usually, and 20 times as many with `--hypothesis-profile search`."""
    return count * settings.default.max_examples // 100  # type: ignore[union-attr]
