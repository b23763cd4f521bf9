"""Where a server's options come from, what it listens on, and what it says when a port is taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from rocketlet.command.cli import parser
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Nodes


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
        with contextlib.suppress(urllib.error.HTTPError):
            return int(urllib.request.urlopen(url, timeout=PATIENCE_S).status)
        return 404

    assert await asyncio.to_thread(status, "/metrics") == 200
    assert await asyncio.to_thread(status, "/metrics?x=1") == 200
    for path in ("/", "/favicon.ico", "/metrics/x"):
        assert await asyncio.to_thread(status, path) == 404
