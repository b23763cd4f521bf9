"""Our message trace, read by Apache's own decoder: `mqadmin queryMsgTraceById`, on Rocketlet's brokers and Apache's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rocketlet.client import Consumer, MessageTrace, Producer
from rocketlet.testing import Broker

from bench.peers import Apache

from ..conftest import eventually
from ..handlers import Inbox
from .conftest import Run, missing
from .systems import HEAP

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(600),
]
TRIES = 100
SENT = re.compile(r"^Pub +shop +.*ms +success", re.MULTILINE)
HANDLED = re.compile(r"^Sub +packers +.*ms +success", re.MULTILINE)


@pytest.fixture(params=["rocketlet", "4.9.7"])
async def name_server(
    request: pytest.FixtureRequest, tmp_path: Path, fetch_apache: Callable[[str], None]
) -> AsyncIterator[str]:
    if request.param == "rocketlet":
        async with Broker() as broker:
            yield broker.address
        return
    await asyncio.to_thread(fetch_apache, request.param)
    async with Apache(tmp_path, request.param, HEAP, traceTopicEnable="true") as apache:
        yield apache.address


@pytest.mark.feature("Our client", "the message trace, read by mqadmin", client="mqadmin 4.9.8")
async def test_apaches_tool_reads_our_trace(name_server: str, java: Run) -> None:
    inbox = Inbox()
    async with (
        MessageTrace(name_server) as trace,
        Producer(name_server, "shop", timeout_s=30, middleware=[trace.sends("shop")]) as producer,
        Consumer(name_server, "packers", "t", inbox, start="first", middleware=[trace.handlers("packers")]),
    ):
        sent = await producer.send("t", b"order 4711", tag="A", keys=["k1", "k2"])
        await eventually(lambda: len(inbox.messages) == 1)
    async with java("mqadmin") as peer:
        words, text = ("queryMsgTraceById", "-n", name_server, "-i", sent.message_id), ""
        for _ in range(TRIES):  # the broker's index is a moment behind its log
            before = len(peer.lines)
            await peer.write("\t".join(words))
            await peer.until(lambda before=before: "== done" in peer.lines[before:], 60)  # type: ignore[misc]
            text = "\n".join(peer.lines[before:])
            if SENT.search(text) and HANDLED.search(text):
                break
        else:
            pytest.fail(f"the trace is not there: {text}")
