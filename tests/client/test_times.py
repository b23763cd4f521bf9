"""Messages that a producer sends to a time, and takes back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rocketlet import sync
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.broker.runtime import MovableClock
from rocketlet.client import BrokerRefused, MessageIllegal, Outgoing, Producer
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.properties import find
from rocketlet.testing import Broker

from ..conftest import Node, Nodes


def stored(node: Node, topic: str = "t") -> list[bytes]:
    store = node.broker.store
    queues = [queue for (name, _), queue in store.queues.items() if name == topic]
    return [store.message(queue, offset).body for queue in queues for offset in range(queue.begin, queue.next)]


@pytest.fixture
async def standing(nodes: Nodes) -> Node:
    return await nodes.start(clock=MovableClock(stands=True))


async def test_a_message_is_sent_after_a_time_or_to_one(standing: Node) -> None:
    now = datetime.fromtimestamp(standing.clock.time_s(), UTC)
    async with Producer(standing.address, default_queues=1) as producer:
        for body, times in {
            b"seconds": {"delay": 1.5},
            b"delta": {"delay": timedelta(seconds=3)},
            b"at": {"at": now + timedelta(seconds=5)},
        }.items():
            assert (await producer.send("t", body, **times)).recall_handle  # type: ignore[arg-type]
        assert not (await producer.send("t", b"now", delay=0)).recall_handle
        assert not (await producer.send("t", b"past", at=now - timedelta(days=1))).recall_handle
    assert stored(standing) == [b"now", b"past"]
    for seconds, body in ((1.501, b"seconds"), (1.5, b"delta"), (2, b"at")):
        standing.clock.advance(seconds)
        assert stored(standing)[-1] == body


async def test_a_message_is_taken_back_once(standing: Node) -> None:
    async with Producer(standing.address, default_queues=1) as producer:
        sent = await producer.send("t", b"x", delay=60)
        assert await producer.recall(sent)
        assert not await producer.recall(sent.recall_handle)
        late = await producer.send("t", b"y", delay=5)
        standing.clock.advance(70)
        assert not await producer.recall(late)
        with pytest.raises(MessageIllegal, match="delay or at"):
            await producer.recall(await producer.send("t", b"z"))
        for odd in (None, "", "of another make", 5):
            with pytest.raises(MessageIllegal, match=f"{odd!r} is no recall handle"):
                await producer.recall(odd)  # type: ignore[arg-type]
    assert stored(standing) == [b"y", b"z"]


@pytest.mark.parametrize(
    ("times", "hint"),
    [
        ({"delay": -1}, "0 or more"),
        ({"delay": float("nan")}, "0 or more"),
        ({"delay": True}, "timedelta"),
        ({"delay": "5"}, "timedelta"),
        ({"at": datetime(2030, 1, 1)}, "time zone"),
        ({"at": 5}, "time zone"),
        ({"delay": 5, "delay_level": 3}, "one of"),
        ({"delay": 5, "at": datetime.now(UTC)}, "one of"),
        ({"delay_level": -1}, "delay level"),
    ],
)
async def test_what_is_no_time_is_refused(node: Node, times: dict[str, Any], hint: str) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=hint):
            await producer.send("t", b"x", **times)


async def test_a_time_too_far_ahead_is_refused_by_the_broker(node: Node) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(BrokerRefused, match="max delay"):
            await producer.send("t", b"x", delay=timedelta(days=41))


async def test_a_broker_that_would_deliver_at_once_gets_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = dict(BROKER_REQUESTS)
    del handlers[RequestCode.GET_TOPIC_CONFIG]
    monkeypatch.setattr("rocketlet.broker.remoting.dispatch.BROKER_REQUESTS", handlers)  # as 4.9's
    async with Broker() as broker:
        async with Producer(broker.address) as producer:
            with pytest.raises(MessageIllegal, match=r"broker of 4\.9"):
                await producer.send("t", b"x", delay=5)
            await producer.send("t", b"x", delay_level=1)
        assert broker.messages("t") == []


async def test_batches_have_no_time_and_middleware_sees_it(node: Node) -> None:
    seen: list[Outgoing] = []

    async def layer(sending: Any, call: Any) -> Any:
        seen.extend(sending.messages)
        return await call(sending)

    async with Producer(node.address, middleware=[layer]) as producer:
        assert (await producer.send("t", b"x", delay=5)).recall_handle
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", delay=5)])
    assert seen[0].delay == 5


def test_code_without_a_loop_sends_to_times_and_takes_back() -> None:
    with Broker() as broker, sync.Producer(broker.address) as producer:
        first = producer.send("t", b"first", delay=3600)
        producer.send("t", b"second", at=datetime.now(UTC) + timedelta(hours=2))
        assert producer.recall(first)
        broker.clock.advance(hours=3)
        [message] = broker.messages("t")
        assert (message.body, find(message.record.properties, "TIMER_OUT_MS") is not None) == (b"second", True)
        assert "TIMER_OUT_MS" not in message.user_properties
