"""The options of source and sink. A wrong one names itself and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import orjson

from ..client.access import ENCODINGS, Access, Encoding
from ..client.config import At, Start
from ..client.errors import ConfigError
from ..protocol import names
from ..protocol.bodies import Queue
from ..protocol.subscription import SQL92, TAG, Sql, Subscription, SubscriptionError, parse_subscription

CONNECTION: Final = {
    "nameServer": "host:port, several separated by ;",
    "accessKey": "the ACL's access key; default: requests are not signed",
    "secretKey": "the ACL's secret key",
    "securityToken": "the ACL's security token, if it has one",
    "tls": "true or false; default: false",
    "tlsCaFile": "a PEM file of certificates to trust; default: the system's",
    "tlsVerify": "true or false: whether the servers' certificates are checked; default: true",
    "tlsCertFile": "a PEM file with this client's certificate",
    "tlsKeyFile": "a PEM file with its key",
    "headerEncoding": "auto, json or rocketmq; default: auto",
}
READ: Final = {
    **CONNECTION,
    "topic": "one topic, or several separated by commas",
    "topicPattern": "a regular expression, instead of topic: every topic whose whole name it matches",
    "group": "the consumer group that the query is a member of",
    "tags": "a tag expression such as `TagA || TagB`; default: *",
    "sql": "an SQL92 filter on properties such as `price > 5`, instead of tags",
    "startingOffsets": "earliest, latest, committed, or JSON with an offset per queue, -2 for earliest and -1 for latest: "
    '{"topic": {"broker": {"0": 23, "1": -1}}}; default: earliest',
    "startingTimestamp": "ms since the epoch, instead of startingOffsets: from the first message stored then",
    "includeProperties": "true or false: whether rows have the column properties; default: true",
    "pollTimeoutMs": "how long a broker may take to answer a read; default: 30000",
    "minPartitions": "the least number of tasks: long ranges are split; default: a task per queue, fewer for short ranges",
    "failOnDataLoss": "true or false; default: true",
    "arrowBatchSize": "rows of an Arrow batch, at most; default: 10000",
}
STREAM: Final = {
    **READ,
    "membership": "true or false: whether queues are shared with the group's other members; default: true",
    "maxRowsPerTrigger": "a positive number; default: no limit",
    "maxBytesPerTrigger": "a positive number, kept by the size of the next messages of each queue; default: no limit",
    "releaseTimeoutMs": "how long a queue that another member wants waits for its batch; default: 60000",
}
BATCH: Final = {
    **READ,
    "endingOffsets": "latest, committed, or JSON as in startingOffsets; default: latest",
    "endingTimestamp": "ms since the epoch, instead of endingOffsets: up to the first message stored then",
}
WRITE: Final = {
    **CONNECTION,
    "topic": "where rows go that have no column topic",
    "group": "the producer group; default: rocketlet-spark",
    "batchBytes": "how many bytes of bodies and properties are sent at once, at most 2000000; default: 1000000",
    "sendTimeoutMs": "a positive number: for a send with all its retries; default: 10000",
    "deliveryTimeoutMs": "a positive number: how long sends are tried again while brokers are away; default: 30000",
    "retries": "0 or more further attempts of a send, each on another queue; default: 2",
}
SPARKS_OWN: Final = ("path", "checkpointlocation", "queryname", "outputmode")
EARLIEST, LATEST = -2, -1
Place = Start | Literal["committed"]
_PLACES: Final[Mapping[str, Place]] = {"earliest": "first", "latest": "last", "committed": "committed"}
MAX_BATCH_BYTES: Final = 2_000_000  # a request may have 4 MiB, and what is counted is an estimate


@dataclass(frozen=True, slots=True)
class Position:
    """A place in every queue. `default`: first, last, committed, or a store time in ms; `queues`: exact, where given."""

    default: Place
    queues: Mapping[Queue, Start | At] = field(default_factory=dict)

    def of(self, queue: Queue) -> Place | At:
        return self.queues.get(queue, self.default)


@dataclass(frozen=True, slots=True)
class Connect:
    """How the cluster is reached."""

    name_server: str
    access: Access


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What source and batch read share. `topics` is empty if there is a pattern, `min_partitions` 0 if not given."""

    connect: Connect
    group: str
    topics: tuple[str, ...]
    pattern: str
    filter: str
    start: Position
    include_properties: bool
    poll_timeout_s: float
    min_partitions: int
    fail_on_data_loss: bool
    arrow_batch_size: int

    def subscription(self, topic: str) -> Subscription:
        """Retries come without a filter: what failed once had passed it."""
        expression = "*" if topic.startswith(names.RETRY_PREFIX) else self.filter
        return parse_subscription(topic, expression, version=1, kind=SQL92 if isinstance(expression, Sql) else TAG)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    read: ReadOptions
    membership: bool
    max_rows: int | None
    max_bytes: int | None
    release_timeout_s: float


@dataclass(frozen=True, slots=True)
class BatchOptions:
    read: ReadOptions
    end: Position


@dataclass(frozen=True, slots=True)
class WriteOptions:
    connect: Connect
    topic: str | None
    group: str
    batch_bytes: int
    timeout_s: float
    delivery_timeout_s: float
    retries: int


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Reads the options, whose names Spark compares without regard to case. Raises ConfigError."""
    given = _Given(options, STREAM)
    membership = given.boolean("membership", True)
    read = _read_options(given, group_needed=membership)
    if not membership and read.start.default == "committed" and not read.group:
        raise ConfigError("startingOffsets is committed, whose group is needed: set the option group")
    return StreamOptions(
        read,
        membership,
        given.number("maxRowsPerTrigger") if given.has("maxRowsPerTrigger") else None,
        given.number("maxBytesPerTrigger") if given.has("maxBytesPerTrigger") else None,
        given.number("releaseTimeoutMs", 60_000) / 1000,
    )


def includes_properties(options: Mapping[str, str]) -> bool:
    """Whether rows have that column, whatever the other options are worth."""
    return {name.lower(): value for name, value in options.items()}.get("includeproperties", "").lower() != "false"


def batch_options(options: Mapping[str, str]) -> BatchOptions:
    """Raises ConfigError."""
    given = _Given(options, BATCH)
    end = given.position("ending", "latest", ("latest", "committed"))
    read = _read_options(given, group_needed=False)
    if "committed" in (end.default, read.start.default) and not read.group:
        raise ConfigError("an offset is committed by a group: set the option group")
    return BatchOptions(read, end)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises ConfigError."""
    given = _Given(options, WRITE)
    topic = given.get("topic") or None
    if topic is not None:
        _checked("topic", names.topic_fault(topic))
    group = given.get("group", "rocketlet-spark")
    _checked("group", names.group_fault(group))
    batch_bytes = given.number("batchBytes", 1_000_000)
    if batch_bytes > MAX_BATCH_BYTES:
        raise ConfigError(f"the option batchBytes is {batch_bytes}; allowed: {WRITE['batchBytes']}")
    retries = given.number("retries", 2, least=0)
    return WriteOptions(
        _connect(given),
        topic,
        group,
        batch_bytes,
        given.number("sendTimeoutMs", 10_000) / 1000,
        given.number("deliveryTimeoutMs", 30_000) / 1000,
        retries,
    )


def _read_options(given: _Given, *, group_needed: bool) -> ReadOptions:
    group = given.required("group") if group_needed else given.get("group")
    if group:
        _checked("group", names.group_fault(group))
    topics, pattern = _topics(given)
    if given.has("tags") and given.has("sql"):
        raise ConfigError("the options tags and sql are both given; a queue has one filter")
    expression = Sql(given.get("sql")) if given.has("sql") else given.get("tags", "*")
    read = ReadOptions(
        connect=_connect(given),
        group=group,
        topics=topics,
        pattern=pattern,
        filter=expression,
        start=given.position("starting", "earliest", ("earliest", "latest", "committed")),
        include_properties=given.boolean("includeProperties", True),
        poll_timeout_s=given.number("pollTimeoutMs", 30_000) / 1000,
        min_partitions=given.number("minPartitions") if given.has("minPartitions") else 0,
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        arrow_batch_size=given.number("arrowBatchSize", 10_000),
    )
    try:
        read.subscription("any")
    except SubscriptionError as error:
        raise ConfigError(f"the option {'sql' if given.has('sql') else 'tags'}: {error}") from None
    return read


def _topics(given: _Given) -> tuple[tuple[str, ...], str]:
    if given.has("topicPattern"):
        if given.has("topic"):
            raise ConfigError("the options topic and topicPattern are both given; choose one")
        pattern = given.get("topicPattern")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the option topicPattern is {pattern!r}: {error}") from None
        return (), pattern
    topics = tuple(part.strip() for part in given.required("topic").split(","))
    for topic in topics:
        _checked("topic", names.topic_fault(topic))
    return topics, ""


def _connect(given: _Given) -> Connect:
    encoding = given.get("headerEncoding", "auto")
    if encoding not in ENCODINGS:
        raise ConfigError(f"the option headerEncoding is {encoding!r}; allowed: {CONNECTION['headerEncoding']}")
    access = Access(
        access_key=given.get("accessKey"),
        secret_key=given.get("secretKey"),
        security_token=given.get("securityToken"),
        tls=given.boolean("tls", False),
        ca_file=given.get("tlsCaFile") or None,
        verify_tls=given.boolean("tlsVerify", True),
        cert_file=given.get("tlsCertFile") or None,
        key_file=given.get("tlsKeyFile") or None,
        encoding=cast("Encoding", encoding),
    )
    return Connect(given.required("nameServer"), access)


def _checked(option: str, fault: str | None) -> None:
    if fault:
        raise ConfigError(f"the option {option}: {fault}")


class _Given:
    """The options as given, by their proper names."""

    def __init__(self, options: Mapping[str, str], allowed: Mapping[str, str]) -> None:
        self._allowed = allowed
        spelled = {name.lower(): name for name in allowed}
        self._values = {spelled.get(name.lower(), name): value for name, value in options.items()}
        unknown = [name for name in self._values if name not in allowed and name.lower() not in SPARKS_OWN]
        if unknown:
            known = "; ".join(f"{name} ({meaning})" for name, meaning in allowed.items())
            raise ConfigError(f"the option {unknown[0]} is unknown. Options: {known}")

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name, default).strip()

    def required(self, name: str) -> str:
        value = self.get(name)
        if not value:
            raise ConfigError(f"the option {name} is missing: {self._allowed[name]}")
        return value

    def number(self, name: str, default: int = 0, least: int = 1) -> int:
        value = self.get(name, str(default))
        if not value.isdigit() or int(value) < least:
            raise ConfigError(f"the option {name} is {value!r}; allowed: {self._allowed[name]}")
        return int(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise ConfigError(f"the option {name} is {value!r}; allowed: {self._allowed[name]}")
        return value == "true"

    def position(self, side: str, default: str, words: tuple[str, ...]) -> Position:
        """`side`Offsets or `side`Timestamp."""
        if self.has(f"{side}Timestamp"):
            if self.has(f"{side}Offsets"):
                raise ConfigError(f"the options {side}Offsets and {side}Timestamp are both given; choose one")
            return Position(self.number(f"{side}Timestamp"))
        value = self.get(f"{side}Offsets", default)
        if value in words:
            return Position(_PLACES[value])
        wrong = ConfigError(f"the option {side}Offsets is {value!r}; allowed: {self._allowed[f'{side}Offsets']}")
        if not value.startswith("{"):
            raise wrong
        try:
            queues = _exact(orjson.loads(value))
        except (ValueError, AttributeError, TypeError):
            raise wrong from None
        return Position("first" if side == "starting" else "last", queues)


def _exact(topics: Any) -> dict[Queue, Start | At]:
    exact: dict[Queue, Start | At] = {}
    for topic, brokers in topics.items():
        for broker_name, queues in brokers.items():
            for queue_id, offset in queues.items():
                if type(offset) is not int or offset < EARLIEST:
                    raise ValueError(offset)
                words: dict[int, Start] = {EARLIEST: "first", LATEST: "last"}
                exact[Queue(topic, broker_name, int(queue_id))] = words.get(offset, At(offset))
    return exact
