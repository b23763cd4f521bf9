"""The changelog is for users: Keep a Changelog's sections, and releases that fit a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
MAX_RELEASE_LINES = 60
MAX_LINE_CHARACTERS = 140


def faults_of(text: str) -> list[str]:
    """Everything that breaks the form, in words."""
    faults = [f"too long a line: {line}" for line in text.splitlines() if len(line) > MAX_LINE_CHARACTERS]
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = release.split("\n", 1)[0]
        lines = [line for line in release.splitlines() if line.strip()]
        if not name.startswith("[Unreleased]") and len(lines) > MAX_RELEASE_LINES:
            faults.append(f"{name} has {len(lines)} lines, {MAX_RELEASE_LINES} are allowed")
        found = re.findall(r"^### (.+)$", release, re.MULTILINE)
        if len(found) != len(set(found)) or not set(found) <= set(SECTIONS):
            faults.append(f"{name} has the sections {found}; take each of {SECTIONS} once at most")
    return faults


def test_the_changelog_has_its_form() -> None:
    assert faults_of((ROOT / "CHANGELOG.md").read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("## [1.0.0]\n### News\n", "sections"),
        ("## [1.0.0]\n### Added\n### Added\n", "sections"),
        ("## [1.0.0]\n### Added\n" + "- a bullet\n" * 60, "has 62 lines"),
        ("x" * 141, "too long a line"),
    ],
)
def test_what_breaks_the_form_is_found(text: str, fault: str) -> None:
    (found,) = faults_of(text)
    assert fault in found
