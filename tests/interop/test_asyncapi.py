"""The AsyncAPI document of an application, read by AsyncAPI's own parser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import FOREIGN_S, kept
from .conftest import fetched

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is missing: `apt-get install npm`"),
    pytest.mark.timeout(FOREIGN_S),
]
PARSER = "@asyncapi/parser@3.6.6"
APPLICATION = """
import pydantic
from rocketlet import Message, Rocketlet

app = Rocketlet("127.0.0.1:9876")


class Line(pydantic.BaseModel):
    item: str


class Order(pydantic.BaseModel):
    number: int
    lines: list[Line]


class Parcel(pydantic.BaseModel):
    weight_kg: float


@app.subscriber({"orders": "new"}, group="packers")
@app.publisher("parcels", tag="packed")
async def pack(order: Order) -> Parcel:
    \"\"\"Pack an order.\"\"\"
    return Parcel(weight_kg=1)


@app.subscriber("parcels", group="archive", batch_size=10)
async def archive(messages: list[Message]) -> None: ...
"""
CHECK = """
const { Parser } = require("@asyncapi/parser");
let text = "";
process.stdin.on("data", (piece) => (text += piece)).on("end", async () => {
  const { document, diagnostics } = await new Parser().parse(text);
  const faults = diagnostics.filter((item) => item.severity === 0).map((item) => item.message);
  const found = document ? document.operations().all() : [];
  const operations = found.map((item) => `${item.action()} ${item.channels().all()[0].address()}`);
  console.log(JSON.stringify({ faults, operations: operations.sort() }));
});
"""


def test_asyncapi_parser_accepts_the_document_when_an_application_has_handlers_and_publishers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def install(folder: Path) -> None:
        fetched(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), PARSER], folder)

    modules = kept(tmp_path_factory, "asyncapi-parser", install, [PARSER]) / "node_modules"
    (tmp_path / "service.py").write_text(APPLICATION)
    (tmp_path / "check.js").write_text(CHECK)
    command = [sys.executable, "-m", "rocketlet.command.cli", "asyncapi", "service:app", "--title", "packing"]
    written = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    environment = {**os.environ, "NODE_PATH": str(modules)}
    checked = subprocess.run(
        ["node", "check.js"],
        cwd=tmp_path, env=environment, input=written.stdout, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(checked.stdout)
    assert found["faults"] == []
    assert found["operations"] == ["receive orders", "receive parcels", "send parcels"]
