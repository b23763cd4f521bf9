"""Real brokers on free ports, and a client that speaks plain frames."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import structlog
from filelock import FileLock
from hypothesis import HealthCheck, settings
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig, Limits
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.connection import Host, RemotingConnection
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol.codes import Language, RequestCode, ResponseCode
from rocketlet.protocol.frame import JSON, Frame, FrameReader, encode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.loop import CheckedLoop
from rocketlet.testing.ports import free_port

from bench.peers import CACHE

from . import side_by_side
from .support import spark_home
from .support.certificates import Certificates
from .support.pacing import pace, poll_intervals

PATIENCE_S = float(os.environ.get("ROCKETLET_TESTS_PATIENCE_S", "60"))
"""After this a test that waits has failed. It is far from what any wait takes, on a busy machine, too."""
FOREIGN = ("java", "go", "node", "pypi", "rust", "spark", "browser", "pyright")
"""Markers of tests that start programs of others."""
FOREIGN_S = 900.0
"""How long such a test may take: it may have to wait until everything is fetched, with empty caches."""
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
PYRIGHT = "pyright@1.1.414"

_LOGS = structlog.get_config()  # nothing has configured them yet

# The same examples each time, so that nothing fails by chance, for somebody who has changed something else.
# `--hypothesis-profile search` looks for others. Without the compiled module the tests run beside those with it.
EXAMPLES = 30 if os.environ.get("ROCKETLET_PURE") == "1" else 100
settings.register_profile(
    "same", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, max_examples=EXAMPLES
)
settings.register_profile("search", deadline=None, suppress_health_check=list(HealthCheck), max_examples=2000)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compatibility", type=Path, help="write the table of what the passed interop tests prove")
    parser.addoption("--screenshots", type=Path, help="write the pictures of the console's pages into this folder")


def has_memory_for_files(folder: Path) -> bool:
    """True if files of tests can be in memory. On a disk brokers would sync thousands of them, for milliseconds each."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    can_run = os.access(folder, os.W_OK) and not found.f_flag & os.ST_NOEXEC
    return can_run and found.f_bavail * found.f_frsize >= MEMORY_BYTES


class _RootIsAFolder:
    """The root is the package `rocketlet`, by an import hook. Pytest would import it again under its folder's name, and
    fails where that is none of Python's, as `rocketlet-main`."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config: pytest.Config) -> None:
    """Sets what Spark and Maven read in all processes that tests start; workers of pytest-xdist inherit it."""
    config.pluginmanager.register(_RootIsAFolder())
    if "TMPDIR" not in os.environ and has_memory_for_files(MEMORY):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
    os.environ.update(spark_home.environment())
    os.environ.setdefault("MAVEN_OPTS", " ".join(spark_home.JVM))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing that is collected is garbage, and the collector would search it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark"):
        spark_home.share_classes()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that brokers and clients run on."""
    return {"uvloop": _WatchedLoop}


class _WatchedLoop(CheckedLoop):
    """Keeps what callbacks raise. A loop only logs it, and nothing else would notice."""

    raised: ClassVar[list[BaseException]] = []

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        is_asked_for = not {"future", "task"}.isdisjoint(context)  # or may still be
        if "exception" in context and not is_asked_for and self.get_exception_handler() is None:
            self.raised.append(context["exception"])
        super().call_exception_handler(context)


@pytest.fixture(autouse=True)
def no_callback_raises() -> Iterator[None]:
    _WatchedLoop.raised.clear()
    yield
    assert not _WatchedLoop.raised, "a callback has raised"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return side_by_side.WORKERS_PER_CORE * (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> side_by_side.Scheduling:
    return side_by_side.Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in FOREIGN):
            item.add_marker(pytest.mark.timeout(FOREIGN_S), append=False)
    items.sort(key=lambda item: side_by_side.place(item.nodeid, is_long=item.get_closest_marker("long") is not None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was retried. It passed then, so nothing else would say it."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"why {report.nodeid} was retried")
        for text in (report.longreprtext, *(f"{name}\n{text}" for name, text in report.sections)):
            terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A test that configures the logs puts them back: tests of other modules wait for events, which a higher level would
    swallow."""
    assert structlog.get_config() == _LOGS, "importing the tests has configured the logs, for all of them"
    yield
    left = structlog.get_config()
    structlog.configure(**_LOGS)
    assert left == _LOGS, "this test has configured the logs and left them so"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that is filled by `make` once for all workers of pytest-xdist. If that skips, all skip."""
    own = factory.getbasetemp()
    top = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, outcome = top / name, top / f"{name}.made"
    with FileLock(top / f"{name}.lock"):
        if not outcome.exists():
            folder.mkdir(exist_ok=True)
            try:
                make(folder)
            except pytest.skip.Exception as skipped:
                outcome.write_text(str(skipped))
            else:
                outcome.touch()
        reason = outcome.read_text()
    if reason:
        pytest.skip(reason)
    return folder


def kept(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None], made_of: Iterable[str | Path]
) -> Path:
    """A folder as of `made_once` that later runs use, too, while the texts and files that it is made of are the same."""
    inputs = [item.read_text() if isinstance(item, Path) else item for item in made_of]
    key = hashlib.sha256("\0".join([sys.version, *inputs]).encode()).hexdigest()[:12]
    folder = CACHE / "tests" / f"{name}-{key}"

    def fill(_: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / "made").touch()

    made_once(factory, name, fill)
    return folder


@dataclass
class Node:
    """A running broker with a name server, in this process. Its clock runs, and further when a test advances it. A test
    that says what has NOT happened yet gives it a clock that stands: this machine may stall at any moment."""

    address: str
    broker: BrokerController
    server: Server
    config: BrokerConfig
    clock: MovableClock
    is_stopped: bool = False

    async def stop(self) -> None:
        """As SIGTERM does it; the second time nothing."""
        if not self.is_stopped:
            self.is_stopped = True
            await self.server.__aexit__()

    def break_connections(self) -> None:
        """Abort the connections of all clients, as a fault of the network does."""
        for connection in self.server.connections:
            connection.abort()

    async def served(self, code: int, count: int = 1) -> None:
        """Wait until the broker has processed this many further requests with the code."""
        served = self.broker.request_times[code]
        before = sum(served.counts)
        await eventually(lambda: sum(served.counts) >= before + count)


@dataclass
class Nodes:
    """Starts nodes; all are stopped at the end of the test. For tests of what is inside of a broker: its objects, a clock
    that stands, plain frames. `limits`: those that the test's marker names. A test that only needs a broker takes the
    kit's, which hides all that."""

    folder: Path
    stack: AsyncExitStack
    limits: Limits

    async def start(self, *, clock: MovableClock | None = None, limits: Limits | None = None, **settings: Any) -> Node:
        limits = limits or self.limits
        port = settings.pop("port", None) or free_port()
        address = f"127.0.0.1:{port}"
        name = settings.pop("name", "broker-a")
        of_server = {key: settings.pop(key) for key in ("tls", "acl") if key in settings}
        settings.setdefault("data_dir", self.folder / name)
        config = replace(BrokerConfig(data_dir=Path(), address=address, name=name), **settings)
        clock = clock or MovableClock()
        routes = None if config.name_servers else Routes(clock, limits=limits)
        broker = BrokerController(config, routes, clock, limits=limits, **of_server)
        server = Server(Listening("127.0.0.1", port, **of_server), broker=broker, routes=routes)
        node = Node(address, broker, await server.__aenter__(), config, clock)
        self.stack.push_async_callback(node.stop)
        return node


def limits_of(request: pytest.FixtureRequest) -> Limits:
    """Those that the markers `limits` of the test and its module name, and the usual ones beside them."""
    named: dict[str, Any] = {}
    for marker in request.node.iter_markers("limits"):  # the closest one first
        named = {**marker.kwargs, **named}
    return Limits(**named)


@pytest.fixture
async def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield Nodes(tmp_path, stack, limits_of(request))


@pytest.fixture
async def node(nodes: Nodes, request: pytest.FixtureRequest) -> Node:
    """One broker with its own name server. With the marker `still`, its clock stands until the test advances it."""
    return await nodes.start(clock=MovableClock(stands=request.node.get_closest_marker("still") is not None))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "tls"
    folder.mkdir()
    return Certificates.make(folder)


def peer(host: object = None) -> RemotingConnection:
    """Return a connection without a client. host: the parts of its server that the test needs."""
    return RemotingConnection(cast("Host", host))


class Wire:
    """A peer that sends and receives plain frames, in the encoding that a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._opaque = 0
        self._answers: dict[int, Frame] = {}
        self.requests: list[Frame] = []

    async def call(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        serialize_type: int = JSON,
        language: int = Language.JAVA,
    ) -> Frame:
        """The answer to a request."""
        opaque = self.send(code, ext, body, flag=flag, serialize_type=serialize_type, language=language)
        return await self.answer(opaque)

    def send(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        serialize_type: int = JSON,
        language: int = Language.JAVA,
    ) -> int:
        self._opaque += 1
        frame = Frame(code, self._opaque, ext or {}, body, flag, language=language, serialize_type=serialize_type)
        self._writer.write(encode(frame))
        return self._opaque

    async def answer(self, opaque: int) -> Frame:
        while opaque not in self._answers:
            await self._read()
        return self._answers.pop(opaque)

    async def request(self, code: int) -> Frame:
        """The next request of the broker with this code."""
        while True:
            for index, frame in enumerate(self.requests):
                if frame.code == code:
                    return self.requests.pop(index)
            await self._read()

    async def _read(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            data = await self._reader.read(1 << 20)
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        for frame in self._frames.feed(data):
            if frame.is_response:
                self._answers[frame.opaque] = frame
            else:
                self.requests.append(frame)

    def write_answer(self, request: Frame, body: bytes = b"", code: int = 0) -> None:
        """Answers a request of the broker."""
        self._writer.write(encode(Frame(code, request.opaque, body=body, flag=1)))

    async def refuse(self) -> None:
        """Answers what the broker asks as a client that knows no such requests, until it is cancelled."""
        while True:
            while self.requests:
                self.write_answer(self.requests.pop(), code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
            await self._read()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def closed(self) -> bool:
        """Whether the broker closes the connection without another answer; its own requests may still come."""
        async with asyncio.timeout(PATIENCE_S):
            while data := await self._reader.read(1 << 20):
                if any(frame.is_response for frame in self._frames.feed(data)):
                    return False
        return True

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


Connect = Callable[[str], Awaitable[Wire]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect("host:port")` gives a Wire; all are closed at the end."""
    wires: list[Wire] = []

    async def open_wire(address: str) -> Wire:
        host, _, port = address.rpartition(":")
        wires.append(Wire(*await asyncio.open_connection(host, int(port))))
        return wires[-1]

    yield open_wire
    for wire in wires:
        await wire.close()


@pytest.fixture
async def wire(node: Node, connect: Connect) -> Wire:
    """A plain connection to `node`."""
    return await connect(node.address)


async def create_topic(wire: Wire, topic: str, queues: int = 4, perm: int = 6, **fields: Any) -> None:
    header = CreateTopic(topic, queues, queues, perm, **fields)
    answer = await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(header))
    assert answer.code == 0, answer.remark


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds, which is checked every few ms; a slow check takes up to a fifth of the time. Raises
    TimeoutError when it never does."""
    now_s = asyncio.get_running_loop().time
    async with asyncio.timeout(timeout_s):
        for interval_s in poll_intervals():
            began_s = now_s()
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await pace(max(interval_s, min(4 * (now_s() - began_s), 0.5)))
