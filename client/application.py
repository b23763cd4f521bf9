"""`Rocketlet`: handlers declared with decorators, their dependencies, and the process that runs them."""

from __future__ import annotations

import asyncio
import inspect
import re
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace, UnionType
from typing import Any, Final, Literal, NamedTuple, TypeVar, Unpack, get_args, get_origin, get_type_hints, overload

import orjson

from .config import (
    HANDLER_CONCURRENCY,
    PRODUCER_GROUP,
    check_callable,
    check_seconds,
    takes_message,
    unexpected_of_send,
)
from .consumer import Consumer
from .consuming.handling import Calling, Decode, Outcome, Reject, RetryLater
from .errors import ConfigError, RocketletError, get_logger
from .lite_consumer import LiteConsumer
from .message import Message, SendResult
from .options import ConsumerOptions, LiteOptions, SharedOptions
from .producer import Producer
from .sending.accumulator import check_topic
from .sending.options import SendOptions
from .shared_consumer import SharedConsumer
from .wire.connection import Access

log = get_logger("rocketlet.application")


# ------------------------------------------------------------------------------
# An application: handlers that are declared with decorators and run by Consumer, SharedConsumer, LiteConsumer and Producer.
#
#     app = Rocketlet("127.0.0.1:9876")
#
#     @app.subscriber("orders", group="kitchen")
#     @app.publisher("dishes")
#     async def cook(order: Order) -> Dish: ...
#
#     app.run()
#
# Each subscriber has its own consumer, and the application has one Producer. The decorators return the functions
# unchanged, so that a test can call them, or run the whole application on a broker in its process: `async with
# app.at(broker.address): ...`.


Function = TypeVar("Function", bound=Callable[..., Any])
_AnyConsumer = Consumer | SharedConsumer | LiteConsumer
Lifespan = Callable[["Rocketlet"], AbstractAsyncContextManager[Any]]


class Health(NamedTuple):
    """The result of a health check.

    Attributes:
        is_healthy: True if the application is running, and the lag of every subscriber could be queried.
        lag: the number of unacknowledged messages by "group: topics": of this process's queues, or of the whole group if
            its members share messages.
        fault: the reason why the application is not healthy; empty if it is.
    """

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
    lite_topics: tuple[str, ...] | None
    decode: Decode[Any] | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        topics = self.subscriptions if isinstance(self.subscriptions, str) else ", ".join(self.subscriptions)
        return f"{self.group}: {topics}"


class Rocketlet:
    """An application of subscribers and publishers.

    - `name_server`, `access`: the cluster's name servers, and the account and TLS settings.
    - `group`: the group of the producer.
    - `encode`: converts results of handlers and arguments of `publish` to bodies. Default: bytes unchanged, str as
      UTF-8, and models of pydantic as JSON.
    - `lifespan`: an async context manager, `@asynccontextmanager async def lifespan(app)`, that is entered before the
      subscribers start and left after they have stopped. The context manager can store objects in `app.state`.
    - `options`: further options of the producer.

    Call `app.run()`, or use `async with app` if another program runs the event loop.
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
        """Functions that a test uses instead of dependencies, by the dependency's function."""
        self._name_server = name_server
        self._group = group
        self._access = access
        self._encode = encode or _default_encode
        self._lifespan = lifespan
        self._options = options
        self._subscribers: list[_Subscriber] = []
        self._publishers: dict[Callable[..., Any], list[tuple[str, SendOptions]]] = {}
        self._stack: AsyncExitStack | None = None
        self._producer: Producer[Any] | None = None
        self._consumers: dict[str, _AnyConsumer] = {}
        self._new_producer(name_server)  # so that invalid arguments raise here instead of at the start

    # Declarations

    @overload
    def subscriber(
        self,
        subscriptions: Mapping[str, str] | str,
        *,
        group: str,
        timeout_s: float | None = None,
        sharing: Literal[False] = False,
        decode: Decode[Any] | None = None,
        batch_size: int | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Callable[[Function], Function]: ...

    @overload
    def subscriber(
        self,
        subscriptions: Mapping[str, str] | str,
        *,
        group: str,
        timeout_s: float | None = None,
        sharing: Literal[True],
        decode: Decode[Any] | None = None,
        **options: Unpack[SharedOptions],
    ) -> Callable[[Function], Function]: ...

    @overload
    def subscriber(
        self,
        subscriptions: str,
        *,
        group: str,
        timeout_s: float | None = None,
        lite_topics: Iterable[str],
        decode: Decode[Any] | None = None,
        **options: Unpack[LiteOptions],
    ) -> Callable[[Function], Function]: ...

    def subscriber(
        self,
        subscriptions: Mapping[str, str] | str,
        *,
        group: str,
        timeout_s: float | None = None,
        sharing: bool = False,
        lite_topics: Iterable[str] | None = None,
        decode: Decode[Any] | None = None,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Declare a function as the handler of a topic, or of a mapping from topics to filters, as a member of a group.

        The function gets the `Message`. With `decode`, or if its first parameter is a model of pydantic, it gets the
        decoded body instead, and the message as its second parameter if it has one.

        - `timeout_s`: the timeout of an `async` handler in seconds, after which it is cancelled and has failed with
          TimeoutError.
        - `sharing`: True to use a SharedConsumer.
        - `lite_topics`: use a LiteConsumer for lite topics of this parent topic, which is subscribed to these at the start,
          `()` for none. `lite_consumer` returns the consumer, to subscribe to others at run time.
        - `decode`: converts a body to the handler's argument.
        - `options`: further options of the consumer, such as `concurrency` or `batch_size`.

        Raises ConfigError for invalid arguments, and for a handler whose parameters do not match.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        if lite_topics is not None:
            _check_lite(subscriptions, lite_topics, sharing=sharing)

        def declared(function: Function) -> Function:
            if timeout_s is not None and not inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"timeout_s: {function.__qualname__} runs in a thread, which cannot be ended; use `async def`"
                )
            found = decode_of(function, decode, takes_batches=options.get("batch_size") is not None)
            names = None if lite_topics is None else tuple(lite_topics)
            subscriber = _Subscriber(function, subscriptions, group, timeout_s, sharing, names, found, dict(options))
            taken = without(function, dependencies_of(function))
            self._new_consumer(subscriber, self._name_server, taken)  # so that invalid options raise here
            self._subscribers.append(subscriber)
            return function

        return declared

    def publisher(self, topic: str, **options: Unpack[SendOptions]) -> Callable[[Function], Function]:
        """Declare that a handler's result is sent to a topic before its message is acknowledged.

        The results None, RetryLater and Reject are not sent.

        - `options`: further options of `Producer.send`, such as `tag`.

        Raises TypeError for unknown options, and MessageIllegal for an invalid topic.
        """
        check_topic(topic)
        if unknown := {name: value for name, value in options.items() if name not in SendOptions.__annotations__}:
            raise unexpected_of_send(unknown, SendOptions.__annotations__)

        def declared(function: Function) -> Function:
            self._publishers.setdefault(function, []).append((topic, options))
            return function

        return declared

    async def publish(self, topic: str, value: Any, **options: Unpack[SendOptions]) -> SendResult:
        """Send a message as `Producer.send` does: bytes, a str, a dict, list or model of pydantic as JSON, or
        what the application's `encode` accepts. Raises ConfigError if the application is not running."""
        return await self.producer.send(topic, value, **options)

    @property
    def producer(self) -> Producer[Any]:
        """The application's producer. Raises ConfigError if the application is not running."""
        if self._producer is None:
            raise ConfigError("this application is not running; use `async with app`, or app.run()")
        return self._producer

    def lite_consumer(self, group: str) -> LiteConsumer:
        """Return the consumer of a subscriber of lite topics, to subscribe to lite topics while it runs. Raises ConfigError
        if the application is not running, or has no such subscriber of this group."""
        for subscriber in self._subscribers:
            consumer = self._consumers.get(subscriber.name)
            if subscriber.group == group and isinstance(consumer, LiteConsumer):
                return consumer
        raise ConfigError(f"group: no subscriber with lite_topics=... of the group {group} is running")

    def asyncapi(self, *, title: str = "Rocketlet application", version: str = "1.0.0") -> dict[str, Any]:
        """Return an AsyncAPI 3.0 document of the application's handlers.

        Topics become channels, handlers become receive operations, publishers become send operations, and models of
        pydantic become schemas.

        Raises ConfigError for declarations for which `app.run()` would raise it.
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
                sent, tag = _model_of(_hints_of(function).get("return")), options.get("tag")
                document.add("send", function, topic, sent, {} if tag is None else {"x-rocketmq-tag": tag})
        return document.made

    # Running

    def run(self) -> None:
        """Run until SIGTERM or Ctrl-C, then wait for running handlers, up to their consumer's `drain_s`, commit and stop."""
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
        """Run the application on another cluster, such as that of a test, while the block runs. The application then
        receives the messages that the block sends to that cluster."""
        await self._start(name_server)
        try:
            yield self
        finally:
            await self.__aexit__()

    async def _start(self, name_server: str) -> None:
        if self._stack is not None:
            raise ConfigError("this application is running already; stop it before it is started again")
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
        """Raise ConfigError if two subscribers have the same group, or a publisher is not also a subscriber."""
        for item, other in combinations(self._subscribers, 2):
            if item.group == other.group:
                raise ConfigError(
                    f"group: {item.name} and {other.name} have the same group {item.group}; give each its own group"
                )
        handlers = {item.handler for item in self._subscribers}
        for function in self._publishers.keys() - handlers:
            raise ConfigError(
                f"publisher: {function.__qualname__} is not a subscriber; declare it with @app.subscriber, too"
            )

    def _forget(self) -> None:
        self._producer = None
        self._consumers.clear()

    def _new_producer(self, name_server: str) -> Producer[Any]:
        return Producer(name_server, self._group, access=self._access, encode=self._encode, **self._options)

    async def _consumer(self, subscriber: _Subscriber, name_server: str, stack: AsyncExitStack) -> _AnyConsumer:
        call = _Call(self, subscriber, self._publishers.get(subscriber.handler, ()))
        stack.callback(call.stop)
        handler = call.with_message if call.takes_message else call.alone
        return await stack.enter_async_context(self._new_consumer(subscriber, name_server, handler))

    def _new_consumer(self, subscriber: _Subscriber, name_server: str, handler: Callable[..., Any]) -> _AnyConsumer:
        kind: Any = SharedConsumer if subscriber.sharing else Consumer
        options = subscriber.options
        if subscriber.lite_topics is not None:
            kind, options = LiteConsumer, {**options, "lite_topics": subscriber.lite_topics}
        consumer: _AnyConsumer = kind(
            name_server, subscriber.group, subscriber.subscriptions, handler,
            decode=subscriber.decode, access=self._access, **options,
        )  # fmt: skip
        return consumer

    async def health(self) -> Health:
        """Query the lag of the subscribers one by one, and return the result of the health check. A RocketletError ends
        the check, and becomes the `fault` of the result."""
        lag: dict[str, int] = {}
        try:
            for name, consumer in self._consumers.items():
                lag[name] = await consumer.lag()
        except RocketletError as error:
            return Health(False, lag, str(error))
        return Health(self._producer is not None, lag, "" if self._producer is not None else "it is not running")


def _check_lite(subscriptions: Mapping[str, str] | str, lite_topics: Iterable[str], *, sharing: bool) -> None:
    """Raise ConfigError for a subscriber of lite topics that cannot be one."""
    if not isinstance(subscriptions, str):
        raise ConfigError(f"lite_topics: expected one parent topic, got the subscriptions {dict(subscriptions)!r}")
    if sharing:
        raise ConfigError("sharing and lite_topics conflict; members of a lite group share lite topics anyway")
    if isinstance(lite_topics, str):
        raise ConfigError(f"lite_topics: expected names, got the text {lite_topics!r}; give [{lite_topics!r}]")


class _Call:
    """Calls a handler for its consumer: resolves its dependencies, limits its time, and publishes its result."""

    def __init__(self, app: Rocketlet, subscriber: _Subscriber, publishers: Sequence[tuple[str, SendOptions]]) -> None:
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
                raise TimeoutError(f"the handler did not end within its timeout_s of {self._timeout_s:g} s") from None
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
                raise TypeError(
                    f"the handler returned {result!r:.200}; add @app.publisher(topic) to send it, or return None"
                )
            for topic, options in self._publishers:
                await self._app.publish(topic, result, **options)
            return None

    def stop(self) -> None:
        if self._in_thread is not None:
            self._in_thread.stop()


def _default_encode(value: Any) -> bytes | str:
    """Return the body of a value: a model of pydantic, a dict or a list as JSON, bytes and str unchanged."""
    dump = getattr(value, "model_dump_json", None)
    if callable(dump):
        made: bytes | str = dump()
        return made
    if isinstance(value, bytes | str):
        return value
    if isinstance(value, dict | list):
        return orjson.dumps(value)
    raise TypeError(
        f"value: got a {type(value).__name__}; expected bytes, str, dict, list or a model of pydantic, or give the "
        "application `encode`"
    )


# ------------------------------------------------------------------------------
# The argument of an application's handler, which its annotation determines: a Message, a model of pydantic, or a list of
# either.


def decode_of(function: Callable[..., Any], decode: Decode[Any] | None, *, takes_batches: bool) -> Decode[Any] | None:
    """Return the decoder of a handler: `decode`, or that of the model in its annotation; None if it gets messages.

    Raises ConfigError for a handler whose parameters do not match the arguments that it would get.
    """
    if not callable(function):
        raise ConfigError(f"subscriber: {function!r} cannot be called; declare a function or `async def` function")
    taken = without(function, dependencies_of(function))
    hint = _first_hint(function, taken)
    is_list = hint is list or get_origin(hint) in (list, Sequence)
    if is_list and not takes_batches:
        raise _mismatch(function, hint, "without batch_size it gets one message at a time")
    one = next(iter(get_args(hint)), Any) if is_list else hint
    found: Decode[Any] | None = decode or getattr(one, "model_validate_json", None)
    if takes_batches and not is_list and _kind(hint) is not object:
        raise _mismatch(function, hint, "with batch_size it gets a list")
    if found is None and not issubclass(Message, _kind(one)):
        raise _mismatch(function, hint, "without decode=... it gets a Message, or a model of pydantic")
    if decode is not None and one is Message:
        raise _mismatch(function, hint, "with decode it gets the decoded body, and a Message as its second parameter")
    return found


def without(handler: Callable[..., Any], wanted: Collection[str]) -> Callable[..., Any]:
    """Return a function with the signature of a handler, without its dependencies (`wanted`): the parameters that the
    consumer passes."""
    signature = inspect.signature(handler)
    kept = [item for name, item in signature.parameters.items() if name not in wanted]

    def stand_in(*arguments: Any) -> None: ...

    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    stand_in.__qualname__ = getattr(handler, "__qualname__", repr(handler))
    return stand_in


def _kind(hint: Any) -> type:
    """Return the class that an annotation names; object if it allows any class, or several."""
    kind = get_origin(hint) or hint
    return kind if isinstance(kind, type) and kind not in (Any, UnionType) else object


def _first_hint(function: Callable[..., Any], taken: Callable[..., Any]) -> Any:
    """Return the annotation of the first parameter; Any if it has none, or if the annotations cannot be evaluated."""
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
    """Return the pydantic model in an annotation, which may be the model, a list of it or a union; None if there is
    none."""
    if callable(getattr(hint, "model_json_schema", None)):
        return hint
    return next(filter(None, map(_model_of, get_args(hint))), None)


class _Document:
    """Builder of an AsyncAPI document."""

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
        """Add an operation."""
        channel = re.sub(r"[^\w-]", "_", topic)  # a key allows fewer characters than a topic's name
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


def _mismatch(function: Callable[..., Any], hint: Any, reason: str) -> ConfigError:
    shown = getattr(hint, "__qualname__", None) if isinstance(hint, type) else None
    name = getattr(function, "__qualname__", repr(function))
    return ConfigError(f"{name}: its first parameter is annotated {shown or hint}; {reason}")


# ------------------------------------------------------------------------------
# The dependencies of an application's handler, besides its message: `db: Annotated[Database, Depends(database)]`.
#
# A dependency is a function whose result is passed to the handler. If it is a generator, the yielded value is passed,
# and the rest of the generator runs after the handler has ended. Dependencies may have dependencies. Each is called once
# per handler call.


@dataclass(frozen=True, slots=True)
class Depends:
    """A marker in Annotated that makes a parameter a dependency.

    - `call`: a function or generator function, async or not, that provides the value.
    """

    call: Callable[..., Any]


def dependencies_of(function: Callable[..., Any]) -> dict[str, Depends]:
    """Return the dependencies of a function by parameter. Raises ConfigError if its annotations have dependencies and
    cannot be evaluated."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:  # a name may be imported for type checkers only, or local to a function
        texts = map(str, getattr(function, "__annotations__", {}).values())
        if any("Depends" in text for text in texts):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"{name}: its annotations cannot be evaluated: {error}; use names of its module"
            ) from None
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
    """Call dependencies, and return their values by parameter.

    Args:
        replaced: functions to call instead of dependencies' functions.
        stack: gets the generators, and runs the rest of them when it is closed.
        known: the results of dependencies that were called already, by function.
    """
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
# `stop_signal`: lets a service stop gracefully.


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def stop_signal() -> signal.Signals:
    """Wait for SIGTERM (from systemd, Docker, Kubernetes) or SIGINT (Ctrl-C), and return the signal.

        async with Consumer(...):
            await stop_signal()

    Leaving the block then waits for running handlers, up to the consumer's `drain_s`, commits offsets and releases queues.
    A second signal acts as it did before this call: SIGTERM ends the process, and Ctrl-C cancels the main task of
    `asyncio.run`. On Windows, where event loops have no signal handlers, this never returns, and Ctrl-C raises
    KeyboardInterrupt.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def on_signal(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    added: list[signal.Signals] = []
    try:
        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
            added.append(number)
    except NotImplementedError:
        pass
    try:
        return await came
    finally:
        for number in added:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
