"""A broker as a process, for campaigns that kill it or take its descriptors."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import PullMessage, write
from rocketlet.protocol.message import decode_records

from tests.conftest import Wire

from ._ledger import Place

PROGRAM = ("-m", "rocketlet.command.cli")
READY_S = 60.0
PIPE_BYTES = 1 << 30
"""How much of a process's unread output is kept. Behind a full pipe it would stand still."""
SUBSCRIBED = 4  # the pull brings its subscription


class BrokerProcess:
    """`async with`: started, ready, and killed at the end if it still runs. `log` is what it wrote to stderr."""

    def __init__(
        self, folder: Path, port: int, *options: str, open_files: int | None = None, command: str = "start"
    ) -> None:
        self._command = command
        self._folder = folder
        self._port = port
        self._options = options
        self._open_files = open_files
        self._child: asyncio.subprocess.Process | None = None
        self.address = f"127.0.0.1:{port}"
        self.log = b""

    async def __aenter__(self) -> BrokerProcess:
        command = [
            self._command,
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--no-vip",
            "--data",
            str(self._folder),
        ]
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, *PROGRAM, *command, *self._options,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=PIPE_BYTES, preexec_fn=self._limit(),
        )  # fmt: skip
        assert self._child.stdout is not None
        async with asyncio.timeout(READY_S):
            while b"ready" not in (line := await self._child.stdout.readline()):
                if not line:
                    raise RuntimeError(f"the broker did not start: {(await self._child.communicate())[1].decode()}")
        return self

    def _limit(self) -> Callable[[], None] | None:
        limit = self._open_files
        return None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    async def __aexit__(self, *exception: object) -> None:
        if self._child is not None and self._child.returncode is None:
            await self.kill()

    def move(self, port: int) -> None:
        """Its next start is on this port."""
        self._port = port
        self.address = f"127.0.0.1:{port}"

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._child is not None
        self._child.kill()
        self.log += (await self._child.communicate())[1]

    def signal(self, number: int) -> None:
        assert self._child is not None
        self._child.send_signal(number)

    async def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self._child is not None
        self._child.terminate()
        async with asyncio.timeout(READY_S):
            self.log += (await self._child.communicate())[1]
        return self._child.returncode or 0


async def pull_all(address: str, topic: str, ends: dict[int, int]) -> dict[Place, bytes]:
    """The messages of queues from the offsets in `ends` on, which are moved to the queues' ends."""
    host, _, port = address.rpartition(":")
    wire = Wire(*await asyncio.open_connection(host, int(port)))
    found: dict[Place, bytes] = {}
    try:
        for queue in ends:
            while True:
                header = PullMessage("check", topic, queue, ends[queue], 32, SUBSCRIBED, 0, 0, subscription="*")
                answer = await wire.call(RequestCode.PULL_MESSAGE, write(header))
                offset = int(str(answer.ext.get("nextBeginOffset", ends[queue])))
                for record in decode_records(answer.body) if answer.code == 0 else ():
                    found[topic, queue, record.queue_offset] = record.body
                if offset <= ends[queue]:
                    break
                ends[queue] = offset
    finally:
        await wire.close()
    return found
