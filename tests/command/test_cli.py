"""The command as a whole: what it imports, and how shells complete it."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import structlog
from rocketlet.command.plumbing.repeats import RepeatedEvents


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
