"""The planners on a real broker, without Spark: what they plan when messages, topics, brokers and offsets are not what they
were."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.client import ConfigError, ConnectionFailed, TopicNotFound
from rocketlet.client.config import CLIENT_LIMITS
from rocketlet.protocol import admin_bodies
from rocketlet.protocol.bodies import DataVersion, TopicConfig, encode_registration
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.headers import CreateTopic, RegisterBroker, ResetOffset, UpdateOffset, write
from rocketlet.protocol.names import Queue
from rocketlet.sync import Consumer

from .strategies import RANGES

pytest.importorskip("pyspark")
from rocketlet.spark.batch import RocketletReader
from rocketlet.spark.checkpoint import EMPTY, MicroBatch, from_offset, to_offset
from rocketlet.spark.config import PlanningLimits
from rocketlet.spark.driver import Ledger
from rocketlet.spark.options import batch_options, stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.reading import read_task
from rocketlet.spark.worker import DataLossError
from rocketlet.testing import Broker
from rocketlet.testing.ports import free_port

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
def test_a_topic_that_was_recreated_is_named_however_far_it_has_grown(
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
def test_a_topic_that_is_recreated_while_the_query_runs_is_named(address: str, membership: bool) -> None:
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
def test_clock_that_was_set_back_makes_no_topic_a_recreated_one(broker: StoppableBroker, membership: bool) -> None:
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
def test_a_restart_of_the_broker_makes_no_topic_a_recreated_one(broker: StoppableBroker, membership: bool) -> None:
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
            ConfigError, match="the option sql: the filter 'price >' cannot be read: something is missing after '>'"
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
    for _ in range(2):  # the second query continues from the checkpoint of the first
        with opened(address, membership, last) as planner:
            for _ in range(QUEUES // 2):
                batch = planner.plan(max_rows=1)
                assert batch is not None
                read |= {queue for queue, (begin, end) in batch.ranges.items() if begin < end}
                planner.finish(batch)
                last = batch
    assert len(read) == QUEUES


@BOTH
def test_topic_that_comes_later_is_found_by_its_pattern(address: str, membership: bool) -> None:
    fill(address, range(100), "orders-1")
    fill(address, range(100), "other")
    limits = PlanningLimits(discovery_interval_s=0.01)
    with opened(address, membership, EMPTY, limits, topic=None, topicPattern="orders-.*") as planner:
        assert rows_of(read_all(planner)) == 100
        fill(address, range(100), "orders-2")
        rows = 0
        while rows < 100:
            planned = planner.plan()
            if planned is not None:
                rows += rows_of(planned)
                planner.finish(planned)
        topics = {queue.topic for queue in planner.share.queues()}
        assert topics - {"%RETRY%g"} == {"orders-1", "orders-2"}


def test_named_topic_that_does_not_exist_is_waited_for_and_then_reported(address: str) -> None:
    limits = PlanningLimits(topic_timeout_s=0.01)
    with (
        pytest.raises(TopicNotFound, match=f"the topic t does not exist on {address}: create it"),
        opened(address, True, EMPTY, limits),
    ):
        pass


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


def test_a_query_that_ends_on_its_own_does_not_pass_a_broker_of_its_checkpoint_by(address: str) -> None:
    fill(address, range(400))
    with opened(address, False) as planner:
        batch = read_all(planner)
    away = replace(batch, ranges={**batch.ranges, Queue("t", "broker-z", 0): (20, 70)})
    fill(address, range(40))
    with opened(address, False, away, pollTimeoutMs="300") as planner:
        planner.set_targets()
        assert rows_of(read_all(planner)) == 40, "the others are read"
        with pytest.raises(ConnectionFailed, match="the broker of t@broker-z:0 has not answered for 0 s"):
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
    with_retired = MicroBatch({**batch.ranges, gone: (70, 70)}, batch.marks, False, "g")
    fill(address, range(40))
    with opened(address, False, with_retired) as planner:
        again = planner.plan()
        assert again is not None
        assert rows_of(again) == 40
        assert again.ranges[gone] == (70, 70), "its place is kept"
        assert planner.addresses(queue for queue, (begin, end) in again.ranges.items() if begin < end)
    for fail in ("true", "false"):
        with opened(address, False, batch, failOnDataLoss=fail, pollTimeoutMs="300") as planner:
            if fail == "true":
                with pytest.raises(DataLossError, match="no name server has a route to broker-z"):
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
    planner = Planner(options, batch if is_rerun else EMPTY, is_unfinished=is_rerun, ledger=ledger)
    try:
        if not is_rerun:
            planner.finish(EMPTY)
            batch = planner.plan()
            assert batch is not None
        assert planner.planned == batch
        ledger.record("g", "run", 0, json.loads(json.dumps(to_offset(batch))))
        wait_for(lambda: committed(address, "g") == 400)
        assert planner.planned is None
        with opened(address, True) as other:
            wait_for(lambda: sum(queue.topic == "t" for queue in other.progress()[1]) == QUEUES // 2)
            again = other.plan()
            assert again is None or rows_of(again) == 0, "nothing is repeated"
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
        owned = member_of(planner).table.owned()
        wait_for(lambda: all(item.reset_to == 0 for queue, item in owned.items() if queue.topic == "t"))
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


def test_broker_that_has_failed_is_named_at_the_start_and_its_messages_come_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its machine has lost its power: the name server has it, and nothing responds at its address."""
    port = free_port()
    body = encode_registration(DataVersion(1), [TopicConfig("t", QUEUES, QUEUES)])
    header = RegisterBroker("broker-b", f"127.0.0.1:{port}", "DefaultCluster", "", 0)
    registration = encode(Frame(RequestCode.REGISTER_BROKER, 1, write(header), body))
    with Broker() as first:
        first.create_topic("t", QUEUES)
        fill(first.address, range(100))
        host, _, at = first.address.rpartition(":")
        with socket.create_connection((host, int(at))) as failed:
            failed.sendall(registration)
            assert failed.recv(1000)
            with (
                pytest.raises(ConnectionFailed, match=r"the broker broker-b does not answer: .*; start it"),
                opened(first.address, False),
            ):
                pass
            with opened(first.address, True, EMPTY, PlanningLimits(assignment_timeout_s=0.5)) as planner:
                assert rows_until(planner, 100) == 100
                assert "broker_away broker='broker-b'" in caplog.text
                assert "queues_missing" in caplog.text and "the broker broker-b does not respond" in caplog.text
                with Broker(name="broker-b", port=port, name_server=first.address) as second:
                    second.create_topic("t", QUEUES)
                    fill(first.address, range(100, 200))
                    assert second.messages("t")
                    assert rows_until(planner, 100) == 100


def rows_until(planner: Planner, count: int) -> int:
    """Plan batches until they have this many rows, and return how many they have."""
    rows = 0
    while rows < count:
        batch = planner.plan()
        if batch is not None:
            planner.finish(batch)
            rows += rows_of(batch)
    return rows


# A batch that Spark runs again, as the planner of a member sees it.


pytest.importorskip("pyspark")


def owned(service: Consumer) -> int:
    return sum(queue.topic == "t" for queue in service.assignment())


def test_the_queues_of_a_batch_that_is_run_again_are_kept_until_it_is_finished(address: str) -> None:
    """A service that joins meanwhile handles none of its messages."""
    fill(address, range(50 * QUEUES))
    with opened(address, True) as planner:
        batch = planner.plan()
        assert batch is not None
    given = {"group": "g", "topic": "t", "nameServer": address}
    again = Planner(stream_options(given), batch, is_unfinished=True)
    handled: list[bytes] = []
    with (
        ThreadPoolExecutor(1) as other,
        Consumer(address, "g", "t", lambda message: handled.append(message.body)) as service,
    ):
        wait_for(lambda: len(report(address, "g")["members"]) == 2)
        assigned = other.submit(service.assigned)
        again.finish(batch)
        assigned.result(60)
        wait_for(lambda: owned(service) == QUEUES // 2)
        again.close()
        wait_for(lambda: owned(service) == QUEUES)
        fill(address, range(1))
        wait_for(lambda: bool(handled))
    assert handled == [b"0"]


# Where planners begin, as options, groups and checkpoints say.


pytest.importorskip("pyspark")

from .planners import BOTH


def test_an_offset_behind_the_end_of_its_queue_is_named(address: str) -> None:
    fill(address, range(400))
    exact = '{"t": {"broker-a": {"0": 500}}}'
    for membership in (True, False):
        with (
            pytest.raises(ConfigError, match="startingOffsets names t@broker-a:0 at 500, which ends at 100"),
            opened(address, membership, startingOffsets=exact),
        ):
            pass


@BOTH
def test_a_starting_time_without_a_message_is_named_where_the_options_say_so(address: str, membership: bool) -> None:
    fill(address, range(400))
    later = {"startingTimestamp": str(int(time.time() * 1000) + 60_000)}
    with (
        pytest.raises(ConfigError, match=r"t@broker-a:0 has no message since \d+ ms, where it is to start"),
        opened(address, membership, EMPTY, **later, startingOffsetsByTimestampStrategy="error"),
    ):
        pass
    with opened(address, membership, EMPTY, **later) as planner:
        batch = read_all(planner)
    with opened(address, membership, batch, **later, startingOffsetsByTimestampStrategy="error"):
        pass  # a query that continues asks no more where to begin


def test_a_member_that_began_at_the_latest_of_empty_queues_gets_what_comes_while_it_is_away(address: str) -> None:
    fill(address, range(0))
    with opened(address, True, startingOffsets="latest") as planner:
        first = planner.plan()
        assert first is not None
        assert rows_of(first) == 0, "an empty batch: the checkpoint keeps that the query has begun"
        assert planner.plan() is None
    fill(address, range(100))
    with opened(address, True, startingOffsets="latest") as planner:
        batch = planner.plan()
        assert batch is not None
        assert rows_of(batch) == 100


@BOTH
def test_a_topic_made_while_a_query_of_a_pattern_is_stopped_is_read_from_its_first_message(
    address: str, membership: bool
) -> None:
    """Also where no row came before."""
    fill(address, range(0))
    given: dict[str, str | None] = {"topic": None, "topicPattern": "[tu]", "startingOffsets": "latest"}
    with opened(address, membership, EMPTY, **given) as planner:
        begun = planner.plan()
        assert begun is not None
    fill(address, range(100), "u")
    with opened(address, membership, begun, **given) as planner:
        batch = planner.plan()
        assert batch is not None
        assert rows_of(batch) == 100


@BOTH
@pytest.mark.parametrize("queue", ["t@broker-a:9", "t@broker-z:0", "u@broker-a:0"])
@pytest.mark.parametrize("name", ["startingOffsets", "startingOffsetsByTimestamp"])
def test_a_start_of_a_queue_that_is_not_there_is_named(address: str, membership: bool, queue: str, name: str) -> None:
    fill(address, range(400))
    topic, broker_name, queue_id = re.split("[@:]", queue)
    given = {name: json.dumps({topic: {broker_name: {queue_id: 5}}})}
    with (
        pytest.raises(ConfigError, match=f"{name} names {queue}, which does not exist"),
        opened(address, membership, EMPTY, **given),
    ):
        pass
    with opened(address, membership) as planner:
        batch = read_all(planner)
    with opened(address, membership, batch, **given) as planner:
        assert planner.plan() is None, "a query that continues asks no more where to begin"


def test_a_batch_read_names_a_start_behind_its_end_and_an_end_that_is_not_there(address: str) -> None:
    fill(address, range(400))

    def ranges(**given: str) -> None:
        options = batch_options({"nameServer": address, "topic": "t", **given})
        RocketletReader(options, ("body",)).partitions()

    with pytest.raises(ConfigError, match="t@broker-a:0: the start 50 is after the end 20"):
        ranges(
            startingOffsets='{"t": {"broker-a": {"0": 50}}}', endingOffsets='{"t": {"broker-a": {"0": 20}}}'
        )  # fmt: skip
    with pytest.raises(ConfigError, match="endingOffsets names t@broker-a:0 at 500, which ends at 100"):
        ranges(endingOffsets='{"t": {"broker-a": {"0": 500}}}')
    with pytest.raises(ConfigError, match="startingOffsets names t@broker-a:0 at 500, which ends at 100"):
        ranges(startingOffsets='{"t": {"broker-a": {"0": 500}}}')


@BOTH
def test_times_are_given_per_queue(address: str, membership: bool) -> None:
    fill(address, range(200))  # 50 in each queue
    later = str(int(time.time() * 1000) + 60_000)
    times = json.dumps({"t": {"broker-a": {"0": int(later), "1": 0}}})
    with opened(address, membership, startingOffsetsByTimestamp=times) as planner:
        batch = read_all(planner)
        assert {queue.queue_id for queue, (begin, end) in batch.ranges.items() if begin < end} == {1, 2, 3}


pytest.importorskip("pyspark")
from rocketlet.spark.patience import FailureTimeout


def test_it_counts_from_the_first_failure_not_from_the_last_success() -> None:
    now_s = 0.0
    patience = FailureTimeout(30.0, lambda: now_s)
    patience.renew()
    now_s = 33.0  # a batch that ran for long
    assert not patience.is_over()
    now_s = 39.0
    assert not patience.is_over()
    patience.renew()
    looks = 0
    while not patience.is_over():
        now_s += 1.0
        looks += 1
    assert looks == 30


def test_a_process_that_was_stopped_has_not_waited() -> None:
    now_s = 0.0
    patience = FailureTimeout(30.0, lambda: now_s)
    assert not patience.is_over()
    now_s = 40.0
    assert not patience.is_over(), "nothing was tried in these 40 s"


pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import Range, shared_out, split


@given(RANGES, st.integers(1, 300))
def test_a_limit_is_kept_and_rows_are_taken_from_the_front(ranges: dict[Queue, Range], limit: int) -> None:
    cut = shared_out(ranges, limit)
    assert sum(end - begin for begin, end in cut.values()) <= limit
    total = sum(end - begin for begin, end in ranges.values())
    assert (not cut) == (total == 0)
    for queue, (begin, end) in cut.items():
        assert begin == ranges[queue][0]
        assert begin < end <= ranges[queue][1]
    if total <= limit:
        assert cut == {queue: span for queue, span in ranges.items() if span[0] < span[1]}


@given(RANGES, st.integers(1, 5000), st.data())
def test_a_limit_in_bytes_is_passed_by_one_message_at_most(
    ranges: dict[Queue, Range], limit: int, data: st.DataObject
) -> None:
    costs = {queue: data.draw(st.floats(1, 1000)) for queue in ranges}
    cut = shared_out(ranges, limit, costs)
    spent = sum((end - begin) * costs[queue] for queue, (begin, end) in cut.items())
    assert spent <= limit * 1.000001 or [end - begin for begin, end in cut.values()] == [1]
    assert bool(cut) == any(begin < end for begin, end in ranges.values())


@given(st.integers(1, 64), st.integers(1, 12), st.booleans())
def test_no_queue_starves_under_a_limit_below_one_message_for_each(queues: int, limit: int, in_bytes: bool) -> None:
    """However fast the queues fill up: each is served before any other is served twice as often as all of them need."""
    every = [Queue("t", "b", number) for number in range(queues)]
    ends = dict.fromkeys(every, 0)
    served_last: Queue | None = None
    seen: set[Queue] = set()
    costs = dict.fromkeys(every, 1.0) if in_bytes else None
    for _ in range(-(-queues // limit)):
        cut = shared_out({queue: (ends[queue], ends[queue] + 1000) for queue in every}, limit, costs, served_last)
        for queue, (_, end) in cut.items():
            ends[queue] = end
            served_last = queue
        seen |= cut.keys()
    assert seen == set(every)


@given(RANGES, st.integers(1, 50), st.integers(1, 500))
def test_no_part_has_more_rows_than_a_task_may_have(ranges: dict[Queue, Range], least: int, most: int) -> None:
    parts = split(ranges, least, most)
    assert all(end - begin <= most for _, (begin, end) in parts)
    assert sum(end - begin for _, (begin, end) in parts) == sum(end - begin for begin, end in ranges.values())


@given(RANGES, st.integers(1, 50))
def test_ranges_are_split_into_parts_of_like_size(ranges: dict[Queue, Range], least: int) -> None:
    parts = split(ranges, least)
    total = sum(end - begin for begin, end in ranges.values())
    assert len(parts) >= min(least, total)
    for queue, (begin, end) in ranges.items():
        mine = [span for other, span in parts if other == queue]
        assert [number for first, last in mine for number in range(first, last)] == list(range(begin, end))
        sizes = {last - first for first, last in mine}
        assert not mine or max(sizes) - min(sizes) <= 1


# The content of Spark's checkpoint, and which checkpoints a query continues from.


pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import TopicSnapshot, check_resumed
from rocketlet.spark.options import StreamOptions

from .strategies import RANGES

MARKS = st.dictionaries(
    st.tuples(st.sampled_from("tu"), st.sampled_from(["a", "b:1"])),
    st.builds(TopicSnapshot, st.text("0123456789abcdef", max_size=16), st.integers(0, 2**45), st.integers(0, 9)),
)
BATCHES = st.builds(MicroBatch, RANGES, MARKS, st.sampled_from([None, True, False]), st.sampled_from(["", "g"]))


@given(BATCHES)
def test_what_spark_logs_is_read_back(batch: MicroBatch) -> None:
    assert from_offset(json.loads(json.dumps(to_offset(batch)))) == batch


def test_a_checkpoint_without_a_batch_and_one_of_an_earlier_release_are_read() -> None:
    assert from_offset({}) == EMPTY
    assert from_offset({"t": {"b": {"0": "5:7"}}}) == MicroBatch({Queue("t", "b", 0): (5, 7)})


@pytest.mark.parametrize("offset", [{"t": {"b": {"0": "5"}}}, {"$": {"topics": {"t": {"b": {"other": 1}}}}}, {"$": 5}])
def test_a_foreign_checkpoint_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no offset of this source"):
        from_offset(offset)


def options(**changed: str) -> StreamOptions:
    return stream_options({"nameServer": "h:1", "topic": "t", "group": "g", **changed})


def test_another_membership_is_refused_and_the_error_says_where_to_continue() -> None:
    ranges = {Queue("t", "b", 0): (5, 7), Queue("t", "b", 1): (9, 9)}
    with pytest.raises(
        ConfigError, match=r"membership is false; the checkpoint was written with true.* group=g and starting"
    ):
        check_resumed(MicroBatch(ranges, membership=True, group="g"), options(membership="false"))
    with pytest.raises(ConfigError, match=r'membership is true.* startingOffsets={"t":{"b":{"0":7,"1":9}}}'):
        check_resumed(MicroBatch(ranges, membership=False), options())
    check_resumed(MicroBatch(ranges, membership=True, group="g"), options())
    check_resumed(MicroBatch(ranges, membership=False), options(membership="false"))
    check_resumed(EMPTY, options())


def test_another_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="the option group is 'g'; the checkpoint belongs to the group 'h'"):
        check_resumed(MicroBatch(membership=True, group="h"), options())
    check_resumed(MicroBatch(membership=False, group="h"), options(membership="false"))
