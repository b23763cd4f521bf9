"""A store, topics and groups with messages shared, without a broker, a socket or a loop: a clock that stands, and turns that
end when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rocketlet.broker.config import LIMITS, BrokerConfig, Limits
from rocketlet.broker.groups.group import ConsumerGroups
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.members import History
from rocketlet.broker.groups.offsets import Offsets
from rocketlet.broker.groups.rates import Rates
from rocketlet.broker.groups.settings import GroupConfigs, RequestModes
from rocketlet.broker.messages.appender import Appender
from rocketlet.broker.messages.filters import Filters
from rocketlet.broker.messages.lite import LiteChanges, LiteFile, LiteTopics
from rocketlet.broker.messages.statistics import Statistics
from rocketlet.broker.messages.topics import Topics
from rocketlet.broker.pops.dead_letters import DeadLetterWriter
from rocketlet.broker.pops.division import Divided, Division, PopMember
from rocketlet.broker.pops.journal import PopJournal
from rocketlet.broker.pops.lite import LiteOffsets
from rocketlet.broker.pops.pool import Receive
from rocketlet.broker.pops.pools import Pools
from rocketlet.broker.pops.pops import Pops
from rocketlet.broker.pops.requests import AckStatus, PopClient, PopRequest, PopResult
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.runtime.turns import Turns
from rocketlet.broker.sessions.events import GroupChanged, SessionEvent
from rocketlet.broker.sessions.session import Session
from rocketlet.broker.store.journals import Frames
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Route, TopicConfig
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.message import decode_record, encode_host
from rocketlet.protocol.names import Queue, Subscription, tag_code
from rocketlet.testing.clock import MovableClock

from ...support.locks import Changes, queues_until
from ...support.stores import open_store

WILDCARD = {"lite.bind.topic": "CHAT", "lite.sub.wildcard": "true"}
HOST = encode_host("127.0.0.1", 1)


class _AtOnce:
    """Tasks that wait for nothing end immediately."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits")


class _NoRoutes:
    async def find_route(self, topic: str) -> Route | None:
        return None


class FakeSession(PopMember):
    """A session without a client."""

    def __init__(self) -> None:
        super().__init__(cast("Divided", None))

    def send_event(self, event: SessionEvent) -> None:
        pass


class Received(Receive):
    """A receive whose result a function takes."""

    def __init__(self, request: PopRequest, take: Callable[[PopResult], object]) -> None:
        super().__init__(request)
        self._take = take

    def respond(self, result: PopResult) -> None:
        self._take(result)


class TestClock(MovableClock):
    """A clock that stands, and event-loop iterations that end when a test says so."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__(stands=True)
        self._began = (1000.0, 1_800_000_000.0)  # the same in each run
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, action: Callable[..., object], *arguments: Any) -> None:
        self.soon.append(partial(action, *arguments))

    def suspend(self, seconds: float) -> None:
        """Let time pass while the process does not run, so that timers are late."""
        self._ahead_s += seconds


class World:
    """One run of what a broker has below its protocol servers. `restart` is a kill, or a stop, and another run."""

    def __init__(self, folder: Path, queues: int = 2, clock: TestClock | None = None, limits: Limits = LIMITS) -> None:
        self.folder = folder
        self.queues = queues
        self.limits = replace(limits, pop_journal_bytes=2000)  # so that it is rewritten in tests, too
        self.clock = clock or TestClock()
        folder.mkdir(parents=True, exist_ok=True)
        self.open()

    def open(self) -> None:
        folder, clock = self.folder, self.clock
        config = BrokerConfig(data_dir=folder, address="127.0.0.1:1")
        tasks: Any = _AtOnce()
        self.turns = Turns(call_soon=clock.call_soon)
        runtime = Runtime(clock, self.limits, tasks=tasks, turns=self.turns)
        self.store = open_store(folder, clock=clock)
        changes = Changes(
            members=lambda group: self.state.division.members_changed(group),
            freed=lambda session, group: session.send_event(GroupChanged(group)),
            appended=self._appended,
            ahead=lambda group, key: self.state.ahead_ended(group, key),
        )
        self.topics = Topics(runtime, config)
        self.store.recover(self.topics.since(), deleted=self.topics.deleted, knows_topics=self.topics.is_current)
        self.topics.ensure(TopicConfig("t", self.queues, self.queues), 0)
        self.appender = Appender(self.store, changes)
        history = History(runtime)
        self.members = ConsumerGroups(
            runtime,
            history,
            "b",
            self.topics,
            changes,
        )
        self.offsets = Offsets(runtime, folder / "offsets.json", self.members, self.topics)
        self.offsets.clamp(self.store.queues)
        self.groups = GroupConfigs(runtime, self.members, folder / "groups.json", auto_create=True)
        self.clock.soon.clear()
        self.pops: Pops | None = None
        self.locks = Locks(
            runtime, self.members, history, folder / "locks.json", self.topics,
            queues_until(0),
        )  # fmt: skip
        self.frames = Frames(self.journal)
        lite_file = LiteFile(runtime.adoption, folder / "lite_offsets.json")
        lites = LiteTopics(runtime, self.topics, self.store, lite_file, LiteChanges())
        lite_offsets = LiteOffsets(runtime, lites, self.topics)
        pools = Pools(runtime, self.topics, self.appender, self.members, self.offsets, self.groups, lite_offsets)
        modes = RequestModes(runtime, folder / "modes.json")
        division = Division(
            runtime, self.topics, self.members, self.locks, modes, history, pools, _NoRoutes()
        )  # fmt: skip
        dead_letters = DeadLetterWriter(self.topics, self.appender, self.groups, self.members)
        journal = PopJournal(runtime, self.frames, self.topics, self.offsets, None)
        self.pops = Pops(
            runtime, Filters(runtime), self.groups, pools, journal, dead_letters, division,
            Statistics(runtime, self.store, self.topics), Rates(runtime, _NoRoutes()),
        )  # fmt: skip

    def join(self, client_id: str, *, strategy: str | None = "AVG", group: str = "g", topic: str = "t") -> Session:
        """A member that pulls: one of ours, or without a strategy one of Apache's."""
        session = FakeSession()
        subscriptions = (Subscription(topic), Subscription(f"%RETRY%{group}"))
        self.members.heartbeat(
            session, client_id, ConsumerData(group, subscriptions=subscriptions, strategy=strategy), 0, 0
        )
        return session

    def leave(self, session: Session, group: str = "g") -> None:
        self.locks.leave(session, group, is_foreign=False)
        self.members.leave(session, group)

    def lock(self, session: Session, client_id: str, *queues: int) -> set[int]:
        wanted = tuple(Queue("t", "b", number) for number in queues)
        got = self.locks.lock(LockRequest(client_id, "g", wanted, handover=True), session)
        return {queue.queue_id for queue in got}

    def unlock(self, session: Session, client_id: str, *queues: int) -> list[str]:
        wanted = tuple(Queue("t", "b", number) for number in queues)
        return self.locks.unlock(LockRequest(client_id, "g", wanted, handover=True), session)

    def _appended(self, queues: Sequence[Any]) -> None:
        if self.pops is not None:
            self.pops.appended(queues)

    @property
    def journal(self) -> Path:
        return self.folder / "pops.journal"

    @property
    def state(self) -> Pops:
        assert self.pops is not None
        return self.pops

    def turn(self) -> None:
        """This turn of the loop is over."""
        while self.clock.soon:
            soon, self.clock.soon[:] = list(self.clock.soon), []
            for action in soon:
                action()

    def kill(self) -> None:
        self.clock.stop()
        self.frames.close()
        self.store.close()

    def save(self) -> None:
        self.state.begin_saving()
        run(self.offsets.saving(is_synced=False))
        run(self.state.saving())

    def group(self, name: str, **settings: Any) -> None:
        self.groups.put(GroupConfig(name, **settings))

    def send(self, body: str, queue: int = 0, topic: str = "t", **properties: str) -> int:
        text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
        with self.appender.batch():
            place = self.appender.stage(
                self.store.queue(topic, queue), body.encode(), text.encode(), tag_code(text), 0, 0, 1, HOST
            )
        return place[1]

    def receive(self, count: int = 32, invisible_ms: int = 10_000, **rest: Any) -> PopResult:
        """Return the messages that are available now, without waiting."""
        got: list[PopResult] = []
        request = PopRequest(
            rest.pop("group", "g"),
            rest.pop("topic", "t"),
            client_of(rest.pop("client", "c")),
            count,
            invisible_ms,
            **rest,
        )
        self.groups.ensure(request.group)  # as servers do
        self.begin(request, got.append)
        self.turn()
        (received,) = got
        return received

    def wait(self, count: int = 32, invisible_ms: int = 10_000, wait_ms: int = 20_000, **rest: Any) -> list[PopResult]:
        """A receive that waits: what it is answered, when it is."""
        got: list[PopResult] = []
        request = PopRequest(
            rest.pop("group", "g"),
            rest.pop("topic", "t"),
            client_of(rest.pop("client", "c")),
            count,
            invisible_ms,
            wait_ms,
            **rest,
        )
        self.groups.ensure(request.group)
        self.last_wait = self.begin(request, got.append)
        self.turn()
        return got

    def begin(self, request: PopRequest, respond: Callable[[PopResult], object]) -> Received:
        receive = Received(request, respond)
        result = self.state.receive(receive)
        if result is not None:
            respond(result)
        return receive

    def ack(self, *handles: str, group: str = "g", topic: str = "t") -> list[AckStatus]:
        got: list[AckStatus] = []
        self.state.ack(group, topic, handles, got.extend)
        self.turn()
        assert len(got) == len(handles)
        return got

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.turn()


def client_of(client: str | PopClient) -> PopClient:
    """A client of 5.x, by its id."""
    return client if isinstance(client, PopClient) else PopClient(client, account_id=("", client))


def bodies(received: PopResult) -> list[str]:
    return [decode_record(message.record).body.decode() for message in received.messages]


def handles(received: PopResult) -> list[str]:
    return [message.handle for message in received.messages]


def lite_sender(world: World) -> Callable[[str, str], None]:
    """Make CHAT the parent of lite topics. The result sends a message to one of them, by its name."""
    world.topics.put(TopicConfig("CHAT", 1, 1, message_type="LITE"), world.store.end)
    lites = world.state.pools.lites

    def send(name: str, body: str) -> None:
        staged = lites.prepare("CHAT", f"__LITE_TOPIC\x01{name}", bytes(8), is_first=True)
        with world.appender.batch():
            queue = world.store.queue("CHAT", staged.queue_id)
            _, offset = world.appender.stage(queue, body.encode(), staged.text.encode(), 0, 0, 0, 1, bytes(8))
        lites.append([(staged, offset)])
        world.state.lite_appended([lites.of("CHAT")[name]])

    return send
