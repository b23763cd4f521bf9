"""A member's share of a topic: what a broker sends unasked is used while it holds, and everything else is asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from rocketlet.client.errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from rocketlet.client.member.membership import Share, Shares
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol import group_bodies
from rocketlet.protocol.allocation import AVG, CONSISTENT_HASH, STICKY, Strategy
from rocketlet.protocol.codes import EXT_DETAIL, EXT_PLACES, EXT_SEEN_QUEUES, EXT_SHARES
from rocketlet.protocol.frame import Ext, Frame
from rocketlet.protocol.group_bodies import BrokerShare, Place
from rocketlet.protocol.names import Queue

A = [Queue("t", "a", number) for number in range(2)]
B = [Queue("t", "b", number) for number in range(2)]
MINE: Ext = {"index": "0", "count": "2"}


class Broker:
    """A connection whose answers are made beforehand. `asked`: the fields of what it was asked."""

    def __init__(self, ext: Ext, body: bytes = b"", error: RocketletError | None = None) -> None:
        self.answer = Frame(0, 0, ext, body)
        self.error = error
        self.asked: list[Ext] = []

    async def request(self, code: int, ext: Ext) -> Frame:
        self.asked.append(ext)
        if self.error is not None:
            raise self.error
        return self.answer


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rocketlet.client.member.membership.clock_s", clock)
    return clock


def shares_at(strategy: Strategy = AVG, **brokers: Broker) -> Shares:
    async def broker(name: str) -> Broker:
        return brokers[name]

    return Shares(cast("ClusterView", SimpleNamespace(connected=brokers.get, broker=broker)), "g", "me", strategy)


def tell(shares: Shares, broker: Broker, ext: dict[str, object]) -> None:
    shares.record_notification(cast("Connection", broker), ext)


def place(position: int, members: int, queues: int) -> dict[str, object]:
    return {EXT_PLACES: group_bodies.encode_places({"t": Place(position, members, queues)})}


def share(members: int, queues: int, **numbers: list[int]) -> dict[str, object]:
    return {EXT_SHARES: group_bodies.encode_shares({"t": BrokerShare(members, queues, numbers)})}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("position", "mine"), [(0, A[:1]), (1, A[1:])])
async def test_a_member_that_gets_its_place_asks_nobody(position: int, mine: list[Queue]) -> None:
    broker = Broker(MINE)
    shares = shares_at(a=broker)
    tell(shares, broker, place(position, 2, 2))
    assert await shares.of("t", A) == Share(mine, A, 2, [])
    assert broker.asked == []


@pytest.mark.usefixtures("clock")
async def test_a_member_that_gets_its_share_asks_nobody() -> None:
    broker = Broker(MINE)
    shares = shares_at(STICKY, a=broker)
    tell(shares, broker, share(2, 2, a=[1]))
    assert await shares.of("t", A) == Share(A[1:], A, 2, [])
    assert broker.asked == []


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (AVG, place(1, 2, 3)),  # the others see more queues
        (AVG, place(-1, 2, 2)),  # it does not count
        (STICKY, share(2, 3, a=[1])),
        (STICKY, place(1, 2, 2)),  # no strategy by position
    ],
)
async def test_news_that_do_not_fit_are_not_believed(strategy: Strategy, told: dict[str, object]) -> None:
    broker = Broker(MINE)
    shares = shares_at(strategy, a=broker)
    tell(shares, broker, told)
    assert await shares.of("t", A) == Share(A[:1], A, 2, [])
    assert len(broker.asked) == 1


async def test_news_are_believed_for_a_while_from_the_broker_that_would_be_asked(clock: Clock) -> None:
    one, other = Broker(MINE), Broker(MINE)
    shares = shares_at(a=one, b=other)
    tell(shares, one, place(1, 2, 4))
    await shares.of("t", A + B)
    clock.now_s += 9.9
    await shares.of("t", A + B)
    assert one.asked == []
    clock.now_s += 0.2
    await shares.of("t", A + B)
    assert len(one.asked) == 1, "it is old"
    tell(shares, other, place(1, 2, 4))
    await shares.of("t", A + B)
    assert len(one.asked) == 2, "it is another broker's"
    assert other.asked == []


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("strategy", "told"), [(AVG, place(1, 2, 2)), (STICKY, share(2, 2, a=[1]))])
async def test_the_next_news_of_a_broker_take_the_place_of_all_earlier_ones(
    strategy: Strategy, told: dict[str, object]
) -> None:
    broker, other = Broker(MINE), Broker(MINE)
    shares = shares_at(strategy, a=broker)
    tell(shares, broker, told)
    tell(shares, other, dict.fromkeys(told, "{}"))
    await shares.of("t", A)
    assert broker.asked == [], "another broker's news are no reason"
    tell(shares, broker, {})
    await shares.of("t", A)
    assert broker.asked == [], "it says nothing of places"
    tell(shares, broker, dict.fromkeys(told, "{}"))
    await shares.of("t", A)
    assert len(broker.asked) == 1, "it has none any more"


@pytest.mark.parametrize(("strategy", "detail"), [(AVG, "position"), (STICKY, "share"), (CONSISTENT_HASH, "members")])
async def test_a_member_asks_for_as_much_as_its_strategy_needs(strategy: Strategy, detail: str) -> None:
    body = group_bodies.encode_members(["you", "me"])
    broker = Broker({}, body)
    found = await shares_at(strategy, a=broker).of("t", A)
    assert found == Share(strategy.allocate("me", A, ["me", "you"]), A, 2, [])
    seen = {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues({"a": 2})} if strategy is STICKY else {}
    assert broker.asked == [{"consumerGroup": "g", "topic": "t", EXT_DETAIL: detail} | seen]


@pytest.mark.parametrize("answer", [({"index": "-1", "count": "2"}, b""), ({}, group_bodies.encode_members(["you"]))])
async def test_a_member_that_its_broker_does_not_count_has_no_share(answer: tuple[Ext, bytes]) -> None:
    assert await shares_at(a=Broker(*answer)).of("t", A) is None


@pytest.mark.parametrize("strategy", [AVG, STICKY])
async def test_a_place_is_as_good_as_a_list(strategy: Strategy) -> None:
    assert await shares_at(strategy, a=Broker({"index": "1", "count": "2"})).of("t", A) == Share(A[1:], A, 2, [])


async def test_a_share_that_the_broker_has_made_counts_before_a_place() -> None:
    answer = cast("Ext", {**MINE, **share(3, 2, a=[0, 1])})
    assert await shares_at(STICKY, a=Broker(answer)).of("t", A) == Share(A, A, 3, [])


async def test_queues_that_only_others_know_are_shared_out_too() -> None:
    seen = {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues({"a": 2, "b": 2})}
    share = await shares_at(a=Broker({"index": "1", "count": "2", **seen})).of("t", A)
    assert share == Share(B, A + B, 2, B)


@pytest.mark.parametrize("how", [ConnectionFailed("gone"), RequestTimeout("late"), BrokerRefused(1, 1, "no", "a")])
async def test_another_broker_is_asked_when_one_does_not_answer(clock: Clock, how: RocketletError) -> None:
    silent, other = Broker({}, error=how), Broker(MINE)
    shares = shares_at(a=silent, b=other)
    await shares.of("t", A + B)
    await shares.of("t", A + B)
    # Only a broker that is waited for is the last for a while.
    assert (len(silent.asked), len(other.asked)) == (1 if isinstance(how, RequestTimeout) else 2, 2)
    clock.now_s += 10.1
    await shares.of("t", A + B)
    assert len(silent.asked) == (2 if isinstance(how, RequestTimeout) else 3)


@pytest.mark.usefixtures("clock")
async def test_a_broker_that_speaks_again_is_asked_first_again() -> None:
    silent, other = Broker({}, error=RequestTimeout("late")), Broker(MINE)
    shares = shares_at(STICKY, a=silent, b=other)
    await shares.of("t", A + B)
    tell(shares, silent, share(2, 4, a=[1]))
    assert await shares.of("t", A + B) == Share(A[1:], A + B, 2, []), (
        "a newcomer asks it, and is notified of its shares"
    )
    assert len(other.asked) == 1


async def test_a_topic_without_brokers_has_no_share() -> None:
    with pytest.raises(ConnectionFailed, match="no broker of the topic t is known"):
        await shares_at().of("t", [])


async def test_the_last_fault_is_reported_when_nobody_answers() -> None:
    shares = shares_at(a=Broker({}, error=ConnectionFailed("first")), b=Broker({}, error=ConnectionFailed("second")))
    with pytest.raises(ConnectionFailed, match="second"):
        await asyncio.wait_for(shares.of("t", A + B), 60)
