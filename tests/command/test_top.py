"""The columns of `rocketlet top`."""

from __future__ import annotations

import pytest
from rocketlet.command.tools.top import _caught_up


@pytest.mark.parametrize(
    ("lag", "out_per_s", "gains_per_s", "told"),
    [
        (0, 0, 0, "now"),
        (50, 10, 0, "now"),  # messages under way
        (51, 10, 0, "never, at this rate"),
        (1, 0, 0, "never, at this rate"),
        (120, 10, 2, "1 min 0 s"),
        (7200, 10, 1, "2 h 0 min"),
    ],
)
def test_a_group_has_caught_up_when_it_reads_what_is_left_in_a_moment(
    lag: int, out_per_s: int, gains_per_s: float, told: str
) -> None:
    assert _caught_up(lag, out_per_s, gains_per_s) == told
