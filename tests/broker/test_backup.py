"""A data folder that was copied while the broker wrote to it, in the order that docs/operations.md gives."""

from __future__ import annotations

import shutil
from pathlib import Path

from rocketlet.broker.store.inspection import inspect
from rocketlet.client import Consumer, Producer

from ..conftest import Nodes, eventually
from ..support.handlers import Inbox


async def test_a_copy_of_a_running_broker_has_all_that_was_acknowledged_before(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.start()
    source, target = node.config.data_dir, tmp_path / "copy"
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", inbox, start="first") as consumer:
        for number in range(50):
            await producer.send("t", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 50)
        await consumer.commit()
        node.clock.advance(10)  # what is saved from time to time is saved
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("commitlog", "lock"))
        for number in range(50, 100):
            await producer.send("t", b"%d" % number)
        shutil.copytree(source / "commitlog", target / "commitlog")
    await node.stop()
    restored = await nodes.start(data_dir=target)
    again = Inbox()
    async with Consumer(restored.address, "h", "t", again, start="first"), Consumer(restored.address, "g", "t", inbox):
        await eventually(lambda: len(again.messages) == 100)
        assert {message.body for message in again.messages} == {b"%d" % number for number in range(100)}
        await eventually(lambda: {message.body for message in inbox.messages} >= {b"%d" % n for n in range(100)})
    assert len(inbox.messages) == 100, "the group goes on where it was when it was copied"
    await restored.stop()
    assert [finding for finding in inspect(target) if finding.fault] == []
