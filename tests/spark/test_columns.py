"""Records to Arrow columns, held against the decoder that makes a Python object of each message."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.protocol import fast
from rocketlet.protocol import properties as props
from rocketlet.protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB
from rocketlet.protocol.message import (
    MAGIC,
    MessageError,
    Record,
    decode_records,
    encode_host,
    encode_record,
    host_flags,
)
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from rocketlet.client import MessageIllegal, Outgoing
from rocketlet.client.sending.accumulator import (
    PROPERTY_BYTES,
    checked_body,
    checked_id,
    properties_text,
    with_message_group,
)
from rocketlet.client.sending.sender import own_text
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.message import BatchEntry, decode_batch, encode_batch
from rocketlet.spark import options
from rocketlet.spark.columns import Rows, compiled_rows, needed_for, record_rows, rows_of
from rocketlet.spark.config import MAX_DELAY_LEVEL
from rocketlet.spark.encoding import MessageIds, WrittenRows, to_entries

QUEUE = Queue("t", "broker-a", 3)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "RETRY_TOPIC", "a", "größe"]) | TEXT
PROPERTIES = st.lists(st.tuples(NAMES, TEXT), max_size=6).map(
    lambda items: "\x02".join("\x01".join(item) for item in items)
)
LIKE_MARKS = st.sampled_from(
    ["a\x01b\x02\x04abcde\x01fghijk", "a\x01b\x02\x04abcdefghijkl", "\x02\x04abcdefgh\x02i\x01j"]
)
TIMES = st.integers(0, 4_000_000_000_000)
HOSTS = st.sampled_from(["127.0.0.1", "::1"]).map(lambda address: encode_host(address, 1234))


@st.composite
def records(draw: st.DrawFn, queue_offset: int) -> bytes:
    born, store = draw(HOSTS), draw(HOSTS)
    body = draw(st.binary(min_size=1, max_size=40) | st.just(MAGIC.to_bytes(4, "big") * 3))
    flags = host_flags(born, store)
    if draw(st.booleans()):
        body, flags = zlib.compress(body), flags | SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
    properties = draw(PROPERTIES | TEXT | LIKE_MARKS).encode()
    times = st.integers(0, 4_000_000_000_000)
    return encode_record(
        3,
        0,
        queue_offset,
        77,
        flags,
        draw(times),
        born,
        draw(times),
        store,
        draw(st.integers(0, 16)),
        0,
        body,
        b"\x01t",
        properties,
    )


def in_python(
    data: bytes, queue: Queue, begin: int, end: int, columns: Sequence[str], tags: Sequence[str] = ()
) -> Rows:
    rows = record_rows(data, queue, begin, end, needed_for(queue, columns, tags))
    rows.tags, rows.is_strict = tags, False
    return rows


LOGS = (
    st.integers(0, 6)
    .flatmap(lambda count: st.tuples(*(records(100 + number) for number in range(count))))
    .map(b"".join)
)


def kafka_row(record: Record, topic: str) -> dict[str, Any]:
    ours = row(record, topic)
    properties = props.decode(record.properties)
    key = properties.get(props.KEYS)
    headers = [
        {"key": name, "value": value.encode()} for name, value in properties.items() if name not in props.RESERVED
    ]
    return {
        "key": None if key is None else key.encode(),
        "value": ours["body"],
        "topic": ours["topic"],
        "partition": 3,
        "offset": ours["queueOffset"],
        "timestamp": ours["bornTime"],
        "timestampType": 0,
        "headers": headers or None,
    }


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """A name twice in one message has the place of its last value, or of its first: properties have no order."""
    return {**found, "headers": found["headers"] and sorted(found["headers"], key=lambda header: header["key"])}


def row(record: Record, topic: str) -> dict[str, Any]:
    properties = props.decode(record.properties)
    began = datetime(1970, 1, 1, tzinfo=UTC)
    body = zlib.decompress(record.body) if record.sys_flag & SYS_COMPRESSED else record.body
    return {
        "topic": properties.get(props.RETRY_TOPIC, topic) if topic.startswith("%RETRY%") else topic,
        "brokerName": "broker-a",
        "queueId": 3,
        "queueOffset": record.queue_offset,
        "messageId": properties.get(props.UNIQUE_KEY) or record.offset_id,
        "keys": properties.get(props.KEYS, "").split(),
        "tags": properties.get(props.TAGS),
        "body": body,
        "properties": properties,
        "bornTime": began + timedelta(milliseconds=record.born_ms),
        "storeTime": began + timedelta(milliseconds=record.store_ms),
        "reconsumeTimes": record.reconsume_times,
    }


@given(LOGS, st.sampled_from(["t", "%RETRY%g"]), st.integers(98, 104), st.integers(98, 107))
@example(b"", "t", 0, 1)
def test_columns_are_what_the_careful_decoder_finds(data: bytes, topic: str, begin: int, end: int) -> None:
    queue = QUEUE._replace(topic=topic)
    batch = in_python(data, queue, begin, end, tuple(options.OURS)).batch(tuple(options.OURS))
    batch.validate(full=True)
    assert batch.schema == to_arrow_schema(options.schema_of(options.OURS), timezone="UTC")
    found = [{**item, "properties": dict(item["properties"])} for item in batch.to_pylist()]
    wanted = [record for record in decode_records(data) if begin <= record.queue_offset < end]
    assert found == [row(record, topic) for record in wanted]
    kafkas = in_python(data, queue, begin, end, tuple(options.KAFKA_COLUMNS)).batch(tuple(options.KAFKA_COLUMNS))
    kafkas.validate(full=True)
    assert kafkas.schema == to_arrow_schema(options.schema_of(options.KAFKA_COLUMNS), timezone="UTC")
    assert list(map(in_order, kafkas.to_pylist())) == [in_order(kafka_row(record, topic)) for record in wanted]
    for name in options.OURS:
        alone = in_python(data, queue, begin, end, [name]).batch([name])
        assert alone == batch.select([name]), "a column alone is the same"


COLUMNS = st.lists(st.sampled_from([*options.OURS, *options.KAFKA_COLUMNS]), min_size=1, unique=True)
DAMAGE = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=2)


@pytest.mark.skipif(fast.MODULE == "pure", reason="needs the compiled module: make dev")
@given(
    LOGS,
    DAMAGE,
    st.sampled_from(["t", "%RETRY%g"]),
    COLUMNS,
    st.sets(st.sampled_from(["A", "größe"])),
    st.integers(98, 104),
    st.integers(98, 107),
)
def test_compiled_rows_are_what_python_finds(
    data: bytes,
    damage: list[tuple[int, int]],
    topic: str,
    columns: list[str],
    tags: set[str],
    begin: int,
    end: int,
) -> None:
    damaged = bytearray(data)
    for position, octet in damage:
        if position < len(damaged):
            damaged[position] = octet
    data, queue = bytes(damaged), QUEUE._replace(topic=topic)
    found = compiled_rows(data, queue, begin, end, needed_for(queue, columns, sorted(tags)))
    if found is None:
        return
    found.tags, found.is_strict = sorted(tags), False
    python = in_python(data, queue, begin, end, columns, sorted(tags))
    batch = found.batch(columns)
    batch.validate(full=True)
    assert batch.to_pylist() == python.batch(columns).to_pylist()
    assert batch.schema == python.batch(columns).schema
    assert found.unreadable == () and not python.unreadable
    assert found.offsets.tolist() == python.offsets.tolist()
    assert found.stored_ms.tolist() == python.stored_ms.tolist()


def plain_record(properties: bytes, body: bytes = b"x", flags: int = 0) -> bytes:
    host = encode_host("127.0.0.1", 1234)
    return encode_record(3, 0, 100, 77, flags, 5, host, 6, host, 0, 0, body, b"\x01t", properties)


@pytest.mark.skipif(fast.MODULE == "pure", reason="needs the compiled module: make dev")
@pytest.mark.parametrize(
    ("data", "is_taken"),
    [
        (b"", True),
        (plain_record("TAGS\x01größe\x02a\x01b".encode()), True),
        (plain_record(b"\x02".join(b"n%d\x01v" % number for number in range(64))), True),
        (plain_record(b"\x02".join(b"n%d\x01v" % number for number in range(65))), False),
        (plain_record(b"a\x01b\x02a\x01c"), False),
        (plain_record(b"TAGS\x01b\x02TAGS\x01c"), False),
        (plain_record(b"a\x01\xff"), False),
        (plain_record(b"a\x01b", zlib.compress(b"x"), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB), True),
    ],
)
def test_compiled_rows_are_declined_when_only_python_decides(data: bytes, is_taken: bool) -> None:
    """All columns together, and of messages without a unique key or in a retry topic."""
    for topic, columns in (("t", ["tags", "properties"]), ("%RETRY%g", [*options.OURS, *options.KAFKA_COLUMNS])):
        queue = QUEUE._replace(topic=topic)
        assert (compiled_rows(data, queue, 0, 1000, needed_for(queue, columns)) is not None) == is_taken
        assert rows_of(data, queue, 0, 1000, columns).batch(columns).num_rows == (data != b"")


@given(LOGS, st.sets(st.sampled_from(["A", "B", "größe"]), min_size=1))
def test_only_the_tags_asked_for_come(data: bytes, tags: set[str]) -> None:
    batch = in_python(data, QUEUE, 0, 1000, ["queueOffset"], sorted(tags)).batch(["queueOffset"])
    wanted = [r.queue_offset for r in decode_records(data) if props.decode(r.properties).get(props.TAGS) in tags]
    assert batch.column("queueOffset").to_pylist() == wanted


@given(LOGS.filter(bool), st.data())
def test_malformed_bytes_are_refused_or_give_the_same_rows(data: bytes, draw: st.DataObject) -> None:
    """Never a crash, never an endless loop: what cannot be read is a MessageError."""
    at = draw.draw(st.integers(0, len(data) - 1))
    cut = (
        data[:at] if draw.draw(st.booleans()) else data[:at] + bytes([draw.draw(st.integers(0, 255))]) + data[at + 1 :]
    )
    try:
        batch = rows_of(cut, QUEUE, -(2**63), 2**63 - 1, tuple(options.OURS), strict=False).batch(tuple(options.OURS))
    except MessageError:
        return
    except (OverflowError, ValueError, ArithmeticError) as error:
        pytest.fail(f"not a MessageError: {error!r}")
    assert batch.num_rows <= 6


def test_a_body_that_cannot_be_decompressed_is_named_or_null() -> None:
    host = encode_host("127.0.0.1", 1)
    flags = SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
    broken = encode_record(3, 0, 41, 0, flags, 0, host, 0, host, 0, 0, b"no zlib", b"\x01t", b"")
    good = encode_record(3, 0, 42, 0, 0, 0, host, 0, host, 0, 0, b"plain", b"\x01t", b"")
    with pytest.raises(MessageError, match=r"message at offset 41 cannot be decoded.*failOnDataLoss"):
        rows_of(broken + good, QUEUE, 0, 100, ["body"]).batch(["body"])
    lenient = rows_of(broken + good, QUEUE, 0, 100, ["body"], strict=False)
    assert lenient.batch(["body"]).column("body").to_pylist() == [None, b"plain"]


def test_columns_in_another_letter_case_have_the_same_values() -> None:
    found = rows_of(plain_record(b"TAGS\x01A"), QUEUE, 0, 1000, ["TAGS", "Body"]).batch(["TAGS", "Body"])
    assert found.to_pylist() == [{"TAGS": "A", "Body": b"x"}]


# Rows to the entries of batches, held against the encoder that takes a Python object of each message.


TEXTS = (
    st.none()
    | st.sampled_from(["", " ", "\x1f", "a\x01", "a\x02b", "größe", "a b", " x ", "a||b", "a\tb", "x\x1fy"])
    | st.text(max_size=8)
)
NAMES_ENTRIES = st.sampled_from(["", " ", "a", "__SHARDINGKEY", "b", "größe", "a\x01", "TAGS", "UNIQ_KEY"]) | st.text(
    max_size=4
)
ROWS = st.fixed_dictionaries(
    {
        "body": st.none() | st.binary(max_size=12),
        "keys": st.none() | st.lists(TEXTS, max_size=3),
        "tags": TEXTS,
        "properties": st.none() | st.dictionaries(NAMES_ENTRIES, TEXTS, max_size=3),
        "messageId": TEXTS,
        "delayLevel": st.sampled_from([None, None, 0, 1, 18, -1]),
        "delay": st.sampled_from([None, None, timedelta(0), timedelta(milliseconds=1500), timedelta(seconds=-1)]),
        "deliverAt": st.sampled_from([None, None, datetime(2040, 1, 1, tzinfo=UTC)]),
        "priority": st.sampled_from([None, None, 0, 7, -1, 2**31]),
        "liteTopic": st.sampled_from([None, None, "", "a-1", "a b", "x" * 65]),
        "messageGroup": st.sampled_from([None, None, "", " ", "g 1", "a\x02"]),
    }
)
SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("keys", pa.list_(pa.string())),
        ("tags", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("messageId", pa.string()),
        ("delayLevel", pa.int32()),
        ("delay", pa.duration("us")),
        ("deliverAt", pa.timestamp("us", "UTC")),
        ("priority", pa.int64()),
        ("liteTopic", pa.string()),
        ("messageGroup", pa.string()),
    ]
)
PLAIN: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {"body": b"x", "messageId": "id"}


def expected(row: dict[str, Any]) -> BatchEntry | None:
    """The entry, without an id where the row has none; None for a row that `Producer.send` would reject."""
    if (row["delayLevel"] or 0) > MAX_DELAY_LEVEL:
        return None
    skipped = {*props.RESERVED, props.SHARDING_KEY}
    kept = {name: value for name, value in (row["properties"] or {}).items() if name not in skipped}
    is_again = bool(row["messageId"])
    try:
        body = checked_body(row["body"] or b"")
        message_id = checked_id(row["messageId"]) if row["messageId"] else "made"
        own = {"delay": row["delay"], "at": row["deliverAt"], "priority": row["priority"]}
        later = own_text(Outgoing(body, delay_level=row["delayLevel"] or 0, lite_topic=row["liteTopic"] or None, **own))
        if row["messageGroup"]:
            kept = {props.SHARDING_KEY: with_message_group({}, row["messageGroup"])[props.SHARDING_KEY], **kept}
        text = properties_text(row["tags"] or None, row["keys"] or (), kept, message_id, later, is_again=is_again)
    except MessageIllegal:
        return None
    return BatchEntry(0, body, text)


def table(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    pairs = [{**row, "properties": row["properties"] and list(row["properties"].items())} for row in rows]
    return pa.RecordBatch.from_pylist(pairs, SCHEMA)


@given(st.lists(ROWS, max_size=5), st.integers(0, 2))
@example([{**PLAIN, "properties": {"a": "b", "TAGS": "x"}}, PLAIN], 0)
@example([{**PLAIN, "properties": {"a": None}}], 0)
@example([{**PLAIN, "keys": ["a", None]}], 0)
@example([{**PLAIN, "keys": [""]}], 0)
@example([{**PLAIN, "keys": ["a b"]}, {**PLAIN, "keys": ["a", ""]}, {**PLAIN, "keys": ["", ""]}], 0)
@example([{**PLAIN, "tags": "a||b"}, {**PLAIN, "tags": "a||b", "messageId": None}], 0)
@example([{**PLAIN, "delayLevel": 3}, {**PLAIN, "delayLevel": 19}], 0)
@example(
    [{**PLAIN, "delay": timedelta(seconds=2), "priority": 3}, {**PLAIN, "delayLevel": 1, "priority": 2**31 - 1}], 0
)
@example([{**PLAIN, "delay": timedelta(0), "deliverAt": datetime(2040, 1, 1, tzinfo=UTC)}], 0)
@example([{**PLAIN, "liteTopic": "a"}, {**PLAIN, "liteTopic": "a", "priority": 0}], 0)
@example([{**PLAIN, "tags": "x" * PROPERTY_BYTES}], 0)
@example([{**PLAIN, "tags": "x" * (PROPERTY_BYTES - len("TAGS1UNIQ_KEY1id1"))}], 0)
@example([{**PLAIN, "body": b"x" * (MAX_BODY_BYTES + 1)}, {**PLAIN, "body": b"x" * MAX_BODY_BYTES}], 0)
def test_entries_are_those_of_the_careful_encoder(rows: list[dict[str, Any]], skipped: int) -> None:
    entries = to_entries(written := WrittenRows(table(rows).slice(skipped)), MessageIds())
    bounds, octets = entries.bounds(), bytes(entries.octets())
    rows = rows[skipped:]
    assert len(written.faulty) == len(rows)
    for number, row in enumerate(rows):
        wanted = expected(row)
        assert bool(written.faulty[number]) == (wanted is None), row
        if wanted is None:
            continue
        data = octets[bounds[number] : bounds[number + 1]]
        (found,) = decode_batch(data)
        if not row["messageId"]:
            made = props.decode(found.properties)[props.UNIQUE_KEY]
            assert len(made) == 32
            found = found._replace(properties=found.properties.replace(made, "made"))
        assert found == wanted
        assert not row["messageId"] or data == encode_batch([wanted])
        assert entries.body_sizes[number] == len(wanted.body)
        assert entries.alone[number] == (not wanted.properties.startswith(("KEYS", "TAGS", "UNIQ_KEY")))


def test_text_bodies_and_keys_in_one_text() -> None:
    columns = {"body": ["grün", "y", "z"], "keys": [" a\tb ", None, " "], "messageId": ["1", "2", "3"]}
    rows = WrittenRows(pa.RecordBatch.from_pydict(columns))
    found = decode_batch(bytes(to_entries(rows, MessageIds()).octets()))
    assert not rows.faulty.any()
    assert [entry.body.decode() for entry in found] == ["grün", "y", "z"]
    texts = ["KEYS\x01a b\x02UNIQ_KEY\x011", "UNIQ_KEY\x012", "UNIQ_KEY\x013"]
    assert [entry.properties for entry in found] == texts


def test_ids_do_not_come_twice_when_the_counter_has_gone_round() -> None:
    ids = MessageIds()
    made = [
        *ids.generate(100_000).to_pylist(),
        *ids.generate(100_000).to_pylist(),
        *MessageIds().generate(1).to_pylist(),
    ]
    assert len(set(made)) == 200_001
    assert all(len(bytes.fromhex(key.decode())) == 16 for key in made[::9973])
