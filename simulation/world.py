"""One simulated run: brokers, members and faults by a seed, and what must hold whatever happens (campaigns/README.md).

`handled` and `done` check members that pull, `popped` and the methods after it members that share messages (`shares`), and
`_fault` what must hold in the end.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig, Limits
from rocketlet.broker.groups.group import ConsumerGroup
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting import dispatch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.sessions.events import GroupChanged, SessionEvent
from rocketlet.client import Message, Producer, RocketletError
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from .loop import Process, SimLoop, virtual_time
from .members import (
    LITE_TOPICS,
    AnyMember,
    FiveMember,
    ForeignMember,
    LiteMember,
    Member,
    OrderlyForeignMember,
    Place,
    PoppedDelivery,
    PoppingMember,
)
from .patches import (
    Violation,
    check_raised,
    forget_raised,
    freezing_requests,
    note_raised,
    noting_defects,
    raise_later,
)

MEMBERS: dict[str, Callable[[World, str, tuple[str, ...]], AnyMember]] = {
    "ours": Member, "foreign": ForeignMember, "locking": OrderlyForeignMember, "pops": PoppingMember, "five": FiveMember,
    "lite": LiteMember,
}  # fmt: skip
LONGEST_HANDLER_S = 60.0
GROUP = "g"
WATCH_S = 0.2
AGREEMENT = (RequestCode.AGREE_ON_MEMBERS, RequestCode.CONFIRM_WORD)
NAME_SERVER_PORT = 9876
CHAOS_S = 40.0
PEACE_S = 240.0
MAX_LONG_HANDLERS = 4  # one queue, in order, must be done with them in time
ROUNDING_S = 0.002  # times on the disk are in ms
LATE_S = 1.0
CALM_S = 15.0  # for this long after an event of the group a message may be late
UNWRITTEN_S = 0.5  # a delivery so shortly before a kill need not be on the disk
FORGIVEN_S = 45.0  # after a kill, members that pull may continue from older offsets
ROUTINE = (" handles ", " gets ", " takes ", " gives ", " reads ", " drops ", "not sent")
WANTED_SHARE = 0.1  # of the messages, where members want those of one tag
FIRST_S = 10.0  # a message is delivered for the first time within this, if nothing stirs the group


@dataclass
class Plan:
    """A seed's decisions.

    Attributes:
        long_handlers: The share of messages whose handlers run for 5 to 60 s.
        unread_limit_s: How soon a queue has a reader.
        backlog_limit_s: How long no member handles a queue with a backlog at most.
        kinds: Kinds of members, where some share messages.
        expression: The tags that members want.
        foreign: The kind of foreign members.
        lite: Who gets the lite topics, where members receive these: "shared", "exclusive" or "wildcard".
        old_peer: True if the second broker is of a release that does not agree with others on members.
    """

    brokers: int
    topics: int
    queues: int
    members: int
    gentle: bool
    mixed: bool
    orderly: bool
    sticky: bool
    handler_s: float
    long_handlers: float
    drain_s: float
    lost_notifications: float
    events: int
    scenario: str = ""
    unread_limit_s: float = 2.0
    backlog_limit_s: float = math.inf
    kinds: tuple[str, ...] = ("ours",)
    expression: str = "*"
    foreign: str = "foreign"
    lite: str = ""
    old_peer: bool = False

    @property
    def is_in_order(self) -> bool:
        """Whether messages wait for those before them."""
        return self.orderly or bool(self.lite)

    @property
    def is_calm(self) -> bool:
        """Whether every hand-over should be a matter of moments."""
        return self.gentle and not self.long_handlers and not self.lost_notifications

    @classmethod
    def of(cls, rng: random.Random) -> Plan:
        long_handlers = rng.choice((0.0, 0.0, 0.03))
        return cls(
            brokers=rng.choice((1, 1, 2)),
            topics=rng.choice((1, 2)),
            queues=rng.choice((1, 3, 4, 8)),
            members=rng.randint(1, 4),
            gentle=rng.random() < 0.5,
            mixed=rng.random() < 0.3,
            orderly=rng.random() < 0.3,
            sticky=rng.random() < 0.3,
            handler_s=rng.choice((0.001, 0.02, 0.2)),
            long_handlers=long_handlers,
            drain_s=rng.choice((30.0, LONGEST_HANDLER_S + 5.0)) if long_handlers else 30.0,
            lost_notifications=rng.choice((0.0, 0.0, 0.3)),
            events=rng.randint(2, 8),
        )


class Measures:
    """What the queues of a run went through.

    Attributes:
        twice: how many times members that pull have begun messages that were begun before.
        doubled_s: for how long two members took a queue for their own, summed over queues.
        unread_s: the longest time in which no member took a queue for its own.
        pauses_s: the longest time of each queue in which no message was begun although there was one.
        unhandled_s: the longest time of each queue in which no foreign member had messages of its backlog (`watch_backlogs`).
    """

    def __init__(self) -> None:
        self.twice = 0
        self.doubled_s = 0.0
        self.unread_s = 0.0
        self.pauses_s: dict[Queue, float] = {}
        self.unhandled_s: dict[Queue, float] = {}


def topic_of(name: str, queues: int, *, is_lite: bool) -> TopicConfig:
    return TopicConfig(name, queues, queues, message_type="LITE") if is_lite else TopicConfig(name, queues, queues)


@dataclass(eq=False)
class Node:
    """A broker's place: it may run, be down, and run again."""

    name: str
    port: int
    folder: Path
    runs_name_server: bool
    process: Process = field(default_factory=lambda: Process("down"))
    broker: BrokerController | None = None
    server: Server | None = None
    is_started: bool = False

    @property
    def is_up(self) -> bool:
        return self.is_started and not self.process.is_paused


class World:
    group = GROUP
    name_server = f"127.0.0.1:{NAME_SERVER_PORT}"

    def __init__(self, rng: random.Random, plan: Plan, loop: SimLoop, folder: Path, *, shares: bool = False) -> None:
        self.rng = rng
        self.plan = plan
        self.shares = shares
        self.loop = loop
        self.members: list[AnyMember] = []
        self.trace: list[str] = []
        self.handlings: dict[Place, list[tuple[float, AnyMember]]] = defaultdict(list)
        self._long_handlers = 0
        self._granted: dict[Queue, int] = {}
        self._owners: dict[tuple[Queue, int], str] = {}
        self._taken: set[Queue] = set()  # since it was looked who reads what
        self._bodies: Counter[bytes] = Counter()
        self.acknowledged: list[tuple[str, bytes]] = []
        self._crashes: list[float] = []
        self._has_foreign = False
        self.measures = Measures()
        self._begun: Counter[Queue] = Counter()
        self.granting = asyncio.Event()  # set when a queue gets another owner
        self.numbers = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deliveries: dict[Place, PoppedDelivery] = {}
        self._done: set[Place] = set()
        self._maybe: set[bytes] = set()  # acknowledged, perhaps
        self._sent_s: dict[bytes, float] = {}
        self._stirred_s = 0.0
        self.nodes = [
            Node(f"broker-{letter}", port, folder / letter, runs_name_server=port == NAME_SERVER_PORT)
            for letter, port in list(zip("ab", (NAME_SERVER_PORT, 10_911), strict=True))[: self.plan.brokers]
        ]
        self.topics = [f"t{number}" for number in range(self.plan.topics)]

    # Notes and checks while it runs

    def note(self, text: str) -> None:
        if not any(word in text for word in ROUTINE):
            self._stirred_s = self.loop.time()
        if self.shares and "restarts" in text and "foreign" in self.plan.kinds:
            self._crashes.append(self.loop.time())  # Apache's client repeats messages without a commit
        if "restarts" in text:
            self.interrupted()
        self.trace.append(f"{self.loop.time():9.4f} {text}")

    def crashed(self) -> None:
        self._crashes.append(self.loop.time())
        for delivery in self._deliveries.values():
            if delivery.since_s > self.loop.time() - UNWRITTEN_S:
                delivery.is_free = True
        self.interrupted()

    def interrupted(self) -> None:
        """No delivery is extended from now on: a broker or a client was away."""
        for delivery in self._deliveries.values():
            delivery.interrupted()

    def freed(self, member: AnyMember) -> None:
        """Others may get what a member had in flight."""
        for delivery in self._deliveries.values():
            if delivery.member is member:
                delivery.is_free = True

    def taken(self, member: Member, queues: set[Queue]) -> None:
        self._taken |= queues
        for queue in queues:
            self.note(f"{member.name} takes {queue}")
            ours = [other for other in self.members if isinstance(other, Member) and other is not member]
            others = [other for other in ours if other.believes_in(queue)]
            guilty = [other.name for other in others if not other.is_blind and not other.process.is_dead]
            if guilty:
                raise_later(f"{member.name} takes {queue}, which {guilty} has")

    def handled(self, member: AnyMember, message: Message) -> None:
        queue = message.queue
        self.note(f"{member.name} handles {queue} {message.queue_offset}")
        if message.origin not in member.topics:
            raise_later(f"{member.name} gets a message of {message.origin}, to which it does not subscribe")
        granted = self._granted.get(queue, 0)
        if member.is_ours and message.epoch < granted and not member.is_blind:
            fault = f"{member.name} begins {queue} {message.queue_offset} under the epoch {message.epoch}; it is at {granted}"
            raise_later(fault)
        times = self.handlings[queue, message.queue_offset]
        now_s = self.loop.time()
        is_waited_for = not self.plan.long_handlers or self.plan.drain_s > LONGEST_HANDLER_S
        if times and is_waited_for and not self._may_repeat(*times[-1]):
            raise_later(f"{queue} {message.queue_offset} handled again by {member.name} without a crash")
        self._begun[queue] += 1
        self.measures.twice += bool(times)
        times.append((now_s, member))
        self._check_in_flight(member, message)

    def _may_repeat(self, handled_s: float, member: AnyMember) -> bool:
        """Whether what a member handled then may be handled again now: its commit may be lost."""
        was_unheard = handled_s <= member.process.silent_until_s  # it continues while its lease lasts
        return was_unheard or any(handled_s - 10 <= crash <= self.loop.time() for crash in self._crashes)

    def done(self, member: AnyMember, message: Message) -> None:
        """A handler has ended: a message that only started in a member that was killed must be redelivered."""
        self._bodies[message.body] += 1
        is_owned_by_other = member.is_ours and message.epoch < self._granted.get(message.queue, 0)
        if is_owned_by_other and not message.lease_lost and not member.is_unanswered:
            raise_later(f"{member.name} does not learn of the new owner of {message.queue} at {message.queue_offset}")

    def _watch_offsets(self, broker: BrokerController) -> None:
        commit = broker.offsets.commit
        owned: dict[tuple[str, int], int] = {}  # by leases' owners; foreign members may put each other back

        def checked(group: ConsumerGroup, topic: str, queue_id: int, offset: int, *, by_owner: bool = False) -> None:
            before = owned.get((topic, queue_id), 0) if self._has_foreign else group.offset(topic, queue_id)
            if before is not None and offset < before:
                raise_later(f"the offset of {topic}:{queue_id} goes back from {before} to {offset}")
            if by_owner:
                owned[topic, queue_id] = offset
            commit(group, topic, queue_id, offset, by_owner=by_owner)

        broker.offsets.commit = checked  # type: ignore[method-assign]

    def _watch_locks(self, broker: BrokerController) -> None:
        lock = broker.locks.lock

        def noted(request: LockRequest, session: Any, *, has_had: bool = False) -> dict[Queue, int]:
            epochs = lock(request, session, has_had=has_had)
            for queue, epoch in epochs.items():
                owner = self._owners.get((queue, epoch), request.client_id)
                if epoch < self._granted.get(queue, 0):
                    raise_later(f"{queue} goes back from the epoch {self._granted[queue]} to {epoch}")
                if owner != request.client_id:
                    raise_later(f"{queue} has the epoch {epoch} of {owner}, and now of {request.client_id}")
                if epoch > self._granted.get(queue, 0):
                    self.granting.set()
                self._owners[queue, epoch] = request.client_id
                self._granted[queue] = max(epoch, self._granted.get(queue, 0))
            return epochs

        broker.locks.lock = noted  # type: ignore[method-assign]

    def handler_s(self) -> float:
        if self._long_handlers < MAX_LONG_HANDLERS and self.rng.random() < self.plan.long_handlers:
            self._long_handlers += 1
            return self.rng.uniform(5.0, LONGEST_HANDLER_S)
        return self.rng.uniform(0.2, 1.8) * self.plan.handler_s

    # Messages that are popped

    def popped(self, member: AnyMember, deliveries: Sequence[PoppedDelivery]) -> None:
        for delivery in deliveries:
            self.note(f"{member.name} gets {delivery.queue} {delivery.offset} for the {delivery.attempt}. time")
            last = self._deliveries.get(delivery.place)
            if last is not None and delivery.popped_s < last.popped_s:  # it froze while the response was in its socket
                continue
            self._begun[delivery.queue] += 1
            if fault := self._fault_of(delivery) or self._order_fault(delivery, deliveries):
                raise_later(f"{delivery.queue} {delivery.offset} is given to {member.name}, {fault}")
            self._deliveries[delivery.place] = delivery
            if self.plan.orderly:  # its acknowledgement was provisional
                self._done.discard(delivery.place)
            delivery.since_s = self.loop.time()

    def _fault_of(self, delivery: PoppedDelivery) -> str | None:
        now_s, before = self.loop.time(), self._deliveries.get(delivery.place)
        if self.plan.orderly:  # it may be redelivered together with one before it, in flight or acknowledged
            return None
        if delivery.place in self._done:
            return "and was acknowledged"
        if before is not None and not before.is_free and now_s < before.held_s - ROUNDING_S:
            return f"and is {before.member.name}'s until {before.held_s:.3f}"
        due_s = before.due_s if before is not None else None
        if self.plan.is_in_order:
            due_s = None  # it waits for those before it
        if due_s is not None and now_s > due_s + LATE_S and self._stirred_s < due_s - CALM_S:
            return f"{now_s - due_s:.3f} s after its time"
        sent_s = self._sent_s.get(delivery.body, now_s)
        is_first = delivery.attempt == 1 and not self.plan.is_in_order
        if is_first and now_s > sent_s + FIRST_S and self._stirred_s < sent_s - CALM_S:
            return f"{now_s - sent_s:.3f} s after it was sent"
        times = self.handlings[delivery.place]
        if times and not self._may_repeat(*times[-1]) and not self._was_killed():
            return f"and {times[-1][1].name}, which pulls, has handled it"
        return None

    def _order_fault(self, delivery: PoppedDelivery, batch: Sequence[PoppedDelivery]) -> str | None:
        """A message is delivered for the first time after those before it are acknowledged, or together with them."""
        if not self.plan.is_in_order or delivery.attempt > 1 or delivery.place in self._deliveries:
            return None
        together = {item.place for item in batch}
        for place, before in self._deliveries.items():
            is_before = place[0] == delivery.queue and place[1] < delivery.offset
            is_open = place not in self._done and before.body not in self._maybe and place not in together
            if is_before and before.lite_topic == delivery.lite_topic and is_open:
                return f"before {place[1]}, which {before.member.name} has"
        return None

    def renewed(self, delivery: PoppedDelivery) -> None:
        """A renewal that the broker confirmed was of the last delivery of a message."""
        last = self._deliveries[delivery.place]
        if last is not delivery and not last.is_sent:
            raise_later(f"{delivery.member.name} renews {delivery.queue} {delivery.offset}, which is another's")

    def acknowledging(self, delivery: PoppedDelivery) -> None:
        delivery.is_sent = True
        if self._deliveries.get(delivery.place) is delivery:  # otherwise the broker must not accept it
            self._maybe.add(delivery.body)

    def acknowledged_by(self, delivery: PoppedDelivery) -> None:
        """The message is done if this delivery was in flight when the broker confirmed."""
        is_last = self._deliveries.get(delivery.place) is delivery
        if is_last and not delivery.is_free and self.loop.time() < delivery.held_s:
            self._done.add(delivery.place)
            self._bodies[delivery.body] += 1

    def _check_in_flight(self, member: AnyMember, message: Message) -> None:
        """A member that pulls handles no message that was popped, while it is in flight or done."""
        place = message.queue, message.queue_offset
        delivery = self._deliveries.get(place)
        fault = None
        if place in self._done:
            fault = None if self._was_killed() else "which was acknowledged"
        elif delivery is not None and not delivery.is_free and self.loop.time() < delivery.held_s - ROUNDING_S:
            fault = f"which is {delivery.member.name}'s until {delivery.held_s:.3f}"
        if fault:
            raise_later(f"{member.name} handles {message.queue} {message.queue_offset}, {fault}")

    def _was_killed(self) -> bool:
        return any(crash > self.loop.time() - FORGIVEN_S for crash in self._crashes)

    # Brokers

    async def start_node(self, node: Node) -> None:
        node.process = Process(node.name)
        config = BrokerConfig(
            data_dir=node.folder,
            address=f"127.0.0.1:{node.port}",
            name=node.name,
            name_servers=() if node.runs_name_server else (f"127.0.0.1:{NAME_SERVER_PORT}",),
            segment_bytes=1 << 20,
            vip_channel=False,
        )
        with node.process.running():
            routes = Routes() if node.runs_name_server else None
            is_old = self.plan.old_peer and not node.runs_name_server
            limits = Limits(journal_lines=8, max_peers=0) if is_old else Limits(journal_lines=8)
            node.broker = BrokerController(config, routes, limits=limits)  # journals become files often
            self._watch_offsets(node.broker)
            self._watch_locks(node.broker)
            known = {
                code: rule for code, rule in dispatch.BROKER_REQUESTS.items() if code not in AGREEMENT or not is_old
            }
            with mock.patch.object(dispatch, "BROKER_REQUESTS", known):
                node.server = Server(Listening("127.0.0.1", node.port), broker=node.broker, routes=routes)
            for topic in self.topics:
                if node.broker.topics.get(topic) is None:
                    node.broker.topics.put(topic_of(topic, self.plan.queues, is_lite=bool(self.plan.lite)), 0)
            if self.plan.lite or (self.shares and self.plan.orderly):
                node.broker.group_configs.put(self._group_config())
        await node.process.run(node.server.__aenter__())
        node.is_started = True

    def _group_config(self) -> GroupConfig:
        if not self.plan.lite:
            return GroupConfig(GROUP, consume_orderly=True)
        kind = {"exclusive": {"lite.sub.model": "Exclusive"}, "wildcard": {"lite.sub.wildcard": "true"}}
        return GroupConfig(GROUP, attributes={"lite.bind.topic": self.topics[0], **kind.get(self.plan.lite, {})})

    async def stop_node(self, node: Node) -> None:
        node.is_started = False
        assert node.server is not None
        await node.process.run(node.server.__aexit__())
        node.broker = node.server = None

    def kill_node(self, node: Node) -> None:
        node.is_started = False
        assert node.server is not None
        assert node.broker is not None
        node.process.kill()
        self.loop.servers.pop(node.port, None)
        node.broker.store.close()
        node.broker = node.server = None

    # Members

    async def join(
        self, topics: tuple[str, ...] | None = None, *, foreign: bool = False, kind: str | None = None
    ) -> None:
        if kind is None:
            kind = self.rng.choice(self.plan.kinds) if self.shares else self.plan.foreign if foreign else "ours"
        if topics is None:
            topics = tuple(self.topics)
            if self.plan.mixed:
                topics = tuple(self.rng.sample(self.topics, self.rng.randint(1, len(self.topics))))
        self._has_foreign = self._has_foreign or kind in ("foreign", "locking")
        member = MEMBERS[kind](self, f"{kind[0]}{len(self.members)}", topics)
        self.members.append(member)
        self.note(f"{member.name} joins {topics}")
        try:
            await self._done_or_dead(member, member.join)
        except RocketletError as error:
            self.note(f"{member.name} cannot join: {error}")
            member.has_left = True

    async def leave(self, member: AnyMember) -> None:
        self.note(f"{member.name} leaves")
        member.has_left = True
        await self._done_or_dead(member, member.leave)

    async def _done_or_dead(self, member: AnyMember, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let a member do something; return when it is done, or will never be."""
        with member.process.running():
            work = action()
            task = asyncio.create_task(work)
        while not task.done() and not member.process.is_dead:
            await asyncio.wait({task}, timeout=1)
        if task.done():
            task.result()
        elif inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()  # the process ended before the task began

    def living(self) -> list[AnyMember]:
        return [member for member in self.members if not member.has_left and not member.process.is_dead]

    # Chaos

    async def run(self, play: Callable[[World], Awaitable[None]]) -> None:
        """Run the group with what `play` lets happen, and check in the end that all is well."""
        for node in self.nodes:
            await self.start_node(node)
        await asyncio.sleep(1)
        await self.join(tuple(self.topics))  # somebody subscribes to everything, whoever else comes
        for _ in range(self.plan.members - 1):
            await self.join()
        watching = [self.produce(), asyncio.create_task(self._watch_rebalanced())]
        watching.append(asyncio.create_task(self._watch_queues()))
        began_s = self.loop.time()
        await play(self)
        await asyncio.sleep(max(began_s + CHAOS_S - self.loop.time(), 0))
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, *self._tasks, return_exceptions=True)
        await self._peace()
        for member in self.living():
            await self.leave(member)
        for node in self.nodes:
            await self.stop_node(node)
        check_raised()

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(_check_event)

    def produce(self) -> asyncio.Task[None]:
        with Process("producer").running():
            return asyncio.create_task(self._send_forever())

    async def _send_forever(self) -> None:
        async with Producer(self.name_server, retries=0) as producer:
            while True:
                topic = self.rng.choice(self.topics)
                expression, tag = self.plan.expression, ""
                if expression != "*":
                    tag = expression if self.rng.random() < WANTED_SHARE else "unwanted"
                self.numbers += 1
                body = b"%d" % self.numbers
                try:
                    if self.plan.lite:
                        await producer.send(topic, body, lite_topic=self.rng.choice(LITE_TOPICS))
                    else:
                        await producer.send(topic, body, tag=tag)
                    if tag != "unwanted":
                        self.acknowledged.append((topic, body))
                        self._sent_s[body] = self.loop.time()
                except RocketletError as error:
                    self.note(f"not sent: {type(error).__name__}")
                await asyncio.sleep(self.rng.expovariate(8))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch brokers and clients as the plan wants them."""
        send_event = RemotingConnection.send_event

        def sending(connection: RemotingConnection, event: SessionEvent) -> None:
            if not isinstance(event, GroupChanged) or self.rng.random() >= self.plan.lost_notifications:
                send_event(connection, event)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(RemotingConnection, "send_event", sending))
            # it is in the clients' ids, and sets of them are in the order of their hashes
            stack.enter_context(mock.patch.object(os, "getpid", lambda: 1))
            stack.enter_context(freezing_requests())
            stack.enter_context(noting_defects())
            yield

    # The end

    async def _peace(self) -> None:
        """Wait until everything is as it should be. Raises Violation if it is not after a long time."""
        end_s = self.loop.time() + PEACE_S
        while fault := self._fault():
            check_raised()
            if self.loop.time() >= end_s:
                raise Violation(f"in the end {fault}")
            await asyncio.sleep(1)

    def _fault(self) -> str | None:
        unhandled = self.missing()
        if unhandled:
            return f"{len(unhandled)} messages were never handled to their end: {unhandled[:3]}"
        if not all(node.is_up for node in self.nodes):
            return "a broker is not up"
        for queue in self.queues_up():
            if fault := self._queue_fault(queue):
                return fault
        return None if self.shares else self._balance_fault()

    def missing(self) -> list[tuple[str, bytes]]:
        """Return the messages that were stored and never handled to their end."""
        return [item for item in self.acknowledged if not self._bodies[item[1]] and item[1] not in self._maybe]

    async def _watch_rebalanced(self) -> None:
        """Nobody is rebalanced who still hands a queue over."""
        while True:
            await asyncio.sleep(0.05)
            for member in self.living():
                if isinstance(member, Member) and member.is_rebalanced and member.releases:
                    raise_later(f"{member.name} is rebalanced, and hands queues over")

    async def _watch_queues(self) -> None:
        """Measure what queues go through. Where nothing is lost, killed or slow, every queue of a broker that is up has a
        reader soon."""
        pauses_s, unread_s = self.measures.pauses_s, dict[Queue, float]()
        idle: dict[Queue, tuple[int, float]] = {}
        while True:
            await asyncio.sleep(WATCH_S)
            now_s, queues = self.loop.time(), list(self.queues_up())
            taken, self._taken = self._taken, set()  # and given away since, perhaps: members come and go
            idle = {queue: self._idle(queue, idle.get(queue), now_s) for queue in queues if self._has_backlog(queue)}
            for queue, (_, since_s) in idle.items():
                pauses_s[queue] = max(pauses_s.get(queue, 0.0), now_s - since_s)
            if self.shares:
                continue
            awake = [member for member in self.living() if member.is_awake]
            owners = Counter(queue for member in awake for queue in queues if member.believes_in(queue))
            self.measures.doubled_s += WATCH_S * sum(count > 1 for count in owners.values())
            unread = [
                queue
                for queue in queues
                if queue not in taken and not any(member.believes_in(queue) for member in self.living())
            ]
            unread_s = {queue: unread_s.get(queue, now_s) for queue in unread}
            for queue, began_s in unread_s.items():
                self.measures.unread_s = max(self.measures.unread_s, now_s - began_s)
                if self.plan.is_calm and now_s - began_s > self.plan.unread_limit_s:
                    raise_later(f"{queue} is read by nobody since {began_s:.1f}")

    def _has_backlog(self, queue: Queue) -> bool:
        """Return True if the last message of a queue was not begun."""
        broker = self.broker_of(queue)
        stored = broker.store.queues.get((queue.topic, queue.queue_id)) if broker is not None else None
        last = (queue, stored.next - 1) if stored is not None and stored.next else None
        return last is not None and last not in self.handlings and last not in self._deliveries

    def _idle(self, queue: Queue, before: tuple[int, float] | None, now_s: float) -> tuple[int, float]:
        """Return how many messages of a queue were begun, and since when no further one was."""
        begun = self._begun[queue]
        return before if before is not None and before[0] == begun else (begun, now_s)

    def queues_up(self) -> Iterator[Queue]:
        """The queues of brokers that are up, when the name server can be asked and no broker lets members wait for an
        answer."""
        if not self.nodes[0].is_up or any(node.process.is_paused for node in self.nodes):
            return
        for node in self.nodes:
            if node.is_up and node.broker is not None:
                for topic in self.topics:
                    config = node.broker.topics.get(topic)
                    for number in range(config.read_queues if config else 0):
                        yield Queue(topic, node.name, number)

    def _queue_fault(self, queue: Queue) -> str | None:
        owners = [member.name for member in self.living() if queue in member.assignment()]
        if len(owners) != 1 and not self.shares:  # a queue that is popped has no owner
            return f"{queue} is owned by {owners}"
        broker = self.broker_of(queue)
        assert broker is not None
        if self.plan.lite:
            pool = broker.pops.pools.bound_lite_pool(GROUP)
            lags = {lite.name: pool.queues.lag(lite) for lite in broker.lites.of(queue.topic).values()} if pool else {}
            return f"lite topics of {queue.topic} have a lag of {lags}" if any(lags.values()) else None
        stored = broker.store.queues.get((queue.topic, queue.queue_id))
        end = stored.next if stored else 0
        offset = broker.offsets.get(GROUP, queue.topic, queue.queue_id) or 0
        return None if offset == end else f"{queue} is committed to {offset} of {end}"

    def broker_of(self, queue: Queue) -> BrokerController | None:
        return next(node.broker for node in self.nodes if node.name == queue.broker_name)

    def is_held_back(self, member: ForeignMember, queue: Queue) -> bool:
        """Whether a foreign member claims a queue of which its broker gives it nothing, because it is another's."""
        broker = self.broker_of(queue)
        group = broker.groups.get(GROUP) if broker is not None else None
        if broker is None or group is None:
            return False
        owner = group.owner_of(queue.topic, queue.queue_id)
        mine = [at for at, found in group.foreign.items() if found.client_id == member.client_id]
        return owner != member.client_id and any(
            group.is_bound(at, queue.topic, broker.clock.monotonic_s()) for at in mine
        )

    def _balance_fault(self) -> str | None:
        for topic in self.topics:
            members = [member for member in self.living() if topic in member.topics]
            shares = [sum(queue.topic == topic for queue in member.assignment()) for member in members]
            if max(shares) - min(shares) > 1:
                return f"the shares of {topic} are {shares}"
        return None


def _check_event(task: asyncio.Task[Any]) -> None:
    """An event that fails is a defect: of a broker that does not start, or of the simulation."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise_later(f"an event failed: {error!r}")


@contextmanager
def simulated(seed: int) -> Iterator[tuple[SimLoop, Path]]:
    """A loop on a virtual clock, and a folder for brokers; random numbers and ids of processes are those of the seed."""
    forget_raised()
    loop = SimLoop(seed)
    loop.set_exception_handler(note_raised)
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    state = random.getstate()
    random.seed(seed)
    asyncio.set_event_loop(loop)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rocketlet-sim-", dir=shared, ignore_cleanup_errors=True) as folder,
            virtual_time(loop),
            mock.patch.object(os, "fdatasync", lambda fd: None),
        ):
            try:
                yield loop, Path(folder)
            finally:
                loop.cancel_all()
    finally:
        random.setstate(state)
        asyncio.set_event_loop(None)
        loop.close()
