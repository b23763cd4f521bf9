"""Members join and leave while messages flow: duplicates, missing, queues with two owners, and how soon it is settled.

Rocketlet's members on Rocketlet's broker, beside Apache's Java members on Apache's broker and on ours. A churn is one member
that joins the others, is given its share, and leaves gracefully. Every handler sleeps; who handled what, and when, is
compared."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rocketlet.client import Consumer, Message, Producer
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner
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


class PythonMembers:
    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self._address = address
        self._options = options
        self._handled: list[Handled] = []
        self._members: dict[str, Consumer] = {}

    async def join(self, name: str) -> None:
        async def handle(message: Message) -> None:
            begin_ms = time.time() * 1000
            await asyncio.sleep(self._options.handler_ms / 1000)
            body = message.body.decode().strip()
            self._handled.append(Handled(name, message.queue_id, body, begin_ms, time.time() * 1000))

        consumer = Consumer(self._address, "churn", TOPIC, handle, start="first", concurrency=self._options.threads)
        self._members[name] = await consumer.__aenter__()

    async def leave(self, name: str) -> None:
        await self._members.pop(name).__aexit__()

    def handled(self) -> list[Handled]:
        return list(self._handled)

    async def close(self) -> None:
        for name in list(self._members):
            await self.leave(name)


class JavaMembers:
    """A process with the members, which writes to its log what they handle."""

    def __init__(self, child: Child, log: Path) -> None:
        self._child = child
        self._log = log

    async def join(self, name: str) -> None:
        await self._child.ask(f"join {name}")

    async def leave(self, name: str) -> None:
        await self._child.ask(f"leave {name}")

    def handled(self) -> list[Handled]:
        found = []
        for line in self._log.read_text().rpartition("\n")[0].splitlines():
            match line.split():
                case ["HANDLED", name, queue, body, begin_ms, end_ms]:
                    found.append(Handled(name, int(queue), body, float(begin_ms), float(end_ms)))
        return found

    async def close(self) -> None:
        await self._child.close()


async def start_members(peer: Peer, options: argparse.Namespace, stack: AsyncExitStack) -> PythonMembers | JavaMembers:
    if peer.name == "rocketlet":
        return PythonMembers(peer.address, options)
    command = (
        "java", *java_options(), "-cp", await compiled("Churn.java"), "Churn", peer.address, "churn", TOPIC,
        str(options.handler_ms), str(options.threads),
    )  # fmt: skip
    log = runner.temporary_folder(stack) / "members.log"
    return JavaMembers(await Child.start(command, log), log)


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


async def churn(peer: Peer, options: argparse.Namespace) -> Run:
    """Joins and leaves, each followed by a stay in which it is settled."""
    run = Run()
    await runner.make_topic(peer.address, TOPIC, options.queues)
    async with Producer(peer.address, timeout_s=10) as producer, AsyncExitStack() as stack:
        members = await start_members(peer, options, stack)
        stack.push_async_callback(members.close)
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
        while run.sent - {item.body for item in members.handled()} and time.monotonic() < end_s:
            await asyncio.sleep(0.5)
        await members.close()
        run.handled = members.handled()
    return run


def double_owner_ms(run: Run) -> float:
    """How long handlers of two members ran on one queue at the same time, summed over queues."""
    total = 0.0
    points: dict[int, list[tuple[float, int, str]]] = defaultdict(list)
    for item in run.handled:
        points[item.queue] += (item.begin_ms, 1, item.member), (item.end_ms, -1, item.member)
    for of_queue in points.values():
        running: Counter[str] = Counter()
        before_ms = 0.0
        for at_ms, step, member in sorted(of_queue):
            if sum(count > 0 for count in running.values()) > 1:
                total += at_ms - before_ms
            running[member] += step
            before_ms = at_ms
    return total


def settle_ms(run: Run) -> list[float]:
    """Per join and leave: until the last queue that moved was handled by its new owner."""
    waits: list[float] = []
    ends_ms = [*(at for _, _, at in run.moments[1:]), run.moments[-1][2] + STAY_S * 1000]
    for (kind, name, at), end_ms in zip(run.moments, ends_ms, strict=True):
        before_owner = owners(run, at - SETTLED_AFTER_S * 1000, at)
        after_owner = owners(run, end_ms - (STAY_S - SETTLED_AFTER_S) * 1000, end_ms)
        moved = {(queue, member) for queue, member in after_owner.items() if before_owner.get(queue) != member}
        firsts: dict[tuple[int, str], float] = {}
        for item in sorted(run.handled, key=lambda item: item.begin_ms):
            if item.begin_ms >= at and (item.queue, item.member) in moved:
                firsts.setdefault((item.queue, item.member), item.begin_ms)
        if firsts:
            waits.append(max(firsts.values()) - at)
        else:
            runner.console.print(f"nothing moved when {name} did {kind}")
    return waits


def owners(run: Run, begin_ms: float, end_ms: float) -> dict[int, str]:
    """The member that handled the last message of each queue in a span of time."""
    found = sorted((item for item in run.handled if begin_ms <= item.begin_ms < end_ms), key=lambda item: item.begin_ms)
    return {item.queue: item.member for item in found}


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
        "settle_ms_p50": round(runner.median(waits), 1),
        "settle_ms_max": round(max(waits, default=float("nan")), 1),
    }


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    async def measure(peer: Peer) -> runner.Values:
        return figures(await churn(peer, options))

    async def prepare(peer: Peer, _: AsyncExitStack) -> runner.Cases:
        return {"": partial(measure, peer)}

    found = await runner.compare(options, NAMES, prepare)
    load = f"{options.rate:.0f} messages/s, {options.queues} queues, {options.handler_ms} ms handlers"
    found.show(f"{load}, {options.members} members and a guest", "settle_ms_p50", less_is_better=True)
    return found.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES, rounds=1)
    made.add_argument("--churns", type=whole(1), default=20)
    made.add_argument("--queues", type=whole(1), default=8)
    made.add_argument("--rate", type=runner.positive, default=1000.0, help="messages a second")
    made.add_argument("--handler-ms", type=whole(0), default=50)
    made.add_argument("--members", type=whole(1), default=2, help="members that stay; one more comes and goes")
    made.add_argument("--threads", type=whole(1), default=40, help="concurrent handlers in each member")
    runner.main("churn", made, run)
