"""Apache's own Java producer, 64 threads with synchronous sends of 1 KB, on our broker and on Apache's."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack
from typing import NamedTuple

import uvloop
from rocketlet.command.plumbing.numbers import whole

from . import common
from .common import console
from .peers import Peer, compiled, java_options
from .processes import cpu_s

NAMES = ("rocketlet", "apache")
THREADS = 64
SECONDS = 5.0


class Measured(NamedTuple):
    """`client_us` and `broker_us` are processor time of a send."""

    sends_per_s: float
    p50_ms: float
    p99_ms: float
    client_us: float
    broker_us: float


class Load:
    """The Java program against one peer."""

    def __init__(self, process: asyncio.subprocess.Process, broker_pid: int) -> None:
        self._process = process
        self._pids = (process.pid, broker_pid)

    @classmethod
    async def start(cls, peer: Peer, threads: int) -> Load:
        classpath = await compiled("Load.java")
        process = await asyncio.create_subprocess_exec(
            "java", *java_options(), "-Xmx512m", "-cp", classpath, "Load", peer.address, str(threads),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        load = cls(process, peer.pid)
        await load._line("READY")
        return load

    async def _line(self, word: str) -> list[str]:
        assert self._process.stdout is not None
        while True:
            line = (await self._process.stdout.readline()).decode()
            if not line:
                raise RuntimeError("the Java program ended; see its output above")
            if line.startswith(word):
                return line.split()

    async def run(self, seconds: float) -> Measured:
        assert self._process.stdin is not None
        before_s = [cpu_s(pid) for pid in self._pids]
        self._process.stdin.write(b"run %f\n" % seconds)
        _, *said = await self._line("RATE")
        rate, p50_ms, p99_ms = map(float, said)
        used_us = [
            (cpu_s(pid) - before) / (rate * seconds) * 1e6 for pid, before in zip(self._pids, before_s, strict=True)
        ]
        return Measured(rate, p50_ms, p99_ms, *used_us)

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--seconds", type=common.positive, default=SECONDS)
    parser.add_argument("--threads", type=whole(1), default=THREADS)
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    async with common.started(names) as peers, AsyncExitStack() as stack:
        loads: dict[str, Load] = {}
        for name, peer in peers.items():
            loads[name] = await Load.start(peer, options.threads)
            stack.push_async_callback(loads[name].stop)
            await loads[name].run(5.0)  # warms both JVMs
        for _ in range(options.rounds):
            for name, load in loads.items():
                found[name].append(await load.run(options.seconds))
    medians = {name: Measured(*map(common.median, zip(*runs, strict=True))) for name, runs in found.items()}
    ours = medians["rocketlet"].sends_per_s if "rocketlet" in medians else float("nan")
    rows = [[name, *values, common.ratio(ours, values.sends_per_s)] for name, values in medians.items()]
    common.show(
        f"Java, {options.threads} threads, synchronous sends of 1 KB",
        ("", "sends/s", "p50 ms", "p99 ms", "client us", "broker us", "rocketlet / this"),
        rows,
    )
    console.print("medians of alternating runs")
    common.finish(options, "java", {name: values._asdict() for name, values in medians.items()})


if __name__ == "__main__":
    uvloop.run(run())
