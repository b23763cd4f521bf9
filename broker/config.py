"""The settings and limits of the broker and the name server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from ..protocol.codes import PERM_READ_WRITE

REGION: Final = "DefaultRegion"

# Connections

MAX_CONNECTIONS: Final = 10_000  # connections of one server; fewer if the process may not open this many files
# fraction of connections, waiting requests and long requests that one client address may use; loopback may use all
ADDRESS_SHARE: Final = 0.5
# fraction of the machine's or container's memory that connections may hold together if --memory is not given
MEMORY_SHARE: Final = 0.25
MIN_MEMORY_BYTES: Final = 64 * 1024 * 1024  # minimum memory that connections may hold together if --memory is not given
MEMORY_SWEEP_S: Final = 1.0  # interval at which the memory of connections that have read or written is counted
# when memory is short, connections of the address that holds most are closed first, those with more than this before others
LARGE_HOLDING_BYTES: Final = 65_536
ROOM_SHARE: Final = 32  # once a smaller connection is closed, closing continues until 1/32 of the budget is free
STREAM_BYTES: Final = (
    2048  # memory counted for an open gRPC call and for each waiting message, in addition to its bytes
)
FIELD_FACTOR: Final = 4  # memory counted for each byte of a gRPC call's header fields (RFC 9113 size), in bytes
# memory counted for each piece of a gRPC response that waits for the client's window, in addition to its bytes
PENDING_BYTES: Final = 256
MAX_METRIC_LEVELS: Final = 32  # levels of a PRIORITY topic that metrics report; the last one includes all higher levels
MAX_ORPHANED_TOPICS: Final = 1_000  # topics with orphaned queues that metrics name; the sum counts all topics
KEPT_FRAME_BYTES: Final = 1024  # memory counted for a waiting request, in addition to its body
HELD_PULL_BYTES: Final = 2048  # memory counted for a held pull
MAX_CHECKED_PULLS: Final = 1_024  # checked pulls that a connection keeps, so that their repetition is not checked again
MAX_CHECKED_SENDS: Final = 4_096  # queues that the broker has checked to accept messages, and need not check again
CHECKED_PULL_BYTES: Final = 1_024  # memory counted for each checked pull that is kept, in addition to its header
KEPT_BEAT_BYTES: Final = 4096  # largest heartbeat body that is kept, so that an identical heartbeat is not parsed again
RESERVED_FILES: Final = 32  # file descriptors kept free for listening sockets, state files and name servers
MIN_OPEN_FILES: Final = 64  # minimum number of file descriptors with which a broker starts
LISTEN_BACKLOG: Final = 1024  # connections that wait in the kernel to be accepted
VIP_DISTANCE: Final = 2  # distance of the VIP channel's port below the broker's port, as Apache's clients compute it
IDLE_LIMIT_S: Final = 120.0  # a connection without data in either direction for this long is closed
SWEEP_INTERVAL_S: Final = 10.0  # interval at which idle connections, silent members and silent brokers are looked up
MOMENT_S: Final = 0.002  # time per event-loop iteration for requests that were just read
TURN_S: Final = 0.003  # time per event-loop iteration for waiting requests and other long work together
PIECE_S: Final = 0.001  # time for the requests of one connection before the event loop serves other connections
NOTED_S: Final = 0.0001  # requests that take less time are not counted against their client's time
SMALL_READ_BYTES: Final = (
    4096  # the requests of a socket read of up to this size are served even if MOMENT_S is used up
)
CALL_WORK: Final = 64  # HTTP/2 frames of a large socket read that are decoded at a time; a frame takes 3 us
# request bodies above this size, except sent messages, are queued as long work; parsing 1 MiB takes 10 ms
LARGE_REQUEST_BYTES: Final = 65_536
# unread response bytes of a client above which the broker stops reading its requests
WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024
# response bytes that are written before further responses are made, so that backpressure takes effect
UNWRITTEN_BYTES: Final = 256 * 1024
CLIENT_ANSWER_S: Final = 10.0  # timeout of a request that the broker sends to a client
MAX_ASKED_AT_ONCE: Final = 1000  # members that the broker queries because of one request
# size of all members' responses to a query of their offsets together; further members are left out
MAX_STATUSES_BYTES: Final = 4 * 1024 * 1024
ASKED_BYTES: Final = 1024  # memory counted for each query to a member, charged to the client that caused it
DRAIN_TIMEOUT_S: Final = 5.0  # time that a stopping broker waits for connections to close
GARBAGE_SWEEP_S: Final = 1.0  # interval at which the garbage collector examines new objects
GARBAGE_GROWTH: Final = 2.0  # memory growth factor after which the garbage collector examines all objects
# memory growth that must be added to this factor before the garbage collector examines all objects
GARBAGE_MIN_BYTES: Final = 128 * 1024 * 1024
MAX_METRICS_CONNECTIONS: Final = 16  # connections of the metrics port; one more closes the oldest
METRICS_CLIENT_S: Final = 10.0  # time that a client of the metrics port may take to write or read

# The store

MAX_OPEN_SEGMENTS: Final = 256  # store files that are open at a time; at most half of the process's file descriptors
PERSIST_INTERVAL_S: Final = 5.0  # interval at which offsets, indexes and progress are saved
RETENTION_SWEEP_S: Final = 30.0  # interval at which expired segments are looked up
# jump of the wall clock, relative to the monotonic clock, after which expiry of segments is delayed
RETENTION_JUMP_S: Final = 60.0
MAX_CLOCK_DOUBT_S: Final = (
    86_400.0  # maximum delay of expiry after the wall clock jumped ahead, in which an operator can correct it
)
DELETE_LIMIT: Final = 10  # segments that one retention sweep deletes
INDEX_SEGMENT_ENTRIES: Final = 300_000  # entries of an index file, as in Apache's store
INDEX_TAIL_BYTES: Final = (
    65_536  # newest index entries of a queue in memory; more are written before the next checkpoint
)
SUMMED_BYTES: Final = 4096  # minimum number of written bytes between two checksums that verify reads
SUMMED_AT_ONCE_BYTES: Final = 32_768  # maximum number of bytes of one append between two checksums that verify reads
MAX_SUMS: Final = 1 << 20  # checksums of 12 bytes in memory; older data is verified record by record
RECOVERY_READ_BYTES: Final = 8 * 1024 * 1024  # bytes of the log that a start reads at a time
ROOM_BYTES: Final = 16 * 1024 * 1024  # free space, after the disk was full, at which messages are accepted again
DAMAGE_ASIDE_BYTES: Final = 64 * 1024 * 1024  # damaged bytes of the log that are copied to `damaged/` for inspection
MAX_NOTED_DAMAGE: Final = 10_000  # damaged messages that are reported one by one; further ones are only skipped
DAMAGE_NEIGHBOURS: Final = 64  # messages before and after a damaged message that are read to estimate its time

# Topics and messages

MAX_QUEUES_PER_TOPIC: Final = 4096  # queues of a topic at one broker
MAX_RETAIN_HOURS: Final = 876_000.0  # maximum of --retain-hours, which is a hundred years
SHARED_READ_BYTES: Final = 65_536  # size up to which the last read is cached for other readers of the same range
PULL_BYTES: Final = 262_144  # message bytes in one pull response, as Apache's maxTransferBytesOnMessageInMemory
PULL_MESSAGES: Final = 1024  # messages in one pull response to a Rocketlet client
# message bytes in one pull response to a client that requests a size, such as a Spark task
BULK_PULL_BYTES: Final = 1024 * 1024
BULK_PULL_MESSAGES: Final = 4096  # messages in one pull response to a client that requests a size, such as a Spark task
# messages in one pull response to Apache's clients, as from Apache's broker, because Apache's tests rely on it
FOREIGN_PULL_MESSAGES: Final = 32
BATCH_TURN_MESSAGES: Final = (
    1024  # batches with more messages are stored in pieces, unless the compiled module takes them
)
# batches with more bytes are stored in pieces, unless the compiled module takes them; hashing long tags takes 50 ns per
# character
BATCH_TURN_BYTES: Final = 512 * 1024
BATCH_RUN_MESSAGES: Final = (
    8192  # messages of a batch that the compiled module stores in one call, which takes up to 4 ms
)
# bytes of a batch that the compiled module stores in one call, which takes up to 5 ms for bytes that were chosen to be slow;
# Spark's sink sends batches of 1,000,000 bytes and a head for each message
BATCH_RUN_BYTES: Final = 1280 * 1024
SCAN_ENTRIES: Final = 800  # index entries that one filtered pull examines: 16,000 bytes, as in Apache's broker
READ_GAP_BYTES: Final = 4096  # gaps between wanted messages up to this size are read, so that one read suffices
CHECKED_GAP_BYTES: Final = 32_768  # gaps up to this size are read where one checksum covers the whole read
MAX_HOLD_S: Final = 60.0  # maximum time for which a pull is held
# time for which a foreign member's pull of a queue of another member is held before it is answered empty
OTHERS_QUEUE_WAIT_S: Final = 0.2
DRAINING_WAIT_S: Final = (
    0.01  # time for which a pull of a queue that is being drained is held before it is answered empty
)
SUBSCRIPTION_POLLS: Final = (
    10  # number of checks of a pull that names a newer subscription than its member's heartbeat, or an unknown member
)
# interval of the checks of a pull that names a newer subscription than its member's heartbeat, or an unknown member
SUBSCRIPTION_POLL_INTERVAL_S: Final = 0.01
RATE_BURST_S: Final = (
    1.0  # after a pause, a group with a rate immediately gets the messages of this time, and at least one
)
RATE_COLLECTED_S: Final = 0.05  # a read of a group at its rate waits until it may get the messages of this time
RATE_RECHECK_S: Final = (
    1.0  # a read of a group at its rate is checked again after this time, in case the rate has changed
)
RATE_ROUTE_INTERVAL_S: Final = 30.0  # interval at which brokers that share the rate of a group are looked up
LIMITED_S: Final = (
    10.0  # a topic is reported as limited for this long after a read has waited because of the group's rate
)
MAX_RUNNING_INFO_BYTES: Final = (
    128 * 1024
)  # size of a member's running info; enough for about 300 queues of a Java member
SCAN_BYTES: Final = (
    512 * 1024
)  # message bytes that one pull with an SQL92 filter examines; it examines at least one message
SCAN_WORDS: Final = 16_000  # tokens of an SQL92 filter times messages that one pull evaluates
MAX_FILTER_WORDS: Final = 1000  # tokens of an SQL92 filter; parsing them takes 4 ms
FILTER_WORD_BYTES: Final = 200  # memory counted for each token of a filter that a held pull uses
MAX_FILTER_DEPTH: Final = 100  # nesting depth of parentheses in an SQL92 filter
MAX_QUERY_ENTRIES: Final = 1024  # index entries of a queue, or lite topics of a report, in one response
MAX_QUERY_MESSAGES: Final = 64  # messages in the response to a query
MAX_QUERY_BYTES: Final = (
    8 * 1024 * 1024
)  # size of messages in the response to a query by key; it has at least one message
UNIQUE_KEY_MESSAGES: Final = 32  # messages in the response to a query by unique key: Apache's defaultQueryMaxNum
SEARCHED_ENTRIES: Final = 20_000_000  # newest index entries of a topic that one query by key examines
SEARCH_ENTRIES: Final = 256  # index entries that a query by key examines per event-loop iteration
SEARCH_CHUNK_BYTES: Final = 128 * 1024  # message bytes that a query by key examines per event-loop iteration
DELAY_LEVELS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
DELAY_DELIVERIES_AT_ONCE: Final = 500  # delayed messages of a level that are delivered per event-loop iteration
CLOCK_TOLERANCE_MS: Final = 1000  # backward steps of the wall clock up to this size are not reported
DELAY_RETRY_S: Final = 1.0  # pause of a delay level after its messages could not be stored
MAX_TIMER_DELAY_MS: Final = (
    40 * 86_400_000
)  # maximum delay of a message with a delivery time; Apache's broker has 3 days
# interval at which the wall clock is read while messages wait for their delivery time, in case it is changed
TIMER_POLL_INTERVAL_S: Final = 10.0
RUN_BLOCK_KEYS: Final = 1024  # entries of a timer file that are in memory
RECALL_READS: Final = 8  # messages with the same delivery time that a recall examines per event-loop iteration
TRANSACTION_CHECK_MAX: Final = 15  # checks of a transaction before its half message is set aside
TRANSACTION_CHECK_INTERVAL_S: Final = 30.0  # time between two checks of a transaction without an outcome
TRANSACTION_TIMEOUT_S: Final = 6.0  # age of a transaction at its first check, unless its producer sets another
MAX_TRANSACTION_TIMEOUT_S: Final = (
    86_400.0  # maximum age of a transaction at its first check, by the broker's setting or a property of the message
)

SAMPLE_INTERVAL_S: Final = 10.0  # interval of the samples from which rates are computed

# Messages shared (POP)

MAX_POP_MESSAGES: Final = 32  # messages of one pop, as at Apache's broker
MAX_POP_BYTES: Final = 4 * 1024 * 1024  # message bytes of one pop response; it has at least one message
LITE_SYNC_S: Final = (
    180.0  # a client's subscriptions to lite topics without a synchronization for this long are dropped
)
LITE_SUBSCRIPTION_BYTES: Final = 250  # memory counted for a subscription to a lite topic
# memory counted for each name in a synchronization of subscriptions to lite topics, until it has ended
LITE_SYNCED_NAME_BYTES: Final = 150
LITE_READS: Final = 16  # lite topics whose oldest unfinished message a report reads without a pause
LITE_EXPIRED_AT_ONCE: Final = 64  # expired lite topics that are deleted in one event-loop iteration
MAX_IDLE_LITE: Final = 1024  # finished lite topics of a group whose deliveries stay in memory, about 1 KB each
MAX_INVISIBLE_MS: Final = 12 * 3600 * 1000  # maximum visibility timeout of a popped message, as at Apache's broker
# a pop that arrives later than this after the end of its poll time, by its client's clock, is answered empty, as by Apache's
# broker, because its client has stopped waiting
LATE_POLL_MS: Final = 500
MAX_ACKS: Final = 512  # receipt handles in one acknowledgement; they take 3 ms
# time after which receives of other levels no longer precede the level of a PRIORITY topic that has waited longest
LEVEL_WAIT_S: Final = 60.0
POP_READS: Final = 8  # reads of a pop whose filter matches nothing, before the event loop serves others
# batches of deliveries whose deadline is postponed in one event-loop iteration, after the process was suspended
POSTPONED_AT_ONCE: Final = 256
EXPIRED_AT_ONCE: Final = 16  # expired batches that are redelivered per event-loop iteration, 512 messages at most
MAX_ATTEMPT_CHARS: Final = 1024  # characters of an attempt id that count; the rest is ignored
# successive extensions of a visibility timeout that the broker makes, as Apache's proxy
RENEWAL_STEPS_S: Final = (60.0, 180.0, 300.0, 600.0, 1800.0, 3600.0)
MAX_RENEWED_S: Final = 3 * 3600.0  # maximum time for which the broker extends a popped message, as Apache's proxy
# time without a pop, and with nothing in flight, after which members may pull a topic that clients popped
POOL_IDLE_S: Final = 30.0
POP_CLIENTS_POLL_INTERVAL_S: Final = 5.0  # interval at which silent pop clients are looked up
# time for which pop clients still get redeliveries of a queue that moves from the pool to a pulling member
POOL_LEAVE_S: Final = 30.0
# messages of a queue that moves from the pool to a pulling member that are sent back per event-loop iteration
POOL_SENT_BACK: Final = 100
POOL_POLL_INTERVAL_S: Final = 0.5  # interval of checks while queues move between pop clients and pulling members
DEAD_LETTER_RETRY_S: Final = 1.0  # pause before a dead letter that could not be stored is stored again

# gRPC

MAX_USER_PROPERTIES: Final = 128  # user properties of a message, as at Apache's proxy
MAX_USER_PROPERTY_BYTES: Final = 16_384  # size of a message's tag, keys and user properties with their names
MAX_ENDPOINTS_BYTES: Final = 1024  # size of a request's endpoints, which a route response repeats for each queue
HISTORY_EVENT_BYTES: Final = 190  # memory counted for an event in a group's history, in addition to its texts
KEPT_RECEIVES: Final = 64  # answered receives of a connection whose client may still cancel them
ANSWERED_BYTES: Final = 600  # memory counted for each answered receive that is kept
ROUTE_PIECE_BYTES: Final = 32_768  # size of the part of a QueryRoute response that one piece of work encodes
QUEUE_BYTES: Final = 200  # memory counted for each queue of a QueryRoute response while the response is made
SMALL_CLIENT_BYTES: Final = (
    4 * 1024 * 1024
)  # largest message with properties that clients of Node, .NET and Rust receive
MAX_GROUP_KEY_BYTES: Final = 63  # name of a message group
MAX_MESSAGE_ID_CHARS: Final = 255  # a message id, which clients choose
MAX_TIMESTAMP_MS: Final = 253_402_300_799_999  # latest time in a response, which is the end of the year 9999
MAX_CONTEXT_CHARS: Final = 1024  # a message's trace context and born host; longer values are left out
MAX_PRIORITY: Final = (1 << 31) - 1  # the priority of a message, a Java int; the larger, the more urgent
MAX_RECOVERY_S: Final = 3600  # maximum of a transaction's own time to its first check
# request timeout assumed for gRPC clients without settings, which is the default of the official clients
REQUEST_TIMEOUT_S: Final = 3.0
# time before a client's deadline at which a waiting receive with a long-polling timeout is answered
DEADLINE_MARGIN_S: Final = 0.1
MAX_POLL_S: Final = 20.0  # maximum time for which a receive waits for messages
POLL_S: Final = 20.0  # long-polling timeout that the broker announces to clients
RECEIVE_BATCH: Final = 32  # batch size that the broker announces to clients
MAX_SEND_MESSAGES: Final = 1024  # messages in one SendMessage call
# minimum visibility timeout of a receive, as at Apache's proxy; ChangeInvisibleDuration may set less
MIN_INVISIBLE_MS: Final = 10_000
RENEWED_INVISIBLE_MS: Final = 60_000  # visibility timeout of messages that the broker extends for their client
RECEIVE_AGAIN_S: Final = 1.0  # delay of the response to a failed or refused receive, which clients retry immediately
# time after its last connection closed at which a gRPC client is gone, and messages extended for it expire
CLIENT_GONE_S: Final = 5.0

# Groups

POPPER_BYTES: Final = 512  # memory counted for a pop client in each group and topic, in addition to its texts
POOL_BYTES: Final = 2304  # memory counted for each group and topic that clients pop, charged to one of the clients
# memory counted for each popped queue of a group, charged to the same client as its group and topic
DELIVERIES_BYTES: Final = 1536
MEMBER_BYTES: Final = 1024  # memory counted for the membership of a producer or consumer
SUBSCRIPTION_BYTES: Final = 512  # memory counted for each subscription, in addition to its expression
TAG_BYTES: Final = 320  # memory counted for each tag of a subscription, in addition to its text
PLACE_BYTES: Final = 256  # memory counted for each queue that a member owns, sees, reads or waits for
MOVING_BYTES: Final = 400  # memory counted for each queue that moves from a foreign member, until the rebalance ends
PROGRESS_S: Final = 0.5  # interval at which a broker reports to its peers that a drain continues
PEER_IDLE_S: Final = 60.0  # idle time after which a connection to another broker is closed
MAX_NAMED_MEMBERS: Final = 10  # members that the report of a conflict names
REPEATS_S: Final = 600.0  # time for which the reasons of possible redeliveries to foreign members are reported
MAX_REFUSED: Final = 100  # recent refusals of each kind, such as refused heartbeats, that are kept for reports
REFUSED_S: Final = 90.0  # a refusal that is not repeated for this long is no longer reported
MAX_NAMED_CHARS: Final = 200  # maximum characters of a client's text or a list of names in a report or log event
MAX_REASON_CHARS: Final = 500  # reason of a failed delivery, kept with the retry and the dead letter
NOTIFY_DELAY_S: Final = 0.005  # changes of a group within this time are notified together
LOCK_LEASE_S: Final = 60.0  # lifetime of the locks of Apache's clients, for orderly consumption
HANDOVER_LEASE_S: Final = 20.0  # lifetime of the leases of Rocketlet's members, which renew them every 5 s
# interval at which expired leases, queues without a reader and finished rebalances are looked up
LEASE_SWEEP_S: Final = 1.0
# a broker whose timers are this late is taken to have been suspended; it extends leases by the delay, and visibility
# timeouts by 1 s
STANDSTILL_S: Final = 1.0
SAVE_LOCKS_DELAY_S: Final = 0.05  # delay after which expired leases are written to the journal
FREED_AT_ONCE: Final = 1024  # expired leases in one record of the journal
# pulls of one queue, without a pull of another queue that moves, after which a foreign reader is taken to have dropped the
# other queue
DRAIN_ROUNDS: Final = 20
TOLD_AGAIN: Final = 5  # repeated notifications of a foreign member that does not request the member list
KNOWN_AFTER_S: Final = (
    35.0  # time after a restart by which every foreign member should have sent a heartbeat, which is due every 30 s
)
DROPPED_AFTER_S: Final = (
    1.0  # time after its notification at which a foreign member's pull shows that it still reads a queue
)
GUARD_QUIET_S: Final = (
    1.0  # a reader that has committed everything and does not pull for this long is taken to have dropped the queue
)
# interval at which the broker checks whether a queue's reader has finished while other clients wait
GUARD_POLL_S: Final = 0.25
RELOOK_S: Final = (
    30.0  # time after which a foreign member should have requested the member list on its own, which is due every 20 s
)
ORPHAN_S: Final = 5.0  # time without a reader after which a queue is reported as orphaned
HISTORY_TEXT_CHARS: Final = 1000  # maximum characters of a detail in an event of a group's history

# TLS and accounts

TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0  # time that a TLS handshake may take
TLS_SHUTDOWN_TIMEOUT_S: Final = 2.0  # time that a client may take to close its TLS connection
MAX_HELLO_BYTES: Final = 32_768  # bytes of a client before the first TLS response; a browser sends 2 KB
RECORDS_AT_ONCE: Final = (
    32  # TLS records that are decrypted before the event loop serves others; a key update takes 30 us
)
RECORD_BYTES: Final = 16  # minimum average payload of TLS records
MAX_EMPTY_RECORDS: Final = 64  # TLS records in excess of that average after which the connection is closed
MAX_REPORTED_PEERS: Final = (
    1000  # refusals, by address and reason, that are logged in one interval; further ones are not
)
REPORT_AGAIN_S: Final = 600.0  # interval in which a repeated refusal of an address is logged only once
MAX_ACL_FILE_BYTES: Final = 1024 * 1024  # size of the account file
SELF_SIGNED_DAYS: Final = 3650  # validity of the certificate that the broker signs itself; each start makes a new one
CERTIFICATE_WARNING_S: Final = 14 * 86_400.0  # time before a certificate expires at which the log warns
MAX_TLS_FILE_BYTES: Final = 1024 * 1024  # size of a file with a certificate chain, a key, or certificate authorities
# interval of checks for changed certificate and account files; a file is loaded once two checks found it the same
RELOAD_INTERVAL_S: Final = 1.0

# Name servers

REGISTER_INTERVAL_S: Final = 30.0  # interval of registrations at name servers
REGISTER_TIMEOUT_S: Final = 6.0  # timeout of a request to a name server or another broker
REGISTER_POLL_INTERVAL_S: Final = 1.0  # interval at which closed connections to name servers are looked up
MAX_PENDING_TOPICS: Final = 10_000  # changed topics that are registered before the next interval
DEPARTED_KEPT_S: Final = 7 * 86_400.0  # time for which a departed broker is remembered


class LimitExceeded(Exception):
    """A request exceeds a limit. The text names the limit."""


N = TypeVar("N", int, float)


def within(what: str, value: N, low: N, high: N) -> N:
    """Return the value if it is in the range. Raises LimitExceeded if it is not, or is NaN."""
    if not low <= value <= high:
        raise LimitExceeded(f"{what}: {value} is not between {low} and {high}")
    return value


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one broker or name server. `LIMITS` are the defaults; tests pass lower ones, to reach an edge with a few
    messages."""

    # Connections

    max_asked: int = 2000  # unanswered queries to one client, or because of one client
    device_stop_s: float = (
        20.0  # time that a stopping broker waits for the disk; after it the next start reads the log again
    )
    metrics_answer_s: float = 5.0  # time that a scrape waits for the event loop
    max_grpc_clients: int = 20_000  # gRPC clients, counted by account and client id
    max_grpc_ids: int = 64  # gRPC client ids on one connection

    # TLS and accounts

    # concurrent TLS handshakes; one more ends the oldest handshake of the address with most of them
    max_handshakes: int = 500
    opening_handshakes: int = 8  # handshakes before their private-key operation; further ones wait
    max_waiting_handshakes: int = 500  # waiting handshakes; one more ends the newest of the address with most of them

    # The store

    journal_lines: int = 1000  # changes of topics or groups after which the state file is rewritten

    # Topics and messages

    max_read_queues: int = 65_536  # queues of one connection, in all groups, whose readers are tracked
    max_topics: int = 50_000  # topics of a broker
    max_queues: int = 500_000  # queues of all topics together
    max_sampled: int = 300_000  # counters in the samples of an hour; the oldest samples are dropped first
    max_counted_reads: int = 100_000  # pairs of topic and group with read counters; idle pairs are dropped first
    max_half_messages: int = 100_000  # half messages without an outcome; further transactional sends are refused
    # scheduled checks of transactions that have ended meanwhile, in addition to twice the half messages without an outcome
    max_lapsed_checks: int = 10_000
    max_outcomes: int = (
        10_000  # outcomes of ended transactions that are remembered, so that a different outcome is refused
    )
    max_outcomes_read: int = 1000  # newest outcomes that a start reads at least
    max_parsed_words: int = (
        1000  # tokens of new SQL92 filters in one event-loop iteration, after which more are refused
    )
    max_filters: int = 256  # parsed SQL92 filters that are cached, by least recent use
    known_filter_words: int = 200_000  # tokens of all cached filters; a token takes about 200 bytes
    max_held_pulls: int = 100_000  # held pulls of all connections
    # clients, groups or messages that one event (such as a new message, a lost connection or a deletion) affects
    # immediately; further ones follow in later event-loop iterations, with TURN_S in each for all such work
    affected_at_once: int = 16
    max_recalled: int = 1_000_000  # recalled messages whose delivery time has not come
    max_recall_looks: int = 100_000  # messages with the same delivery time among which a recall searches
    max_searches: int = 4  # concurrent queries by key, one for each client
    max_waiting_searches: int = 256  # waiting queries by key of one connection
    max_recalling: int = 8  # concurrent recalls of gRPC clients, one for each connection
    max_waiting_recalls: int = 1000  # waiting recalls of one connection
    run_keys: int = 16_384  # newest messages with a delivery time in memory, 44 bytes each; more are sorted into a file
    runs_to_merge: int = 8  # timer files of about one size that are merged
    timer_deliveries_at_once: int = 50  # due messages in one commit; reading one takes 0.1 ms
    timer_delivery_bytes: int = 4 * 1024 * 1024  # size of due messages after which a commit takes no further one
    max_answering: int = 256  # concurrent requests that are answered later, except queries by key

    # Messages shared (POP)

    max_request_modes: int = 10_000  # request modes of groups and topics that administrators have set
    max_waiting_receives: int = 100_000  # waiting pops of all clients
    max_unfinished: int = 20_000  # unacknowledged deliveries of a group in one queue; further pops wait
    # unacknowledged deliveries of a group in all queues, about 350 bytes each; further pops wait
    max_unfinished_of_group: int = 200_000
    max_unfinished_of_lite_client: int = 100  # unacknowledged messages of a client in lite topics of a parent topic
    # synchronizations of clients' subscriptions to lite topics in a second; one address may use half of them
    max_lite_syncs_per_s: int = 5000
    # subscriptions to lite topics of all clients, about 250 bytes each; one address or account may have half of them
    max_lite_subscriptions: int = 500_000
    # lite topics of all parent topics, about 365 bytes each; one address may create half of them
    max_lite_topics: int = 500_000
    # ids of messages of topics with `dedup`, about 200 bytes each; above, the topic with most forgets its oldest ones
    max_dedup_ids: int = 500_000
    max_rate_buckets: int = (
        100_000  # pairs of a group with a rate and a topic; above, all start again with a full bucket
    )
    # committed offsets of all groups in all lite topics, about 100 bytes each; one address or account may open half of them
    max_lite_offsets: int = 1_000_000
    # unacknowledged deliveries of an ordered group in one queue, with messages that wait for them
    max_unfinished_in_order: int = 2000
    max_attempt_ids: int = 10_000  # pops of ordered groups whose batch is returned again to the same attempt id
    max_unused_pools: int = (
        1000  # groups and topics without pop clients that are kept for 30 s; the oldest are dropped first
    )
    pop_journal_bytes: int = 4 * 1024 * 1024  # size of new records in the pop journal after which the file is rewritten

    # Groups

    max_locks: int = 200_000  # locks of all groups together, about 600 bytes each
    max_locks_of_connection: int = 16_384  # locks that a connection holds or waits for
    max_lock_waiters: int = (
        200_000  # members that are notified when a queue becomes free; further ones retry on their own
    )
    max_memberships: int = 256  # memberships of one connection, because all end together when it closes
    max_offsets: int = 1_000_000  # committed offsets of all groups in all queues, about 100 bytes each
    watched_per_s: int = 100_000  # queues per second that are checked for a reader; a check takes up to 2 us
    max_reported: int = 100  # orphaned queues that one check reports; later checks report the others
    max_compared: int = 100  # different topic sets of a group's members that are compared pairwise
    max_members: int = 10_000  # members of a group
    max_seen_queues: int = 65_536  # queues of a topic on all brokers for which members learn what other members see
    max_shared_queues: int = (
        8192  # queues of a topic on all brokers that a broker allocates; for more, members allocate
    )
    max_reported_faults: int = 8  # conflicts that the response to a Rocketlet member's heartbeat contains
    # faults of a group that are logged in ten minutes; the group's history has further ones
    max_logged_faults: int = 20
    checked_at_once: int = 128  # members up to which a group is compared immediately at each change; others in pieces
    # a member without a heartbeat, a pop client that sends nothing, or a broker without a registration, for this long is
    # removed; messages of such a pop client are no longer extended
    heartbeat_limit_s: float = 120.0
    history_events: int = 10_000  # events kept for one group
    history_groups: int = 1000  # groups with kept events
    history_all_events: int = 200_000  # events of all groups that are recorded until an event is removed
    history_bytes: int = 40 * 1024 * 1024  # memory counted for all events; above, old events are removed
    max_groups: int = 10_000  # groups of a broker with settings; offsets are kept of twice as many groups
    max_client_ids: int = 16  # client ids of one connection
    max_producer_groups: int = 256  # producer groups of one connection
    max_agreeing_members: int = 1000  # foreign members of a group up to which brokers synchronize their drains
    max_peers: int = 64  # brokers of a group's topics up to which they synchronize their drains
    max_listed_ids: int = 10_000  # members in the lists of one change of a group; further topic sets get no list
    kept_lists: int = 4  # newest changes of a group whose member lists are kept for peers
    max_outdated_peers: int = (
        1000  # brokers remembered because they do not support peer requests; the oldest are queried again
    )
    # claims of members to queues of one topic up to which a rebalance drains; above, members are notified immediately
    max_claims: int = 100_000
    max_gated: int = 16  # held pulls of a queue whose previous reader has not finished
    max_bridged: int = 100_000  # queues times members up to which queues are handed over one by one
    bridged_after_s: float = 0.2  # duration of a drain after which queues are handed over one by one
    list_wait_s: float = 1.0  # time for which a foreign member's request for the member list waits for a peer broker
    drain_limit_s: float = (
        2.0  # time for which a notification waits for a foreign member whose handlers make no progress
    )
    drain_max_s: float = 30.0  # time for which a notification waits for a foreign member whose handlers make progress
    max_given_ids: int = (
        1_000_000  # client ids in the last member lists of foreign members, counting each distinct list once
    )
    # queues of all groups with foreign members up to which rebalances drain; above, members are notified immediately
    max_drained_queues: int = 500_000
    owners_refresh_delay_s: float = 1.0  # delay after a refused lock before the owners of queues are computed again
    drained_wait_s: float = 5.0  # time for which a notified foreign member gets no messages of the queues that it loses
    guard_max_s: float = 60.0  # maximum time for which another client's pulls of a queue wait for its reader
    # time for which another client's pulls wait for a reader that neither pulls nor commits; Java commits every 5 s
    guard_silent_s: float = 10.0
    max_peer_links: int = 256  # connections to other brokers; idle ones are closed first
    max_proofs: int = 64  # brokers that are concurrently asked to confirm a request, once per connection
    max_hashed: int = 20_000  # queues, plus ten points per member, that one request allocates by consistent hashing
    max_free_queues: int = 50_000  # unlocked queues whose next owner is awaited

    # Name servers

    # topics of all brokers together, half of them of one host; a topic counts once for each of its brokers
    max_routes: int = 400_000
    # characters of the names of these topics, half of them of one host, so that a list of all names fits into a frame
    max_route_chars: int = 13_000_000
    max_brokers: int = 1000  # broker names at a name server
    max_broker_addresses: int = 16  # addresses of one broker, master and slaves
    max_departed_brokers: int = 100  # departed brokers that are remembered, the newest ones
    max_kv_namespaces: int = 100  # namespaces of the name server's key-value settings
    max_kv_keys: int = 10_000  # keys in one namespace
    max_kv_chars: int = 8 * 1024 * 1024  # characters of all keys and values, with the namespace counted for each key


LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """A broker's settings.

    Attributes:
        address: The broker's address in routes, as `host:port`.
        external_address: The address in routes for clients outside of the brokers' network; None for the same one.
        default_queues: The maximum number of queues of a topic that a send creates. Clients request 4. In Apache's broker and
            client both numbers are called `defaultTopicQueueNums`.
        grpc_max_delay_hours: How far ahead gRPC clients may set a delivery time (`maxDelayTimeMills` of Apache's proxy).
        name_server_account: The access key of the account with which requests to name servers and other brokers are signed.
    """

    data_dir: Path
    address: str
    external_address: str | None = None
    name: str = "broker-a"
    cluster: str = "DefaultCluster"
    name_servers: tuple[str, ...] = ()
    name_server_account: str | None = None
    flush: Literal["os", "sync"] = "os"
    default_queues: int = 8
    auto_create_topics: bool = True
    auto_create_groups: bool = True
    permission: int = PERM_READ_WRITE
    retain_hours: float = 72.0
    retain_bytes: int | None = None
    segment_bytes: int = 256 * 1024 * 1024
    delay_levels_ms: tuple[int, ...] = field(default=DELAY_LEVELS_MS)
    vip_channel: bool = True
    grpc_max_delay_hours: float = 24.0
    metrics_port: int | None = None
    metrics_host: str | None = None
    memory_bytes: int | None = None
    transaction_check_interval_s: float = TRANSACTION_CHECK_INTERVAL_S
    transaction_timeout_s: float = TRANSACTION_TIMEOUT_S
    transaction_check_max: int = TRANSACTION_CHECK_MAX


# Metrics
REQUEST_BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
HANDOVER_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REBALANCE_REST_S: Final = 5.0  # a rebalance is over when no queue has changed its owner for this long
