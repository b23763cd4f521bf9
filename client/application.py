"""An application: handlers that are declared where they are written, on the classes that there are.

    app = Rocketlet("127.0.0.1:9876")

    @app.subscriber("orders", group="kitchen")
    @app.publisher("dishes")
    async def cook(order: Order) -> Dish: ...

    app.run()

Each subscriber is one Consumer, and the application has one Producer. The functions stay as they are, so that a test calls
them, or runs all of the application on a broker in its memory: `async with app.at(broker.address): ...`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from .annotations import decode_of, without
from .arguments import check_callable, check_seconds, takes_message
from .config import HANDLER_CONCURRENCY, PRODUCER_GROUP
from .consumer import Consumer
from .consuming.calling import Calling
from .consuming.decoding import Decode
from .consuming.handling import Outcome, Reject, RetryLater
from .dependencies import Depends, dependencies_of, resolved
from .errors import ConfigError, RocketletError
from .log import get_logger
from .message import Message, SendResult
from .producer import Producer
from .sending.outgoing import check_topic
from .shared_consumer import SharedConsumer
from .signals import stop_signal
from .wire.access import Access

log = get_logger("rocketlet.application")

Function = TypeVar("Function", bound=Callable[..., Any])
Lifespan = Callable[["Rocketlet"], AbstractAsyncContextManager[Any]]


class Health(NamedTuple):
    """`lag`: messages that this process has not handled, or the group, where its members share messages, by group and topics.
    `fault`: why it is not well; empty if it is."""

    is_well: bool
    lag: Mapping[str, int]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Subscriber:
    handler: Callable[..., Any]
    subscriptions: Mapping[str, str] | str
    group: str
    timeout_s: float | None
    sharing: bool
    decode: Decode[Any] | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        topics = self.subscriptions if isinstance(self.subscriptions, str) else ", ".join(self.subscriptions)
        return f"{self.group}: {topics}"


class Rocketlet:
    """An application of subscribers and publishers.

    - `name_server`, `access`: the cluster. `group`: the producer's.
    - `encode`: makes bytes of what handlers return and `publish` gets. Default: bytes as they are, text in UTF-8, and
      models of pydantic as JSON.
    - `lifespan`: `@asynccontextmanager async def lifespan(app)`, around all subscribers; `app.state` is for what it makes.
    - `options` of the producer.

    Use `app.run()`, or `async with app` where another program runs the event loop.
    """

    def __init__(
        self,
        name_server: str = "127.0.0.1:9876",
        *,
        group: str = PRODUCER_GROUP,
        access: Access | None = None,
        encode: Callable[[Any], bytes | str] | None = None,
        lifespan: Lifespan | None = None,
        **options: Any,
    ) -> None:
        check_callable("lifespan", lifespan, "the application")
        self.state = SimpleNamespace()
        self.replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
        """In a test: functions in place of dependencies."""
        self._name_server = name_server
        self._group = group
        self._access = access
        self._encode = encode or _plainly_encoded
        self._lifespan = lifespan
        self._options = options
        self._subscribers: list[_Subscriber] = []
        self._publishers: dict[Callable[..., Any], list[tuple[str, dict[str, Any]]]] = {}
        self._stack: AsyncExitStack | None = None
        self._producer: Producer[Any] | None = None
        self._consumers: dict[str, Consumer | SharedConsumer] = {}
        self._new_producer(name_server)  # raises for mistakes here, and not at the start

    # Declaring

    def subscriber(
        self,
        subscriptions: Mapping[str, str] | str,
        *,
        group: str,
        timeout_s: float | None = None,
        sharing: bool = False,
        decode: Decode[Any] | None = None,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """The function handles messages of a topic, or of topics with their filters, as a member of a group.

        It gets the `Message`; with `decode`, or if its first parameter is a model of pydantic, the value, and the message
        as a second parameter if it has one. `timeout_s` ends an `async` handler that takes longer; its message is
        tried again. `sharing`: as a SharedConsumer. `options`: of the consumer, such as `concurrency` or `batch_size`.

        Raises ConfigError for mistakes in any of these, and for a handler with parameters that it would not be given.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)

        def declared(function: Function) -> Function:
            if timeout_s is not None and not inspect.iscoroutinefunction(function):
                raise ConfigError(f"timeout_s: {function.__qualname__} runs in a thread, which cannot be ended")
            found = decode_of(function, decode, takes_batches=options.get("batch_size") is not None)
            subscriber = _Subscriber(function, subscriptions, group, timeout_s, sharing, found, dict(options))
            taken = without(function, dependencies_of(function))
            self._new_consumer(subscriber, self._name_server, taken)  # raises for mistakes here, and not at the start
            self._subscribers.append(subscriber)
            return function

        return declared

    def publisher(self, topic: str, **options: Any) -> Callable[[Function], Function]:
        """The function's result is sent to a topic before its message is acknowledged. None, RetryLater and Reject are not
        sent. `options`: of `Producer.send`, such as `tag`. Raises ConfigError for others, and MessageIllegal for a topic that
        cannot be."""
        check_topic(topic)
        odd = sorted(options.keys() - inspect.signature(Producer.send).parameters.keys())
        if odd:
            raise ConfigError(f"publisher: {odd[0]} is not an option of Producer.send")

        def declared(function: Function) -> Function:
            self._publishers.setdefault(function, []).append((topic, dict(options)))
            return function

        return declared

    async def publish(self, topic: str, value: Any, **options: Any) -> SendResult:
        """Sends as `Producer.send` does. Raises ConfigError if the application does not run."""
        return await self.producer.send(topic, value, **options)

    @property
    def producer(self) -> Producer[Any]:
        if self._producer is None:
            raise ConfigError("this application does not run; use `async with app`, or app.run()")
        return self._producer

    # Running

    def run(self) -> None:
        """Runs until SIGTERM or Ctrl-C, then lets handlers end, commits and leaves."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with self:
            log.info("application_runs", subscribers=len(self._subscribers), name_server=self._name_server)
            await stop_signal()

    async def __aenter__(self) -> Rocketlet:
        await self._start(self._name_server)
        return self

    async def __aexit__(self, *exception: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    @asynccontextmanager
    async def at(self, name_server: str) -> AsyncIterator[Rocketlet]:
        """Runs it on another cluster, such as a test's. It receives messages that are sent in the block."""
        await self._start(name_server)
        try:
            yield self
        finally:
            await self.__aexit__()

    async def _start(self, name_server: str) -> None:
        if self._stack is not None:
            raise ConfigError("this application runs already")
        self._check_declared()
        async with AsyncExitStack() as stack:
            self._producer = await stack.enter_async_context(self._new_producer(name_server))
            stack.callback(self._forget)
            if self._lifespan is not None:
                await stack.enter_async_context(self._lifespan(self))
            for subscriber in self._subscribers:
                self._consumers[subscriber.name] = await self._consumer(subscriber, name_server, stack)
            self._stack = stack.pop_all()

    def _check_declared(self) -> None:
        """A group has one subscription, and a publisher that handles nothing would send nothing."""
        for item, other in combinations(self._subscribers, 2):
            if item.group == other.group:
                raise ConfigError(
                    f"two subscribers are of the group {item.group}, {item.name} and {other.name}; give one another group"
                )
        handlers = {item.handler for item in self._subscribers}
        for function in self._publishers.keys() - handlers:
            raise ConfigError(f"publisher: {function.__qualname__} handles nothing; declare it as a subscriber, too")

    def _forget(self) -> None:
        self._producer = None
        self._consumers.clear()

    def _new_producer(self, name_server: str) -> Producer[Any]:
        return Producer(name_server, self._group, access=self._access, encode=self._encode, **self._options)

    async def _consumer(
        self, subscriber: _Subscriber, name_server: str, stack: AsyncExitStack
    ) -> Consumer | SharedConsumer:
        call = _Call(self, subscriber, self._publishers.get(subscriber.handler, ()))
        stack.callback(call.stop)
        handler = call.with_message if call.takes_message else call.alone
        return await stack.enter_async_context(self._new_consumer(subscriber, name_server, handler))

    def _new_consumer(
        self, subscriber: _Subscriber, name_server: str, handler: Callable[..., Any]
    ) -> Consumer | SharedConsumer:
        kind: Any = SharedConsumer if subscriber.sharing else Consumer
        consumer: Consumer | SharedConsumer = kind(
            name_server, subscriber.group, subscriber.subscriptions, handler,
            decode=subscriber.decode, access=self._access, **subscriber.options,
        )  # fmt: skip
        return consumer

    async def health(self) -> Health:
        """For a health check: whether the brokers can be asked how far this process is. Never raises RocketletError."""
        lag: dict[str, int] = {}
        try:
            for name, consumer in self._consumers.items():
                lag[name] = await consumer.lag()
        except RocketletError as error:
            return Health(False, lag, str(error))
        return Health(self._producer is not None, lag, "" if self._producer is not None else "it does not run")


class _Call:
    """A handler as its consumer calls it: with its dependencies, its time, and its publishers."""

    def __init__(
        self, app: Rocketlet, subscriber: _Subscriber, publishers: Sequence[tuple[str, dict[str, Any]]]
    ) -> None:
        self._app = app
        self._handler = subscriber.handler
        self._timeout_s = subscriber.timeout_s
        self._publishers = publishers
        self._wanted = dependencies_of(subscriber.handler)
        self.takes_message = subscriber.decode is not None and takes_message(without(subscriber.handler, self._wanted))
        self._in_thread: Calling | None = None
        if not inspect.iscoroutinefunction(subscriber.handler):
            self._in_thread = Calling(
                lambda call: call(), int(subscriber.options.get("concurrency", HANDLER_CONCURRENCY)), ()
            )

    async def with_message(self, value: Any, message: Message) -> Outcome:
        return await self._called(value, message)

    async def alone(self, value: Any) -> Outcome:
        return await self._called(value)

    async def _called(self, *arguments: Any) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._handled(*arguments)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"the handler took longer than its timeout_s, {self._timeout_s:g} s") from None
            raise

    async def _handled(self, *arguments: Any) -> Outcome:
        async with AsyncExitStack() as stack:
            given = await resolved(self._wanted, self._app.replaced, stack, {})
            if self._in_thread is not None:
                result = await self._in_thread.call(lambda: self._handler(*arguments, **given))
            else:
                result = await self._handler(*arguments, **given)
            if result is None or isinstance(result, RetryLater | Reject):
                return result
            if not self._publishers:
                raise TypeError(f"the handler returned {result!r:.200}; @app.publisher(topic) would send it")
            for topic, options in self._publishers:
                await self._app.publish(topic, result, **options)
            return None

    def stop(self) -> None:
        if self._in_thread is not None:
            self._in_thread.stop()


def _plainly_encoded(value: Any) -> bytes | str:
    dump = getattr(value, "model_dump_json", None)
    made: bytes | str = dump() if callable(dump) else value
    return made


__all__ = ["Depends", "Health", "Rocketlet"]
