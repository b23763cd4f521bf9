"""Every limit and interval of the test kit."""

from __future__ import annotations

from typing import Final

WAIT_S: Final = 60.0  # how long a wait of a test may take, unless it says otherwise; far from what any takes
LOOK_S: Final = 0.002  # between two looks whether a condition holds
KEPT_REQUESTS: Final = 10_000  # the newest requests of clients that are kept

# The clock

MAX_ADVANCE_S: Final = 366 * 86_400.0  # one jump
FINE_S: Final = 5.0  # a step: less than any lease, so that a member that is kept alive never looks late
FINE_FOR_S: Final = 3600.0  # steps are larger after this: by then every frozen lease and member is gone
COARSE_S: Final = 60.0  # a larger step: sweeps run once in it when nobody's lease can end
MAX_COARSE_STEPS: Final = (
    1440  # steps of one jump: 0.15 s in which the broker answers nobody; steps are longer from a day on
)

# Faults

MAX_DELAY_S: Final = 31_536_000.0  # a late answer: a year

# The control interface

MAX_BODY_BYTES: Final = 1024 * 1024  # the body of one call
MAX_WAIT_S: Final = 600.0  # for one `wait-for`
STOP_S: Final = 1  # how long calls that still wait may take when it closes
ANSWER_S: Final = 120.0  # how long a test waits for its broker's answer, in another thread or process
