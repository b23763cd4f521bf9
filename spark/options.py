"""Options of sources and sinks, and the schema of rows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from uuid import uuid4

import orjson
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..client.config import At, Start, check_client_name, parse_addresses
from ..client.errors import ConfigError
from ..client.wire.connection import ENCODINGS, Access, Encoding
from ..protocol import names
from ..protocol.names import Queue, Sql, Subscription, SubscriptionError, parse_subscription
from .config import (
    ARROW_BATCH_ROWS,
    DELIVERY_TIMEOUT_MS,
    MAX_NUMBER,
    MAX_SEND_BATCH_BYTES,
    MAX_TIMEOUT_MS,
    PLANNING_LIMITS,
    POLL_TIMEOUT_MS,
    PREFETCH_ROWS,
    RELEASE_TIMEOUT_MS,
    RETRIES,
    SEND_BATCH_BYTES,
    SEND_TIMEOUT_MS,
    SHOWN_CHARS,
    TRIGGER_DELAY,
    PlanningLimits,
)

# ------------------------------------------------------------------------------
# The options of sources and sinks.


CONNECTION: Final = {
    "nameServer": "host:port, several separated by ;",
    "accessKey": "the ACL's access key; default: requests are not signed",
    "secretKey": "the ACL's secret key",
    "securityToken": "the ACL's security token, if it has one",
    "tls": "true or false; default: false",
    "tlsCaFile": "a PEM file of certificates to trust; default: the system's",
    "tlsVerify": "true or false: true checks the servers' certificates; default: true",
    "tlsCertFile": "a PEM file with this client's certificate",
    "tlsKeyFile": "a PEM file with its key",
    "headerEncoding": "auto, json or rocketmq; default: auto",
}
READ: Final = {
    **CONNECTION,
    "topic": "one topic, or several separated by commas",
    "topicPattern": "a regular expression, instead of topic: all topics whose whole name matches",
    "assign": 'JSON, instead of topic: the queues to read, {"topic": {"broker": [0, 1]}}; not for members of a group',
    "group": "the consumer group that the query is a member of",
    "groupIdPrefix": "without membership and group: the beginning of a random group name for each run, which brokers "
    "authorize; default: no group",
    "tags": "a tag expression such as `TagA || TagB`; default: *",
    "sql": "an SQL92 filter on properties such as `price > 5`, instead of tags",
    "startingOffsets": "earliest, latest, committed, or JSON with an offset per queue, -2 for earliest and -1 for latest: "
    '{"topic": {"broker": {"0": 23, "1": -1}}}; default: earliest',
    "startingTimestamp": "ms since the epoch, instead of startingOffsets: start at the first message stored "
    "at this time or later",
    "startingOffsetsByTimestamp": "JSON, instead of startingOffsets: ms since the epoch per queue, "
    '{"topic": {"broker": {"0": 1700000000000}}}; other queues start at startingTimestamp, or else at their first message',
    "startingOffsetsByTimestampStrategy": "latest or error: what to do if no message is as new as the starting "
    "time; default: latest",
    "columns": "names of columns, separated by commas: other columns are not read; or kafka, for the columns of "
    "Spark's Kafka connector",
    "includeProperties": "true or false: true adds the column properties, or headers with columns=kafka; default: "
    "true, with columns=kafka false",
    "pollTimeoutMs": "timeout of a read, and how long reads are retried; maximum "
    f"{MAX_TIMEOUT_MS}; default: {POLL_TIMEOUT_MS}",
    "minPartitions": "minimum number of tasks: long ranges are split; default: a task per queue, fewer for short ranges",
    "maxRecordsPerPartition": "a positive number: maximum rows of a task; default: no limit",
    "failOnDataLoss": "true or false; default: true",
    "arrowBatchSize": f"maximum rows of an Arrow batch; default: {ARROW_BATCH_ROWS}",
}
STREAM: Final = {
    **READ,
    "clientName": "the name of the query's member, as tools show it, such as the query's; default: the host",
    "membership": "true or false: true shares the queues with the group's other members; default: true",
    "maxRowsPerTrigger": "a positive number; default: no limit",
    "maxBytesPerTrigger": "a positive number, applied to the mean size of the next messages of each queue; default: no limit",
    "minOffsetsPerTrigger": "a positive number: a batch waits until this many rows are available; default: it does not wait",
    "maxTriggerDelay": "such as 500ms, 30s, 15m or 1h: maximum wait of a batch for minOffsetsPerTrigger; "
    f"default: {TRIGGER_DELAY}",
    "prefetchRows": "0 or more: batches of up to this many rows are read in the driver, without Python tasks; "
    f"default: {PREFETCH_ROWS}",
    "releaseTimeoutMs": "maximum time that a queue assigned to another member waits for its running batch, maximum "
    f"{MAX_TIMEOUT_MS}; default: {RELEASE_TIMEOUT_MS}",
}
BATCH: Final = {
    **READ,
    "endingOffsets": "latest, committed, or JSON as in startingOffsets; default: latest",
    "endingTimestamp": "ms since the epoch, instead of endingOffsets: end before the first message stored at "
    "this time or later",
    "endingOffsetsByTimestamp": "JSON as in startingOffsetsByTimestamp, instead of endingOffsets; other queues end at "
    "endingTimestamp, or else at their last message",
}
WRITE: Final = {
    **CONNECTION,
    "topic": "the topic of rows without a column topic",
    "group": "the producer group; default: rocketlet-spark",
    "illegalRowsTopic": "the topic for rows that cannot be sent, as JSON; default: such a row fails the job",
    "batchBytes": "bytes of bodies and properties in one request, maximum "
    f"{MAX_SEND_BATCH_BYTES}; default: {SEND_BATCH_BYTES}",
    "sendTimeoutMs": f"a positive number, maximum {MAX_TIMEOUT_MS}: timeout of a send including its retries; "
    f"default: {SEND_TIMEOUT_MS}",
    "deliveryTimeoutMs": f"a positive number, maximum {MAX_TIMEOUT_MS}: how long sends are retried while brokers are "
    f"unreachable; default: {DELIVERY_TIMEOUT_MS}",
    "compressOverBytes": "a positive number: bodies of at least this many bytes are sent compressed, each in a request of "
    "its own; default: bodies in a request with others are not compressed",
    "retries": f"0 or more further attempts of a send, each in another queue if possible; default: {RETRIES}",
}
_KINDS: Final = {"streams": STREAM, "batch reads": BATCH, "writing": WRITE}
ACCESS: Final = {
    "access_key": "accessKey",
    "secret_key": "secretKey",
    "tls": "tls",
    "ca_file": "tlsCaFile",
    "cert_file": "tlsCertFile",
    "key_file": "tlsKeyFile",
}
"""Fields of the client's `Access`, which its errors name, and the options that set these fields."""
_ACCESS: Final = re.compile(rf"\b({'|'.join(ACCESS)})\b")


@dataclass(frozen=True, slots=True)
class Connect:
    """Name server, credentials and client name."""

    name_server: str
    access: Access
    client_name: str | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options that streams and batch reads share.

    Attributes:
        topics: names of topics; empty with a pattern
        pattern: regular expression for topics; empty without one
        assigned: the queues of the option `assign`; empty without it
        needs_message: True if it is an error that no message is as new as the starting time
        min_partitions: minimum number of tasks; 0 for the default
        max_partition_rows: maximum messages of a task; None for no limit
    """

    connect: Connect
    group: str
    topics: tuple[str, ...]
    pattern: str
    assigned: frozenset[Queue]
    filter: str
    start: StartingOffsets
    needs_message: bool
    poll_timeout_s: float
    min_partitions: int
    max_partition_rows: int | None
    fail_on_data_loss: bool
    arrow_batch_size: int
    limits: PlanningLimits = PLANNING_LIMITS

    def reads(self, queue: Queue) -> bool:
        """Return True if the query reads this queue, or would read it if it existed. Queues of the group's retry topic count,
        although only a member reads them."""
        if self.assigned:
            return queue in self.assigned
        if queue.topic == names.retry_topic(self.group):
            return True
        return re.fullmatch(self.pattern, queue.topic) is not None if self.pattern else queue.topic in self.topics

    def subscription(self, topic: str) -> Subscription:
        """Return the subscription of a topic. Retry topics have no filter, because their messages have already passed
        it."""
        expression = "*" if topic.startswith(names.RETRY_PREFIX) else self.filter
        return parse_subscription(topic, expression, version=1)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of `readStream`."""

    read: ReadOptions
    membership: bool
    max_rows: int | None
    max_bytes: int | None
    min_rows: int
    max_delay_s: float
    release_timeout_s: float
    prefetch_rows: int


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of `read`."""

    read: ReadOptions
    end: StartingOffsets


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of `write` and `writeStream`."""

    connect: Connect
    topic: str | None
    illegal_rows_topic: str | None
    group: str
    batch_bytes: int
    timeout_s: float
    delivery_timeout_s: float
    retries: int
    compress_over_bytes: int | None = None


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Parse options, whose names are case-insensitive. Raises ConfigError."""
    given = ParsedOptions(options, STREAM, _KINDS)
    membership = given.boolean("membership", True)
    read = _read_options(given, group_needed=membership)
    if membership and read.assigned:
        raise ConfigError(
            "the option assign is given, but a member reads the queues that its group assigns to it; set membership to false"
        )
    if given.has("maxTriggerDelay") and not given.has("minOffsetsPerTrigger"):
        raise ConfigError("the option maxTriggerDelay is given without minOffsetsPerTrigger, which it belongs to")
    max_rows, min_rows = given.optional("maxRowsPerTrigger"), given.optional("minOffsetsPerTrigger") or 0
    if max_rows is not None and min_rows > max_rows:
        raise ConfigError(f"minOffsetsPerTrigger is {min_rows}, more than maxRowsPerTrigger, which is {max_rows}")
    if not membership and read.start.default == "committed" and not read.group:
        raise ConfigError("startingOffsets is committed, which needs a group: set the option group")
    return StreamOptions(
        read,
        membership,
        max_rows,
        given.optional("maxBytesPerTrigger"),
        min_rows,
        given.duration_s("maxTriggerDelay", TRIGGER_DELAY),
        given.seconds("releaseTimeoutMs", RELEASE_TIMEOUT_MS),
        given.number("prefetchRows", PREFETCH_ROWS, least=0),
    )


def columns(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of rows that are read, even if other options are invalid. Raises ConfigError."""
    given = {name.lower(): value.strip() for name, value in options.items()}
    wanted = given.get("columns", "")
    included = given.get("includeproperties", str(wanted != "kafka")).lower()
    if included not in ("true", "false"):
        raise ConfigError(f"the option includeProperties is {included!r}; allowed: {READ['includeProperties']}")
    if wanted and wanted != "kafka":
        if "includeproperties" in given:
            raise ConfigError("the options columns and includeProperties are both given; name properties in columns")
        return tuple(dict.fromkeys(name.strip() for name in wanted.split(",")))
    known, costly = (KAFKA_COLUMNS, HEADERS) if wanted else (OURS, PROPERTIES)
    return tuple(name for name in known if included == "true" or name != costly)


def chosen(options: Mapping[str, str], found: StructType) -> tuple[str, ...]:
    """Return the columns of a reader: the option `columns`, or the columns of `.schema(...)`. Raises ConfigError."""
    names_found = checked(found)
    if "columns" in map(str.lower, options) and names_found != columns(options):
        raise ConfigError("the option columns and .schema(...) are both given; choose one")
    return names_found


def batch_options(options: Mapping[str, str]) -> BatchOptions:
    """Parse the options of `read`. Raises ConfigError."""
    given = ParsedOptions(options, BATCH, _KINDS)
    end = given.position("ending", "latest", ("latest", "committed"))
    read = _read_options(given, group_needed=False)
    if "committed" in (end.default, read.start.default) and not read.group:
        raise ConfigError("an offset is committed by a group: set the option group")
    return BatchOptions(read, end)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of `write` and `writeStream`. Raises ConfigError."""
    given = ParsedOptions(options, WRITE, _KINDS)
    topic, illegal_rows_topic = given.get("topic") or None, given.get("illegalRowsTopic") or None
    for option, name in (("topic", topic), ("illegalRowsTopic", illegal_rows_topic)):
        if name is not None:
            check(option, names.topic_fault(name))
    group = given.get("group", "rocketlet-spark")
    check("group", names.group_fault(group))
    return WriteOptions(
        _connect(given),
        topic,
        illegal_rows_topic,
        group,
        given.number("batchBytes", SEND_BATCH_BYTES, most=MAX_SEND_BATCH_BYTES),
        given.seconds("sendTimeoutMs", SEND_TIMEOUT_MS),
        given.seconds("deliveryTimeoutMs", DELIVERY_TIMEOUT_MS),
        given.number("retries", RETRIES, least=0),
        given.optional("compressOverBytes"),
    )


def _read_options(given: ParsedOptions, *, group_needed: bool) -> ReadOptions:
    group = given.required("group") if group_needed else given.get("group")
    if given.has("groupIdPrefix") and group_needed:
        raise ConfigError(
            "the option groupIdPrefix is given, but a member names its group; set the option group, or membership to false"
        )
    if given.has("groupIdPrefix") and not group:
        group = f"{given.required('groupIdPrefix')}-{uuid4().hex}"
    if group:
        check("group", names.group_fault(group))
    topics, pattern, assigned = _topics(given)
    if given.has("tags") and given.has("sql"):
        raise ConfigError("the options tags and sql are both given; a queue has one filter")
    expression = Sql(given.required("sql")) if given.has("sql") else given.get("tags", "*")
    if not isinstance(expression, Sql) and "|" in expression.replace("||", ""):
        raise ConfigError(
            f"the option tags is {expression[:SHOWN_CHARS]!r}: tags are separated by ||. For a tag with | in it, set sql to "
            "TAGS = 'a|b'"
        )
    read = ReadOptions(
        connect=_connect(given),
        group=group,
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        filter=expression,
        start=given.position("starting", "earliest", ("earliest", "latest", "committed")),
        needs_message=given.choice("startingOffsetsByTimestampStrategy", "latest", "error") == "error",
        poll_timeout_s=given.seconds("pollTimeoutMs", POLL_TIMEOUT_MS),
        min_partitions=given.optional("minPartitions") or 0,
        max_partition_rows=given.optional("maxRecordsPerPartition"),
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        arrow_batch_size=given.number("arrowBatchSize", ARROW_BATCH_ROWS),
    )
    try:
        read.subscription("any")
    except SubscriptionError as error:
        raise ConfigError(f"the option {'sql' if given.has('sql') else 'tags'}: {error}") from None
    return read


def _topics(given: ParsedOptions) -> tuple[tuple[str, ...], str, frozenset[Queue]]:
    both = [name for name in ("topic", "topicPattern", "assign") if given.has(name)]
    if len(both) > 1:
        raise ConfigError(f"the options {' and '.join(both)} are both given; choose one")
    if given.has("assign"):
        assigned = given.queues("assign")
        return tuple(sorted({queue.topic for queue in assigned})), "", assigned
    if given.has("topicPattern"):
        pattern = given.required("topicPattern")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the option topicPattern is {pattern!r}: {error}") from None
        return (), pattern, frozenset()
    topics = tuple(part.strip() for part in given.required("topic").split(","))
    for topic in topics:
        check("topic", names.topic_fault(topic))
    return topics, "", frozenset()


def _connect(given: ParsedOptions) -> Connect:
    encoding = given.choice("headerEncoding", *ENCODINGS)
    try:
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
        # reads the certificate files, so that a missing file is reported before anything else is done
        access.check_files()
    except ConfigError as error:
        raise ConfigError(_ACCESS.sub(lambda found: ACCESS[found[0]], str(error))) from None
    name_server, client_name = given.required("nameServer"), given.get("clientName") or None
    try:
        parse_addresses(name_server)
    except ConfigError as error:
        raise ConfigError(f"the option nameServer{str(error).removeprefix('name_server')}") from None
    check_client_name("the option clientName", client_name)
    return Connect(name_server, access, client_name)


# ------------------------------------------------------------------------------
# Parsing of options: numbers, choices, durations and positions.


SPARKS_OWN: Final = ("path", "checkpointlocation", "queryname", "outputmode")
KAFKA_OPTIONS: Final = {
    "kafka.bootstrap.servers": "nameServer",
    "kafka.group.id": "group",
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "maxoffsetspertrigger": "maxRowsPerTrigger",
    "includeheaders": "includeProperties",
    "kafkaconsumer.polltimeoutms": "pollTimeoutMs",
    "kafka.batch.size": "batchBytes",
    "kafka.compression.type": "compressOverBytes",
    "kafka.delivery.timeout.ms": "deliveryTimeoutMs",
    "kafka.request.timeout.ms": "sendTimeoutMs",
    "kafka.retries": "retries",
}
"""Options of Spark's Kafka connector that have another name in this format."""
EARLIEST, LATEST = -2, -1
StartPlace = Start | Literal["committed"]
_PLACES: Final[Mapping[str, StartPlace]] = {"earliest": "first", "latest": "last", "committed": "committed"}


@dataclass(frozen=True, slots=True)
class StartingOffsets:
    """A position in every queue.

    Attributes:
        default: "first", "last", "committed", or a store time in ms since the epoch
        queues: positions of single queues, which replace the default
        option: the option that names the single queues
    """

    default: StartPlace
    queues: Mapping[Queue, Start | At] = field(default_factory=dict)
    option: str = field(default="", compare=False)

    def of(self, queue: Queue) -> StartPlace | At:
        return self.queues.get(queue, self.default)


def check(option: str, fault: str | None) -> None:
    if fault:
        raise ConfigError(f"the option {option}: {fault}")


def _closest(name: str, spelled: Mapping[str, str]) -> str | None:
    """Return the option that a misspelled name, or the name of an option of Spark's Kafka connector, most likely stands
    for."""
    known = {**{kafkas: ours for kafkas, ours in KAFKA_OPTIONS.items() if ours in spelled.values()}, **spelled}
    near = difflib.get_close_matches(name, known, 1)
    return known[near[0]] if near else None


class ParsedOptions:
    """Options that the user has set, with their names in the documented spelling."""

    def __init__(
        self, options: Mapping[str, str], allowed: Mapping[str, str], kinds: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Check the names of the options. Raises ConfigError for an unknown one, and if none is an option of this format.

        Args:
            options: the options that the user has set
            allowed: the permitted options, with a description of their values
            kinds: all options of the format by their purpose, for the error
        """
        self._allowed = allowed
        spelled = {name.lower(): name for name in allowed}
        self._values = {spelled.get(name.lower(), name): value for name, value in options.items()}
        unknown = [name for name in self._values if name not in allowed and name.lower() not in SPARKS_OWN]
        if not unknown and not self._values.keys() & allowed.keys():
            raise ConfigError(
                "no option reaches the source; nameServer and topic are needed. Spark keeps none of a table that "
                "CREATE TABLE ... USING rocketlet made: use CREATE TEMPORARY VIEW v USING rocketlet "
                "OPTIONS (nameServer '...', topic '...')"
            )
        if unknown:
            closest = _closest(unknown[0].lower(), spelled)
            hint = f"; did you mean {closest}?" if closest else "."
            other = [kind for kind, known in kinds.items() if unknown[0].lower() in map(str.lower, known)]
            if other:
                hint = f" here; it is one for {' and '.join(other)}."
            raise ConfigError(f"the option {unknown[0]} is unknown{hint} Options: {', '.join(allowed)}")

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name, default).strip()

    def required(self, name: str) -> str:
        value = self.get(name)
        if not value:
            raise ConfigError(f"the option {name} is missing: {self._allowed[name]}")
        return value

    def _invalid(self, name: str) -> ConfigError:
        value = self.get(name)
        shown = f"{value[:SHOWN_CHARS]}..." if len(value) > SHOWN_CHARS else value
        return ConfigError(f"the option {name} is {shown!r}; allowed: {self._allowed[name]}")

    def number(self, name: str, default: int = 0, least: int = 1, most: int = MAX_NUMBER) -> int:
        value = self.get(name, str(default))
        number = int(value) if re.fullmatch("[0-9]{1,19}", value) else -1
        if not least <= number <= most:
            raise self._invalid(name)
        return number

    def optional(self, name: str) -> int | None:
        """Return a positive number, or None if the option is not set."""
        return self.number(name) if self.has(name) else None

    def choice(self, name: str, *words: str) -> str:
        """Return the chosen value, by default the first one."""
        value = self.get(name, words[0]).lower()
        if value not in words:
            raise self._invalid(name)
        return value

    def seconds(self, name: str, default_ms: int) -> float:
        """Return the value of an option in ms as seconds."""
        return self.number(name, default_ms, most=MAX_TIMEOUT_MS) / 1000

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self._invalid(name)
        return value == "true"

    def position(self, side: str, default: str, words: tuple[str, ...]) -> StartingOffsets:
        """Return the position of the options `{side}Offsets`, `{side}Timestamp` and `{side}OffsetsByTimestamp`."""
        by_timestamp = f"{side}OffsetsByTimestamp"
        for name in (f"{side}Timestamp", by_timestamp):
            if self.has(name) and self.has(f"{side}Offsets"):
                raise ConfigError(f"the options {side}Offsets and {name} are both given; choose one")
        if self.has(f"{side}Timestamp") or self.has(by_timestamp):
            fallback: StartPlace = "first" if side == "starting" else "last"
            rest = self.number(f"{side}Timestamp", least=0) if self.has(f"{side}Timestamp") else fallback
            per_queue = self._per_queue(by_timestamp, _time) if self.has(by_timestamp) else {}
            return StartingOffsets(rest, per_queue, by_timestamp)
        value = self.get(f"{side}Offsets", default)
        if value.lower() in words:
            return StartingOffsets(_PLACES[value.lower()])
        name = f"{side}Offsets"
        if not value.startswith("{"):
            raise self._invalid(name)
        return StartingOffsets("first" if side == "starting" else "last", self._per_queue(name, _place), name)

    def duration_s(self, name: str, default: str) -> float:
        found = re.fullmatch("([0-9]{1,19})(ms|s|m|min|h|d)", self.get(name, default))
        if found is None or not 0 < int(found[1]) <= MAX_NUMBER:
            raise self._invalid(name)
        return int(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}[found[2]]

    def queues(self, name: str) -> frozenset[Queue]:
        """Return the queues of an option whose value is a JSON list of queue ids per topic and broker."""
        try:
            queues = frozenset(
                Queue(topic, broker_name, _queue_id(queue_id))
                for topic, brokers in orjson.loads(self.get(name)).items()
                for broker_name, numbers in brokers.items()
                for queue_id in numbers
            )
            if not queues:
                raise ValueError
        except (ValueError, AttributeError, TypeError):
            raise self._invalid(name) from None
        for queue in queues:
            check(name, names.topic_fault(queue.topic))
        return queues

    def _per_queue(self, name: str, place: Callable[[Any], Start | At]) -> dict[Queue, Start | At]:
        try:
            return {
                Queue(topic, broker_name, _queue_id(int(queue_id))): place(value)
                for topic, brokers in orjson.loads(self.get(name)).items()
                for broker_name, queues in brokers.items()
                for queue_id, value in queues.items()
            }
        except (ValueError, AttributeError, TypeError):
            raise self._invalid(name) from None


def _place(offset: Any) -> Start | At:
    if type(offset) is not int or not EARLIEST <= offset <= MAX_NUMBER:
        raise ValueError(offset)
    words: dict[int, Start] = {EARLIEST: "first", LATEST: "last"}
    return words.get(offset, At(offset))


def _time(milliseconds: Any) -> Start:
    if type(milliseconds) is not int or not 0 <= milliseconds <= MAX_NUMBER:
        raise ValueError(milliseconds)
    return milliseconds


def _queue_id(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


# ------------------------------------------------------------------------------
# The columns of rows: RocketMQ's, and those of Spark's Kafka connector, which a job written for that connector can keep.


CREATE_TIME: Final = 0  # Kafka's timestampType for a time that the sender has set
PROPERTIES: Final = "properties"
HEADERS: Final = "headers"
OURS: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "brokerName": StringType(),
    "queueId": IntegerType(),
    "queueOffset": LongType(),
    "messageId": StringType(),
    "keys": ArrayType(StringType()),
    "tags": StringType(),
    "body": BinaryType(),
    "bornTime": TimestampType(),
    "storeTime": TimestampType(),
    "reconsumeTimes": IntegerType(),
    PROPERTIES: MapType(StringType(), StringType()),
}
KAFKA_COLUMNS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    HEADERS: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}
_ALL: Final = {**OURS, **KAFKA_COLUMNS}
_BY_LOWER_CASE: Final = {name.lower(): name for name in _ALL}


def schema_of(columns: Iterable[str]) -> StructType:
    """Return Spark's schema of columns. Raises ConfigError for an unknown column."""
    return StructType([StructField(name, _type(name)) for name in columns])


def checked(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns in `.schema(...)`. Raises ConfigError."""
    for column in schema.fields:
        wanted = _type(column.name)
        if column.dataType != wanted or not column.nullable:
            found = column.dataType.simpleString() + ("" if column.nullable else " not null")
            raise ConfigError(
                f"the schema's column {column.name} is {found}; rows have {wanted.simpleString()}: cast it in a select"
            )
    return tuple(schema.names)


def canonical(name: str) -> str:
    """Return a column's name in the documented case: Spark's column names are case-insensitive."""
    return _BY_LOWER_CASE.get(name.lower(), name)


def _type(name: str) -> DataType:
    found = _ALL.get(canonical(name))
    if found is None:
        raise ConfigError(f"rows have no column {name!r}; columns: {', '.join(_ALL)}")
    return found
