"""A broker for tests: the real one, on real sockets, in this process.

It runs in the running event loop (`async with Broker() as broker`), or in a thread with its own (`with Broker() as broker`):
that suits tests without asyncio, and one broker for many tests. What passes here passes against `rocketlet start`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from ..broker.broker import Broker as RunningBroker
from ..broker.config import BrokerConfig
from ..broker.nameserver.routes import Routes
from ..broker.net.connection import Connection
from ..broker.server import Server
from ..client.config import TOPIC_QUEUES
from ..client.message import Message
from ..client.settling import settled
from ..protocol import names
from ..protocol.bodies import GroupConfig, Queue, TopicConfig
from ..protocol.message import decode_records
from .clock import BrokerClock
from .faults import Fault, Faults, Injected
from .loop_thread import LoopThread
from .ports import free_port
from .tap import Request, Tap, TappedConnection

T = TypeVar("T")

WAIT_S: Final = 20.0
LOOK_S: Final = 0.002
_MEMORY = Path("/dev/shm")  # where there is one, files cost no disk
_SETTINGS: Final = frozenset(item.name for item in fields(BrokerConfig)) - {"data_dir", "address"}


class Broker:
    """folder: where its data lies; by default in memory where the system can, else in a temporary folder, gone at the end.
    port: 0 takes a free one. settings: of `rocketlet.broker.config.BrokerConfig`, such as `default_queues=4`.

    `address` is what clients are given, as name server and broker. `clock` moves the broker's time, `faults` makes things go
    wrong. Raises ValueError for a setting that a broker does not have.
    """

    def __init__(
        self, *, folder: Path | None = None, port: int = 0, name_server: str | None = None, **settings: Any
    ) -> None:
        wrong = sorted(settings.keys() - _SETTINGS)
        if wrong:
            raise ValueError(f"a broker has no setting {', '.join(wrong)}; it has {', '.join(sorted(_SETTINGS))}")
        self._given = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folders = 0
        self._settings = {"vip_channel": False, **settings}
        if name_server is not None:
            self._settings["name_servers"] = (name_server,)
        self._port = port
        self._thread: LoopThread | None = None
        self._server: Server | None = None
        self._broker: _MortalBroker | None = None
        self._tap: Tap | None = None
        self.clock = BrokerClock()
        self.faults = _BrokerFaults(self)

    # Life

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._close()

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        try:
            self._thread.wait(self._open())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._thread is not None
        self._thread.wait(self._close())
        self._thread.stop()
        self._thread = None

    @property
    def address(self) -> str:
        """`host:port` of the name server and the broker."""
        return f"127.0.0.1:{self._port}"

    async def _open(self) -> None:
        if self._given is None:
            parent = _MEMORY if _MEMORY.is_dir() else None  # noqa: ASYNC240 -- once, before there is a client
            self._temporary = tempfile.TemporaryDirectory(prefix="rocketlet-", dir=parent, ignore_cleanup_errors=True)
        if not self._port:
            self._port = free_port()
        await self._start(self._new_folder())

    def _new_folder(self) -> Path:
        if self._temporary is None:
            assert self._given is not None
            return self._given
        self._folders += 1
        return Path(self._temporary.name) / str(self._folders)

    async def _start(self, folder: Path) -> None:
        clock = self.clock
        clock.run = lambda action: self._do(action)
        clock.keep_alive, clock.next_due_s = self._keep_alive, self._next_due_s
        clock.is_anyone_frozen = lambda: bool(self.faults.frozen())
        config = replace(BrokerConfig(data_dir=folder, address=self.address), **self._settings)
        routes = None if config.name_servers else Routes()
        broker = _MortalBroker(config, routes, clock)
        server = Server("127.0.0.1", self._port, broker=broker, routes=routes, connection_type=TappedConnection)
        tap = Tap(server.serve, self._client_of, self.faults, clock)
        server.serve = tap.serve
        self._broker, self._server, self._tap = broker, server, tap
        await server.__aenter__()

    async def _close(self) -> None:
        if self._server is not None:
            self._abort_connections()
            await self._server.__aexit__()
        self._server = self._broker = self._tap = None
        if self._temporary is not None:
            self._temporary.cleanup()

    def _abort_connections(self) -> None:
        assert self._server is not None
        for connection in self._server.connections:
            connection.abort()

    # Between tests

    def clear(self) -> None:
        """As new: without topics, groups, messages, faults and requests; clients that are still connected are cut off. The
        address stays. In a running loop use `await aclear()`."""
        if self._thread is None:
            raise RuntimeError("this broker runs in the event loop of the test; use `await broker.aclear()`")
        self._thread.wait(self.aclear())

    async def aclear(self) -> None:
        if self._temporary is None:
            raise RuntimeError("a broker with a folder of its own keeps it; delete topics and groups instead")
        self.faults.clear()
        assert self._server is not None
        self._abort_connections()
        await self._server.__aexit__()
        self.clock.reset()
        await self._start(self._new_folder())

    def restart(self) -> None:
        """Stops as by SIGTERM and starts again on the same data. In a running loop use `await arestart()`."""
        self._in_thread(self.arestart())

    async def arestart(self) -> None:
        assert self._server is not None
        assert self._broker is not None
        folder = self._broker.config.data_dir
        self._abort_connections()
        await self._server.__aexit__()
        await self._start(folder)

    def kill(self, *, lose: int = 0) -> None:
        """Stops as by SIGKILL and starts again; the last `lose` messages that were acknowledged are gone, as after a power
        cut without `--flush sync`. In a running loop use `await akill()`."""
        self._in_thread(self.akill(lose=lose))

    async def akill(self, *, lose: int = 0) -> None:
        assert self._server is not None
        assert self._broker is not None
        broker, folder = self._broker, self._broker.config.data_dir
        end = _end_without(broker, lose)
        self._abort_connections()
        broker.is_killed = True
        await self._server.__aexit__()
        _cut(folder / "commitlog", end)
        await self._start(folder)

    def _in_thread(self, work: Coroutine[Any, Any, None]) -> None:
        if self._thread is None:
            work.close()
            raise RuntimeError("this broker runs in the event loop of the test; use the method with an `a` in front")
        self._thread.wait(work)

    # Waiting

    async def settled(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        """Returns when the rebalance is over; the number of queues by client id. Raises TimeoutError, which says what is
        missing."""
        return await settled(self.address, group, members=members, timeout_s=timeout_s)

    async def consumed(self, group: str, topic: str, *, timeout_s: float = WAIT_S) -> None:
        """Returns when the group has committed every message of the topic. Raises TimeoutError, which says how many lack."""
        await self.until(
            lambda: self.lag(group, topic) == 0 and self.committed(group, topic) != {},
            timeout_s=timeout_s,
            what=lambda: f"{self.lag(group, topic)} messages of {topic} are not consumed by {group}",
        )

    async def until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float = WAIT_S,
        what: Callable[[], str] = lambda: "the condition does not hold",
    ) -> None:
        """Returns when the condition holds. Raises TimeoutError with `what` is missing."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110 -- what changes may be in another thread
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"{what()}, after {timeout_s} s") from None

    async def skip_waits(self, condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
        """Returns when the condition holds, and lets no delayed message wait meanwhile: the clock jumps to when the next one
        is due, again and again. A retry chain of hours takes as long as its handlers do."""
        await self.until(lambda: condition() or self._skip(), timeout_s=timeout_s)

    def _skip(self) -> bool:
        wait_s = self._do(self._next_due_s)
        if wait_s is not None:
            self.clock.advance(wait_s)
        return False

    def _next_due_s(self) -> float | None:
        broker = self._running
        waits = [wait_s for level in broker.delays.levels if (wait_s := broker.delays.wait_s(level)) is not None]
        return max(min(waits), 0.0) if waits else None

    # Looking

    @property
    def requests(self) -> list[Request]:
        """What clients have asked since the last `clear`, oldest first."""
        assert self._tap is not None
        return list(self._tap.requests)

    def requests_of(self, name: str, *, client: str | None = None) -> list[Request]:
        """Those with a name such as `SEND_MESSAGE_V2`."""
        return [item for item in self.requests if item.name == name and client in (None, item.client)]

    def messages(self, topic: str, *, key: str | None = None) -> list[Message]:
        """All stored messages of a topic, in the order of their storing."""
        return [message for message in self._do(lambda: self._messages(topic)) if key is None or key in message.keys]

    def dead_letters(self, group: str) -> list[Message]:
        return self.messages(names.dlq_topic(group))

    def _messages(self, topic: str) -> list[Message]:
        broker = self._running
        found: list[Message] = []
        for (name, number), queue in list(broker.store.queues.items()):
            if name != topic:
                continue
            place = Queue(topic, broker.config.name, number)
            for offset in range(queue.begin, queue.next):
                position, size, _ = queue.entry(offset)
                found += [Message(item, place, topic) for item in decode_records(broker.store.read_log(position, size))]
        return sorted(found, key=lambda message: message.record.physical_offset)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's offset by queue id."""
        return self._do(lambda: dict(self._running.offsets.of(group, topic)))

    def lag(self, group: str, topic: str) -> int:
        """Messages of the topic that the group has not committed."""

        def count() -> int:
            broker = self._running
            offsets = broker.offsets.of(group, topic)
            ends = {number: queue.next for (name, number), queue in broker.store.queues.items() if name == topic}
            return sum(max(end - offsets.get(number, 0), 0) for number, end in ends.items())

        return self._do(count)

    def owners(self, group: str) -> dict[Queue, str]:
        """Who holds which queue."""
        name = self._running.config.name
        owners = self._do(lambda: self._running.locks.owners(group))
        return {Queue(topic, name, number): client for (topic, number), client in sorted(owners.items())}

    def members(self, group: str) -> list[str]:
        """Client ids of the group's members."""
        return self._do(lambda: [] if (found := self._running.groups.get(group)) is None else found.client_ids())

    def timeline(self, group: str) -> list[dict[str, Any]]:
        """What happened in a group: who joined, which queue went where, oldest first."""
        return self._do(lambda: list(self._running.history.of(group)))

    @property
    def injected(self) -> list[Injected]:
        """The faults that have acted."""
        return list(self.faults.injected)

    def report(self) -> str:
        """What one needs to see when a test failed: faults, groups, and the last requests."""
        lines = [f"fault: {item}" for item in self.injected]
        for group in self._do(lambda: [found.name for found in self._running.groups]):
            lines.append(f"group {group}: members {self.members(group)}")
            lines += [f"  {queue} is held by {client}" for queue, client in self.owners(group).items()]
        return "\n".join([*lines, *(f"request: {item}" for item in self.requests[-20:])])

    # Ordering

    def create_topic(self, topic: str, queues: int = TOPIC_QUEUES) -> None:
        """Raises IllegalName."""

        def create() -> None:
            self._running.topics.put(TopicConfig(topic, queues, queues), self._running.store.end)

        self._do(create)

    def create_group(self, group: str) -> None:
        """With its retry topic, which a Java consumer otherwise learns of with its next look at the routes, after 30 s."""

        def create() -> None:
            self._running.group_configs.put(GroupConfig(group))
            self._running.topics.put(TopicConfig(names.retry_topic(group), 1, 1), self._running.store.end)

        self._do(create)

    def take_lease(self, group: str, topic: str, queue_id: int) -> None:
        """Ends a member's lease as if it had run out. Raises KeyError if nobody holds the queue."""
        self._do(lambda: self._running.locks.end(group, topic, queue_id))

    def rebalance(self, group: str) -> None:
        """Tells the members that the group has changed. Raises KeyError if it has none."""

        def tell() -> None:
            found = self._running.groups.get(group)
            if found is None:
                raise KeyError(f"the group {group} has no members")
            self._running.notifications.changed(found)

        self._do(tell)

    # Inside

    @property
    def _running(self) -> _MortalBroker:
        if self._broker is None:
            raise RuntimeError("the broker does not run; use it inside of its `with` block")
        return self._broker

    def _do(self, action: Callable[[], T]) -> T:
        """Runs in the broker's thread, if it has one of its own."""
        return action() if self._thread is None else self._thread.do(action)

    def _client_of(self, connection: Connection) -> str:
        broker = self._running
        return broker.clients.id_of(connection) or next(
            (group.members[connection].client_id for group in broker.groups if connection in group.members), ""
        )

    def _thaw(self) -> None:
        """What waited for clients that are not frozen any more, goes on."""
        if self._server is None or self._tap is None:
            return
        frozen = self.faults.frozen()
        for connection in self._server.connections:
            if isinstance(connection, TappedConnection) and self._client_of(connection) not in frozen:
                self._tap.thaw(connection)

    def _keep_alive(self) -> None:
        """Connected clients count as heard from, but for those that a fault has frozen."""
        broker, server = self._broker, self._server
        if broker is None or server is None:
            return
        frozen = self.faults.frozen()
        living = [item for item in server.connections if not frozen or self._client_of(item) not in frozen]
        now_s = self.clock.monotonic_s()
        for connection in living:
            connection.active_s = now_s
        broker.groups.heard_from(living)
        broker.locks.renew(living)


class _MortalBroker(RunningBroker):
    """One that can end without keeping anything, as by SIGKILL."""

    is_killed = False

    def persist(self, closes: bool = False) -> None:
        if not self.is_killed:
            super().persist(closes)


class _BrokerFaults(Faults):
    """Tells the broker when a frozen member goes on."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._of = broker

    def add(self, *faults: Fault) -> None:
        self._of._do(lambda: super(_BrokerFaults, self).add(*faults))

    def remove(self, *faults: Fault) -> None:
        def removed() -> None:
            super(_BrokerFaults, self).remove(*faults)
            self._of._thaw()

        self._of._do(removed)


def _end_without(broker: RunningBroker, lose: int) -> int:
    """Where the commit log ends without its last messages. Raises ValueError if it has fewer."""
    if lose < 0:
        raise ValueError(f"lose is {lose}; 0 or more is allowed")
    entries = (
        queue.entry(offset) for queue in broker.store.queues.values() for offset in range(queue.begin, queue.next)
    )
    # what an earlier power cut took has an entry, and no bytes
    positions = [position for position, size, _ in entries if size and position + size <= broker.store.end]
    if lose > len(positions):
        raise ValueError(f"lose is {lose}; the broker has only {len(positions)} messages")
    return sorted(positions)[-lose] if lose else broker.store.end


def _cut(log: Path, end: int) -> None:
    for segment in sorted(log.iterdir(), reverse=True):
        if segment.name.isdigit():
            begin = int(segment.name)
            size = segment.stat().st_size
            if begin + size > end:
                with segment.open("r+b") as file:
                    file.truncate(max(end - begin, 0))
