"""The bar that says how far a copy is."""

from __future__ import annotations

import asyncio
import os
import pty
import sys

import pytest
from rocketlet.client import Producer
from rocketlet.command.plumbing.bar import WIDTH, bar
from rocketlet.migration.mirror import MirrorProgress
from rocketlet.testing import Broker


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
