"""A start over a data folder that is not as it was left: nothing is lost without a word."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.broker.store import files, recovery
from rocketlet.broker.store.files import StoreError, read_state, write_state
from rocketlet.broker.store.journals import Frames, Journal
from rocketlet.broker.store.log import FILE as MARKS_FILE
from rocketlet.broker.store.log import Damage, Marks
from rocketlet.broker.store.recovery import Lost, Recovered, inspect
from rocketlet.broker.store.store import Store
from rocketlet.client import Consumer, Producer
from rocketlet.command.tools import backup
from rocketlet.command.tools.backup import copied
from rocketlet.command.tools.fsck import fsck
from rocketlet.protocol.message import BEGIN_BYTES, BEGIN_MARK, CHECKSUM_BYTES, MAX_RECORD_BYTES

from ...conftest import Node, Nodes, eventually
from ...support import forged
from ...support.handlers import Inbox
from ...support.stores import TOPICS, append_to_log, bodies, filled, kill, open_store, put, reopened

Change = Callable[[bytearray, random.Random], object]
CHANGES: dict[str, Change] = {
    "cut": lambda data, chance: data.__delitem__(slice(chance.randrange(len(data)), None)),
    "zeroed": lambda data, chance: _overwrite(data, chance, bytes(chance.randrange(1, len(data)))),
    "garbled": lambda data, chance: _overwrite(data, chance, chance.randbytes(chance.randrange(1, 100))),
    "flipped": lambda data, chance: data.__setitem__(chance.randrange(len(data)), chance.randrange(256)),
    "padded": lambda data, chance: data.extend(bytes(chance.randrange(1, 200))),
    "emptied": lambda data, chance: data.clear(),
}


def _overwrite(data: bytearray, chance: random.Random, with_: bytes) -> None:
    at = chance.randrange(len(data))
    data[at : at + len(with_)] = with_[: len(data) - at]


def test_after_a_clean_end_nothing_is_read_again(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    store, found = reopened(tmp_path)
    assert found == Recovered()
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    assert store.queue("t", 7).next == 0
    store.close()


def test_after_a_crash_only_what_the_checkpoint_does_not_know_is_read(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    store, _ = reopened(tmp_path)
    put(store, b"new", queue=2)
    kill(store)
    store, found = reopened(tmp_path)
    assert found == Recovered(records=1)
    assert bodies(store, queue=2) == [*expected[2], b"new"]
    store.close()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_index_is_recreated_and_reported(tmp_path: Path, change: str, seed: int) -> None:
    expected = filled(tmp_path)
    (file,) = (tmp_path / "consumequeue" / "t" / "1").iterdir()
    before = file.read_bytes()
    data = bytearray(before)
    CHANGES[change](data, random.Random(seed))
    file.write_bytes(data)
    store, found = reopened(tmp_path)
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    assert (found.lost, found.damage) == ((), ())
    is_known = data[: len(before)] == before  # bytes that were added behind the end are cut off
    assert found.rebuilt == (() if is_known else ("t@1",))
    store.close()


def test_an_index_of_several_files_is_checked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketlet.broker.store.index.INDEX_SEGMENT_ENTRIES", 20)
    monkeypatch.setattr("rocketlet.broker.store.index.INDEX_TAIL_BYTES", 100)
    monkeypatch.setattr("rocketlet.broker.store.store.TAIL_ENTRIES", 1)
    expected = filled(tmp_path)
    files = sorted((tmp_path / "consumequeue" / "t" / "0").iterdir())
    assert len(files) > 3
    assert reopened_and_closed(tmp_path) == Recovered()
    files[1].unlink()
    store, found = reopened(tmp_path)
    assert found.rebuilt == ("t@0",)
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    store.close()
    assert reopened_and_closed(tmp_path) == Recovered()


def reopened_and_closed(folder: Path, segment_bytes: int = 1 << 20) -> Recovered:
    store, found = reopened(folder, segment_bytes)
    store.close()
    return found


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1, 2]", b'{"position": "x"}', b'{"position": 1, "queues": {"t": 1}}']
)
def test_a_lost_or_damaged_checkpoint_is_recreated(tmp_path: Path, content: bytes | None) -> None:
    expected = filled(tmp_path)
    for name in ("checkpoint.json", "checkpoint.old"):
        (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / "checkpoint.json").write_bytes(content)
    store, found = reopened(tmp_path)
    assert (found.records, found.lost, found.damage) == (300, (), ())
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    store.close()
    assert reopened_and_closed(tmp_path) == Recovered()


def test_a_lost_end_of_the_log_is_reported_and_its_offsets_are_not_reused(tmp_path: Path) -> None:
    expected = filled(tmp_path, segment_bytes=5000)
    last = max((tmp_path / "commitlog").iterdir())
    size, end = last.stat().st_size, int(last.name)
    last.unlink()
    store, found = reopened(tmp_path, 5000)
    assert found.damage == (Damage(end, size),)
    kept = [store.queue("t", queue).next for queue in range(3)]
    assert kept == [100, 100, 100]
    lost = sum(lost.end - lost.begin for lost in found.lost)
    assert lost > 0
    assert sum(len(bodies(store, queue=queue)) for queue in range(3)) == 300 - lost
    for lost_of in found.lost:
        assert bodies(store, queue=lost_of.queue_id) == expected[lost_of.queue_id][: lost_of.begin]
    assert put(store, b"new", queue=1)[1] == 100
    assert bodies(store, queue=1)[-1] == b"new"
    store.close()
    assert reopened_and_closed(tmp_path, 5000).lost == ()


def test_a_log_that_was_cut_in_the_middle_of_a_message_ends_before_it(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    (segment,) = (tmp_path / "commitlog").iterdir()
    segment.write_bytes(segment.read_bytes()[:-10])
    store, found = reopened(tmp_path)
    (aside,) = (tmp_path / "damaged").iterdir()
    assert aside.stat().st_mode & 0o077 == 0, "only the user of the broker may read messages"
    assert found.lost == (Lost("t", 2, 99, 100),)
    assert bodies(store, queue=2) == expected[2][:-1]
    assert put(store, b"new", queue=2)[1] == 100
    store.close()
    store, found = reopened(tmp_path)
    assert bodies(store, queue=2) == [*expected[2][:-1], b"new"]
    store.close()


@pytest.mark.parametrize("read_from", ["its beginning", "before its end"])
def test_an_index_does_not_point_behind_a_log_whose_end_is_zeros(tmp_path: Path, read_from: str) -> None:
    """As after a power cut, when the file is as long as it was. The next messages get the place of those that were there."""
    expected = filled(tmp_path)
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = segment.read_bytes()
    end = data.rfind(b"body-290")  # within a message of queue 2
    segment.write_bytes(data[:end] + bytes(len(data) - end))
    if read_from == "its beginning":  # because an index is recreated
        (index,) = (tmp_path / "consumequeue" / "t" / "0").iterdir()
        index.write_bytes(bytes(index.stat().st_size))
    else:  # because messages came while the checkpoint was written
        state: Any = read_state(tmp_path / "checkpoint.json")
        write_state(tmp_path / "checkpoint.json", state | {"position": data.rfind(b"body-250")})
    store, found = reopened(tmp_path)
    assert found.torn_bytes > len(data) - end
    kept = [97, 97, 96]
    assert found.lost == tuple(Lost("t", queue, kept[queue], 100) for queue in range(3))
    for number in range(30):
        assert put(store, b"new-%d" % number, queue=number % 3)[1] == 100 + number // 3
    new = [[b"new-%d" % number for number in range(queue, 30, 3)] for queue in range(3)]
    assert [bodies(store, queue=queue) for queue in range(3)] == [
        expected[queue][: kept[queue]] + new[queue] for queue in range(3)
    ]
    store.close()


def test_a_lost_segment_in_the_middle_is_said_and_the_rest_is_delivered(tmp_path: Path) -> None:
    expected = filled(tmp_path, segment_bytes=5000)
    second = sorted((tmp_path / "commitlog").iterdir())[1]
    damage = Damage(int(second.name), second.stat().st_size)
    second.unlink()
    store, found = reopened(tmp_path, 5000)
    assert found.damage == (damage,)
    left = [bodies(store, queue=queue) for queue in range(3)]
    assert 0 < sum(map(len, left)) < 300
    assert len(store.damaged) == 300 - sum(map(len, left))
    assert all(set(some) <= set(all_) for some, all_ in zip(left, expected, strict=True))
    assert [queue[-1] for queue in left] == [queue[-1] for queue in expected]
    store.close()


def test_a_lost_beginning_of_the_log_is_said(tmp_path: Path) -> None:
    filled(tmp_path, segment_bytes=5000)
    first = min((tmp_path / "commitlog").iterdir())
    size = first.stat().st_size
    first.unlink()
    store, found = reopened(tmp_path, 5000)
    assert found.damage == (Damage(0, size),)
    store.close()


def test_an_expired_beginning_of_the_log_is_no_loss(tmp_path: Path) -> None:
    filled(tmp_path, segment_bytes=5000)
    store, _ = reopened(tmp_path, 5000)
    assert store.expire(older_than_s=0, total_bytes=10_000) > 0
    begins = [store.queue("t", queue).begin for queue in range(3)]
    kill(store)
    store, found = reopened(tmp_path, 5000)
    assert found == Recovered()
    assert [store.queue("t", queue).begin for queue in range(3)] == begins
    store.close()


def test_a_queue_whose_messages_all_expired_continues_counting(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1000)
    store.recover(TOPICS)
    for number in range(3):
        put(store, b"%d" % number, queue=1)
    for number in range(100):
        put(store, b"%d" % number, queue=0)
    store.expire(older_than_s=0, total_bytes=3000)
    assert store.queue("t", 1).begin == store.queue("t", 1).next == 3
    store.close()
    shutil.rmtree(tmp_path / "consumequeue" / "t" / "1")
    store, _ = reopened(tmp_path, 1000)
    assert store.queue("t", 1).next == 3
    store.close()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_topics_that_only_the_log_knows_are_taken_in(tmp_path: Path, with_checkpoint: bool) -> None:
    expected = filled(tmp_path)
    if not with_checkpoint:
        (tmp_path / "checkpoint.json").unlink()
        (tmp_path / "checkpoint.old").unlink()
    store = open_store(tmp_path)
    found = store.recover([], knows_topics=False)
    assert found.unknown_topics == {"t": 3}
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    store.close()
    assert reopened_and_closed(tmp_path) == Recovered()


@pytest.mark.parametrize("left", [b"12345678\n", b"6e10\n", b"null", b'"text"', b"true"])
def test_what_is_left_of_a_state_file_without_its_begin_is_no_state(tmp_path: Path, left: bytes) -> None:
    """Digits of a checksum may be a number, which is JSON, too."""
    path = tmp_path / "state.json"
    write_state(path, {"a": 1})
    write_state(path, {"a": 2})
    path.write_bytes(left)
    assert read_state(path) == {"a": 1}


def test_the_copy_before_it_stands_in_for_a_lost_or_damaged_state_file(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    write_state(path, {"a": 1})
    write_state(path, {"a": 2})
    assert read_state(path) == {"a": 2}
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        assert read_state(path) in ({"a": 2}, {"a": 1})
    for end in range(len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_state(path) == {"a": 1}
    path.unlink()
    assert read_state(path) == {"a": 1}


def test_a_message_that_looks_like_messages_hides_no_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recover(TOPICS)
    put(store, b"first")
    (segment,) = (tmp_path / "commitlog").iterdir()
    put(store, segment.read_bytes() * 3)
    put(store, b"last")
    kill(store)
    data = bytearray(segment.read_bytes())
    at = data.rindex(b"first", 0, data.rindex(b"first"))
    data[at] ^= 1
    segment.write_bytes(data)
    store, found = reopened(tmp_path)
    assert bodies(store) == [b"first", b"last"]
    assert found.lost == (Lost("t", 0, 1, 2),)
    store.close()


def test_damage_longer_than_one_read_is_searched_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketlet.broker.store.log.RECOVERY_READ_BYTES", 5000)
    filled(tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    (tmp_path / "checkpoint.old").unlink()
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = segment.read_bytes()
    segment.write_bytes(data[:1000] + bytes(12_000) + data[13_000:])
    store, found = reopened(tmp_path)
    (damage,) = found.damage
    assert damage.position <= 1000
    assert 12_000 <= damage.size < 12_300
    assert found.records == 300 - sum(lost.end - lost.begin for lost in found.lost)
    store.close()


def in_one_bit(segment: Path, body: bytes, *, before: int) -> None:
    """Flips a bit this many bytes before a body: in its record's head."""
    data = bytearray(segment.read_bytes())
    data[data.index(body) - before] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize("before", [8, 20, 37, 56, 64, 76])
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_bit_flipped_in_a_records_head_loses_that_record_only(tmp_path: Path, before: int, is_rebuilt: bool) -> None:
    expected = filled(tmp_path)
    (segment,) = (tmp_path / "commitlog").iterdir()
    in_one_bit(segment, b"body-151", before=before)
    if is_rebuilt:
        (tmp_path / "checkpoint.json").unlink()
        (tmp_path / "checkpoint.old").unlink()
    store, found = reopened(tmp_path)
    assert [bodies(store, queue=queue) for queue in (0, 2)] == [expected[0], expected[2]]
    assert bodies(store, queue=1) == [body for body in expected[1] if body != b"body-151"]
    assert bodies(store, queue=1, tags="A") == []
    if is_rebuilt:
        assert found.lost == (Lost("t", 1, 50, 51),)
    assert len(store.damaged) == 1
    store.close()


def test_an_index_that_knows_more_than_the_checkpoint_says_what_the_log_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    store, _ = reopened(tmp_path)
    put(store, b"x" * 500, queue=1)
    store.queue("t", 1).flush()
    end = store.end
    kill(store)
    (segment,) = (tmp_path / "commitlog").iterdir()
    kept = end - store.queue("t", 1).entry(100)[1]
    segment.write_bytes(segment.read_bytes()[:kept])
    assert reopened_and_closed(tmp_path).damage == (Damage(kept, end - kept),)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_topic_whose_settings_are_lost_keeps_its_messages(tmp_path: Path, is_killed: bool) -> None:
    """As after the loss of the file or journal that says so; a topic that was deleted is in no checkpoint."""
    store = open_store(tmp_path)
    store.recover([("u", 0), ("t", 0)])
    put(store, b"deleted", topic="u")
    store.delete_topic("u")
    put(store, b"kept")
    if not is_killed:
        store.checkpoint()
    store.close()
    (tmp_path / "consumequeue" / "gone" / "0").mkdir(parents=True)
    store = open_store(tmp_path)
    found = store.recover([])
    assert found.unknown_topics == {"t": 1}
    assert bodies(store) == [b"kept"]
    assert not (tmp_path / "consumequeue" / "gone" / "0").exists()
    store.close()


def test_a_checksum_that_is_wiped_out_is_damage(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = segment.read_bytes()
    at = data.index(b"\x02\x03", data.index(b"body-151"))
    segment.write_bytes(data[:at] + b"anyhow way" + data[at + 10 :])
    store, _ = reopened(tmp_path)
    assert bodies(store, queue=1) == [body for body in expected[1] if body != b"body-151"]
    store.close()


@pytest.mark.parametrize("name", [f"{1 << 63:020d}", "9" * 20, "9" * 100, "7", f"{(1 << 62) - 1:021d}"])
def test_a_file_that_no_segment_can_be_is_left_alone(tmp_path: Path, name: str) -> None:
    expected = filled(tmp_path)
    strange = tmp_path / "commitlog" / name
    strange.write_bytes(b"not ours")
    store, found = reopened(tmp_path)
    assert found == Recovered()
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    assert strange.read_bytes() == b"not ours"
    store.close()


@pytest.mark.parametrize("is_folder", [True, False])
def test_damaged_bytes_are_not_kept_behind_a_link(tmp_path: Path, is_folder: bool) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    data.mkdir()
    outside.mkdir()
    filled(data)
    store, _ = reopened(data)
    torn = store.end
    kill(store)
    (segment,) = (data / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(torn)
        file.write(b"no record" * 10)
    if is_folder:
        (data / "damaged").symlink_to(outside)
    else:
        (data / "damaged").mkdir()
        (data / "damaged" / f"commitlog-{torn:020d}").symlink_to(outside / "file")
    reopened(data)[0].close()
    assert list(outside.iterdir()) == []


# Bodies full of records: no recovery, repair or check of a folder takes what a client wrote for a record of its own.


VICTIMS = [b"u-%d" % number for number in range(100)]


def unrecovered(folder: Path) -> Store:
    return open_store(folder, 1 << 25)


def opened(folder: Path) -> Store:
    store = unrecovered(folder)
    store.recover(TOPICS)
    return store


def forget_indexes(folder: Path) -> None:
    """All that is derived from the log is gone."""
    for path in [*folder.glob("checkpoint.*"), *(folder / "consumequeue").rglob("0000*")]:
        path.unlink()


def log_of(folder: Path) -> Path:
    (segment,) = (folder / "commitlog").iterdir()
    return segment


def changed(folder: Path, at: int, with_: bytes) -> None:
    data = bytearray(log_of(folder).read_bytes())
    data[at : at + len(with_)] = with_
    log_of(folder).write_bytes(data)


def attacked(folder: Path, body_of: forged.BodyOf, *, is_indexed: bool) -> int:
    """Messages of a victim around one whose body is forged; where that one begins."""
    store = opened(folder)
    for body in VICTIMS[:50]:
        put(store, body, topic="u")
    at, _ = put(store, body_of(store.end))
    for body in VICTIMS[50:]:
        put(store, body, topic="u")
    if is_indexed:
        store.checkpoint()
    kill(store)
    if not is_indexed:
        forget_indexes(folder)
    return at


def with_marks_of_others(position: int) -> bytes:
    """Forged records that have the mark of a record, as everybody can read it, and checksums that fit."""
    mark = BEGIN_MARK.decode() + "A" * (BEGIN_BYTES - 2)
    return forged.record(position + forged.HEAD_BYTES, b"FORGED", offset=50, properties=mark)


BODIES: dict[str, forged.BodyOf] = {
    "records that continue": lambda at: forged.body_at(at, b"FORGED", b"FORGED", offset=50),
    "a record far away": lambda at: forged.body_at(at, b"FORGED", offset=2**40),
    "a record with a mark": with_marks_of_others,
    "a record of 4 MiB": lambda at: forged.body_at(at, bytes(4_000_000), offset=50),
    "heads": lambda at: forged.heads_at(at, 100_000),
    "bare heads": lambda at: (MAX_RECORD_BYTES.to_bytes(4, "big") + forged.MAGIC_BYTES + b"\0") * 438_889,
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("damage", ["head", "body", "tail", "nothing"])
def test_what_is_in_a_damaged_body_is_no_record(tmp_path: Path, name: str, is_indexed: bool, damage: str) -> None:
    body_of = BODIES[name]
    at = attacked(tmp_path, body_of, is_indexed=is_indexed)
    size = len(body_of(at)) + forged.HEAD_BYTES
    places = {"head": at + 4, "body": at + forged.HEAD_BYTES, "tail": at + size + 3, "nothing": at}
    if damage != "nothing":
        changed(tmp_path, places[damage], b"\xff")
    began_s = time.process_time()
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS, rebuilds=is_indexed)
    assert time.process_time() - began_s < 10, "438,889 heads took more than 90 s"
    assert bodies(store, "u") == VICTIMS
    assert bodies(store, "t") == ([] if damage != "nothing" else [body_of(at)])
    assert all(lost.topic == "t" for lost in found.lost)
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("consumequeue/*/*/*")) < 10_000


@pytest.mark.parametrize("name", BODIES)
def test_a_whole_log_full_of_records_is_whole_to_fsck(tmp_path: Path, name: str) -> None:
    attacked(tmp_path, BODIES[name], is_indexed=True)
    assert [finding for finding in inspect(tmp_path) if finding.fault] == []


@pytest.mark.parametrize("name", BODIES)
def test_fsck_repairs_only_what_is_damaged(tmp_path: Path, name: str) -> None:
    at = attacked(tmp_path, BODIES[name], is_indexed=True)
    changed(tmp_path, at + 4, b"\xff")
    assert fsck(tmp_path, repairs=True, is_json=True) == 0
    store = opened(tmp_path)
    assert bodies(store, "u") == VICTIMS
    assert bodies(store, "t") == []
    store.close()


@pytest.mark.parametrize("cut", [1, 50, 5000])
def test_what_is_in_a_torn_body_is_no_record(tmp_path: Path, cut: int) -> None:
    store = opened(tmp_path)
    put(store, b"u-0", topic="u")
    at, _ = put(store, forged.body_at(store.end, *[b"FORGED"] * 200, offset=1))
    end = store.end
    kill(store)
    log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes()[: end - cut])
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert (found.torn_bytes, found.damage, bodies(store, "u")) == (end - cut - at, (), [b"u-0"])
    store.close()


def test_what_recovery_would_not_take_is_not_stored(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StoreError, match="maximum"):
        put(store, bytes(MAX_RECORD_BYTES))
    assert (store.staged, store.end, store.queue("t", 0).next) == (0, 0, 0)
    put(store, b"next")
    assert bodies(store) == [b"next"]
    store.close()


def test_a_folder_that_has_lost_its_marks_continues_with_new_ones(tmp_path: Path) -> None:
    at = attacked(tmp_path, BODIES["records that continue"], is_indexed=True)
    (tmp_path / "marks.json").unlink()
    for damage in (at + 4, at + 2):
        changed(tmp_path, damage, b"\xff")
        store = opened(tmp_path)
        assert bodies(store, "u") == VICTIMS
        store.close()
    store = unrecovered(tmp_path)
    store.recover(TOPICS, rebuilds=True)  # no index names anything: the forged records are none, whatever else is lost
    assert b"FORGED" not in bodies(store, "u")
    assert bodies(store, "u")[:50] == VICTIMS[:50]
    store.close()


def marks_of(folder: Path) -> Marks:
    return Marks(read_state(folder / MARKS_FILE, is_derivable=True))


def test_a_mark_is_of_one_place_and_of_one_start(tmp_path: Path) -> None:
    """A lost end of the log: who has read its marks cannot use them for what is written there next."""
    store = opened(tmp_path)
    put(store, b"u-0", topic="u")
    begin = store.end
    put(store, b"x" * 200)
    known = store.read_log(begin, store.end - begin)[-BEGIN_BYTES - CHECKSUM_BYTES : -CHECKSUM_BYTES]
    assert marks_of(tmp_path).is_mark(known, begin)
    assert not marks_of(tmp_path).is_mark(known, begin + 1)
    kill(store)
    log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes()[:begin])
    store = opened(tmp_path)
    assert not marks_of(tmp_path).is_mark(known, begin)
    kill(store)


def test_keys_of_what_has_expired_are_forgotten(tmp_path: Path) -> None:
    for number in range(30):
        store = open_store(tmp_path, 1000)
        store.recover(TOPICS)
        put(store, b"%d" % number + bytes(400))
        store.expire(older_than_s=0, total_bytes=3000)
        begin = store.begin
        kill(store)
    marks: Any = read_state(tmp_path / "marks.json")
    epochs = marks["epochs"]
    assert len(epochs) < 12
    assert epochs[0][0] <= begin
    assert (tmp_path / "marks.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"epochs":[[1]]}', b'{"epochs":[["x","zz"]]}'])
def test_lost_keys_are_recreated(tmp_path: Path, content: bytes | None) -> None:
    attacked(tmp_path, BODIES["records that continue"], is_indexed=True)
    for path in tmp_path.glob("marks.*"):
        path.unlink()
    if content is not None:
        (tmp_path / "marks.json").write_bytes(content)
    for _ in range(2):
        store = opened(tmp_path)
        assert bodies(store, "u") == VICTIMS
        put(store, b"new")
        kill(store)


def test_offsets_that_no_log_can_have_are_not_given_entries(tmp_path: Path) -> None:
    """An index takes 20 bytes for each lost message: 2**40 of them once filled the disk, at each start."""
    store = opened(tmp_path)
    put(store, b"u-0", topic="u")
    append_to_log(store, forged.record(store.end, b"far", offset=2**40))
    put(store, b"u-1", topic="u")
    kill(store)
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert bodies(store, "u") == [b"u-0", b"u-1"]
    assert found.lost == ()
    store.checkpoint()
    state: Any = read_state(tmp_path / "checkpoint.json")
    kill(store)
    state["queues"]["u@0"][1] = 2**40
    write_state(tmp_path / "checkpoint.json", state)
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert (found.lost, store.queue("u", 0).next) == ((), 2)
    put(store, b"u-2", topic="u")
    assert bodies(store, "u") == [b"u-0", b"u-1", b"u-2"]
    store.close()


# `rocketlet fsck`: says what is whole and what is not, changes nothing unless asked to repair.


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def segment(folder: Path) -> Path:
    return max((folder / "commitlog").iterdir())


def index(folder: Path) -> Path:
    return next((folder / "consumequeue" / "t" / "1").iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_body(folder: Path) -> None:
    flip(segment(folder), segment(folder).stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit of a body": (
        lambda folder: flip(segment(folder), segment(folder).stat().st_size // 2),
        "no whole message",
    ),
    "a cut log": (lambda folder: cut(segment(folder)), "bytes at its end are missing"),
    "a flipped bit of an index": (lambda folder: flip(index(folder), 100), "1 message is not where the index says"),
    "a lost index": (lambda folder: index(folder).unlink(), "100 messages are not where the index says"),
    "a damaged checkpoint": (lambda folder: flip(folder / "checkpoint.json", 5), "checksum"),
    "a lost log": (lambda folder: segment(folder).unlink(), "are not in the commit log"),
}


def test_a_whole_folder_is_said_to_be_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    before = snapshot(tmp_path)
    assert fsck(tmp_path, repairs=False, is_json=False) == 0
    assert "whole    commit log, 300 messages" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


def test_messages_behind_the_checkpoint_are_no_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recover([("t", 0)])
    for number in range(10):
        put(store, b"%d" % number)
    kill(store)
    assert fsck(tmp_path, repairs=False, is_json=False) == 0


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    expected = filled(tmp_path)
    damage, words = DAMAGE[name]
    damage(tmp_path)
    before = snapshot(tmp_path)
    assert fsck(tmp_path, repairs=False, is_json=False) == 1
    out = capsys.readouterr().out
    assert words in out
    assert "repair:" in out
    assert snapshot(tmp_path) == before
    assert fsck(tmp_path, repairs=True, is_json=True) == 0
    assert orjson.loads(capsys.readouterr().out.splitlines()[-1])["repaired"] is True
    store, found = reopened(tmp_path)
    assert (found.rebuilt, found.lost) == ((), ())
    left = [bodies(store, queue=queue) for queue in range(3)]
    if name in ("a lost log", "a cut log", "a flipped bit of a body"):
        assert all(set(some) <= set(all_) for some, all_ in zip(left, expected, strict=True))
    else:
        assert left == expected
    store.close()


@pytest.mark.parametrize("name", ["pops.journal", "groups.journal"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_journal_is_named_and_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    filled(tmp_path)
    path = tmp_path / name
    if name == "pops.journal":
        frames = Frames(path)
        for _ in range(2):
            frames.append(b"a frame")
        frames.close()
    else:
        path.unlink(missing_ok=True)
        for _ in range(2):
            Journal(path).append(["a line"])
    whole = path.read_bytes()
    assert fsck(tmp_path, repairs=False, is_json=False) == 0
    assert f"whole    {name}" in capsys.readouterr().out
    if damage == "cut":
        path.write_bytes(whole[:-3])
    else:
        flip(path, len(whole) - 3)
    assert fsck(tmp_path, repairs=False, is_json=False) == 1
    assert f"damaged  {name}: " in capsys.readouterr().out
    assert fsck(tmp_path, repairs=True, is_json=False) == 0
    assert path.read_bytes() == whole[: len(whole) // 2]


def test_a_folder_that_is_none_or_in_use_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rocketlet.command.cli", "fsck", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, "is not a data folder" in done.stderr) == (1, True)
    assert not (tmp_path / "nothing").exists()
    filled(tmp_path)
    store, _ = reopened(tmp_path)
    with pytest.raises(StoreError, match="another broker uses"):
        list(inspect(tmp_path))
    store.close()


def test_what_is_odd_in_a_folder_is_named_as_text_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)
    os.mkfifo(tmp_path / "groups.json")
    os.mkfifo(tmp_path / "commitlog" / ("9" * 18))
    for name in (b"\x1b[2J", b"\xff"):
        queue = os.fsencode(tmp_path / "consumequeue") + b"/" + name + b"/0"
        os.makedirs(queue)
        Path(os.fsdecode(queue), "0" * 20).write_bytes(bytes(40))
    (tmp_path / "consumequeue" / "t" / "\u00b2").mkdir()
    (tmp_path / "\x1b[2J.json").write_bytes(b"{")
    for is_json in (False, True):
        assert fsck(tmp_path, repairs=False, is_json=is_json) == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "x1b[2J" in out
        assert "groups.json" in out
    (tmp_path / "groups.json").unlink()
    store, _ = reopened(tmp_path)
    store.close()
    assert len(list(tmp_path.rglob("consumequeue/*/0/0*"))) == 3


# `rocketlet backup` of a data folder whose broker works, and `rocketlet restore`.


async def run(source: Path, target: Path) -> int:
    """As both commands do."""
    return await asyncio.to_thread(copied, source, target)


async def test_a_backup_of_a_running_broker_has_all_that_was_acknowledged_before(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.start(segment_bytes=20_000)
    copy, target = tmp_path / "copy", tmp_path / "target"
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", inbox, start="first") as consumer:
        for number in range(300):
            await producer.send("t", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 300)
        await consumer.commit()
        node.clock.advance(10)  # state that is saved from time to time is saved
        backup = asyncio.create_task(run(node.config.data_dir, copy))
        number = 300
        while not backup.done():
            await producer.send("t", b"%d" % number)
            number += 1
        assert await backup == 0
    await node.stop()
    assert await run(copy, target) == 0
    assert [finding for finding in inspect(target) if finding.fault] == []
    assert not list(target.glob("locks.*"))
    restored = await nodes.start(data_dir=target)
    again = Inbox()
    before = {b"%d" % n for n in range(300)}
    async with Consumer(restored.address, "h", "t", again, start="first"):
        await eventually(lambda: {message.body for message in again.messages} >= before)
    taken = len(inbox.messages)
    async with Consumer(restored.address, "g", "t", inbox):
        await asyncio.sleep(0)
    assert not before & {message.body for message in inbox.messages[taken:]}, "the group continues where it was"
    assert len(again.messages) == len({message.body for message in again.messages})


async def test_a_segment_that_retention_deletes_meanwhile_is_no_hole(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(segment_bytes=2_000)
    async with Producer(node.address) as producer:
        for _ in range(40):
            await producer.send("t", b"x" * 100)
    node.broker.persist()
    store = node.broker.store

    def deleting(source: Path, target: Path) -> Iterator[int]:
        for size in recovery.copying(source, target):
            if store.begin == 0 and (recovery.partial_of(target) / "commitlog").exists():
                store.expire(older_than_s=float("inf"), total_bytes=None)  # the rest is copied, the log only begun
            yield size

    monkeypatch.setattr(backup, "copying", deleting)
    assert copied(node.config.data_dir, tmp_path / "copy") == 0
    assert store.begin > 0
    assert [finding for finding in inspect(tmp_path / "copy") if finding.fault] == []


async def test_what_is_not_whole_gets_no_name(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Producer(node.address) as producer:
        for _ in range(10):
            await producer.send("t", b"x" * 100)
    await node.stop()
    (segment,) = (node.config.data_dir / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert await run(node.config.data_dir, tmp_path / "copy") == 1
    assert "contain no whole message" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [".partial"]
    for source, target, words in (
        (tmp_path / "copy", tmp_path / "target", "is not a data folder"),
        (tmp_path / "nothing", tmp_path / "target", "is not a data folder"),
        (node.config.data_dir, node.config.data_dir, "is not empty"),
    ):
        assert await run(source, target) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("change", "words"), [(1, "a newer Rocketlet"), (-1, "an earlier Rocketlet")])
async def test_folder_of_another_format_is_refused_and_not_taken_for_damaged(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: int, words: str
) -> None:
    node = await nodes.start()
    await node.stop()
    folder = node.config.data_dir
    assert orjson.loads((folder / "format.json").read_text().splitlines()[0])["format"] == files.FORMAT
    write_state(folder / "format.json", {"format": files.FORMAT + change, "by": "99.0"})
    with pytest.raises(StoreError, match=rf"was written by {words} \(99\.0\)"):
        await nodes.start(data_dir=folder)
    assert await run(folder, tmp_path / "copy") == 1
    assert words in capsys.readouterr().err
    with pytest.raises(StoreError, match=words):
        list(inspect(folder))
