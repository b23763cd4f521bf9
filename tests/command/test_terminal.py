"""Texts of others reach a terminal as text, never as something that the terminal obeys."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rocketlet.client import AdminClient, Consumer, Producer, rebalanced
from rocketlet.client.admin.diagnosis import Examiner
from rocketlet.command.cli import main
from rocketlet.command.plumbing.bar import WIDTH, bar
from rocketlet.command.tools.top import _caught_up, _look
from rocketlet.migration.mirror import MirrorProgress
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.testing import Broker

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import Inbox
from .conftest import Run

EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
HARMLESS = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb"
CODE = 1  # SYSTEM_ERROR

LOGGING = """
import io, logging, sys
from rocketlet.command.plumbing import logs

class Terminal(io.StringIO):
    def isatty(self):
        return True

evil = {evil!r}
real, sys.stderr = sys.stderr, Terminal()
logs.configure()
logs.log.warning("client_lost", client_id=evil, names=[evil])
logging.getLogger("library").warning("of a library: %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    logs.log.exception("failed")
sys.stdout.buffer.write(sys.stderr.getvalue().encode())
"""


def test_a_log_on_a_terminal_has_nothing_that_it_obeys(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOGGING.format(evil=EVIL))
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, check=True).stdout.decode()
    for harm in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
        assert harm not in shown
    assert shown.count(HARMLESS) >= 3
    assert "Traceback" in shown
    assert len(shown.splitlines()) > 5, "a traceback has its lines"


async def test_a_remark_of_a_name_server_is_shown_harmlessly(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65_536):
            for frame in frames.feed(data):
                writer.write(encode(Frame(CODE, frame.opaque, remark=EVIL, flag=1)))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    capsys.readouterr()
    status = await asyncio.to_thread(main, ["topics", "list", "--nameserver", f"127.0.0.1:{port}"])
    shown = capsys.readouterr().err
    server.close()
    await server.wait_closed()
    assert (status, "\x1b" in shown, HARMLESS in shown) == (1, False, True), shown


# The bar that says how far a copy is.


@pytest.mark.parametrize(
    ("done", "filled", "percent"), [(0, 0, 0), (1, 0, 0), (1250, 15, 50), (2499, 29, 99), (2500, 30, 100)]
)
def test_it_is_full_only_at_the_end(done: int, filled: int, percent: int) -> None:
    drawn = bar(MirrorProgress("orders", done, 2500))
    assert drawn == f"orders [{'#' * filled}{'-' * (WIDTH - filled)}] {percent} %, {done:,} of 2,500"


def test_a_topic_without_messages_is_copied() -> None:
    assert bar(MirrorProgress("orders", 0, 0)).endswith("100 %, 0 of 0")


@pytest.mark.parametrize("command", ["mirror", "move"])
async def test_it_is_drawn_on_a_terminal_alone(command: str, rocketlet: Broker) -> None:
    async with Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"1", b"2", b"3"])
    screen, terminal = pty.openpty()
    async with Broker() as there:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rocketlet.command.cli", command, "--from", rocketlet.address, "--to", there.address,
            stdout=asyncio.subprocess.PIPE, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)
        out, _ = await child.communicate()
    shown = os.read(screen, 65536).decode()
    os.close(screen)
    assert child.returncode == 0
    assert f"orders [{'#' * WIDTH}] 100 %, 3 of 3" in shown
    assert shown.endswith("\r\n"), "the next line is free"
    assert "[#" not in out.decode()


# The columns of `rocketlet top`.


@pytest.mark.parametrize(
    ("lag", "out_per_s", "gains_per_s", "told"),
    [
        (0, 0, 0, "now"),
        (50, 10, 0, "now"),  # messages under way
        (51, 10, 0, "never, at this rate"),
        (1, 0, 0, "never, at this rate"),
        (120, 10, 2, "1 min 0 s"),
        (7200, 10, 1, "2 h 0 min"),
    ],
)
def test_a_group_has_caught_up_when_it_reads_what_is_left_in_a_moment(
    lag: int, out_per_s: int, gains_per_s: float, told: str
) -> None:
    assert _caught_up(lag, out_per_s, gains_per_s) == told


async def test_groups_have_the_findings_of_doctor(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with (
        Consumer(node.address, "off", "t", Inbox()),
        Consumer(node.address, "well", "t", Inbox()),
        AdminClient(node.address) as admin,
    ):
        for group in ("off", "well"):
            await rebalanced(node.address, group, members=1)
        await admin.change_group("off", consume_enable=False)
        examiner = Examiner(admin, watch_s=0)

        async def findings() -> dict[str, str]:
            return {row["group"]: row["findings"] for row in (await _look(admin, examiner)).groups}

        assert await findings() == {"off": "checking", "well": "checking"}

        async def is_seen() -> bool:
            return await findings() == {"off": "consumption_off", "well": "none"}

        await eventually(is_seen)
