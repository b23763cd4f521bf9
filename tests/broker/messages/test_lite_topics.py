"""Lite topics: sends to them, and the index of their messages, which agrees with the log after whatever happened to it."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BATCH_TURN_MESSAGES, LITE_EXPIRED_AT_ONCE, BrokerConfig, Limits
from rocketlet.broker.messages.lite import LiteTopic
from rocketlet.broker.messages.sending import LongBatch
from rocketlet.broker.runtime.clock import Timer
from rocketlet.broker.sessions.refusal import Reason, Refusal
from rocketlet.broker.store.files import Damaged, StoreFull
from rocketlet.broker.store.store import Retention
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import SLICE, TopicConfig, finish
from rocketlet.protocol.headers import SendMessage
from rocketlet.protocol.message import Record, decode_record, encode_batch, encode_host
from rocketlet.protocol.names import IllegalName, lite_queue
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from ...support.examples import examples

PARENT = "CHAT"
HOST = encode_host("127.0.0.1", 1)
Found = dict[str, list[tuple[int, bytes]]]  # offset and body of the messages of each lite topic


class Opened:
    """A broker on a folder, without a server.

    Attributes:
        deleted: the positions of the messages of deleted lite topics in the commit log.
    """

    def __init__(self, folder: Path, later_s: float = 0, **limits: Any) -> None:
        self.deleted: set[int] = set()
        config = BrokerConfig(data_dir=folder, address="127.0.0.1:1", segment_bytes=4000, retain_hours=1)
        self.clock = MovableClock(stands=True)
        self.clock.advance(later_s)
        self.broker = BrokerController(config, None, self.clock, limits=Limits(**limits))

    def put_parent(self, **settings: Any) -> None:
        self.broker.topics.put(TopicConfig(PARENT, 4, 4, message_type="LITE", **settings), self.broker.store.end)

    def stage(
        self, name: str, body: bytes = b"x", topic: str = PARENT, more: str = "", queue_id: int = 0, host: bytes = HOST
    ) -> None:
        text = "\x02".join(filter(None, (f"{props.LITE_TOPIC}\x01{name}" if name else "", more)))
        header = SendMessage("p", topic, "TBW102", 4, queue_id, 0, 1, 0, text)
        self.broker.sending.stage(header, body, host)

    def send(self, *names: str) -> None:
        for name in names:
            self.stage(name, b"%d" % self.broker.store.end)
        self.broker.sending.commit()

    def delete(self, name: str) -> None:
        """Delete a lite topic, as when it has expired."""
        broker = self.broker
        lite = broker.lites.of(PARENT)[name]
        records = [broker.lites.record(lite, offset) for offset in range(lite.begin, lite.next)]
        self.deleted.update(decode_record(record).physical_offset for record in records if record is not None)
        assert broker.pops.expiry.delete(lite)

    def recreate_parent(self) -> None:
        broker = self.broker
        broker.topics.delete(PARENT, broker.store.end)
        broker.lites.topic_deleted(PARENT)
        broker.pops.topic_deleted(PARENT)
        broker.store.delete_topic(PARENT)
        self.put_parent()

    def copy(self, target: Path) -> Path:
        """The folder as it is left if the process is killed now."""
        shutil.copytree(self.broker.config.data_dir, target)
        return target

    def close(self) -> None:
        self.broker.store.close()

    def by_index(self) -> Found:
        """What the index has."""
        found: Found = {}
        for name, lite in self.broker.lites.of(PARENT).items():
            records = [(offset, self.broker.lites.record(lite, offset)) for offset in range(lite.begin, lite.next)]
            found[name] = [(offset, decode_record(record).body) for offset, record in records if record is not None]
        return {name: messages for name, messages in found.items() if messages}

    def by_records(self) -> Found:
        """What the records say that are left in the log."""
        store = self.broker.store
        queues = [queue for (topic, _), queue in store.queues.items() if topic == PARENT]
        records: list[Record] = []
        for queue in queues:
            for offset in range(queue.begin, queue.next):
                with suppress(Damaged):  # the end of the log was cut off
                    record = store.message(queue, offset)
                    if record.physical_offset not in self.deleted:
                        records.append(record)
        found: Found = {}
        for record in sorted(records, key=lambda record: record.physical_offset):
            name = props.find(record.properties, props.LITE_TOPIC)
            assert name, record
            assert props.find(record.properties, props.LITE_QUEUE) == lite_queue(PARENT, name)
            offset = int(props.find(record.properties, props.LITE_OFFSET) or "")
            messages = found.setdefault(name, [])
            if messages and offset == 0:  # it was deleted, and sent to again
                messages.clear()
            messages.append((offset, record.body))
        return found


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    found = Opened(tmp_path / "data")
    found.put_parent()
    return found


def test_lite_topic_has_its_messages_in_order_with_offsets_of_its_own(opened: Opened) -> None:
    opened.send("a", "b", "a")
    opened.send("a")
    found = opened.by_index()
    assert {name: [offset for offset, _ in messages] for name, messages in found.items()} == {"a": [0, 1, 2], "b": [0]}
    assert found == opened.by_records()


def test_name_of_an_offset_is_no_topic_queue_or_file(opened: Opened, tmp_path: Path) -> None:
    opened.send("a", "b")
    opened.broker.persist()
    assert [topic.name for topic in opened.broker.topics if "LMQ" in topic.name] == []
    assert [key for key in opened.broker.store.queues if "LMQ" in key[0]] == []
    assert [path for path in tmp_path.rglob("*") if "LMQ" in path.name] == []


def test_messages_taken_back_before_they_are_stored_leave_no_gap(opened: Opened) -> None:
    opened.send("a")
    savepoint = opened.broker.sending.savepoint()
    opened.stage("a", b"taken back")
    opened.stage("new", b"taken back")
    opened.broker.sending.roll_back(savepoint)
    opened.stage("a", b"kept")
    with pytest.raises(Refusal):
        opened.stage("a", b"no", more="DELAY\x011")
    opened.stage("a", b"kept, too")
    opened.broker.sending.commit()
    found = opened.by_index()
    assert [offset for offset, _ in found["a"]] == [0, 1, 2]
    assert "new" not in found
    assert found == opened.by_records()


@pytest.mark.parametrize("is_clean", [True, False])
def test_index_is_the_same_after_a_restart(opened: Opened, tmp_path: Path, is_clean: bool) -> None:
    opened.send("a", "b", "a", "c")
    folder = opened.broker.config.data_dir
    if is_clean:
        opened.broker.persist(closes=True)
    folder = opened.copy(tmp_path / "copy")
    again = Opened(folder)
    assert again.by_index() == opened.by_index() == again.by_records()
    again.send("a", "d")
    assert [offset for offset, _ in again.by_index()["a"]] == [0, 1, 2]
    again.close()


def test_forged_properties_are_replaced(opened: Opened) -> None:
    forged = f"{props.LITE_QUEUE}\x01%LMQ%$other$x\x02{props.LITE_OFFSET}\x0177"
    opened.stage("a", more=forged)
    opened.broker.sending.commit()
    assert [offset for offset, _ in opened.by_records()["a"]] == [0]
    assert opened.by_index() == opened.by_records()


def test_properties_of_another_topic_are_no_index_when_it_becomes_a_parent(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "data")
    opened.broker.topics.put(TopicConfig("plain", 1, 1), 0)
    forged = f"{props.LITE_QUEUE}\x01%LMQ%$plain$x\x02{props.LITE_OFFSET}\x01999999999999"
    opened.stage("", topic="plain", more=forged)
    opened.broker.sending.commit()
    opened.broker.topics.put(TopicConfig("plain", 1, 1, message_type="LITE"), opened.broker.store.end)
    assert opened.broker.lites.of("plain") == {}


def forge(opened: Opened, count: int, topic: str = "plain", step: int = 10**15) -> None:
    """Store messages with the properties of lite topics, as a batch of an earlier release left them."""
    broker = opened.broker
    with broker.appender.batch():
        for number in range(count):
            pairs = {
                props.LITE_TOPIC: f"forged{number % 2}",
                props.LITE_QUEUE: lite_queue(topic, f"forged{number % 2}"),
                props.LITE_OFFSET: str(number * step),
            }
            queue = broker.store.queue(topic, 0)
            broker.appender.stage(queue, b"x", props.encode(pairs).encode(), 0, 0, 0, 1, HOST, 0)


def test_records_from_before_a_topic_was_made_lite_are_not_indexed_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(tmp_path / "data")
    opened.broker.topics.put(TopicConfig(PARENT, 1, 1), 0)
    forge(opened, 200, PARENT, 50_000)
    read: list[Any] = []
    monkeypatch.setattr(opened.broker.store, "fetch", lambda *of, **_: read.append(of))
    opened.put_parent()
    opened.send("a")
    monkeypatch.undo()
    assert (list(opened.broker.lites.of(PARENT)), opened.broker.lites.count, read) == (["a"], 1, [])
    again = Opened(opened.copy(tmp_path / "killed"))
    assert again.by_index() == opened.by_index() == {"a": opened.by_index()["a"]}
    assert again.broker.lites.count == 1
    again.close()


def test_messages_stay_indexed_when_a_parent_is_lite_with_an_interruption(opened: Opened, tmp_path: Path) -> None:
    opened.send("a", "b")
    opened.broker.topics.put(TopicConfig(PARENT, 4, 4), opened.broker.store.end)
    opened.stage("", b"plain")
    opened.broker.sending.commit()
    again = Opened(opened.copy(tmp_path / "killed"))
    for one in (opened, again):
        one.put_parent()
        one.send("a")
        assert [offset for offset, _ in one.by_index()["a"]] == [0, 1]
        assert sorted(one.by_index()) == ["a", "b"]
    again.close()


def test_parent_whose_settings_were_lost_gets_its_messages_back_when_it_is_lite_again(
    opened: Opened, tmp_path: Path
) -> None:
    opened.send("a", "a", "b")
    before = opened.by_index()
    folder = opened.copy(tmp_path / "copy")
    for path in folder.glob("topics.*"):
        path.unlink()
    again = Opened(folder)
    assert again.by_index() == {}, "it is a plain topic now"
    again.put_parent()
    again.close()
    assert Opened(folder).by_index() == before


def test_lite_messages_that_replace_lost_ones_from_before_the_topic_was_lite_are_found(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "data")
    opened.broker.topics.put(TopicConfig(PARENT, 1, 1), 0)
    opened.stage("", b"first")
    opened.broker.sending.commit()
    end = opened.broker.store.end
    opened.stage("", b"lost")
    opened.broker.sending.commit()
    opened.put_parent()
    folder = opened.copy(tmp_path / "copy")
    with open(max((folder / "commitlog").iterdir()), "r+b") as file:
        file.truncate(end)
    cut = Opened(folder)
    cut.send("a")
    again = Opened(cut.copy(tmp_path / "killed"))
    assert [offset for offset, _ in again.by_index()["a"]] == [0]
    again.close()
    cut.close()


@pytest.mark.parametrize("name", ["%RETRY%g", "%DLQ%g"])
def test_topic_of_a_group_cannot_be_a_parent(opened: Opened, name: str) -> None:
    with pytest.raises(IllegalName, match="of a group"):
        opened.broker.topics.put(TopicConfig(name, 1, 1, message_type="LITE"), opened.broker.store.end)


LITE_TEXT = f"{props.LITE_TOPIC}\x01a"


@pytest.mark.parametrize("count", [1, BATCH_TURN_MESSAGES + 1])
@pytest.mark.parametrize(
    ("body", "text", "shared", "is_refused"),
    [
        (b"x", LITE_TEXT, "", True),
        (b"x", f"k\x01v\x02{LITE_TEXT}", "", True),
        (b"x", "", LITE_TEXT, True),
        (LITE_TEXT.encode(), f"x{LITE_TEXT}", "", False),
        (b"x", f"{props.LITE_TOPIC}\x01\x02{props.LITE_OFFSET}\x017", "", False),
    ],
    ids=["own", "own, second", "shared", "other names and a body", "without a value"],
)
def test_batch_has_no_messages_of_lite_topics(
    opened: Opened, count: int, body: bytes, text: str, shared: str, is_refused: bool
) -> None:
    opened.broker.topics.put(TopicConfig("plain", 1, 1), 0)
    data = encode_batch([(0, b"x", "")] * (count - 1) + [(0, body, text)])
    header = SendMessage("p", "plain", "TBW102", 4, 0, 0, 1, 0, shared, batch=True)

    def store() -> None:
        try:
            opened.broker.sending.stage(header, data, HOST)
        except LongBatch:
            finish(opened.broker.sending.storing_batch(header, data, HOST))
        opened.broker.sending.commit()

    if is_refused:
        with pytest.raises(Refusal, match="a batch cannot have messages of lite topics") as refused:
            store()
        assert refused.value.reason is Reason.ILLEGAL_MESSAGE
    else:
        store()
    queue = opened.broker.store.queues.get(("plain", 0))
    assert (queue.next if queue is not None else 0) == (0 if is_refused else count)


def test_lost_messages_take_no_memory(opened: Opened) -> None:
    opened.send("a")
    lite = opened.broker.lites.of(PARENT)["a"]
    opened.put_parent()
    tracemalloc.start()
    try:
        for number in range(1, 200):
            lite.lose_until(number * 10**9)
            lite.append(0)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 100_000
    assert (lite.next, lite.readable_from(5), lite.readable_from(10**9 + 1)) == (199 * 10**9 + 1, 10**9, 2 * 10**9)


class _Retained:
    """The part of a queue that a lite topic reads: the first offset that retention has left."""

    topic = PARENT
    begin = 0


class GappedLiteTopic(RuleBasedStateMachine):
    """A lite topic with lost messages, against a plain dict of offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = _Retained()
        self.lite = LiteTopic("a", self.queue, "")  # type: ignore[arg-type]
        self.left: dict[int, int] = {}
        self.end = self.parent_end = 0

    @rule(lost=st.sampled_from([0, 0, 0, 1, 3, 10**12]), count=st.integers(1, 12), step=st.integers(1, 3))
    def append(self, lost: int, count: int, step: int) -> None:
        self.lite.lose_until(self.end + lost)
        self.end += lost
        for _ in range(count):
            self.lite.append(self.parent_end)
            self.left[self.end] = self.parent_end
            self.end += 1
            self.parent_end += step

    @rule(part=st.floats(0, 1))
    def expire(self, part: float) -> None:
        self.queue.begin = max(self.queue.begin, int(self.parent_end * part))
        self.left = {offset: parent for offset, parent in self.left.items() if parent >= self.queue.begin}

    @invariant()
    def agrees(self) -> None:
        lite, offsets = self.lite, list(self.left)
        assert lite.next == self.end
        assert {offset: lite.parent_offset(offset) for offset in offsets} == self.left
        assert lite.first_parent_offset == (self.left[offsets[0]] if offsets else None)
        assert lite.last_parent_offset == (self.left.get(self.end - 1))
        around = {offset + step for offset in offsets for step in (-1, 1)} | {0, self.end - 1, self.end}
        for offset in sorted(around):
            assert lite.parent_offset(offset) == self.left.get(offset)
            if offset >= 0:
                following = next((known for known in offsets if known >= offset), max(offset, self.end))
                assert lite.readable_from(offset) == following


TestGappedLiteTopic = GappedLiteTopic.TestCase
TestGappedLiteTopic.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("name", "topic", "more", "text"),
    [
        ("", PARENT, "", "accepts LITE messages only"),
        ("a", "plain", "", "has no lite topics"),
        ("a b", PARENT, "", "lite topic: got 'a b'"),
        ("x" * 65, PARENT, "", "expected 1 to 64"),
        ("a", PARENT, "DELAY\x013", "DELAY"),
        ("a", PARENT, "TIMER_DELAY_MS\x0199", "TIMER_DELAY_MS"),
        ("a", PARENT, "_SYS_MSG_PRIORITY_\x011", "PRIORITY"),
        ("a", PARENT, "TRAN_MSG\x01true\x02PGROUP\x01p", "transactional"),
    ],
)
def test_message_that_contradicts_lite_topics_is_refused(
    opened: Opened, name: str, topic: str, more: str, text: str
) -> None:
    opened.broker.topics.put(TopicConfig("plain", 4, 4), 0)
    with pytest.raises(Refusal, match=text) as refused:
        opened.stage(name, topic=topic, more=more)
    assert refused.value.reason is Reason.ILLEGAL_MESSAGE
    opened.broker.sending.commit()
    assert opened.by_records() == {}


def test_batch_is_refused_in_a_parent_topic(opened: Opened) -> None:
    header = SendMessage("p", PARENT, "TBW102", 4, 0, 0, 1, 0, f"{props.LITE_TOPIC}\x01a", batch=True)
    with pytest.raises(Refusal, match="LITE"):
        opened.broker.sending.stage(header, b"\0" * 20, HOST)


def test_broker_takes_as_many_lite_topics_as_its_limit(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "data", max_lite_topics=3)
    opened.put_parent()
    opened.send("a", "b")
    opened.stage("c")
    with pytest.raises(Refusal, match="3 lite topics") as refused:
        opened.stage("d")
    assert refused.value.reason is Reason.TOO_MANY_LITE_TOPICS
    opened.stage("a")
    opened.broker.sending.commit()
    assert sorted(opened.by_index()) == ["a", "b", "c"]


def test_address_creates_half_of_the_lite_topics_also_over_a_restart(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "data", max_lite_topics=8)
    opened.put_parent()
    opened.broker.topics.put(TopicConfig("OTHER", 1, 1, message_type="LITE"), opened.broker.store.end)
    first, second = encode_host("10.0.0.1", 1), encode_host("10.0.0.2", 1)

    def create(name: str, host: bytes, parent: str = PARENT) -> None:
        opened.stage(name, host=host, topic=parent)
        opened.broker.sending.commit()

    for name in ("a", "b", "c"):
        create(name, first)
    create("d", first, "OTHER")
    folder = opened.copy(tmp_path / "killed")
    opened.close()
    opened = Opened(folder, max_lite_topics=8)
    opened.deleted.clear()
    for parent in (PARENT, "OTHER"):
        with pytest.raises(Refusal, match="half of them of one address") as refused:
            create("e", first, parent)
        assert refused.value.reason is Reason.TOO_MANY_LITE_TOPICS
    create("a", first)
    create("e", second)
    create("f", HOST)
    opened.delete("a")
    create("g", first)
    with pytest.raises(Refusal, match="half of them"):
        create("h", first)
    opened.broker.lites.topic_deleted("OTHER")
    create("h", first)
    assert opened.broker.lites.count == 6
    opened.close()


def test_lite_topic_stays_in_its_queue_when_the_parent_gets_more(opened: Opened) -> None:
    opened.send("a", "a")
    before = opened.broker.lites.of(PARENT)["a"].queue
    opened.broker.topics.put(TopicConfig(PARENT, 16, 16, message_type="LITE"), opened.broker.store.end)
    opened.send("a")
    assert opened.broker.lites.of(PARENT)["a"].queue is before
    assert opened.by_index() == opened.by_records()


def test_lite_topics_stay_when_the_parent_gets_fewer_queues_and_the_broker_restarts(
    opened: Opened, tmp_path: Path
) -> None:
    names = [f"s{number}" for number in range(40)]
    opened.send(*names)
    opened.delete(names[-1])
    opened.delete(names[-2])
    expected = opened.by_index()
    for number, queues in enumerate((2, 1, 4)):
        opened.broker.topics.put(TopicConfig(PARENT, queues, queues, message_type="LITE"), opened.broker.store.end)
        opened.broker.lite_offsets.put("g", PARENT, names[0], 1)
        opened.broker.persist()
        folder = opened.copy(tmp_path / str(number))
        opened.close()
        opened = Opened(folder)
        assert opened.by_index() == expected
    opened.close()


def test_lite_topic_keeps_no_names_of_deleted_groups_however_many_there_were(opened: Opened) -> None:
    opened.send("a")
    lite, offsets = opened.broker.lites.of(PARENT)["a"], opened.broker.lite_offsets
    for number in range(100):
        offsets.put(f"stays{number}", PARENT, "a", 1)
    for number in range(1000):
        offsets.put(f"gone{number}", PARENT, "a", 1)
        offsets.group_deleted(f"gone{number}")
    assert (offsets.count, len(lite.groups) < 300) == (100, True)
    offsets.delete(lite)
    assert (offsets.count, any(offsets.all.values())) == (0, False)


def test_deleted_parent_takes_its_lite_topics_along(opened: Opened) -> None:
    opened.send("a", "b")
    opened.broker.topics.delete(PARENT, opened.broker.store.end)
    opened.broker.store.delete_topic(PARENT)
    opened.broker.lites.topic_deleted(PARENT)
    assert opened.broker.lites.count == 0
    opened.put_parent()
    opened.send("a")
    assert [offset for offset, _ in opened.by_index()["a"]] == [0]


@pytest.mark.parametrize("has_deleted", [True, False])
def test_parent_that_is_recreated_while_lite_topics_are_saved_gets_nothing_of_the_former(
    opened: Opened, tmp_path: Path, has_deleted: bool
) -> None:
    names = [f"s{number}" for number in range(SLICE + 1)]
    opened.send(*names, *names)
    for name in names:
        opened.broker.lite_offsets.put("g", PARENT, name, 1)
    if has_deleted:
        opened.delete(names[0])
    for number, step in enumerate(opened.broker.lite_offsets.saving(False)):
        if number == 0:
            opened.recreate_parent()
        if step is not None:
            step()
    opened.deleted.clear()
    opened.send(*names, names[1])
    expected = opened.by_index()
    folder = opened.copy(tmp_path / "killed")
    opened.close()
    again = Opened(folder)
    assert again.by_index() == expected
    assert not again.broker.lite_offsets.of("g", PARENT)
    again.close()


async def test_lite_topic_that_is_recreated_while_retention_deletes_others_keeps_its_offsets(opened: Opened) -> None:
    broker = opened.broker
    names = [f"s{number}" for number in range(SLICE + 1)]
    for name in (*names, *("left" for _ in range(40))):
        opened.send(name)
    broker.lite_offsets.put("g", PARENT, names[-1], 1)
    opened.clock.advance(2 * 3600)
    retention = Retention.of(broker.config, opened.clock.time_s(), broker.timers.waiting_bytes)
    assert await broker.device.do(broker.store.expiring(retention, broker.timers.carrying))
    work = broker.pops.expiry.retained()
    for _ in work:
        if names[0] not in broker.lites.of(PARENT):
            break
    assert list(broker.lites.of(PARENT)) == [names[-1], "left"]
    broker.pops.expiry.delete(broker.lites.of(PARENT)[names[-1]])
    opened.send(names[-1])
    broker.lite_offsets.put("g", PARENT, names[-1], 1)
    for _ in work:
        pass
    assert broker.lite_offsets.of("g", PARENT) == {names[-1]: 1}
    assert list(broker.lites.of(PARENT)) == ["left", names[-1]]


async def test_lite_topics_of_many_parents_expire_some_at_a_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, expiry = opened.broker, opened.broker.pops.expiry
    parents = ["P1", "P2", "P3"]
    for parent in parents:
        broker.topics.put(TopicConfig(parent, 1, 1, message_type="LITE", lite_expiration_min=1), broker.store.end)
        for number in range(LITE_EXPIRED_AT_ONCE):
            opened.stage(f"s{number}", topic=parent)
    broker.sending.commit()
    expired: list[int] = []
    call_later = opened.clock.call_later

    def noted(*arguments: Any) -> Timer:
        expired.append(expiry.expired)
        return call_later(*arguments)

    monkeypatch.setattr(opened.clock, "call_later", noted)
    expiry.start()
    opened.clock.advance(3600)
    expired.append(expiry.expired)
    assert expiry.expired == len(parents) * LITE_EXPIRED_AT_ONCE
    assert max(later - before for before, later in pairwise(expired)) <= LITE_EXPIRED_AT_ONCE


@pytest.mark.parametrize("is_saved", [True, False])
def test_deleted_lite_topic_does_not_return_when_the_broker_is_killed(
    opened: Opened, tmp_path: Path, is_saved: bool
) -> None:
    opened.send("kept", "a", "a", "b", "kept")
    opened.delete("a")
    opened.delete("b")
    if is_saved:
        opened.broker.persist()
    opened.send("b")
    folder = opened.copy(tmp_path / "copy")
    opened.close()
    again = Opened(folder)
    found = again.by_index()
    assert {name: [offset for offset, _ in messages] for name, messages in found.items()} == {"kept": [0, 1], "b": [0]}
    again.deleted = opened.deleted
    assert found == again.by_records()
    again.close()


def test_messages_that_replace_lost_ones_of_a_deleted_lite_topic_are_found(opened: Opened, tmp_path: Path) -> None:
    opened.send("a")
    end = opened.broker.store.end
    opened.send("a", "a", "a")
    opened.delete("a")
    folder = opened.copy(tmp_path / "copy")
    opened.close()
    last = max((folder / "commitlog").iterdir())
    with open(last, "r+b") as file:
        file.truncate(end)
    cut = Opened(folder)
    assert cut.broker.store.end == end
    cut.send("a", "a", "a")
    expected = cut.by_index()
    assert [offset for offset, _ in expected["a"]] == [0, 1, 2]
    killed = cut.copy(tmp_path / "killed")
    cut.close()
    again = Opened(killed)
    assert again.by_index() == expected
    again.close()


def test_lite_topic_is_kept_when_the_disk_refuses_its_deletion(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.send("a", "b")

    def refuse(value: Any) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(opened.broker.lites.file.journal, "append", refuse)
        for lite in list(opened.broker.lites.of(PARENT).values()):
            assert not opened.broker.pops.expiry.delete(lite)
    assert list(opened.by_index()) == ["a", "b"]
    assert [line["lite_topic"] for line in logs if line["event"] == "lite_topic_not_deleted"] == ["a"]
    opened.delete("a")
    assert list(opened.by_index()) == ["b"]


async def test_deletion_of_an_emptied_lite_topic_that_the_disk_refused_is_retried(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", *("left" for _ in range(60))):
        opened.send(name)
    opened.broker.lite_offsets.put("g", PARENT, "a", 1)
    opened.clock.advance(2 * 3600)

    def refuse(value: Any) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(opened.broker.lites.file.journal, "append", refuse)
        await opened.broker.expire_segments()
        await opened.broker.turns.done()
        assert list(opened.broker.lites.of(PARENT)) == ["a", "left"]
        opened.broker.pops.expire_clients()
        assert list(opened.broker.lites.of(PARENT)) == ["a", "left"]
    opened.broker.pops.expire_clients()
    assert list(opened.broker.lites.of(PARENT)) == ["left"]
    assert not opened.broker.lite_offsets.of("g", PARENT)


@pytest.mark.parametrize("seed", range(6))
async def test_index_agrees_with_the_log_whatever_happened(tmp_path: Path, seed: int) -> None:
    """Random sends, deletions, retention, clean stops, kills and torn tails."""
    choose = random.Random(seed)
    opened = Opened(tmp_path / "0")
    opened.put_parent()
    opened.send("s0")
    for step in range(1, 40):
        event = choose.choice(
            ("send", "send", "send", "undo", "delete", "delete", "save", "retain", "stop", "kill", "tear")
        )
        if event == "send":
            opened.send(*(f"s{choose.randrange(12)}" for _ in range(choose.randrange(1, 40))))
        elif event == "undo":
            savepoint = opened.broker.sending.savepoint()
            opened.stage("s1")
            opened.broker.sending.roll_back(savepoint)
        elif event == "delete" and (lites := list(opened.broker.lites.of(PARENT).values())):
            name = choose.choice(lites).name
            opened.delete(name)
            if choose.random() < 0.5:
                opened.send(name)
        elif event == "save":
            opened.broker.persist()
        elif event == "retain":
            opened.clock.advance(2 * 3600)
            await opened.broker.expire_segments()
        elif event in ("stop", "kill", "tear"):
            if event == "stop":
                opened.broker.persist(closes=True)
            before, folder = opened.by_index(), opened.copy(tmp_path / str(step))
            if event == "tear":
                last = max((folder / "commitlog").iterdir())
                with open(last, "r+b") as file:
                    file.truncate(max(last.stat().st_size - choose.randrange(1, 400), 0))
            opened.close()
            deleted = opened.deleted
            opened = Opened(folder)
            opened.deleted = {position for position in deleted if position < opened.broker.store.end}
            if event != "tear":
                assert opened.by_index() == before
        assert opened.by_index() == opened.by_records()
    opened.close()


def test_entries_of_a_long_lite_topic_are_those_of_a_short_one(opened: Opened) -> None:
    opened.send(*("a" for _ in range(100)), "b")
    assert [offset for offset, _ in opened.by_index()["a"]] == list(range(100))
    assert opened.by_index() == opened.by_records()


def test_oldest_age_of_a_group_remains_when_it_finishes_the_oldest_message_during_the_count(opened: Opened) -> None:
    opened.broker.topics.put(TopicConfig(PARENT, 1, 1, message_type="LITE"), opened.broker.store.end)
    opened.broker.pops.lite.bind("g", PARENT)
    pool = opened.broker.pops.pools.lite_pool("g", PARENT)
    names = [f"s{number}" for number in range(SLICE + 1)]
    opened.send(*names)
    for name in names:
        pool.queues.set_offset(name, 0)
    work = opened.broker.progress.lag("g", PARENT)
    next(work)
    pool.queues.set_offset(names[0], 1)
    lag = finish(work)
    assert lag.messages == len(names)
    assert lag.since_ms
