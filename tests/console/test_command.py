"""`rocketlet console`, and `rocketlet start --console-port`, as processes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from rocketlet.command.cli import main

from ..conftest import PATIENCE_S, Node
from .conftest import Site


@asynccontextmanager
async def running(*arguments: str, word: str) -> AsyncIterator[Site]:
    """A command; the site at the URL that it prints behind a word. It must end at SIGTERM, even while a page is open."""
    command = [sys.executable, "-m", "rocketlet.command.cli", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while True:
            line = (await process.stdout.readline()).decode()
            assert line, "it ended without a word"
            if word in line:
                break
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        url = "http" + line.rpartition("http")[2].strip()
        async with http.stream("GET", f"{url}/groups", headers={"accept": "text/event-stream"}) as page:
            lines = page.aiter_lines()
            assert (await anext(lines)).startswith("event: live_groups")
            yield Site(url, http)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0


async def test_a_console_of_its_own_serves_a_cluster_and_ends(node: Node) -> None:
    options = ("console", "--nameserver", node.address, "--port", "0", "--read-only")
    async with running(*options, word="console is ready on") as site:
        assert site.url.startswith("http://127.0.0.1:")
        page = await site.get("/brokers")
        assert "broker-a" in page
        assert "read-only" in page


async def test_a_broker_starts_with_its_console(tmp_path: Path) -> None:
    options = ("start", "--port", "0", "--data", str(tmp_path), "--console-port", "0")
    async with running(*options, word="  Console  ") as site:
        assert "broker-a" in await site.get("/brokers")


async def test_a_console_port_in_use_keeps_a_broker_from_serving_anybody(tmp_path: Path, node: Node) -> None:
    port = node.address.rpartition(":")[2]
    command = [sys.executable, "-m", "rocketlet.command.cli", "start", "--port", "0", "--data", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command, "--console-port", port, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, complained = await process.communicate()
    assert (process.returncode, b"is ready" in said, b"broker_registered" in said + complained) == (1, False, False)
    assert f"rocketlet: cannot listen on 127.0.0.1:{port}".encode() in complained


async def test_what_keeps_a_console_from_starting_is_one_line(
    node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.command.plumbing.logs.configure", lambda level: None)
    port = node.address.rpartition(":")[2]
    assert await asyncio.to_thread(main, ("console", "--nameserver", node.address, "--port", port)) == 1
    assert f"rocketlet: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    monkeypatch.setattr("rocketlet.command.serving.console._NEEDED", ("no_such_package",))
    assert await asyncio.to_thread(main, ("console", "--nameserver", node.address, "--port", "0")) == 1
    assert "pip install '.[console]'" in capsys.readouterr().err
