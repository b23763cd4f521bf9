"""The first examples of docs/how-to/official-clients.md run as programs of the official clients of 5.x."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rocketlet.testing.ports import free_port

from .conftest import SMALL_JVM, program
from .official import SOURCES, home_of, made

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "official-clients.md").read_text()
FENCES = {"python": "py", "java": "java", "go": "go", "node": "javascript"}
JAVA = """\
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.consumer.*;
import org.apache.rocketmq.client.apis.producer.*;

public class Example {
    public static void main(String[] arguments) throws Exception {
%s
        System.in.read();
        Runtime.getRuntime().halt(0);
    }
}
"""
GO = """\
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

func main() {
	ctx := context.Background()
%s
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}
"""
NODE = """\
const { ConsumeResult, Producer, PushConsumer } = require('rocketmq-client-nodejs');
process.stdin.on('end', () => process.exit(0)).resume();
(async () => {
%s
})();
"""
PYTHON = """\
import os, sys
%s
sys.stdin.read()
os._exit(0)
"""


def example(language: str, address: str) -> str:
    """All snippets of the language, in the order of the page."""
    found = re.findall(rf"```{FENCES[language]}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 2, "a producer and a consumer"
    return "".join(inspect.cleandoc("\n" + snippet) + "\n" for snippet in found).replace("127.0.0.1:9876", address)


def command(language: str, text: str, made: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the program, compile it if that is needed, and return its command and environment."""
    home = home_of(folder)
    if language == "python":
        (folder / "example.py").write_text(PYTHON % text)
        environment = {"HOME": str(home), "PYTHONPATH": str(made), "GRPC_VERBOSITY": "NONE"}
        return [sys.executable, str(folder / "example.py")], environment
    if language == "java":
        (folder / "Example.java").write_text(JAVA % text)
        return ["java", *SMALL_JVM, f"-Duser.home={home}", "-cp", f"{made / 'lib'}/*", str(folder / "Example.java")], {}
    if language == "go":
        for name in ("go.mod", "go.sum"):
            (folder / name).write_text((SOURCES / "go" / name).read_text())
        (folder / "main.go").write_text(GO % text)
        subprocess.run(["go", "build", "-o", "example", "."], cwd=folder, check=True)
        return [str(folder / "example")], {"rocketmq.client.logRoot": str(home)}
    (folder / "example.js").write_text(NODE % text)
    return ["node", str(folder / "example.js")], {"HOME": str(home), "NODE_PATH": str(made / "node_modules")}


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a broker that was started as the page says, with a data folder of its own."""
    port, data = free_port(), str(tmp_path / "data")
    arguments = ["-m", "rocketlet.command.cli", "start", "--port", str(port), "--data", data, "--log-level", "error"]
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()
    yield f"127.0.0.1:{port}"
    child.terminate()
    await child.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "language",
    [
        pytest.param("go", marks=pytest.mark.go),
        pytest.param("java", marks=pytest.mark.java),
        pytest.param("node", marks=pytest.mark.node),
        pytest.param("python", marks=pytest.mark.pypi),
    ],
)
async def test_first_example_handles_its_message(
    language: str, address: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = made(tmp_path_factory, language)
    arguments, environment = command(language, example(language, address), folder, tmp_path)
    async with program(*arguments, **environment) as peer:
        await peer.until(lambda: bool(peer.found("handled")))
    assert peer.found("handled") == [["handled", "A1"]]
