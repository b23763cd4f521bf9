"""docs/compatibility.md is written from proofs; here: it knows every request that is handled, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from .compatibility import rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_document_names_every_request_that_is_handled_and_no_other() -> None:
    found = re.findall(r"^\| (\d+) (\w+) \| ([\w ,]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert [(int(code), name, where) for code, name, where in found] == rows()
