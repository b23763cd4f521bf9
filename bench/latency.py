"""Latency from `send` to the handler of another process, under a load that does not wait: messages of 1 KB are due at fixed
times, whatever became of those before (open loop), and each one's time counts from when it was due. So a system that stands
still pays for every message that was due meanwhile (corrected for coordinated omission).

Our client on our broker and on Apache's. One process sends, one handles, one is the broker. Rates beyond 1,000/s come in
bursts, one each ms.

Two more cases, at 1,000/s: while another group drains a backlog, and while 20 more members join and leave, one after the
other."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rocketlet.client import Producer
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner
from .churn import make_topic
from .drain import fill
from .latency_reader import HEAD, NAME, PADDING
from .peers import Peer

NAMES = ("rocketlet", "apache")
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


class Reader:
    """The process at the other end (`latency_reader`)."""

    def __init__(self, child: Child) -> None:
        self.order = child.ask

    @classmethod
    async def start(cls, peer: Peer, stack: AsyncExitStack) -> Reader:
        command = (sys.executable, "-m", "bench.latency_reader", peer.address)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketlet-bench-")))
        child = await Child.start(command, folder / "reader.log")
        stack.push_async_callback(child.close)
        return cls(child)

    async def samples(self, run: int) -> array[int]:
        found: array[int] = array("q")
        found.frombytes(bytes.fromhex((await self.order(f"samples {run}")).partition(" ")[2]))
        return found


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
        await make_topic(peer.address, NAME, QUEUES)
        producer = await stack.enter_async_context(Producer(peer.address, NAME, timeout_s=60))
        send: Send = partial(producer.send, NAME)
        system = cls(peer, send, await Reader.start(peer, stack), await Reader.start(peer, stack))
        await system._reader.order("members 1")
        return system

    async def at(self, rate: float, seconds: float) -> runner.Values:
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        return await self._measure(rate, lambda due_ns: due_ns >= end_ns)

    async def beside(self, *orders: str) -> runner.Values:
        """Measure while the guests carry out orders."""

        async def carry_out() -> None:
            for order in orders:
                await self._guests.order(order)

        meanwhile = asyncio.create_task(carry_out())
        measured = await self._measure(CASE_RATE, lambda _: meanwhile.done())
        await meanwhile
        return measured

    async def _measure(self, rate: float, over: Callable[[int], bool]) -> runner.Values:
        """`late_ms`: how late the last message was handed to `send`; a sender that cannot keep up is late by much.
        `broker_us` is processor time per message."""
        run = next(self._runs)
        load = Load(self._send, run, rate)
        watch = runner.Stopwatch(self._peer)
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
                for reader in (self._reader, self._guests):
                    samples = await reader.samples(run)
                    for number, ns in zip(samples[::2], samples[1::2], strict=True):
                        found[number] = min(ns, found.get(number, ns))
                await asyncio.sleep(0.1)
        return found


def cases_of(system: System, options: argparse.Namespace) -> dict[str, runner.Measure]:
    found: dict[str, runner.Measure] = {
        f"{rate:.0f}": partial(system.at, rate, options.seconds) for rate in options.rates
    }
    if options.backlog:
        found[BACKLOG_CASE] = partial(system.beside, f"drain {options.backlog}")
        found[MEMBERS_CASE] = partial(system.beside, f"members {MEMBERS}", "members 0")
    return found


def parser() -> argparse.ArgumentParser:
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--rates", type=runner.positives, default=list(RATES), help="messages/s, separated by commas")
    made.add_argument(
        "--seconds", type=runner.positive, default=SECONDS, help="of each run; the other cases end on their own"
    )
    made.add_argument("--backlog", type=whole(0), default=BACKLOG, help="0 leaves out the cases beside the rates")
    return made


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    async def prepare(peer: Peer, stack: AsyncExitStack) -> Mapping[str, runner.Measure]:
        system = await System.start(peer, stack, options.backlog)
        await system.at(*WARM_UP)
        return cases_of(system, options)

    figures = await runner.compare(options, NAMES, prepare)
    title = "From the time a message was due to the handler of another process, by messages/s"
    figures.show(title, "p99_ms", less_is_better=True)
    return figures.medians


if __name__ == "__main__":
    runner.main("latency", parser(), run)
