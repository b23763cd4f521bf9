"""Bodies full of records: no recovery, repair or look at a folder takes what a client wrote for a record of its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rocketlet.broker.store.files import StoreError, read_state, write_state
from rocketlet.broker.store.log import Damage
from rocketlet.broker.store.recovery import inspect
from rocketlet.broker.store.store import Store
from rocketlet.command.tools.fsck import fsck
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.message import BEGIN_BYTES, BEGIN_MARK, CHECKSUM_BYTES, MAX_RECORD_BYTES

from ...support import forged
from ...support.stores import TOPICS, bodies, kill, open_store, put

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
    "records that go on": lambda at: forged.body_at(at, b"FORGED", b"FORGED", offset=50),
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


def test_a_reply_of_an_earlier_release_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, b"u-0", topic="u")
    begin = store.end
    inner = forged.body_at(begin, b"FORGED", offset=1)
    record = forged.record(begin, inner + bytes(MAX_BODY_BYTES * 3), topic="t")
    store._log.append(record)
    store._next = store.end + len(record)
    put(store, b"u-1", topic="u")
    kill(store)
    forget_indexes(tmp_path)
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert found.damage == (Damage(begin, len(record)),)
    assert (bodies(store, "u"), found.lost) == ([b"u-0", b"u-1"], ())
    store.close()


def test_what_recovery_would_not_take_is_not_stored(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StoreError, match="are stored at most"):
        put(store, bytes(MAX_RECORD_BYTES))
    assert (store.staged, store.end, store.queue("t", 0).next) == (0, 0, 0)
    put(store, b"next")
    assert bodies(store) == [b"next"]
    store.close()


def test_a_folder_of_an_earlier_release_goes_on_with_marks(tmp_path: Path) -> None:
    at = attacked(tmp_path, BODIES["records that go on"], is_indexed=True)
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


def test_a_mark_is_of_one_place_and_of_one_start(tmp_path: Path) -> None:
    """A lost end of the log: who has read its marks cannot use them for what is written there next."""
    store = opened(tmp_path)
    put(store, b"u-0", topic="u")
    begin = store.end
    put(store, b"x" * 200)
    known = store.read_log(begin, store.end - begin)[-BEGIN_BYTES - CHECKSUM_BYTES : -CHECKSUM_BYTES]
    assert store._marks.is_mark(known, begin)
    assert not store._marks.is_mark(known, begin + 1)
    kill(store)
    log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes()[:begin])
    store = opened(tmp_path)
    assert not store._marks.is_mark(known, begin)
    kill(store)


def test_keys_of_what_has_expired_are_forgotten(tmp_path: Path) -> None:
    for number in range(30):
        store = open_store(tmp_path, 1000)
        store.recover(TOPICS)
        put(store, b"%d" % number + bytes(400))
        store.expire(older_than_s=0, total_bytes=3000)
        begin = store.begin
        kill(store)
    epochs = read_state(tmp_path / "marks.json")["epochs"]
    assert len(epochs) < 12
    assert epochs[0][0] <= begin
    assert (tmp_path / "marks.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"epochs":[[1]]}', b'{"epochs":[["x","zz"]]}'])
def test_lost_keys_are_made_anew(tmp_path: Path, content: bytes | None) -> None:
    attacked(tmp_path, BODIES["records that go on"], is_indexed=True)
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
    store._log.append(forged.record(store.end, b"far", offset=2**40))
    store._next = store._log.end
    put(store, b"u-1", topic="u")
    kill(store)
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert bodies(store, "u") == [b"u-0", b"u-1"]
    assert found.lost == ()
    store.checkpoint()
    state = read_state(tmp_path / "checkpoint.json")
    kill(store)
    state["queues"]["u@0"][1] = 2**40
    write_state(tmp_path / "checkpoint.json", state)
    store = unrecovered(tmp_path)
    found = store.recover(TOPICS)
    assert (found.lost, store.queue("u", 0).next) == ((), 2)
    put(store, b"u-2", topic="u")
    assert bodies(store, "u") == [b"u-0", b"u-1", b"u-2"]
    store.close()
