"""The parts that tests of planners share: a planner as a query has it, and what is done to its topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvloop
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import TopicName, write

pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import EMPTY, MicroBatch
from rocketlet.spark.config import PLANNING_LIMITS, PlanningLimits
from rocketlet.spark.member import QueryMember
from rocketlet.spark.options import StreamOptions, stream_options
from rocketlet.spark.planner import Planner

BOTH = pytest.mark.parametrize("membership", [True, False], ids=["member", "standalone"])


@contextmanager
def opened(
    address: str,
    membership: bool,
    resumed: MicroBatch = EMPTY,
    limits: PlanningLimits = PLANNING_LIMITS,
    /,
    **given: str | None,
) -> Iterator[Planner]:
    """A planner as a query has it that continues from a checkpoint."""
    options = planner_options(address, membership, **given)
    planner = Planner(replace(options, read=replace(options.read, limits=limits)), resumed)
    try:
        planner.finish(resumed)
        yield planner
    finally:
        planner.close()


def planner_options(address: str, membership: bool, **given: str | None) -> StreamOptions:
    topic = {} if "assign" in given else {"topic": "t"}
    all_given = {name: value for name, value in {**topic, **given}.items() if value is not None}
    kind = {"membership": str(membership).lower(), "group": "g", "nameServer": address, "pollTimeoutMs": "2000"}
    return stream_options({**kind, **all_given})


def member_of(planner: Planner) -> QueryMember:
    assert isinstance(planner.share, QueryMember)
    return planner.share


def read_all(planner: Planner) -> MicroBatch:
    """The batch of everything that is there, finished."""
    batch = planner.plan()
    assert batch is not None
    planner.finish(batch)
    return batch


def request(address: str, code: int, ext: dict[str, object]) -> None:
    async def run() -> None:
        cluster = ClusterView(address)
        connection = await cluster.connection(address)
        await connection.request(code, ext)  # type: ignore[arg-type]
        await cluster.close()

    uvloop.run(run())


def delete_topic(address: str, topic: str = "t") -> None:
    for code in (RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.DELETE_TOPIC_IN_NAMESRV):
        request(address, code, dict(write(TopicName(topic))))
