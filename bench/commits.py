"""The cost of offsets in pulls, which say how far a queue is handled: processor time for a message, with and without.

A backlog is drained by a `Consumer`, in alternating rounds, with up to 256 messages in a pull, and with one in each, which
is the most that commits can cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from rocketlet.client import Consumer, Message
from rocketlet.client.config import PullLimits
from rocketlet.client.consuming.pulling import Puller

from . import common
from .drain import fill
from .peers import Peer

BACKLOGS = {256: 100_000, 1: 8_000}  # by messages in a pull


@contextmanager
def commits(are_on: bool) -> Iterator[None]:
    kept = Puller._offset_to_commit
    if not are_on:
        Puller._offset_to_commit = lambda self, process_queue, offset: None  # type: ignore[method-assign] # measured with and without
    try:
        yield
    finally:
        Puller._offset_to_commit = kept  # type: ignore[method-assign] # measured with and without


async def drained_us(peer: Peer, group: str, count: int, batch_size: int) -> tuple[float, float]:
    """Processor time of a message in µs: the consumer's, and the broker's."""
    seen = 0
    done = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        nonlocal seen
        seen += len(messages)
        if seen >= count:
            done.set()

    limits = PullLimits(batch_size=batch_size)
    consumer = Consumer(peer.address, group, "backlog", handle, start="first", batch_size=256, pull=limits)
    client_s, broker_s = time.process_time(), peer.cpu_s()
    async with consumer:
        await done.wait()
        return (time.process_time() - client_s) / count * 1e6, (peer.cpu_s() - broker_s) / count * 1e6


async def run() -> None:
    options = common.parser(__doc__ or "").parse_args()
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    async with common.started(["rocketlet"]) as peers:
        peer = peers["rocketlet"]
        await fill(peer, max(BACKLOGS.values()))
        for number in range(options.rounds + 1):
            for batch_size, count in BACKLOGS.items():
                for are_on in (True, False):
                    with commits(are_on):
                        cost = await drained_us(peer, f"g{number}-{batch_size}-{are_on}", count, batch_size)
                    if number:  # the first round warms up
                        found.setdefault((batch_size, are_on), []).append(cost)
    medians = {
        f"{batch_size} a pull, {'with' if are_on else 'without'} commits": tuple(
            common.median([cost[index] for cost in costs]) for index in range(2)
        )
        for (batch_size, are_on), costs in found.items()
    }
    rows = [[name, *cost] for name, cost in medians.items()]
    common.show("Processor time for a message", ("", "consumer, µs", "broker, µs"), rows)
    common.finish(options, "commits", {name: {"client_us": a, "broker_us": b} for name, (a, b) in medians.items()})


if __name__ == "__main__":
    uvloop.run(run())
