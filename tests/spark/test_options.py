from __future__ import annotations

import re

import pytest
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructField, StructType
from rocketlet.client.config import At
from rocketlet.client.errors import ConfigError
from rocketlet.spark import options as schema
from rocketlet.spark.config import MAX_NUMBER, MAX_SEND_BATCH_BYTES, MAX_TIMEOUT_MS
from rocketlet.spark.encoding import check_columns
from rocketlet.spark.options import StartingOffsets, batch_options, chosen, columns, stream_options, write_options

GOOD = {"nameServer": "h:1", "topic": "t", "group": "g"}


def offset_of_queue(number: int) -> str:
    return f'{{"t": {{"b": {{"0": {number}}}}}}}'


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nameServer": ""}, "option nameServer is missing: host:port"),
        ({"topic": ""}, "option topic is missing"),
        ({"topic": "a b"}, "option topic"),
        ({"topicPattern": "a.*"}, "topic and topicPattern are both given"),
        ({"group": "a b"}, "option group"),
        ({"group": ""}, "option group is missing: the consumer group"),
        ({"tags": "||"}, "option tags"),
        ({"tags": "a |"}, r"option tags is 'a \|': tags are separated by \|\|"),
        ({"nameServer": "h"}, "^the option nameServer: 'h' is not host:port"),
        ({"clientName": "a b"}, "^the option clientName"),
        ({"tags": "A", "sql": "a = 1"}, "tags and sql are both given"),
        ({"startingOffsets": "middle"}, "allowed: earliest, latest"),
        ({"startingOffsets": '{"t": {"a": {"0": -3}}}'}, "allowed: earliest, latest"),
        ({"startingOffsets": '{"t": 5}'}, "allowed: earliest, latest"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "both given"),
        ({"startingTimestamp": "yesterday"}, "allowed: ms since the epoch"),
        ({"maxRowsPerTrigger": "0"}, "allowed: a positive number"),
        ({"minOffsetsPerTrigger": "0"}, "option minOffsetsPerTrigger is '0'; allowed: a positive number"),
        (
            {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "15"},
            "option maxTriggerDelay is '15'; allowed: such as 500ms",
        ),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "0s"}, "option maxTriggerDelay is '0s'; allowed: such as"),
        ({"minOffsetsPerTrigger": "6", "maxRowsPerTrigger": "5"}, "is 6, more than maxRowsPerTrigger, which is 5"),
        ({"startingOffsetsByTimestampStrategy": "none"}, "is .none.; allowed: latest or error"),
        ({"maxTriggerDelay": "15m"}, "maxTriggerDelay is given without minOffsetsPerTrigger"),
        ({"assign": '{"t": {"b": [0]}}'}, "options topic and assign are both given"),
        ({"topic": None, "assign": '{"t": {"b": [0]}}'}, "assign is given, .* set membership to false"),
        ({"topic": None, "membership": "false", "assign": '{"t": {"b": [-1]}}'}, "option assign is .*allowed: JSON"),
        ({"topic": None, "membership": "false", "assign": "{}"}, "option assign is '{}'; allowed: JSON"),
        ({"startingOffsetsByTimestamp": '{"t": {"b": {"0": -1}}}'}, "option startingOffsetsByTimestamp is .*allowed"),
        (
            {"startingOffsetsByTimestamp": '{"t": {"b": {"0": 1}}}', "startingOffsets": "latest"},
            "startingOffsets and startingOffsetsByTimestamp are both given",
        ),
        ({"maxBytesPerTrigger": "-1"}, "allowed: a positive number"),
        ({"maxBytesPerTrigger": "\u00b2"}, "allowed: a positive number"),
        (
            {"maxBytesPerTrigger": "9" * 5000},
            r"option maxBytesPerTrigger is '9{100}\.\.\.'; allowed: a positive number",
        ),
        ({"maxBytesPerTrigger": str(MAX_NUMBER + 1)}, "allowed: a positive number"),
        ({"pollTimeoutMs": str(MAX_TIMEOUT_MS + 1)}, f"maximum {MAX_TIMEOUT_MS}"),
        ({"releaseTimeoutMs": str(MAX_TIMEOUT_MS + 1)}, f"maximum {MAX_TIMEOUT_MS}"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "9" * 5000 + "h"}, "such as 500ms, 30s, 15m or 1h"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": str(MAX_NUMBER + 1) + "d"}, "such as 500ms, 30s, 15m or 1h"),
        ({"startingOffsets": offset_of_queue(MAX_NUMBER + 1)}, "option startingOffsets is .*allowed"),
        (
            {"startingOffsetsByTimestamp": offset_of_queue(MAX_NUMBER + 1)},
            "option startingOffsetsByTimestamp is .*allowed",
        ),
        ({"startingOffsets": '{"t": {"b": {"-1": 5}}}'}, "option startingOffsets is .*allowed"),
        ({"topic": None, "topicPattern": ""}, "option topicPattern is missing"),
        ({"sql": " "}, "option sql is missing: an SQL92 filter"),
        ({"minPartitions": "many"}, "option minPartitions is 'many'"),
        ({"pollTimeoutMs": "0"}, "allowed: timeout of a read"),
        ({"failOnDataLoss": "maybe"}, "allowed: true or false"),
        ({"membership": "no"}, "allowed: true or false"),
        ({"headerEncoding": "xml"}, "allowed: auto, json or rocketmq"),
        ({"accessKey": "k"}, "accessKey, secretKey: only one of them is given"),
        (
            {"tls": "true", "tlsCaFile": "/nowhere/ca.pem"},
            "tlsCaFile: /nowhere/ca.pem does not exist or is not readable",
        ),
        ({"tlsCaFile": "/ca.pem"}, "but TLS is off"),
        ({"maxRows": "5"}, "option maxRows is unknown.*maxRowsPerTrigger"),
        (
            {"startingoffset": "latest"},
            r"startingoffset is unknown; did you mean startingOffsets\? Options: nameServer, ",
        ),
        ({"maxOffsetsPerTrigger": "5"}, "did you mean maxRowsPerTrigger"),
        ({"maxOffsetsPerTriger": "5"}, "did you mean maxRowsPerTrigger"),
        ({"kafka.bootstrap.servers": "h:1"}, "did you mean nameServer"),
        ({"includeHeaders": "true"}, "did you mean includeProperties"),
        ({"zzz": "1"}, r"zzz is unknown\. Options: nameServer"),
        ({"endingOffsets": "latest"}, "option endingOffsets is unknown here; it is one for batch reads"),
        ({"membership": "false", "group": "", "startingOffsets": "committed"}, "set the option group"),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_allowed(options: dict[str, str | None], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        stream_options({name: value for name, value in {**GOOD, **options}.items() if value is not None})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"endingOffsets": "earliest"}, "allowed: latest, committed"),
        ({"group": "", "endingOffsets": "committed"}, "set the option group"),
        ({"maxrowspertrigger": "5"}, "option maxrowspertrigger is unknown here; it is one for streams"),
    ],
)
def test_a_batch_has_options_of_its_own(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        batch_options({**GOOD, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batchBytes": "5000000"}, "maximum 2000000"),
        ({"retries": "-1"}, "option retries is '-1'"),
        ({"group": "DEFAULT_PRODUCER"}, "option group"),
        ({"tags": "A"}, "option tags is unknown here; it is one for streams and batch reads"),
    ],
)
def test_the_sink_has_options_of_its_own(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        write_options({**GOOD, **options})


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": IntegerType()}, "the column body is int; allowed: BINARY or STRING"),
        ({"body": BinaryType(), "tag": StringType()}, "the column tag is not a column of a message.*tags"),
        ({"tags": StringType()}, "a column body is missing"),
        ({"body": StringType(), "delayLevel": StringType()}, "the column delayLevel is string"),
        ({"body": StringType()}, "add a column topic, or set the option topic"),
    ],
)
def test_columns_that_make_no_message_are_refused(columns: dict[str, DataType], reason: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    with pytest.raises(ConfigError, match=reason):
        check_columns(schema, write_options({"nameServer": "h:1"}))


def test_options_are_read_whatever_their_case() -> None:
    options = stream_options(
        {"NAMESERVER": "h:1", "Topic": "t, u", "group": "g", "startingtimestamp": "17", "MaxRowsPerTrigger": "9"}
    )
    assert options.read.topics == ("t", "u")
    assert (options.read.start, options.max_rows) == (StartingOffsets(17), 9)
    assert "secret" not in repr(stream_options({**GOOD, "accessKey": "key", "secretKey": "secret"}))


def test_exact_offsets_are_kafkas_numbers() -> None:
    exact = '{"t": {"a": {"0": 23, "1": -1, "2": -2}}}'
    start = stream_options({**GOOD, "startingOffsets": exact}).read.start
    assert start == StartingOffsets(
        "first", {Queue("t", "a", 0): At(23), Queue("t", "a", 1): "last", Queue("t", "a", 2): "first"}
    )
    assert start.of(Queue("t", "b", 0)) == "first"
    assert batch_options({**GOOD, "endingOffsets": exact}).end.of(Queue("t", "b", 0)) == "last"


def test_starting_time_may_be_the_epoch() -> None:
    assert stream_options({**GOOD, "startingTimestamp": "0"}).read.start.default == 0


def test_durations_queues_and_times_per_queue() -> None:
    good = {"nameServer": "h:1", "group": "g", "membership": "false", "assign": '{"t": {"b": [0, 2]}, "u": {"b": [1]}}'}
    read = stream_options(good).read
    assert read.topics == ("t", "u")
    assert read.assigned == {Queue("t", "b", 0), Queue("t", "b", 2), Queue("u", "b", 1)}
    times = {"startingOffsetsByTimestamp": '{"t": {"b": {"0": 5}}}', "startingTimestamp": "7"}
    assert stream_options(GOOD | times).read.start == StartingOffsets(7, {Queue("t", "b", 0): 5})
    del times["startingTimestamp"]
    assert stream_options(GOOD | times).read.start == StartingOffsets("first", {Queue("t", "b", 0): 5})
    for text, seconds in (("500ms", 0.5), ("30s", 30), ("15m", 900), ("2min", 120), ("1h", 3600), ("1d", 86_400)):
        assert stream_options(GOOD | {"minOffsetsPerTrigger": "5", "maxTriggerDelay": text}).max_delay_s == seconds


def test_numbers_are_taken_up_to_their_limits() -> None:
    numbers = dict.fromkeys(
        (
            "maxRowsPerTrigger",
            "maxBytesPerTrigger",
            "minOffsetsPerTrigger",
            "minPartitions",
            "prefetchRows",
            "arrowBatchSize",
        ),
        str(MAX_NUMBER),
    )
    times = dict.fromkeys(("pollTimeoutMs", "releaseTimeoutMs"), str(MAX_TIMEOUT_MS))
    start = {"startingOffsets": offset_of_queue(MAX_NUMBER)}
    options = stream_options(GOOD | numbers | times | start)
    assert (options.max_rows, options.read.min_partitions, options.prefetch_rows) == (MAX_NUMBER,) * 3
    assert options.read.poll_timeout_s == options.release_timeout_s == MAX_TIMEOUT_MS / 1000
    assert options.read.start.of(Queue("t", "b", 0)) == At(MAX_NUMBER)
    assert write_options(GOOD | {"batchBytes": str(MAX_SEND_BATCH_BYTES)}).batch_bytes == MAX_SEND_BATCH_BYTES
    with pytest.raises(ConfigError, match=f"maximum {MAX_SEND_BATCH_BYTES}"):
        write_options(GOOD | {"batchBytes": str(MAX_SEND_BATCH_BYTES + 1)})


@pytest.mark.parametrize("value", ["false", " False ", "true", " true"])
def test_rows_have_the_column_properties_where_they_are_read_with_it(value: str) -> None:
    given = GOOD | {"includeProperties": value}
    assert (schema.PROPERTIES in columns(given)) == ("rue" in value)
    assert (schema.HEADERS in columns({**given, "columns": "kafka"})) == ("rue" in value)


def test_columns_are_named_or_those_of_kafkas_connector() -> None:
    assert columns(GOOD) == tuple(schema.OURS)
    assert columns(GOOD | {"COLUMNS": "body, tags,body"}) == ("body", "tags")
    assert columns(GOOD | {"columns": "kafka"}) == tuple(schema.KAFKA_COLUMNS)[:-1], (
        "as there, headers only when asked for"
    )


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        ({}, StructField("nothing", IntegerType()), "no column 'nothing'; columns: topic, "),
        ({}, StructField("body", StringType()), "column body is string; rows have binary: cast it in a select"),
        ({}, StructField("keys", ArrayType(IntegerType())), "column keys is array<int>; rows have array<string>"),
        ({}, StructField("body", BinaryType(), nullable=False), "column body is binary not null"),
        ({"columns": "tags"}, StructField("body", BinaryType()), r"columns and .schema\(...\) are both given"),
        ({"columns": "body", "includeProperties": "true"}, None, "columns and includeProperties are both"),
        ({"includeProperties": "perhaps"}, None, "includeProperties is 'perhaps'; allowed: true or false"),
        ({"columns": "body,"}, None, "no column ''"),
        ({"columns": "Bodies"}, None, "no column 'Bodies'"),
    ],
)
def test_columns_that_rows_cannot_have_are_refused(given: dict[str, str], asked: StructField | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schema.schema_of(columns(GOOD | given)) if asked is None else chosen(GOOD | given, StructType([asked]))


def test_no_option_at_all_is_what_spark_makes_of_a_created_table() -> None:
    with pytest.raises(ConfigError, match="use CREATE TEMPORARY VIEW v USING rocketlet OPTIONS"):
        batch_options({})


def test_options_of_kafkas_connector_alone_are_named() -> None:
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is unknown; did you mean nameServer"):
        stream_options({"kafka.bootstrap.servers": "h:1", "subscribe": "t"})
    with pytest.raises(ConfigError, match="no option reaches the source"):
        stream_options({"path": "/t"})


def test_words_of_options_have_any_letter_case() -> None:
    given = {"nameServer": "h:1", "topic": "t", "group": "g", "startingOffsets": "Latest", "headerEncoding": "JSON"}
    options = stream_options(given)
    assert (options.read.start.default, options.read.connect.access.encoding) == ("last", "json")


def test_query_without_membership_gets_a_group_of_its_own_for_each_run_by_its_prefix() -> None:
    given = {"nameServer": "h:1", "topic": "t", "membership": "false", "groupIdPrefix": "report"}
    groups = {stream_options(given).read.group for _ in range(2)}
    assert len(groups) == 2 and all(re.fullmatch("report-[0-9a-f]{32}", group) for group in groups)
    assert stream_options({**given, "group": "g"}).read.group == "g"
    with pytest.raises(ConfigError, match="a member names its group"):
        stream_options({**given, "group": "g", "membership": "true"})
