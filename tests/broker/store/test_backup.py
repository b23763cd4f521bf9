"""`rocketlet backup` of a data folder whose broker works, and `rocketlet restore`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from rocketlet.broker.store import files, recovery
from rocketlet.broker.store.files import StoreError, write_state
from rocketlet.broker.store.recovery import inspect
from rocketlet.client import Consumer, Producer
from rocketlet.command.tools.backup import copied

from ...conftest import Nodes, eventually
from ...support.handlers import Inbox


async def run(source: Path, target: Path) -> int:
    """As both commands do."""
    return await asyncio.to_thread(copied, source, target)


async def test_a_backup_of_a_running_broker_has_all_that_was_acknowledged_before(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.start(segment_bytes=20_000)
    copy, target = tmp_path / "copy", tmp_path / "target"
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", inbox, start="first") as consumer:
        for number in range(300):
            await producer.send("t", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 300)
        await consumer.commit()
        node.clock.advance(10)  # state that is saved from time to time is saved
        backup = asyncio.create_task(run(node.config.data_dir, copy))
        number = 300
        while not backup.done():
            await producer.send("t", b"%d" % number)
            number += 1
        assert await backup == 0
    await node.stop()
    assert await run(copy, target) == 0
    assert [finding for finding in inspect(target) if finding.fault] == []
    assert not list(target.glob("locks.*"))
    restored = await nodes.start(data_dir=target)
    again = Inbox()
    before = {b"%d" % n for n in range(300)}
    async with Consumer(restored.address, "h", "t", again, start="first"):
        await eventually(lambda: {message.body for message in again.messages} >= before)
    taken = len(inbox.messages)
    async with Consumer(restored.address, "g", "t", inbox):
        await asyncio.sleep(0)
    assert not before & {message.body for message in inbox.messages[taken:]}, "the group goes on where it was"
    assert len(again.messages) == len({message.body for message in again.messages})


async def test_a_segment_that_retention_deletes_meanwhile_is_no_hole(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(segment_bytes=2_000)
    async with Producer(node.address) as producer:
        for _ in range(40):
            await producer.send("t", b"x" * 100)
    node.broker.persist()
    states = recovery._Copy.states
    rounds: list[int] = []

    def deleting(copy: recovery._Copy) -> object:
        yield from states(copy)
        if not rounds:
            node.broker.store.expire(older_than_s=float("inf"), total_bytes=None)
        rounds.append(node.broker.store.begin)

    monkeypatch.setattr(recovery._Copy, "states", deleting)
    assert copied(node.config.data_dir, tmp_path / "copy") == 0
    assert len(rounds) == 2
    assert rounds[1] > 0
    assert [finding for finding in inspect(tmp_path / "copy") if finding.fault] == []


async def test_what_is_not_whole_gets_no_name(nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = await nodes.start()
    async with Producer(node.address) as producer:
        for _ in range(10):
            await producer.send("t", b"x" * 100)
    await node.stop()
    (segment,) = (node.config.data_dir / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert await run(node.config.data_dir, tmp_path / "copy") == 1
    assert "hold no whole message" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [".partial"]
    for source, target, words in (
        (tmp_path / "copy", tmp_path / "target", "is not a data folder"),
        (tmp_path / "nothing", tmp_path / "target", "is not a data folder"),
        (node.config.data_dir, node.config.data_dir, "is not empty"),
    ):
        assert await run(source, target) == 1
        assert words in capsys.readouterr().err


async def test_a_folder_of_a_later_release_is_not_taken_for_damaged(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await nodes.start()
    await node.stop()
    folder = node.config.data_dir
    assert orjson.loads((folder / "format.json").read_text().splitlines()[0])["format"] == files.FORMAT
    write_state(folder / "format.json", {"format": files.FORMAT + 1, "by": "99.0"})
    with pytest.raises(StoreError, match=r"was written by a newer Rocketlet \(99\.0\)"):
        await nodes.start(data_dir=folder)
    assert await run(folder, tmp_path / "copy") == 1
    assert "newer Rocketlet" in capsys.readouterr().err
    with pytest.raises(StoreError, match="newer Rocketlet"):
        list(inspect(folder))
