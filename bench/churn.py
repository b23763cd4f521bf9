"""Members join and leave while messages flow: duplicates, missing, queues with two owners, and how soon it is settled.

Rocketlet's members on Rocketlet's broker, beside Apache's Java members on Apache's broker and on ours. A churn is one member
that joins the others, is given its share, and leaves gracefully. Every handler sleeps; who handled what, and when, is
compared."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.wire.cluster import Cluster
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.bodies import decode_cluster
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write

from . import common
from .peers import Peer, compiled, java_options

NAMES = ("rocketlet", "apache", "java-on-rocketlet")
TOPIC = "churn"
STAY_S = 2.5
SETTLED_AFTER_S = 1.5


@dataclass(frozen=True, slots=True)
class Handled:
    member: str
    queue: int
    body: str
    begin_ms: float
    end_ms: float


@dataclass
class Run:
    """The events in one system."""

    handled: list[Handled] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    sent_ms: list[float] = field(default_factory=list)
    moments: list[tuple[str, str, float]] = field(default_factory=list)


class Members(Protocol):
    async def join(self, name: str, topic: str = TOPIC) -> None: ...

    async def leave(self, name: str) -> None: ...


class PythonMembers:
    def __init__(self, address: str, run: Run, handler_s: float, threads: int) -> None:
        self._address = address
        self._run = run
        self._handler_s = handler_s
        self._threads = threads
        self._members: dict[str, Consumer] = {}

    async def join(self, name: str, topic: str = TOPIC) -> None:
        async def handle(message: Message) -> None:
            begin_ms = time.time() * 1000
            await asyncio.sleep(self._handler_s)
            body = message.body.decode().strip()
            self._run.handled.append(Handled(name, message.queue_id, body, begin_ms, time.time() * 1000))

        consumer = Consumer(self._address, "churn", topic, handle, start="first", concurrency=self._threads)
        self._members[name] = await consumer.__aenter__()

    async def leave(self, name: str) -> None:
        await self._members.pop(name).__aexit__()

    async def close(self) -> None:
        for name in list(self._members):
            await self.leave(name)


class JavaMembers:
    def __init__(self, process: asyncio.subprocess.Process, run: Run) -> None:
        self._process = process
        self._run = run
        self._done: set[str] = set()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            words = line.decode().split()
            if words[:1] == ["HANDLED"]:
                _, name, queue, body, begin_ms, end_ms = words
                self._run.handled.append(Handled(name, int(queue), body, float(begin_ms), float(end_ms)))
            elif words[:1] == ["DONE"]:
                self._done.add(" ".join(words[1:]))

    async def _command(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        async with asyncio.timeout(30):
            while command not in self._done:
                if self._process.returncode is not None:
                    raise RuntimeError(f"the Java members have ended at {command!r}; see the output above")
                await asyncio.sleep(0.001)

    async def join(self, name: str, topic: str = TOPIC) -> None:
        await self._command(f"join {name} {topic}")

    async def leave(self, name: str) -> None:
        await self._command(f"leave {name}")

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader


@asynccontextmanager
async def members_of(peer: Peer, run: Run, options: Any) -> AsyncIterator[Members]:
    if peer.name in ("rocketlet", "python-on-apache"):
        python = PythonMembers(peer.address, run, options.handler_ms / 1000, options.threads)
        try:
            yield python
        finally:
            await python.close()
        return
    process = await asyncio.create_subprocess_exec(
        "java", *java_options(), "-cp", await compiled("Churn.java"), "Churn", peer.address, "churn", TOPIC,
        str(options.handler_ms), str(options.threads),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    java = JavaMembers(process, run)
    try:
        yield java
    finally:
        await java.close()


async def make_topic(address: str, topic: str, queues: int) -> None:
    cluster = Cluster(address)
    while not (found := decode_cluster((await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)).body)):
        await asyncio.sleep(0.05)
    connection = await cluster.connection(found[0].addresses[0])
    await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))
    while await cluster.find_route(topic) is None:
        await asyncio.sleep(0.05)
    await cluster.close()


async def send_forever(producer: Producer, run: Run, rate: float) -> None:
    began_s = time.perf_counter()
    number = 0

    async def send(number: int) -> None:
        body = f"m{number}"
        await producer.send(TOPIC, body.ljust(100).encode())
        run.sent.add(body)
        run.sent_ms.append(time.time() * 1000)

    while True:
        due = int((time.perf_counter() - began_s) * rate)
        await asyncio.gather(*(send(index) for index in range(number, due)))
        number = max(number, due)
        await asyncio.sleep(0.005)


async def churn(peer: Peer, options: Any) -> Run:
    """Joins and leaves, each followed by a stay in which it is settled."""
    run = Run()
    await make_topic(peer.address, TOPIC, options.queues)
    async with Producer(peer.address, timeout_s=10) as producer, members_of(peer, run, options) as members:
        for number in range(options.members):
            await members.join(f"steady{number}")
        sending = asyncio.create_task(send_forever(producer, run, options.rate))
        await asyncio.sleep(STAY_S)
        for number in range(options.churns):
            name = f"guest{number}"
            run.moments.append(("join", name, time.time() * 1000))
            await members.join(name)
            await asyncio.sleep(STAY_S)
            run.moments.append(("leave", name, time.time() * 1000))
            await members.leave(name)
            await asyncio.sleep(STAY_S)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        end_s = time.monotonic() + 20
        while len({item.body for item in run.handled} & run.sent) < len(run.sent) and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
    return run


def double_owner_ms(run: Run) -> float:
    """How long handlers of two members ran on one queue at the same time, summed over queues."""
    total = 0.0
    queues: dict[int, list[Handled]] = defaultdict(list)
    for item in run.handled:
        queues[item.queue].append(item)
    for items in queues.values():
        points = sorted(
            [(item.begin_ms, 1, item.member) for item in items] + [(item.end_ms, -1, item.member) for item in items]
        )
        running: Counter[str] = Counter()
        since: float | None = None
        for at, step, member in points:
            running[member] += step
            owners = sum(count > 0 for count in running.values())
            if owners > 1 and since is None:
                since = at
            elif owners < 2 and since is not None:
                total += at - since
                since = None
    return total


def settle_ms(run: Run) -> list[float]:
    """Per join and leave: until the last queue that moved was handled by its new owner."""
    waits: list[float] = []
    for (kind, name, at), after in zip(run.moments, [*run.moments[1:], ("", "", at_end(run))], strict=True):
        before_owner = owners(run, at - SETTLED_AFTER_S * 1000, at)
        after_owner = owners(run, after[2] - (STAY_S - SETTLED_AFTER_S) * 1000, after[2])
        moved = [queue for queue in after_owner if before_owner.get(queue) != after_owner[queue]]
        firsts = [first_ms(run, queue, after_owner[queue], at) for queue in moved]
        if firsts:
            waits.append(max(firsts) - at)
        else:
            common.console.print(f"nothing moved when {name} did {kind}")
    return waits


def first_ms(run: Run, queue: int, member: str, since_ms: float) -> float:
    """When a member began its first message of a queue after a moment."""
    return min(
        item.begin_ms
        for item in run.handled
        if item.queue == queue and item.member == member and item.begin_ms >= since_ms
    )


def at_end(run: Run) -> float:
    return run.moments[-1][2] + STAY_S * 1000


def owners(run: Run, begin_ms: float, end_ms: float) -> dict[int, str]:
    """The member that handled the last message of each queue in a span of time."""
    found: dict[int, Handled] = {}
    for item in run.handled:
        if begin_ms <= item.begin_ms < end_ms and (
            item.queue not in found or found[item.queue].begin_ms < item.begin_ms
        ):
            found[item.queue] = item
    return {queue: item.member for queue, item in found.items()}


def figures(run: Run) -> dict[str, float]:
    counts = Counter(item.body for item in run.handled)
    waits = settle_ms(run)
    return {
        "joins": sum(kind == "join" for kind, _, _ in run.moments),
        "leaves": sum(kind == "leave" for kind, _, _ in run.moments),
        "sent": len(run.sent),
        "duplicates": sum(counts.values()) - len(counts),
        "missing": len(run.sent - counts.keys()),
        "double_owner_ms": round(double_owner_ms(run), 1),
        "settle_ms_p50": round(common.median(waits), 1),
        "settle_ms_max": round(max(waits, default=float("nan")), 1),
    }


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--churns", type=whole(1), default=20)
    parser.add_argument("--queues", type=whole(1), default=8)
    parser.add_argument("--rate", type=common.positive, default=1000.0, help="messages a second")
    parser.add_argument("--handler-ms", type=whole(0), default=50)
    parser.add_argument("--members", type=whole(1), default=2, help="members that stay; one more comes and goes")
    parser.add_argument("--threads", type=whole(1), default=40, help="handlers at once in each member")
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    async with AsyncExitStack() as stack:
        peers = await stack.enter_async_context(common.started(names))
        found = {name: figures(await churn(peer, options)) for name, peer in peers.items()}
    rows = [[key, *(item[key] for item in found.values())] for key in next(iter(found.values()))]
    load = f"{options.rate:.0f} messages/s, {options.queues} queues, {options.handler_ms} ms handlers"
    title = f"{load}, {options.members} members and a guest"
    common.show(title, ("", *found), rows)
    common.finish(options, "churn", found)


if __name__ == "__main__":
    uvloop.run(run())
