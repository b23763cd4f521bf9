"""The fixture `rocketlet`: one broker for the run, as new for each test; works with any way of running async tests.

A test that fails shows which faults acted, who held which queue, and the last requests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # loaded when a test asks for it, not in every run of pytest
    from .broker import Broker

_BROKER = pytest.StashKey["Broker"]()


@pytest.fixture(scope="session")
def rocketlet_broker() -> Iterator[Broker]:
    """The broker that all tests of this process share. Override it to change its settings."""
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
    """`host:port` for clients of 5.x, in any language, that a test starts. Its clock and faults are `rocketlet`'s."""
    return rocketlet.endpoint


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    broker = item.stash.get(_BROKER, None)
    if report.failed and call.when == "call" and broker is not None:
        report.sections.append(("rocketlet", _said(broker)))
    return report


def _said(broker: Broker) -> str:
    """A broker that cannot say what happened ends no run of pytest."""
    try:
        return broker.report()
    except Exception as error:
        return f"the broker does not say what happened: {error!r}"
