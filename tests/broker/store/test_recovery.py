"""A start over a data folder that is not as it was left: nothing is lost without a word."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from rocketlet.broker.store.files import read_state, write_state
from rocketlet.broker.store.log import Damage
from rocketlet.broker.store.recovery import Lost, Recovered

from ...support.stores import TOPICS, bodies, filled, kill, open_store, put, reopened

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
def test_a_damaged_index_is_made_anew_and_said(tmp_path: Path, change: str, seed: int) -> None:
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
def test_a_lost_or_damaged_checkpoint_is_made_anew(tmp_path: Path, content: bytes | None) -> None:
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


def test_the_checkpoint_of_an_earlier_release_is_understood(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    path = tmp_path / "checkpoint.json"
    value = read_state(path)
    value["queues"] = {name: state[1] for name, state in value["queues"].items()}
    del value["begin"]
    path.write_bytes(orjson.dumps(value))
    store, found = reopened(tmp_path)
    assert found == Recovered()
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
    store.close()


def test_a_lost_end_of_the_log_is_said_and_its_offsets_are_not_given_again(tmp_path: Path) -> None:
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
    if read_from == "its beginning":  # because an index is made anew
        (index,) = (tmp_path / "consumequeue" / "t" / "0").iterdir()
        index.write_bytes(bytes(index.stat().st_size))
    else:  # because messages came while the checkpoint was written
        state = read_state(tmp_path / "checkpoint.json")
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


def test_a_queue_whose_messages_all_expired_goes_on_counting(tmp_path: Path) -> None:
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
        is_all_there = end in (whole.index(b"\n"), whole.index(b"\n") + 1)  # as earlier releases wrote it
        assert read_state(path) == {"a": 2 if is_all_there else 1}
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
    """Flips a bit so many bytes before a body: in its record's head."""
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


def test_a_log_of_an_earlier_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.protocol.message.CHECKSUM_BYTES", 40_000)  # there is never room for one
        expected = filled(tmp_path)
    (segment,) = (tmp_path / "commitlog").iterdir()
    assert b"\x02\x03" not in segment.read_bytes()
    for name in ("checkpoint.json", "checkpoint.old"):
        (tmp_path / name).unlink()
    store, found = reopened(tmp_path)
    assert (found.records, found.lost, found.damage) == (300, (), ())
    assert [bodies(store, queue=queue) for queue in range(3)] == expected
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
