"""The records of `--json`: one style of keys, null for what there is not, numbers as such, and times that name their zone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.client import Consumer, Message, Producer, Reject
from rocketlet.client.wire.connection import Access
from rocketlet.command.cli import main, parser, subcommands
from rocketlet.command.plumbing.output import BY_NAME, Output
from rocketlet.command.tools.dump import Dump

from ..conftest import Node, Nodes, eventually
from ..support.accounts import ADMIN, SECRETS, AccountsFile
from .conftest import Run

ARGUMENTS = {
    "topics create": "made --queues 2",
    "topics list": "",
    "topics show": "orders",
    "topics set": "made --queues 3",
    "topics delete": "made --yes",
    "groups create": "spare",
    "groups list": "",
    "groups show": "g --timeline",
    "groups set": "spare --retries 3",
    "groups delete": "spare --yes",
    "offsets show": "g",
    "offsets reset": "g orders --to first --dry-run",
    "messages find": "orders",
    "messages tail": "orders --no-follow",
    "messages send": "orders hello",
    "messages dead": "g",
    "messages replay": "g --yes",
    "messages discard": "g --again --yes",
    "brokers list": "",
    "brokers show": "broker-a",
    "brokers set": "broker-a defaultTopicQueueNums=5",
    "brokers forget": "gone",
    "acl list": "",
    "acl put": "viewer-key --admin --new-secret",
    "acl delete": "viewer-key --yes",
    "acl white": "10.0.0.1 --yes",
    "bench": "--seconds 0.1 --rate 100 --in-flight 2",
    "doctor": "--watch 0",
    "top": "--interval 0.01 --count 1",
    "version": "",
}
"""The arguments of each command that queries a cluster, in the order in which they run."""
SIDES = ("mirror", "move", "fsck", "dump", "jobs list", "jobs stop")
"""The commands with `--json` that query no cluster, or two, or a console."""

KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*").fullmatch
NUMBER = re.compile(r"-?\d+(\.\d+)?").fullmatch
DATE = re.compile(r"\d{4}-\d\d-\d\d").match
TEXTS = ("body", "account", "version", "value")
"""The fields of any text."""


def with_json() -> Iterator[str]:
    """The commands that have the option."""
    for command in subcommands(parser()):
        if "--json" in command.format_help():
            yield command.prog.removeprefix("rocketlet ")


def faults(value: Any, place: str) -> Iterator[str]:
    """What is wrong with a record."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not KEY(name):
                yield f"{place}: the key {name}"
            if name not in BY_NAME:
                yield from faults(item, f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from faults(item, place)
    elif isinstance(value, str) and not place.endswith(TEXTS):
        if value in ("", "-", "None", "null") or NUMBER(value):
            yield f"{place}: {value!r}"
        if DATE(value) and datetime.fromisoformat(value).tzinfo is None:
            yield f"{place}: {value!r} without an offset"


async def test_records_of_all_commands_have_one_style(
    nodes: Nodes,
    tmp_path: Path,
    run_on: Callable[[Node], Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(with_json()) == {*ARGUMENTS, *SIDES}
    node = await nodes.start(acl=AccountsFile(tmp_path / "plain_acl.yml").acl)
    there = await nodes.start(name="broker-b")
    for name, value in (("ACCESS_KEY", ADMIN), ("SECRET_KEY", SECRETS[ADMIN]), ("NEW_SECRET_KEY", "a-new-secret")):
        monkeypatch.setenv(f"ROCKETLET_{name}", value)
        monkeypatch.setenv(f"ROCKETLET_FROM_{name}", value)
    access, run = Access(ADMIN, SECRETS[ADMIN]), run_on(node)

    def handle(message: Message) -> Reject | None:
        return Reject("odd") if message.tag == "odd" else None

    records: dict[str, list[dict[str, Any]]] = {}
    async with (
        Producer(node.address, access=access) as producer,
        Consumer(node.address, "g", "orders", handle, start="first", access=access),
    ):
        await producer.send("orders", b"1", tag="new", keys=["a", "b"], properties={"colour": "red"})
        await producer.send("orders", b"2", tag="odd")
        await producer.send("orders", b"3", delay_level=18)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        for command, arguments in ARGUMENTS.items():
            ran = await run(*command.split(), *arguments.split(), "--json")
            assert (ran.status, ran.err) in ((0, ""), (1, "")) or command == "brokers forget", (command, ran)
            records[command] = ran.records
        dump = Dump("127.0.0.1", Output(as_json=True), None)
        host, _, port = node.address.rpartition(":")
        capsys.readouterr()
        through = await dump.listen(0, (host, int(port)))
        async with Producer(f"127.0.0.1:{through}", access=access) as seen:
            await seen.send("orders", b"4")
        dump.close()
        records["dump"] = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    sides = ["--from", node.address, "--to", there.address, "--json"]

    for words in (["mirror", *sides], ["move", *sides, "--dry-run"]):
        capsys.readouterr()
        await asyncio.to_thread(main, words)
        records[words[0]] = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    await there.stop()
    capsys.readouterr()
    await asyncio.to_thread(main, ["fsck", str(there.config.data_dir), "--json"])
    records["fsck"] = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    empty = {command for command, found in records.items() if not found}
    assert empty <= {"brokers forget", "doctor"}, empty
    assert [fault for command, found in records.items() for fault in faults(found, command)] == []
