"""Delayed and half messages whose topic is another one by the time they are due: deleted, or made anew with fewer queues."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.protocol import names
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.message import decode_records
from structlog.testing import capture_logs

from ...conftest import Node, Wire, create_topic, eventually
from ...support.requests import COMMIT, ROLLBACK, end, half, pull, send

QUEUE = 3


async def wait(node: Node, wire: Wire, kind: str) -> Any:
    """Stores a message that waits to come to queue 3 of t."""
    if kind == "half":
        return await half(wire, queue=QUEUE)
    return await send(wire, b"pay", queue=QUEUE, properties="DELAY\x011")


async def come(node: Node, wire: Wire, kind: str, sent: Any) -> None:
    if kind == "half":
        await wire.call(RequestCode.END_TRANSACTION, end(sent, COMMIT))
        assert node.broker.transactions.waiting == 0
    else:
        node.clock.advance(1.0)
        await eventually(lambda: node.broker.delays.progress.get(1) == 1)


@pytest.mark.parametrize("kind", ["half", "delayed"])
async def test_a_message_of_a_deleted_topic_does_not_bring_it_back(node: Node, wire: Wire, kind: str) -> None:
    await create_topic(wire, "t")
    sent = await wait(node, wire, kind)
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    with capture_logs() as logs:
        await come(node, wire, kind, sent)
    assert node.broker.topics.get("t") is None
    assert [queue for topic, queue in node.broker.store.queues if topic == "t"] == []
    events = {entry["event"]: entry["hint"] for entry in logs if "hint" in entry}
    event = {"half": "transaction_set_aside", "delayed": "delayed_message_dropped"}[kind]
    assert events[event] == "its topic was deleted"
    if kind == "half":
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(names.CHECK_MAX_TIME_TOPIC))
        assert [record.body for record in decode_records(answer.body)] == [b"pay"]
    else:
        assert node.broker.delays.set_aside == 1


async def test_who_commits_for_a_deleted_topic_is_told_and_may_roll_back(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    one, two = await half(wire), await half(wire)
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    refused = await wire.call(RequestCode.END_TRANSACTION, end(one, COMMIT))
    assert (refused.code, "was deleted" in (refused.remark or "")) == (1, True)
    assert (await wire.call(RequestCode.END_TRANSACTION, end(two, ROLLBACK))).code == 0
    assert node.broker.store.queue(names.CHECK_MAX_TIME_TOPIC, 0).next == 1


@pytest.mark.parametrize("kind", ["half", "delayed"])
@pytest.mark.parametrize(("queues", "expected"), [(4, 3), (2, 1), (1, 0)])
async def test_a_message_for_a_queue_that_is_gone_comes_to_another_one(
    node: Node, wire: Wire, kind: str, queues: int, expected: int
) -> None:
    """It was acknowledged, and lay in a queue that nobody could read."""
    await create_topic(wire, "t")
    sent = await wait(node, wire, kind)
    await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    await create_topic(wire, "t", queues)
    with capture_logs() as logs:
        await come(node, wire, kind, sent)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull("t", queue=expected))
    assert [record.body for record in decode_records(answer.body)] == [b"pay"]
    assert [entry["queue"] for entry in logs if entry["event"] == "message_in_another_queue"] == [expected] * (
        queues < 4
    )


@pytest.mark.parametrize(
    ("read", "write", "queue", "expected"),
    [(4, 4, 3, 3), (8, 4, 7, 7), (4, 8, 7, 7), (4, 4, 4, 0), (0, 4, 6, 2), (4, 0, 6, 2), (0, 0, 5, 0)],
)
async def test_a_queue_that_may_be_read_or_written_is_there(
    node: Node, read: int, write: int, queue: int, expected: int
) -> None:
    node.broker.topics.put(TopicConfig("t", read, write), 0)
    assert node.broker.topics.queue_now("t", queue) == expected
    assert node.broker.topics.queue_now("u", queue) is None
