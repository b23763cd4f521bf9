"""Request and response headers of the remoting protocol: extension fields as typed values, signatures, and fast
encoders."""

from __future__ import annotations

import hashlib
import hmac
from binascii import b2a_base64
from collections.abc import Callable
from functools import cache, lru_cache
from operator import itemgetter
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

from .codes import RESPONSE_FLAG, VERSION, Language
from .config import MAX_LAYOUT_BYTES, MAX_LAYOUT_FIELDS, MAX_LAYOUTS
from .frame import JSON, MSGPACK, ROCKETMQ, Ext, ExtValue, Frame, encode_head, encode_msgpack, text_of

# ------------------------------------------------------------------------------
# Generated functions that read and write one type of header, with one statement per field, as dataclasses generate
# `__init__`. A loop over the fields takes two to three times as long, and every request has a header.
#
#     def read(ext, find, pack, new, kind, boolean, long):
#         f0 = str(ext['topic'])
#         f1 = int(ext['queueId'])
#         f2 = None if (found := find('epoch')) is None else long(found)
#         pack(f1)
#         return new(kind, (f0, f1, f2))
#
#     def write(header):
#         f0, f1, f2 = header
#         ext = {'topic': f0, 'queueId': f1}
#         if f2 is not None: ext['epoch'] = f2
#         return ext


REQUIRED: Final = object()


class Field(NamedTuple):
    """A field of a header. `key` is its name on the wire; `convert` raises TypeError or ValueError for an invalid
    value."""

    key: str
    convert: Callable[[Any], Any]
    default: Any


def fields_of(kind: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a NamedTuple, whose types are str, int and bool."""
    defaults = kind._field_defaults
    return tuple(
        Field(_camel(name), _converter(hint), defaults.get(name, REQUIRED))
        for name, hint in get_type_hints(kind).items()
    )


def reader_of(kind: type[Any]) -> Callable[..., Any]:
    """Return the function `read(ext, ext.get)` of a header type. `read` raises KeyError, TypeError, ValueError or
    struct.error for invalid fields."""
    fields = fields_of(kind)
    lines = [f"f{number} = {_reading(field)}" for number, field in enumerate(fields)]
    # `pack` checks all required numbers in one call: no field of a header has more than 64 bits.
    numbers = [
        f"f{number}" for number, field in enumerate(fields) if field.convert is long and field.default is not None
    ]
    lines.append(f"pack({', '.join(numbers)})" if numbers else "")
    lines.append(f"return new(kind, ({''.join(f'f{number}, ' for number in range(len(fields)))}))")
    names = {
        "pack": Struct(f">{len(numbers)}q").pack,
        "new": tuple.__new__,  # a NamedTuple's own constructor costs twice as much
        "kind": kind,
        "boolean": boolean,
        "long": long,
    }
    return _function("read(ext, find, " + ", ".join(f"{name}={name}" for name in names) + ")", lines, names)


def _reading(field: Field) -> str:
    """Return the expression that reads one value."""
    name = {str: "str", boolean: "boolean", long: "long" if field.default is None else "int"}[field.convert]
    if field.default is REQUIRED:
        return f"{name}(ext[{field.key!r}])"
    return f"{field.default!r} if (found := find({field.key!r})) is None else {name}(found)"


def writer_of(kind: type[Any]) -> Callable[[Any], Any]:
    """Return the function `write(header)`, which returns the extension fields without those that are None."""
    fields = list(enumerate(fields_of(kind)))
    always = [f"{field.key!r}: f{number}" for number, field in fields if field.default is not None]
    lines = [
        "".join(f"f{number}, " for number, _ in fields) + "= header",
        f"ext = {{{', '.join(always)}}}",
        *(
            f"if f{number} is not None: ext[{field.key!r}] = f{number}"
            for number, field in fields
            if field.default is None
        ),
        "return ext",
    ]
    return _function("write(header)", lines, {})


def _function(signature: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Compile a function. The source of the function consists of keys and defaults of this module, and of no data from
    clients."""
    exec(f"def {signature}:\n    " + "\n    ".join(lines), names)
    made: Callable[..., Any] = names[signature.partition("(")[0]]
    return made


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _converter(hint: Any) -> Callable[[Any], Any]:
    if hint is bool or hint == bool | None:
        return boolean
    return long if hint in (int, int | None) else str


def boolean(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def long(value: Any) -> int:
    number = int(value)
    if not -0x8000_0000_0000_0000 <= number <= 0x7FFF_FFFF_FFFF_FFFF:
        raise ValueError("more than 64 bits")
    return number


# ------------------------------------------------------------------------------
# The extension fields of the header of each request.
#
# Each class is one header, and its fields have the names of the wire in snake_case. `read` makes a header from a
# frame's `ext`, and `write` does the reverse. Names and defaults are those of RocketMQ 4.9's `*RequestHeader` and
# `*ResponseHeader`.


_reader = cache(reader_of)
_writer = cache(writer_of)
_new_tuple: Final = tuple.__new__  # a NamedTuple's own constructor costs twice as much
H = TypeVar("H", bound=tuple[Any, ...])


class HeaderError(ValueError):
    """The error for a header with a missing required field or an invalid value. The text names the field."""


class SendMessage(NamedTuple):
    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    flag: int
    properties: str = ""
    reconsume_times: int = 0
    unit_mode: bool = False
    batch: bool = False
    max_reconsume_times: int | None = None


FIRST_ID: Final = "firstId"
"""Rocketlet's extension field of a batch: the response needs to contain only the id of the first message."""


class PullMessage(NamedTuple):
    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    suspend_timeout_millis: int
    sub_version: int = 0
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: int | None = None  # a field of 5.x: maximum size of the response
    # Rocketlet's own field: the broker refuses the pull if the topic has another identity
    topic_identity: str | None = None


class PullMessageResult(NamedTuple):
    suggest_which_broker_id: int
    next_begin_offset: int
    min_offset: int
    max_offset: int


class QueueOffset(NamedTuple):
    """QUERY_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: int


class UpdateOffset(NamedTuple):
    """UPDATE_CONSUMER_OFFSET.

    Rocketlet's own fields:
        epoch: epoch of the lease under which the member commits
        sought: True if this run of the broker has returned this offset to the member
    """

    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    epoch: int | None = None
    sought: bool | None = None


class Offset(NamedTuple):
    """Response to GET_MAX_OFFSET, GET_MIN_OFFSET, SEARCH_OFFSET_BY_TIMESTAMP and QUERY_CONSUMER_OFFSET."""

    offset: int


class TopicQueue(NamedTuple):
    """GET_MAX_OFFSET, GET_MIN_OFFSET and GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: int


class SearchOffset(NamedTuple):
    """SEARCH_OFFSET_BY_TIMESTAMP. With `lite_topic`, a field of 5.5 and later, `topic` is the parent topic."""

    topic: str
    queue_id: int
    timestamp: int
    lite_topic: str | None = None


class StoreTime(NamedTuple):
    timestamp: int


class UnregisterClient(NamedTuple):
    client_ID: str  # noqa: N815 (the name on the wire)
    producer_group: str | None = None
    consumer_group: str | None = None


class SendBack(NamedTuple):
    """CONSUMER_SEND_MSG_BACK. `reason`, the handler's error, is Rocketlet's own field, which other brokers ignore."""

    offset: int
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    reason: str | None = None


class GroupHistory(NamedTuple):
    """GET_GROUP_HISTORY, Rocketlet's own request: the events of a group since a time in ms. With `lag` False, the
    broker does not compute the group's lag."""

    consumer_group: str
    since_ms: int = 0
    lag: bool = True


class AgreeOnMembers(NamedTuple):
    """AGREE_ON_MEMBERS, Rocketlet's own request. `group_bodies.py` explains the fields."""

    consumer_group: str
    broker_name: str
    number: int
    heard: int
    asks: bool
    digest: str
    token: str = ""


class ConfirmWord(NamedTuple):
    """CONFIRM_WORD, Rocketlet's own request: `broker_name` is the broker that sends it, `token` the token that it has
    received."""

    broker_name: str
    token: str


class ConsumerGroupHeader(NamedTuple):
    """GET_CONSUMER_LIST_BY_GROUP and NOTIFY_CONSUMER_IDS_CHANGED.

    With Rocketlet's own field `topic`, the list contains only members that subscribe to the topic.
    """

    consumer_group: str
    topic: str | None = None


class OptionalGroup(NamedTuple):
    """GET_QUEUE_OFFSETS."""

    consumer_group: str | None = None


class BrokerTimes(NamedTuple):
    """Response to GET_QUEUE_OFFSETS: the present time and the start time of the broker, in ms since the epoch by its
    clock.

    Every message that the response counts was stored before `now_ms`.
    """

    now_ms: int
    started_ms: int


class CreateTopic(NamedTuple):
    """UPDATE_AND_CREATE_TOPIC. With Rocketlet's own field `if_missing`, an existing topic is not changed."""

    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    default_topic: str = "TBW102"
    attributes: str = ""  # a field of 5.x: `+name=value` and `-name`, separated by commas
    if_missing: bool = False


class TopicName(NamedTuple):
    """GET_ROUTEINFO_BY_TOPIC, DELETE_TOPIC_IN_BROKER, DELETE_TOPIC_IN_NAMESRV and GET_TOPIC_CONFIG."""

    topic: str


class RegisterBroker(NamedTuple):
    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: int
    compressed: bool = False
    body_crc32: int = 0
    external_addr: str | None = None  # Rocketlet's own field: the address for clients outside of the brokers' network


class BrokerName(NamedTuple):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: int


class QueryMessage(NamedTuple):
    topic: str
    key: str
    max_num: int
    begin_timestamp: int
    end_timestamp: int


class RecallMessage(NamedTuple):
    """RECALL_MESSAGE, 5.3's."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class LogOffset(NamedTuple):
    """VIEW_MESSAGE_BY_ID: a position in the commit log."""

    offset: int


class EndTransaction(NamedTuple):
    """END_TRANSACTION. `commit_or_rollback` is a transaction type of the sys flag: 8 for commit, 12 for rollback, 0 for
    an unknown outcome."""

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    from_transaction_check: bool = False
    msg_id: str | None = None
    transaction_id: str | None = None


# Rocketlet's own field of a refused END_TRANSACTION: the outcome that the broker has recorded for the half message
OUTCOME: Final = "outcome"


class CheckTransaction(NamedTuple):
    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class PushReply(NamedTuple):
    """PUSH_REPLY_MESSAGE_TO_CLIENT. Hosts have the form `ip:port`."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    flag: int
    properties: str
    reconsume_times: int
    unit_mode: bool
    born_host: str
    store_host: str
    store_timestamp: int


class ConsumeStats(NamedTuple):
    """GET_CONSUME_STATS.

    Rocketlet's own fields, which other brokers ignore:
        columns: True for a response in a compact form
        times: True if the response is to contain the store times of messages, each of which costs a read from disk
    """

    consumer_group: str
    topic: str | None = None
    columns: bool = False
    times: bool = True


class TopicGroup(NamedTuple):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS and QUERY_CONSUME_TIME_SPAN. `client_addr` contains a client id."""

    topic: str
    group: str
    client_addr: str | None = None


class ResetOffset(NamedTuple):
    """INVOKE_BROKER_TO_RESET_OFFSET.

    Attributes:
        timestamp: ms since the epoch; -1 for the end of each queue
        is_force: True if offsets may also be increased
        queue_id: a field of 5.x: reset only this queue; below 0 for all queues
        offset: a field of 5.x: the new offset of that queue, instead of the time
        exact: Rocketlet's own field: True resets to the first message stored at the time or later; Apache's brokers use
            the message nearest to the time
    """

    topic: str
    group: str
    timestamp: int
    is_force: bool
    queue_id: int = -1
    offset: int = -1
    exact: bool = False


class ProducerGroup(NamedTuple):
    producer_group: str


class GroupName(NamedTuple):
    """DELETE_SUBSCRIPTIONGROUP."""

    group_name: str
    remove_offset: bool = False


class GroupOnly(NamedTuple):
    """GET_SUBSCRIPTIONGROUP_CONFIG."""

    group: str


class AskMember(NamedTuple):
    """GET_CONSUMER_RUNNING_INFO and CONSUME_MESSAGE_DIRECTLY."""

    consumer_group: str
    client_id: str
    msg_id: str | None = None


class RunningInfoParts(NamedTuple):
    """The parts of a member's response to GET_CONSUMER_RUNNING_INFO that tools request; brokers forward these fields.

    Attributes:
        jstack_enable: True for a text with the stacks, which mqadmin prints.
        stacks: True for the stack of each running handler, which only Rocketlet members report.
    """

    jstack_enable: bool = False
    stacks: bool = False


class CorrectionOffset(NamedTuple):
    compare_group: str
    topic: str
    filter_groups: str | None = None


class CloneOffset(NamedTuple):
    src_group: str
    dest_group: str
    topic: str | None = None


class ViewStats(NamedTuple):
    stats_name: str
    stats_key: str


class ConsumeQueueQuery(NamedTuple):
    topic: str
    queue_id: int
    index_: int  # the underscore keeps these names from hiding methods of tuple
    count_: int
    consumer_group: str | None = None


class IsOrder(NamedTuple):
    is_order: bool = False


class KvKey(NamedTuple):
    namespace: str
    key: str


class KvValue(NamedTuple):
    namespace: str
    key: str
    value: str


class KvNamespace(NamedTuple):
    namespace: str


class BrokerNameOnly(NamedTuple):
    """WIPE_WRITE_PERM_OF_BROKER, ADD_WRITE_PERM_OF_BROKER and FORGET_BROKER."""

    broker_name: str


class ClusterName(NamedTuple):
    cluster: str


class DepartedCount(NamedTuple):
    """Response to GET_BROKER_CLUSTER_INFO. Only Rocketlet's name servers return the number of departed brokers."""

    departed: int = 0


class HeartbeatAnswer(NamedTuple):
    """Response to HEART_BEAT. Only Rocketlet's brokers return `disagreements`, one conflict per line, and only to
    Rocketlet members."""

    disagreements: str = ""


class PutAccount(NamedTuple):
    """UPDATE_AND_CREATE_ACL_CONFIG: an account in the form of `plain_acl.yml`.

    Permissions of topics and groups are joined by commas: `orders=PUB|SUB,returns=SUB`. Fields that are None, and an empty
    `secret_key`, leave an existing account's settings unchanged; `admin` is always set.
    """

    access_key: str
    secret_key: str
    white_remote_address: str | None = None
    admin: bool = False
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


class AccountName(NamedTuple):
    """DELETE_ACL_CONFIG."""

    access_key: str


class UserName(NamedTuple):
    """AUTH_CREATE_USER, AUTH_UPDATE_USER, AUTH_DELETE_USER and AUTH_GET_USER."""

    username: str


class UserFilter(NamedTuple):
    """AUTH_LIST_USER: users whose names contain this text."""

    filter_: str | None = None


class AclSubject(NamedTuple):
    """AUTH_CREATE_ACL, AUTH_UPDATE_ACL and AUTH_GET_ACL. The subject has the form `User:NAME`."""

    subject: str


class DeleteAcl(NamedTuple):
    """AUTH_DELETE_ACL. `resource` has a form such as `Topic:orders`, and is optional."""

    subject: str
    policy_type: str | None = None
    resource: str | None = None


class AclFilter(NamedTuple):
    """AUTH_LIST_ACL: texts that subjects and resources must contain."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class WhiteAddresses(NamedTuple):
    """UPDATE_GLOBAL_WHITE_ADDRS_CONFIG. Addresses are joined by commas. mqadmin sends `acl_file_full_path` since 4.9.3."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclVersion(NamedTuple):
    """Response to GET_BROKER_CLUSTER_ACL_INFO; both versions are JSON."""

    version: str
    all_acl_file_version: str
    broker_name: str
    broker_addr: str
    cluster_name: str


def read(kind: type[H], ext: Ext) -> H:
    """Return the header in a frame's extension fields. Raises HeaderError, which names the first invalid field."""
    try:
        found: H = _reader(kind)(ext, ext.get)
    except (KeyError, TypeError, ValueError, StructError):
        raise _fault(kind, ext) from None
    return found


def _fault(kind: type[tuple[Any, ...]], ext: Ext) -> HeaderError:
    """Return the error that names the first missing or invalid field."""
    for key, convert, default in fields_of(kind):
        value = ext.get(key)
        if value is None:
            if default is REQUIRED:
                return HeaderError(f"the header field {key} is missing")
            continue
        try:
            convert(value)
        except (TypeError, ValueError):
            return HeaderError(f"the header field {key} is {str(value)[:80]!r}")
    return HeaderError(f"the fields are not a header {kind.__name__}")


def write(header: tuple[Any, ...]) -> dict[str, ExtValue]:
    """Return the extension fields of a header; fields that are None are left out."""
    found: dict[str, ExtValue] = _writer(type(header))(header)
    return found


def read_send_v2(ext: Ext) -> SendMessage:
    """Return the header of SEND_MESSAGE_V2 or SEND_BATCH_MESSAGE, whose keys are single letters. Written by hand,
    because it runs once per message."""
    try:
        most, batch = ext.get("l"), ext.get("m")
        fields = (
            str(ext["a"]), str(ext["b"]), str(ext["c"]), int(ext["d"]), int(ext["e"]), int(ext["f"]), int(ext["g"]),
            int(ext["h"]), str(ext.get("i", "")), int(ext.get("j", 0)), False, batch != "false" and boolean(batch),
            None if most is None else int(most),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError) as error:
        raise HeaderError(f"the header field {error} is missing or is not a number") from None
    return _new_tuple(SendMessage, fields)


# ------------------------------------------------------------------------------
# The headers of POP requests (5.x). Each class is one header.


FROM_FIRST: Final = 0
# `init_mode` of Apache's ConsumeInitMode.MAX: a new group starts at the newest message of each queue. Rocketlet's
# brokers start at the first message instead if retention has deleted no message of the queue
FROM_NEWEST: Final = 1
# Rocketlet's own value: start after the newest message. Apache's brokers treat every other number as 1
FROM_END: Final = 2


class PopMessage(NamedTuple):
    """POP_MESSAGE. Times are in ms.

    Attributes:
        queue_id: the queue; below 0 for any queue of the topic
        invisible_time: visibility timeout of the returned messages
        poll_time: how long the broker may hold the request
        init_mode: where a new group starts, such as `FROM_FIRST`
        order: True if messages are returned in order
    """

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int
    invisible_time: int
    poll_time: int
    init_mode: int = 1
    born_time: int = 0
    exp_type: str | None = None
    exp: str | None = None
    attempt_id: str | None = None
    order: bool = False


class PopMessageResult(NamedTuple):
    """Response to POP_MESSAGE. `rest_num` is about the number of messages that the group has not popped yet;
    Rocketlet's brokers count queues that the group has popped before. The texts are encoded and decoded in
    `message.py`."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    rest_num: int
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class PopLiteMessage(NamedTuple):
    """POP_LITE_MESSAGE: POP_MESSAGE for the lite topics that a client is subscribed to. Times are in ms."""

    client_id: str
    consumer_group: str
    topic: str
    max_msg_num: int
    invisible_time: int
    poll_time: int
    born_time: int = 0
    attempt_id: str | None = None


class PopLiteMessageResult(NamedTuple):
    """Response to POP_LITE_MESSAGE. `order_count_info`: an entry for each message, separated by ";". The number after an
    entry's last space is that of the message's earlier attempts. Apache's broker 5.5.0 sends "0", or "0 qo0%OFFSET COUNT"."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    order_count_info: str | None = None


class LiteTopicOf(NamedTuple):
    """GET_LITE_TOPIC_INFO."""

    parent_topic: str
    lite_topic: str


class LiteClientOf(NamedTuple):
    """GET_LITE_CLIENT_INFO. `max_count`: how many lite topics the response may list, up to 1,024."""

    parent_topic: str
    group: str
    client_id: str
    max_count: int = 1000


class LiteGroupOf(NamedTuple):
    """GET_LITE_GROUP_INFO. `top_k`: how many lite topics the response lists; Apache's brokers refuse less than 1. With
    `lite_topic` the response describes only that lite topic."""

    group: str
    lite_topic: str | None = None
    top_k: int = 20


class LiteDispatch(NamedTuple):
    """TRIGGER_LITE_DISPATCH. Without `client_id` the request is for all clients of the group."""

    group: str
    client_id: str | None = None


class LiteTopicTaken(NamedTuple):
    """NOTIFY_UNSUBSCRIBE_LITE: another client of an exclusive group has subscribed to a lite topic of this client."""

    lite_topic: str
    consumer_group: str
    client_id: str


class AckMessage(NamedTuple):
    """ACK_MESSAGE. `extra_info` contains the receipt handle. With `lite_topic`, the message is one of a lite topic: `topic`
    is the parent topic, `queue_id` is 0, and `offset` is the message's in the lite topic."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int
    lite_topic: str | None = None


class ChangeInvisibleTime(NamedTuple):
    """CHANGE_MESSAGE_INVISIBLETIME.

    Attributes:
        invisible_time: the new visibility timeout in ms
        suspend: a field of 5.5 and later: True if the delivery does not count as an attempt
        renews: Rocketlet's own field: True if the message is still being handled; False if it is to be redelivered after
            the new timeout
        reject: Rocketlet's own field: the reason to dead-letter the message instead
        lite_topic: a field of 5.5 and later, as in ACK_MESSAGE
        alone: Rocketlet's own field: True if `suspend` does not extend to the messages of the lite topic that were popped
            together with this one
    """

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int
    invisible_time: int
    suspend: bool = False
    renews: bool = False
    reject: str | None = None
    lite_topic: str | None = None
    alone: bool | None = None


class ChangedInvisibleTime(NamedTuple):
    """Response to CHANGE_MESSAGE_INVISIBLETIME: `invisible_time` starts at `pop_time`. `rejected` is True if the
    message was stored as a dead letter."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    rejected: bool | None = None


class Notification(NamedTuple):
    """NOTIFICATION: a request that waits until there is a message to pop. Times are in ms."""

    consumer_group: str
    topic: str
    queue_id: int
    poll_time: int
    born_time: int = 0


class Notified(NamedTuple):
    has_msg: bool
    polling_full: bool


class PollingInfo(NamedTuple):
    """POLLING_INFO: query the number of held POP requests."""

    consumer_group: str
    topic: str
    queue_id: int


class Polling(NamedTuple):
    polling_num: int


class PeekMessage(NamedTuple):
    """PEEK_MESSAGE: read messages without popping them."""

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int


# ------------------------------------------------------------------------------
# Signatures of requests: HMAC-SHA1 over header fields and body, as Apache's clients sign (AclClientRPCHook,
# AclUtils.combineRequestContent, AclSigner).
#
# The signature covers the values of the fields other than the signature in the order of their names, without
# separators, and then the body. The signature covers neither the request code nor the opaque id nor a time, and values
# may be moved from one field to the next. Only TLS protects against a man in the middle.


_BLOCK_BYTES: Final = 64  # block size of SHA-1

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
CREDENTIALS: Final = frozenset((ACCESS_KEY, SIGNATURE, SECURITY_TOKEN))
# Apache's client signs this field, but its broker ignores it when it verifies
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"


_Order = tuple[str, Callable[[Ext], tuple[ExtValue, ...]]]
# cached by the names of the fields, which are equal in most requests of one type
_orders: Final[dict[tuple[str, ...], _Order]] = {}


def _signing_order(names: tuple[str, ...]) -> _Order:
    """Return a format with a placeholder for each signed value, and a function that returns the values in the order of
    their names."""
    signed = sorted(name for name in names if name != SIGNATURE)
    values_of = itemgetter(*signed) if len(signed) > 1 else lambda ext: tuple(ext[name] for name in signed)
    order = "%s" * len(signed), values_of
    if len(names) <= MAX_LAYOUT_FIELDS and sum(map(len, names)) <= MAX_LAYOUT_BYTES:
        if len(_orders) >= MAX_LAYOUTS:
            _orders.clear()
        _orders[names] = order
    return order


class Signer:
    """Signer of one secret. The inner and the outer hash of RFC 2104 are computed once for the secret.

    Copying two hashes takes half as long as copying OpenSSL's HMAC object.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode()
        key = (hashlib.sha1(key).digest() if len(key) > _BLOCK_BYTES else key).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha1(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha1(bytes(byte ^ 0x5C for byte in key))

    def signature(self, ext: Ext, body: bytes, without: str = "") -> str:
        """Return the signature in base64. `without` names a field that is not signed."""
        if without:
            ext = {name: value for name, value in ext.items() if name != without}
        names = tuple(ext)
        template, values_of = _orders.get(names) or _signing_order(names)
        text = template % values_of(ext)
        if "True" in text or "False" in text:  # may be a boolean, which the wire writes in lower case
            text = "".join(map(text_of, values_of(ext)))
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text.encode())
        inner.update(body)
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False).decode()

    def signature_of(self, text: bytes) -> str:
        """Return the HMAC of a text in hex, as 5.x clients sign."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Return True if both signers have the same secret."""
        return isinstance(other, Signer) and hmac.compare_digest(self._inner.digest(), other._inner.digest())

    def __hash__(self) -> int:
        return hash(self._inner.digest())

    def has_signed(self, ext: Ext, body: bytes) -> bool:
        """Return True if the fields contain a valid signature of this secret. Comparisons take constant time."""
        given = ext.get(SIGNATURE)
        if type(given) is not str or not given.isascii():
            return False
        if hmac.compare_digest(self.signature(ext, body), given):
            return True
        return UNIQUE_KEY_QUERY in ext and hmac.compare_digest(self.signature(ext, body, UNIQUE_KEY_QUERY), given)


# ------------------------------------------------------------------------------
# The head of a response with messages. Each pull needs one, so its bytes are formatted directly, like those of send
# responses below.


_JAVA: Final = int(Language.JAVA)
_PREFIX: Final = Struct(">II")
_BINARY_HEAD: Final = Struct(">IIhBhiii5si")  # the last two are the remark, and the length of the fields
_FIELDS: Final = b"\0\x14suggestWhichBrokerId\0\0\0\x010\0\x0fnextBeginOffset%b%b\0\tminOffset%b%b\0\tmaxOffset%b%b"
_pack_int: Final = Struct(">i").pack


def encode_found_head(serialize_type: int, opaque: int, offsets: tuple[int, int, int], body_bytes: int) -> bytes:
    """Return the bytes of the response to a pull before its body, equal to those of `encode_head`.

    Args:
        offsets: the next offset to pull, and the first and last offsets of the queue
    """
    if serialize_type == JSON:
        header = (
            b'{"code":0,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"%d","minOffset":"%d","maxOffset":"%d"},'
            b'"flag":%d,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d,"remark":"FOUND"}'
            % (*offsets, RESPONSE_FLAG, opaque, VERSION)
        )
        return _PREFIX.pack(4 + len(header) + body_bytes, len(header)) + header
    if serialize_type == ROCKETMQ:
        after, begin, end = (b"%d" % offset for offset in offsets)
        fields = _FIELDS % (_pack_int(len(after)), after, _pack_int(len(begin)), begin, _pack_int(len(end)), end)
        size = 26 + len(fields)  # the fixed part including the remark has 26 bytes
        prefix = 4 + size + body_bytes, ROCKETMQ << 24 | size
        return _BINARY_HEAD.pack(*prefix, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 5, b"FOUND", len(fields)) + fields
    ext = write(PullMessageResult(0, *offsets))
    return encode_head(Frame(0, opaque, ext, b"", RESPONSE_FLAG, "FOUND", _JAVA, VERSION, serialize_type), body_bytes)


# ------------------------------------------------------------------------------
# The response to a send, which is the most frequent response. The bytes of this response are formatted directly,
# without a Frame.


_JSON_HEADER: Final = (
    b'{"code":0,"extFields":{"msgId":"%%b","queueId":"%%d","queueOffset":"%%d","MSG_REGION":"%%b","TRACE_ON":"true"},'
    b'"flag":%d,"language":"JAVA","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
    % (RESPONSE_FLAG, VERSION)
)
_BINARY_FRAME: Final = Struct(">IIhBhiiii")  # prefix, header, length 0 of the remark, and length of the fields
_BINARY_FIELDS: Final = b"\0\5msgId%b%b\0\7queueId%b%b\0\x0bqueueOffset%b%b%b"


def encode_sent(
    serialize_type: int, opaque: int, message_ids: str, queue_id: int, queue_offset: int, region: str
) -> bytes:
    """Return the response to a send, with the ids, queue and offset of its messages; equal to the result of `encode`.

    `message_ids` and `region` must be plain ASCII. A Rocketlet client, which uses MessagePack, needs neither the region
    nor the trace switch.
    """
    if serialize_type == MSGPACK:
        ext: dict[str, ExtValue] = {"msgId": message_ids, "queueId": queue_id, "queueOffset": queue_offset}
        return encode_msgpack(0, RESPONSE_FLAG, opaque, _JAVA, ext)
    if serialize_type == ROCKETMQ:
        return _binary(opaque, message_ids, queue_id, queue_offset, region)
    header = _JSON_HEADER % (message_ids.encode(), queue_id, queue_offset, region.encode(), opaque)
    size = len(header)
    return _PREFIX.pack(4 + size, JSON << 24 | size) + header


def _binary(opaque: int, message_ids: str, queue_id: int, queue_offset: int, region: str) -> bytes:
    ids, queue, offset = message_ids.encode(), b"%d" % queue_id, b"%d" % queue_offset
    fields = _BINARY_FIELDS % (
        _pack_int(len(ids)), ids, _pack_int(len(queue)), queue, _pack_int(len(offset)), offset, _end(region)
    )  # fmt: skip
    size = len(fields)
    mark = ROCKETMQ << 24 | 21 + size  # length of the header
    return _BINARY_FRAME.pack(25 + size, mark, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 0, size) + fields


@lru_cache(1)
def _end(region: str) -> bytes:
    """Return the fields that are equal in all responses of a broker."""
    return b"\0\nMSG_REGION%b%b\0\x08TRACE_ON\0\0\0\4true" % (_pack_int(len(region)), region.encode())
