"""The compiled module does exactly what Python does, and declines the rest. Skipped where the module was not built."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Mapping
from struct import Struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol import fast, message
from rocketlet.protocol.checksum import crc32
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.headers import PullMessage, encode_found_head, write

needs_module = pytest.mark.skipif(
    os.environ.get("ROCKETLET_PURE") == "1" or fast.MODULE == "pure", reason="needs the compiled module: make dev"
)
KINDS = (JSON, ROCKETMQ, MSGPACK)
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


PULL = write(PullMessage("g", "t", 0, 0, 32, 6, 0, 15_000, 0, "A || größe", "TAG"))
OFFSETS = st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-1, 2**59), st.integers(-1, 2**59))


def pull_frame(kind: int, opaque: int, ext: Mapping[str, Any], **fields: Any) -> bytes:
    return encode(Frame(**{"code": 11, "opaque": opaque, "ext": ext, "serialize_type": kind, **fields}))


@needs_module
@given(st.sampled_from(KINDS), OFFSETS, OFFSETS)
def test_pulls_that_differ_in_number_and_offsets_have_one_key(
    kind: int, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    keys = set()
    for opaque, offset, commit_offset in (one, other):
        data = pull_frame(kind, opaque, PULL | {"queueOffset": offset, "commitOffset": commit_offset})
        keys.add(fast.pull_key(b"x" + data + b"next", 1, 1000))
    assert len(keys) == 1
    assert None not in keys


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
    assert keys[1] is None or (keys[0] == keys[1]) == is_same


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


class Log:
    """A log with records of one queue that this process has written, and the queue's index."""

    def __init__(self, gaps_and_sizes: list[tuple[int, int]], begin: int) -> None:
        self.begin = self.end = 1000
        self.data = bytearray()
        self.places, self.sums, self.sum = array("Q", (1000,)), array("I", (0,)), 0
        self.rows: list[tuple[int, int]] = []
        self.first = begin
        for number, (gap, size) in enumerate(gaps_and_sizes):
            self._append(bytes(gap))
            self.rows.append((self.end, size))
            self._append(Struct(">I24xQ").pack(size, self.end).ljust(size, b"r")[:size])
            if number % 3 == 0:
                self.places.append(self.end)
                self.sums.append(self.sum)

    def _append(self, data: bytes) -> None:
        self.data += data
        self.sum = crc32(data, self.sum)
        self.end += len(data)

    @property
    def next(self) -> int:
        return self.first + len(self.rows)

    def entries(self, offset: int, count: int) -> bytes:
        rows = self.rows[offset - self.first :][:count]
        return b"".join(Struct(">QIq").pack(*row, 7) for row in rows)

    def read_at(self, descriptor: int, size: int, at: int) -> bytes:
        return bytes(self.data[at : at + size])

    def take(self, data: bytes, room: int, limit: int, max_bytes: int) -> fast.ServedPulls | None:
        source = fast.PullSource(self.entries, None, self.first, self.next, self.first, room, limit, True)
        key = fast.pull_key(data, 0, 1000)
        assert key is not None
        return fast.take_pulls(
            data, 0, 1000, {key: "checked"}, lambda *_: source, lambda _: (1000, self.end, 3), self.read_at, crc32,
            (self.places, self.sums, self.end, self.sum), (0, 0, b""), (1000, 10_000, max_bytes, 500),
        )  # fmt: skip

    def found(self, offset: int, room: int, limit: int) -> tuple[int, bytes] | None:
        """The records of a pull, as Python reads them, if they lie side by side."""
        rows = self.rows[offset - self.first :][:limit] if self.first <= offset else []
        while len(rows) > 1 and sum(size for _, size in rows) > room:
            rows.pop()
        total = sum(size for _, size in rows)
        if not rows or not all(size for _, size in rows) or rows[-1][0] + rows[-1][1] - rows[0][0] != total:
            return None
        return len(rows), bytes(self.data[rows[0][0] - 1000 :][:total])


ROWS = st.lists(st.tuples(st.sampled_from((0, 0, 0, 0, 3)), st.sampled_from((91, 91, 120, 0))), min_size=1, max_size=40)


@needs_module
@given(
    st.sampled_from(KINDS),
    st.builds(Log, ROWS, st.integers(0, 2**40)),
    st.lists(st.integers(-1, 41), min_size=1, max_size=8),
    st.integers(0, 3000),
    st.integers(1, 32),
    st.integers(0, 5000),
)
def test_pulls_get_the_responses_that_python_makes(
    kind: int, log: Log, offsets: list[int], room: int, limit: int, max_bytes: int
) -> None:
    pulls = [
        pull_frame(kind, number, PULL | {"queueOffset": max(log.first + offset, 0)})
        for number, offset in enumerate(offsets)
    ]
    expected: list[bytes] = []
    counts: list[int] = []
    next_offset = size = 0
    for number, offset in enumerate(offsets):
        found = log.found(max(log.first + offset, 0), room, limit)
        if found is None or sum(map(len, expected)) > max_bytes:
            break
        next_offset = max(log.first + offset, 0) + found[0]
        head = encode_found_head(kind, number, (next_offset, log.first, log.next), len(found[1]))
        expected += head, found[1]
        counts.append(found[0])
        size += len(found[1])
    served = log.take(b"".join(pulls), room, limit, max_bytes)
    if served is None:
        assert not expected
        return
    assert list(map(bytes, served.responses)) == expected
    assert (served.end, served.served) == (sum(map(len, pulls[: len(counts)])), len(counts))
    assert served.size == sum(map(len, expected))
    assert served.pulls == [("checked", sum(counts), size, next_offset)]


@needs_module
def test_call_serves_up_to_64_pulls_and_the_next_calls_serve_the_rest() -> None:
    log, counts = Log([(0, 91)] * 1000, 0), []
    data = b"".join(pull_frame(MSGPACK, number, PULL | {"queueOffset": number}) for number in range(1000))
    while data:
        served = log.take(data, 91, 1, 1 << 20)
        assert served is not None
        data = data[served.end :]
        counts.append(served.served)
    assert counts == [64] * 15 + [40]


def one_record() -> Log:
    return Log([(0, 91), (0, 91)], 0)


@needs_module
@pytest.mark.parametrize("at", [0, 35, 90])
def test_pull_of_a_record_that_has_changed_is_declined(at: int) -> None:
    log = one_record()
    assert log.take(pull_frame(JSON, 1, PULL), 1000, 32, 1000) is not None
    log.data[at] ^= 1
    assert log.take(pull_frame(JSON, 1, PULL), 1000, 32, 1000) is None


@needs_module
@pytest.mark.parametrize("rows", [[(1001, 91), (1091, 91)], [(1000, 91), (1091, 92)], [(1091, 91), (1182, 91)]])
def test_pull_of_other_records_than_the_index_has_is_declined(rows: list[tuple[int, int]]) -> None:
    log = one_record()
    log.rows = rows
    assert log.take(pull_frame(JSON, 1, PULL), 1000, 32, 1000) is None


@needs_module
@pytest.mark.parametrize("name", ["entries", "read_at"])
@pytest.mark.parametrize("error", [OSError, ValueError])
def test_pull_whose_read_fails_is_declined(monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]) -> None:
    def fails(*_: int) -> bytes:
        raise error

    log = one_record()
    monkeypatch.setattr(log, name, fails)
    assert log.take(pull_frame(JSON, 1, PULL), 1000, 32, 1000) is None


@needs_module
@pytest.mark.parametrize("opaque", [-1, -(2**31)])
def test_pull_with_a_negative_number_is_declined(opaque: int) -> None:
    assert one_record().take(pull_frame(JSON, opaque, PULL), 1000, 32, 1000) is None


@needs_module
@given(st.binary(max_size=20), st.sampled_from((JSON, ROCKETMQ, MSGPACK)), st.integers(0, 2**15 - 1))
def test_code_of_a_frame_is_found_without_its_fields(before: bytes, kind: int, code: int) -> None:
    data = encode(Frame(code, 1, {"a": "b"}, serialize_type=kind))
    assert fast.code_at(before + data, len(before)) == code
    assert all(fast.code_at(data[:end], 0) in (-1, code, *range(code)) for end in range(len(data)))
    assert fast.code_at(before, 0) is not None
