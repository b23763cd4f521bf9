"""The systems that are measured, each a real process on free ports; and the processes of other tests and campaigns."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Access
from rocketlet.demo.processes import Child
from rocketlet.protocol.bodies import decode_cluster
from rocketlet.protocol.codes import RequestCode
from rocketlet.testing.ports import free_port

from . import versions

APACHE_START_S = 90.0  # it takes 3 s on a machine with nothing else to do
APACHE_TRIES = 3
FETCH_S = 600.0  # it takes seconds, or a minute with an empty cache
APACHE_HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=2g")
CLUSTER_HEAP = ("-Xms512m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=512m")
PROXY_HEAP = ("-Xms512m", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=1g")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rocketlet"
POM = Path(__file__).parent / "apache" / "pom.xml"
KAFKA_POMS = Path(__file__).parent / "kafka"
LOGGING = '<configuration><root level="OFF"/></configuration>\n'
ACCOUNT = Access(access_key="bench-key", secret_key="a-long-secret")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Used(NamedTuple):
    """What one process has used: CPU seconds of its own and of its ended children, and resident memory."""

    pid: int
    parent: int
    name: str
    cpu_s: float
    children_s: float
    resident_bytes: int


def used(pid: int) -> Used | None:
    """Return what a process has used, from /proc; None if the process has ended."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    user, system, children_user, children_system = (int(field) / _TICKS_PER_S for field in fields[11:15])
    resident = int(fields[21]) * _PAGE_BYTES
    return Used(pid, int(fields[1]), head.partition("(")[2], user + system, children_user + children_system, resident)


@dataclass(frozen=True, slots=True)
class Peer:
    """A running system. `pid` is the process that stores messages; `access` authenticates its clients."""

    name: str
    address: str
    pid: int
    access: Access | None = None

    def resident_mib(self) -> float:
        found = used(self.pid)
        return found.resident_bytes / (1 << 20) if found else 0.0

    def cpu_s(self) -> float:
        found = used(self.pid)
        return found.cpu_s if found else float("nan")


@asynccontextmanager
async def process(arguments: Sequence[str], log: Path, **environment: str) -> AsyncIterator[int]:
    """A child process whose output is in `log`, ended by its own id."""
    child = await Child.start(arguments, log, reads=False, environment=environment)
    try:
        yield child.pid
    finally:
        await child.stop(20)


async def listening(port: int, timeout_s: float = 180.0, *, pid: int | None = None) -> None:
    """Return when something accepts connections on the port. Raises ProcessLookupError when the process `pid` has ended."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                if pid is not None:
                    os.kill(pid, 0)
                await asyncio.sleep(0.005)
                continue
            writer.close()
            return


@asynccontextmanager
async def rocketlet(
    folder: Path, *options: str, name: str = "rocketlet", signs: bool = False, tls: bool = False
) -> AsyncIterator[Peer]:
    """Our broker.

    Args:
        folder: Where a folder of the system's name is made.
        options: More options of `rocketlet start`.
        name: The name of the peer.
        signs: True if clients need an account.
        tls: True if the broker takes only connections over TLS.
    """
    home, port, access = folder / name, free_port(), Access()
    home.mkdir()
    if signs:
        account = f"accessKey: {ACCOUNT.access_key}, secretKey: {ACCOUNT.secret_key}, topicPerms: [bench=PUB]"
        (home / "plain_acl.yml").write_text(f"accounts: [{{{account}}}]")
        options, access = (*options, "--acl", str(home / "plain_acl.yml")), ACCOUNT
    if tls:
        import trustme

        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(home / "ca.pem"))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "server.pem"))
        options = (*options, "--tls", "enforcing", "--tls-cert", str(home / "server.pem"))
        access = replace(access, tls=True, ca_file=str(home / "ca.pem"))
    arguments = (
        sys.executable, "-m", "rocketlet.command.cli", "start", "--host", "127.0.0.1", "--port", str(port),
        "--data", str(home / "data"), "--log-level", "warning", *options,
    )  # fmt: skip
    async with process(arguments, home / "log") as pid:
        await listening(port)
        yield Peer(name, f"127.0.0.1:{port}", pid, access if signs or tls else None)


def java_fault(fetched: str) -> str | None:
    """Return why Java's programs cannot run here, unless their jars (a pattern) are in the cache; None if they can."""
    if shutil.which("java") is None:
        return "java is missing"
    if not any(CACHE.glob(fetched)) and shutil.which("mvn") is None:
        return "mvn is missing, which fetches jars from Maven Central"
    return None


def apache_fault() -> str | None:
    return java_fault("apache-*/rocketmq-broker-*.jar")


def fetch(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command that fetches something. Return the end of its output if it failed, and nothing if it did not.

    One runs at a time on this machine, because Maven's repository and the caches of Go and npm are not made for several
    that fill them. A failed one is retried once, because networks have hiccups."""
    CACHE.mkdir(parents=True, exist_ok=True)
    output = ""
    with (CACHE / "fetching.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2):
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S)
            except subprocess.TimeoutExpired:
                return f"not within {FETCH_S:.0f} s"
            if not done.returncode:
                return ""
            output = (done.stdout + done.stderr).strip() or f"it ended with {done.returncode}"
    return output


async def fetch_python(folder: Path, needed: str, requirement: str) -> Path:
    """Return the folder with a package of PyPI, which is fetched unless the folder has `needed`."""
    if not any(folder.glob(needed)):
        command = (sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), requirement)
        if fault := await asyncio.to_thread(fetch, command):
            raise RuntimeError(f"pip could not fetch {requirement}: {fault[-2000:]}")
    return folder


async def maven_jars(folder: Path, needed: str, pom: Path, *options: str) -> Path:
    """Return the folder with the jars of a pom, which are fetched from Maven Central unless the folder has `needed`. The
    folder appears with all jars, because other processes may be waiting for it."""
    if any(folder.glob(needed)):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as coming:
        command = ("mvn", "-q", "-B", "-f", str(pom), *options, "dependency:copy-dependencies")
        fault = await asyncio.to_thread(fetch, (*command, f"-DoutputDirectory={coming}/jars"))
        if fault:
            raise RuntimeError(f"Maven could not fetch {folder.name}: {fault[-2000:]}")
        try:
            Path(coming, "jars").rename(folder)
        except OSError:  # another process was faster
            if not any(folder.glob(needed)):
                raise
    return folder


async def apache_jars(version: str) -> Path:
    return await maven_jars(CACHE / f"apache-{version}", "rocketmq-broker-*.jar", POM, f"-Drocketmq.version={version}")


async def fetch_fault(version: str) -> str | None:
    """Return why Apache's jars of a version are not here and cannot be fetched; None once they are here."""
    try:
        await apache_jars(version)
    except RuntimeError as error:
        return str(error)
    return None


async def compiled(program: str, jars: Path | None = None) -> str:
    """Return the classpath of one of our Java programs beside jars: by default those of Apache's client of 4.9."""
    jars = jars or await apache_jars(versions.APACHE)
    classes = jars / "programs"
    source = POM.parent / program
    child = await asyncio.create_subprocess_exec("javac", "-cp", f"{jars}/*", "-d", str(classes), str(source))
    if await child.wait():
        raise RuntimeError(f"{program} does not compile; see the output above")
    return f"{classes}:{jars}/*"


def java_options() -> tuple[str, ...]:
    """Return the options of a client that logs nothing."""
    quiet = CACHE / "logback.xml"
    quiet.write_text(LOGGING)
    return ("-Drocketmq.client.logUseSlf4j=true", f"-Dlogback.configurationFile={quiet}")


class Apache:
    """Apache's name server and broker as processes.

    `address` is the name server's, `broker_address` the broker's, whose name is `apache`. With `name_server`, the address of
    a running one, only a broker is started. `heap` is for the broker, `options` for both virtual machines; other settings
    are of broker.conf."""

    def __init__(
        self,
        folder: Path,
        version: str,
        heap: Sequence[str],
        *,
        options: Sequence[str] = (),
        name_server: str | None = None,
        **settings: object,
    ) -> None:
        self.home = folder / f"apache-{version}"
        self.version = version
        self._heap = heap
        self._options = options
        self._name_server = name_server
        self._jars = Path()
        self._settings = settings
        self._stack = AsyncExitStack()
        self._broker = AsyncExitStack()
        self.pid = 0
        self._configure()

    def _configure(self) -> None:
        """Write what both processes read, with free ports."""
        name_port, self._port = free_port(), free_port()
        self.address = self._name_server or f"127.0.0.1:{name_port}"
        self.broker_address = f"127.0.0.1:{self._port}"
        home = self.home
        (home / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("broker", "namesrv"):
            for file in (f"logback_{name}.xml", f"rmq.{name}.logback.xml"):
                (home / "conf" / file).write_text(LOGGING)
        (home / "namesrv.properties").write_text(f"listenPort={name_port}\n")
        settings = {
            "brokerName": "apache",
            "brokerIP1": "127.0.0.1",
            "listenPort": self._port,
            "namesrvAddr": self.address,
            "storePathRootDir": f"{home}/store",
            "storePathCommitLog": f"{home}/store/commitlog",
            "haListenPort": free_port(),
            "defaultTopicQueueNums": 8,
            **self._settings,
        }
        write_properties(home / "broker.properties", settings)

    async def __aenter__(self) -> Apache:
        self._jars = await self.jars()
        for tries_left in reversed(range(APACHE_TRIES)):
            try:
                if self._name_server is None:
                    await self._start_name_server()
                await self._start_broker()
                break
            except (TimeoutError, OSError) as error:
                await self.__aexit__()
                if not tries_left:
                    output = (self.home / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(
                        f"Apache {self.version} does not start ({error!r}); it printed {output!r}"
                    ) from error
                self._configure()
        return self

    async def jars(self) -> Path:
        return await apache_jars(self.version)

    async def __aexit__(self, *exception: object) -> None:
        await self._broker.aclose()
        await self._stack.aclose()

    async def restart_broker(self) -> None:
        """End the broker in order and start it again on the same address and data."""
        await self._broker.aclose()
        await self._start_broker()

    async def _start_name_server(self) -> None:
        arguments = self._java(
            "namesrv.NamesrvStartup", "namesrv.properties", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"
        )
        pid = await self._stack.enter_async_context(process(arguments, self.home / "log", ROCKETMQ_HOME=str(self.home)))
        await listening(int(self.address.rpartition(":")[2]), APACHE_START_S, pid=pid)

    async def _start_broker(self) -> None:
        await self._run(self._java("broker.BrokerStartup", "broker.properties", *self._heap), self._port)

    async def _run(self, arguments: Sequence[str], port: int) -> None:
        """Run the broker's process, and return when it listens on the port and is registered."""
        self._broker = AsyncExitStack()
        homes = {"ROCKETMQ_HOME": str(self.home), "RMQ_PROXY_HOME": str(self.home)}
        self.pid = await self._broker.enter_async_context(process(arguments, self.home / "log", **homes))
        await listening(port, APACHE_START_S, pid=self.pid)
        await _registered(self.address)

    def _java(self, main: str, properties: str, *heap: str) -> tuple[str, ...]:
        return (
            "java", *heap, *self._options, f"-Duser.home={self.home}",
            f"-XX:ErrorFile={self.home}/hs_err.log", "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
            "--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
            "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
            "-cp", f"{self._jars}/*", f"org.apache.rocketmq.{main}", "-c", str(self.home / properties),
        )  # fmt: skip


class Proxy(Apache):
    """Apache's proxy of 5.x with its broker inside (local mode), and its name server. `endpoint` is for clients of 5.x."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = ""
        super().__init__(folder, versions.APACHE_FIVE, PROXY_HEAP, recallMessageEnable="true")

    async def jars(self) -> Path:
        pom = POM.parent / "proxy.xml"
        version = f"-Drocketmq.version={versions.APACHE_FIVE}"
        return await maven_jars(CACHE / f"apache-proxy-{versions.APACHE_FIVE}", "rocketmq-proxy-*.jar", pom, version)

    def _configure(self) -> None:
        super()._configure()
        self._endpoint_port = free_port()
        self.endpoint = f"127.0.0.1:{self._endpoint_port}"
        (self.home / "conf" / "rmq.proxy.logback.xml").write_text(LOGGING)
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "grpcServerPort": self._endpoint_port,
            "remotingListenPort": free_port(),
            "namesrvAddr": self.address,
        }
        (self.home / "rmq-proxy.json").write_text(json.dumps(settings))

    async def _start_broker(self) -> None:
        arguments = (
            *self._java("proxy.ProxyStartup", "unused", *self._heap)[:-2], "-pm", "local", "-n", self.address,
            "-bc", str(self.home / "broker.properties"), "-pc", str(self.home / "rmq-proxy.json"),
        )  # fmt: skip
        await self._run(arguments, self._endpoint_port)


def write_properties(path: Path, settings: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


async def _registered(name_server: str) -> None:
    """Return when the name server has a broker."""
    cluster = ClusterView(name_server)
    try:
        async with asyncio.timeout(60):
            while True:
                answer = await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
                if decode_cluster(answer.body):
                    return
                await asyncio.sleep(0.02)
    finally:
        await cluster.close()


@asynccontextmanager
async def apache(
    folder: Path, flush: str = "ASYNC_FLUSH", *, version: str = versions.APACHE, name: str = "apache"
) -> AsyncIterator[Peer]:
    """Apache's name server and broker with their defaults, but for addresses, folders and the heap."""
    async with Apache(folder, version, APACHE_HEAP, flushDiskType=flush) as system:
        yield Peer(name, system.address, system.pid)


@asynccontextmanager
async def apache_cluster(folder: Path, names: Sequence[str]) -> AsyncIterator[str]:
    """Apache's brokers of these names with one name server, whose address this is."""
    async with AsyncExitStack() as stack:
        address: str | None = None
        for name in names:
            system = Apache(folder / name, versions.APACHE, CLUSTER_HEAP, name_server=address, brokerName=name)
            await stack.enter_async_context(system)
            address = system.address
        yield str(address)


NATS_SERVER = CACHE / f"nats-{versions.NATS}" / "nats-server"


def jetstream_fault() -> str | None:
    if not NATS_SERVER.exists() and shutil.which("go") is None:
        return "go is missing, which builds nats-server"
    return None


async def nats_server() -> str:
    """Return the path of JetStream's server, which is built from its Go module unless the cache has it."""
    if not NATS_SERVER.exists():
        module = f"github.com/nats-io/nats-server/v2@v{versions.NATS}"
        command = ("env", f"GOBIN={NATS_SERVER.parent}", "go", "install", module)
        if fault := await asyncio.to_thread(fetch, command):
            raise RuntimeError(f"Go could not build {module}: {fault[-2000:]}")
    return str(NATS_SERVER)


@asynccontextmanager
async def jetstream(folder: Path, *, syncs: bool = False) -> AsyncIterator[Peer]:
    port = free_port()
    settings = folder / "nats.conf"
    interval = "\n  sync_interval: always" if syncs else ""
    settings.write_text(f'jetstream {{\n  store_dir: "{folder}/nats"{interval}\n}}\n')
    arguments = (await nats_server(), "--addr", "127.0.0.1", "--port", str(port), "--config", str(settings))
    async with process(arguments, folder / "nats.log") as pid:
        await listening(port)
        yield Peer("jetstream", f"127.0.0.1:{port}", pid)


async def kafka_jars(pom: str, version: str, needed: str, setting: str) -> Path:
    """Return the folder with the jars of one of Kafka's parts."""
    options = (f"-D{setting}={version}", "-DincludeScope=runtime")
    return await maven_jars(CACHE / f"{pom}-{version}", needed, KAFKA_POMS / f"{pom}.xml", *options)


@asynccontextmanager
async def kafka(folder: Path) -> AsyncIterator[Peer]:
    """A Kafka broker with its defaults, which is its own controller."""
    jars = await kafka_jars("broker", versions.KAFKA, "kafka_*.jar", "kafka.version")
    port, controller = free_port(), free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": folder / "kafka",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
    }
    properties, log = folder / "kafka.properties", folder / "kafka.log"
    write_properties(properties, settings)
    java = ("java", "-Xms1g", "-Xmx1g", "-cp", f"{jars}/*")
    storage = (*java, "kafka.tools.StorageTool", "format", "-t", str(uuid.uuid4()), "-c", str(properties))
    if await (await Child.start(storage, log, reads=False)).wait(60):
        raise RuntimeError(f"Kafka's storage could not be formatted: {log.read_text()[-2000:]}")
    async with process((*java, "kafka.Kafka", str(properties)), log) as pid:
        await listening(port)
        yield Peer("kafka", f"127.0.0.1:{port}", pid)


@asynccontextmanager
async def echo(folder: Path) -> AsyncIterator[Peer]:
    port = free_port()
    async with process((sys.executable, "-m", "bench.echo", str(port)), folder / "echo.log") as pid:
        await listening(port)
        yield Peer("echo", f"127.0.0.1:{port}", pid)


async def make_kafka_topic(peer: Peer, topic: str, partitions: int) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": peer.address})  # must live until the topic is created
    await asyncio.to_thread(admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result)


class System(NamedTuple):
    """How a system is started with its data in a folder, and why it cannot be started here."""

    start: Callable[[Path], AbstractAsyncContextManager[Peer]]
    fault: Callable[[], str | None] = lambda: None


SYSTEMS: Mapping[str, System] = {
    "rocketlet": System(rocketlet),
    "rocketlet-signed": System(partial(rocketlet, name="rocketlet-signed", signs=True)),
    "rocketlet-synced": System(lambda folder: rocketlet(folder, "--flush", "sync")),
    "rocketlet-tls": System(partial(rocketlet, name="rocketlet-tls", tls=True)),
    "rocketlet-tls-signed": System(partial(rocketlet, name="rocketlet-tls-signed", tls=True, signs=True)),
    "java-on-rocketlet": System(partial(rocketlet, name="java-on-rocketlet"), apache_fault),
    "apache": System(apache, apache_fault),
    "apache-5": System(partial(apache, version=versions.APACHE_FIVE, name="apache-5"), apache_fault),
    "apache-synced": System(partial(apache, flush="SYNC_FLUSH"), apache_fault),
    "jetstream": System(jetstream, jetstream_fault),
    "jetstream-synced": System(partial(jetstream, syncs=True), jetstream_fault),
    "echo": System(echo),
    "kafka": System(kafka, partial(java_fault, "broker-*/kafka_*.jar")),
}
