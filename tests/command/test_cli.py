"""The command as a whole: what it imports, and how shells complete it."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import socket
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import orjson
import pytest
import structlog
from rocketlet.broker.machine import default_budget
from rocketlet.client.config import parse_addresses
from rocketlet.client.errors import ConfigError
from rocketlet.command.cli import parser
from rocketlet.command.config import MAX_LOCAL_BROKERS, MAX_RESTART_DELAY_S, PORT_STEP, RESTART_DELAY_S
from rocketlet.command.plumbing.repeats import RepeatedEvents
from rocketlet.command.serving import layout, server_options
from rocketlet.command.serving.serve import _bind, _config
from rocketlet.command.serving.server_options import _advertised
from rocketlet.command.serving.supervisor import restart_delay_s


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def imported(command: str, *packages: str) -> list[str]:
    """The modules of these packages that are imported to understand a command."""
    code = f"""
import json, sys
from rocketlet.command.cli import parser
parser({command!r})
print(json.dumps([name for name in sys.modules if name.startswith({packages!r})]))
"""
    return list(json.loads(python(code)))


@pytest.mark.parametrize("command", ["topics", "groups", "offsets", "messages", "brokers", "doctor", "completion"])
def test_a_command_that_asks_a_cluster_imports_no_broker(command: str) -> None:
    assert imported(command, "rocketlet.broker", "prometheus_client", "rocketlet.spark", "structlog", "rich") == []


@pytest.mark.parametrize("command", ["start", "broker", "nameserver"])
def test_a_server_imports_neither_the_console_nor_what_administrators_use(command: str) -> None:
    """They would add a tenth to the time in which it is ready."""
    assert imported(command, "rocketlet.client.admin", "rocketlet.console.pages", "jinja2", "starlette") == []


@pytest.mark.parametrize("command", ["start", "broker", "nameserver"])
def test_a_server_does_not_import_what_structlog_can_do_without(command: str) -> None:
    """rich would add a sixth to the time in which it is ready, and an eighth to its memory."""
    assert imported(command, "rich", "pygments", "attr") == []
    program = f"from rocketlet.command.cli import parser; parser({command!r}); import rich; print(rich.__name__)"
    assert python(program).strip() == "rich"


def test_a_server_is_ready_before_it_loads_what_grpc_needs() -> None:
    """It would add a tenth to the time. A client that comes immediately is served all the same."""
    program = """
import asyncio, sys
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
async def main():
    async with Server(Listening(), broker=None, routes=Routes()) as server:
        print([name for name in sys.modules if name.startswith(("google", "hpack", "rocketlet.broker.grpc"))])
        print(server.grpc_server is not None)
asyncio.run(main())
"""
    assert python(program).splitlines() == ["[]", "True"]


def test_what_such_a_command_logs_looks_like_all_logs() -> None:
    """structlog comes with the first record that the level lets through."""
    program = """
import sys
from rocketlet.command import cli
from rocketlet.client.errors import get_logger
cli.configure_logs("warning")
log = get_logger("rocketlet.some")
log.info("not this")
assert "structlog" not in sys.modules
log.warning("lost", message="4711")
log.warning("again")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = (orjson.loads(line) for line in ran.stderr.splitlines())
    assert (first["event"], first["message"], first["level"], second["event"]) == ("lost", "4711", "warning", "again")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_nouns_verbs_and_options(shell: str) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "rocketlet.command.cli", "completion", shell], capture_output=True, text=True, check=True
    ).stdout
    for word in ("topics", "create", "retain-hours"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_verb(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(
        subprocess.run(
            [sys.executable, "-m", "rocketlet.command.cli", "completion", "bash"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    asking = f"source {script}; COMP_WORDS=(rocketlet topics cr) COMP_CWORD=2; _shtab_rocketlet rocketlet cr topics; "
    found = subprocess.run(["bash", "-c", asking + "echo ${COMPREPLY[@]}"], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["create"]


# Warnings that repeat are written once a minute.


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s


def test_a_line_is_written_once_and_then_each_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    repeats = RepeatedEvents(clock.now_s)

    def written(method: str = "warning", **fields: object) -> dict[str, object] | None:
        try:
            return dict(repeats.process(None, method, {"event": "name_server_unreachable", **fields}))
        except structlog.DropEvent:
            return None

    line = {"event": "name_server_unreachable", "address": "a"}
    assert written(address="a") == line
    for clock.s in range(1, 60):
        assert written(address="a") is None
    assert written(address="b") == line | {"address": "b"}, "a line that differs is another"
    assert written("info", address="a") == line, "only warnings and errors count"
    clock.s = 60.0
    assert written(address="a") == line | {"repeated": 59}
    clock.s = 120.0
    assert written(address="a") == line
    monkeypatch.setattr("rocketlet.command.plumbing.repeats.REPEATS_KNOWN", 2)
    written(address="c")
    written(address="d")
    assert written(address="a") == line, "it was forgotten"


def test_lines_of_logging_are_left_out_too() -> None:
    repeats = RepeatedEvents(Time().now_s)

    def record(**fields: object) -> logging.LogRecord:
        made = logging.LogRecord("rocketlet.cluster", logging.WARNING, "f", 1, "text", (), None)
        made.event, made.fields = "route_not_refreshed", fields
        return made

    assert [repeats.filter(record(topic=topic)) for topic in ("t", "t", "u")] == [True, False, True]


# Which ports, folders and options the brokers of `rocketlet start --brokers N` get, and what is refused.


OWN = {"name", "port", "data", "metrics_port", "advertise", "advertise_external", "nameserver", "stop_with_stdin"}
"""Options of which each broker gets its own."""
SHARED = {"memory", "retain_bytes"}


def started(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["start", *arguments])


def broker_of(options: argparse.Namespace, number: int) -> argparse.Namespace:
    """The options with which a broker of them runs."""
    place = layout.places(options, Path("d"))[number]
    return parser().parse_args(layout.arguments(options, place, "127.0.0.1:9876")[3:])


def test_an_option_of_the_broker_is_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One call of `add_argument` is enough: here of a field of BrokerConfig that has no option."""
    options_of_the_store = server_options._store_options

    def planted(parser: argparse.ArgumentParser) -> None:
        options_of_the_store(parser)
        parser.add_argument("--transaction-sweep-s", type=float, default=60.0, help="how often, in seconds")

    monkeypatch.setattr(server_options, "_store_options", planted)
    for name in ("start", "broker"):
        with pytest.raises(SystemExit):
            parser().parse_args([name, "--help"])
        assert "--transaction-sweep-s" in capsys.readouterr().out
    monkeypatch.setenv("ROCKETLET_TRANSACTION_SWEEP_S", "5")
    options = started("--brokers=2")
    monkeypatch.delenv("ROCKETLET_TRANSACTION_SWEEP_S")
    assert options.transaction_sweep_s == 5.0
    assert broker_of(options, 1).transaction_sweep_s == 5.0
    assert _config(options, "h:1", ()).transaction_sweep_s == 5.0
    file = tmp_path / "rocketlet.toml"
    file.write_text("transaction-sweep-s = 7\n")
    assert started(f"--config={file}").transaction_sweep_s == 7.0


def test_brokers_get_the_options_of_the_start() -> None:
    options = started(
        "--brokers=2", "--host=0.0.0.0", "--admin=loopback", "--log-level=debug", "--tls=enforcing", "--tls-cert=c",
        "--tls-key=k", "--tls-ca=ca", "--acl=a", "--nameserver-tls=n", "--nameserver-account=x", "--cluster=-c",
        "--no-vip", "--flush=sync", "--retain-hours=1.5", "--segment-bytes=1M", "--queues=3", "--metrics-host=h",
        "--grpc-max-delay-hours=48",
    )  # fmt: skip
    layout.check(options)
    found = broker_of(options, 1)
    passed = set(server_options.names_of_a_broker()) - OWN - SHARED - layout.NOT_PASSED
    assert {name: getattr(found, name) for name in passed} == {name: getattr(options, name) for name in passed}
    unsaid = vars(started())
    assert [name for name in passed if getattr(options, name) == unsaid[name]] == [], "each was given"
    assert found.stop_with_stdin, "it stops with its supervisor"


def test_limits_of_all_together_are_shared_out() -> None:
    found = broker_of(started("--brokers=4", "--memory=64M", "--retain-bytes=20G"), 0)
    assert (found.memory, found.retain_bytes) == (16 << 20, 5 << 30)
    unsaid = broker_of(started("--brokers=4"), 0)
    assert (unsaid.memory, unsaid.retain_bytes) == (default_budget() // 4, None)


def test_ports_leave_room_for_the_vip_channels() -> None:
    options = started(
        "--brokers=3", "--port=9876", "--metrics-port=9100", "--advertise=h:7000", "--advertise-external=e:80"
    )
    places = layout.places(options, Path("d"))
    assert [place[:4] for place in places] == [
        ("a", 9879, 9101, Path("d/a")),
        ("b", 9882, 9102, Path("d/b")),
        ("c", 9885, 9103, Path("d/c")),
    ]
    assert [place[4:] for place in places] == [("h:7000", "e:80"), ("h:7003", "e:83"), ("h:7006", "e:86")]
    ports = {place.port for place in places} | {place.port - 2 for place in places} | {9876}
    assert len(ports) == 7, "no VIP channel takes another's port"
    (one,) = layout.places(started("--brokers=1", "--advertise=h"), Path("d"))
    assert (one.metrics_port, one.advertise, one.external) == (None, "h", None)


def test_port_0_takes_free_ports() -> None:
    ports = [place.port for place in layout.places(started("--brokers=3", "--port=0"), Path("d"))]
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))


def test_ports_end_at_65535() -> None:
    last = 65_535 - 2 * PORT_STEP
    assert layout.places(started("--brokers=2", f"--port={last}"), Path("d"))[-1].port == 65_535
    with pytest.raises(ConfigError, match=f"port {last + 1} is too high"):
        layout.places(started("--brokers=2", f"--port={last + 1}"), Path("d"))


def test_there_are_as_many_brokers_as_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert [place.name for place in layout.places(started(f"--brokers={MAX_LOCAL_BROKERS}"), Path("d"))][-1] == "z"
    for count in ("0", str(MAX_LOCAL_BROKERS + 1), "two"):
        with pytest.raises(SystemExit):
            started(f"--brokers={count}")
        assert f"{count} is not a number of brokers; give 1 to 26" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--brokers 2 --name x", "--name does not go with --brokers"),
        ("--brokers 2 --control-port 0", "--control-port does not go with --brokers"),
        ("--brokers 2 --grpc-port 0", "--grpc-port does not go with --brokers"),
        ("--brokers 2 --advertise auto", "--advertise auto does not go with --brokers"),
        ("--brokers 2 --tls enforcing --tls-cert c", "give --nameserver-tls"),
        ("--brokers 2 --acl a", "give --nameserver-account"),
        ("--nameserver-tls c", "are for --brokers"),
        ("--nameserver-account c", "are for --brokers"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout.check(started(*arguments.split()))


def used(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "lock").touch()
    return folder


def test_a_folder_is_used_with_as_many_brokers_or_more(tmp_path: Path) -> None:
    folder = used(tmp_path, "a", "b", "c")
    layout.check_folder(folder, 3)
    layout.check_folder(folder, 4)
    with pytest.raises(ConfigError, match="also holds the data of c; give --brokers 3"):
        layout.check_folder(folder, 2)
    with pytest.raises(ConfigError, match="holds the data of brokers a, b, c; give --brokers 3"):
        layout.check_folder(folder, None)


def test_a_folder_of_one_broker_in_the_name_servers_process_stays_its_own(tmp_path: Path) -> None:
    folder = used(tmp_path, "x") / "x"
    layout.check_folder(folder, None)
    with pytest.raises(ConfigError, match="started without --brokers"):
        layout.check_folder(folder, 1)
    layout.check_folder(tmp_path / "new", None)
    layout.check_folder(tmp_path / "new", 2)


def test_a_broker_that_dies_soon_again_and_again_is_started_ever_later() -> None:
    assert restart_delay_s(0) == 0.0, "it ran for long before"
    delays = [restart_delay_s(deaths) for deaths in range(1, 20)]
    assert delays[:3] == [RESTART_DELAY_S, 2 * RESTART_DELAY_S, 4 * RESTART_DELAY_S]
    assert delays == sorted(delays)
    assert restart_delay_s(10**6) == MAX_RESTART_DELAY_S


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1:9876"),
        ("0.0.0.0", "broker.example", "broker.example:9876"),
        ("0.0.0.0", "broker.example:5", "broker.example:5"),
        ("::1", None, "[::1]:9876"),
        ("::", "[2001:db8::1]", "[2001:db8::1]:9876"),
        ("::", "[2001:db8::1]:5", "[2001:db8::1]:5"),
    ],
)
def test_the_address_that_is_returned_is_one_that_clients_take(host: str, advertise: str | None, told: str) -> None:
    if advertise is not None:
        assert _advertised(advertise) == advertise
    assert _bind(Namespace(host=host, port=9876, advertise=advertise)) == told
    assert parse_addresses(told) == [told]


@pytest.mark.parametrize("text", ["", ":5", "h:0", "h:65536", "h:x", "::1", "[::1", "[h]", "a:b:5"])
def test_what_is_no_address_is_not_advertised(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="an IPv6 address is in brackets"):
        _advertised(text)
