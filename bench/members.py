"""How long a join takes in groups of 10, 100, 300 and 1,000 real members, all in one process, with as many queues as members.

The requests and bytes of a join, up to 1,000 members, are counted in simulation: `python -m tests.simulation.scaling`."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import uvloop
from rocketlet.client import Consumer, settled

from . import common
from .churn import make_topic
from .peers import Peer

SIZES = (10, 100, 300, 1000)


async def _ignore(message: object) -> None: ...


async def join_s(peer: Peer, members: int) -> float:
    """From a member's join until every queue has its new owner."""
    group = topic = f"members-{members}"
    await make_topic(peer.address, topic, members)
    async with AsyncExitStack() as stack:
        for _ in range(members - 1):
            await stack.enter_async_context(Consumer(peer.address, group, topic, _ignore, concurrency=1))
        await settled(peer.address, group, members=members - 1, timeout_s=120)
        began_s = time.perf_counter()
        last = Consumer(peer.address, group, topic, _ignore, concurrency=1)
        await stack.enter_async_context(last)
        await settled(peer.address, group, members=members, timeout_s=120)
        return time.perf_counter() - began_s


async def run() -> None:
    options = common.parser(__doc__ or "").parse_args()
    async with common.started(["rocketlet"]) as peers:
        found = {members: await join_s(peers["rocketlet"], members) for members in SIZES}
    rows = [[members, seconds * 1000] for members, seconds in found.items()]
    common.show("One more member joins", ("members", "settled after, ms"), rows)
    common.finish(options, "members", {str(members): {"join_s": seconds} for members, seconds in found.items()})


if __name__ == "__main__":
    uvloop.run(run())
