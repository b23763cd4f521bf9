"""The kit's tests run twice: with a broker in this process, and with one in a process of its own, by its control port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from rocketlet.testing import Broker, BrokerUnderTest, RemoteBroker


@pytest.fixture(scope="session")
def controlled_process() -> Iterator[tuple[str, str]]:
    """The addresses of a broker process and of its control interface."""
    command = [sys.executable, "-m", "rocketlet.command.cli", "start", "--port", "0", "--control-port", "0"]
    with subprocess.Popen(
        [*command, "--log-level", "error", "--queues", "4", "--no-vip"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(5)]
        yield said[0].split()[4].rstrip(":"), said[4].split()[1].removesuffix("/openapi.json")
        child.terminate()


@pytest.fixture(params=["in this process", "remote"])
def rocketlet(request: pytest.FixtureRequest) -> Iterator[BrokerUnderTest]:
    """In the place of the plugin's fixture."""
    if request.param == "remote":
        address, control = request.getfixturevalue("controlled_process")
        with RemoteBroker(control) as broker:
            assert broker.address == address
            yield broker
            broker.clear()
        return
    local: Broker = request.getfixturevalue("rocketlet_broker")
    yield local
    local.clear()
