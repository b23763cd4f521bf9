"""Every limit, interval and default of the Spark format. Options change the defaults; `options` says which."""

from __future__ import annotations

from typing import Final

# Options: their defaults and their limits

POLL_TIMEOUT_MS: Final = 30_000  # default of pollTimeoutMs
RELEASE_TIMEOUT_MS: Final = 60_000  # default of releaseTimeoutMs
SEND_TIMEOUT_MS: Final = 10_000  # default of sendTimeoutMs: a send with its retries
DELIVERY_TIMEOUT_MS: Final = (
    30_000  # default of deliveryTimeoutMs: how long a send is tried again while brokers are away
)
RETRIES: Final = 2  # default of retries
ARROW_BATCH_ROWS: Final = 10_000  # default of arrowBatchSize
SEND_BATCH_BYTES: Final = 1_000_000  # default of batchBytes
PREFETCH_ROWS: Final = 1000  # default of prefetchRows
TRIGGER_DELAY: Final = "15m"  # as Kafka's source
MAX_NUMBER: Final = 2**63 - 1  # rows, bytes, offsets and ms since the epoch: Java's long
MAX_TIMEOUT_MS: Final = 2**31 - 1  # the longest time of an option: Java's int
MAX_SEND_BATCH_BYTES: Final = (
    2_000_000  # the most for batchBytes: a request may have 4 MiB, and the size is an estimate
)
MAX_DELAY_LEVEL: Final = 18  # a row's delay level
SHOWN_CHARS: Final = 100  # so much of a wrong value is shown

SHOWN_BYTES: Final = 1024 * 1024  # each value of an illegal row, in the topic of such rows

# Planning

CALL_TIMEOUT_S: Final = 60.0  # for Spark's questions to the planner, beside pollTimeoutMs
TOPIC_PATIENCE_S: Final = 15.0  # for a topic that does not exist yet
SETTLE_TIMEOUT_S: Final = 15.0  # for a member's first queues
SHARE_TIMEOUT_S: Final = 60.0  # for all queues of a member that ends by itself: others may take so long to let go
DISCOVERY_INTERVAL_S: Final = 10.0  # between two looks for topics that match a pattern
NEW_QUEUES_S: Final = 2.0  # between two looks for queues that a topic has got, and for brokers that have it now
IDLE_INTERVAL_S: Final = 0.03  # Spark asks every 10 ms while there is nothing new; brokers need not be asked as often
ROUTE_RETRY_S: Final = 0.2  # how long a route that failed rests
FINGERPRINTS: Final = 4  # messages of each topic and broker by which a checkpoint recognizes them
SAMPLE_MESSAGES: Final = 32  # messages of each queue, whose size stands for the next ones'
MAX_PATIENCE_STEP_S: Final = 10.0  # so much counts at most between two failures
END_PATIENCE_S: Final = 5.0  # how long a stopped query waits for the driver's word on its last batch
LEDGER_LOOK_S: Final = 0.01  # between two looks into the ledger
LEDGER_WATCH_S: Final = 0.2  # between two looks whether a running batch is finished, long before the next trigger
HOLD_S: Final = 10.0  # after which a hold of `rocketlet.spark.stop` ends that its driver does not renew
HOLD_RENEWAL_S: Final = 1.0  # between two renewals of a hold
STOP_TIMEOUT_S: Final = 600.0  # how long `rocketlet.spark.stop` waits for a batch
STOP_LOOK_S: Final = 0.002  # between two looks whether a query is idle: an idle trigger rests for 10 ms

# Reading

PULL_MESSAGES: Final = 4096  # messages that a task asks for in one pull
PULL_BYTES: Final = 1024 * 1024  # the same in bytes; a Rocketlet broker gives as much at once, Apache's less
READ_BATCH_BYTES: Final = 512 * 1024  # messages in an Arrow batch, where there are so many: at least
PLAIN_BYTES: Final = 128 * 1024 * 1024  # decompressed bodies in an Arrow batch; one has 64 MiB at most
PREFETCH_BYTES: Final = 4 * 1024 * 1024  # rows that pass through the driver with one batch
PREFETCH_PATIENCE_S: Final = 1.0  # how long a broker may take to answer a read in the driver
FIRST_RETRY_S: Final = 0.1  # until a read or a send is tried again; then doubled each time
LAST_RETRY_S: Final = 2.0  # the longest pause between two tries

# Writing

LANES: Final = 4  # batches without a key that are under way at once
PIECE_BYTES: Final = 64 * 1024 * 1024  # rows that are encoded at once: Arrow's arrays end at 2 GiB
