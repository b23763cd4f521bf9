"""Our message trace, read by Apache's own decoder: `mqadmin queryMsgTraceById`, on Rocketlet's brokers and Apache's."""

from __future__ import annotations

import re

import pytest
from rocketlet.client import Consumer, MessageTrace, Producer

from ..conftest import eventually
from ..handlers import Inbox
from .conftest import Run, missing
from .systems import System

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(600),
]
TRIES = 100
SENT = re.compile(r"^Pub +shop +.*ms +success", re.MULTILINE)


@pytest.mark.feature("Our client", "the message trace, read by mqadmin", client="mqadmin 4.9.8")
@pytest.mark.parametrize("system", ["rocketlet", "4.9.7"], indirect=True)
async def test_apaches_tool_reads_our_trace(system: System, java: Run) -> None:
    name_server, topic, group = system.address, await system.topic(), await system.group()
    handled = re.compile(rf"^Sub +{group} +.*ms +success", re.MULTILINE)
    inbox = Inbox()
    async with (
        MessageTrace(name_server) as trace,
        Producer(name_server, "shop", timeout_s=30, middleware=[trace.sends("shop")]) as producer,
        Consumer(name_server, group, topic, inbox, start="first", middleware=[trace.handlers(group)]),
    ):
        sent = await producer.send(topic, b"order 4711", tag="A", keys=["k1", "k2"])
        await eventually(lambda: len(inbox.messages) == 1)
    async with java("mqadmin") as peer:
        words, text = ("queryMsgTraceById", "-n", name_server, "-i", sent.message_id), ""
        for _ in range(TRIES):  # the broker's index is a moment behind its log
            before = len(peer.lines)
            await peer.write("\t".join(words))
            await peer.until(lambda before=before: "== done" in peer.lines[before:], 60)  # type: ignore[misc]
            text = "\n".join(peer.lines[before:])
            if SENT.search(text) and handled.search(text):
                break
        else:
            pytest.fail(f"the trace is not there: {text}")
