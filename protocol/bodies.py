"""The JSON bodies: what requests and answers carry beside their header.

Every body is written compactly (a Go client reads a blank inside `brokerAddrs` as part of the address) and read
leniently, as fastjson writes. `decode_*` raise BodyError with the body's name and what is wrong with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from . import fastjson_text
from .subscription import Subscription, SubscriptionError, parse_subscription

T = TypeVar("T")

MAX_QUEUES: Final = 65_536  # of a topic at one broker, whosever
MAX_REGISTRATION_BYTES: Final = (
    16_777_216  # of a broker's topics, inflated: what one frame may have without compression
)


class BodyError(ValueError):
    """A body that cannot be read, and why."""


class Queue(NamedTuple):
    """A message queue. Sorts as RocketMQ sorts: by topic, broker name, queue id."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


def reads(name: str) -> Callable[[Callable[[Any], T]], Callable[[bytes], T]]:
    """Makes a decoder of JSON bytes out of one of JSON values; what fails in it is a BodyError."""

    def decorate(decode: Callable[[Any], T]) -> Callable[[bytes], T]:
        @wraps(decode)
        def decode_body(body: bytes) -> T:
            try:
                return decode(fastjson_text.loads(body))
            except SubscriptionError as error:
                raise BodyError(f"{name}: {error}") from None
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BodyError(f"the {name} body cannot be read: {error!r}") from None

        return decode_body

    return decorate


# Heartbeats


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group in a heartbeat. Rocketlet's own fields, which Apache's brokers ignore: `strategy`, how the member
    allocates queues; `leaving`, that it is giving its queues up and wants no share any more; `assigned`, the queues that it
    owns; `queue_counts`, how many queues it sees, by broker name and topic."""

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


def read_subscription(data: Mapping[str, Any]) -> Subscription:
    """From its JSON object. The code set is recomputed: a Go client hashes non-ASCII tags differently, and its own
    set would filter its messages away."""
    return parse_subscription(
        str(data["topic"]),
        data.get("subString"),
        version=int(data.get("subVersion") or 0),
        kind=data.get("expressionType"),
    )


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
    if consumer.leaving:
        data["leaving"] = True
    if consumer.assigned:
        data["assigned"] = [list(queue) for queue in consumer.assigned]
    if consumer.queue_counts:
        data["queueCounts"] = {name: dict(counts) for name, counts in consumer.queue_counts.items()}
    return data


_CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY")
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


def _read_consumer(data: Mapping[str, Any]) -> ConsumerData:
    return ConsumerData(
        group=str(data["groupName"]),
        consume_type=read_enum(data.get("consumeType"), _CONSUME_TYPES, "CONSUME_PASSIVELY"),
        message_model=read_enum(data.get("messageModel"), MESSAGE_MODELS, "CLUSTERING"),
        consume_from=read_enum(data.get("consumeFromWhere"), _CONSUME_FROM, _CONSUME_FROM[0]),
        subscriptions=tuple(read_subscription(item) for item in data.get("subscriptionDataSet") or ()),
        unit_mode=bool(data.get("unitMode")),
        strategy=data.get("allocateStrategy"),
        leaving=bool(data.get("leaving")),
        assigned=tuple(Queue(str(item[0]), str(item[1]), int(item[2])) for item in data.get("assigned") or ()),
        queue_counts=data.get("queueCounts") or {},
    )


@reads("heartbeat")
def decode_heartbeat(data: Any) -> Heartbeat:
    return Heartbeat(
        client_id=str(data["clientID"]),
        consumers=tuple(_read_consumer(item) for item in data.get("consumerDataSet") or ()),
        producer_groups=tuple(str(item["groupName"]) for item in data.get("producerDataSet") or ()),
    )


@reads("client check")
def decode_client_check(data: Any) -> tuple[str, str, Mapping[str, Any]]:
    """CHECK_CLIENT_CONFIG: client id, group, the subscription's JSON object."""
    return str(data["clientId"]), str(data["group"]), data.get("subscriptionData") or {}


def encode_client_check(client_id: str, group: str, subscription: Subscription) -> bytes:
    value = {"clientId": client_id, "group": group, "subscriptionData": encode_subscription(subscription)}
    return orjson.dumps(value)


# Queues


def queue_json(queue: Queue) -> dict[str, Any]:
    return {
        "brokerName": queue.broker_name,
        "queueId": queue.queue_id,
        "topic": queue.topic,
    }


def read_queue(data: Mapping[str, Any]) -> Queue:
    return Queue(str(data["topic"]), str(data["brokerName"]), int(data["queueId"]))


# Topics and routes


@dataclass(frozen=True, slots=True)
class TopicConfig:
    name: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = 6
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False


@dataclass(frozen=True, slots=True)
class DataVersion:
    timestamp: int
    counter: int = 0


def topic_json(topic: TopicConfig) -> dict[str, Any]:
    return {
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
        "writeQueueNums": topic.write_queues,
    }


def read_topic(data: Mapping[str, Any]) -> TopicConfig:
    return TopicConfig(
        name=str(data["topicName"]),
        read_queues=_queue_count(data.get("readQueueNums", 16)),
        write_queues=_queue_count(data.get("writeQueueNums", 16)),
        perm=int(data.get("perm", 6)),
        filter_type=read_enum(data.get("topicFilterType"), ("SINGLE_TAG", "MULTI_TAG"), "SINGLE_TAG"),
        sys_flag=int(data.get("topicSysFlag", 0)),
        order=bool(data.get("order", False)),
    )


def _queue_count(value: Any) -> int:
    """How many queues of a topic somebody says there are: whoever believes it makes a list as long."""
    count = int(value)
    if not 0 <= count <= MAX_QUEUES:
        raise ValueError(f"{count} queues; 0 to {MAX_QUEUES} are possible")
    return count


def version_json(version: DataVersion) -> dict[str, int]:
    return {"counter": version.counter, "timestamp": version.timestamp}


def encode_registration(version: DataVersion, topics: Iterable[TopicConfig]) -> bytes:
    """REGISTER_BROKER's body, uncompressed."""
    return orjson.dumps(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": version_json(version),
                "topicConfigTable": {topic.name: topic_json(topic) for topic in topics},
            },
        }
    )


def _read_version(data: Mapping[str, Any] | None) -> DataVersion:
    data = data or {}
    return DataVersion(int(data.get("timestamp", 0)), int(data.get("counter", 0)))


@reads("broker registration")
def decode_registration(data: Any) -> tuple[DataVersion, list[TopicConfig]]:
    wrapper = data["topicConfigSerializeWrapper"]
    topics = [read_topic(item) for item in (wrapper.get("topicConfigTable") or {}).values()]
    return _read_version(wrapper.get("dataVersion")), topics


def decode_compressed_registration(body: bytes) -> tuple[DataVersion, list[TopicConfig]]:
    """A zlib stream: the version's JSON, then each topic as a line `name read write perm filterType`, lengths in front."""
    parts = _Parts(_inflated(body))
    try:
        version = _read_version(orjson.loads(parts.part()))
        lines = [parts.part().decode().split(" ") for _ in range(parts.count())]
        return version, [_topic_of_line(line) for line in lines]
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None


def _topic_of_line(line: list[str]) -> TopicConfig:
    return TopicConfig(line[0], _queue_count(line[1]), _queue_count(line[2]), int(line[3]))


def _inflated(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, MAX_REGISTRATION_BYTES)
    except zlib.error as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    if not stream.eof:
        raise BodyError(f"the broker registration is cut off, or inflates to more than {MAX_REGISTRATION_BYTES} bytes")
    return plain


class _Parts:
    """Numbers and byte strings with their length in front. Raises ValueError for what the bytes left cannot hold."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self) -> int:
        """How many parts follow: each has its length in front."""
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


def encode_data_version(version: DataVersion) -> bytes:
    return orjson.dumps(version_json(version))


@reads("data version")
def decode_data_version(data: Any) -> DataVersion:
    return _read_version(data)


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
    """One broker name: its addresses by broker id; 0 is the master."""

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


def _read_broker(data: Mapping[str, Any]) -> BrokerData:
    addresses = {int(number): str(address) for number, address in data["brokerAddrs"].items()}
    return BrokerData(str(data["brokerName"]), str(data.get("cluster", "")), addresses)


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


@reads("route")
def decode_route(data: Any) -> Route:
    return Route(
        queues=tuple(
            QueueData(
                str(item["brokerName"]),
                _queue_count(item["readQueueNums"]),
                _queue_count(item["writeQueueNums"]),
                int(item["perm"]),
                int(item.get("topicSysFlag", 0)),
            )
            for item in data.get("queueDatas") or ()
        ),
        brokers=tuple(_read_broker(item) for item in data.get("brokerDatas") or ()),
        order_conf=data.get("orderTopicConf"),
    )


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


@reads("cluster")
def decode_cluster(data: Any) -> list[BrokerData]:
    return [_read_broker(item) for item in (data.get("brokerAddrTable") or {}).values()]


def encode_topic_list(topics: Iterable[str]) -> bytes:
    return orjson.dumps({"topicList": list(topics)})


@reads("topic list")
def decode_topic_list(data: Any) -> list[str]:
    return [str(item) for item in data.get("topicList") or ()]


# Subscription groups


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A consumer group's settings at a broker (UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 200). `strict` is ours: members that
    subscribe to something else than the others are refused."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queues: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    slow_broker_id: int = 1
    notify_enable: bool = True
    strict: bool = False


def group_json(group: GroupConfig) -> dict[str, Any]:
    return {
        "brokerId": group.broker_id,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "consumeFromMinEnable": group.consume_from_min_enable,
        "groupName": group.name,
        "notifyConsumerIdsChangedEnable": group.notify_enable,
        "retryMaxTimes": group.retry_max_times,
        "retryQueueNums": group.retry_queues,
        "strict": group.strict,
        "whichBrokerWhenConsumeSlowly": group.slow_broker_id,
    }


def read_group(data: Mapping[str, Any]) -> GroupConfig:
    return GroupConfig(
        name=str(data["groupName"]),
        consume_enable=bool(data.get("consumeEnable", True)),
        consume_from_min_enable=bool(data.get("consumeFromMinEnable", True)),
        consume_broadcast_enable=bool(data.get("consumeBroadcastEnable", True)),
        retry_queues=int(data.get("retryQueueNums", 1)),
        retry_max_times=int(data.get("retryMaxTimes", 16)),
        broker_id=int(data.get("brokerId", 0)),
        slow_broker_id=int(data.get("whichBrokerWhenConsumeSlowly", 1)),
        notify_enable=bool(data.get("notifyConsumerIdsChangedEnable", True)),
        strict=bool(data.get("strict", False)),
    )


def encode_group(group: GroupConfig) -> bytes:
    return orjson.dumps(group_json(group))


@reads("subscription group")
def decode_group(data: Any) -> GroupConfig:
    return read_group(data)
