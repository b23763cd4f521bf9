"""Heartbeats of a member: which brokers have one, which are waited for, and when there is something new to say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from rocketlet.client.config import ClientLimits
from rocketlet.client.errors import BrokerRefused, ConnectionFailed, RocketletError
from rocketlet.client.member.leases import Heartbeats
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.bodies import Heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame

from ..conftest import eventually
from ..support.turns import passed


class Brokers:
    """Brokers by their addresses. `faults`: of those that fail; `beats`: who has got a heartbeat, and of whom."""

    limits = ClientLimits(heartbeat_interval_s=3600.0, heartbeat_retry_s=0.001)

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.faults: dict[str, RocketletError] = {}
        self.disagreements: list[str] = []
        self.beats: list[tuple[str, bytes]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.name = "me"
        self.heartbeats = Heartbeats(
            cast("ClusterView", self), lambda: Heartbeat(self.name, (), ()), lambda: self.addresses
        )

    async def connection(self, address: str) -> object:
        async def request(code: int, ext: object, body: bytes) -> Frame:
            assert code == RequestCode.HEART_BEAT
            self.beats.append((address, body))
            await self.goes_on.wait()
            if address in self.faults:
                raise self.faults[address]
            return Frame(0, ext={"disagreements": "\n".join(self.disagreements)} if self.disagreements else {})

        return SimpleNamespace(request=request)

    def heard(self) -> list[str]:
        heard = sorted(address for address, _ in self.beats)
        self.beats.clear()
        return heard


@pytest.fixture
async def brokers() -> Brokers:
    return Brokers("a", "b")


async def test_a_broker_that_fails_is_said_once_and_again_when_it_is_back(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rocketlet.membership")
    heartbeats = brokers.heartbeats
    await heartbeats.beat()
    assert (brokers.heard(), heartbeats.is_registered("a"), heartbeats.are_failing) == (["a", "b"], True, False)
    brokers.faults["a"] = ConnectionFailed("gone")
    for _ in range(2):
        await heartbeats.beat()
    assert (heartbeats.is_registered("a"), heartbeats.is_registered("b"), heartbeats.are_failing) == (False, True, True)
    assert caplog.text.count("heartbeat_failed") == 1
    assert heartbeats.refusal is None
    brokers.faults.clear()
    for _ in range(2):
        await heartbeats.beat()
    assert (heartbeats.is_registered("a"), heartbeats.are_failing) == (True, False)
    assert caplog.text.count("broker_back") == 1


async def test_member_logs_each_disagreement_once_when_brokers_report_it_in_every_answer(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [text.partition(" hint=")[0] for text in caplog.messages if text.startswith("members_disagree")]

    brokers.disagreements = ["g: different tag expressions for t: c1: a; c2: b"]
    await brokers.heartbeats.beat()
    await brokers.heartbeats.beat()
    assert logged() == ["members_disagree group='g' fault='different tag expressions for t: c1: a; c2: b'"]
    brokers.disagreements.append("g: 2 live connections with the client id c1")
    await brokers.heartbeats.beat()
    assert len(logged()) == 2


async def test_a_refusal_is_kept_for_the_member_that_joins(brokers: Brokers) -> None:
    refusal = BrokerRefused(RequestCode.HEART_BEAT, 1, "no", "a")
    brokers.faults["a"] = refusal
    await brokers.heartbeats.beat()
    assert brokers.heartbeats.refusal is refusal
    brokers.faults["a"] = ConnectionFailed("gone")
    await brokers.heartbeats.beat()
    assert brokers.heartbeats.refusal is None


async def test_a_broker_that_moved_is_not_awaited_where_it_was(brokers: Brokers) -> None:
    brokers.faults["a"] = ConnectionFailed("gone")
    await brokers.heartbeats.beat()
    assert brokers.heartbeats.are_failing
    brokers.addresses = ["b", "c"]
    await brokers.heartbeats.beat()
    assert not brokers.heartbeats.are_failing


async def test_only_brokers_without_a_heartbeat_of_a_member_get_another(brokers: Brokers) -> None:
    heartbeats = brokers.heartbeats
    await heartbeats.register()
    assert brokers.heard() == ["a", "b"]
    await heartbeats.register()
    assert brokers.heard() == []
    heartbeats.forget("a")
    assert (heartbeats.is_registered("a"), heartbeats.is_registered("b")) == (False, True)
    await heartbeats.register(["b"])
    assert brokers.heard() == []
    await heartbeats.register(["a"])
    assert brokers.heard() == ["a"]
    heartbeats.forget()
    await heartbeats.register()
    assert brokers.heard() == ["a", "b"]


async def test_a_broker_that_stalls_is_notified_once_and_waited_for_no_longer_than_was_said(brokers: Brokers) -> None:
    brokers.goes_on.clear()
    for _ in range(2):
        await brokers.heartbeats.register(timeout_s=0.001)
    assert brokers.heard() == ["a", "b"]
    brokers.goes_on.set()
    await brokers.heartbeats.register()
    assert (brokers.heard(), brokers.heartbeats.is_registered("a")) == ([], True)


async def test_the_end_waits_for_no_broker(brokers: Brokers) -> None:
    brokers.goes_on.clear()
    await brokers.heartbeats.register(timeout_s=0.001)
    async with asyncio.timeout(60):
        await brokers.heartbeats.stop()
    brokers.goes_on.set()
    await brokers.heartbeats.register()
    assert brokers.heard() == ["a", "a", "b", "b"], "nothing is under way any more"


async def test_a_member_reports_what_is_new_and_nothing_twice(brokers: Brokers) -> None:
    heartbeats = brokers.heartbeats
    await heartbeats.beat()
    beating = asyncio.create_task(heartbeats.beat_forever())
    heartbeats.send_if_changed()
    await passed()
    assert brokers.heard() == ["a", "b"], "only the first"
    brokers.name = "you"
    heartbeats.send_if_changed()
    await eventually(lambda: len(brokers.beats) == 2)
    await passed()
    assert brokers.heard() == ["a", "b"]
    beating.cancel()


async def test_a_broker_that_fails_is_retried_soon(brokers: Brokers) -> None:
    brokers.faults["a"] = ConnectionFailed("gone")
    await brokers.heartbeats.beat()
    beating = asyncio.create_task(brokers.heartbeats.beat_forever())
    await eventually(lambda: len(brokers.beats) >= 6)
    brokers.faults.clear()
    await eventually(lambda: not brokers.heartbeats.are_failing)
    beating.cancel()


async def test_a_member_that_has_said_nothing_yet_has_news(brokers: Brokers) -> None:
    beating = asyncio.create_task(brokers.heartbeats.beat_forever())
    brokers.heartbeats.send_if_changed()
    await eventually(lambda: len(brokers.beats) == 2)
    beating.cancel()
