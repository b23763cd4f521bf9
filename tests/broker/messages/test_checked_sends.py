"""A queue that takes messages is checked again only when something has changed that its checks have looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rocketlet.broker.config import MAX_CHECKED_SENDS
from rocketlet.broker.sessions import Refusal
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.headers import SendMessage

from ...conftest import Node, Nodes

HOST = bytes(8)
TOPICS = ("t", "u", "%RETRY%g", "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT", "no such name!")


class Checks:
    """Counts the sends whose queue is checked."""

    def __init__(self, node: Node) -> None:
        self.count = 0
        self._check = node.broker.sending._queue_id
        node.broker.sending._queue_id = self._counted  # type: ignore[method-assign]

    def _counted(self, header: SendMessage) -> int:
        self.count += 1
        return self._check(header)


def sent(node: Node, topic: str = "t", queue: int = 0) -> tuple[str, int] | str:
    """Where a message has come, or why it was refused."""
    header = SendMessage("p", topic, "TBW102", 4, queue, 0, 1, 0)
    try:
        placed = node.broker.sending.stage(header, b"x", HOST)
    except Refusal as refusal:
        return str(refusal)
    node.broker.sending.commit()
    return node.broker.store.message(
        node.broker.store.queues[topic, placed.queue_id], placed.queue_offset
    ).topic, placed.queue_id


def _topic_shrunk(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 1, 1), 0)


def _topic_deleted(node: Node) -> None:
    node.broker.topics.delete("t", node.broker.store.end)
    node.broker.store.delete_topic("t")


def _another_topic_made(node: Node) -> None:
    node.broker.topics.put(TopicConfig("another", 1, 1), 0)


def _settings_changed(node: Node) -> None:
    node.broker.settings.change(node.broker.settings.now)


CHANGES: dict[str, Callable[[Node], None]] = {
    "a topic has fewer queues": _topic_shrunk,
    "a topic is deleted": _topic_deleted,
    "another topic is made": _another_topic_made,
    "settings change": _settings_changed,
}


async def test_the_next_sends_to_a_queue_are_not_checked_again(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 2, 2), 0)
    checks = Checks(node)
    assert [sent(node, queue=queue) for queue in (0, 1, 0, 1, 0)] == [("t", queue) for queue in (0, 1, 0, 1, 0)]
    assert checks.count == 2


async def test_a_choice_that_is_left_to_the_broker_is_made_each_time(node: Node) -> None:
    node.broker.topics.put(TopicConfig("t", 8, 8), 0)
    checks = Checks(node)
    assert len({sent(node, queue=-1) for _ in range(50)}) > 1
    assert checks.count == 50


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_raises_the_number_and_the_next_send_is_checked(node: Node, change: str) -> None:
    node.broker.topics.put(TopicConfig("t", 2, 2), 0)
    checks = Checks(node)
    for _ in range(3):
        assert sent(node, queue=1) == ("t", 1)
    generation = node.broker.generation.number
    assert checks.count == 1
    CHANGES[change](node)
    assert node.broker.generation.number > generation
    sent(node, queue=1)
    assert checks.count == 2


async def test_a_broker_remembers_as_many_queues_as_the_limit_says(node: Node) -> None:
    checks = Checks(node)
    for topic in "tu":
        node.broker.topics.put(TopicConfig(topic, 1, MAX_CHECKED_SENDS), 0)
    sending = node.broker.sending
    for queue in range(MAX_CHECKED_SENDS):
        sending._queue_id(SendMessage("p", "t", "TBW102", 4, queue, 0, 1, 0))
    assert len(sending._checked) == MAX_CHECKED_SENDS
    assert sent(node, queue=0) == ("t", 0)
    assert checks.count == MAX_CHECKED_SENDS, "the first one is remembered"
    assert sent(node, "u") == ("u", 0)
    assert sending._checked == {("u", 0)}


class Anew(set[Any]):
    """Remembers nothing."""

    def add(self, element: Any) -> None: ...


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_remembered_changes_no_answer(nodes: Nodes, seed: int) -> None:
    """The same changes and sends, in any order, on a broker that remembers and on one that checks each send."""
    chance = random.Random(seed)
    both = [await nodes.start(name="broker-a"), await nodes.start(name="broker-a", data_dir=nodes.folder / "other")]
    both[1].broker.sending._checked = Anew()
    checks = [Checks(node) for node in both]
    for _ in range(300):
        topic, queue = chance.choice(TOPICS), chance.choice((0, 0, 1, 2, 7))
        act = chance.randrange(20)
        if act == 0 and topic in "tu":
            config = TopicConfig(topic, chance.randrange(1, 4), chance.randrange(1, 4))
            for node in both:
                node.broker.topics.put(config, node.broker.store.end)
        elif act == 1 and both[0].broker.topics.get(topic) and topic in "tu":
            for node in both:
                node.broker.topics.delete(topic, node.broker.store.end)
                node.broker.store.delete_topic(topic)
        else:
            found = [sent(node, topic, queue) for node in both]
            assert found[0] == found[1]
    assert checks[0].count < checks[1].count
