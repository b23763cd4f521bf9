"""How long a join takes in groups of 10, 100, 300 and 1,000 real members, all in one process, with as many queues as members,
and what it costs: requests to the broker, and bytes both ways.

Without a clock of its own on the way, the same is counted in simulation: `python -m simulation.scaling`."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import uvloop
from rocketlet.client import AVG, STICKY, Consumer
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.allocation import Strategy

from . import common
from .churn import make_topic
from .peers import Peer

SIZES = "10,100,300,1000"
STRATEGIES: Mapping[str, Strategy] = {"AVG": AVG, "STICKY": STICKY}
PATIENCE_S = 300.0
TOGETHER = 200  # members that start at once


@dataclass
class Traffic:
    """The traffic of all members so far, except those that exist before it."""

    requests: int = 0
    bytes: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    traffic = Traffic()
    call, write_now, data_received = Connection.call, Connection.write_now, Connection.data_received

    def calling(connection: Connection, *arguments: Any) -> None:
        traffic.requests += 1
        call(connection, *arguments)

    def writing(connection: Connection) -> None:
        traffic.bytes += sum(map(len, connection._out))
        write_now(connection)

    def receiving(connection: Connection, data: bytes) -> None:
        traffic.bytes += len(data)
        data_received(connection, data)

    with (
        mock.patch.object(Connection, "call", calling),
        mock.patch.object(Connection, "write_now", writing),
        mock.patch.object(Connection, "data_received", receiving),
    ):
        yield traffic


async def _ignore(message: object) -> None: ...


async def join(peer: Peer, members: int, strategy: str, traffic: Traffic) -> dict[str, float]:
    """From a member's join until every queue has its new owner."""
    topic = f"members-{members}-{strategy}"
    await make_topic(peer.address, topic, members)
    everybody = [
        Consumer(peer.address, topic, topic, _ignore, strategy=STRATEGIES[strategy], concurrency=1)
        for _ in range(members)
    ]
    async with AsyncExitStack() as stack:
        for begin in range(0, members - 1, TOGETHER):
            some = everybody[begin : min(begin + TOGETHER, members - 1)]
            await asyncio.gather(*map(stack.enter_async_context, some))
        await _at_rest(everybody[:-1], members, topic)
        await asyncio.sleep(1)
        gc.collect()
        gc.freeze()  # so many members are in one process only here: its garbage collector would stop all of them at once
        before, broker_s, members_s = replace(traffic), peer.cpu_s(), time.process_time()
        began_s = time.perf_counter()
        await stack.enter_async_context(everybody[-1])
        await _at_rest(everybody, members, topic)
        return {
            "settled_s": time.perf_counter() - began_s,
            "broker_cpu_s": peer.cpu_s() - broker_s,
            "members_cpu_s": time.process_time() - members_s,
            "requests": traffic.requests - before.requests,
            "bytes": traffic.bytes - before.bytes,
        }


async def _at_rest(members: Sequence[Consumer], queues: int, topic: str) -> None:
    """Returns when every queue is owned and all shares are equal."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            shares = [sum(queue.topic == topic for queue in member.assignment()) for member in members]
            if sum(shares) == queues and max(shares) - min(shares) <= 1:
                return
            await asyncio.sleep(0.01)


async def _measure(peer: Peer, options: Any, traffic: Traffic, found: dict[str, dict[str, float]]) -> None:
    for strategy in options.strategies.split(","):
        for size in options.sizes:
            cost = found[f"{strategy} {size}"] = await join(peer, size, strategy, traffic)
            common.console.print(f"{strategy}, {size} members: {cost}")


async def run() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--sizes", type=common.counts, default=SIZES, help=f"how many members, separated by commas; default: {SIZES}"
    )
    parser.add_argument(
        "--strategies", type=common.among(tuple(STRATEGIES)), default=",".join(STRATEGIES), help="default: AVG,STICKY"
    )
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with counted() as traffic:
        async with common.started(["rocketlet"]) as peers:
            await _measure(peers["rocketlet"], options, traffic, found)
    times = ("settled_s", "broker_cpu_s", "members_cpu_s")
    rows = [
        [name, *(cost[key] * 1000 for key in times), cost["requests"], cost["bytes"]] for name, cost in found.items()
    ]
    columns = (
        "members",
        "settled after, ms",
        "processor time of the broker, ms",
        "of all members",
        "requests",
        "bytes",
    )
    common.show("One more member joins", columns, rows)
    common.finish(options, "members", found)


if __name__ == "__main__":
    uvloop.run(run())
