"""The console and the command line before a broker with 1,000 groups in 1,000 queues: how long a page or a command takes, and
how large it is. Broker and console are processes; offsets and memberships reach the broker by requests.

The broker keeps 1,000,000 offsets at most: 998 groups have one in each queue; one more, `shop`, is a consumer that owns all.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop
from rocketlet.client import AdminClient, Consumer, Producer
from rocketlet.client.wire.cluster import Cluster
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import UpdateOffset, write
from rocketlet.protocol.subscription import parse_subscription
from rocketlet.testing.ports import free_port

from . import common
from .peers import Peer, listening, process, rocketlet

TOPIC = "orders"
GROUPS, QUEUES, MESSAGES_OF_A_QUEUE = 998, 1_000, 20
OF_A_CONNECTION = 120  # groups; a heartbeat may have 128
HEARTBEAT_S = 30.0
PATIENCE_S = 60.0
PAGES = (
    "/groups",
    "/groups?sort=lag",
    "/groups/g0500",
    "/groups/shop",
    "/topics",
    f"/topics/{TOPIC}",
    f"/messages?topic={TOPIC}",
    "/brokers",
    "/brokers/broker-a",
    "/doctor",
)
DOCTOR = ("doctor",)
COMMANDS = (
    ("groups", "list"),
    ("groups", "show", "g0500"),
    ("groups", "show", "shop"),
    ("offsets", "show", "g0500"),
    ("topics", "list"),
    ("topics", "show", TOPIC),
    ("brokers", "list"),
    DOCTOR,
)


async def _fill(address: str) -> None:
    """Messages, and offsets that lag behind by one in each queue."""
    async with AdminClient(address) as admin:
        await admin.create_topic(TOPIC, queues=QUEUES)
        queues = (await admin.topic(TOPIC)).ranges
    async with Producer(address, timeout_s=PATIENCE_S) as producer:
        for queue in queues:
            await producer.send_batch(TOPIC, [b"%d" % number for number in range(MESSAGES_OF_A_QUEUE)], queue=queue)
    cluster, beat = Cluster(address), encode_heartbeat(Heartbeat("filler"))
    connection = await cluster.connection(address)
    for number in range(GROUPS):
        name = _group(number)
        for queue_id in range(QUEUES):
            header = UpdateOffset(name, TOPIC, queue_id, MESSAGES_OF_A_QUEUE - 1, None)
            connection.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, write(header))
        await connection.request(RequestCode.HEART_BEAT, {}, beat, timeout_s=PATIENCE_S)  # all have come
    await cluster.close()


def _group(number: int) -> str:
    return f"g{number:04}"


@asynccontextmanager
async def _members(address: str) -> AsyncIterator[None]:
    """A member of each group: heartbeats alone."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        beating = []
        for begin in range(0, GROUPS, OF_A_CONNECTION):
            cluster = Cluster(address)
            stack.push_async_callback(cluster.close)
            beat = partial(_beat, await cluster.connection(address), range(begin, min(begin + OF_A_CONNECTION, GROUPS)))
            await beat()
            beating.append(tasks.create_task(_again(beat)))
        yield
        for task in beating:
            task.cancel()


async def _beat(connection: Connection, numbers: range) -> None:
    subscription = parse_subscription(TOPIC, "*")
    groups = tuple(ConsumerData(_group(number), subscriptions=(subscription,)) for number in numbers)
    body = encode_heartbeat(Heartbeat(f"member-{numbers.start}", groups))
    await connection.request(RequestCode.HEART_BEAT, {}, body, timeout_s=PATIENCE_S)


async def _again(beat: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await beat()


@asynccontextmanager
async def _console(address: str, folder: Path) -> AsyncIterator[str]:
    port = free_port()
    command = (
        sys.executable, "-m", "rocketlet.command.cli", "console", "--nameserver", address, "--port", str(port),
    )  # fmt: skip
    async with process(command, folder / "console.log") as pid:
        await listening(port, pid=pid)
        yield f"http://127.0.0.1:{port}"


def _page(url: str) -> tuple[float, int]:
    """Seconds and bytes."""
    began_s = time.perf_counter()
    with urllib.request.urlopen(url, timeout=120) as answer:
        size = len(answer.read())
    return time.perf_counter() - began_s, size


def _command(words: tuple[str, ...], address: str) -> tuple[float, int]:
    began_s = time.perf_counter()
    line = (sys.executable, "-m", "rocketlet.command.cli", *words)
    done = subprocess.run(line, capture_output=True, env={**os.environ, "ROCKETLET_NAMESERVER": address})
    found_something = words == DOCTOR and done.returncode == 1
    if (done.returncode and not found_something) or done.stderr:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.decode()[-1000:]}")
    return time.perf_counter() - began_s, len(done.stdout)


Figures = dict[str, list[tuple[float, int]]]


async def _measure(peer: Peer, url: str, rounds: int) -> Figures:
    found: Figures = {}
    for _ in range(rounds):
        for path in PAGES:
            found.setdefault(path, []).append(await asyncio.to_thread(_page, url + path))
        for words in COMMANDS:
            figures = await asyncio.to_thread(_command, words, peer.address)
            found.setdefault("rocketlet " + " ".join(words), []).append(figures)
    return found


async def measure(rounds: int) -> Mapping[str, dict[str, float]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketlet-bench-")))
        peer = await stack.enter_async_context(rocketlet(folder))
        await _fill(peer.address)
        await stack.enter_async_context(_members(peer.address))
        shop = await stack.enter_async_context(Consumer(peer.address, "shop", TOPIC, lambda message: None))
        await shop.assigned()
        url = await stack.enter_async_context(_console(peer.address, folder))
        found = await _measure(peer, url, rounds)
        common.console.print(f"the broker holds {peer.resident_mib():.0f} MiB")
    return {
        what: {
            "first_ms": figures[0][0] * 1000,
            "median_ms": common.median([took_s * 1000 for took_s, _ in figures]),
            "kb": max(size for _, size in figures) / 1000,
        }
        for what, figures in found.items()
    }


async def run() -> None:
    options = common.parser(__doc__ or "").parse_args()
    found = await measure(options.rounds)
    rows = [[what, *(round(value, 1) for value in figures.values())] for what, figures in found.items()]
    common.show("1,000 groups in 1,000 queues", ("page or command", "first ms", "median ms", "kB"), rows)
    common.finish(options, "crowd", {"rounds": options.rounds, "found": found})


if __name__ == "__main__":
    uvloop.run(run())
