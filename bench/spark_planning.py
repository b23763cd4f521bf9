"""How long the planner takes for a batch of many queues, without Spark: our broker, and Apache's if it is here."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from rocketlet.client.producer import Producer
from rocketlet.client.wire.cluster import Cluster
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.queue import Queue
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.options import stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.standalone import Standalone

from . import common
from .peers import apache, apache_fault, rocketlet

T = TypeVar("T")
ROUNDS = 20


class Background:
    """A loop in a thread: the planner is called from Spark's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)


async def create(address: str, broker: str, queues: int) -> None:
    """The topic, on the one broker of the cluster."""
    cluster = Cluster(address)
    await cluster.find_route("TBW102")
    connection = await cluster.connection(cluster.master(broker) or address)
    await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("many", queues, queues, 6)))
    while await cluster.find_route("many") is None:
        await asyncio.sleep(0.05)
    await cluster.close()


async def send(address: str, broker: str, queues: int) -> None:
    """One message to each queue."""
    async with Producer(address, timeout_s=30) as producer:
        for begin in range(0, queues, 256):
            targets = [Queue("many", broker, number) for number in range(begin, min(begin + 256, queues))]
            await asyncio.gather(*(producer.send("many", b"x" * 200, queue=queue) for queue in targets))


def measure(background: Background, address: str, broker: str, queues: int) -> dict[str, float]:
    background.run(create(address, broker, queues))
    options = stream_options({"nameServer": address, "topic": "many", "membership": "false"})
    planner = Planner(Standalone(options.read), options.read, EMPTY)
    planner.finish(EMPTY)
    first = planner.plan()
    assert first is not None
    planner.finish(first)
    spent: list[float] = []
    for _ in range(ROUNDS):
        background.run(send(address, broker, queues))
        time.sleep(0.5)  # an Apache broker shows messages a little later
        began_s = time.perf_counter()
        batch = planner.plan()
        spent.append((time.perf_counter() - began_s) * 1000)
        assert batch is not None
        planner.finish(batch)
    planner.close()
    return {"planning_ms_p50": common.median(spent), "planning_ms_max": max(spent)}


def main() -> None:
    parser = common.parser(__doc__ or "", ("rocketlet", "apache"))
    parser.add_argument("--queues", type=whole(1), default=2560)
    options = parser.parse_args()
    background, stack = Background(), AsyncExitStack()
    starters: dict[str, Any] = {"rocketlet": (rocketlet, "broker-a"), "apache": (apache, "apache")}
    if apache_fault():
        del starters["apache"]
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-", ignore_cleanup_errors=True) as folder:
        try:
            for name, (start, broker) in starters.items():
                if options.only and name not in options.only.split(","):
                    continue
                peer = background.run(stack.enter_async_context(start(Path(folder))))
                result[name] = measure(background, peer.address, broker, options.queues)
                print(name, result[name], flush=True)
        finally:
            background.run(stack.aclose())
    common.finish(options, "spark_planning", {"queues": options.queues, **result})


if __name__ == "__main__":
    main()
