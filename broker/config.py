"""Every setting and limit of the broker and the name server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from ..protocol.codes import PERM_READ_WRITE

REGION: Final = "DefaultRegion"

# Connections

MAX_CONNECTIONS: Final = 10_000  # fewer if the process may not open as many files
# the share that one client address may have of connections, waiting requests and long ones; loopback may have all
ADDRESS_SHARE: Final = 0.5
# the share of the machine's or container's memory that connections may hold together, without --memory
MEMORY_SHARE: Final = 0.25
MIN_MEMORY_BYTES: Final = 64 * 1024 * 1024  # connections may hold so much at least
MEMORY_SWEEP_S: Final = 1.0  # between two counts of what connections hold
LARGE_HOLDING_BYTES: Final = 65_536  # to make room, connections that hold more are closed first
ROOM_SHARE: Final = 32  # where only smaller ones can be closed, a part of the budget is made free
STREAM_BYTES: Final = 2048  # counted for a gRPC call that is open, beside its messages
FIELD_FACTOR: Final = 4  # for each byte of its header fields, as RFC 9113 counts them, so many are counted
PENDING_BYTES: Final = 256  # counted for each message of an answer that waits for the client's window, beside its bytes
MAX_ORPHANED_TOPICS: Final = 1_000  # topics of groups with orphaned queues that metrics name; the sum counts all
KEPT_FRAME_BYTES: Final = 1024  # counted for a request that waits, beside its body and its fields
KEPT_FIELD_BYTES: Final = 200  # counted for each field of its header
HELD_PULL_BYTES: Final = 2048  # counted for a held pull
MAX_CHECKED_PULLS: Final = 1_024  # a connection keeps so many, which need not be checked again
MAX_CHECKED_SENDS: Final = 4_096  # queues of which the broker remembers that they take messages
CHECKED_PULL_BYTES: Final = 1_024  # counted for each pull that is kept, besides its texts
KEPT_BEAT_BYTES: Final = 4096  # a heartbeat's body that is kept: the same one is not parsed again
RESERVED_FILES: Final = 32  # neither connections nor segments: listening sockets, state files, name servers
MIN_OPEN_FILES: Final = 64  # a broker does not start with fewer
LISTEN_BACKLOG: Final = 1024  # connections that wait to be accepted
VIP_DISTANCE: Final = 2  # ports below the broker's, as Apache's clients count
IDLE_LIMIT_S: Final = 120.0  # a connection that is silent for longer is closed
SWEEP_INTERVAL_S: Final = 10.0  # between two looks for idle connections, silent members and silent brokers
MOMENT_S: Final = 0.002  # how long requests that were just read are served, between two looks at the sockets
TURN_S: Final = 0.003  # the same for requests and other work that wait for their turn, all together
PIECE_S: Final = 0.001  # how long one connection's requests are read or served before others have their turn
NOTED_S: Final = 0.0001  # requests that take less count nowhere
SMALL_READ_BYTES: Final = 4096  # a read of no more is served at once
READ_PIECE_BYTES: Final = 16_384  # of what was read, so much is cut into requests at a time
CALL_WORK: Final = 64  # the same for HTTP/2, in frames; a frame takes 3 us
LARGE_REQUEST_BYTES: Final = 65_536  # larger bodies, messages' aside, wait for their turn: to read 1 MiB takes 10 ms
WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024  # a client that reads slower than this is not read from
UNWRITTEN_BYTES: Final = 256 * 1024  # answers are written before more are made, so that the reader's pace is felt
CLIENT_ANSWER_S: Final = 10.0  # how long the broker waits for a client that it asked something
MAX_ASKED_AT_ONCE: Final = 1000  # members that one request has the broker ask
MAX_STATUSES_BYTES: Final = 4 * 1024 * 1024  # all their answers together; members beyond are left out
ASKED_BYTES: Final = 1024  # counted for each such question, for the client that caused it
DRAIN_TIMEOUT_S: Final = 5.0  # how long a broker that stops waits for connections to close
GARBAGE_SWEEP_S: Final = 1.0  # between two looks of the collector at new objects
GARBAGE_GROWTH: Final = 2.0  # when memory has grown so many times, all objects are looked at for circles
GARBAGE_MIN_BYTES: Final = 128 * 1024 * 1024  # and when it has grown by so much at least
MAX_METRICS_CONNECTIONS: Final = 16  # connections of the metrics port; beyond, the oldest one ends
METRICS_CLIENT_S: Final = 10.0  # how long the metrics port waits for a client to write or read

# The store

MAX_OPEN_SEGMENTS: Final = 256  # files of the store open at a time; at most half of what the process may open
PERSIST_INTERVAL_S: Final = 5.0  # between two saves of offsets, indexes and progress
RETENTION_SWEEP_S: Final = 30.0  # between two looks for segments that have expired
RETENTION_JUMP_S: Final = 60.0  # the wall clock's jump against the monotonic one, after which segments expire later
MAX_CLOCK_DOUBT_S: Final = 86_400.0  # how much later at most: for so long the clock may be set right
DELETE_LIMIT: Final = 10  # segments that one sweep of retention removes
INDEX_SEGMENT_ENTRIES: Final = 300_000  # entries of an index file, as Apache's
INDEX_TAIL_BYTES: Final = (
    65_536  # a queue's newest index entries in memory; more are written before the next checkpoint
)
SUMMED_BYTES: Final = 4096  # written between two sums by which reads are checked, at least
SUMMED_AT_ONCE_BYTES: Final = 32_768  # the same for one append, at most
MAX_SUMS: Final = 1 << 20  # sums of 12 bytes; data from before the newest of them is checked record by record
RECOVERY_READ_BYTES: Final = 8 * 1024 * 1024  # read from the log at once at a start
ROOM_BYTES: Final = 16 * 1024 * 1024  # a disk that was full takes messages again when so much was freed
DAMAGE_ASIDE_BYTES: Final = 64 * 1024 * 1024  # damaged bytes of the log that are kept for people to look at
MAX_NOTED_DAMAGE: Final = 10_000  # damaged messages that are said one by one; beyond they are only left out
DAMAGE_NEIGHBOURS: Final = 64  # messages before and behind a damaged one that are looked at for its time

# Topics and messages

MAX_QUEUES_PER_TOPIC: Final = 4096  # queues of a topic at one broker
MAX_RETAIN_HOURS: Final = 876_000.0  # a hundred years
SHARED_READ_BYTES: Final = 65_536  # the last read is kept for others that ask for the same
PULL_BYTES: Final = 262_144  # messages in one answer, as Apache's maxTransferBytesOnMessageInMemory
PULL_MESSAGES: Final = 1024  # messages in one answer to a Rocketlet client
BULK_PULL_BYTES: Final = 1024 * 1024  # the same for clients that say how many bytes they take, such as tasks of Spark
BULK_PULL_MESSAGES: Final = 4096  # the same in messages
FOREIGN_PULL_MESSAGES: Final = (
    32  # messages in one answer to Apache's clients, as Apache's broker: their tests count on it
)
BATCH_TURN_MESSAGES: Final = 1024  # a batch with more is stored in pieces
BATCH_TURN_BYTES: Final = 512 * 1024  # the same in bytes; a hash of long tags takes 50 ns for each
SCAN_ENTRIES: Final = 800  # index entries that one filtered pull looks at: 16,000 bytes, as Apache's
READ_GAP_BYTES: Final = 4096  # a gap up to this is read through rather than read around
CHECKED_GAP_BYTES: Final = 32_768  # the same where the whole read is checked at once
MAX_HOLD_S: Final = 60.0  # how long a pull may wait for a message
# how long a foreign member's pull of another's queue waits before it is answered with nothing
OTHERS_QUEUE_WAIT_S: Final = 0.2
DRAINING_WAIT_S: Final = 0.01  # the same for a queue that is being drained
SUBSCRIPTION_LOOKS: Final = 10  # how often a pull that is older than its member's subscription is looked at again
SUBSCRIPTION_LOOK_S: Final = 0.01  # between two of these looks
MAX_RUNNING_INFO_BYTES: Final = 128 * 1024  # a member's report on itself; about 300 queues of a Java member
SCAN_BYTES: Final = 512 * 1024  # messages that one pull with an SQL92 filter looks at; one is always looked at
SCAN_WORDS: Final = 16_000  # words of an SQL92 filter, each time that it looks at a message
MAX_FILTER_WORDS: Final = 10_000  # words and signs of an SQL92 filter; parsed in pieces, 40 ms in all
FILTER_WORD_BYTES: Final = 200  # counted for each of a filter by which a held pull looks at messages
MAX_FILTER_DEPTH: Final = 100  # levels of parentheses in an SQL92 filter
MAX_QUERY_ENTRIES: Final = 1024  # index entries of a queue in one answer
MAX_QUERY_MESSAGES: Final = 64  # messages in the answer to a search
MAX_QUERY_BYTES: Final = 8 * 1024 * 1024  # messages found by a key; one is always given
UNIQUE_KEY_MESSAGES: Final = 32  # messages found by a unique key, whatever is asked for: Apache's defaultQueryMaxNum
SEARCHED_ENTRIES: Final = 20_000_000  # the newest entries of a topic's indexes, which one search by a key looks at
SEARCH_ENTRIES: Final = 256  # entries in one piece of work
SEARCH_CHUNK_BYTES: Final = 128 * 1024  # messages in one piece of work
DELAY_LEVELS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
DELAY_DELIVERIES_AT_ONCE: Final = 500  # delayed messages of a level that are delivered in one piece of work
CLOCK_TOLERANCE_MS: Final = 1000  # steps back of the machine's clock that nobody needs to know of
DELAY_RETRY_S: Final = 1.0  # how long a delay level waits if its messages could not be stored
MAX_TIMER_DELAY_MS: Final = 40 * 86_400_000  # how far ahead a message may be sent to a time; Apache's broker: 3 days
TIMER_LOOK_S: Final = 10.0  # how often the clock is looked at while messages wait: somebody may set it
RUN_BLOCK_KEYS: Final = 1024  # keys of a file that are in memory
RECALL_LOOKS: Final = 8  # messages of the same time that a recall looks at in one turn
TRANSACTION_CHECK_MAX: Final = 15  # checks of a transaction before its message is set aside
TRANSACTION_SWEEP_S: Final = 60.0  # between two looks for transactions without an outcome
TRANSACTION_TIMEOUT_S: Final = 6.0  # how old a transaction is when it is checked for the first time
MAX_TRANSACTION_TIMEOUT_S: Final = 86_400.0  # the most that an administrator may set instead
SAMPLE_INTERVAL_S: Final = 10.0  # between two samples of the counters behind the rates

# Messages shared (POP)

MAX_POP_MESSAGES: Final = 32  # messages of one receive, as Apache's
MAX_POP_BYTES: Final = 4 * 1024 * 1024  # one answer; its first message is always given
MAX_INVISIBLE_MS: Final = 12 * 3600 * 1000  # the longest time for a popped message, as Apache's
LATE_POLL_MS: Final = 500  # how late a receive may come; then nobody waits for its answer, as with Apache's broker
MAX_ACKS: Final = 512  # handles in one acknowledgement; they take 3 ms
POP_LOOKS: Final = 8  # reads of a receive whose filter finds nothing, before others have their turn
EXPIRED_AT_ONCE: Final = 16  # batches whose time is over, in one turn: 512 messages at most
MAX_ATTEMPT_CHARS: Final = 1024  # an attempt's id; the rest of a longer one does not count
RENEWAL_STEPS_S: Final = (60.0, 180.0, 300.0, 600.0, 1800.0, 3600.0)  # by which a delivery is prolonged, as Apache's
MAX_RENEWED_S: Final = 3 * 3600.0  # how long a popped message is prolonged at most, as Apache's
POP_CLIENT_SILENT_S: Final = 120.0  # a client that is silent for longer counts as gone, and is not prolonged for
POOL_IDLE_S: Final = 30.0  # how long nobody may pop a topic before members may pull it, if nothing is in flight
POP_CLIENTS_LOOK_S: Final = 5.0  # between two looks for clients that went silent
POOL_LEAVE_S: Final = 30.0  # how long clients that pop get their returned messages again when a queue leaves them
POOL_SENT_BACK: Final = 100  # messages of a queue that leaves clients that pop, sent back in one turn
POOL_LOOK_S: Final = 0.5  # between two looks while queues change hands between clients that pop and members that pull
DEAD_LETTER_RETRY_S: Final = 1.0  # before a dead letter is stored again that the disk refused
POP_JOURNAL_BYTES: Final = 4 * 1024 * 1024  # records of pops and acknowledgements before the file is written anew

# gRPC

MAX_USER_PROPERTIES: Final = 128  # user properties of a message, as Apache's
MAX_USER_PROPERTY_BYTES: Final = 16_384  # the names and values of user properties, with tag and keys
MAX_ENDPOINTS_BYTES: Final = 1024  # a request's endpoints, which its answer repeats for each queue
HISTORY_EVENT_BYTES: Final = 190  # counted for an event in a group's history, beside its texts
KEPT_RECEIVES: Final = 64  # answered receives of a connection that its client may still give up
ANSWERED_BYTES: Final = 600  # counted for each of them
ROUTE_PIECE_BYTES: Final = 32_768  # of the answer to QueryRoute, encoded in one piece of work
QUEUE_BYTES: Final = 200  # counted for each queue of such an answer beside its own, for the time that it takes
SMALL_CLIENT_BYTES: Final = (
    4 * 1024 * 1024
)  # the largest message that clients of Node, .NET and Rust take, with properties
MAX_GROUP_KEY_BYTES: Final = 63  # the name of a message group
MAX_MESSAGE_ID_CHARS: Final = 255  # a message id, which clients choose
MAX_TIMESTAMP_MS: Final = 253_402_300_799_999  # the latest time in a response, the end of the year 9999
MAX_CONTEXT_CHARS: Final = 1024  # a message's trace context, and the name of its host; longer ones are left out
MAX_PRIORITY: Final = (1 << 31) - 1  # the priority of a message, a Java int; the larger, the more urgent
MAX_RECOVERY_S: Final = 3600  # the latest time to ask for a transaction's outcome
REQUEST_TIMEOUT_S: Final = (
    3.0  # the request timeout of a gRPC client that has sent no settings, as official clients have it
)
DEADLINE_MARGIN_S: Final = 0.1  # how long before a client's deadline a waiting receive is answered
MAX_POLL_S: Final = 20.0  # how long a receive waits for messages at most
POLL_S: Final = 20.0  # how long clients are told to wait
RECEIVE_BATCH: Final = 32  # messages that clients are told to ask for
MAX_SEND_MESSAGES: Final = 1024  # messages in one call
MIN_INVISIBLE_MS: Final = 10_000  # for received messages, as Apache's; the time may be changed to less
RENEWED_INVISIBLE_MS: Final = 60_000  # for messages that the broker prolongs
RECEIVE_AGAIN_S: Final = 1.0  # how long a refusal is held back whose client would ask again at once
CLIENT_GONE_S: Final = (  # how long after its last connection a client is gone; messages prolonged for it then come again
    5.0  # after the end of a client's connection; messages that the broker prolongs for it then come again
)

# Groups

POPPER_BYTES: Final = 512  # counted for a client that pops, in each group and topic, beside its texts
POOL_BYTES: Final = 2304  # counted for each group and topic that clients pop, for one of the clients
DELIVERIES_BYTES: Final = 1536  # counted for each queue of it that they have popped, for the same client
MEMBER_BYTES: Final = 1024  # counted for a membership, a producer's or a consumer's, against --memory
SUBSCRIPTION_BYTES: Final = 512  # counted for each subscription, beside its expression
TAG_BYTES: Final = 320  # counted for each tag of an expression, beside its text
PLACE_BYTES: Final = 256  # counted for each queue that a member owns, sees, reads or waits for
MOVING_BYTES: Final = 400  # counted for each queue that moves from a foreign member, until the change is over
PROGRESS_S: Final = 0.5  # how often a broker says that a drain goes on, though no member is done
PEER_IDLE_S: Final = 60.0  # an idle connection to another broker is closed after this
MAX_NAMED_MEMBERS: Final = 10  # members that a report of a disagreement names
REPEATS_S: Final = 600.0  # how long it is told why messages of foreign members may be handled again
MAX_REFUSED: Final = 100  # clients whose heartbeats were refused, of which the reason is kept
REFUSED_S: Final = 90.0  # a refusal that does not come again for so long is over
MAX_NAMED_CHARS: Final = 200  # each of their texts
MAX_REASON_CHARS: Final = 500  # the reason why a message was not handled, kept with its retry and its dead letter
MAX_RETRY_QUEUES: Final = 64  # queues of a group's retry topic
MAX_RETRY_TIMES: Final = 1_000_000  # retries that a group's settings may allow
NOTIFY_DELAY_S: Final = 0.005  # changes of a group within this time make one notification
LOCK_LEASE_S: Final = 60.0  # the locks of Apache's clients, for orderly consumption
HANDOVER_LEASE_S: Final = 20.0  # the leases of Rocketlet's members, which renew every 5 s
LEASE_SWEEP_S: Final = 1.0  # between two looks for leases that have ended
STANDSTILL_S: Final = 1.0  # a broker that is this much later than its timers stood still: leases are prolonged by it
SAVE_LOCKS_DELAY_S: Final = 0.05  # how soon leases that have ended by themselves are written
FREED_AT_ONCE: Final = 1024  # leases that have ended, in one line of the journal
DRAIN_ROUNDS: Final = 20  # a reader that pulls one queue that it loses so often, and another not, has dropped the other
TOLD_AGAIN: Final = 5  # how often a foreign member is told again that does not ask for the list of members
KNOWN_AFTER_S: Final = 35.0  # after a start; by then every foreign member has sent a heartbeat, due every 30 s
DROPPED_AFTER_S: Final = 1.0  # one that pulls such a queue later than this after it was told has not dropped it
GUARD_QUIET_S: Final = (
    1.0  # a reader that has committed everything and does not pull for this long has dropped the queue
)
GUARD_POLL_S: Final = 0.25  # how often the broker checks whether a queue's reader has finished while other clients wait
RELOOK_S: Final = 30.0  # by then a foreign member has asked for the list of members by itself: it does so every 20 s
ORPHAN_S: Final = 5.0  # how long nobody may read a queue before that is named
HISTORY_TEXT_CHARS: Final = 1000  # the texts of an event

# TLS and accounts

TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0  # a TLS handshake that takes longer is ended
TLS_SHUTDOWN_TIMEOUT_S: Final = 2.0  # how long a client may take to say good-bye
MAX_HELLO_BYTES: Final = 32_768  # bytes of a client before the first answer; those of browsers have 2 KB
RECORDS_AT_ONCE: Final = (
    32  # TLS records that are decrypted before others are looked at; 30 us each, if they are key updates
)
RECORD_BYTES: Final = 16  # data that a record has on average; requests are longer
MAX_EMPTY_RECORDS: Final = 64  # records beyond that; then the client is cut off
MAX_REPORTED_PEERS: Final = 1000  # addresses whose refusal is in the log
REPORT_AGAIN_S: Final = 600.0  # how long the same refusal of an address is not logged again
MAX_ACL_FILE_BYTES: Final = 1024 * 1024  # the accounts' file
SELF_SIGNED_DAYS: Final = 3650  # validity of a certificate that the broker makes for itself; a restart makes another
CERTIFICATE_WARNING_S: Final = 14 * 86_400.0  # how long before a certificate expires the log warns
MAX_TLS_FILE_BYTES: Final = 1024 * 1024  # a certificate with its chain, a key, or the authorities
RELOAD_INTERVAL_S: Final = 1.0  # how often certificates and accounts are looked at; two looks alike: nobody writes them

# Name servers

REGISTER_INTERVAL_S: Final = 30.0  # between two registrations at name servers
REGISTER_TIMEOUT_S: Final = 6.0  # how long a name server may take to answer a registration
REGISTER_LOOK_S: Final = 1.0  # between two looks whether a name server has hung up
MAX_PENDING_TOPICS: Final = 10_000  # changed topics that name servers do not know yet; others wait for the interval
DEPARTED_KEPT_S: Final = 7 * 86_400.0  # how long a broker that is gone is remembered


class LimitExceeded(Exception):
    """More than a limit of this module allows. The text names what, and the limit."""


N = TypeVar("N", int, float)


def within(what: str, value: N, low: N, high: N) -> N:
    """The value, if it is in the range. Raises LimitExceeded, also for NaN."""
    if not low <= value <= high:
        raise LimitExceeded(f"{what}: {value} is not between {low} and {high}")
    return value


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of what one broker or name server keeps, takes at once and waits for. Those of `LIMITS` are in force where
    nobody hands in others: tests do, to come to an edge with a few messages."""

    # Connections

    max_asked: int = 2000  # questions to one client, or because of one client, that are not answered yet
    device_stop_s: float = (
        20.0  # how long a broker that stops waits for the disk; then the next start reads the log again
    )
    metrics_answer_s: float = 5.0  # how long a scrape waits for the event loop
    max_grpc_clients: int = 20_000  # clients of RocketMQ 5, by their ids
    max_grpc_ids: int = 64  # clients that share one connection

    # TLS and accounts

    max_handshakes: int = (
        500  # TLS handshakes at once; beyond, the oldest of the address that has most of them is ended
    )
    opening_handshakes: int = 8  # handshakes before their private-key operation; others wait
    max_waiting_handshakes: int = (
        500  # handshakes that wait; beyond, the newest of the address with most of them is ended
    )

    # The store

    journal_lines: int = 1000  # changes of topics or groups before the state file is written anew

    # Topics and messages

    max_read_queues: int = 65_536  # queues of one connection, in all groups, whose readers are watched
    max_topics: int = 50_000  # topics of a broker
    max_queues: int = 500_000  # queues of all topics together
    max_sampled: int = 300_000  # counters in all samples of an hour; beyond, the oldest samples are forgotten
    max_counted_reads: int = 100_000  # topics, by the groups that read them; of more, those that nobody reads now
    max_half_messages: int = 100_000  # half messages without an outcome; beyond, transactional sends are refused
    max_outcomes: int = (
        10_000  # transactions that have ended whose outcome is known; beyond, the other one is not refused
    )
    max_outcomes_read: int = 1000  # outcomes that a start reads
    max_unparsed: int = 10_000  # requests that wait for their SQL92 filter to be parsed
    max_filters: int = 256  # SQL92 filters that are known; the one that was asked for longest ago is forgotten
    known_filter_words: int = 200_000  # words of all known filters; one takes about 200 bytes
    max_held_pulls: int = 100_000  # pulls that wait
    woken_at_once: int = 16  # held pulls of one queue; more are answered in turns
    max_recalled: int = 1_000_000  # messages that were recalled and whose time has not come
    max_recall_looks: int = 100_000  # messages of the same ms among which one is recalled
    max_searches: int = 4  # searches at a time, each of another client
    max_waiting_searches: int = 256  # searches of one client that wait
    max_recalling: int = 8  # recalls of gRPC clients that are looked for at once, one of each connection
    max_waiting_recalls: int = 1000  # recalls of one connection that wait for those before them
    run_keys: int = 16_384  # the newest messages with a time, 44 bytes each, in memory; more are sorted into a file
    runs_to_merge: int = 8  # files of about one size, which become one
    timer_deliveries_at_once: int = 50  # messages whose time has come, in one commit; to read one takes 0.1 ms
    timer_delivery_bytes: int = 4 * 1024 * 1024  # the same in bytes; one is always delivered
    max_answering: int = 256  # requests that are answered later, at a time; searches by a key have limits of their own

    # Messages shared (POP)

    max_request_modes: int = 10_000  # modes of groups and topics that an administrator has set
    max_waiting_receives: int = 100_000  # receives that wait
    max_unfinished: int = 20_000  # unacknowledged deliveries of a group in one queue; beyond, receives wait
    max_unfinished_of_group: int = 200_000  # the same in all queues of a group; about 350 bytes each
    max_unfinished_in_order: int = (
        2000  # the same for a group in order, with those behind others of their message group
    )
    max_attempt_ids: int = 10_000  # receives in order whose batches are given again to the same attempt
    max_unused_pools: int = 1000  # groups and topics whose clients are gone, kept for 30 s; of more, the first ones end

    # Groups

    max_locks: int = 200_000  # locks of all groups together, about 600 bytes each
    max_locks_of_connection: int = 16_384  # locks that a connection has or waits for
    max_lock_waiters: int = 200_000  # members that are told as soon as a queue is free; others ask again by themselves
    max_memberships: int = 256  # memberships of one connection: all end at once when it closes
    max_offsets: int = 1_000_000  # offsets of all groups in all queues; about 100 bytes each
    watched_per_s: int = 100_000  # queues a second that are looked at whether somebody reads them: 0.5 us each
    max_reported: int = 100  # orphaned queues that one look reports; the others are reported by the next ones
    max_compared: int = 100  # different sets of topics in a group, each compared with each
    max_members: int = 10_000  # members of a group
    max_seen_queues: int = 65_536  # queues of a topic on all brokers, of which members are told what others see
    max_shared_queues: int = 8192  # queues of a topic on all brokers shared out by a broker; members share out more
    max_reported_faults: int = 8  # disagreements that a Rocketlet member gets with the answer to its heartbeat
    max_logged_faults: int = 20  # faults of a group in ten minutes; its history has the others, too
    checked_at_once: int = 128  # members of a group whose agreement is checked with each change
    heartbeat_limit_s: float = 120.0  # a member without a heartbeat for longer is gone
    history_events: int = 10_000  # events kept for one group
    history_groups: int = 1000  # groups whose events are kept
    history_all_events: int = 200_000  # events of all groups; beyond, the oldest are removed
    history_bytes: int = 40 * 1024 * 1024  # memory of all these events with their texts; beyond, the oldest are removed
    max_groups: int = 10_000  # groups of a broker
    max_client_ids: int = 16  # client ids that one connection goes by
    max_producer_groups: int = 256  # producer groups of one connection
    max_agreeing_members: int = (
        1000  # foreign members of a group whose brokers agree; beyond, each broker drains for itself
    )
    max_peers: int = 64  # brokers of a group's topics; beyond, each drains for itself
    max_listed_ids: int = (
        10_000  # members in the lists by a change of a group; beyond, only lists of the first sets of topics
    )
    kept_lists: int = 4  # lists of members by the last changes, in a group whose brokers agree
    max_strangers: int = 1000  # brokers that do not know the request; beyond, the first ones are asked again
    max_claims: int = 100_000  # claims of one topic's queues by members; beyond, a group is told at once
    max_gated: int = 16  # pulls of a queue whose former reader is not done
    max_bridged: int = 100_000  # queues times members whose queues move one by one: each claims all
    bridged_after_s: float = 0.2  # how long a drain takes before each queue moves by itself
    list_wait_s: float = 1.0  # how long a foreign member's question for the list waits for a word of another broker
    drain_limit_s: float = 2.0  # how long a change is kept from a foreign member whose handlers make no progress
    drain_max_s: float = 30.0  # the same for one whose handlers make progress
    max_given_ids: int = (
        1_000_000  # client ids in the lists that foreign members were given last, each list counted once
    )
    max_drained_queues: int = (
        500_000  # queues of all groups with foreign members together; beyond, a group is told at once
    )
    owners_look_s: float = 1.0  # how soon after a refused lock the owners of queues are found anew
    drained_wait_s: float = (
        5.0  # how long a foreign member that was told of a change gets nothing of the queues it loses
    )
    guard_max_s: float = 60.0  # how long another client's pulls of a queue wait for its reader at most
    guard_silent_s: float = (
        10.0  # how long they wait for a reader that neither pulls nor commits; Java commits every 5 s
    )
    max_peer_links: int = 256  # connections to other brokers; beyond, idle ones are closed
    max_proofs: int = 64  # brokers that are being asked whether they said something, once for each connection
    max_hashed: int = (
        20_000  # queues, and ten points for each member, that one request has the broker share out by hashes
    )
    max_free_queues: int = 50_000  # unlocked queues whose next owner is waited for

    # Name servers

    max_routes: int = 200_000  # topics of all brokers together; a topic counts once for each broker that has it
    max_brokers: int = 1000  # brokers of a name server, by name
    max_broker_addresses: int = 16  # addresses of one broker: master and slaves
    max_departed_brokers: int = 100  # departed brokers that are remembered; the one that left first makes room
    max_kv_namespaces: int = 100  # namespaces of settings at a name server
    max_kv_keys: int = 10_000  # keys in a namespace
    max_kv_chars: int = 8 * 1024 * 1024  # characters of all namespaces, keys and values


LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """A broker's settings. `address` is what clients are told to connect to, as `host:port`; `external_address` is for
    clients that ask at a name server's external port. `default_queues`: how many queues a topic that a send creates gets at
    most; clients ask for 4 (both are `defaultTopicQueueNums` in Apache's). `grpc_max_delay_hours`: how far ahead clients of
    gRPC may set a delivery time (`maxDelayTimeMills` of Apache's proxy). `name_server_account`: the access key of the
    account as which registrations are signed."""

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
    transaction_sweep_s: float = TRANSACTION_SWEEP_S
    transaction_timeout_s: float = TRANSACTION_TIMEOUT_S
    transaction_check_max: int = TRANSACTION_CHECK_MAX


class LiveConfig:
    """The settings in force. UPDATE_BROKER_CONFIG replaces them while the broker runs; parts that must follow keep this."""

    __slots__ = ("_on_change", "changes", "now")

    def __init__(self, config: BrokerConfig, on_change: Callable[[], None]) -> None:
        self.now = config
        self.changes = 0
        self._on_change = on_change

    def change(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes += 1
        self._on_change()


# Metrics
REQUEST_BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
HANDOVER_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REBALANCE_REST_S: Final = 5.0  # a rebalance is over when no queue has changed hands for so long
