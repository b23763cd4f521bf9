"""Rows to the entries of batches, held against the encoder that takes a Python object of each message."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.client import MessageIllegal
from rocketlet.client.sending.accumulator import PROPERTY_BYTES, checked_body, checked_id, properties_text
from rocketlet.protocol import properties as props
from rocketlet.protocol.message import BatchEntry, decode_batch, encode_batch

pytest.importorskip("pyspark")
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.spark.sink import MessageIds, to_entries

TEXTS = st.none() | st.sampled_from(["", " ", "\x1f", "a\x01", "a\x02b", "größe", "a b", " x "]) | st.text(max_size=8)
NAMES = st.sampled_from(["", " ", "a", "b", "größe", "a\x01", "TAGS", "UNIQ_KEY"]) | st.text(max_size=4)
ROWS = st.fixed_dictionaries(
    {
        "body": st.none() | st.binary(max_size=12),
        "keys": st.none() | st.lists(TEXTS, max_size=3),
        "tags": TEXTS,
        "properties": st.none() | st.dictionaries(NAMES, TEXTS, max_size=3),
        "messageId": TEXTS,
    }
)
SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("keys", pa.list_(pa.string())),
        ("tags", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("messageId", pa.string()),
    ]
)
PLAIN: dict[str, Any] = {"body": b"x", "keys": None, "tags": None, "properties": None, "messageId": "id"}


def expected(row: dict[str, Any]) -> BatchEntry | None:
    """The entry, without an id where the row has none; None for a row that cannot be sent."""
    kept = {name: value for name, value in (row["properties"] or {}).items() if name not in props.RESERVED}
    try:
        body = checked_body(row["body"] or b"")
        message_id = checked_id(row["messageId"]) if row["messageId"] else "made"
        text = properties_text(row["tags"] or None, row["keys"] or (), kept, message_id, "")
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
@example([{**PLAIN, "tags": "x" * PROPERTY_BYTES}], 0)
@example([{**PLAIN, "tags": "x" * (PROPERTY_BYTES - len("TAGS1UNIQ_KEY1id1"))}], 0)
@example([{**PLAIN, "body": b"x" * (MAX_BODY_BYTES + 1)}, {**PLAIN, "body": b"x" * MAX_BODY_BYTES}], 0)
def test_entries_are_those_of_the_careful_encoder(rows: list[dict[str, Any]], skipped: int) -> None:
    entries = to_entries(table(rows).slice(skipped), MessageIds())
    bounds, octets = entries.bounds(), bytes(entries.octets())
    rows = rows[skipped:]
    assert len(entries.faulty) == len(rows)
    for number, row in enumerate(rows):
        wanted = expected(row)
        assert bool(entries.faulty[number]) == (wanted is None), row
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


def test_text_bodies_and_keys_in_one_text() -> None:
    batch = pa.RecordBatch.from_pydict({"body": ["grün", "y"], "keys": ["a b", None], "messageId": ["1", "2"]})
    found = decode_batch(bytes(to_entries(batch, MessageIds()).octets()))
    assert [entry.body.decode() for entry in found] == ["grün", "y"]
    assert [entry.properties for entry in found] == ["KEYS\x01a b\x02UNIQ_KEY\x011", "UNIQ_KEY\x012"]


def test_ids_do_not_come_twice_when_the_counter_has_gone_round() -> None:
    ids = MessageIds()
    made = [
        *ids.generate(100_000).to_pylist(),
        *ids.generate(100_000).to_pylist(),
        *MessageIds().generate(1).to_pylist(),
    ]
    assert len(set(made)) == 200_001
    assert all(len(bytes.fromhex(key.decode())) == 16 for key in made[::9973])
