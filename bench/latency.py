"""Latency from `send` to the handler of another process, under a load that does not wait: messages of 1 KB are due at fixed
times, whatever became of those before (open loop), and each one's time counts from when it was due. So a system that stands
still pays for every message that was due meanwhile (corrected for coordinated omission).

Our client on our broker and on Apache's; nats-py on JetStream with a durable push consumer and acknowledged publishes. One
process sends, one handles, one is the broker. Rates beyond 1,000/s come in bursts, one each ms.

Two more cases, at 1,000/s: while another group drains a backlog, and while 20 more members join and leave, one after the
other."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import nats
import uvloop
from nats.js.api import StreamConfig
from rocketlet.client import Producer
from rocketlet.command.plumbing.numbers import whole

from . import common
from .churn import make_topic
from .common import console
from .drain import fill
from .latency_reader import HEAD, NAME, PADDING
from .peers import Peer

NAMES = ("rocketlet", "apache", "jetstream")
RATES = (100, 1_000, 10_000, 30_000)
SECONDS = 5.0
BACKLOG = 1_000_000
BACKLOG_CASE, MEMBERS_CASE = "1000 beside a drain", "1000 beside members"
CASE_RATE = 1_000
MEMBERS = 20
QUEUES = 32
ARRIVAL_S = 120.0
WARM_UP = (1_000, 2.0)
Send = Callable[[bytes], Coroutine[Any, Any, object]]


class Measured(NamedTuple):
    """`late_ms`: how late the last message was handed to `send`; a sender that cannot keep up is late by much.
    `broker_us` is processor time per message."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    late_ms: float
    broker_us: float
    seconds: float


class Reader:
    """The process at the other end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, peer: Peer, stack: AsyncExitStack) -> Reader:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.latency_reader", peer.name, peer.address,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        reader = cls(process)
        stack.push_async_callback(reader._stop)
        return reader

    async def order(self, text: str) -> None:
        await self._ask(text)

    async def samples(self, run: int) -> array[int]:
        found: array[int] = array("q")
        _, count = (await self._ask(f"samples {run}")).split()
        assert self._process.stdout is not None
        found.frombytes(await self._process.stdout.readexactly(int(count) * 16))
        return found

    async def _ask(self, text: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{text}\n".encode())
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the reading process ended; see its output above")
        return line.decode()

    async def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Load:
    """Sends when messages are due. A timer of the kernel wakes the loop, whose own timers are not finer than 1 ms."""

    def __init__(self, send: Send, run: int, rate: float) -> None:
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

    def _send_due(self, tasks: asyncio.TaskGroup, over: Callable[[int], bool]) -> None:
        now_ns = time.monotonic_ns()
        while self._due_ns <= now_ns and not over(self._due_ns):
            for number in range(self.sent, self.sent + self._burst):
                tasks.create_task(self._send(HEAD.pack(self._due_ns, self._run, number) + PADDING))
            self.sent += self._burst
            self.late_ns = now_ns - self._due_ns
            self._due_ns += self._interval_ns


class System:
    """One system with what sends and who reads. `guests` are members of the same group in a process of their own; they
    drain the backlog, too, in another group."""

    def __init__(self, peer: Peer, send: Send, reader: Reader, guests: Reader) -> None:
        self._peer = peer
        self._send = send
        self._reader = reader
        self._guests = guests
        self._runs = itertools.count()

    @classmethod
    async def start(cls, peer: Peer, stack: AsyncExitStack, backlog: int) -> System:
        if backlog:
            await fill(peer, backlog)
        send = await (jetstream if peer.name == "jetstream" else ours)(peer, stack)
        system = cls(peer, send, await Reader.start(peer, stack), await Reader.start(peer, stack))
        await system._reader.order("members 1")
        return system

    async def at(self, rate: float, seconds: float) -> Measured:
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        return await self._measure(rate, lambda due_ns: due_ns >= end_ns)

    async def beside(self, orders: Sequence[str]) -> Measured:
        """While the guests carry out orders."""

        async def carry_out() -> None:
            for order in orders:
                await self._guests.order(order)

        meanwhile = asyncio.create_task(carry_out())
        measured = await self._measure(CASE_RATE, lambda _: meanwhile.done())
        await meanwhile
        return measured

    async def _measure(self, rate: float, over: Callable[[int], bool]) -> Measured:
        run = next(self._runs)
        load = Load(self._send, run, rate)
        began_s, broker_s = time.monotonic(), self._peer.cpu_s()
        await load.until(over)
        seconds = time.monotonic() - began_s
        waits_ms = [ns / 1e6 for ns in (await self._arrived(run, load.sent)).values()]
        p50_ms, p99_ms, p999_ms = (common.percentile(waits_ms, part) for part in (0.5, 0.99, 0.999))
        broker_us = (self._peer.cpu_s() - broker_s) / load.sent * 1e6
        return Measured(p50_ms, p99_ms, p999_ms, load.late_ns / 1e6, broker_us, seconds)

    async def _arrived(self, run: int, count: int) -> dict[int, int]:
        """By number the ns of each message until it was handled for the first time."""
        found: dict[int, int] = {}
        async with asyncio.timeout(ARRIVAL_S):
            while len(found) < count:
                for reader in (self._reader, self._guests):
                    samples = await reader.samples(run)
                    for number, ns in zip(samples[::2], samples[1::2], strict=True):
                        found[number] = min(ns, found.get(number, ns))
                await asyncio.sleep(0.1)
        return found


async def ours(peer: Peer, stack: AsyncExitStack) -> Send:
    await make_topic(peer.address, NAME, QUEUES)
    producer = await stack.enter_async_context(Producer(peer.address, NAME, timeout_s=60))
    return lambda body: producer.send(NAME, body)


async def jetstream(peer: Peer, stack: AsyncExitStack) -> Send:
    connection = await nats.connect(f"nats://{peer.address}")
    stack.push_async_callback(connection.close)
    stream = connection.jetstream(publish_async_max_pending=100_000)
    await stream.add_stream(StreamConfig(name=NAME, subjects=[NAME], max_bytes=4 << 30))

    async def send(body: bytes) -> None:
        await (await stream.publish_async(NAME, body))

    return send


Case = Callable[[System], Awaitable[Measured]]


def cases(rates: Sequence[float], seconds: float, backlog: int) -> dict[str, Case]:
    found: dict[str, Case] = {f"{rate:.0f}": partial(System.at, rate=rate, seconds=seconds) for rate in rates}
    if backlog:
        found[BACKLOG_CASE] = lambda system: system.beside([f"drain {backlog}"])
        found[MEMBERS_CASE] = lambda system: system.beside([f"members {MEMBERS}", "members 0"])
    return found


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--rates", type=common.positives, default=list(RATES), help="messages/s, separated by commas")
    parser.add_argument(
        "--seconds", type=common.positive, default=SECONDS, help="of each run; the other cases end by themselves"
    )
    parser.add_argument("--backlog", type=whole(0), default=BACKLOG, help="0 leaves out the cases beside the rates")
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    chosen = cases(options.rates, options.seconds, options.backlog)
    found: dict[str, dict[str, list[Measured]]] = {name: {case: [] for case in chosen} for name in names}
    async with common.started(names) as peers, AsyncExitStack() as stack:
        systems = {name: await System.start(peer, stack, options.backlog) for name, peer in peers.items()}
        for system in systems.values():
            await system.at(*WARM_UP)
        for _ in range(options.rounds):
            for case, measure in chosen.items():
                for name, system in systems.items():
                    found[name][case].append(await measure(system))
    medians = {
        name: {case: Measured(*map(common.median, zip(*runs, strict=True))) for case, runs in of_cases.items()}
        for name, of_cases in found.items()
    }
    report(medians, found)
    result = {name: {case: values._asdict() for case, values in rows.items()} for name, rows in medians.items()}
    common.finish(options, "latency", result)


def report(medians: Mapping[str, Mapping[str, Measured]], found: Mapping[str, Mapping[str, list[Measured]]]) -> None:
    rows: list[list[object]] = []
    ours = found.get("rocketlet", {})
    for case in next(iter(medians.values())):
        for name, values in medians.items():
            ratios = sorted(
                other.p99_ms / mine.p99_ms for mine, other in zip(ours.get(case, []), found[name][case], strict=False)
            )
            ratio = f"{common.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"
            rows.append([case, name, *values[case], ratio])
    columns = ("messages/s", "", "p50 ms", "p99 ms", "p99.9 ms", "late ms", "broker us", "s", "p99 / rocketlet")
    common.show("From the time a message was due to the handler of another process", columns, rows)
    console.print("medians of alternating runs; ratios of p99 to ours of one round: median (least to most)")


if __name__ == "__main__":
    uvloop.run(run())
