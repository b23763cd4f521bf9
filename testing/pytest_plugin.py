"""The fixture `rocketlet`: one broker for all tests of a process, cleared after each test. The broker runs in a thread
of its own, so that tests may use any event loop.

A test with the fixture that fails shows the faults that acted, the owners of the queues, and the last requests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # loaded when a test uses the fixture, not in every run of pytest
    from .broker import Broker

_BROKER = pytest.StashKey["Broker"]()


@pytest.fixture(scope="session")
def rocketlet_broker() -> Iterator[Broker]:
    """The broker that the tests of this process share. Override the fixture to change its settings."""
    from . import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def rocketlet(rocketlet_broker: Broker, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker without topics, groups, messages and faults, at `rocketlet.address`."""
    request.node.stash[_BROKER] = rocketlet_broker
    yield rocketlet_broker
    rocketlet_broker.clear()


@pytest.fixture
def rocketlet_endpoint(rocketlet: Broker) -> str:
    """`host:port` of the broker `rocketlet` for 5.x clients in any language. Raises RuntimeError without protobuf."""
    return rocketlet.endpoint


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    broker = item.stash.get(_BROKER, None)
    if report.failed and call.when == "call" and broker is not None:
        report.sections.append(("rocketlet", _report_of(broker)))
    return report


def _report_of(broker: Broker) -> str:
    """Return the report of a broker, or a text about the error if the report fails."""
    try:
        return broker.report()
    except Exception as error:
        return f"the broker could not report its state: {error!r}"
