"""Brokers in processes of their own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S

RUN = "import sys; from rocketlet.command import cli; sys.exit(cli.main(sys.argv[1:]))"


class Process:
    def __init__(self, child: asyncio.subprocess.Process, address: str) -> None:
        self.child = child
        self.address = address
        self.output = b""

    async def ready(self) -> None:
        assert self.child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"ready" not in self.output:
                line = await self.child.stdout.readline()
                assert line, "the broker ended before it was ready"
                self.output += line

    async def kill(self) -> None:
        self.child.kill()
        await self.child.communicate()

    async def end(self) -> tuple[bytes, bytes]:
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            out, err = await self.child.communicate()
        return self.output + out, err


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    running: list[Process] = []

    async def start_broker(*options: str, port: int | None = None, before: str = "pass", program: str = RUN) -> Process:
        """`before` is done in the new process, whose descriptors are few, unlike those of this one."""
        port = port or free_port()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"{before}; {program}", "start", "--host", "127.0.0.1", "--port", str(port),
            "--data", str(tmp_path / "data"), *options,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        running.append(Process(child, f"127.0.0.1:{port}"))
        await running[-1].ready()
        return running[-1]

    yield start_broker
    for process in running:
        if process.child.returncode is None:
            await process.kill()


Start = Callable[..., "asyncio.Future[Process]"]
