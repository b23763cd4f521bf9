"""Everybody moves from Rocketlet to Apache's broker and back under load, and each step is killed with SIGKILL again and
again before it may end.

`rocketlet move` runs as a process. The groups have a Python member, a Java member and a Spark query. MOVE_TO names Apache's
version. A fault is: a message that a group never handles or handles twice, and a step that does not end.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

import uvloop
from rocketlet.client import AdminClient, Consumer, Message, Producer, RetryLater, RocketletError
from rocketlet.testing.ports import free_port

from bench.peers import Apache, compiled, java_options
from tests.interop.systems import HEAP, SETTINGS

from ._process import BrokerProcess
from .common import Limit, Outcome

DEFAULT_COUNT = 1
TOPIC = "orders"
QUEUES = 4
PAUSE_S = 0.01  # between two messages
KILLS = 6  # a step is killed so often before it may end
LIVES_S = (0.3, 1.5)  # how long a step runs before it is killed
WORKS_S = 5.0  # how long everybody works at one place
STARTS_S = 180.0  # a member's start, Spark's among them
STEP_S = 240.0  # producers hear of it within 30 s, and then it is quiet for 35 s
RETRIED_SHARE = 0.02
GROUPS = ("py", "jv", "sp")

SPARK = """
import os, sys, threading
import rocketlet.spark
from pyspark.sql import SparkSession
name_server, folder = sys.argv[1:]
os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
rocketlet.spark.register(spark)
rows = spark.readStream.format("rocketlet").options(nameServer=name_server, topic="orders", group="sp").load()
def write(batch, number):
    for row in batch.selectExpr("cast(body as string) as body").collect():
        print("HANDLED sp 0", row.body, 0, 0, flush=True)
    print("STARTED", flush=True)
query = rows.writeStream.foreachBatch(write).option("checkpointLocation", folder).start()
sys.stdin.read()
query.stop()
"""


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"sent": 0, "kills": 0, "moved": 0, "missing": 0, "twice": 0})
    chance = random.Random(seed)
    for number in limit:
        try:
            uvloop.run(_Journey(folder / str(number), chance, outcome).go())
        except Exception as error:
            outcome.fault(f"{type(error).__name__}: {error}".replace(str(folder), ""))
        outcome.tried += 1
    return outcome


class _Foreign:
    """A process that says STARTED or DONE, and then HANDLED, name, queue, body; it leaves when its input ends."""

    def __init__(self, handled: Counter[str]) -> None:
        self._handled = handled
        self.started = asyncio.Event()

    @asynccontextmanager
    async def running(self, command: list[str], first: bytes = b"") -> AsyncIterator[None]:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        process.stdin.write(first)
        reading = asyncio.create_task(self._read(process))
        try:
            async with asyncio.timeout(STARTS_S):
                await self.started.wait()
            yield
        finally:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(STARTS_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
            await reading

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            words = line.decode().split()
            if words[:1] in (["STARTED"], ["DONE"]):
                self.started.set()
            elif words[:1] == ["HANDLED"]:
                self._handled[words[3]] += 1


class _Journey:
    """One way there and back."""

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._handled = {group: Counter[str]() for group in GROUPS}
        self._sent = 0
        self._lives = 0

    async def go(self) -> None:
        async with (
            BrokerProcess(self._folder / "ours", free_port(), "--log-level", "error") as ours,
            Apache(self._folder, os.environ.get("MOVE_TO", "4.9.7"), HEAP, **SETTINGS) as apache,
        ):
            async with AdminClient(ours.address) as admin:
                await admin.create_topic(TOPIC, queues=QUEUES)
            sending = asyncio.create_task(self._send([ours.address, apache.address]))
            await self._move(ours.address, apache.address)
            await self._move(apache.address, ours.address, "--back")
            async with AsyncExitStack() as members:
                await self._join(members, ours.address)
                await asyncio.sleep(WORKS_S)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await self._caught_up(GROUPS)
        self._judge()

    def _judge(self) -> None:
        figures = self._outcome.figures
        figures["sent"] += self._sent
        for group, handled in self._handled.items():
            missing = [number for number in range(self._sent) if str(number) not in handled]
            twice = sorted(body for body, count in handled.items() if count > 1)
            figures["missing"] += len(missing)
            figures["twice"] += len(twice)
            if missing:
                self._outcome.fault(f"{group}: messages are missing, as {missing[:3]}")
            if twice:
                self._outcome.fault(f"{group}: messages were handled twice, as {twice[:3]}")

    async def _send(self, addresses: list[str]) -> None:
        """Where a send is refused, it goes on at the other address."""
        for address in cycle(addresses):
            async with Producer(address, retries=0) as producer:
                with suppress(RocketletError):
                    while True:
                        await producer.send(TOPIC, b"%d" % self._sent)
                        self._sent += 1
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(0.2)

    async def _move(self, source: str, target: str, *options: str) -> None:
        async with AsyncExitStack() as members:
            await self._join(members, source)
            await asyncio.sleep(WORKS_S)
            await self._step(source, target, *options)
            await self._step(source, target, *options, "--producers")
            await self._caught_up(("sp",), source)
        for group in GROUPS:
            await self._step(source, target, *options, "--group", group)

    async def _caught_up(self, groups: tuple[str, ...], source: str | None = None) -> None:
        """A group has handled all that was sent, or all that its source has: a query that ends in a batch reads it again."""
        async with asyncio.timeout(STARTS_S):
            if source is None:
                while any(len(self._handled[group]) < self._sent for group in groups):
                    await asyncio.sleep(0.2)
                return
            async with AdminClient(source) as admin:
                for group in groups:
                    while any(item.lag for item in (await admin.progress(group, times=False)).values()):
                        await asyncio.sleep(0.2)

    async def _join(self, members: AsyncExitStack, address: str) -> None:
        """A member of each group, which leaves with the stack."""
        self._lives += 1
        java = ["java", *java_options(), "-Xmx128m", "-cp", await compiled("Churn.java"), "Churn", address, "jv", TOPIC]
        spark = [sys.executable, "-c", SPARK, address, str(self._folder / f"checkpoint-{self._lives}")]
        first = f"join java-{self._lives} {TOPIC}\n".encode()
        await asyncio.gather(
            members.enter_async_context(_Foreign(self._handled["jv"]).running([*java, "0", "4"], first)),
            members.enter_async_context(_Foreign(self._handled["sp"]).running(spark)),
        )
        await members.enter_async_context(Consumer(address, "py", TOPIC, self._handle, start="first"))

    def _handle(self, message: Message) -> RetryLater | None:
        if not message.reconsume_times and self._chance.random() < RETRIED_SHARE:
            return RetryLater()
        self._handled["py"][message.body.decode()] += 1
        return None

    async def _step(self, source: str, target: str, *options: str) -> None:
        """A step of the move: begun and killed, and at last left to end."""
        command = [sys.executable, "-m", "rocketlet.command.cli", "move", "--from", source, "--to", target, *options]
        for kills_left in reversed(range(KILLS + 1)):
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            try:
                async with asyncio.timeout(self._chance.uniform(*LIVES_S) if kills_left else STEP_S):
                    said, _ = await process.communicate()
            except TimeoutError:
                process.kill()
                await process.communicate()
                self._outcome.figures["kills"] += 1
                if not kills_left:
                    raise RuntimeError(f"the step {' '.join(options)} does not end") from None
                continue
            if process.returncode:
                raise RuntimeError(f"the step {' '.join(options)} fails: {said.decode().strip()}")
        self._outcome.figures["moved"] += 1
