"""Comments, docstrings and documents are sentences with a subject: none begins with What, Who, Whoever or Of.

Questions are exempt, and so are headings and tables of documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = "adapters broker client command console demo host protocol spark sync testing web"
FOLDERS = (*PRODUCT.split(), "bench", "campaigns", "examples", "simulation", "tests")
BAD = re.compile(r"(What|Who|Whoever|Of)\b")
BAD_AT_FIRST = re.compile(BAD.pattern, re.IGNORECASE)  # a comment beside code begins with a small letter
SUSPECT = re.compile(r"\b(What|Who|Whoever|Of)\b|(#|\"\"\")\s*(what|who|whoever|of)\b")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^\s*(?:[-*>]|\d+\.|:)\s+", re.MULTILINE)  # an item of a list, or a definition
BREAK = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring and each comment with its line. Comments on lines of their own that follow each other are one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            is_alone = token.line.lstrip().startswith("#")
            if block and not (is_alone and line == last + 1):
                yield first, " ".join(block)
                block = []
            first = first if block else line
            block.append(text)
            last = line if is_alone else 0
    if block:
        yield first, " ".join(block)


def faults_of(source: str) -> list[str]:
    """The sentences that begin with one of the words, each behind its line."""
    if not SUSPECT.search(source):  # to parse all files takes ten times as long
        return []
    return [
        f"{line}: {' '.join(sentence.split())[:70]}"
        for line, text in texts_of(source)
        for number, sentence in enumerate(BREAK.split(text.strip()))
        if (BAD if number else BAD_AT_FIRST).match(sentence)
    ]


def faults_of_document(text: str) -> list[str]:
    """The same of a document, outside of code, headings and tables. Its lines are not counted: sentences span several."""
    prose = "\n".join("" if line.lstrip().startswith(("#", "|")) else line for line in FENCE.sub("", text).splitlines())
    sentences = (" ".join(part.split()) for block in ITEM.split(prose) for part in BREAK.split(block.strip()))
    return [found[:70] for found in sentences if BAD.match(found.lstrip("*_")) and not found.endswith("?")]


def test_no_sentence_of_a_document_hides_its_subject() -> None:
    paths = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
    assert len(paths) > 30
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults_of_document(path.read_text())]
    assert faults == [], "name the subject; CONTRIBUTING.md has examples"


@pytest.mark.parametrize(
    "planted",
    [
        "Well.\nWho reads it waits.",
        "- good\n- What is read is kept.",
        "1. **Whoever asks** gets it.",
        "a\n:   Of one group.",
    ],
)
def test_a_planted_one_in_a_document_is_found(planted: str) -> None:
    assert len(faults_of_document(planted)) == 1


def test_questions_headings_tables_and_code_are_not_meant() -> None:
    text = "# What it is\n\nWhat is wrong?\n\n| What | Who |\n|---|---|\n\n```python\nWhat = 1\n```\n"
    assert faults_of_document(text) == []


def test_no_sentence_hides_its_subject() -> None:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert len(paths) > 700
    faults = [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in faults_of(path.read_text())]
    assert faults == [], "name the subject; CONTRIBUTING.md has examples"


@pytest.mark.parametrize(
    "planted",
    [
        '"""What is read."""',
        'def f():\n    """Reads. Whoever asks\n    gets it."""',
        'def f():\n    """Reads.\n\n    Of one group."""',
        "x = 1  # of a group",
        "# It is read. Who\n# reads it waits.",
        "x = 1  # good\n# What follows.\n",
    ],
)
def test_a_planted_one_is_found(planted: str) -> None:
    (fault,) = faults_of(planted)
    assert int(fault.split(":")[0]) >= 1


def test_such_words_within_a_sentence_are_not_meant() -> None:
    assert faults_of('"""Says who reads what of a queue. Whether it does, too."""  # so that what comes is kept') == []
