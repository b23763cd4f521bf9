"""examples/exactly_once.py in processes of its own that are killed and frozen while messages come.

EXACTLY_ONCE_RUNS=200 runs more seeds, EXACTLY_ONCE_FREEZE_S=25 freezes beyond the lease, EXACTLY_ONCE_URL names another
database than SQLite; its tables must be empty.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest
from rocketlet.client import Producer

from ..conftest import Node, Wire, create_topic, eventually

sqlalchemy = pytest.importorskip("sqlalchemy")

EXAMPLE = Path(__file__).parents[2] / "examples" / "exactly_once.py"
RUNS = int(os.environ.get("EXACTLY_ONCE_RUNS", "1"))
FREEZE_S = float(os.environ.get("EXACTLY_ONCE_FREEZE_S", "0.2"))
MESSAGES = 240


async def member(address: str, url: str) -> Process:
    process = await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), address, url, "t", stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def end(process: Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        await process.wait()


async def disturb(chance: random.Random, address: str, url: str, members: list[Process]) -> None:
    """Kills one and starts another, or freezes one."""
    victim = chance.randrange(len(members))
    if chance.random() < 0.5:
        await end(members[victim])
        members[victim] = await member(address, url)
    else:
        members[victim].send_signal(signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(0, FREEZE_S))
        members[victim].send_signal(signal.SIGCONT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(RUNS))
async def test_every_message_is_in_the_table_once(node: Node, wire: Wire, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    url = os.environ.get("EXACTLY_ONCE_URL", f"sqlite:///{tmp_path / 'ledger.db'}?timeout=60")
    await create_topic(wire, "t", 4)
    engine = sqlalchemy.create_engine(url)

    def rows() -> list[str]:
        with engine.begin() as database:
            return list(database.execute(sqlalchemy.text("select body from payments")).scalars())

    members = list(await asyncio.gather(*(member(node.address, url) for _ in range(3))))
    try:
        async with Producer(node.address) as producer:
            for number in range(MESSAGES):
                await producer.send("t", f"{seed}-{number}".encode())
                if number % 60 == 30:
                    await disturb(chance, node.address, url, members)
        wanted = {f"{seed}-{number}" for number in range(MESSAGES)}
        await eventually(lambda: wanted <= set(rows()), timeout_s=120)
    finally:
        await asyncio.gather(*map(end, members))
    mine = [body for body in rows() if body.startswith(f"{seed}-")]
    assert len(mine) == MESSAGES
    engine.dispose()
