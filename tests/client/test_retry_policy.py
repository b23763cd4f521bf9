"""Batches by size or time, and declared retry policies."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    ConfigError,
    Consumer,
    GroupConfig,
    Message,
    Producer,
    PullLimits,
    RetryPolicy,
    SharedConsumer,
)
from rocketlet.client.config import ClientLimits
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker, Fault

from ..conftest import Node, Wire, create_topic, eventually


@pytest.mark.parametrize("orderly", [False, True])
async def test_a_batch_waits_for_its_size_or_its_time(node: Node, wire: Wire, orderly: bool) -> None:
    await create_topic(wire, "t", 1)
    seen: list[list[bytes]] = []

    async def store(messages: list[Message]) -> None:
        seen.append([message.body for message in messages])

    options: dict[str, Any] = {"orderly": orderly, "pull": PullLimits(batch_size=32)}
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", store, batch_size=3, batch_wait_s=60, **options) as waits,
    ):
        await waits.assigned()
        for body in (b"1", b"2", b"3", b"4"):
            await producer.send("t", body)  # each is pulled alone
        await eventually(lambda: seen == [[b"1", b"2", b"3"]])
        (process_queue,) = (item for item in waits.queues.values() if item.queue.topic == "t")
        await eventually(lambda: process_queue.messages == 1)
        assert process_queue.runs[0].is_filling
    assert len(seen) == 1
    async with Consumer(node.address, "g", "t", store, batch_size=3, batch_wait_s=0.01, **options):
        await eventually(lambda: seen[1:] == [[b"4"]])


async def test_a_seek_forgets_a_batch_that_waits(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    seen: list[bytes] = []

    async def store(messages: list[Message]) -> None:
        seen.extend(message.body for message in messages)

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", store, batch_size=3, batch_wait_s=0.05) as consumer,
    ):
        await consumer.assigned()
        await producer.send("t", b"1")
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: process_queue.messages == 1)
        await consumer.seek("last")
        await producer.send("t", b"2")
        await eventually(lambda: seen == [b"2"])


async def test_a_policy_says_what_is_retried_how_often_and_when(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    seen: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> None:
        seen.append((message.body, message.reconsume_times))
        raise {b"away": ConnectionError, b"wrong": ValueError, b"reset": ConnectionResetError}[message.body]("no")

    policy = RetryPolicy(attempts=2, delays_s=(1,), on=(ConnectionError,), never=(ConnectionResetError,))
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, retry=policy, start="first"),
    ):
        for body in (b"away", b"wrong", b"reset"):
            await producer.send("t", body)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 2)
        await eventually(lambda: node.broker.store.queue("SCHEDULE_TOPIC_XXXX", 0).next == 1)
        node.clock.advance(1)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 3)
    assert sorted(seen) == [(b"away", 0), (b"away", 1), (b"reset", 0), (b"wrong", 0)]
    async with AdminClient(node.address) as admin:
        dead = [item async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 3) for item in part]
    assert {item.body: item.failure for item in dead} == {
        b"away": "tried 2 times; ConnectionError: no",
        b"wrong": "ValueError: no",
        b"reset": "ConnectionResetError: no",
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"delays_s": 5}, "delays_s: expected a tuple of seconds .* got 5"),
        ({"delays_s": "5"}, "delays_s: expected a tuple of seconds .* got '5'"),
        ({"delays_s": ("5",)}, "delays_s: '5' is not a time from 0 to 12 hours"),
        ({"delays_s": (43_201,)}, "delays_s: 43201 is not a time from 0 to 12 hours"),
        (
            {"attempts": 2, "delays_s": (1, 5)},
            "delays_s: expected at most 1 delays, one between each two of the 2 attempts",
        ),
        ({"attempts": 0}, "attempts: 0 is not a whole number from 1"),
        ({"on": ValueError}, "expected a tuple of exceptions"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RetryPolicy(**options)


def test_a_policy_must_fit_its_consumer() -> None:
    with pytest.raises(ConfigError, match="a Consumer does not support 7 s; expected one of 1, 5, 10, 30, 60"):
        Consumer("127.0.0.1:1", "g", "t", print, retry=RetryPolicy(delays_s=(7,)))
    kinds: tuple[Any, ...] = (Consumer, SharedConsumer)
    for kind in kinds:
        with pytest.raises(ConfigError, match="max_reconsume_times: 3 conflicts with the attempts of `retry`"):
            kind("127.0.0.1:1", "g", "t", print, retry=RetryPolicy(attempts=2), max_reconsume_times=3)


async def test_a_policy_of_members_that_share_takes_any_time(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    seen: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> None:
        seen.append((message.body, message.attempt))
        raise {b"away": ConnectionError, b"wrong": ValueError}[message.body]("no")

    def later() -> bool:
        node.clock.advance(7.5)
        return len(seen) == 4

    policy = RetryPolicy(attempts=3, delays_s=(7.5,), on=(ConnectionError,))
    async with (
        Producer(node.address) as producer,
        SharedConsumer(node.address, "g", "t", handle, retry=policy, start="first"),
    ):
        for body in (b"wrong", b"away"):
            await producer.send("t", body)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        await eventually(later)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 2)
    assert sorted(seen) == [(b"away", 1), (b"away", 2), (b"away", 3), (b"wrong", 1)]


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_the_log_says_whether_a_failed_message_is_redelivered(
    node: Node, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It said "will be retried" of messages that became dead letters immediately."""

    async def handle(message: Message) -> None:
        raise {b"away": ConnectionError, b"wrong": ValueError}[message.body]("no")

    policy = RetryPolicy(attempts=3, on=(ConnectionError,))
    async with (
        Producer(node.address) as producer,
        kind(node.address, "g", "t", handle, retry=policy, start="first"),
    ):
        for body in (b"wrong", b"away"):
            await producer.send("t", body)
        await eventually(lambda: caplog.text.count("handler_failed") == 2)
    failed = [str(record.getMessage()) for record in caplog.records if "handler_failed" in record.getMessage()]
    hints = {("ValueError" in text): text.partition("hint=")[2] for text in failed}
    assert hints == {True: "'stored as dead letters'", False: "'redelivered later, while retries are left'"}


@pytest.mark.parametrize("wait_s", [0, 61, "1"])
def test_a_wait_is_for_batches_and_short(wait_s: Any) -> None:
    with pytest.raises(ConfigError, match="batch_wait_s"):
        Consumer("127.0.0.1:1", "g", "t", batch_size=2, batch_wait_s=wait_s)
    with pytest.raises(ConfigError, match="batch_wait_s: needs a batch_size"):
        Consumer("127.0.0.1:1", "g", "t", batch_wait_s=1)


# The group's limit

IN_ORDER: dict[str, Any] = {"orderly": True, "suspend_queue_s": 0.001, "start": "first"}


async def set_retries(rocketlet: Broker, retries: int) -> None:
    rocketlet.create_topic("t", 1)
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_group(GroupConfig("g", retry_max_times=retries))


class Failing:
    """A handler that fails for the body `bad`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.bodies.append(message.body)
        if message.body == b"bad":
            raise ValueError("no")


async def handle_bad_and_good(rocketlet: Broker, **options: Any) -> list[bytes]:
    """Returns the bodies in the order in which the handler got them, when it got the good message."""
    handler = Failing()
    async with Producer(rocketlet.address) as producer, Consumer(rocketlet.address, "g", "t", handler, **options):
        for body in (b"bad", b"good"):
            await producer.send("t", body)
        await eventually(lambda: b"good" in handler.bodies)
    return handler.bodies


async def test_consumer_retries_as_often_as_the_groups_settings_say(rocketlet: Broker) -> None:
    await set_retries(rocketlet, 2)
    handler = Failing()

    def is_dead() -> bool:
        rocketlet.clock.advance(60)
        return len(rocketlet.dead_letters("g")) == 1

    async with Producer(rocketlet.address) as producer, Consumer(rocketlet.address, "g", "t", handler, start="first"):
        await producer.send("t", b"bad")
        await eventually(is_dead)
    assert handler.bodies == [b"bad"] * 3


@pytest.mark.parametrize("code", [None, "REQUEST_CODE_NOT_SUPPORTED"])
async def test_message_in_order_is_retried_as_often_as_the_groups_settings_say(
    rocketlet: Broker, code: str | None
) -> None:
    """code: the answer of brokers of 4.9, which return the settings of all groups only."""
    await set_retries(rocketlet, 2)
    if code is not None:
        rocketlet.faults.add(Fault.answer("GET_SUBSCRIPTIONGROUP_CONFIG", response=code))
    assert await handle_bad_and_good(rocketlet, **IN_ORDER) == [b"bad"] * 3 + [b"good"]
    assert len(rocketlet.dead_letters("g")) == 1


async def test_message_in_order_is_retried_16_times_when_the_settings_cannot_be_read(
    rocketlet: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await set_retries(rocketlet, 2)
    rocketlet.faults.add(Fault.answer("GET_SUBSCRIPTIONGROUP_CONFIG", response="NO_PERMISSION"))
    assert await handle_bad_and_good(rocketlet, **IN_ORDER) == [b"bad"] * 17 + [b"good"]
    assert "group_settings_unknown" in caplog.text


async def test_message_in_order_is_retried_by_new_settings_when_they_are_asked_for_again(rocketlet: Broker) -> None:
    await set_retries(rocketlet, 16)
    handler, limits = Failing(), ClientLimits(group_settings_s=0.0)
    async with (
        AdminClient(rocketlet.address) as admin,
        Producer(rocketlet.address) as producer,
        Consumer(rocketlet.address, "g", "t", handler, limits=limits, orderly=True, suspend_queue_s=0.2, start="first"),
    ):
        await producer.send("t", b"bad")
        await eventually(lambda: len(handler.bodies) == 1)
        await admin.change_group("g", retry_max_times=1)
        await eventually(lambda: len(rocketlet.dead_letters("g")) == 1)
    assert len(handler.bodies) < 17


async def test_message_in_order_without_a_handler_is_retried_as_often_as_the_groups_settings_say(
    rocketlet: Broker,
) -> None:
    await set_retries(rocketlet, 1)
    async with Producer(rocketlet.address) as producer, Consumer(rocketlet.address, "g", "t", **IN_ORDER) as consumer:
        for body in (b"bad", b"good"):
            await producer.send("t", body)
        for body in (b"bad", b"bad", b"good"):
            message = await consumer.receive()
            assert message.body == body
            await consumer.retry(message)
    assert len(rocketlet.dead_letters("g")) == 1
