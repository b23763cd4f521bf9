"""The store on disk: what is read back, what a crash leaves, what expires. No broker, no loop."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocketlet.broker.runtime import run
from rocketlet.broker.store.files import (
    Folder,
    OpenFiles,
    StoreError,
    StoreFailed,
    StoreFull,
    read_state,
    write_state,
)
from rocketlet.broker.store.log import Buffer, CommitLog, SegmentedFile
from rocketlet.broker.store.recovery import Lost
from rocketlet.broker.store.store import Store
from rocketlet.protocol.message import encode_batch, split

from ...support.stores import HOST, TOPICS, bodies, kill, open_store, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    opened.recover(TOPICS)
    yield opened
    opened.close()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=3000), st.sampled_from(["", "A", "B"])), max_size=60))
def test_every_queue_gives_back_its_messages_in_order(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[int, bytes, str]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = open_store(folder, 4096)
    store.recover(TOPICS)
    for queue, body, tag in messages:
        put(store, body, queue=queue, tag=tag)
    for _ in range(2):
        for queue in range(4):
            assert bodies(store, queue=queue) == [body for number, body, _ in messages if number == queue]
            assert bodies(store, queue=queue, tags="A") == [
                body for number, body, tag in messages if (number, tag) == (queue, "A")
            ]
        store.close()
        store = open_store(folder, 4096)
        store.recover(TOPICS)
    store.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_after_a_crash_everything_committed_is_there(tmp_path: Path, checkpointed: bool) -> None:
    store = open_store(tmp_path)
    store.recover(TOPICS)
    for number in range(100):
        put(store, b"%d" % number, queue=number % 3)
        if checkpointed and number == 50:
            store.checkpoint()
    kill(store)
    again = open_store(tmp_path)
    found = again.recover(TOPICS)
    assert found.records == (49 if checkpointed else 100)
    assert found.torn_bytes == 0
    for queue in range(3):
        assert bodies(again, queue=queue) == [b"%d" % number for number in range(queue, 100, 3)]
    again.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_tail_is_cut_off_wherever_it_is_torn(tmp_path: Path, seed: int) -> None:
    store = open_store(tmp_path)
    store.recover(TOPICS)
    ends = []
    for number in range(20):
        put(store, b"%d" % number * 10)
        ends.append(store.end)
    kill(store)
    cut = random.Random(seed).randrange(1, ends[-1])
    (segment,) = (tmp_path / "commitlog").iterdir()
    os.truncate(segment, cut)
    again = open_store(tmp_path)
    found = again.recover(TOPICS)
    whole = sum(end <= cut for end in ends)
    assert bodies(again) == [b"%d" % number * 10 for number in range(whole)]
    assert found.torn_bytes == cut - (ends[whole - 1] if whole else 0)
    put(again, b"after")
    assert bodies(again)[-1] == b"after"
    again.close()


def test_a_garbled_record_at_the_end_is_cut_off(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recover(TOPICS)
    for number in range(5):
        put(store, b"body-%d" % number)
    kill(store)
    (segment,) = (tmp_path / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"body-4")] ^= 1
    segment.write_bytes(data)
    again = open_store(tmp_path)
    assert again.recover(TOPICS).torn_bytes > 0
    assert bodies(again) == [b"body-%d" % number for number in range(4)]
    again.close()


def test_damage_in_the_log_is_skipped_and_put_aside_and_said(tmp_path: Path) -> None:
    store = open_store(tmp_path, 500)
    store.recover(TOPICS)
    for number in range(20):
        put(store, b"body-%d" % number * 20)
    kill(store)
    first, *_, last = sorted((tmp_path / "commitlog").iterdir())
    first.write_bytes(b"x" + first.read_bytes()[1:])
    last.write_bytes(last.read_bytes().replace(b"body-18", b"body-xx", 1))
    again = open_store(tmp_path, 500)
    found = again.recover(TOPICS)
    size = len(again.record_bytes_at(again.queue("t", 0).entry(1)[0]) or b"")
    assert found.damage[0] == (0, size)
    assert found.lost == (Lost("t", 0, 0, 1), Lost("t", 0, 18, 19))
    assert found.torn_bytes == 0
    assert bodies(again) == [b"body-%d" % number * 20 for number in range(1, 20) if number != 18]
    assert len(list((tmp_path / "damaged").iterdir())) == 2
    put(again, b"after")
    assert again.queue("t", 0).next == 21
    again.close()
    once_more = open_store(tmp_path, 500)
    assert once_more.recover(TOPICS).lost == ()
    assert bodies(once_more)[-2:] == [b"body-19" * 20, b"after"]
    once_more.close()


def test_lost_indexes_are_made_anew_from_the_log(tmp_path: Path, store: Store) -> None:
    for number in range(30):
        put(store, b"%d" % number, queue=number % 2)
    store.checkpoint()
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")
    again = open_store(tmp_path)
    found = again.recover(TOPICS)
    assert (sorted(found.rebuilt), found.records, found.lost) == (["t@0", "t@1"], 30, ())
    assert bodies(again, queue=1) == [b"%d" % number for number in range(1, 30, 2)]
    again.close()


def test_a_deleted_topic_does_not_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recover(TOPICS)
    put(store, b"old")
    store.delete_topic("t")
    since = store.end
    put(store, b"new")
    kill(store)
    shutil.rmtree(tmp_path / "consumequeue", ignore_errors=True)
    again = open_store(tmp_path)
    again.recover([("t", since)])
    assert bodies(again) == [b"new"]
    again.close()


def test_segments_expire_by_total_size_and_offsets_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2000)
    store.recover(TOPICS)
    for number in range(40):
        put(store, b"%02d" % number * 100)
    assert store.expire(older_than_s=0, total_bytes=5000) > 0
    queue = store.queue("t", 0)
    assert 0 < queue.begin < queue.next == 40
    assert bodies(store) == [b"%02d" % number * 100 for number in range(queue.begin, 40)]
    store.close()
    again = open_store(tmp_path, 2000)
    again.recover(TOPICS)
    assert again.queue("t", 0).begin == queue.begin
    assert again.queue("t", 0).next == 40
    again.close()


def test_segments_expire_by_age_but_never_the_one_being_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1000)
    store.recover(TOPICS)
    for number in range(10):
        put(store, b"%d" % number * 300)
    for segment in sorted((tmp_path / "commitlog").iterdir()):
        os.utime(segment, (1000, 1000))
    while store.expire(older_than_s=2000, total_bytes=None):
        pass
    assert store.queue("t", 0).next == 10
    assert len(bodies(store)) >= 1
    store.close()


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, b"before")
    end = store.end
    real = os.write

    def short_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 500:
            return real(descriptor, bytes(data[:10]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.broker.store.disk.write", short_then_full)
        with pytest.raises(StoreFull, match="No space left"):
            put(store, b"x" * 500)
    assert store.end == end
    assert store.queue("t", 0).next == 1
    put(store, b"after")
    assert bodies(store) == [b"before", b"after"]


def test_a_folder_belongs_to_one_broker(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(StoreError, match="another broker uses"):
        Folder(tmp_path)
    folder.unlock()
    Folder(tmp_path).unlock()
    with pytest.raises(StoreError, match="cannot use"):
        Folder(Path("/proc/nothing"))


def test_a_folder_belongs_to_one_broker_whatever_files_are_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(StoreError, match="another broker uses"):
        Folder(tmp_path)
    folder.unlock()
    Folder(tmp_path).unlock()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_store_whose_folder_is_moved_away_writes_no_more(tmp_path: Path, is_replaced: bool) -> None:
    store = open_store(tmp_path / "data")
    store.recover(TOPICS)
    put(store, b"kept")
    store.checkpoint()
    (tmp_path / "data").rename(tmp_path / "away")
    if is_replaced:
        (tmp_path / "data").mkdir()
    store.checkpoint()
    with pytest.raises(StoreFailed, match="another folder is at" if is_replaced else "is gone"):
        put(store, b"refused")
    assert bodies(store) == [b"kept"]
    store.close()


@pytest.mark.parametrize("linked", ["t", "t/0"])
def test_a_linked_index_is_refused_and_nothing_behind_it_is_removed(tmp_path: Path, linked: str) -> None:
    store = open_store(tmp_path / "data")
    store.recover(TOPICS)
    put(store, b"kept")
    store.checkpoint()
    store.close()
    index = tmp_path / "data" / "consumequeue" / linked
    index.rename(tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("elsewhere/**/*"))
    for rebuilds in (False, True):
        store = open_store(tmp_path / "data")
        with pytest.raises(StoreError, match="is a link; put the folder"):
            store.recover(TOPICS, rebuilds=rebuilds)
        store.close()
    store = open_store(tmp_path / "data")  # the topic is unknown, and in no checkpoint: its index would be removed
    for path in (tmp_path / "data").glob("checkpoint.*"):
        path.unlink()
    store.recover([("u", 0)])
    store.close()
    assert sorted(tmp_path.rglob("elsewhere/**/*")) == before


def test_a_pipe_is_no_state_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "topics.json")
    with pytest.raises(StoreError, match="it is no regular file"):
        read_state(tmp_path / "topics.json")


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    assert read_state(path) is None
    write_state(path, {"a": 1})
    assert read_state(path) == {"a": 1}
    path.write_text("{")
    with pytest.raises(StoreError, match=r"topics\.json is damaged"):
        read_state(path)


def test_few_files_are_open_however_many_there_are(tmp_path: Path) -> None:
    files = OpenFiles(limit=4)
    segmented = [SegmentedFile(tmp_path / str(number), 100, files) for number in range(10)]
    for number, item in enumerate(segmented):
        item.append(b"%d" % number)
    assert [item.read(0, 9) for item in segmented] == [b"%d" % number for number in range(10)]
    assert len(files._open) == 4
    files.close()


def test_a_file_that_is_gone_is_named_and_not_made_anew(tmp_path: Path) -> None:
    files = OpenFiles(limit=4)
    segmented = SegmentedFile(tmp_path / "s", 1, files)
    for _ in range(6):
        segmented.append(b"x")
    gone = tmp_path / "s" / f"{0:020d}"
    gone.unlink()
    files.close()
    with pytest.raises(StoreError, match=str(gone)):
        segmented.read(0, 1)
    assert not gone.exists()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Every further open fails with EMFILE; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("segment_bytes", [1 << 20, 1000])
def test_without_a_descriptor_a_message_is_kept_or_refused(tmp_path: Path, segment_bytes: int) -> None:
    store = open_store(tmp_path, segment_bytes, open_files=4)
    store.recover(TOPICS)
    accepted: dict[int, list[bytes]] = {queue: [] for queue in range(8)}

    def send(number: int) -> bool:
        body = b"%d" % number * 40
        try:
            put(store, body, queue=number % 8)
        except StoreFull:
            return False
        accepted[number % 8].append(body)
        return True

    for number in range(16):
        assert send(number)
        store.checkpoint()  # the indexes take the descriptors in turn
    with no_descriptor_left():
        sent = sum(send(number) for number in range(100))
    assert sent == 100 if segment_bytes == 1 << 20 else sent < 100
    assert send(1)
    store.close()
    again = open_store(tmp_path, segment_bytes)
    assert again.recover(TOPICS).torn_bytes == 0
    assert {queue: bodies(again, queue=queue) for queue in range(8)} == accepted
    again.close()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt])
def test_whatever_fails_while_a_message_is_stored_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    put(store, b"before")

    def fail(*arguments: object) -> int:
        raise error

    def put_batch() -> None:
        store.stage_batch(store.queue("t", 0), split(encode_batch([(0, b"lost", "")] * 2)), 0, 1, HOST)
        store.commit()

    ways = {("encode_record", "_pack"): lambda: put(store, b"lost"), ("encode_records", "_packer"): put_batch}
    for way, number in itertools.product(ways, range(3)):
        place = ("disk.write", f"store.{way[0]}", f"index.{way[1]}")[number]
        with monkeypatch.context() as patch:
            patch.setattr(f"rocketlet.broker.store.{place}", fail)
            with pytest.raises(error):
                ways[way]()
        assert store.staged == 0
        assert (store.end, store.queue("t", 0).next) == (store._log.end, 1)
    put(store, b"after")
    assert bodies(store) == [b"before", b"after"]


def test_what_a_failed_write_left_is_cut_off_before_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, b"before")
    real_write, real_truncate = os.write, os.ftruncate
    is_broken = True

    def write(descriptor: int, data: bytes) -> int:
        if is_broken:
            real_write(descriptor, bytes(data[:7]))
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    def truncate(descriptor: int, size: int) -> None:
        if is_broken:
            raise OSError(28, "No space left on device")
        real_truncate(descriptor, size)

    monkeypatch.setattr("rocketlet.broker.store.disk.write", write)
    monkeypatch.setattr("rocketlet.broker.store.disk.truncate", truncate)
    for _ in range(3):
        with pytest.raises(StoreFull):
            put(store, b"lost")
    is_broken = False
    put(store, b"after")
    assert bodies(store) == [b"before", b"after"]


def test_a_part_of_what_is_staged_can_be_forgotten(store: Store) -> None:
    def stage(body: bytes, queue: int) -> None:
        store.stage(store.queue("t", queue), body, b"", 0, flag=0, sys_flag=0, born_ms=1, born_host=HOST)

    store.begin_batch()
    for number in range(4):
        stage(b"%d" % number, number % 2)
    store.roll_back(kept=1)
    stage(b"other", 1)
    store.commit()
    assert (bodies(store, queue=0), bodies(store, queue=1)) == ([b"0"], [b"other"])


def test_a_checkpoint_is_made_in_pieces_and_what_is_deleted_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(5):
        put(store, b"x", f"t{number}")
    saving = store.checkpointing()
    assert [next(saving) for _ in range(2)] == [None, None], "each index that is flushed is a piece"
    store.delete_topic("t0")
    store.delete_topic("t3")
    run(saving)
    assert sorted(path.name for path in (tmp_path / "consumequeue").iterdir()) == ["t1", "t2", "t4"]
    store.close()
    store = open_store(tmp_path)
    store.recover([(f"t{number}", 0) for number in (1, 2, 4)])
    assert {topic for topic, _ in store.queues} == {"t1", "t2", "t4"}
    store.close()


def test_what_is_stored_while_a_checkpoint_is_made_is_not_stored_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(6):
        put(store, b"%d" % number, queue=number % 3)
    saving = store.checkpointing()
    next(saving)
    for number in range(6, 12):
        put(store, b"%d" % number, queue=number % 3)
    run(saving)
    store.close()
    store = open_store(tmp_path)
    assert store.recover([("t", 0)]).rebuilt == ()
    for queue in range(3):
        assert bodies(store, queue=queue) == [b"%d" % number for number in range(12) if number % 3 == queue]
    store.close()


def test_groups_that_pull_the_same_messages_share_a_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    read = CommitLog.read_written

    def counted(log: CommitLog, position: int, size: int) -> Buffer:
        reads.append((position, size))
        return read(log, position, size)

    monkeypatch.setattr(CommitLog, "read_written", counted)
    for number in range(3):
        put(store, b"%d" % number)
    queue = store.queue("t", 0)
    first, again = (store.fetch(queue, 0, 32) for _ in range(2))
    assert first == again
    assert len(reads) == 1
    put(store, b"3")
    assert bodies(store) == [b"0", b"1", b"2", b"3"]
    assert bodies(store, offset=1) == [b"1", b"2", b"3"]
    assert len(set(reads)) == len(reads) == 3


def test_what_was_just_read_is_gone_when_it_expires(tmp_path: Path) -> None:
    store = open_store(tmp_path, segment_bytes=4096)
    store.recover(TOPICS)
    for _ in range(8):
        put(store, b"x" * 2000)
    queue = store.queue("t", 0)
    position, size, _ = queue.entry(0)
    assert store._reader._read_records([position], [size])
    store.expire(older_than_s=0.0, total_bytes=4096)
    assert store.begin > position
    with pytest.raises(StoreError):
        store._reader._read_records([position], [size])
    store.close()
