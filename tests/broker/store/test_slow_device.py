"""A client that asked for the device waits for it, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from rocketlet.broker.config import Limits
from rocketlet.broker.store import disk
from rocketlet.broker.store.files import Folder, StoreError
from rocketlet.broker.store.store import Store
from rocketlet.protocol.codes import RequestCode as Code
from structlog.testing import capture_logs

from ...conftest import Connect, Nodes, create_topic, eventually
from ...support.requests import send
from ...support.stores import HOST


class Slow:
    """A device that syncs when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_sync = threading.Event()
        self.syncs = 0
        monkeypatch.setattr(disk, "sync", self._wait)
        monkeypatch.setattr(disk, "sync_folder", self._wait)

    def _wait(self, what: Any) -> None:
        self.syncs += 1
        assert self.may_sync.wait(60)


async def test_a_slow_device_stops_nobody_who_does_not_wait_for_it(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New topics and groups, sends and saving wait for the device, as --flush sync says. Everybody else is served."""
    node = await nodes.start(flush="sync")
    asking, other = await connect(node.address), await connect(node.address)
    await create_topic(asking, "t")
    slow = Slow(monkeypatch)
    node.broker.offsets.put("g", "t", 0, 0)
    saving = asyncio.create_task(node.broker.device.do(node.broker.saving()))
    creating = asyncio.create_task(asking.call(Code.UPDATE_AND_CREATE_TOPIC, CREATE))
    for _ in range(20):
        assert (await other.call(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    assert not creating.done()
    assert not saving.done()
    slow.may_sync.set()
    assert (await creating).code == 0
    await saving
    assert slow.syncs > 2


async def test_what_somebody_else_is_syncing_is_not_acknowledged_before(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saves has the log synced: whoever asks meanwhile finds nothing left to sync, and waits behind it."""
    node = await nodes.start(flush="sync")
    wire, broker = await connect(node.address), node.broker
    await create_topic(wire, "t")
    slow = Slow(monkeypatch)
    store_one(broker.store)
    job = asyncio.create_task(broker.device.do(broker.store.syncing()))
    await eventually(lambda: slow.syncs > 0)
    told: list[bool] = []
    assert broker.flusher is not None
    broker.flusher.after_sync(lambda: told.append(True), lambda: told.append(False))
    for _ in range(20):
        assert (await wire.call(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    assert told == []
    slow.may_sync.set()
    await job
    await broker.flusher.drain()
    assert told == [True]


def store_one(store: Store, body: bytes = b"x") -> None:
    store.begin_batch()
    store.stage(store.queue("t", 0), body, b"", 0, flag=0, sys_flag=0, born_ms=1, born_host=HOST)
    store.commit()


CREATE = {"topic": "new", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}


async def test_a_topic_whose_journal_cannot_be_synced_is_not_acknowledged(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "sync", fail)
    answer = await wire.call(Code.UPDATE_AND_CREATE_TOPIC, CREATE)
    assert (answer.code, "Input/output error" in (answer.remark or "")) == (14, True)


def test_the_log_of_the_next_segment_does_not_wait_for_the_one_before(tmp_path: Any) -> None:
    store = Store(tmp_path, segment_bytes=200, tag_code_of=lambda record: 0, is_synced=True)
    for _ in range(5):
        store_one(store, b"x" * 200)
    calls = store.syncs()
    assert len(calls) == 5 + 2, "each segment, the names in its folder, and the folder's own"
    for call in calls:
        call()
    assert store.syncs() == []
    store.close()


def test_a_job_syncs_the_log_and_its_names_with_nothing_between(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls somebody else's sync, which finds nothing to do, would acknowledge a message whose file has no name
    on the device yet."""
    store = Store(tmp_path, segment_bytes=200, tag_code_of=lambda record: 0, is_synced=True)
    made: list[str] = []
    monkeypatch.setattr(disk, "sync", lambda descriptor: made.append("file"))
    monkeypatch.setattr(disk, "sync_folder", lambda path: made.append("folder"))
    for _ in range(2):
        store_one(store, b"x" * 200)
    (call,) = [call for call in store.syncing() if call is not None]
    assert store.syncs() == []
    call()
    assert made == ["file", "file", "folder", "folder"]
    store.close()


async def test_a_broker_stops_though_the_device_never_answers_and_leaves_its_folder_to_nobody(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync", limits=Limits(device_stop_s=0.05))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    slow = Slow(monkeypatch)
    sending = asyncio.create_task(send(wire))
    await eventually(lambda: slow.syncs > 0)
    with capture_logs() as logs:
        await node.stop()
    assert [entry["event"] for entry in logs if entry["log_level"] == "critical"] == ["store_stopped_writing"]
    with pytest.raises(StoreError, match="another broker uses"):
        Folder(node.config.data_dir)
    slow.may_sync.set()
    node.broker.device._thread.shutdown(wait=True)
    node.broker.store.close()
    with pytest.raises(ConnectionResetError):
        await sending
