"""Runs commands as a shell would, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import orjson
import pytest
import structlog
from rocketlet.command.cli import main
from rocketlet.command.plumbing import logs

from ..conftest import Node


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, object]]:
        """The output with --json."""
        return [orjson.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Awaitable[Ran]]


@pytest.fixture
def run_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Node], Run]]:
    """`await run_on(node)("topics", "list")` asks the cluster of a node."""
    # the broker of this process logs, too: not into what commands print
    monkeypatch.setattr(logs, "configure", lambda level: None)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    def on(node: Node) -> Run:
        async def ran(*arguments: str) -> Ran:
            capsys.readouterr()
            status = await asyncio.to_thread(main, [*arguments, "--nameserver", node.address])
            return Ran(status, *capsys.readouterr())

        return ran

    yield on
    structlog.reset_defaults()


@pytest.fixture
def run(node: Node, run_on: Callable[[Node], Run]) -> Run:
    """`await run("topics", "list")` asks the cluster of `node`."""
    return run_on(node)
