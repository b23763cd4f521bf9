"""The test kit with an unmodified Java client: what takes its broker hours takes a test moments."""

from __future__ import annotations

import pytest
from rocketlet.client import Producer
from rocketlet.testing import Broker

from .conftest import Run, missing

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]


async def test_sixteen_retries_of_a_java_consumer_end_among_the_dead_letters(java: Run) -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        broker.create_topic("t")
        broker.create_group("g")
        began_ms = broker.clock.now_ms
        async with java("consume", ns=broker.address, group="g", topic="t", mode="fail-always") as peer:
            await peer.started()
            await broker.until(lambda: len(broker.requests_of("PULL_MESSAGE")) >= 5)

            await producer.send("t", b"hard")
            await broker.skip_waits(lambda: len(broker.dead_letters("g")) == 1, timeout_s=120)
        tries = [int(line[4]) for line in peer.found("GOT")]
        assert tries == list(range(17))
        assert broker.clock.now_ms - began_ms > 4.7 * 3_600_000
