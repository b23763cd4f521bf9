"""A type checker reads a user's code: a wrong attribute, handler or option is an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import PATIENCE_S, PYRIGHT

ROOT = Path(__file__).parents[2]
PROGRAM = """
from rocketlet import sync
from rocketlet.client import Consumer, Message, RetryLater


def plain(m: Message) -> None: ...
async def coroutine(m: Message) -> RetryLater | None: ...
async def batch(ms: list[Message]) -> None: ...


Consumer("h:1", "g", "t", plain)
Consumer("h:1", "g", "t", coroutine, start="first", concurrency=3)
Consumer("h:1", "g", "t", batch, batch_size=5)
Consumer("h:1", "g", "t", lambda m: print(m.body))
Consumer("h:1", "g", "t", lambda m: print(m.boddy))  # error
Consumer("h:1", "g", "t", lambda ms: print(ms[0].boddy), batch_size=5)  # error
Consumer("h:1", "g", "t", batch)  # error
Consumer("h:1", "g", "t", coroutine, batch_size=5)  # error
Consumer("h:1", "g", "t", lambda m: True)  # error
Consumer("h:1", "g", "t", start="earliest")  # error
Consumer("h:1", "g", "t", nonsense=1)  # error


async def use(consumer: Consumer) -> None:
    async for m in consumer:
        print(m.body, m.boddy)  # error
    print((await consumer.receive()).boddy)  # error
    async for ms in consumer.batches():
        print(ms[0].boddy)  # error
    print((await anext(consumer)).boddy)  # error


sync.Producer("h:1", retries=5).send("t", b"x", tag="a")
sync.Producer("h:1", retires=5)  # error
sync.Producer("h:1").send("t", b"x", tags="a")  # error
sync.Consumer("h:1", "g", "t", start="first", batch_size=3)
sync.Consumer("h:1", "g", "t", start="begin")  # error
"""


WANTED = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# error")}


def test_mistakes_in_handlers_are_found_by_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    config = str(ROOT / "pyproject.toml")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", config, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S * 4, check=False)
    # by the name alone: what mypy has seen before it says with the folder of that time
    errors = {int(number) for number in re.findall(r"program\.py:(\d+): error:", found.stdout)}
    assert errors == WANTED, found.stdout + found.stderr


@pytest.mark.pyright
@pytest.mark.skipif(shutil.which("npx") is None, reason="needs Node with npx, which fetches pyright")
def test_mistakes_in_handlers_are_found_by_pyright(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"typeCheckingMode": "strict", "include": ["program.py"], "extraPaths": [str(ROOT / ".types")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["npx", "--yes", PYRIGHT, "--outputjson"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S * 4, check=False)
    start = found.stdout.find("{")
    if start < 0:
        pytest.skip(f"npx fetches no pyright: {(found.stdout + found.stderr)[-300:]}")
    faults = json.loads(found.stdout[start:])["generalDiagnostics"]
    errors = {fault["range"]["start"]["line"] + 1 for fault in faults}
    assert errors == WANTED, faults
