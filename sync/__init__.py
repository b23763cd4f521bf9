"""Producer and consumer for code without an event loop: scripts, Django, Flask, notebooks.

    from rocketlet.sync import Consumer, Producer

    with Producer("127.0.0.1:9876") as producer:
        producer.send("orders", b"one coffee")
    with Consumer("127.0.0.1:9876", "kitchen", "orders", start="first") as consumer:
        for message in consumer.messages(timeout_s=5):
            print(message.body)

The classes of this package wrap the asynchronous classes. All of them share one event loop in a background thread, so
that heartbeats and commits continue while your code runs. All methods may be called from any thread and from the cells
of a notebook, but not in a coroutine. Plain functions as handlers, listeners and `check` run in threads and may block.

loop   the event loop in the background thread
tasks  the parts that adapters of task queues share

After a fork, create new clients in the child process: clients that were created before the fork raise ConfigError there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Self, TypeVar, Unpack

from ..client import consumer as asynchronous
from ..client.admin.admin_client import AdminClient as AsyncAdminClient
from ..client.config import PRODUCER_GROUP, REQUEST_TIMEOUT_S, takes
from ..client.consuming.handling import Outcome, RetryLater, caught
from ..client.errors import get_logger
from ..client.lite_consumer import LiteConsumer as AsyncLiteConsumer
from ..client.lite_consumer import LiteStart
from ..client.member.offsets import Position
from ..client.message import Message, Outgoing, SendResult
from ..client.options import ConsumerOptions, LiteOptions, SeekPosition, SharedOptions
from ..client.producer import Producer as AsyncProducer
from ..client.sending.options import MessageOptions, ProducerOptions, SendOptions
from ..client.shared_consumer import SharedConsumer as AsyncSharedConsumer
from ..client.wire.connection import Access, cancelled
from ..protocol.names import Queue
from .loop import Loop

log = get_logger("rocketlet.sync")

_loop = Loop()


def _threaded(function: Callable[[Any], Any] | None) -> Any:
    """Return a listener or check that runs a plain function in a thread, because it must not block the loop that all clients
    share. Coroutine functions are returned as they are."""
    if not callable(function) or inspect.iscoroutinefunction(function):
        return function

    @wraps(function)
    async def in_thread(given: Any) -> Any:
        outcome, error = await asyncio.to_thread(caught, function, given)
        if error is not None:
            raise error
        return await outcome if inspect.isawaitable(outcome) else outcome

    return in_thread


def _notifying(listener: Callable[[str], object] | None) -> Any:
    """Return a listener that runs the plain function in a thread, without waiting for it."""
    if not callable(listener):
        return listener
    tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references

    async def notify(given: str) -> None:
        _, error = await asyncio.to_thread(caught, listener, given)
        if error is not None:
            log.error("listener_failed", lite_topic=given, exc_info=error)

    def begin(given: str) -> None:
        tasks.add(task := asyncio.create_task(notify(given)))
        task.add_done_callback(tasks.discard)

    return begin


@takes(ProducerOptions)
class Producer:
    """The synchronous version of `rocketlet.Producer`. `check` is a plain function."""

    def __init__(self, name_server: str, group: str = PRODUCER_GROUP, **options: Unpack[ProducerOptions]) -> None:
        if "check" in options:
            options["check"] = _threaded(options["check"])

        async def made() -> AsyncProducer:
            return AsyncProducer(name_server, group, **options)

        self._producer = _loop.run(made())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the producer. Raises what `rocketlet.Producer.start` raises."""
        _loop.run(self._producer.start())

    def stop(self) -> None:
        _loop.run(self._producer.stop())

    def send(self, topic: str, body: bytes, **options: Unpack[SendOptions]) -> SendResult:
        """Send one message. Return when the broker has stored it. Options and errors are those of
        `rocketlet.Producer.send`."""
        return _loop.run(self._producer.send(topic, body, **options))

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Outgoing | bytes],
        *,
        queue_key: str | None = None,
        queue: Queue | None = None,
    ) -> SendResult:
        """Send messages in one request, as `rocketlet.Producer.send_batch` does."""
        return _loop.run(self._producer.send_batch(topic, messages, queue_key=queue_key, queue=queue))

    def send_oneway(self, topic: str, body: bytes, **options: Unpack[MessageOptions]) -> None:
        """Send without waiting for a response, as `rocketlet.Producer.send_oneway` does. The message may be lost."""
        _loop.run(self._producer.send_oneway(topic, body, **options))

    def recall(self, sent: SendResult | str) -> bool:
        """Cancel the delivery of a delayed message, as `rocketlet.Producer.recall` does."""
        return _loop.run(self._producer.recall(sent))

    def queue_for(self, topic: str, queue_key: str) -> Queue:
        """Return the queue for messages with this key. Raises TopicNotFound."""
        return _loop.run(self._producer.queue_for(topic, queue_key))

    def request(
        self, topic: str, body: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S, **options: Unpack[MessageOptions]
    ) -> Message:
        """Send a message and return the reply, as `rocketlet.Producer.request` does. Raises RequestTimeout."""
        return _loop.run(self._producer.request(topic, body, timeout_s=timeout_s, **options))

    def reply(self, request: Message, body: bytes, *, properties: Mapping[str, str] | None = None) -> None:
        """Send the reply to a request, as `rocketlet.Producer.reply` does."""
        _loop.run(self._producer.reply(request, body, properties=properties))

    def resend(self, message: Message, topic: str | None = None) -> SendResult:
        """Send a copy of a received message, as `rocketlet.Producer.resend` does."""
        return _loop.run(self._producer.resend(message, topic))

    @contextmanager
    def transaction(self, topic: str, body: bytes, **options: Unpack[MessageOptions]) -> Iterator[SendResult]:
        """Send a message that consumers get when the block ends without an exception, as `rocketlet.Producer.transaction`
        does. If the block raises, the message is rolled back."""
        block = self._producer.transaction(topic, body, **options)
        half = _loop.run(block.__aenter__())
        try:
            yield half
        except BaseException as error:
            _loop.run(block.__aexit__(type(error), error, error.__traceback__))
            raise
        _loop.run(block.__aexit__(None, None, None))


class Receiver:
    """Common base of the consumers: receiving single messages."""

    _consumer: asynchronous.Consumer | AsyncSharedConsumer | AsyncLiteConsumer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the consumer. Raises what `start` of the asynchronous class raises."""
        _loop.run(self._consumer.start())

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Return the next message. Settle it with `ack`, `retry` or `reject`. Raises TimeoutError."""
        came: list[Message] = []

        async def received() -> Message:
            came.append(await self._consumer.receive(timeout_s=timeout_s))
            return came[0]

        def release() -> None:
            for message in came:
                self._consumer.release(message)

        try:
            return _loop.run(received())
        except BaseException:  # for example from a signal handler, while a message was received
            _loop.soon(release)
            raise

    def ack(self, message: Message) -> None:
        """Acknowledge a message."""
        _loop.run(self._consumer.ack(message))

    def retry(self, message: Message, outcome: RetryLater = RetryLater()) -> None:  # noqa: B008 (it is frozen)
        """Settle a message so that it is redelivered later, as `retry` of the asynchronous class does."""
        _loop.run(self._consumer.retry(message, outcome))

    def reject(self, message: Message, *, reason: str = "") -> None:
        """Settle a message by storing it in the dead-letter topic, with the reason."""
        _loop.run(self._consumer.reject(message, reason=reason))

    def lag(self) -> int:
        """Return the number of messages that are not acknowledged yet, as `lag` of the asynchronous class does."""
        return _loop.run(self._consumer.lag())

    def messages(self, *, timeout_s: float | None = None) -> Iterator[Message]:
        """Iterate over single messages, until none has arrived for `timeout_s` seconds.

        Requesting the next message acknowledges the previous one, unless that is settled already. If `break` or an
        exception ends the loop, the last message is redelivered.
        """
        while True:
            try:
                message = self.receive(timeout_s=timeout_s)
            except TimeoutError:
                return
            try:
                yield message
            except GeneratorExit:
                _loop.soon(partial(self._consumer.release, message))
                raise
            if self._consumer.is_in_hand(message):
                self.ack(message)

    def __iter__(self) -> Iterator[Message]:
        return self.messages()


@takes(ConsumerOptions)
class Consumer(Receiver):
    """The synchronous version of `rocketlet.Consumer`.

    With a handler, a plain function that runs in threads, the consumer calls it until the `with` block ends. Without a
    handler, call `receive`, `messages` or `batches`.
    """

    _consumer: asynchronous.Consumer

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: Callable[[Any], Outcome] | None = None,
        *,
        batch_size: int | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        if "on_assigned" in options:
            options["on_assigned"] = _threaded(options["on_assigned"])
        if "on_revoked" in options:
            options["on_revoked"] = _threaded(options["on_revoked"])

        async def made() -> asynchronous.Consumer:
            if batch_size is None:
                return asynchronous.Consumer(name_server, group, subscriptions, handler, **options)
            return asynchronous.Consumer(name_server, group, subscriptions, handler, batch_size=batch_size, **options)

        self._consumer = _loop.run(made())

    def stop(self) -> None:
        """Wait for running handlers, commit and unregister. Messages that were received and not settled are redelivered.

        Raises ConfigError if a handler calls it, because stopping waits for the handler.
        """
        self._consumer.check_stop()

        async def stopped() -> None:
            self._consumer.release()
            await self._consumer.stop()

        _loop.run(stopped())

    def batches(self, *, timeout_s: float | None = None) -> Iterator[list[Message]]:
        """Iterate over lists of up to `batch_size` messages of one queue, until none has arrived for `timeout_s`
        seconds. The messages of a list are acknowledged as in `messages`."""
        batches = self._consumer.batches()

        async def following() -> list[Message]:
            async with asyncio.timeout(timeout_s):
                return await anext(batches)

        while True:
            try:
                messages = _loop.run(following())
            except (TimeoutError, StopAsyncIteration):
                return
            except BaseException:
                _loop.soon(batches.release)
                raise
            try:
                yield messages
            except GeneratorExit:
                _loop.soon(batches.release)
                raise

    def assignment(self) -> set[Queue]:
        """Return the queues that this member owns now."""
        return self._consumer.assignment()

    def assigned(self, timeout_s: float = 30.0) -> set[Queue]:
        """Wait until this member owns all queues that the last rebalance assigned to it, and return them. Raises
        TimeoutError with the reason."""
        return _loop.run(self._consumer.assigned(timeout_s))

    def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Pause these queues, or all if None, as `rocketlet.Consumer.pause` does."""
        _loop.run(self._consumer.pause(queues))

    def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """Resume these paused queues, or all if None."""
        _loop.run(self._consumer.resume(queues))

    def seek(self, to: SeekPosition, queues: Iterable[Queue] | None = None) -> None:
        """Move the position of queues, as `rocketlet.Consumer.seek` does."""
        _loop.run(self._consumer.seek(to, queues))

    def commit(self) -> None:
        """Commit the offsets of acknowledged messages. Return when the brokers have responded."""
        _loop.run(self._consumer.commit())

    def positions(self) -> dict[Queue, Position]:
        """Return the progress of this member in each of its queues, as `rocketlet.Consumer.positions` does."""
        return _loop.run(self._consumer.positions())


class PopReceiver(Receiver):
    """Common base of SharedConsumer and LiteConsumer."""

    _consumer: AsyncSharedConsumer | AsyncLiteConsumer

    def stop(self) -> None:
        """Wait for running handlers, release messages in flight and unregister. Raises ConfigError if a handler calls
        it."""
        self._consumer.check_stop()
        _loop.run(self._consumer.stop())

    def pause(self) -> None:
        """Pause the consumer, as `pause` of the asynchronous class does."""
        _loop.run(self._consumer.pause())

    def resume(self) -> None:
        """Resume the consumer after a pause."""
        _loop.run(self._consumer.resume())


@takes(SharedOptions)
class SharedConsumer(PopReceiver):
    """The synchronous version of `rocketlet.SharedConsumer`.

    With a handler, a plain function that runs in threads, the consumer calls it until the `with` block ends. Without a
    handler, call `receive` or `messages`.
    """

    _consumer: AsyncSharedConsumer

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: Callable[[Message], Outcome] | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        async def made() -> AsyncSharedConsumer:
            return AsyncSharedConsumer(name_server, group, subscriptions, handler, **options)

        self._consumer = _loop.run(made())


@takes(LiteOptions)
class LiteConsumer(PopReceiver):
    """The synchronous version of `rocketlet.LiteConsumer`.

    With a handler, a plain function that runs in threads, the consumer calls it until the `with` block ends. Without a
    handler, call `receive` or `messages`. `on_taken` is a plain function, too.
    """

    _consumer: AsyncLiteConsumer

    def __init__(
        self,
        name_server: str,
        group: str,
        topic: str,
        handler: Callable[[Message], Outcome] | None = None,
        *,
        lite_topics: Iterable[str] = (),
        **options: Unpack[LiteOptions],
    ) -> None:
        if "on_taken" in options:
            options["on_taken"] = _notifying(options["on_taken"])

        async def made() -> AsyncLiteConsumer:
            return AsyncLiteConsumer(name_server, group, topic, handler, lite_topics=lite_topics, **options)

        self._consumer = _loop.run(made())

    @property
    def lite_topics(self) -> frozenset[str]:
        """The lite topics to which this member is subscribed."""
        return self._consumer.lite_topics

    def subscribe(
        self,
        *lite_topics: str,
        start: LiteStart | None = None,
        offset: int | None = None,
        tail: int | None = None,
    ) -> None:
        """Subscribe to lite topics. Arguments and errors are those of `rocketlet.LiteConsumer.subscribe`."""
        _loop.run(self._consumer.subscribe(*lite_topics, start=start, offset=offset, tail=tail))

    def unsubscribe(self, *lite_topics: str) -> None:
        """Unsubscribe from lite topics. This member keeps their messages that are in flight."""
        _loop.run(self._consumer.unsubscribe(*lite_topics))


Answer = TypeVar("Answer")


class AdminClient:
    """The synchronous version of `rocketlet.AdminClient`, whose methods `call` runs:

    with AdminClient("host:port") as admin:
        print(admin.call(lambda admin: admin.topics()))
    """

    def __init__(self, name_server: str, *, access: Access | None = None) -> None:
        async def made() -> AsyncAdminClient:
            return AsyncAdminClient(name_server, access=access)

        self._admin = _loop.run(made())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        _loop.run(self._admin.close())

    def call(self, action: Callable[[AsyncAdminClient], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the result of a coroutine: `action(admin)`, which gets the `rocketlet.AdminClient` and may call several of
        its methods. Raises what the coroutine raises."""
        return _loop.run(action(self._admin))


AnyReceiver = TypeVar("AnyReceiver", Consumer, SharedConsumer, LiteConsumer)


def receive_any(consumers: Sequence[AnyReceiver], *, timeout_s: float | None = None) -> tuple[AnyReceiver, Message]:
    """Return the first of these consumers that receives a message, and the message. If several have one already, the order
    of the sequence decides. Raises TimeoutError, and what `receive` raises."""
    arrived: list[tuple[AnyReceiver, Message]] = []

    async def receive(consumer: AnyReceiver) -> None:
        if not arrived:
            arrived.append((consumer, await consumer._consumer.receive()))

    async def received() -> tuple[AnyReceiver, Message]:
        waits = [asyncio.create_task(receive(consumer)) for consumer in consumers]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(waits)
        if not arrived:
            for wait in waits:
                if not wait.cancelled():
                    wait.result()
            raise TimeoutError(f"receive_any: no message came in {timeout_s} s")
        release(1)
        return arrived[0]

    def release(kept: int) -> None:
        for consumer, message in arrived[kept:]:
            consumer._consumer.release(message)

    try:
        return _loop.run(received())
    except BaseException:
        _loop.soon(partial(release, 0))
        raise


__all__ = [
    "Access",
    "AdminClient",
    "Consumer",
    "LiteConsumer",
    "Message",
    "Outgoing",
    "Producer",
    "SendResult",
    "SharedConsumer",
    "receive_any",
]
