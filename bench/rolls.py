"""Members are replaced one after the other, as by a rolling deployment, while messages come: how long no member begins
anything of a queue though messages of it wait, and what is handled twice.

Rocketlet's members and Apache's Java members, each on Rocketlet's broker and on Apache's. Each new member joins before an old
one leaves; an old one waits up to 5 s for its handlers, as `awaitTerminationMillisWhenShutdown` does. `--backlog` puts
messages there before the first member is replaced."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop
from rocketlet.client import Producer
from rocketlet.command.plumbing.numbers import whole

from . import common
from .churn import TOPIC, Handled, Run, make_topic, members_of
from .peers import Peer

NAMES = ("rocketlet", "python-on-apache", "java-on-rocketlet", "apache")
SETTLE_S = 2.0
PATIENCE_S = 60.0


@dataclass
class Rolled(Run):
    """sent_at_ms: when each message was acknowledged. began_ms, ended_ms: when members began and ended to be replaced."""

    sent_at_ms: dict[str, float] = field(default_factory=dict)
    began_ms: float = 0.0
    ended_ms: float = 0.0


async def send(producer: Producer, rolled: Rolled, numbers: Iterable[int]) -> None:
    async def one(number: int) -> None:
        body = f"m{number}"
        await producer.send(TOPIC, body.ljust(100).encode())
        rolled.sent_at_ms[body] = time.time() * 1000

    await asyncio.gather(*map(one, numbers))


async def send_forever(producer: Producer, rolled: Rolled, first: int, rate: float) -> None:
    began_s, number = time.perf_counter(), first
    while True:
        due = first + int((time.perf_counter() - began_s) * rate)
        await send(producer, rolled, range(number, due))
        number = max(number, due)
        await asyncio.sleep(0.01)


async def roll(peer: Peer, options: Any) -> Rolled:
    rolled = Rolled()
    await make_topic(peer.address, TOPIC, options.queues)
    async with Producer(peer.address, timeout_s=10) as producer, members_of(peer, rolled, options) as members:
        for number in range(options.members):
            await members.join(f"old{number}")
        await asyncio.sleep(SETTLE_S)
        await send(producer, rolled, range(options.backlog))
        sending = asyncio.create_task(send_forever(producer, rolled, options.backlog, options.rate))
        await asyncio.sleep(SETTLE_S)
        rolled.began_ms = time.time() * 1000
        for number in range(options.members):
            await members.join(f"new{number}")
            await asyncio.sleep(options.pause)
            await members.leave(f"old{number}")
        rolled.ended_ms = time.time() * 1000
        await asyncio.sleep(SETTLE_S)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        end_s = time.monotonic() + PATIENCE_S
        while rolled.sent_at_ms.keys() - {item.body for item in rolled.handled} and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
    return rolled


def unread_s(rolled: Rolled) -> dict[int, list[float]]:
    """By queue: each time in which nobody handled anything of it, though some of it had been sent and not begun."""
    queues: dict[int, list[Handled]] = defaultdict(list)
    for item in rolled.handled:
        queues[item.queue].append(item)
    return {queue: list(_pauses(rolled, items)) for queue, items in queues.items()}


def _pauses(rolled: Rolled, items: list[Handled]) -> Iterable[float]:
    items.sort(key=lambda item: item.begin_ms)
    waiting = sorted({item.body: rolled.sent_at_ms.get(item.body, item.begin_ms) for item in items}.items(), key=_at)
    begun: set[str] = set()
    busy_until_ms = 0.0
    for item in items:
        while waiting and waiting[0][0] in begun:
            waiting.pop(0)
        if waiting and item.begin_ms > (since_ms := max(busy_until_ms, waiting[0][1])):
            yield (item.begin_ms - since_ms) / 1000
        begun.add(item.body)
        busy_until_ms = max(busy_until_ms, item.end_ms)


def _at(pair: tuple[str, float]) -> float:
    return pair[1]


def figures(rolls: list[Rolled]) -> dict[str, float]:
    longest = [max(pauses, default=0.0) for rolled in rolls for pauses in unread_s(rolled).values()]
    counts = [Counter(item.body for item in rolled.handled) for rolled in rolls]
    return {
        "messages": sum(len(rolled.sent_at_ms) for rolled in rolls),
        "handled twice": sum(times > 1 for of_roll in counts for times in of_roll.values()),
        "missing": sum(len(rolled.sent_at_ms.keys() - of_roll) for rolled, of_roll in zip(rolls, counts, strict=True)),
        "roll, s": common.median([(rolled.ended_ms - rolled.began_ms) / 1000 for rolled in rolls]),
        "queue unread, median s": common.median(longest),
        "99 % s": common.percentile(longest, 0.99),
        "most s": max(longest, default=float("nan")),
    }


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--queues", type=whole(1), default=16)
    parser.add_argument("--members", type=whole(1), default=6, help="each is replaced")
    parser.add_argument("--rate", type=common.positive, default=200.0, help="messages a second")
    parser.add_argument("--backlog", type=whole(0), default=0, help="messages that wait at the beginning")
    parser.add_argument("--handler-ms", type=whole(0), default=50)
    parser.add_argument("--threads", type=whole(1), default=8, help="handlers at once in each member")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a join and the next leave")
    options = parser.parse_args()
    names = common.chosen(options.only, NAMES)
    found: dict[str, list[Rolled]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            async with AsyncExitStack() as stack:
                peers = await stack.enter_async_context(common.started([name]))
                found[name].append(await roll(peers[name], options))
    result = {name: figures(rolls) for name, rolls in found.items()}
    rows = [[key, *(item[key] for item in result.values())] for key in next(iter(result.values()))]
    title = f"{options.rounds} rolls of {options.members} members of {options.queues} queues"
    common.show(title, ("", *result), rows)
    common.finish(options, "rolls", result)


if __name__ == "__main__":
    uvloop.run(run())
