"""Where a consumer is in its queues: pause, seek, how far it is, and what is committed or kept in a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import ConfigError, Consumer, Message, Producer
from rocketlet.client.member.offsets import Position
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill


@pytest.mark.parametrize("place", ["earliest", None, True, -1, 1.5e12, 2**63, {Queue("t", "broker-a", 0): "5"}])
async def test_another_place_is_no_place_to_continue(node: Node, wire: Wire, place: Any) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", start="first") as consumer:
        with pytest.raises(ConfigError, match=r"seek: .* give 'first', 'last', a time in ms since 1970"):
            await consumer.seek(place)
    for state in (Consumer(node.address, "g", "t"), consumer):
        for call in (state.seek("first"), state.assigned()):
            with pytest.raises(ConfigError, match="this consumer has"):
                await call


async def test_nothing_begins_after_pause_until_it_is_resumed(node: Node, wire: Wire) -> None:
    """Not what is cached, nor what a held pull brings, nor what another queue brings that comes later."""
    await create_topic(wire, "t", 2)
    release = asyncio.Event()
    begun: list[bytes] = []

    async def handle(message: Message) -> None:
        begun.append(message.body)
        await release.wait()

    async with Consumer(node.address, "g", "t", handle, start="first", concurrency=3) as consumer:
        await consumer.assigned()
        await fill(node, 10)
        await eventually(lambda: len(begun) == 3)
        await consumer.pause()
        release.set()
        await fill(node, 10)
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 3, 3, 6)))
        await eventually(lambda: Queue("t", "broker-a", 2) in consumer.assignment())
        await fill(node, 10)
        await consumer.commit()
        assert len(begun) == 3
        await consumer.resume()
        await eventually(lambda: len(begun) == 30)
        (one,) = [queue for queue in consumer.assignment() if queue == Queue("t", "broker-a", 0)]
        await consumer.pause([one])
        async with Producer(node.address) as producer:
            await producer.send("t", b"held", queue=one)
            await producer.send("t", b"free", queue=Queue("t", "broker-a", 1))
        await eventually(lambda: b"free" in begun)
        assert b"held" not in begun
        await consumer.resume([one])
        await eventually(lambda: b"held" in begun)
        with pytest.raises(ConfigError, match="does not own"):
            await consumer.pause([Queue("t", "broker-z", 0)])


async def test_seek_goes_back_and_forth(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 5)
    inbox = Inbox()
    queue = Queue("t", "broker-a", 0)
    async with Consumer(node.address, "g", "t", inbox, start="first", concurrency=1) as consumer:
        await eventually(lambda: len(inbox.messages) == 5)
        await consumer.seek({queue: 3})
        assert node.broker.offsets.get("g", "t", 0) == 3
        await eventually(lambda: len(inbox.messages) == 7)
        await consumer.seek("first")
        await eventually(lambda: len(inbox.messages) == 12)
        await consumer.pause()
        await fill(node, 3)
        await consumer.seek("last", [queue])
        await consumer.resume()
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 13)
        await consumer.seek(inbox.messages[-1].store_ms)
        await eventually(lambda: len(inbox.messages) >= 14)
        with pytest.raises(ConfigError, match="does not own"):
            await consumer.seek({Queue("t", "broker-z", 0): 0})
    assert inbox.bodies[:13] == [b"0", b"1", b"2", b"3", b"4", b"3", b"4", b"0", b"1", b"2", b"3", b"4", b"0"]
    assert inbox.messages[-1].queue_offset == 8


async def test_a_consumer_knows_how_far_it_is(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 4)
    queue = Queue("t", "broker-a", 0)
    async with Consumer(node.address, "g", "t", start="first", commit_interval_s=300) as consumer:
        seen = [await anext(consumer) for _ in range(4)]
        assert [message.body for message in seen] == [b"0", b"1", b"2", b"3"]
        at = (await consumer.positions())[queue]
        assert (at.acknowledged, at.end, at.lag) == (3, 4, 1)
        assert at.committed in (None, *range(4)), "a pull may have carried a commit"
        assert await consumer.lag() == 1
        await consumer.ack(seen[-1])
        await consumer.commit()
        assert (await consumer.positions())[queue] == Position(4, 4, 4)
        assert await consumer.lag() == 0


async def test_an_expired_offset_is_corrected(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 2)
    node.broker.offsets.put("g", "t", 0, 999)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox) as consumer:
        await consumer.assigned()
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 2)
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_commits_happen_on_an_interval(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await fill(node, 3)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", commit_interval_s=0.01):
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 3)


async def test_a_queue_continues_though_its_new_offset_cannot_be_kept(
    node: Node, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", broadcasting=True, offsets_file=tmp_path / "offsets.json") as consumer:
        (queue,) = await consumer.assigned()
        pulled: list[object] = []

        async def refused(_: object) -> None:
            raise OSError("no room")

        with monkeypatch.context() as patches:
            patches.setattr(consumer._membership, "commit", refused)
            patches.setattr(consumer._puller, "pull", pulled.append)
            with pytest.raises(OSError, match="no room"):
                await consumer._commit_and_pull(consumer.queues[queue], 0)
        assert pulled == [consumer.queues[queue]]


async def test_broadcasting_gives_every_member_every_message(node: Node, wire: Wire, tmp_path: Path) -> None:
    await create_topic(wire, "t")
    await fill(node, 6)
    one, two = Inbox(), Inbox()
    file = tmp_path / "offsets.json"
    options: dict[str, Any] = {"broadcasting": True, "start": "first"}
    async with (
        Consumer(node.address, "g", "t", one, offsets_file=file, **options),
        Consumer(node.address, "g", "t", two, **options),
    ):
        await eventually(lambda: len(one.messages) == len(two.messages) == 6)
    again = Inbox()
    await fill(node, 1)
    async with Consumer(node.address, "g", "t", again, offsets_file=file, **options):
        await eventually(lambda: len(again.messages) == 1)


async def test_two_members_with_one_file_of_offsets_are_refused(node: Node, wire: Wire, tmp_path: Path) -> None:
    await create_topic(wire, "t")
    file = tmp_path / "caches" / "offsets.json"
    options: dict[str, Any] = {"broadcasting": True, "offsets_file": file, "start": "first"}
    async with Consumer(node.address, "g", "t", **options) as first:
        second = Consumer(node.address, "g", "t", **options)
        with pytest.raises(ConfigError, match=r"offsets.json is in use by another member"):
            await second.start()
        assert not first.has_ended
    await fill(node, 1)
    again = Inbox()
    async with Consumer(node.address, "g", "t", again, **options):
        await eventually(lambda: len(again.messages) == 1)


async def test_a_member_whose_file_of_offsets_cannot_be_written_does_not_start(
    node: Node, wire: Wire, tmp_path: Path
) -> None:
    await create_topic(wire, "t")
    (tmp_path / "offsets.json.lock").mkdir()
    with pytest.raises(ConfigError, match=r"offsets_file: .* cannot be written"):
        async with Consumer(node.address, "g", "t", broadcasting=True, offsets_file=tmp_path / "offsets.json"):
            pass


async def test_a_stop_says_that_the_file_of_offsets_cannot_be_written_any_more(
    node: Node, wire: Wire, tmp_path: Path
) -> None:
    await create_topic(wire, "t", 1)
    inbox, file = Inbox(), tmp_path / "offsets.json"
    consumer = Consumer(node.address, "g", "t", inbox, broadcasting=True, offsets_file=file, start="first")
    await consumer.start()
    await fill(node, 1)
    await eventually(lambda: len(inbox.messages) == 1)
    (tmp_path / "offsets.json.new").mkdir()
    with pytest.raises(ConfigError, match=r"offsets.json cannot be written: .*; messages since its last write are"):
        await consumer.stop()


@pytest.mark.parametrize(
    "kept", ["{", "", "{}", '""', "5", "[[1]]", '[["t","b",0,"5"]]', '[["t","b","0",5]]', '[["t","b",0,-1]]']
)
def test_a_damaged_file_of_offsets_is_named(tmp_path: Path, kept: str) -> None:
    file = tmp_path / "offsets.json"
    file.write_text(kept)
    with pytest.raises(ConfigError, match=r"offsets.json is damaged .*delete it"):
        Consumer("h:1", "g", "t", broadcasting=True, offsets_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        Consumer("h:1", "g", "t", broadcasting=True, offsets_file=tmp_path)
