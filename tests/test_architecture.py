"""Packages import only what `ARROWS` lists, which docs/architecture.md draws.

Every import counts, also those for type checkers only and those inside of functions.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rocketlet.broker.groups import owners, stages
from rocketlet.broker.groups.stages import Drain
from rocketlet.broker.pops import deliveries
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.client.consuming import queues
from rocketlet.client.message import Lease
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from .support import habits
from .support.sources import ROOT, body, docstring, nodes, text_of, texts

PACKAGES = tuple("adapters broker client command console demo host migration protocol spark sync testing web".split())
PROGRAMS = ("bench", "campaigns", "examples", "simulation")
"""Programs of ours that are no part of `rocketlet`. No part of it knows them, or the tests."""
BESIDE = (*PROGRAMS, "tests")
SPLIT_PACKAGES = ("broker", "client", "command")
"""Packages whose folders and modules have an entry of their own in `ARROWS`."""

# The packages and modules that each package may import besides itself and protocol. Add a new package here and to
# docs/architecture.md.
ARROWS: Mapping[str, frozenset[str]] = {
    package: frozenset(below.split())
    for package, below in {
        "protocol": "",
        "host": "",
        "client.errors": "",
        "client.message": "",
        "client.config": "client.errors",
        "client.wire": "client.config client.errors client.message host",
        "client.sending": "client.config client.errors client.message client.wire host",
        "client.member": "client.config client.errors client.message client.wire host",
        "client.consuming": "client.config client.errors client.message client.wire",
        "client.sharing": "client.config client.consuming client.errors client.message client.wire",
        "client.options": "client.config client.consuming client.errors client.wire",
        "client.producer": "client.config client.errors client.message client.sending client.wire",
        "client.consumer": "client.config client.consuming client.errors client.member client.message client.options "
        "client.sending client.wire",
        "client.shared_consumer": "client.config client.consumer client.consuming client.errors client.member "
        "client.message client.options client.sending client.sharing client.wire host",
        "client.lite_consumer": "client.config client.consuming client.errors client.options client.shared_consumer "
        "client.sharing client.wire",
        "client.application": "client.config client.consumer client.consuming client.errors client.lite_consumer "
        "client.message client.options client.producer client.sending client.shared_consumer client.wire",
        "client.cloudevents": "client.errors client.message",
        "client.admin": "client.config client.consuming client.errors client.message client.producer client.sending "
        "client.wire",
        "client": "client.admin client.application client.cloudevents client.config client.consumer client.consuming "
        "client.errors "
        "client.lite_consumer client.member client.message client.producer client.sending client.shared_consumer "
        "client.wire",  # the public names
        "migration": "client",
        "spark": "client host",
        "root": "client",  # the public names, in __init__.py of the root
        "sync": "client",
        "adapters": "client root sync testing",  # rocketlet.celery, dramatiq, otel, taskiq and testcontainers
        "examples": "root spark testing",
        "bench": "broker client command demo simulation spark testing tests",
        "campaigns": "bench broker client command console demo testing tests",
        "simulation": "broker client tests",
        "web": "",
        "console": "client host web",
        "command": "",
        "command.config": "",
        "command.plumbing": "client command.config migration",
        "command.serving": "broker client command.config command.plumbing console host testing",  # testing for --control-port
        "command.tools": "broker client command.config command.plumbing command.serving migration",
        "command.nouns": "client command.plumbing command.tools root",  # the root for its version
        "command.cli": "command.plumbing command.serving root",
        "command.completion": "command.cli",
        "demo": "bench client command spark",  # bench.peers: Apache's brokers, in a clone of the repository
        "testing": "broker client host root web",  # the root for its version
        "broker.config": "",
        "broker.runtime": "broker.config",
        "broker.machine": "broker.config broker.runtime",
        "broker.store": "host broker.config broker.runtime",
        "broker.sessions": "host broker.config broker.runtime",
        "broker.memory": "broker.config",
        "broker.tls": "broker.config broker.machine broker.sessions host",
        "broker.access": "broker.config broker.machine broker.runtime broker.sessions host",
        "broker.nameserver": "host broker.config broker.runtime broker.sessions",
        "broker.messages": "broker.config broker.runtime broker.sessions broker.store",
        "broker.cluster": "broker.access broker.config broker.messages broker.nameserver broker.runtime broker.tls",
        "broker.groups": "broker.config broker.messages broker.runtime broker.sessions broker.store",
        "broker.pops": "broker.config broker.groups broker.messages broker.runtime broker.sessions broker.store",
        "broker.groups.pulling": "broker.config broker.groups broker.messages broker.pops broker.runtime broker.sessions "
        "broker.store",
        "broker.broker": "broker.access broker.cluster broker.config broker.groups broker.groups.pulling broker.machine "
        "broker.messages broker.nameserver broker.pops broker.runtime broker.sessions broker.store broker.tls",
        "broker.metrics": "host broker.broker broker.config broker.memory broker.messages broker.nameserver "
        "broker.runtime broker.tls",
        "broker.remoting": "broker.access broker.broker broker.config broker.groups broker.groups.pulling "
        "broker.machine broker.memory broker.messages broker.nameserver broker.pops broker.runtime broker.sessions "
        "broker.store broker.tls host",
        "broker.grpc": "broker.access broker.broker broker.config broker.messages broker.pops broker.runtime "
        "broker.sessions broker.store broker.tls",
        "broker.server": "host broker.access broker.broker broker.config broker.grpc broker.machine broker.memory "
        "broker.metrics broker.nameserver broker.remoting broker.runtime broker.sessions broker.tls",
    }.items()
}
IMPURE = frozenset(
    "asyncio logging os pathlib random select selectors shutil socket ssl structlog subprocess tempfile threading "
    "time".split()
)
ALLOWED = {"protocol.fast": {"os"}}  # whose environment may switch the compiled module off
# The store's calls to the operating system, and those for what an operator writes; nothing else of the broker.
TOUCH_THE_DISK = frozenset(
    (
        "broker.store.disk",
        "broker.store.files",
        "broker.store.journals",
        "broker.store.log",
        "broker.store.recovery",
        "broker.machine",  # the memory of a container, and files of an operator
        "broker.tls",  # OpenSSL reads certificates from files
    )
)
PROTOCOL_SERVERS = ("grpc", "remoting")
# State: what protocol servers decode to and encode from. It imports no frame, no response code and no transport.
BELOW_PROTOCOL_SERVERS = ("access", "groups", "messages", "nameserver", "pops", "sessions")
NAMES_OF_PROTOCOLS = frozenset(("protocol.frame", "protocol.codes.ResponseCode"))
CLASSES_OF_ASYNCIO = frozenset(("Protocol", "Transport", "BaseTransport", "StreamReader", "StreamWriter"))
MODULES_OF_PROTOCOLS = frozenset(("socket", "socketserver", "ssl"))
DISK_MODULES = frozenset(("os", "shutil", "fcntl", "io", "tempfile", "mmap"))
DISK_CALLS = frozenset(
    "open read_bytes read_text write_bytes write_text mkdir unlink rename touch iterdir glob rglob is_dir is_file exists "
    "stat".split()
)


Sources = Mapping[str, str]


@cache
def _imports(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in nodes(text) if isinstance(node, ast.Import | ast.ImportFrom))


Import = tuple[str, str]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of every module of the package, by its name without `rocketlet.`."""
    found = {"": text_of(ROOT / "__init__.py")}
    for path, text in texts(*PACKAGES, *PROGRAMS).items():
        found[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = text
    return found


def package_of(module: str) -> str:
    """A folder of a top-level package or of a folder there, a module beside them, or another package."""
    parts = module.split(".")
    if not module:
        return "root"
    if parts[0] not in SPLIT_PACKAGES or len(parts) == 1:
        return parts[0]
    return next((package for count in (3, 2) if (package := ".".join(parts[:count])) in ARROWS), ".".join(parts[:2]))


def imports(sources: Sources) -> Iterator[Import]:
    """Module and imported module, of ours only."""
    packages = {name.rpartition(".")[0] for name in sources} | {""}
    for module, text in sources.items():
        package = module if module in packages else module.rpartition(".")[0]
        for node in _imports(text):
            if isinstance(node, ast.ImportFrom):
                base = _base(package, node)
                if base is None:
                    continue
                for alias in node.names:
                    target = f"{base}.{alias.name}".lstrip(".")
                    yield module, target if target in sources else base
            else:
                for alias in node.names:
                    if alias.name.split(".")[0] in ("rocketlet", *BESIDE):
                        yield module, alias.name.removeprefix("rocketlet").removeprefix(".")


def _base(package: str, node: ast.ImportFrom) -> str | None:
    """The module that names are imported from, without `rocketlet.`; None if it is not ours."""
    if node.level:
        parts = package.split(".") if package else []
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])
    name = node.module or ""
    top = name.split(".")[0]
    if top in BESIDE:
        return name
    return name.removeprefix("rocketlet").removeprefix(".") if top == "rocketlet" else None


def wrong_arrows(sources: Sources) -> list[str]:
    faults = []
    for module, target in imports(sources):
        package, other = package_of(module), package_of(target)
        is_init = module == "broker"  # its docstring only
        if package == other or other == "protocol" or is_init:
            continue
        allowed = ARROWS.get(package)
        if allowed is None:
            faults.append(f"{module}: the package {package} is not drawn; add it to ARROWS and docs/architecture.md")
        elif other not in allowed and not (
            other.partition(".")[0] in allowed and package.partition(".")[0] not in other
        ):
            faults.append(f"{module} imports {target}: {package} may not import {other}")
    return faults


def circle(sources: Sources) -> list[str]:
    """A circle of modules that import each other; empty if there is none."""
    below: dict[str, set[str]] = {module: set() for module in sources}
    for module, target in imports(sources):
        if target in below and target != module:
            below[module].add(target)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for target in sorted(below[module]):
            found = walk(target, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    return next((found for module in sorted(below) if (found := walk(module, []))), [])


def foreign_imports(text: str) -> set[str]:
    """The top names of what is imported that is not ours."""
    found: set[str] = set()
    for node in _imports(text):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def disk_faults(sources: Sources) -> list[str]:
    faults: list[str] = []
    for module, text in sources.items():
        if not module.startswith("broker") or module in TOUCH_THE_DISK:
            continue
        faults += [f"{module} imports {name}" for name in sorted(foreign_imports(text) & DISK_MODULES)]
        for node in nodes(text):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                if name in DISK_CALLS:
                    faults.append(f"{module}:{node.lineno} calls {name}")
    return faults


def _targets(module: str, text: str) -> Iterator[str]:
    """Each name that a module imports of ours, with its module."""
    package = module.rpartition(".")[0]
    for node in _imports(text):
        if isinstance(node, ast.ImportFrom) and (base := _base(package, node)) is not None:
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def protocol_faults(sources: Sources) -> list[str]:
    """Return the places where state knows a protocol's encoding."""
    state = {
        name: text
        for name, text in sources.items()
        if f"{name}.".startswith(tuple(f"broker.{package}." for package in BELOW_PROTOCOL_SERVERS))
    }
    faults: list[str] = []
    for module, text in state.items():
        for target in _targets(module, text):
            is_of_protocol = target.startswith(tuple(f"broker.{server}" for server in PROTOCOL_SERVERS))
            if is_of_protocol or target in NAMES_OF_PROTOCOLS or target.rpartition(".")[0] in NAMES_OF_PROTOCOLS:
                faults.append(f"{module} imports {target}")
        faults += [f"{module} imports {name}" for name in sorted(foreign_imports(text) & MODULES_OF_PROTOCOLS)]
        used = [node.attr for node in nodes(text) if isinstance(node, ast.Attribute)]
        faults += [f"{module} uses asyncio.{name}" for name in used if name in CLASSES_OF_ASYNCIO]
    return faults


def test_imports_go_down(sources: Sources) -> None:
    assert wrong_arrows(sources) == []


def test_no_modules_import_each_other_in_a_circle(sources: Sources) -> None:
    """In the product: the simulation's world and its actors know each other."""
    product = {module: text for module, text in sources.items() if module.split(".")[0] not in PROGRAMS}
    assert circle(product) == []


def test_protocol_is_pure(sources: Sources) -> None:
    impure = {
        module: found
        for module, text in sources.items()
        if module.startswith("protocol") and (found := foreign_imports(text) & IMPURE - ALLOWED.get(module, set()))
    }
    assert impure == {}


@pytest.mark.parametrize("module", ["socket", "ssl", "time"])
def test_an_impure_import_is_found(module: str) -> None:
    assert foreign_imports(f"def f():\n    import {module}") & IMPURE == {module}


def test_only_the_store_touches_the_disk(sources: Sources) -> None:
    assert disk_faults(sources) == []


def test_nothing_below_a_protocol_server_knows_its_encoding(sources: Sources) -> None:
    assert protocol_faults(sources) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "from ..remoting.connection import RemotingConnection",
            "imports broker.remoting.connection.RemotingConnection",
        ),
        ("from .. import remoting", "imports broker.remoting"),
        ("from ...protocol.frame import Frame", "imports protocol.frame.Frame"),
        ("from ...protocol import frame", "imports protocol.frame"),
        ("from ...protocol.codes import ResponseCode", "imports protocol.codes.ResponseCode"),
        ("import socket", "imports socket"),
        ("import asyncio\nclass Socket(asyncio.Protocol): ...", "uses asyncio.Protocol"),
    ],
)
def test_an_arrow_from_state_to_a_protocol_server_is_found(sources: dict[str, str], text: str, fault: str) -> None:
    assert protocol_faults(sources | {"broker.messages.planted": text}) == [f"broker.messages.planted {fault}"]


@pytest.mark.parametrize(
    ("module", "text", "fault"),
    [
        (
            "broker.store.planted",
            "from ..remoting.messages import Sends",
            "broker.store may not import broker.remoting",
        ),
        ("broker.groups.planted", "from ..broker import Broker", "broker.groups may not import broker.broker"),
        (
            "broker.messages.planted",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..broker import Broker",
            "broker.messages may not import broker.broker",
        ),
        (
            "broker.store.planted",
            "def late():\n    from .. import server",
            "broker.store may not import broker.server",
        ),
        ("protocol.planted", "from ..client.errors import RocketletError", "protocol may not import client"),
        ("client.wire.planted", "import rocketlet.broker.config", "client.wire may not import broker.config"),
        ("client.wire.planted", "from ..member.leases import Leases", "client.wire may not import client.member"),
        ("client.consuming.planted", "from ..member import leases", "client.consuming may not import client.member"),
        ("command.plumbing.planted", "from ..serving import serve", "command.plumbing may not import command.serving"),
        ("broker.cellar.planted", "from ..config import REGION", "the package broker.cellar is not drawn"),
        ("sync.planted", "from ..broker.server import Server", "sync may not import broker.server"),
        (
            "adapters.otel.planted",
            "from rocketlet.broker.config import REGION",
            "adapters may not import broker.config",
        ),
        ("client.wire.planted", "from bench.peers import Peer", "client.wire may not import bench"),
        ("broker.store.planted", "import simulation.loop", "broker.store may not import simulation"),
        ("testing.planted", "from tests.conftest import Wire", "testing may not import tests"),
        (
            "examples.planted",
            "from rocketlet.client.wire.connection import Access",
            "examples may not import client.wire",
        ),
        ("bench.planted", "from rocketlet.console import app", "bench may not import console"),
    ],
)
def test_an_upward_import_is_found(sources: dict[str, str], module: str, text: str, fault: str) -> None:
    (found,) = wrong_arrows(sources | {module: text})
    assert fault in found


def test_a_circle_is_found_also_if_it_is_for_types_only(sources: dict[str, str]) -> None:
    offsets = sources["broker.groups.offsets"] + "\nif TYPE_CHECKING:\n    from .pulling import Pulling\n"
    found = circle(sources | {"broker.groups.offsets": offsets})
    assert {"broker.groups.offsets", "broker.groups.pulling"} <= set(found)


def test_a_touch_of_the_disk_is_found(sources: dict[str, str]) -> None:
    planted = {
        "broker.groups.planted": "import shutil",
        "broker.messages.planted": "def keep(path):\n    path.write_text('')",
    }
    assert disk_faults(sources | planted) == [
        "broker.groups.planted imports shutil",
        "broker.messages.planted:2 calls write_text",
    ]


def test_docstring_of_every_package_describes_its_modules(sources: Sources) -> None:
    missing: list[str] = []
    for module in sources:
        package, _, name = module.rpartition(".")
        if package and package in sources:
            text = docstring(sources[package])
            words = {word.strip(",/") for line in text.splitlines() for word in line.split("  ")[0].split()}
            if name not in words:
                missing.append(f"{package}/__init__.py does not describe {name}")
    assert missing == []


def test_docstring_of_a_package_names_no_missing_module(sources: Sources) -> None:
    packages = {module.rpartition(".")[0] for module in sources} - {""}
    stale: list[str] = []
    for package in packages & sources.keys():
        text = docstring(sources[package])
        for line in text.splitlines()[1:]:
            names, gap, _ = line.partition("  ")
            if gap and names.strip():
                stale += [
                    f"{package}/__init__.py names {name}"
                    for name in names.replace(",", " ").replace("/", " ").split()
                    if f"{package}.{name}" not in sources
                ]
    assert stale == []


def test_every_request_of_the_tables_is_in_the_table_of_compatibility() -> None:
    document = (ROOT / "docs" / "compatibility.md").read_text()
    codes = {*SENDS, *BROKER_REQUESTS, *NAME_SERVER_REQUESTS}
    assert [code for code in sorted(codes) if f"\n| {int(code)} {RequestCode(code).name} |" not in document] == []


def test_what_is_drawn_is_there(sources: Sources) -> None:
    """ARROWS has no missing package and no import that is not used."""
    used = {(package_of(module), package_of(target)) for module, target in imports(sources)}
    packages = {package_of(module) for module in sources}
    assert set(ARROWS) <= packages
    used |= {(package, below.partition(".")[0]) for package, below in used}
    unused = [
        (package, below) for package, all_below in ARROWS.items() for below in all_below if (package, below) not in used
    ]
    assert unused == []


def test_the_standard_library_has_what_is_called_impure() -> None:
    assert IMPURE - {"structlog"} <= sys.stdlib_module_names


def test_the_architecture_page_names_every_package_and_no_missing_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    packages = [package.rpartition(".")[2] for package in ARROWS if (ROOT / package.replace(".", "/")).is_dir()]
    assert [package for package in packages if f"{package}" not in text] == []
    paths = re.findall(r"`((?:broker|client|protocol|command|spark|tests|docs)/[\w/.]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_architecture_page_names_no_missing_function() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([A-Za-z_.]+)` \(`([\w/]+\.py)`\)", text)
    assert len(named) > 20
    assert [f"{name} in {path}" for name, path in named if name not in definitions(ROOT / path)] == []


def definitions(path: Path) -> set[str]:
    """Return the classes, functions and methods of a module, methods with their class."""
    found = set()
    for node in body(text_of(path)):
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {node.name} | {f"{node.name}.{item.name}" for item in methods}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


# State machines allow what they draw, and nothing else.


class Machine(NamedTuple):
    """`make` gives one in a state; `legal`: by state what each event leads to, in the events' order, - where it cannot be."""

    module: Any
    stages: type[Enum]
    events: type[Enum]
    make: Callable[[Any], Any]
    field: str
    legal: str


@dataclass
class _InTable:
    """A delivery as its table has it: `QueueDeliveries._transition` also counts."""

    state: deliveries.DeliveryState

    def transition(self, event: deliveries.DeliveryEvent) -> None:
        self.state = deliveries.TRANSITIONS[self.state, event]


@dataclass
class _Owned:
    """A queue whose owner changes by its table."""

    state: owners.OwnerState

    def transition(self, event: owners.OwnerEvent) -> None:
        self.state = owners.OWNER_TRANSITIONS[self.state][event]


def _drain(stage: stages.DrainStage) -> Drain:
    made = Drain(0.0)
    made.stage = stage
    return made


def _sync(stage: stages.SyncStage) -> stages.PeerSync:
    made = stages.PeerSync()
    made.stage = stage
    return made


def _queue(state: queues.QueueState) -> queues.ProcessQueue:
    made = queues.ProcessQueue(Queue("t", "b", 0), 0, Lease(1))
    made.state = state
    return made


MACHINES = {
    "process queue": Machine(
        queues,
        queues.QueueState,
        queues.QueueEvent,
        _queue,
        "state",
        """
        suspend   resume  stop    drop
        SUSPENDED RUNNING STOPPED DROPPED RUNNING
        SUSPENDED RUNNING STOPPED DROPPED SUSPENDED
        STOPPED   STOPPED STOPPED DROPPED STOPPED
        -         -       -       -       DROPPED
        """,
    ),
    "synchronization": Machine(
        stages,
        stages.SyncStage,
        stages.SyncEvent,
        _sync,
        "stage",
        """
        change  find   agree give_up
        FINDING ASKING -     SILENT  FINDING
        FINDING -      DONE  DONE    ASKING
        FINDING -      -     DONE    DONE
        FINDING ASKING -     -       SILENT
        """,
    ),
    "drain": Machine(
        stages,
        stages.DrainStage,
        stages.DrainEvent,
        _drain,
        "stage",
        """
        change  find     find_nobody finish   agree    give_up
        FINDING DRAINING AGREEING    FINDING  -        NOTIFIED FINDING
        FINDING -        -           AGREEING -        NOTIFIED DRAINING
        FINDING -        -           -        NOTIFIED NOTIFIED AGREEING
        FINDING DRAINING AGREEING    -        -        -        NOTIFIED
        """,
    ),
    "owner": Machine(
        owners,
        owners.OwnerState,
        owners.OwnerEvent,
        _Owned,
        "state",
        """
        grant  lock        reconnect   disconnect unlock  expire  close read        release lose        restart
        LEASED LOCKED      -           -          -       -       -     FOREIGN     -       -           FREE    FREE
        LEASED LOCKED      LEASED      LEASED     FREE    FREE    FREE  -           -       -           LEASED  LEASED
        LEASED LOCKED      LOCKED      -          FREE    FREE    -     LOCKED_FOREIGN -    -           -       LOCKED
        LEASED LOCKED_FOREIGN -        -          -       -       -     FOREIGN     FREE    LOST        AWAITED FOREIGN
        LEASED LOCKED_FOREIGN LOCKED_FOREIGN -    FOREIGN FOREIGN -     LOCKED_FOREIGN LOCKED LOCKED_LOST -     LOCKED_FOREIGN
        LEASED LOCKED      AWAITED     AWAITED    FREE    FREE    FREE  FOREIGN     -       -           -       AWAITED
        LEASED LOCKED_LOST -           -          -       -       -     FOREIGN     FREE    -           -       LOST
        LEASED LOCKED_LOST LOCKED_LOST -          LOST    LOST    -     LOCKED_FOREIGN LOCKED -         -       LOCKED_LOST
        """,
    ),
    "delivery": Machine(
        deliveries,
        deliveries.DeliveryState,
        deliveries.DeliveryEvent,
        _InTable,
        "state",
        """
        pop       release change    acknowledge  refuse  finish   forget
        IN_FLIGHT VISIBLE -         ACKNOWLEDGED -       -        FINISHED BEHIND
        IN_FLIGHT -       IN_FLIGHT ACKNOWLEDGED -       -        FINISHED VISIBLE
        IN_FLIGHT VISIBLE IN_FLIGHT ACKNOWLEDGED -       -        FINISHED IN_FLIGHT
        IN_FLIGHT -       -         -            VISIBLE FINISHED FINISHED ACKNOWLEDGED
        -         -       -         -            -       -        FINISHED FINISHED
        """,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_allows_what_its_table_says(name: str) -> None:
    _, stages, all_events, make, field, legal = MACHINES[name]
    found = []
    for stage in stages:
        row = []
        for event in all_events:
            machine = make(stage)
            try:
                getattr(machine, "transition" if hasattr(machine, "transition") else "turn")(event)
            except KeyError:
                assert getattr(machine, field) is stage
                row.append("-")
            else:
                row.append(getattr(machine, field).name)
        found.append([*row, stage.name])
    events, *rows = (line.split() for line in legal.strip().splitlines())
    assert [event.name.lower() for event in all_events] == events
    assert found == rows


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_drawn_where_it_lives(name: str) -> None:
    machine = MACHINES[name]
    picture = "\n".join(line for line in inspect.getsource(machine.module).splitlines() if line.startswith("#"))
    assert set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", picture)) >= {stage.name for stage in machine.stages}


# Folders of tests are named like the packages that they test, and shared code is in modules without tests.


def test_tests_of_the_broker_are_in_the_folder_of_their_package() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests" / "broker").rglob("test_*.py")]
    folders = {path.parent.as_posix() for path in tests} - {"broker"}
    packages = [folder for folder in folders if (ROOT / folder).is_dir() or (ROOT / f"{folder}.py").is_file()]
    assert sorted(folders) == sorted(packages)
    of_modules = {path.stem.removeprefix("test_") for path in tests if path.parent.name == "broker"}
    assert [name for name in sorted(of_modules) if not (ROOT / "broker" / f"{name}.py").is_file()] == []


def test_no_module_of_tests_imports_from_another_module_of_tests() -> None:
    """Tests share code through the conftest of their folder and through modules without tests."""
    shared = re.compile(r"^from \.[\w.]*\btest_\w+ import", re.M)
    modules = [path for path in (ROOT / "tests").rglob("*.py") if shared.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in modules] == []


def test_docstring_of_every_folder_of_tests_describes_its_shared_modules() -> None:
    """Shared modules are those without tests, except conftest."""
    missing: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        package = path.parent / "__init__.py"
        if path.stem in ("__init__", "conftest") or path.stem.startswith("test_") or not package.exists():
            continue
        if not re.search(rf"^(\w+, )*{path.stem}\b", docstring(text_of(package)), re.M):
            missing.append(f"{package.relative_to(ROOT)} does not describe {path.stem}")
    assert missing == []


def test_examples_of_slow_tests_follow_the_profile_of_hypothesis() -> None:
    fixed = re.compile(r"max_examples=(?!examples\()")
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_java_consumers.py"]
    found = [path.name for path in paths if path != Path(__file__) and fixed.search(path.read_text())]
    assert found == [], "use tests.support.examples: --hypothesis-profile search tries more"


# Tests use what users use, and wait for conditions: private accesses and sleeps only become fewer.


def test_private_accesses_and_sleeps_are_no_more_than_the_committed_counts() -> None:
    private, slept = habits.found()
    assert len(private) <= habits.MOST_PRIVATE_ACCESSES, "use public behaviour: python -m tests.support.habits --list"
    assert len(slept) <= habits.MOST_SLEEPS, "wait for a condition with `eventually`, or move the clock"


@pytest.mark.parametrize(
    "text",
    [
        "consumer._membership.x",
        "from rocketlet.broker.store.index import _read",
        "monkeypatch.setattr(Pool, '_places', 1)",
        "mock.patch.setattr('rocketlet.client.wire.home._mine', 1)",
    ],
)
def test_a_private_access_is_found(text: str) -> None:
    assert len(list(habits.private_accesses(text))) == 1


def test_names_of_the_tests_and_of_python_are_no_private_accesses() -> None:
    text = "class Reader:\n    def read(self):\n        self._lines = []\nreader._lines\nnode.__dict__"
    own = set(habits.defined(text))
    assert [name for _, name in habits.private_accesses(text) if name not in own] == []


@pytest.mark.parametrize(
    ("text", "count"), [("time.sleep(1)", 1), ("await asyncio.sleep(pause_s)", 1), ("await asyncio.sleep(0)", 0)]
)
def test_a_sleep_is_found_unless_it_is_of_length_0(text: str, count: int) -> None:
    assert len(list(habits.sleeps(f"async def f():\n    {text}"))) == count
