"""One trace over languages: Python services with `rocketlet.otel`, Java ones with OpenTelemetry's agent."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rocketlet.client import Consumer, Producer
from rocketlet.otel import TracedHandlers, TracedSends

from ..conftest import eventually, kept
from ..support.handlers import Inbox
from .conftest import HERE, Cluster, Run, fetched, missing

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
    pytest.mark.feature("Traces", "one trace through Python and Java (OpenTelemetry's agent)"),
    pytest.mark.parametrize("brokers", [1], indirect=True),  # a trace is in properties, which each broker keeps alike
]
AGENT = "opentelemetry-javaagent-2.10.0.jar"


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = "io.opentelemetry.javaagent:opentelemetry-javaagent:2.10.0"

    def make(folder: Path) -> None:
        command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
        fetched(command, HERE / "java")

    return kept(tmp_path_factory, "opentelemetry-agent", make, [artifact]) / AGENT


@dataclass(frozen=True, slots=True)
class Exported:
    """A span that Java exported; ids as OpenTelemetry prints them, and an empty parent for a root."""

    trace: str
    id: str
    parent: str
    name: str


class Collector:
    """Takes what Java agents export, over HTTP, as protobuf."""

    def __init__(self) -> None:
        self.port = 0
        self.spans: list[Exported] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (size,) = re.findall(rb"(?i)^content-length: *([0-9]+)\r$", head, re.MULTILINE)
                self.spans += spans_of(await reader.readexactly(int(size)))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    def named(self, name: str) -> list[Exported]:
        return [span for span in self.spans if span.name == name]


def spans_of(request: bytes) -> Iterator[Exported]:
    """The spans of an ExportTraceServiceRequest: resource_spans (1), scope_spans (2), spans (2)."""
    for resource in fields(request).get(1, ()):
        for scope in fields(resource).get(2, ()):
            for span in fields(scope).get(2, ()):
                found = fields(span)
                trace, own, parent = (b"".join(found.get(number, ())).hex() for number in (1, 2, 4))
                yield Exported(trace, own, parent, b"".join(found[5]).decode())


def fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a protobuf message that have a length, by number."""
    found: dict[int, list[bytes]] = {}
    rest = io.BytesIO(message)
    while rest.tell() < len(message):
        key = varint(rest)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(rest.read(varint(rest)))
        elif key & 7 == 0:
            varint(rest)
        else:
            rest.read({1: 8, 5: 4}[key & 7])
    return found


def varint(rest: io.BytesIO) -> int:
    value = shift = 0
    while True:
        (byte,) = rest.read(1)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value


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
        "-Xshare:off",  # classes of the shared archive cannot be instrumented
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


@pytest.fixture(params=["java", "java_five"])
def remoting(request: pytest.FixtureRequest) -> Run:
    """Apache's remoting client, 4.9 and 5.x."""
    found: Run = request.getfixturevalue(request.param)
    return found


async def test_one_trace_leads_through_python_java_and_python(
    remoting: Run,
    cluster: Cluster,
    agent: Path,
    exported: InMemorySpanExporter,
    provider: TracerProvider,
) -> None:
    await cluster.create_topic("orders")
    await cluster.create_topic("parcels")
    inbox, handlers = Inbox(), TracedHandlers("packers", tracer_provider=provider)
    async with (
        collecting() as collector,
        remoting(
            "consume",
            jvm=traced_jvm(agent, collector),
            ns=cluster.address,
            group="g",
            topic="orders",
            forward="parcels",
        ) as peer,
        Consumer(cluster.address, "packers", "parcels", inbox, start="first", middleware=[handlers]),
        Producer(cluster.address, middleware=[TracedSends(tracer_provider=provider)]) as producer,
    ):
        await peer.started()
        await producer.send("orders", b"x")
        await peer.until(lambda: bool(collector.named("parcels publish") and collector.named("orders process")))
        await eventually(lambda: len(exported.get_finished_spans()) == 2)
    assert inbox.bodies == [b"x"]
    ours = {span.name: span for span in exported.get_finished_spans()}
    sent, handled = ours["send orders"], ours["process parcels"]
    (java_handled,), (java_sent,) = collector.named("orders process"), collector.named("parcels publish")
    assert sent.parent is None
    assert sent.context is not None
    assert handled.context is not None
    assert handled.parent is not None
    trace = f"{sent.context.trace_id:032x}"
    assert {java_handled.trace, java_sent.trace, f"{handled.context.trace_id:032x}"} == {trace}
    assert java_handled.parent == f"{sent.context.span_id:016x}"
    assert java_sent.parent == java_handled.id
    assert f"{handled.parent.span_id:016x}" == java_sent.id


async def test_a_trace_of_java_leads_to_python(
    cluster: Cluster, java: Run, agent: Path, exported: InMemorySpanExporter, provider: TracerProvider
) -> None:
    await cluster.create_topic("t")
    async with (
        collecting() as collector,
        Consumer(
            cluster.address,
            "g",
            "t",
            Inbox(),
            start="first",
            middleware=[TracedHandlers("g", tracer_provider=provider)],
        ),
        java("produce", jvm=traced_jvm(agent, collector), ns=cluster.address, topic="t", count=1) as peer,
    ):
        await peer.until(lambda: bool(exported.get_finished_spans() and collector.named("t publish")))
    (processed,), (sent,) = exported.get_finished_spans(), collector.named("t publish")
    assert processed.parent is not None
    assert processed.parent.is_remote
    assert (f"{processed.parent.trace_id:032x}", f"{processed.parent.span_id:016x}") == (sent.trace, sent.id)
    assert sent.parent == ""
