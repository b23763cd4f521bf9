"""The planners on a real broker, without Spark: what they plan when messages, topics, brokers and offsets are not what they
were."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rocketlet.client import ConfigError, ConnectionFailed
from rocketlet.client.config import CLIENT_LIMITS
from rocketlet.protocol import admin_bodies
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, ResetOffset, UpdateOffset, write
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from rocketlet.spark.batch import RocketletReader
from rocketlet.spark.checkpoint import EMPTY, Batch, from_offset, to_offset
from rocketlet.spark.driver import Ledger
from rocketlet.spark.options import batch_options, stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.reading import read_task
from rocketlet.spark.source import _planner
from rocketlet.spark.worker import DataLossError
from rocketlet.testing import Broker

from .conftest import StoppableBroker
from .planners import BOTH, delete_topic, member_of, opened, read_all, request
from .running import QUEUES, committed, fill, report, rows_of, wait_for

pytestmark = pytest.mark.timeout(120)


@BOTH
def test_a_planner_that_is_closed_leaves_nothing_open(address: str, membership: bool) -> None:
    """Spark makes one for each start of a query, in a process that lives on."""
    before = None
    for begin in (0, 10):  # the first opens the broker's files as well
        fill(address, range(begin, begin + 10))
        with opened(address, membership) as planner:
            read_all(planner)
        if before is not None:
            wait_for(lambda before=before: open_descriptors() <= before)  # type: ignore[misc]
        before = open_descriptors()


def as_apaches(planner: Planner) -> None:
    """Its brokers answer as Apache's do: they do not know the request of ours."""
    planner._view.extents._foreign.add("broker-a")


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def commit(address: str, offsets: dict[int, int]) -> None:
    """As a tool does it for a group without members."""
    for queue_id, offset in offsets.items():
        request(address, RequestCode.UPDATE_CONSUMER_OFFSET, dict(write(UpdateOffset("g", "t", queue_id, offset))))


# Topics and brokers that were recreated


@BOTH
@pytest.mark.parametrize("later", [0, 100, 1200])
def test_a_topic_that_was_made_anew_is_named_however_far_it_has_grown(
    address: str, membership: bool, later: int
) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        batch = read_all(planner)
    delete_topic(address)
    fill(address, range(later))
    with (
        opened(address, membership, batch) as planner,
        pytest.raises(
            DataLossError, match=r"t@broker-a:\d: the query wants offset 100, the broker holds 0 to .*recreated"
        ),
    ):
        planner.plan()
    with opened(address, membership, batch, failOnDataLoss="false") as planner:
        again = planner.plan()
        assert (rows_of(again) if again else 0) == later
        if again:
            planner.finish(again)
            fill(address, range(40))
            more = planner.plan()
            assert more is not None
            assert rows_of(more) == 40
    assert not membership or committed(address, "g") == later


@BOTH
def test_a_topic_that_is_made_anew_while_the_query_runs_is_named(address: str, membership: bool) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        read_all(planner)
        delete_topic(address)
        fill(address, range(1200))
        with pytest.raises(DataLossError, match="other messages: the topic t on broker-a was recreated"):
            planner.plan()


@BOTH
def test_a_broker_that_was_replaced_by_an_empty_one_is_recognised(
    broker: StoppableBroker, tmp_path: Path, membership: bool
) -> None:
    fill(broker.address, range(400))
    with opened(broker.address, membership) as planner:
        batch = read_all(planner)
    broker.stop()
    shutil.rmtree(tmp_path / "data")
    broker.start()
    fill(broker.address, range(1200))
    with opened(broker.address, membership, batch) as planner, pytest.raises(DataLossError, match="recreated"):
        planner.plan()


@BOTH
def test_a_broker_that_was_restored_from_a_backup_is_recognised_however_far_it_has_grown(
    broker: StoppableBroker, tmp_path: Path, membership: bool
) -> None:
    fill(broker.address, range(200))
    broker.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    broker.start()
    fill(broker.address, range(200))
    with opened(broker.address, membership) as planner:
        batch = read_all(planner)
    broker.stop()
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "backup").rename(tmp_path / "data")
    broker.start()
    fill(broker.address, range(1200))
    with opened(broker.address, membership, batch) as planner, pytest.raises(DataLossError, match="recreated"):
        planner.plan()


@BOTH
def test_clock_that_was_set_back_makes_no_topic_anew(broker: StoppableBroker, membership: bool) -> None:
    broker.stop()
    broker.start(ahead_s=600)
    fill(broker.address, range(400))
    broker.stop()
    broker.start()
    with opened(broker.address, membership) as planner:
        batch = read_all(planner)
    reader = RocketletReader(batch_options({"nameServer": broker.address, "topic": "t"}), ("queueOffset",))
    assert sum(rows.num_rows for task in reader.partitions() for rows in read_task(task)) == 400
    broker.stop()
    broker.start()
    fill(broker.address, range(40))
    with opened(broker.address, membership, batch) as planner:
        assert rows_of(read_all(planner)) == 40


@BOTH
@pytest.mark.parametrize("is_rerun", [False, True], ids=["goes on", "runs again"])
def test_copy_of_the_data_folder_is_another_cluster_even_if_its_messages_are_older(
    broker: StoppableBroker, tmp_path: Path, membership: bool, is_rerun: bool
) -> None:
    fill(broker.address, range(200))
    broker.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copy = StoppableBroker(tmp_path / "copy")
    copy.start()
    try:
        fill(copy.address, range(1000))
        broker.start()
        fill(broker.address, range(200))
        with opened(broker.address, membership) as planner:
            batch = read_all(planner)
        with opened(copy.address, membership, batch) as planner, pytest.raises(DataLossError, match="another cluster"):
            planner.readable(batch) if is_rerun else planner.plan()
    finally:
        copy.stop()


@BOTH
def test_checkpoint_without_fingerprints_is_resumed(broker: StoppableBroker, membership: bool) -> None:
    """As earlier releases wrote it."""
    fill(broker.address, range(400))
    with opened(broker.address, membership) as planner:
        batch = read_all(planner)
    broker.stop()
    broker.start()
    fill(broker.address, range(40))
    offset = to_offset(batch)
    del offset["$"]["messages"]
    with opened(broker.address, membership, from_offset(offset)) as planner:
        assert rows_of(read_all(planner)) == 40


@BOTH
@pytest.mark.parametrize("was_apaches", [True, False])
def test_a_checkpoint_of_another_kind_of_broker_is_refused(address: str, membership: bool, was_apaches: bool) -> None:
    """Apache's broker-a is not ours, though their names are the same. Apache's answers have no identity."""
    fill(address, range(400))
    with opened(address, membership) as planner:
        batch = read_all(planner)
    (mark,) = {mark for part, mark in batch.marks.items() if part[0] == "t"}
    other = replace(mark, identity="", started_ms=0) if was_apaches else mark
    moved = replace(batch, marks={("t", "broker-a"): other})
    fill(address, range(600))
    with opened(address, membership, moved) as planner:
        if not was_apaches:
            as_apaches(planner)
        with pytest.raises(DataLossError, match=r"recreated, or this is another cluster.*startingTimestamp"):
            planner.plan()


@BOTH
def test_a_batch_that_is_run_again_does_not_read_the_messages_of_another_topic(address: str, membership: bool) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        batch = planner.plan()
        assert batch is not None
        assert planner.readable(batch) == batch.ranges
    delete_topic(address)
    fill(address, range(1200))
    with opened(address, membership, batch) as planner, pytest.raises(DataLossError, match="recreated"):
        planner.readable(batch)
    with opened(address, membership, batch, failOnDataLoss="false") as planner:
        assert not planner.readable(batch)


@BOTH
def test_a_restart_of_the_broker_makes_nothing_anew(broker: StoppableBroker, membership: bool) -> None:
    fill(broker.address, range(400))
    with opened(broker.address, membership) as planner:
        batch = read_all(planner)
    broker.stop()
    broker.start()
    fill(broker.address, range(40))
    with opened(broker.address, membership, batch) as planner:
        again = planner.plan()
        assert again is not None
        assert rows_of(again) == 40


@BOTH
def test_queues_that_a_topic_gets_are_read_soon(address: str, membership: bool) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        read_all(planner)
        grown = write(CreateTopic("t", 2 * QUEUES, 2 * QUEUES, 6))
        request(address, RequestCode.UPDATE_AND_CREATE_TOPIC, dict(grown))
        before_next_look_s = CLIENT_LIMITS.route_interval_s - 5  # at routes, by the client

        def planned() -> bool:
            planner.plan()
            return sum(queue.topic == "t" for queue in planner.progress()[1]) == 2 * QUEUES

        wait_for(planned, before_next_look_s)


@BOTH
@pytest.mark.parametrize("encoding", ["json", "rocketmq"])
def test_a_query_may_speak_each_encoding(address: str, membership: bool, encoding: str) -> None:
    fill(address, range(400))
    with opened(address, membership, headerEncoding=encoding) as planner:
        assert rows_of(read_all(planner)) == 400


@BOTH
def test_a_filter_that_brokers_do_not_take_is_refused_before_anything_is_planned(
    address: str, membership: bool
) -> None:
    fill(address, range(400))
    with (
        pytest.raises(
            ConfigError, match="the option sql: the filter 'price >' cannot be read: something is missing behind '>'"
        ),
        opened(address, membership, sql="price >"),
    ):
        pass
    with opened(address, membership, sql="price > 5 OR TAGS = 'A'") as planner:
        assert read_all(planner).ranges


@BOTH
def test_what_a_plan_asks_may_take_as_long_as_the_option_says(
    address: str, membership: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(address, range(400))
    with opened(address, membership, pollTimeoutMs="120000") as planner:
        monkeypatch.setattr("rocketlet.spark.planner.CALL_TIMEOUT_S", 0.0)
        assert rows_of(read_all(planner)) == 400


@BOTH
def test_a_batch_waits_for_enough_rows_or_for_the_longest_delay(address: str, membership: bool) -> None:
    fill(address, range(10))
    with opened(address, membership, minOffsetsPerTrigger="100") as planner:
        assert rows_of(read_all(planner)) == 10, "the first one waits for nothing, as Kafka's"
        fill(address, range(99))
        assert planner.plan() is None
        fill(address, range(1))
        assert rows_of(read_all(planner)) == 100
    with opened(address, membership, minOffsetsPerTrigger="100", maxTriggerDelay="1ms", group="h") as planner:
        read_all(planner)
        fill(address, range(5))
        assert rows_of(read_all(planner)) == 5
        assert planner.plan() is None


@BOTH
def test_a_limit_below_one_message_for_each_queue_leaves_none_unread(address: str, membership: bool) -> None:
    fill(address, range(50 * QUEUES))
    read: set[Queue] = set()
    last = EMPTY
    for _ in range(2):  # the second query goes on from the checkpoint of the first
        with opened(address, membership, last) as planner:
            for _ in range(QUEUES // 2):
                batch = planner.plan(max_rows=1)
                assert batch is not None
                read |= {queue for queue, (begin, end) in batch.ranges.items() if begin < end}
                planner.finish(batch)
                last = batch
    assert len(read) == QUEUES


def test_pattern_takes_no_topic_that_brokers_make_for_themselves(address: str) -> None:
    fill(address, range(40), "t")
    fill(address, range(40), "u")
    with opened(address, False, topic=None, topicPattern=".*") as planner:
        assert {queue.topic for queue in read_all(planner).ranges} == {"t", "u"}


def test_member_has_the_name_that_the_option_gives(address: str) -> None:
    fill(address, range(40))
    with opened(address, True, clientName="figures"):
        (member,) = report(address, "g")["members"]
        assert member["clientId"].startswith("figures#")


def test_only_assigned_queues_are_read(address: str) -> None:
    fill(address, range(400))
    with opened(address, False, assign='{"t": {"broker-a": [1, 3]}}') as planner:
        batch = read_all(planner)
        assert {queue.queue_id for queue in batch.ranges} == {1, 3}
        assert rows_of(batch) == 200
    with (
        pytest.raises(ConfigError, match="assign names t@broker-a:9, which does not exist"),
        opened(address, False, assign='{"t": {"broker-a": [1, 9]}}'),
    ):
        pass


# Brokers that are gone


@BOTH
def test_a_checkpoint_whose_brokers_are_all_unknown_here_is_refused(address: str, membership: bool) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        batch = read_all(planner)
    elsewhere = {queue._replace(broker_name="broker-z"): span for queue, span in batch.ranges.items()}
    moved = replace(batch, ranges=elsewhere, marks={("t", "broker-z"): batch.marks["t", "broker-a"]}, messages={})
    with (
        pytest.raises(DataLossError, match=r"none of the brokers broker-z.*another cluster"),
        opened(address, membership, moved),
    ):
        pass
    with opened(address, membership, moved, failOnDataLoss="false", group="h") as planner:
        again = planner.plan()
        assert again is not None
        assert rows_of(again) == 400


@BOTH
def test_queues_that_a_topic_has_no_more_keep_their_place(address: str, membership: bool) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        read_all(planner)
        for queues, rows in ((2, 20), (QUEUES, 40)):
            request(address, RequestCode.UPDATE_AND_CREATE_TOPIC, dict(write(CreateTopic("t", queues, queues, 6))))
            missing = QUEUES - queues

            def planned(missing: int = missing) -> bool:
                batch = planner.plan()
                assert batch is None or rows_of(batch) == 0
                return len(planner.missing) == missing

            wait_for(planned)
            fill(address, range(rows))
            read = 0

            def is_read(rows: int = rows) -> bool:
                nonlocal read
                batch = planner.plan()
                if batch is not None:
                    read += rows_of(batch)
                    planner.finish(batch)
                return read >= rows

            wait_for(is_read)
            assert read == rows


def test_a_query_that_ends_by_itself_does_not_pass_a_broker_of_its_checkpoint_by(address: str) -> None:
    fill(address, range(400))
    with opened(address, False) as planner:
        batch = read_all(planner)
    away = replace(batch, ranges={**batch.ranges, Queue("t", "broker-z", 0): (20, 70)})
    fill(address, range(40))
    with opened(address, False, away) as planner:
        planner.set_targets()
        assert rows_of(read_all(planner)) == 40, "the others are read"
        with pytest.raises(ConnectionFailed, match="the broker of t@broker-z:0 has not answered for 2 s"):
            planner.plan()
        assert planner.missing == {Queue("t", "broker-z", 0)}
    with opened(address, False, away, failOnDataLoss="false") as planner:
        planner.set_targets()
        assert rows_of(read_all(planner)) == 40
        assert planner.plan() is None


def test_a_retired_broker_leaves_the_checkpoint_usable(address: str) -> None:
    fill(address, range(400))
    with opened(address, False) as planner:
        batch = read_all(planner)
    gone = Queue("t", "broker-z", 0)
    with_retired = Batch({**batch.ranges, gone: (70, 70)}, batch.marks, False, "g")
    fill(address, range(40))
    with opened(address, False, with_retired) as planner:
        again = planner.plan()
        assert again is not None
        assert rows_of(again) == 40
        assert again.ranges[gone] == (70, 70), "its place is kept"
        assert planner.addresses(queue for queue, (begin, end) in again.ranges.items() if begin < end)
    for fail in ("true", "false"):
        with opened(address, False, batch, failOnDataLoss=fail) as planner:
            if fail == "true":
                with pytest.raises(DataLossError, match="no name server knows broker-z"):
                    planner.addresses([gone])
            else:
                assert not planner.addresses([gone])


# Resets


@pytest.mark.parametrize("is_rerun", [False, True], ids=["planned", "run again"])
def test_batch_is_finished_as_soon_as_the_driver_has_noted_it(address: str, tmp_path: Path, is_rerun: bool) -> None:
    """Spark's next trigger may be hours away, and another member waits for the queues."""
    fill(address, range(400))
    with opened(address, True) as planner:
        batch = planner.plan()
    assert batch is not None
    ledger = Ledger(tmp_path)
    options = stream_options({"nameServer": address, "topic": "t", "group": "g", "releaseTimeoutMs": "600000"})
    planner = _planner(options, batch if is_rerun else EMPTY, is_rerun, ledger)
    try:
        if not is_rerun:
            planner.finish(EMPTY)
            batch = planner.plan()
            assert batch is not None
        assert planner.planned == batch
        ledger.note("g", "run", 0, json.loads(json.dumps(to_offset(batch))))
        wait_for(lambda: committed(address, "g") == 400)
        assert planner.planned is None
        with opened(address, True) as other:
            wait_for(lambda: sum(queue.topic == "t" for queue in other.progress()[1]) == QUEUES // 2)
            again = other.plan()
            assert again is None or rows_of(again) == 0, "nothing comes again"
        planner.finish(batch)
        fill(address, range(40))
        wait_for(lambda: (more := planner.plan()) is not None and rows_of(more) == 40)
    finally:
        planner.close()


def reset(address: str, offset_ms: int) -> None:
    header = ResetOffset("t", "g", offset_ms, True)
    request(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, dict(write(header)))


def test_a_reset_of_a_running_query_is_served_between_batches_and_when_one_is_done(address: str) -> None:
    fill(address, range(400))
    with opened(address, True) as planner:
        read_all(planner)
        reset(address, 0)
        wait_for(lambda: committed(address, "g") == 0)
        batch = planner.plan()
        assert batch is not None
        assert rows_of(batch) == 400
        reset(address, 0)
        readings = member_of(planner)._readings
        wait_for(lambda: all(reading.reset_to == 0 for queue, reading in readings.items() if queue.topic == "t"))
        planner.finish(batch)
        assert committed(address, "g") == 0
        again = read_all(planner)
        assert rows_of(again) == 400
        assert committed(address, "g") == 400


def test_a_reset_of_queues_that_were_never_used_is_served(address: str) -> None:
    fill(address, range(0))
    with opened(address, True) as planner:
        reset(address, -1)
        fill(address, range(100))
        assert rows_of(read_all(planner)) == 100


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("offset", [0, 10, 30, 60, 100])
def test_a_reset_of_a_stopped_query_is_served_however_many_batches_ran(address: str, offset: int, batches: int) -> None:
    fill(address, range(400))  # 100 in each queue
    with opened(address, True) as planner:
        for _ in range(batches):
            batch = planner.plan(400 // batches)
            assert batch is not None
            planner.finish(batch)
            done = batch
    commit(address, dict.fromkeys(range(QUEUES), offset))
    with opened(address, True, done) as planner:
        again = planner.plan()
        assert (rows_of(again) if again else 0) == QUEUES * (100 - offset)


def test_what_a_killed_query_had_finished_but_not_committed_is_not_read_again(address: str) -> None:
    fill(address, range(400))
    with opened(address, True) as planner:
        batch = planner.plan()  # and Spark finishes it, and is killed
        assert batch is not None
    with opened(address, True, batch) as planner:
        assert planner.plan() is None
        assert committed(address, "g") == 400


def test_offsets_of_the_reset_are_decoded() -> None:
    offsets = {Queue("t", "b", 0): 5}
    assert admin_bodies.decode_offsets(admin_bodies.encode_offsets(offsets)) == offsets


# Brokers that were away at the start


@BOTH
@pytest.mark.parametrize("was_there", [True, False])
def test_a_query_from_the_latest_reads_no_history_of_a_broker_that_was_away(membership: bool, was_there: bool) -> None:
    with Broker() as first, Broker(name="broker-b", name_server=first.address) as second:
        if was_there:
            second.create_topic("t", QUEUES)
            fill(first.address, range(100))
            assert len(second.messages("t")) == 100
        first.create_topic("t", QUEUES)
        second.stop()
        with opened(first.address, membership, startingOffsets="latest") as planner:
            batch = planner.plan()
            assert batch is not None and rows_of(batch) == 0
            planner.finish(batch)
        second.start()
        if not was_there:
            second.create_topic("t", QUEUES)
        fill(first.address, range(100, 200))
        with opened(first.address, membership, batch, startingOffsets="latest") as planner:
            read = 0
            while read < 100:
                following = planner.plan()
                if following is not None:
                    planner.finish(following)
                    read += rows_of(following)
            assert read == 100
