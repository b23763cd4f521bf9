"""The default name server, and limits and intervals of the command, mainly of `rocketlet start --brokers N`."""

from __future__ import annotations

from typing import Final

NAME_SERVER: Final = "127.0.0.1:9876"
NAME_SERVER_VARIABLE: Final = "ROCKETLET_NAMESERVER"
# Environment variables (without ROCKETLET_) that no option of a server has.
OTHER_VARIABLES: Final = frozenset(
    "ACCESS_KEY SECRET_KEY NEW_SECRET_KEY CONTROL CONFIG FROM_ACCESS_KEY FROM_SECRET_KEY TO_ACCESS_KEY TO_SECRET_KEY".split()
)

MAX_LOCAL_BROKERS: Final = 26  # brokers of `--brokers`: a to z
PORT_STEP: Final = 3  # from one broker's port to the next: each also has the one of its VIP channel, two below
RESTART_DELAY_S: Final = (
    0.1  # pause before a broker process that died is restarted, doubled each time that it dies soon
)
MAX_RESTART_DELAY_S: Final = 10.0  # maximum pause before such a restart
STEADY_S: Final = 60.0  # a broker that was ready for this long has not died soon
STOP_S: Final = 25.0  # time that a broker may take to stop before it is killed
SUPERVISOR_STOP_S: Final = 35.0  # time that a process with several brokers may take to stop

REPEAT_INTERVAL_S: Final = 60.0  # minimum interval of equal log lines
REPEATS_KNOWN: Final = 1_000  # log lines that are remembered, so that they are not repeated

MAX_INFLATED_BYTES: Final = (
    1024 * 1024
)  # compressed body that is printed as JSON; for people, 200 characters are printed
MAX_INFLATED_OF_FRAME: Final = 16 * 1024 * 1024  # decompressed bodies of one frame that `rocketlet dump` prints

TOP_INTERVAL_S: Final = 2.0  # interval at which `rocketlet top` refreshes
MAX_TOP_ROWS: Final = 30  # topics that `rocketlet top` shows, and groups

MAX_BENCH_SECONDS: Final = 600.0  # maximum duration of `rocketlet bench`
MIN_BENCH_BYTES: Final = 8  # minimum body of `rocketlet bench`, which starts with the time of the send
MAX_BENCH_BYTES: Final = 4 * 1024 * 1024 - 1024  # maximum body of `rocketlet bench`, because brokers refuse larger ones
MAX_BENCH_QUEUES: Final = 1024  # queues of the topic of `rocketlet bench`
MAX_BENCH_IN_FLIGHT: Final = 4096  # unanswered sends of `rocketlet bench`
BENCH_DRAIN_S: Final = (
    30.0  # messages that are not received within this time after the last send are reported as missing
)
