"""Stores of tests: opened without a broker, filled, left as a crash leaves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rocketlet.broker.messages.delays import tag_code_of
from rocketlet.broker.store.recovery import Recovered
from rocketlet.broker.store.store import Store
from rocketlet.protocol.message import decode_records, encode_host
from rocketlet.protocol.names import java_hash, parse_subscription

HOST = encode_host("127.0.0.1", 1)
TOPICS = [("t", 0), ("u", 0)]


def open_store(folder: Path, segment_bytes: int = 1 << 20, open_files: int = 256, **options: Any) -> Store:
    return Store(
        folder,
        segment_bytes=segment_bytes,
        tag_code_of=lambda record: tag_code_of(record, (1000,)),
        open_files=open_files,
        **options,
    )


def kill(store: Store) -> None:
    """As when the process is killed: nothing is flushed, no checkpoint is written."""
    store.close()


def put(
    store: Store, body: bytes, topic: str = "t", queue: int = 0, tag: str = "", *, commits: bool = True
) -> tuple[int, int]:
    properties = f"TAGS\x01{tag}".encode() if tag else b""
    code = java_hash(tag) if tag else 0
    store.begin_batch()
    place = store.stage(
        store.queue(topic, queue), body, properties, code, flag=0, sys_flag=0, born_ms=1, born_host=HOST
    )
    if commits:
        store.commit()
    return place


def cut_log(folder: Path, end: int) -> None:
    """Cut the commit log in a data folder at a position."""
    for path in (folder / "commitlog").iterdir():
        if int(path.name) >= end:
            path.unlink()
        elif int(path.name) + path.stat().st_size > end:
            os.truncate(path, end - int(path.name))


def append_to_log(store: Store, record: bytes) -> None:
    """Append bytes to the commit log that no release stores today."""
    store._log.append(record)
    store._next = store._log.end


def bodies(store: Store, topic: str = "t", queue: int = 0, offset: int | None = None, tags: str = "*") -> list[bytes]:
    """Everything from an offset on, by as many fetches as it takes."""
    found: list[bytes] = []
    item = store.queue(topic, queue)
    position = item.begin if offset is None else offset
    while position < item.next:
        fetched = store.fetch(item, position, 32, parse_subscription(topic, tags))
        found += [record.body for record in decode_records(b"".join(fetched.pieces))]
        assert fetched.next_offset > position
        position = fetched.next_offset
    return found


def filled(folder: Path, messages: int = 300, segment_bytes: int = 1 << 20) -> list[list[bytes]]:
    """A folder that was closed cleanly: three queues with messages, one that was only read from."""
    store = open_store(folder, segment_bytes)
    store.recover(TOPICS)
    store.queue("t", 7)
    for number in range(messages):
        put(store, b"body-%d" % number, queue=number % 3)
    store.checkpoint(sync=True)
    store.close()
    return [[b"body-%d" % number for number in range(queue, messages, 3)] for queue in range(3)]


def reopened(folder: Path, segment_bytes: int = 1 << 20, **options: Any) -> tuple[Store, Recovered]:
    store = open_store(folder, segment_bytes)
    return store, store.recover(TOPICS, **options)
