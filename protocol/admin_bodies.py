"""Bodies of administrative requests and responses, and of Apache's message trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import field as wire

from . import bodies
from .bodies import (
    BodyError,
    DataVersion,
    GroupConfig,
    Long,
    QueueShape,
    Shape,
    Text,
    TopicConfig,
    TopicShape,
    Work,
    answers,
    encode_json,
    listed,
    queue_json,
    queue_of,
    reads,
    refuse_beyond,
    topic_of,
)
from .codes import Language
from .config import MAX_STATUS_BYTES
from .names import TAG, Queue

# ------------------------------------------------------------------------------
# The bodies of administration: mqadmin's questions to brokers, and the brokers' questions to their clients.
#
# Maps whose keys are message queues are written as fastjson writes them (`fastjson_text.object_keys`): Java also
# reads text keys, Go does not.


_LANGUAGES = {int(language): language.name for language in Language}


class ConnectedClient(NamedTuple):
    """A client as its broker sees it. `address` is `ip:port`, `seen_ms` the time of its last heartbeat."""

    client_id: str
    address: str
    language: int
    version: int
    seen_ms: int = 0


def _connection(client: ConnectedClient) -> dict[str, Any]:
    return {
        "clientAddr": client.address,
        "clientId": client.client_id,
        "language": language_name(client.language),
        "version": client.version,
    }


def language_name(code: int) -> str:
    return _LANGUAGES.get(code, Language.OTHER.name)


def encode_consumer_connections(
    connections: Iterable[ConnectedClient],
    consume_type: str,
    message_model: str,
    consume_from: str,
    subscriptions: Mapping[str, Any],
) -> Work[bytes]:
    """GET_CONSUMER_CONNECTION_LIST's answer; subscriptions are JSON objects by topic."""
    found = yield from listed(orjson.dumps(_connection(info)) for info in connections)
    rest = {
        "consumeFromWhere": consume_from,
        "consumeType": consume_type,
        "messageModel": message_model,
        "subscriptionTable": subscriptions,
    }
    return b'{"connectionSet":[%b],%b' % (found, orjson.dumps(rest)[1:])


def encode_producer_connections(connections: Iterable[ConnectedClient]) -> Work[bytes]:
    found = yield from listed(orjson.dumps(_connection(connection)) for connection in connections)
    return b'{"connectionSet":[%b]}' % found


def encode_all_producers(groups: Mapping[str, Iterable[ConnectedClient]]) -> Work[bytes]:
    """GET_ALL_PRODUCER_INFO's answer."""
    of_groups: list[bytes] = []
    for group, infos in groups.items():
        found = yield from listed(map(_producer, infos))
        of_groups.append(b"%b:[%b]" % (orjson.dumps(group), found))
        yield
    return b'{"data":{%b}}' % (yield from listed(of_groups))


def _producer(info: ConnectedClient) -> bytes:
    return orjson.dumps(
        {
            "clientId": info.client_id,
            "language": language_name(info.language),
            "lastUpdateTimestamp": info.seen_ms,
            "remoteIP": "/" + info.address,
            "version": info.version,
        }
    )


class QueueProgress(msgspec.Struct, frozen=True, rename="camel"):
    """The progress of a group in a queue. `last_ms`: when the last message that it consumed was stored, 0 if not reported;
    `lost`: how many messages were deleted before it had committed them, if reported; `in_hand`: how many were popped and are
    not acknowledged, which lag contains."""

    broker_offset: Long
    consumer_offset: Long
    last_ms: Long = wire(name="lastTimestamp", default=0)
    lost: Long = 0
    in_hand: Long = 0

    @property
    def lag(self) -> int:
        return self.broker_offset - self.consumer_offset

    @property
    def waiting(self) -> int:
        """Messages that are not in flight."""
        return self.lag - self.in_hand


def encode_consume_stats(items: Iterable[tuple[Queue, QueueProgress]], tps: float) -> Work[bytes]:
    """GET_CONSUME_STATS's answer; `tps`: messages per second over the last minute. Tools of 5.x show by how much `pullOffset`
    is ahead as messages in flight; without it they would show a number below zero."""
    table = yield from listed(
        (
            bodies.object_key(
                queue_json(queue),
                {
                    "brokerOffset": item.broker_offset,
                    "consumerOffset": item.consumer_offset,
                    "pullOffset": item.consumer_offset + item.in_hand,
                    "lastTimestamp": item.last_ms,
                },
            )
            for queue, item in items
        ),
    )
    return b'{"consumeTps":%b,"offsetTable":{%b}}' % (orjson.dumps(float(tps)), table)


class ProgressColumns(NamedTuple):
    """A group's progress in the queues of a topic at a broker, by queue id: the fields of `QueueProgress`, each in a list.
    `last_ms` is empty if nobody has asked for it. `lost`, `in_hand`: queue ids and counts, only of those where there are
    some. `unreadable`: id, broker offset and consumer offset of queues with lag that may not be read any more."""

    topic: str
    broker_name: str
    broker_offsets: list[int]
    consumer_offsets: list[int]
    last_ms: list[int]
    lost: list[tuple[int, int]]
    in_hand: list[tuple[int, int]]
    unreadable: list[tuple[int, int, int]]


def encode_progress_columns(topics: Iterable[ProgressColumns]) -> Work[bytes]:
    """GET_CONSUME_STATS's answer to our own clients. Java's, with an object of text for each queue, costs both sides ten
    times as much."""
    lost: list[tuple[str, str, int, int]] = []
    in_hand: list[tuple[str, str, int, int]] = []
    unreadable: list[tuple[str, str, int, int, int]] = []

    def written() -> Iterator[bytes]:
        for columns in topics:
            lost.extend((columns.topic, columns.broker_name, *item) for item in columns.lost)
            in_hand.extend((columns.topic, columns.broker_name, *item) for item in columns.in_hand)
            unreadable.extend((columns.topic, columns.broker_name, *item) for item in columns.unreadable)
            yield orjson.dumps(columns[:-3])

    found = yield from listed(written())
    rest = {"lost": lost, "inHand": in_hand, "unreadable": unreadable}
    return b'{"columns":[%b],%b' % (found, orjson.dumps(rest)[1:])


def encode_all_consume_stats(
    address: str, groups: Iterable[tuple[str, Iterable[tuple[Queue, QueueProgress]]]]
) -> Work[bytes]:
    """GET_BROKER_CONSUME_STATS's answer. Groups without a queue are left out."""
    stats: list[bytes] = []
    behind = size = 0

    def counted(items: Iterable[tuple[Queue, QueueProgress]]) -> Iterator[tuple[Queue, QueueProgress]]:
        nonlocal behind
        for queue, item in items:
            behind += item.lag
            yield queue, item

    for group, items in groups:
        found = yield from encode_consume_stats(counted(items), 0.0)
        if not found.endswith(b":{}}"):
            stats.append(b"{%b:[%b]}" % (orjson.dumps(group), found))
            size += len(stats[-1])
        refuse_beyond(size)
        yield
    return b'{"brokerAddr":%b,"consumeStatsList":[%b],"totalDiff":%d}' % (
        orjson.dumps(address),
        b",".join(stats),
        behind,
    )


class Departed(NamedTuple):
    """A broker that a name server knew and that is gone. `topics`: how many it had."""

    name: Text
    cluster: Text
    address: Text
    topics: Long
    left_ms: Long


def encode_departed(brokers: Iterable[Departed]) -> bytes:
    """GET_DEPARTED_BROKERS's answer."""
    return encode_json(list(brokers))


@answers("departed brokers", list[Departed])
def decode_departed(data: list[Departed]) -> list[Departed]:
    return data


Column = list[Long]


class ConsumeStatsShape(Shape):
    offset_table: dict[str, QueueProgress] | None = None
    columns: list[tuple[Text, Text, Column, Column, Column]] | None = None
    lost: list[tuple[Text, Text, Long, Long]] | None = None
    in_hand: list[tuple[Text, Text, Long, Long]] | None = None
    unreadable: list[tuple[Text, Text, Long, Long, Long]] | None = None


_queue_key = msgspec.json.Decoder(QueueShape, strict=False)


def _queue_of_key(text: str) -> Queue:
    """The queue whose JSON text is a key. Raises ValueError."""
    return queue_of(_queue_key.decode(text))


@answers("consume statistics", ConsumeStatsShape)
def decode_consume_stats(data: ConsumeStatsShape) -> dict[Queue, QueueProgress]:
    """Both forms of it."""
    found = {_queue_of_key(key): item for key, item in (data.offset_table or {}).items()}
    for topic, broker_name, ends, offsets, times in data.columns or ():
        rows = zip(ends, offsets, times or repeat(0, len(ends)), strict=True)
        for queue_id, row in enumerate(rows):
            found[Queue(topic, broker_name, queue_id)] = QueueProgress(*row)
    for topic, broker_name, queue_id, end, offset in data.unreadable or ():
        found[Queue(topic, broker_name, queue_id)] = QueueProgress(end, offset, 0)
    for name, counts in (("lost", data.lost), ("in_hand", data.in_hand)):
        for topic, broker_name, queue_id, count in counts or ():
            queue = Queue(topic, broker_name, queue_id)
            if queue in found:
                found[queue] = msgspec.structs.replace(found[queue], **{name: count})
    return found


class Range(msgspec.Struct, frozen=True):
    """The offsets of a queue, the second exclusive, and the store time of its last message (ms; 0 without one)."""

    begin: Long = wire(name="minOffset")
    end: Long = wire(name="maxOffset")
    last_ms: Long = wire(name="lastUpdateTimestamp", default=0)


def encode_topic_stats(ranges: Iterable[tuple[Queue, Range]]) -> Work[bytes]:
    """GET_TOPIC_STATS_INFO's answer."""
    table = yield from listed(bodies.object_key(queue_json(queue), item) for queue, item in ranges)
    return b'{"offsetTable":{%b}}' % table


class TopicStatsShape(Shape):
    offset_table: dict[str, Range] | None = None


@answers("topic statistics", TopicStatsShape)
def decode_topic_stats(data: TopicStatsShape) -> dict[Queue, Range]:
    return {_queue_of_key(key): item for key, item in (data.offset_table or {}).items()}


def encode_offsets(offsets: Mapping[Queue, int]) -> bytes:
    """RESET_CONSUMER_CLIENT_OFFSET's request and INVOKE_BROKER_TO_RESET_OFFSET's answer."""
    return b'{"offsetTable":%b}' % _offset_table(offsets)


def encode_offsets_for_cpp(offsets: Mapping[Queue, int]) -> bytes:
    """RESET_CONSUMER_CLIENT_OFFSET's request, when a C++ client asked for the reset."""
    return orjson.dumps({"offsetTable": [queue_json(queue) | {"offset": item} for queue, item in offsets.items()]})


class OffsetShape(QueueShape):
    offset: Long


class OffsetTableShape(Shape):
    offset_table: dict[str, Long] | list[OffsetShape] | None = None


@answers("offset reset", OffsetTableShape)
def decode_offsets(data: OffsetTableShape) -> dict[Queue, int]:
    """Both forms of RESET_CONSUMER_CLIENT_OFFSET's request."""
    table = data.offset_table or {}
    if isinstance(table, list):
        return {queue_of(item): item.offset for item in table}
    return {_queue_of_key(key): offset for key, offset in table.items()}


def _offset_table(offsets: Mapping[Queue, int]) -> bytes:
    return bodies.object_keys((queue_json(queue), offset) for queue, offset in offsets.items())


def encode_client_status(offsets: Mapping[Queue, int]) -> bytes:
    """GET_CONSUMER_STATUS_FROM_CLIENT's answer: a client's offsets."""
    return b'{"consumerTable":{},"messageQueueTable":%b}' % _offset_table(offsets)


class ClientStatusShape(Shape):
    message_queue_table: dict[str, Long] | None = None


@reads("consumer status", ClientStatusShape, max_dialect_bytes=MAX_STATUS_BYTES)
def decode_client_status(data: ClientStatusShape) -> dict[Queue, int]:
    return {_queue_of_key(key): offset for key, offset in (data.message_queue_table or {}).items()}


def encode_consumer_status(clients: Mapping[str, Mapping[Queue, int]]) -> bytes:
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS's answer: the offsets by client id."""
    tables = b",".join(b"%b:%b" % (orjson.dumps(name), _offset_table(offsets)) for name, offsets in clients.items())
    return b'{"consumerTable":{%b},"messageQueueTable":{}}' % tables


class RunningQueue(msgspec.Struct, frozen=True, rename="camel"):
    """A queue of a member. Times are in ms since the epoch, 0 for never. The fields with a default belong to Java's member; a
    Rocketlet member has no such state, except the last two, which only it has: the attempt that the first message is in, and
    why the attempt before failed."""

    commit_offset: int
    cached_messages: int = wire(name="cachedMsgCount")
    cached_mib: int = wire(name="cachedMsgSizeInMiB")
    locked: bool
    dropped: bool = wire(name="droped")
    last_pull_ms: int = wire(name="lastPullTimestamp")
    last_consume_ms: int = wire(name="lastConsumeTimestamp", default=0)
    last_lock_ms: int = wire(name="lastLockTimestamp", default=0)
    cached_msg_max_offset: int = 0
    cached_msg_min_offset: int = 0
    transaction_msg_count: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_min_offset: int = 0
    try_unlock_times: int = 0
    attempt: int = 0
    failure: str = ""


def encode_running_info(
    properties: Mapping[str, str], subscriptions: Iterable[Mapping[str, Any]], queues: Mapping[Queue, RunningQueue]
) -> bytes:
    """GET_CONSUMER_RUNNING_INFO's answer, of a client."""
    return b'{"mqTable":%b,"properties":%b,"statusTable":{},"subscriptionSet":%b}' % (
        bodies.object_keys((queue_json(queue), item) for queue, item in queues.items()),
        orjson.dumps(dict(properties)),
        orjson.dumps(list(subscriptions)),
    )


def encode_direct_result(result: str, remark: str, spent_ms: int, *, orderly: bool) -> bytes:
    """CONSUME_MESSAGE_DIRECTLY's answer, of a client; `result` such as CR_SUCCESS, CR_LATER, CR_THROW_EXCEPTION."""
    value = {
        "autoCommit": True,
        "consumeResult": result,
        "order": orderly,
        "remark": remark,
        "spentTimeMills": spent_ms,
    }
    return orjson.dumps(value)


def encode_offset_moved(group: str, queue: Queue, asked: int, new: int) -> bytes:
    """An OffsetMovedEvent, the body of a message."""
    event = {"consumerGroup": group, "messageQueue": queue_json(queue), "offsetNew": new, "offsetRequest": asked}
    return orjson.dumps(event)


def encode_table(table: Mapping[str, str]) -> bytes:
    """A KVTable."""
    return orjson.dumps({"table": table})


def encode_versioned(version: DataVersion, name: str, table: Iterable[tuple[str, Any]]) -> Work[bytes]:
    """GET_ALL_TOPIC_CONFIG's and GET_ALL_SUBSCRIPTIONGROUP_CONFIG's answers."""
    entries = yield from listed((b"%b:%b" % (orjson.dumps(key), encode_json(value)) for key, value in table))
    return b'{"dataVersion":%b,"%b":{%b}}' % (encode_json(version), name.encode(), entries)


def encode_times(spans: Iterable[dict[str, Any]]) -> Work[bytes]:
    """QUERY_CONSUME_TIME_SPAN's answer."""
    found = yield from listed(map(orjson.dumps, spans))
    return b'{"consumeTimeSpanSet":[%b]}' % found


def encode_properties(settings: Mapping[str, Any]) -> bytes:
    """A configuration as `name=value` lines."""
    return "".join(f"{name}={value}\n" for name, value in settings.items()).encode()


def decode_properties(body: bytes) -> dict[str, str]:
    """`name=value` lines; blank lines and lines that begin with # are skipped. Raises BodyError."""
    try:
        lines = [line.strip() for line in body.decode().splitlines()]
    except UnicodeDecodeError:
        raise BodyError("the settings are not UTF-8 text") from None
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


# ------------------------------------------------------------------------------
# Reads the answers of brokers and name servers to administration: the counterpart of `admin_bodies`.
#
# Apache's brokers of 4.9 and 5.3 write the same bodies with more fields; fields that are not named here are ignored.


class MemberConnection(NamedTuple):
    """A connected client. `address` is `ip:port`, `version` a number such as 409 (V4_9_8)."""

    client_id: str
    address: str
    language: str
    version: int


class GroupConnections(NamedTuple):
    """The members of a consumer group at one broker; `subscriptions` maps topics to filter expressions."""

    members: tuple[MemberConnection, ...]
    subscriptions: Mapping[str, str]
    consume_type: str
    message_model: str
    consume_from: str


class GroupsShape(Shape):
    subscription_group_table: dict[str, GroupConfig] | None = None


@answers("group settings", GroupsShape)
def decode_groups(data: GroupsShape) -> dict[str, GroupConfig]:
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
    return data.subscription_group_table or {}


@answers("group settings")
def decode_group_tables(data: Any) -> dict[str, dict[str, Any]]:
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG, with the fields of each group as the broker wrote them."""
    return {str(name): dict(item) for name, item in (data.get("subscriptionGroupTable") or {}).items()}


@answers("topic settings", TopicShape)
def decode_topic_config(data: TopicShape) -> TopicConfig:
    """GET_TOPIC_CONFIG."""
    return topic_of(data)


@answers("delay offsets")
def decode_delay_offsets(data: Any) -> dict[int, int]:
    """GET_ALL_DELAY_OFFSET: by level."""
    return {int(level): int(offset) for level, offset in (data.get("offsetTable") or {}).items()}


@answers("group list")
def decode_group_list(data: Any) -> list[str]:
    """QUERY_TOPIC_CONSUME_BY_WHO."""
    return [str(item) for item in data.get("groupList") or ()]


@answers("table")
def decode_table(data: Any) -> dict[str, str]:
    """A KVTable, such as GET_BROKER_RUNTIME_INFO's."""
    return {str(name): str(value) for name, value in (data.get("table") or {}).items()}


def _read_connection(data: Mapping[str, Any]) -> MemberConnection:
    address = str(data["clientAddr"]).lstrip("/")
    return MemberConnection(str(data["clientId"]), address, str(data["language"]), int(data["version"]))


@answers("consumer connections")
def decode_consumer_connections(data: Any) -> GroupConnections:
    """GET_CONSUMER_CONNECTION_LIST."""
    table = data.get("subscriptionTable") or {}
    return GroupConnections(
        tuple(sorted(map(_read_connection, data.get("connectionSet") or ()))),
        {str(topic): str(item.get("subString") or "*") for topic, item in table.items()},
        str(data.get("consumeType") or ""),
        str(data.get("messageModel") or ""),
        str(data.get("consumeFromWhere") or ""),
    )


@answers("producers")
def decode_all_producers(data: Any) -> dict[str, tuple[MemberConnection, ...]]:
    """GET_ALL_PRODUCER_INFO: connected producers by group."""
    return {
        str(group): tuple(
            MemberConnection(
                str(item["clientId"]), str(item["remoteIP"]).lstrip("/"), str(item["language"]), int(item["version"])
            )
            for item in items
        )
        for group, items in (data.get("data") or {}).items()
    }


class Running(NamedTuple):
    """A member's report on itself. `commit_offsets` has the queues that it owns, `versions` those of its subscriptions,
    `kinds` TAG or SQL92. `failures`, of Rocketlet members only, has the attempt that a queue's first message is in, and
    why the attempt before failed."""

    subscriptions: Mapping[str, str]
    commit_offsets: Mapping[Queue, int]
    properties: Mapping[str, str]
    versions: Mapping[str, int]
    kinds: Mapping[str, str]
    failures: Mapping[Queue, tuple[int, str]] = {}


@answers("running consumer")
def decode_running(data: Any) -> Running:
    """GET_CONSUMER_RUNNING_INFO."""
    subscriptions = data.get("subscriptionSet") or ()
    return Running(
        {str(item["topic"]): str(item.get("subString") or "*") for item in subscriptions},
        {
            _queue_of_key(key): int(item.get("commitOffset", 0))
            for key, item in (data.get("mqTable") or {}).items()
            if not item.get("droped")
        },
        {str(name): str(value) for name, value in (data.get("properties") or {}).items()},
        {str(item["topic"]): int(item.get("subVersion") or 0) for item in subscriptions},
        {str(item["topic"]): str(item.get("expressionType") or TAG) for item in subscriptions},
        {
            _queue_of_key(key): (int(item["attempt"]), str(item.get("failure") or ""))
            for key, item in (data.get("mqTable") or {}).items()
            if int(item.get("attempt") or 0) > 1
        },
    )


@answers("group history")
def decode_report(data: Any) -> dict[str, Any]:
    """GET_GROUP_HISTORY, which only Rocketlet's brokers answer."""
    lists = ("members", "lag", "owners", "disagreements", "events")
    found = {name: list(data[name]) for name in lists}
    return {"full": [], **data, **found, "broker": str(data["broker"])}


@answers("accounts")
def decode_accounts(data: Any) -> dict[str, Any]:
    """GET_BROKER_CLUSTER_ACL_CONFIG."""
    return {**data}


# ------------------------------------------------------------------------------
# Records of Apache's message trace: who sent a message and who handled it, when, for how long, and with what outcome.
#
# A message of the trace topic has many records in its body, and in its keys the ids and keys of all messages that
# they are about: by them readers find it. Fields are separated by \x01, records by \x02
# (TraceDataEncoder.encoderFromContextBean).


TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
REGION: Final = "DefaultRegion"
_FIELD, _RECORD = "\x01", "\x02"


class Kind(IntEnum):
    """The kind of a message: org.apache.rocketmq.common.message.MessageType."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAYED = 3


class ConsumeReturnType(IntEnum):
    """How a handler ended: org.apache.rocketmq.client.consumer.listener.ConsumeReturnType."""

    SUCCESS = 0
    EXCEPTION = 2
    FAILED = 4


class About(NamedTuple):
    """The message that a record is about; `keys` separated by spaces."""

    message_id: str
    keys: str = ""


def sent(
    about: About, *, time_ms: int, group: str, topic: str, tag: str, store_host: str, size: int, took_ms: int,
    kind: Kind, offset_id: str,
) -> str:  # fmt: skip
    """A message that a broker has acknowledged. `time_ms`: when its send began; `store_host`: the broker's `host:port`."""
    return _record(
        "Pub", time_ms, REGION, group, topic, about.message_id, tag, about.keys, store_host, size, took_ms, int(kind),
        offset_id, "true",
    )  # fmt: skip


def transaction_ended(
    about: About,
    *,
    time_ms: int,
    group: str,
    topic: str,
    tag: str,
    store_host: str,
    commits: bool | None,
    is_check: bool,
) -> str:
    """An outcome was sent to the broker at `store_host`, which had asked for it if `is_check`."""
    state = {True: "COMMIT_MESSAGE", False: "ROLLBACK_MESSAGE", None: "UNKNOW"}[commits]  # LocalTransactionState
    return _record(
        "EndTransaction", time_ms, REGION, group, topic, about.message_id, tag, about.keys, store_host, int(Kind.COMMIT),
        about.message_id, state, "true" if is_check else "false",
    )  # fmt: skip


def before_handling(about: About, *, time_ms: int, group: str, handling_id: str, retries: int) -> str:
    """A handler is called. `handling_id` pairs this with what comes after it; messages of a batch share it."""
    keys = about.keys or " "  # Java's split() drops an empty last field, and the decoder asks for eight
    return _record("SubBefore", time_ms, REGION, group, handling_id, about.message_id, retries, keys)


def after_handling(
    about: About, *, time_ms: int, group: str, handling_id: str, took_ms: int, outcome: ConsumeReturnType
) -> str:
    is_success = "true" if outcome is ConsumeReturnType.SUCCESS else "false"
    return _record(
        "SubAfter", handling_id, about.message_id, took_ms, is_success, about.keys, int(outcome), time_ms, group
    )


def _record(*fields: str | int) -> str:
    """A separator inside of a field would make two of it."""
    return _FIELD.join(str(field).translate(_NO_SEPARATORS) for field in fields) + _RECORD


_NO_SEPARATORS: Final = str.maketrans({_FIELD: " ", _RECORD: " "})


# ------------------------------------------------------------------------------
# The users and ACLs of 5.x.


class UserAccount(Shape):
    """UserInfo, the body of AUTH_CREATE_USER and AUTH_UPDATE_USER. Fields that are missing stay as they are."""

    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class AclEntry(Shape):
    """A permission: `resource` such as `Topic:orders`, `actions` such as Pub, `decision` Allow or Deny."""

    resource: str
    actions: list[str] | None = None
    source_ips: list[str] | None = None
    decision: str = "Allow"


class AclPolicy(Shape):
    entries: list[AclEntry] | None = None


class AclShape(Shape):
    policies: list[AclPolicy] | None = None


@reads("user", UserAccount)
def decode_user(data: UserAccount) -> UserAccount:
    return data


@reads("ACL", AclShape)
def decode_acl(data: AclShape) -> list[AclEntry]:
    """The permissions in AclInfo, the body of AUTH_CREATE_ACL and AUTH_UPDATE_ACL."""
    return [entry for policy in data.policies or [] for entry in policy.entries or []]
