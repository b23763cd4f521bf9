"""Whom the command asks, and its limits and intervals, above all of `rocketlet start --brokers N`."""

from __future__ import annotations

from typing import Final

NAME_SERVER: Final = "127.0.0.1:9876"
NAME_SERVER_VARIABLE: Final = "ROCKETLET_NAMESERVER"
# That no server has as an option; with ROCKETLET_ before them.
OTHER_VARIABLES: Final = frozenset(
    "ACCESS_KEY SECRET_KEY NEW_SECRET_KEY CONTROL CONFIG FROM_ACCESS_KEY FROM_SECRET_KEY TO_ACCESS_KEY TO_SECRET_KEY".split()
)

MAX_LOCAL_BROKERS: Final = 26  # brokers of `--brokers`: a to z
PORT_STEP: Final = 3  # from one broker's port to the next: each also has the one of its VIP channel, two below
# how long a broker that died rests before it is started again; doubled each time that it dies soon
RESTART_DELAY_S: Final = 0.1
MAX_RESTART_DELAY_S: Final = 10.0  # the longest pause before that
STEADY_S: Final = 60.0  # a broker that was ready for so long did not die soon
STOP_S: Final = 25.0  # how long a broker may take to stop, before it is killed, or ends without having saved
SUPERVISOR_STOP_S: Final = 35.0  # the same for a process whose brokers have so long

REPEAT_INTERVAL_S: Final = 60.0  # between two lines of the log that are alike
REPEATS_KNOWN: Final = 1_000  # lines that are remembered for that

MAX_INFLATED_BYTES: Final = 1024 * 1024  # a compressed body that is printed as JSON; 200 characters for people
MAX_INFLATED_OF_FRAME: Final = 16 * 1024 * 1024  # all compressed bodies in one frame that `rocketlet dump` shows

TOP_INTERVAL_S: Final = 2.0  # between two looks of `rocketlet top`
MAX_TOP_ROWS: Final = 30  # topics that `rocketlet top` shows, and groups

MAX_BENCH_SECONDS: Final = 600.0  # the longest `rocketlet bench`
MIN_BENCH_BYTES: Final = 8  # a body begins with the time at which it was sent
MAX_BENCH_BYTES: Final = 4 * 1024 * 1024 - 1024  # brokers take no larger body
MAX_BENCH_QUEUES: Final = 1024  # queues of its topic
MAX_BENCH_IN_FLIGHT: Final = 4096  # sends of it that are not answered
BENCH_DRAIN_S: Final = 30.0  # messages that have not arrived so long after the last send are reported as missing
