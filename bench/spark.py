"""2,000,000 messages of 200 bytes drained into Spark's `noop`, by our source from our broker and by Spark's Kafka connector
from a Kafka broker, with 4, 16 and 64 queues; and how long a row of a trickle takes to reach `foreachBatch`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner
from .churn import make_topic
from .peers import CACHE, Peer, Used, fetch_python, kafka_jars, used

NAMES = ("rocketlet", "kafka")
PARTS = ("read", "write", "trickle")
ROWS = 2_000_000
CONNECTOR_VERSION = "4.0.0"  # runs with PySpark of the same version: the connector fits no other
NEEDED = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")  # Spark has the others


class SparkUse(NamedTuple):
    """What the processes of a Spark session have used: the JVM, and the Python processes that it started."""

    jvm_s: float
    python_s: float


def spark_use(driver_pid: int) -> SparkUse:
    """driver_pid: the Python program that started the JVM."""
    jvm = next(item for item in below(driver_pid) if item.name == "java")
    return SparkUse(jvm.cpu_s, jvm.children_s + sum(item.cpu_s + item.children_s for item in below(jvm.pid)))


def below(pid: int) -> Iterator[Used]:
    """Yield the descendants of a process."""
    found = [item for item in (used(int(name)) for name in os.listdir("/proc") if name.isdigit()) if item is not None]
    parents = {pid}
    while parents:
        children = [item for item in found if item.parent in parents]
        yield from children
        parents = {item.pid for item in children}


class Session:
    """A Spark session in a process of its own (`spark_job`)."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._child.ask(json.dumps({"do": do, **arguments})))
        return found


@asynccontextmanager
async def session(peer: Peer, folder: Path) -> AsyncIterator[Session]:
    jars, environment = "", {"SPARK_LOCAL_IP": "127.0.0.1"}
    if peer.name == "kafka":
        found = await kafka_jars("connector", CONNECTOR_VERSION, "spark-sql-kafka-*.jar", "spark.version")
        jars = ":".join(str(jar) for jar in sorted(found.glob("*.jar")) if jar.name.startswith(NEEDED))
        pyspark = CACHE / f"pyspark-{CONNECTOR_VERSION}"
        environment["PYTHONPATH"] = str(await fetch_python(pyspark, "pyspark", f"pyspark=={CONNECTOR_VERSION}"))
    command = (sys.executable, "-m", "bench.spark_job", peer.name, peer.address, jars)
    child = await Child.start(command, folder / f"{peer.name}-spark.log", environment=environment)
    try:
        await child.wait_for()
        yield Session(child)
    finally:
        await child.close()


Sessions = list[tuple[Peer, Session]]
Result = dict[str, dict[str, float]]


async def create_topic(peer: Peer, spark: Session | None, topic: str, queues: int) -> None:
    """spark: by which Kafka's are made."""
    if peer.name == "kafka":
        assert spark is not None
        await spark.ask("kafka_topic", topic=topic, queues=queues)
    else:
        await make_topic(peer.address, topic, queues)


def parser() -> argparse.ArgumentParser:
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--rows", type=whole(1), default=ROWS)
    made.add_argument("--queues", type=runner.counts, default="4,16,64")
    made.add_argument("--trickle-seconds", type=runner.positive, default=20.0)
    made.add_argument("--parts", type=runner.among(PARTS), default=",".join(PARTS), help="what to measure")
    return made


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    names, parts = runner.chosen(options.only, NAMES), options.parts.split(",")
    result: dict[str, dict[str, float]] = {name: {} for name in names}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketlet-bench-", ignore_cleanup_errors=True))
        peers = await stack.enter_async_context(runner.started(names))
        sessions = [(peer, await stack.enter_async_context(session(peer, Path(folder)))) for peer in peers.values()]
        topics = (("trickle", 4), ("written", 4), *((f"t{queues}", queues) for queues in options.queues))
        for peer, spark in sessions:
            for topic, queues in topics:
                await create_topic(peer, spark, topic, queues)
        for queues in options.queues if "read" in parts else ():
            await drains(sessions, queues, options, result)
        if "write" in parts:
            await writes(sessions, options, result)
        if "trickle" in parts:
            await trickles(sessions, options, result)
    first = result[names[0]]
    rows = [[name, key, result[name][key], ratio(first[key], result[name][key])] for key in first for name in names]
    runner.show("Spark reads", ("", "", "", f"{names[0]} / this"), rows)
    return {"rows": options.rows, "spark": pyspark.__version__, "kafka_spark": CONNECTOR_VERSION, **result}


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


async def drains(sessions: Sessions, queues: int, options: argparse.Namespace, result: Result) -> None:
    """Each system in turn, `rounds` times after one that warms."""
    topic = f"t{queues}"

    async def drained(peer: Peer, spark: Session, properties: bool) -> runner.Values:
        found = await measured(peer, spark, "drain", topic=topic, properties=properties)
        assert found["rows"] == options.rows, f"{peer.name}: {found['rows']} of {options.rows} rows were read"
        return found

    for _, spark in sessions:
        await spark.ask("fill", topic=topic, rows=options.rows, parts=8)
    cases = {
        peer.name: {
            f"read_{queues}": partial(drained, peer, spark, False),
            f"read_{queues}_with_properties": partial(drained, peer, spark, True),
        }
        for peer, spark in sessions
    }
    keep(await runner.alternate(options.rounds, cases, warm_ups=1), options.rows, result)


async def writes(sessions: Sessions, options: argparse.Namespace, result: Result) -> None:
    """Each system in turn into one topic, `rounds` times after one that warms."""
    fill = partial(measured, do="fill", topic="written", rows=options.rows, parts=8)
    cases = {peer.name: {"write": partial(fill, peer, spark)} for peer, spark in sessions}
    keep(await runner.alternate(options.rounds, cases, warm_ups=1), options.rows, result)


async def measured(peer: Peer, spark: Session, do: str, **arguments: Any) -> dict[str, float]:
    """The session's answer, and the CPU seconds that it took: JVM, Spark's Python, broker."""
    before, broker_s = spark_use(spark.pid), peer.cpu_s()
    found: dict[str, float] = await spark.ask(do, **arguments)
    after = spark_use(spark.pid)
    found["jvm_cpu_s"] = after.jvm_s - before.jvm_s
    found["python_cpu_s"] = after.python_s - before.python_s
    found["broker_cpu_s"] = peer.cpu_s() - broker_s
    found["cpu_s"] = found["jvm_cpu_s"] + found["python_cpu_s"] + found["broker_cpu_s"]
    return found


def keep(figures: runner.Figures, rows: int, result: Result) -> None:
    """Add the rates of each case, and the processor time by process, in µs per row."""
    for system, cases in figures.medians.items():
        for case, values in cases.items():
            result[system][f"{case}_rows_per_s"] = rows / values["seconds"]
            for name in ("cpu", "jvm_cpu", "python_cpu", "broker_cpu"):
                result[system][f"{case}_{name}_us_per_row"] = values[f"{name}_s"] / rows * 1e6


async def trickles(sessions: Sessions, options: argparse.Namespace, result: Result) -> None:
    """Each system in turn, `rounds` times: how long a row takes, and what a trigger spends its time on."""
    latencies: dict[str, list[float]] = {peer.name: [] for peer, _ in sessions}
    steps: dict[str, dict[str, list[float]]] = {peer.name: {} for peer, _ in sessions}
    for _ in range(options.rounds):
        for peer, spark in sessions:
            found = await spark.ask("trickle", topic="trickle", rate=100, seconds=options.trickle_seconds)
            assert found["rows"] == found["of"], f"{found['rows']} of {found['of']} rows came"
            latencies[peer.name] += found["latencies_ms"]
            for step, spent_ms in found["steps_ms"].items():
                steps[peer.name].setdefault(step, []).extend(spent_ms)
    for name, found_ms in latencies.items():
        result[name]["latency_ms_p50"] = runner.percentile(found_ms, 0.5)
        result[name]["latency_ms_p99"] = runner.percentile(found_ms, 0.99)
        for step, spent_ms in sorted(steps[name].items()):
            result[name][f"trigger_{step}_ms"] = runner.median(spent_ms)


if __name__ == "__main__":
    runner.main("spark", parser(), run)
