"""What one event does to many clients, groups or messages is done in pieces, so that others do not wait for all of them.

Turns have no time in these tests, so only what is done immediately is done. Then they have some, and the rest follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.config import LIMITS, MAX_POP_MESSAGES, POSTPONED_AT_ONCE, STANDSTILL_S
from rocketlet.broker.pops.deadlines import Deadlines
from rocketlet.broker.pops.deliveries import Delivery, DeliveryState
from rocketlet.broker.pops.lite_subscriptions import LiteSync
from rocketlet.broker.pops.pool import QueueDeliveries
from rocketlet.broker.pops.requests import PopClient, PopResult, Why
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, finish
from rocketlet.protocol.group_bodies import LiteAction

from .world import WILDCARD, FakeSession, World, bodies, client_of, handles, lite_sender

AT_ONCE = LIMITS.affected_at_once
MANY = 10 * AT_ONCE


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data", queues=2)


Waiting = list[list[PopResult]]


def ended(waiting: Waiting) -> int:
    return sum(map(bool, waiting))


def iterate(world: World, count: int = 3) -> None:
    """Some event-loop iterations are over."""
    for _ in range(count):
        soon, world.clock.soon[:] = list(world.clock.soon), []
        for action in soon:
            action()


def in_pieces(world: World, waiting: Waiting, event: Callable[[], object], least: int = 1) -> list[PopResult]:
    """The event ends some of the receives immediately, and the rest in turns."""
    turn_s, world.turns.turn_s = world.turns.turn_s, -1
    event()
    iterate(world)
    assert least <= ended(waiting) <= AT_ONCE
    world.turns.turn_s = turn_s
    world.turn()
    assert ended(waiting) == len(waiting)
    return [result for results in waiting for result in results]


def test_messages_wake_the_receives_of_one_group_in_pieces(world: World) -> None:
    waiting = [world.wait(1) for _ in range(MANY)]

    def send() -> None:
        with world.appender.batch():
            queue = world.store.queue("t", 0)
            for number in range(MANY):
                world.appender.stage(queue, b"%d" % number, b"", 0, 0, 0, 1, bytes(8))

    found = in_pieces(world, waiting, send)
    assert sorted(int(body) for result in found for body in bodies(result)) == list(range(MANY))


def test_message_wakes_the_receives_of_many_groups_in_pieces(world: World) -> None:
    waiting = [world.wait(group=f"g{number}") for number in range(MANY)]
    found = in_pieces(world, waiting, lambda: world.send("m"))
    assert all(bodies(result) == ["m"] for result in found)


def test_messages_that_arrive_while_groups_are_woken_reach_all_of_them(world: World) -> None:
    names = [f"g{number}" for number in range(MANY)]
    waiting = [world.wait(1, group=name) for name in names]
    world.turns.turn_s, turn_s = -1, world.turns.turn_s
    world.send("first")
    world.send("second", queue=1)
    world.turns.turn_s = turn_s
    world.turn()
    for name, results in zip(names, waiting, strict=True):
        found = [*results, world.receive(group=name)]
        assert sorted(body for result in found for body in bodies(result)) == ["first", "second"]


def test_message_waits_for_no_groups_of_another_topic_in_the_same_commit(world: World) -> None:
    for topic in "AB":
        world.topics.put(TopicConfig(topic, 1, 1), world.store.end)
    many = [world.wait(1, topic="A", group=f"g{number}") for number in range(MANY)]
    other = world.wait(1, topic="B", group="b")
    world.turns.turn_s = -1  # only what is done immediately is done
    with world.appender.batch():
        for topic in "AB":
            world.appender.stage(world.store.queue(topic, 0), b"m", b"", 0, 0, 0, 1, bytes(8))
    assert [bodies(result) for result in other] == [["m"]]
    assert 0 < ended(many) < MANY


def test_lite_message_wakes_the_receives_of_many_groups_in_pieces(world: World) -> None:
    send = lite_sender(world)
    send("a", "0")
    waiting: Waiting = []
    for number in range(MANY):
        world.groups.put(GroupConfig(f"g{number}", attributes=WILDCARD))
        world.state.pools.lite_pool(f"g{number}", "CHAT").queues.set_offset("a", 1)
        waiting.append(world.wait(group=f"g{number}", topic="CHAT"))
    found = in_pieces(world, waiting, lambda: send("a", "1"))
    assert all(bodies(result) == ["1"] for result in found)


def test_receives_of_a_client_that_is_gone_end_in_pieces(world: World) -> None:
    waiting = [world.wait() for _ in range(MANY)]
    found = in_pieces(world, waiting, lambda: world.state.client_gone(client_of("c")))
    assert {result.why for result in found} == {Why.CLIENT_GONE}


def test_receives_of_a_session_that_is_gone_end_in_pieces(world: World) -> None:
    session = FakeSession()
    waiting = [world.wait(client=PopClient("", session=session)) for _ in range(MANY)]
    found = in_pieces(world, waiting, lambda: world.state.session_gone(session))
    assert {result.why for result in found} == {Why.CLIENT_GONE}


def test_messages_of_a_client_that_is_gone_are_redelivered_in_pieces(world: World) -> None:
    world.receive()
    for number in range(MANY):
        world.send(f"{number}")
    for _ in range(0, MANY, MAX_POP_MESSAGES):
        world.receive(auto_renew=True)
    waiting = [world.wait(1, client="other") for _ in range(MANY)]
    found = in_pieces(world, waiting, lambda: world.state.client_gone(client_of("c")), 0)
    assert sorted(int(body) for result in found for body in bodies(result)) == list(range(MANY))


@pytest.mark.parametrize("kind", ["topic", "group", "group that keeps its offsets"])
def test_receives_of_what_is_deleted_end_in_pieces(world: World, kind: str) -> None:
    waiting = [world.wait(client=f"c{number}") for number in range(MANY)]
    state = world.state
    event: dict[str, Callable[[], object]] = {
        "topic": lambda: state.topic_deleted("t"),
        "group": lambda: state.group_deleted("g"),
        "group that keeps its offsets": lambda: state.end_receives("g"),
    }
    found = in_pieces(world, waiting, event[kind])
    assert {result.why for result in found} == {Why.TOPIC_GONE if kind == "topic" else Why.GROUP_GONE}
    assert state.waiting == 0


def test_receives_of_many_groups_of_a_deleted_topic_end_in_pieces(world: World) -> None:
    waiting = [world.wait(group=f"g{number}") for number in range(MANY)]
    found = in_pieces(world, waiting, lambda: world.state.topic_deleted("t"))
    assert {result.why for result in found} == {Why.TOPIC_GONE}


def test_group_of_a_deleted_parent_starts_again_while_its_former_receives_end(world: World) -> None:
    send = lite_sender(world)
    world.groups.put(GroupConfig("g", attributes=WILDCARD))
    waiting = [world.wait(client=f"c{number}", topic="CHAT") for number in range(MANY)]
    turn_s, world.turns.turn_s = world.turns.turn_s, -1
    world.state.topic_deleted("CHAT")
    assert 0 < ended(waiting) <= AT_ONCE
    request = world.last_wait.request
    again: list[PopResult] = []
    world.begin(request, again.append)
    world.turns.turn_s = turn_s
    world.turn()
    assert (ended(waiting), again, world.state.waiting) == (MANY, [], 1)
    send("a", "1")
    world.turn()
    assert [bodies(result) for result in again] == [["1"]]


def test_lite_client_that_returns_while_its_former_receives_end_keeps_its_new_subscriptions(world: World) -> None:
    send = lite_sender(world)
    world.groups.put(GroupConfig("g", attributes={"lite.bind.topic": "CHAT"}))
    session: Any = FakeSession()
    subscribe = LiteSync(client_of("c"), session, "g", "CHAT", LiteAction.COMPLETE_ADD, ("a",))
    finish(world.state.lite.sync(subscribe))
    waiting = [world.wait(topic="CHAT") for _ in range(MANY)]
    turn_s, world.turns.turn_s = world.turns.turn_s, -1
    world.state.client_gone(client_of("c"))
    assert 0 < ended(waiting) <= AT_ONCE
    finish(world.state.lite.sync(subscribe))
    world.turns.turn_s = turn_s
    world.turn()
    assert ended(waiting) == MANY
    again = world.wait(topic="CHAT")
    send("a", "1")
    world.turn()
    assert [bodies(result) for result in again] == [["1"]]


def test_receives_end_in_pieces_when_the_broker_stops(world: World) -> None:
    waiting = [world.wait() for _ in range(MANY)]
    found = in_pieces(world, waiting, world.state.stop)
    assert {result.why for result in found} == {Why.STOPPED}


def test_receives_whose_time_is_over_together_end_in_pieces(world: World) -> None:
    waiting = [world.wait(wait_ms=1000) for _ in range(MANY)]
    turn_s, world.turns.turn_s = world.turns.turn_s, -1
    world.clock.advance(1)
    iterate(world)
    assert ended(waiting) <= AT_ONCE
    world.turns.turn_s = turn_s
    world.turn()
    assert {result.why for results in waiting for result in results} == {Why.NOTHING_NEW}
    assert ended(waiting) == MANY


def test_deadlines_are_postponed_in_pieces_after_a_suspension(world: World) -> None:
    """Acknowledgements that arrived meanwhile are not read yet."""
    world.receive()
    count = POSTPONED_AT_ONCE + 10
    for number in range(count):
        world.send(f"{number}")
    found = []
    for _ in range(count):
        found.append(world.receive(1, invisible_ms=10_000))
        world.advance(0.01)
    world.clock.suspend(10 + STANDSTILL_S)
    for _ in range(2):
        world.clock.advance(0)
    world.turn()
    assert not world.receive().messages, "none was redelivered"
    for result in found:
        assert world.ack(*handles(result))
    world.advance(60)
    assert not world.receive().messages


def test_unreadable_messages_of_a_lite_topic_are_passed_some_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = lite_sender(world)
    world.groups.put(GroupConfig("g", attributes=WILDCARD))
    assert not world.receive(topic="CHAT").messages
    waiting = world.wait(topic="CHAT", invisible_ms=1000)
    for number in range(MAX_POP_MESSAGES):
        send("a", f"{number}")
    world.ack(*handles(waiting[0]), topic="%LMQ%$CHAT$a")
    assert len(world.wait(topic="CHAT", invisible_ms=1000)[0].messages) == MAX_POP_MESSAGES - 1
    for number in range(MAX_POP_MESSAGES):
        send("a", f"{number}")
    world.advance(2)
    reads: list[Any] = []
    lites = world.state.pools.lites
    monkeypatch.setattr(lites, "record", lambda *of: reads.append(of))
    again = world.wait(topic="CHAT")
    assert 0 < len(reads) <= 3 * MAX_POP_MESSAGES
    assert not again
    assert world.state.pools.lite_pool("g", "CHAT").queues.lag(lites.of("CHAT")["a"]) == 0


class Batch(list[Delivery]):
    """Counts how often a batch is examined."""

    examined = 0

    def __iter__(self) -> Iterator[Delivery]:
        Batch.examined += 1
        return super().__iter__()


class Expired(list[int]):
    def expire(self, deliveries: QueueDeliveries, due: list[Delivery]) -> None:
        for delivery in due:
            delivery.state = DeliveryState.VISIBLE
            self.append(delivery.offset)


@pytest.mark.parametrize("count", [7 * MANY, 20 * MANY])  # while they are removed, and after that
def test_deadlines_of_finished_deliveries_are_removed_a_few_at_a_time(world: World, count: int) -> None:
    world.send("0")
    world.receive()
    deliveries = next(world.state.pools.deliveries())
    expired = Expired()
    deadlines, most, live = Deadlines(world.clock, expired.expire), 0, set()
    for number in range(count):
        delivery = Delivery(number, DeliveryState.IN_FLIGHT)
        delivery.deadline_s = world.clock.monotonic_s() + 10 + number % 7
        Batch.examined = 0
        deadlines.put(deliveries, Batch([delivery]), delivery.deadline_s)
        most = max(most, Batch.examined)
        if number % 10:
            delivery.state = DeliveryState.FINISHED
        else:
            live.add(number)
    assert 0 < most <= 8, "few of them, however many there are"
    world.clock.advance(17)
    world.turn()
    assert (set(expired), len(expired)) == (live, len(live))
