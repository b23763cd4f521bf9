"""The default name server, and limits and intervals of the command, mainly of `rocketlet start --brokers N`."""

from __future__ import annotations

from typing import Final

NAME_SERVER: Final = "127.0.0.1:9876"
NAME_SERVER_VARIABLE: Final = "ROCKETLET_NAMESERVER"
# Environment variables (without ROCKETLET_) that are not options of a server.
OTHER_VARIABLES: Final = frozenset(
    "ACCESS_KEY SECRET_KEY NEW_SECRET_KEY CONTROL CONFIG FROM_ACCESS_KEY FROM_SECRET_KEY TO_ACCESS_KEY TO_SECRET_KEY".split()
)

MAX_LOCAL_BROKERS: Final = 26  # maximum brokers of `--brokers`, which are called a to z
PORT_STEP: Final = 3  # distance between the ports of consecutive brokers, whose VIP channels are two below
RESTART_DELAY_S: Final = (
    0.1  # pause before a broker process that ended soon is restarted, doubled each time that it ends soon again
)
MAX_RESTART_DELAY_S: Final = 10.0  # maximum pause before such a restart
STEADY_S: Final = 60.0  # a broker that was ready for this long has not ended soon: it is restarted without a pause
STOP_S: Final = 25.0  # time that a broker may take to stop before it is killed
SUPERVISOR_STOP_S: Final = 35.0  # time that a process with several brokers may take to stop

REPEAT_INTERVAL_S: Final = 60.0  # minimum interval of equal warnings or errors in the log
REPEATS_KNOWN: Final = 1_000  # warnings and errors that are remembered to drop equal ones

MAX_INFLATED_BYTES: Final = (
    1024 * 1024
)  # decompressed bytes of a compressed body that are printed as JSON; without --json, 200 characters are printed
MAX_INFLATED_OF_FRAME: Final = 16 * 1024 * 1024  # decompressed text of one frame that `rocketlet dump --json` prints

TOP_INTERVAL_S: Final = 2.0  # interval at which `rocketlet top` refreshes
MAX_TOP_ROWS: Final = 30  # maximum topics that `rocketlet top` shows, and maximum groups

MAX_BENCH_SECONDS: Final = 600.0  # maximum duration of `rocketlet bench`
MIN_BENCH_BYTES: Final = 8  # minimum body of `rocketlet bench`, which starts with the time of the send
MAX_BENCH_BYTES: Final = 4 * 1024 * 1024 - 1024  # maximum body of `rocketlet bench`; brokers refuse 4 MiB by default
MAX_BENCH_QUEUES: Final = 1024  # maximum queues of the topic of `rocketlet bench` on each broker
MAX_BENCH_IN_FLIGHT: Final = 4096  # maximum concurrent sends of `rocketlet bench`
BENCH_DRAIN_S: Final = (
    30.0  # messages that are not received within this time after the last send are reported as missing
)
