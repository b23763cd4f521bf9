"""`rocketlet start --brokers N`: brokers that are killed come back, and none outlives its supervisor."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rocketlet.client import Access, AdminClient, BrokerRefused, Consumer, Message, Producer

from ..conftest import PATIENCE_S, eventually
from ..support.certificates import Certificates
from ..support.metrics import page


class Supervisor:
    """The process, and what it printed when it was ready."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.said = ""

    @classmethod
    async def start(cls, folder: Path, *options: str) -> Supervisor:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rocketlet.command.cli", "start", "--data", str(folder), *options,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "ROCKETLET_FLUSH": "os"},
        )  # fmt: skip
        return cls(child)

    async def ready(self, brokers: int) -> None:
        assert self.child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while f"and {brokers} broker" not in self.said or "\n  Metrics " not in self.said:
                line = await self.child.stdout.readline()
                assert line, "it ended before it was ready"
                self.said += line.decode()

    @property
    def address(self) -> str:
        return str(re.findall(r"ready on (\S+:\d+):", self.said)[0])

    @property
    def metrics_port(self) -> int:
        return int(re.findall(r"Metrics +port (\d+)", self.said)[0])

    async def restarted(self, broker: str) -> None:
        """Returns when the broker is ready again."""
        count = f'rocketlet_broker_restarts_total{{broker="{broker}",cluster="DefaultCluster"}} 1.0'

        async def has_restarted() -> bool:
            return count in (await page(self.metrics_port, "/metrics"))[1]

        async def is_ready() -> bool:
            return (await page(self.metrics_port, "/readyz"))[0] == 200

        await eventually(has_restarted)
        await eventually(is_ready)

    def brokers(self) -> dict[str, int]:
        """The ids of the brokers' processes, by name."""
        pid = self.child.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
        return {command.partition("--name=")[2].partition("\0")[0]: child for child, command in commands.items()}


@pytest.fixture
async def running() -> AsyncIterator[list[Supervisor]]:
    """The supervisors that a test has started. Those that still run at its end are killed."""
    started: list[Supervisor] = []
    yield started
    for supervisor in started:
        if supervisor.child.returncode is None:
            supervisor.child.kill()
        await supervisor.child.communicate()


async def create_topic_on(brokers: int, address: str) -> None:
    """Makes the topic t; returns when the name server has it of all brokers, which announce it each on its own."""
    async with AdminClient(address) as admin:
        await admin.create_topic("t", queues=4)

        async def is_on_all() -> bool:
            return len((await admin.topic("t")).config) >= brokers

        await eventually(is_on_all)


async def gone(pid: int) -> None:
    """Returns when the process has ended, also while nobody has asked for its status."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


async def test_a_killed_broker_comes_back_and_nothing_acknowledged_is_lost(
    tmp_path: Path, running: list[Supervisor]
) -> None:
    supervisor = await Supervisor.start(tmp_path, "--brokers", "2", "--port", "0", "--metrics-port", "0")
    running.append(supervisor)
    await supervisor.ready(2)
    before = supervisor.brokers()
    assert sorted(before) == ["a", "b"]
    assert await page(supervisor.metrics_port, "/readyz") == (200, "ok\n")
    seen: set[bytes] = set()
    places: set[str] = set()
    acknowledged: set[bytes] = set()
    news = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.add(message.body)
        news.set()

    async def send(producer: Producer, first: int) -> None:
        for number in range(first, first + 20):
            body = b"%d" % number
            result = await producer.send("t", body)
            places.add(result.queue.broker_name)
            acknowledged.add(body)

    await create_topic_on(2, supervisor.address)
    async with Producer(supervisor.address) as producer, asyncio.timeout(PATIENCE_S):
        await send(producer, 0)
        assert places == {"a", "b"}, "clients see one cluster"
        os.kill(before["a"], signal.SIGKILL)
        await send(producer, 100)
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.restarted("a")
    places.clear()
    async with (  # those before would look for routes within 30 s
        Producer(supervisor.address) as producer,
        Consumer(supervisor.address, "g", "t", handle, start="first"),
        asyncio.timeout(PATIENCE_S),
    ):
        await send(producer, 200)
        assert places == {"a", "b"}
        while not acknowledged <= seen:
            news.clear()
            await news.wait()
    after = supervisor.brokers()
    assert after["b"] == before["b"], "the other broker ran on"
    assert after["a"] != before["a"]
    supervisor.child.terminate()
    async with asyncio.timeout(PATIENCE_S):
        _, err = await supervisor.child.communicate()
    assert supervisor.child.returncode == 0
    for pid in after.values():
        assert not Path(f"/proc/{pid}").exists(), "it was waited for"
    assert b'"event": "broker_died"' in err
    assert b'"reason": "SIGKILL"' in err
    closed = [line for line in err.splitlines() if b'"event": "closing"' in line]
    assert sum(b'"broker": "a"' in line for line in closed) == 1, "a broker's lines bear its name"
    assert sum(b'"broker": "b"' in line for line in closed) == 1
    assert b"Traceback" not in err


async def test_brokers_stop_when_their_supervisor_was_killed(tmp_path: Path, running: list[Supervisor]) -> None:
    supervisor = await Supervisor.start(tmp_path, "--brokers", "1", "--port", "0", "--metrics-port", "0")
    running.append(supervisor)
    await supervisor.ready(1)
    pids = supervisor.brokers().values()
    assert pids
    supervisor.child.kill()
    for pid in pids:
        await gone(pid)


async def test_a_broker_that_cannot_start_ends_the_start(tmp_path: Path, running: list[Supervisor]) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        supervisor = await Supervisor.start(tmp_path, "--brokers", "1", "--port", "0")
        running.append(supervisor)
        async with asyncio.timeout(PATIENCE_S):
            out, err = await supervisor.child.communicate()
    assert supervisor.child.returncode == 1
    assert b"ready" not in out
    assert b"another broker uses the data folder" in err
    assert b"rocketlet: the broker a ended before it was ready (exit status 1)" in err


def test_it_says_what_does_not_go_together_and_does_not_start(tmp_path: Path) -> None:
    arguments = ["start", "--data", str(tmp_path / "d"), "--brokers", "2", "--name", "x"]
    command = [sys.executable, "-m", "rocketlet.command.cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "rocketlet: --name does not go with --brokers" in ended.stderr
    assert not (tmp_path / "d").exists()


async def test_accounts_and_tls_are_passed_on(tmp_path: Path, running: list[Supervisor]) -> None:
    Certificates.make(tmp_path)
    accounts = tmp_path / "plain_acl.yml"
    accounts.write_text("accounts: [{accessKey: admin-key, secretKey: its-secret, admin: true}]")
    accounts.chmod(0o600)
    supervisor = await Supervisor.start(
        tmp_path / "data", "--brokers", "1", "--port", "0", "--metrics-port", "0", "--tls", "enforcing",
        "--tls-cert", f"{tmp_path}/server.pem", "--tls-key", f"{tmp_path}/server.key",
        "--nameserver-tls", f"{tmp_path}/ca.pem", "--acl", str(accounts), "--nameserver-account", "admin-key",
    )  # fmt: skip
    running.append(supervisor)
    await supervisor.ready(1)
    shown = Access(tls=True, ca_file=f"{tmp_path}/ca.pem", access_key="admin-key", secret_key="its-secret")
    async with Producer(supervisor.address, access=shown) as producer:
        await producer.send("t", b"x")
    with pytest.raises(BrokerRefused, match="accessKey"):
        async with Producer(supervisor.address, access=Access(tls=True, ca_file=f"{tmp_path}/ca.pem")):
            pass
