"""Passes of a rebalance alone: which queues are given up and asked for, and when the next pass comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rocketlet.client.config import CLIENT_LIMITS
from rocketlet.client.errors import ConnectionFailed, RocketletError
from rocketlet.client.member.membership import Rebalance, Share
from rocketlet.client.message import Lease
from rocketlet.protocol.bodies import BrokerData, QueueData, Route
from rocketlet.protocol.names import Queue

T = [Queue("t", "a", number) for number in range(2)]
U = [Queue("u", "a", number) for number in range(2)]


def route(queues: int = 2) -> Route:
    return Route((QueueData("a", queues, queues, 6),), (BrokerData("a", {0: "a:1"}, "c"),))


class World:
    """The questions and words of a rebalance, by hand."""

    strategy_name, group, client_id = "AVG", "g", "me"
    limits = CLIENT_LIMITS

    def __init__(self) -> None:
        self.routes: dict[str, Route | None] = {"t": route(), "u": route()}
        self.known: dict[str, Route] = {}
        self.looked_up: list[str] = []
        self.shares: dict[str, Share | RocketletError | None] = {"t": Share(T, T, 1, []), "u": Share([], U, 2, [])}
        self.asked: list[tuple[str, list[Queue]]] = []
        self.registered = {"a:1"}
        self.told: list[str] = []
        self.owned: dict[Queue, Lease] = {}
        self.refused: set[Queue] = set()
        self.released: list[Queue] = []
        self.was_rebalanced = False  # when queues were asked for
        self.are_suspended = self.are_doubtful = self.are_releasing = False
        self.wake, self.rebalanced = asyncio.Event(), asyncio.Event()
        fake: Any = self
        self.rebalance = Rebalance(fake, ["t", "u"], fake, fake, fake, wake=self.wake, rebalanced=self.rebalanced)

    # The cluster

    def route(self, topic: str) -> Route | None:
        return self.known.get(topic)

    async def find_route(self, topic: str) -> Route | None:
        self.looked_up.append(topic)
        if topic not in self.routes:
            raise ConnectionFailed("no name server")
        found = self.routes[topic]
        if found is not None:
            self.known[topic] = found
        return found

    def masters(self) -> dict[str, str]:
        return {"a": "a:1"}

    # Shares

    async def of(self, topic: str, queues: list[Queue]) -> Share | None:
        self.asked.append((topic, queues))
        share = self.shares[topic]
        if isinstance(share, RocketletError):
            raise share
        return share

    # Heartbeats

    async def register(self, *, timeout_s: float) -> None:
        assert timeout_s == CLIENT_LIMITS.register_timeout_s
        self.told.append("register")

    def is_registered(self, address: str) -> bool:
        return address in self.registered

    def forget(self) -> None:
        self.told.append("forget")

    def send_if_changed(self) -> None:
        self.told.append("news")

    # Leases

    def release(self, queue: Queue) -> None:
        del self.owned[queue]
        self.released.append(queue)

    async def acquire(self, wanted: Iterable[Queue]) -> None:
        self.was_rebalanced = self.rebalanced.is_set()
        self.owned |= {queue: Lease(1) for queue in set(wanted) - self.owned.keys() - self.refused}

    async def reclaim(self) -> None:
        self.told.append("reclaim")

    # A pass

    async def passes(self, *, leaving: bool = False) -> float:
        """One pass; how long the next one waits for an event."""
        waits: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def wait() -> asyncio.Future[None]:
            if not waits.done():
                waits.set_result(self.rebalance._retry_s)
            return asyncio.get_running_loop().create_future()

        self.rebalance._wake = cast("asyncio.Event", SimpleNamespace(clear=lambda: None, wait=wait))
        running = asyncio.create_task(self.rebalance.run_forever(leaving=leaving))
        try:
            return await waits
        finally:
            running.cancel()


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_member_takes_its_share_and_is_rebalanced(world: World) -> None:
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert (set(world.owned), world.rebalanced.is_set()) == (set(T), True)
    assert world.asked == [("t", T), ("u", U)]
    assert world.told == ["register", "reclaim", "news"]


async def test_a_member_gives_up_what_is_no_more_its_share(world: World) -> None:
    await world.passes()
    world.shares["t"] = Share(T[:1], T, 2, [])
    world.are_releasing = True
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert (set(world.owned), world.released, world.rebalanced.is_set()) == ({T[0]}, [T[1]], False)
    world.are_releasing = False
    await world.passes()
    assert world.rebalanced.is_set()
    await world.passes()
    assert world.was_rebalanced, "nothing has changed"
    world.shares["t"] = Share(T, T, 1, [])
    await world.passes()
    assert not world.was_rebalanced


async def test_a_member_that_was_refused_a_queue_asks_again_soon(world: World) -> None:
    world.refused = {T[1]}
    world.rebalanced.set()
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert not world.rebalanced.is_set()


@pytest.mark.parametrize("why", ["are_suspended", "are_doubtful"])
async def test_a_member_in_doubt_asks_again_soon(world: World, why: str) -> None:
    setattr(world, why, True)
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert world.rebalanced.is_set() is (why == "are_doubtful")


async def test_a_broker_that_does_not_know_the_member_is_retried_immediately(world: World) -> None:
    world.registered.clear()
    assert await world.passes() == CLIENT_LIMITS.reconnect_s


async def test_what_is_not_known_stays_as_it_is(world: World) -> None:
    world.shares["u"] = Share(U[:1], U, 2, [])
    await world.passes()
    world.shares |= {"t": Share(T[:1], T, 2, []), "u": ConnectionFailed("gone")}
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert (set(world.owned), world.rebalanced.is_set()) == ({T[0], U[0]}, False)
    world.shares["u"] = None
    world.told.clear()
    await world.passes()
    assert "forget" in world.told, "the broker does not count it, so it must get another heartbeat"
    assert set(world.owned) == {T[0], U[0]}


async def test_a_missing_topic_is_named_once_and_a_retry_topic_never(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    retries = "%RETRY%g"
    world.routes |= {"u": None, retries: None}
    world.rebalance.add_topics(["u", retries])
    assert world.wake.is_set()
    for _ in range(2):
        assert await world.passes() == min(CLIENT_LIMITS.missing_route_interval_s, CLIENT_LIMITS.lock_retry_s)
    assert (world.rebalance.missing, caplog.text.count("topic_missing")) == ({"u"}, 1)
    assert set(world.owned) == set(T)
    world.routes["u"] = route()
    assert await world.passes() == CLIENT_LIMITS.missing_route_interval_s, "the retry topic comes with the first retry"
    assert (world.rebalance.missing, world.rebalanced.is_set()) == (set(), True)
    assert world.looked_up.count("u") == 3


async def test_a_topic_that_has_grown_is_looked_up_until_somebody_answers(world: World) -> None:
    await world.passes()
    world.looked_up.clear()
    world.rebalance.grown("strange")
    await world.passes()
    assert world.looked_up == []
    world.rebalance.grown("t")
    grown = world.routes.pop("t")
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert world.asked[-2:] == [("t", T), ("u", U)]
    world.routes["t"] = route(3)
    assert grown is not None
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert world.asked[-2] == ("t", [*T, Queue("t", "a", 2)])
    assert world.looked_up == ["t", "t"]
    await world.passes()
    assert world.looked_up == ["t", "t"]


async def test_a_broker_that_only_others_know_is_looked_up_in_the_next_pass(world: World) -> None:
    strange = Queue("t", "b", 0)
    world.shares["t"] = Share([strange], [*T, strange], 2, [strange])
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    world.looked_up.clear()
    await world.passes()
    assert world.looked_up == ["t"]


async def test_a_result_is_logged_when_it_has_changed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rocketlet.membership")
    for _ in range(2):
        await world.passes()
    assert caplog.text.count("rebalanced") == 2, "for each topic one, also where nothing is its own"
    world.shares["t"] = Share(T[:1], T, 2, [])
    await world.passes()
    assert caplog.text.count("rebalanced") == 3


async def test_a_pass_that_fails_is_logged_and_retried_soon(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.shares["t"] = RocketletError("a fault")
    del world.shares["u"]
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert caplog.text.count("rebalance_failed") == 1


async def test_a_member_that_leaves_takes_nothing_more(world: World) -> None:
    assert await world.passes(leaving=True) == CLIENT_LIMITS.rebalance_interval_s
    assert (world.told, world.owned) == (["register", "reclaim"], {})


async def test_an_event_starts_the_next_pass(world: World) -> None:
    running = asyncio.create_task(world.rebalance.run_forever())
    await asyncio.wait_for(world.rebalanced.wait(), 60)
    world.rebalanced.clear()
    world.wake.set()
    await asyncio.wait_for(world.rebalanced.wait(), 60)
    assert not world.wake.is_set()
    running.cancel()
