"""A batch is one piece to the store, and on disk the same as its messages one by one."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocketlet.broker.store.store import Store
from rocketlet.protocol.message import MessageError, encode_batch, split
from rocketlet.protocol.names import tag_code

from ...support.stores import HOST, TOPICS, bodies, open_store

Entries = list[tuple[int, bytes, str]]
ENTRIES = st.lists(
    st.tuples(st.integers(0, 9), st.binary(max_size=30), st.sampled_from(["", "TAGS\x01A", "K\x01\u00e9\x02"])),
    min_size=1,
    max_size=8,
)


def new_store(folder: Path) -> Store:
    store = open_store(folder, time_ms=lambda: 7)
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


@settings(max_examples=30)
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
