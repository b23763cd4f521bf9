"""Members come, go, are killed, freeze and are cut off, brokers stop, move, are killed and freeze, while messages flow.

All are processes, on two brokers. A member is cut off by freezing the proxy (`rocketlet dump`) between it and the brokers:
its sockets stay open and silent. With CHAOS_JAVA=1 unmodified Java members come and go, too; with CHAOS_POPS=1 some members
pop; with CHAOS_PYTHON=FOLDER, where pip has put rocketmq-python-client, some are that client, and with CHAOS_GO=PROGRAM,
built in tests/interop/five/go, some are Go's.

A fault is: an acknowledged message that is not handled in the end, a message that a Rocketlet member starts to handle under
an old epoch, after another member has started one of the queue under a later one, a message that two members handle at one
time, and anything else that is not over 240 s after the last event. Every 5 s it then prints what it waits for.

Apache's clients handle all that they have when they resume after a freeze, whichever member has received it meanwhile, so a
message that two members handle shortly after a freeze of such a client is no fault. `handled_twice_after` counts them all, by
what had happened before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from rocketlet.client import AdminClient, Producer, RocketletError
from rocketlet.demo.processes import Child, ServerProcess
from rocketlet.testing.ports import free_port

from bench.peers import compiled, java_options

from .common import PROGRESS_S, Limit, Outcome

SHORT_COUNT = 10  # up to this many events nothing freezes for longer than a lease lasts
TOPIC, GROUP = "t", "g"
PEER = Path(__file__).parents[1] / "tests/interop/five/python/peer.py"
QUEUES = 6
RATE = 60.0
MEMBERS = (2, 6)
PAUSE_S = (0.3, 3.0)
FREEZES_S = (1.0, 4.0, 12.0, 25.0)
READY_S = 120.0
SHORT_MS = 900.0  # a handler that takes longer may have been frozen
END_S = 240.0  # until everything is over; foreign messages in retry are redelivered after a minute
EXCUSED_MS = 30_000.0  # Apache's clients send a heartbeat after this (heartbeatBrokerInterval)
FROZEN, BROKER_FROZEN, BROKER_AWAY, CHANGED = "a foreign freeze", "a frozen broker", "a broker's absence", "a change"


class Member:
    """A consumer process, perhaps behind a proxy of its own."""

    kind = "pulls"
    checks_leases = True
    """False if it handles messages that another member received while it was frozen."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.is_busy = False  # it is frozen, or is about to end
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
            program = (sys.executable, "-m", "rocketlet.command.cli", "dump")
            dump = (*program, "0", "--to", address, "--only", "UNREGISTER_CLIENT")
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

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    async def leave(self) -> None:
        await self.child.close()
        await self._end()

    async def kill(self) -> None:
        self.child.kill()
        await self._end()

    @property
    def runs(self) -> bool:
        return any(child and child.exit_status is None for child in (self._child, self.proxy))

    async def _end(self) -> None:
        assert self._reader is not None
        await self.child.wait(END_S)
        await self._reader
        if self.proxy is not None:
            self.proxy.kill()
            await self.proxy.wait(END_S)


class PoppingMember(Member):
    kind = "pops"


class PythonMember(Member):
    """The official Python client of 5.x, which pops. It needs the route of its broker."""

    checks_leases = False

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
    """Apache's client of 4.9. It handles the messages that it has pulled even if its queue has another owner by then."""

    checks_leases = False

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

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome, freezes_s: tuple[float, ...]) -> None:
        self.folder = folder
        self.chance = chance
        self.outcome = outcome
        self.freezes_s = freezes_s
        ports = free_port(), free_port()
        self.name_server = f"127.0.0.1:{ports[0]}"
        options = ("--queues", str(QUEUES), "--log-level", "error")
        second = ("--name", "broker-b", "--nameserver", self.name_server)
        self.brokers = [
            ServerProcess(folder / "a", ports[0], "--name", "broker-a", *options),
            ServerProcess(folder / "b", ports[1], *second, *options, command="broker"),
        ]
        self.is_broker_away = False
        self.members: list[Member] = []
        self.started: list[Member] = []
        self.sent: set[str] = set()
        self.handled: Counter[str] = Counter()
        self.handled_twice_after: Counter[str] = Counter()
        self._began: dict[str, tuple[int, str, float]] = {}  # the latest epoch of a queue, its member, and its start
        self._spans: dict[str, list[tuple[Member, float, float]]] = {}  # when handlers ran, by message
        self._happened: list[tuple[str, str, list[float]]] = []  # causes, names, start and end
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
            self.outcome.fault("a member starts to handle a message under an old epoch")
            late_ms = begin_ms - latest[2]
            print(f"{member}: {body} of {queue} under {epoch}, {late_ms:.0f} ms after {latest[1]} under {latest[0]}")

    def ended(self, member: Member, body: str, began_ms: float, end_ms: float) -> None:
        """Long handlers may have been frozen, while another member received their message or its queue."""
        self.handled[body] += 1
        if end_ms - began_ms > SHORT_MS:
            return
        for other, since_ms, until_ms in self._spans.setdefault(body, []):
            if other is not member and began_ms < until_ms and since_ms < end_ms:
                cause = self._cause((member, other), max(began_ms, since_ms))
                self.handled_twice_after[cause] += 1
                if cause != FROZEN:
                    self.outcome.fault(f"two members handle a message at one time, after {cause}")
                print(f"{body}: {member} {began_ms:.0f} to {end_ms:.0f}, {other} {since_ms:.0f} to {until_ms:.0f}")
        self._spans[body].append((member, began_ms, end_ms))

    def _cause(self, members: tuple[Member, Member], at_ms: float) -> str:
        foreign = {member.name for member in members if not member.checks_leases}
        recent = {
            cause
            for cause, name, (since_ms, until_ms) in self._happened
            if since_ms <= at_ms <= until_ms + EXCUSED_MS and (cause != FROZEN or name in foreign)
        }
        return next((cause for cause in (FROZEN, BROKER_FROZEN, BROKER_AWAY, CHANGED) if cause in recent), "nothing")

    # Events

    @contextlib.contextmanager
    def _noting(self, event: str, cause: str, name: str) -> Iterator[None]:
        times = [time.time() * 1000, math.inf]
        self._happened.append((cause, name, times))
        print(f"{times[0]:.0f} {event} {name}", flush=True)
        yield
        times[1] = time.time() * 1000
        print(f"{times[1]:.0f} {event} {name}: over", flush=True)

    async def join(self) -> None:
        if len(self.members) < MEMBERS[1]:
            member = self._kind()(f"m{len(self.started) + 1}", self)
            self.members.append(member)
            self.started.append(member)
            member.is_busy = True
            with self._noting("join", CHANGED, str(member)):
                await member.start(behind_proxy=self.chance.random() < 0.5)
            member.is_busy = False

    def _kind(self) -> type[Member]:
        chance = self.chance.random()
        for name, kind, end in (
            ("CHAOS_JAVA", JavaMember, 0.25),
            ("CHAOS_POPS", PoppingMember, 0.5),
            ("CHAOS_PYTHON", PythonMember, 0.65),
            ("CHAOS_GO", GoMember, 0.8),
        ):
            if chance < end:
                return kind if os.environ.get(name) else Member
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
        if member := self._idle():
            member.is_busy = True
            await self._freeze("freeze", FROZEN, member.name, member.child)
            member.is_busy = False

    async def partition(self) -> None:
        member = self._idle()
        if member is not None and member.proxy is not None:
            member.is_busy = True
            await self._freeze("partition", FROZEN, member.name, member.proxy)
            member.is_busy = False

    async def _freeze(self, event: str, cause: str, name: str, child: Child) -> None:
        with self._noting(event, cause, name):
            child.signal(signal.SIGSTOP)
            await asyncio.sleep(self.chance.choice(self.freezes_s))
            child.signal(signal.SIGCONT)

    async def restart_broker(self) -> None:
        await self._with_broker(ServerProcess.end, self.chance.randrange(2))

    async def kill_broker(self) -> None:
        await self._with_broker(ServerProcess.kill, self.chance.randrange(2))

    async def move_broker(self) -> None:
        """The broker that is no name server returns at another address."""
        await self._with_broker(ServerProcess.end, 1, port=free_port())

    async def _with_broker(
        self, end: Callable[[ServerProcess], Awaitable[object]], number: int, port: int | None = None
    ) -> None:
        broker = self.brokers[number]
        if not self.is_broker_away:
            self.is_broker_away = True
            with self._noting(end.__name__, BROKER_AWAY, f"broker {number}"):
                await end(broker)
                await asyncio.sleep(self.chance.uniform(0, 2))
                if port is not None:
                    broker.move(port)
                await broker.__aenter__()
            self.is_broker_away = False

    async def stop_broker(self) -> None:
        number = self.chance.randrange(2)
        if not self.is_broker_away:
            self.is_broker_away = True
            await self._freeze("freeze", BROKER_FROZEN, f"broker {number}", self.brokers[number].child)
            self.is_broker_away = False

    def spawn(self, event: str) -> None:
        self._tasks.add(asyncio.create_task(getattr(self, event)(), name=event))

    @property
    def missing(self) -> list[str]:
        """The acknowledged messages that are not handled."""
        return sorted(self.sent - self.handled.keys(), key=int)

    def waits_for(self) -> str:
        """Return the unfinished events and members, and unhandled messages, as a text."""
        events = sorted(task.get_name() for task in self._tasks if not task.done())
        members, missing = [member.name for member in self.started if member.runs], self.missing
        return (
            f"events {', '.join(events) or 'none'}; members {', '.join(members) or 'none'}; "
            f"{len(missing)} messages {', '.join(missing[:5])}"
        )

    async def send_forever(self) -> None:
        async with Producer(self.name_server, timeout_s=5, retries=0) as producer:
            for number in range(1_000_000_000):
                with contextlib.suppress(RocketletError):
                    await producer.send(TOPIC, f"{number}".encode())
                    self.sent.add(f"{number}")
                await asyncio.sleep(1 / RATE)

    async def start(self) -> asyncio.Task[None]:
        """Return the task that sends, when the first members are here and messages flow."""
        async with AdminClient(self.name_server) as admin:
            await admin.create_topic(TOPIC, queues=QUEUES)
        for _ in range(MEMBERS[0]):
            await self.join()
        sending = asyncio.create_task(self.send_forever())
        while not self.sent and not sending.done():
            await asyncio.sleep(0.05)
        return sending

    async def end(self, sending: asyncio.Task[None]) -> None:
        """Return when all events are over, all messages are handled, and all members have left."""
        for event in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(event, BaseException):
                self.outcome.fault(f"an event failed: {event!r}")
        sending.cancel()
        ended = await asyncio.gather(sending, return_exceptions=True)
        if not isinstance(ended[0], asyncio.CancelledError) or not self.sent:
            self.outcome.fault(f"sending has stopped: {ended[0]!r}")
        while self.missing:
            await asyncio.sleep(0.2)
        await asyncio.gather(*(member.leave() for member in self.members))


GENTLE = ("join", "leave", "restart_broker", "move_broker")
HARSH = ("kill", "freeze", "partition", "kill_broker", "stop_broker")


async def chaos(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    is_short = limit.count is not None and limit.count <= SHORT_COUNT
    world, events = (
        World(folder, random.Random(seed), outcome, FREEZES_S[:1] if is_short else FREEZES_S),
        Counter[str](),
    )
    async with world.brokers[0], world.brokers[1]:
        async with asyncio.timeout(READY_S):
            sending = await world.start()
        for _ in limit:
            event = world.chance.choice(GENTLE + HARSH)
            events[event] += 1
            world.spawn(event)
            await asyncio.sleep(world.chance.uniform(*PAUSE_S))
        reporting = asyncio.create_task(_report_forever(world))
        try:
            async with asyncio.timeout(END_S):
                await world.end(sending)
        except TimeoutError:
            outcome.fault(f"after {END_S:.0f} s it still waits: {world.waits_for()}")
        reporting.cancel()
        missing, kinds = world.missing, Counter(type(member).__name__ for member in world.started)
        for _ in missing:
            outcome.fault("an acknowledged message was never handled")
        outcome.figures |= {
            "events": dict(events),
            "kinds": dict(kinds),
            "sent": len(world.sent),
            "missing": len(missing),
        }
        outcome.figures["twice"] = world.handled.total() - len(world.handled)
        outcome.figures["handled_twice_after"] = dict(world.handled_twice_after)
        await asyncio.gather(*(member.kill() for member in world.started if member.runs))


async def _report_forever(world: World) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"waiting for: {world.waits_for()}", file=sys.stderr, flush=True)
