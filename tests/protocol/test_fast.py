"""The compiled module does exactly what Python does, and declines the rest. Skipped where the module was not built."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol import fast, message

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


@needs_module
@pytest.mark.parametrize("properties", ["", r"a\u0001b\u0002c", r"\n\t\r\b\f\"\\\/", "größe\U0001f600", r"\u007F"])
def test_send_in_json_is_taken_with_the_usual_escapes(properties: str) -> None:
    data = send_with(properties)
    assert fast.sends_end(data * 2, 0, 1000) == 2 * len(data)


@needs_module
@pytest.mark.parametrize(
    "properties", [r"\Q", r"\u12", r"\ud83d", r"\u0080", r"\u000g", "\x01", "a\\\\\\", '"', r"\u00"]
)
def test_send_in_json_is_declined_with_other_escapes(properties: str) -> None:
    assert fast.sends_end(send_with(properties), 0, 1000) == 0
