"""Documents are read in editors and in diffs, too: lines are short."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_CHARACTERS = 140
FOLDERS = ("docs", "bench", "examples", "docker", ".github")


def long_lines(text: str) -> list[int]:
    """The numbers of lines that are too long, outside of tables and code."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif len(line) > MAX_CHARACTERS and not is_code and not line.lstrip().startswith("|"):
            found.append(number)
    return found


def test_no_line_of_a_document_is_too_long() -> None:
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    assert len(pages) > 20
    too_long = [f"{page.relative_to(ROOT)}:{number}" for page in pages for number in long_lines(page.read_text())]
    assert too_long == []


def test_tables_and_code_may_be_wide() -> None:
    wide = "x" * 141
    assert long_lines(f"{wide}\n| {wide} |\n```\n{wide}\n```\n{wide[1:]}\n") == [1]
