"""2,000,000 messages of 200 bytes drained into Spark's `noop`, by our source from our broker and by Spark's Kafka connector
from a Kafka broker, with 4, 16 and 64 queues; and how long a row of a trickle takes to reach `foreachBatch`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rocketlet.client import Producer
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner, versions
from .peers import CACHE, Peer, Used, fetch_python, kafka_jars, make_kafka_topic, used

NAMES = ("rocketlet", "kafka")
PARTS = ("read", "write", "trickle")
ROWS = 2_000_000
NEEDED = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")  # Spark has the others
BODY_BYTES = 200

# The process with the session


class Job:
    """A Spark session that carries out the lines on its input, one JSON object each, and answers each with one. Spark and its
    workers get the two cores of `local[2]`, whatever the system."""

    def __init__(self, system: str, address: str, jars: str) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        settings: dict[str, bool | float | int | str | None] = {
            "spark.ui.enabled": "false",
            # the connector's Spark 4.0 does not write these files yet: two more for each batch
            "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
            # as docs/spark.md recommends; the connector's Spark does not know it, and reads without Python
            "spark.python.unix.domain.socket.enabled": "true",
            **({"spark.driver.extraClassPath": jars} if jars else {}),
        }
        self.spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")
        self._system = system
        self._server = address
        self._address = {"kafka.bootstrap.servers" if system == "kafka" else "nameServer": address}
        if system == "rocketlet":
            import rocketlet.spark

            rocketlet.spark.register(self.spark)

    def fill(self, topic: str, rows: int, parts: int) -> dict[str, float]:
        """Write rows of 200 bytes with the system's own sink."""
        # a producer that is kept from another topic learns late of this one's leaders
        patient = {"kafka.metadata.max.age.ms": "2000", "kafka.delivery.timeout.ms": "600000"}
        column, settings = ("value", patient) if self._system == "kafka" else ("body", {})
        body = f.rpad(f.col("id").cast("string"), BODY_BYTES, "x").alias(column)
        frame = self.spark.range(0, rows, numPartitions=parts)
        began_s = time.perf_counter()
        writer = frame.select(body).write.format(self._system).options(topic=topic, **self._address, **settings)
        writer.mode("append").save()
        return {"seconds": time.perf_counter() - began_s, "rows": rows}

    def stream(self, topic: str, start: str, *, properties: bool = False) -> DataFrame:
        """Both with the columns of Kafka's connector: without headers, as by default there, or with them."""
        if self._system == "kafka":
            settings = {"subscribe": topic, "includeHeaders": str(properties).lower()}
        else:
            group = f"bench-{time.time_ns()}"
            settings = {
                "topic": topic,
                "group": group,
                "columns": "kafka",
                "includeProperties": str(properties).lower(),
            }
        reader = self.spark.readStream.format(self._system).options(startingOffsets=start, **self._address, **settings)
        return reader.load()

    def drain(self, topic: str, properties: bool = False) -> dict[str, float]:
        """Everything that is there, in one batch, from the start of the query to its end."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
            began_s = time.perf_counter()
            stream = self.stream(topic, "earliest", properties=properties).writeStream.format("noop")
            query = stream.trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
            query.awaitTermination()
            seconds = time.perf_counter() - began_s
            return {"seconds": seconds, "rows": sum(progress["numInputRows"] for progress in query.recentProgress)}

    def trickle(self, topic: str, rate: int, seconds: float) -> dict[str, Any]:
        """From the moment a row is sent, which its body says, until a batch with it reaches foreachBatch;
        but for the first three seconds, which warm what is to be measured."""
        body = f.col("value").cast("string")
        latencies_ms: list[float] = []

        def take(rows: DataFrame, batch: int) -> None:
            sent = [float(row[0]) for row in rows.select(body).collect()]
            now_s = time.time()
            latencies_ms.extend((now_s - at_s) * 1000 for at_s in sent)

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
            stream = self.stream(topic, "latest").writeStream.foreachBatch(take)
            query = stream.option("checkpointLocation", checkpoint).start()
            time.sleep(8)  # warm
            send = self._sender(topic)
            count = int(rate * seconds)
            began_s = time.time()
            for number in range(count):
                time.sleep(max(0.0, began_s + number / rate - time.time()))
                send(repr(time.time()))
            end_s = time.time() + 20
            while len(latencies_ms) < count and time.time() < end_s:
                time.sleep(0.05)
            steps_ms: dict[str, list[float]] = {}
            for progress in query.recentProgress:
                if progress["numInputRows"]:
                    for step, spent_ms in progress["durationMs"].items():
                        steps_ms.setdefault(step, []).append(spent_ms)
            query.stop()
        return {"latencies_ms": latencies_ms[3 * rate :], "rows": len(latencies_ms), "of": count, "steps_ms": steps_ms}

    def _sender(self, topic: str) -> Callable[[str], object]:
        if self._system == "kafka":
            kafka = confluent_kafka.Producer({"bootstrap.servers": self._server, "linger.ms": 0})
            return lambda text: kafka.produce(topic, text)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        producer = Producer(self._server)
        asyncio.run_coroutine_threadsafe(producer.__aenter__(), loop).result()
        return lambda text: asyncio.run_coroutine_threadsafe(producer.send(topic, text.encode()), loop)


def serve(system: str, address: str, jars: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark's own output is no answer
    job = Job(system, address, jars)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(job, asked.pop("do"))(**asked)), file=answers, flush=True)
    job.spark.stop()


# The measurement


class Session:
    """A Spark session in a process of its own, and the broker that it reads from."""

    def __init__(self, peer: Peer, child: Child) -> None:
        self._peer = peer
        self._child = child

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._child.ask(json.dumps({"do": do, **arguments})))
        return found

    def used_s(self) -> dict[str, float]:
        """CPU seconds of the JVM, of the Python processes that it started, and of the broker."""
        jvm = next(item for item in below(self._child.pid) if item.name == "java")
        python_s = jvm.children_s + sum(item.cpu_s + item.children_s for item in below(jvm.pid))
        return {"jvm_cpu": jvm.cpu_s, "python_cpu": python_s, "broker_cpu": self._peer.cpu_s()}

    async def measure(self, count: int, do: str, **arguments: Any) -> runner.Values:
        """The rate at which the session reads or writes rows, and the processor time by process, in µs per row."""
        before = self.used_s()
        found = await self.ask(do, **arguments)
        spent_s = {name: after - before[name] for name, after in self.used_s().items()}
        assert found["rows"] == count, f"{self._peer.name}: {do} had {found['rows']} of {count} rows"
        spent_s = {"cpu": sum(spent_s.values()), **spent_s}
        return {
            "rows_per_s": count / found["seconds"],
            **{f"{name}_us_per_row": seconds / count * 1e6 for name, seconds in spent_s.items()},
        }

    async def trickle(self, seconds: float) -> runner.Values:
        """How long a row takes, and what a trigger spends its time on."""
        found = await self.ask("trickle", topic="trickle", rate=100, seconds=seconds)
        assert found["rows"] == found["of"], f"{found['rows']} of {found['of']} rows came"
        return {
            "latency_ms_p50": runner.percentile(found["latencies_ms"], 0.5),
            "latency_ms_p99": runner.percentile(found["latencies_ms"], 0.99),
            **{f"trigger_{step}_ms": runner.median(spent) for step, spent in sorted(found["steps_ms"].items())},
        }


def below(pid: int) -> Iterator[Used]:
    """Yield the descendants of a process."""
    found = [item for item in (used(int(name)) for name in os.listdir("/proc") if name.isdigit()) if item is not None]
    parents = {pid}
    while parents:
        children = [item for item in found if item.parent in parents]
        yield from children
        parents = {item.pid for item in children}


@asynccontextmanager
async def session(peer: Peer, folder: Path) -> AsyncIterator[Session]:
    jars, environment = "", {"SPARK_LOCAL_IP": "127.0.0.1"}
    if peer.name == "kafka":
        found = await kafka_jars("connector", versions.KAFKA_SPARK, "spark-sql-kafka-*.jar", "spark.version")
        jars = ":".join(str(jar) for jar in sorted(found.glob("*.jar")) if jar.name.startswith(NEEDED))
        home = CACHE / f"pyspark-{versions.KAFKA_SPARK}"
        environment["PYTHONPATH"] = str(await fetch_python(home, "pyspark", f"pyspark=={versions.KAFKA_SPARK}"))
    command = (sys.executable, "-m", "bench.spark", "session", peer.name, peer.address, jars)
    child = await Child.start(command, folder / f"{peer.name}-spark.log", environment=environment)
    try:
        await child.wait_for()
        yield Session(peer, child)
    finally:
        await child.close()


async def create_topic(peer: Peer, topic: str, queues: int) -> None:
    if peer.name == "kafka":
        await make_kafka_topic(peer, topic, queues)
    else:
        await runner.make_topic(peer.address, topic, queues)


async def cases_of(spark: Session, options: argparse.Namespace) -> runner.Cases:
    """Reads of filled topics, without and with properties, and writes."""
    cases: dict[str, runner.Measure] = {}
    write = {"rows": options.rows, "parts": 8}
    for queues in options.queues if "read" in options.parts else ():
        topic = f"t{queues}"
        await spark.ask("fill", topic=topic, **write)
        for suffix, properties in (("", False), ("_with_properties", True)):
            read = partial(spark.measure, options.rows, "drain", topic=topic, properties=properties)
            cases[f"read_{queues}{suffix}"] = read
    if "write" in options.parts:
        cases["write"] = partial(spark.measure, options.rows, "fill", topic="written", **write)
    return cases


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    async with AsyncExitStack() as stack:
        folder = runner.temporary_folder(stack)
        peers = await stack.enter_async_context(runner.started(runner.chosen(options.only, NAMES)))
        sessions = {name: await stack.enter_async_context(session(peer, folder)) for name, peer in peers.items()}
        for peer in peers.values():
            for topic, queues in (
                ("trickle", 4),
                ("written", 4),
                *((f"t{queues}", queues) for queues in options.queues),
            ):
                await create_topic(peer, topic, queues)
        cases = {name: await cases_of(spark, options) for name, spark in sessions.items()}
        if "trickle" in options.parts:
            for name, spark in sessions.items():
                cases[name] = {**cases[name], "trickle": partial(spark.trickle, options.trickle_seconds)}
        figures = await runner.alternate(options.rounds, cases, warm_ups=1)
    rows = [
        [name, case, key, value, figures.ratios(key, name, case)]
        for case, values in figures.medians[figures.first].items()
        for key in values
        for name, of_one in figures.medians.items()
        if (value := of_one.get(case, {}).get(key)) is not None
    ]
    runner.show("Spark", ("", "", "", "", f"{figures.first} / this"), rows)
    versions_used = {"spark": pyspark.__version__, "kafka_spark": versions.KAFKA_SPARK}
    return {"rows": options.rows, **versions_used, **figures.record()}


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    if sys.argv[1:2] == ["session"]:
        serve(*sys.argv[2:])
    else:
        made.add_argument("--rows", type=whole(1), default=ROWS)
        made.add_argument("--queues", type=runner.listed(whole(1)), default="4,16,64")
        made.add_argument("--trickle-seconds", type=runner.positive, default=20.0)
        made.add_argument("--parts", type=runner.listed(runner.one_of(PARTS)), default=PARTS, help="what to measure")
        runner.main("spark", made, run)
