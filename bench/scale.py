"""The cost of growth: CPU time and memory of a broker by the number of members, topics, timers and so on, with slopes.

Each size of a dimension has a broker of its own, as a process. Its state is grown by requests on plain connections, then each
operation is repeated in five batches of at least 10 ms, of which the cheapest counts, because other load on the machine only
adds. All times are CPU time of the broker. A slope is the exponent fitted over the three largest sizes: 0 for a cost that
does not depend on the size, 1 for a linear one.

grow     a further one, on average; the bytes of each one are the growth of resident memory
idle     one second without requests, of the thirty by which the broker's clock is advanced, twice
step     the longest event-loop iteration of a batch, in CPU time of its thread
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rocketlet.broker.machine import raise_limit
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest, encode_lock_request
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue
from rocketlet.protocol.properties import LITE_TOPIC, TIMER_DELAY_SEC, find

from . import runner
from .scale_broker import Row, Wire, World, started

BATCHES, BATCH_S, MAX_IN_BATCH = 5, 0.01, 200
IDLE_S = 30
FITTED = 3  # the largest sizes, over which a slope is fitted
SHARE = 100  # requests in flight on one connection; its groups, held pulls and waiting receives
SUBSCRIBED = 500  # lite topics of each client
CLIENTS = 8  # that make requests at a time, because one event-loop iteration serves all whose requests have arrived
HELD_MS, DAY_S = 3_600_000, 86_400


async def each(count: int, request: Callable[[int], Awaitable[object]], at_once: int = SHARE) -> None:
    """Make requests, some of them at a time."""
    for begin in range(0, count, at_once):
        await asyncio.gather(*map(request, range(begin, min(begin + at_once, count))))


# What grows, and what is done with it. The topic is t with 8 queues, the group g.


async def members(world: World, count: int) -> None:
    await world.clients(count)
    await each(count, lambda number: world.wires[number].beat(number), CLIENTS)


async def join_and_leave(world: World) -> None:
    guest, number = await world.connect(), 1_000_000 + world.number()
    await guest.beat(number)
    await guest.call(RequestCode.UNREGISTER_CLIENT, {"clientID": f"c{number}", "consumerGroup": "g"})
    guest.transport.close()
    await world.read("1")  # by then all members are notified


async def lock(world: World) -> None:
    body = encode_lock_request(LockRequest("c0", "g", tuple(Queue("t", "broker-a", queue) for queue in range(8))))
    await world.wire.call(RequestCode.LOCK_BATCH_MQ, body=body)
    await world.wire.call(RequestCode.UNLOCK_BATCH_MQ, body=body)


async def groups(world: World, count: int) -> None:
    await world.clients(-(-count // SHARE))
    for number, wire in enumerate(world.wires):
        await wire.beat(number, range(number * SHARE, min(number * SHARE + SHARE, count)))


async def pull_and_commit(world: World) -> None:
    await world.wire.send()
    await world.wire.pull(0, 0)
    ext = {"consumerGroup": "0", "topic": "t", "queueId": 0, "commitOffset": 1}
    await world.wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext)


async def connect(world: World) -> None:
    (await world.connect()).transport.close()


async def hold(world: World, count: int, request: Callable[[Wire, int], object]) -> None:
    for number in range(count):
        request(world.wires[number // SHARE], number)
        if not number % SHARE:
            await world.wires[number // SHARE].call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})


async def held_pulls(world: World, count: int) -> None:
    """Each connection is a group of its own, with a held pull of each queue."""
    await world.wire.topic(queues=SHARE)
    await world.clients(-(-count // SHARE))
    for number, wire in enumerate(world.wires):
        await wire.beat(number, (number,))
    await hold(world, count, lambda wire, number: wire.pull(number // SHARE, number % SHARE, HELD_MS))


async def receives(world: World, count: int) -> None:
    await world.clients(-(-count // SHARE))
    await hold(world, count, lambda wire, number: wire.pop(HELD_MS))


async def lite_topics(world: World, count: int) -> None:
    await world.wire.topic(attributes="+message.type=LITE")
    await each(count, lambda number: send_lite(world, number))


def send_lite(world: World, number: int = 0) -> Awaitable[Frame]:
    return world.wire.send(properties=f"{LITE_TOPIC}\x01{number}")


async def subscriptions(world: World, count: int) -> None:
    await world.wire.topic(attributes="+message.type=LITE")
    await world.clients(-(-count // SUBSCRIBED))
    for number, wire in enumerate(world.wires):
        await wire.sync(number, range(number * SUBSCRIBED, min(number * SUBSCRIBED + SUBSCRIBED, count)))


def subscribe(world: World) -> Awaitable[Frame]:
    """Clients subscribe to a new lite topic one after the other, because each may subscribe to 2,000."""
    number = world.number()
    client = number % len(world.wires)
    return world.wires[client].sync(client, [10_000_000 + number])


def send_later(world: World) -> Awaitable[Frame]:
    """A message that is due in one to three days, in no order."""
    return world.wire.send(0, f"{TIMER_DELAY_SEC}\x01{DAY_S + world.number() * 7919 % (2 * DAY_S)}")


async def retained(world: World, count: int) -> None:
    await world.wire.send()
    await world.read(f"index {count}")


async def consumers(world: World, count: int) -> None:
    """Members that share one queue, with a backlog for all of them."""
    await each(100, lambda number: world.wire.send())
    await world.clients(count)


async def send_pop_ack(world: World) -> None:
    await world.wire.send()
    wire = world.wires[world.number() % len(world.wires)]
    (record,) = decode_records((await wire.pop()).body)
    ext = {"consumerGroup": "g", "topic": "t", "queueId": 0, "offset": record.queue_offset}
    await wire.call(RequestCode.ACK_MESSAGE, {**ext, "extraInfo": find(record.properties, "POP_CK")})


def called(code: int, **ext: object) -> Callable[[World], Awaitable[Frame]]:
    return lambda world: world.wire.call(code, ext)


OF_LITE_TOPICS = (lite_topics, subscriptions)  # they change the type of the topic


class Dimension(NamedTuple):
    """Something that grows up to `most`, and what is done at each size."""

    most: int
    grow: Callable[[World, int], Awaitable[object]]
    operations: Mapping[str, Callable[[World], Awaitable[object]]]


route = called(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="t")
send = {"send": lambda world: world.wire.send()}
DIMENSIONS: dict[str, Dimension] = {
    "members": Dimension(9_900, members, {
        "heartbeat": lambda world: world.wire.beat(), "join, leave": join_and_leave, "lock": lock,
        "list": called(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g"),
    }),
    "groups": Dimension(10_000, groups, {"pull, commit": pull_and_commit}),
    "topics": Dimension(100_000, lambda world, count: each(count, lambda number: world.wire.topic(f"t{number}")), {
        "route": route, "create": lambda world: world.wire.topic(f"new{world.number()}"), **send,
        "list": called(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER),
    }),
    "queues": Dimension(4_096, lambda world, count: world.wire.topic(queues=count), {
        "route": route, "heartbeat": lambda world: world.wire.beat(), **send,
    }),
    "connections": Dimension(9_900, lambda world, count: world.clients(count), {"route": route, "connect": connect}),
    "held-pulls": Dimension(100_000, held_pulls, send),
    "receives": Dimension(100_000, receives, send),
    "lite-topics": Dimension(500_000, lite_topics, {"send": send_lite}),
    "subscriptions": Dimension(500_000, subscriptions, {
        "subscribe": subscribe, "send": send_lite,
    }),
    "timers": Dimension(2_000_000, lambda world, count: each(count, lambda number: send_later(world)), {"send": send_later}),
    "retained": Dimension(100_000_000, retained, {
        **send, "search": called(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=2**42),
    }),
    "consumers": Dimension(9_900, consumers, {"send, pop, ack": send_pop_ack}),
}  # fmt: skip


async def measure(dimension: Dimension, count: int) -> dict[str, Row]:
    """The costs at one size."""
    async with started() as world:
        rows = {"grow": await world.measured(count, partial(dimension.grow, world, count))}
        for operation, do in dimension.operations.items():
            rows[operation] = cheapest([await batch(world, partial(do, world)) for _ in range(BATCHES)])
        rows["idle"] = cheapest([await world.measured(IDLE_S, partial(world.read, str(IDLE_S))) for _ in range(2)])
    return rows


async def batch(world: World, do: Callable[[], Awaitable[object]]) -> Row:
    """Repeat an operation, each time twice as often, until it takes long enough to be measured."""
    times = 1
    while (row := await world.measured(times, do, times)).us * times < BATCH_S * 1e6 and times < MAX_IN_BATCH:
        times *= 2
    return row


def cheapest(rows: list[Row]) -> Row:
    return Row(*map(min, zip(*rows, strict=True)))


def slope(sizes: list[int], values: list[float]) -> float:
    pairs = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value][-FITTED:]
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope if len(pairs) > 1 else math.nan


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    raise_limit()
    result: dict[str, Any] = {}
    for name in options.only or DIMENSIONS:
        most = min(DIMENSIONS[name].most, options.most)
        sizes = sorted({max(most // 10**part, 1) for part in range(options.sizes)})
        found = [await measure(DIMENSIONS[name], size) for size in sizes]
        rows = {row: [of_size[row] for of_size in found] for row in found[0]}
        result[name] = {"sizes": sizes, "bytes": rows["grow"][-1].bytes} | {
            row: {
                "us": [value.us for value in values],
                "slope": slope(sizes, [value.us for value in values]),
                "step_ms": [value.step_ms for value in values],
            }
            for row, values in rows.items()
        }
        columns = ("µs of CPU", *(f"{size:,}" for size in sizes), "slope", "step, ms")
        table = [
            (row, *(value.us for value in values), result[name][row]["slope"], max(value.step_ms for value in values))
            for row, values in rows.items()
        ]
        runner.show(f"{name}: {result[name]['bytes']:,.0f} bytes each", columns, table)
    return result


if __name__ == "__main__":
    made = runner.parser(__doc__, DIMENSIONS, rounds=0)
    made.add_argument("--most", type=whole(1), default=10**8, help="the largest size of any dimension")
    made.add_argument("--sizes", type=whole(1), default=4, help="how many sizes, each ten times the one before")
    runner.main("scale", made, run)
