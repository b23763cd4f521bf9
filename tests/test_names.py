"""One word, one thing: no two classes of the product have the same public name; and tests hand limits in, instead of patching
constants of modules."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from .support.sources import ROOT, body, nodes, text_of, texts

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

JUSTIFIED = frozenset(("AdminClient", "Consumer", "LiteConsumer", "Producer", "RocketletBroker", "SharedConsumer"))
"""The classes of `sync` stand for the client's, by the same names on purpose, and task queues have a RocketletBroker each."""


def classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each public class, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, text in sources.items():
        for node in body(text):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def doubles(sources: Mapping[str, str]) -> set[str]:
    return {name for name, modules in classes(sources).items() if len(modules) > 1}


@pytest.fixture(scope="module")
def product() -> dict[str, str]:
    return texts(*ROOMS)


def test_public_class_name_has_one_meaning(product: dict[str, str]) -> None:
    assert doubles(product) == JUSTIFIED, "give the new class another name"


def test_a_planted_double_is_found(product: dict[str, str]) -> None:
    assert "Locks" not in doubles(product)
    assert "Locks" in doubles({**product, "client/planted.py": "class Locks: ..."})


# Constants

PATCHING = frozenset(("setattr", "object", "patch"))
PATCHED = {
    "broker/groups/test_draining.py": 1,
    "broker/grpc/test_costs.py": 1,
    "broker/grpc/test_transport.py": 3,
    "broker/tls/test_tls.py": 2,
    "broker/messages/test_searching.py": 3,
    "broker/remoting/test_hostile.py": 1,
    "broker/runtime/test_turns.py": 4,
    "broker/sessions/test_limits.py": 1,
    "broker/store/test_recovery.py": 4,
    "broker/store/test_durability.py": 1,
    "broker/store/test_store.py": 6,
    "client/test_offsets.py": 1,
    "command/test_commands.py": 1,
    "command/test_cli.py": 1,
    "protocol/test_http2.py": 1,
    "spark/test_available_now.py": 2,
    "spark/test_hostile.py": 2,
    "spark/test_internals.py": 1,
    "spark/test_planner.py": 1,
    "spark/test_sink.py": 1,
    "testing/test_kit.py": 3,
    "web/test_server.py": 1,
}
"""How many constants the tests of a module still patch. These numbers become smaller only."""


def patched(text: str) -> Iterator[str]:
    """Constants with a unit or a bound in their name that a test puts another value in, by a text or beside a module."""
    for node in nodes(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATCHING:
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant | ast.JoinedStr):
                    name = ast.unparse(argument).strip("f'\"").rpartition(".")[2]
                    if re.fullmatch(LIMIT, name):
                        yield name


LIMIT = (
    r"[A-Z][A-Z0-9_]*(_S|_MS|_BYTES|_ENTRIES|_KEYS|_ROWS|_KNOWN|_QUEUES|_STEPS|_SUMS|_MESSAGES)|MAX_[A-Z0-9_]+|LOOKS"
)


def test_limits_are_handed_in_and_not_patched() -> None:
    counts = {path.removeprefix("tests/"): len(list(patched(text))) for path, text in texts("tests").items()}
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


# Every log event is a stable name: snake_case, written out where it is logged. Its fields have the values that vary.


LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def odd_events(source: str) -> Iterator[tuple[int, str]]:
    """Lines and events of calls such as `log.info(...)` whose first argument is not such a name."""
    for call in nodes(source):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS):
            continue
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "log":
            event = call.args[0] if call.args else None
            if not (isinstance(event, ast.Constant) and NAME.fullmatch(str(event.value))):
                yield call.lineno, ast.unparse(call)


def test_events_are_stable_names() -> None:
    for folder in ("broker", "client", "command", "console", "demo", "migration", "spark", "sync"):
        modules = texts(folder)
        assert modules
        odd = [f"{path}:{line}: {call}" for path, text in modules.items() for line, call in odd_events(text)]
        assert not odd


def test_an_event_that_is_a_sentence_or_computed_is_found() -> None:
    source = (
        'log.info("queue_lost", queue=queue)\nlog.error("queue lost")\nlog.warning(f"lost_{queue}")\nlog.info(event)'
    )
    assert [line for line, _ in odd_events(source)] == [2, 3, 4]


# The words of the project: comments, docstrings, messages and names of tests use the terms of RocketMQ, Python and gRPC.


PACKAGES = (
    "adapters", "bench", "broker", "campaigns", "client", "command", "console", "examples", "host", "migration", "protocol",
    "simulation", "spark", "sync", "testing", "tests", "web",
)  # fmt: skip

BANNED = {
    "retry, redeliver, recreate": r"(?:come|comes|give|gives|given|try|tried) (?:once )?again|once more|anew",
    "resume, continue": r"go(?:es)? on|let(?:s)? on|going on",
    "stall, freeze": r"stand(?:s|ing)? still|stood still|standstill",
    "notify, report": r"tell|tells|told|hear|hears|heard",
    "poll, check, look up": r"looks at|looked at|look at|between two looks",
    "in flight": r"in (?:the |its |their |whose |other )?hands?",
    "extend": r"prolong(?:s|ed|ing)?",
    "immediately": r"at once",
    "on its own": r"by (?:itself|themselves)",
    "this many, up to": r"so (?:much|many)",
    "fix, repair": r"mend(?:s|ed)?",
    "invalid, malformed": r"garbled",
    "protocol server, package": r"doors?|houses?|halls?|seats?|crews?",
    "connection is closed": r"good-?bye|farewell",
    "revoke, release": r"forsake|let(?:s)? go",
}
"""What to write, and the words that stand for it in a private language."""

PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED.values())})\b", re.IGNORECASE)


def sentences(text: str) -> Iterator[str]:
    """Return the comments, the texts of three words or more, and the names of tests, as words."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def banned_words(text: str) -> list[str]:
    names = " ".join(re.findall(r"def test_\w+", text)).replace("_", " ")
    if not PATTERN.search(text) and not PATTERN.search(names):
        return []  # most files, which need not be parsed
    return [match[0] for sentence in sentences(text) for match in PATTERN.finditer(sentence)]


def test_no_private_word_is_used() -> None:
    used = {
        str(path.relative_to(ROOT)): words
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != Path(__file__) and (words := banned_words(text_of(path)))
    }
    assert used == {}, "write the word of the glossary (tests/test_names.py, BANNED) instead"


def test_private_word_is_found_in_comments_texts_and_names_of_tests() -> None:
    text = 'def test_broker_is_told():\n    """It comes again."""\n    x = "it goes on"  # at once\n    told = "told"\n'
    assert sorted(banned_words(text)) == ["at once", "comes again", "goes on", "told"]
