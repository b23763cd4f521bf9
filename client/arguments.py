"""Checks the arguments of a new client before anything begins. Each function raises ConfigError, which names the wrong
argument and the allowed values.

An option is declared once, as a line of a TypedDict whose type is annotated with its `Option`. Type checkers read the
type there; `chosen` takes defaults and checks from it, and `takes` makes the signature and the docstring of the client.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from textwrap import fill
from typing import Any, Final, TypeVar, cast

from ..protocol import names
from ..protocol.queue import Queue
from ..protocol.subscription import SQL92, TAG, Sql, Subscription, SubscriptionError, parse_subscription
from .config import (
    EARLIEST_MS,
    MAX_BATCH_SIZE,
    MAX_BATCH_WAIT_S,
    MAX_HELD_S,
    MAX_INT,
    MAX_INVISIBLE_S,
    MAX_LONG,
    MAX_NAME_SERVERS,
    MIN_INVISIBLE_S,
    PullLimits,
)
from .errors import ConfigError

_CLIENT_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]").fullmatch

ArgumentCheck = Callable[[str, Any], None]
"""Called with an argument's name and value."""
Given = TypeVar("Given")
Client = TypeVar("Client", bound=type)


@dataclass(frozen=True, slots=True)
class Option:
    """`check(name, value)` raises ConfigError. `text` says what the option is for; the reference prints it."""

    text: str
    default: Any
    check: ArgumentCheck


def options_of(kind: Any) -> Mapping[str, Option]:
    """The options that a TypedDict declares, in a module whose annotations are values, not text."""
    return {name: hint.__metadata__[0] for name, hint in kind.__annotations__.items()}


def chosen(kind: type[Given], given: Mapping[str, Any]) -> Given:
    """The value of each option: as given, checked, or its default. Raises ConfigError, and TypeError for an unknown one."""
    options = options_of(kind)
    for name in given:
        if name not in options:
            raise TypeError(f"unexpected keyword argument {name!r}; the options are {', '.join(options)}")
    found = {name: given.get(name, option.default) for name, option in options.items()}
    for name, option in options.items():
        option.check(name, found[name])
    return cast("Given", found)


def takes(kind: type) -> Callable[[Client], Client]:
    """Completes the signature and the docstring of a class whose `__init__` takes the options as `**options`."""

    def completed(client: Client) -> Client:
        made: Any = client.__init__  # type: ignore[misc]
        signature = inspect.signature(made)
        named = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        for name, option in options_of(kind).items():
            named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default))
        made.__signature__ = signature.replace(parameters=named)
        if client.__doc__ is not None:  # there is none with python -OO
            texts = [f"- `{name}`: {option.text}" for name, option in options_of(kind).items()]
            lines = [fill(text, 120, initial_indent="    ", subsequent_indent="      ") for text in texts]
            ends_with_list = "\n    - `" in client.__doc__
            client.__doc__ = "\n".join((client.__doc__.rstrip(), *([] if ends_with_list else [""]), *lines, "    "))
        return client

    return completed


def parse_addresses(text: Any) -> list[str]:
    """The name servers of `host:port;host:port`."""
    if not isinstance(text, str):
        raise ConfigError(f"name_server: {text!r} is not a text; give 'host:port', several separated by ';'")
    addresses = [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not _HOST(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"name_server: {address!r} is not host:port, such as 127.0.0.1:9876")
    if not addresses or len(addresses) > MAX_NAME_SERVERS:
        raise ConfigError(f"name_server: {len(addresses)} addresses given; 1 to {MAX_NAME_SERVERS} are needed")
    return addresses


def parse_place(text: str, topic: str) -> tuple[Queue, int]:
    """The queue and the offset of `BROKER:QUEUE:OFFSET`."""
    broker, *numbers = text.rsplit(":", 2)
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(f"{text[:80]!r} is not a place; use BROKER:QUEUE:OFFSET, such as broker-a:0:1234")
    queue_id, offset = map(int, numbers)
    return Queue(topic, broker, queue_id), offset


def check_group(group: Any) -> None:
    fault = names.group_fault(group) if isinstance(group, str) else f"{group!r} is not a text"
    if fault:
        raise ConfigError(f"group: {fault}")


def check_client_name(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and _CLIENT_NAME(value)):
        raise ConfigError(f"{name}: {value!r} is not a name of up to 64 letters, digits, and . _ -")


def check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise ConfigError(f"{name}: {value!r} is not {allowed}")


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False, most: float = math.inf) -> None:
    """`most` tells seconds from milliseconds, in which other clients take most times."""
    if type(value) not in (int, float) or not (value > 0 or (may_be_zero and value == 0)):
        raise ConfigError(f"{name}: {value!r} is not a number of seconds {'from' if may_be_zero else 'above'} 0")
    if value > most:
        raise ConfigError(f"{name}: {value!r} is more than {most:.0f} seconds; for milliseconds give {value / 1000:g}")


def check_end(name: str, start: Any) -> None:
    """Checks where a group begins whose members share messages."""
    if start not in ("last", "first"):
        raise ConfigError(f"{name}: {start!r} is neither 'last' nor 'first'; a time suits a Consumer only")


def check_invisible(name: str, value: Any) -> None:
    check_seconds(name, value, most=MAX_HELD_S)
    if value < MIN_INVISIBLE_S:
        raise ConfigError(f"{name}: {value!r} is less than {MIN_INVISIBLE_S:.0f} second")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} is neither True nor False")


def check_delay(delay: Any, name: str = "delay") -> None:
    """The seconds after which a message comes again; None for the delay of its level."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= MAX_INVISIBLE_S):
        raise ConfigError(f"{name}: {delay!r} is not a time from 0 to {MAX_INVISIBLE_S / 3600:.0f} hours")


def check_callable(name: str, value: Any, *takes: str) -> None:
    """`takes` names its argument, such as "a message"."""
    if value is None:
        return
    if not callable(value):
        raise ConfigError(f"{name}: {value!r} cannot be called; give a function or `async def` function")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some that are written in C say nothing
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        called = getattr(value, "__qualname__", repr(value))
        raise ConfigError(f"{name}: {called}{signature} is called with {' and '.join(takes)}: {error}") from None


def takes_message(handler: Callable[..., Any]) -> bool:
    """Whether a handler of decoded bodies wants the message, too: `async def cook(order, message)`."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):  # some that are written in C say nothing
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in places and item.default is item.empty for item in parameters) > 1


def check_handler(
    handler: Callable[..., Any] | None, decode: Any, middleware: Iterable[Any], *, takes_batches: bool = False
) -> None:
    taken = "a list of messages" if takes_batches else "a message"
    if decode is None:
        check_callable("handler", handler, taken)
    else:
        check_callable("decode", decode, "a body")
        if handler is None:
            raise ConfigError("decode: only with a handler; decode message.body yourself where you ask for messages")
        value = "a list of what decode returns" if takes_batches else "what decode returns"
        check_callable("handler", handler, value, *((taken,) if takes_message(handler) else ()))
    for index, layer in enumerate(middleware):
        check_callable(f"middleware[{index}]", layer, taken, "what to call next")


def check_start(name: str, start: Any) -> None:
    if start not in ("last", "first") and not _is_long(start):
        raise ConfigError(f"{name}: {start!r} is neither 'last' nor 'first' nor a time in ms since 1970")
    check_ms(name, start)


def check_ms(name: str, time_ms: Any) -> None:
    """A time in ms since the epoch that is years before RocketMQ was one in seconds. 0 is the beginning of everything."""
    if isinstance(time_ms, int) and 0 < time_ms < EARLIEST_MS:
        raise ConfigError(f"{name}: {time_ms} ms since 1970 is before 1973; give ms, such as {time_ms}_000 for seconds")


def check_path(name: str, file: Any) -> None:
    if file is not None and not isinstance(file, str | os.PathLike):
        raise ConfigError(f"{name}: {file!r} is not a path")


def batch_limits(batch_size: Any, limits: PullLimits | None, wait_s: Any) -> PullLimits:
    """How far a consumer reads ahead that takes batches: each is of one pull."""
    check_count("batch_size", 1 if batch_size is None else batch_size, 1, MAX_BATCH_SIZE)
    if wait_s is not None:
        check_seconds("batch_wait_s", wait_s)
        if batch_size is None or wait_s > MAX_BATCH_WAIT_S:
            raise ConfigError(
                f"batch_wait_s: {wait_s!r} is for a consumer with a batch_size, up to {MAX_BATCH_WAIT_S} s"
            )
    if limits is None:
        return PullLimits(batch_size=max(PullLimits().batch_size, batch_size or 1))
    if batch_size is not None and batch_size > limits.batch_size:
        hint = f"give pull=PullLimits(batch_size={batch_size})"
        raise ConfigError(f"batch_size: {batch_size} is more than the {limits.batch_size} messages of one pull; {hint}")
    return limits


def check_pull_limits(name: str, limits: Any) -> None:
    if limits is None:
        return
    if not isinstance(limits, PullLimits):
        raise ConfigError(f"{name}: {limits!r} is not a PullLimits")
    for field in ("batch_size", "messages", "size_bytes", "span"):
        check_count(f"{name}.{field}", getattr(limits, field), 1, MAX_INT if field == "batch_size" else None)


def check_place(place: Any) -> None:
    allowed = "'first', 'last', a time in ms since 1970 as an int, or an offset for each queue"
    if isinstance(place, Mapping):
        odd = [f"{queue}: {offset!r}" for queue, offset in place.items() if not _is_long(offset)]
        if odd:
            raise ConfigError(f"seek: {odd[0]} is not an offset from 0; give {allowed}")
    elif place not in ("last", "first") and not _is_long(place):
        raise ConfigError(f"seek: {place!r} is not a place; give {allowed}")
    else:
        check_ms("seek", place)


def check_starts(starts: Any) -> None:
    """Checks the return value of `on_assigned`."""
    if not isinstance(starts, Mapping):
        raise ConfigError(f"on_assigned returned {starts!r}; allowed are None and a mapping of offsets by queue")
    for queue, offset in starts.items():
        if not isinstance(queue, Queue):
            raise ConfigError(
                f"on_assigned returned the key {queue!r}, which is not a Queue; use the queues that it is called with"
            )
        if not _is_long(offset):
            kind = type(offset).__name__
            allowed = f"an offset is an int from 0 to {MAX_LONG}"
            raise ConfigError(f"on_assigned returned {offset!r} ({kind}) for {queue}; {allowed}")


def _is_long(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_LONG


def check_kind(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}: {value!r} is a {type(value).__name__}; give {kind.__name__}(...)")


def check_layers(name: str, layers: Any) -> None:
    if not isinstance(layers, Sequence):
        raise ConfigError(f"{name}: {layers!r} is not a list; give [{getattr(layers, '__name__', 'layer')}]")


def check_timeout(value: Any) -> None:
    """Checks the timeout of a call. It may be over before the call begins."""
    if type(value) not in (int, float) or math.isnan(value):
        raise ConfigError(f"timeout_s: {value!r} is not a number of seconds")


def check_strategy(name: str, strategy: Any) -> None:
    if isinstance(strategy, type) or not (
        isinstance(getattr(strategy, "name", None), str) and callable(getattr(strategy, "allocate", None))
    ):
        allowed = "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, STICKY or an object with `name` and `allocate`"
        raise ConfigError(f"{name}: {strategy!r} is not a strategy; import {allowed}")


def parse_subscriptions(subscriptions: Any) -> dict[str, Subscription]:
    """Subscriptions by topic, of a topic's name or of expressions by topic."""
    expressions = {subscriptions: "*"} if isinstance(subscriptions, str) else subscriptions
    if not isinstance(expressions, Mapping):
        raise ConfigError(
            f"subscriptions: {subscriptions!r} is neither a topic nor expressions by topic, such as {{'a': '*', 'b': 'new'}}"
        )
    if not expressions:
        raise ConfigError("subscriptions: none given; name a topic, or map topics to tag expressions")
    return {topic: _subscription(topic, expression) for topic, expression in expressions.items()}


def _subscription(topic: Any, expression: Any) -> Subscription:
    fault = names.topic_fault(topic) if isinstance(topic, str) else f"{topic!r} is not a text"
    if fault:
        raise ConfigError(f"subscriptions: {fault}")
    if not isinstance(expression, str):
        raise ConfigError(
            f"subscriptions: {topic}: {expression!r} is not an expression; use '*', 'TagA || TagB' or Sql(...)"
        )
    kind = SQL92 if isinstance(expression, Sql) else TAG
    try:
        parsed = parse_subscription(topic, expression, version=int(time.time() * 1000), kind=kind)
    except SubscriptionError as error:
        raise ConfigError(f"subscriptions: {topic}: {error}") from None
    odd = sorted(tag for tag in parsed.tags if re.search(r"[\s|,&]", tag) or tag == "*")
    if odd:
        raise ConfigError(
            f"subscriptions: {topic}: {odd[0]!r} is not a tag; separate tags by '||', or filter by Sql(\"TAGS = '...'\")"
        )
    return parsed


def with_retries(
    group: str, subscriptions: dict[str, Subscription], *, broadcasting: bool
) -> Mapping[str, Subscription]:
    """Adds the group's retry topic, like Apache's DefaultMQPushConsumerImpl.copySubscription: broadcasting has no
    retries."""
    if broadcasting:
        return subscriptions
    retry = names.retry_topic(group)
    return {**subscriptions, retry: Subscription(retry, version=int(time.time() * 1000))}
