"""Two members of one group that subscribe to one topic each: how much of what is sent is delivered.

On Apache's broker each heartbeat overwrites the group's table of subscriptions; ours keeps a member's own."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import uvloop
from rocketlet.client import Producer
from rocketlet.command.plumbing.numbers import whole

from . import common
from .churn import Run, make_topic, members_of
from .peers import Peer

NAMES = ("rocketlet", "java-on-rocketlet", "apache", "python-on-apache")
TOPICS = ("mixed-a", "mixed-b")
PATIENCE_S = 10.0


async def mixed(peer: Peer, options: Any) -> dict[str, float]:
    """Messages delivered at least once, of those sent, and how long that took."""
    run = Run()
    for topic in TOPICS:
        await make_topic(peer.address, topic, options.queues)
    began_s = time.monotonic()
    async with Producer(peer.address, timeout_s=10) as producer, members_of(peer, run, options) as members:
        for topic in TOPICS:
            await members.join(f"reader-of-{topic}", topic)
        number = 0
        while time.monotonic() - began_s < options.seconds:
            for topic in TOPICS:
                number += 1
                await producer.send(topic, f"m{number}".ljust(100).encode())
                run.sent.add(f"m{number}")
            await asyncio.sleep(0.05)
        end_s = time.monotonic() + PATIENCE_S
        while len({item.body for item in run.handled}) < len(run.sent) and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - began_s
    return {"delivered": len({item.body for item in run.handled}), "of": len(run.sent), "seconds": round(seconds, 1)}


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--seconds", type=common.positive, default=60.0, help="how long messages are sent")
    parser.add_argument("--queues", type=whole(1), default=4)
    parser.add_argument("--handler-ms", type=whole(0), default=1)
    parser.add_argument("--threads", type=whole(1), default=8)
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    async with AsyncExitStack() as stack:
        peers = await stack.enter_async_context(common.started(names))
        results = await asyncio.gather(*(mixed(peer, options) for peer in peers.values()))
    found = dict(zip(peers, results, strict=True))
    rows = [[name, *item.values()] for name, item in found.items()]
    common.show("One group, two members, one topic each", ("", "delivered", "of", "seconds"), rows)
    common.finish(options, "mixed", found)


if __name__ == "__main__":
    uvloop.run(run())
