"""Unmodified Apache Java clients (4.9.8) on our broker, alone and in one group with Python members."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from rocketlet.client import Consumer, Message, Producer
from rocketlet.protocol.properties import decode

from ..client.test_consumer import Inbox
from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually

HERE = Path(__file__).parent
MISSING = [name for name in ("java", "mvn") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def classpath() -> str:
    """Our Java program, compiled, with Apache's client from Maven Central beside it."""
    subprocess.run(
        ["mvn", "-q", "-B", "compile", "dependency:copy-dependencies", "-DoutputDirectory=target/lib"],
        cwd=HERE,
        check=True,
    )
    return f"{HERE}/target/classes:{HERE}/target/lib/*"


class Java:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode().rstrip())

    def found(self, word: str) -> list[list[str]]:
        return [line.split(" ") for line in self.lines if line.startswith(word)]

    @property
    def bodies(self) -> list[str]:
        return [line[5] for line in self.found("GOT")]

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise
        finally:
            await self._reader


Run = Callable[..., AbstractAsyncContextManager[Java]]


@pytest.fixture
def java(classpath: str, tmp_path: Path) -> Run:
    @asynccontextmanager
    async def run(*arguments: str) -> AsyncIterator[Java]:
        process = await asyncio.create_subprocess_exec(
            "java", "-Xmx256m", "-Drocketmq.client.logUseSlf4j=true", f"-Duser.home={tmp_path}",
            "-cp", classpath, "Peer", *arguments,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        peer = Java(process)
        try:
            yield peer
        finally:
            await peer.end()

    return run


async def test_what_java_sends_python_receives(node: Node, wire: Wire, java: Run) -> None:
    await create_topic(wire, "t")
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first"), java("produce", node.address, "t", "20") as peer:
        await eventually(lambda: len(inbox.messages) == 20, 60)
    assert [line[1] for line in peer.found("SENT")] == ["SEND_OK"] * 20
    assert sorted(line[2] for line in peer.found("SENT")) == sorted(message.message_id for message in inbox.messages)
    assert sorted(line[3] for line in peer.found("SENT")) == sorted(message.offset_id for message in inbox.messages)
    message = next(message for message in inbox.messages if message.keys == ["key-7"])
    assert (message.body, message.tag) == (b"java-7-" + b"x" * 5000, "odd")
    assert len(message.record.body) < 1000, "Java compresses bodies over 4 KiB"
    assert message.properties["farbe"] == "grün"
    assert "WAIT" not in decode(message.record.properties)


async def test_java_makes_a_topic_by_sending_to_it(node: Node, java: Run) -> None:
    async with java("produce", node.address, "fresh", "3") as peer:
        await eventually(lambda: len(peer.found("SENT")) == 3, 60)
    assert sum(node.broker.store.queue("fresh", queue).next for queue in range(4)) == 3


async def test_java_sends_batches_and_oneway(node: Node, wire: Wire, java: Run) -> None:
    await create_topic(wire, "t")
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first"), java("batch", node.address, "t", "40"):
        await eventually(lambda: len(inbox.messages) == 41, 60)
    assert Counter(inbox.bodies) == Counter([*(b"batch-%d" % number for number in range(40)), b"batch-oneway"])


@pytest.mark.parametrize("mode", ["concurrently", "orderly", "broadcast"])
async def test_what_python_sends_java_receives_once_and_by_tag(node: Node, wire: Wire, java: Run, mode: str) -> None:
    await create_topic(wire, "t")
    async with java("consume", node.address, "g", "t", "A || B", mode) as peer, Producer(node.address) as producer:
        await eventually(lambda: bool(peer.found("STARTED")), 60)
        for number in range(60):
            await producer.send(
                "t", b"%d" % number, tag="ABC"[number % 3], queue_key="one" if mode == "orderly" else None
            )
        await eventually(lambda: len(peer.bodies) >= 40, 60)
    wanted = [str(number) for number in range(60) if number % 3 < 2]
    assert (peer.bodies if mode == "orderly" else sorted(peer.bodies, key=int)) == wanted


async def test_a_message_that_java_cannot_handle_comes_to_it_again(nodes: Nodes, connect: Connect, java: Run) -> None:
    node = await nodes.start(delay_levels_ms=(20,) * 18)
    await create_topic(await connect(node.address), "t")
    async with java("consume", node.address, "g", "t", "*", "fail-once") as peer, Producer(node.address) as producer:
        await eventually(lambda: bool(peer.found("STARTED")), 60)
        await producer.send("t", b"hard")
        await eventually(lambda: len(peer.bodies) == 2, 60)
    assert [(line[1], line[4], line[5]) for line in peer.found("GOT")] == [("t", "0", "hard"), ("t", "1", "hard")]


async def test_java_and_python_members_share_a_group(node: Node, wire: Wire, java: Run) -> None:
    await create_topic(wire, "t", 8)
    inbox = Inbox()
    async with java("consume", node.address, "g", "t", "*", "concurrently") as peer:
        await eventually(lambda: bool(peer.found("STARTED")), 60)
        async with (
            Consumer(node.address, "g", "t", inbox, start="first") as consumer,
            Producer(node.address) as producer,
        ):
            await eventually(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == 4)
            for number in range(80):
                await producer.send("t", b"%d" % number)
            await eventually(lambda: len(inbox.messages) + len(peer.bodies) >= 80, 60)
        mine = {message.body.decode() for message in inbox.messages if isinstance(message, Message)}
        assert mine
        assert peer.bodies
        assert mine | set(peer.bodies) == {str(number) for number in range(80)}


async def test_a_java_member_that_ends_is_gone_at_once(node: Node, wire: Wire, java: Run) -> None:
    await create_topic(wire, "t")
    async with java("consume", node.address, "g", "t", "*", "concurrently") as peer:
        await eventually(lambda: bool(peer.found("STARTED")) and node.broker.groups.get("g") is not None, 60)
    assert node.broker.groups.get("g") is None
    assert node.broker.clients.all_producers() == {}
