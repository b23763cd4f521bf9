"""Official clients of 5.x, Java's and Python's, on our broker and on Apache's proxy 5.3: sends of 1 KB, receives and
acknowledgements, and how late a message is redelivered; processor time of the server, readiness and idle memory."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rocketlet.client import AdminClient
from rocketlet.command.plumbing.numbers import whole
from rocketlet.demo.processes import Child

from . import runner, versions
from .peers import CACHE, POM, Peer, Proxy, apache_fault, compiled, fetch_python, maven_jars, rocketlet

CLIENTS = ("java", "python")
COUNTS = {"java": 20_000, "python": 3_000}
THREADS = {"java": 16, "python": 8}
PYTHON_CLIENT = "rocketmq-python-client==5.1.2"
PHASES = {"send": "server_us_of_a_send", "consume": "server_us_of_a_consumed"}
CLIENT_S = 300.0  # a client that takes longer has stalled
numbers = count(1)


@dataclass(slots=True)
class Server:
    """A running server, the endpoint for clients, and how long its start took."""

    peer: Peer
    endpoint: str
    ready_s: float
    idle_mib: float = 0.0


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[dict[str, Server]]:
    watch = runner.Stopwatch()
    async with rocketlet(folder) as peer:
        ours = Server(peer, peer.address, watch.read_s()[0])
        proxy = Proxy(folder)
        await proxy.jars()
        watch = runner.Stopwatch()
        async with proxy:
            peer = Peer("apache", proxy.address, proxy.pid)
            yield {"ours": ours, "apache": Server(peer, proxy.endpoint, watch.read_s()[0])}


async def command_of(client: str) -> tuple[str, ...]:
    if client == "java":
        jars = await maven_jars(CACHE / "five-client-5.2.0", "rocketmq-client-java-*.jar", POM.parent / "five.xml")
        classes = await compiled("Five.java", jars)
        return ("java", f"-Duser.home={tempfile.gettempdir()}", "-cp", classes, "Five")
    folder = await fetch_python(CACHE / "five-client-python", "rocketmq*", PYTHON_CLIENT)
    program = Path(__file__).parent / "five_client.py"
    return ("env", f"PYTHONPATH={folder}", "GRPC_VERBOSITY=NONE", sys.executable, str(program))


async def run_client(
    server: Server, client: str, command: Sequence[str], messages: int, redeliveries: int, log: Path
) -> dict[str, float]:
    """Return the rates and the server's processor time of each phase, and how many ms redeliveries were late, if any."""
    topic, group = f"t{next(numbers)}", f"g{next(numbers)}"
    async with AdminClient(server.peer.address) as admin:
        await admin.create_topic(topic, queues=4)
    arguments = (server.endpoint, topic, group, str(messages), str(THREADS[client]), str(redeliveries))
    child = await Child.start((*command, *arguments), log)
    found: dict[str, float] = {}
    late_ms: list[float] = []
    name, watch = "", runner.Stopwatch(server.peer)
    try:
        async with asyncio.timeout(CLIENT_S):
            async for line in child.lines():
                match line.split(" ", 1):
                    case ["phase", name]:
                        watch = runner.Stopwatch(server.peer)
                        server.idle_mib = server.idle_mib or server.peer.resident_mib()
                        await child.tell("")
                    case ["took", seconds] if name in PHASES:
                        found[name] = messages / float(seconds)
                        found[PHASES[name]] = watch.read_s()[2] / messages * 1e6
                    case ["late", late]:
                        late_ms.append(float(late))
                    case ["failed", fault]:
                        raise RuntimeError(f"the {client} client on {server.peer.name}: {fault}")
            if status := await child.close():
                text = f"ended with {status}: {child.last_words()}"
                raise RuntimeError(f"the {client} client on {server.peer.name} {text}")
    except TimeoutError:
        raise RuntimeError(f"the {client} client on {server.peer.name} did not end its phase {name!r}") from None
    finally:
        child.kill()
        await child.close()
    return found | ({"redelivery": runner.median(late_ms), "redelivery_worst": max(late_ms)} if late_ms else {})


def compared(ours: float, apache: float, *, more_is_better: bool = False) -> dict[str, float]:
    """`ratio`: how many times better ours is."""
    better = ours / apache if more_is_better else apache / ours if ours else float("inf")
    return {"ours": round(ours, 3), "apache": round(apache, 3), "ratio": round(better, 2)}


async def measure(options: argparse.Namespace, running: Mapping[str, Server], client: str, log: Path) -> dict[str, Any]:
    command, threads = await command_of(client), THREADS[client]
    messages = (options.messages or COUNTS[client]) // threads * threads

    cases = {
        name: {"": partial(run_client, server, client, command, messages, 0, log)} for name, server in running.items()
    }
    found = (await runner.alternate(options.rounds, cases, warm_ups=1)).only_case()
    for name, server in running.items():
        late = await run_client(server, client, command, threads, options.redeliveries, log)
        found[name] |= {key: late[key] for key in ("redelivery", "redelivery_worst")}
    ours, apache = found["ours"], found["apache"]
    return {key: compared(ours[key], apache[key], more_is_better=key in PHASES) for key in ours}


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    if fault := apache_fault():
        raise SystemExit(f"Apache's proxy cannot run here: {fault}")
    clients = options.only or CLIENTS
    async with AsyncExitStack() as stack:
        folder = runner.temporary_folder(stack)
        running = await stack.enter_async_context(servers(folder))
        found = {client: await measure(options, running, client, folder / "client.log") for client in clients}
    ours, apache = running["ours"], running["apache"]
    of_both = {key: compared(getattr(ours, key), getattr(apache, key)) for key in ("ready_s", "idle_mib")}
    rows = [(client, what, *values.values()) for client in clients for what, values in found[client].items()]
    rows += [("", what, *values.values()) for what, values in of_both.items()]
    runner.show(
        "Official clients of 5.x", ("client", "", "rocketlet", f"apache {versions.APACHE_FIVE}", "times better"), rows
    )
    runner.console.print("rates: messages/s, medians of alternating rounds; redelivery: ms behind its time")
    return {**found.pop(clients[0]), "client": clients[0], **found, **of_both}


if __name__ == "__main__":
    made = runner.parser(__doc__, CLIENTS)
    made.add_argument("--messages", type=whole(100), help="of each phase; default: " + str(COUNTS))
    made.add_argument("--redeliveries", type=whole(1), default=5, help="of each client; one takes up to 10 s")
    runner.main("five", made, run)
