"""Every log event is a stable name: snake_case, written out where it is logged. Its fields have the values that vary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def odd_events(source: str) -> Iterator[tuple[int, str]]:
    """Lines and events of calls such as `log.info(...)` whose first argument is not such a name."""
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS):
            continue
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "log":
            event = call.args[0] if call.args else None
            if not (isinstance(event, ast.Constant) and NAME.fullmatch(str(event.value))):
                yield call.lineno, ast.unparse(call)


@pytest.mark.parametrize("folder", ["broker", "client", "command", "console", "demo", "migration", "spark", "sync"])
def test_events_are_stable_names(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    odd = [f"{path.relative_to(ROOT)}:{line}: {call}" for path in files for line, call in odd_events(path.read_text())]
    assert not odd


def test_an_event_that_is_a_sentence_or_computed_is_found() -> None:
    source = (
        'log.info("queue_lost", queue=queue)\nlog.error("queue lost")\nlog.warning(f"lost_{queue}")\nlog.info(event)'
    )
    assert [line for line, _ in odd_events(source)] == [2, 3, 4]
