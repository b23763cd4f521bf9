"""The test kit, used as its users do: in the running loop, in a thread, through the fixture."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rocketlet.broker.config import VIP_DISTANCE
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    ConnectionFailed,
    Consumer,
    LiteConsumer,
    Message,
    Outgoing,
    Producer,
    Reject,
    RequestTimeout,
    RetryLater,
    SharedConsumer,
)
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, Route
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing import Broker, BrokerUnderTest, Cluster, Fault, UnknownGroup, UnknownTopic, clock, loop_thread
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.loop import CheckedLoop
from rocketlet.testing.loop_thread import LoopThread
from rocketlet.testing.ports import HELD, free_port

from ..conftest import PATIENCE_S, Connect

HEARTBEAT = bodies.encode_heartbeat(
    Heartbeat("c1", (ConsumerData("g", subscriptions=(parse_subscription("t", "*", version=1),)),))
)


async def test_a_broker_runs_in_the_loop_of_the_test_and_leaves_nothing() -> None:
    async with Broker() as broker:
        folder = broker.folder
        seen: list[Message] = []
        async with Producer(broker.address) as producer, Consumer(broker.address, "g", "t", seen.append, start="first"):
            await producer.send("t", b"hello", keys="k1")
            await broker.until(lambda: len(seen) == 1)
        assert [message.body for message in broker.messages("t", key="k1")] == [b"hello"]
    assert not folder.exists()


async def test_a_broker_in_the_loop_of_the_test_is_stopped_and_started_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        await producer.send("t", b"1")
        with pytest.raises(RuntimeError, match=r"use `await broker\.arestart\(\)`"):
            broker.restart()
        await broker.arestart()
        await broker.astop()
        with pytest.raises(RuntimeError, match="start it after a stop"):
            broker.messages("t")
        await broker.astart()
        assert [message.body for message in broker.messages("t")] == [b"1"]
        await broker.akill(lose=1)
        assert broker.messages("t") == []
        reads: list[str] = []
        monkeypatch.setattr("importlib.metadata.distribution", reads.append)
        await broker.aclear()
        assert (broker.requests, reads) == ([], []), "the package's metadata are read once, and slowly"


def test_a_broker_runs_in_a_thread_for_tests_without_asyncio(tmp_path: Path) -> None:
    with Broker(folder=tmp_path / "data", default_queues=2) as broker:

        async def send() -> None:
            async with Producer(broker.address, default_queues=2) as producer:
                await producer.send_batch("t", [b"a", b"b"])

        asyncio.run(send())
        assert [message.body for message in broker.messages("t")] == [b"a", b"b"]
        broker.restart()
        assert len(broker.messages("t")) == 2
        broker.stop()
        with pytest.raises(RuntimeError, match="start it after a stop"):
            broker.messages("t")
        broker.start()
        assert len(broker.messages("t")) == 2
        broker.kill(lose=1)
        assert [message.body for message in broker.messages("t")] == [b"a"]
        with pytest.raises(ValueError, match="lose is 5; the broker has only 1 messages"):
            broker.kill(lose=5)
        with pytest.raises(RuntimeError, match="a folder of its own keeps it"):
            broker.clear()


async def test_the_fixture_is_as_new_for_each_test(rocketlet: BrokerUnderTest) -> None:
    assert rocketlet.messages("left-over") == []
    assert rocketlet.requests == []
    async with Producer(rocketlet.address) as producer:
        await producer.send("left-over", b"x")
    rocketlet.faults.add(Fault.drop("SEND_MESSAGE_V2"))
    rocketlet.clock.advance(hours=1)
    assert rocketlet.clock.now_ms > time.time() * 1000 + 3_590_000


async def test_the_fixture_is_as_new_for_each_test_again(rocketlet: BrokerUnderTest) -> None:
    await test_the_fixture_is_as_new_for_each_test(rocketlet)


async def test_clients_that_a_test_leaves_connected_hold_nothing_up(rocketlet: BrokerUnderTest) -> None:
    consumer = Consumer(rocketlet.address, "g", "t", lambda message: None)
    await consumer.__aenter__()
    await asyncio.to_thread(rocketlet.clear)
    with pytest.raises(UnknownGroup):
        rocketlet.members("g")
    await consumer.__aexit__(None, None, None)


async def test_a_delayed_message_comes_when_the_clock_says_so(rocketlet: BrokerUnderTest) -> None:
    seen: list[Message] = []
    async with (
        Producer(rocketlet.address) as producer,
        Consumer(rocketlet.address, "g", "t", seen.append, start="first"),
    ):
        await producer.send("t", b"in two hours", delay_level=18)
        rocketlet.clock.advance(minutes=119)
        assert rocketlet.messages("t") == []
        rocketlet.clock.advance(minutes=2)
        await rocketlet.until(lambda: len(seen) == 1)
        assert seen[0].store_ms - seen[0].born_ms >= 7_200_000
        await rocketlet.rebalanced("g", members=1)
    with pytest.raises(ValueError, match="cannot be set back"):
        rocketlet.clock.advance(-1)


async def test_sixteen_retries_to_the_dead_letters(rocketlet: BrokerUnderTest) -> None:
    """4 h 46 min on a broker whose time nobody moves."""
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(message.reconsume_times)
        raise ValueError("never")

    began_ms = rocketlet.clock.now_ms
    async with Producer(rocketlet.address) as producer, Consumer(rocketlet.address, "g", "t", handle, start="first"):
        await producer.send("t", b"poison")
        await rocketlet.skip_waits(lambda: bool(rocketlet.dead_letters("g")))
    assert tries == list(range(17))
    assert [message.body for message in rocketlet.dead_letters("g")] == [b"poison"]
    assert rocketlet.clock.now_ms - began_ms > 4.7 * 3_600_000


async def test_a_transaction_is_checked_until_the_broker_gives_up(rocketlet: BrokerUnderTest) -> None:
    asked: list[str] = []

    def check(message: Message) -> None:
        asked.append(message.message_id)

    async with Producer(rocketlet.address, "p", check=check) as producer:
        rocketlet.faults.add(Fault.answer("END_TRANSACTION", response="SYSTEM_ERROR", times=None))
        with suppress(BrokerRefused):
            async with producer.transaction("t", b"half"):
                pass
        for number in range(1, 16):
            rocketlet.clock.advance(minutes=1)
            await rocketlet.until(lambda number=number: len(asked) >= number)  # type: ignore[misc]
        rocketlet.clock.advance(minutes=3)
    assert len(asked) == 15
    assert rocketlet.messages("t") == []


async def test_a_lease_ends_while_its_owner_is_frozen(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 2)
    first, second = [], []  # type: list[Message], list[Message]
    async with Producer(rocketlet.address) as producer:
        owner = Consumer(rocketlet.address, "g", "t", first.append, start="first")
        async with owner:
            await rocketlet.rebalanced("g", members=1)
            rocketlet.faults.add(Fault.freeze(client=owner.client_id))
            async with Consumer(rocketlet.address, "g", "t", second.append, start="first") as other:
                rocketlet.clock.advance(seconds=150)  # longer than a lease, and than a member may be silent
                await rocketlet.until(
                    lambda: (
                        {item for queue, item in rocketlet.owners("g").items() if queue.topic == "t"}
                        == {other.client_id}
                    )
                )
                await producer.send_batch("t", [b"1", b"2"])
                await rocketlet.until(lambda: len(second) == 2)
            rocketlet.faults.remove()
    assert first == []


async def test_a_frozen_client_stays_so_when_it_connects_again(rocketlet: BrokerUnderTest, connect: Connect) -> None:
    """The broker has closed its connection, because it was silent; on the new one a heartbeat is the first that names it."""
    rocketlet.create_topic("t")
    rocketlet.faults.add(Fault.freeze(client="c1"))
    frozen, other = await connect(rocketlet.address), await connect(rocketlet.address)
    frozen.send(RequestCode.HEART_BEAT, body=HEARTBEAT)
    assert (await other.call(RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0  # behind the heartbeat
    rocketlet.create_group("g")
    assert rocketlet.members("g") == []
    rocketlet.clock.advance(minutes=1)
    assert rocketlet.members("g") == []
    rocketlet.faults.remove()
    await rocketlet.until(lambda: rocketlet.members("g") == ["c1"])
    assert [request.client for request in rocketlet.requests_of("HEART_BEAT")] == ["c1"]


async def test_topic_is_changed_only_as_long_as_its_messages_stay_readable(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 2)
    rocketlet.create_topic("t", 3)
    async with Producer(rocketlet.address) as producer:
        for _ in range(3):
            await producer.send("t", b"x")
    with pytest.raises(ValueError, match="1 message of t in queues 2 to 2 would become unreadable"):
        rocketlet.create_topic("t", 2)
    rocketlet.create_topic("t", 5)
    async with AdminClient(rocketlet.address) as admin:
        assert len((await admin.topic("t")).ranges) == 5


async def test_a_message_is_stored_but_not_acknowledged(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t")
    async with Producer(rocketlet.address, retries=2) as producer:
        await producer.send("t", b"warm")
        rocketlet.faults.add(Fault.close("SEND_MESSAGE_V2", after=True))
        await producer.send("t", b"twice", message_id="id-1")
    assert Counter(message.body for message in rocketlet.messages("t")) == {b"warm": 1, b"twice": 2}
    assert {message.message_id for message in rocketlet.messages("t") if message.body == b"twice"} == {"id-1"}
    (injected,) = rocketlet.injected
    assert str(injected).startswith("close_after SEND_MESSAGE_V2 (310) on SEND_MESSAGE_V2")


async def test_a_lost_notification_delays_the_rebalance_and_no_more(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 4)
    async with Consumer(rocketlet.address, "g", "t", lambda message: None) as one:
        await rocketlet.rebalanced("g", members=1)
        rocketlet.faults.add(Fault.lose("NOTIFY_CONSUMER_IDS_CHANGED", client=one.client_id))
        async with Consumer(rocketlet.address, "g", "t", lambda message: None):
            await rocketlet.until(lambda: len(rocketlet.injected) == 1)
            rocketlet.rebalance("g")  # the next one arrives
            shares = await rocketlet.rebalanced("g", members=2)
            assert sorted(shares.values())[-1] <= 3


@pytest.mark.parametrize(
    ("fault", "error", "stored"),
    [
        (Fault.answer("SEND_MESSAGE_V2", response="SYSTEM_BUSY", times=9), BrokerRefused, 0),
        (Fault.answer(310, response=ResponseCode.NO_PERMISSION, times=9), BrokerRefused, 0),
        (Fault.drop("SEND_MESSAGE_V2", times=9), RequestTimeout, 0),
        (Fault.silence("SEND_MESSAGE_V2", times=9), RequestTimeout, 1),
        (Fault.close("SEND_MESSAGE_V2", times=9), ConnectionFailed, 0),
    ],
    ids=lambda value: value.action if isinstance(value, Fault) else "",
)
async def test_a_fault_reaches_the_sender(
    rocketlet: BrokerUnderTest, fault: Fault, error: type[Exception], stored: int
) -> None:
    rocketlet.create_topic("t")
    timeout_s = 0.5 if error is RequestTimeout else PATIENCE_S
    async with Producer(rocketlet.address, retries=0, timeout_s=timeout_s) as producer:
        rocketlet.faults.add(fault)
        with pytest.raises(error):
            await producer.send("t", b"x")
        rocketlet.faults.remove()
    async with Producer(rocketlet.address, retries=0, timeout_s=PATIENCE_S) as producer:
        await producer.send("t", b"y")
    assert len(rocketlet.messages("t")) == stored + 1
    assert rocketlet.injected[0].fault == fault


async def test_answers_come_late_and_in_pieces(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t")
    async with Producer(rocketlet.address, timeout_s=PATIENCE_S) as producer:
        await producer.send("t", b"warm")
        rocketlet.faults.add(
            Fault.late("SEND_MESSAGE_V2", delay_s=600), Fault.slow("SEND_MESSAGE_V2", bytes_per_s=10, nth=1)
        )
        late = asyncio.ensure_future(producer.send("t", b"late"))
        await rocketlet.until(lambda: len(rocketlet.messages("t")) == 2)
        assert not late.done()
        rocketlet.clock.advance(minutes=11)
        await late
        slow = asyncio.ensure_future(producer.send("t", b"slow"))
        await rocketlet.until(lambda: len(rocketlet.injected) == 2)
        rocketlet.clock.advance(seconds=2)
        assert not slow.done()
        rocketlet.clock.advance(minutes=1)
        await slow


async def test_faults_act_on_the_nth_request_and_by_chance(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t")

    async def send(count: int) -> list[int]:
        """The numbers of the sends that failed."""
        failed: list[int] = []
        async with Producer(rocketlet.address, retries=0, timeout_s=PATIENCE_S) as producer:
            for number in range(count):
                try:
                    await producer.send("t", b"x")
                except BrokerRefused:
                    failed.append(number)
        return failed

    rocketlet.faults.add(Fault.answer("SEND_MESSAGE_V2", response="SYSTEM_BUSY", nth=3, times=2))
    assert await send(8) == [2, 3]
    by_chance = Fault.answer("SEND_MESSAGE_V2", response="SYSTEM_BUSY", probability=0.5, seed=7, times=None)
    rocketlet.faults.add(by_chance)
    first = await send(30)
    rocketlet.faults.remove(by_chance)
    rocketlet.faults.add(by_chance)
    assert 5 < len(first) < 25
    assert await send(30) == first, "a seed repeats"


async def test_requests_of_several_iterations_are_recorded_once(rocketlet: BrokerUnderTest, connect: Connect) -> None:
    """The broker serves them in several event-loop iterations. A fault counts each of them once, too."""
    rocketlet.faults.add(Fault.answer("GET_BROKER_CLUSTER_INFO", response="SYSTEM_BUSY", nth=1501, times=None))
    wire = await connect(rocketlet.address)
    wire.write(b"".join(encode(Frame(RequestCode.GET_BROKER_CLUSTER_INFO, number)) for number in range(2000)))
    answers = [(await wire.answer(number)).code for number in range(2000)]
    assert answers == [0] * 1500 + [ResponseCode.SYSTEM_BUSY] * 500
    assert [request.response for request in rocketlet.requests_of("GET_BROKER_CLUSTER_INFO")] == answers


async def test_a_client_gets_other_queues_than_the_rest(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 4)
    rocketlet.faults.add(Fault.route("t", queues=2))
    async with Producer(rocketlet.address) as producer:
        queues = {(await producer.send("t", b"x")).queue.queue_id for _ in range(8)}
    assert queues == {0, 1}


async def test_a_function_changes_what_a_client_gets() -> None:
    def halved(route: Route) -> Route:
        return replace(route, queues=tuple(replace(data, read_queues=2, write_queues=2) for data in route.queues))

    async with Broker() as broker, Producer(broker.address) as producer:
        broker.create_topic("t", 4)
        broker.faults.add(Fault.route("t", halved))
        assert {(await producer.send("t", b"x")).queue.queue_id for _ in range(8)} == {0, 1}


async def test_what_clients_asked_and_committed_can_be_seen(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 1)
    seen: list[Message] = []
    async with Producer(rocketlet.address) as producer:
        consumer = Consumer(rocketlet.address, "g", "t", seen.append, start="first", commit_interval_s=0.05)
        async with consumer:
            await producer.send("t", b"x")
            await rocketlet.consumed("g", "t")
            assert rocketlet.members("g") == [consumer.client_id]
            assert set(rocketlet.owners("g").values()) == {consumer.client_id}
        assert rocketlet.committed("g", "t") == {0: 1}
        sends = rocketlet.requests_of("SEND_MESSAGE_V2")
        assert [(item.topic, item.response) for item in sends] == [("t", 0)]
        assert "SEND_MESSAGE_V2 -> SUCCESS (0): producer_group=rocketlet topic=t" in str(sends[0])
        assert "joined" in [event["event"] for event in rocketlet.timeline("g")]
        await producer.send("t", b"y")
    with pytest.raises(TimeoutError, match="1 message of t is not consumed by g, after"):
        await rocketlet.consumed("g", "t", timeout_s=0.05)
    assert "request: " in rocketlet.report()


async def test_a_lease_is_taken_away_and_comes_back(rocketlet: BrokerUnderTest) -> None:
    rocketlet.create_topic("t", 1)
    async with Consumer(rocketlet.address, "g", "t", lambda message: None):
        await rocketlet.rebalanced("g", members=1)
        rocketlet.take_lease("g", "t", 0)
        await rocketlet.until(lambda: "lock expired" in [event["event"] for event in rocketlet.timeline("g")])
    with pytest.raises(KeyError):
        rocketlet.take_lease("g", "t", 0)


async def test_two_brokers_are_one_cluster() -> None:
    async with Cluster(brokers=2) as cluster:
        await cluster.create_topic("t", 2)
        async with Producer(cluster.address) as producer:
            names = {(await producer.send("t", b"x")).queue.broker_name for _ in range(4)}
            assert names == {"broker-a", "broker-b"}
            counts = [len(broker.messages("t")) for broker in cluster.brokers]
            assert sum(counts) == 4
            assert min(counts) > 0
            cluster.brokers[1].faults.add(Fault.answer("SEND_MESSAGE_V2", response="SERVICE_NOT_AVAILABLE", times=None))
            names = {(await producer.send("t", b"x")).queue.broker_name for _ in range(4)}
            assert names == {"broker-a"}
    with pytest.raises(ValueError, match="1 to 26"):
        Cluster(brokers=0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Fault.drop("SEND_MESAGE_V2"), "did you mean SEND_MESSAGE_V2"),
        (lambda: Fault.answer("SEND_MESSAGE", response="BUSY"), "unknown response 'BUSY'"),
        (lambda: Fault.drop("SEND_MESSAGE", nth=0), "nth is 0; expected 1 or more"),
        (lambda: Fault.drop("SEND_MESSAGE", times=0), "times is 0; expected 1 or more"),
        (lambda: Fault.drop("SEND_MESSAGE", probability=1.5), "probability is 1.5"),
        (lambda: Fault.drop("SEND_MESSAGE", topik="t"), "a fault has no field 'topik'; allowed: client, group"),
        (lambda: Fault.drop("SEND_MESSAGE", topic=5), "topic is 5; it must be text"),
        (lambda: Fault.late("SEND_MESSAGE", delay_s=0), "delay_s is 0"),
        (
            lambda: Fault.late("SEND_MESSAGE", delay_s=31_536_001),
            "delay_s is 31536001; expected more than 0 and at most 31536000",
        ),
        (lambda: Fault.late("SEND_MESSAGE", delay_s=True), "delay_s is True"),
        (lambda: Fault.drop("SEND_MESSAGE", seed="x"), "seed is 'x'; expected a whole number"),
        (lambda: Fault.freeze(client=""), "client is ''; freezing needs the id of a client"),
        (lambda: Fault.route("t"), "queues is missing"),
        (lambda: Fault.route("t", queues=0), "queues is 0; expected 1 or more"),
        (lambda: Fault.route("t", queues=4097), "queues is 4097; maximum 4096"),
        (lambda: Fault.route("t", 5), "change is 5; it must be a function"),  # type: ignore[arg-type] # that is the test
        (lambda: Fault.slow("SEND_MESSAGE", bytes_per_s=0), "bytes_per_s is 0"),
        (lambda: Fault.slow("SEND_MESSAGE", bytes_per_s=None), "bytes_per_s is None"),  # type: ignore[arg-type]
        (lambda: Fault.drop("SEND_MESSAGE", seed=None), "seed is None; expected a whole number"),
        (lambda: Fault.drop(["SEND_MESSAGE"]), r"code: unknown request \['SEND_MESSAGE'\]"),  # type: ignore[arg-type]
        (lambda: Fault.drop(True), "code: unknown request True"),
        (lambda: Fault.drop(-1), "code is -1; expected 0 or more"),
        (lambda: Fault.answer("SEND_MESSAGE", response=False), "response: unknown response False"),
        (lambda: Fault.answer("SEND_MESSAGE", response=2, remark=5), "remark is 5; it must be text"),  # type: ignore[arg-type]
        (lambda: Fault.lose("SEND_MESSAGE"), "lose: SEND_MESSAGE .10. is a request of clients; use Fault.drop"),
        (lambda: Fault.drop("NOTIFY_CONSUMER_IDS_CHANGED"), "is a request of brokers; use Fault.lose"),
        (lambda: Broker(nonsense=1), "a broker has no setting nonsense"),
    ],
)
def test_what_a_fault_cannot_be_is_refused_by_name(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


async def test_a_poison_message_of_a_shared_consumer_is_a_dead_letter_in_no_time(rocketlet: BrokerUnderTest) -> None:
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("never")

    async with (
        Producer(rocketlet.address) as producer,
        SharedConsumer(rocketlet.address, "g", "t", handle, start="first"),
    ):
        await producer.send("t", b"poison")
        await rocketlet.skip_waits(lambda: bool(rocketlet.dead_letters("g")))
    assert attempts == list(range(1, 18))
    assert [message.body for message in rocketlet.dead_letters("g")] == [b"poison"]


async def test_a_message_that_a_shared_consumer_still_handles_is_not_skipped_to(rocketlet: BrokerUnderTest) -> None:
    """Also if its lease was renewed."""
    may_end, attempts, looks = asyncio.Event(), list[int](), count()

    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        await may_end.wait()

    consumer = SharedConsumer(rocketlet.address, "g", "t", handle, start="first", invisible_s=3.0)
    async with Producer(rocketlet.address) as producer, consumer:
        await producer.send("t", b"long")
        await rocketlet.until(lambda: bool(rocketlet.requests_of("CHANGE_MESSAGE_INVISIBLETIME")))
        await rocketlet.skip_waits(lambda: next(looks) > 2)
        may_end.set()
        await rocketlet.consumed("g", "t")
    assert attempts == [1]


async def test_retries_later_and_rejections_are_seen_immediately(rocketlet: BrokerUnderTest) -> None:
    outcomes: list[RetryLater | Reject] = [Reject(), RetryLater(delay_level=5)]

    def handle(message: Message) -> RetryLater | Reject:
        return outcomes.pop()

    async with (
        Producer(rocketlet.address, timeout_s=PATIENCE_S) as producer,  # so that it sends once
        Consumer(rocketlet.address, "g", "t", handle, start="first"),
    ):
        await producer.send_batch("t", [Outgoing(b"x")])
        await rocketlet.skip_waits(lambda: len(rocketlet.dead_letters("g")) == 1)
    codes = [item.code for item in rocketlet.requests_of("CONSUMER_SEND_MSG_BACK")]
    assert codes == [RequestCode.CONSUMER_SEND_MSG_BACK] * 2
    assert all(before.at_s <= after.at_s for before, after in pairwise(rocketlet.requests))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"port": 99_999}, "port is 99999; expected 0 to 65535"),
        ({"port": -1}, "port is -1"),
        ({"name_server": "nowhere"}, "'nowhere' is not host:port"),
    ],
)
def test_a_broker_is_not_made_for_an_address_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Broker(**settings)


def test_a_broker_that_cannot_start_leaves_nothing_open() -> None:
    """A file left open would warn, and a warning is an error here."""
    with Broker() as other:
        port = int(other.address.rpartition(":")[2])
        taken: tuple[dict[str, Any], ...] = ({"port": port}, {"metrics_port": port})
        for settings in taken:
            with pytest.raises(OSError, match="in use"), Broker(**settings):
                pytest.fail("it has started")
            gc.collect()


async def test_a_jump_of_a_year_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside somebody who is frozen. A step checks all who wait."""
    monkeypatch.setattr(clock, "MAX_COARSE_STEPS", 100)
    monkeypatch.setattr(clock, "FINE_FOR_S", 50.0)
    steps = 0
    advance = MovableClock.advance

    def counted(self: MovableClock, seconds: float) -> None:
        nonlocal steps
        steps += 1
        advance(self, seconds)

    async with Broker() as broker:
        broker.faults.add(Fault.freeze(client="c"))
        monkeypatch.setattr(MovableClock, "advance", counted)
        before_ms = broker.clock.now_ms
        broker.clock.advance(days=366)
        assert broker.clock.now_ms - before_ms >= 366 * 86_400_000
    assert 110 <= steps < 150


def test_who_waits_too_long_for_the_broker_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(held: threading.Event) -> None:
        held.wait(PATIENCE_S)

    thread = LoopThread()
    held = threading.Event()
    with (
        monkeypatch.context() as patch,
        pytest.raises(TimeoutError, match=r"the broker has not responded for 0\.001 s"),
    ):
        patch.setattr(loop_thread, "ANSWER_S", 0.001)
        thread.do(lambda: later(held))
    held.set()
    thread.do(lambda: None)
    thread.stop()


# The kit, asked about a name that is nobody's.


async def test_a_mistyped_group_or_topic_is_not_one_of_which_there_is_nothing() -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        await producer.send("t", b"x")
        async with Consumer(broker.address, "shipping", "t", lambda message: None, start="first"):
            await broker.consumed("shipping", "t")
        assert broker.dead_letters("shipping") == []
        with pytest.raises(UnknownGroup, match="the broker knows no group shiping; with members: "):
            broker.dead_letters("shiping")
        for about in (broker.lag, broker.committed):
            about("shipping", "t")
            with pytest.raises(UnknownGroup, match="shiping"):
                about("shiping", "t")
        for asked in (broker.members, broker.owners, broker.timeline):
            asked("shipping")
            with pytest.raises(UnknownGroup, match="shiping"):
                asked("shiping")
        with pytest.raises(UnknownGroup, match="shiping"):
            broker.messages("t", waiting_for="shiping")
        with pytest.raises(UnknownTopic, match=r"the broker has no topic tt; it has: .*t"):
            broker.lag("shipping", "tt")


async def test_lag_of_a_lite_group_is_that_of_its_lite_topics() -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        broker.create_topic("CHAT", message_type="LITE")
        for lite_topic in ("a", "a", "unread"):
            await producer.send("CHAT", b"x", lite_topic=lite_topic)
        async with LiteConsumer(broker.address, "chats", "CHAT", lite_topics=["a"]) as consumer:
            first = await consumer.receive()
            assert broker.lag("chats", "CHAT") == 2
            assert [message.lite_topic for message in broker.messages("CHAT", waiting_for="chats")] == ["a", "a"]
            await consumer.ack(first)
            await consumer.ack(await consumer.receive())
            await broker.consumed("chats", "CHAT")
            assert broker.lag("chats", "CHAT") == await consumer.lag() == 0
            assert broker.messages("CHAT", waiting_for="chats") == []
            assert len(broker.messages("CHAT")) == 3


@pytest.mark.parametrize(
    ("group", "topic", "said"),
    [("shiping", "t", "the broker knows no group shiping"), ("shipping", "tt", "the broker has no topic tt")],
)
async def test_waiting_for_a_mistyped_name_ends_with_it(group: str, topic: str, said: str) -> None:
    async with Broker() as broker:
        broker.create_topic("t")
        broker.create_group("shipping")
        with pytest.raises(TimeoutError, match=said):
            await broker.until(lambda: broker.lag(group, topic) == 0, timeout_s=0.01)


async def test_a_group_whose_members_each_get_everything_has_no_lag_that_a_broker_knows() -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        await producer.send("t", b"x")
        async with Consumer(broker.address, "caches", "t", lambda message: None, start="first", broadcasting=True):
            for about in (broker.lag, broker.committed):
                with pytest.raises(
                    ValueError,
                    match="each member of the broadcasting group caches gets every message and stores its offsets",
                ):
                    about("caches", "t")
            with pytest.raises(ValueError, match="wait for the effects of your handlers"):
                await broker.consumed("caches", "t")


async def test_a_mistyped_request_was_not_asked_never() -> None:
    async with Broker() as broker:
        assert broker.requests_of("SEND_MESSAGE_V2") == []
        with pytest.raises(ValueError, match="unknown request 'SEND_MESAGE'; did you mean SEND_MESSAGE"):
            broker.requests_of("SEND_MESAGE")


# Parts that a test has left open are named, and the tests continue.


def test_a_connection_that_was_left_open_is_named_when_the_loop_closes() -> None:
    loop = CheckedLoop()
    ours, theirs = socket.socketpair()
    with theirs:
        loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
        with pytest.raises(ResourceWarning, match="unclosed"):
            loop.close()
    assert loop.is_closed()


def test_a_loop_with_nothing_left_closes_in_silence() -> None:
    loop = CheckedLoop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert loop.is_closed()


def test_a_loop_in_a_thread_does_not_wait_for_what_is_open_either() -> None:
    thread = LoopThread()
    ours, theirs = socket.socketpair()
    with theirs:

        async def leave_open() -> None:
            await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)

        thread.wait(leave_open())
        with pytest.raises(ResourceWarning, match="unclosed"):
            thread.stop()


# The fixture `rocketlet` with each way of running tests: pytest-asyncio in its modes, anyio, unittest, pytest-xdist.


pytest_plugins = ["pytester"]

SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")  # without it pytest-asyncio warns
SERVICE = """
import asyncio
import pytest
from rocketlet import Consumer, Producer
from rocketlet.testing import Broker, Fault

async def handled(broker):
    assert broker.messages("t") == [], "as new for each test"
    broker.create_topic("t")
    seen = []
    async with (
        Producer(broker.address) as producer,
        Consumer(broker.address, "g", "t", lambda message: seen.append(message.body), start="first"),
    ):
        await producer.send("t", b"now")
        await producer.send("t", b"later", delay_level=18)
        await broker.until(lambda: seen == [b"now"])
        await broker.skip_waits(lambda: seen == [b"now", b"later"])
"""
MARKED = """
{mark}
async def test_one(rocketlet):
    await handled(rocketlet)

{mark}
async def test_another(rocketlet):
    await handled(rocketlet)
"""
THREADS = """
def test_one(rocketlet):
    asyncio.run(handled(rocketlet))

def test_another(rocketlet):
    asyncio.run(handled(rocketlet))
"""
IN_UNITTEST = """
import unittest

class InAThread(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.broker = cls.enterClassContext(Broker())

    def setUp(self):
        self.addCleanup(self.broker.clear)

    def test_one(self):
        asyncio.run(handled(self.broker))

    def test_another(self):
        asyncio.run(handled(self.broker))

class InTheLoop(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.broker = await self.enterAsyncContext(Broker())

    async def test_one(self):
        await handled(self.broker)

    async def test_another(self):
        await handled(self.broker)
"""


@pytest.mark.parametrize("loop_scope", ["function", "session"])
@pytest.mark.parametrize(
    ("mark", "mode"), [("@pytest.mark.asyncio", "strict"), ("@pytest.mark.asyncio", "auto"), ("", "auto")]
)
def test_pytest_asyncio(pytester: pytest.Pytester, mark: str, mode: str, loop_scope: str) -> None:
    pytester.makepyfile(SERVICE + MARKED.format(mark=mark))
    scopes = ("-o", f"asyncio_default_test_loop_scope={loop_scope}", *SCOPE)
    pytester.runpytest("-W", "error", "-o", f"asyncio_mode={mode}", *scopes).assert_outcomes(passed=2)


def test_anyio(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n")
    pytester.makepyfile(SERVICE + MARKED.format(mark="@pytest.mark.anyio"))
    pytester.runpytest("-W", "error", "-p", "no:asyncio").assert_outcomes(passed=2)


def test_tests_without_a_loop(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SERVICE + THREADS)
    pytester.runpytest("-W", "error", "-p", "no:asyncio", "-p", "no:anyio").assert_outcomes(passed=2)


def test_unittest(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(SERVICE + IN_UNITTEST)
    ran = pytester.run(sys.executable, "-W", "error", "-m", "unittest", path.stem)
    ran.stderr.fnmatch_lines(["Ran 4 tests in*", "OK"])
    pytester.runpytest("-W", "error", *SCOPE).assert_outcomes(passed=4)


def test_pytest_xdist(pytester: pytest.Pytester) -> None:
    """Each worker has a broker of its own, and the tests of one do not see those of another."""
    both = MARKED.format(mark="@pytest.mark.asyncio")
    pytester.makepyfile(test_a=SERVICE + both, test_b=SERVICE + both)
    pytester.runpytest("-W", "error", "-n", "2", "--dist", "load", *SCOPE).assert_outcomes(passed=4)


def test_a_broker_that_does_not_answer_ends_no_run(pytester: pytest.Pytester) -> None:
    """The report of a failed test asks it what happened."""
    pytester.makepyfile("""
        from rocketlet.testing import Broker

        def test_it_fails(rocketlet, monkeypatch):
            def silent():
                raise TimeoutError("the broker has not responded for 120 s")
            monkeypatch.setattr(rocketlet, "report", silent)
            assert False

        def test_the_next(rocketlet):
            pass
    """)
    ran = pytester.runpytest("-p", "no:asyncio", "-p", "no:anyio")
    ran.assert_outcomes(failed=1, passed=1)
    ran.stdout.fnmatch_lines(["the broker could not report its state: *has not responded for 120 s*"])


# Free ports: nobody else gets them before they are listened on, and they can be listened on.


def test_a_port_is_given_once() -> None:
    ports = [free_port() for _ in range(HELD)]
    given = {*ports, *(port - VIP_DISTANCE for port in ports)}
    assert len(given) == 2 * HELD
    for _ in range(10 * HELD):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in given


@pytest.mark.parametrize("distance", [0, VIP_DISTANCE])
async def test_nobody_can_bind_it_but_servers_can_listen(distance: int) -> None:
    port = free_port() - distance
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):  # and again, after a restart
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        server.close()
        await server.wait_closed()


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_few_descriptors_are_held() -> None:
    """They are counted, not compared by number: other tests of this process may have any of them open."""
    for _ in range(HELD):
        free_port()
    before = open_descriptors()
    for _ in range(3 * HELD):
        free_port()
    assert open_descriptors() < before + 10
