"""Limits on sizes and counts of what peers send: frames, headers, bodies, names, HTTP/2 streams. A request beyond a
limit is rejected; caches drop entries."""

from __future__ import annotations

from typing import Final

# Frames

MAX_FRAME_BYTES: Final = 16_777_216  # a frame with its length field, as Apache's decoder counts
MAX_BINARY_CODE: Final = 32_767  # the largest code of a request with a binary header
MAX_LAYOUTS: Final = 2048  # cached layouts of binary headers, sets of signed names, and HTTP/2 header fields
MAX_LAYOUT_FIELDS: Final = 32  # fields of a cached layout
MAX_LAYOUT_BYTES: Final = 1024  # size of all keys of a cached layout together
MAX_KEY_CHARS: Final = 64  # field names above this length are not cached in their encoded form
MAX_REQUEST_HEADER_BYTES: Final = (
    262_144  # size of a request's header, which has a message's properties escaped as JSON
)

# Messages

MAX_TOPIC_CHARS: Final = 127  # a topic's name
MAX_GROUP_CHARS: Final = 120  # a group's name, which with %RETRY% before it is the name of its retry topic
MAX_BODY_BYTES: Final = 4_194_304  # a message's body
MAX_PROPERTY_BYTES: Final = 32_767  # all properties of a message, in a record
RETRY_ROOM_BYTES: Final = 512  # property bytes that a sent message leaves free for the properties that retries add
# size of all properties of a sent message, including those that the broker adds
SENT_PROPERTY_BYTES: Final = MAX_PROPERTY_BYTES - RETRY_ROOM_BYTES
MAX_BATCH_ENTRIES: Final = 65_536  # messages of a batch
MAX_KEPT_TAG_CHARS: Final = 64  # hashes of longer tags are not cached
MAX_LITE_NAME_CHARS: Final = 64  # the name of a lite topic
MAX_SYNCED_LITE_TOPICS: Final = 20_000  # lite topics in one synchronization of a client's subscriptions
MAX_LITE_SYNCS: Final = 100  # changes of subscriptions to lite topics in one remoting request
MAX_DECOMPRESSED_BYTES: Final = 64 * 1024 * 1024  # size of a decompressed body
INFLATED_PIECE_BYTES: Final = 65_536  # bytes that are read or produced in one piece while a broker decompresses a body
GZIP_MEMBER_BYTES: Final = 4096  # size counted for each gzip member and further frame, in addition to its bytes

# Bodies of requests and responses

MAX_ANSWER_BYTES: Final = 16_777_216  # the JSON of a response
MAX_DEPTH: Final = 64  # levels of JSON
MAX_AGREED_IDS: Final = 1000  # members in a member list that one broker sends to another
MAX_AGREED_LISTS: Final = 4  # member lists that one broker sends to another, one for each change of the group
MAX_TOPICS_ASKED: Final = 1000  # topics in a request for the offsets of all their queues
MAX_JSON_BYTES: Final = 1_048_576  # size of a request's JSON body, which is parsed within 10 ms
MAX_TABLE_BYTES: Final = 16_000_000  # size of a response that lists many items; a frame allows little more
MAX_DIALECT_BYTES: Final = 65_536  # size of a body in fastjson's dialect, which is parsed in Python
MAX_REGISTRATION_BYTES: Final = 16_777_216  # size of a broker's topics after decompression, as in an uncompressed frame
MAX_GROUPS: Final = 128  # groups of consumers, and of producers, in a heartbeat; new ones cost 0.2 ms each
MAX_SUBSCRIPTIONS: Final = 1024  # topics of a group in a heartbeat
MAX_REQUEST_QUEUES: Final = 8192  # queues to lock, to unlock, or owned, in one request
MAX_SEEN_BROKERS: Final = 1000  # brokers at which a member sees queues
MAX_TOPIC_QUEUES: Final = 65_536  # queues of a topic at any one broker
MAX_RETRY_QUEUES: Final = 64  # queues of a group's retry topic
MAX_RETRY_TIMES: Final = 1_000_000  # maximum of a group's setting for retries
MAX_ROUTE_QUEUES: Final = 262_144  # queues of a topic at all brokers, in a route; a list of them takes 100 bytes each
MAX_ID_CHARS: Final = 512  # client ids, strategies and addresses
MAX_EXPRESSION_CHARS: Final = 65_536  # a subscription's expression
MAX_EXPRESSION_TAGS: Final = 1000  # different tags of a subscription's expression; parsing them takes 1.5 ms
MAX_HEARTBEAT_TAGS: Final = 4096  # tags of all expressions of a heartbeat together; parsing them takes 6 ms
MAX_SUMMARY_CHARS: Final = 1000  # an expression in reports, and in comparisons of members' subscriptions
MAX_MARK_RANGES: Final = 1000  # ranges of dead letters in one mark, which has 30 KB
MAX_STATUS_BYTES: Final = 262_144  # size of a client's offset report, which a client sends only when it is queried

# HTTP/2 and gRPC

HPACK_TABLE_BYTES: Final = 4096  # dynamic table of header fields that a connection need not repeat
MAX_HEADER_LIST_BYTES: Final = 16_384  # a call's header fields, counted as RFC 9113 counts
MAX_HEADER_FRAMES: Final = 16  # frames of one header block, because CONTINUATION frames may be empty
MAX_HTTP2_FRAME_BYTES: Final = 65_536  # a frame from a client; clients cut messages into frames
MAX_STREAMS: Final = (
    1000  # concurrent streams of one connection; a push consumer has one for each queue on which it waits
)
STREAM_WINDOW_BYTES: Final = 1_048_576  # bytes that a client may send in one call without a window update
# bytes that a client may send in all calls of a connection without a window update
CONNECTION_WINDOW_BYTES: Final = 8_388_608
# PING, SETTINGS, PRIORITY and similar frames, and empty DATA frames, of one connection in 10 s; a long SETTINGS frame
# counts as several. WINDOW_UPDATE frames are counted separately: this limit plus two for each DATA frame that the
# broker has sent
MAX_CONTROL_FRAMES: Final = 2000
MAX_RESETS: Final = 1000  # calls of one connection that are cancelled before their request is complete, in 10 s
# calls of one connection that are cancelled after their request, in 10 s: eager clients cancel whatever is past its deadline
MAX_CANCELLED_CALLS: Final = 20_000
CONTROL_SPAN_S: Final = 10.0  # time span in which HTTP/2 control frames are counted
KEPT_STREAM_IDS: Final = 256  # ended calls that are remembered, so that their late frames are ignored
MAX_CALL_BYTES: Final = 4_456_448  # one message of a client: a body of 4 MiB, its properties, and their envelope
MAX_UNFINISHED_BYTES: Final = 33_554_432  # bytes of incomplete messages, in all gRPC calls of a connection
MAX_STATUS_CHARS: Final = 1000  # the text of a failed call
MAX_SHARED_QUEUES: Final = 4096  # queues of a topic up to which responses share the queues' names in memory
