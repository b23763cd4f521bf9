"""The twelve incidents: what each does to a cluster of processes, and who must name it."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from rocketlet.client import Access, AdminClient, Consumer, Message, Producer, Reject, RocketletError
from rocketlet.demo.processes import Child
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing.ports import free_port

from bench.peers import listening
from tests.conftest import Wire

ROOM_BYTES = 4 << 20  # the size of a file, where the disk is to be full
ACCOUNTS = "accounts:\n- {accessKey: operator, secretKey: a-secret-of-ours, admin: true}\n"
Client = TypeVar("Client")
OPERATOR = Access(access_key="operator", secret_key="a-secret-of-ours")


class Stage:
    """The processes of one incident: `ns`, `a` and `b`, as far as it wants them."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.access: Access | None = None
        self.address = ""
        self.metrics: dict[str, int] = {}
        self._children: dict[str, Child] = {}

    async def start(self, name: str, command: str, *options: object, file_bytes: int | None = None) -> str:
        """A server's address; it is ready then."""
        port, metrics = free_port(), free_port()
        arguments = [command, "--port", port, "--metrics-port", metrics, *options]
        if command != "nameserver":
            arguments += ["--name", name, "--no-vip", "--data", self.folder / name]

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        command_line = (sys.executable, "-m", "rocketlet.command.cli", *map(str, arguments))
        child = await Child.start(command_line, self.folder / f"{name}.log", reads=False, prepare=limit)
        self._children[name] = child
        self.stack.push_async_callback(self.kill, name)
        self.metrics[name] = metrics
        await listening(metrics, pid=child.pid)
        await listening(port, pid=child.pid)
        self.address = self.address or f"127.0.0.1:{port}"
        return f"127.0.0.1:{port}"

    async def kill(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.kill()
            await child.wait(60)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    async def enter(self, client: AbstractAsyncContextManager[Client]) -> Client:
        return await self.stack.enter_async_context(client)

    async def admin(self) -> AdminClient:
        return await self.enter(AdminClient(self.address, access=self.access))

    async def producer(self) -> Producer:
        return await self.enter(Producer(self.address, access=self.access, retries=0))

    async def consumer(
        self, group: str, topics: str | dict[str, str], handler: Handler, drain_s: float = 5.0
    ) -> Consumer:
        return await self.enter(
            Consumer(self.address, group, topics, handler, access=self.access, start="first", drain_s=drain_s)
        )

    async def wire(self) -> Wire:
        host, _, port = self.address.rpartition(":")
        wire = Wire(*await asyncio.open_connection(host, int(port)))
        self.stack.push_async_callback(wire.close)
        return wire


Handler = Callable[[Message], Reject | None] | Callable[[Message], Awaitable[None]]
Play = Callable[[Stage], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Incident:
    """finding: the kind that doctor must name, on `subject`. metric: the beginning of a line of `process`'s metrics, whose
    value must be above 0, or with `is_zero` 0. readiness: the status of its /readyz."""

    finding: str
    subject: str
    metric: str
    event: str
    play: Play
    within_s: float = 20.0
    is_zero: bool = False
    process: str = "a"
    readiness: int = 200


@asynccontextmanager
async def broker_gone(stage: Stage) -> AsyncIterator[None]:
    ns = await stage.start("ns", "nameserver")
    for name in ("a", "b"):
        await stage.start(name, "broker", "--nameserver", ns)
    admin = await stage.admin()
    while len(await admin.brokers()) < 2:
        await asyncio.sleep(0.1)
    await admin.create_topic("orders", queues=2)
    await asyncio.sleep(2)  # until the name server has heard of it
    await stage.kill("b")
    yield


@asynccontextmanager
async def name_server_gone(stage: Stage) -> AsyncIterator[None]:
    ns = await stage.start("ns", "nameserver")
    await stage.start("a", "broker", "--nameserver", ns)
    await stage.kill("ns")
    yield


@asynccontextmanager
async def disk_full(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start", file_bytes=ROOM_BYTES)
    producer = await stage.producer()
    with suppress(RocketletError):
        while True:
            await producer.send("orders", b"x" * 100_000)
    yield


@asynccontextmanager
async def damaged(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    producer = await stage.producer()
    for _ in range(10):
        await producer.send("orders", b"x" * 1_000)
    (segment,) = (stage.folder / "a" / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(1_600)
        file.write(b"\0" * 200)
    await stage.consumer("shop", "orders", lambda message: None)
    yield


@asynccontextmanager
async def certificate_expires(stage: Stage) -> AsyncIterator[None]:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(stage.folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=5))
    issued.private_key_and_cert_chain_pem.write_to_path(str(stage.folder / "server.pem"))
    await stage.start("a", "start", "--tls-cert", stage.folder / "server.pem")
    yield


@asynccontextmanager
async def signatures_refused(stage: Stage) -> AsyncIterator[None]:
    file = stage.folder / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    await stage.start("a", "start", "--acl", file)
    stage.access = OPERATOR
    wrong = Access(access_key="operator", secret_key="the-secret-before")
    with suppress(RocketletError):
        async with Producer(stage.address, access=wrong, retries=0) as producer:
            await producer.send("orders", b"x")
    yield


@asynccontextmanager
async def heartbeats_refused(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_topic("orders", queues=2)
    wire = await stage.wire()
    subscription = replace(parse_subscription("orders", "paid"), expression="x" * 65_537)
    odd = ConsumerData("shop", subscriptions=(subscription,))
    await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (odd,))))
    yield


@asynccontextmanager
async def handler_stuck(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    forever = asyncio.Event()

    async def handle(message: Message) -> None:
        await forever.wait()

    producer = await stage.producer()
    await stage.consumer("shop", "orders", handle, drain_s=0.1)
    for _ in range(20):
        await producer.send("orders", b"x")
    yield
    forever.set()


@asynccontextmanager
async def nobody_reads(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    producer = await stage.producer()
    seen: list[Message] = []
    await producer.send("orders", b"x")
    async with Consumer(stage.address, "shop", "orders", seen.append, start="first") as consumer:
        while not seen:
            await asyncio.sleep(0.05)
        await consumer.commit()
    await producer.send("orders", b"x")
    yield


@asynccontextmanager
async def members_disagree(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_topic("orders", queues=4)
    for expression in ("*", "paid"):
        await stage.consumer("shop", {"orders": expression}, lambda message: None)
    yield


@asynccontextmanager
async def given_up(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_group(GroupConfig("shop", retry_max_times=0))
    await stage.consumer("shop", "orders", lambda message: Reject("no such order"))
    await (await stage.producer()).send("orders", b"x")
    yield


@asynccontextmanager
async def expired_unread(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start", "--segment-bytes", "64K", "--retain-bytes", "128K")
    admin, producer = await stage.admin(), await stage.producer()
    await admin.create_topic("orders", queues=1)
    seen: list[Message] = []
    await producer.send("orders", b"x")
    async with Consumer(stage.address, "shop", "orders", seen.append, start="first") as consumer:
        while not seen:
            await asyncio.sleep(0.05)
        await consumer.commit()
    for _ in range(400):
        await producer.send("orders", b"x" * 1_000)
    yield


INCIDENTS = {
    "broker gone": Incident(
        "broker_gone", "b", "rocketlet_name_server_departed_broker{", "broker_gone", broker_gone, process="ns"
    ),
    "name server gone": Incident(
        "", "", "rocketlet_registered{", "name_server_unreachable", name_server_gone, is_zero=True, readiness=503
    ),
    "disk full": Incident("writes_refused", "a", "rocketlet_store_full{", "writes_refused", disk_full, readiness=503),
    "damaged": Incident("damaged", "a", "rocketlet_messages_damaged_total{", "damaged_message_skipped", damaged),
    "certificate": Incident(
        "certificate",
        "a",
        "rocketlet_certificate_expires_timestamp_seconds{",
        "certificate_expires",
        certificate_expires,
    ),
    "signatures": Incident(
        "requests_refused", "a", "rocketlet_requests_refused_total{", "request_refused", signatures_refused
    ),
    "heartbeats": Incident(
        "heartbeat_refused", "a", "rocketlet_heartbeats_refused_total{", "heartbeat_refused", heartbeats_refused
    ),
    "stuck": Incident("stuck_queue", "shop", "rocketlet_group_oldest_seconds{", "", handler_stuck, within_s=75.0),
    "nobody reads": Incident("no_members", "shop", "rocketlet_group_lag{", "member_changed", nobody_reads),
    "disagreement": Incident(
        "disagreement", "shop", "rocketlet_group_disagreements{", "members_disagree", members_disagree
    ),
    "given up": Incident("dead_letters", "shop", "rocketlet_dead_letters{", "", given_up),
    "expired": Incident(
        "retention",
        "shop",
        "rocketlet_messages_expired_unread_total{",
        "messages_expired_unread",
        expired_unread,
        within_s=90.0,
    ),
}
