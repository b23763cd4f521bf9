"""How soon a broker is ready again over 1,000 queues with 10^4 to 10^7 messages: after SIGTERM, and after SIGKILL with
5 seconds of sends behind the last checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import ServerProcess
from rocketlet.testing.ports import free_port

from . import drain, runner

QUEUES = 1000
QUEUES_PER_TOPIC = 10
TOPICS = [f"restart-{number}" for number in range(QUEUES // QUEUES_PER_TOPIC)]
UNSAVED = 100_000  # messages behind the last checkpoint, as a busy broker has after 5 s
BODY = b"x" * 100
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000)


async def ready_ms(folder: Path, messages: int = 0, *, dies: bool = False) -> float:
    """Start a broker over the folder, add messages, end it with SIGTERM or SIGKILL, and return how long the start took."""
    watch = runner.Stopwatch()
    async with ServerProcess(folder, free_port(), "--log-level", "error") as server:
        taken_ms = watch.read_s()[0] * 1000
        if messages:
            await drain.fill(server.address, messages, TOPICS, queues=QUEUES_PER_TOPIC, body=BODY)
        if not dies:
            await server.end()
    return taken_ms


async def measure(folder: Path, present: int, wanted: int, rounds: int) -> dict[str, float]:
    """Fill the folder up, then start a broker over it after each kind of end."""
    unsaved = min(UNSAVED, wanted // 10, (wanted - present) // rounds) // drain.BATCH * drain.BATCH
    await ready_ms(folder, wanted - present - rounds * unsaved)
    clean_ms: list[float] = []
    killed_ms: list[float] = []
    for _ in range(rounds):
        clean_ms.append(await ready_ms(folder, unsaved, dies=True))
        killed_ms.append(await ready_ms(folder))
    return {"messages": wanted, "clean_ms": runner.median(clean_ms), "killed_ms": runner.median(killed_ms)}


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    growth: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="rocketlet-restart-", dir=options.folder) as name:
        present = 0
        for wanted in [size for size in GROWTH if size < options.messages] + [options.messages]:
            growth.append(await measure(Path(name, "data"), present, wanted, options.rounds))
            present = wanted
    columns = ("messages", "ready after a clean end, ms", "after SIGKILL, ms")
    runner.show("A broker over stored messages", columns, [list(found.values()) for found in growth])
    return {"queues": QUEUES, **growth[-1], "growth": growth}


if __name__ == "__main__":
    made = runner.parser(__doc__)
    made.add_argument("--messages", type=whole(drain.BATCH), default=GROWTH[-1])
    made.add_argument("--folder", type=runner.folder, help="where 3 GB are written; default: a temporary folder")
    runner.main("restart", made, run)
