"""examples/exactly_once.py in processes of its own that are killed, frozen and cut off while messages come.

EXACTLY_ONCE_RUNS=200 runs more seeds, EXACTLY_ONCE_FIRST=1000 others. EXACTLY_ONCE_FREEZE_S=25 freezes and cuts off beyond
the lease. A member is cut off by stopping the proxy between it and the broker: its sockets stay open and silent.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pwd import getpwnam
from typing import Any

import pytest
from rocketlet.client import Producer

from ..conftest import Node, Wire, create_topic, eventually
from ..support.pacing import pause_at_random

sqlalchemy = pytest.importorskip("sqlalchemy")

EXAMPLE = Path(__file__).parents[2] / "examples" / "exactly_once.py"
PROXY = (sys.executable, "-m", "rocketlet.command.cli", "dump")
FIRST = int(os.environ.get("EXACTLY_ONCE_FIRST", "0"))
RUNS = int(os.environ.get("EXACTLY_ONCE_RUNS", "1"))
FREEZE_S = float(os.environ.get("EXACTLY_ONCE_FREEZE_S", "0.2"))
MESSAGES = 240


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}?timeout=60"
        return
    pytest.importorskip("psycopg")
    if (programs := postgres_programs()) is None:
        pytest.skip("needs PostgreSQL, of Debian's package postgresql, and for root its user postgres")
    with running_postgres(programs) as address:
        yield address


def postgres_programs() -> Path | None:
    """Where initdb and pg_ctl are. PostgreSQL does not run as root."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    try:
        getpwnam("postgres")
    except KeyError:
        return None
    return found[-1].parent if found else None


@contextmanager
def running_postgres(programs: Path) -> Iterator[str]:
    """A server of its own, on a socket in its folder; its URL."""
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="rocketlet-postgres-"))
    if user is not None:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True)

    data = str(folder / "data")
    run(str(programs / "initdb"), "-D", data, "-A", "trust", "-U", "ledger", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    run(str(programs / "pg_ctl"), "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql+psycopg://ledger@/postgres?host={folder}"
    finally:
        run(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


class Member:
    """The example, and the proxy between it and the broker."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.proxy: Process | None = None

    async def start(self, address: str, url: str) -> None:
        dump = (*PROXY, "0", "--to", address, "--only", "UNREGISTER_CLIENT")
        self.proxy = await asyncio.create_subprocess_exec(*dump, stdout=PIPE)
        line = await _first_line(self.proxy)  # give clients 127.0.0.1:PORT; ...
        command = (sys.executable, str(EXAMPLE), line.split(";")[0].split()[-1], url, "t")
        self.process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert await _first_line(self.process) == "ready"

    async def end(self) -> None:
        for process in (self.process, self.proxy):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def _first_line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().rstrip()


async def disturb(chance: random.Random, address: str, url: str, members: list[Member]) -> None:
    """Kills one and starts another, freezes one, or cuts it off."""
    victim = chance.randrange(len(members))
    how = chance.choice(("kill", "freeze", "cut off"))
    if how == "kill":
        await members[victim].end()
        members[victim] = Member()
        await members[victim].start(address, url)
    else:
        stopped = members[victim].process if how == "freeze" else members[victim].proxy
        assert stopped is not None
        stopped.send_signal(signal.SIGSTOP)
        await pause_at_random(chance, FREEZE_S)
        stopped.send_signal(signal.SIGCONT)


def loaded(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_members_that_start_together_make_the_tables_once(url: str) -> None:
    """Another member makes each table between this one's look and its own try."""
    example = loaded(EXAMPLE)
    mine, another = sqlalchemy.create_engine(url), sqlalchemy.create_engine(url)
    tables = list(example.metadata.sorted_tables)

    def quicker(table: Any, connection: Any, **options: Any) -> None:
        if connection.engine is mine:
            table.create(another)

    for table in tables:
        sqlalchemy.event.listen(table, "before_create", quicker)
    example.make_tables(mine)
    assert set(sqlalchemy.inspect(mine).get_table_names()) == {table.name for table in tables}
    mine.dispose()
    another.dispose()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
async def test_every_message_is_in_the_table_once(node: Node, wire: Wire, url: str, seed: int) -> None:
    chance = random.Random(seed)
    await create_topic(wire, "t", 4)
    engine = sqlalchemy.create_engine(url)

    def rows() -> list[str]:
        with engine.begin() as database:
            return list(database.execute(sqlalchemy.text("select body from payments")).scalars())

    members = [Member() for _ in range(3)]
    try:
        starts = (member.start(node.address, url) for member in members)
        assert await asyncio.gather(*starts, return_exceptions=True) == [None, None, None]
        async with Producer(node.address) as producer:
            for number in range(MESSAGES):
                await producer.send("t", f"{seed}-{number}".encode())
                if number % 60 == 30:
                    await disturb(chance, node.address, url, members)
        wanted = {f"{seed}-{number}" for number in range(MESSAGES)}
        await eventually(lambda: wanted <= set(rows()), timeout_s=120)
    finally:
        await asyncio.gather(*(member.end() for member in members))
    mine = [body for body in rows() if body.startswith(f"{seed}-")]
    assert len(mine) == MESSAGES
    engine.dispose()
