"""Each finding of `rocketlet doctor` is provoked on a real broker."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    Consumer,
    LiteConsumer,
    Message,
    Producer,
    Reject,
    RetryLater,
    SharedConsumer,
    rebalanced,
)
from rocketlet.client.admin import diagnosis
from rocketlet.client.admin.admin_client import Group, Topic
from rocketlet.client.admin.diagnosis import Examined, ObservationTimes, diagnose
from rocketlet.client.admin.findings import BlockedMessage, Finding, Harm, Observed, findings_of_group
from rocketlet.client.config import SUSPECTS
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.admin_bodies import (
    GroupConnections,
    MemberConnection,
    QueueProgress,
    Range,
    Running,
    RunningQueue,
    encode_running_info,
)
from rocketlet.protocol.bodies import (
    ConsumerData,
    DataVersion,
    GroupConfig,
    Heartbeat,
    encode_heartbeat,
    encode_registration,
    encode_subscription,
)
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LiteAction, LiteSubscription, encode_lite_subscription
from rocketlet.protocol.headers import UpdateOffset, write
from rocketlet.protocol.names import Queue, Sql, dlq_topic, parse_subscription
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.clocks import WallClock
from ..support.handlers import Inbox
from ..support.requests import join
from ..support.sick_cluster import SEGMENT_BYTES, SickCluster, provoked_here, wanted
from ..support.staged import SICK, WELL
from ..support.staged.stage import Cluster, Findings, Stage
from ..support.topics import put
from .conftest import Run

AT_ONCE = ObservationTimes(look_s=0.0, watch_s=0.0, stuck_s=0.0)


async def found(node: Node, *peers: Wire, patience: ObservationTimes = AT_ONCE) -> dict[str, Finding]:
    """Peers are asked what they do, too. They answer that they do not know the question."""
    async with AdminClient(node.address) as admin, asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(peer.refuse()) for peer in peers]
        findings = await diagnose(admin, patience)
        for task in answering:
            task.cancel()
    return {finding.kind: finding for finding in findings}


async def test_a_name_server_without_brokers_is_no_healthy_cluster() -> None:
    port = free_port()
    async with (
        Server(Listening("127.0.0.1", port), broker=None, routes=Routes()),
        AdminClient(f"127.0.0.1:{port}") as admin,
    ):
        (finding,) = await diagnose(admin, AT_ONCE)
        assert (finding.harm, finding.kind) == (Harm.STANDS, "no_broker")
        assert "--nameserver" in finding.cure


async def test_a_broker_that_left_with_topics_is_named_until_it_is_back_or_forgotten(
    nodes: Nodes, connect: Connect, run_on: Callable[[Node], Run]
) -> None:
    port = free_port()
    name_server = f"127.0.0.1:{port}"
    async with Server(Listening("127.0.0.1", port), broker=None, routes=Routes()), AdminClient(name_server) as admin:
        await nodes.start(name_servers=(name_server,))
        gone = await nodes.start(name="broker-b", name_servers=(name_server,))
        await create_topic(await connect(gone.address), "t")

        async def has_topic() -> bool:
            return "t" in await admin.topics()

        await eventually(has_topic)
        await gone.stop()
        (finding,) = [found for found in await diagnose(admin, AT_ONCE) if found.kind == "broker_gone"]
        assert finding.subject == "broker-b"
        assert "with 1 topic, which cannot be read or sent to there" in finding.text
        run = run_on(replace(gone, address=name_server))
        listed = await run("brokers", "list", "--json")
        away = [row for row in listed.records if row["state"] == "gone"]
        assert [row["broker"] for row in away] == ["broker-b"]
        assert "rocketlet brokers forget broker-b" in (await run("brokers", "list")).out
        with pytest.raises(BrokerRefused, match="no broker broker-x is remembered as gone; remembered: broker-b"):
            await admin.forget_broker("broker-x")
        await admin.forget_broker("broker-b")
        assert "broker_gone" not in {found.kind for found in await diagnose(admin, AT_ONCE)}


async def test_a_name_server_that_reports_no_departed_broker_is_not_asked_for_them(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    request = Connection.request

    def noted(connection: Connection, code: int, *rest: Any, **more: Any) -> Any:
        asked.append(code)
        return request(connection, code, *rest, **more)

    monkeypatch.setattr(Connection, "request", noted)
    await found(node)
    assert RequestCode.GET_BROKER_CLUSTER_INFO in asked
    assert RequestCode.GET_DEPARTED_BROKERS not in asked  # Apache's of 4.9 would never answer


async def test_a_healthy_cluster_has_nothing_wrong(node: Node, wire: Wire, run: Run) -> None:
    await create_topic(wire, "t")
    seen: list[Message] = []
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", seen.append, start="first"):
        await producer.send("t", b"x")
        await eventually(lambda: len(seen) == 1)
        await rebalanced(node.address, "g", members=1)
        assert {kind for kind in await found(node, patience=ObservationTimes()) if kind != "disk"} == set()
    kinds = {kind for kind in await found(node) if kind != "disk"}
    assert kinds == {"no_members"}, "a group that nobody is a member of any more may hurt later"
    ran = await run("doctor", "--watch", "0")
    assert ran.status == 0 or "disk" in ran.out


async def test_messages_that_wait_for_nobody(node: Node, wire: Wire, run: Run) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        async with Consumer(node.address, "g", "t", lambda message: None) as consumer:
            await consumer.commit()
        await producer.send("t", b"x")
    finding = (await found(node))["no_members"]
    assert (finding.subject, finding.text) == ("g", "1 message waits and the group has no members")
    ran = await run("doctor", "--watch", "0")
    assert ran.status == 1
    assert "messages wait without progress:" in ran.out
    assert any(record["kind"] == "no_members" for record in (await run("doctor", "--watch", "0", "--json")).records)


async def test_a_queue_that_stands_names_its_owner(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    stuck = asyncio.Event()

    async def handle(message: Message) -> None:
        await stuck.wait()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", handle, start="first") as consumer:
        await producer.send("t", b"x")
        await rebalanced(node.address, "g", members=1)
        finding = (await found(node, patience=ObservationTimes(0.2, 0.2, 0.0)))["stuck_queue"]
        assert consumer.client_id in finding.text
        stuck.set()


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_handler_that_began_not_long_ago_is_progress_while_older_messages_wait(
    nodes: Nodes, connect: Connect, kind: type[Consumer | SharedConsumer]
) -> None:
    clock = WallClock()
    clock.set_s = -3600  # until the messages are stored, which have then been waiting for an hour
    node = await nodes.start(clock=clock)
    await create_topic(await connect(node.address), "t", 1)
    stuck, begun = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        begun.set()
        await stuck.wait()

    async with Producer(node.address) as producer, kind(node.address, "g", "t", handle, start="first", concurrency=1):
        for _ in range(5):
            await producer.send("t", b"x")
        clock.set_s = 0
        await begun.wait()
        assert "stuck_queue" in await found(node, patience=ObservationTimes(0.1, 0.1, 0.0))
        assert "stuck_queue" not in await found(node, patience=ObservationTimes(0.1, 0.1, 30.0))
        stuck.set()


async def test_finding_names_message_age_member_and_place_of_a_handler_that_hangs(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    stuck = asyncio.Event()

    async def hanging(message: Message) -> None:
        await stuck.wait()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", hanging, start="first") as consumer:
        sent = await producer.send("t", b"x")
        await rebalanced(node.address, "g", members=1)
        finding = (await found(node, patience=ObservationTimes(0.1, 0.1, 0.0)))["stuck_queue"]
        stuck.set()
    assert f"the oldest is message {sent.message_id} at offset 0" in finding.text
    assert f"; its handler at {consumer.client_id} has run for 0 s, now at command/test_doctor.py:" in finding.text


async def test_finding_names_the_message_that_blocks_its_queue_when_it_is_retried_in_order(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", 1)
    failed = 0

    def handle(message: Message) -> None:
        nonlocal failed
        failed += 1
        raise ValueError("no such dish")

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first", orderly=True, suspend_queue_s=0.05),
    ):
        sent = await producer.send("t", b"x")
        await eventually(lambda: failed > 2)

        async def is_named() -> bool:
            finding = (await found(node, patience=ObservationTimes(0.05, 0.05, 0.0)))["stuck_queue"]
            message = f"the oldest is message {sent.message_id} at offset 0 of t@{node.config.name}:0, attempt "
            # While the handler runs, the finding names its place instead of the last failure.
            return message in finding.text and finding.text.endswith(
                "; the attempt before failed: ValueError: no such dish"
            )

        await eventually(is_named)


async def subscribe(wire: Wire, client_id: str, *names: str) -> None:
    """Subscribe a client of the lite group g to lite topics of t. It receives nothing."""
    change = LiteSubscription(LiteAction.PARTIAL_ADD, client_id, "g", "t", names)
    assert (await wire.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))).code == 0


async def test_stuck_lite_topics_are_named_with_their_cause(node: Node, wire: Wire) -> None:
    put(node, message_type="LITE")
    await subscribe(wire, "c1", "idle", "left", "slow")
    async with Producer(node.address) as producer:
        for name in ("idle", "left", "slow", "slow", "unread"):
            await producer.send("t", b"x", lite_topic=name)
        assert set(await found(node)) == {"stuck_lite_topic"}
        idle = (await found(node))["stuck_lite_topic"]
        assert (idle.harm, idle.subject) == (Harm.STANDS, "g")
        named, waiting = idle.text.split(" of t: ")
        assert sorted(named.removeprefix("lite topics ").split(", ")) == ["idle", "left", "slow"]
        assert waiting.startswith("4 messages wait, the oldest for ")
        inbox, gate = Inbox(), asyncio.Event()

        async def work(message: Message) -> None:
            await inbox(message)
            if message.lite_topic == "slow":
                await gate.wait()

        async with LiteConsumer(node.address, "g", "t", work, lite_topics=["idle", "left", "slow"]) as member:
            await eventually(lambda: len(inbox.messages) == 3)
            slow = (await found(node))["stuck_lite_topic"]
            assert slow.harm is Harm.SLOW
            assert "lite topic slow of t: 1 message waits" in slow.text
            gate.set()
            await eventually(lambda: node.broker.pops.pools.unfinished("g") == 0)
            await member.unsubscribe("left")
            change = LiteSubscription(LiteAction.PARTIAL_REMOVE, "c1", "g", "t", ("left",))
            await wire.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))
            await producer.send("t", b"x", lite_topic="left")
            left = (await found(node))["lite_topic_unread"]
            assert left.harm is Harm.RISK
            assert left.text.startswith("lite topic left of t: 1 message waits")
            assert left.text.endswith("no member is subscribed")


async def test_lite_topic_that_waits_for_busy_members_is_slow_and_not_stuck(node: Node) -> None:
    put(node, message_type="LITE")
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with (
        Producer(node.address) as producer,
        LiteConsumer(node.address, "g", "t", inbox, lite_topics=["first", "late"], concurrency=1),
    ):
        await producer.send("t", b"x", lite_topic="first")
        await eventually(lambda: len(inbox.messages) == 1)
        await producer.send("t", b"x", lite_topic="late")
        busy = (await found(node))["stuck_lite_topic"]
        gate.set()
    assert busy.harm is Harm.SLOW
    assert busy.text.startswith("lite topic late of t: 1 message waits")
    assert busy.text.endswith("handle messages of other lite topics")


async def test_stuck_lite_topic_is_found_behind_many_that_nobody_reads(node: Node, wire: Wire) -> None:
    put(node, message_type="LITE")
    left = [f"left{number}" for number in range(SUSPECTS + 1)]
    async with Producer(node.address) as producer:
        for name in left:
            await producer.send("t", b"x", lite_topic=name)
            node.broker.lite_offsets.put("g", "t", name, 0)
        await subscribe(wire, "c1", "idle")
        await producer.send("t", b"x", lite_topic="idle")
        kinds = await found(node)
    assert kinds["stuck_lite_topic"].text.startswith("lite topic idle of t: 1 message waits")
    assert kinds["lite_topic_unread"].text.endswith("no member is subscribed")


async def test_stuck_and_unread_lite_topics_are_found_behind_many_whose_handlers_are_slow(
    node: Node, wire: Wire
) -> None:
    put(node, message_type="LITE")
    slow = [f"slow{number}" for number in range(SUSPECTS + 1)]
    inbox = Inbox(gate=(gate := asyncio.Event()))
    async with (
        Producer(node.address) as producer,
        LiteConsumer(node.address, "g", "t", inbox, lite_topics=slow, concurrency=len(slow)),
        AdminClient(node.address) as admin,
    ):
        for name in (*slow, *slow):
            await producer.send("t", b"x", lite_topic=name)
        await eventually(lambda: len(inbox.messages) == len(slow))
        await subscribe(wire, "c1", "idle")
        for name in ("idle", "unread"):
            await producer.send("t", b"x", lite_topic=name)
        node.broker.lite_offsets.put("g", "t", "unread", 0)
        (unread,) = (finding for finding in await diagnose(admin, AT_ONCE) if finding.kind == "lite_topic_unread")
        stuck = [finding.text for finding in await diagnose(admin, AT_ONCE) if finding.kind == "stuck_lite_topic"]
        gate.set()
    assert any(text.startswith("lite topic idle of t: 1 message waits") for text in stuck)
    assert unread.text.startswith("lite topic unread of t: 1 message waits")


async def test_lite_topic_is_healthy_while_messages_wait_for_one_that_its_handler_returned_with_a_delay(
    node: Node,
) -> None:
    put(node, message_type="LITE")
    inbox = Inbox()

    async def work(message: Message) -> RetryLater:
        await inbox(message)
        return RetryLater(delay=60)

    async def is_healthy() -> bool:
        return not await found(node)

    async with Producer(node.address) as producer, LiteConsumer(node.address, "g", "t", work, lite_topics=["a"]):
        for _ in range(3):
            await producer.send("t", b"x", lite_topic="a")
        await eventually(lambda: bool(inbox.messages))
        await eventually(is_healthy)


async def test_lite_group_that_works_or_waits_for_young_messages_is_healthy(node: Node) -> None:
    put(node, message_type="LITE")
    patience = ObservationTimes(look_s=0.0, watch_s=0.0, stuck_s=PATIENCE_S)
    inbox, gate = Inbox(), asyncio.Event()

    async def work(message: Message) -> None:
        await inbox(message)
        if message.lite_topic == "slow":
            await gate.wait()

    async with Producer(node.address) as producer:
        for _ in range(3):
            for name in ("a", "b", "slow", "unread"):
                await producer.send("t", b"x", lite_topic=name)
        async with LiteConsumer(node.address, "g", "t", work, lite_topics=["a", "b", "slow"], concurrency=2):
            await eventually(lambda: len(inbox.messages) == 7)
            assert await found(node, patience=patience) == {}
            gate.set()
            await eventually(lambda: node.broker.pops.pools.unfinished("g") == 0)
            assert await found(node) == {}
        await producer.send("t", b"x", lite_topic="a")
        waiting = (await found(node))["no_members"]
        assert (waiting.harm, waiting.text) == (
            Harm.STANDS,
            "1 message waits and the group has no members",
        )


async def test_broadcasting_group_has_no_unread_queues_when_its_members_do_not_report(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    consumer = ConsumerData("g", message_model="BROADCASTING", subscriptions=(parse_subscription("t", "*"),))
    assert (await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (consumer,))))).code == 0
    assert set(await found(node, wire)) <= {"disk"}


async def test_queue_is_not_stuck_when_its_member_progresses_without_a_commit(node: Node, wire: Wire) -> None:
    """Members commit every 5 s, or less often, and report the offset in their memory at any time."""
    await create_topic(wire, "t", 1)

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)

    async with Producer(node.address) as producer:
        for _ in range(100):
            await producer.send("t", b"x")
        queue = Queue("t", node.config.name, 0)
        answering, at = asyncio.ensure_future(asyncio.sleep(0)), 0
        consumer = ConsumerData("g", subscriptions=(parse_subscription("t", "*"),))
        await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (consumer,))))
        await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("g", "t", 0, 1)))

        async def answers() -> None:
            nonlocal at
            while True:
                at += 1
                running = encode_running_info({}, [], {queue: RunningQueue(at, 0, 0, True, False, 0)})
                wire.write_answer(await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO), running)

        answering = asyncio.create_task(answers())
        assert "stuck_queue" not in await found(node, patience=ObservationTimes(0.05, 0.2, 0.0))
        assert at > 1
        answering.cancel()


async def test_a_queue_that_commits_nothing_is_not_stuck_while_its_message_is_young(node: Node, wire: Wire) -> None:
    """A handler may take some seconds, and members commit every 5 s."""
    await create_topic(wire, "t", 1)
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        await done.wait()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", handle, start="first"):
        await producer.send("t", b"x")
        await rebalanced(node.address, "g", members=1)
        assert "stuck_queue" not in await found(node, patience=ObservationTimes(0.2, 0.2, stuck_s=30.0))
        done.set()


@pytest.mark.parametrize("expression", ["rare", Sql("kind = 'rare'"), Sql("kind IS NOT NULL")])
async def test_messages_that_no_filter_wants_make_no_queue_stuck(node: Node, connect: Connect, expression: str) -> None:
    """As with Java's members, who commit nothing while the broker skips messages for them."""
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    consumer = ConsumerData("g", subscriptions=(parse_subscription("t", expression),))
    answer = await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (consumer,))))
    assert answer.code == 0
    held = {Queue("t", node.config.name, 0): RunningQueue(0, 0, 0, True, False, 0)}
    running = encode_running_info({}, [encode_subscription(parse_subscription("t", expression))], held)
    await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("g", "t", 0, 0)))

    async def answers() -> None:
        while True:
            wire.write_answer(await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO), running)

    answering = asyncio.create_task(answers())
    async with Producer(node.address) as producer, AdminClient(node.address) as admin:
        for _ in range(20):
            await producer.send("t", b"x", tag="common")
        assert "stuck_queue" not in {finding.kind for finding in await diagnose(admin, AT_ONCE)}
        await producer.send("t", b"x", tag="rare", properties={"kind": "rare"})
        assert "stuck_queue" in {finding.kind for finding in await diagnose(admin, AT_ONCE)}
    answering.cancel()


async def test_lag_that_grows_says_by_how_much_and_what_helps(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten messages arrive between the two looks, and the handler commits one of them."""
    await create_topic(wire, "t", 1)
    go = asyncio.Semaphore(1)

    async def handle(message: Message) -> None:
        await go.acquire()

    async with Producer(node.address) as producer, AsyncExitStack() as stack:
        consumer = await stack.enter_async_context(
            Consumer(node.address, "g", "t", handle, start="first", commit_interval_s=0.05)
        )
        for _ in range(200):
            await producer.send("t", b"x")
        async with AdminClient(node.address) as admin:

            async def committed(count: int) -> None:
                async def is_committed() -> bool:
                    progress = await admin.progress("g", "t")
                    return sum(item.consumer_offset for item in progress.values()) == count

                await eventually(is_committed)

            async def second_look(watch: Any, group: Group, disagreements: tuple[str, ...], began_s: float) -> Observed:
                for _ in range(10):
                    await producer.send("t", b"x")
                go.release()
                await committed(2)
                return replace(await second(watch, group, disagreements, began_s), seconds=1.0)

            await committed(1)
            second = diagnosis._Watch._second
            monkeypatch.setattr(diagnosis._Watch, "_second", second_look)
            findings = {finding.kind: finding for finding in await diagnose(admin, AT_ONCE)}
        assert "10 messages/s arrive, 1 are consumed" in findings["growing_lag"].text
        assert "1 queue for 1 member: add queues" in findings["growing_lag"].cure
        for _ in range(1000):
            go.release()
        assert consumer.client_id


def an_outpaced_queue(waiting: Mapping[Queue, BlockedMessage]) -> Observed:
    """A queue to which 500 messages were sent while 60 were consumed."""
    queue = Queue("t", "a", 0)
    before, later = {queue: QueueProgress(1000, 40, 0)}, {queue: QueueProgress(1500, 100, 0)}
    member = MemberConnection("c1", "192.0.2.1:1", "PYTHON", 1)
    connections = GroupConnections(
        (member,), {"t": "rare"}, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET"
    )
    group = Group("g", {}, {"a": connections}, before, {queue: "c1"})
    return Observed(group, later, {}, {}, (), 5.0, waiting)


def test_lag_of_messages_that_no_filter_wants_does_not_grow() -> None:
    """The offset of a group that wants one message in a thousand trails, because its pulls are held meanwhile."""
    assert "growing_lag" not in {finding.kind for finding in findings_of_group(an_outpaced_queue({}))}
    waiting = an_outpaced_queue({Queue("t", "a", 0): BlockedMessage(40.0)})
    assert "growing_lag" in {finding.kind for finding in findings_of_group(waiting)}


async def test_a_broker_that_has_run_for_days_has_the_right_time(node: Node) -> None:
    node.broker.statistics.boot_ms -= (2 * 86_400 + 3 * 3600 + 4 * 60) * 1000
    async with AdminClient(node.address) as admin:
        assert (await admin.broker_status(node.address))["runtime"].startswith("[ 2 days, 3 hours, 4 minutes, ")
        assert "clock_skew" not in {finding.kind for finding in await diagnose(admin, AT_ONCE)}


async def test_queues_that_nobody_reads_and_members_that_read_none(node: Node, connect: Connect, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    one = await connect(node.address)
    await join(one, "c1", strategy="AVG")
    findings = await found(node, one)
    assert "nobody reads t@broker-a:0, t@broker-a:1" in findings["unread_queues"].text


async def test_members_without_a_queue(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(Consumer(node.address, "g", {"t": "*"}, lambda message: None))
        await rebalanced(node.address, "g", members=3)
        async with AdminClient(node.address) as admin:
            group = await admin.group("g")
        owners = set(group.owners.values())
        findings = await found(node)
        assert ("idle_members" in findings) == (len(owners) < 3)


async def test_one_client_id_twice_and_different_subscriptions(node: Node, connect: Connect, wire: Wire) -> None:
    for topic in ("t", "u"):
        await create_topic(wire, topic)
    one, two = await connect(node.address), await connect(node.address)
    for peer, topic in ((one, "t"), (two, "u")):
        await join(peer, "c1", topic)
    findings = await found(node, one, two)
    assert "2 members have the client id c1" in findings["client_id_twice"].text
    assert "disagreement" in findings


async def test_dead_letters_have_a_cure(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", lambda message: Reject()):
        await producer.send("t", b"x")
        async with AdminClient(node.address) as admin:

            async def has_dead_letters() -> bool:
                topic = dlq_topic("g")
                return topic in await admin.topics(system=True) and bool((await admin.topic(topic)).messages)

            await eventually(has_dead_letters)
        finding = (await found(node))["dead_letters"]
    assert "rocketlet messages replay g" in finding.cure


async def test_permissions_groups_switched_off_and_brokers_that_are_away(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", perm=4)
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g", consume_enable=False))
    await join(wire, "c1")
    findings = await found(node, wire)
    assert findings["permission"].text == "no broker allows it to be sent to"
    assert "consumption_off" in findings


async def test_a_broker_that_the_name_server_knows_and_nobody_reaches(node: Node, connect: Connect) -> None:
    wire = await connect(node.address)
    ext = {
        "brokerName": "broker-z", "brokerAddr": "127.0.0.1:1", "clusterName": "DefaultCluster", "haServerAddr": "",
        "brokerId": 0,
    }  # fmt: skip
    answer = await wire.call(RequestCode.REGISTER_BROKER, ext, encode_registration(DataVersion(1), []))
    assert answer.code == 0, answer.remark
    finding = (await found(node))["broker_away"]
    assert (finding.subject, "127.0.0.1:1" in finding.text) == ("broker-z", True)


async def test_all_findings_in_one_cluster(nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    provoked_here(monkeypatch)
    port = free_port()
    name_server = f"127.0.0.1:{port}"
    async with Server(Listening("127.0.0.1", port), broker=None, routes=Routes()):
        node = await nodes.start(name_servers=(name_server,), segment_bytes=SEGMENT_BYTES, retain_hours=0)
        cluster = SickCluster(name_server, node.config.name, node.address, connect)
        async with cluster.running():
            await cluster.findings(wanted(node.config.name))
            await cluster.lose_brokers()
            await cluster.findings(wanted(node.config.name, others=True))


async def test_a_group_costs_the_doctor_two_requests_without_members_and_five_with_one(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 4)
    asked: list[int] = []
    request = Connection.request

    async def counted(self: Connection, code: int, *rest: Any, **named: Any) -> Frame:
        asked.append(code)
        return await request(self, code, *rest, **named)

    async def requests() -> int:
        asked.clear()
        async with AdminClient(node.address) as admin:
            await diagnose(admin, AT_ONCE)
        return len(asked)

    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g0"))
        monkeypatch.setattr(Connection, "request", counted)
        before = await requests()
        for number in range(1, 11):
            await admin.create_group(GroupConfig(f"g{number}"))
        empty = await requests()
        assert empty - before == 10 * 2
    for number in range(1, 4):
        await join(wire, "c1", group=f"g{number}")
    answering = asyncio.create_task(wire.refuse())
    # more: what connections, progress and owners are; the second progress; the member; the topic's route and offsets, once;
    # and, because nobody reads the queues, the connections and owners again; the member does not answer
    assert await requests() - empty == 3 * (3 + 2) + 2
    answering.cancel()


async def test_groups_are_watched_concurrently_when_there_are_many(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch takes seconds, so a watch of one group after the other would take minutes."""
    count = 128
    await create_topic(wire, "t", 1)
    for number in range(count):
        await join(wire, "c1", group=f"g{number}")
        await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset(f"g{number}", "t", 0, 0)))
    all_watched = asyncio.Barrier(count)

    async def watched(watch: Any, *given: Any) -> dict[Queue, int]:
        async with asyncio.timeout(PATIENCE_S):
            await all_watched.wait()
        return {}

    monkeypatch.setattr(diagnosis._Watch, "_wait_for_progress", watched)
    examined = Examined()
    answering = asyncio.create_task(wire.refuse())
    async with AdminClient(node.address) as admin:
        await diagnose(admin, AT_ONCE, examined)
    assert (examined.done, examined.total) == (count, count)
    answering.cancel()


async def test_unread_queues_are_found_and_no_others_when_many_groups_are_examined(
    node: Node, connect: Connect, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many groups, the look that confirms findings of a moment comes during the watch."""
    monkeypatch.setattr(diagnosis, "EARLY_LOOKS", 0)
    await create_topic(wire, "t", 2)
    await join(wire, "c1", group="unread")
    await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("unread", "t", 0, 0)))
    async with Producer(node.address) as producer, Consumer(node.address, "well", "t", Inbox(), start="first"):
        await producer.send("t", b"x")
        await rebalanced(node.address, "well", members=1)
        async with AdminClient(node.address) as admin:
            answering = asyncio.create_task(wire.refuse())
            findings = await diagnose(admin, ObservationTimes(0.1, 0.4, 30.0))
            answering.cancel()
    assert [(item.subject, item.kind) for item in findings if item.kind != "disk"] == [("unread", "unread_queues")]


class CountedOwners(dict[Queue, str]):
    """Counts the passes over all owners."""

    passes = 0

    def items(self) -> Any:
        self.passes += 1
        return super().items()


def test_whether_a_group_is_well_is_seen_in_few_passes_over_its_queues() -> None:
    queues = [Queue("t", "b", number) for number in range(200)]
    member = MemberConnection("c1", "127.0.0.1:1", "JAVA", 411)
    connections = GroupConnections((member,), {"t": "*"}, "CONSUME_PASSIVELY", "CLUSTERING", "")
    owners = CountedOwners(dict.fromkeys(queues, "c1"))
    group = Group("g", {}, {"b": connections}, dict.fromkeys(queues, QueueProgress(9, 1, 0)), owners)
    topic = Topic("t", {}, dict.fromkeys(queues, Range(0, 9, 0)))
    seen = Observed(group, group.progress, {"t": topic}, {}, (), 1.0, dict.fromkeys(queues, BlockedMessage(40.0)))
    (stuck,) = [finding for finding in findings_of_group(seen) if finding.kind == "stuck_queue"]
    assert (
        "t@b:0, t@b:1, t@b:2 and 197 more: 1,600 messages wait, the oldest for 40 s, and their owner c1" in stuck.text
    )
    assert 0 < owners.passes <= 11, "at most one in each check, whatever the number of queues"


async def test_a_queue_that_changes_hands_between_two_checks_has_no_two_readers(node: Node) -> None:
    """As at each deployment: the older member owned it at the first look, the newer one says at the second that it reads."""
    async with AsyncExitStack() as stack:
        await (await stack.enter_async_context(AdminClient(node.address))).create_topic("t")
        older = Consumer(node.address, "g", "t", Inbox())
        await older.start()
        await stack.enter_async_context(Consumer(node.address, "g", "t", Inbox()))
        await rebalanced(node.address, "g", members=2)

        class Deploying(AdminClient):
            async def running(self, *given: Any, **options: Any) -> dict[str, Running]:
                await older.stop()
                await rebalanced(node.address, "g", members=1)
                return await super().running(*given, **options)

        admin = await stack.enter_async_context(Deploying(node.address))
        assert await diagnose(admin, AT_ONCE) == []


# Forty staged clusters, twenty well and twenty sick: `rocketlet doctor` must say all that is wrong, and nothing
# else. A cluster is a function that is run until its `yield`. Its table says which findings are due, by subject and
# kind. Well ones are checked for as long as the command does, so that a false alarm of the command is one here.


SOON: Final = ObservationTimes(look_s=0.3, watch_s=0.6, stuck_s=0.0)


def _name(cluster: Cluster) -> str:
    return cluster.__name__


@pytest.fixture
async def stage(
    nodes: Nodes, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    usage = shutil.disk_usage("/")._replace(total=1000, used=100, free=900)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)  # this machine's disk is none of a cluster's ills
    node = await nodes.start()
    async with Producer(node.address) as producer, AsyncExitStack() as stack:
        yield Stage(node, connect, stack, producer, tmp_path)


async def told(stage: Stage, cluster: Cluster, patience: ObservationTimes) -> Findings:
    async with asyncio.timeout(PATIENCE_S), cluster(stage), AdminClient(stage.node.address) as admin:
        found = await diagnose(admin, patience)
        print(*found, sep="\n")  # pytest shows it if a test fails
        return {(finding.subject, finding.kind) for finding in found}


@pytest.mark.parametrize("cluster", WELL, ids=_name)
async def test_nothing_is_said_of_a_cluster_that_is_well(stage: Stage, cluster: Cluster) -> None:
    assert await told(stage, cluster, ObservationTimes()) == set()


@pytest.mark.parametrize(("cluster", "due"), SICK, ids=[_name(cluster) for cluster, _ in SICK])
async def test_all_that_is_wrong_is_said_and_nothing_else(stage: Stage, cluster: Cluster, due: Findings) -> None:
    assert await told(stage, cluster, SOON) == due


def test_there_are_twenty_of_either() -> None:
    assert (len(WELL), len(SICK)) == (20, 20)
