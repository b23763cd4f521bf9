"""The console on Apache's brokers: what it shows there, and what it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rocketlet.client import Consumer, Producer, Reject
from rocketlet.console.server import ConsoleServer

from bench.peers import Apache

from ..conftest import PATIENCE_S, Connect, eventually
from ..console.conftest import Site
from ..support.handlers import Inbox
from ..support.sick_cluster import SEGMENT_BYTES, SickCluster, provoked_here, wanted
from .systems import HEAP, System

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]


async def until(site: Site, path: str, words: str) -> str:
    """The text of a page as soon as it has some words."""
    pages: list[str] = []

    async def has_words() -> bool:
        pages.append(await site.text(path))
        return words in pages[-1]

    await eventually(has_words)
    return pages[-1]


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"], indirect=True)
async def test_apaches_cluster_is_shown_and_changed(system: System) -> None:
    is_broken, mended, done = True, Inbox(), Inbox()

    async def handle(message: Any) -> Reject | None:
        if is_broken:
            return Reject()
        await mended(message)
        return None

    async with ConsoleServer(system.address) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        site = Site(server.url, http)
        await site.change("/new/topic", "/new/topic", topic="orders", queues="4", perm="6")
        for group in ("shipping", "billing"):
            await site.change("/new/group", "/new/group", group=group, retries="3", retry_queues="1", consume="on")
        async with (
            Producer(system.address) as producer,
            Consumer(system.address, "shipping", "orders", done, start="first"),
            Consumer(system.address, "billing", "orders", handle, start="first"),
        ):
            sent = await producer.send("orders", b"<script>", keys="k1", tag="A")
            await eventually(lambda: bool(done.messages))
            place = f"/messages/orders/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}"
            await until(site, place, "billing dead")
            await until(site, place, "shipping consumed")
            page = await until(site, "/groups/shipping", "orders [*]")
            assert "These brokers do not report owners" in page
            assert "Python 4.9.8" in page
            assert "queues without an owner" in page
            await until(site, "/groups?sort=dead", "billing dead letters 1 orders 0")
            async with Consumer(system.address, "shipping", "orders", Inbox(), start="first"):
                async for name, part in site.stream("/groups/shipping"):
                    if name == "live_timeline" and "owner-1" in part and "<rect" in part:
                        break
            assert "<code>&lt;script&gt;</code>" in await site.get("/messages?topic=orders&by=key&value=k1")
            is_broken = False
            _, said = await site.change("/groups/billing/dead", "/groups/billing/replay", which="all", to="group")
            assert "The replay of 1 message to the retry topic of billing has started" in said
            await eventually(lambda: mended.bodies == [b"<script>"])
            await until(site, "/topics/orders", "shipping")
            assert "up" in await site.text("/brokers")
            assert "fileReservedTime" in await site.text(f"/brokers/{sent.queue.broker_name}")
        _, said = await site.change("/groups/shipping/reset", "/groups/shipping/reset", topic="orders", to="first")
        assert "were set in 4 queues: 0 messages are skipped, 1 is delivered again" in said
        _, said = await site.change("/topics/orders/settings", "/topics/orders/delete")
        assert "is deleted, with 1 message" in said


# `rocketlet doctor` on Apache's broker: each finding that it can show there, on one cluster.


BROKER = "apache"


async def test_all_findings_in_one_cluster(
    tmp_path: Path, connect: Connect, fetch_apache: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(fetch_apache, "4.9.7")
    provoked_here(monkeypatch)
    settings: dict[str, Any] = {
        "mappedFileSizeCommitLog": SEGMENT_BYTES,
        "fileReservedTime": 0,
        "cleanResourceInterval": 100,
    }
    async with Apache(tmp_path, "4.9.7", HEAP, **settings) as apache:
        cluster = SickCluster(apache.address, BROKER, apache.broker_address, connect)
        async with cluster.running():
            await cluster.findings(wanted(BROKER))
            await cluster.lose_brokers()
            # a broker's question has no answer from Apache's name server: the broker at its address counts as away
            others = wanted(BROKER, others=True) - {("mistaken", "broker_unknown")}
            await cluster.findings(others | {("mistaken", "broker_away")})
