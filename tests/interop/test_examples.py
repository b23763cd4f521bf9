"""The examples of tests in other languages run as their readers run them, against the control port of a broker process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import fetched, missing

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def control() -> AsyncIterator[str]:
    """The URL of a broker's control interface."""
    command = [sys.executable, "-m", "rocketlet.command.cli", "start", "--port", "0", "--control-port", "0"]
    child = await asyncio.create_subprocess_exec(*command, "--log-level", "error", stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = [await child.stdout.readline() for _ in range(5)]
    yield said[4].decode().split()[1].removesuffix("/openapi.json")
    child.terminate()
    await child.wait()


async def run(*command: str, folder: Path, **environment: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await child.communicate()
    assert child.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.java
@pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn"))
async def test_five_faults_are_shown_with_junit_and_an_unmodified_java_client(control: str) -> None:
    folder = EXAMPLES / "junit"
    if not (folder / "target").exists():
        fetched(["mvn", "-q", "-B", "test", "-DskipTests"], folder)
    said = await run("mvn", "-B", "test", folder=folder, ROCKETLET_CONTROL=control)
    assert "Tests run: 5, Failures: 0, Errors: 0, Skipped: 0" in said


@pytest.mark.go
@pytest.mark.skipif(bool(missing("go")), reason=missing("go"))
async def test_the_go_example_passes(control: str) -> None:
    folder = EXAMPLES / "go"
    fetched(["go", "mod", "download"], folder)
    said = await run("go", "test", "-count=1", "-v", "./...", folder=folder, ROCKETLET_CONTROL=control)
    assert said.count("--- PASS") == 3


async def test_the_pytest_example_passes() -> None:
    said = await run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", ".",
        folder=EXAMPLES / "pytest",
    )  # fmt: skip
    assert "4 passed" in said


def test_the_workflow_publishes_the_ports_that_clients_get() -> None:
    workflow: dict[str, Any] = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
    job = workflow["jobs"]["test"]
    service = job["services"]["rocketlet"]
    control_port = service["env"]["ROCKETLET_CONTROL_PORT"]
    assert service["ports"] == ["9876:9876", f"{control_port}:{control_port}"]
    assert job["env"]["ROCKETLET_CONTROL"].endswith(control_port)
    exposed = (EXAMPLES.parent / "Dockerfile").read_text()
    assert {"9876", control_port} <= set(exposed.partition("EXPOSE ")[2].splitlines()[0].split())
