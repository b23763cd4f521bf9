"""The cost of one join in groups of 10, 100 and 1,000 members: requests and bytes between broker and members from the join
until the group has settled. `python -m simulation.scaling`; nothing is sent meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from rocketlet.broker.remoting.dispatch import Dispatch
from rocketlet.client import Consumer
from rocketlet.protocol.allocation import AVG, STICKY, Strategy

from .loop import Process, SimLoop, Transport, virtual_time
from .world import NAME_SERVER_PORT, World


class Cost(NamedTuple):
    """The cost of one join: requests to the broker, bytes both ways, and how long it took."""

    members: int
    requests: int
    bytes: int
    seconds: float


def measure(members: int, strategy: Strategy = AVG) -> Cost:
    """With as many queues as members."""
    loop = SimLoop(members)
    folder = Path(tempfile.mkdtemp(prefix="rocketlet-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    counted = {"requests": 0, "bytes": 0}
    serve, write = Dispatch.serve, Transport.write

    def serving(dispatch: Dispatch, connection: Any, frames: list[Any]) -> None:
        counted["requests"] += len(frames)
        serve(dispatch, connection, frames)

    def writing(transport: Transport, data: Any) -> None:
        counted["bytes"] += len(data)
        write(transport, data)

    Dispatch.serve = serving  # type: ignore[method-assign, assignment]
    Transport.write = writing  # type: ignore[method-assign, assignment]
    asyncio.set_event_loop(loop)
    try:
        with virtual_time(loop):
            return loop.run_until_complete(_run(loop, folder, members, strategy, counted))
    finally:
        Dispatch.serve, Transport.write = serve, write  # type: ignore[method-assign]
        asyncio.set_event_loop(None)
        shutil.rmtree(folder, ignore_errors=True)


async def _run(loop: SimLoop, folder: Path, members: int, strategy: Strategy, counted: dict[str, int]) -> Cost:
    world = World(1, loop, folder)
    world.plan.queues, world.topics = members, ["t0"]
    world.nodes = world.nodes[:1]
    await world.start_node(world.nodes[0])
    consumers: list[Consumer] = []

    async def join() -> None:
        consumer = Consumer(f"127.0.0.1:{NAME_SERVER_PORT}", "g", "t0", _ignore, strategy=strategy, concurrency=1)
        with Process(f"m{len(consumers)}").running():
            consumers.append(consumer)
            task = asyncio.create_task(consumer.__aenter__())
        await task

    await asyncio.gather(*(join() for _ in range(members - 1)))
    await _at_rest(world, consumers)
    await asyncio.sleep(0.3)
    before, began_s = dict(counted), loop.time()
    await join()
    await _at_rest(world, consumers)
    spent_s = loop.time() - began_s
    return Cost(members, counted["requests"] - before["requests"], counted["bytes"] - before["bytes"], spent_s)


async def _ignore(message: object) -> None: ...


async def _at_rest(world: World, consumers: list[Consumer]) -> None:
    """Returns when every queue is owned and every member has its share."""
    queues = world.plan.queues
    while True:
        shares = [sum(queue.topic == "t0" for queue in consumer.assignment()) for consumer in consumers]
        if sum(shares) == queues and max(shares) - min(shares) <= 1:
            return
        await asyncio.sleep(0.01)


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name in ("rocketlet", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sizes = [int(argument) for argument in sys.argv[1:]] or [10, 100, 1000]
    for strategy in (AVG, STICKY):
        for size in sizes:
            cost = measure(size, strategy)
            print(json.dumps({"strategy": strategy.name, **cost._asdict()}), flush=True)


if __name__ == "__main__":
    main()
