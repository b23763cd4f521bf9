"""One word, one thing: no two classes of the product have the same public name; and tests hand limits in, instead of patching
constants of modules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "broker",
    "client",
    "command",
    "console",
    "migration",
    "protocol",
    "spark",
    "testing",
    "sync",
    "web",
    "host",
    "adapters",
)

JUSTIFIED = frozenset(("Consumer", "LiteConsumer", "Producer", "SharedConsumer"))
"""The classes of `sync` stand for the client's, by the same names on purpose."""


def classes(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each public class, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def doubles(texts: Mapping[str, str]) -> set[str]:
    return {name for name, modules in classes(texts).items() if len(modules) > 1}


@pytest.fixture(scope="module")
def product() -> dict[str, str]:
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_public_class_name_has_one_meaning(product: dict[str, str]) -> None:
    assert doubles(product) == JUSTIFIED, "give the new class another name"


def test_a_planted_double_is_found(product: dict[str, str]) -> None:
    assert "Locks" not in doubles(product)
    assert "Locks" in doubles({**product, "client/planted.py": "class Locks: ..."})


# Constants

PATCHING = frozenset(("setattr", "object", "patch"))
PATCHED = {
    "broker/groups/test_draining.py": 1,
    "broker/grpc/test_costs.py": 2,
    "broker/grpc/test_transport.py": 3,
    "broker/tls/test_tls.py": 1,
    "broker/tls/test_tls_floods.py": 1,
    "broker/messages/test_searching.py": 3,
    "broker/remoting/test_hostile.py": 1,
    "broker/runtime/test_turns.py": 4,
    "broker/sessions/test_limits.py": 1,
    "broker/store/test_recovery.py": 5,
    "broker/store/test_schedule.py": 1,
    "broker/store/test_store.py": 6,
    "client/test_offsets.py": 1,
    "command/test_commands.py": 1,
    "command/test_cli.py": 1,
    "protocol/test_http2.py": 1,
    "spark/test_available_now.py": 4,
    "spark/test_hostile.py": 2,
    "spark/test_planner.py": 1,
    "spark/test_sink.py": 1,
    "testing/test_kit.py": 3,
    "web/test_server.py": 1,
}
"""How many constants the tests of a module still patch. These numbers become smaller only."""


def patched(text: str) -> Iterator[str]:
    """Constants with a unit or a bound in their name that a test puts another value in, by a text or beside a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATCHING:
            for argument in node.args[:2]:
                name = ast.unparse(argument).strip("f'\"").rpartition(".")[2]
                if isinstance(argument, ast.Constant | ast.JoinedStr) and re.fullmatch(LIMIT, name):
                    yield name


LIMIT = (
    r"[A-Z][A-Z0-9_]*(_S|_MS|_BYTES|_ENTRIES|_KEYS|_ROWS|_KNOWN|_QUEUES|_STEPS|_SUMS|_MESSAGES)|MAX_[A-Z0-9_]+|LOOKS"
)


def test_limits_are_handed_in_and_not_patched() -> None:
    counts = {
        str(path.relative_to(ROOT / "tests")): len(list(patched(path.read_text())))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    assert {module: count for module, count in counts.items() if count} == PATCHED, "hand in Limits or ClientLimits"


@pytest.mark.parametrize(
    "text",
    [
        "monkeypatch.setattr('rocketlet.client.member.leases.LOCK_TIMEOUT_S', 0)",
        "monkeypatch.setattr(written, 'MAX_SUMS', 50)",
        "patch.setattr(f'rocketlet.broker.{module}.LOOKS', 4)",
    ],
)
def test_a_patched_constant_is_found(text: str) -> None:
    assert len(list(patched(text))) == 1


def test_a_patched_function_is_none() -> None:
    assert list(patched("monkeypatch.setattr('rocketlet.broker.store.disk.write', fail)")) == []
