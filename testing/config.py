"""Limits and intervals of the test kit."""

from __future__ import annotations

from typing import Final

WAIT_S: Final = 60.0  # default timeout of a wait in a test, far above what any wait takes
POLL_INTERVAL_S: Final = 0.002  # interval at which a condition is polled
KEPT_REQUESTS: Final = 10_000  # newest requests of clients that are kept

# The clock

MAX_ADVANCE_S: Final = 366 * 86_400.0  # maximum advance of the clock by one call
FINE_S: Final = 5.0  # step of an advance while a client is frozen, shorter than any lease, so that others stay members
FINE_FOR_S: Final = 3600.0  # the part of an advance that has such steps: by then a frozen client's leases have expired
COARSE_S: Final = 60.0  # minimum size of the other steps, in each of which periodic work runs once
MAX_COARSE_STEPS: Final = 1440  # maximum such steps of one advance, unless more messages become due; they take 0.15 s

# Faults

MAX_DELAY_S: Final = 31_536_000.0  # maximum delay of a response, which is a year

# The control interface

MAX_BODY_BYTES: Final = 1024 * 1024  # maximum body of a call to the control interface
MAX_WAIT_S: Final = 600.0  # maximum timeout of one `wait-for`
STOP_S: Final = 1  # time that waiting calls may take when the control interface closes
ANSWER_S: Final = 120.0  # time that a test waits for a response of its broker in another thread or process
