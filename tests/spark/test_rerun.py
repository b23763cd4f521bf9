"""A batch that Spark runs again, as the planner of a member sees it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from rocketlet.sync import Consumer

pytest.importorskip("pyspark")
from rocketlet.spark.options import stream_options
from rocketlet.spark.source import _planner

from .planners import opened
from .running import QUEUES, fill, report, wait_for

pytestmark = pytest.mark.timeout(120)


def owned(service: Consumer) -> int:
    return sum(queue.topic == "t" for queue in service.assignment())


def test_the_queues_of_a_batch_that_is_run_again_are_kept_until_it_is_finished(address: str) -> None:
    """A service that joins meanwhile handles none of its messages."""
    fill(address, range(50 * QUEUES))
    with opened(address, True) as planner:
        batch = planner.plan()
        assert batch is not None
    given = {"group": "g", "topic": "t", "nameServer": address}
    again = _planner(stream_options(given), batch, is_unfinished=True)
    handled: list[bytes] = []
    with (
        ThreadPoolExecutor(1) as other,
        Consumer(address, "g", "t", lambda message: handled.append(message.body)) as service,
    ):
        wait_for(lambda: len(report(address, "g")["members"]) == 2)
        assigned = other.submit(service.assigned)
        again.finish(batch)
        assigned.result(60)
        wait_for(lambda: owned(service) == QUEUES // 2)
        again.close()
        wait_for(lambda: owned(service) == QUEUES)
        fill(address, range(1))
        wait_for(lambda: bool(handled))
    assert handled == [b"0"]
