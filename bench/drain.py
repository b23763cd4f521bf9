"""A backlog of 1 KB messages consumed: by raw pulls, and by `Consumer` with a handler for batches and with one for single
messages, on our broker and on Apache's. Handlers only count. Starting and stopping a `Consumer` counts."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import PullLimits
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.allocation import subscribe_queues
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.headers import PullMessage, PullMessageResult, read, write

from . import runner
from .peers import Peer
from .runner import BODY, Arrivals

NAMES = ("rocketlet", "apache")
BACKLOG = 200_000
BATCH = 100
FETCH = 256
LIMITS = PullLimits(batch_size=FETCH, messages=4000, span=8000)
Drain = Callable[[Peer, int, int], Awaitable[None]]
"""Drains a peer's backlog of N messages in a numbered round."""


async def fill(peer: Peer, count: int) -> None:
    """Puts the backlog there."""
    async with Producer(peer.address, "bench", timeout_s=10, default_queues=8) as producer:
        await producer.send_batch("backlog", [BODY] * BATCH)  # makes the topic
        for _ in range((count // BATCH - 1) // 8):
            await asyncio.gather(*(producer.send_batch("backlog", [BODY] * BATCH) for _ in range(8)))
        for _ in range((count // BATCH - 1) % 8):
            await producer.send_batch("backlog", [BODY] * BATCH)


async def raw_pulls(peer: Peer, count: int, run: int) -> None:
    """Every queue pulled to its end, one pull in flight per queue; bodies are received, not decoded."""
    cluster = ClusterView(peer.address)
    route = await cluster.find_route("backlog")
    assert route is not None
    done = 0

    async def pull_queue(broker_name: str, queue_id: int) -> None:
        nonlocal done
        connection = await cluster.broker(broker_name)
        offset = 0
        while True:
            header = PullMessage(
                f"raw{run}", "backlog", queue_id, offset, FETCH, PULL_SUBSCRIPTION, 0, 0, subscription="*"
            )
            answer = await connection.ask(RequestCode.PULL_MESSAGE, write(header), timeout_s=10)
            if answer.code:
                return
            offset, before = read(PullMessageResult, answer.ext).next_begin_offset, offset
            done += offset - before

    queues = subscribe_queues("backlog", route)
    await asyncio.gather(*(pull_queue(queue.broker_name, queue.queue_id) for queue in queues))
    await cluster.close()
    assert done == count, f"{done} of {count} were pulled"


async def in_batches(peer: Peer, count: int, run: int) -> None:
    """Handed to a batch handler that only counts, acknowledged, committed."""
    arrivals = Arrivals(count)
    group = f"batches{run}"
    async with Consumer(peer.address, group, "backlog", arrivals, batch_size=FETCH, start="first", pull=LIMITS):
        await arrivals.done.wait()
    assert arrivals.seen == count, f"{arrivals.seen} of {count} were handled"


async def singly(peer: Peer, count: int, run: int) -> None:
    """The same with a handler for one message."""
    arrivals = Arrivals(count)

    async def handle(message: Message) -> None:
        arrivals.add(1)

    async with Consumer(peer.address, f"singly{run}", "backlog", handle, start="first", pull=LIMITS):
        await arrivals.done.wait()
    assert arrivals.seen == count, f"{arrivals.seen} of {count} were handled"


WAYS: Mapping[str, Drain] = {
    "raw pulls": raw_pulls,
    "Consumer, batch handler": in_batches,
    "Consumer, handler per message": singly,
}


async def measure(drain: Drain, peer: Peer, count: int, runs: Iterator[int]) -> runner.Values:
    """`client_us` is the processor time of this process per message."""
    watch = runner.Stopwatch()
    await drain(peer, count, next(runs))
    clock_s, client_s, _ = watch.read_s()
    return {"messages_per_s": count / clock_s, "client_us": client_s / count * 1e6}


def parser() -> argparse.ArgumentParser:
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--messages", type=whole(1), default=BACKLOG)
    return made


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    runs = itertools.count()

    async def prepare(peer: Peer, _: AsyncExitStack) -> Mapping[str, runner.Measure]:
        await fill(peer, options.messages)
        return {way: partial(measure, drain, peer, options.messages, runs) for way, drain in WAYS.items()}

    figures = await runner.compare(options, NAMES, prepare)
    figures.show("A backlog consumed", "messages_per_s")
    return {
        name: {way: values["messages_per_s"] for way, values in ways.items()} for name, ways in figures.medians.items()
    }


if __name__ == "__main__":
    runner.main("drain", parser(), run)
