"""Days of virtual time, in which nothing may grow: `python -m simulation.weeks [--hours 336] [--stormy] [--seed N]`.

A broker with a few queues, members of a group, and a producer. Calm: nothing else happens. Stormy: every ten minutes a member
joins, leaves, is killed or freezes, or the broker restarts; there are three members again after each. Once in a period,
when all is at rest, live objects, connections, the broker's tables and its files are counted. It prints them, and ends with 1
if those of the last quarter are larger than those of the first by more than a tenth, and for files by what is made but once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import time
from dataclasses import replace
from typing import Any

import structlog
from rocketlet.client import Producer, RocketletError

from . import scenarios
from .loop import fix_hashes
from .world import Plan, World, simulated

HOUR_S = 3600.0
EVENT_S = 600.0
SEND_S = 60.0
MEMBERS = 3
SAMPLES = 24
SLACK = 1.1
ONCE = {"files": 4, "state_bytes": 4096}  # state files and their copies are there from the first stop on
STORM = (scenarios.join, scenarios.someone_leaves, scenarios.kill, scenarios.freeze, scenarios.restart)


class Weeks(World):
    """A world without an end of its own; it keeps no history."""

    def note(self, text: str) -> None:
        """Nothing: a trace would grow."""

    async def live(self, hours: float, count: int, *, stormy: bool) -> list[dict[str, int]]:
        await self.start_node(self.nodes[0])
        for _ in range(MEMBERS):
            await self.join(tuple(self.topics))
        producing = self.produce()
        samples = []
        for _ in range(count):
            await self._period(hours * HOUR_S / count, stormy=stormy)
            samples.append(self._sample())
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        for member in self.living():
            await self.leave(member)
        await self.stop_node(self.nodes[0])
        return samples

    async def _period(self, seconds: float, *, stormy: bool) -> None:
        end_s = self.loop.time() + seconds
        while stormy and self.loop.time() < end_s:
            await asyncio.sleep(self.rng.uniform(0, EVENT_S / 2))
            await self.rng.choice(STORM)(self)
            await self._three_again()
        await asyncio.sleep(max(end_s - self.loop.time(), EVENT_S))  # leases and held pulls are over
        self.members = list(self.living())  # and of the past only the checks of `World` know
        for table in (self.handlings, self._owners, self._bodies, self.acknowledged, self._crashes):
            table.clear()
        self._tasks = {task for task in self._tasks if not task.done()}

    async def _three_again(self) -> None:
        await asyncio.sleep(EVENT_S / 2)
        while len(self.living()) > MEMBERS:
            await self.leave(self.living()[-1])
        while len(self.living()) < MEMBERS:
            await self.join(tuple(self.topics))

    def _sample(self) -> dict[str, int]:
        node = self.nodes[0]
        broker, server = node.broker, node.server
        assert broker is not None and server is not None
        gc.collect()
        return {
            "objects": len(gc.get_objects()),
            "connections": len(server.connections),
            "groups": sum(bool(group.members) for group in broker.groups),
            "locks": len(broker.locks),
            "held_pulls": broker.held_pulls.count,
            "files": sum(path.is_file() for path in node.folder.rglob("*")),
            # without journals, which grow to journal_lines changes and are cut then, and `.old`, the copy before
            "state_bytes": sum(path.stat().st_size for path in node.folder.glob("*.json")),
        }

    async def _send_forever(self) -> None:
        """At the pace of days."""
        async with Producer(self.name_server) as producer:
            while True:
                try:
                    await producer.send(self.rng.choice(self.topics), b"x")
                except RocketletError:
                    pass
                await asyncio.sleep(SEND_S)


def grown(samples: list[dict[str, int]]) -> list[str]:
    """The counts that are larger in the last quarter than ever in the first."""
    quarter = len(samples) // 4
    found = []
    for name in samples[0]:
        before = max(sample[name] for sample in samples[:quarter])
        after = min(sample[name] for sample in samples[-quarter:])
        if after > before * SLACK + ONCE.get(name, 0):
            found.append(f"{name}: {before} at first, {after} at last")
    return found


def simulate(hours: float, count: int, seed: int, *, stormy: bool) -> list[dict[str, int]]:
    """Return the samples, in their order."""
    with simulated(seed) as (loop, folder):
        rng = random.Random(seed)
        calm: dict[str, Any] = {"lost_notifications": 0.0, "mixed": False, "long_handlers": 0.0, "gentle": False}
        plan = replace(Plan.of(rng), brokers=1, topics=1, queues=4, **calm)
        return loop.run_until_complete(Weeks(rng, plan, loop, folder).live(hours, count, stormy=stormy))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=14 * 24)
    parser.add_argument("--stormy", action="store_true")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    began_s = time.perf_counter()
    samples = simulate(options.hours, options.samples, options.seed, stormy=options.stormy)
    faults = grown(samples)
    found = {"hours": options.hours, "stormy": options.stormy, "seed": options.seed}
    took = {"took_s": round(time.perf_counter() - began_s, 1)}
    print(json.dumps(found | took | {"first": samples[0], "last": samples[-1], "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    fix_hashes("simulation.weeks")
    sys.exit(main())
