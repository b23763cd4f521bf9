"""A plugin of pytest: which functions of some files each test calls, and how long it takes. Written to the file named by
ROCKETLET_CALLS, for the files named by ROCKETLET_CALLED."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

_FILES = {str(Path(name).resolve()): name for name in os.environ.get("ROCKETLET_CALLED", "").split(os.pathsep) if name}
_found: dict[str, dict[str, Any]] = {}
_called: set[tuple[str, int]] = set()


def _note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and (name := _FILES.get(frame.f_code.co_filename)) is not None:
        _called.add((name, frame.f_code.co_firstlineno))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _called.clear()
    sys.setprofile(_note)
    try:
        yield
    finally:
        sys.setprofile(None)
        _found.setdefault(item.nodeid, {"seconds": 0.0, "passed": True})["calls"] = sorted(_called)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = _found.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
    found["seconds"] += report.duration
    found["passed"] = found["passed"] and report.passed


def pytest_sessionfinish() -> None:
    Path(os.environ["ROCKETLET_CALLS"]).write_bytes(orjson.dumps(_found))
