"""Apache's own Java producer, 64 threads with synchronous sends of 1 KB, on our broker and on Apache's."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack

import uvloop

from . import common
from .common import console
from .peers import Peer, compiled, java_options

THREADS = 64
SECONDS = 5.0


class Load:
    """The Java program against one peer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, peer: Peer, threads: int) -> Load:
        classpath = await compiled("Load.java")
        process = await asyncio.create_subprocess_exec(
            "java", *java_options(), "-Xmx512m", "-cp", classpath, "Load", peer.address, str(threads),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        load = cls(process)
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

    async def run(self, seconds: float) -> tuple[float, float, float]:
        """Sends per second, and the median and 99th percentile of a send in ms."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"run %f\n" % seconds)
        _, rate, p50_ms, p99_ms = await self._line("RATE")
        return float(rate), float(p50_ms), float(p99_ms)

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def run() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    names = common.chosen(options.only, ("rocketlet", "apache"))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    async with common.started(names) as peers, AsyncExitStack() as stack:
        loads: dict[str, Load] = {}
        for name, peer in peers.items():
            loads[name] = await Load.start(peer, options.threads)
            stack.push_async_callback(loads[name].stop)
            await loads[name].run(5.0)  # warms both JVMs
        for _ in range(options.rounds):
            for name, load in loads.items():
                found[name].append(await load.run(options.seconds))
    medians = {
        name: tuple(common.median([run[index] for run in runs]) for index in range(3)) for name, runs in found.items()
    }
    ours = medians.get("rocketlet", (float("nan"),))[0]
    rows = [[name, *values, common.ratio(ours, values[0])] for name, values in medians.items()]
    common.show(
        f"Java, {options.threads} threads, synchronous sends of 1 KB",
        ("", "sends/s", "p50 ms", "p99 ms", "rocketlet / this"),
        rows,
    )
    console.print("medians of alternating runs")
    result = {
        name: dict(zip(("sends_per_s", "p50_ms", "p99_ms"), values, strict=True)) for name, values in medians.items()
    }
    common.finish(options, "java", result)


if __name__ == "__main__":
    uvloop.run(run())
