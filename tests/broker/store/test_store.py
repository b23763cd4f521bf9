"""The store on disk: what is read back, what a crash leaves, what expires. No broker, no loop."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocketlet.broker import config
from rocketlet.broker.config import MAX_CLOCK_DOUBT_S, RETENTION_JUMP_S, RETENTION_SWEEP_S
from rocketlet.broker.metrics import Collector
from rocketlet.broker.runtime.clock import Clock
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.store import disk
from rocketlet.broker.store import index as reading
from rocketlet.broker.store import log as written
from rocketlet.broker.store.files import (
    Folder,
    OpenFiles,
    StoreError,
    StoreFailed,
    StoreFull,
    read_state,
    write_state,
)
from rocketlet.broker.store.journals import Frames, Journal
from rocketlet.broker.store.log import Buffer, CommitLog, SegmentedFile, Written
from rocketlet.broker.store.recovery import Lost
from rocketlet.broker.store.store import RetentionTime, Store
from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.protocol.checksum import crc32
from rocketlet.protocol.message import MessageError, decode_records, encode_batch, split
from rocketlet.protocol.names import tag_code
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, create_topic, eventually
from ...support.clocks import WallClock
from ...support.examples import examples
from ...support.requests import bodies_of, send
from ...support.stores import HOST, TOPICS, bodies, kill, open_store, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    opened.recover(TOPICS)
    yield opened
    opened.close()


@settings(max_examples=examples(40))
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


def test_a_malformed_record_at_the_end_is_cut_off(tmp_path: Path) -> None:
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


def test_lost_indexes_are_recreated_from_the_log(tmp_path: Path, store: Store) -> None:
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
    with pytest.raises(StoreError, match="not a regular file"):
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
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert sum(path.startswith(str(tmp_path)) for path in open_files) == 4
    files.close()


def test_a_file_that_is_gone_is_named_and_not_recreated(tmp_path: Path) -> None:
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
    end = store.end

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
        assert (store.end, store.queue("t", 0).next) == (end, 1)
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


@pytest.mark.parametrize(("call", "is_tail_long"), [("write", False), ("sync", False), ("write", True)])
def test_store_writes_nothing_after_the_device_has_failed_below_an_index(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, is_tail_long: bool
) -> None:
    put(store, b"before")
    real = getattr(disk, call)

    def fail(descriptor: int, *arguments: object) -> object:
        if "consumequeue" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk, call, fail)
        if is_tail_long:
            for _ in range(reading.TAIL_ENTRIES):
                put(store, b"one of many", commits=False)
            store.commit()
        else:
            with pytest.raises(StoreFailed):
                store.checkpoint(closes=True)
    with pytest.raises(StoreFailed, match="has stopped writing"):
        put(store, b"after")


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


# A batch is one piece to the store, and on disk the same as its messages one by one.


Entries = list[tuple[int, bytes, str]]
ENTRIES = st.lists(
    st.tuples(st.integers(0, 9), st.binary(max_size=30), st.sampled_from(["", "TAGS\x01A", "K\x01\u00e9\x02"])),
    min_size=1,
    max_size=8,
)


class Stamps(Clock):
    """Messages are stored at these times, one after the other."""

    def __init__(self, times_ms: Iterable[int]) -> None:
        self._times_ms = iter(times_ms)

    def time_ms(self) -> int:
        return next(self._times_ms)


def new_store(folder: Path) -> Store:
    store = open_store(folder, clock=Stamps(itertools.repeat(7)))
    with mock.patch("rocketlet.broker.store.log.secrets.token_bytes", bytes):  # stores with the same key
        store.recover(TOPICS)
    store.begin_batch()
    return store


def stage_batch(store: Store, entries: Entries, queue: int = 0) -> tuple[list[int], int]:
    return store.stage_batch(store.queue("t", queue), split(encode_batch(entries), b"C\x01c"), 0, 5, HOST, 3)


def stage_singly(store: Store, entries: Entries, queue: int) -> None:
    for flag, body, text in entries:
        whole = f"{text}C\x01c" if not text or text.endswith("\x02") else f"{text}\x02C\x01c"
        store.stage(store.queue("t", queue), body, whole.encode(), tag_code(whole), flag, 0, 5, HOST, 3)


def content(folder: Path) -> dict[str, bytes]:
    paths = [path for kind in ("commitlog", "consumequeue") for path in (folder / kind).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(ENTRIES, st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_log_and_indexes_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[Entries, int, bool]]
) -> None:
    folders = [tmp_path_factory.mktemp("store") for _ in range(2)]
    stores = [new_store(folder) for folder in folders]
    for entries, queue, is_kept in batches:
        stage_batch(stores[0], entries, queue)
        stage_singly(stores[1], entries, queue)
        for store in stores:
            if is_kept:
                store.commit()
            else:
                store.roll_back()
    for store in stores:
        store.checkpoint()
        store.close()
    assert content(folders[0]) == content(folders[1])


def test_a_batch_is_staged_and_forgotten_whole(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    three = [(0, b"%d" % number, "") for number in range(3)]
    positions, offset = stage_batch(store, three)
    assert (len(positions), offset, store.staged) == (3, 0, 1)
    with pytest.raises(MessageError):
        store.stage_batch(store.queue("t", 0), split(b"garbage"), 0, 5, HOST)
    with pytest.raises(Exception, match="format requires"):
        store.stage_batch(store.queue("t", 0), split(encode_batch(three)), 2**40, 5, HOST)
    assert (store.staged, store.queue("t", 0).next) == (1, 3)
    assert stage_batch(store, three)[1] == 3
    store.roll_back(kept=1)
    assert store.queue("t", 0).next == 3
    assert store.commit() == [store.queue("t", 0)]
    assert bodies(store) == [b"0", b"1", b"2"]
    store.close()


# Bytes that the disk gives back changed are not delivered, also while the process runs that wrote them.


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
    store.fetch(store.queue("t", 0), 0, 1)  # replaces the last shared read by one of a record far from the damage
    segment.write_bytes(data)
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
def test_after_a_restart_the_time_of_a_large_message_is_found_without_reading_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    store = open_store(tmp_path, clock=Stamps(range(1000, 2000, 100)))
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
        assert len(sums) <= 20 + len(log) // 300
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
    assert len(sums) <= 50
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
        assert READS[read](store, 0) == expected[0]  # replaces the last shared read
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


# A wall clock that jumps ahead does not have everything expire immediately.


DAY_S = 86_400.0


def test_time_that_goes_by_counts_immediately() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    for seconds in (1, 30, 30 * DAY_S):
        clock.advance(seconds)
        assert time.now_s() == clock.time_s()


def test_a_small_jump_counts_immediately() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    clock.set_s = RETENTION_JUMP_S
    assert time.now_s() == clock.time_s()


def test_a_jump_counts_after_as_long_as_it_is_wide_and_a_day_at_most() -> None:
    for jump_s in (RETENTION_JUMP_S + 1, 3600.0, MAX_CLOCK_DOUBT_S, 30 * DAY_S):
        clock = WallClock(stands=True)
        time = RetentionTime(clock)
        clock.set_s = jump_s
        with capture_logs() as logs:
            assert time.now_s() == clock.time_s() - jump_s
        wait_s = min(jump_s, MAX_CLOCK_DOUBT_S)
        assert [(log["event"], log["ahead_s"], log["wait_s"]) for log in logs] == [
            ("clock_set_ahead", round(jump_s), round(wait_s))
        ]
        clock.advance(wait_s - 1)
        assert time.now_s() == clock.time_s() - jump_s
        clock.advance(1)
        assert time.now_s() == clock.time_s()


def test_a_clock_that_is_set_right_again_counts_immediately() -> None:
    clock = WallClock(stands=True)
    time = RetentionTime(clock)
    clock.set_s = 30 * DAY_S
    time.now_s()
    clock.advance(60)
    clock.set_s = 10.0  # nearly
    assert 0 <= clock.time_s() - time.now_s() <= RETENTION_JUMP_S
    clock.set_s = 30 * DAY_S
    assert time.now_s() < clock.time_s() - 29 * DAY_S


async def metric(node: Node, name: str) -> float:
    families = await Collector(node.broker, node.server.memory, ()).snapshot()
    (sample,) = (sample for family in families for sample in family.samples if sample.name == name)
    return sample.value


async def test_a_clock_that_is_30_days_ahead_deletes_nothing(nodes: Nodes, connect: Connect) -> None:
    clock = WallClock(stands=True)
    node = await nodes.start(clock=clock, segment_bytes=1000, retain_hours=1)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for _ in range(10):
        await send(wire, bytes(900))
    segments = node.broker.store.segments
    clock.set_s = 30 * DAY_S
    clock.advance(RETENTION_SWEEP_S)
    await node.broker.expire_segments()
    assert node.broker.store.segments == segments
    assert len(await bodies_of(wire)) == 10
    assert await metric(node, "rocketlet_clock_ahead_seconds") == 30 * DAY_S
    async with AdminClient(node.address) as admin:
        findings = [
            found for found in await diagnose(admin, ObservationTimes(0, 0, 0)) if found.kind == "clock_set_ahead"
        ]
    assert ["2592000 s ahead" in found.text for found in findings] == [True]
    clock.set_s = 0.0
    clock.advance(RETENTION_SWEEP_S)
    await node.broker.expire_segments()
    assert node.broker.store.segments == segments
    assert await metric(node, "rocketlet_clock_ahead_seconds") == 0
    clock.advance(3600 + RETENTION_SWEEP_S)
    await eventually(lambda: node.broker.store.segments < segments)


# Changes of a state file, a line each: whole or not at all.


def test_changes_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.json")
    assert journal.read() == []
    for value in ({"a": 1}, ["b\n"], None):
        journal.append(value)
    assert Journal(tmp_path / "x.json").read() == [{"a": 1}, ["b\n"], None]
    journal.clear()
    assert Journal(tmp_path / "x.json").read() == []
    assert journal.lines == 0


@given(cut=st.integers(0, 200))
def test_a_journal_that_is_cut_off_keeps_its_whole_lines_and_continues(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.journal"
    path.unlink(missing_ok=True)
    journal = Journal(tmp_path / "x.json")
    for number in range(5):
        journal.append({"number": number})
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    again = Journal(tmp_path / "x.json")
    kept = again.read()
    assert kept == [{"number": number} for number in range(data.count(b"\n"))]
    again.append("next")
    assert Journal(tmp_path / "x.json").read() == [*kept, "next"]


@pytest.mark.parametrize("kind", [Journal, Frames])
def test_changes_after_a_failed_write_that_could_not_be_truncated_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    path = tmp_path / "x.journal"
    journal = kind(path)
    journal.append(b"first" if kind is Frames else "first")
    real = os.write

    def short_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 500:
            return real(descriptor, bytes(data[:10]))
        raise OSError(28, "No space left on device")

    def refuse(path: Path, size: int) -> None:
        raise OSError(5, "Input/output error")

    long = "x" * 495
    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.broker.store.disk.write", short_then_full)
        patch.setattr("rocketlet.broker.store.disk.cut", refuse)
        with pytest.raises(StoreFull, match="No space left"):
            journal.append(long.encode() if kind is Frames else long)
    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.broker.store.disk.cut", refuse)
        with pytest.raises(StoreFull, match="Input/output error"):
            journal.append(b"second" if kind is Frames else "second")
    journal.append(b"third" if kind is Frames else "third")
    assert list(kind(path).read()) == ([b"first", b"third"] if kind is Frames else ["first", "third"])


def test_a_damaged_line_and_what_follows_it_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.json")
    for number in range(3):
        journal.append(number)
    path = tmp_path / "x.journal"
    path.write_bytes(path.read_bytes().replace(b" 1\n", b" 7\n"))
    assert Journal(tmp_path / "x.json").read() == [0]


def test_a_change_that_the_disk_refuses_is_not_kept_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "x.json")
    journal.append("first")
    write = disk.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) <= 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-12])

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(StoreFull, match="No space"):
        journal.append("second")
    monkeypatch.undo()
    journal.append("third")
    assert Journal(tmp_path / "x.json").read() == ["first", "third"]
