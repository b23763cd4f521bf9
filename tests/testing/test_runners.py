"""The fixture `rocketlet` with each way of running tests: pytest-asyncio in its modes, anyio, unittest, pytest-xdist."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest
from rocketlet.broker.config import VIP_DISTANCE
from rocketlet.testing.ports import HELD, free_port

pytest_plugins = ["pytester"]

SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")  # without it pytest-asyncio warns
SERVICE = """
import asyncio
import pytest
from rocketlet import Consumer, Producer
from rocketlet.testing import Broker, Fault

async def handled(broker):
    assert broker.messages("t") == [], "as new for each test"
    broker.create_topic("t")
    seen = []
    async with (
        Producer(broker.address) as producer,
        Consumer(broker.address, "g", "t", lambda message: seen.append(message.body), start="first"),
    ):
        await producer.send("t", b"now")
        await producer.send("t", b"later", delay_level=18)
        await broker.until(lambda: seen == [b"now"])
        await broker.skip_waits(lambda: seen == [b"now", b"later"])
"""
MARKED = """
{mark}
async def test_one(rocketlet):
    await handled(rocketlet)

{mark}
async def test_another(rocketlet):
    await handled(rocketlet)
"""
THREADS = """
def test_one(rocketlet):
    asyncio.run(handled(rocketlet))

def test_another(rocketlet):
    asyncio.run(handled(rocketlet))
"""
IN_UNITTEST = """
import unittest

class InAThread(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.broker = cls.enterClassContext(Broker())

    def setUp(self):
        self.addCleanup(self.broker.clear)

    def test_one(self):
        asyncio.run(handled(self.broker))

    def test_another(self):
        asyncio.run(handled(self.broker))

class InTheLoop(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.broker = await self.enterAsyncContext(Broker())

    async def test_one(self):
        await handled(self.broker)

    async def test_another(self):
        await handled(self.broker)
"""


@pytest.mark.parametrize("loop_scope", ["function", "session"])
@pytest.mark.parametrize(
    ("mark", "mode"), [("@pytest.mark.asyncio", "strict"), ("@pytest.mark.asyncio", "auto"), ("", "auto")]
)
def test_pytest_asyncio(pytester: pytest.Pytester, mark: str, mode: str, loop_scope: str) -> None:
    pytester.makepyfile(SERVICE + MARKED.format(mark=mark))
    scopes = ("-o", f"asyncio_default_test_loop_scope={loop_scope}", *SCOPE)
    pytester.runpytest("-W", "error", "-o", f"asyncio_mode={mode}", *scopes).assert_outcomes(passed=2)


def test_anyio(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n")
    pytester.makepyfile(SERVICE + MARKED.format(mark="@pytest.mark.anyio"))
    pytester.runpytest("-W", "error", "-p", "no:asyncio").assert_outcomes(passed=2)


def test_tests_without_a_loop(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SERVICE + THREADS)
    pytester.runpytest("-W", "error", "-p", "no:asyncio", "-p", "no:anyio").assert_outcomes(passed=2)


def test_unittest(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(SERVICE + IN_UNITTEST)
    ran = pytester.run(sys.executable, "-W", "error", "-m", "unittest", path.stem)
    ran.stderr.fnmatch_lines(["Ran 4 tests in*", "OK"])
    pytester.runpytest("-W", "error", *SCOPE).assert_outcomes(passed=4)


def test_pytest_xdist(pytester: pytest.Pytester) -> None:
    """Each worker has a broker of its own, and the tests of one do not see those of another."""
    both = MARKED.format(mark="@pytest.mark.asyncio")
    pytester.makepyfile(test_a=SERVICE + both, test_b=SERVICE + both)
    pytester.runpytest("-W", "error", "-n", "2", "--dist", "load", *SCOPE).assert_outcomes(passed=4)


def test_a_broker_that_does_not_answer_ends_no_run(pytester: pytest.Pytester) -> None:
    """The report of a failed test asks it what happened."""
    pytester.makepyfile("""
        from rocketlet.testing import Broker

        def test_it_fails(rocketlet, monkeypatch):
            def silent():
                raise TimeoutError("the broker has not responded for 120 s")
            monkeypatch.setattr(rocketlet, "report", silent)
            assert False

        def test_the_next(rocketlet):
            pass
    """)
    ran = pytester.runpytest("-p", "no:asyncio", "-p", "no:anyio")
    ran.assert_outcomes(failed=1, passed=1)
    ran.stdout.fnmatch_lines(["the broker could not report its state: *has not responded for 120 s*"])


# Free ports: nobody else gets them before they are listened on, and they can be listened on.


def test_a_port_is_given_once() -> None:
    ports = [free_port() for _ in range(HELD)]
    given = {*ports, *(port - VIP_DISTANCE for port in ports)}
    assert len(given) == 2 * HELD
    for _ in range(10 * HELD):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in given


@pytest.mark.parametrize("distance", [0, VIP_DISTANCE])
async def test_nobody_can_bind_it_but_servers_can_listen(distance: int) -> None:
    port = free_port() - distance
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):  # and again, after a restart
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        server.close()
        await server.wait_closed()


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_few_descriptors_are_held() -> None:
    """They are counted, not compared by number: other tests of this process may have any of them open."""
    for _ in range(HELD):
        free_port()
    before = open_descriptors()
    for _ in range(3 * HELD):
        free_port()
    assert open_descriptors() < before + 10
