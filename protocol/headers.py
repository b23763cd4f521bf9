"""Request and response headers of the remoting protocol: extFields as typed values, signatures, and fast encoders."""

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

from . import fast
from .codes import RESPONSE_FLAG, VERSION, Language
from .config import MAX_LAYOUT_BYTES, MAX_LAYOUT_FIELDS, MAX_LAYOUTS
from .fast import IS_COMPILED
from .frame import JSON, MSGPACK, ROCKETMQ, Ext, ExtValue, Frame, encode_head, encode_msgpack, text_of

# ------------------------------------------------------------------------------
# Functions that read and write one kind of header, spelled out field by field, as dataclasses write their `__init__`:
# a loop over the fields takes two to three times as long, and each request has a header.
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
    """`key`: as the wire spells it. `convert` raises TypeError, ValueError."""

    key: str
    convert: Callable[[Any], Any]
    default: Any


def fields_of(kind: type[Any]) -> tuple[Field, ...]:
    """The fields of a NamedTuple, which are text, numbers or booleans."""
    defaults = kind._field_defaults
    return tuple(
        Field(_camel(name), _converter(hint), defaults.get(name, REQUIRED))
        for name, hint in get_type_hints(kind).items()
    )


def reader_of(kind: type[Any]) -> Callable[..., Any]:
    """`read(ext, ext.get)`; raises KeyError, TypeError, ValueError, struct.error."""
    fields = fields_of(kind)
    lines = [f"f{number} = {_reading(field)}" for number, field in enumerate(fields)]
    # All numbers that are present together: no field of any header has more than 64 bits.
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
    """The expression for one value."""
    name = {str: "str", boolean: "boolean", long: "long" if field.default is None else "int"}[field.convert]
    if field.default is REQUIRED:
        return f"{name}(ext[{field.key!r}])"
    return f"{field.default!r} if (found := find({field.key!r})) is None else {name}(found)"


def writer_of(kind: type[Any]) -> Callable[[Any], Any]:
    """`write(header)`: the extension fields; those that are None are left out."""
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
    """Keys and defaults come from our own headers; nothing that a client sent is in it."""
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
# The extension fields of a header, for each request code.
#
# Each class is one header; its fields are the wire's, in camelCase there. `read` makes one from a frame's `ext`,
# `write` turns it back. Field names and defaults: RocketMQ 4.9's `*RequestHeader` and `*ResponseHeader`.


_reader = cache(reader_of)
_writer = cache(writer_of)
_new_tuple: Final = tuple.__new__  # a NamedTuple's own constructor costs twice as much
H = TypeVar("H", bound=tuple[Any, ...])


class HeaderError(ValueError):
    """A required field is missing or has a wrong type. The text names it."""


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
"""Rocketlet's field of a batch: the answer needs the id of the first message only."""


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
    max_msg_bytes: int | None = None  # 5.x's; a Rocketlet broker returns more to a client that requests more
    topic_identity: str | None = None  # Rocketlet's: a topic with another identity is not read


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
    """Our own: `epoch`, of the lease; `sought`, of an offset that this run of the broker has named to the member."""

    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    epoch: int | None = None
    sought: bool | None = None


class Offset(NamedTuple):
    """The answer of GET_MAX_OFFSET, GET_MIN_OFFSET, SEARCH_OFFSET_BY_TIMESTAMP and QUERY_CONSUMER_OFFSET."""

    offset: int


class TopicQueue(NamedTuple):
    """GET_MAX_OFFSET, GET_MIN_OFFSET and GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: int


class SearchOffset(NamedTuple):
    topic: str
    queue_id: int
    timestamp: int


class StoreTime(NamedTuple):
    timestamp: int


class UnregisterClient(NamedTuple):
    client_ID: str  # noqa: N815 -- the one field that the wire spells so
    producer_group: str | None = None
    consumer_group: str | None = None


class SendBack(NamedTuple):
    """`reason`, why the message was not handled, is our own: other brokers ignore it."""

    offset: int
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    reason: str | None = None


class GroupHistory(NamedTuple):
    """GET_GROUP_HISTORY, our own: the events since a time, ms. Without `lag` nobody looks how far the group is behind."""

    consumer_group: str
    since_ms: int = 0
    lag: bool = True


class AgreeOnMembers(NamedTuple):
    """AGREE_ON_MEMBERS, our own: the header; `agreement` has its fields."""

    consumer_group: str
    broker_name: str
    number: int
    heard: int
    asks: bool
    digest: str
    token: str = ""


class ConfirmWord(NamedTuple):
    """CONFIRM_WORD, our own. broker_name: the one that asks; `token`: of the word that has come."""

    broker_name: str
    token: str


class ConsumerGroupHeader(NamedTuple):
    """GET_CONSUMER_LIST_BY_GROUP and NOTIFY_CONSUMER_IDS_CHANGED. With `topic`, which only we send and read, the
    list holds only the members that subscribe to it."""

    consumer_group: str
    topic: str | None = None


class OptionalGroup(NamedTuple):
    """GET_QUEUE_OFFSETS."""

    consumer_group: str | None = None


class BrokerTimes(NamedTuple):
    """The answer to GET_QUEUE_OFFSETS, in ms since the epoch by the broker's clock: now, and when the broker started. Every
    message that the answer counts was stored before now. Brokers of 0.1.0 do not report it."""

    now_ms: int = 0
    started_ms: int = 0


class CreateTopic(NamedTuple):
    """UPDATE_AND_CREATE_TOPIC. `if_missing`, our own: a topic that exists stays as it is."""

    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    default_topic: str = "TBW102"
    attributes: str = ""  # 5.x's: `+name=value` and `-name`, divided by commas
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
    external_addr: str | None = None  # ours: the address for clients outside the brokers' network


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
    """VIEW_MESSAGE_BY_ID: a commit log position."""

    offset: int


class EndTransaction(NamedTuple):
    """`commit_or_rollback` is a transaction type of the sys flag: 8 commits, 12 rolls back, 0 does not know yet."""

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    from_transaction_check: bool = False
    msg_id: str | None = None
    transaction_id: str | None = None


class CheckTransaction(NamedTuple):
    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class PushReply(NamedTuple):
    """PUSH_REPLY_MESSAGE_TO_CLIENT. Hosts are `ip:port`."""

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
    """GET_CONSUME_STATS. The last two are our own, and others ignore them: `columns` asks for a form of the answer that is
    short and quick, `times` for the times of the messages in it, each of which is a read of the disk."""

    consumer_group: str
    topic: str | None = None
    columns: bool = False
    times: bool = True


class TopicGroup(NamedTuple):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS and QUERY_CONSUME_TIME_SPAN. `client_addr` is a client id."""

    topic: str
    group: str
    client_addr: str | None = None


class ResetOffset(NamedTuple):
    """`timestamp`: ms, -1 for the end. `is_force`: forward, too. `queue_id`: of 5.x, only this queue; below 0: all. `offset`:
    where that queue goes, instead of the time. `exact`, our own: to the first message stored at the time or later; Apache's
    brokers take the nearest one."""

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
    index_: int  # without the underscore these two would hide a tuple's methods
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
    """The answer of GET_BROKER_CLUSTER_INFO. Only our name servers say how many brokers they knew that are `departed`."""

    departed: int = 0


class HeartbeatAnswer(NamedTuple):
    """The answer of HEART_BEAT. Only our brokers report `disagreements`, one in each line, and only to our members."""

    disagreements: str = ""


class PutAccount(NamedTuple):
    """An account as `plain_acl.yml` has it (UPDATE_AND_CREATE_ACL_CONFIG). Permissions of single topics and groups are
    joined by commas: `orders=PUB|SUB,returns=SUB`. A field that is None stays as it is."""

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
    """AUTH_LIST_USER: users whose names have this text."""

    filter_: str | None = None


class AclSubject(NamedTuple):
    """AUTH_CREATE_ACL, AUTH_UPDATE_ACL and AUTH_GET_ACL: `User:NAME`."""

    subject: str


class DeleteAcl(NamedTuple):
    """AUTH_DELETE_ACL. `resource`, such as `Topic:orders`, may be missing."""

    subject: str
    policy_type: str | None = None
    resource: str | None = None


class AclFilter(NamedTuple):
    """AUTH_LIST_ACL: texts that subjects and resources have."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class WhiteAddresses(NamedTuple):
    """UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: joined by commas; `acl_file_full_path` of mqadmin 4.9.3 or later."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclVersion(NamedTuple):
    """The answer of GET_BROKER_CLUSTER_ACL_INFO; both versions are JSON."""

    version: str
    all_acl_file_version: str
    broker_name: str
    broker_addr: str
    cluster_name: str


def read(kind: type[H], ext: Ext) -> H:
    """The header of a frame. Raises HeaderError, which names the field."""
    try:
        found: H = _reader(kind)(ext, ext.get)
    except (KeyError, TypeError, ValueError, StructError):
        raise _fault(kind, ext) from None
    return found


def _fault(kind: type[tuple[Any, ...]], ext: Ext) -> HeaderError:
    """Why `read` cannot read it: by the first field that is missing or is not what it should be."""
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
    return HeaderError(f"the header is no {kind.__name__}")


def write(header: tuple[Any, ...]) -> dict[str, ExtValue]:
    """The extension fields of a header; fields that are None are left out."""
    found: dict[str, ExtValue] = _writer(type(header))(header)
    return found


def read_send_v2(ext: Ext) -> SendMessage:
    """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE, whose keys are single letters. Spelled out: it is read per message."""
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
# The headers of messages that are shared (POP), 5.x's. As in `headers`: each class is one, its fields are the wire's.


FROM_FIRST: Final = 0
FROM_NEWEST: Final = 1  # Apache's other one: with the newest message of each queue
FROM_END: Final = 2  # ours: behind the newest message. Apache takes every other number for 1


class PopMessage(NamedTuple):
    """POP_MESSAGE. `queue_id` below 0: any. Times in ms. `init_mode`: where a new group begins. `order`: the messages
    come in order."""

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
    """`rest_num`: messages that nobody has popped. The other texts are those of `popped`."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    rest_num: int
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessage(NamedTuple):
    """ACK_MESSAGE. `extra_info` is the receipt handle."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int


class ChangeInvisibleTime(NamedTuple):
    """CHANGE_MESSAGE_INVISIBLETIME.

    Attributes:
        suspend: of 5.5 and later: True if the delivery does not count as an attempt.
        renews: our own: True if the message is still being handled, so that it is not to be redelivered then.
        reject: our own: the reason to make the message a dead letter instead.
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


class ChangedInvisibleTime(NamedTuple):
    """Its response: `invisible_time` counts from `pop_time`. `rejected`: the message is stored as a dead letter."""

    pop_time: int
    invisible_time: int
    revive_qid: int
    rejected: bool | None = None


class Notification(NamedTuple):
    """NOTIFICATION: whether there is something to pop. Times in ms."""

    consumer_group: str
    topic: str
    queue_id: int
    poll_time: int
    born_time: int = 0


class Notified(NamedTuple):
    has_msg: bool
    polling_full: bool


class PollingInfo(NamedTuple):
    """POLLING_INFO: how many receives wait."""

    consumer_group: str
    topic: str
    queue_id: int


class Polling(NamedTuple):
    polling_num: int


class PeekMessage(NamedTuple):
    """PEEK_MESSAGE: looks, and takes nothing."""

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int


# ------------------------------------------------------------------------------
# Proves who sent a request: HMAC-SHA1 over its header fields and body, as Apache's clients sign (AclClientRPCHook,
# AclUtils.combineRequestContent, AclSigner).
#
# It covers the values of all other fields in the order of their names, with nothing between them, then the body.
# Neither the request's code nor its number nor the time is signed, and values may be shifted from one field to the
# next: only TLS protects against somebody on the way.


_BLOCK_BYTES: Final = 64  # SHA-1's

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
CREDENTIALS: Final = frozenset((ACCESS_KEY, SIGNATURE, SECURITY_TOKEN))
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"  # Apache's client signs it, its broker does not count it


_Order = tuple[str, Callable[[Ext], tuple[ExtValue, ...]]]
_orders: Final[dict[tuple[str, ...], _Order]] = {}  # requests of one kind have the same names


def _found_order(names: tuple[str, ...]) -> _Order:
    """A format with a place for each signed value of these fields, and a function that takes the values in their order."""
    signed = sorted(name for name in names if name != SIGNATURE)
    take = itemgetter(*signed) if len(signed) > 1 else lambda ext: tuple(ext[name] for name in signed)
    order = "%s" * len(signed), take
    if len(names) <= MAX_LAYOUT_FIELDS and sum(map(len, names)) <= MAX_LAYOUT_BYTES:
        if len(_orders) >= MAX_LAYOUTS:
            _orders.clear()
        _orders[names] = order
    return order


class Signer:
    """Signs with one secret, whose part of the computation is done once: the inner and the outer hash of RFC 2104. To copy
    two hashes takes half as long as to copy OpenSSL's HMAC."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: str) -> None:
        key = secret.encode()
        key = (hashlib.sha1(key).digest() if len(key) > _BLOCK_BYTES else key).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha1(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha1(bytes(byte ^ 0x5C for byte in key))

    def signature(self, ext: Ext, body: bytes, without: str = "") -> str:
        """Base64 of the HMAC. `without`: one of the fields, which does not count beside the signature."""
        if without:
            ext = {name: value for name, value in ext.items() if name != without}
        names = tuple(ext)
        template, take = _orders.get(names) or _found_order(names)
        text = template % take(ext)
        if "True" in text or "False" in text:  # perhaps a value that has another text on the wire
            text = "".join(map(text_of, take(ext)))
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text.encode())
        inner.update(body)
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False).decode()

    def signature_of(self, text: bytes) -> str:
        """The HMAC of a text in hex, as 5.x clients sign."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether both have the same secret."""
        return isinstance(other, Signer) and hmac.compare_digest(self._inner.digest(), other._inner.digest())

    def __hash__(self) -> int:
        return hash(self._inner.digest())

    def has_signed(self, ext: Ext, body: bytes) -> bool:
        """Whether the signature among the fields is this secret's; takes as long for every wrong one."""
        shown = ext.get(SIGNATURE)
        if type(shown) is not str or not shown.isascii():
            return False
        if hmac.compare_digest(self.signature(ext, body), shown):
            return True
        return UNIQUE_KEY_QUERY in ext and hmac.compare_digest(self.signature(ext, body, UNIQUE_KEY_QUERY), shown)


# ------------------------------------------------------------------------------
# The head of an answer with messages. Each pull has one, so its bytes are spelled out, as those of `sent` are.


_JAVA: Final = int(Language.JAVA)
_PREFIX: Final = Struct(">II")
_BINARY_HEAD: Final = Struct(">IIhBhiii5si")  # the last two: the remark, and the length of the fields
_FIELDS: Final = b"\0\x14suggestWhichBrokerId\0\0\0\x010\0\x0fnextBeginOffset%b%b\0\tminOffset%b%b\0\tmaxOffset%b%b"
_pack_int: Final = Struct(">i").pack


def encode_found_head(serialize_type: int, opaque: int, offsets: tuple[int, int, int], body_bytes: int) -> bytes:
    """The frame without its body, as `encode_head` makes it. `offsets`: of the next pull, and the queue's begin and end."""
    if IS_COMPILED and (made := fast.found_head(serialize_type, opaque, *offsets, body_bytes)) is not None:
        return made
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
        size = 26 + len(fields)  # the header has its remark, too
        prefix = 4 + size + body_bytes, ROCKETMQ << 24 | size
        return _BINARY_HEAD.pack(*prefix, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 5, b"FOUND", len(fields)) + fields
    ext = write(PullMessageResult(0, *offsets))
    return encode_head(Frame(0, opaque, ext, b"", RESPONSE_FLAG, "FOUND", _JAVA, VERSION, serialize_type), body_bytes)


# ------------------------------------------------------------------------------
# The answer to a send, the most frequent of all: its bytes are spelled out instead of encoded field by field.


_JSON_HEADER: Final = (
    b'{"code":0,"extFields":{"msgId":"%%b","queueId":"%%d","queueOffset":"%%d","MSG_REGION":"%%b","TRACE_ON":"true"},'
    b'"flag":%d,"language":"JAVA","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
    % (RESPONSE_FLAG, VERSION)
)
_BINARY_FRAME: Final = Struct(">IIhBhiiii")  # prefix, header, the length of no remark and that of the fields
_BINARY_FIELDS: Final = b"\0\5msgId%b%b\0\7queueId%b%b\0\x0bqueueOffset%b%b%b"


def encode_sent(
    serialize_type: int, opaque: int, message_ids: str, queue_id: int, queue_offset: int, region: str
) -> bytes:
    """Return the response to a send with the places of its messages, as `encode` makes it.

    `message_ids` and `region` are plain ASCII. A Rocketlet client, which speaks MessagePack, needs neither the region nor the
    switch for traces.
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
    mark = ROCKETMQ << 24 | 21 + size  # the header's length
    return _BINARY_FRAME.pack(25 + size, mark, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 0, size) + fields


@lru_cache(1)
def _end(region: str) -> bytes:
    """The fields that are the same in all answers of a broker."""
    return b"\0\nMSG_REGION%b%b\0\x08TRACE_ON\0\0\0\4true" % (_pack_int(len(region)), region.encode())
