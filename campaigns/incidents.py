"""Incidents on real processes, one after the other: each must be named by `rocketlet doctor`, a metric, a log event and
/readyz, as far as they can know of it, within its time, and nothing else may be named.

A fault is a tool that does not name the incident in time, or that names something else.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from rocketlet.client import Access, AdminClient, Consumer, Message, Producer, Reject, RocketletError
from rocketlet.demo.processes import ServerProcess
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing.ports import free_port

from tests.conftest import Wire

from .common import Limit, Outcome
from .processes import connect

FULL_BYTES = 4 << 20  # the maximum size of a file, where the disk is to be full
OPERATOR = Access(access_key="operator", secret_key="a-secret-of-ours")
ACCOUNTS = "accounts:\n- {accessKey: operator, secretKey: a-secret-of-ours, admin: true}\n"
BESIDE = {"expired": {"no_members"}}  # a group with members would have lost nothing
Client = TypeVar("Client")
Handler = Callable[[Message], Reject | None] | Callable[[Message], Awaitable[None]]


class Stage:
    """The processes of one incident: those of `ns`, `a` and `b` that it needs."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.access: Access | None = None
        self.address = ""
        self.metrics: dict[str, int] = {}
        self.servers: dict[str, ServerProcess] = {}

    async def start(self, name: str, command: str, *options: object, file_bytes: int | None = None) -> str:
        """Start a server, and return its address."""
        self.metrics[name] = free_port()
        named = () if command == "nameserver" else ("--name", name)
        texts = ("--metrics-port", str(self.metrics[name]), *named, *map(str, options))
        limits = {} if file_bytes is None else {resource.RLIMIT_FSIZE: file_bytes}
        server = ServerProcess(self.folder / name, free_port(), *texts, command=command, limits=limits)
        self.servers[name] = await self.stack.enter_async_context(server)
        self.address = self.address or server.address
        return server.address

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
        wire = await connect(self.address)
        self.stack.push_async_callback(wire.close)
        return wire

    async def handled_one(self) -> None:
        """Let a group handle and commit one message, and leave."""
        seen: list[Message] = []
        async with (
            Producer(self.address) as producer,
            Consumer(self.address, "shop", "orders", seen.append, start="first") as consumer,
        ):
            await producer.send("orders", b"x")
            while not seen:
                await asyncio.sleep(0.05)
            await consumer.commit()


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident and what must name it.

    Attributes:
        finding: The kind of the finding of `doctor`, on `subject`.
        metric: The start of a line of the metrics of `process`, whose value must be above 0, or 0 with `is_zero`.
        event: The log event.
        readiness: The status of /readyz of `process`.
    """

    play: Callable[[Stage], AbstractAsyncContextManager[None]]
    finding: str
    subject: str
    metric: str
    event: str
    within_s: float = 20.0
    is_zero: bool = False
    process: str = "a"
    readiness: int = 200


INCIDENTS: dict[str, Incident] = {}


def incident(name: str, finding: str, subject: str, metric: str, event: str, **about: Any) -> Callable[..., None]:
    def added(play: Callable[[Stage], AsyncIterator[None]]) -> None:
        INCIDENTS[name] = Incident(asynccontextmanager(play), finding, subject, metric, event, **about)

    return added


@incident("broker gone", "broker_gone", "b", "rocketlet_name_server_departed_broker{", "broker_gone", process="ns")
async def broker_gone(stage: Stage) -> AsyncIterator[None]:
    ns = await stage.start("ns", "nameserver")
    for name in ("a", "b"):
        await stage.start(name, "broker", "--nameserver", ns)
    admin = await stage.admin()
    while len(await admin.brokers()) < 2:
        await asyncio.sleep(0.1)
    await admin.create_topic("orders", queues=2)
    await asyncio.sleep(2)  # until the name server has the topic
    await stage.servers["b"].kill()
    yield


@incident("name server gone", "", "", "rocketlet_registered{", "name_server_unreachable", is_zero=True, readiness=503)
async def name_server_gone(stage: Stage) -> AsyncIterator[None]:
    ns = await stage.start("ns", "nameserver")
    await stage.start("a", "broker", "--nameserver", ns)
    await stage.servers["ns"].kill()
    yield


@incident("disk full", "writes_refused", "a", "rocketlet_store_full{", "writes_refused", readiness=503)
async def disk_full(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start", file_bytes=FULL_BYTES)
    producer = await stage.producer()
    with suppress(RocketletError):
        while True:
            await producer.send("orders", b"x" * 100_000)
    yield


@incident("damaged", "damaged", "a", "rocketlet_messages_damaged_total{", "damaged_message_skipped")
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


@incident("certificate", "certificate", "a", "rocketlet_certificate_expires_timestamp_seconds{", "certificate_expires")
async def certificate_expires(stage: Stage) -> AsyncIterator[None]:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(stage.folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=5))
    issued.private_key_and_cert_chain_pem.write_to_path(str(stage.folder / "server.pem"))
    await stage.start("a", "start", "--tls-cert", stage.folder / "server.pem")
    yield


@incident("signatures", "requests_refused", "a", "rocketlet_requests_refused_total{", "request_refused")
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


@incident("heartbeats", "heartbeat_refused", "a", "rocketlet_heartbeats_refused_total{", "heartbeat_refused")
async def heartbeats_refused(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_topic("orders", queues=2)
    wire = await stage.wire()
    subscription = replace(parse_subscription("orders", "paid"), expression="x" * 65_537)
    consumer = ConsumerData("shop", subscriptions=(subscription,))
    await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (consumer,))))
    yield


@incident("stuck", "stuck_queue", "shop", "rocketlet_group_oldest_seconds{", "", within_s=75.0)
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


@incident("nobody reads", "no_members", "shop", "rocketlet_group_lag{", "member_changed")
async def nobody_reads(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    producer = await stage.producer()
    await stage.handled_one()
    await producer.send("orders", b"x")
    yield


@incident("disagreement", "disagreement", "shop", "rocketlet_group_disagreements{", "members_disagree")
async def members_disagree(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_topic("orders", queues=4)
    for expression in ("*", "paid"):
        await stage.consumer("shop", {"orders": expression}, lambda message: None)
    yield


@incident("given up", "dead_letters", "shop", "rocketlet_dead_letters{", "")
async def given_up(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_group(GroupConfig("shop", retry_max_times=0))
    await stage.consumer("shop", "orders", lambda message: Reject("no such order"))
    await (await stage.producer()).send("orders", b"x")
    yield


@incident(
    "expired", "retention", "shop", "rocketlet_messages_expired_unread_total{", "messages_expired_unread", within_s=90.0
)
async def expired_unread(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start", "--segment-bytes", "64K", "--retain-bytes", "128K")
    admin, producer = await stage.admin(), await stage.producer()
    await admin.create_topic("orders", queues=1)
    await stage.handled_one()
    for _ in range(400):
        await producer.send("orders", b"x" * 1_000)
    yield


async def incidents(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    outcome.figures["seconds"] = {}
    names = [limit.only] if limit.only else list(INCIDENTS)
    for number in limit:
        name = names[number % len(names)]
        home = folder / str(number)
        home.mkdir()
        async with AsyncExitStack() as stack:
            stage = Stage(home, stack)
            try:
                async with INCIDENTS[name].play(stage):
                    await _judge(name, INCIDENTS[name], stage, outcome)
            except (OSError, RuntimeError, TimeoutError) as error:
                outcome.fault(f"{name}: it could not be played: {error!r}")


async def _judge(name: str, incident: Incident, stage: Stage, outcome: Outcome) -> None:
    start_s = time.monotonic()
    missing = {"doctor", "metric", "readyz", *(["log"] if incident.event else [])}
    others: set[tuple[str, str]] = set()
    while missing and time.monotonic() < start_s + incident.within_s:
        if "metric" in missing and await _measured(incident, stage):
            missing.discard("metric")
        if "log" in missing and f'"event": "{incident.event}"' in stage.log():
            missing.discard("log")
        if "readyz" in missing and (await _fetched(stage, incident.process, "readyz"))[0] == incident.readiness:
            missing.discard("readyz")
        findings, text = await doctor(stage)
        others = findings - {(incident.subject, incident.finding)} - {("shop", kind) for kind in BESIDE.get(name, ())}
        if (incident.subject, incident.finding) in findings or (not incident.finding and "no name server" in text):
            missing.discard("doctor")
        await asyncio.sleep(0.2)
    outcome.figures["seconds"][name] = round(time.monotonic() - start_s, 1)
    for tool in sorted(missing):
        outcome.fault(f"{name}: {tool} does not name it within {incident.within_s:g} s")
    for subject, kind in sorted(others):
        outcome.fault(f"{name}: doctor names {kind} of {subject}, too")


async def _measured(incident: Incident, stage: Stage) -> bool:
    _, text = await _fetched(stage, incident.process, "metrics")
    values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(incident.metric)]
    return bool(values) and (max(values) == 0 if incident.is_zero else max(values) > 0)


async def _fetched(stage: Stage, process: str, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{stage.metrics[process]}/{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def doctor(stage: Stage) -> tuple[set[tuple[str, str]], str]:
    """Return the subjects and kinds of the findings of `rocketlet doctor`, and its other output."""
    keys: dict[str, str] = {}
    if stage.access is not None:
        keys = {"ROCKETLET_ACCESS_KEY": stage.access.access_key, "ROCKETLET_SECRET_KEY": stage.access.secret_key}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", "doctor", "--json", "--nameserver", stage.address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **keys},
    )  # fmt: skip
    out, err = await child.communicate()
    found = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    return {(item["subject"], item["kind"]) for item in found}, err.decode()
