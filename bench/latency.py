"""Latency from `send` to the handler of another process, under a load that does not wait: messages of 1 KB are due at fixed
times, whatever became of those before (open loop), and each one's time counts from when it was due. So a system that stands
still pays for every message that was due meanwhile (corrected for coordinated omission).

Our client on our broker and on Apache's of 4.9 and of 5, nats-py on JetStream, aiokafka on Kafka. One process sends, one
handles, one is the broker. Rates beyond 1,000/s come in bursts, one each ms.

Two more cases of our client, at 1,000/s: while another group drains a backlog, and while 20 more members join and leave,
one after the other."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import struct
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats
import uvloop
from aiokafka import AIOKafkaConsumer
from nats.aio.msg import Msg
from rocketlet.client import Consumer, Message
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import drain, runner, sends
from .peers import Peer, make_kafka_topic

OURS = ("rocketlet", "apache", "apache-5")
NAMES = (*OURS, "jetstream", "kafka")
NAME = "latency"  # of the topic and the group
RATES = (100.0, 1_000.0, 10_000.0, 30_000.0)
# aiokafka falls behind for good at 10,000/s; nats-py was not tried above 1,000/s, and sends 14,000/s at most (`sends`)
MOST_RATES = {
    "jetstream": 1_000.0,
    "kafka": 10_000.0,
}
SECONDS = 5.0
BACKLOG = 1_000_000
BACKLOG_CASE, MEMBERS_CASE = "1000 beside a drain", "1000 beside members"
CASE_RATE = 1_000
MEMBERS = 20
QUEUES = 32
PAUSE_S = 0.1  # between members that join or leave one after the other
ARRIVAL_S = 120.0
WARM_UP = (1_000, 2.0)
# when a message was due (ns of CLOCK_MONOTONIC, which all processes share), the run, its number
HEAD = struct.Struct(">qII")
PADDING = b"." * (runner.BODY_BYTES - HEAD.size)

# The process at the other end


class Reader:
    """Members of one group in a process of its own, which note when each message reaches a handler.

    `python -m bench.latency reader SYSTEM ADDRESS` reads orders from stdin, a line each, and prints a line after each:

    members N      members join or leave, one after the other with a pause, until there are N
    drain COUNT    a group of its own reads a backlog of COUNT messages
    samples RUN    two int64 in hex for each handled message of a run, which is forgotten then: its number, and the ns since
                   it was due
    """

    def __init__(self, system: str, address: str) -> None:
        self._join = {"jetstream": self._join_jetstream, "kafka": self._join_kafka}.get(system, self._join_ours)
        self._address = address
        self._samples: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self._members: list[AsyncExitStack] = []
        self._drains = itertools.count()

    def _note(self, body: bytes) -> None:
        due_ns, run, number = HEAD.unpack_from(body)
        self._samples[run].extend((number, time.monotonic_ns() - due_ns))

    async def _join_ours(self, stack: AsyncExitStack) -> None:
        async def handle(message: Message) -> None:
            self._note(message.body)

        await stack.enter_async_context(Consumer(self._address, NAME, NAME, handle, start="first"))

    async def _join_jetstream(self, stack: AsyncExitStack) -> None:
        async def handle(message: Msg) -> None:
            self._note(message.data)

        connection = await nats.connect(f"nats://{self._address}")
        stack.push_async_callback(connection.close)
        await connection.jetstream().subscribe(NAME, durable=NAME, cb=handle)  # nats-py acknowledges after the callback

    async def _join_kafka(self, stack: AsyncExitStack) -> None:
        consumer = AIOKafkaConsumer(NAME, bootstrap_servers=self._address, group_id=NAME, auto_offset_reset="earliest")
        await consumer.start()
        stack.push_async_callback(consumer.stop)

        async def consume() -> None:
            async for record in consumer:
                self._note(record.value)

        stack.callback(asyncio.create_task(consume()).cancel)

    async def members(self, count: int) -> None:
        while len(self._members) != count:
            if len(self._members) < count:
                member = AsyncExitStack()
                await self._join(member)
                self._members.append(member)
            else:
                await self._members.pop().aclose()
            await asyncio.sleep(PAUSE_S)

    async def drain(self, count: int) -> None:
        await drain.in_batches(self._address, count, next(self._drains))

    async def samples(self, run: int) -> str:
        return self._samples.pop(run, array("q")).tobytes().hex()

    async def serve(self) -> None:
        """Carry out the orders until stdin ends."""
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := (await lines.readline()).decode():
            order, number = line.split()
            print(await getattr(self, order)(int(number)) or "", flush=True)
        await self.members(0)


async def start_reader(peer: Peer, stack: AsyncExitStack) -> Child:
    log = runner.temporary_folder(stack) / "reader.log"
    child = await Child.start((sys.executable, "-m", "bench.latency", "reader", peer.name, peer.address), log)
    stack.push_async_callback(child.close)
    return child


# The load


class Load:
    """Sends when messages are due. A timer of the kernel wakes the loop, whose own timers are not finer than 1 ms."""

    def __init__(self, send: sends.Send, run: int, rate: float) -> None:
        self._send = send
        self._run = run
        self._interval_ns, self._burst = (10**6, round(rate / 1000)) if rate > 1000 else (round(10**9 / rate), 1)
        self.sent = 0
        self.late_ns = 0

    async def until(self, over: Callable[[int], bool]) -> None:
        """Sends what is due until `over(due_ns)`, and waits until all of it is acknowledged."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._due_ns = time.monotonic_ns() + self._interval_ns
        async with asyncio.TaskGroup() as tasks:

            def tick() -> None:
                self._send_due(tasks, over)
                if over(self._due_ns):
                    ended.set()

            interval_s = self._interval_ns / 1e9
            loop.add_signal_handler(signal.SIGALRM, tick)
            signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
            try:
                await ended.wait()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                loop.remove_signal_handler(signal.SIGALRM)

    async def _sent(self, body: bytes) -> None:
        await self._send(body)

    def _send_due(self, tasks: asyncio.TaskGroup, over: Callable[[int], bool]) -> None:
        now_ns = time.monotonic_ns()
        while self._due_ns <= now_ns and not over(self._due_ns):
            for number in range(self.sent, self.sent + self._burst):
                tasks.create_task(self._sent(HEAD.pack(self._due_ns, self._run, number) + PADDING))
            self.sent += self._burst
            self.late_ns = now_ns - self._due_ns
            self._due_ns += self._interval_ns


@dataclass(frozen=True)
class System:
    """One system with what sends and who reads. `guests` are members of the same group in a process of their own; they
    drain the backlog, too, in another group."""

    peer: Peer
    send: sends.Send
    reader: Child
    guests: Child
    runs: Iterator[int] = field(default_factory=itertools.count)

    async def at(self, rate: float, seconds: float) -> runner.Values:
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        return await self._measure(rate, lambda due_ns: due_ns >= end_ns)

    async def beside(self, *orders: str) -> runner.Values:
        """Measure while the guests carry out orders."""

        async def carry_out() -> None:
            for order in orders:
                await self.guests.ask(order)

        meanwhile = asyncio.create_task(carry_out())
        measured = await self._measure(CASE_RATE, lambda _: meanwhile.done())
        await meanwhile
        return measured

    async def _measure(self, rate: float, over: Callable[[int], bool]) -> runner.Values:
        """`late_ms`: how late the last message was handed to `send`; a sender that cannot keep up is late by much.
        `broker_us` is processor time per message."""
        run = next(self.runs)
        load = Load(self.send, run, rate)
        watch = runner.Stopwatch(self.peer)
        await load.until(over)
        seconds = watch.read_s()[0]
        latencies_ms = [ns / 1e6 for ns in (await self._arrived(run, load.sent)).values()]
        return {
            "p50_ms": runner.percentile(latencies_ms, 0.5),
            "p99_ms": runner.percentile(latencies_ms, 0.99),
            "p999_ms": runner.percentile(latencies_ms, 0.999),
            "late_ms": load.late_ns / 1e6,
            "broker_us": watch.read_s()[2] / load.sent * 1e6,
            "seconds": seconds,
        }

    async def _arrived(self, run: int, count: int) -> dict[int, int]:
        """By number the ns of each message until it was handled for the first time."""
        found: dict[int, int] = {}
        async with asyncio.timeout(ARRIVAL_S):
            while len(found) < count:
                for reader in (self.reader, self.guests):
                    samples = array("q", bytes.fromhex(await reader.ask(f"samples {run}")))
                    for number, ns in zip(samples[::2], samples[1::2], strict=True):
                        found[number] = min(ns, found.get(number, ns))
                await asyncio.sleep(0.1)
        return found


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    async def prepare(peer: Peer, stack: AsyncExitStack) -> runner.Cases:
        is_ours = peer.name in OURS
        if options.backlog and is_ours:
            await drain.fill(peer.address, options.backlog)
        if is_ours:
            await runner.make_topic(peer.address, NAME, QUEUES)
        elif peer.name == "kafka":
            await make_kafka_topic(peer, NAME, QUEUES)
        connect = {"jetstream": sends.jetstream, "kafka": sends.aiokafka}.get(peer.name, sends.ours)
        send = await connect(peer, stack, NAME)
        reader, guests = await start_reader(peer, stack), await start_reader(peer, stack)
        await reader.ask("members 1")
        system = System(peer, send, reader, guests)
        await system.at(*WARM_UP)
        cases: dict[str, runner.Measure] = {
            f"{rate:.0f}": partial(system.at, rate, options.seconds)
            for rate in options.rates
            if rate <= MOST_RATES.get(peer.name, rate)
        }
        if options.backlog and is_ours:
            cases[BACKLOG_CASE] = partial(system.beside, f"drain {options.backlog}")
            cases[MEMBERS_CASE] = partial(system.beside, f"members {MEMBERS}", "members 0")
        return cases

    figures = await runner.compare(options, NAMES, prepare)
    title = "From the time a message was due to the handler of another process, by messages/s"
    figures.show(title, "p99_ms", less_is_better=True)
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    if sys.argv[1:2] == ["reader"]:
        uvloop.run(Reader(*sys.argv[2:4]).serve())
    else:
        made.add_argument(
            "--rates", type=runner.listed(runner.positive), default=RATES, help="messages/s, separated by commas"
        )
        made.add_argument(
            "--seconds", type=runner.positive, default=SECONDS, help="of each run; the other cases end on their own"
        )
        made.add_argument("--backlog", type=whole(0), default=BACKLOG, help="0 leaves out the cases beside the rates")
        runner.main("latency", made, run)
