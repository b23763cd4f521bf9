"""Apache's own Java producer, 64 threads with synchronous sends of 1 KB, on our broker and on Apache's. Beside it on each
our `Producer`, with as many sends in flight: Python's client and Java's on the same broker."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

import uvloop
from rocketlet.command.plumbing.numbers import whole

from . import common, sends
from .common import console
from .peers import Peer, compiled, java_options
from .processes import cpu_s
from .sends import Measured, Send

NAMES = ("rocketlet", "apache")
JAVA, OURS = CLIENTS = ("Java", "Producer")
THREADS = 64
SECONDS = 5.0


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
    found: dict[str, list[Measured]] = {f"{client} on {name}": [] for name in names for client in CLIENTS}
    async with common.started(names) as peers, AsyncExitStack() as stack:
        loads: dict[str, Load] = {}
        producers: dict[str, Send] = {}
        for name, peer in peers.items():
            loads[name] = await Load.start(peer, options.threads)
            stack.push_async_callback(loads[name].stop)
            producers[name] = await sends.batches(peer, stack)
            await loads[name].run(5.0)  # warms both JVMs
        for _ in range(options.rounds):
            for name, load in loads.items():
                found[f"{JAVA} on {name}"].append(await load.run(options.seconds))
                measured = await sends.measure(peers[name], producers[name], options.threads, options.seconds)
                found[f"{OURS} on {name}"].append(measured)
    medians = {name: Measured(*map(common.median, zip(*runs, strict=True))) for name, runs in found.items()}
    report(medians, found, options.threads)
    common.finish(options, "java", {name: values._asdict() for name, values in medians.items()})


def report(medians: Mapping[str, Measured], found: Mapping[str, list[Measured]], threads: int) -> None:
    rows = []
    for name, values in medians.items():
        ratios = sorted(this.sends_per_s / java.sends_per_s for this, java in _rounds(found, name))
        shown = f"{common.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, *values, shown])
    columns = ("", "sends/s", "p50 ms", "p99 ms", "client us", "broker us", "this / Java on Apache's")
    common.show(f"{threads} sends of 1 KB at a time", columns, rows)
    console.print("medians of alternating runs; ratios of the runs of one round: median (least to most)")


def _rounds(found: Mapping[str, list[Measured]], name: str) -> Iterable[tuple[Measured, Measured]]:
    other = found.get(f"{JAVA} on apache") or found[name]
    return zip(found[name], other, strict=True)


if __name__ == "__main__":
    uvloop.run(run())
