"""`rocketlet doctor` on Apache's broker: each finding that it can show there, on one cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.peers import Apache

from ..conftest import Connect
from ..support.sick_cluster import SEGMENT_BYTES, SickCluster, provoked_here, wanted
from .systems import HEAP

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
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
