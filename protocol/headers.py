"""The extension fields of a header, for each request code.

Each class is one header; its fields are the wire's, in camelCase there. `read` makes one from a frame's `ext`,
`write` turns it back. Field names and defaults: RocketMQ 4.9's `*RequestHeader` and `*ResponseHeader`.
"""

from __future__ import annotations

from functools import cache
from struct import error as StructError
from typing import Any, Final, NamedTuple, TypeVar

from .frame import Ext, ExtValue
from .header_code import REQUIRED, boolean, fields_of, reader_of, writer_of

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
    max_msg_bytes: int | None = None  # 5.x's; a Rocketlet broker gives more at once to a client that asks for more
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
    """`reason`, why the message was not handled, is our own: other brokers do not look at it."""

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


class ConsumerGroup(NamedTuple):
    """GET_CONSUMER_LIST_BY_GROUP and NOTIFY_CONSUMER_IDS_CHANGED. With `topic`, which only we send and read, the
    list holds only the members that subscribe to it."""

    consumer_group: str
    topic: str | None = None


class OptionalGroup(NamedTuple):
    """GET_QUEUE_OFFSETS."""

    consumer_group: str | None = None


class BrokerTimes(NamedTuple):
    """The answer to GET_QUEUE_OFFSETS, in ms since the epoch by the broker's clock: now, and when the broker started. Every
    message that the answer counts was stored before now. Brokers of 0.1.0 do not tell."""

    now_ms: int = 0
    started_ms: int = 0


class CreateTopic(NamedTuple):
    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    default_topic: str = "TBW102"
    attributes: str = ""  # 5.x's: `+name=value` and `-name`, divided by commas


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
