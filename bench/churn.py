"""Members join and leave while messages flow: duplicates, missing, queues with two owners, and how soon it is settled.

Rocketlet's members on Rocketlet's broker, beside Apache's Java members on Apache's broker and on ours, and beside members of
Kafka's newer protocol (KIP-848), where the broker assigns the partitions and a member hands over those that it must give up.
A churn is one member that joins the others, is given its share, and leaves gracefully. Every handler sleeps; who handled
what, and when, is compared."""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition
from rocketlet.client import Consumer, Message
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner, sends
from .peers import Peer, compiled, java_options, make_kafka_topic

NAMES = ("rocketlet", "apache", "java-on-rocketlet", "kafka")
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


class KafkaMember(threading.Thread):
    """A member of confluent-kafka with as many handlers as the others. Messages of a partition that is revoked are handled
    and committed first."""

    def __init__(self, name: str, address: str, options: argparse.Namespace) -> None:
        super().__init__()
        self._member = name
        self._settings = {
            "bootstrap.servers": address,
            "group.id": TOPIC,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
        }
        self._handler_s, self._threads = options.handler_ms / 1000, options.threads
        self._running: dict[int, dict[Future[None], KafkaMessage]] = defaultdict(dict)
        self._is_over = threading.Event()
        self.handled: list[Handled] = []
        self.start()

    def leave(self) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        consumer = KafkaConsumer(self._settings)
        consumer.subscribe([TOPIC], on_revoke=self._revoked)
        with ThreadPoolExecutor(self._threads) as handlers:
            while not self._is_over.is_set():
                is_full = sum(map(len, self._running.values())) >= self._threads
                message = None if is_full else consumer.poll(0.01)
                if message is not None and not message.error():
                    future = handlers.submit(self._handle, message)
                    self._running[message.partition() or 0][future] = message
                elif is_full:
                    wait([future for running in self._running.values() for future in running], 0.05, "FIRST_COMPLETED")
                for running in self._running.values():
                    self._store(consumer, running)
            self._finish(consumer, list(self._running))
            consumer.close()

    def _handle(self, message: KafkaMessage) -> None:
        begin_ms = time.time() * 1000
        time.sleep(self._handler_s)
        body = (message.value() or b"").decode().strip()
        self.handled.append(Handled(self._member, message.partition() or 0, body, begin_ms, time.time() * 1000))

    @staticmethod
    def _store(consumer: KafkaConsumer, running: dict[Future[None], KafkaMessage]) -> None:
        """Store the offsets of the first messages that are handled, up to one that is not."""
        while running and (first := next(iter(running))).done():
            consumer.store_offsets(running.pop(first))

    def _revoked(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        self._finish(consumer, [partition.partition for partition in partitions])

    def _finish(self, consumer: KafkaConsumer, partitions: list[int]) -> None:
        for partition in partitions:
            wait(self._running[partition])
            if self._running[partition]:
                self._store(consumer, self._running.pop(partition))
                consumer.commit(asynchronous=False)


class KafkaMembers:
    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self._address = address
        self._options = options
        self._members: dict[str, KafkaMember] = {}
        self._handled: list[Handled] = []

    async def join(self, name: str) -> None:
        self._members[name] = KafkaMember(name, self._address, self._options)

    async def leave(self, name: str) -> None:
        member = self._members.pop(name)
        await asyncio.to_thread(member.leave)
        self._handled += member.handled

    def handled(self) -> list[Handled]:
        return self._handled + [item for member in self._members.values() for item in member.handled]

    async def close(self) -> None:
        for name in list(self._members):
            await self.leave(name)


Members = PythonMembers | JavaMembers | KafkaMembers


async def start_members(peer: Peer, options: argparse.Namespace, stack: AsyncExitStack) -> Members:
    if peer.name == "rocketlet":
        return PythonMembers(peer.address, options)
    if peer.name == "kafka":
        return KafkaMembers(peer.address, options)
    command = (
        "java", *java_options(), "-cp", await compiled("Churn.java"), "Churn", peer.address, "churn", TOPIC,
        str(options.handler_ms), str(options.threads),
    )  # fmt: skip
    log = runner.temporary_folder(stack) / "members.log"
    return JavaMembers(await Child.start(command, log), log)


async def send_forever(send_body: sends.Send, run: Run, rate: float) -> None:
    began_s = time.perf_counter()
    number = 0

    async def send(number: int) -> None:
        body = f"m{number}"
        await send_body(body.ljust(100).encode())
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
    is_kafka = peer.name == "kafka"
    if is_kafka:
        await make_kafka_topic(peer, TOPIC, options.queues)
    else:
        await runner.make_topic(peer.address, TOPIC, options.queues)
    async with AsyncExitStack() as stack:
        send = await (sends.aiokafka if is_kafka else sends.ours)(peer, stack, TOPIC)
        members = await start_members(peer, options, stack)
        stack.push_async_callback(members.close)
        for number in range(options.members):
            await members.join(f"steady{number}")
        sending = asyncio.create_task(send_forever(send, run, options.rate))
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
