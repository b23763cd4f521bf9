"""The words of the project: comments, docstrings, messages and names of tests use the terms of RocketMQ, Python and gRPC."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def banned_words(text: str) -> list[str]:
    return [match[0] for sentence in sentences(text) for match in PATTERN.finditer(sentence)]


def test_no_private_word_is_used() -> None:
    used = {
        str(path.relative_to(ROOT)): words
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != Path(__file__) and (words := banned_words(path.read_text()))
    }
    assert used == {}, "write the word of the glossary (tests/test_glossary.py, BANNED) instead"


def test_private_word_is_found_in_comments_texts_and_names_of_tests() -> None:
    text = 'def test_broker_is_told():\n    """It comes again."""\n    x = "it goes on"  # at once\n    told = "told"\n'
    assert sorted(banned_words(text)) == ["at once", "comes again", "goes on", "told"]
