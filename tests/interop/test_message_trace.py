"""Our message trace, read by Apache's own decoder: `mqadmin queryMsgTraceById`, on Rocketlet's brokers and Apache's."""

from __future__ import annotations

import re

import pytest
from rocketlet.client import Consumer, MessageTrace, Producer

from ..conftest import eventually
from ..support.handlers import Inbox
from .conftest import START_S, Program, Run, missing
from .systems import System

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(600),
]
TRIES = 100
SENT = re.compile(r"^Pub +shop +.*ms +success", re.MULTILINE)
HANDLED = re.compile(r"^Sub +(\S+) +.*ms +success", re.MULTILINE)


async def told(peer: Program, name_server: str, message_id: str, groups: set[str]) -> None:
    """Returns when mqadmin says of the message who sent it, and that these groups have handled it."""
    words, text = ("queryMsgTraceById", "-n", name_server, "-i", message_id), ""
    for _ in range(TRIES):  # the broker's index is a moment behind its log
        before = len(peer.lines)
        await peer.write("\t".join(words))
        await peer.until(lambda before=before: "== done" in peer.lines[before:], 60)  # type: ignore[misc]
        text = "\n".join(peer.lines[before:])
        if SENT.search(text) and set(HANDLED.findall(text)) == groups:
            return
    pytest.fail(f"the trace is not there: {text}")


@pytest.mark.feature("Our client", "the message trace, read by mqadmin", client="mqadmin 4.9.8")
@pytest.mark.parametrize("version", ["rocketlet", "4.9.7"], indirect=True)
async def test_apaches_tool_reads_our_trace(system: System, java: Run) -> None:
    topic, packers, readers = await system.topic(), await system.group(), await system.group()
    inbox, sends = Inbox(), []
    async with MessageTrace(system.address) as trace:
        layers = [trace.sends("shop")]
        async with (
            Producer(system.address, "shop", timeout_s=30, check=bool, middleware=layers) as producer,
            Consumer(system.address, packers, topic, inbox, start="first", middleware=[trace.handlers(packers)]),
            Consumer(system.address, readers, topic, start="first", middleware=[trace.handlers(readers)]) as reader,
        ):
            await producer.send(topic, b"order 4711", tag="A", keys=["k1", "k2"])
            async with producer.transaction(topic, b"paid", keys="k3"):
                pass
            await producer.send_oneway(topic, b"oneway")
            for _ in range(3):
                message = await reader.receive(timeout_s=START_S)
                await reader.ack(message)
                sends.append(message.message_id)
            await eventually(lambda: len(inbox.messages) == 3)
    async with java("mqadmin") as peer:
        for message_id in sends:
            await told(peer, system.address, message_id, {packers, readers})
