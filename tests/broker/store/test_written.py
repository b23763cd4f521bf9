"""Bytes that the disk gives back changed are not delivered, also while the process runs that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker import config
from rocketlet.broker.store import disk
from rocketlet.broker.store import index as reading
from rocketlet.broker.store import log as written
from rocketlet.broker.store.log import Written
from rocketlet.broker.store.store import Store
from rocketlet.protocol.checksum import crc32
from rocketlet.protocol.message import decode_records

from ...support.stores import TOPICS, bodies, open_store, put

Harm = Callable[[bytearray, int], object]
HARMS: dict[str, Harm] = {
    "a flipped bit": lambda data, at: data.__setitem__(at, data[at] ^ 4),
    "a zeroed sector": lambda data, at: data.__setitem__(slice(at - 100, at + 412), bytes(512)),
    "the rest zeroed": lambda data, at: data.__setitem__(slice(at, None), bytes(len(data) - at)),
    "the rest cut off": lambda data, at: data.__delitem__(slice(at, None)),
}
SHAPES = {"singly": 1, "in one append": 300}
READS: dict[str, Callable[[Store, int], list[bytes]]] = {
    "all": lambda store, queue: bodies(store, queue=queue),
    "by tag": lambda store, queue: bodies(store, queue=queue, tags="a"),
    "by properties": lambda store, queue: by_properties(store, queue),
    "one by one": lambda store, queue: one_by_one(store, queue),
}


def by_properties(store: Store, number: int) -> list[bytes]:
    found: list[bytes] = []
    queue, offset = store.queue("t", number), 0
    while offset < queue.next:
        fetched = store.fetch(queue, offset, 32, matches=lambda text: True)
        found += [record.body for record in decode_records(b"".join(fetched.pieces))]
        offset = fetched.next_offset
    return found


def one_by_one(store: Store, number: int) -> list[bytes]:
    found: list[bytes] = []
    queue = store.queue("t", number)
    for offset in range(queue.next):
        found += [record.body for record in decode_records(b"".join(store.fetch(queue, offset, 1).pieces))]
    return found


def filled(folder: Path, at_once: int, run: int = 1) -> tuple[Store, list[list[bytes]]]:
    """Three queues take turns: each gets `run` messages that lie side by side."""
    store = open_store(folder)
    store.recover(TOPICS)
    expected: list[list[bytes]] = [[], [], []]
    for number in range(300):
        body = b"body-%d" % number + bytes(number % 90)
        queue = number // run % 3
        expected[queue].append(body)
        put(store, body, queue=queue, tag="a", commits=number % at_once == at_once - 1)
    return store, expected


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("read", READS)
def test_what_is_damaged_after_it_was_written_is_skipped_and_said(
    tmp_path: Path, harm: str, shape: str, read: str
) -> None:
    store, expected = filled(tmp_path, SHAPES[shape])
    assert [READS[read](store, queue) for queue in range(3)] == expected
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    before = bytes(data)
    HARMS[harm](data, data.index(b"body-150"))
    segment.write_bytes(data)
    store._reader._latest = (0, 0, b"")  # as of another read between
    entries = [(queue, offset, *store.queue("t", queue).entry(offset)) for queue in range(3) for offset in range(100)]
    whole = {(q, o) for q, o, at, size, _ in entries if data[at : at + size] == before[at : at + size]}
    assert 0 < len(whole) < 300
    for queue in range(3):
        left = [body for offset, body in enumerate(expected[queue]) if (queue, offset) in whole]
        assert READS[read](store, queue) == left
    assert {(queue, offset) for _, queue, offset in store.damaged} == {(q, o) for q, o, *_ in entries} - whole
    store.close()


def test_times_are_those_of_whole_messages(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, 1)
    queue = store.queue("t", 0)
    time_ms = store.store_time_ms(queue, 50)
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[queue.entry(50)[0] + 57] ^= 1  # 2**48 ms
    segment.write_bytes(data)
    assert store.store_time_ms(queue, 50) == pytest.approx(time_ms, abs=60_000)
    store.close()


@pytest.mark.parametrize("bit", [40, 60, 63, 80, 95])
def test_times_are_those_of_the_messages_that_an_index_means(tmp_path: Path, bit: int) -> None:
    store, _ = filled(tmp_path, 1)
    store.checkpoint()
    queue = store.queue("t", 1)
    time_ms = store.store_time_ms(queue, 50)
    (index,) = (tmp_path / "consumequeue" / "t" / "1").iterdir()
    data = bytearray(index.read_bytes())
    data[50 * 20 + bit // 8] ^= 0x80 >> bit % 8
    index.write_bytes(data)
    assert store.store_time_ms(queue, 50) == pytest.approx(time_ms, abs=60_000)
    assert ("t", 1, 50) in store.damaged
    store.close()


@pytest.mark.parametrize("harm", ["none", "head", "body", "topic"])
def test_after_a_restart_the_time_of_a_large_message_is_told_without_reading_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    times = iter(range(1000, 2000, 100))
    store = open_store(tmp_path, time_ms=lambda: next(times))
    store.recover(TOPICS)
    for _ in range(3):
        put(store, bytes(500_000))
    position = store.queue("t", 0).entry(1)[0]
    store.checkpoint(closes=True)
    store.close()
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[position + {"none": 0, "head": 57, "body": 300, "topic": 88 + 500_000 + 1}[harm]] ^= harm != "none"
    segment.write_bytes(data)
    store = open_store(tmp_path)
    store.recover(TOPICS)
    read, sizes = disk.read_at, list[int]()

    def counted(descriptor: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return read(descriptor, size, at)

    monkeypatch.setattr(disk, "read_at", counted)
    is_told = harm in ("none", "body")  # a checksum of its own says what is before and behind the body
    assert store.store_time_ms(store.queue("t", 0), 1) == (1100 if is_told else 1200)
    assert (sum(sizes) < 1000) == is_told
    store.close()


def test_what_is_left_after_segments_expire_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path, 3000)
    store.recover(TOPICS)
    for number in range(40):
        put(store, b"%d" % number + bytes(700))
        store.expire(older_than_s=0, total_bytes=8000)
        assert bodies(store)[-1] == b"%d" % number + bytes(700)
        assert store.damaged == frozenset()
    assert 8 <= len(bodies(store)) <= 15
    store.close()


@given(
    st.integers(0, 1000),
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 2000)), min_size=1, max_size=60),
    st.data(),
)
def test_a_part_has_what_is_asked_for_and_its_sums(begin: int, sizes: list[int], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "SUMMED_BYTES", 100)
        patch.setattr(written, "SUMMED_AT_ONCE_BYTES", 300)
        patch.setattr(written, "MAX_SUMS", 20)
        log = b""
        sums = Written(begin)
        for number, size in enumerate(sizes):
            log += bytes((number % 251,)) * size
            sums.add(log[-size:])
        dropped = data.draw(st.integers(begin, begin + len(log)))
        sums.forget_before(dropped)
        assert len(sums._places) <= 20 + len(log) // 300
        assert sums.begin >= dropped or dropped == begin + len(log)
        end = begin + len(log)
        if sums.begin == end:
            return
        at = data.draw(st.integers(sums.begin, end - 1))
        to = data.draw(st.integers(at + 1, end))
        low, high, before, behind = sums.part(at, to)
        assert sums.begin <= low <= at < to <= high <= end
        assert crc32(log[low - begin : high - begin], before) == behind
        assert high - low <= (to - at) + 2 * max(300, 100 + max(min(size, 300) for size in sizes))


def test_sums_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data without a sum is checked record by record."""
    monkeypatch.setattr(written, "SUMMED_BYTES", 100)
    monkeypatch.setattr(written, "MAX_SUMS", 50)
    store, expected = filled(tmp_path, 1)
    sums = store._log.written
    assert 0 < sums.begin < store.end
    assert len(sums._places) <= 50
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    store.close()


@pytest.mark.parametrize("gap", [config.CHECKED_GAP_BYTES, 0])
def test_messages_that_lie_side_by_side_are_read_as_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    monkeypatch.setattr(reading, "CHECKED_GAP_BYTES", gap)
    store, expected = filled(tmp_path, 300, run=10)
    fetched = store.fetch(store.queue("t", 1), 5, 32)
    assert len(fetched.pieces) == 4
    assert [record.body for record in decode_records(b"".join(fetched.pieces))] == expected[1][5:37]
    store.close()


@pytest.mark.parametrize(("read", "run"), [*((read, 1) for read in READS), ("all", 10)])
@pytest.mark.parametrize("bit", [0, 40, 50, 56, 60, 62, 63, 64, 80, 88, 90, 95])
def test_a_bit_flipped_in_an_index_while_the_broker_runs_hides_one_message(
    tmp_path: Path, read: str, run: int, bit: int
) -> None:
    """The log is as it was written; only the index points elsewhere."""
    store, expected = filled(tmp_path, 1, run)
    store.checkpoint()
    (index,) = (tmp_path / "consumequeue" / "t" / "1").iterdir()
    for offset in (0, 50, 99):
        data = bytearray(index.read_bytes())
        data[offset * 20 + bit // 8] ^= 0x80 >> bit % 8
        index.write_bytes(data)
        store._reader._latest = (0, 0, b"")
        left = expected[1][:offset] + expected[1][offset + 1 :]
        assert READS[read](store, 1) in (left, expected[1])
        data[offset * 20 + bit // 8] ^= 0x80 >> bit % 8
        index.write_bytes(data)
    assert {(queue, offset) for _, queue, offset in store.damaged} <= {(1, 0), (1, 50), (1, 99)}
    store.close()


def test_a_sum_that_cannot_be_kept_undoes_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are in the log: a message that is refused then would shift the places of all that follow."""
    store = open_store(tmp_path)
    store.recover(TOPICS)
    put(store, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(written, "crc32", no_memory)
        put(store, b"without")
    put(store, b"after")
    assert bodies(store) == [b"before", b"without", b"after"]
    assert store.damaged == frozenset()
    store.close()
    store = open_store(tmp_path)
    assert store.recover(TOPICS).damage == ()
    assert bodies(store) == [b"before", b"without", b"after"]
    store.close()


def no_memory(*arguments: object) -> int:
    raise MemoryError
