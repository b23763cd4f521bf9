"""h2spec judges our HTTP/2: every case of its, in plain text and with TLS."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from rocketlet.broker.tls import Tls

from ..conftest import Nodes, kept
from .conftest import fetched, missing

pytestmark = [
    pytest.mark.go,
    pytest.mark.skipif(bool(missing("go")), reason=missing("go")),
    pytest.mark.timeout(300),
]
H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
CASES = 146  # the cases of h2spec 2.2.1, with the strict one


@pytest.fixture(scope="session")
def h2spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = kept(tmp_path_factory, "h2spec", _install, [H2SPEC])
    return str(folder / "h2spec")


def _install(folder: Path) -> None:
    fetched(["env", f"GOBIN={folder}", "go", "install", H2SPEC], folder)


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_every_case_of_h2spec_passes(nodes: Nodes, h2spec: str, with_tls: bool) -> None:
    node = await nodes.start(tls=Tls(signs_itself=with_tls))
    host, _, port = node.address.rpartition(":")
    options = ["-h", host, "-p", port, "-o", "10", "--strict", *(["-t", "-k"] if with_tls else [])]
    process = await asyncio.create_subprocess_exec(
        h2spec, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ}
    )
    output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text[text.find("Failures:") :][-3000:]
    assert f"{CASES} tests, {CASES} passed, 0 skipped, 0 failed" in text, text[-200:]
