"""Texts of others reach a terminal as text, never as something that the terminal obeys."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from rocketlet.command.cli import main
from rocketlet.protocol.frame import Frame, FrameReader, encode

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
