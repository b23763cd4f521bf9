"""The recipe of docs/spark.md, examples/spark_exactly_once.py, under kills: ROCKETLET_KILLS of them (1 by default)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ..conftest import eventually
from ..support.pacing import pause_at_random
from .running import MARKS, fill

pytestmark = [pytest.mark.timeout(1800), *MARKS]
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_exactly_once.py"
KILLS = int(os.environ.get("ROCKETLET_KILLS", "1"))
MESSAGES = 2000 + 1000 * KILLS  # a run writes some batches of 200 before it is killed
SEED = int(os.environ.get("ROCKETLET_SEED", "1"))


class Job:
    """The example as a process group of its own."""

    def __init__(self, address: str, folder: Path) -> None:
        self._arguments = (sys.executable, str(EXAMPLE), address, "t", str(folder / "out"))
        self._log = folder / "log"

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            )

    async def kill(self) -> None:
        os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()

    async def end(self) -> str:
        output, _ = await asyncio.wait_for(self._child.communicate(), 300)
        assert self._child.returncode == 0, self._log.read_text()[-3000:]
        return output.decode()


def written(folder: Path) -> int:
    """How many batches the database has."""
    if not (folder / "out" / "messages.db").exists():
        return 0
    with closing(sqlite3.connect(folder / "out" / "messages.db", timeout=60)) as database:
        found = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'batches'").fetchone()[0]
        return int(database.execute("SELECT count(*) FROM batches").fetchone()[0]) if found else 0


def has_more_than(folder: Path, count: int) -> bool:
    return written(folder) > count


async def test_each_message_is_once_in_the_table_in_delta_and_in_parquet(address: str, tmp_path: Path) -> None:
    await asyncio.to_thread(fill, address, range(MESSAGES))
    job, chance = Job(address, tmp_path), random.Random(SEED)
    for _ in range(KILLS):
        before = written(tmp_path)
        await job.start()
        await eventually(partial(has_more_than, tmp_path, before), 200)
        await pause_at_random(chance, 0.5)
        await job.kill()
    await job.start()
    assert f"{MESSAGES} messages in the table, {MESSAGES} in Delta, {MESSAGES} in Parquet" in await job.end()
    with closing(sqlite3.connect(tmp_path / "out" / "messages.db")) as database:
        numbers = Counter(int(body) for (body,) in database.execute("SELECT body FROM messages"))
    assert numbers == Counter(range(MESSAGES))
    parquet = pq.read_table(tmp_path / "out" / "parquet", columns=["body"])
    for table in (parquet, DeltaTable(tmp_path / "out" / "delta").to_pyarrow_table(columns=["body"])):
        assert Counter(int(body) for body in table.column("body").to_pylist()) == Counter(range(MESSAGES))
