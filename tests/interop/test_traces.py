"""One trace over languages: Python services with `rocketlet.otel`, Java ones with OpenTelemetry's agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rocketlet.client import Consumer, Producer
from rocketlet.otel import TracedHandlers, TracedSends

from ..conftest import made_once
from ..support.handlers import Inbox
from .conftest import HERE, Cluster, Run, fetched, missing

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
    pytest.mark.feature("Traces", "one trace through Python and Java (OpenTelemetry's agent)"),
]
AGENT = "opentelemetry-javaagent-2.10.0.jar"


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = "io.opentelemetry.javaagent:opentelemetry-javaagent:2.10.0"

    def make(folder: Path) -> None:
        command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
        fetched(command, HERE / "java")

    return made_once(tmp_path_factory, "opentelemetry-agent", make) / AGENT


class Collector:
    """Takes what a Java agent exports: protobuf, in which ids are their plain bytes."""

    def __init__(self) -> None:
        self.port = 0
        self.received = bytearray()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.received += data
            if b"\r\n\r\n" in data or len(data) < 65536:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    server = await asyncio.start_server(collector.take, "127.0.0.1", 0)
    collector.port = server.sockets[0].getsockname()[1]
    try:
        yield collector
    finally:
        server.close()


def traced_jvm(agent: Path, collector: Collector) -> list[str]:
    return [
        f"-javaagent:{agent}",
        "-Dotel.exporter.otlp.protocol=http/protobuf",
        f"-Dotel.exporter.otlp.endpoint=http://127.0.0.1:{collector.port}",
        "-Dotel.exporter.otlp.compression=none",
        "-Dotel.metrics.exporter=none",
        "-Dotel.logs.exporter=none",
        "-Dotel.bsp.schedule.delay=50",
    ]


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exported: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return provider


async def test_java_continues_a_trace_of_python(
    cluster: Cluster, java: Run, agent: Path, exported: InMemorySpanExporter, provider: TracerProvider
) -> None:
    await cluster.create_topic("t")
    async with (
        collecting() as collector,
        java("consume", jvm=traced_jvm(agent, collector), ns=cluster.address, group="g", topic="t") as peer,
        Producer(cluster.address, middleware=[TracedSends(tracer_provider=provider)]) as producer,
    ):
        await peer.started()
        await producer.send("t", b"x")
        (sent,) = exported.get_finished_spans()
        assert sent.context is not None
        trace_id = sent.context.trace_id.to_bytes(16, "big")
        await peer.until(lambda: trace_id in collector.received)
        assert sent.context.span_id.to_bytes(8, "big") in collector.received, "the sender's span is its parent"


async def test_python_continues_a_trace_of_java(
    cluster: Cluster, java: Run, agent: Path, exported: InMemorySpanExporter, provider: TracerProvider
) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        collecting() as collector,
        Consumer(
            cluster.address, "g", "t", inbox, start="first", middleware=[TracedHandlers("g", tracer_provider=provider)]
        ),
        java("produce", jvm=traced_jvm(agent, collector), ns=cluster.address, topic="t", count=1) as peer,
    ):
        await peer.until(lambda: bool(exported.get_finished_spans()))
        (processed,) = exported.get_finished_spans()
        assert processed.parent is not None
        assert processed.parent.is_remote
        trace_id = processed.parent.trace_id.to_bytes(16, "big")
        await peer.until(lambda: trace_id in collector.received)
