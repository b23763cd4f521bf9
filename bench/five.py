"""Official clients of 5.x, Java's and Python's, on our broker and on Apache's proxy 5.3: sends of 1 KB, receives and
acknowledgements, and how late a message comes again; processor time of the server, readiness and idle memory."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rocketlet.client import AdminClient
from rocketlet.command.plumbing.numbers import whole

from . import common
from .common import console
from .peers import CACHE, POM, Peer, apache_fault, compiled_with, fetch, maven_jars, rocketlet
from .proxy import Proxy

CLIENTS = ("java", "python")
COUNTS = {"java": 20_000, "python": 3_000}
THREADS = {"java": 16, "python": 8}
REDELIVERIES = 5
PYTHON_CLIENT = "rocketmq-python-client==5.1.2"
_numbers = count(1)


@dataclass(slots=True)
class System:
    """A running server, what clients are given, and how long it took to be ready."""

    peer: Peer
    endpoint: str
    ready_s: float
    idle_mib: float = 0.0


@dataclass(slots=True)
class Round:
    """One client's run on one server: seconds by phase, seconds of the server's processor, ms that messages were late."""

    took_s: dict[str, float] = field(default_factory=dict)
    server_s: dict[str, float] = field(default_factory=dict)
    late_ms: list[float] = field(default_factory=list)


@asynccontextmanager
async def systems(folder: Path) -> AsyncIterator[dict[str, System]]:
    began_s = time.perf_counter()
    async with rocketlet(folder) as peer:
        ours = System(peer, peer.address, time.perf_counter() - began_s)
        proxy = Proxy(folder)
        await proxy.jars()
        began_s = time.perf_counter()
        async with proxy:
            peer = Peer("apache", proxy.address, proxy.pid)
            yield {"ours": ours, "apache": System(peer, proxy.endpoint, time.perf_counter() - began_s)}


async def command_of(client: str) -> tuple[str, ...]:
    if client == "java":
        jars = await maven_jars(CACHE / "five-client-5.2.0", "rocketmq-client-java-*.jar", POM.parent / "five.xml")
        classes = await compiled_with(jars, "Five.java")
        return ("java", f"-Duser.home={tempfile.gettempdir()}", "-cp", classes, "Five")
    folder = CACHE / "five-client-python"
    if not any(folder.glob("rocketmq*")):
        wanted = (sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), PYTHON_CLIENT)
        fault = await asyncio.to_thread(fetch, wanted)
        if fault:
            raise RuntimeError(f"pip could not fetch {PYTHON_CLIENT}: {fault[-2000:]}")
    program = Path(__file__).parent / "five_client.py"
    return ("env", f"PYTHONPATH={folder}", "GRPC_VERBOSITY=NONE", sys.executable, str(program))


async def measure(system: System, client: str, command: Sequence[str], messages: int, redeliveries: int) -> Round:
    topic, group = f"t{next(_numbers)}", f"g{next(_numbers)}"
    async with AdminClient(system.peer.address) as admin:
        await admin.create_topic(topic, queues=4)
    arguments = (system.endpoint, topic, group, str(messages), str(THREADS[client]), str(redeliveries))
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with this function)
    child = await asyncio.create_subprocess_exec(
        *command, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    )
    assert child.stdout is not None
    assert child.stdin is not None
    found, name, before_s = Round(), "", 0.0
    async for line in child.stdout:
        word, _, text = line.decode().strip().partition(" ")
        if word == "phase":
            name = text
            system.idle_mib = system.idle_mib or system.peer.resident_mib()
            before_s = system.peer.cpu_s()
            child.stdin.write(b"\n")
        elif word == "took":
            found.took_s[name], found.server_s[name] = float(text), system.peer.cpu_s() - before_s
        elif word == "late":
            found.late_ms.append(float(text))
        elif word == "failed":
            raise RuntimeError(f"the {client} client on {system.peer.name}: {text}")
    if await child.wait() or len(found.took_s) < 3:
        errors.seek(0)
        said = errors.read()[-2000:].decode(errors="replace")
        raise RuntimeError(f"the {client} client on {system.peer.name} ended with {child.returncode}: {said}")
    return found


def compared(ours: float, apache: float, *, more_is_better: bool = False) -> dict[str, float]:
    """`ratio`: how many times better ours is."""
    better = ours / apache if more_is_better else apache / ours if ours else float("inf")
    return {"ours": round(ours, 3), "apache": round(apache, 3), "ratio": round(better, 2)}


def result_of(rounds: Mapping[str, Sequence[Round]], messages: int) -> dict[str, Any]:
    def rate(name: str, phase: str) -> float:
        return messages / common.median([item.took_s[phase] for item in rounds[name]])

    def server_us(name: str, phase: str) -> float:
        return common.median([item.server_s[phase] for item in rounds[name]]) / messages * 1e6

    late = {name: [ms for item in rounds[name] for ms in item.late_ms] for name in rounds}
    return {
        "send": compared(rate("ours", "send"), rate("apache", "send"), more_is_better=True),
        "consume": compared(rate("ours", "consume"), rate("apache", "consume"), more_is_better=True),
        "redelivery": compared(common.median(late["ours"]), common.median(late["apache"])),
        "redelivery_worst": compared(max(late["ours"]), max(late["apache"])),
        "server_us_of_a_send": compared(server_us("ours", "send"), server_us("apache", "send")),
        "server_us_of_a_consumed": compared(server_us("ours", "consume"), server_us("apache", "consume")),
    }


async def run() -> None:
    parser = common.parser(__doc__ or "", CLIENTS)
    parser.add_argument("--messages", type=whole(100), help="of each phase; default: " + str(COUNTS))
    options = parser.parse_args()
    fault = apache_fault()
    if fault:
        raise SystemExit(f"Apache's proxy cannot run here: {fault}")
    clients = options.only.split(",") if options.only else CLIENTS
    commands = {client: await command_of(client) for client in clients}
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with systems(Path(folder)) as running:
            found = {client: await rounds_of(options, running, client, commands[client]) for client in clients}
    ours, apache = running["ours"], running["apache"]
    found["ready_s"] = compared(ours.ready_s, apache.ready_s)
    found["idle_mib"] = compared(ours.idle_mib, apache.idle_mib)
    show(found)
    common.finish(options, "five", {**found.pop(clients[0]), "client": clients[0], **found})


async def rounds_of(
    options: argparse.Namespace, running: Mapping[str, System], client: str, command: Sequence[str]
) -> dict[str, Any]:
    messages = options.messages or COUNTS[client]
    messages -= messages % THREADS[client]
    rounds: dict[str, list[Round]] = {name: [] for name in running}
    for number in range(options.rounds + 1):
        for name, system in running.items():
            late = REDELIVERIES if number == options.rounds else 0
            measured = await measure(system, client, command, messages, late)
            if number:  # the first round warms both servers
                rounds[name].append(measured)
    return result_of(rounds, messages)


def show(found: Mapping[str, Any]) -> None:
    rows: list[list[object]] = []
    for name, value in found.items():
        of_client = value if name in CLIENTS else {name: value}
        for what, numbers in of_client.items():
            client = name if name in CLIENTS else ""
            rows.append([client, what, numbers["ours"], numbers["apache"], numbers["ratio"]])
    common.show("Official clients of 5.x", ("client", "", "rocketlet", "apache 5.3.3", "times better"), rows)
    console.print("rates: messages/s, medians of alternating rounds; redelivery: ms behind its time")


if __name__ == "__main__":
    asyncio.run(run())
