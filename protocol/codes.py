"""The codes of the wire protocol: requests, responses, languages, flags."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class RequestCode(IntEnum):
    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18  # since 5.x
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    GET_BROKER_CLUSTER_ACL_CONFIG = 54  # removed in 4.9.8
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225  # since 5.x
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    LITE_PULL_MESSAGE = 361  # PULL_MESSAGE of the lite pull consumers of 5.x
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400  # since 5.0: a member requests its share from the broker
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    AUTH_CREATE_USER = 3001  # since 5.x, like the following
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010
    DELETE_TOPIC_IN_BROKER_LIST = 5002  # since 5.5.1, like the next one
    DELETE_SUBSCRIPTIONGROUP_LIST = 5003
    POP_MESSAGE = 200_050
    ACK_MESSAGE = 200_051
    PEEK_MESSAGE = 200_052
    CHANGE_MESSAGE_INVISIBLETIME = 200_053
    NOTIFICATION = 200_054
    POLLING_INFO = 200_055
    POP_LITE_MESSAGE = 200_070
    LITE_SUBSCRIPTION_CTL = 200_071
    NOTIFY_UNSUBSCRIBE_LITE = 200_073
    GET_BROKER_LITE_INFO = 200_074
    GET_PARENT_TOPIC_INFO = 200_075
    GET_LITE_TOPIC_INFO = 200_076
    GET_LITE_CLIENT_INFO = 200_077
    GET_LITE_GROUP_INFO = 200_078
    TRIGGER_LITE_DISPATCH = 200_079
    BATCH_ACK_MESSAGE = 200_151
    # Rocketlet's own requests, in a range that Apache does not use. An Apache broker returns response code 3; an Apache
    # name server of 4.9 does not respond.
    GET_GROUP_HISTORY = 77_001
    GET_QUEUE_OFFSETS = 77_002
    IDENTIFY = 77_003  # a client authenticates once for a TLS connection
    AGREE_ON_MEMBERS = 77_004  # brokers synchronize a group with foreign members
    CONFIRM_WORD = 77_005  # a broker checks with another broker that a message really came from it
    GET_DEPARTED_BROKERS = 77_006  # a name server lists brokers that have departed
    FORGET_BROKER = 77_007  # a departed broker was retired permanently


class ResponseCode(IntEnum):
    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4  # of Rocketlet's END_TRANSACTION: the broker has recorded another outcome
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    UPDATE_AND_CREATE_ACL_CONFIG_FAILED = 209
    POLLING_FULL = 209  # of 5.x
    DELETE_ACL_CONFIG_FAILED = 210
    POLLING_TIMEOUT = 210  # of 5.x
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED = 211
    FLOW_CONTROL = 215
    ILLEGAL_OPERATION = 604
    LMQ_QUOTA_EXCEEDED = 2017  # since 5.5, like the next one
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 2018
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


class Language(IntEnum):
    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12


class SerializeType(IntEnum):
    """The serialize type of a frame, in the top byte of its header length. MSGPACK is Rocketlet's own."""

    JSON = 0
    ROCKETMQ = 1
    MSGPACK = 77


VERSION: Final = 409  # V4_9_8; clients derive a server's features from it

RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2

PERM_READ: Final = 4
PERM_WRITE: Final = 2
# permission of a template topic: a send to an unknown topic that names the template creates the topic with the
# template's settings, at most its number of queues, and without this permission
PERM_INHERIT: Final = 1
PERM_READ_WRITE: Final = PERM_READ | PERM_WRITE
MAX_PERM: Final = PERM_READ | PERM_WRITE | PERM_INHERIT

SYS_COMPRESSED: Final = 0x1
SYS_MULTI_TAGS: Final = 0x2
SYS_TRANSACTION_MASK: Final = 0xC
SYS_TRANSACTION_PREPARED: Final = 0x4
SYS_TRANSACTION_COMMIT: Final = 0x8
SYS_TRANSACTION_ROLLBACK: Final = 0xC
SYS_BORNHOST_V6: Final = 0x10
SYS_STOREHOST_V6: Final = 0x20
SYS_COMPRESSION_MASK: Final = 0x700
SYS_COMPRESSION_LZ4: Final = 0x100
SYS_COMPRESSION_ZSTD: Final = 0x200
SYS_COMPRESSION_ZLIB: Final = 0x300

PULL_COMMIT_OFFSET: Final = 0x1
PULL_SUSPEND: Final = 0x2
PULL_SUBSCRIPTION: Final = 0x4

# Extension fields that only Rocketlet peers use and Apache's ignore.
EXT_ACCEPT_ENCODING: Final = "acceptEncoding"
EXT_CHANNEL: Final = "channel"  # IDENTIFY: the TLS channel binding, in hex
EXT_DETAIL: Final = "detail"  # GET_CONSUMER_LIST_BY_GROUP: "position", "members" or "share"
# GET_CONSUMER_LIST_BY_GROUP: the number of the topic's queues by broker, as JSON: in the request as the client sees
# them, in the response as the members see them
EXT_SEEN_QUEUES: Final = "seenQueues"
# NOTIFY_CONSUMER_IDS_CHANGED: JSON by topic: the receiver's position, the number of members, and the number of queues
# that the members see
EXT_PLACES: Final = "places"
EXT_SHARES: Final = "shares"  # both requests: the receiver's queues by topic, if the broker allocates them (STICKY)
# QUERY_CONSUMER_OFFSET: what to return for a queue without an offset, "error" or "latest"
EXT_UNKNOWN: Final = "unknown"


def code_name(code: int) -> str:
    """Return a response code as text, for errors and logs: `TOPIC_NOT_EXIST (17)`."""
    try:
        return f"{ResponseCode(code).name} ({code})"
    except ValueError:
        return f"code {code}"


def request_name(code: int) -> str:
    """Return a request code as text, for errors and logs: `PULL_MESSAGE (11)`, or `request 9999` for an unknown code."""
    code = code & 0x7FFF_FFFF if code > 0x7FFF_FFFF else code
    try:
        return f"{RequestCode(code).name} ({code})"
    except ValueError:
        return f"request {code}"
