"""Messages that are sent to a time: when they come, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import MAX_TIMER_DELAY_MS
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.store import disk
from rocketlet.broker.store.files import StoreFull
from rocketlet.protocol import names
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.message import HandleError, RecallHandle, Record, decode_handle, decode_records, encode_batch
from rocketlet.protocol.names import TIMER_TOPIC
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from campaigns.store import open_broker, put

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.clocks import WallClock
from ...support.requests import COMMIT, HALF_PROPERTIES, ROLLBACK, SUBSCRIBED, SUSPEND, bodies_of, end, half, pull, send

DAY_MS = 86_400_000


@pytest.fixture
async def standing(nodes: Nodes) -> Node:
    """A broker whose clock moves by `advance` only, with a topic."""
    return await nodes.start(clock=MovableClock(stands=True))


@pytest.fixture
async def line(standing: Node, connect: Connect) -> Wire:
    wire = await connect(standing.address)
    await create_topic(wire, "t", 2)
    return wire


def timed(key: str = "u1", /, **fields: Any) -> str:
    return props.encode({"UNIQ_KEY": key, **{f"TIMER_{name}": str(value) for name, value in fields.items()}})


async def records(wire: Wire, queue: int = 0, topic: str = "t") -> list[Record]:
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic, queue=queue))
    return list(decode_records(answer.body)) if answer.code == 0 else []


async def recall(wire: Wire, handle: str, topic: str = "t") -> Frame:
    return await wire.call(RequestCode.RECALL_MESSAGE, {"topic": topic, "recallHandle": handle})


@pytest.mark.parametrize("name", ["DELAY_SEC", "DELAY_MS", "DELIVER_MS"])
async def test_a_message_comes_at_its_ms_and_not_before(standing: Node, line: Wire, name: str) -> None:
    now_ms = standing.clock.time_ms()
    value = {"DELAY_SEC": 2, "DELAY_MS": 2000, "DELIVER_MS": now_ms + 2000}[name]
    answer = await send(line, b"later", queue=1, properties=timed(**{name: value}))
    assert (answer.code, answer.ext["queueId"]) == (0, "1")
    standing.clock.advance(1.998)
    assert await records(line, 1) == []
    standing.clock.advance(0.003)
    [record] = await records(line, 1)
    assert record.body == b"later"
    assert record.store_ms in (now_ms + 2000, now_ms + 2001)
    assert props.find(record.properties, "TIMER_OUT_MS") == str(now_ms + 2000)


async def test_messages_come_in_the_order_of_their_times_whatever_order_they_were_sent_in(
    standing: Node, line: Wire
) -> None:
    for after_ms in (500, 10, 3000, 10, 700):
        await send(line, b"%d" % after_ms, properties=timed(DELAY_MS=after_ms))
    standing.clock.advance(0.6)
    assert await bodies_of(line) == [b"10", b"10", b"500"]
    standing.clock.advance(10)
    assert await bodies_of(line) == [b"10", b"10", b"500", b"700", b"3000"]


async def test_a_message_that_comes_wakes_who_waits_for_it(standing: Node, line: Wire, connect: Connect) -> None:
    waiting = await connect(standing.address)
    held = waiting.send(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, suspend_timeout_millis=60_000))
    await send(line, b"late", properties=timed(DELAY_MS=5000))
    standing.clock.advance(5.001)
    assert [record.body for record in decode_records((await waiting.answer(held)).body)] == [b"late"]


async def test_a_time_in_the_past_delivers_immediately_and_a_level_counts_before_a_time(
    standing: Node, line: Wire
) -> None:
    for value in (standing.clock.time_ms(), 5, -1):
        await send(line, b"past", properties=timed(DELIVER_MS=value))
    assert await bodies_of(line) == [b"past"] * 3
    text = timed(DELAY_MS=3_600_000) + "\x02DELAY\x011"
    assert "recallHandle" not in (await send(line, b"level", queue=1, properties=text)).ext
    standing.clock.advance(1.1)
    [record] = await records(line, 1)
    assert props.find(record.properties, "TIMER_DELAY_MS") is None


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"DELAY_MS": MAX_TIMER_DELAY_MS + 1}, "max delay 3456000000ms"),
        ({"DELAY_SEC": MAX_TIMER_DELAY_MS}, "days ahead"),
        ({"DELIVER_MS": "soon"}, "TIMER_DELIVER_MS is 'soon'"),
        ({"DELAY_SEC": "1_0"}, "not a number"),
        ({"DELAY_MS": "9" * 20}, "not a number"),
        ({"DEL_UNIQKEY": "t_u1", "DELAY_MS": 5}, "RECALL_MESSAGE"),
    ],
)
async def test_what_cannot_be_a_time_is_refused(line: Wire, fields: dict[str, Any], hint: str) -> None:
    answer = await send(line, properties=timed(**fields))
    assert (answer.code, hint in (answer.remark or "")) == (ResponseCode.MESSAGE_ILLEGAL, True), answer.remark


async def test_the_farthest_time_is_taken(standing: Node, line: Wire) -> None:
    assert (await send(line, b"far", properties=timed(DELAY_MS=MAX_TIMER_DELAY_MS))).code == 0
    assert standing.broker.timers.waiting == 1


async def test_transactions_and_batches_have_no_time(standing: Node, line: Wire) -> None:
    half = f"{HALF_PROPERTIES}\x02TIMER_DELAY_MS\x015"
    answer = await send(line, properties=half, sys_flag=4)
    assert (answer.code, "transactional" in (answer.remark or "")) == (ResponseCode.MESSAGE_ILLEGAL, True)
    batch = encode_batch([(0, b"a", timed(DELAY_MS=5000))])
    answer = await send(line, batch, batch=True, properties=timed(DELAY_MS=5000))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    # As Apache's: the properties of one message in a batch are not read.
    assert (await send(line, batch, batch=True)).code == 0
    assert await bodies_of(line) == [b"a"]


async def test_the_system_topic_cannot_be_sent_to(line: Wire) -> None:
    answer = await send(line, topic=TIMER_TOPIC, properties=timed(OUT_MS=5))
    assert answer.code == ResponseCode.NO_PERMISSION


async def test_what_waits_is_kept_over_a_restart_and_comes_once(nodes: Nodes, connect: Connect) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t", 2)
    for after_s in (1, 3, 5):
        await send(wire, b"%d" % after_s, properties=timed(DELAY_SEC=after_s))
    clock.advance(1.5)
    await node.stop()
    clock.advance(2)
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    wire = await connect(node.address)
    assert node.broker.timers.waiting == 2
    clock.advance(0.001)
    assert await bodies_of(wire) == [b"1", b"3"]
    clock.advance(60)
    assert await bodies_of(wire) == [b"1", b"3", b"5"]
    await node.stop()
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    clock.advance(60)
    assert await bodies_of(await connect(node.address)) == [b"1", b"3", b"5"]
    assert node.broker.timers.waiting == 0


async def test_a_clock_that_is_set_back_loses_nothing(nodes: Nodes, connect: Connect) -> None:
    clock = WallClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await send(wire, b"first", properties=timed(DELAY_SEC=100))
    clock.advance(101)
    clock.set_s -= 95  # as a machine's that was ahead
    await send(wire, b"second", properties=timed(DELAY_SEC=60))
    await node.stop()
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    wire = await connect(node.address)
    assert await bodies_of(wire) == [b"first"]
    clock.advance(61)
    assert await bodies_of(wire) == [b"first", b"second"]
    await node.stop()
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    clock.advance(9999)
    assert await bodies_of(await connect(node.address)) == [b"first", b"second"]


async def test_a_full_disk_delays_delivery_and_loses_nothing(
    standing: Node, line: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await send(line, b"%d" % number, properties=timed(DELAY_MS=100 + number))
    with monkeypatch.context() as patch:

        def refused(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr("rocketlet.broker.store.disk.write", refused)
        standing.clock.advance(1)
        assert await bodies_of(line) == []
    standing.clock.advance(1.5)
    assert await bodies_of(line) == [b"0", b"1", b"2"]
    standing.clock.advance(60)
    assert await bodies_of(line) == [b"0", b"1", b"2"]


async def test_retention_drops_the_log_and_keeps_what_waits(nodes: Nodes, connect: Connect) -> None:
    clock = MovableClock(stands=True)
    settings: dict[str, Any] = {"clock": clock, "retain_hours": 0.0, "segment_bytes": 10_000}
    node = await nodes.start(**settings)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    clock.advance(100)  # all files are older than what is retained
    for number in range(5):
        await send(wire, b"late-%d" % number, properties=timed(f"u{number}", DELAY_SEC=10 * DAY_MS // 1000 + number))
    for _ in range(5):
        for _ in range(20):
            await send(wire, b"x" * 1000)
        await node.broker.expire_segments()
    assert node.broker.store.begin > 50_000
    assert node.broker.timers.waiting == 5
    assert node.broker.timers.queue.begin >= 5
    await node.stop()
    clock.advance(10 * DAY_MS / 1000)
    node = await nodes.start(data_dir=node.config.data_dir, **settings)
    clock.advance(0.5)
    assert node.broker.timers.waiting == 4
    clock.advance(10)
    wire = await connect(node.address)
    begin = node.broker.store.queues["t", 0].begin
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=begin))
    late = [record.body for record in decode_records(answer.body) if record.body.startswith(b"late")]
    assert late == [b"late-%d" % number for number in range(5)]


@pytest.mark.limits(run_keys=32, runs_to_merge=2)
async def test_many_messages_are_sorted_on_disk_and_come_in_order(
    nodes: Nodes, connect: Connect, tmp_path: Path
) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock)
    wire = await connect(node.address)
    await create_topic(wire, "t")
    times = [(number * 7919) % 1000 + 1 for number in range(400)]
    for number, after_ms in enumerate(times):
        await send(wire, b"%d" % number, properties=timed(DELAY_MS=1000 * after_ms))
        if number % 50 == 0:
            node.broker.persist()
    folder = tmp_path / "broker-a" / "timers"
    assert 0 < len(list(folder.iterdir())) < 10
    clock.advance(500)
    await node.stop()
    damaged = sorted(folder.iterdir())[0]
    data = bytearray(damaged.read_bytes())
    data[5] ^= 1
    damaged.write_bytes(bytes(data))
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    clock.advance(501)
    wire = await connect(node.address)
    found: list[int] = []
    while len(found) < 400:
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=len(found)))
        assert answer.code == 0
        found += [int(record.body) for record in decode_records(answer.body)]
    assert found == sorted(range(400), key=lambda number: (times[number], number))
    assert node.broker.timers.waiting == 0


async def test_a_message_is_recalled_before_its_time_once(standing: Node, line: Wire) -> None:
    handles: list[str] = []
    for number in range(3):
        answer = await send(line, b"%d" % number, properties=timed(f"u{number}", DELAY_MS=5000))
        handles.append(str(answer.ext["recallHandle"]))
    answer = await recall(line, handles[1])
    assert (answer.code, answer.ext["msgId"]) == (0, "u1")
    assert (await recall(line, handles[1])).code == ResponseCode.NO_MESSAGE
    standing.clock.advance(5.001)
    assert await bodies_of(line) == [b"0", b"2"]
    assert (await recall(line, handles[0])).code == ResponseCode.NO_MESSAGE


async def test_a_recall_is_kept_over_a_restart(nodes: Nodes, connect: Connect) -> None:
    clock = MovableClock(stands=True)
    node = await nodes.start(clock=clock, flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    handle = str((await send(wire, properties=timed(DELAY_MS=5000))).ext["recallHandle"])
    await send(wire, b"stays", properties=timed("u2", DELAY_MS=5000))
    assert (await recall(wire, handle)).code == 0
    await node.stop()
    node = await nodes.start(clock=clock, data_dir=node.config.data_dir)
    wire = await connect(node.address)
    assert (await recall(wire, handle)).code == ResponseCode.NO_MESSAGE
    clock.advance(5.001)
    assert await bodies_of(wire) == [b"stays"]


async def test_a_handle_that_is_none_is_refused(standing: Node, line: Wire) -> None:
    handle = RecallHandle("t", "broker-a", standing.clock.time_ms() + 5, "u1")
    cases = {
        "junk": "recall handle is invalid",
        handle._replace(topic="u").encoded(): "topic not match",
        handle._replace(broker_name="b").encoded(): "broker service not available",
    }
    for text, hint in cases.items():
        answer = await recall(line, text)
        assert (answer.code, hint in (answer.remark or "")) == (ResponseCode.ILLEGAL_OPERATION, True), answer.remark
    assert (await recall(line, handle.encoded())).code == ResponseCode.NO_MESSAGE
    assert (await recall(line, handle.encoded(), "nowhere")).code == ResponseCode.TOPIC_NOT_EXIST


async def test_only_what_waits_for_a_time_and_has_a_key_gets_a_handle(line: Wire) -> None:
    answer = await send(line, properties=timed(DELAY_MS=5000))
    assert decode_handle(str(answer.ext["recallHandle"]))[:2] == ("t", "broker-a")
    for text in (timed(DELAY_MS=0), "UNIQ_KEY\x01u", "TIMER_DELAY_MS\x015000"):
        assert "recallHandle" not in (await send(line, properties=text)).ext


@given(
    st.from_regex(r"[%|a-zA-Z0-9_-]{1,127}", fullmatch=True),
    st.integers(0, 10**15),
    st.text(st.characters(exclude_characters=" ", exclude_categories=["Cs"]), min_size=1, max_size=40),
)
def test_a_handle_comes_back_as_it_was(topic: str, due_ms: int, key: str) -> None:
    handle = RecallHandle(topic, "broker-a", due_ms, key)
    assert decode_handle(handle.encoded()) == handle


@given(st.text())
def test_any_other_text_is_no_handle(text: str) -> None:
    with pytest.raises(HandleError):
        decode_handle(text)


@pytest.mark.limits(max_recalled=1, max_recall_looks=2)
async def test_recalls_are_limited(standing: Node, line: Wire) -> None:
    answers = [await send(line, properties=timed(f"u{number}", DELAY_MS=5000)) for number in range(3)]
    handles = [str(answer.ext["recallHandle"]) for answer in answers]
    assert (await recall(line, handles[0])).code == 0
    answer = await recall(line, handles[1])
    assert (answer.code, "1 messages were recalled" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    answer = await recall(line, handles[2])  # behind as many of the same ms as are read
    assert (answer.code, "more than 2 messages" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


# Delayed and half messages whose topic is another one by the time they are due: deleted, or recreated with fewer
# queues.


QUEUE = 3


async def wait(node: Node, wire: Wire, kind: str) -> Any:
    """Stores a message that waits to come to queue 3 of t."""
    if kind == "half":
        return await half(wire, queue=QUEUE)
    return await send(wire, b"pay", queue=QUEUE, properties="DELAY\x011")


async def come(node: Node, wire: Wire, kind: str, sent: Any) -> None:
    if kind == "half":
        await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
        assert node.broker.transactions.waiting == 0
    else:
        node.clock.advance(1.0)
        await eventually(lambda: node.broker.delays.progress.get(1) == 1)


@pytest.mark.parametrize("kind", ["half", "delayed"])
async def test_a_message_of_a_deleted_topic_does_not_bring_it_back(node: Node, wire: Wire, kind: str) -> None:
    await create_topic(wire, "t")
    sent = await wait(node, wire, kind)
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    with capture_logs() as logs:
        await come(node, wire, kind, sent)
    assert node.broker.topics.get("t") is None
    assert [queue for topic, queue in node.broker.store.queues if topic == "t"] == []
    events = {entry["event"]: entry["hint"] for entry in logs if "hint" in entry}
    event = {"half": "transaction_set_aside", "delayed": "delayed_message_dropped"}[kind]
    assert events[event] == "its topic was deleted"
    if kind == "half":
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(names.CHECK_MAX_TIME_TOPIC))
        assert [record.body for record in decode_records(answer.body)] == [b"pay"]
    else:
        assert node.broker.delays.set_aside == 1


async def test_who_commits_for_a_deleted_topic_gets_an_error_and_may_roll_back(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    one, two = await half(wire), await half(wire)
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    refused = await wire.call(RequestCode.END_TRANSACTION, end(one, COMMIT))
    assert (refused.code, "was deleted" in (refused.remark or "")) == (ResponseCode.TRANSACTION_FAILED, True)
    assert (await wire.call(RequestCode.END_TRANSACTION, end(two, ROLLBACK))).code == 0
    assert node.broker.store.queue(names.CHECK_MAX_TIME_TOPIC, 0).next == 1


@pytest.mark.parametrize("kind", ["half", "delayed"])
@pytest.mark.parametrize(("queues", "expected"), [(4, 3), (2, 1), (1, 0)])
async def test_a_message_for_a_queue_that_is_gone_comes_to_another_one(
    node: Node, wire: Wire, kind: str, queues: int, expected: int
) -> None:
    """It was acknowledged, and lay in a queue that nobody could read."""
    await create_topic(wire, "t")
    sent = await wait(node, wire, kind)
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    await create_topic(wire, "t", queues)
    with capture_logs() as logs:
        await come(node, wire, kind, sent)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull("t", queue=expected))
    assert [record.body for record in decode_records(answer.body)] == [b"pay"]
    assert [entry["queue"] for entry in logs if entry["event"] == "message_in_another_queue"] == [expected] * (
        queues < 4
    )


@pytest.mark.parametrize(
    ("read", "write", "queue", "expected"),
    [(4, 4, 3, 3), (8, 4, 7, 7), (4, 8, 7, 7), (4, 4, 4, 0), (0, 4, 6, 2), (4, 0, 6, 2), (0, 0, 5, 0)],
)
async def test_a_queue_that_may_be_read_or_written_is_there(
    node: Node, read: int, write: int, queue: int, expected: int
) -> None:
    node.broker.topics.put(TopicConfig("t", read, write), 0)
    assert node.broker.topics.queue_now("t", queue, 0) == expected
    assert node.broker.topics.queue_now("u", queue, 0) is None


# A topic that was deleted stays so, wherever a kill comes between the journal's line and the next checkpoint.


def filled(folder: Path, *, is_saved: bool) -> BrokerController:
    broker = open_broker(folder)
    for name in ("gone", "kept"):
        broker.topics.put(TopicConfig(name, 1, 1), broker.store.end)
        for number in range(3):
            put(broker, broker.store.queue(name, 0), b"%s %d" % (name.encode(), number))
    if is_saved:
        broker.persist()
    return broker


def killed(broker: BrokerController, folder: Path) -> BrokerController:
    """The broker after the next start. Nothing is saved."""
    broker.store.close()
    return open_broker(folder)


def bodies(broker: BrokerController, topic: str) -> list[bytes]:
    queue = broker.store.queue(topic, 0)
    return [broker.store.message(queue, offset).body for offset in range(queue.begin, queue.next)]


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("loses", ["nothing", "checkpoint", "topics"])
def test_a_deleted_topic_stays_away_after_a_kill(tmp_path: Path, is_saved: bool, loses: str) -> None:
    broker = filled(tmp_path, is_saved=is_saved)
    if loses == "topics":  # the journal is short again, and the state file has what it had
        run(broker.topics.saving(broker.store.begin))
    broker.topics.delete("gone", broker.store.end)
    if loses == "topics":
        run(broker.topics.saving(broker.store.begin))
    if loses == "checkpoint":
        for path in tmp_path.glob("checkpoint.*"):
            path.unlink()
    broker = killed(broker, tmp_path)
    assert broker.topics.get("gone") is None
    assert ("gone", 0) not in broker.store.queues
    assert bodies(broker, "kept") == [b"kept 0", b"kept 1", b"kept 2"]
    assert broker.recovered.lost == ()
    broker = killed(broker, tmp_path)
    assert broker.topics.get("gone") is None
    broker.store.close()


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_topic_that_was_recreated_has_only_what_came_then(tmp_path: Path, is_removed: bool) -> None:
    broker = filled(tmp_path, is_saved=True)
    broker.topics.delete("gone", broker.store.end)
    removing = broker.store.deleting("gone")
    broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
    put(broker, broker.store.queue("gone", 0), b"new")
    if not is_removed:  # the folder's new name was lost
        (tmp_path / "removed" / "0").rename(tmp_path / "consumequeue" / "gone")
    removing.close()
    broker = killed(broker, tmp_path)
    assert bodies(broker, "gone") == [b"new"]
    assert broker.recovered.lost == ()
    broker.store.close()


def test_deletions_are_forgotten_with_the_part_of_the_log_that_they_are_about(tmp_path: Path) -> None:
    broker = filled(tmp_path, is_saved=True)
    at = broker.store.end
    broker.topics.delete("gone", at)
    assert broker.topics.deleted == {"gone": at}
    broker.topics.forget_deletions(at - 1)
    assert broker.topics.deleted == {"gone": at}
    broker.topics.forget_deletions(at)
    assert broker.topics.deleted == {}
    broker.store.close()


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_offsets_in_a_deleted_topic_are_forgotten_although_nothing_was_saved(
    tmp_path: Path, is_made_anew: bool
) -> None:
    broker = filled(tmp_path, is_saved=False)
    for topic in ("gone", "kept"):
        broker.offsets.put("g", topic, 0, 2)
        broker.offsets.put("g", topic, 0, 1)
    broker.persist()
    broker.topics.delete("gone", broker.store.end)
    broker.offsets.topic_deleted("gone")
    if is_made_anew:
        broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
        for number in range(3):
            put(broker, broker.store.queue("gone", 0), b"new %d" % number)
    broker = killed(broker, tmp_path)
    assert broker.offsets.get("g", "gone", 0) is None, "the group has read nothing of this topic"
    assert (broker.offsets.get("g", "kept", 0), broker.offsets.rewinds("g", "kept")) == (1, 1)
    assert broker.offsets.rewinds("g", "gone") == 0
    broker.offsets.put("g", "kept", 0, 3)
    broker.persist()
    broker = killed(broker, tmp_path)
    assert broker.offsets.get("g", "kept", 0) == 3
    assert broker.offsets.get("g", "gone", 0) is None
    broker.store.close()


def not_permitted(source: Path, target: Path) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_topic_recreated_does_not_open_index_files_that_could_not_be_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = filled(tmp_path, is_saved=True)
    monkeypatch.setattr(disk, "rename_folder", not_permitted)
    broker.topics.delete("gone", broker.store.end)
    removing = broker.store.deleting("gone")
    broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
    remove_folder = disk.remove_folder
    monkeypatch.setattr(disk, "remove_folder", lambda path: None)
    with pytest.raises(StoreFull, match="cannot be removed"):
        broker.store.queue("gone", 0)
    monkeypatch.setattr(disk, "remove_folder", remove_folder)
    put(broker, broker.store.queue("gone", 0), b"new")
    run(removing)
    broker.persist()
    assert bodies(broker, "gone") == [b"new"]
    broker = killed(broker, tmp_path)
    assert bodies(broker, "gone") == [b"new"]
    assert broker.recovered.lost == ()
    broker.store.close()


def test_index_files_that_could_not_be_taken_away_are_removed_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = filled(tmp_path, is_saved=True)
    monkeypatch.setattr(disk, "rename_folder", not_permitted)
    broker.topics.delete("gone", broker.store.end)
    broker.store.delete_topic("gone")
    assert not (tmp_path / "consumequeue" / "gone").exists()
    broker.store.close()
