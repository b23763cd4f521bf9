"""`Rocketlet`: handlers declared with decorators, their dependencies, and the process that runs them."""

from __future__ import annotations

import asyncio
import inspect
import re
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace, UnionType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from .config import HANDLER_CONCURRENCY, PRODUCER_GROUP, check_callable, check_seconds, takes_message
from .consumer import Consumer
from .consuming.handling import Calling, Decode, Outcome, Reject, RetryLater
from .errors import ConfigError, RocketletError, get_logger
from .message import Message, SendResult
from .producer import Producer
from .sending.accumulator import check_topic
from .shared_consumer import SharedConsumer
from .wire.connection import Access

log = get_logger("rocketlet.application")


# ------------------------------------------------------------------------------
# An application: handlers that are declared where they are written, on the classes that there are.
#
#     app = Rocketlet("127.0.0.1:9876")
#
#     @app.subscriber("orders", group="kitchen")
#     @app.publisher("dishes")
#     async def cook(order: Order) -> Dish: ...
#
#     app.run()
#
# Each subscriber is one Consumer, and the application has one Producer. The functions stay as they are, so that a
# test calls them, or runs all of the application on a broker in its memory: `async with app.at(broker.address): ...`.


Function = TypeVar("Function", bound=Callable[..., Any])
Lifespan = Callable[["Rocketlet"], AbstractAsyncContextManager[Any]]


class Health(NamedTuple):
    """`lag`: messages that this process has not handled, or the group, where its members share messages, by group and topics.
    `fault`: why it is not well; empty if it is."""

    is_healthy: bool
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
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}
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

    def asyncapi(self, *, title: str = "Rocketlet application", version: str = "1.0.0") -> dict[str, Any]:
        """Return an AsyncAPI 3.0 document of the application's handlers.

        Topics are channels, each handler is an operation that receives, each publisher one that sends, and models of pydantic
        are schemas.

        Raises ConfigError for what `app.run()` would refuse.
        """
        self._check_declared()
        document = _Document(title, version, self._name_server)
        for subscriber in self._subscribers:
            function = subscriber.handler
            model = _model_of(_first_hint(function, without(function, dependencies_of(function))))
            subscriptions = subscriber.subscriptions
            topics = {subscriptions: "*"} if isinstance(subscriptions, str) else subscriptions
            for topic, expression in topics.items():
                more = {"x-rocketmq-group": subscriber.group, "x-rocketmq-filter": str(expression)}
                document.add("receive", function, topic, model, more)
            for topic, options in self._publishers.get(function, ()):
                sent = _model_of(_hints_of(function).get("return"))
                document.add(
                    "send", function, topic, sent, {"x-rocketmq-tag": options["tag"]} if "tag" in options else {}
                )
        return document.made

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
            given = await resolved(self._wanted, self._app.dependency_overrides, stack, {})
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


# ------------------------------------------------------------------------------
# The argument of an application's handler, as its annotation says: a Message, a model of pydantic, or a list of
# either.


def decode_of(function: Callable[..., Any], decode: Decode[Any] | None, *, takes_batches: bool) -> Decode[Any] | None:
    """The decoder of a handler: the one that is given, or its model's. Raises ConfigError for a handler whose parameters
    are not what it gets."""
    if not callable(function):
        raise ConfigError(f"{function!r} cannot be called; declare a function or `async def` function")
    taken = without(function, dependencies_of(function))
    hint = _first_hint(function, taken)
    is_list = hint is list or get_origin(hint) in (list, Sequence)
    if is_list and not takes_batches:
        raise _odd(function, hint, "without batch_size it gets one message at a time")
    one = next(iter(get_args(hint)), Any) if is_list else hint
    found: Decode[Any] | None = decode or getattr(one, "model_validate_json", None)
    if takes_batches and not is_list and _kind(hint) is not object:
        raise _odd(function, hint, "with batch_size it gets a list")
    if found is None and not issubclass(Message, _kind(one)):
        raise _odd(function, hint, "without decode=... it gets a Message, or a model of pydantic")
    if decode is not None and one is Message:
        raise _odd(function, hint, "with decode it gets what that returns, and a Message as its second parameter")
    return found


def without(handler: Callable[..., Any], wanted: Collection[str]) -> Callable[..., Any]:
    """A function with the parameters of a handler that its consumer gives."""
    signature = inspect.signature(handler)
    kept = [item for name, item in signature.parameters.items() if name not in wanted]

    def stand_in(*arguments: Any) -> None: ...

    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    stand_in.__qualname__ = getattr(handler, "__qualname__", repr(handler))
    return stand_in


def _kind(hint: Any) -> type:
    """The class that a value has; object where it may be of any, or of several."""
    kind = get_origin(hint) or hint
    return kind if isinstance(kind, type) and kind not in (Any, UnionType) else object


def _first_hint(function: Callable[..., Any], taken: Callable[..., Any]) -> Any:
    """Any where a parameter says nothing, or names what only type checkers know."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        return Any
    return hints.get(next(iter(inspect.signature(taken).parameters), ""), Any)


def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}


def _model_of(hint: Any) -> Any:
    """The model of pydantic in a hint: itself, in a list, or one of several kinds; None if there is none."""
    if callable(getattr(hint, "model_json_schema", None)):
        return hint
    return next(filter(None, map(_model_of, get_args(hint))), None)


class _Document:
    """An AsyncAPI document in the making."""

    def __init__(self, title: str, version: str, name_servers: str) -> None:
        hosts = [host.strip() for host in name_servers.split(";") if host.strip()]
        self.made: dict[str, Any] = {
            "asyncapi": "3.0.0",
            "info": {"title": title, "version": version},
            "defaultContentType": "application/json",
            "servers": {
                f"name-server-{number}": {"host": host, "protocol": "rocketmq"} for number, host in enumerate(hosts, 1)
            },
            "channels": {},
            "operations": {},
            "components": {"messages": {}, "schemas": {}},
        }

    def add(self, action: str, function: Callable[..., Any], topic: str, model: Any, more: Mapping[str, str]) -> None:
        """Add an operation. A topic's name may have characters that a key of the document may not."""
        channel = re.sub(r"[^\w-]", "_", topic)
        name = model.__name__ if model is not None else "Bytes"
        made = self.made
        made["channels"].setdefault(channel, {"address": topic, "messages": {}})["messages"][name] = {
            "$ref": f"#/components/messages/{name}"
        }
        made["components"]["messages"].setdefault(name, self._message(name, model))
        operation: dict[str, Any] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"}],
            **more,
        }
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        if summary:
            operation["summary"] = summary
        key = f"{action}_{getattr(function, '__name__', 'handler')}_{channel}"
        while key in made["operations"]:
            key += "_"
        made["operations"][key] = operation

    def _message(self, name: str, model: Any) -> dict[str, Any]:
        if model is None:
            return {"name": name, "contentType": "application/octet-stream", "payload": {"type": "string"}}
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = self.made["components"]["schemas"]
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
        return {"name": name, "payload": {"$ref": f"#/components/schemas/{name}"}}


def _odd(function: Callable[..., Any], hint: Any, reason: str) -> ConfigError:
    said = getattr(hint, "__qualname__", None) if isinstance(hint, type) else None
    name = getattr(function, "__qualname__", repr(function))
    return ConfigError(f"{name}: its first parameter is annotated {said or hint}; {reason}")


# ------------------------------------------------------------------------------
# The dependencies of an application's handler, besides its message: `db: Annotated[Database, Depends(database)]`.
#
# A dependency is a function. Its result is given to the handler; a generator's value is, and the rest of it runs when
# the handler has ended. Dependencies may have dependencies. Each is called once for a message.


@dataclass(frozen=True, slots=True)
class Depends:
    """Beside the type of a parameter, in Annotated. `call`: a function, async or not, or a generator."""

    call: Callable[..., Any]


def dependencies_of(function: Callable[..., Any]) -> dict[str, Depends]:
    """By the name of the parameter. Raises ConfigError for annotations that cannot be read."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:  # names may be known to type checkers alone, or to a function
        texts = map(str, getattr(function, "__annotations__", {}).values())
        if any("Depends" in text for text in texts):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(f"{name}: its annotations cannot be read: {error}; use names of its module") from None
        return {}
    found: dict[str, Depends] = {}
    for name, hint in hints.items():
        depends = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Depends)), None)
        if depends is not None:
            found[name] = depends
    return found


async def resolved(
    wanted: Mapping[str, Depends],
    replaced: Mapping[Callable[..., Any], Callable[..., Any]],
    stack: AsyncExitStack,
    known: dict[Callable[..., Any], Any],
) -> dict[str, Any]:
    """The values by parameter. `replaced`: what a test gives in place of a dependency. `stack` ends the generators."""
    values: dict[str, Any] = {}
    for name, depends in wanted.items():
        call = replaced.get(depends.call, depends.call)
        if call not in known:
            below = await resolved(dependencies_of(call), replaced, stack, known)
            known[call] = await _value(call, below, stack)
        values[name] = known[call]
    return values


async def _value(call: Callable[..., Any], arguments: dict[str, Any], stack: AsyncExitStack) -> Any:
    if inspect.isasyncgenfunction(call):
        whole: Callable[..., AsyncIterator[Any]] = call
        return await stack.enter_async_context(asynccontextmanager(whole)(**arguments))
    if inspect.isgeneratorfunction(call):
        part: Callable[..., Iterator[Any]] = call
        return stack.enter_context(contextmanager(part)(**arguments))
    value = call(**arguments)
    return await value if inspect.isawaitable(value) else value


# ------------------------------------------------------------------------------
# `stop_signal`: a service that stops gracefully, in one line.


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def stop_signal() -> signal.Signals:
    """Waits until the process is told to stop, by SIGTERM (systemd, Docker, Kubernetes) or SIGINT (Ctrl-C). Returns which.

        async with Consumer(...):
            await stop_signal()

    Leaving the block then lets running handlers finish, commits offsets and hands over queues. A second signal ends the
    process at once. On Windows, where loops have no signal handlers, this never returns, and Ctrl-C raises KeyboardInterrupt.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def tell(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    added: list[signal.Signals] = []
    try:
        for number in SIGNALS:
            loop.add_signal_handler(number, tell, number)
            added.append(number)
    except NotImplementedError:
        pass
    try:
        return await came
    finally:
        for number in added:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
