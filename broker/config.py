"""Every setting and limit of the broker and the name server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

REGION: Final = "DefaultRegion"
MAX_CONNECTIONS: Final = 10_000  # fewer if the process may not open as many files
MAX_OPEN_SEGMENTS: Final = 256  # files of the store open at a time; at most half of what the process may open
RESERVED_FILES: Final = 32  # neither connections nor segments: listening sockets, state files, name servers
MIN_OPEN_FILES: Final = 64
LISTEN_BACKLOG: Final = 1024
IDLE_LIMIT_S: Final = 120.0
HEARTBEAT_LIMIT_S: Final = 120.0
SWEEP_INTERVAL_S: Final = 10.0
PERSIST_INTERVAL_S: Final = 5.0
REGISTER_INTERVAL_S: Final = 30.0
REGISTER_TIMEOUT_S: Final = 6.0
REGISTER_LOOK_S: Final = 1.0  # between two looks whether a name server has hung up
MAX_PENDING_TOPICS: Final = (
    10_000  # changed topics that name servers are not told of yet; beyond, with the next interval
)
NOTIFY_DELAY_S: Final = 0.005  # changes of a group within this time make one notification
LOCK_LEASE_S: Final = 60.0  # Apache's, for orderly consumption
HANDOVER_LEASE_S: Final = 20.0  # Rocketlet members, who renew every 5 s
LEASE_SWEEP_S: Final = 1.0
STANDSTILL_S: Final = 1.0  # a broker that is this much later than its timers stood still: leases are prolonged by it
SAVE_LOCKS_DELAY_S: Final = 0.05
MAX_HOLD_S: Final = 60.0
MAX_HELD_PULLS: Final = 100_000
WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024  # a client that reads slower than this is not read from
MAX_TOPICS: Final = 50_000
MAX_QUEUES_PER_TOPIC: Final = 4096
MAX_RETRY_QUEUES: Final = 64  # of a group's retry topic
MAX_RETRY_TIMES: Final = 1_000_000
MAX_QUERY_ENTRIES: Final = 1024  # of a queue's index in one answer
MAX_RETAIN_HOURS: Final = 876_000.0  # a hundred years
MAX_TRANSACTION_TIMEOUT_S: Final = 86_400.0
MAX_KV_NAMESPACES: Final = 100
MAX_KV_KEYS: Final = 10_000
MAX_GROUPS: Final = 10_000
MAX_MEMBERS: Final = 10_000
VIP_DISTANCE: Final = 2
DRAIN_LIMIT_S: Final = 2.0  # how long a change of a group is kept from foreign members whose handlers run
ORPHAN_S: Final = 5.0  # how long nobody may read a queue before that is named
CLIENT_ANSWER_S: Final = 10.0  # how long the broker waits for a client that it asked something
MAX_QUERY_MESSAGES: Final = 64
SAMPLE_INTERVAL_S: Final = 10.0  # of the counters behind the rates
TRANSACTION_CHECK_MAX: Final = 15
TRANSACTION_SWEEP_S: Final = 60.0
TRANSACTION_TIMEOUT_S: Final = 6.0
HISTORY_EVENTS: Final = 10_000
HISTORY_GROUPS: Final = 1000
DRAIN_TIMEOUT_S: Final = 5.0
RETENTION_SWEEP_S: Final = 30.0

DELAY_LEVELS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
DELAY_DELIVERIES_AT_ONCE: Final = 500


class LimitExceeded(Exception):
    """More than a limit of this module allows. The text names what, and the limit."""


N = TypeVar("N", int, float)


def within(what: str, value: N, low: N, high: N) -> N:
    """The value, if it lies in the range. Raises LimitExceeded, for what is no number, too."""
    if not low <= value <= high:
        raise LimitExceeded(f"{what}: {value} is not between {low} and {high}")
    return value


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """A broker's settings. `address` is what clients are told to connect to, as `host:port`; `external_address` is what
    those are told that ask at a name server's external port."""

    data_dir: Path
    address: str
    external_address: str | None = None
    name: str = "broker-a"
    cluster: str = "DefaultCluster"
    name_servers: tuple[str, ...] = ()
    flush: Literal["os", "sync"] = "os"
    default_queues: int = 8
    auto_create_topics: bool = True
    auto_create_groups: bool = True
    permission: int = 6
    retain_hours: float = 72.0
    retain_bytes: int | None = None
    segment_bytes: int = 256 * 1024 * 1024
    delay_levels_ms: tuple[int, ...] = field(default=DELAY_LEVELS_MS)
    vip_channel: bool = True
    metrics_port: int | None = None
    transaction_sweep_s: float = TRANSACTION_SWEEP_S
    transaction_timeout_s: float = TRANSACTION_TIMEOUT_S
    transaction_check_max: int = TRANSACTION_CHECK_MAX


class LiveConfig:
    """The settings in force. UPDATE_BROKER_CONFIG replaces them while the broker runs, so who must follow keeps this."""

    __slots__ = ("changes", "now")

    def __init__(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes = 0

    def change(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes += 1
