"""docs/outgrowing.md followed: services and a Spark job move from Rocketlet to Apache's broker without loss or repeat."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from rocketlet.client import Consumer, Message, Producer, RetryLater
from rocketlet.testing import Broker

from bench.peers import Apache

from ..conftest import FOREIGN_S, eventually
from ..interop.conftest import fetch_apache
from ..interop.systems import HEAP
from ..support.pacing import pace

__all__ = ["fetch_apache"]
PAGE = (Path(__file__).parents[2] / "docs" / "outgrowing.md").read_text()
WALK = PAGE.partition("## Move a service")[2].partition("\n## ")[0]
FAILING = b"7"
SPARK_S = 300.0
"""The job may take so long to start and read. Ten seconds are usual."""
TWO_MINUTES = 6  # the delay level of two minutes
pytestmark = [
    pytest.mark.java,
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.skipif(
        shutil.which("java") is None or importlib.util.find_spec("pyspark") is None,
        reason="Java or PySpark is missing, which the job needs",
    ),
    pytest.mark.timeout(FOREIGN_S),
]
Child = asyncio.subprocess.Process


class Walker:
    """A reader who follows the page in an empty folder: its job, and its commands in turn, with the addresses of here."""

    def __init__(self, folder: Path, old: str, new: str) -> None:
        self._folder = folder
        self._addresses = {"rocketlet:9876": old, "apache:9876": new}
        self._read: dict[str, list[str]] = {}  # the bodies of each finished file
        self._steps = iter(re.findall(r"^ *```\n *(.+)\n *```", WALK, re.MULTILINE))
        # tests/docs/test_snippets runs each ```python; this job needs arguments, and does not end
        for title, job in re.findall(r'^```py title="(.+)"\n(.*?)^```', WALK, re.DOTALL | re.MULTILINE):
            (folder / title).write_text(job)

    def step(self, begin: str) -> list[str]:
        """The next command of the page, which begins so."""
        line = next(self._steps)
        assert line.startswith(begin), line
        for name, address in self._addresses.items():
            line = line.replace(name, address)
        program, *words = line.split()
        module = ("-m", "rocketlet.command.cli") if program == "rocketlet" else ()
        return [sys.executable, *module, *words]

    @asynccontextmanager
    async def runs(self, command: list[str], *, is_read: bool = False) -> AsyncIterator[Child]:
        """It is killed at the end, if nobody has ended it. Its output goes into a file, because Spark's machine would keep a
        pipe open, unless it is read."""
        with (self._folder / "log").open("ab") as log:
            output = subprocess.PIPE if is_read else log
            child = await asyncio.create_subprocess_exec(*command, cwd=self._folder, stdout=output, stderr=log)
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def says(self, command: list[str]) -> str:
        async with self.runs(command, is_read=True) as child:
            out, _ = await child.communicate()
            return out.decode()

    def rows(self) -> Counter[bytes]:
        """How often each body is in the job's files, of those that Spark lists as finished."""
        from pyarrow import parquet

        lists = self._folder.glob("figures-*/rows/_spark_metadata/[0-9]*")
        files = {json.loads(line)["path"] for one in lists for line in one.read_text().splitlines()[1:]}
        for file in files - self._read.keys():
            self._read[file] = parquet.read_table(file.removeprefix("file://"))["body"].to_pylist()
        return Counter(body.encode() for bodies in self._read.values() for body in bodies)

    async def has_rows(self, numbers: range) -> None:
        """Returns when the job's files have these numbers, perhaps more than once."""
        async with asyncio.timeout(SPARK_S):
            while self.rows().keys() != numbered(numbers).keys():
                await pace(0.2)


class Service:
    """Counts what it has handled. The first try of `failing` fails; the next comes two minutes later."""

    def __init__(self, group: str, failing: bytes | None = None) -> None:
        self._group = group
        self._failing = failing
        self.handled: Counter[bytes] = Counter()

    async def _handle(self, message: Message) -> RetryLater | None:
        if message.body == self._failing and not message.reconsume_times:
            return RetryLater(delay_level=TWO_MINUTES)
        self.handled[message.body] += 1
        return None

    def at(self, address: str) -> Consumer:
        return Consumer(address, self._group, "orders", self._handle, start="first")


def numbered(numbers: range) -> Counter[bytes]:
    return Counter(b"%d" % number for number in numbers)


async def sell(address: str, numbers: range) -> None:
    async with Producer(address) as producer:
        for number in numbers:
            await producer.send("orders", b"%d" % number)


async def test_services_and_their_spark_job_move_and_each_message_is_handled_once(
    tmp_path: Path, fetch_apache: Callable[[str], None]
) -> None:
    await asyncio.to_thread(fetch_apache, "4.9.7")
    shop, audit = Service("shop", FAILING), Service("audit")
    async with Broker() as old, Apache(tmp_path, "4.9.7", HEAP) as new:
        old.create_topic("orders", queues=4)
        walker = Walker(tmp_path, old.address, new.address)
        async with walker.runs(walker.step("python")) as job, walker.runs(walker.step("rocketlet mirror")) as mirror:
            async with shop.at(old.address), audit.at(old.address):
                await sell(old.address, range(200))
                await eventually(lambda: shop.handled + Counter([FAILING]) == audit.handled == numbered(range(200)))
            await sell(old.address, range(200, 400))
            await walker.has_rows(range(400))
            show = walker.step("rocketlet groups show figures")
            async with asyncio.timeout(SPARK_S):
                while "orders: 0 messages behind" not in await walker.says(show):
                    assert job.returncode is None
                    await pace(0.5)
            assert walker.rows() == numbered(range(400))
            job.terminate()
            await job.wait()
            mirror.send_signal(signal.SIGINT)
            assert await mirror.wait() == 0
        mirror_again = walker.step("rocketlet mirror")
        assert "the group shop has 1 message to retry" in await walker.says(mirror_again)
        async with shop.at(old.address):
            old.clock.advance(minutes=2)
            await eventually(lambda: FAILING in shop.handled)
        assert "messages to retry" not in await walker.says(mirror_again)

        async with walker.runs(walker.step("python")), shop.at(new.address), audit.at(new.address):
            await sell(new.address, range(400, 500))
            every = numbered(range(500))
            await eventually(lambda: shop.handled.keys() == audit.handled.keys() == every.keys())
            await walker.has_rows(range(500))
    assert (shop.handled, audit.handled, walker.rows()) == (every, every, every)
