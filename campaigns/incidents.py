"""Incidents on real processes, one after the other: each must be named by `rocketlet doctor`, a metric, a log event and
/readyz, as far as they can know of it, within its time, and nothing else may be named.

A fault is a tool that does not name the incident in time, or that names something else. Incidents that a test plays and whose
finding, metric and event it checks are not here (README.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rocketlet.client import Access, AdminClient, Consumer, Producer, Reject, RocketletError
from rocketlet.demo.processes import ServerProcess
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing.ports import free_port

from tests.support.metrics import page

from .common import Limit, Outcome
from .processes import connect

OPERATOR = Access(access_key="operator", secret_key="a-secret-of-ours")
ACCOUNTS = "accounts:\n- {accessKey: operator, secretKey: a-secret-of-ours, admin: true}\n"
WITHIN_S = 20.0
Client = TypeVar("Client")


@dataclass
class Stage:
    """The servers of one incident, by name: those of `ns`, `a` and `b` that it needs. `address` is the first one's."""

    folder: Path
    stack: AsyncExitStack
    access: Access | None = None

    def __post_init__(self) -> None:
        self.servers: dict[str, ServerProcess] = {}
        self.metrics: dict[str, int] = {}

    async def start(self, name: str, command: str, *options: str) -> str:
        """Start a server, and return its address."""
        self.metrics[name] = free_port()
        named = () if command == "nameserver" else ("--name", name)
        texts = ("--metrics-port", str(self.metrics[name]), *named, *options)
        server = ServerProcess(self.folder / name, free_port(), *texts, command=command)
        self.servers[name] = await self.stack.enter_async_context(server)
        return server.address

    @property
    def address(self) -> str:
        return next(iter(self.servers.values())).address

    async def enter(self, client: AbstractAsyncContextManager[Client]) -> Client:
        return await self.stack.enter_async_context(client)

    async def admin(self) -> AdminClient:
        return await self.enter(AdminClient(self.address, access=self.access))

    async def producer(self) -> Producer:
        return await self.enter(Producer(self.address, access=self.access, retries=0))


class Incident(NamedTuple):
    """An incident and what must name it.

    Attributes:
        play: A function that plays the incident until its `yield`.
        finding: The kind of the finding of `doctor`, on `subject`.
        metric: A regular expression that a line of the metrics of `process` starts with.
        event: The log event, if there is one.
        readiness: The status of /readyz of `process`.
    """

    play: Callable[[Stage], AbstractAsyncContextManager[None]]
    finding: str
    subject: str
    metric: str
    event: str
    process: str = "a"
    readiness: int = 200


INCIDENTS: dict[str, Incident] = {}


def incident(name: str, finding: str, subject: str, metric: str, event: str, **about: Any) -> Callable[..., None]:
    def added(play: Callable[[Stage], AsyncIterator[None]]) -> None:
        INCIDENTS[name] = Incident(asynccontextmanager(play), finding, subject, metric, event, **about)

    return added


@incident("broker gone", "broker_gone", "b", "rocketlet_name_server_departed_broker{.*} 1", "broker_gone", process="ns")
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


@incident("name server gone", "", "", "rocketlet_registered{.*} 0", "name_server_unreachable", readiness=503)
async def name_server_gone(stage: Stage) -> AsyncIterator[None]:
    ns = await stage.start("ns", "nameserver")
    await stage.start("a", "broker", "--nameserver", ns)
    await stage.servers["ns"].kill()
    yield


@incident("damaged", "damaged", "a", "rocketlet_messages_damaged_total{.*} [1-9]", "damaged_message_skipped")
async def damaged(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    producer = await stage.producer()
    for _ in range(10):
        await producer.send("orders", b"x" * 1_000)
    (segment,) = (stage.folder / "a" / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(1_600)
        file.write(b"\0" * 200)
    await stage.enter(Consumer(stage.address, "shop", "orders", lambda message: None, start="first"))
    yield


@incident("signatures", "requests_refused", "a", "rocketlet_requests_refused_total{.*} [1-9]", "request_refused")
async def signatures_refused(stage: Stage) -> AsyncIterator[None]:
    file = stage.folder / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    await stage.start("a", "start", "--acl", str(file))
    stage.access = OPERATOR
    with suppress(RocketletError):
        async with Producer(
            stage.address, access=replace(OPERATOR, secret_key="the-secret-before"), retries=0
        ) as producer:
            await producer.send("orders", b"x")
    yield


@incident("heartbeats", "heartbeat_refused", "a", "rocketlet_heartbeats_refused_total{.*} [1-9]", "heartbeat_refused")
async def heartbeats_refused(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_topic("orders", queues=2)
    wire = await connect(stage.address)
    stage.stack.push_async_callback(wire.close)
    subscription = replace(parse_subscription("orders", "paid"), expression="x" * 65_537)
    beat = Heartbeat("c1", (ConsumerData("shop", subscriptions=(subscription,)),))
    await wire.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(beat))
    yield


@incident("given up", "dead_letters", "shop", "rocketlet_dead_letters{.*} [1-9]", "")
async def given_up(stage: Stage) -> AsyncIterator[None]:
    await stage.start("a", "start")
    await (await stage.admin()).create_group(GroupConfig("shop", retry_max_times=0))
    await stage.enter(Consumer(stage.address, "shop", "orders", lambda message: Reject("no such order"), start="first"))
    await (await stage.producer()).send("orders", b"x")
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
    start_s, port = time.monotonic(), stage.metrics[incident.process]
    missing = {"doctor", "metric", "readyz", *(["log"] if incident.event else [])}
    others: set[tuple[str, str]] = set()
    while missing and time.monotonic() < start_s + WITHIN_S:
        if re.search(f"^{incident.metric}", (await page(port, "/metrics"))[1], re.MULTILINE):
            missing.discard("metric")
        if any(b'"event": "%s"' % incident.event.encode() in server.log for server in stage.servers.values()):
            missing.discard("log")
        if (await page(port, "/readyz"))[0] == incident.readiness:
            missing.discard("readyz")
        findings, text = await _doctor(stage)
        others = findings - {(incident.subject, incident.finding)}
        if (incident.subject, incident.finding) in findings or (not incident.finding and "no name server" in text):
            missing.discard("doctor")
        await asyncio.sleep(0.2)
    outcome.figures["seconds"][name] = round(time.monotonic() - start_s, 1)
    for tool in sorted(missing):
        outcome.fault(f"{name}: {tool} does not name it within {WITHIN_S:g} s")
    for subject, kind in sorted(others):
        outcome.fault(f"{name}: doctor names {kind} of {subject}, too")


async def _doctor(stage: Stage) -> tuple[set[tuple[str, str]], str]:
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
