"""2,000,000 messages of 200 bytes drained into Spark's `noop`, by our source from our broker and by Spark's Kafka connector
from a Kafka broker, with 4, 16 and 64 queues; and how long a row of a trickle takes to reach `foreachBatch`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pyspark
import uvloop
from rocketlet.client.wire.cluster import Cluster
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write

from . import common, readme
from .kafka_broker import kafka, kafka_fault, kafka_jars
from .peers import CACHE, Peer, rocketlet
from .processes import spark_use

NAMES = ("rocketlet", "kafka")
PARTS = ("read", "write", "trickle")
ROWS = 2_000_000
KEPT = {  # the rows of results/spark.json, and the figure of each
    "rows read, 4 queues": "read_4_rows_per_s",
    "rows read with properties, 4 queues": "read_4_with_properties_rows_per_s",
    "rows written": "write_rows_per_s",
    "processor time of a row read": "read_4_cpu_us_per_row",
    "processor time of a row read with properties": "read_4_with_properties_cpu_us_per_row",
    "processor time of a row written": "write_cpu_us_per_row",
    "processor time of a row read, the broker's": "read_4_broker_cpu_us_per_row",
    "processor time of a row written, the broker's": "write_broker_cpu_us_per_row",
    "a row on its way at 100/s, median": "latency_ms_p50",
    "a row on its way at 100/s, 99 of 100 within": "latency_ms_p99",
    "rows read, 16 queues": "read_16_rows_per_s",
    "rows read, 64 queues": "read_64_rows_per_s",
}
CONNECTOR_VERSION = "4.0.0"  # runs with PySpark of the same version: the connector fits no other
NEEDED = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")  # Spark has the others


async def _pyspark(version: str) -> Path:
    """The folder with a PySpark of a version, fetched from PyPI if it is not there."""
    folder = CACHE / f"pyspark-{version}"
    if not (folder / "pyspark").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"pyspark=={version}")
        child = await asyncio.create_subprocess_exec(*pip)
        if await child.wait():
            raise RuntimeError(f"PySpark {version} could not be fetched; see the output above")
    return folder


class Session:
    """A Spark session in a process of its own (`spark_job`)."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self._child = child
        self._log = log

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = await self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the Spark session ended:\n{self._log.read_text()[-6000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def session(peer: Peer, folder: Path) -> AsyncIterator[Session]:
    jars, environment = "", {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    if peer.name == "kafka":
        found = await kafka_jars("connector", CONNECTOR_VERSION, "spark-sql-kafka-*.jar", "spark.version")
        jars = ":".join(str(jar) for jar in sorted(found.glob("*.jar")) if jar.name.startswith(NEEDED))
        environment["PYTHONPATH"] = str(await _pyspark(CONNECTOR_VERSION))
    log = folder / f"{peer.name}-spark.log"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.spark_job", peer.name, peer.address, jars,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=log.open("ab"),
        env=environment, limit=64 * 1024 * 1024,
    )  # fmt: skip
    made = Session(child, log)
    try:
        await made.answer()
        yield made
    finally:
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()


async def create_topic(peer: Peer, spark: Session | None, topic: str, queues: int) -> None:
    """spark: by which Kafka's are made."""
    if peer.name == "kafka":
        assert spark is not None
        await spark.ask("kafka_topic", topic=topic, queues=queues)
        return
    cluster = Cluster(peer.address)
    connection = await cluster.connection(peer.address)
    await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))
    await cluster.close()


async def run() -> None:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--rows", type=whole(1), default=ROWS)
    parser.add_argument("--queues", type=common.counts, default="4,16,64")
    parser.add_argument("--trickle-seconds", type=common.positive, default=20.0)
    parser.add_argument(
        "--keep", choices=readme.MACHINES, help="write the figures to bench/results and both pages, as of this machine"
    )
    parser.add_argument("--parts", type=common.among(PARTS), default=",".join(PARTS), help="what to measure")
    options = parser.parse_args()
    if options.keep and options.rows != ROWS:
        parser.error(f"figures that are kept are those of {ROWS:,} rows")
    parts = options.parts.split(",")
    names = [
        name for name in (options.only.split(",") if options.only else NAMES) if name != "kafka" or not kafka_fault()
    ]
    if "kafka" not in names and kafka_fault():
        common.console.print(f"kafka is left out: {kafka_fault()}")
    result: dict[str, dict[str, float]] = {name: {} for name in names}
    async with AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketlet-bench-", ignore_cleanup_errors=True))
        )
        starters = {"rocketlet": rocketlet, "kafka": kafka}
        peers = [await stack.enter_async_context(starters[name](folder)) for name in names]
        sessions = [(peer, await stack.enter_async_context(session(peer, folder))) for peer in peers]
        counts = options.queues
        for peer, spark in sessions:
            topics = (("trickle", 4), ("written", 4), *((f"t{queues}", queues) for queues in counts))
            for topic, queues in topics:
                await create_topic(peer, spark, topic, queues)
        if "read" in parts:
            for queues in counts:
                await drains(sessions, queues, options, result)
        if "write" in parts:
            await writes(sessions, options, result)
        if "trickle" in parts:
            await trickles(sessions, options, result)
    report(result)
    if options.keep:
        keep_figures(result, options.keep)
    common.finish(
        options,
        "spark",
        {"rows": options.rows, "spark": pyspark.__version__, "kafka_spark": CONNECTOR_VERSION, **result},
    )


async def drains(
    sessions: list[tuple[Peer, Session]], queues: int, options: Any, result: dict[str, dict[str, float]]
) -> None:
    """Each system in turn, `rounds` times after one that warms."""
    topic = f"t{queues}"
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _, spark in sessions:
        await spark.ask("fill", topic=topic, rows=options.rows, parts=8)
        for properties in (False, True):
            await spark.ask("drain", topic=topic, properties=properties)
    for _ in range(options.rounds):
        for properties in (False, True):
            for peer, spark in sessions:
                found = await measured(peer, spark, "drain", topic=topic, properties=properties)
                assert found["rows"] == options.rows, f"{peer.name}: {found['rows']} of {options.rows} rows were read"
                runs.setdefault((peer.name, f"{queues}_with_properties" if properties else f"{queues}"), []).append(
                    found
                )
    for (name, what), found_all in runs.items():
        keep(result[name], f"read_{what}", options.rows, found_all)


async def writes(sessions: list[tuple[Peer, Session]], options: Any, result: dict[str, dict[str, float]]) -> None:
    """Each system in turn into one topic, `rounds` times after one that warms."""
    runs: dict[str, list[dict[str, float]]] = {peer.name: [] for peer, _ in sessions}
    for number in range(options.rounds + 1):
        for peer, spark in sessions:
            found = await measured(peer, spark, "fill", topic="written", rows=options.rows, parts=8)
            if number:
                runs[peer.name].append(found)
    for name, found_all in runs.items():
        keep(result[name], "write", options.rows, found_all)


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


def keep(result: dict[str, float], what: str, rows: int, runs: list[dict[str, float]]) -> None:
    """Rates, as medians: per second, and per second of CPU; and the CPU by process, in µs per row."""
    result[f"{what}_rows_per_s"] = rows / common.median([run["seconds"] for run in runs])
    for name in ("cpu", "jvm_cpu", "python_cpu", "broker_cpu"):
        result[f"{what}_{name}_us_per_row"] = common.median([run[f"{name}_s"] for run in runs]) / rows * 1e6


async def trickles(sessions: list[tuple[Peer, Session]], options: Any, result: dict[str, dict[str, float]]) -> None:
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
        result[name]["latency_ms_p50"] = common.percentile(found_ms, 0.5)
        result[name]["latency_ms_p99"] = common.percentile(found_ms, 0.99)
        for step, spent_ms in sorted(steps[name].items()):
            result[name][f"trigger_{step}_ms"] = common.median(spent_ms)


def keep_figures(result: dict[str, dict[str, float]], machine: str) -> None:
    """Writes what was measured of both systems into results/spark.json, and the pages that are made of it."""
    ours, theirs = result.get("rocketlet", {}), result.get("kafka", {})
    found = {
        path: {"ours": _rounded(ours[key]), "Kafka": _rounded(theirs[key])}
        for path, key in KEPT.items()
        if key in ours and key in theirs
    }
    for reason in readme.renew("spark", machine, time.strftime("%Y-%m-%d"), found):
        common.console.print(f"read again, or change in bench/results/spark.json: {reason}")


def _rounded(value: float) -> float:
    return round(value) if value >= 100 else float(f"{value:.3g}")


def report(result: dict[str, dict[str, float]]) -> None:
    ours = result.get("rocketlet", {})
    rows: list[list[object]] = [
        [name, key, value, common.ratio(ours.get(key, float("nan")), value)]
        for key in next(iter(result.values()))
        for name, value in ((name, result[name][key]) for name in result)
    ]
    common.show("Spark reads", ("", "", "", "rocketlet / this"), rows)


if __name__ == "__main__":
    uvloop.run(run())
