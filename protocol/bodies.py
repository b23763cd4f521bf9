"""The JSON bodies of requests and answers.

Bodies are written without blanks (a Go client takes a blank inside `brokerAddrs` for a part of the address), and read as
leniently as fastjson reads. `decode_*` raise BodyError, which names the body and its fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import orjson
from msgspec import Meta
from msgspec import field as wire

from .codes import PERM_READ_WRITE
from .config import MAX_GROUPS, MAX_ROUTE_QUEUES, MAX_SEEN_BROKERS, MAX_SUBSCRIPTIONS
from .queue import Queue
from .schema import (
    BodyError,
    Enum,
    Expression,
    Int,
    Long,
    QueueCount,
    QueueList,
    QueueShape,
    Shape,
    Text,
    answers,
    reads,
    shaped,
)
from .subscription import Subscription, parse_subscription
from .work import Work, listed

# Heartbeats


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group in a heartbeat. Rocketlet's own fields, which Apache's brokers ignore: `strategy`, how the member
    allocates queues; `leaving`, that it gives up its queues and wants no share; `assigned`, the queues that it
    owns; `queue_counts`, how many queues it sees, by broker name and topic; `own_version`, which Rocketlet it is."""

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
    client_id: str
    consumers: tuple[ConsumerData, ...] = ()
    producer_groups: tuple[str, ...] = ()


def encode_subscription(subscription: Subscription) -> dict[str, Any]:
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
    """The code set is recomputed: a Go client hashes non-ASCII tags differently, and its own set would filter its messages
    away."""
    return parse_subscription(data.topic, data.sub_string, version=data.sub_version or 0, kind=data.expression_type)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    return orjson.dumps(
        {
            "clientID": heartbeat.client_id,
            "consumerDataSet": [_encode_consumer(consumer) for consumer in heartbeat.consumers],
            "producerDataSet": [{"groupName": group} for group in heartbeat.producer_groups],
        }
    )


def _encode_consumer(consumer: ConsumerData) -> dict[str, Any]:
    data = {
        "consumeFromWhere": consumer.consume_from,
        "consumeType": consumer.consume_type,
        "groupName": consumer.group,
        "messageModel": consumer.message_model,
        "subscriptionDataSet": [encode_subscription(item) for item in consumer.subscriptions],
        "unitMode": consumer.unit_mode,
    }
    if consumer.strategy:
        data["allocateStrategy"] = consumer.strategy
    if consumer.own_version:
        data["rocketletVersion"] = consumer.own_version
    if consumer.leaving:
        data["leaving"] = True
    if consumer.assigned:
        data["assigned"] = [list(queue) for queue in consumer.assigned]
    if consumer.queue_counts:
        data["queueCounts"] = {name: dict(counts) for name, counts in consumer.queue_counts.items()}
    return data


_VERSION_CHARS = 40
_CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
_CONSUME_FROM = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)


def read_enum(value: Any, names: tuple[str, ...], default: str) -> str:
    """fastjson reads an enum by its name or by its ordinal."""
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value if value in names else default


class ConsumerShape(Shape):
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


def _consumer(data: ConsumerShape) -> ConsumerData:
    return ConsumerData(
        group=data.group_name,
        consume_type=read_enum(data.consume_type, _CONSUME_TYPES, "CONSUME_PASSIVELY"),
        message_model=read_enum(data.message_model, MESSAGE_MODELS, "CLUSTERING"),
        consume_from=read_enum(data.consume_from_where, _CONSUME_FROM, _CONSUME_FROM[0]),
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
    """The client and its groups as far as a heartbeat tells them that was refused for something else in it."""
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


def read_queue(data: Any) -> Queue:
    """Raises BodyError."""
    return queue_of(shaped(data, QueueShape))


def queue_of(data: QueueShape) -> Queue:
    return Queue(data.topic, data.broker_name, data.queue_id)


# Topics and routes

MESSAGE_TYPE: Final = "message.type"
MESSAGE_TYPES: Final = frozenset(("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "UNSPECIFIED"))


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """`message_type`: 5.x's attribute `message.type`, which says what messages the topic is for; empty if nobody said."""

    name: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = PERM_READ_WRITE
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    message_type: str = ""


@dataclass(frozen=True, slots=True)
class DataVersion:
    timestamp: int
    counter: int = 0


def topic_json(topic: TopicConfig) -> dict[str, Any]:
    attributes = {"attributes": {MESSAGE_TYPE: topic.message_type}} if topic.message_type else {}
    return {
        **attributes,
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
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
    attributes: Any = None  # also of other brokers, which may have more of them


def read_topic(data: Any) -> TopicConfig:
    """Reads a topic's JSON object. Raises BodyError."""
    return topic_of(shaped(data, TopicShape))


def topic_of(data: TopicShape) -> TopicConfig:
    return TopicConfig(
        data.topic_name,
        data.read_queue_nums,
        data.write_queue_nums,
        data.perm,
        read_enum(data.topic_filter_type, ("SINGLE_TAG", "MULTI_TAG"), "SINGLE_TAG"),
        data.topic_sys_flag,
        bool(data.order),
        _message_type(data.attributes),
    )


def _message_type(attributes: Any) -> str:
    found = attributes.get(MESSAGE_TYPE) if isinstance(attributes, dict) else None
    return found if isinstance(found, str) and found in MESSAGE_TYPES else ""


def altered_attributes(topic: TopicConfig, changes: str) -> TopicConfig:
    """The topic with the attributes that UPDATE_AND_CREATE_TOPIC changes: `+name=value` and `-name`, divided by commas.
    Raises BodyError, for there is one attribute, `message.type`."""
    for change in filter(None, changes.split(",")):
        name, _, value = change[1:].partition("=")
        if change[0] not in "+-" or name != MESSAGE_TYPE:
            raise BodyError(f"the topic attribute {change[:100]!r} is not kept here; +{MESSAGE_TYPE}=NORMAL is")
        if change[0] == "+" and value not in MESSAGE_TYPES:
            raise BodyError(f"the message type {value[:100]!r} is unknown; use {', '.join(sorted(MESSAGE_TYPES))}")
        topic = replace(topic, message_type=value if change[0] == "+" else "")
    return topic


def version_json(version: DataVersion) -> dict[str, int]:
    return {"counter": version.counter, "timestamp": version.timestamp}


class VersionShape(Shape):
    timestamp: Long = 0
    counter: Long = 0


def version_of(data: VersionShape | None) -> DataVersion:
    return DataVersion(data.timestamp, data.counter) if data else DataVersion(0)


def encode_data_version(version: DataVersion) -> bytes:
    return orjson.dumps(version_json(version))


@reads("data version", VersionShape)
def decode_data_version(data: VersionShape) -> DataVersion:
    return version_of(data)


@dataclass(frozen=True, slots=True)
class QueueData:
    """How many queues of a topic one broker has."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of one broker name, by broker id; 0 is the master."""

    name: str
    cluster: str
    addresses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Route:
    queues: tuple[QueueData, ...]
    brokers: tuple[BrokerData, ...]
    order_conf: str | None = None


def _broker_json(broker: BrokerData) -> dict[str, Any]:
    return {
        "brokerAddrs": {str(number): address for number, address in broker.addresses.items()},
        "brokerName": broker.name,
        "cluster": broker.cluster,
    }


class BrokerShape(Shape):
    broker_name: Text
    broker_addrs: dict[int, Text]
    cluster: Text = ""


def _broker(data: BrokerShape) -> BrokerData:
    return BrokerData(data.broker_name, data.cluster, data.broker_addrs)


def encode_route(route: Route) -> bytes:
    return orjson.dumps(
        {
            "brokerDatas": [_broker_json(broker) for broker in route.brokers],
            "filterServerTable": {},
            "queueDatas": [
                {
                    "brokerName": queue.broker_name,
                    "perm": queue.perm,
                    "readQueueNums": queue.read_queues,
                    "topicSysFlag": queue.sys_flag,
                    "writeQueueNums": queue.write_queues,
                }
                for queue in route.queues
            ],
        }
    )


class QueueDataShape(Shape):
    broker_name: Text
    read_queue_nums: QueueCount
    write_queue_nums: QueueCount
    perm: Int
    topic_sys_flag: Int = 0


class RouteShape(Shape):
    queue_datas: list[QueueDataShape] | None = None
    broker_datas: list[BrokerShape] | None = None
    order_topic_conf: str | None = None


@answers("route", RouteShape)
def decode_route(data: RouteShape) -> Route:
    count = sum(max(item.read_queue_nums, item.write_queue_nums) for item in data.queue_datas or ())
    if count > MAX_ROUTE_QUEUES:
        raise ValueError(f"it has {count} queues; {MAX_ROUTE_QUEUES} are allowed")
    queues = (
        QueueData(item.broker_name, item.read_queue_nums, item.write_queue_nums, item.perm, item.topic_sys_flag)
        for item in data.queue_datas or ()
    )
    return Route(tuple(queues), tuple(map(_broker, data.broker_datas or ())), data.order_topic_conf)


def encode_cluster(brokers: Iterable[BrokerData]) -> bytes:
    brokers = list(brokers)
    clusters: dict[str, list[str]] = {}
    for broker in brokers:
        clusters.setdefault(broker.cluster, []).append(broker.name)
    return orjson.dumps(
        {
            "brokerAddrTable": {broker.name: _broker_json(broker) for broker in brokers},
            "clusterAddrTable": clusters,
        }
    )


class ClusterShape(Shape):
    broker_addr_table: dict[str, BrokerShape] | None = None


@answers("cluster", ClusterShape)
def decode_cluster(data: ClusterShape) -> list[BrokerData]:
    return list(map(_broker, (data.broker_addr_table or {}).values()))


def encode_topic_list(topics: Iterable[str]) -> Work[bytes]:
    found = yield from listed(map(orjson.dumps, topics))
    return b'{"topicList":[%b]}' % found


class TopicListShape(Shape):
    topic_list: list[str] | None = None


@answers("topic list", TopicListShape)
def decode_topic_list(data: TopicListShape) -> list[str]:
    return data.topic_list or []
