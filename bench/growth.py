"""How cost grows: a curve each for messages in the store, queues, connections, groups on one topic, and members of a group.
All figures are processor time of the broker, its memory, or counts, which say the same on a busy machine.

`--only messages,queues` chooses curves, `--most 1000` ends each curve there, `--pictures bench/pictures` draws them. Messages
need 3 GB (`--folder`)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import uvloop
from rocketlet.client import AdminClient, Consumer, Message, Producer
from rocketlet.client.wire.cluster import Cluster
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.headers import PullMessage, PullMessageResult, read, write

from . import common, restart
from .peers import Peer, rocketlet
from .processes import cpu_s, used

Figures = dict[str, float]
Curve = Callable[[int, Namespace], Awaitable[Figures]]
BODY: Final = common.BODY
WORK: Final = 20_000  # messages that are sent and consumed where work is measured
PULLED: Final = 100_000  # messages that are read from the begin of the store
IN_FLIGHT: Final = 128
OPENED_AT_ONCE: Final = 100
TOPIC_QUEUES: Final = 1000  # queues of one topic, where there are more in all
US: Final = 1e6


@asynccontextmanager
async def broker() -> AsyncIterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with rocketlet(Path(folder)) as peer:
            yield peer


async def idle(peer: Peer, options: Namespace) -> float:
    """Processor time of the broker in a minute in which nothing is sent, s. All pulls begin together and are held for a
    minute, so what is watched begins half a minute later."""
    watched_s: float = options.idle_s
    await asyncio.sleep(watched_s / 2)
    before_s = cpu_s(peer.pid)
    await asyncio.sleep(watched_s)
    return (cpu_s(peer.pid) - before_s) * 60 / watched_s


async def work(peer: Peer, topics: Sequence[str], groups: int = 1) -> float:
    """Processor time of the broker for a message that is sent to one of the topics and consumed by each group's one member,
    for each time that it is handled, µs. The members stay until this returns."""
    count = max(WORK // groups, len(topics))
    arrivals = common.Arrivals(count * groups)
    async with AsyncExitStack() as stack:
        for number in range(groups):
            subscriptions = dict.fromkeys(topics, "*")
            made = Consumer(peer.address, f"g{number}", subscriptions, arrivals, batch_size=256, start="first")
            await stack.enter_async_context(made)
        producer = await stack.enter_async_context(Producer(peer.address, "bench", timeout_s=60))
        numbers = iter(range(count))

        async def send() -> None:
            for number in numbers:
                await producer.send(topics[number % len(topics)], BODY)

        before_s = cpu_s(peer.pid)
        await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
        await arrivals.done.wait()
        return (cpu_s(peer.pid) - before_s) / (count * groups) * US


async def create(peer: Peer, queues: int) -> list[str]:
    topics = [f"growth-{number}" for number in range(-(-queues // TOPIC_QUEUES))]
    async with AdminClient(peer.address) as admin:
        for topic in topics:
            await admin.create_topic(topic, queues=min(queues, TOPIC_QUEUES))
    return topics


async def messages(size: int, options: Namespace) -> Figures:
    """A store with 1,000 queues, its broker killed with up to 100,000 messages behind the last checkpoint."""
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-", dir=options.folder) as name:
        folder = Path(name)
        restart.create_topics(folder)
        unsaved = min(restart.UNSAVED, size // 10)
        await asyncio.to_thread(restart.fill, folder, size - unsaved)
        await asyncio.to_thread(restart.fill_and_die, folder, unsaved)
        child, address = await asyncio.to_thread(restart.start_at, folder)
        try:
            started_s = cpu_s(child.pid)
            resident = memory_mib(child.pid)
            return {
                "start after SIGKILL, CPU ms": started_s * 1000,
                "memory, MiB": resident,
                "pull from the begin, CPU us a message": await pull(address, child.pid, min(size, PULLED)),
            }
        finally:
            restart.end(child, signal.SIGTERM)


async def pull(address: str, pid: int, count: int) -> float:
    """Processor time of the broker for a message that is pulled, from the begin of each queue, µs."""
    cluster = Cluster(address)
    before_s, done = cpu_s(pid), 0
    each = count // restart.QUEUES
    for number in range(restart.QUEUES):
        connection = await cluster.broker((await _names(cluster))[0])
        offset = 0
        while offset < each:
            topic, queue_id = restart.topic_of(number), number % restart.QUEUES_PER_TOPIC
            header = PullMessage("g", topic, queue_id, offset, 256, PULL_SUBSCRIPTION, 0, 0, subscription="*")
            answer = await connection.ask(RequestCode.PULL_MESSAGE, write(header), timeout_s=60)
            if answer.code:
                raise RuntimeError(f"a pull was refused: {answer.remark}")
            offset = read(PullMessageResult, answer.ext).next_begin_offset
        done += offset
    await cluster.close()
    return (cpu_s(pid) - before_s) / done * US


async def _names(cluster: Cluster) -> list[str]:
    route = await cluster.find_route(restart.topic_of(0))
    assert route is not None
    return [broker.name for broker in route.brokers]


def memory_mib(pid: int) -> float:
    found = used(pid)
    return found.resident_bytes / (1 << 20) if found else 0.0


async def queues(size: int, options: Namespace) -> Figures:
    """One member that reads them all."""
    async with broker() as peer:
        topics = await create(peer, size)
        spent_us = await work(peer, topics)
        async with Consumer(peer.address, "g0", dict.fromkeys(topics, "*"), _ignore):
            idle_s = await idle(peer, options)
        return {
            "sent and consumed, CPU us a message": spent_us,
            "memory, MiB": memory_mib(peer.pid),
            "idle with a member, CPU s a minute": idle_s,
        }


async def connections(size: int, options: Namespace) -> Figures:
    """Idle ones, beside one client that sends and consumes."""
    async with broker() as peer, AsyncExitStack() as stack:
        topics = await create(peer, 8)
        await work(peer, topics)  # the first client's imports do not count
        host, _, port = peer.address.rpartition(":")
        before_s, before_mib = cpu_s(peer.pid), memory_mib(peer.pid)
        for first in range(0, size, OPENED_AT_ONCE):
            some = range(min(OPENED_AT_ONCE, size - first))
            for _, writer in await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in some)):
                stack.callback(writer.close)
        await work(peer, topics)  # every connection has been accepted by now
        opened_s, opened_mib = cpu_s(peer.pid), memory_mib(peer.pid)
        idle_s = await idle(peer, options)
        return {
            "sent and consumed, CPU us a message": await work(peer, topics),
            "memory of a connection, KiB": max(opened_mib - before_mib, 0.0) * 1024 / size,
            "opening all and 20,000 messages, CPU s": opened_s - before_s,
            "idle, CPU s a minute": idle_s,
        }


async def groups(size: int, options: Namespace) -> Figures:
    """Each has one member and reads every message of a topic with 4 queues."""
    async with broker() as peer, AsyncExitStack() as stack:
        (topic,) = await create(peer, 4)
        spent_us = await work(peer, [topic], size)
        for number in range(size):
            await stack.enter_async_context(Consumer(peer.address, f"g{number}", topic, _ignore))
        return {
            "CPU us a message and group": spent_us,
            "memory, MiB": memory_mib(peer.pid),
            "idle with their members, CPU s a minute": await idle(peer, options),
        }


async def members(size: int, options: Namespace) -> Figures:
    """One more joins a group with as many queues as members; counted in simulation (`bench.members` has times)."""
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    arguments = ("-m", "simulation.scaling", str(size))
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=nothing)
    out, _ = await child.communicate()
    cost = json.loads(out.splitlines()[0])  # for the default strategy
    return {"requests of a join": cost["requests"], "KiB of a join": cost["bytes"] / 1024}


async def _ignore(message: Message) -> None: ...


CURVES: Final[Mapping[str, tuple[Curve, tuple[int, ...]]]] = {
    "messages": (messages, (10_000, 100_000, 1_000_000, 10_000_000)),
    "queues": (queues, (10, 100, 1000, 10_000)),
    "connections": (connections, (10, 100, 1000, 9900)),  # the limit is 10,000
    "groups": (groups, (1, 10, 100, 1000)),
    "members": (members, (10, 100, 300, 1000)),
}


async def run() -> None:
    parser = common.parser(__doc__ or "", CURVES)
    parser.add_argument("--most", type=whole(1), default=10_000_000, help="the largest size")
    parser.add_argument("--least", type=whole(1), default=1, help="the smallest size")
    parser.add_argument("--idle-s", type=common.positive, default=60.0, help="how long an idle broker is watched")
    parser.add_argument("--folder", type=common.folder, help="where messages are written; default: a temporary folder")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the curves there, as SVG")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CURVES)
    if not any(options.least <= size <= options.most for name in names for size in CURVES[name][1]):
        known = "; ".join(f"{name} {', '.join(map(str, CURVES[name][1]))}" for name in names)
        parser.error(f"no size is from {options.least} to {options.most}; there are: {known}")
    found: dict[str, dict[int, Figures]] = {}
    for name in names:
        curve, sizes = CURVES[name]
        for size in sizes:
            if options.least <= size <= options.most:
                figures = found.setdefault(name, {})[size] = await curve(size, options)
                said = ", ".join(f"{title} {value:,.3g}" for title, value in figures.items())
                common.console.print(f"{name} {size:,}: {said}", soft_wrap=True)
    for name, points in found.items():
        columns = list(next(iter(points.values()), {}))
        rows = [[f"{size:,}", *figures.values()] for size, figures in points.items()]
        common.show(f"{name}: {CURVES[name][0].__doc__}", ("", *columns), rows)
        if options.pictures:
            from .pictures import draw

            draw(options.pictures / f"growth-{name}.svg", name, points)
    common.finish(
        options, "growth", {name: {str(size): item for size, item in points.items()} for name, points in found.items()}
    )


if __name__ == "__main__":
    uvloop.run(run())
