"""Members come, go, are killed, stand still and are cut off, brokers stop, move, are killed and stand still, while messages
flow.

All are processes of their own, on two brokers. A member is cut off by stopping the proxy (`rocketlet dump`) between it and
the brokers: its sockets stay open and silent. With CHAOS_JAVA=1 unmodified Java members come and go, too; with CHAOS_POPS=1
some members pop; with CHAOS_PYTHON=FOLDER, where pip has put rocketmq-python-client, some are that client, and with
CHAOS_GO=PROGRAM, built in tests/interop/five/go, some are Go's.

A fault is: an acknowledged message that nobody has handled in the end, a message that a Rocketlet member begins under an
epoch that is over, because another member has begun one of the queue under a later one, a message that two members handle at
one time (unless a client of Apache's stood still shortly before, which is excused), and anything else that is not over
240 s after the last event. Every 5 s it then says what it waits for. `in_two_hands` counts by what had happened before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvloop
from rocketlet.client import AdminClient, Producer, RocketletError
from rocketlet.demo.processes import Child
from rocketlet.testing.ports import free_port

from bench.peers import compiled, java_options

from ._overlaps import BROKER_AWAY, BROKER_STOOD, CHANGED, STOOD, Overlaps
from .common import PROGRESS_S, Limit, Outcome
from .kill import BrokerProcess

SHORT_COUNT = 10  # up to so many events nobody stands still for longer than a lease lasts
TOPIC, GROUP = "t", "g"
PEER = Path(__file__).parents[1] / "tests/interop/five/python/peer.py"
QUEUES = 6
RATE = 60.0
MEMBERS = (2, 6)
PAUSE_S = (0.3, 3.0)
STANDS_S = (1.0, 4.0, 12.0, 25.0)
READY_S = 120.0
SHORT_MS = 900.0  # a handler that takes longer may have stood still
PATIENCE_S = 240.0  # until everything is over; foreign messages in retry come after a minute


class Member:
    """A consumer process, perhaps behind a proxy of its own."""

    kind = "pulls"
    heeds_time = True
    """Whether it begins nothing that became another's while it stood still: Apache's clients handle all they have."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.is_busy = False  # it stands still, or is about to end
        self._world = world
        self._child: Child | None = None
        self.proxy: Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._began_ms: dict[str, float] = {}

    def _log(self, of: str = "") -> Path:
        return self._world.folder / f"{self.name}{of}.log"

    async def start(self, *, behind_proxy: bool) -> None:
        address = self._world.name_server
        if behind_proxy:
            dump = (
                sys.executable,
                "-m",
                "rocketlet.command.cli",
                "dump",
                "0",
                "--to",
                address,
                "--only",
                "UNREGISTER_CLIENT",
            )
            self.proxy = await Child.start(dump, self._log("-proxy"))
            leads = await self.proxy.wait_for()  # give clients 127.0.0.1:PORT; it leads to ...
            address = leads.split(";")[0].split()[-1]
        await self._run([sys.executable, "-m", "campaigns._member", address, GROUP, TOPIC, self.name, self.kind])

    async def _run(self, command: list[str], first: str = "") -> None:
        self._child = await Child.start(command, self._log())
        if first:
            await self._child.tell(first)
        self._reader = asyncio.create_task(self._read(self._child))
        async with asyncio.timeout(READY_S):
            await self._ready.wait()

    async def _read(self, child: Child) -> None:
        async for line in child.lines():
            words = line.split()
            if words[:1] in (["READY"], ["DONE"], ["STARTED"]):
                self._ready.set()
            elif words[:1] == ["HANDLED"] and len(words) == 6:
                self._world.ended(self, words[3], float(words[4]), float(words[5]))
            elif words[:1] == ["B"] and len(words) == 5:
                self._began_ms[words[3]] = float(words[4])
                if int(words[2]):  # clients that pop have no epoch
                    self._world.began(self.name, words[1], int(words[2]), words[3], float(words[4]))
            elif words[:1] == ["E"] and len(words) == 5:
                self._world.ended(self, words[3], self._began_ms.pop(words[3]), float(words[4]))
        self._ready.set()

    def __str__(self) -> str:
        return f"{self.name} ({type(self).__name__})"

    def signal(self, number: int) -> None:
        assert self._child is not None
        self._child.signal(number)

    async def leave(self) -> None:
        assert self._child is not None
        await self._child.close()
        await self._end()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self._end()

    @property
    def runs(self) -> bool:
        return any(child and child.exit_status is None for child in (self._child, self.proxy))

    async def _end(self) -> None:
        assert self._child is not None
        assert self._reader is not None
        await self._child.wait(PATIENCE_S)
        await self._reader
        if self.proxy is not None:
            self.proxy.kill()
            await self.proxy.wait(PATIENCE_S)


class PoppingMember(Member):
    kind = "pops"


class PythonMember(Member):
    """The official Python client of 5.x, which pops. It needs the route of the broker that it is given."""

    heeds_time = False

    async def start(self, *, behind_proxy: bool) -> None:
        options = f"endpoint={self._world.name_server}", f"topic={TOPIC}", f"group={GROUP}", "spans=1"
        await self._run([*self._program(), "push", *options])

    def _program(self) -> list[str]:
        folder = os.environ["CHAOS_PYTHON"]
        environment = {"PYTHONPATH": folder, "HOME": folder, "GRPC_VERBOSITY": "NONE"}
        return ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, str(PEER)]


class GoMember(PythonMember):
    """The official Go client of 5.x."""

    def _program(self) -> list[str]:
        binary = Path(os.environ["CHAOS_GO"])
        return ["env", f"rocketmq.client.logRoot={binary.parent}", str(binary)]


class JavaMember(Member):
    """Apache's client of 4.9. It pulls, and what it has read it handles after its queue has gone to another."""

    heeds_time = False

    async def start(self, *, behind_proxy: bool) -> None:
        program = (
            "-Xmx128m",
            "-cp",
            await compiled("Churn.java"),
            "Churn",
            self._world.name_server,
            GROUP,
            TOPIC,
            "20",
            "8",
        )
        await self._run(["java", *java_options(), *program], f"join {self.name} {TOPIC}")


class World:
    """The brokers, the members, and what they have done."""

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome, stands_s: tuple[float, ...]) -> None:
        self.folder = folder
        self.chance = chance
        self.outcome = outcome
        self.stands_s = stands_s
        ports = free_port(), free_port()
        self.name_server = f"127.0.0.1:{ports[0]}"
        options = ("--queues", str(QUEUES), "--log-level", "error")
        second = ("--name", "broker-b", "--nameserver", self.name_server)
        self.brokers = [
            BrokerProcess(folder / "a", ports[0], "--name", "broker-a", *options),
            BrokerProcess(folder / "b", ports[1], *second, *options, command="broker"),
        ]
        self.standing: set[int] = set()
        self.members: list[Member] = []
        self.started: list[Member] = []
        self.sent: set[str] = set()
        self.handled: Counter[str] = Counter()
        self.overlaps = Overlaps()
        self._names = 0
        self._began: dict[str, tuple[int, str, float]] = {}  # the latest epoch of a queue, whose, and since when
        self._spans: dict[str, list[tuple[Member, float, float]]] = {}  # when handlers ran, by message
        self._tasks: set[asyncio.Task[None]] = set()

    def began(self, member: str, queue: str, epoch: int, body: str, begin_ms: float) -> None:
        """Lines of two members may be read in another order than they were written: the times in them count."""
        latest = self._began.get(queue)
        if latest is None or epoch > latest[0]:
            self._began[queue] = (epoch, member, begin_ms)
        elif epoch == latest[0]:
            if member != latest[1]:
                self.outcome.fault("two members have one epoch")
            self._began[queue] = (epoch, member, min(begin_ms, latest[2]))
        elif begin_ms > latest[2]:
            self.outcome.fault("a member begins a message under an epoch that is over")
            late_ms = begin_ms - latest[2]
            print(
                f"{member} begins {body} of {queue} under {epoch}, {late_ms:.0f} ms after {latest[1]} under {latest[0]}"
            )

    def ended(self, member: Member, body: str, began_ms: float, end_ms: float) -> None:
        """Handlers that took long may have stood still, while their message or its queue became another's."""
        self.handled[body] += 1
        if end_ms - began_ms > SHORT_MS:
            return
        for other, since_ms, until_ms in self._spans.setdefault(body, []):
            if other is not member and began_ms < until_ms and since_ms < end_ms:
                cause = self.overlaps.found((member, other), max(began_ms, since_ms))
                if cause is not STOOD:
                    self.outcome.fault(f"a message is in two hands at one time, after {cause}")
                print(
                    f"{member} handles {body} from {began_ms:.0f} to {end_ms:.0f}, "
                    f"{other} {since_ms:.0f} to {until_ms:.0f}, after {cause}"
                )
        self._spans[body].append((member, began_ms, end_ms))

    # Events

    @contextlib.contextmanager
    def _noting(self, event: str, cause: str, name: str) -> Iterator[None]:
        print(f"{time.time() * 1000:.0f} {event} {name}", flush=True)
        with self.overlaps.happening(cause, name):
            yield
        print(f"{time.time() * 1000:.0f} {event} {name}: over", flush=True)

    async def join(self) -> None:
        if len(self.members) < MEMBERS[1]:
            self._names += 1
            member = self._kind()(f"m{self._names}", self)
            self.members.append(member)
            self.started.append(member)
            member.is_busy = True
            with self._noting("join", CHANGED, str(member)):
                await member.start(behind_proxy=self.chance.random() < 0.5)
            member.is_busy = False

    def _kind(self) -> type[Member]:
        chance = self.chance.random()
        if os.environ.get("CHAOS_JAVA") == "1" and chance < 0.25:
            return JavaMember
        if os.environ.get("CHAOS_POPS") == "1" and 0.25 <= chance < 0.5:
            return PoppingMember
        if os.environ.get("CHAOS_PYTHON") and 0.5 <= chance < 0.65:
            return PythonMember
        if os.environ.get("CHAOS_GO") and 0.65 <= chance < 0.8:
            return GoMember
        return Member

    def _idle(self) -> Member | None:
        idle = [member for member in self.members if not member.is_busy]
        return self.chance.choice(idle) if len(self.members) > MEMBERS[0] and idle else None

    async def leave(self) -> None:
        await self._lose(Member.leave)

    async def kill(self) -> None:
        await self._lose(Member.kill)

    async def _lose(self, how: Callable[[Member], Awaitable[None]]) -> None:
        member = self._idle()
        if member is not None:
            self.members.remove(member)
            with self._noting(how.__name__, CHANGED, str(member)):
                await how(member)

    async def freeze(self) -> None:
        member = self._idle()
        if member is not None:
            member.is_busy = True
            with self._noting("freeze", STOOD, member.name):
                member.signal(signal.SIGSTOP)
                await asyncio.sleep(self.chance.choice(self.stands_s))
                member.signal(signal.SIGCONT)
            member.is_busy = False

    async def partition(self) -> None:
        member = self._idle()
        if member is not None and member.proxy is not None:
            member.is_busy = True
            with self._noting("partition", STOOD, member.name):
                member.proxy.signal(signal.SIGSTOP)
                await asyncio.sleep(self.chance.choice(self.stands_s))
                member.proxy.signal(signal.SIGCONT)
            member.is_busy = False

    async def restart_broker(self) -> None:
        await self._with_broker(BrokerProcess.end)

    async def kill_broker(self) -> None:
        await self._with_broker(BrokerProcess.kill)

    async def move_broker(self) -> None:
        """The one that is no name server comes back at another address."""
        await self._with_broker(BrokerProcess.end, number=1, port=free_port())

    async def _with_broker(
        self, end: Callable[[BrokerProcess], Awaitable[object]], *, number: int | None = None, port: int | None = None
    ) -> None:
        if number is None:
            number = self.chance.randrange(2)
        if not self.standing:
            self.standing.add(number)
            with self._noting(end.__name__, BROKER_AWAY, f"broker {number}"):
                await end(self.brokers[number])
                await asyncio.sleep(self.chance.uniform(0, 2))
                if port is not None:
                    self.brokers[number].move(port)
                await self.brokers[number].__aenter__()
            self.standing.discard(number)

    async def stop_broker(self) -> None:
        number = self.chance.randrange(2)
        if not self.standing:
            self.standing.add(number)
            with self._noting("freeze", BROKER_STOOD, f"broker {number}"):
                self.brokers[number].signal(signal.SIGSTOP)
                await asyncio.sleep(self.chance.choice(self.stands_s))
                self.brokers[number].signal(signal.SIGCONT)
            self.standing.discard(number)

    def spawn(self, event: str) -> None:
        task = asyncio.create_task(getattr(self, event)(), name=event)
        self._tasks.add(task)

    @property
    def missing(self) -> list[str]:
        """Messages that were acknowledged and are not handled."""
        return sorted(self.sent - self.handled.keys(), key=int)

    def waits_for(self) -> str:
        """The unfinished events and members, in words."""
        events = sorted(task.get_name() for task in self._tasks if not task.done())
        members = [member.name for member in self.started if member.runs]
        missing = self.missing
        return (
            f"events {', '.join(events) or 'none'}; members {', '.join(members) or 'none'}; "
            f"{len(missing)} messages {', '.join(missing[:5])}"
        )

    async def quiet(self) -> None:
        """Returns when all events are over."""
        for event in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(event, BaseException):
                self.outcome.fault(f"an event failed: {event!r}")


GENTLE = ("join", "leave", "restart_broker", "move_broker")
HARSH = ("kill", "freeze", "partition", "kill_broker", "stop_broker")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"events": {}, "sent": 0, "twice": 0, "in_two_hands": {}, "missing": 0})
    is_short = limit.count is not None and limit.count <= SHORT_COUNT
    world = World(folder, random.Random(seed), outcome, STANDS_S[:1] if is_short else STANDS_S)
    uvloop.run(_run(limit, world))
    return outcome


async def _run(limit: Limit, world: World) -> None:
    outcome, events = world.outcome, Counter[str]()
    async with world.brokers[0], world.brokers[1]:
        async with asyncio.timeout(READY_S):
            sending = await _begin(world)
        for _ in limit:
            event = world.chance.choice(GENTLE + HARSH)
            events[event] += 1
            world.spawn(event)
            await asyncio.sleep(world.chance.uniform(*PAUSE_S))
            outcome.tried += 1
        saying = asyncio.create_task(_say_forever(world))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _end(world, sending)
        except TimeoutError:
            outcome.fault(f"after {PATIENCE_S:.0f} s it still waits: {world.waits_for()}")
        saying.cancel()
        missing = len(world.missing)
        for _ in range(missing):
            outcome.fault("an acknowledged message was never handled")
        twice = world.handled.total() - len(world.handled)
        kinds = Counter(type(member).__name__ for member in world.started)
        outcome.figures |= {"events": dict(events), "kinds": dict(kinds)}
        outcome.figures |= {"sent": len(world.sent), "twice": twice, "missing": missing}
        outcome.figures["in_two_hands"] = dict(world.overlaps.causes)
        await asyncio.gather(*(member.kill() for member in world.started if member.runs))


async def _begin(world: World) -> asyncio.Task[None]:
    """The first members are here, and messages flow."""
    async with AdminClient(world.name_server) as admin:
        await admin.create_topic(TOPIC, queues=QUEUES)
    for _ in range(MEMBERS[0]):
        await world.join()
    sending = asyncio.create_task(_send_forever(world))
    while not world.sent and not sending.done():
        await asyncio.sleep(0.05)
    return sending


async def _end(world: World, sending: asyncio.Task[None]) -> None:
    """Returns when all events are over, all messages handled, and all members gone."""
    await world.quiet()
    sending.cancel()
    ended = await asyncio.gather(sending, return_exceptions=True)
    if not isinstance(ended[0], asyncio.CancelledError) or not world.sent:
        world.outcome.fault(f"nothing was sent any more: {ended[0]!r}")
    while world.missing:
        await asyncio.sleep(0.2)
    await asyncio.gather(*(member.leave() for member in world.members))


async def _say_forever(world: World) -> None:
    """On standard error, what it waits for."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"waiting for: {world.waits_for()}", file=sys.stderr, flush=True)


async def _send_forever(world: World) -> None:
    async with Producer(world.name_server, timeout_s=5, retries=0) as producer:
        for number in range(1_000_000_000):
            with contextlib.suppress(RocketletError):
                await producer.send(TOPIC, f"{number}".encode())
                world.sent.add(f"{number}")
            await asyncio.sleep(1 / RATE)
