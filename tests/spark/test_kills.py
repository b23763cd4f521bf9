"""A query that is killed at random, while another member of its group comes and goes, loses nothing and doubles nothing.

ROCKETLET_KILLS: how many times (2 by default, an executor and all; 50 is the full test), ROCKETLET_SEED: which.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from rocketlet.client import Consumer, Message, Producer

from ..support.pacing import pace, pause_at_random
from .running import MARKS, fill

pytestmark = [pytest.mark.timeout(3600), *MARKS]
KILLS = int(os.environ.get("ROCKETLET_KILLS", "2"))
SEED = int(os.environ.get("ROCKETLET_SEED", "9"))
RATE = 200


class Job:
    """The job as a process group of its own."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, mode: str = "forever") -> None:
        arguments = (sys.executable, "-m", "tests.spark.killed_job", self._address, str(self._folder), mode)
        with (self._folder / "job.log").open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(self._folder / "work")},
            )
        assert self._child.stdout is not None
        self.said = self._child.stdout

    async def line(self, *words: str) -> str:
        """The next line of these kinds; empty if the job ended."""
        async with asyncio.timeout(600):
            while True:
                line = (await self.said.readline()).decode()
                if not line or line.split()[0] in words:
                    return line

    async def end(self) -> int:
        assert self._child is not None
        async with asyncio.timeout(600):
            await self.said.read()
            return await self._child.wait()

    def log(self) -> str:
        return (self._folder / "job.log").read_text()[-4000:]

    async def kill(self) -> None:
        """Driver, executors and workers, all at the same time."""
        assert self._child is not None
        for pid in (self._child.pid, *self._processes()):
            _kill(pid)
        await self._child.wait()

    def kill_executor(self) -> bool:
        """One executor; its tasks are retried by another one."""
        executors = [pid for pid in self._processes() if b"CoarseGrainedExecutorBackend" in _command(pid)]
        if executors:
            _kill(random.choice(executors))
        return bool(executors)

    def _processes(self) -> list[int]:
        """Those of the job's session."""
        assert self._child is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                except (OSError, IndexError):
                    continue
                if session == self._child.pid:
                    found.append(int(entry.name))
        return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Traffic:
    """Sends numbers, and handles some of them as a member that comes and goes."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self.sent = 0
        self.handled: Counter[int] = Counter()

    async def send(self) -> None:
        async with Producer(self._address) as producer:
            while True:
                await asyncio.gather(*(producer.send("t", b"%d" % (self.sent + at)) for at in range(RATE // 10)))
                self.sent += RATE // 10
                await pace(0.1)

    async def come_and_go(self) -> None:
        while True:
            await pause_at_random(self._random, 10)
            async with Consumer(self._address, "g", "t", self._handle, start="first"):
                await pause_at_random(self._random, 3)

    async def _handle(self, message: Message) -> None:
        self.handled[int(message.body)] += 1


async def test_killed_at_random_points_nothing_is_lost_or_doubled(address: str, tmp_path: Path) -> None:
    print(f"{KILLS} kills, ROCKETLET_SEED={SEED}")
    (tmp_path / "batches").mkdir()
    await asyncio.to_thread(fill, address, range(0), "t")
    traffic, job = Traffic(address, SEED), Job(address, tmp_path)
    tasks = [asyncio.create_task(traffic.send()), asyncio.create_task(traffic.come_and_go())]
    await job.start()
    try:
        killed = await kill_at_random(job)
        await job.line("written")
    finally:
        await job.kill()
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await job.start("available-now")
    assert await job.end() == 0, job.log()
    check(traffic, tmp_path)
    print(f"{traffic.sent} sent, {sum(traffic.handled.values())} handled by the other member, killed: {dict(killed)}")


async def kill_at_random(job: Job) -> Counter[str]:
    """How often at which point. The job runs at the end."""
    chance = random.Random(SEED)
    killed: Counter[str] = Counter()
    while killed.total() < KILLS:
        point = chance.choice(["any time", "begun", "written", "executor"])
        assert await job.line("written"), job.log()  # it works
        if point in ("begun", "written"):
            await job.line(point)
        else:
            await pause_at_random(chance, 4)
        if point == "executor":
            killed[point] += job.kill_executor()
            continue
        await job.kill()
        killed[point] += 1
        await job.start()
        print(dict(killed), flush=True)
    return killed


def check(traffic: Traffic, folder: Path) -> None:
    batches = [json.loads(path.read_text()) for path in (folder / "batches").glob("*.json")]
    offsets = Counter((queue, offset) for rows in batches for queue, offset, _ in rows)
    assert max(offsets.values()) == 1, "the query read an offset in two batches"
    numbers = {int(body) for rows in batches for _, _, body in rows}
    assert numbers | traffic.handled.keys() >= set(range(traffic.sent)), "lost"
    assert set(traffic.handled.values()) <= {1}, "the other member handled a message twice"
