"""2,000,000 messages of 200 bytes drained into Spark's `noop`, by our source from our broker and by Spark's Kafka connector
from a Kafka broker, with 4, 16 and 64 queues; and how long a row of a trickle takes to reach `foreachBatch`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pyspark
import uvloop
from rocketlet.client.cluster import Cluster
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write

from . import common
from .kafka_broker import kafka, kafka_fault, kafka_jars
from .peers import CACHE, Peer, rocketlet

ROWS = 2_000_000
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


async def create_topic(peer: Peer, spark: Session, topic: str, queues: int) -> None:
    if peer.name == "kafka":
        await spark.ask("kafka_topic", topic=topic, queues=queues)
        return
    cluster = Cluster(peer.address)
    connection = await cluster.connection(peer.address)
    await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))
    await cluster.close()


async def run() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--queues", default="4,16,64")
    parser.add_argument("--trickle-seconds", type=float, default=20.0)
    options = parser.parse_args()
    names = [name for name in (options.only or "rocketlet,kafka").split(",") if name != "kafka" or not kafka_fault()]
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
        counts = [int(text) for text in options.queues.split(",")]
        for peer, spark in sessions:
            for topic, queues in (("trickle", 4), *((f"t{queues}", queues) for queues in counts)):
                await create_topic(peer, spark, topic, queues)
        for queues in counts:
            await drains(sessions, queues, options, result)
        for peer, spark in sessions:
            found = await spark.ask("trickle", topic="trickle", rate=100, seconds=options.trickle_seconds)
            assert found["rows"] == found["of"], f"{found['rows']} of {found['of']} rows came"
            result[peer.name]["latency_ms_p50"] = common.percentile(found["latencies_ms"], 0.5)
            result[peer.name]["latency_ms_p99"] = common.percentile(found["latencies_ms"], 0.99)
    report(result)
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
    seconds: dict[str, list[float]] = {peer.name: [] for peer, _ in sessions}
    for peer, spark in sessions:
        wrote = await spark.ask("fill", topic=topic, rows=options.rows, parts=8)
        result[peer.name].setdefault("written_rows_per_s", options.rows / wrote["seconds"])
        await spark.ask("drain", topic=topic)
    for _ in range(options.rounds):
        for peer, spark in sessions:
            found = await spark.ask("drain", topic=topic)
            assert found["rows"] == options.rows, f"{peer.name}: {found['rows']} of {options.rows} rows were read"
            seconds[peer.name].append(found["seconds"])
    for name, runs in seconds.items():
        result[name][f"rows_per_s_{queues}"] = options.rows / common.median(runs)


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
