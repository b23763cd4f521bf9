"""Where a server's options come from, what it listens on, and what it says when a port is taken."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from rocketlet.client import Access, AdminClient, BrokerRefused, Consumer, Message, Producer
from rocketlet.command.cli import parser
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Nodes, eventually
from ..support.certificates import Certificates
from ..support.metrics import page


def parsed(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], *arguments: str) -> dict[str, object]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return vars(parser().parse_args(arguments))


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rocketlet.toml"
    file.write_text("""
port = 1000
queues = 5
retain-hours = 12.5
retain_bytes = "20G"
no-vip = true
flush = "sync"
data = "/data"
""")
    environment = {"ROCKETLET_CONFIG": str(file), "ROCKETLET_PORT": "2000", "ROCKETLET_QUEUES": "6"}
    found = parsed(monkeypatch, environment, "start", "--port", "3000")
    assert (found["port"], found["queues"], found["retain_hours"]) == (3000, 6, 12.5)
    assert (found["retain_bytes"], found["no_vip"], found["flush"], found["data"]) == (
        20 << 30,
        True,
        "sync",
        Path("/data"),
    )
    assert found["host"] == "127.0.0.1", "the default stays"
    again = parsed(monkeypatch, {"ROCKETLET_NO_VIP": "0"}, "start", f"--config={file}")
    assert (again["no_vip"], again["port"]) == (False, 2000)


@pytest.mark.parametrize(
    ("name", "meant"), [("RETAIN_HUORS", "RETAIN_HOURS"), ("DAAT", "DATA"), ("CONSOLE_PROT", "CONSOLE_PORT")]
)
def test_a_mistyped_variable_is_named_with_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, {f"ROCKETLET_{name}": "1"}, "start")
    assert f"$ROCKETLET_{name} is no setting; is $ROCKETLET_{meant} meant?" in capsys.readouterr().err


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("SERVICE_HOST", "PORT_9876_TCP", "SERVICE_PORT_CONSOLE", "CONSOLE_PORT", "SECRET_KEY", "TEAM")
    given = {f"ROCKETLET_{name}": "1" for name in names}
    parsed(monkeypatch, {**given, "ROCKETLET_NAMESERVER": "h:1"}, "broker")


def test_what_is_required_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, {"ROCKETLET_NAMESERVER": "h:1"}, "broker")["nameserver"] == "h:1"


@pytest.mark.parametrize("typed", [("--port", "3000"), ("--port=3000",)])
def test_source_of_lower_rank_is_not_checked_when_the_command_line_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: tuple[str, ...]
) -> None:
    file = tmp_path / "rocketlet.toml"
    file.write_text("port = 99999\nqueues = 'many'\nflush = 'never'\n")
    environment = {"ROCKETLET_CONFIG": str(file), "ROCKETLET_PORT": "abc", "ROCKETLET_QUEUES": "3"}
    found = parsed(monkeypatch, environment, "start", *typed, "--flush", "sync")
    assert (found["port"], found["queues"], found["flush"]) == (3000, 3, "sync")


def test_addresses_that_kubernetes_sets_are_ignored_and_logged_once(tmp_path: Path) -> None:
    addresses = {
        f"ROCKETLET_{name}": "tcp://10.0.0.7:9876"
        for name in ("PORT", "NAMESERVER_PORT", "CONSOLE_PORT", "METRICS_PORT")
    }
    process = run(tmp_path, "--no-vip", "--config", str(tmp_path / "c.toml"), toml="\ufeffport = 0\n", **addresses)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    (line,) = [line for line in err.splitlines() if "variables_ignored" in line]
    assert all(name in line for name in addresses)


def test_address_for_other_networks_is_reported_when_the_broker_is_ready(tmp_path: Path) -> None:
    process = run(tmp_path, "--port", "0", "--advertise-external", "localhost:7")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert "  Outside  localhost:7: the same, for clients of other networks\n" in lines


def test_advertised_host_that_is_unknown_is_named(tmp_path: Path) -> None:
    process = run(tmp_path, "--port", "0", "--advertise", "nowhere.invalid:9876")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "--advertise: the host name nowhere.invalid is unknown" in err) == (1, True)


@pytest.mark.parametrize(
    ("text", "environment", "reason"),
    [
        ("port = 99999", {}, "port: 99999 is not a port"),
        ("flush = 'never'", {}, "flush: 'never' is not one of os, sync"),
        ("no-vip = 'perhaps'", {}, "no-vip: 'perhaps' is neither true nor false"),
        ("data = ['a', 'b']", {}, "is not one value"),
        ("retain = 5", {}, "unknown settings: retain; there are host, "),
        ("port = ", {}, "is not TOML"),
        (None, {"ROCKETLET_CONFIG": "/nowhere.toml"}, "/nowhere.toml cannot be read: No such file"),
        (None, {"ROCKETLET_PORT": "abc"}, r"\$ROCKETLET_PORT: abc is not a port"),
    ],
)
def test_wrong_settings_are_named_with_their_place(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    environment: dict[str, str],
    reason: str,
) -> None:
    if text is not None:
        environment = {"ROCKETLET_CONFIG": str(tmp_path / "c.toml")}
        (tmp_path / "c.toml").write_text(text)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, environment, "start")

    assert re.search(reason, capsys.readouterr().err)


def run(tmp_path: Path, *options: str, toml: str | None = None, **environment: str) -> subprocess.Popen[str]:
    if toml is not None:
        (tmp_path / "c.toml").write_text(toml)
    command = [sys.executable, "-m", "rocketlet.command.cli", "start", "--data", str(tmp_path / "data"), *options]
    of_process = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=of_process)


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
def test_a_broker_listens_on_this_machine_only_unless_configured_otherwise(tmp_path: Path, host: str | None) -> None:
    port = free_port()
    process = run(tmp_path, "--port", str(port), "--no-vip", *(["--host", host] if host else []))
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    with socket.socket() as other:
        if host is None:
            other.bind(("127.0.0.2", port))  # is free
        else:
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.2", port))
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert ("listening_to_other_machines" in err) == (host is not None)


def test_a_taken_metrics_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = run(tmp_path, "--port", str(free_port()), "--metrics-port", str(port))
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"the metrics port 127.0.0.1:{port}" in err
    assert "Traceback" not in err


async def test_only_metrics_are_at_the_metrics_port(nodes: Nodes) -> None:
    node = await nodes.start(metrics_port=0)

    def status(path: str) -> int:
        url = f"http://127.0.0.1:{node.server.metrics_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(status, "/metrics") == 200
    assert await asyncio.to_thread(status, "/metrics?x=1") == 200
    for path in ("/", "/favicon.ico", "/metrics/x"):
        assert await asyncio.to_thread(status, path) == 404


# `rocketlet start --brokers N`: brokers that are killed come back, and none outlives its supervisor.


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
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and path.suffix != ".log"]
    assert files
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []
    with pytest.raises(BrokerRefused, match="accessKey"):
        async with Producer(supervisor.address, access=Access(tls=True, ca_file=f"{tmp_path}/ca.pem")):
            pass
