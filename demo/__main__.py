"""The demo: `make demo`, or `python -m rocketlet.demo`.

A name server and two brokers are started; the flights are replayed; consumers of the group `departures` work on them
while one joins, one leaves, one is killed, and a Spark query is a member for a while; another Spark query computes
delays. At the end every flight is accounted for, and Spark's figures are compared with the file's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import uvloop
    from rich.console import Console
except ModuleNotFoundError as missing:
    raise ImportError("the demo needs its extra: pip install '.[demo]'") from missing

from ..client.admin.admin_client import AdminClient, changes, ownerships
from ..client.errors import RocketletError
from ..command.plumbing import logs
from ..protocol.bodies import queue_json
from ..protocol.names import Queue
from .accounting import (
    DIFFERENCES_SHOWN,
    Account,
    account,
    accounts_table,
    delays_table,
    differences,
    figures_of,
    figures_of_spark,
    received_count,
)
from .flights import TOTAL, read_flights
from .page import write_page
from .processes import Child, java_fault
from .replay import TOPIC, create_topic
from .screen import Screen
from .timeline import Mark, Sample, double_owned_ms, panel_of, read_told

QUEUES = 8
MOST_PER_S = 6000.0
LEAST_S = 24.0
STALL_S = 180.0  # Apache's brokers keep the queues of a killed member for 60 s
SPARK_START_S = 300.0  # two JVMs; a busy machine takes minutes
GROUP = "departures"
BROKERS = ("broker-a", "broker-b")
Cluster = contextlib.AbstractAsyncContextManager[str]
"""Running brokers; its value is the address of their name server."""
KILLED = "cem"
SPARK_JOINS = "Spark joins"


class Job:
    """One run. Data and logs go to `folder`, what you want to look at afterwards to `output`."""

    def __init__(
        self, flights: int, folder: Path, output: Path, *, with_spark: bool, apache: Callable[[Path], Cluster] | None
    ) -> None:
        self.flights = flights
        self.folder = folder
        self.output = output
        self.with_spark = with_spark
        self._apache = apache
        self._brokers = contextlib.AsyncExitStack()
        self._owners: dict[Queue, str] = {}
        self.rate = min(MOST_PER_S, flights / LEAST_S)
        self.names: dict[str, str] = {}
        self.marks: list[Mark] = []
        self.events: list[dict[str, Any]] = []
        self.samples: list[Sample] = []
        self.children: list[Child] = []
        self.members: dict[str, Child] = {}
        self.spark: Child | None = None
        self.name_server = ""
        self._replay: Child | None = None

    # Children

    async def child(self, name: str, module: str, *arguments: str) -> Child:
        command = (sys.executable, "-m", f"rocketlet.{module}", *arguments)
        environment = {"PYTHONUNBUFFERED": "1", "PYSPARK_PYTHON": sys.executable}
        child = await Child.start(command, self.folder / f"{name}.log", environment=environment)
        self.children.append(child)
        return child

    async def start_cluster(self) -> None:
        if self._apache is None:
            await self._start_rocketlet()
        else:
            self.name_server = await self._brokers.enter_async_context(self._apache(self.folder))
        await create_topic(self.name_server, QUEUES, len(BROKERS))

    async def _start_rocketlet(self) -> None:
        server = await self.child("nameserver", "command.cli", "nameserver", "--host", "127.0.0.1", "--port", "0")
        self.name_server = (await server.wait_for("ready")).split()[-1]
        brokers = [
            await self.child(
                name, "command.cli", "broker", "--host", "127.0.0.1", "--port", "0", "--name", name,
                "--nameserver", self.name_server, "--data", str(self.folder / name),
            )
            for name in BROKERS
        ]  # fmt: skip
        for broker in brokers:
            await broker.wait_for("ready")

    async def start_member(self, name: str) -> None:
        received = self.folder / f"received-{name}.ids"
        child = await self.child(
            name, "demo.member", "--nameserver", self.name_server, "--received", str(received),
            "--notes", str(self.folder / f"notes-{name}.jsonl"),
        )  # fmt: skip
        self.members[name] = child
        self.names[(await child.wait_for("ready")).split()[-1]] = name

    async def start_spark(self) -> None:
        self.spark = await self.child(
            "spark", "demo.spark_job", "--nameserver", self.name_server, "--output", str(self.folder)
        )

    def mark(self, text: str) -> None:
        self.marks.append(Mark(int(time.time() * 1000), text))

    # The course of events

    async def run(self, screen: Screen) -> int:
        """Runs everything; returns the number of flights sent."""
        await self.start_cluster()
        kind = "Apache's" if self._apache is not None else "our"
        screen.event(f"{kind} name server on {self.name_server}, brokers {' and '.join(BROKERS)}, {2 * QUEUES} queues")
        if self.with_spark:
            await self.start_spark()
        for name in ("ada", "ben", "cem"):
            await self.start_member(name)
        screen.event("ada, ben and cem are members of departures")
        if self.spark is not None:
            await self.spark.wait_for("ready", SPARK_START_S)
            screen.event("Spark is up; its query delays has a group of its own")
        status = self.folder / "sent"
        self._replay = await self.child(
            "replay", "demo.replay", "--nameserver", self.name_server, "--flights", str(self.flights),
            "--rate", str(self.rate), "--status", str(status),
        )  # fmt: skip
        plan: list[tuple[float, Callable[[Screen], Awaitable[None]]]] = [
            (0.12, self._join),
            (0.28, self._leave),
            (0.42, self._spark_joins),
            (0.62, self._kill),
            (0.82, self._spark_leaves),
        ]
        await self._watch(screen, status, plan)
        await self._replay.wait(10)
        return int(status.read_text())

    async def _watch(
        self, screen: Screen, status: Path, plan: list[tuple[float, Callable[[Screen], Awaitable[None]]]]
    ) -> None:
        """Shows progress, lets the events of the plan happen at their part of the flights, ends when all are through."""
        last: tuple[int, ...] = ()
        moved_s = time.monotonic()
        pending: set[asyncio.Task[None]] = set()
        while True:
            counts = await self._counts(status)
            self.samples.append(Sample(int(time.time() * 1000), counts[0], counts[1]))
            owners = await self._look()
            screen.update(counts, owners, self.names)
            while plan and counts[1] >= plan[0][0] * self.flights:
                task = asyncio.ensure_future(plan.pop(0)[1](screen))
                pending.add(task)
            for task in [task for task in pending if task.done()]:
                pending.discard(task)
                task.result()
            if counts != last:
                last, moved_s = counts, time.monotonic()
            if time.monotonic() - moved_s > STALL_S:
                screen.event(f"nothing moved for {STALL_S:.0f} s; giving up")
                return
            if not plan and not pending and self._is_through(counts):
                return
            self._check_children()
            await asyncio.sleep(0.25)

    async def _counts(self, status: Path) -> tuple[int, ...]:
        sent = 0
        with contextlib.suppress(FileNotFoundError):
            sent = int(status.read_text())  # noqa: ASYNC240 (a few bytes)
        spark = sum(item.flights for item in figures_of_spark(self.folder).values())
        return sent, received_count(self.folder), spark

    def _is_through(self, counts: Sequence[int]) -> bool:
        if self._replay is None or self._replay.exit_status is None:
            return False
        spark_done = not self.with_spark or counts[2] >= self.flights
        return spark_done and counts[1] >= self.flights and account(GROUP, self.flights, self.folder).missing == 0

    async def _look(self) -> list[dict[str, Any]]:
        """The owner of each queue now; keeps the events that led there. Apache's brokers do not know, so it asks the
        members."""
        try:
            async with AdminClient(self.name_server) as admin:
                if self._apache is not None:
                    return self._note_owners((await admin.group(GROUP)).owners)
                reports = await admin.history(GROUP)
        except RocketletError:
            return []
        self.events = [{"broker": item["broker"], **event} for item in reports for event in item["events"]]
        return [owner for item in reports for owner in item["owners"] if owner["topic"] == TOPIC]

    def _note_owners(self, owners: Mapping[Queue, str]) -> list[dict[str, Any]]:
        mine = {queue: owner for queue, owner in owners.items() if queue.topic == TOPIC}
        self.events += changes(self._owners, mine, int(time.time() * 1000))
        self._owners = mine
        return [{**queue_json(queue), "clientId": owner} for queue, owner in mine.items()]

    def _check_children(self) -> None:
        for child in self.children:
            if child.exit_status not in (None, 0) and child.name != KILLED:
                raise RuntimeError(f"{child.name} ended with status {child.exit_status}: {child.last_words()}")

    async def _join(self, screen: Screen) -> None:
        await self.start_member("dot")
        self.mark("dot joins")
        screen.event("dot joined")

    async def _leave(self, screen: Screen) -> None:
        self.mark("ben leaves")
        await self.members["ben"].stop()
        screen.event("ben left gracefully")

    async def _kill(self, screen: Screen) -> None:
        self.mark(f"{KILLED} is killed")
        self.members[KILLED].kill()
        screen.event(f"{KILLED} was killed with SIGKILL")

    async def _spark_joins(self, screen: Screen) -> None:
        if self.spark is not None:
            await self.spark.tell("join")
            await self.spark.wait_for("done join")
            self.mark(SPARK_JOINS)
            screen.event("a Spark query joined departures")

    async def _spark_leaves(self, screen: Screen) -> None:
        if self.spark is not None:
            self.mark("Spark leaves")
            await self.spark.tell("leave")
            await self.spark.wait_for("done leave")
            screen.event("the Spark query left departures")

    async def stop(self) -> None:
        if self.spark is not None and self.spark.exit_status is None:
            with contextlib.suppress(TimeoutError, OSError):
                await self.spark.tell("stop")
                await self.spark.wait(20)
        others = [child for child in self.children if child.exit_status is None]
        for child in reversed(others):
            await child.stop()
        await self._brokers.aclose()

    # The end

    def result(self, console: Console, sent: int) -> int:
        """Prints the tables, draws the picture; the exit status."""
        departures = account(GROUP, sent, self.folder, KILLED)
        accounts = [departures]
        faults: list[str] = []
        if departures.missing:
            faults.append(f"{departures.missing} flights are missing in {GROUP}")
        if self.with_spark:
            file, spark = figures_of(read_flights(self.flights)), figures_of_spark(self.folder)
            rows = sum(item.flights for item in spark.values())
            accounts.append(Account("delays (Spark)", sent, min(rows, sent), max(rows - sent, 0), max(sent - rows, 0)))
            console.print(accounts_table(accounts))
            console.print(delays_table(file, spark))
            wrong = differences(file, spark)
            faults += wrong[:DIFFERENCES_SHOWN]
            console.print(
                f"Spark's table {'differs from' if wrong else 'equals'} the file's in all {len(file)} carriers and months"
            )
        else:
            console.print(accounts_table(accounts))
        self._draw(console, departures, sent)
        for fault in faults:
            console.print(f"FAULT: {fault}", style="bold red")
        return 1 if faults else 0

    def _draw(self, console: Console, departures: Account, sent: int) -> None:
        events = sorted(self.events, key=lambda event: event["ms"])
        spans = ownerships(events, TOPIC, int(time.time() * 1000))
        names = {span.owner: self.names.get(span.owner, "spark") for span in spans}
        overlap = double_owned_ms(spans)
        summary = (
            f"{sent:,} flights; {departures.duplicates} delivered twice, {departures.after_kill} of them because {KILLED} "
            f"was killed before it had committed them;\n{len(spans)} assignments of {2 * QUEUES} queues; "
            f"queues with two owners: {overlap} ms"
        )
        if self._apache is not None:
            summary += "\nApache's brokers do not tell who owns a queue: what members say when they are asked is drawn"
        for event in self.events:
            if event["event"] == "joined" and event["client"] not in self.names:
                self.marks = [mark for mark in self.marks if mark.text != SPARK_JOINS]
                self.marks.append(Mark(int(event["ms"]), SPARK_JOINS))
        told = read_told(self.folder.glob("notes-*.jsonl"), TOPIC)
        panel = panel_of(spans, self.marks, names, events=events, told=told, samples=self.samples)
        page = self.output / "rebalance.html"
        title = (
            f"{sent:,} flights, {len(self.marks)} changes of the group: {departures.missing} lost, "
            f"{departures.duplicates} delivered twice"
        )
        write_page(page, title, [panel], summary)
        console.print(summary, highlight=False, soft_wrap=True)
        console.print(f"page: {page}", soft_wrap=True)


def _apache_cluster() -> Callable[[Path], Cluster] | None:
    """Two of Apache's brokers. They are no part of the package: None outside of a clone of the repository, or without Java
    and Maven; says why."""
    try:
        from bench.peers import apache_cluster, apache_fault
    except ModuleNotFoundError:
        fault: str | None = "bench, which gets Apache's brokers, is in a clone of the repository"
    else:
        fault = apache_fault()
        if fault is None:
            return functools.partial(apache_cluster, names=BROKERS)
    print(f"rocketlet.demo: --on-apache cannot run here: {fault}", file=sys.stderr)
    return None


async def run(options: argparse.Namespace) -> int:
    apache = _apache_cluster() if options.on_apache else None
    if options.on_apache and apache is None:
        return 1
    fault = None if options.no_spark else java_fault()
    folder = Path(tempfile.mkdtemp(prefix="rocketlet-demo-"))
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    if fault:
        console.print(f"Spark is skipped: {fault}.", style="yellow")
    began_s = time.monotonic()
    with_spark = not fault and not options.no_spark
    job = Job(options.flights, folder, options.output, with_spark=with_spark, apache=apache)
    try:
        with Screen(options.flights, with_spark=job.with_spark) as screen:
            try:
                sent = await job.run(screen)
            finally:
                await job.stop()
        status = job.result(screen.console, sent)
        screen.console.print(f"{time.monotonic() - began_s:.0f} s")
    except (RuntimeError, TimeoutError, FileNotFoundError) as error:
        console.print(f"The demo failed: {error}\nLogs are in {folder}", style="red", soft_wrap=True)
        return 1
    if status == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="rocketlet.demo", description="a year of flights through a local cluster")
    parser.add_argument("--flights", type=_flights, default=TOTAL, help=f"how many, 1000 to {TOTAL}")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where the pictures go")
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--on-apache", action="store_true", help="the same on two of Apache's brokers; needs a clone")
    parser.add_argument(
        "--versus",
        action="store_true",
        help="instead: the same joins and leaves with Java members on Apache's broker and with ours, on one page",
    )
    options = parser.parse_args()
    logs.configure("error")
    return uvloop.run(versus(options.output) if options.versus else run(options))


async def versus(output: Path) -> int:
    """Measurements are no part of the package: they are in a clone of the repository."""
    try:
        from bench.versus import compare
    except ModuleNotFoundError:
        print(
            "rocketlet.demo: --versus measures Apache's broker; run `make demo ARGS=--versus` in a clone",
            file=sys.stderr,
        )
        return 1
    return await compare(output)


def _flights(text: str) -> int:
    number = int(text)
    if not 1000 <= number <= TOTAL:
        raise argparse.ArgumentTypeError(f"{number} flights; 1000 to {TOTAL} can be replayed")
    return number


if __name__ == "__main__":
    sys.exit(main())
