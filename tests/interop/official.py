"""The official clients of 5.x as programs: how each is fetched, built and run. Tests get them by the fixture `official`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from rocketlet.client import Consumer, Producer

from bench.peers import CACHE

from ..conftest import Node, Nodes, kept
from ..support.handlers import Inbox
from .conftest import HERE, SMALL_JVM, Program, fetched, missing, program

SOURCES = HERE / "five"

NORMAL = "producer: messages with tag, keys and properties"
FIFO = "producer: messages of a group in order"
TIMED = "producer: timed messages"
TRANSACTIONS = "producer: transactions committed, rolled back, asked for by the broker"
SIMPLE = "simple consumer: by tag, with retries at their time"
ACCOUNTS = "accounts: signed requests"
"""Features that several clients show, for docs/compatibility.md."""


@dataclass
class Official:
    """One client. `name` as docs/compatibility.md shows it; `folder`: what was fetched and built."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]

    def run(self, mode: str, /, environment: dict[str, str] | None = None, **options: object) -> Running:
        named = [f"{name}={value}" for name, value in options.items()]
        return program(*self.command, mode, *named, **self.environment, **(environment or {}))


Running = AbstractAsyncContextManager[Program]


def go(folder: Path, home: Path) -> Official:
    return Official("Go 5.1.4", [str(folder / "peer")], {"rocketmq.client.logRoot": str(home)})


def make_go(folder: Path) -> None:
    fetched(["go", "mod", "download"], SOURCES / "go")
    subprocess.run(["go", "build", "-o", str(folder / "peer"), "."], cwd=SOURCES / "go", check=True)


def java(folder: Path, home: Path) -> Official:
    jars = f"{folder / 'classes'}:{folder / 'lib'}/*"
    return Official("Java 5.2.0", ["java", *SMALL_JVM, f"-Duser.home={home}", "-cp", jars, "Peer"], {})


def make_java(folder: Path) -> None:
    jars = folder / "lib"
    fetched(["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"], SOURCES / "java")
    options = ("-cp", f"{jars}/*", "-encoding", "UTF-8", "-nowarn", "-d", folder / "classes")
    subprocess.run(["javac", *options, SOURCES / "java" / "Peer.java"], check=True)


def node(folder: Path, home: Path) -> Official:
    return Official("Node 1.0.8", ["node", str(folder / "peer.js")], {"HOME": str(home)})


def make_node(folder: Path) -> None:
    fetched(
        ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "rocketmq-client-nodejs@1.0.8"], folder
    )
    shutil.copy(SOURCES / "node" / "peer.js", folder)


def python(folder: Path, home: Path) -> Official:
    environment = {"HOME": str(home), "PYTHONPATH": str(folder), "GRPC_VERBOSITY": "NONE"}
    return Official("Python 5.1.2", [sys.executable, str(SOURCES / "python" / "peer.py")], environment)


def make_python(folder: Path) -> None:
    wanted = "rocketmq-python-client==5.1.2"
    fetched([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), wanted], folder)


def rust(folder: Path, home: Path) -> Official:
    return Official("Rust 5.0.0", [str(folder / "peer")], {"HOME": str(home)})


def make_rust(folder: Path) -> None:
    """Cargo keeps what it has compiled of others in the cache, because that takes minutes."""
    fetched(["cargo", "fetch", "--locked"], SOURCES / "rust")
    target = CACHE / "cargo"
    target.mkdir(parents=True, exist_ok=True)
    with FileLock(target / "tests.lock"):
        built = {**os.environ, "CARGO_TARGET_DIR": str(target)}
        subprocess.run(["cargo", "build", "--quiet", "--locked"], cwd=SOURCES / "rust", env=built, check=True)
        shutil.copy(target / "debug" / "peer", folder)


Make = Callable[[Path], None]
CLIENTS: dict[str, tuple[tuple[str, ...], Make, Callable[[Path, Path], Official]]] = {
    "go": (("go",), make_go, go),
    "java": (("java", "mvn", "javac"), make_java, java),
    "node": (("node", "npm"), make_node, node),
    "python": ((), make_python, python),
}
"""The programs that each needs, and how it is made and run."""


def made(factory: pytest.TempPathFactory, name: str) -> Path:
    """The folder of a client that was fetched and built; skips the test where that cannot be."""
    needed, make, _ = CLIENTS[name]
    if missing(*needed):
        pytest.skip(missing(*needed))
    sources = sorted(path for path in (SOURCES / name).iterdir() if path.is_file() and path.suffix != ".py")
    tools = (str(Path(shutil.which(tool) or tool).resolve()) for tool in needed)  # another JDK makes other classes
    return kept(factory, f"official-{name}", make, [*tools, Path(__file__), *sources])


def home_of(folder: Path) -> Path:
    """Where a client writes its log."""
    found = folder / "home"
    found.mkdir(exist_ok=True)
    return found


PRODUCED = Counter(
    [f"{kind}-{number}" for kind in ("normal", "fifo") for number in range(5)] + "delayed committed unknown".split()
)
"""The bodies that the mode `produce` sends and does not take back."""


async def check_producers(nodes: Nodes, official: Official) -> None:
    """Runs the client's mode `produce` and checks everything that reaches a consumer."""
    node = await nodes.start(transaction_check_interval_s=0.1, transaction_timeout_s=0.3)
    inbox = Inbox()
    async with (
        Consumer(node.address, "g", "t", inbox, start="first"),
        official.run("produce", endpoint=node.address, topic="t") as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == PRODUCED.total() and bool(peer.found("DONE")))
    assert Counter(body.decode() for body in inbox.bodies) == PRODUCED
    assert peer.found("ASKED")[0] == ["ASKED", "unknown"]
    message = next(message for message in inbox.messages if message.body == b"normal-3")
    assert (message.tag, message.keys, message.properties["farbe"]) == ("TagA", ["key-3"], "grün")
    in_order = [message for message in inbox.messages if message.body.startswith(b"fifo")]
    assert len({message.queue_id for message in in_order}) == 1
    assert [message.body for message in sorted(in_order, key=lambda message: message.queue_offset)] == [
        b"fifo-%d" % number for number in range(5)
    ]


async def check_consumed(node: Node, producer: Producer, peer: Program) -> None:
    """Sends to a client that takes the tags A and C, and rejects the body `bad` once."""
    for number in range(5):
        await producer.send("t", b"%d" % number, tag="TagA", keys="k", properties={"farbe": "grün"})
    await producer.send("t", b"unwanted", tag="TagB")
    await producer.send("t", b"bad", tag="TagC")
    await peer.until(lambda: len(peer.bodies) == 7)
    await peer.until(lambda: sum(item.lag for item in node.broker.pops.pools.numbers("g", "t").values()) == 0)
    assert Counter(peer.bodies) == Counter(["0", "1", "2", "3", "4", "bad", "bad"])
    assert [line[4] for line in peer.found("GOT") if line[5] == "bad"] == ["1", "2"]
    assert next(line for line in peer.found("GOT") if line[5] == "3") == ["GOT", "t", "TagA", "k", "1", "3", "grün"]
