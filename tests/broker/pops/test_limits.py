"""The limits of messages that are shared, each at its edge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rocketlet.broker.config import LIMITS, MAX_POP_MESSAGES, POOL_IDLE_S, LimitExceeded
from rocketlet.broker.pops.lite_subscriptions import LiteSync
from rocketlet.broker.pops.requests import AckStatus, PopClient, Why
from rocketlet.broker.sessions.refusal import Refusal
from rocketlet.broker.sessions.session import Session
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, finish
from rocketlet.protocol.group_bodies import LiteAction

from ...conftest import limits_of
from .world import WILDCARD, FakeSession, World, bodies, client_of, handles, lite_sender


class Client(FakeSession):
    """A client's session, which may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self._actions: list[Callable[[Session], None]] = []

    def on_lost(self, action: Callable[[Session], None]) -> None:
        self._actions.append(action)

    def lose(self) -> None:
        for action in self._actions:
            action(self)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(tmp_path / "data", queues=2, limits=limits_of(request))


def fill(world: World, count: int, queue: int = 0, **properties: str) -> None:
    for number in range(count):
        world.send(f"{queue}-{number}", queue=queue, **properties)


def test_a_receive_gets_no_more_than_32_messages(world: World) -> None:
    fill(world, MAX_POP_MESSAGES + 1)
    assert len(world.receive(1000).messages) == MAX_POP_MESSAGES


def test_a_receive_gets_no_more_bytes_than_it_takes_but_one_message_always(world: World) -> None:
    fill(world, 3)
    size = len(world.state.pools.peek("g", "t", None, 1)[0].record)
    assert len(world.receive(max_bytes=2 * size).messages) == 2
    assert len(world.receive(max_bytes=size - 1).messages) == 1


def test_a_message_that_is_redelivered_is_not_overtaken_because_it_is_large(world: World) -> None:
    world.send("small")
    world.send("x" * 1000)
    world.send("small too")
    received = world.receive(2, 1000)
    world.advance(1)
    room = len(received.messages[0].record) + 10
    assert bodies(world.receive(max_bytes=room)) == ["small"]
    assert bodies(world.receive(max_bytes=room)) == ["x" * 1000]


@pytest.mark.limits(max_unfinished=3)
def test_a_queue_with_too_much_in_flight_waits(world: World) -> None:
    fill(world, 5)
    received = world.receive()
    assert len(received.messages) == 3
    got = world.wait()
    assert not got
    world.ack(handles(received)[1])
    assert bodies(got[0]) == ["0-3"]
    assert world.receive().why is Why.NOTHING_NEW


@pytest.mark.limits(max_unfinished_of_group=3)
def test_a_group_with_too_much_in_flight_waits(world: World) -> None:
    fill(world, 2, queue=0)
    fill(world, 2, queue=1)
    received = world.receive()
    assert len(received.messages) == 3
    got = world.wait()
    assert not got
    world.ack(handles(received)[0])
    assert len(got[0].messages) == 1


@pytest.mark.limits(max_unfinished_in_order=4)
def test_a_group_in_order_looks_past_this_many_messages(world: World) -> None:
    world.group("g", consume_orderly=True)
    fill(world, 5, __SHARDINGKEY="a")
    world.send("b", __SHARDINGKEY="b")
    first = world.receive(1)
    assert bodies(first) == ["0-0"]
    assert world.receive().why is Why.NOTHING_NEW  # b lies behind what is read
    assert world.state.pools.numbers("g", "t")[0].waiting == 3
    world.ack(*handles(first))
    assert bodies(world.receive(3)) == ["0-1", "0-2", "0-3"]


@pytest.mark.limits(max_waiting_receives=2)
def test_no_more_receives_wait_than_that(world: World) -> None:
    client = Client()
    client.address = "127.0.0.1"
    waits = [world.wait(session=client) for _ in range(3)]
    assert [got[0].why if got else None for got in waits] == [None, None, Why.TOO_MANY_WAIT]
    world.advance(20)
    assert [got[0].why for got in waits[:2]] == [Why.NOTHING_NEW] * 2
    assert world.state.waiting == 0


def test_what_retention_has_removed_is_finished_and_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    fill(world, 2)
    world.receive(invisible_ms=1000)
    world.store.queues["t", 0].begin = 1
    world.advance(1)
    assert bodies(world.receive()) == ["0-1"]
    assert "popped_message_gone" in capsys.readouterr().out
    assert world.offsets.get("g", "t", 0) == 1


@pytest.mark.limits(max_unused_pools=1)
def test_groups_that_nobody_pops_any_more_are_kept_for_a_while_and_no_more_of_them_than_that(world: World) -> None:
    clients = [Client() for _ in range(3)]
    for group, client in zip(("a", "b", "c"), clients, strict=True):
        world.receive(group=group, client=group, session=client)
    pools = world.state.pools.all
    clients[0].lose()
    world.turn()
    assert {(pool.group, pool.topic) for pool in pools} == {("a", "t"), ("b", "t"), ("c", "t")}
    clients[1].lose()
    world.turn()
    assert {(pool.group, pool.topic) for pool in pools} == {("b", "t"), ("c", "t")}
    world.clock.advance(POOL_IDLE_S)
    world.state.expire_clients()
    assert {(pool.group, pool.topic) for pool in pools} == {("c", "t")}, "its client may come back for two minutes"
    world.clock.advance(LIMITS.heartbeat_limit_s)
    world.state.expire_clients()
    assert not pools


def test_a_group_whose_clients_are_gone_keeps_what_is_in_flight_and_continues_where_it_was(world: World) -> None:
    session = Client()
    fill(world, 2)
    received = world.receive(invisible_ms=60_000, session=session)
    world.ack(handles(received)[0])
    fill(world, 1, queue=1)
    world.ack(*handles(world.receive(session=session)))
    session.lose()
    world.advance(POOL_IDLE_S)
    world.state.expire_clients()
    assert list(world.state.pools.numbers("g", "t")) == [0], "nothing of the other queue is in flight"
    assert world.ack(handles(received)[1]) == [AckStatus.DONE]
    world.state.expire_clients()
    assert not world.state.pools.all
    assert [world.offsets.get("g", "t", queue) for queue in (0, 1)] == [2, 1]
    fill(world, 1, queue=1)
    world.kill()
    world.open()
    assert bodies(world.receive()) == ["1-0"]


@pytest.mark.limits(max_lite_subscriptions=4)
def test_address_has_half_of_the_subscriptions_to_lite_topics(world: World) -> None:
    world.topics.put(TopicConfig("CHAT", 1, 1, message_type="LITE"), world.store.end)
    world.groups.put(GroupConfig("g", attributes={"lite.bind.topic": "CHAT"}))
    lite, sessions = world.state.lite, [FakeSession() for _ in range(3)]
    for number, session in enumerate(sessions):
        session.address = f"10.0.0.{number // 2}"

    def sync(number: int, *names: str, action: LiteAction = LiteAction.PARTIAL_ADD) -> None:
        client = PopClient(f"c{number}", account_id=("", f"c{number}"))
        finish(lite.sync(LiteSync(client, sessions[number], "g", "CHAT", action, names)))

    sync(0, "a")
    sync(1, "a")
    for number in (0, 1):
        with pytest.raises(Refusal, match="half of them of one address"):
            sync(number, "b")
    sync(2, "a", "b")
    sync(0, "a", action=LiteAction.PARTIAL_REMOVE)
    sync(1, "b")
    assert lite.count == 4
    sync(1, action=LiteAction.COMPLETE_REMOVE)
    world.turn()
    sync(0, "a", "b")
    world.state.group_deleted("g")
    world.turn()
    assert lite.count == 0


@pytest.mark.limits(max_lite_subscriptions=4)
def test_account_has_half_of_the_subscriptions_to_lite_topics_from_all_its_addresses(world: World) -> None:
    world.topics.put(TopicConfig("CHAT", 1, 1, message_type="LITE"), world.store.end)
    world.groups.put(GroupConfig("g", attributes={"lite.bind.topic": "CHAT"}))
    lite = world.state.lite

    def sync(number: int, account: str, *names: str, action: LiteAction = LiteAction.PARTIAL_ADD) -> None:
        session = FakeSession()
        session.address = f"10.0.0.{number}"
        client = PopClient(f"c{number}", account_id=(account, f"c{number}"))
        finish(lite.sync(LiteSync(client, session, "g", "CHAT", action, names)))

    sync(1, "one", "a")
    sync(2, "one", "a")
    with pytest.raises(Refusal, match="half of them of one address or account"):
        sync(3, "one", "a")
    sync(4, "two", "a")
    sync(2, "one", action=LiteAction.COMPLETE_REMOVE)
    world.turn()
    sync(3, "one", "a")
    assert lite.count == 3


@pytest.mark.limits(max_lite_offsets=4)
def test_address_opens_half_of_the_offsets_in_lite_topics(world: World) -> None:
    send, sessions = lite_sender(world), [FakeSession() for _ in range(3)]
    world.groups.put(GroupConfig("g", attributes=WILDCARD))
    world.groups.put(GroupConfig("h", attributes=WILDCARD))
    for session, address in zip(sessions, ("10.0.0.1", "10.0.0.1", "10.0.0.2"), strict=True):
        session.address = address

    def found(number: int, group: str = "g") -> list[str]:
        client = PopClient(f"c{number}", account_id=("", f"c{number}"))
        finish(world.state.lite.sync(LiteSync(client, sessions[number], group, "CHAT", LiteAction.COMPLETE_ADD, ())))
        world.turn()
        return bodies(world.receive(1, group=group, topic="CHAT", client=client, session=sessions[number]))

    for name in "abc":
        send(name, name)
    assert found(0) + found(1) == ["a", "b"]
    for number, group in ((0, "g"), (1, "h")):
        with pytest.raises(LimitExceeded, match="half of them for one address"):
            found(number, group)
    assert (found(2), found(2, "h"), world.state.pools.lite_offsets.count) == (["c"], ["b"], 4)
    world.state.group_deleted("g")
    assert (found(1, "h"), found(0, "h")) == (["c"], ["a"])
    world.state.expiry.delete(world.state.pools.lites.of("CHAT")["b"])
    assert world.state.pools.lite_offsets.count == 2


def test_pool_of_lite_topics_ends_when_its_topic_has_none_any_more(world: World) -> None:
    send = lite_sender(world)
    world.groups.put(GroupConfig("g", attributes=WILDCARD))
    send("a", "0")
    client = client_of("c")
    finish(world.state.lite.sync(LiteSync(client, FakeSession(), "g", "CHAT", LiteAction.COMPLETE_ADD, ())))
    world.turn()
    assert bodies(world.receive(group="g", topic="CHAT", client=client)) == ["0"]
    waiting = world.wait(group="g", topic="CHAT", client=client)
    settings = TopicConfig("CHAT", 1, 1)
    world.topics.put(settings, world.store.end)
    world.state.topic_changed(settings)
    assert [result.why for result in waiting] == [Why.GROUP_GONE]
    world.groups.put(GroupConfig("g"))
    assert bodies(world.receive(group="g", topic="CHAT", client=client)) == ["0"], "by the queue of the topic"
