"""The systems that are measured: each started as real processes on free ports, stopped at the end."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rocketlet.client.wire.cluster import Cluster
from rocketlet.client.wire.connection import Access
from rocketlet.protocol.bodies import decode_cluster
from rocketlet.protocol.codes import RequestCode
from rocketlet.testing.ports import free_port

APACHE_VERSION = "4.9.7"  # the newest 4.9 whose broker and name server are on Maven Central
APACHE_START_S = 90.0  # it takes 3 s on a machine with nothing else to do
APACHE_TRIES = 3
FETCH_S = 600.0  # it takes seconds, or a minute with an empty cache
APACHE_HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=2g")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rocketlet"
POM = Path(__file__).parent / "apache" / "pom.xml"


@dataclass(frozen=True, slots=True)
class Peer:
    """A running system. `pid` is the process that stores messages; `access` is how to show who asks, if it wants to know."""

    name: str
    address: str
    pid: int
    access: Access | None = None

    def resident_mib(self) -> float:
        """The broker's resident memory (VmRSS), MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def cpu_s(self) -> float:
        """Processor time of the broker's process, s."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def process(arguments: Sequence[str], log: Path, **environment: str) -> AsyncIterator[int]:
    """A child process, ended by its own id."""
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *arguments, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        yield child.pid
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(20):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()


async def listening(port: int, timeout_s: float = 180.0, *, pid: int | None = None) -> None:
    """Returns when something accepts connections on the port. Raises ProcessLookupError when the process `pid` has ended."""
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
async def rocketlet(folder: Path, *options: str) -> AsyncIterator[Peer]:
    port = free_port()
    arguments = (
        sys.executable, "-m", "rocketlet.command.cli", "start", "--host", "127.0.0.1", "--port", str(port),
        "--data", str(folder / "rocketlet"), "--log-level", "warning", *options,
    )  # fmt: skip
    async with process(arguments, folder / "rocketlet.log") as pid:
        await listening(port)
        yield Peer("rocketlet", f"127.0.0.1:{port}", pid)


@asynccontextmanager
async def rocketlet_signed(folder: Path) -> AsyncIterator[Peer]:
    """Our broker once more, with accounts: each request is signed, and checked."""
    home = folder / "signed"
    home.mkdir()
    async with rocketlet(home, *_accounts(home)) as peer:
        yield replace(peer, name="rocketlet-signed", access=ACCOUNT)


@asynccontextmanager
async def rocketlet_tls(folder: Path, name: str = "rocketlet-tls", *, signs: bool = False) -> AsyncIterator[Peer]:
    """Our broker once more, over TLS."""
    import trustme

    home = folder / name
    home.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "server.pem"))
    options = ("--tls", "enforcing", "--tls-cert", str(home / "server.pem"), *(_accounts(home) if signs else ()))
    async with rocketlet(home, *options) as peer:
        access = replace(ACCOUNT if signs else Access(), tls=True, ca_file=str(home / "ca.pem"))
        yield replace(peer, name=name, access=access)


def rocketlet_tls_signed(folder: Path) -> AbstractAsyncContextManager[Peer]:
    """Over TLS and with accounts: the client shows once for each connection who it is."""
    return rocketlet_tls(folder, "rocketlet-tls-signed", signs=True)


ACCOUNT = Access(access_key="bench-key", secret_key="a-long-secret")


def _accounts(folder: Path) -> tuple[str, str]:
    path = folder / "plain_acl.yml"
    account = f"accessKey: {ACCOUNT.access_key}, secretKey: {ACCOUNT.secret_key}, topicPerms: [bench=PUB]"
    path.write_text(f"accounts: [{{{account}}}]")
    return "--acl", str(path)


@asynccontextmanager
async def rocketlet_synced(folder: Path) -> AsyncIterator[Peer]:
    """Our broker once more; it acknowledges what is on the device."""
    async with rocketlet(folder, "--flush", "sync") as peer:
        yield peer


@asynccontextmanager
async def java_on_rocketlet(folder: Path) -> AsyncIterator[Peer]:
    """Our broker once more, for Apache's clients."""
    (folder / "java").mkdir()
    async with rocketlet(folder / "java") as peer:
        yield replace(peer, name="java-on-rocketlet")


@asynccontextmanager
async def python_on_apache(folder: Path) -> AsyncIterator[Peer]:
    """Apache's broker once more, for our clients."""
    (folder / "python").mkdir()
    async with apache(folder / "python") as peer:
        yield replace(peer, name="python-on-apache")


def apache_fault() -> str | None:
    """Why Apache's broker cannot be measured here; None if it can."""
    if shutil.which("java") is None:
        return "java is missing"
    if not any(CACHE.glob("apache-*/rocketmq-broker-*.jar")) and shutil.which("mvn") is None:
        return "mvn is missing, which fetches Apache RocketMQ from Maven Central"
    return None


def fetch(command: Sequence[str], folder: Path | None = None) -> str:
    """Runs a command that fetches something. Returns its last words if it failed, and nothing if it did not.

    One runs at a time on this machine, because Maven's repository and the caches of Go and npm are not made for several
    that fill them. A failed one is tried once more, because networks have hiccups."""
    CACHE.mkdir(parents=True, exist_ok=True)
    said = ""
    with (CACHE / "fetching.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2):
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S)
            except subprocess.TimeoutExpired:
                return f"not within {FETCH_S:.0f} s"
            if not done.returncode:
                return ""
            said = (done.stdout + done.stderr).strip() or f"it ended with {done.returncode}"
    return said


async def maven_jars(folder: Path, needed: str, pom: Path, *options: str) -> Path:
    """The folder with the jars of a pom, fetched from Maven Central if none that is `needed` is there. It comes into being
    with all of them: others may be looking for it, too."""
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
        except OSError:  # somebody else was faster
            if not any(folder.glob(needed)):
                raise
    return folder


async def apache_jars(version: str) -> Path:
    return await maven_jars(CACHE / f"apache-{version}", "rocketmq-broker-*.jar", POM, f"-Drocketmq.version={version}")


async def fetch_fault(version: str) -> str | None:
    """Why Apache's jars of a version are not here and cannot be fetched; None once they are here."""
    try:
        await apache_jars(version)
    except RuntimeError as error:
        return str(error)
    return None


async def compiled(program: str) -> str:
    """The classpath of one of our Java programs beside Apache's client."""
    return await compiled_with(await apache_jars(APACHE_VERSION), program)


async def compiled_with(jars: Path, program: str) -> str:
    classes = jars / "programs"
    source = POM.parent / program
    child = await asyncio.create_subprocess_exec("javac", "-cp", f"{jars}/*", "-d", str(classes), str(source))
    if await child.wait():
        raise RuntimeError(f"{program} does not compile; see the output above")
    return f"{classes}:{jars}/*"


def java_options() -> tuple[str, ...]:
    """A client's options: quiet."""
    quiet = CACHE / "logback.xml"
    quiet.write_text(LOGGING)
    return ("-Drocketmq.client.logUseSlf4j=true", f"-Dlogback.configurationFile={quiet}")


LOGGING = '<configuration><root level="OFF"/></configuration>\n'


@asynccontextmanager
async def apache(folder: Path) -> AsyncIterator[Peer]:
    """Name server and broker with their defaults, but for addresses, folders and the heap."""
    async with Apache(folder, APACHE_VERSION, APACHE_HEAP) as system:
        yield Peer("apache", system.address, system.pid)


@asynccontextmanager
async def apache_cluster(folder: Path, names: Sequence[str]) -> AsyncIterator[str]:
    """Brokers of these names with one name server, whose address this is."""
    heap = ("-Xms512m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=512m")
    async with AsyncExitStack() as stack:
        address: str | None = None
        for name in names:
            system = Apache(folder / name, APACHE_VERSION, heap, name_server=address, brokerName=name)
            await stack.enter_async_context(system)
            address = system.address
        yield str(address)


@asynccontextmanager
async def apache_synced(folder: Path) -> AsyncIterator[Peer]:
    """Apache's broker; it acknowledges what is on the device."""
    async with Apache(folder, APACHE_VERSION, APACHE_HEAP, flushDiskType="SYNC_FLUSH") as system:
        yield Peer("apache", system.address, system.pid)


class Apache:
    """Apache's name server and broker as processes. `address` is the name server's, `broker_address` the broker's, whose
    name is `apache`; settings are of broker.conf, options of both virtual machines. `name_server`: the address of one that
    runs; then only a broker is started."""

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
        self._version = version
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
        """Writes what both read, with ports that are free."""
        name_port, self._port = free_port(), free_port()
        self.address = self._name_server or f"127.0.0.1:{name_port}"
        self.broker_address = f"127.0.0.1:{self._port}"
        home = self.home
        (home / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("broker", "namesrv"):
            for file in (f"logback_{name}.xml", f"rmq.{name}.logback.xml"):
                (home / "conf" / file).write_text(LOGGING)
        (home / "namesrv.properties").write_text(f"listenPort={name_port}\n")
        lines = {
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
        (home / "broker.properties").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    async def __aenter__(self) -> Apache:
        self._jars = await self.jars()
        for tries_left in reversed(range(APACHE_TRIES)):
            try:
                await self._start()
                break
            except (TimeoutError, OSError) as error:
                await self.__aexit__()
                if not tries_left:
                    said = (self.home / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(
                        f"Apache {self._version} does not start ({error!r}); it printed {said!r}"
                    ) from error
                self._configure()
        return self

    async def jars(self) -> Path:
        return await apache_jars(self._version)

    async def __aexit__(self, *exception: object) -> None:
        await self._broker.aclose()
        await self._stack.aclose()

    async def restart_broker(self) -> None:
        """Ends the broker in order and starts it again on the same address and data."""
        await self._broker.aclose()
        await self._start_broker()

    async def _start(self) -> None:
        if self._name_server is None:
            await self._start_name_server()
        await self._start_broker()

    async def _start_name_server(self) -> None:
        arguments = self._java(
            "namesrv.NamesrvStartup", "namesrv.properties", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"
        )
        pid = await self._stack.enter_async_context(process(arguments, self.home / "log", ROCKETMQ_HOME=str(self.home)))
        await listening(int(self.address.rpartition(":")[2]), APACHE_START_S, pid=pid)

    async def _start_broker(self) -> None:
        arguments = self._java("broker.BrokerStartup", "broker.properties", *self._heap)
        self._broker = AsyncExitStack()
        self.pid = await self._broker.enter_async_context(
            process(arguments, self.home / "log", ROCKETMQ_HOME=str(self.home))
        )
        await listening(self._port, APACHE_START_S, pid=self.pid)
        await _registered(self.address)

    def _java(self, main: str, properties: str, *heap: str) -> tuple[str, ...]:
        return (
            "java", *heap, *self._options, f"-Duser.home={self.home}",
            f"-XX:ErrorFile={self.home}/hs_err.log", "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
            "--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
            "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
            "-cp", f"{self._jars}/*", f"org.apache.rocketmq.{main}", "-c", str(self.home / properties),
        )  # fmt: skip


async def _registered(name_server: str) -> None:
    """Returns when the name server knows a broker."""
    cluster = Cluster(name_server)
    try:
        async with asyncio.timeout(60):
            while True:
                answer = await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
                if decode_cluster(answer.body):
                    return
                await asyncio.sleep(0.02)
    finally:
        await cluster.close()


def jetstream_fault() -> str | None:
    return None if _nats() else "nats-server is missing: set NATS_SERVER, or install Debian's package of that name"


def _nats() -> str | None:
    found = os.environ.get("NATS_SERVER") or shutil.which("nats-server")
    return found or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")


def jetstream_synced_fault() -> str | None:
    if jetstream_fault():
        return jetstream_fault()
    version = subprocess.run((str(_nats()), "--version"), capture_output=True, text=True, check=True).stdout
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return (
        None if numbers >= [2, 10] else f"{version.strip()} cannot sync always; set NATS_SERVER to one of 2.10 or later"
    )


@asynccontextmanager
async def jetstream(folder: Path, *, syncs: bool = False) -> AsyncIterator[Peer]:
    port = free_port()
    settings = folder / "nats.conf"
    interval = "\n  sync_interval: always" if syncs else ""
    settings.write_text(f'jetstream {{\n  store_dir: "{folder}/nats"{interval}\n}}\n')
    arguments = (str(_nats()), "--addr", "127.0.0.1", "--port", str(port), "--config", str(settings))
    async with process(arguments, folder / "nats.log") as pid:
        await listening(port)
        yield Peer("jetstream", f"127.0.0.1:{port}", pid)


def jetstream_synced(folder: Path) -> AbstractAsyncContextManager[Peer]:
    """JetStream; it acknowledges what is on the device."""
    return jetstream(folder, syncs=True)
