"""JSON bodies of the remoting protocol: heartbeats, routes, topics, group settings, registration; and the checks of
JSON."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson
from msgspec import Meta
from msgspec import field as wire

from .codes import PERM_READ_WRITE
from .config import (
    MAX_ANSWER_BYTES,
    MAX_DEPTH,
    MAX_DIALECT_BYTES,
    MAX_EXPRESSION_CHARS,
    MAX_GROUPS,
    MAX_HEARTBEAT_TAGS,
    MAX_ID_CHARS,
    MAX_JSON_BYTES,
    MAX_REGISTRATION_BYTES,
    MAX_REQUEST_QUEUES,
    MAX_ROUTE_QUEUES,
    MAX_SEEN_BROKERS,
    MAX_SUBSCRIPTIONS,
    MAX_TABLE_BYTES,
    MAX_TOPIC_QUEUES,
)
from .names import Queue, Subscription, SubscriptionError, parse_subscription

# ------------------------------------------------------------------------------
# Checks of JSON bodies. msgspec checks types, counts and lengths once, when a body is decoded.
#
# A value with the fields of the wire, such as GroupConfig, is a Struct with the wire's names and defaults, which
# msgspec decodes and encodes directly. Where the value differs from its JSON (nulls, enums by ordinal, objects as
# keys), a `Shape` declares the fields of the JSON. Unknown fields are ignored, and numbers and booleans may be written
# as text; fastjson does both as well. A function that `reads` decorates receives a value that has the types of its
# shape.


T = TypeVar("T")
S = TypeVar("S")


Long = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
QueueCount = Annotated[int, Meta(ge=0, le=MAX_TOPIC_QUEUES)]
Text = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Expression = Annotated[str, Meta(max_length=MAX_EXPRESSION_CHARS)]
Enum = str | int  # fastjson reads an enum by its name or by its ordinal
QueueList = Annotated[list[T], Meta(max_length=MAX_REQUEST_QUEUES)]


class BodyError(ValueError):
    """The error for a body that cannot be decoded. The text has the reason."""


def _plain(value: Any) -> Any:
    """Return a value of a subclass of str or int, such as Sql, as the str or int that it is on the wire."""
    for kind in (str, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


encode_json: Final[Callable[[Any], bytes]] = msgspec.json.Encoder(enc_hook=_plain).encode


class Shape(msgspec.Struct, rename="camel"):
    """Declaration of the fields that are read from a JSON object. Fields of the object that are not declared are
    ignored."""


class QueueShape(Shape):
    topic: Text
    broker_name: Text
    queue_id: Int


def reads(
    name: str, shape: Any = Any, *, max_bytes: int = MAX_JSON_BYTES, max_dialect_bytes: int = MAX_DIALECT_BYTES
) -> Callable[[Callable[[S], T]], Callable[[bytes], T]]:
    """Decorate a function that converts a value of a shape, so that it decodes JSON bytes. The decorated function
    raises BodyError for invalid bytes.

    Args:
        name: name of the body in errors
        shape: type of the value that the function receives
        max_bytes: maximum size of the body
        max_dialect_bytes: maximum size of a body in fastjson's dialect, which is parsed in Python
    """
    decoder = msgspec.json.Decoder(shape, strict=False)

    def parse(body: bytes) -> Any:
        if len(body) > max_bytes:
            raise BodyError(f"it has {len(body)} bytes; maximum {max_bytes}")
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # not JSON, but possibly fastjson's dialect
            if len(body) > max_dialect_bytes:
                raise
            return msgspec.convert(loads(body), shape, strict=False)

    def decorate(decode: Callable[[S], T]) -> Callable[[bytes], T]:
        @wraps(decode)
        def decode_body(body: bytes) -> T:
            try:
                return decode(parse(body))
            except SubscriptionError as error:
                raise BodyError(f"{name}: {error}") from None
            except (ValueError, RecursionError, *_UNSHAPED) as error:
                raise BodyError(f"the {name} body cannot be read: {error or repr(error)}") from None

        return decode_body

    return decorate


# raised by functions that receive a value without a shape
_UNSHAPED = (KeyError, TypeError, AttributeError, IndexError, OverflowError)


def answers(name: str, shape: Any = Any) -> Callable[[Callable[[S], T]], Callable[[bytes], T]]:
    """Like `reads`, for responses of brokers and name servers, which may be as large as a frame."""
    return reads(name, shape, max_bytes=MAX_ANSWER_BYTES, max_dialect_bytes=MAX_ANSWER_BYTES)


def shaped(value: object, shape: type[S]) -> S:
    """Convert a decoded JSON value, for example from a state file, to a shape. Raises BodyError."""
    try:
        return msgspec.convert(value, shape, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BodyError(str(error)) from None


# ------------------------------------------------------------------------------
# JSON bodies of requests and responses.
#
# Bodies are encoded without whitespace, because a Go client treats a space inside of `brokerAddrs` as a part of the
# address. Received bodies are decoded as leniently as fastjson decodes. Functions `decode_*` raise BodyError, which
# names the body and the error.


# Heartbeats


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group in a heartbeat.

    Rocketlet's own fields, which Apache's brokers ignore:
        strategy: the member's allocation strategy
        leaving: True if the member releases its queues and wants no share
        assigned: queues that the member owns
        queue_counts: number of queues that the member sees, by broker name and topic
        own_version: the member's version of Rocketlet
    """

    group: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: tuple[Subscription, ...] = ()
    unit_mode: bool = False
    strategy: str | None = None
    leaving: bool = False
    assigned: tuple[Queue, ...] = ()
    queue_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    own_version: str | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The groups of one client."""

    client_id: str
    consumers: tuple[ConsumerData, ...] = ()
    producer_groups: tuple[str, ...] = ()


def encode_subscription(subscription: Subscription) -> dict[str, Any]:
    """Return the JSON object of a subscription."""
    return {
        "classFilterMode": False,
        "codeSet": sorted(subscription.codes),
        "expressionType": subscription.kind,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": sorted(subscription.tags),
        "topic": subscription.topic,
    }


class SubscriptionShape(Shape):
    topic: Text
    sub_string: Expression | None = None
    sub_version: Long | None = None
    expression_type: Text | None = None


def _subscription(data: SubscriptionShape) -> Subscription:
    """Return the subscription of a JSON object.

    The set of hash codes is computed again: a Go client hashes non-ASCII tags differently, so that its own set would
    filter out its messages.
    """
    return parse_subscription(data.topic, data.sub_string, version=data.sub_version or 0, kind=data.expression_type)


_VERSION_CHARS = 40


def spellings(*names: str) -> Mapping[str | int | None, str]:
    """Return the names of an enum by every key that fastjson accepts: the name and the ordinal."""
    return {**dict(enumerate(names)), **dict(zip(names, names, strict=True))}


CONSUME_TYPES: Final = spellings("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS: Final = spellings("BROADCASTING", "CLUSTERING")
CONSUME_FROM: Final = spellings(
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
FILTER_TYPES: Final = spellings("SINGLE_TAG", "MULTI_TAG")


class ConsumerShape(Shape, omit_defaults=True):
    group_name: Text
    consume_type: Enum | None = None
    message_model: Enum | None = None
    consume_from_where: Enum | None = None
    subscription_data_set: Annotated[list[SubscriptionShape], Meta(max_length=MAX_SUBSCRIPTIONS)] | None = None
    unit_mode: bool | None = None
    allocate_strategy: Text | None = None
    rocketlet_version: Text | None = None
    leaving: bool | None = None
    assigned: QueueList[tuple[Text, Text, Int]] | None = None
    queue_counts: (
        Annotated[
            dict[Text, Annotated[dict[Text, QueueCount], Meta(max_length=MAX_SUBSCRIPTIONS)]],
            Meta(max_length=MAX_SEEN_BROKERS),
        ]
        | None
    ) = None


class ProducerShape(Shape):
    group_name: Text


class HeartbeatShape(Shape):
    client_id: Text = wire(name="clientID")
    consumer_data_set: Annotated[list[ConsumerShape], Meta(max_length=MAX_GROUPS)] | None = None
    producer_data_set: Annotated[list[ProducerShape], Meta(max_length=MAX_GROUPS)] | None = None


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    consumers = list(map(_shape_of, heartbeat.consumers))
    return encode_json(
        HeartbeatShape(heartbeat.client_id, consumers, list(map(ProducerShape, heartbeat.producer_groups)))
    )


def _shape_of(data: ConsumerData) -> ConsumerShape:
    """Return the JSON object of a group. Rocketlet's own fields are None if they are empty, so that they are left out."""
    subscriptions: Any = list(map(encode_subscription, data.subscriptions))  # includes fields that no broker reads
    return ConsumerShape(
        data.group,
        data.consume_type,
        data.message_model,
        data.consume_from,
        subscriptions,
        data.unit_mode,
        data.strategy or None,
        data.own_version or None,
        data.leaving or None,
        list(data.assigned) or None,
        {name: dict(counts) for name, counts in data.queue_counts.items()} or None,
    )


def _consumer(data: ConsumerShape) -> ConsumerData:
    return ConsumerData(
        group=data.group_name,
        consume_type=CONSUME_TYPES.get(data.consume_type, "CONSUME_PASSIVELY"),
        message_model=MESSAGE_MODELS.get(data.message_model, "CLUSTERING"),
        consume_from=CONSUME_FROM.get(data.consume_from_where, "CONSUME_FROM_LAST_OFFSET"),
        subscriptions=tuple(map(_subscription, data.subscription_data_set or ())),
        unit_mode=bool(data.unit_mode),
        strategy=data.allocate_strategy,
        leaving=bool(data.leaving),
        assigned=tuple(Queue(*item) for item in data.assigned or ()),
        queue_counts=data.queue_counts or {},
        own_version=(data.rocketlet_version or "")[:_VERSION_CHARS] or None,
    )


@reads("heartbeat", HeartbeatShape)
def decode_heartbeat(data: HeartbeatShape) -> Heartbeat:
    subscriptions = (item for consumer in data.consumer_data_set or () for item in consumer.subscription_data_set or ())
    tags = sum(item.sub_string.count("||") + 1 for item in subscriptions if item.sub_string and "||" in item.sub_string)
    if tags > MAX_HEARTBEAT_TAGS:
        raise SubscriptionError(f"its expressions name {tags} tags; maximum {MAX_HEARTBEAT_TAGS}")
    return Heartbeat(
        client_id=data.client_id,
        consumers=tuple(map(_consumer, data.consumer_data_set or ())),
        producer_groups=tuple(item.group_name for item in data.producer_data_set or ()),
    )


class _NamedShape(Shape):
    group_name: Any = None


class _NamesShape(Shape):
    client_id: Any = wire(name="clientID", default=None)
    consumer_data_set: list[_NamedShape] | None = None
    producer_data_set: list[_NamedShape] | None = None


@reads("heartbeat", _NamesShape)
def _names_in(data: _NamesShape) -> tuple[str, list[str]]:
    named = (*(data.consumer_data_set or ()), *(data.producer_data_set or ()))
    return str(data.client_id or ""), [str(item.group_name or "") for item in named]


def names_in_heartbeat(body: bytes) -> tuple[str, list[str]]:
    """Return the client id and the group names of a heartbeat that was refused because of another field; empty if these
    fields are invalid, too."""
    try:
        return _names_in(body)
    except BodyError:
        return "", []


# Queues


def queue_json(queue: Queue) -> dict[str, Any]:
    return {
        "brokerName": queue.broker_name,
        "queueId": queue.queue_id,
        "topic": queue.topic,
    }


def queue_of(data: QueueShape) -> Queue:
    """Return the queue of a JSON object."""
    return Queue(data.topic, data.broker_name, data.queue_id)


# Topics and routes

MESSAGE_TYPE: Final = "message.type"
MESSAGE_TYPES: Final = frozenset(("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "LITE", "MIXED", "UNSPECIFIED"))
LITE_EXPIRATION: Final = "lite.topic.expiration"
NO_EXPIRATION: Final = -1
RETRIED_FIRST: Final = "priority.retried.first"
MAX_LITE_EXPIRATION_MIN: Final = 43_200
DEDUP: Final = "dedup"
"""Rocketlet's own attribute of a topic: the time, such as `10m`, for which a repeated send gets the first result."""
NO_DEDUP: Final = "off"
MAX_DEDUP_S: Final = 86_400
DEDUP_FLAG: Final = 1 << 16
"""The bit of the system flag that routes of a topic with this attribute have."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic at a broker.

    Attributes:
        message_type: the attribute `message.type` of 5.x, the type of message that the topic is for; empty if it is not set
        lite_expiration_min: the attribute `lite.topic.expiration` of 5.5: minutes without a message after which a lite
            topic of this parent topic is deleted; -1 for never
        retried_first: the attribute `priority.retried.first`, which Apache's brokers do not have: True if a redelivered
            message of a topic with priorities keeps its level; otherwise it comes after the waiting messages of all levels
        dedup: Rocketlet's attribute `dedup`, a time such as `10m`, or `off`
    """

    name: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = PERM_READ_WRITE
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    message_type: str = ""
    lite_expiration_min: int = NO_EXPIRATION
    retried_first: bool = False
    dedup: str = NO_DEDUP

    @property
    def has_dedup(self) -> bool:
        """True if a repeated send to the topic gets the first result."""
        return self.dedup != NO_DEDUP

    @property
    def route_flag(self) -> int:
        """The system flag that routes of the topic have."""
        return self.sys_flag | DEDUP_FLAG if self.has_dedup else self.sys_flag

    @property
    def is_lite(self) -> bool:
        """True if the topic is the parent of lite topics."""
        return self.message_type == "LITE"

    @property
    def has_priorities(self) -> bool:
        """True if the topic is for messages with priorities: a queue for each level, the highest last."""
        return self.message_type == "PRIORITY"


class DataVersion(msgspec.Struct, frozen=True):
    timestamp: Long = 0
    counter: Long = 0


def topic_json(topic: TopicConfig) -> dict[str, Any]:
    """Return the JSON object of a topic."""
    attributes = {MESSAGE_TYPE: topic.message_type} if topic.message_type else {}
    if topic.lite_expiration_min != NO_EXPIRATION:
        attributes[LITE_EXPIRATION] = str(topic.lite_expiration_min)
    if topic.retried_first:
        attributes[RETRIED_FIRST] = "true"
    if topic.has_dedup:
        attributes[DEDUP] = topic.dedup
    return {
        **({"attributes": attributes} if attributes else {}),
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.route_flag,
        "writeQueueNums": topic.write_queues,
    }


class TopicShape(Shape):
    topic_name: Text
    read_queue_nums: QueueCount = 16
    write_queue_nums: QueueCount = 16
    perm: Int = PERM_READ_WRITE
    topic_filter_type: Enum | None = None
    topic_sys_flag: Int = 0
    order: bool | None = None
    attributes: Any = None  # topics of other brokers may have more attributes


def read_topic(data: object) -> TopicConfig:
    """Return the topic of a JSON object that is decoded already. Raises BodyError."""
    return topic_of(shaped(data, TopicShape))


def topic_of(data: TopicShape) -> TopicConfig:
    """Return the topic of a JSON object."""
    return TopicConfig(
        data.topic_name,
        data.read_queue_nums,
        data.write_queue_nums,
        data.perm,
        FILTER_TYPES.get(data.topic_filter_type, "SINGLE_TAG"),
        data.topic_sys_flag & ~DEDUP_FLAG,
        bool(data.order),
        _message_type(data.attributes),
        _lite_expiration_min(data.attributes),
        isinstance(data.attributes, dict) and data.attributes.get(RETRIED_FIRST) == "true",
        _dedup(data.attributes),
    )


def _message_type(attributes: Any) -> str:
    found = attributes.get(MESSAGE_TYPE) if isinstance(attributes, dict) else None
    return found if isinstance(found, str) and found in MESSAGE_TYPES else ""


def _lite_expiration_min(attributes: Any) -> int:
    found = str(attributes.get(LITE_EXPIRATION)) if isinstance(attributes, dict) else ""
    return NO_EXPIRATION if expiration_fault(found) else int(found)  # invalid: a value of another broker


def _dedup(attributes: Any) -> str:
    found = str(attributes.get(DEDUP)) if isinstance(attributes, dict) else NO_DEDUP
    return NO_DEDUP if dedup_fault(found) else found  # invalid: a value of another broker


_DURATION: Final = re.compile(r"([1-9][0-9]{0,8})([smhd])", re.ASCII).fullmatch
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> int:
    """Return the seconds of a duration such as `10m`; 0 for any other text."""
    found = _DURATION(text)
    return int(found[1]) * _UNITS_S[found[2]] if found else 0


def dedup_fault(text: str) -> str | None:
    """Return why the time of an attribute `dedup` is invalid; None if it is valid."""
    if text == NO_DEDUP or 0 < duration_s(text) <= MAX_DEDUP_S:
        return None
    return f"got {text[:40]!r}; expected 1s to 1d, such as 10m, or {NO_DEDUP}"


def expiration_fault(text: str) -> str | None:
    """Return why the minutes of an expiration are invalid; None if they are valid."""
    if text == str(NO_EXPIRATION) or (
        text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= MAX_LITE_EXPIRATION_MIN
    ):
        return None
    return f"got {text[:40]!r}; expected {NO_EXPIRATION} or 1 to {MAX_LITE_EXPIRATION_MIN} minutes"


class NewTopicsShape(Shape):
    topic_config_list: list[TopicShape] | None = None


@reads("list of topics", NewTopicsShape)
def decode_new_topics(data: NewTopicsShape) -> list[tuple[TopicConfig, str]]:
    """Decode UPDATE_AND_CREATE_TOPIC_LIST: topics, each with changes of attributes for `changed_topic`."""
    return [(topic_of(item), _attribute_changes(item.attributes)) for item in data.topic_config_list or []]


def _attribute_changes(attributes: Any) -> str:
    if not isinstance(attributes, dict):
        return ""
    return ",".join(
        f"{name if name.startswith(('+', '-')) else '+' + name}={value}" for name, value in attributes.items()
    )


def encode_data_version(version: DataVersion) -> bytes:
    return encode_json(version)


@reads("data version", DataVersion)
def decode_data_version(data: DataVersion) -> DataVersion:
    return data


class QueueData(msgspec.Struct, frozen=True, rename="camel"):
    """Number of queues of a topic on one broker."""

    broker_name: Text
    read_queues: QueueCount = wire(name="readQueueNums")
    write_queues: QueueCount = wire(name="writeQueueNums")
    perm: Int
    sys_flag: Int = wire(name="topicSysFlag", default=0)


class BrokerData(msgspec.Struct, frozen=True, rename="camel"):
    """Addresses of a broker name by broker id; id 0 is the master."""

    name: Text = wire(name="brokerName")
    addresses: Mapping[int, Text] = wire(name="brokerAddrs")
    cluster: Text = ""


class Route(msgspec.Struct, frozen=True):
    """Queues and brokers of a topic."""

    queues: tuple[QueueData, ...]
    brokers: tuple[BrokerData, ...]
    order_conf: str | None = None


def encode_route(route: Route) -> bytes:
    return encode_json({"brokerDatas": route.brokers, "filterServerTable": {}, "queueDatas": route.queues})


class RouteShape(Shape):
    queue_datas: tuple[QueueData, ...] | None = None
    broker_datas: tuple[BrokerData, ...] | None = None
    order_topic_conf: str | None = None


@answers("route", RouteShape)
def decode_route(data: RouteShape) -> Route:
    queues = data.queue_datas or ()
    count = sum(max(item.read_queues, item.write_queues) for item in queues)
    if count > MAX_ROUTE_QUEUES:
        raise ValueError(f"it has {count} queues; maximum {MAX_ROUTE_QUEUES}")
    return Route(queues, data.broker_datas or (), data.order_topic_conf)


def encode_cluster(brokers: Iterable[BrokerData]) -> bytes:
    table = {broker.name: broker for broker in brokers}
    clusters: dict[str, list[str]] = {}
    for broker in table.values():
        clusters.setdefault(broker.cluster, []).append(broker.name)
    return encode_json({"brokerAddrTable": table, "clusterAddrTable": clusters})


class ClusterShape(Shape):
    broker_addr_table: dict[str, BrokerData] | None = None


@answers("cluster", ClusterShape)
def decode_cluster(data: ClusterShape) -> list[BrokerData]:
    return list((data.broker_addr_table or {}).values())


def encode_topic_list(topics: Iterable[str]) -> Work[bytes]:
    found = yield from listed(map(orjson.dumps, topics))
    return b'{"topicList":[%b]}' % found


class TopicListShape(Shape):
    topic_list: list[str] | None = None


@reads("list of topic names", TopicListShape)
def decode_topic_names(data: TopicListShape) -> list[str]:
    """Decode DELETE_TOPIC_IN_BROKER_LIST: names of topics."""
    return data.topic_list or []


@answers("topic list", TopicListShape)
def decode_topic_list(data: TopicListShape) -> list[str]:
    return data.topic_list or []


# ------------------------------------------------------------------------------
# The settings of a consumer group at a broker. The wire calls such a group a subscription group.


NO_RATE: Final = "off"
MAX_RATE: Final = 1_000_000
_RATE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)/([smh])", re.ASCII).fullmatch


def rate_of(text: str) -> float:
    """Return the messages per second of a rate such as `100/s` or `30/m`; 0 for any other text."""
    found = _RATE(text)
    return float(found[1]) / _UNITS_S[found[2]] if found else 0.0


def rate_fault(text: str) -> str | None:
    """Return why the rate of a group is invalid; None if it is valid."""
    if text == NO_RATE or 0 < rate_of(text) <= MAX_RATE:
        return None
    return f"got {text[:40]!r}; expected up to {MAX_RATE}/s, such as 100/s or 30/m, or {NO_RATE}"


class GroupConfig(msgspec.Struct, frozen=True, rename="camel"):
    """The settings of a consumer group at a broker (UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 200).

    Attributes:
        strict: Rocketlet's own field: True if the broker rejects a heartbeat whose subscriptions differ from those of the
            other members; clients of the gRPC protocol are not checked
        consume_orderly: True if pop clients get the messages of each message group in order
        rate: Rocketlet's own field: the messages of a topic that its brokers hand out, such as `100/s`, or `off`
    """

    name: Text = wire(name="groupName")
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queues: Long = wire(name="retryQueueNums", default=1)
    retry_max_times: Long = 16
    broker_id: Long = 0
    slow_broker_id: Long = wire(name="whichBrokerWhenConsumeSlowly", default=1)
    notify_enable: bool = wire(name="notifyConsumerIdsChangedEnable", default=True)
    strict: bool = False
    consume_orderly: bool = wire(name="consumeMessageOrderly", default=False)
    attributes: dict[str, str] = {}
    rate: str = NO_RATE

    @property
    def has_rate(self) -> bool:
        """True if brokers limit the messages that they hand out to the group."""
        return self.rate != NO_RATE

    @property
    def lite_topic(self) -> str:
        """The parent topic whose lite topics the group consumes; empty for a group that is not a lite group."""
        return self.attributes.get(LITE_BIND, "")

    @property
    def lite_is_exclusive(self) -> bool:
        """True if only one client of the group may subscribe to a lite topic."""
        return self.attributes.get(LITE_MODEL) == EXCLUSIVE

    @property
    def lite_is_wildcard(self) -> bool:
        """True if clients of the group receive from every lite topic."""
        return LITE_WILDCARD in self.attributes

    @property
    def lite_quota(self) -> int:
        """The maximum number of lite topics that a client of the group may subscribe to; -1 for no maximum."""
        return int(self.attributes.get(LITE_QUOTA, DEFAULT_LITE_QUOTA))

    @property
    def priority_factor(self) -> int:
        """The percentage of receives that begin with the most urgent messages, in topics of the type PRIORITY."""
        return int(self.attributes.get(PRIORITY_FACTOR, DEFAULT_PRIORITY_FACTOR))

    def resets_lite(self, name: str) -> bool:
        """Return True if the group's attribute of this name, one of LITE_RESET_*, is `true`."""
        return self.attributes.get(name) == "true"


# Attributes of groups, as Apache's SubscriptionGroupAttributes names them
LITE_BIND: Final = "lite.bind.topic"
LITE_MODEL: Final = "lite.sub.model"
LITE_QUOTA: Final = "lite.sub.client.quota"
LITE_EVENTS: Final = "lite.sub.client.max.event.cnt"  # kept and not used: no news are queued here
LITE_RESET_EXCLUSIVE: Final = "lite.sub.reset.offset.exclusive"
LITE_RESET_UNSUBSCRIBED: Final = "lite.sub.reset.offset.unsubscribe"
LITE_WILDCARD: Final = "lite.sub.wildcard"
PRIORITY_FACTOR: Final = "priority.factor"
SHARED, EXCLUSIVE = "Shared", "Exclusive"
DEFAULT_LITE_QUOTA: Final = 2000
DEFAULT_PRIORITY_FACTOR: Final = 100


def read_group(data: object) -> GroupConfig:
    """Return the settings of a JSON object that is decoded already. Raises BodyError."""
    return shaped(data, GroupConfig)


def encode_group(group: GroupConfig) -> bytes:
    return encode_json(group)


def encode_group_in(table: Mapping[str, Any], group: GroupConfig) -> bytes:
    """Return the JSON object of a group with the fields of `table`, its JSON object at a broker, that only this broker
    has."""
    return encode_json({**table, **msgspec.to_builtins(group, enc_hook=_plain)})


def encode_new_group(group: GroupConfig, table: Mapping[str, Any]) -> bytes:
    """Return the JSON object of a group for a broker that does not have the group. Apache's brokers require that each
    attribute is named as an addition.

    Args:
        table: the group's JSON object at another broker, whose fields are kept; empty if no broker has the group
    """
    added = {f"+{name}": value for name, value in group.attributes.items()}
    return encode_group_in(table, msgspec.structs.replace(group, attributes=added))


@reads("subscription group", GroupConfig)
def decode_group(data: GroupConfig) -> GroupConfig:
    return data


class GroupNamesShape(Shape):
    group_name_list: list[Text] | None = None
    clean_offset: bool = False


@reads("list of group names", GroupNamesShape)
def decode_group_names(data: GroupNamesShape) -> tuple[list[str], bool]:
    """Decode DELETE_SUBSCRIPTIONGROUP_LIST: names of groups, and True if their offsets are to be deleted as well."""
    return data.group_name_list or [], data.clean_offset


# ------------------------------------------------------------------------------
# The body of REGISTER_BROKER: a broker's topics, as JSON or compressed.


_ONE_PIECE_BYTES: Final = (
    MAX_DIALECT_BYTES  # maximum size of a registration that is parsed in one piece, including fastjson's dialect
)
_PIECE_BYTES: Final = 16_384
_ATTEMPTS: Final = 16  # maximum attempts to find the end of a topic that contains objects
_INFLATED_BYTES: Final = 262_144  # bytes that are decompressed in one piece of work
_BETWEEN: Final = re.compile(rb'\}\s*,\s*("[^"\\]*"\s*:\s*\{)')  # where one topic may end and the next one start


def encode_registration(version: DataVersion, topics: Iterable[TopicConfig]) -> bytes:
    """Return the body of REGISTER_BROKER, not compressed."""
    table = {topic.name: topic_json(topic) for topic in topics}
    wrapper = {"dataVersion": version, "topicConfigTable": table}
    return encode_json({"filterServerList": [], "topicConfigSerializeWrapper": wrapper})


class TopicTableShape(Shape):
    data_version: DataVersion | None = None
    topic_config_table: dict[str, TopicShape] | None = None


class RegistrationShape(Shape):
    topic_config_serialize_wrapper: TopicTableShape


@reads("broker registration's version", DataVersion, max_bytes=MAX_REGISTRATION_BYTES)
def _decode_version(data: DataVersion) -> DataVersion:
    return data


@reads("broker registration", RegistrationShape, max_bytes=MAX_REGISTRATION_BYTES)
def _decode_whole(data: RegistrationShape) -> tuple[DataVersion, list[TopicConfig]]:
    wrapper = data.topic_config_serialize_wrapper
    return wrapper.data_version or DataVersion(), list(map(topic_of, (wrapper.topic_config_table or {}).values()))


class _RawTableShape(Shape):
    data_version: DataVersion | None = None
    topic_config_table: msgspec.Raw = msgspec.Raw(b"{}")


class _RawShape(Shape):
    topic_config_serialize_wrapper: _RawTableShape


_raw = msgspec.json.Decoder(_RawShape, strict=False)


@reads("broker registration's topics", dict[str, TopicShape])
def _decode_topics(data: dict[str, TopicShape]) -> list[TopicConfig]:
    return list(map(topic_of, data.values()))


def decode_registration(body: bytes) -> Work[tuple[DataVersion, list[TopicConfig]]]:
    """Decode the body of REGISTER_BROKER, not compressed. Raises BodyError."""
    if len(body) <= _ONE_PIECE_BYTES:
        return _decode_whole(body)
    if len(body) > MAX_REGISTRATION_BYTES:
        raise BodyError(f"the broker registration has {len(body)} bytes; maximum {MAX_REGISTRATION_BYTES}")
    try:
        wrapper = _raw.decode(body).topic_config_serialize_wrapper
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(f"the broker registration body cannot be read: {error}") from None
    yield
    table = bytes(wrapper.topic_config_table).strip()
    topics = (yield from _topics_in(table)) if table != b"null" else []
    return wrapper.data_version or DataVersion(), topics


def _topics_in(table: bytes) -> Work[list[TopicConfig]]:
    """Decode the topics of a JSON object, a few KB at a time.

    The end of a topic is a guess: `_BETWEEN` also matches within a topic. If the text between two positions parses as
    the content of an object, both positions are between two entries; otherwise the next match is tried.
    """
    topics: list[TopicConfig] = []
    at = table.find(b"{") + 1
    end = table.rfind(b"}")
    while at < end:
        stop = at + _PIECE_BYTES
        for attempt in range(_ATTEMPTS + 1):
            between = _BETWEEN.search(table, min(stop, end), end)
            stop, following = (between.start() + 1, between.start(1)) if between else (end, end)
            try:
                topics += _decode_topics(b"{%b}" % table[at:stop])
                break
            except BodyError:
                if between is None or attempt == _ATTEMPTS:
                    raise
        at = following
        yield
    return topics


def decode_compressed_registration(body: bytes) -> Work[tuple[DataVersion, list[TopicConfig]]]:
    """Decode the compressed body of REGISTER_BROKER. Raises BodyError.

    The body is a zlib stream of the version's JSON and one line `name read write perm filterType` for each topic, each
    with its length before it.
    """
    plain = yield from _inflated(body)
    parts = _Parts(plain)
    topics: list[TopicConfig] = []
    try:
        version = _decode_version(parts.part())
        for number in range(parts.count()):
            topics.append(_topic_of_line(parts.part().decode().split(" ")))
            if number % SLICE == 0:
                yield
    except ValueError as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    return version, topics


def _topic_of_line(line: list[str]) -> TopicConfig:
    name, read, write, perm, *_ = line
    return read_topic({"topicName": name, "readQueueNums": read, "writeQueueNums": write, "perm": perm})


def _inflated(body: bytes) -> Work[bytes]:
    stream = zlib.decompressobj()
    found: list[bytes] = []
    size = 0
    try:
        while not stream.eof and size <= MAX_REGISTRATION_BYTES:
            piece = stream.decompress(stream.unconsumed_tail or (body if not found else b""), _INFLATED_BYTES)
            if not piece and not stream.unconsumed_tail:
                break
            found.append(piece)
            size += len(piece)
            yield
    except zlib.error as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    if not stream.eof or size > MAX_REGISTRATION_BYTES:
        raise BodyError(f"the broker registration is cut off, or inflates to more than {MAX_REGISTRATION_BYTES} bytes")
    return b"".join(found)


class _Parts:
    """Reader of numbers and length-prefixed byte strings. Raises ValueError for a length beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self) -> int:
        """Return the number of parts that follow, each of which has at least its own length."""
        number = int.from_bytes(self._take(4), "big")
        if number > (len(self._data) - self._at) // 4:
            raise ValueError(f"{number} parts in {len(self._data) - self._at} bytes")
        return number

    def part(self) -> bytes:
        return self._take(int.from_bytes(self._take(4), "big"))

    def _take(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"{size} bytes at byte {begin} of {len(self._data)}")
        return self._data[begin : self._at]


# ------------------------------------------------------------------------------
# fastjson's dialect of JSON, with unquoted numbers and objects as keys of maps.
#
#     {"brokerAddrs":{0:"10.0.0.1:10911"}}        {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}
#
# A key that is an object becomes the text of that object, so that the result is an ordinary `dict[str, ...]`. Valid
# JSON, which is the usual case, is parsed by orjson.


# Possessive quantifiers, and matches that start where the last one ended: the cost of invalid text grows with its
# length, not with the square of it.
_TOKEN = re.compile(r'\s*+("(?:[^"\\]|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]++)', re.DOTALL)


# A broker's table has an object as key for each queue. Parsing a thousand of them token by token takes 15 ms, so common
# ones are replaced by one regular expression.
_MEMBER = r'"[^"\x00-\x1f]*+":(?:"[^"\x00-\x1f]*+"|-?[1-9]\d{0,17}+|0)'
_OBJECT_KEY = re.compile(rf"(\{{{_MEMBER}(?:,{_MEMBER})*+\}})(?=:)")


class JsonError(ValueError):
    """The error for a text that is neither JSON nor fastjson's dialect."""


def loads(data: bytes) -> Any:
    """Parse JSON or fastjson's dialect. Raises JsonError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        text = data.decode()
        try:
            return orjson.loads(_with_text_keys(text))
        except orjson.JSONDecodeError:
            return _Reader(text).document()
    except (UnicodeDecodeError, IndexError):
        raise JsonError(f"this is not JSON: {data[:80]!r}") from None


def object_keys(pairs: Iterable[tuple[Any, Any]]) -> bytes:
    """Return a map whose keys are objects, in the form that fastjson writes and Go's client expects: `{{"a":1}:2}`."""
    return b"{%b}" % b",".join(object_key(key, value) for key, value in pairs)


def object_key(key: Any, value: Any) -> bytes:
    """Return one entry of a map that `object_keys` returns."""
    return b"%b:%b" % (encode_json(key), encode_json(value))


def _with_text_keys(text: str) -> str:
    """Return the text with each simple object that is a key replaced by its quoted text. Return the text unchanged if
    strings and keys cannot be distinguished.

    Without a backslash, a position after an even number of quotes is outside of any string.
    """
    if "\\" in text:
        return text
    parts = _OBJECT_KEY.split(text)
    if any(part.count('"') % 2 for part in parts[::2]):
        return text
    parts[1::2] = ['"' + key.replace('"', '\\"') + '"' for key in parts[1::2]]
    return "".join(parts)


class _Reader:
    """Recursive parser of fastjson's dialect."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._at = 0
        end = 0
        while match := _TOKEN.match(text, end):
            self._tokens.append(match[1])
            end = match.end()
        if text[end:].strip():
            raise JsonError(f"this is not JSON from character {end} on: {text[end : end + 40]!r}")

    def document(self) -> Any:
        value = self._value(0)
        if self._at != len(self._tokens):
            raise JsonError(f"text after the JSON value: {self._tokens[self._at][:40]!r}")
        return value

    def _next(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise JsonError(f"JSON nested deeper than {MAX_DEPTH}")
        token = self._next()
        if token == "{":
            return self._object(depth)
        if token == "[":
            return self._array(depth)
        return _scalar(token)

    def _array(self, depth: int) -> list[Any]:
        values: list[Any] = []
        while self._peek() != "]":
            values.append(self._value(depth + 1))
            if self._peek() == ",":
                self._next()
        self._next()
        return values

    def _object(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while self._peek() != "}":
            key = self._value(depth + 1)
            if self._next() != ":":
                raise JsonError("a key has no colon after it")
            pairs[key if isinstance(key, str) else orjson.dumps(key).decode()] = self._value(depth + 1)
            if self._peek() == ",":
                self._next()
        self._next()
        return pairs


def _scalar(token: str) -> Any:
    try:
        return orjson.loads(token)
    except orjson.JSONDecodeError:
        raise JsonError(f"this is not a JSON value: {token[:40]!r}") from None


# ------------------------------------------------------------------------------
# Long work in slices: a generator that yields after each small piece of work, and returns the result. Most pieces take
# less than a millisecond, and the caller may do other work at each yield.


Work = Generator[None, None, T]

SLICE: Final = 64  # items of a list in one piece of work, at about 5 us each
WRITES: Final = 16  # clients in one piece of work that sends a frame to each, at about 30 us each
LOOKS: Final = 1024  # items in one piece of work that only examines them, at about 0.3 us each


def finish(work: Work[T]) -> T:
    """Run the work without a pause, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def refuse_beyond(size: int) -> None:
    """Raise BodyError if a response of this size is too large for a client."""
    if size > MAX_TABLE_BYTES:
        raise BodyError(f"the response exceeds {MAX_TABLE_BYTES} bytes; request less, such as one group or topic")


def joined(parts: Iterable[bytes]) -> Work[bytes]:
    """Join the parts with commas. Each part is made only when it is needed."""
    found: list[bytes] = []
    pieces: list[bytes] = []  # joined slices, so that the last join has few items
    for part in parts:
        found.append(part)
        if len(found) == SLICE:
            pieces.append(b",".join(found))
            found.clear()
            yield
    if found:
        pieces.append(b",".join(found))
    content = b",".join(pieces)
    if len(pieces) > 1:  # copying some MB takes milliseconds, and the caller copies them again
        yield
    return content


def listed(parts: Iterable[bytes]) -> Work[bytes]:
    """Like `joined`, for a response. Raises BodyError as soon as the response is too large for a client."""

    def counted() -> Iterator[bytes]:
        size = 0
        for part in parts:
            size += len(part) + 1
            refuse_beyond(size)
            yield part

    return joined(counted())
