"""Bodies of administrative requests and responses, and of Apache's message trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from typing import Annotated, Any, Final, Literal, NamedTuple

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
from .config import MAX_MARK_RANGES, MAX_SHARED_QUEUES, MAX_STATUS_BYTES
from .names import SQL92, Queue, Sql, parent_and_name

# ------------------------------------------------------------------------------
# Bodies of administration: requests of mqadmin to brokers and of brokers to clients, and their responses.
#
# Maps whose keys are message queues are written as fastjson writes them (`bodies.object_keys`). Java also reads text
# keys, Go does not.


_LANGUAGES = {int(language): language.name for language in Language}


class ConnectedClient(NamedTuple):
    """A client as its broker sees it. `address` is `ip:port`; `seen_ms` is the time of its last heartbeat, in ms since
    the epoch, or 0 if the response does not need it."""

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
    """Return the response to GET_CONSUMER_CONNECTION_LIST. `subscriptions` has JSON objects by topic."""
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
    """Return the response to GET_ALL_PRODUCER_INFO."""
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
    """Progress of a group in a queue.

    Attributes:
        broker_offset: end of the queue
        consumer_offset: committed offset of the group
        last_ms: store time of the last consumed message in ms since the epoch; 0 if not reported
        lost: number of messages that were deleted before the group had committed them; 0 if not reported
        in_hand: number of popped messages that are not acknowledged; they are a part of the lag
    """

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
        """Number of messages that are not in flight."""
        return self.lag - self.in_hand


def encode_consume_stats(items: Iterable[tuple[Queue, QueueProgress]], tps: float) -> Work[bytes]:
    """Return the response to GET_CONSUME_STATS.

    Tools of 5.x show the difference of `pullOffset` and `consumerOffset` as messages in flight; without `pullOffset`
    they would show a negative number.

    Args:
        items: the group's progress in each queue
        tps: messages per second over the last minute
    """
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
    """A group's progress in the queues of a topic at a broker: the fields of `QueueProgress`, as one list per field.

    Attributes:
        broker_offsets: end of each queue, by queue id
        consumer_offsets: committed offset of each queue, by queue id
        last_ms: store time of the last consumed message, by queue id; empty if it was not requested
        lost: queue ids and numbers of lost messages, of queues with lost messages
        in_hand: queue ids and numbers of unacknowledged messages, of queues with such messages
        unreadable: queue id, broker offset and consumer offset of queues with lag that are not readable any more
    """

    topic: str
    broker_name: str
    broker_offsets: list[int]
    consumer_offsets: list[int]
    last_ms: list[int]
    lost: list[tuple[int, int]]
    in_hand: list[tuple[int, int]]
    unreadable: list[tuple[int, int, int]]


def encode_progress_columns(topics: Iterable[ProgressColumns]) -> Work[bytes]:
    """Return the response to GET_CONSUME_STATS for Rocketlet clients. Java's form, with an object as text for each
    queue, costs both sides ten times as much."""
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
    """Return the response to GET_BROKER_CONSUME_STATS. Groups without a queue are left out."""
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
    """A broker that has departed from its name server. `topics` is the number of its topics without those that each broker
    creates for itself; `left_ms` is the time in ms since the epoch."""

    name: Text
    cluster: Text
    address: Text
    topics: Long
    left_ms: Long


def encode_departed(brokers: Iterable[Departed]) -> bytes:
    """Return the response to GET_DEPARTED_BROKERS."""
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
    """Return the queue whose JSON text is a key. Raises ValueError."""
    return queue_of(_queue_key.decode(text))


@lru_cache(maxsize=64)
def _queues(topic: str, broker_name: str, count: int) -> tuple[Queue, ...]:
    """Return the queues of a topic at a broker. Many groups read the same topics and share one tuple."""
    return tuple(Queue(topic, broker_name, queue_id) for queue_id in range(count))


@answers("consume statistics", ConsumeStatsShape)
def decode_consume_stats(data: ConsumeStatsShape) -> dict[Queue, QueueProgress]:
    """Decode the response to GET_CONSUME_STATS, in either form."""
    found = {_queue_of_key(key): item for key, item in (data.offset_table or {}).items()}
    for topic, broker_name, ends, offsets, times in data.columns or ():
        if not len(ends) == len(offsets) == len(times or ends):
            raise ValueError(f"columns of topic {topic} have different lengths")
        rows = map(QueueProgress, ends, offsets, times or repeat(0))
        make_queues = _queues if len(ends) <= MAX_SHARED_QUEUES else _queues.__wrapped__
        found.update(zip(make_queues(topic, broker_name, len(ends)), rows, strict=True))
    for topic, broker_name, queue_id, end, offset in data.unreadable or ():
        found[Queue(topic, broker_name, queue_id)] = QueueProgress(end, offset, 0)
    for name, counts in (("lost", data.lost), ("in_hand", data.in_hand)):
        for topic, broker_name, queue_id, count in counts or ():
            queue = Queue(topic, broker_name, queue_id)
            if queue in found:
                found[queue] = msgspec.structs.replace(found[queue], **{name: count})
    return found


class Range(msgspec.Struct, frozen=True):
    """First offset of a queue, offset after its last message, and store time of its last message (ms since the epoch; 0
    if it is empty)."""

    begin: Long = wire(name="minOffset")
    end: Long = wire(name="maxOffset")
    last_ms: Long = wire(name="lastUpdateTimestamp", default=0)


def encode_topic_stats(ranges: Iterable[tuple[Queue, Range]]) -> Work[bytes]:
    """Return the response to GET_TOPIC_STATS_INFO."""
    table = yield from listed(bodies.object_key(queue_json(queue), item) for queue, item in ranges)
    return b'{"offsetTable":{%b}}' % table


class TopicStatsShape(Shape):
    offset_table: dict[str, Range] | None = None


@answers("topic statistics", TopicStatsShape)
def decode_topic_stats(data: TopicStatsShape) -> dict[Queue, Range]:
    return {_queue_of_key(key): item for key, item in (data.offset_table or {}).items()}


def encode_offsets(offsets: Mapping[Queue, int]) -> bytes:
    """Return the body of RESET_CONSUMER_CLIENT_OFFSET, and of the response to INVOKE_BROKER_TO_RESET_OFFSET."""
    return b'{"offsetTable":%b}' % _offset_table(offsets)


def encode_offsets_for_cpp(offsets: Mapping[Queue, int]) -> bytes:
    """Return the body of RESET_CONSUMER_CLIENT_OFFSET for a reset that a C++ client has requested."""
    return orjson.dumps({"offsetTable": [queue_json(queue) | {"offset": item} for queue, item in offsets.items()]})


class OffsetShape(QueueShape):
    offset: Long


class OffsetTableShape(Shape):
    offset_table: dict[str, Long] | list[OffsetShape] | None = None


@answers("offset reset", OffsetTableShape)
def decode_offsets(data: OffsetTableShape) -> dict[Queue, int]:
    """Decode the body of RESET_CONSUMER_CLIENT_OFFSET, in either form."""
    table = data.offset_table or {}
    if isinstance(table, list):
        return {queue_of(item): item.offset for item in table}
    return {_queue_of_key(key): offset for key, offset in table.items()}


def _offset_table(offsets: Mapping[Queue, int]) -> bytes:
    return bodies.object_keys((queue_json(queue), offset) for queue, offset in offsets.items())


def encode_client_status(offsets: Mapping[Queue, int]) -> bytes:
    """Return the response to GET_CONSUMER_STATUS_FROM_CLIENT: a client's offsets."""
    return b'{"consumerTable":{},"messageQueueTable":%b}' % _offset_table(offsets)


class ClientStatusShape(Shape):
    message_queue_table: dict[str, Long] | None = None


@reads("consumer status", ClientStatusShape, max_dialect_bytes=MAX_STATUS_BYTES)
def decode_client_status(data: ClientStatusShape) -> dict[Queue, int]:
    return {_queue_of_key(key): offset for key, offset in (data.message_queue_table or {}).items()}


def encode_consumer_status(clients: Mapping[str, Mapping[Queue, int]]) -> bytes:
    """Return the response to INVOKE_BROKER_TO_GET_CONSUMER_STATUS: offsets by client id."""
    tables = b",".join(b"%b:%b" % (orjson.dumps(name), _offset_table(offsets)) for name, offsets in clients.items())
    return b'{"consumerTable":{%b},"messageQueueTable":{}}' % tables


class RunningQueue(msgspec.Struct, frozen=True, rename="camel"):
    """State of a queue of a member. Times are in ms since the epoch, 0 for never.

    Fields with a default are Java's and stay at it in Rocketlet members, except for the last two, which only Rocketlet
    members have: the present attempt of the first message, and the error of the attempt before.
    """

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


_LIBRARIES: Final = ("/lib/python3", "/site-packages/", "/dist-packages/", "<frozen ")


class RunningHandler(msgspec.Struct, frozen=True, rename="camel"):
    """A handler call that is running, which only Rocketlet members report.

    Attributes:
        message_id, topic, broker_name, queue_id, offset, attempt: of the first message of the call.
        age_ms: how long the call has been running.
        messages: the number of messages of the call.
        stack: the places in the code where the call is, the outermost first; empty if they were not requested.
    """

    message_id: str
    topic: str
    broker_name: str
    queue_id: int
    offset: int
    attempt: int
    age_ms: int
    messages: int = 1
    stack: list[str] = []

    @property
    def queue(self) -> Queue:
        return Queue(self.topic, self.broker_name, self.queue_id)

    @property
    def place(self) -> str:
        """The innermost place of the stack that is not in a library, with the last two parts of its path; empty without a
        stack."""
        own = [place for place in self.stack if not any(part in place for part in _LIBRARIES)] or self.stack
        return "/".join(own[-1].split("/")[-2:]) if own else ""

    def named(self) -> str:
        """Return the call as a text: its message, attempt and age."""
        more = f" and {self.messages - 1} more" if self.messages > 1 else ""
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        place = f"at offset {self.offset} of {self.queue}"
        return f"message {self.message_id}{more} {place}{attempt}, running for {self.age_ms / 1000:.0f} s"


def encode_running_info(
    properties: Mapping[str, str],
    subscriptions: Iterable[Mapping[str, Any]],
    queues: Mapping[Queue, RunningQueue],
    handlers: Sequence[RunningHandler] = (),
    jstack: str | None = None,
) -> bytes:
    """Return a client's response to GET_CONSUMER_RUNNING_INFO. `jstack` is a text for mqadmin; None if it was not
    requested."""
    text = b"" if jstack is None else b'"jstack":%b,' % orjson.dumps(jstack)
    return b'{%b"mqTable":%b,"properties":%b,"runningHandlers":%b,"statusTable":{},"subscriptionSet":%b}' % (
        text,
        bodies.object_keys((queue_json(queue), item) for queue, item in queues.items()),
        orjson.dumps(dict(properties)),
        msgspec.json.encode(handlers),
        orjson.dumps(list(subscriptions)),
    )


def encode_direct_result(result: str, remark: str, spent_ms: int, *, orderly: bool) -> bytes:
    """Return a client's response to CONSUME_MESSAGE_DIRECTLY. `result` is a value such as CR_SUCCESS, CR_LATER or
    CR_THROW_EXCEPTION."""
    value = {
        "autoCommit": True,
        "consumeResult": result,
        "order": orderly,
        "remark": remark,
        "spentTimeMills": spent_ms,
    }
    return orjson.dumps(value)


def encode_offset_moved(group: str, queue: Queue, asked: int, new: int) -> bytes:
    """Return an OffsetMovedEvent, the body of a message."""
    event = {"consumerGroup": group, "messageQueue": queue_json(queue), "offsetNew": new, "offsetRequest": asked}
    return orjson.dumps(event)


def encode_table(table: Mapping[str, str]) -> bytes:
    """Return a KVTable."""
    return orjson.dumps({"table": table})


def encode_versioned(version: DataVersion, name: str, table: Iterable[tuple[str, Any]]) -> Work[bytes]:
    """Return the response to GET_ALL_TOPIC_CONFIG or GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
    entries = yield from listed((b"%b:%b" % (orjson.dumps(key), encode_json(value)) for key, value in table))
    return b'{"dataVersion":%b,"%b":{%b}}' % (encode_json(version), name.encode(), entries)


def encode_times(spans: Iterable[dict[str, Any]]) -> Work[bytes]:
    """Return the response to QUERY_CONSUME_TIME_SPAN."""
    found = yield from listed(map(orjson.dumps, spans))
    return b'{"consumeTimeSpanSet":[%b]}' % found


def encode_properties(settings: Mapping[str, Any]) -> bytes:
    """Return settings as `name=value` lines."""
    return "".join(f"{name}={value}\n" for name, value in settings.items()).encode()


def decode_properties(body: bytes) -> dict[str, str]:
    """Decode `name=value` lines. Blank lines and lines that start with # are skipped. Raises BodyError."""
    try:
        lines = [line.strip() for line in body.decode().splitlines()]
    except UnicodeDecodeError:
        raise BodyError("the settings are not UTF-8 text") from None
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


# ------------------------------------------------------------------------------
# Decoders of responses of brokers and name servers to administrative requests.
#
# Apache's brokers of 4.9 and 5.3 return more fields; the fields that are not declared here are ignored.


class MemberConnection(NamedTuple):
    """A connected client. `address` is `ip:port`; `version` is a number such as 409 (V4_9_8)."""

    client_id: str
    address: str
    language: str
    version: int


class GroupConnections(NamedTuple):
    """The members of a consumer group at one broker. `subscriptions` has the filter of each topic, as `Sql` if its type is
    SQL92."""

    members: tuple[MemberConnection, ...]
    subscriptions: Mapping[str, str]
    consume_type: str
    message_model: str
    consume_from: str


class GroupsShape(Shape):
    subscription_group_table: dict[str, GroupConfig] | None = None


@answers("group settings", GroupsShape)
def decode_groups(data: GroupsShape) -> dict[str, GroupConfig]:
    """Decode the response to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
    return data.subscription_group_table or {}


@answers("group settings")
def decode_group_tables(data: Any) -> dict[str, dict[str, Any]]:
    """Decode the response to GET_ALL_SUBSCRIPTIONGROUP_CONFIG into the unchanged JSON objects of the groups."""
    return {str(name): dict(item) for name, item in (data.get("subscriptionGroupTable") or {}).items()}


@answers("topic settings", TopicShape)
def decode_topic_config(data: TopicShape) -> TopicConfig:
    """Decode the response to GET_TOPIC_CONFIG."""
    return topic_of(data)


@answers("delay offsets")
def decode_delay_offsets(data: Any) -> dict[int, int]:
    """Decode the response to GET_ALL_DELAY_OFFSET: offsets by delay level."""
    return {int(level): int(offset) for level, offset in (data.get("offsetTable") or {}).items()}


@answers("group list")
def decode_group_list(data: Any) -> list[str]:
    """Decode the response to QUERY_TOPIC_CONSUME_BY_WHO: names of groups."""
    return [str(item) for item in data.get("groupList") or ()]


@answers("table")
def decode_table(data: Any) -> dict[str, str]:
    """Decode a KVTable, for example the response to GET_BROKER_RUNTIME_INFO."""
    return {str(name): str(value) for name, value in (data.get("table") or {}).items()}


def _read_connection(data: Mapping[str, Any]) -> MemberConnection:
    address = str(data["clientAddr"]).lstrip("/")
    return MemberConnection(str(data["clientId"]), address, str(data["language"]), int(data["version"]))


def _expression_of(item: Mapping[str, Any]) -> str:
    """Return the filter of a JSON object of a subscription, as `Sql` if its type is SQL92."""
    expression = str(item.get("subString") or "*")
    return Sql(expression) if item.get("expressionType") == SQL92 else expression


@answers("consumer connections")
def decode_consumer_connections(data: Any) -> GroupConnections:
    """Decode the response to GET_CONSUMER_CONNECTION_LIST."""
    table = data.get("subscriptionTable") or {}
    return GroupConnections(
        tuple(sorted(map(_read_connection, data.get("connectionSet") or ()))),
        {str(topic): _expression_of(item) for topic, item in table.items()},
        str(data.get("consumeType") or ""),
        str(data.get("messageModel") or ""),
        str(data.get("consumeFromWhere") or ""),
    )


@answers("statistics")
def decode_rate(data: Any) -> float:
    """Decode the response to VIEW_BROKER_STATS_DATA. Return the rate per second over the last minute."""
    return float(data["statsMinute"]["tps"])


@answers("producers")
def decode_all_producers(data: Any) -> dict[str, tuple[MemberConnection, ...]]:
    """Decode the response to GET_ALL_PRODUCER_INFO: connected producers by group."""
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
    """A member's report about itself.

    Attributes:
        subscriptions: filter expression of each topic, as `Sql` if its type is SQL92
        commit_offsets: committed offset of each queue that the member owns
        properties: settings of the member
        versions: version of each topic's subscription
        failures: from Rocketlet members only: the present attempt of a queue's first message, and the error of the
            attempt before
        handlers: from Rocketlet members only: the handler calls that have been running for longest
    """

    subscriptions: Mapping[str, str]
    commit_offsets: Mapping[Queue, int]
    properties: Mapping[str, str]
    versions: Mapping[str, int]
    failures: Mapping[Queue, tuple[int, str]] = {}
    handlers: Sequence[RunningHandler] = ()


@answers("running consumer")
def decode_running(data: Any) -> Running:
    """Decode a client's response to GET_CONSUMER_RUNNING_INFO."""
    subscriptions = data.get("subscriptionSet") or ()
    return Running(
        {str(item["topic"]): _expression_of(item) for item in subscriptions},
        {
            _queue_of_key(key): int(item.get("commitOffset", 0))
            for key, item in (data.get("mqTable") or {}).items()
            if not item.get("droped")
        },
        {str(name): str(value) for name, value in (data.get("properties") or {}).items()},
        {str(item["topic"]): int(item.get("subVersion") or 0) for item in subscriptions},
        {
            _queue_of_key(key): (int(item["attempt"]), str(item.get("failure") or ""))
            for key, item in (data.get("mqTable") or {}).items()
            if int(item.get("attempt") or 0) > 1
        },
        msgspec.convert(data.get("runningHandlers") or [], list[RunningHandler]),
    )


@answers("group history")
def decode_report(data: Any) -> dict[str, Any]:
    """Decode the response to GET_GROUP_HISTORY, which only Rocketlet's brokers support."""
    lists = ("members", "lag", "owners", "disagreements", "events")
    found = {name: list(data[name]) for name in lists}
    return {"full": [], "limited": [], **data, **found, "broker": str(data["broker"])}


MarkState = Literal["replayed", "discarded"]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class DeadLetterMark(msgspec.Struct):
    """A mark of dead letters: the body of a message in `MARKS_TOPIC`, by which Rocketlet's tools remember which dead letters
    were replayed or discarded.

    Attributes:
        queue: the id of the queue in the group's dead-letter topic.
        ranges: pairs of the first offset and the one after the last.
    """

    group: Text
    queue: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    state: MarkState
    ranges: Annotated[list[tuple[Offset, Offset]], msgspec.Meta(max_length=MAX_MARK_RANGES)]


@reads("mark of dead letters", DeadLetterMark)
def decode_mark(data: DeadLetterMark) -> DeadLetterMark:
    """Decode a mark. Raises BodyError for bytes that Rocketlet's tools would not write."""
    for begin, end in data.ranges:
        if begin >= end:
            raise BodyError(f"a range from {begin} to before {end} has no offset")
    return data


@answers("accounts")
def decode_accounts(data: Any) -> dict[str, Any]:
    """Decode the response to GET_BROKER_CLUSTER_ACL_CONFIG."""
    return {**data}


# ------------------------------------------------------------------------------
# Reports of brokers of 5.5 on lite topics.


class LiteParent(NamedTuple):
    """A broker's report about a parent topic.

    Attributes:
        lite_topics: the number of its lite topics.
        expiration_min: minutes without a message after which a lite topic is deleted, or -1 for never.
        groups: the lite groups of the topic.
    """

    lite_topics: int
    expiration_min: int
    groups: tuple[str, ...]


@answers("parent topic")
def decode_lite_parent(data: Any) -> LiteParent:
    """Decode the response to GET_PARENT_TOPIC_INFO."""
    return LiteParent(int(data["liteTopicCount"]), int(data["ttl"]), tuple(map(str, data["groups"])))


class LiteTopicLag(NamedTuple):
    """The messages of a lite topic that a lite group has not finished. Times are in ms since the epoch, 0 for none.

    Attributes:
        messages: the number of the messages.
        oldest_ms: the store time of the first of the messages.
        in_flight: the number of the messages that are in flight; 0 from Apache's brokers, which do not report it.
        waiting_ms: the store time of the first message that is not in flight; 0 if an earlier one was returned with a
            delay. Apache's brokers do not report it: it is then `oldest_ms`.
    """

    name: str
    messages: int
    oldest_ms: int
    in_flight: int
    waiting_ms: int


class LiteGroupLag(NamedTuple):
    """The messages of a broker's lite topics that a lite group has not finished.

    Attributes:
        topic: the parent topic.
        messages: the number of the messages.
        oldest_ms: the store time of the oldest of the messages, in ms since the epoch; 0 for none.
        in_flight: the number of the messages that are in flight; 0 from Apache's brokers, which do not report it.
        is_wildcard: True if members receive from every lite topic; False from Apache's brokers, which do not report it.
        longest: the lite topics with most of the messages.
        oldest: the lite topics with the oldest of the messages.
        stuck: the lite topics with a subscriber and a message that is not in flight: first those whose next message could
            be delivered now, then those whose next message waits for one in flight. Of each, the longest wait is first.
            Apache's brokers do not report them.
        unread: the lite topics without a subscriber and with a message that is not in flight, the longest wait first;
            Apache's brokers do not report them.
    """

    topic: str
    messages: int
    oldest_ms: int
    in_flight: int
    is_wildcard: bool
    longest: tuple[LiteTopicLag, ...]
    oldest: tuple[LiteTopicLag, ...]
    stuck: tuple[LiteTopicLag, ...]
    unread: tuple[LiteTopicLag, ...]


_LITE_LISTS: Final = ("lagCountTopK", "lagTimestampTopK", "waitingTopK", "unreadTopK")


@answers("lite group")
def decode_lite_lag(data: Any) -> LiteGroupLag:
    """Decode the response to GET_LITE_GROUP_INFO about all lite topics."""
    tops = [tuple(map(_lite_topic_lag, data.get(name) or ())) for name in _LITE_LISTS]
    oldest_ms = max(int(data["earliestUnconsumedTimestamp"]), 0)
    return LiteGroupLag(
        str(data["parentTopic"]),
        int(data["totalLagCount"]),
        oldest_ms,
        int(data.get("inFlight", 0)),
        bool(data.get("wildcard", False)),
        *tops,
    )


def _lite_topic_lag(data: Any) -> LiteTopicLag:
    oldest_ms = max(int(data["earliestUnconsumedTimestamp"]), 0)
    waiting_ms = int(data.get("earliestWaitingTimestamp", oldest_ms))
    name = str(data["liteTopic"])
    _, name = parent_and_name(name) or ("", name)  # Apache's brokers return the name of the lite topic's queue
    return LiteTopicLag(name, int(data["lagCount"]), oldest_ms, int(data.get("inFlight", 0)), waiting_ms)


@answers("lite topic")
def decode_lite_subscribers(data: Any) -> list[tuple[str, str]]:
    """Decode the response to GET_LITE_TOPIC_INFO. Return the client id and the group of each subscriber."""
    return [(str(item["clientId"]), str(item["group"])) for item in data.get("subscriber") or ()]


@answers("client of a lite group")
def decode_lite_client(data: Any) -> int:
    """Decode the response to GET_LITE_CLIENT_INFO. Return to how many lite topics the client is subscribed, or -1 if the
    broker does not know it."""
    return int(data["liteTopicCount"])


# ------------------------------------------------------------------------------
# Records of Apache's message trace: the clients that sent and handled a message, with times, durations and outcomes.
#
# A message of the trace topic contains many records in its body. The trace message's keys are the ids and keys of the
# messages that its records are about, so that tools find the trace message by them. Fields are separated by \x01,
# records by \x02 (TraceDataEncoder.encoderFromContextBean).


TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
REGION: Final = "DefaultRegion"
_FIELD, _RECORD = "\x01", "\x02"


class Kind(IntEnum):
    """Type of a message: org.apache.rocketmq.common.message.MessageType."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAYED = 3


class ConsumeReturnType(IntEnum):
    """Outcome of a handler: org.apache.rocketmq.client.consumer.listener.ConsumeReturnType."""

    SUCCESS = 0
    EXCEPTION = 2
    FAILED = 4


class About(NamedTuple):
    """The message of a record. `keys` are separated by spaces."""

    message_id: str
    keys: str = ""


def sent(
    about: About, *, time_ms: int, group: str, topic: str, tag: str, store_host: str, size: int, took_ms: int,
    kind: Kind, offset_id: str,
) -> str:  # fmt: skip
    """Return the record of a message that a broker has stored.

    Args:
        about: the message
        time_ms: start of the send, in ms since the epoch
        store_host: the broker's `host:port`
        took_ms: duration of the send in ms
    """
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
    """Return the record of a transaction's outcome that was sent to the broker at `store_host`. `is_check` is True if
    the broker had requested the outcome."""
    state = {True: "COMMIT_MESSAGE", False: "ROLLBACK_MESSAGE", None: "UNKNOW"}[commits]  # LocalTransactionState
    return _record(
        "EndTransaction", time_ms, REGION, group, topic, about.message_id, tag, about.keys, store_host, int(Kind.COMMIT),
        about.message_id, state, "true" if is_check else "false",
    )  # fmt: skip


def before_handling(about: About, *, time_ms: int, group: str, handling_id: str, retries: int) -> str:
    """Return the record of a handler's start. `handling_id` is equal in the record of its end, and in all messages of a
    batch."""
    keys = about.keys or " "  # Java's split() drops an empty last field, and the decoder requires eight fields
    return _record("SubBefore", time_ms, REGION, group, handling_id, about.message_id, retries, keys)


def after_handling(
    about: About, *, time_ms: int, group: str, handling_id: str, took_ms: int, outcome: ConsumeReturnType
) -> str:
    """Return the record of a handler's end. `took_ms` is its duration in ms."""
    is_success = "true" if outcome is ConsumeReturnType.SUCCESS else "false"
    return _record(
        "SubAfter", handling_id, about.message_id, took_ms, is_success, about.keys, int(outcome), time_ms, group
    )


class TraceRecord(NamedTuple):
    """A record of the trace, without the fields that tools do not show. A field that the record does not have is empty.

    Attributes:
        kind: Pub for a send, SubBefore and SubAfter for the start and end of a handler, or EndTransaction.
        time_ms: the time of the event, in ms since the epoch; 0 if the record has none, as of older clients.
        handling_id: equal in the records of the start and the end of a handler.
        took_ms: the duration of the send or of the handler.
        attempt: the number of failed attempts before this handler.
        state: the outcome that was sent to the broker, of a transaction.
    """

    kind: str
    message_id: str
    time_ms: int = 0
    group: str = ""
    topic: str = ""
    store_host: str = ""
    handling_id: str = ""
    took_ms: int = 0
    is_success: bool = True
    attempt: int = 0
    state: str = ""


def decode_trace(body: bytes) -> list[TraceRecord]:
    """Decode the records in a message of the trace topic. Any client may write to it, so records that cannot be decoded are
    left out."""
    found = []
    for text in body.decode(errors="replace").split(_RECORD):
        fields = text.split(_FIELD)
        decode = _TRACE_DECODERS.get(fields[0])
        try:
            if decode is not None:
                found.append(decode(fields))
        except (ValueError, IndexError):
            continue
    return found


def _decode_sent(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord(
        "Pub", fields[5], int(fields[1]), fields[3], fields[4], fields[8], took_ms=int(fields[10]),
        is_success=(fields[12] if len(fields) == 13 else fields[13]) == "true",
    )  # fmt: skip


def _decode_transaction_ended(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord("EndTransaction", fields[5], int(fields[1]), fields[3], fields[4], fields[8], state=fields[11])


def _decode_before_handling(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord("SubBefore", fields[5], int(fields[1]), fields[3], handling_id=fields[4], attempt=int(fields[6]))


def _decode_after_handling(fields: Sequence[str]) -> TraceRecord:
    time_ms, group = (int(fields[7]), fields[8]) if len(fields) > 8 else (0, "")
    return TraceRecord(
        "SubAfter", fields[2], time_ms, group, handling_id=fields[1], took_ms=int(fields[3]),
        is_success=fields[4] == "true",
    )  # fmt: skip


_TRACE_DECODERS: Final[Mapping[str, Callable[[Sequence[str]], TraceRecord]]] = {
    "Pub": _decode_sent,
    "EndTransaction": _decode_transaction_ended,
    "SubBefore": _decode_before_handling,
    "SubAfter": _decode_after_handling,
}


def _record(*fields: str | int) -> str:
    """Return an encoded record. Separators inside of fields become spaces."""
    return _FIELD.join(str(field).translate(_NO_SEPARATORS) for field in fields) + _RECORD


_NO_SEPARATORS: Final = str.maketrans({_FIELD: " ", _RECORD: " "})


# ------------------------------------------------------------------------------
# Users and ACLs of 5.x.


class UserAccount(Shape):
    """UserInfo, the body of AUTH_CREATE_USER and AUTH_UPDATE_USER. Missing fields are not changed."""

    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class AclEntry(Shape):
    """A permission. `resource` is a text such as `Topic:orders`, `actions` such as Pub, `decision` Allow or Deny."""

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
    """Decode the permissions in AclInfo, the body of AUTH_CREATE_ACL and AUTH_UPDATE_ACL."""
    return [entry for policy in data.policies or [] for entry in policy.entries or []]
