"""Foreign clients as processes, clusters of one and of two brokers, and a note of what they asked: `--compatibility FILE`
writes docs/compatibility.md of the tests that passed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting import events
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.remoting.dispatch import Dispatch
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.sessions.events import ClientRequest, SessionEvent
from rocketlet.client import Consumer, Producer
from rocketlet.protocol.codes import Language
from rocketlet.protocol.frame import FrameReader
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker
from rocketlet.testing.ports import free_port

from bench.peers import Apache, apache_fault, fetch, fetch_fault

from ..conftest import Connect, Node, Nodes, Wire, create_topic, kept, made_once
from ..support.pacing import pace, poll_intervals
from . import compatibility
from .systems import HEAP, LITE, SETTINGS, SMALL, Ours, System

HERE = Path(__file__).parent
JAVA_CLIENT = "Java 4.9.8"
MQADMIN = "mqadmin 4.9.8"
JAVA, JAVA_FIVE, JAVA_NEWEST = "4.9.8", "5.3.3", "5.5.0"
"""Apache's remoting clients: our Java programs are compiled once for each."""
GO_CLIENT = "Go 2.1.2"
CLIENTS = {
    "test_mqadmin": MQADMIN,
    "test_go": GO_CLIENT,
    "test_java_five": f"Java {JAVA_FIVE}",
    "test_mqadmin_five": f"mqadmin {JAVA_FIVE}",
}
"""By the module that tries it; others try `JAVA_CLIENT`."""
SMALL_JVM = ("-Xmx256m", *SMALL)
SHARED = "peer.jsa"
START_S = 240.0
"""A foreign program may take so long to start and do something. A second is usual."""


def missing(*programs: str) -> str:
    """Which of the programs are not here; empty if all are."""
    found = [name for name in programs if shutil.which(name) is None]
    return f"missing: {', '.join(found)}" if found else ""


# Proofs of the tests


_proofs = compatibility.Proofs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


_passed = pytest.StashKey[bool]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--compatibility")
    if path is not None:
        path.write_text(compatibility.document(_proofs))


@pytest.fixture(autouse=True)
def proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Notes the requests of foreign clients and to them, and the test's feature, if the test passes."""
    client = CLIENTS.get(request.module.__name__.rpartition(".")[2], JAVA_CLIENT)
    if "official" in request.fixturenames:
        client = str(request.getfixturevalue("official").name)
    if "programs_newest" in request.fixturenames:
        client = f"mqadmin {JAVA_NEWEST}"
    seen: set[tuple[int, str]] = set()
    serve, send_event, send_request = Dispatch.serve, RemotingConnection.send_event, RemotingConnection.send_request

    def serving(dispatch: Dispatch, connection: RemotingConnection) -> None:
        for frame in FrameReader().feed(connection.requests.data[connection.requests.at :]):
            if not frame.is_response and frame.language in (Language.JAVA, Language.GO):
                seen.add((frame.code, client))
        serve(dispatch, connection)

    def sending_event(connection: RemotingConnection, event: SessionEvent) -> None:
        seen.update((frame.code, client) for frame in FrameReader().feed(events.encode_event(event)))
        send_event(connection, event)

    def sending_request(connection: RemotingConnection, number: int, wanted: ClientRequest) -> None:
        seen.update((frame.code, client) for frame in FrameReader().feed(events.encode_request(number, wanted)))
        send_request(connection, number, wanted)

    monkeypatch.setattr(Dispatch, "serve", serving)
    monkeypatch.setattr(RemotingConnection, "send_event", sending_event)
    monkeypatch.setattr(RemotingConnection, "send_request", sending_request)
    yield
    if request.node.stash.get(_passed, False):
        for mark in request.node.iter_markers("feature"):
            _proofs.features.add((*mark.args, mark.kwargs.get("client", client)))
        _proofs.requests |= seen


# Processes


class Program:
    """A foreign client's process: what it printed so far, and its end when its stdin is closed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._came = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            self._came.set()

    def found(self, word: str) -> list[list[str]]:
        """The lines that begin with a word, cut at blanks."""
        return [line.split(" ") for line in self.lines if line.split(" ")[0] == word]

    @property
    def bodies(self) -> list[str]:
        return [line[5] for line in self.found("GOT")]

    async def until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Returns when the condition holds; fails when the program says FAILED, ends, or time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                for interval_s in poll_intervals():
                    if condition():
                        return
                    if self.process.returncode:
                        await self._reader  # it may have said why
                    failed = self.found("FAILED")
                    assert not failed, failed
                    assert not self.process.returncode, self.lines[-20:]
                    await pace(interval_s)
        except TimeoutError:
            raise AssertionError(f"not in {timeout_s} s; it printed {self.lines[-20:]}") from None

    async def started(self) -> None:
        await self.until(lambda: bool(self.found("STARTED")))

    async def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()

    async def end(self) -> None:
        assert self.process.stdin is not None
        if self.process.returncode is None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(120):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise
        finally:
            await self._reader

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


Run = Callable[..., AbstractAsyncContextManager[Program]]


@asynccontextmanager
async def program(*arguments: str, **environment: str) -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    peer = Program(process)
    try:
        yield peer
    finally:
        await peer.end()


def fetched(command: list[str], folder: Path) -> None:
    """Fetches what foreign programs are made of; skips the test where that cannot be reached."""
    fault = fetch(command, folder)
    if fault:
        pytest.skip(f"{command[0]} cannot fetch what is needed: {fault.splitlines()[-1]}")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our Java programs, compiled, and the classes of a consumer as a virtual machine loads them fastest."""
    return compiled(tmp_path_factory, JAVA)


@pytest.fixture(scope="session")
def programs_five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `programs`, for 5.x's client."""
    return compiled(tmp_path_factory, JAVA_FIVE)


@pytest.fixture(scope="session")
def programs_newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, JAVA_NEWEST)


def compiled(factory: pytest.TempPathFactory, version: str) -> Path:
    machine = str(Path(shutil.which("java") or "").resolve())
    sources = sorted(path for path in (HERE / "java").rglob("*") if path.suffix in (".java", ".xml"))
    return kept(
        factory, f"java-programs-{version}", partial(make_programs, version), [version, machine, *SMALL_JVM, *sources]
    )


def make_programs(version: str, folder: Path) -> None:
    """Compiles them. A package has another name in 5.x, and Maven Central has not all parts of each version."""
    project, jars, is_five = HERE / "java", folder / "lib", version != JAVA
    wanted = [f"-Drocketmq.version={version}", *([f"-Dfilter.version={version}"] if is_five else [])]
    fetched(["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}", *wanted], project)
    sources = folder / "src"
    sources.mkdir()
    for source in [*project.rglob("main/**/*.java"), *(project.rglob("five/**/*.java") if is_five else ())]:
        text = source.read_text()
        if is_five:
            text = text.replace("org.apache.rocketmq.common.protocol", "org.apache.rocketmq.remoting.protocol")
        (sources / source.name).write_text(text)
    options = ("-cp", f"{jars}/*", "-encoding", "UTF-8", "-nowarn", "-d", folder / "classes")
    subprocess.run(["javac", *options, *sorted(sources.iterdir())], check=True)
    Path(shutil.make_archive(str(folder / "peer"), "zip", folder / "classes")).rename(folder / "peer.jar")
    share_classes(folder)


def share_classes(folder: Path) -> None:
    """Starts and ends a consumer, and keeps its classes (JEP 350): a program takes a third less of the processor then. Where
    that cannot be, programs start as always."""
    with Broker() as broker, suppress(subprocess.TimeoutExpired):
        broker.create_topic("t")
        subprocess.run(
            ["java", *SMALL_JVM, f"-XX:ArchiveClassesAtExit={folder / SHARED}", "-Drocketmq.client.logUseSlf4j=true",
             f"-Duser.home={folder}", "-cp", classpath_of(folder),
             "Peer", "consume", f"ns={broker.address}", "group=g", "topic=t"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=START_S,
        )  # fmt: skip


def classpath_of(folder: Path) -> str:
    return f"{folder / 'peer.jar'}:{folder / 'lib'}/*"


@pytest.fixture(scope="session")
def classpath(programs: Path) -> str:
    """Our Java programs, with Apache's client and tools from Maven Central beside them."""
    return classpath_of(programs)


@pytest.fixture(scope="session")
def fetch_apache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """`fetch_apache("4.9.7")` fetches Apache's servers; it skips the test where that cannot be."""

    def fetch(version: str) -> None:
        def make(_: Path) -> None:
            fault = apache_fault() or asyncio.run(fetch_fault(version))
            if fault:
                pytest.skip(fault)

        made_once(tmp_path_factory, f"apache-{version}", make)

    return fetch


@pytest.fixture(scope="session", params=["rocketlet", "4.9.7", JAVA_NEWEST])
def version(request: pytest.FixtureRequest) -> str:
    """The system's version. The fixture lasts for the session, so that the tests of one version follow each other."""
    return str(request.param)


@pytest.fixture
def system(version: str, tmp_path_factory: pytest.TempPathFactory, fetch_apache: Callable[[str], None]) -> System:
    """Shared with the tests of other files: topics and groups have names of their own, or are deleted."""
    if version not in _systems:
        folder = tmp_path_factory.mktemp("system")
        if version == "rocketlet":
            _systems[version] = System(Ours(folder))
        else:
            fetch_apache(version)
            lite = LITE if version == JAVA_NEWEST else {}
            _systems[version] = System(Apache(folder, version, HEAP, **SETTINGS, **lite))
    return _systems[version]


_systems: dict[str, System] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Stops a system behind its last test: Apache's brokers use the processor while nobody uses them, for as long as the
    tests of others last."""
    try:
        yield
    finally:
        callspec = getattr(nextitem, "callspec", None)
        version = callspec.params.get("version") if callspec else None
        for name in _systems.keys() - {version}:
            _systems.pop(name).stop()


@pytest.fixture
def java(programs: Path, tmp_path: Path) -> Run:
    """`async with java("consume", ns=..., topic=...) as peer:`"""
    return runner(programs, tmp_path)


@pytest.fixture
def java_five(programs_five: Path, tmp_path: Path) -> Run:
    """As `java`, with 5.x's client."""
    return runner(programs_five, tmp_path)


@pytest.fixture(params=[JAVA_FIVE, JAVA_NEWEST])
def java_fives(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """As `java_five`, with the newest of 5.x's clients, too."""
    name = "programs_five" if request.param == JAVA_FIVE else "programs_newest"
    return runner(request.getfixturevalue(name), tmp_path)


def runner(programs: Path, home: Path) -> Run:
    logback = home / "conf" / "logback_tools.xml"
    logback.parent.mkdir(exist_ok=True)
    logback.write_text('<configuration><root level="OFF"/></configuration>')

    def run(program_mode: str, /, jvm: Sequence[str] = (), **options: object) -> AbstractAsyncContextManager[Program]:
        named = [f"{name.replace('_', '-')}={value}" for name, value in options.items()]
        return program(
            "java", *jvm, *SMALL_JVM, f"-XX:SharedArchiveFile={programs / SHARED}", "-Xlog:disable", "-Dfile.encoding=UTF-8",
            "-Drocketmq.client.logUseSlf4j=true", f"-Dlogback.configurationFile={logback}", f"-Duser.home={home}",
            "-cp", classpath_of(programs), "Peer", program_mode, *named, ROCKETMQ_HOME=str(home),
        )  # fmt: skip

    return run


# Clusters


@dataclass
class Cluster:
    """A name server and its brokers. `wires`: a plain connection to each broker."""

    address: str
    nodes: list[Node]
    wires: list[Wire]

    async def create_topic(self, topic: str, queues: int = 4, perm: int = 6) -> None:
        """On every broker."""
        for wire in self.wires:
            await create_topic(wire, topic, queues, perm)

    def stored(self, topic: str) -> int:
        """How many messages a topic has."""
        return sum(
            queue.next for node in self.nodes for queue in node.broker.store.queues.values() if queue.topic == topic
        )


@pytest.fixture
def brokers(request: pytest.FixtureRequest) -> int:
    """Two, unless the test names another number, as those with `on_one_broker_and_two` do."""
    return int(getattr(request, "param", 2))


on_one_broker_and_two = pytest.mark.parametrize("brokers", [1, 2], ids=["one-broker", "two-brokers"], indirect=True)
"""For a few tests of each client: what a client does otherwise is the same with a name server and brokers of its own."""


@pytest.fixture
async def start_cluster(nodes: Nodes, connect: Connect) -> Callable[..., Any]:
    async def start(brokers: int, **settings: Any) -> Cluster:
        if brokers == 1:
            node = await nodes.start(**settings)
            return Cluster(node.address, [node], [await connect(node.address)])
        port = free_port()
        server = Server(Listening("127.0.0.1", port), broker=None, routes=Routes())
        await nodes.stack.enter_async_context(server)
        address = f"127.0.0.1:{port}"
        started = [
            await nodes.start(name=f"broker-{letter}", name_servers=(address,), **settings)
            for letter in "abcdefgh"[:brokers]
        ]
        return Cluster(address, started, [await connect(node.address) for node in started])

    return start


StartCluster = Callable[..., Any]


@pytest.fixture
async def cluster(start_cluster: StartCluster, brokers: int) -> Cluster:
    """One process with name server and broker, or a name server and two brokers."""
    found = await start_cluster(brokers)
    assert isinstance(found, Cluster)
    return found


def own(consumer: Consumer, topic: str) -> int:
    """How many queues of a topic a consumer owns."""
    return sum(queue.topic == topic for queue in consumer.assignment())


def waiting(cluster: Cluster, group: str) -> int:
    """How many pulls of a group the brokers hold."""
    count = 0
    for node in cluster.nodes:
        found = node.broker.groups.get(group)
        count += sum(len(node.broker.held_pulls.of(connection)) for connection in (found.members if found else ()))
    return count


async def tagged_messages_arrive(cluster: Cluster, peer: Program, mode: str) -> None:
    """Sends messages of three tags, of which the program wants A and B: those come, each once, in order if asked for."""
    await peer.started()
    async with Producer(cluster.address) as producer:
        key = "one" if mode == "orderly" else None
        for number in range(60):
            await producer.send("t", b"%d" % number, tag="ABC"[number % 3], queue_key=key)
        await peer.until(lambda: len(peer.bodies) >= 40)
    wanted = [str(number) for number in range(60) if number % 3 < 2]
    assert (peer.bodies if mode == "orderly" else sorted(peer.bodies, key=int)) == wanted


async def filled(cluster: Cluster) -> list[str]:
    """A topic with five messages in each of two queues per broker; their bodies."""
    await cluster.create_topic("t", 2)
    bodies: list[str] = []
    async with Producer(cluster.address) as producer:
        for node in cluster.nodes:
            for queue in range(2):
                for number in range(5):
                    bodies.append(f"{node.broker.config.name}-{queue}-{number}")
                    at = Queue("t", node.broker.config.name, queue)
                    await producer.send("t", bodies[-1].encode(), queue=at, tag="even" if number % 2 == 0 else "odd")
    return bodies


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our Go program, compiled, with Apache's client from the module proxy in it."""
    folder = HERE / "go"

    def make(_: Path) -> None:
        fetched(["go", "mod", "download"], folder)
        subprocess.run(["go", "build", "-o", "target/peer", "."], cwd=folder, check=True)

    made_once(tmp_path_factory, "go-program", make)
    return str(folder / "target" / "peer")


@pytest.fixture
def go(binary: str) -> Run:
    def run(program_mode: str, /, **options: object) -> AbstractAsyncContextManager[Program]:
        return program(binary, program_mode, *(f"{name}={value}" for name, value in options.items()))

    return run
