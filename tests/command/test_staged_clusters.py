"""Forty staged clusters, twenty well and twenty sick: `rocketlet doctor` must say all that is wrong, and nothing else.

A cluster is a function that is run until its `yield`. Its table says which findings are due, by subject and kind. Well ones
are checked for as long as the command does, so that a false alarm of the command is one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
from rocketlet.client import AdminClient, Producer
from rocketlet.client.admin import diagnosis
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose

from ..conftest import PATIENCE_S, Connect, Nodes
from ..support.staged import SICK, WELL
from ..support.staged.stage import Cluster, Findings, Stage

SOON: Final = ObservationTimes(look_s=0.3, watch_s=0.6, stuck_s=0.0)


def _name(cluster: Cluster) -> str:
    return cluster.__name__


@pytest.fixture
async def stage(
    nodes: Nodes, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(diagnosis, "_disk_ratio", lambda status: 0.1)  # this machine's disk is none of a cluster's ills
    node = await nodes.start()
    async with Producer(node.address) as producer, AsyncExitStack() as stack:
        yield Stage(node, connect, stack, producer, tmp_path)


async def told(stage: Stage, cluster: Cluster, patience: ObservationTimes) -> Findings:
    async with asyncio.timeout(PATIENCE_S), cluster(stage), AdminClient(stage.node.address) as admin:
        found = await diagnose(admin, patience)
        print(*found, sep="\n")  # pytest shows it if a test fails
        return {(finding.subject, finding.kind) for finding in found}


@pytest.mark.parametrize("cluster", WELL, ids=_name)
async def test_nothing_is_said_of_a_cluster_that_is_well(stage: Stage, cluster: Cluster) -> None:
    assert await told(stage, cluster, ObservationTimes()) == set()


@pytest.mark.parametrize(("cluster", "due"), SICK, ids=[_name(cluster) for cluster, _ in SICK])
async def test_all_that_is_wrong_is_said_and_nothing_else(stage: Stage, cluster: Cluster, due: Findings) -> None:
    assert await told(stage, cluster, SOON) == due


def test_there_are_twenty_of_either() -> None:
    assert (len(WELL), len(SICK)) == (20, 20)
