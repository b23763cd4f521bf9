"""User code may do anything: its queue continues, or the log says which one stands."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import orjson
import pytest
from rocketlet.client import (
    AdminClient,
    ConfigError,
    Consumer,
    GroupConfig,
    LiteConsumer,
    Message,
    Producer,
    PullLimits,
    Queue,
    Reject,
    RetryLater,
    RetryPolicy,
    SharedConsumer,
)
from rocketlet.client.config import CLIENT_LIMITS, MAX_REPORTED_HANDLERS, ClientLimits
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection, KeptTask, finished
from rocketlet.protocol.admin_bodies import RunningHandler
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.testing import Broker, Fault

from ..client.conftest import set_send_timeout, tasks_named
from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill


async def raise_cancelled(message: Message) -> None:
    raise asyncio.CancelledError


async def cancel_itself(message: Message) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancel_itself_and_return(message: Message) -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "junk"


async def wait_for_a_cancelled_task(message: Message) -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def raise_system_exit(message: Message) -> None:
    raise SystemExit(3)


async def raise_of_its_own(message: Message) -> None:
    class Odd(BaseException):
        """As trio's Cancelled is."""

    raise Odd


async def close_the_executor(message: Message) -> None:
    await asyncio.get_running_loop().shutdown_default_executor()
    raise RuntimeError("closed")


def stop_iteration(message: Message) -> None:
    next(iter(()))


def exit_thread(message: Message) -> None:
    raise SystemExit(3)


def return_a_coroutine(message: Message) -> Any:
    return asyncio.sleep(0, "junk")


JUNK: list[Callable[[Message], Any]] = [
    lambda message: True,
    lambda message: "ok",
    lambda message: RetryLater,
    lambda message: NotImplemented,
    raise_cancelled,
    cancel_itself,
    cancel_itself_and_return,
    wait_for_a_cancelled_task,
    raise_system_exit,
    raise_of_its_own,
    close_the_executor,
    stop_iteration,
    exit_thread,
    return_a_coroutine,
]


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("fails", JUNK, ids=lambda found: getattr(found, "__name__", "?"))
async def test_whatever_a_handler_does_is_a_failure_that_is_retried_and_dead_at_last(
    nodes: Nodes, connect: Connect, fails: Callable[[Message], Any], orderly: bool
) -> None:
    """Ten messages that fail are more than the workers that could die of them."""
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    tries: Counter[bytes] = Counter()

    def count(message: Message) -> bool:
        tries[message.body] += 1
        return int(message.body) % 2 == 0

    async def handle(message: Message) -> Any:
        return await fails(message) if count(message) else None

    def handle_plainly(message: Message) -> Any:
        return fails(message) if count(message) else None

    handler = handle if inspect.iscoroutinefunction(fails) else handle_plainly
    await fill(node, 20)
    options: dict[str, Any] = {"max_reconsume_times": 1, "orderly": orderly, "concurrency": 4}
    if orderly:
        options["suspend_queue_s"] = 0.001
    async with Consumer(
        node.address, "g", "t", handler, start="first", **options, limits=ClientLimits(restart_s=0.001)
    ):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 10 and len(tries) == 20)
    if fails is not cancel_itself_and_return:  # cancels what comes after it, too, which is retried
        assert tries == {b"%d" % number: 1 + (number % 2 == 0) for number in range(20)}


async def test_a_plain_function_that_returns_a_coroutine_is_a_handler(node: Node) -> None:
    """As a lambda around one."""
    handled: list[bytes] = []

    async def handle(message: Message, outcome: str) -> Reject | None:
        handled.append(message.body)
        return Reject(outcome) if message.body == b"0" else None

    async with Consumer(node.address, "g", "t", lambda message: handle(message, "no"), start="first"):
        await fill(node, 3)
        await eventually(lambda: len(handled) == 3)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)


async def test_a_failure_is_logged_with_its_traceback_and_what_was_returned(
    nodes: Nodes, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    node = await nodes.start(delay_levels_ms=(5,) * 18)
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 2)

    async def handle(message: Message) -> Any:
        if message.body == b"0":
            return True
        raise RuntimeError("cannot handle this")

    async with Consumer(node.address, "g", "t", handle, start="first", max_reconsume_times=0):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 2)
    failures = [record for record in caplog.records if vars(record).get("event") == "handler_failed"]
    assert {record.levelno for record in failures} == {logging.ERROR}
    texts = [str(record.exc_info[1]) for record in failures if record.exc_info]
    assert any("returned True, a bool; expected None, RetryLater(...) or Reject()" in text for text in texts)
    assert any("cannot handle this" in text for text in texts)
    assert all("offset" in record.getMessage() for record in failures)


async def test_a_queue_that_stands_is_named(node: Node, one_queue: None, caplog: pytest.LogCaptureFixture) -> None:
    await fill(node, 1)
    release = threading.Event()
    caplog.set_level(logging.INFO)

    def hold(message: Message) -> None:
        release.wait()

    def named(text: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if text in record.getMessage()]

    async with Consumer(
        node.address, "g", "t", hold, start="first", commit_interval_s=0.01, limits=ClientLimits(standing_s=0.05)
    ):
        await eventually(lambda: bool(named("queue_stuck")))
        assert "t@broker-a:0" in named("queue_stuck")[0]
        release.set()
        await eventually(lambda: bool(named("queue_unstuck")))


async def test_a_handler_that_blocks_the_loop_is_named_and_its_queue_continues(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each second in which nothing ran is seen, even if other work continues just then."""
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        threading.Event().wait(1.0 if message.body == b"blocks" else 0.0)
        handled.append(message.body)

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first", commit_interval_s=0.01),
        asyncio.timeout(PATIENCE_S),
    ):
        await producer.send("t", b"blocks")
        await eventually(lambda: "event_loop_blocked" in caplog.text)
        await producer.send("t", b"x")
        await eventually(lambda: handled == [b"blocks", b"x"])


async def test_a_listener_may_raise_anything(node: Node, wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    await create_topic(wire, "t", 2)
    await fill(node, 4)
    handled: list[bytes] = []

    async def later(queues: object) -> None:
        raise RuntimeError("later")

    def at_once(queues: object) -> None:
        raise SystemExit(1)

    async def handle(message: Message) -> None:
        handled.append(message.body)

    async with Consumer(node.address, "g", "t", handle, start="first", on_assigned=later, on_revoked=at_once):
        await eventually(lambda: len(handled) == 4)
    failures = [record for record in caplog.records if "listener_failed" in record.getMessage()]
    assert {type(record.exc_info[1]) for record in failures if record.exc_info} == {RuntimeError, SystemExit}


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (lambda queue: {queue: 2**63}, r"9223372036854775808 \(int\) for t@"),
        (lambda queue: {queue: Decimal(1)}, r"\(Decimal\) for t@"),
        (lambda queue: {queue: -1}, r"-1 \(int\)"),
        (lambda queue: {str(queue): 1}, "which is not a Queue"),
        (lambda queue: [1], r"returned \[1\]"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_listener_that_names_no_offset_gets_an_error_and_its_queue_is_read(
    node: Node, connect: Connect, caplog: pytest.LogCaptureFixture, starts: Any, said: str, *, is_async: bool
) -> None:
    """As of a database that returns Decimals: passed by in silence, the queue would begin elsewhere than the user thinks."""
    await create_topic(await connect(node.address), "t", 1)
    await fill(node, 2)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.body)

    async def later(queues: set[Queue]) -> Any:
        return starts(next(iter(queues)))

    def at_once(queues: set[Queue]) -> Any:
        return starts(next(iter(queues)))

    listener = later if is_async else at_once
    async with Consumer(node.address, "g", "t", handle, start="first", on_assigned=listener):
        await eventually(lambda: len(handled) == 2)
    texts = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert any(re.search(said, text) for text in texts), texts


@pytest.mark.parametrize("level", [-1, "3", 1.5, 2**31])
def test_a_delay_level_is_a_number_from_0(level: Any) -> None:
    with pytest.raises(ValueError, match="delay_level"):
        RetryLater(delay_level=level)
    assert Reject() == Reject()


@pytest.mark.parametrize("given", [5, "busy"])
def test_seconds_levels_and_reasons_are_distinguished_by_name(given: Any) -> None:
    with pytest.raises(TypeError, match="positional"):
        RetryLater(given)  # type: ignore[call-arg]


@pytest.mark.parametrize("delay", [1, 0, timedelta(seconds=1)])
def test_a_delay_and_a_level_exclude_each_other(delay: Any) -> None:
    with pytest.raises(ConfigError, match=r"delay: .* conflicts with delay_level=3; give only one of them"):
        RetryLater(delay=delay, delay_level=3)


async def test_a_check_that_returns_junk_or_raises_anything_is_asked_again(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "transaction_check_interval_s": 0.02,
        "transaction_timeout_s": 0.0,
        "transaction_check_max": 10**6,
    }
    node = await nodes.start(**settings)
    await create_topic(await connect(node.address), "t", 1)
    asked = 0

    def check(message: Message) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            return "no"  # a truth that is none
        if asked == 2:
            raise asyncio.CancelledError
        return False

    async with Producer(node.address, "p", check=check) as producer:

        async def silent(*arguments: object, **options: object) -> None:
            """As if the process had died before it sent the outcome."""

        monkeypatch.setattr(ProducerTransactions, "end", silent)
        async with producer.transaction("t", b"maybe"):
            pass
        await eventually(lambda: node.broker.transactions.waiting == 0)
    assert asked >= 3
    assert node.broker.store.queue("t", 0).next == 0, "it was rolled back"


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_check_that_hangs_or_stops_its_producer_does_not_hold_the_stop_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    settings: dict[str, Any] = {"transaction_check_interval_s": 0.02, "transaction_timeout_s": 0.0}
    node = await nodes.start(**settings)
    called, asked = asyncio.Event(), list[tuple[Connection, Frame]]()

    async def check(message: Message) -> None:
        called.set()
        await (asyncio.Event().wait() if hangs else producer.stop())

    async def silent(*arguments: object, **options: object) -> None: ...

    listen, checks = ClusterView.answer, list[Callable[[Connection, Frame], None]]()

    def answer_and_note(cluster: ClusterView, code: int, answer: Callable[[Connection, Frame], None]) -> None:
        def noted(connection: Connection, frame: Frame) -> None:
            asked.append((connection, frame))
            answer(connection, frame)

        is_check = code == RequestCode.CHECK_TRANSACTION_STATE
        if is_check:
            checks.append(answer)
        listen(cluster, code, noted if is_check else answer)

    monkeypatch.setattr(ClusterView, "answer", answer_and_note)
    monkeypatch.setattr(ProducerTransactions, "end", silent)
    producer = Producer(node.address, "p", check=check)
    await producer.start()
    async with producer.transaction("t", b"maybe"):
        pass
    await called.wait()
    set_send_timeout(producer, 0.01)
    await producer.stop()
    checks[0](*asked[0])  # as a broker that asks again, which does so every 20 ms here
    await eventually(lambda: not tasks_named("transaction check"))


async def test_a_handler_that_stops_its_consumer_gets_an_error_and_the_consumer_continues(
    node: Node, one_queue: None
) -> None:
    errors: list[BaseException] = []
    stops: list[Callable[[], Awaitable[None]]] = []

    async def handle(message: Message) -> None:
        try:
            await stops[0]()
        except BaseException as error:
            errors.append(error)

    async with Producer(node.address) as producer:
        consumer = Consumer(node.address, "g", "t", handle, start="first", drain_s=0)
        await consumer.start()
        stops.append(consumer.stop)
        await producer.send("t", b"x")
        await eventually(lambda: len(errors) == 1)
        assert isinstance(errors[0], ConfigError)
        assert "cannot stop its own consumer" in str(errors[0])
        stops[0] = lambda: asyncio.create_task(consumer.stop())  # the stop of another task is not recognized
        await producer.send("t", b"y")
        await eventually(lambda: len(errors) == 2)
        assert isinstance(errors[1], asyncio.CancelledError)
        await eventually(lambda: not node.broker.groups.members_of("g"))


@pytest.mark.parametrize("broadcasting", [False, True])
async def test_a_stop_that_is_cancelled_leaves_no_task_behind(node: Node, one_queue: None, broadcasting: bool) -> None:
    before = asyncio.all_tasks()
    for turns in range(1, 12):
        consumer = Consumer(node.address, "g", "t", broadcasting=broadcasting)
        await consumer.start()
        stopping = asyncio.ensure_future(consumer.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        names = {"rebalance", "heartbeat", "lock renewal", "broadcast", "commit", "routes", "leave"}
        assert not names & {task.get_name() for task in asyncio.all_tasks() - before}


async def test_a_listener_that_hangs_does_not_hold_the_stop_up(node: Node, one_queue: None) -> None:
    async def hang(queues: set[Queue]) -> None:
        await asyncio.Event().wait()

    async with Consumer(node.address, "g", "t", on_revoked=hang, drain_s=0.01) as consumer:
        await consumer.assigned()


async def test_a_trial_that_an_administrator_asks_for_is_answered_and_ends_with_its_consumer(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", 1)
    calls, ended = 0, asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise asyncio.CancelledError
        if calls == 3:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    async with Producer(node.address) as producer:
        sent = await producer.send("t", b"x")
    consumer = Consumer(node.address, "g", "t", handle, start="first", drain_s=0.01)
    await consumer.start()
    await eventually(lambda: calls == 1)
    trial = {"consumerGroup": "g", "clientId": consumer.client_id, "msgId": sent.offset_id}
    answer = await wire.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, trial)
    assert b"CancelledError" in answer.body
    wire.send(RequestCode.CONSUME_MESSAGE_DIRECTLY, trial)
    await eventually(lambda: calls == 3)
    await consumer.stop()
    await eventually(ended.is_set)


async def test_who_waits_for_what_runs_beside_and_is_cancelled_ends_it() -> None:
    """As a stop that waits for a listener that hangs."""
    hung = asyncio.create_task(asyncio.Event().wait())
    waiting = asyncio.create_task(finished({hung}, 3600.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert hung.cancelling()


async def test_what_arrives_does_not_shorten_the_pause_after_a_failure_in_order(node: Node, one_queue: None) -> None:
    tries = 0

    async def fail(message: Message) -> None:
        nonlocal tries
        tries += 1
        raise ValueError("not yet")

    in_order: dict[str, Any] = {"orderly": True, "suspend_queue_s": 300.0, "drain_s": 0.01}
    async with Consumer(node.address, "g", "t", fail, start="first", **in_order) as consumer:
        (queue,) = [queue for queue in await consumer.assigned() if queue.topic == "t"]
        async with Producer(node.address) as producer:
            await producer.send("t", b"fails")
            await eventually(lambda: tries == 1)
            await producer.send("t", b"arrives meanwhile")
            await eventually(lambda: consumer.queues[queue].messages == 2)
            await producer.send("t", b"and another")
            await eventually(lambda: consumer.queues[queue].messages == 3)
        assert tries == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"handler": lambda: None}, r"handler: .*<lambda>\(\) is called with a message: too many positional arguments"),
        ({"handler": lambda message, more: None}, "is called with a message: missing a required argument: 'more'"),
        ({"handler": lambda: None, "batch_size": 2}, "is called with a list of messages"),
        ({"middleware": [lambda message: None]}, r"middleware\[0\]: .* is called with a message and the next layer"),
        ({"on_assigned": lambda: None}, "on_assigned: .* is called with a set of queues"),
        ({"on_revoked": lambda: None}, "on_revoked: .* is called with a set of queues"),
    ],
)
async def test_a_callback_that_cannot_be_called_is_refused_immediately(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Consumer("h:1", "g", "t", **arguments)


# Batches by size or time, and declared retry policies.


@pytest.mark.parametrize("orderly", [False, True])
async def test_a_batch_waits_for_its_size_or_its_time(node: Node, one_queue: None, orderly: bool) -> None:
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


async def test_a_seek_forgets_a_batch_that_waits(node: Node, one_queue: None) -> None:
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


async def test_a_policy_says_what_is_retried_how_often_and_when(node: Node, one_queue: None) -> None:
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


async def test_a_policy_of_members_that_share_takes_any_time(node: Node, one_queue: None) -> None:
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
    assert hints == {True: "'stored as dead letters'", False: "'retried while retries are left'"}


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


# Handlers that are running, as their member reports them.


async def handlers_of(node: Node, expected: int = 1) -> list[RunningHandler]:
    """The running handlers of the only member of the group g."""
    async with AdminClient(node.address) as admin:
        while True:
            found = [item for member in (await admin.running("g")).values() for item in member.handlers]
            if len(found) == expected:
                return found


async def waits(gate: asyncio.Event) -> None:
    await gate.wait()


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_running_handler_is_reported_with_its_message_and_the_place_where_it_waits(
    node: Node, one_queue: None, kind: type[Consumer | SharedConsumer]
) -> None:
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        await waits(gate)

    async with Producer(node.address) as producer, kind(node.address, "g", "t", handle, start="first"):
        sent = await producer.send("t", b"x")
        (running,) = await handlers_of(node)
        gate.set()
        assert await handlers_of(node, 0) == []
    assert (running.message_id, running.queue, running.attempt, running.messages) == (sent.message_id, sent.queue, 1, 1)
    outer, inner, *_ = [place.rpartition(" ")[2] for place in running.stack]
    assert (outer.rpartition(".")[2], inner) == ("handle", "waits")
    assert running.stack[0].startswith(__file__)
    assert running.place.startswith("client/test_handlers.py:")
    assert running.place.endswith(" waits"), "not the line of asyncio"


async def test_running_handler_in_a_thread_is_reported_with_the_stack_of_the_thread(
    node: Node, one_queue: None
) -> None:
    gate = threading.Event()

    def handle(message: Message) -> None:
        gate.wait(PATIENCE_S)

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", handle, start="first"):
        await producer.send("t", b"x")
        (running,) = await handlers_of(node)
        while "threading.py" not in running.stack[-1]:  # the thread may not have begun yet
            (running,) = await handlers_of(node)
        gate.set()
    assert running.stack[0].endswith("handle")


async def test_handler_in_a_thread_succeeds_when_an_earlier_call_of_its_worker_ends_meanwhile(
    node: Node, one_queue: None
) -> None:
    began = {body: asyncio.Event() for body in (b"abandoned", b"first", b"second", b"third")}
    ended = {body: asyncio.Event() for body in began}
    may_end = {body: threading.Event() for body in (b"abandoned", b"second")}
    workers: dict[bytes, asyncio.Task[Any] | None] = {}
    errors: list[BaseException] = []
    loop = asyncio.get_running_loop()

    def handle(message: Message) -> None:
        loop.call_soon_threadsafe(began[message.body].set)
        if message.body in may_end:
            may_end[message.body].wait(PATIENCE_S)

    async def time_out(message: Message, call: Callable[[Message], Awaitable[Any]]) -> Any:
        workers[message.body] = asyncio.current_task()
        try:
            async with asyncio.timeout(None) as limit:
                if message.body == b"abandoned":
                    limit_of_abandoned.set_result(limit)
                return await call(message)
        except TimeoutError:
            return None
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            ended[message.body].set()

    limit_of_abandoned: asyncio.Future[asyncio.Timeout] = loop.create_future()
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first", concurrency=2, middleware=[time_out]),
    ):
        await producer.send("t", b"abandoned")
        await began[b"abandoned"].wait()
        (await limit_of_abandoned).reschedule(0)
        await ended[b"abandoned"].wait()  # its thread still runs
        await producer.send("t", b"first")
        await ended[b"first"].wait()
        await producer.send("t", b"second")
        await began[b"second"].wait()
        may_end[b"abandoned"].set()
        await producer.send("t", b"third")
        await ended[b"third"].wait()  # in the thread of the abandoned call, which has therefore ended
        may_end[b"second"].set()
        await ended[b"second"].wait()
    assert workers[b"second"] is workers[b"abandoned"]
    assert not errors


async def test_handlers_beyond_the_limit_are_reported_as_the_longest_and_the_newest(
    node: Node, one_queue: None
) -> None:
    gate, count = asyncio.Event(), MAX_REPORTED_HANDLERS + 3

    async def handle(message: Message) -> None:
        await gate.wait()

    async with Consumer(node.address, "g", "t", handle, start="first", concurrency=count) as consumer:
        await fill(node, count)
        await eventually(lambda: len(consumer.running_handlers(stacks=False)) == MAX_REPORTED_HANDLERS)
        found = consumer.running_handlers(stacks=False)
        while found[-1].offset != count - 1:
            await asyncio.sleep(0)
            found = consumer.running_handlers(stacks=False)
        gate.set()
    assert [item.offset for item in found] == [*range(MAX_REPORTED_HANDLERS - 1), count - 1]
    assert not any(item.stack for item in found)


@pytest.mark.parametrize("options", [{}, {"orderly": True, "max_reconsume_times": 0}], ids=["concurrent", "orderly"])
async def test_handler_that_has_ended_is_not_reported_while_its_outcome_is_sent(
    rocketlet: Broker, options: dict[str, Any]
) -> None:
    rocketlet.create_topic("t", 1)
    rocketlet.faults.add(Fault.silence("CONSUMER_SEND_MSG_BACK"))

    async def fail(message: Message) -> Reject:
        return Reject("no such dish")

    async with (
        Producer(rocketlet.address) as producer,
        Consumer(rocketlet.address, "g", "t", fail, start="first", drain_s=0, **options) as consumer,
    ):
        await producer.send("t", b"x")
        await eventually(lambda: bool(rocketlet.requests_of("CONSUMER_SEND_MSG_BACK")))
        assert not consumer.running_handlers(stacks=False)


async def test_only_the_member_is_left_out_when_its_running_handlers_are_unreadable(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(message: Message) -> None: ...

    def unreadable(*, stacks: bool) -> list[RunningHandler]:
        return [RunningHandler(1, "t", "b", 0, 0, 1, 0, 1, [])]  # type: ignore[arg-type]

    async with (
        Consumer(node.address, "g", "t", handle) as broken,
        Consumer(node.address, "g", "t", handle) as sound,
        AdminClient(node.address) as admin,
    ):
        monkeypatch.setattr(broken, "running_handlers", unreadable)
        assert list(await admin.running("g")) == [sound.client_id]
    (logged,) = fields_of(caplog, "running_info_unreadable")
    assert logged.items() >= {"group": "g", "client": broken.client_id}.items()


async def test_mqadmin_gets_running_handlers_as_jstack(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        await waits(gate)

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first") as consumer,
    ):
        sent = await producer.send("t", b"x")
        await handlers_of(node)
        asked = {"consumerGroup": "g", "clientId": consumer.client_id}
        plain = await wire.call(RequestCode.GET_CONSUMER_RUNNING_INFO, asked)
        answer = await wire.call(RequestCode.GET_CONSUMER_RUNNING_INFO, {**asked, "jstackEnable": True})
        gate.set()
    assert b'"jstack"' not in plain.body
    text = re.search(rb'"jstack":("[^"]*")', answer.body)
    assert text is not None
    first, *places = orjson.loads(text[1]).splitlines()
    assert first.startswith(f"message {sent.message_id} at offset 0 of t@{node.config.name}:0, running for ")
    assert any(place.startswith("    at ") and place.endswith(" waits") for place in places)


# What the log says about failures.


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if vars(record).get("event") == event]


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_log_of_a_failed_handler_names_message_attempt_limit_and_delay(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture, kind: type[Consumer | SharedConsumer]
) -> None:
    async def fail(message: Message) -> None:
        raise ValueError("no such dish")

    retry = RetryPolicy(attempts=2, delays_s=(1,))
    async with Producer(node.address) as producer, kind(node.address, "g", "t", fail, start="first", retry=retry):
        sent = await producer.send("t", b"x", keys=("4711", "a"))
        await eventually(lambda: bool(fields_of(caplog, "message_dead_lettered")))
    first, last = fields_of(caplog, "handler_failed")
    (dead,) = fields_of(caplog, "message_dead_lettered")
    known = {"message": sent.message_id, "keys": "4711 a"}
    assert first.items() >= {**known, "attempt": 1, "attempts": 2, "retry_s": 1.0}.items()
    assert first["hint"] == "retried while retries are left"
    assert last.items() >= {**known, "attempt": 2, "attempts": 2, "hint": "stored as dead letters"}.items()
    reason = "ValueError: no such dish"
    assert dead.items() >= {**known, "group": "g", "attempt": 2, "reason": reason}.items()


async def test_log_of_a_failed_handler_names_the_attempts_of_an_orderly_consumer(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(message: Message) -> None:
        raise ValueError("no such dish")

    async with (
        Producer(node.address) as producer,
        Consumer(
            node.address, "g", "t", fail, start="first", orderly=True, suspend_queue_s=0.01, max_reconsume_times=1
        ),
    ):
        await producer.send("t", b"x")
        await eventually(lambda: bool(fields_of(caplog, "message_dead_lettered")))
    failed = [(item["attempt"], item["hint"]) for item in fields_of(caplog, "handler_failed")]
    assert failed == [(1, "retried while retries are left"), (2, "stored as dead letters")]
    assert [item["attempt"] for item in fields_of(caplog, "message_dead_lettered")] == [2]


async def test_log_of_a_failed_handler_says_that_broadcasting_has_no_retries(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(message: Message) -> None:
        raise ValueError("no such dish")

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", fail, start="first", broadcasting=True) as consumer,
    ):
        await consumer.assigned(PATIENCE_S)
        await producer.send("t", b"x")
        await eventually(lambda: bool(fields_of(caplog, "handler_failed")))
    (failed,) = fields_of(caplog, "handler_failed")
    assert ("retry_s" in failed, failed["hint"]) == (False, "dropped, because broadcasting has no retries")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of its connections, which stay open
@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
def test_consumer_that_is_not_stopped_is_logged_once_when_its_loop_ends(
    caplog: pytest.LogCaptureFixture, kind: type[Consumer | SharedConsumer]
) -> None:
    async def handle(message: Message) -> None: ...

    async def start(address: str) -> None:
        await kind(address, "g", "t", handle, concurrency=5).start()

    with Broker() as broker:
        broker.create_topic("t", 1)
        asyncio.run(start(broker.address))
    gc.collect()
    assert len(fields_of(caplog, "consumer_not_stopped")) == 1
    assert "worker_cancelled" not in caplog.text


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_only_worker_is_replaced_when_it_is_cancelled_while_it_is_idle(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture, kind: type[Consumer | SharedConsumer]
) -> None:
    workers: list[asyncio.Task[Any] | None] = []

    async def handle(message: Message) -> None:
        workers.append(asyncio.current_task())

    async with (
        Producer(node.address) as producer,
        kind(node.address, "g", "t", handle, start="first", concurrency=1) as consumer,
    ):
        await producer.send("t", b"1")
        await eventually(lambda: len(workers) == 1 and not consumer.running_handlers(stacks=False))
        worker = workers[0]
        assert worker is not None
        worker.cancel()
        await producer.send("t", b"2")
        await eventually(lambda: len(workers) == 2)
    assert workers[1] is not worker
    assert fields_of(caplog, "worker_cancelled")
    assert not fields_of(caplog, "consumer_not_stopped")


SHARES = {"heartbeat", "routes", "sources", "renewals", "receive t at broker-a"}


def test_kept_task_is_not_replaced_while_the_event_loop_ends() -> None:
    started, handled = 0, threading.Event()

    async def work() -> None:
        nonlocal started
        started += 1
        await asyncio.Event().wait()

    async def main() -> None:
        kept = KeptTask(work, "kept", 0.01)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        loop.run_in_executor(None, handled.wait)  # the loop waits for this handler after it has cancelled all tasks
        kept.task.add_done_callback(lambda _: loop.call_later(0.1, handled.set))

    asyncio.run(main())
    assert started == 1


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Consumer, {"heartbeat", "routes", "rebalance", "lock renewal", "commit"}),
        (SharedConsumer, SHARES),
        (LiteConsumer, {*SHARES, "lite subscriptions"}),
    ],
)
async def test_consumer_continues_after_all_its_tasks_were_cancelled(
    caplog: pytest.LogCaptureFixture, kind: type[Consumer | SharedConsumer | LiteConsumer], wanted: set[str]
) -> None:
    is_lite = kind is LiteConsumer
    inbox, before = Inbox(), asyncio.all_tasks()
    limits = replace(CLIENT_LIMITS, lite_sync_interval_s=0.05)
    more: dict[str, Any] = {"lite_topics": ["a", "b"]} if is_lite else {"start": "first"}
    with Broker() as broker:
        broker.create_topic("t", 1, message_type="LITE" if is_lite else "")
        producer = Producer(broker.address)
        await producer.start()
        async with kind(broker.address, "g", "t", inbox, limits=limits, **more):
            await producer.send("t", b"1", lite_topic="a" if is_lite else None)
            await eventually(lambda: len(inbox.messages) == 1)
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await eventually(lambda: wanted <= {fields["task"] for fields in fields_of(caplog, "task_replaced")})
            for name in ("a", "b"):  # the first one is the response to a receive that was cancelled
                await producer.send("t", b"2", lite_topic=name if is_lite else None)
            await eventually(lambda: len(inbox.messages) >= 2)
        await producer.stop()


@pytest.mark.still
async def test_consumer_retries_after_a_delay_that_is_a_level(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    async def later(message: Message) -> RetryLater | None:
        attempts.append(message.attempt)
        return RetryLater(delay=10) if message.attempt == 1 else None

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", later, start="first"):
        await producer.send("t", b"x")
        await eventually(lambda: node.broker.store.queue("SCHEDULE_TOPIC_XXXX", 2).next == 1)  # level 3: 10 s
        node.clock.advance(10)
        await eventually(lambda: attempts == [1, 2])
    assert not fields_of(caplog, "handler_failed")


async def test_consumer_names_the_delays_that_it_supports(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def later(message: Message) -> RetryLater:
        return RetryLater(delay=11)

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", later, start="first"):
        await producer.send("t", b"x")
        await eventually(lambda: bool(fields_of(caplog, "handler_failed")))
    (failed, *_) = fields_of(caplog, "handler_failed")
    assert "a Consumer does not support 11 s; expected one of 1, 5, 10, 30" in failed["error"]
