"""Every limit on the wire. A request beyond one is refused, and the refusal names the limit."""

from __future__ import annotations

from typing import Final

# Frames

MAX_FRAME_BYTES: Final = 16_777_216  # a frame with its length field, as Apache's decoder counts
MAX_BINARY_CODE: Final = 32_767  # the largest code of a request with a binary header
MAX_LAYOUTS: Final = (
    2048  # layouts of binary headers that are known again; sets of names that are signed; HTTP/2's fields
)
MAX_LAYOUT_FIELDS: Final = 32  # fields of such a layout
MAX_LAYOUT_BYTES: Final = 1024  # all keys of a layout together
MAX_KEY_CHARS: Final = 64  # longer names of fields are not kept encoded
MAX_REQUEST_HEADER_BYTES: Final = (
    262_144  # a request's header: the properties of a message, as JSON escapes them, and more
)

# Messages

MAX_TOPIC_CHARS: Final = 127  # a topic's name
MAX_GROUP_CHARS: Final = 120  # a group's name: with %RETRY% before it, it is the name of its retry topic
MAX_BODY_BYTES: Final = 4_194_304  # a message's body
MAX_PROPERTY_BYTES: Final = 32_767  # all properties of a message, in a record
RETRY_ROOM_BYTES: Final = 512  # room that a sent message leaves: retries add where it comes from and is to go
# all properties of a message that is sent, with the broker's own
SENT_PROPERTY_BYTES: Final = MAX_PROPERTY_BYTES - RETRY_ROOM_BYTES
MAX_BATCH_ENTRIES: Final = 65_536  # messages of a batch
MAX_KEPT_TAG_CHARS: Final = 64  # hashes of longer tags are not remembered
MAX_DECOMPRESSED_BYTES: Final = 64 * 1024 * 1024  # a body, decompressed
INFLATED_PIECE_BYTES: Final = 65_536  # read, or made, in one piece of work of a broker that decompresses a body
GZIP_MEMBER_BYTES: Final = 4096  # counted for each member of a gzip body, beside its bytes

# Bodies of requests and answers

MAX_ANSWER_BYTES: Final = 16_777_216  # the JSON of an answer
MAX_DEPTH: Final = 64  # levels of JSON
MAX_AGREED_IDS: Final = 1000  # members in a list that one broker tells another one of a group
MAX_AGREED_LISTS: Final = 4  # such lists, one for each change
MAX_TOPICS_ASKED: Final = 1000  # topics in a request for the offsets of all their queues
MAX_JSON_BYTES: Final = 1_048_576  # a request's JSON; it is read within 10 ms
MAX_TABLE_BYTES: Final = 16_000_000  # an answer that lists very much; a frame takes little more
MAX_DIALECT_BYTES: Final = 65_536  # a body in fastjson's dialect, which is read in Python
MAX_REGISTRATION_BYTES: Final = (
    16_777_216  # a broker's topics, inflated: as much as one frame may have without compression
)
MAX_GROUPS: Final = 128  # groups of consumers, and of producers, in a heartbeat; new ones cost 0.2 ms each
MAX_SUBSCRIPTIONS: Final = 1024  # topics of a group in a heartbeat
MAX_REQUEST_QUEUES: Final = 8192  # queues to lock, to unlock, or owned, in one request
MAX_SEEN_BROKERS: Final = 1000  # brokers at which a member sees queues
MAX_TOPIC_QUEUES: Final = 65_536  # queues of a topic at any one broker
MAX_ROUTE_QUEUES: Final = 262_144  # queues of a topic at all brokers, in a route; a list of them takes 100 bytes each
MAX_ID_CHARS: Final = 512  # client ids, strategies and addresses
MAX_EXPRESSION_CHARS: Final = 65_536  # a subscription's expression
MAX_EXPRESSION_TAGS: Final = 1000  # different tags of an expression; to read them takes 1.5 ms
MAX_SUMMARY_CHARS: Final = 1000  # an expression in reports, and where the expressions of members are compared
MAX_STATUS_BYTES: Final = 262_144  # a client's offsets, which come only when they were asked for

# HTTP/2 and gRPC

HPACK_TABLE_BYTES: Final = 4096  # header fields that a connection need not repeat
MAX_HEADER_LIST_BYTES: Final = 16_384  # a call's header fields, counted as RFC 9113 counts
MAX_HEADER_FRAMES: Final = 16  # frames of one header block; CONTINUATION may be empty
MAX_HTTP2_FRAME_BYTES: Final = 65_536  # a frame from a client; clients cut messages into frames
MAX_STREAMS: Final = (
    1000  # streams of one connection at a time; a push consumer has one for each queue that it waits for
)
STREAM_WINDOW_BYTES: Final = 1_048_576  # bytes that a client may send in one call before it hears from the broker
CONNECTION_WINDOW_BYTES: Final = 8_388_608  # the same in all calls of a connection
MAX_CONTROL_FRAMES: Final = 2000  # PING, SETTINGS, PRIORITY and the like, and frames without data, in 10 s
MAX_RESETS: Final = 1000  # calls of one connection that are given up, in 10 s
CONTROL_SPAN_S: Final = 10.0  # the time in which HTTP/2's control frames are counted
KEPT_STREAM_IDS: Final = 256  # calls that are over, of which late frames are known
MAX_CALL_BYTES: Final = 4_456_448  # one message of a client: a body of 4 MiB, its properties, and their envelope
MAX_UNFINISHED_BYTES: Final = 33_554_432  # a connection's calls whose messages are not complete
MAX_STATUS_CHARS: Final = 1000  # the text of a failed call
