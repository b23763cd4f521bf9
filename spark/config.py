"""The limits, intervals and defaults of the Spark format. Options change the defaults; `options` says which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Options: their defaults and their limits

POLL_TIMEOUT_MS: Final = 30_000  # default of pollTimeoutMs
RELEASE_TIMEOUT_MS: Final = 60_000  # default of releaseTimeoutMs
SEND_TIMEOUT_MS: Final = 10_000  # default of sendTimeoutMs, for a send with its retries
DELIVERY_TIMEOUT_MS: Final = (
    30_000  # default of deliveryTimeoutMs: how long a send is retried while brokers are unreachable
)
RETRIES: Final = 2  # default of retries
ARROW_BATCH_ROWS: Final = 10_000  # default of arrowBatchSize
SEND_BATCH_BYTES: Final = 1_000_000  # default of batchBytes
PREFETCH_ROWS: Final = 1000  # default of prefetchRows
TRIGGER_DELAY: Final = "15m"  # default of maxTriggerDelay, as in Kafka's source
MAX_NUMBER: Final = 2**63 - 1  # rows, bytes, offsets and ms since the epoch: Java's long
MAX_TIMEOUT_MS: Final = 2**31 - 1  # maximum time of an option: Java's int
MAX_SEND_BATCH_BYTES: Final = 2_000_000  # maximum of batchBytes: a request may have 4 MiB, and the size is an estimate
MAX_DELAY_LEVEL: Final = 18  # maximum delay level of a row
SHOWN_CHARS: Final = 100  # characters of an invalid value that an error shows

SHOWN_BYTES: Final = 1024 * 1024  # maximum bytes or characters of a value of a row in the topic of illegal rows

# Planning


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """Times of a query's planner."""

    topic_timeout_s: float = 15.0  # time to wait for a topic that does not exist yet
    assignment_timeout_s: float = 15.0  # time to wait for a member's first queues
    # time for a member that ends on its own to get all queues: others may take this long to release theirs
    share_timeout_s: float = 60.0
    discovery_interval_s: float = 10.0  # interval at which topics that match a pattern are looked up


PLANNING_LIMITS: Final = PlanningLimits()
CALL_TIMEOUT_S: Final = 60.0  # time for Spark's requests to the planner, in addition to pollTimeoutMs
AWAY_POLL_S: Final = 1.0  # interval at which a member that waits for its queues looks for brokers that do not respond
NEW_QUEUES_S: Final = 2.0  # interval at which new queues of a topic, and new brokers of it, are looked up
IDLE_INTERVAL_S: Final = (
    0.03  # minimum interval of queries to brokers while nothing is new; Spark's trigger runs every 10 ms
)
ROUTE_RETRY_S: Final = 0.2  # pause after a failed route request
FINGERPRINTS: Final = 4  # messages of each topic and broker by which a checkpoint recognizes the broker's data
SAMPLE_MESSAGES: Final = 32  # messages of each queue whose average size estimates that of the next ones
# maximum time between two failures that counts for pollTimeoutMs and deliveryTimeoutMs
MAX_PATIENCE_STEP_S: Final = 10.0
END_TIMEOUT_S: Final = 5.0  # time that a stopped query waits for the driver's report of its last batch
LEDGER_POLL_INTERVAL_S: Final = 0.01  # interval at which the ledger is polled
# interval at which the ledger is polled for the end of a running batch, long before the next trigger
LEDGER_WATCH_S: Final = 0.2
LEDGER_AGE_S: Final = 86_400.0  # time since the last write after which the ledger of a driver that has ended is removed
# time after the first finished batch without a record in the ledger after which the planner logs a warning
LEDGER_SILENCE_S: Final = 10.0
HOLD_S: Final = 10.0  # time after which a hold of `rocketlet.spark.stop` ends if its driver does not renew it
HOLD_RENEWAL_S: Final = 1.0  # interval at which `rocketlet.spark.stop` renews its hold on a query
STOP_TIMEOUT_S: Final = 600.0  # default time that `rocketlet.spark.stop` waits for a batch
STOP_POLL_INTERVAL_S: Final = 0.002  # interval at which an idle query is looked up; an idle trigger waits 10 ms

# Reading

PULL_MESSAGES: Final = 4096  # messages that a task requests in one pull
PULL_BYTES: Final = 1024 * 1024  # message bytes that a task requests in one pull; Apache's brokers return fewer
# size of pulled messages at which a task makes an Arrow batch, unless arrowBatchSize or the end of the range comes first
READ_BATCH_BYTES: Final = 512 * 1024
PLAIN_BYTES: Final = 128 * 1024 * 1024  # maximum of decompressed bodies in an Arrow batch; one body has 64 MiB at most
PREFETCH_BYTES: Final = 4 * 1024 * 1024  # maximum size of the rows that the driver reads for one batch
PREFETCH_TIMEOUT_S: Final = 1.0  # timeout of a read in the driver
FIRST_RETRY_S: Final = 0.1  # pause before the first retry of a read or send, doubled for each further retry
LAST_RETRY_S: Final = 2.0  # maximum pause between two retries of a read or send

# Writing

LANES: Final = 4  # concurrent requests of a task with rows of one topic that choose no queue
PIECE_BYTES: Final = 64 * 1024 * 1024  # size of rows that are encoded together; Arrow's arrays end at 2 GiB
