"""mqadmin in one virtual machine, command by command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rocketlet.client import Producer, SendResult

from .conftest import Cluster, Run

TRIES = 10


Admin = Callable[..., Awaitable[str]]


@asynccontextmanager
async def admin_of(cluster: Cluster, java: Run) -> AsyncIterator[Admin]:
    """`await admin("clusterList")` gives what the command prints. The tool waits 3 s for an answer, whatever the options.
    On a busy machine its own start may take them; then the command is repeated."""
    async with java("mqadmin") as peer:

        async def told(*words: str) -> str:
            before = len(peer.lines)
            await peer.write("\t".join((words[0], "-n", cluster.address, *words[1:])))
            await peer.until(lambda: "== done" in peer.lines[before:])
            return "\n".join(peer.lines[before : peer.lines.index("== done", before)])

        async def run(*words: str) -> str:
            text = await told(*words)
            for _ in range(TRIES - 1):
                if "rocketmq.remoting.exception." in text:  # it could not connect, send, or wait long enough
                    text = await told(*words)
            assert "Exception" not in text, text
            return text

        yield run


async def sent(cluster: Cluster, topic: str, count: int = 10) -> list[SendResult]:
    async with Producer(cluster.address) as producer:
        return [await producer.send(topic, b"%d" % number, keys=f"key-{number}") for number in range(count)]
