"""One reader for each queue among Apache's clients: pulls of other clients wait until the reader has finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from rocketlet.broker.config import GUARD_QUIET_S, LIMITS, TOLD_AGAIN
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.message import decode_records

from ...conftest import PATIENCE_S, Connect, Node, Wire, create_topic, eventually
from ...support.draining import FLAGS, members_of
from ...support.requests import SUBSCRIBED, commit, join, members, pull, send

COMMITS = 0x1
BROADCASTING = "BROADCASTING"


pytestmark = pytest.mark.still


async def _read(wire: Wire, *, offset: int = 0, commit_offset: int = 0, queue: int = 0, **fields: Any) -> Frame:
    return await wire.call(RequestCode.PULL_MESSAGE, _pull(offset, commit_offset, queue, **fields))


def _pull(offset: int = 0, commit_offset: int = 0, queue: int = 0, flags: int = FLAGS, **fields: Any) -> dict[str, Any]:
    flags |= COMMITS if commit_offset else 0
    return pull(queue=queue, offset=offset, flags=flags, commit_offset=commit_offset, **fields)


def _bodies(answer: Frame) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)] if answer.code == 0 else []


async def _two_claim(node: Node, one: Wire, two: Wire) -> None:
    """c1 and c2 are members that both claim queue 0, of which c1 has a message in its handlers."""
    await create_topic(one, "t", 1)
    await join(one, "c1")
    await join(two, "c2")
    await eventually(lambda: members_of(node) == 2 and not node.broker.draining.is_pending("g"))
    assert await members(one) == await members(two) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)  # the change is over
    await send(one, b"first")
    assert _bodies(await _read(one)) == [b"first"]


async def _waits(node: Node, wire: Wire, **fields: Any) -> int:
    """The opaque of a pull that the broker holds."""
    held = node.broker.held_pulls.count
    opaque = wire.send(RequestCode.PULL_MESSAGE, _pull(**fields))
    await eventually(lambda: node.broker.held_pulls.count > held)
    return opaque


async def test_second_member_waits_until_the_reader_has_committed_and_stopped_pulling(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    waits = await _waits(node, two)
    node.clock.advance(2 * GUARD_QUIET_S)
    await send(wire, b"second")
    assert node.broker.held_pulls.count == 1, "the reader has not committed its message"
    await commit(wire, 1)
    node.clock.advance(2 * GUARD_QUIET_S)
    moved = await two.answer(waits)
    assert (moved.code, moved.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "1"), "it skips what c1 handled"
    assert _bodies(await _read(two, offset=1)) == [b"second"]


async def test_reader_that_pulls_on_keeps_its_queue(node: Node, wire: Wire, connect: Connect) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    await _waits(node, two)
    for offset in range(1, 10):
        held = await _waits(node, wire, offset=offset, commit_offset=offset)
        node.clock.advance(GUARD_QUIET_S)
        returned = await wire.answer(held)
        assert returned.code == ResponseCode.PULL_NOT_FOUND, "the broker checks that the reader pulls again"
        await send(wire, b"%d" % offset)
        assert _bodies(await _read(wire, offset=offset, commit_offset=offset)) == [b"%d" % offset]
    assert node.broker.locks.double_readers == 0


async def test_waiting_pull_is_answered_within_its_own_suspend_time(node: Node, wire: Wire, connect: Connect) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    waits = await _waits(node, two, suspend_timeout_millis=3000)
    node.clock.advance(2.9)
    assert node.broker.held_pulls.count == 1
    node.clock.advance(0.1)
    answer = await two.answer(waits)
    assert (answer.code, answer.ext["nextBeginOffset"], answer.body) == (ResponseCode.PULL_NOT_FOUND, "0", b"")


@pytest.mark.parametrize("leaves", ["unregisters", "disconnects"])
async def test_second_member_reads_when_the_reader_leaves(
    node: Node, wire: Wire, connect: Connect, leaves: str
) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await _two_claim(node, one, two)
    waits = await _waits(node, two)
    if leaves == "unregisters":
        ext = {"clientID": "c1", "consumerGroup": "g"}
        assert (await one.call(RequestCode.UNREGISTER_CLIENT, ext)).code == 0
    else:
        await one.close()
    await eventually(lambda: members_of(node) == 1)
    node.clock.advance(GUARD_QUIET_S)
    assert _bodies(await two.answer(waits)) == [b"first"], "c1 did not commit it"


async def test_reader_that_neither_pulls_nor_commits_is_not_waited_for(
    node: Node, wire: Wire, connect: Connect
) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    waits = await _waits(node, two, suspend_timeout_millis=60_000)
    node.clock.advance(LIMITS.guard_silent_s - 1.0)
    await commit(wire, 0)  # nothing new, but it still has the queue
    node.clock.advance(LIMITS.guard_silent_s - 1.0)
    assert node.broker.held_pulls.count == 1
    node.clock.advance(2.0)
    assert _bodies(await two.answer(waits)) == [b"first"]


@pytest.mark.limits(guard_max_s=30.0)
async def test_reader_is_waited_for_only_so_long(node: Node, wire: Wire, connect: Connect) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    waits = await _waits(node, two, suspend_timeout_millis=60_000)
    for _ in range(5):
        node.clock.advance(5.5)
        await commit(wire, 0)
    assert node.broker.held_pulls.count == 1
    node.clock.advance(3.0)
    assert _bodies(await two.answer(waits)) == [b"first"]


async def test_client_without_a_heartbeat_waits_for_the_reader(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 1)
    await join(wire, "c1")
    await send(wire, b"first")
    assert _bodies(await _read(wire)) == [b"first"]
    anonymous = await connect(node.address)
    waits = await _waits(node, anonymous)
    await send(wire, b"second")
    assert _bodies(await _read(wire, offset=1, commit_offset=1)) == [b"second"]
    assert node.broker.held_pulls.count == 1
    await commit(wire, 2)
    node.clock.advance(2 * GUARD_QUIET_S)
    assert (await anonymous.answer(waits)).code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED, 0)


async def test_client_without_a_heartbeat_that_commits_is_a_reader(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 1)
    anonymous = await connect(node.address)
    await send(wire, b"first")
    assert _bodies(await _read(anonymous)) == [b"first"]
    await commit(anonymous, 1)
    await send(wire, b"second")
    assert _bodies(await _read(anonymous, offset=1)) == [b"second"]
    await join(wire, "c1")
    await _waits(node, wire, offset=1)


@pytest.mark.parametrize("reader", ["never commits", BROADCASTING])
async def test_reader_that_shares_no_queues_keeps_nobody_waiting(
    node: Node, wire: Wire, connect: Connect, reader: str
) -> None:
    await create_topic(wire, "t", 1)
    two = await connect(node.address)
    if reader == BROADCASTING:
        await join(wire, "c1", message_model=BROADCASTING)
        await join(two, "c2", message_model=BROADCASTING)
    await send(wire, b"first")
    for client in (wire, two):
        assert _bodies(await _read(client)) == [b"first"]


async def test_pull_that_does_not_suspend_reads_beside_the_reader(node: Node, wire: Wire, connect: Connect) -> None:
    two = await connect(node.address)
    await _two_claim(node, wire, two)
    assert _bodies(await _read(await connect(node.address), flags=SUBSCRIBED)) == [b"first"]


async def test_member_that_missed_its_notifications_does_not_read_beside_the_next_reader(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """c1 never asks for the member list again, so it claims both queues for good. The second one is c2's."""
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    assert await members(wire) == ["c1"]
    two = await connect(node.address)
    await join(two, "c2")

    def is_over() -> bool:
        node.clock.advance(LIMITS.drain_limit_s)
        return members_of(node) == 2 and not node.broker.draining.is_pending("g")

    await eventually(is_over)
    assert await members(two) == ["c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s * (TOLD_AGAIN + 1))  # the broker notifies c1 in vain, and stops
    await send(wire, b"first", queue=1)
    assert _bodies(await _read(two, queue=1)) == [b"first"]
    held = await _waits(node, two, queue=1, offset=1, commit_offset=1)
    late = wire.send(RequestCode.PULL_MESSAGE, _pull(1, 0, 1, suspend_timeout_millis=5000))
    assert not _bodies(await two.answer(held)), "the broker checks that c2 still has the queue"
    held = await _waits(node, two, queue=1, offset=1, commit_offset=1)
    await send(wire, b"second", queue=1)
    assert _bodies(await two.answer(held)) == [b"second"]
    node.clock.advance(5.0)
    assert not _bodies(await wire.answer(late))


async def test_no_queue_is_read_by_two_members_while_a_topic_grows(node: Node, wire: Wire, connect: Connect) -> None:
    """Three members learn of the new queues one after the other, and hold on to what they read by the old route."""
    await create_topic(wire, "t", 4)
    wires = [wire, await connect(node.address), await connect(node.address)]
    for number, client in enumerate(wires):
        await join(client, f"c{number}")
    await eventually(lambda: members_of(node) == 3 and not node.broker.draining.is_pending("g"))
    for client in wires:
        assert await members(client) == ["c0", "c1", "c2"]
    node.clock.advance(LIMITS.drained_wait_s)  # the change is over
    reads: Counter[bytes] = Counter()
    offsets: dict[tuple[int, int], int] = {}

    async def poll(member: int, queues: range) -> None:
        """Pull each queue once, as a member that allocates these; a pull that waits is answered by its suspend time."""
        for queue in queues:
            offset = offsets.get((member, queue), 0)
            fields = {"queue": queue, "offset": offset, "commit_offset": offset, "suspend_timeout_millis": 20}
            opaque = wires[member].send(RequestCode.PULL_MESSAGE, _pull(**fields))
            async with asyncio.timeout(PATIENCE_S):
                answered = asyncio.ensure_future(wires[member].answer(opaque))
                while not answered.done():
                    node.clock.advance(0.02)
                    await asyncio.sleep(0)
            answer = answered.result()
            reads.update(_bodies(answer))
            offsets[member, queue] = int(answer.ext.get("nextBeginOffset", offset))

    old = [range(2), range(2, 3), range(3, 4)]
    for queue in range(4):
        await send(wire, b"before %d" % queue, queue=queue)
    for member, queues in enumerate(old):
        await poll(member, queues)
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 16, 16, 6)))
    new = [range(6), range(6, 11), range(11, 16)]
    shares = list(old)
    for changed in range(3):
        shares[changed] = new[changed]
        for queue in range(16):
            await send(wire, b"%d of %d" % (changed, queue), queue=queue)
        for _ in range(2):
            for member, queues in enumerate(shares):
                await poll(member, queues)
    assert set(reads.values()) == {1}, "each message was given once"
    assert node.broker.locks.double_readers == 0
