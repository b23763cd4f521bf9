"""Acknowledged messages are kept: --flush sync, devices that fail, full disks, logs that lost their end."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig, Limits
from rocketlet.broker.messages.delays import tag_code_of
from rocketlet.broker.messages.timers import waiting_text
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.store import disk, schedule
from rocketlet.broker.store.files import Folder, StoreError
from rocketlet.broker.store.store import Retention, Store
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import Heartbeat, TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.headers import SendBack, UpdateOffset, write
from rocketlet.protocol.message import Record, decode_records
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.examples import examples
from ...support.requests import COMMIT, end, half, heartbeat, pull, reply, send
from ...support.stores import HOST


class Device:
    """Holds every sync back until `let`, or fails it with `error`."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self.error: OSError | None = None

    def sync(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # a state file's sync is not held back
            assert self._free.wait(20)
        if self.error is not None:
            raise self.error
        os.fdatasync(descriptor)

    def hold(self) -> None:
        self._free.clear()

    def let(self) -> None:
        self._free.set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("rocketlet.broker.store.disk.sync", made.sync)
    return made


@pytest.fixture
async def synced(nodes: Nodes, connect: Connect) -> Wire:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    return wire


async def is_answered(wire: Wire, opaque: int) -> bool:
    """Whether a request was answered by the time that a later one is."""
    await wire.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    return opaque in wire._answers


async def test_with_sync_every_answer_that_says_stored_waits_for_the_device(
    synced: Wire, device: Device, nodes: Nodes, connect: Connect
) -> None:
    stored = await send(synced, b"first")
    prepared = await half(synced)
    await heartbeat(synced)
    waiting = await connect("127.0.0.1:" + str(synced._writer.get_extra_info("peername")[1]))
    await waiting.call(RequestCode.HEART_BEAT, body=bodies.encode_heartbeat(Heartbeat("me", producer_groups=("p",))))
    position = int(str(stored.ext["msgId"])[-16:], 16)
    requests: list[Callable[[], int]] = [
        lambda: synced.send(RequestCode.CONSUMER_SEND_MSG_BACK, write(SendBack(position, "g", -1))),
        lambda: synced.send(RequestCode.END_TRANSACTION, end(prepared, COMMIT)),
        lambda: synced.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("nobody")),
    ]
    for request in requests:
        device.hold()
        opaque = request()
        assert not await is_answered(synced, opaque)
        device.let()
        await synced.answer(opaque)
    device.hold()
    opaque = synced.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    assert not await is_answered(synced, opaque)
    device.let()
    assert (await synced.answer(opaque)).code == 0


async def test_after_a_sync_that_failed_nothing_is_written_any_more(
    nodes: Nodes, connect: Connect, device: Device, tmp_path: Path
) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    assert (await send(wire, b"kept")).code == 0
    device.error = OSError(5, "Input/output error")
    refused = await send(wire, b"who knows")
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "the broker has stopped writing" in (refused.remark or "")
    device.error = None  # the next sync would succeed, and mean nothing
    end_of_log = node.broker.store.end
    again = await send(wire, b"not written")
    assert (again.code, node.broker.store.end) == (ResponseCode.SERVICE_NOT_AVAILABLE, end_of_log)
    assert "Input/output error" in (again.remark or "")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull())
    assert next(decode_records(answer.body)).body == b"kept"
    await node.stop()
    node = await nodes.start(flush="sync", data_dir=tmp_path / "broker-a")
    wire = await connect(node.address)
    assert (await send(wire, b"after")).code == 0


async def test_a_write_that_the_device_fails_stops_writing_too(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.broker.store.disk.write", fail)
        assert (await send(wire)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert (await send(wire)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert node.broker.store.fault is not None


async def test_a_broker_starts_on_a_full_disk_and_unknown_groups_read_there(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await send(wire, b"kept")
    await node.stop()
    for name in ("checkpoint.json", "checkpoint.old"):  # there is something to recover, and no room to say so
        (tmp_path / "broker-a" / name).unlink(missing_ok=True)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rocketlet.broker.store.disk.write", full)
        node = await nodes.start(data_dir=tmp_path / "broker-a")
        wire = await connect(node.address)
        await heartbeat(wire, group="unknown")
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(consumer_group="unknown"))
        assert [record.body for record in decode_records(answer.body)] == [b"kept"]
        assert (await send(wire)).code == ResponseCode.SERVICE_NOT_AVAILABLE
        node.broker.persist()
    assert (await send(wire, b"room again")).code == 0
    node.broker.persist()
    await node.stop()
    node = await nodes.start(data_dir=tmp_path / "broker-a")
    assert node.broker.recovered.records == 0
    assert node.broker.store.queue("t", 0).next == 2


async def test_offsets_and_progress_behind_a_lost_end_are_set_back(
    nodes: Nodes, connect: Connect, tmp_path: Path
) -> None:
    node = await nodes.start(delay_levels_ms=(1,))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    for number in range(10):
        await send(wire, b"%d" % number)
        await send(wire, b"late", queue=1, properties="DELAY\x011")
    await heartbeat(wire)
    await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("g", "t", 0, 10)))
    await eventually(lambda: node.broker.delays.progress.get(1) == 10)
    await node.stop()
    folder = tmp_path / "broker-a"
    (segment,) = (folder / "commitlog").iterdir()
    os.truncate(segment, segment.stat().st_size // 4)
    for name in ("checkpoint.json", "checkpoint.old"):  # with it, the numbers continue where they were
        (folder / name).unlink(missing_ok=True)
    node = await nodes.start(delay_levels_ms=(1,), data_dir=folder)
    queue, delayed = node.broker.store.queue("t", 0), node.broker.store.queue("t", 1)
    assert 0 < queue.next < 10
    assert node.broker.offsets.get("g", "t", 0) == queue.next
    assert node.broker.delays.progress[1] < 10
    wire = await connect(node.address)
    before = delayed.next
    await send(wire, b"late", queue=1, properties="DELAY\x011")
    await eventually(lambda: delayed.next > before)


def test_a_delayed_message_of_a_level_that_is_gone_has_the_last_ones_time() -> None:
    record = Record(0, 0, 7, 0, 0, 0, 0, 0, b"", 1000, b"", 0, 0, b"", "SCHEDULE_TOPIC_XXXX", "")
    assert tag_code_of(record, (1, 2)) == 1002


# A client that asked for the device waits for it, and nobody else does.


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


# A message that is sent to a time comes then, through stops and kills of its broker. A model says which must have come.


HOST_SCHEDULE = b"\x7f\0\0\1\0\0\0\1"


LIMITS_OF_FEW = Limits(run_keys=8, runs_to_merge=2, timer_deliveries_at_once=3)


class Times(RuleBasedStateMachine):
    """`due`: of each message that was acknowledged, when it is due, ms; `came`: those that have been delivered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(schedule, "RUN_BLOCK_KEYS", 4)
        self.patch.setattr(schedule, "_BLOCK_BYTES", 4 * schedule.KEY_BYTES + 4)
        self.clock = MovableClock(stands=True)
        self.numbers = itertools.count()
        self.due: dict[int, int] = {}
        self.came: list[int] = []
        self.recalled: set[int] = set()
        self.broker: BrokerController

    @initialize()
    def start(self) -> None:
        config = BrokerConfig(self.folder, "127.0.0.1:1", segment_bytes=4000)
        self.broker = BrokerController(config, None, self.clock, limits=LIMITS_OF_FEW)
        if self.broker.topics.get("t") is None:
            self.broker.topics.put(TopicConfig("t", 1, 1), 0)
        self.queue = self.broker.store.queue("t", 0)
        self.seen = self.queue.next
        self.broker.timers.start()

    def teardown(self) -> None:
        self.clock.stop()
        self.broker.timers.stop()
        self.broker.store.close()
        self.broker.device._thread.shutdown()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def look(self) -> None:
        """Notes what has come."""
        for offset in range(self.seen, self.queue.next):
            record = self.broker.store.message(self.queue, offset)
            if record.body == b"filling":
                continue
            number = int(record.body)
            assert number not in self.recalled
            assert number not in self.came, "delivered twice"
            assert self.due[number] <= self.clock.time_s() * 1000 + 0.01, "delivered before its time"
            self.came.append(number)
        self.seen = self.queue.next

    @rule(after_ms=st.lists(st.integers(1, 60), min_size=1, max_size=12))
    def send(self, after_ms: list[int]) -> None:
        timers = self.broker.timers
        with self.broker.appender.batch() as now_ms:
            for delay_ms in after_ms:
                number, due_ms = next(self.numbers), now_ms + delay_ms
                text = waiting_text(f"UNIQ_KEY\x01u{number}", due_ms, "t", 0)
                self.broker.appender.stage(
                    timers.queue, b"%d" % number, text.encode(), due_ms, 0, 0, now_ms, HOST_SCHEDULE
                )
                self.due[number] = due_ms
        timers.schedule_stored()

    @rule(ms=st.integers(0, 40))
    def advance(self, ms: int) -> None:
        self.clock.advance(ms / 1000)
        self.look()

    @rule()
    def save(self) -> None:
        self.broker.persist()

    @rule()
    def restart(self) -> None:
        self.broker.timers.stop()
        self.broker.persist(closes=True)
        self.start_again()

    @rule()
    def kill(self) -> None:
        self.broker.timers.stop()
        self.start_again()

    def start_again(self) -> None:
        self.clock.stop()
        self.broker.store.close()
        self.broker.device._thread.shutdown()
        self.start()

    @rule(filling=st.integers(0, 10), steps=st.none() | st.integers(0, 4))
    def expire(self, filling: int, steps: int | None) -> None:
        """steps: after which it is killed."""
        with self.broker.appender.batch() as now_ms:
            for _ in range(filling):
                self.broker.appender.stage(self.queue, b"filling", b"x" * 500, 0, 0, 0, now_ms, HOST_SCHEDULE)
        self.look()
        expiring = self.broker.store.expiring(Retention(0, 4000), self.broker.timers.carrying)
        if steps is None:
            run(expiring)
        for call in itertools.islice(expiring, steps or 0):
            if call is not None:
                call()
        self.look()
        if steps is not None:
            expiring.close()
            self.kill()

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.due)))
        found = yielded(self.broker.timers.recalling("t", self.due[number], f"u{number}"))
        assert found == (number not in self.came and number not in self.recalled)
        if found:
            self.recalled.add(number)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A file that nobody needs is lost: its content is made again."""
        folder = self.folder / "timers"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if files:
            path = data.draw(st.sampled_from(files))
            content = bytearray(path.read_bytes())
            if content:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 0xFF
                path.write_bytes(bytes(content))

    @invariant()
    def nothing_is_late(self) -> None:
        if not hasattr(self, "queue"):
            return
        late = {
            number
            for number, due_ms in self.due.items()
            if due_ms < self.clock.time_s() * 1000 - 1 and number not in self.recalled
        }
        self.clock.advance(0)
        self.look()
        assert late <= set(self.came)
        waiting = len(self.due) - len(set(self.came)) - len(self.recalled)
        assert self.broker.timers.waiting >= waiting


def yielded(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


TestTimes = Times.TestCase
TestTimes.settings = settings(
    max_examples=examples(20), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
