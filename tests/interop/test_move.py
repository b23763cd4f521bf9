"""`rocketlet move` under load, from Rocketlet to Apache's broker and back, with members in Python and Java. It takes minutes,
most of them for virtual machines that start; MOVE_TO=4.9.7,5.5.0 moves to both."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, RetryLater, RocketletError
from rocketlet.client.config import ClientLimits
from rocketlet.migration.move import Move
from rocketlet.testing import Broker

from bench.peers import Apache

from ..conftest import eventually
from ..support.pacing import pace
from .conftest import Run, missing
from .systems import HEAP, SETTINGS

pytestmark = [
    pytest.mark.java,
    pytest.mark.long,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(400),
]
QUEUES = 4
PAUSE_S = 0.02  # between two messages


class Load:
    """Sends numbers until it is stopped; where a send is refused, it continues at the other address."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self.sent = 0

    async def run(self) -> None:
        for address in cycle(self._addresses):
            async with Producer(address, retries=0, limits=ClientLimits(route_interval_s=2.0)) as producer:
                with suppress(RocketletError):
                    while True:
                        await producer.send("orders", b"%d" % self.sent)
                        self.sent += 1
                        await pace(PAUSE_S)
            await pace(0.2)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Handled:
    """The messages that a Python member has acknowledged, by body; message 7 only at its second try."""

    def __init__(self) -> None:
        self.bodies: Counter[str] = Counter()
        self.refused = False

    def __call__(self, message: Message) -> RetryLater | None:
        if message.body == b"7" and not self.refused:
            self.refused = True
            return RetryLater()
        self.bodies[message.body.decode()] += 1
        return None


@pytest.mark.parametrize("version", os.environ.get("MOVE_TO", "4.9.7").split(","))
async def test_groups_in_python_and_java_move_under_load_and_back(
    version: str,
    rocketlet: Broker,
    java: Run,
    tmp_path: Path,
    fetch_apache: Callable[[str], None],
) -> None:
    await asyncio.to_thread(fetch_apache, version)
    async with Apache(tmp_path, version, HEAP, **SETTINGS) as apache, AdminClient(rocketlet.address) as admin:
        await admin.create_topic("orders", queues=QUEUES)
        python, of_java = Handled(), Counter[str]()
        here, there = rocketlet.address, apache.address
        load = Load([here, there])
        async with load.running():
            await _move(Move(here, there, limits=ClientLimits(move_quiet_s=4.0)), here, there, python, of_java, java)
            await _move(
                Move(there, here, returns=True, limits=ClientLimits(move_quiet_s=4.0)),
                there,
                here,
                python,
                of_java,
                java,
            )
            wanted = load.sent
        async with Consumer(here, "py", "orders", python), java("consume", ns=here, group="jv", topic="orders") as peer:
            await eventually(lambda: len(python.bodies) >= load.sent)
            await peer.until(lambda: len(of_java.keys() | set(peer.bodies)) >= load.sent)
        of_java.update(peer.bodies)
    everything = {str(number) for number in range(load.sent)}
    assert wanted > 100
    for counted in (python.bodies, of_java):
        assert everything - counted.keys() == set(), "nothing is lost"
        assert {body: count for body, count in counted.items() if count > 1} == {}, "nothing is handed out twice"


async def _move(move: Move, source: str, target: str, python: Handled, of_java: Counter[str], java: Run) -> None:
    """Both groups work at the source, and then at the target, all the time under load."""
    async with move:
        async with (
            Consumer(source, "py", "orders", python, start="first") as consumer,
            java("consume", ns=source, group="jv", topic="orders") as peer,
        ):
            seen = len(python.bodies)
            await peer.started()
            await eventually(lambda: len(python.bodies) > seen + 20)
            await peer.until(lambda: len(peer.bodies) > 20)
            await move.copy()
            await move.close()
            await consumer.commit()
        of_java.update(peer.bodies)
        for group in ("py", "jv"):
            await move.take(group)
