"""The Spark session that `bench.spark` runs for each system. It carries out the lines on its input, one JSON object each,
and answers each with one. Spark and its workers get the two cores of `local[2]`, whatever the system."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

BODY_BYTES = 200


class Job:
    def __init__(self, system: str, address: str, jars: str) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        # the connector's Spark 4.0 does not write these files yet: two more for each batch
        builder = builder.config("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
        # as docs/spark.md recommends; the connector's Spark does not know it, and reads without Python
        builder = builder.config("spark.python.unix.domain.socket.enabled", "true")
        self.spark = (
            builder.config("spark.driver.extraClassPath", jars).getOrCreate() if jars else builder.getOrCreate()
        )
        self.spark.sparkContext.setLogLevel("ERROR")
        self._is_kafka = system == "kafka"
        self._address = address
        if not self._is_kafka:
            import rocketlet.spark

            rocketlet.spark.register(self.spark)

    def fill(self, topic: str, rows: int, parts: int) -> dict[str, float]:
        """Writes rows of 200 bytes with the system's own sink."""
        body = f.rpad(f.col("id").cast("string"), BODY_BYTES, "x")
        frame = self.spark.range(0, rows, numPartitions=parts)
        began_s = time.perf_counter()
        if self._is_kafka:
            writer = frame.select(body.alias("value")).write.format("kafka").option("topic", topic)
            # a producer that is kept from another topic learns late of this one's leaders
            writer = writer.option("kafka.metadata.max.age.ms", "2000").option("kafka.delivery.timeout.ms", "600000")
            writer.option("kafka.bootstrap.servers", self._address).save()
        else:
            writer = frame.select(body.alias("body")).write.format("rocketlet").option("topic", topic)
            writer.option("nameServer", self._address).mode("append").save()
        return {"seconds": time.perf_counter() - began_s}

    def stream(self, topic: str, start: str, *, properties: bool = False) -> DataFrame:
        """Both with the columns of Kafka's connector: without headers, as by default there, or with them."""
        reader = self.spark.readStream.option("startingOffsets", start)
        if self._is_kafka:
            return (
                reader.format("kafka")
                .option("kafka.bootstrap.servers", self._address)
                .option("subscribe", topic)
                .option("includeHeaders", str(properties).lower())
                .load()
            )
        reader = reader.format("rocketlet").option("nameServer", self._address).option("topic", topic)
        reader = reader.option("columns", "kafka").option("includeProperties", str(properties).lower())
        return reader.option("group", f"bench-{time.time_ns()}").load()

    def drain(self, topic: str, properties: bool = False) -> dict[str, float]:
        """Everything that is there, in one batch, from the start of the query to its end."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
            began_s = time.perf_counter()
            writer = (
                self.stream(topic, "earliest", properties=properties)
                .writeStream.format("noop")
                .trigger(availableNow=True)
            )
            query = writer.option("checkpointLocation", checkpoint).start()
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
            send = self._kafka_sender(topic) if self._is_kafka else self._sender(topic)
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

    def _sender(self, topic: str) -> Any:
        import asyncio

        from rocketlet.client import Producer

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        producer = Producer(self._address)
        asyncio.run_coroutine_threadsafe(producer.__aenter__(), loop).result()
        return lambda text: asyncio.run_coroutine_threadsafe(producer.send(topic, text.encode()), loop)

    def kafka_topic(self, topic: str, queues: int) -> dict[str, Any]:
        java: Any = self.spark._jvm
        admin = java.org.apache.kafka.clients.admin.Admin.create(self._kafka_settings())
        made = java.org.apache.kafka.clients.admin.NewTopic(topic, queues, 1)
        admin.createTopics(java.java.util.List.of(made)).all().get()
        admin.close()
        return {}

    def _kafka_sender(self, topic: str) -> Any:
        kafka: Any = self.spark._jvm.org.apache.kafka.clients.producer  # type: ignore[union-attr] # None only without a JVM
        producer = kafka.KafkaProducer(self._kafka_settings())
        return lambda text: producer.send(kafka.ProducerRecord(topic, text))

    def _kafka_settings(self) -> Any:
        java: Any = self.spark._jvm
        settings = java.java.util.Properties()
        settings.put("bootstrap.servers", self._address)
        for name in ("key.serializer", "value.serializer"):
            settings.put(name, "org.apache.kafka.common.serialization.StringSerializer")
        return settings


def main(system: str, address: str, jars: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark's own output is no answer
    job = Job(system, address, jars)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(job, asked.pop("do"))(**asked)), file=answers, flush=True)
    job.spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
