"""A group is queried and changed: strictness, sticky shares, settling, growth, who reads what, metrics, assignments."""

from __future__ import annotations

import asyncio
import logging
import sys
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.config import LEASE_SWEEP_S, ORPHAN_S
from rocketlet.client import AdminClient, BrokerRefused, ConfigError, Consumer, Producer, rebalanced
from rocketlet.client.admin.admin_client import rebalanced_by
from rocketlet.client.config import ClientLimits
from rocketlet.command.cli import main
from rocketlet.command.nouns.group_report import report as report_of
from rocketlet.command.plumbing import logs
from rocketlet.command.plumbing.output import Output
from rocketlet.protocol.allocation import AVG, CONSISTENT_HASH, STICKY
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue, parse_subscription
from rocketlet.testing import Broker, Fault

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox
from ..support.requests import join, lock, pull, send

PLACE = 'broker="broker-a",cluster="DefaultCluster"'


async def report(group: str, address: str, timeline: bool, as_json: bool) -> None:
    async with AdminClient(address) as admin:
        await report_of(admin, group, Output(as_json=as_json), timeline=timeline)


def owned(consumer: Consumer, topic: str = "t") -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == topic}


async def test_a_strict_group_refuses_other_subscriptions_and_says_what_to_change(
    node: Node, wire: Wire, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda level: None)  # the broker of this process logs, too
    for topic in ("t", "u"):
        await create_topic(wire, topic)
    strict = ("groups", "set", "g", "--strict", "on", "--nameserver", node.address)
    assert await asyncio.to_thread(main, strict) == 1
    assert "no broker knows the group g" in capsys.readouterr().err
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g"))
    assert await asyncio.to_thread(main, strict) == 0
    assert "strict on" in capsys.readouterr().out
    async with Consumer(node.address, "g", {"t": "A"}, Inbox()):
        for subscriptions in ({"u": "*"}, {"t": "B"}, {"t": "A", "u": "*"}):
            with pytest.raises(BrokerRefused, match=r"the group g is strict.*groups set g --strict off"):
                async with Consumer(node.address, "g", subscriptions, Inbox()):
                    pass
        async with Consumer(node.address, "g", {"t": "A"}, Inbox()):
            pass
        assert (
            await asyncio.to_thread(main, ("groups", "set", "g", "--strict", "off", "--nameserver", node.address)) == 0
        )
        async with Consumer(node.address, "g", {"u": "*"}, Inbox()) as consumer:
            await eventually(lambda: len(owned(consumer, "u")) == 4)


@given(
    st.integers(1, 12),
    st.lists(st.integers(0, 11), max_size=40),
    st.integers(0, 12),
)
def test_sticky_shares_are_equal_whole_and_move_the_fewest_queues(
    members: int, before: list[int], strangers: int
) -> None:
    """`before`: who owns each queue, among members and some that are gone."""
    ids = [f"c{number:02d}" for number in range(members)]
    queues = [Queue("t", "b", number) for number in range(len(before))]
    owners = {
        queue: f"c{owner % (members + strangers):02d}" for queue, owner in zip(queues, before, strict=True) if owner
    }
    shares = STICKY.share_out(queues, ids, owners)
    assert sorted(queue for share in shares.values() for queue in share) == queues
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    moved = sum(owners.get(queue) != client for client, share in shares.items() for queue in share)
    held = Counter(owner for owner in owners.values() if owner in shares)
    size, rest = divmod(len(queues), members)
    most = sorted((held[client] for client in ids), reverse=True)
    kept = sum(min(count, size + (index < rest)) for index, count in enumerate(most))
    assert moved == len(queues) - kept, "no allocation with equal shares moves fewer"
    after = {queue: client for client, share in shares.items() for queue in share}
    stays = {client: sorted(share) for client, share in shares.items()}
    assert STICKY.share_out(queues, ids, after) == stays, "and then it stays"


async def test_a_sticky_member_that_joins_takes_only_its_share(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 12)
    moves: list[Queue] = []
    options: dict[str, Any] = {"strategy": STICKY, "on_revoked": lambda queues: moves.extend(queues)}
    async with AsyncExitStack() as stack:
        members: list[Consumer] = []
        for count in (1, 2, 3, 4):
            members.append(
                await stack.enter_async_context(
                    Consumer(
                        node.address,
                        "g",
                        "t",
                        Inbox(),
                        **options,
                        limits=ClientLimits(rebalance_interval_s=10 * PATIENCE_S),  # notified, not by the clock
                    )
                )
            )
            await rebalanced(node.address, "g", members=count)
            assert sorted(len(owned(member)) for member in members) == [12 // count] * count
        assert sum(queue.topic == "t" for queue in moves) == 6 + 4 + 3
        foreign = await stack.enter_async_context(
            Consumer(
                node.address,
                "g",
                "t",
                Inbox(),
                strategy=AVG,
                limits=ClientLimits(rebalance_interval_s=10 * PATIENCE_S),  # notified, not by the clock
            )
        )
        everyone = [*members, foreign]
        await eventually(lambda: sorted(len(owned(member)) for member in everyone) == [2, 2, 2, 3, 3])
        first = min(everyone, key=lambda member: member.client_id)
        assert owned(first) == {Queue("t", "broker-a", number) for number in range(3)}, "with AVG members it is AVG"


async def test_rebalanced_waits_for_the_whole_group_and_says_what_is_missing(node: Node, four_queues: None) -> None:
    with pytest.raises(TimeoutError, match="it has no members"):
        await rebalanced(node.address, "g", timeout_s=2.0)
    async with Consumer(node.address, "g", "t", Inbox()) as one, Consumer(node.address, "g", "t", Inbox()) as two:
        shares = await rebalanced(node.address, "g", members=2)
        assert shares == {member.client_id: len(await member.assigned()) for member in (one, two)}
        with pytest.raises(TimeoutError, match="it has 2 members"):
            await rebalanced(node.address, "g", members=3, timeout_s=2.0)


async def test_a_group_with_uneven_shares_by_its_strategy_settles_too(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 16)
    options: dict[str, Any] = {"strategy": CONSISTENT_HASH, "start": "first"}
    async with (
        Consumer(node.address, "g", "t", Inbox(), **options) as one,
        Consumer(node.address, "g", "t", Inbox(), **options) as two,
        AdminClient(node.address) as admin,
    ):
        shares = await rebalanced(node.address, "g", members=2)
        (report,) = await admin.history("g")
        owned_by = Counter(item["clientId"] for item in report["owners"])
        assert shares == {member.client_id: owned_by[member.client_id] for member in (one, two)}
        for item in report["owners"]:
            item["clientId"] = {one.client_id: two.client_id, two.client_id: one.client_id}[item["clientId"]]

        async def look() -> list[dict[str, Any]]:
            return [report]

        with pytest.raises(TimeoutError, match="are not those of CONSISTENT_HASH yet"):
            await rebalanced_by(look, "g", members=2, timeout_s=0.1)


async def test_members_learn_immediately_that_a_topic_has_grown(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox()) as consumer:
        await consumer.assigned()
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 5, 5, 6)))
        await eventually(lambda: len(owned(consumer)) == 5)


async def test_a_topic_that_grew_while_no_name_server_answered_is_looked_up_again() -> None:
    async with Broker() as broker:
        broker.create_topic("t", 2)
        async with Consumer(
            broker.address, "g", "t", Inbox(), limits=ClientLimits(route_interval_s=10 * PATIENCE_S)
        ) as consumer:
            await consumer.assigned()
            broker.faults.add(Fault.answer("GET_ROUTEINFO_BY_TOPIC", response="SYSTEM_ERROR", topic="t", times=4))
            broker.create_topic("t", 5)
            await eventually(lambda: len(owned(consumer)) == 5)


async def test_a_member_that_sees_too_few_queues_is_notified_when_name_servers_know_all(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    await join(wire, "c1", queue_counts={"broker-a": {"t": 3}})
    await told_of_growth(wire)
    node.broker.notifications.topics_registered()
    await told_of_growth(wire)


async def test_a_member_that_looked_before_a_topic_grew_is_notified_when_it_joins(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    await join(wire, "c1", queue_counts={"broker-a": {"t": 3}})
    await told_of_growth(wire)


async def test_a_member_that_gets_its_place_asks_when_the_others_see_more_queues(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """Its route lacks a broker that the new member knows: a place among the members divides the queues that all know."""
    await create_topic(wire, "t", 2)
    await create_topic(wire, "%RETRY%g", 1)
    async with Consumer(
        node.address, "g", "t", Inbox(), limits=ClientLimits(rebalance_interval_s=10 * PATIENCE_S)
    ) as consumer:
        await consumer.assigned()
        await join(await connect(node.address), "0", strategy="AVG", queue_counts={"broker-z": {"t": 2}})
        # among a:0, a:1, z:0 and z:1 the second of two members has the last ones, wherever broker-z is
        await eventually(lambda: owned(consumer) == set())


async def told_of_growth(wire: Wire) -> None:
    while (told := await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)).ext.get("topic") is None:
        pass  # a member has come
    assert (told.ext["consumerGroup"], told.ext["topic"]) == ("g", "t")


async def test_a_member_whose_queue_list_is_stale_is_named(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    await join(wire, "c1", queue_counts={"broker-a": {"t": 3}, "elsewhere": {"t": 1}})
    group = node.broker.groups.obtain("g")
    assert group.reported == {"c1 sees 3 queues of t at broker-a, there are 4"}
    await join(wire, "c1", queue_counts={"broker-a": {"t": 4}})
    assert group.reported == frozenset()


async def test_two_members_that_read_one_queue_are_named(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 1)
    await send(one)
    for wire, name in ((one, "c1"), (two, "c2")):
        await join(wire, name)
    for wire in (one, two):
        await wire.call(RequestCode.PULL_MESSAGE, pull())
    assert node.broker.locks.double_readers == 0, "a queue may change hands"
    await one.call(RequestCode.PULL_MESSAGE, pull())
    assert node.broker.locks.double_readers == 1
    (event,) = [event for event in node.broker.history.of("g") if event["event"] == "two readers"]
    assert event["fault"] == "t:0 is read by c2 and c1"


async def test_a_queue_that_comes_back_by_its_lock_has_one_reader(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 1)
    await send(one)
    for wire, name in ((one, "c1"), (two, "c2")):
        await join(wire, name)
    for wire, name in ((one, "c1"), (two, "c2"), (one, "c1")):
        await lock(wire, name)
        assert (await wire.call(RequestCode.PULL_MESSAGE, pull())).code == 0
        await lock(wire, name, code=RequestCode.UNLOCK_BATCH_MQ)
    assert node.broker.locks.double_readers == 0


async def test_a_foreign_member_that_gets_a_queue_back_from_one_of_ours_reads_alone(
    node: Node, connect: Connect
) -> None:
    foreign, ours = await connect(node.address), await connect(node.address)
    await create_topic(ours, "t", 1)
    await send(ours)
    await join(foreign, "c1")
    await foreign.call(RequestCode.PULL_MESSAGE, pull())
    await join(ours, "c2", strategy="AVG")
    await lock(ours, "c2")
    await ours.call(RequestCode.PULL_MESSAGE, pull())
    await lock(ours, "c2", code=RequestCode.UNLOCK_BATCH_MQ)
    await foreign.call(RequestCode.PULL_MESSAGE, pull())
    assert node.broker.locks.double_readers == 0


@pytest.mark.still
async def test_a_queue_that_nobody_reads_is_named(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    await send(wire)
    await join(wire, "c1")
    await wire.call(RequestCode.PULL_MESSAGE, pull())
    node.clock.advance(ORPHAN_S)
    assert not node.broker.watch.orphaned(), "not yet"
    node.clock.advance(2 * LEASE_SWEEP_S)
    faults = {event["fault"] for event in node.broker.history.of("g") if event["event"] == "orphaned"}
    assert faults == {"t:1 has no reader"}
    assert node.broker.watch.orphaned() == {("g", "t"): 1}


async def test_the_history_has_the_first_pull_and_commit_of_each_owner(node: Node, one_queue: None) -> None:
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first") as consumer, Producer(node.address) as producer:
        for _ in range(3):
            await producer.send("t", b"x")
            await eventually(lambda: len(inbox.messages) >= 1)
            await consumer.commit()
        await eventually(lambda: any(event["event"] == "assigned" for event in node.broker.history.of("g")))
    events = [event["event"] for event in node.broker.history.of("g") if event.get("topic", "t") == "t"]
    for name in ("joined", "locked", "first pull", "first commit", "unlocked", "left"):
        assert events.count(name) == 1, (name, events)


async def test_the_timeline_can_be_followed(node: Node, four_queues: None) -> None:
    async with Consumer(node.address, "g", "t", Inbox()):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rocketlet.command.cli", "groups", "show", "g", "--nameserver", node.address, "--timeline",
            "--follow", "--json", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        first = orjson.loads(await process.stdout.readline())
        assert "joined" in [event["event"] for event in first["events"]]
        async with Consumer(node.address, "g", "t", Inbox()) as late:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    event = orjson.loads(await process.stdout.readline())
                    if event["event"] == "joined" and event["client"] == late.client_id:
                        break
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_report_of_an_unknown_group_fails(node: Node, as_json: bool) -> None:
    with pytest.raises(ConfigError, match="no broker knows the group nobody"):
        await report("nobody", node.address, timeline=True, as_json=as_json)


async def test_a_group_without_members_has_a_report(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("shop"))
    await report("shop", node.address, timeline=False, as_json=False)
    assert "group shop: 0 members, 0 queues locked\n  settings: retries 16, " in capsys.readouterr().out


async def test_metrics_show_lag_and_what_members_disagree_in(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(metrics_port=0)
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 1)
    for _ in range(5):
        await send(one)
    await join(one, "c1")
    await join(two, "c2", "u")
    url = f"http://127.0.0.1:{node.server.metrics_port}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=PATIENCE_S).read())).decode()
    assert f'rocketlet_messages_put_total{{{PLACE},topic="t"}} 5.0' in text
    assert f'rocketlet_group_lag{{{PLACE},group="g",topic="t"}} 5.0' in text
    assert f'rocketlet_group_members{{{PLACE},group="g"}} 2.0' in text
    assert f'rocketlet_group_disagreements{{{PLACE},group="g"}} 2.0' in text


async def test_heartbeat_answer_names_disagreements_when_the_member_is_a_rocketlet_member(
    node: Node, connect: Connect
) -> None:
    def beat(client_id: str, topic: str, version: str | None) -> bytes:
        data = ConsumerData("g", subscriptions=(parse_subscription(topic, "*"),), own_version=version)
        return encode_heartbeat(Heartbeat(client_id, (data,)))

    one, two = await connect(node.address), await connect(node.address)
    assert not (await one.call(RequestCode.HEART_BEAT, {}, beat("c1", "t", "1.0"))).ext.get("disagreements")
    assert not (await two.call(RequestCode.HEART_BEAT, {}, beat("c2", "u", None))).ext.get("disagreements")
    told = (await one.call(RequestCode.HEART_BEAT, {}, beat("c1", "t", "1.0"))).ext["disagreements"]
    assert str(told).splitlines() == [
        "g: c1 not subscribed to u, while c2 are",
        "g: c2 not subscribed to t, while c1 are",
    ]
    foreign = await two.call(RequestCode.HEART_BEAT, {}, beat("c2", "u", None))
    assert not foreign.ext.get("disagreements"), "other clients would not read it"


async def test_lag_is_shown_with_members_without_and_after_a_restart(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await nodes.start(metrics_port=0)

    async def shown(members: int, lag: int) -> None:
        """In metrics and in `rocketlet groups`, as text and as JSON."""
        url = f"http://127.0.0.1:{node.server.metrics_port}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=PATIENCE_S).read())).decode()
        assert f'rocketlet_group_members{{{PLACE},group="g"}} {members}.0' in text
        assert f'rocketlet_group_lag{{{PLACE},group="g",topic="t"}} {lag}.0' in text
        (age,) = [
            line for line in text.splitlines() if line.startswith("rocketlet_group_oldest_seconds") and '"t"' in line
        ]
        assert (float(age.split()[-1]) > 0) == (lag > 0)
        capsys.readouterr()
        await report("g", node.address, timeline=False, as_json=False)
        text = capsys.readouterr().out
        assert f"group g: {members} member" in text
        assert f"  t: {lag} message" in text
        assert ("the oldest stored" in text) == (lag > 0)
        await report("g", node.address, timeline=False, as_json=True)
        (found,) = orjson.loads(capsys.readouterr().out)["brokers"]
        assert [entry["messages"] for entry in found["lag"] if entry["topic"] == "t"] == [lag]

    inbox = Inbox()
    async with Producer(node.address) as producer:
        await producer.send_batch("t", [b"x"] * 3)
        async with Consumer(node.address, "g", "t", inbox, start="first") as consumer:
            await eventually(lambda: len(inbox.messages) == 3)
            await consumer.commit()
            await shown(1, 0)
        await producer.send_batch("t", [b"x"] * 5)
    await shown(0, 5)
    await node.stop()
    node = await nodes.start(metrics_port=0)
    await shown(0, 5)


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"])
async def test_the_broker_computes_assignments_for_who_asks(node: Node, connect: Connect, strategy: str) -> None:
    wires = [await connect(node.address) for _ in range(3)]
    await create_topic(wires[0], "t", 8)
    for number, wire in enumerate(wires):
        await join(wire, f"c{number}")
    found: list[int] = []
    for number, wire in enumerate(wires):
        request = {"topic": "t", "consumerGroup": "g", "clientId": f"c{number}", "strategyName": strategy}
        answer = await wire.call(RequestCode.QUERY_ASSIGNMENT, body=orjson.dumps(request))
        items = orjson.loads(answer.body)["messageQueueAssignments"]
        assert {item["mode"] for item in items} <= {"PULL"}
        found += [item["messageQueue"]["queueId"] for item in items]
    assert sorted(found) == list(range(8))
    request = {"topic": "t", "consumerGroup": "g", "clientId": "c0", "messageModel": "BROADCASTING"}
    answer = await wires[0].call(RequestCode.QUERY_ASSIGNMENT, body=orjson.dumps(request))
    assert len(orjson.loads(answer.body)["messageQueueAssignments"]) == 8
    for wrong in ({"strategyName": "MINE"}, {"topic": "nowhere"}):
        answer = await wires[0].call(RequestCode.QUERY_ASSIGNMENT, body=orjson.dumps(request | wrong))
        assert answer.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.TOPIC_NOT_EXIST)


async def test_an_assignment_needs_no_name_server_in_the_same_process(nodes: Nodes, connect: Connect) -> None:
    names = await nodes.start(name="broker-a")
    other = await nodes.start(name="broker-b", name_servers=(names.address,))
    wire = await connect(other.address)
    await create_topic(wire, "t", 3)
    await join(wire, "c0")
    request = orjson.dumps({"topic": "t", "consumerGroup": "g", "clientId": "c0"})

    async def has_all_queues() -> bool:
        answer = await wire.call(RequestCode.QUERY_ASSIGNMENT, body=request)
        return answer.code == 0 and len(orjson.loads(answer.body)["messageQueueAssignments"]) == 3

    await eventually(has_all_queues)


async def test_a_rebalance_and_a_hand_over_are_one_event_each_with_all_that_was_decided(
    node: Node, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    def events(name: str, client_id: str) -> list[dict[str, Any]]:
        found = [vars(record) for record in caplog.records if vars(record).get("event") == name]
        ours = [record["fields"] for record in found if name != "rebalanced" or record["fields"]["topic"] == "t"]
        return [fields for fields in ours if fields.get("client_id", client_id) == client_id]

    caplog.set_level(logging.INFO, "rocketlet.membership")
    await create_topic(wire, "t", 3)
    async with Consumer(node.address, "g", "t", Inbox()) as one:
        await one.assigned()
        async with Consumer(node.address, "g", "t", Inbox()) as two:
            await rebalanced(node.address, "g", members=2)
            first, second = events("rebalanced", one.client_id)
            before, after = [f"t@broker-a:{number}" for number in range(3)], sorted(map(str, owned(one)))
            decided = {"strategy": "AVG", "group": "g", "topic": "t", "client_id": one.client_id, "queues": 3}
            whole = {"members": 1, "result_count": 3, "result": before, "added": before, "removed": []}
            assert first.pop("look_up_ms") >= 0
            assert first == decided | whole
            lost = sorted(set(before) - set(after))
            share = {"members": 2, "result_count": len(after), "result": after, "added": [], "removed": lost}
            assert second.pop("look_up_ms") >= 0
            assert second == decided | share
            handed_over = events("queue_handed_over", one.client_id)
            assert sorted(fields["queue"] for fields in handed_over) == lost
            steps = {"queue", "offset", "drain_ms", "commit_ms", "unlock_ms"}
            assert all(fields.keys() == steps for fields in handed_over)
            assert sorted(map(str, owned(two))) == lost
