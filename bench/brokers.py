"""The cost of several brokers: messages sent and consumed for a second of processor time, with `rocketlet start --brokers
N` for N from 1 to 4. There are as many clients as brokers, each a process that sends with 128 in flight and is a member of
one group. The processor time is that of all brokers and the name server.

Processes that share cores take caches and turns from each other, whatever they do. So each number of brokers is also measured
as so many clusters of one broker and one client, which have nothing to do with each other: `to apart` is what it costs to be
one cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import uvloop
from rocketlet.client import AdminClient, Consumer, Message, Producer

from . import common
from .common import BODY
from .processes import below, used

BROKERS = (1, 2, 3, 4)
IN_FLIGHT = 128
QUEUES = 4  # on each broker
SECONDS = 3.0
WARM_S = 1.0


class Measured(NamedTuple):
    """`brokers_us` and `clients_us`: processor time for a message that was sent and consumed."""

    messages: int
    messages_per_s: float
    brokers_us: float
    clients_us: float

    @property
    def per_cpu_s(self) -> float:
        return 1e6 / self.brokers_us


@asynccontextmanager
async def cluster(count: int, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """One of so many brokers: the name server's address, and the id of the supervisor's process."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", "start", "--brokers", str(count), "--port", "0", "--no-vip",
        "--data", str(folder), "--log-level", "error", stdout=pipe,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        line = (await child.stdout.readline()).decode()
        (address,) = re.findall(r"ready on (\S+:\d+):", line)
        yield address, child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


def brokers_cpu_s(pids: Sequence[int]) -> float:
    own = (used(pid) for pid in pids)
    children = (process for pid in pids for process in below(pid))
    return sum(process.cpu_s for process in (*own, *children) if process)


async def client(address: str, warm_s: float, seconds: float) -> dict[str, float]:
    """Sends and consumes for a while; counts what it did after it was warm."""
    counts = {"sent": 0, "got": 0}

    async def handle(messages: Sequence[Message]) -> None:
        counts["got"] += len(messages)

    async with (
        Producer(address, "bench", timeout_s=20) as producer,
        Consumer(address, "bench", "bench", handle, batch_size=256, start="first"),
    ):
        begin_s = time.monotonic() + warm_s
        end_s = begin_s + seconds

        async def worker() -> None:
            while time.monotonic() < end_s:
                await producer.send("bench", BODY)
                counts["sent"] += 1

        workers = [asyncio.create_task(worker()) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(warm_s)
        print("warm", flush=True)
        before, cpu_s = dict(counts), time.process_time()
        await asyncio.gather(*workers)
        return {
            **{name: counts[name] - before[name] for name in counts},
            "cpu_s": time.process_time() - cpu_s,
        }


async def start_client(address: str, seconds: float) -> asyncio.subprocess.Process:
    arguments = ("-m", "bench.brokers", "--client", address, "--seconds", str(seconds))
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)


async def measure(sizes: Sequence[int], seconds: float) -> Measured:
    """Clusters of these sizes, at once; each has as many clients as brokers."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketlet-bench-"))
        addresses, pids = [], []
        for number, count in enumerate(sizes):
            address, pid = await stack.enter_async_context(cluster(count, Path(folder) / str(number)))
            async with AdminClient(address) as admin:
                await admin.create_topic("bench", queues=QUEUES)
            addresses += [address] * count
            pids.append(pid)
        children = [await start_client(address, seconds) for address in addresses]
        outputs = [child.stdout for child in children if child.stdout is not None]
        await asyncio.gather(*(output.readline() for output in outputs))
        began_s, cpu_s = time.monotonic(), brokers_cpu_s(pids)
        lines = await asyncio.gather(*(output.readline() for output in outputs))
        taken_s, cpu_s = time.monotonic() - began_s, brokers_cpu_s(pids) - cpu_s
        await asyncio.gather(*(child.wait() for child in children))
        found = [json.loads(line) for line in lines]
    done = sum(item["sent"] + item["got"] for item in found) // 2
    clients_s = sum(item["cpu_s"] for item in found)
    return Measured(done, done / taken_s, cpu_s / done * 1e6, clients_s / done * 1e6)


def parser() -> ArgumentParser:
    made = common.parser(__doc__ or "")
    made.add_argument("--only", type=common.counts, default=list(BROKERS), help="how many brokers, separated by commas")
    made.add_argument("--seconds", type=common.positive, default=SECONDS)
    made.add_argument("--client", metavar="ADDRESS", help="be one of the clients: what the program starts itself")
    return made


def ratios(found: Sequence[Measured], others: Sequence[Measured]) -> list[float]:
    """The ratios of messages for a second of processor time, round by round; the least first."""
    return sorted(mine.per_cpu_s / other.per_cpu_s for mine, other in zip(found, others, strict=True))


async def run() -> None:
    options = parser().parse_args()
    if options.client:
        print(json.dumps(await client(options.client, WARM_S, options.seconds)), flush=True)
        return
    sizes = options.only
    rounds: dict[int, list[Measured]] = {size: [] for size in sizes}
    apart: dict[int, list[Measured]] = {size: [] for size in sizes}
    for _ in range(options.rounds):
        for size in sizes:
            rounds[size].append(await measure([size], options.seconds))
            apart[size].append(await measure([1] * size, options.seconds) if size > 1 else rounds[size][-1])
    rows: list[list[object]] = []
    result: dict[str, dict[str, float]] = {}
    for size, found in rounds.items():
        to_first, to_apart = ratios(found, rounds[sizes[0]]), ratios(found, apart[size])
        medians = {name: common.median([getattr(item, name) for item in found]) for name in Measured._fields}
        medians["messages_per_cpu_s"] = common.median([item.per_cpu_s for item in found])
        medians["apart_us"] = common.median([item.brokers_us for item in apart[size]])
        medians["ratio_to_first"], medians["ratio_to_apart"] = common.median(to_first), common.median(to_apart)
        result[str(size)] = medians
        said = [f"{common.median(part):.2f} ({part[0]:.2f} to {part[-1]:.2f})" for part in (to_first, to_apart)]
        names = ("messages_per_cpu_s", "brokers_us", "apart_us", "clients_us")
        rows.append([size, *(medians[name] for name in names), *said])
    columns = ("brokers", "messages / CPU s", "us", "apart us", "clients us", f"to {sizes[0]}", "to apart")
    common.show("Messages of 1 KB, sent and consumed", columns, rows)
    common.finish(options, "brokers", result)


if __name__ == "__main__":
    uvloop.run(run())
