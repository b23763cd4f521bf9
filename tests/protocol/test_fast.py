"""The compiled module does exactly what Python does, and declines the rest. Skipped where the module was not built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from struct import Struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol import fast, message
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.headers import PullMessage, encode_found_head, write

needs_module = pytest.mark.skipif(
    os.environ.get("ROCKETLET_PURE") == "1" or fast.MODULE == "pure", reason="needs the compiled module: make dev"
)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)


def in_python(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Switch one function off, as ROCKETLET_PURE does with all."""
    monkeypatch.setattr(fast, name, lambda *_: None)


def shown_module(code: str = "", **environment: str) -> str:
    code = f"{code}\nfrom rocketlet.protocol.fast import MODULE; print(MODULE)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_module_is_pure_when_the_environment_says_so() -> None:
    assert shown_module(ROCKETLET_PURE="1") == "pure\n"


def test_stale_module_counts_as_absent() -> None:
    stale = "import sys, types; sys.modules['rocketlet.protocol._fast'] = types.SimpleNamespace(INTERFACE=0)"
    assert shown_module(stale, ROCKETLET_PURE="") == "pure\n"


def outcome(function: Any, *arguments: Any) -> Any:
    """The result, or the type and text of the error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


@needs_module
@given(st.lists(st.tuples(st.integers(-(2**33), 2**33), st.binary(max_size=300), TEXTS), max_size=20))
def test_entries_are_the_bytes_that_python_makes(rows: list[tuple[int, bytes, str]]) -> None:
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = outcome(message.encode_columns, *columns)
        in_python(monkeypatch, "entries")
        assert outcome(message.encode_columns, *columns) == found


@needs_module
@pytest.mark.parametrize(
    ("flags", "bodies", "texts"),
    [
        ([0], [bytearray(b"a")], ["x"]),
        ([True], [b"a"], ["x"]),
        ([0], [b"a"], [b"x"]),
        ([0], [b"a"], ["\ud800"]),
        ([2**31], [b"a"], ["x"]),
        ([2**64], [b"a"], ["x"]),
        ([0], [b"a"], ["x" * 32_768]),
        ([0], [b"a"], ["é" * 16_384]),
        ([0, 0], [b"a"], ["x"]),
    ],
)
def test_entries_that_python_refuses_or_reads_otherwise_are_declined(flags: Any, bodies: Any, texts: Any) -> None:
    assert fast.entries(flags, bodies, texts) is None


@needs_module
def test_entries_take_texts_of_the_longest_size() -> None:
    assert fast.entries([-(2**31)], [b""], ["é" * 16_383 + "x"]) is not None


@needs_module
@given(
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=300), st.binary(max_size=300)), min_size=1),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**31 - 1),
    st.sampled_from([8, 20]),
    st.binary(max_size=14),
)
def test_records_are_the_bytes_that_python_makes(
    rows: list[tuple[int, bytes, bytes]], offset: int, position: int, queue_id: int, host_bytes: int, mark: bytes
) -> None:
    shared = message.Shared(b"\x01t", queue_id, 0, 5, bytes(8), 6, bytes(host_bytes), 1)
    flags, bodies, texts = (list(column) for column in zip(*rows, strict=True))
    arguments: tuple[Any, ...] = (
        [message.Piece(flags, bodies, texts, False)],
        shared,
        offset,
        position,
        lambda _: mark,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = message.encode_records(*arguments)
        in_python(monkeypatch, "records")
        assert message.encode_records(*arguments) == found


@needs_module
@pytest.mark.parametrize(("size", "is_taken"), [(32_757, True), (32_758, False)])
def test_records_with_longer_properties_than_a_size_can_say_are_declined(size: int, is_taken: bool) -> None:
    made = fast.records([0], [b"x"], [b"y" * size], [0], b"\x01t", 0, bytes(44), 0, 0)
    assert (made is not None) == is_taken


@needs_module
@pytest.mark.parametrize(
    ("flag", "queue_id", "offset", "position"),
    [
        (2**31, 0, 0, 0),
        (2**64, 0, 0, 0),
        (0, 2**31, 0, 0),
        (0, 2**64, 0, 0),
        (0, 0, 2**63, 0),
        (0, 0, 0, 2**64),
    ],
)
def test_records_with_numbers_that_have_too_many_bits_are_declined(
    flag: int, queue_id: int, offset: int, position: int
) -> None:
    assert fast.records([flag], [b"x"], [b""], [0], b"\x01t", queue_id, bytes(44), offset, position) is None


@needs_module
def test_slice_up_to_an_offset_that_has_too_many_bits_is_declined() -> None:
    assert fast.decode_slice(b"", 0, 2**64, (), None) is None


def send_with(properties: str) -> bytes:
    """A send whose properties are written so in JSON."""
    header = (
        b'{"code":310,"extFields":{"a":"p","b":"t","c":"TBW102","d":"4","e":"0","f":"0","g":"1","h":"0","i":"%b"},'
        b'"flag":0,"opaque":1}' % properties.encode()
    )
    return (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


def sends_taken(data: bytes) -> int:
    queues: dict[bytes, tuple[Any, bytes]] = {b"\0t\x000": (SimpleNamespace(next=0), b"\x01t")}
    broker_texts, limits = (bytes(8), b"00" * 8, b"CLUSTER\x01c", b"r"), (100, 1000, 100, 10, 100, 10, 1000)
    found = fast.take_sends(data, 0, b"", queues, 0, 1, b"", lambda _: b"", bytes(8), broker_texts, limits)
    return 0 if found is None else found.sends


@needs_module
@pytest.mark.parametrize("properties", ["", r"a\u0001b\u0002c", r"\n\t\r\b\f\"\\\/", "größe\U0001f600", r"\u007F"])
def test_send_in_json_is_taken_with_the_usual_escapes(properties: str) -> None:
    data = send_with(properties)
    assert sends_taken(data * 2) == 2


@needs_module
@pytest.mark.parametrize(
    "properties", [r"\Q", r"\u12", r"\ud83d", r"\u0080", r"\u000g", "\x01", "a\\\\\\", '"', r"\u00"]
)
def test_send_in_json_is_declined_with_other_escapes(properties: str) -> None:
    assert sends_taken(send_with(properties)) == 0


ENTRIES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from((0, 1, 91, 91, 120))), min_size=1, max_size=40)


@needs_module
@given(ENTRIES, st.integers(0, 2**40), st.integers(0, 3000))
def test_span_is_that_of_the_first_records_that_the_room_takes(
    gaps_and_sizes: list[tuple[int, int]], position: int, room: int
) -> None:
    rows: list[tuple[int, int]] = []
    for gap, size in gaps_and_sizes:
        position += gap if gap == 3 else 0
        rows.append((position, size))
        position += size
    count = 1
    while count < len(rows) and sum(size for _, size in rows[: count + 1]) <= room:
        count += 1
    taken = rows[:count]
    total = sum(size for _, size in taken)
    is_one = all(size for _, size in taken) and taken[-1][0] + taken[-1][1] - taken[0][0] == total
    expected = (taken[0][0], total, taken[-1][1], count) if is_one else None
    assert fast.span(b"".join(Struct(">QIq").pack(*row, 7) for row in rows), room) == expected


PULL = write(PullMessage("g", "t", 0, 0, 32, 6, 0, 15_000, 0, "A || größe", "TAG"))
OFFSETS = st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-1, 2**59), st.integers(-1, 2**59))


def pull_frame(kind: int, opaque: int, ext: Mapping[str, Any], **fields: Any) -> bytes:
    return encode(Frame(**{"code": 11, "opaque": opaque, "ext": ext, "serialize_type": kind, **fields}))


@needs_module
@given(st.sampled_from((JSON, ROCKETMQ, MSGPACK)), OFFSETS, OFFSETS)
def test_pulls_that_differ_in_number_and_offsets_have_one_key(
    kind: int, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    keys = set()
    for opaque, offset, commit_offset in (one, other):
        data = pull_frame(kind, opaque, PULL | {"queueOffset": offset, "commitOffset": commit_offset})
        found = fast.pull_key(b"x" + data + b"next", 1, 1000)
        assert found is not None
        end, found_kind, key, *values = found
        assert (end, found_kind, values) == (1 + len(data), kind, [opaque, offset, commit_offset])
        keys.add(key)
    assert len(keys) == 1


@needs_module
@given(
    st.sampled_from((JSON, ROCKETMQ, MSGPACK)),
    st.sampled_from([name for name in PULL if name not in ("queueOffset", "commitOffset")]),
    st.sampled_from(("x", "1", "10", "", "0")),
    st.sampled_from((0, 1, 10, 100, 1000)),
)
def test_pulls_that_differ_in_another_field_have_other_keys(kind: int, field: str, value: str, offset: int) -> None:
    before, after = PULL | {"queueOffset": offset}, PULL | {field: value, "queueOffset": 10 * offset}
    keys = [fast.pull_key(pull_frame(kind, 1, ext), 0, 1000) for ext in (before, after)]
    assert keys[0] is not None
    is_same = (PULL[field] if kind == MSGPACK else str(PULL[field])) == value
    assert keys[1] is None or (keys[0][2] == keys[1][2]) == is_same


@needs_module
@pytest.mark.parametrize("kind", [JSON, ROCKETMQ, MSGPACK])
@pytest.mark.parametrize(
    "fields",
    [
        {"code": 12},
        {"flag": 2},
        {"body": b"x"},
        {"ext": PULL | {"Signature": "s"}},
        {"ext": PULL | {"AccessKey": "a"}},
        {"ext": PULL | {"queueOffset": "x"}},
        {"ext": {name: value for name, value in PULL.items() if name != "commitOffset"}},
    ],
)
def test_pull_that_is_no_repeat_or_is_signed_has_no_key(kind: int, fields: dict[str, Any]) -> None:
    assert fast.pull_key(pull_frame(kind, 1, **{"ext": PULL, **fields}), 0, 1000) is None


@needs_module
@given(st.sampled_from((JSON, ROCKETMQ, MSGPACK)), st.integers(-1, 2**32), st.tuples(*[st.integers(-1, 2**65)] * 3))
def test_head_of_a_pulls_response_is_the_bytes_that_python_makes(
    kind: int, opaque: int, offsets: tuple[int, int, int]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = outcome(encode_found_head, kind, opaque, offsets, 36_000)
        in_python(monkeypatch, "found_head")
        assert outcome(encode_found_head, kind, opaque, offsets, 36_000) == found


@needs_module
@pytest.mark.parametrize(
    "numbers", [(-1, 0, 0, 0, 0), (2**31, 0, 0, 0, 0), (1, -1, 0, 0, 0), (1, 0, 2**64, 0, 0), (1, 0, 0, 0, 1 << 24)]
)
def test_head_of_a_pulls_response_with_unusual_numbers_is_declined(numbers: tuple[int, int, int, int, int]) -> None:
    assert fast.found_head(JSON, *numbers) is None
    assert fast.found_head(JSON, 1, 0, 0, 0, 0) is not None


@needs_module
@given(st.binary(max_size=20), st.sampled_from((JSON, ROCKETMQ, MSGPACK)), st.integers(0, 2**15 - 1))
def test_code_of_a_frame_is_found_without_its_fields(before: bytes, kind: int, code: int) -> None:
    data = encode(Frame(code, 1, {"a": "b"}, serialize_type=kind))
    assert fast.code_at(before + data, len(before)) == code
    assert all(fast.code_at(data[:end], 0) in (-1, code, *range(code)) for end in range(len(data)))
    assert fast.code_at(before, 0) is not None
