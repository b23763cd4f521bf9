"""A cluster with everything that `rocketlet doctor` can find, Rocketlet's or Apache's.

Ills that a cluster cannot show on its own are provoked at this end: the disk counts as full earlier, and this machine's
clock goes an hour ahead of the broker's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject
from rocketlet.client.admin import diagnosis
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Finding
from rocketlet.client.config import DISK_LOW_RATIO
from rocketlet.protocol.admin_bodies import RunningQueue, encode_running_info
from rocketlet.protocol.bodies import (
    ConsumerData,
    DataVersion,
    GroupConfig,
    Heartbeat,
    encode_heartbeat,
    encode_registration,
    encode_subscription,
)
from rocketlet.protocol.codes import VERSION, Language, RequestCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.headers import CreateTopic, RegisterBroker, UpdateOffset, write
from rocketlet.protocol.names import Queue, parse_subscription

from ..conftest import PATIENCE_S, Connect, Wire, eventually
from ..support.pacing import pace

SEGMENT_BYTES = 1 << 20  # the broker must have this size, and must keep messages for 0 hours
AN_OLD_VERSION = 300
_HEARTBEAT = 99_999  # its number, which no other request of a wire has

OF_GROUPS = {
    "late": "retention",
    "gone": "no_members",
    "off": "consumption_off",
    "unread": "unread_queues",
    "stuck": "stuck_queue",
    "slow": "growing_lag",
    "twins": "client_id_twice",
    "pair": "two_readers",
    "differ": "disagreement",
    "idle": "idle_members",
    "old": "old_client",
    "dead": "dead_letters",
}
OF_TOPICS = {"readonly": "permission", "odd": "unreadable_queues"}
OF_BROKERS = ("disk", "clock_skew")
OF_OTHER_BROKERS = {"lost": "broker_away", "headless": "no_master", "mistaken": "broker_unknown"}


class SickCluster:
    """`broker_address` is the broker's, whose topics and groups this makes."""

    def __init__(self, name_server: str, broker_name: str, broker_address: str, connect: Connect) -> None:
        self._name_server = name_server
        self._broker_name = broker_name
        self._broker_address = broker_address
        self._connect = connect
        self._answering: list[tuple[Wire, bytes | None]] = []

    @asynccontextmanager
    async def _answers(self) -> AsyncIterator[None]:
        """Our foreign members answer what the broker asks."""
        tasks = [
            asyncio.ensure_future(peer.refuse() if body is None else answer_always(peer, body))
            for peer, body in self._answering
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def findings(self, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Finding]:
        """By subject and kind; looks until those that are wanted are all there."""
        missing = set(wanted)
        async with AdminClient(self._name_server) as admin, self._answers():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        looked = await diagnose(admin, ObservationTimes(look_s=0.5, watch_s=0.5, stuck_s=0.0))
                        found = {(finding.subject, finding.kind): finding for finding in looked}
                        missing = set(wanted) - found.keys()
                        if not missing:
                            return found
            except TimeoutError:
                pytest.fail(f"not found: {sorted(missing)}; found: {sorted(found)}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is open, its members and topics are as sick as they can be."""
        wire = await self._connect(self._broker_address)
        for topic, read, written, perm in (
            ("old", 1, 1, 6), ("t", 1, 1, 6), ("u", 1, 1, 6), ("readonly", 1, 1, 4), ("odd", 1, 2, 6),
        ):  # fmt: skip
            answer = await wire.call(
                RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, read, written, perm))
            )
            assert answer.code == 0, answer.remark
        async with AdminClient(self._name_server) as admin, AsyncExitStack() as stack:
            for group in OF_GROUPS:
                await admin.create_group(GroupConfig(group, consume_enable=group != "off"))
            producer = await stack.enter_async_context(Producer(self._name_server))
            await self._expire(wire, admin, producer)
            await _commit(wire, "gone", "t", 0)
            await self._foreign_members()
            await self._our_members(stack, producer)
            yield

    async def _expire(self, wire: Wire, admin: AdminClient, producer: Producer) -> None:
        """The group `late` has read one of some messages, which fill segments, and all but the newest segment go."""
        queue = Queue("old", self._broker_name, 0)
        for _ in range(3 * SEGMENT_BYTES // 100_000):
            await producer.send("old", os.urandom(100_000))  # which no compression makes small
        await _commit(wire, "late", "old", 1)

        async def has_expired() -> bool:
            answer = await wire.call(RequestCode.DELETE_EXPIRED_COMMITLOG)
            assert answer.code == 0, answer.remark
            return (await admin.topic("old")).ranges[queue].begin > 1

        await eventually(has_expired)

    async def _foreign_members(self) -> None:
        first = Queue("t", self._broker_name, 0)
        for group, client_id, topic, running in (
            ("off", "c1", "t", None),
            ("unread", "c1", "t", None),
            ("twins", "c1", "t", None),
            ("twins", "c1", "t", None),
            ("pair", "c1", "t", running_body("t", first)),
            ("pair", "c2", "t", running_body("t", first)),
            ("differ", "c1", "t", running_body("t", first)),
            ("differ", "c2", "u", running_body("u")),
            ("idle", "c1", "t", running_body("t", first)),
            ("idle", "c2", "t", running_body("t")),
            ("old", "c1", "t", running_body("t", first)),
        ):
            peer = await self._connect(self._broker_address)
            consumer = ConsumerData(group, subscriptions=(parse_subscription(topic, "*"),))
            version = AN_OLD_VERSION if group == "old" else VERSION
            body = encode_heartbeat(Heartbeat(client_id, (consumer,)))
            beat = Frame(RequestCode.HEART_BEAT, _HEARTBEAT, {}, body, language=Language.JAVA, version=version)
            peer.write(encode(beat))
            answer = await peer.answer(_HEARTBEAT)
            assert answer.code == 0, answer.remark
            self._answering.append((peer, running))

    async def _our_members(self, stack: AsyncExitStack, producer: Producer) -> None:
        never, one_more = asyncio.Event(), asyncio.Semaphore(0)

        async def stuck(message: Message) -> None:
            await never.wait()

        async def slow(message: Message) -> None:
            await one_more.acquire()

        for group, handler in (("stuck", stuck), ("slow", slow), ("dead", lambda message: Reject())):
            consumer = Consumer(self._name_server, group, "t", handler, start="first", commit_interval_s=0.05)
            await stack.enter_async_context(consumer)

        async def load() -> None:
            """Ten messages for one that `slow` handles."""
            while True:
                for _ in range(10):
                    await producer.send("t", b"x")
                one_more.release()
                await pace(0.05)

        loading = asyncio.ensure_future(load())
        stack.callback(never.set)
        stack.callback(self._let_all, one_more)
        stack.callback(loading.cancel)

    def _let_all(self, semaphore: asyncio.Semaphore) -> None:
        for _ in range(100_000):
            semaphore.release()

    async def lose_brokers(self) -> None:
        """The name server learns of one that nobody reaches, one that has only a slave, and one whose address is its own."""
        wire = await self._connect(self._name_server)
        for name, address, broker_id in (
            ("lost", "127.0.0.1:1", 0), ("headless", "127.0.0.1:2", 1), ("mistaken", self._name_server, 0),
        ):  # fmt: skip
            header = RegisterBroker(name, address, "DefaultCluster", "", broker_id)
            answer = await wire.call(
                RequestCode.REGISTER_BROKER, write(header), encode_registration(DataVersion(1), [])
            )
            assert answer.code == 0, answer.remark


def provoked_here(patch: pytest.MonkeyPatch) -> None:
    """Provokes the ills that no broker can be brought to: a full disk, and a wrong clock."""
    patch.setattr(diagnosis, "_disk_ratio", lambda status: DISK_LOW_RATIO)
    patch.setattr(diagnosis, "time", SimpleNamespace(time=lambda: time.time() + 3600))


def wanted(broker_name: str, *, others: bool = False) -> set[tuple[str, str]]:
    of_brokers = {(broker_name, kind) for kind in OF_BROKERS}
    if others:
        return of_brokers | set(OF_OTHER_BROKERS.items())
    return of_brokers | set(OF_GROUPS.items()) | set(OF_TOPICS.items())


def running_body(topic: str, *queues: Queue) -> bytes:
    held: Mapping[Queue, RunningQueue] = {queue: RunningQueue(0, 0, 0, True, False, 0) for queue in queues}
    return encode_running_info({}, [encode_subscription(parse_subscription(topic, "*"))], held)


async def answer_always(peer: Wire, body: bytes) -> None:
    while True:
        peer.write_answer(await peer.request(RequestCode.GET_CONSUMER_RUNNING_INFO), body)


async def _commit(wire: Wire, group: str, topic: str, offset: int) -> None:
    answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset(group, topic, 0, offset)))
    assert answer.code == 0, answer.remark
