"""Limits and defaults of the client, and the checks of its arguments."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from textwrap import fill
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from ..protocol import names
from ..protocol.config import MAX_REQUEST_QUEUES
from ..protocol.names import Queue, Subscription, SubscriptionError, parse_subscription
from .errors import ConfigError, unencodable

# ------------------------------------------------------------------------------
# The settings and limits of the client.


Start = Literal["last", "first"] | int
"""The start position of a new group: "last" is the end of each queue when the first member joins, "first" is the first
stored message, and an int is a store time in ms since the epoch. With "last", queues that are created later are read from
their first message."""


class At(NamedTuple):
    """A start position that is an offset."""

    offset: int


PRODUCER_GROUP: Final = "rocketlet"  # producer group of producers that name none
SEND_RETRIES: Final = 2  # default number of retries of a send
COMPRESS_OVER_BYTES: Final = 4096  # default minimum size of a body that a producer compresses
TOPIC_QUEUES: Final = 4  # queues of a topic that a client creates; Apache's DefaultMQProducer.defaultTopicQueueNums
CONNECT_TIMEOUT_S: Final = 3.0  # timeout of opening a connection to one address of a host name
MAX_CONNECT_ADDRESSES: Final = 4  # addresses of a host name that are tried one after the other
TIMEOUT_TICK_S: Final = 0.25  # longest tick of a timeout that counts only the time in which the event loop runs
REQUEST_TIMEOUT_S: Final = 3.0  # default timeout of a request
MAX_SEND_TIMEOUT_S: Final = 600.0  # maximum `timeout_s` of a producer; larger values are probably milliseconds
OFFSET_TIMEOUT_S: Final = 5.0  # timeout of a request for an offset

HEARTBEAT_BYTES: Final = 512 * 1024  # size of the queue list in a heartbeat; a broker accepts 1 MiB in all
HEARTBEAT_QUEUE_BYTES: Final = 32  # size counted for a queue in a heartbeat, in addition to its two names
PLACE_S: Final = 10.0  # time for which a member uses its place in the group without a new query
LEASE_S: Final = 20.0  # lifetime of Rocketlet's leases, from the arrival of a renewal at the broker
APACHE_LEASE_S: Final = 60.0  # lifetime of Apache's locks: rocketmq.broker.rebalance.lockMaxLiveTime
LEASE_MARGIN_S: Final = 1.0  # a member's lease ends this much earlier than the broker's, because clocks drift
LAST_COMMIT_CHECKS: Final = (
    5  # number of times that a hand-over checks its last commit on Apache's broker, and repeats it
)
PULL_COMMIT_S: Final = 0.1  # time that Apache's broker may take to store the offset that a pull carries
COMMIT_INTERVAL_S: Final = 5.0  # interval of commits of offsets that neither a pull nor an idle queue has committed
MAX_COMMIT_INTERVAL_S: Final = 300.0  # maximum of `commit_interval_s`; larger values are probably milliseconds
DRAIN_S: Final = 30.0  # default time that a stop or a revoked queue waits for running handlers
MAX_DRAIN_S: Final = 3600.0  # maximum of `drain_s`; larger values are probably milliseconds
HANDLER_CONCURRENCY: Final = 20  # default number of concurrent handlers of a consumer
MAX_HANDLER_CONCURRENCY: Final = 10_000  # concurrent handlers of a consumer
# concurrent handlers of a lite consumer: by default brokers give one client no more unacknowledged messages
MAX_LITE_CONCURRENCY: Final = 100
MAX_BATCH_SIZE: Final = (
    1024  # messages of one pull, as a Rocketlet broker returns; Apache's broker returns 32 by default
)

INVISIBLE_S: Final = 30.0  # default visibility timeout of a popped message
# maximum of `invisible_s`; larger values are probably milliseconds, and running handlers extend theirs
MAX_HELD_S: Final = 3600.0
MIN_INVISIBLE_S: Final = 1.0  # minimum delay before a returned message is redelivered
MAX_INVISIBLE_S: Final = 12 * 3600.0  # maximum visibility timeout, as brokers allow
RENEWALS: Final = 3  # extensions of a visibility timeout within its length
POP_MESSAGES: Final = 32  # messages of one pop, which is the brokers' maximum
POP_WAIT_S: Final = 15.0  # long-polling time of a pop, as in the Java client
POP_TURN_S: Final = (
    0.1  # long-polling time of a pop when there are fewer free handlers than brokers and topics to pop from
)
POP_TIMEOUT_S: Final = 10.0  # timeout of a pop in addition to its long-polling time
ACK_MESSAGES: Final = 1024  # acknowledgements in one request
# time after the visibility timeout in which a message is still acknowledged, in case it was not redelivered
ACK_TIMEOUT_S: Final = 60.0
POP_STOP_S: Final = 0.5  # time that pops may take to end when a member unregisters
DELAY_LEVELS_S: Final = (1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # the brokers' default delay levels

PULL_HOLD_S: Final = 60.0  # time for which a broker may hold a pull; Rocketlet's maximum
PULL_TIMEOUT_S: Final = 75.0  # timeout of a pull
SUSPEND_QUEUE_S: Final = 1.0  # `suspendCurrentQueueTimeMillis` of Apache's client
MAX_SUSPEND_QUEUE_S: Final = (
    300.0  # maximum of `suspend_queue_s`, 30 s in Apache's client; larger values are probably milliseconds
)
MAX_REASON_CHARS: Final = 300  # reason of a failed delivery
MAX_BATCH_WAIT_S: Final = 60.0  # maximum time that a message waits for its batch to fill
# the delays between two attempts, by delay level from 1, as brokers have them by default
RETRY_DELAYS_S: Final = (1, 5, 10, 30, *(60 * minutes for minutes in (*range(1, 11), 20, 30)), 3600, 7200)
MARK_INTERVAL_S: Final = 1.0  # how often a running replay marks the dead letters that it has sent
REPLAY_BURST_S: Final = 0.1  # a replay that was slower than its rate sends the messages of this time without a pause
DEAD_LETTER_LEVEL: Final = -1  # delay level of a message that is sent back as a dead letter
BLOCKED_S: Final = 1.0  # an event loop that is blocked for longer is logged
BLOCKED_POLL_INTERVAL_S: Final = 0.25  # interval of checks for a blocked event loop, and the tolerance of its duration
BLOCKED_NAMING_S: Final = 10.0  # minimum interval of log lines about a blocked event loop
EARLIEST_MS: Final = 10**11  # times below this, which is in 1973, are rejected as seconds given instead of milliseconds
FAILURE_CHARS: Final = 200  # text of a failed handler that the caller of a request gets

DISK_LOW_RATIO: Final = 0.75  # usage of a broker's disk at which Apache's brokers delete old messages immediately
DISK_FULL_RATIO: Final = 0.9  # usage of a broker's disk at which `rocketlet doctor` warns of loss
CERTIFICATE_WARNING_S: Final = 14 * 86_400.0  # time before a certificate expires at which `rocketlet doctor` warns
CLOCK_SKEW_S: Final = 5.0  # difference of a broker's clock at which `rocketlet doctor` warns
SHORT_LAG_S: Final = 5.0  # lag that is consumed within this time does not count as growing
LEAST_LAG: Final = 100  # messages of lag below which lag does not count as growing
LOOK_S: Final = 2.0  # interval of the two samples of a group
# time for which `rocketlet doctor` observes a queue without commits; members commit every 5 s by default
WATCH_S: Final = 6.0
MAX_REPORTED_HANDLERS: Final = (
    32  # running handlers that a member reports to administrators: the longest, and the newest
)
MAX_STACK_FRAMES: Final = 30  # innermost frames of a running handler's stack that a member reports
STUCK_S: Final = (
    30.0  # a message that waits, or is in its handler, for longer is reported as stuck; many handlers take some seconds
)
MAX_DISAGREEMENTS: Final = 100  # conflicts between members that a member remembers, to log each once
SUSPECTS: Final = 32  # queues of a group whose next message is read for the report
MAX_WANTED: Final = 10_000  # next messages of queues that `rocketlet doctor` and the console remember
REASON_CHARS: Final = 200  # characters of a failed attempt's reason that a finding shows
OLDEST_VERSION: Final = 393  # V4_9_0's ordinal in Apache's MQVersion
LOCKS_MEAN_ORDER_VERSION: Final = 412  # V5_0_0_SNAPSHOT's ordinal in Apache's MQVersion; see dead letters' replay

ADMIN_TIMEOUT_S: Final = 10.0  # default timeout of an administrative request
ASKED_AT_ONCE: Final = (
    8  # groups or topics queried concurrently; a slow broker must answer all of them within the timeout
)
EARLY_LOOKS: Final = (
    64  # with more groups, `rocketlet doctor` does not check before its last look whether a queue progresses
)
WATCHED_AT_ONCE: Final = 2048  # groups that `rocketlet doctor` observes concurrently; each takes 24 bytes per queue
SEARCH_TIMEOUT_S: Final = 30.0  # timeout of a query by key, which may read much of a commit log
SEARCH_MESSAGES: Final = 256  # messages of a pull without a group

TRACE_FLUSH_S: Final = 0.1  # time for which trace records are collected
MAX_TRACE_MESSAGES: Final = 64  # trace messages of each broker from which the trace of a message is read

ONEWAY_AT_ONCE: Final = 256  # unwritten buffers of a connection, at which a one-way send yields to the event loop
BATCH_MESSAGES: Final = 1000  # single sends in one SEND_BATCH_MESSAGE
OVERLAP_MESSAGES: Final = 16  # sends that are split into two requests if nothing is in flight
OVERLAP_BATCHES: Final = 4  # split batches whose halves stayed apart, after which splitting continues
MAX_OVERLAP_PAUSE: Final = 256  # batches until splitting is tried after it did not help
BATCH_BYTES: Final = 72 * 1024  # size of a batch of single sends; 128 messages of 1 KiB are two batches

SEND_BACKOFF_S: Final = 0.05  # pause before the first retry of a send, doubled for each further retry
MAX_SEND_BACKOFF_S: Final = 1.0  # maximum pause between retries of a send
MAX_TRIED_AT_ONCE: Final = 16  # messages that a member handles concurrently for CONSUME_MESSAGE_DIRECTLY
MAX_OFFSETS_BYTES: Final = 64 * 1024 * 1024  # size of a broadcasting consumer's offset file
MAX_TLS_FILE_BYTES: Final = 1024 * 1024  # size of a file with a certificate chain, a key, or certificate authorities
MAX_NAME_SERVERS: Final = 64  # addresses of name servers
MAX_INT: Final = 2**31 - 1  # Java's `int`; brokers refuse larger numbers
MAX_LONG: Final = 2**63 - 1  # Java's `long`, for offsets and times
MAX_RECONSUME_TIMES: Final = 16  # retries of a message if the group's setting is unknown, as in Apache's push consumer


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits, timeouts and intervals of one client. The default is `CLIENT_LIMITS`. Tests pass smaller values, so that they
    reach a limit with few messages or without waiting."""

    # Connections

    resolve_timeout_s: float = 10.0  # timeout of looking up the addresses of a host name
    reconnect_s: float = 0.2  # how long a broken connection, or a request on it, waits before the retry
    # time for which a closing client waits until servers have closed their sides, which Apache's do not over TLS
    close_timeout_s: float = 1.0
    deadline_sweep_s: float = 0.25  # interval at which timed-out requests are looked up
    silent_s: float = (
        60.0  # a connection that receives nothing for this long is closed if a request has timed out; TCP needs 15 min
    )
    max_in_flight: int = 65_536  # unanswered requests of a connection
    # bytes that a broker may leave unread while it sends requests; above, the client closes the connection
    max_unread_bytes: int = 16 * 1024 * 1024
    route_interval_s: float = 30.0  # interval at which routes of topics are refreshed
    # interval at which routes are refreshed while a broker is unreachable, because it may have a new address
    route_retry_s: float = 1.0
    route_timeout_s: float = 60.0  # time for which a member keeps a broker that is missing in a route
    # interval at which the route of a topic without one is requested, mostly the retry topic of a new group
    missing_route_interval_s: float = 0.5

    # Members

    heartbeat_interval_s: float = 30.0  # interval of heartbeats
    # interval at which a lite consumer synchronizes its subscriptions; brokers drop them 180 s after the last time
    lite_sync_interval_s: float = 30.0
    heartbeat_retry_s: float = (
        1.0  # interval of heartbeats to a broker that has not responded, because its queues are locked only after that
    )
    # time that brokers without a response to the heartbeat may delay the other brokers' queues
    register_timeout_s: float = 0.5
    rebalance_interval_s: float = 20.0  # interval of rebalances without a notification
    lock_timeout_s: float = 1.0  # time for which a rebalance waits for the response to a lock or unlock request
    lock_interval_s: float = 5.0  # interval of lease renewals
    lock_retry_s: float = (
        0.5  # pause before the next rebalance if a member lacks a queue, a lookup failed, or the rebalance failed
    )
    lock_queues: int = 2000  # queues in one lock request; a broker accepts 8,192 in 1 MiB, which long names fill sooner
    lease_tick_s: float = 1.0  # interval at which expired and due leases are looked up
    # time for which the commit of a released queue is retried; timeout of lock requests and of last acknowledgements
    hand_over_timeout_s: float = 15.0
    heartbeat_queues: int = MAX_REQUEST_QUEUES  # maximum queues that a heartbeat names, as brokers accept

    # Handlers

    # interval at which queues whose messages are all handled are looked up, to commit their offset
    idle_commit_s: float = 0.05
    pull_error_delay_s: float = 1.0  # pause of a queue after a failed pull
    pull_busy_delay_s: float = (
        0.02  # pause of a queue whose broker is busy, or answers pulls immediately without messages
    )
    send_back_retry_s: float = 5.0  # pause before a message that the broker did not accept back is sent back again
    # pause before a cancelled worker restarts, so that it does not restart while its event loop closes
    restart_s: float = 0.1
    group_settings_s: float = 30.0  # time for which an orderly consumer caches a broker's maximum of retries
    log_repeat_s: float = 60.0  # minimum interval of log lines about the same refusal of a queue's pulls
    standing_s: float = 60.0  # a queue whose oldest message is unacknowledged for longer is logged
    # size of messages whose transactions are checked concurrently; brokers repeat the others
    max_checked_bytes: int = 64 * 1024 * 1024

    # Administrators

    trace_bytes: int = 128_000  # trace records of a message: AsyncTraceDispatcher's maxMsgSize
    trace_keys_bytes: int = 16 * 1024  # keys of a trace message; brokers accept 32 KB of properties
    trace_waiting: int = (
        10_000  # trace records that wait to be written; further ones are dropped, and counted in the log
    )
    move_poll_interval_s: float = (
        1.0  # interval at which a move checks whether members have stopped, or messages are due
    )
    # time in which producers notice a changed route: they refresh it every 30 s (pollNameServerInterval)
    move_quiet_s: float = 35.0
    mirror_backoff_s: float = 1.0  # pause of a mirror before it retries an unreachable cluster


CLIENT_LIMITS: Final = ClientLimits()


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Limits for reading ahead of the handlers. A consumer stops pulling from a queue while `messages`, `size_bytes` or
    `span` is exceeded.

    - `batch_size`: maximum number of messages of one pull.
    - `messages`: maximum number of unacknowledged messages of one queue in memory.
    - `size_bytes`: maximum size of these messages as they are stored, in bytes.
    - `span`: maximum distance of the offsets of the first unacknowledged message and the next message to pull; not used
      in an orderly consumer.
    """

    batch_size: int = 256
    messages: int = 1000
    size_bytes: int = 100 * 1024 * 1024
    span: int = 2000


# Mirror
MIRROR_BATCH_MESSAGES: Final = 256  # copies in one request
MIRROR_BATCH_BYTES: Final = 1024 * 1024  # size of the bodies in one request of a mirror
MIRROR_LOOK_BACK: Final = 10_000  # messages of other producers after the newest copy in a queue that a mirror examines
MIRROR_QUEUES_AT_ONCE: Final = 16  # queues that a mirror copies concurrently
MIRROR_INDEXED_LIMIT_S: Final = 5.0  # time that the target may take until copies can be read
MIRROR_INDEXED_S: Final = 0.02  # interval at which a mirror checks whether copies can be read at the target
MIRROR_POLL_S: Final = 0.5  # interval at which a following mirror polls the source
MOVE_RETRIES_LOOK_BACK: Final = 32  # messages of the target's retry queue among which a move looks for its last copy
MIRROR_TIMEOUT_S: Final = 60.0  # time for which a cluster may be unreachable before a mirror stops, unless it follows


# ------------------------------------------------------------------------------
# Checks the arguments of clients and their methods. The errors are ConfigErrors that name the wrong argument.
#
# An option is declared once, as a line of a TypedDict whose type is annotated with its `Option`. Type checkers read
# the type there; `chosen` takes defaults and checks from it, and `takes` makes the signature and the docstring of the
# client.


_CLIENT_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]").fullmatch

ArgumentCheck = Callable[[str, Any], None]
"""Called with an argument's name and value."""
Given = TypeVar("Given")
Client = TypeVar("Client", bound=type)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a consumer or producer.

    Attributes:
        text: the description, which is added to the docstring of the class.
        default: the default value.
        check: `check(name, value)` raises ConfigError for an invalid value.
    """

    text: str
    default: Any
    check: ArgumentCheck


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Return the options that a TypedDict declares. The module of the TypedDict must not postpone the evaluation of
    annotations."""
    return {name: hint.__metadata__[0] for name, hint in kind.__annotations__.items()}


_PARAMETERS: Final[dict[object, list[str]]] = {}
"""By the TypedDict of options, the other parameters of the class that takes them, which errors suggest."""


def chosen(kind: type[Given], given: Mapping[str, Any]) -> Given:
    """Return the value of each option: the given value, or the default. Raises ConfigError for an invalid value, and
    TypeError for an unknown option."""
    options = options_of(cast("Any", kind))
    for name in given:
        if name not in options:
            raise unexpected(name, options, _PARAMETERS.get(kind, ()))
    found: dict[str, Any] = {}
    for name, option in options.items():
        found[name] = value = given.get(name, option.default)
        option.check(name, value)
    return cast("Given", found)


_OF_OTHER_CLIENTS: Final = {
    "headers": "give properties={name: value}",
    "key": "give keys= for tools to find the message, or queue_key= to keep the order of messages with the same key",
    "partition": "give queue=, or queue_key= to keep the order of messages with the same key",
    "tags": "give tag=; a message has one tag",
    "value": "give body=",
}
"""For arguments of a send that clients of other brokers have: the arguments to use instead."""


def unexpected(name: str, options: Iterable[str], parameters: Iterable[str] = ()) -> TypeError:
    """Return the error for an unknown keyword argument. It suggests the most similar option or parameter, or lists the
    options."""
    near = difflib.get_close_matches(name, [*options, *parameters], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(options)}"
    return TypeError(f"unexpected keyword argument {name!r}; {hint}")


def unexpected_of_send(unknown: Mapping[str, object], options: Iterable[str]) -> TypeError:
    """Return the error for unknown keyword arguments of a send."""
    name = next(iter(unknown))
    if name in _OF_OTHER_CLIENTS:
        return TypeError(f"unexpected keyword argument {name!r}; {_OF_OTHER_CLIENTS[name]}")
    return unexpected(name, options)


def takes(kind: type) -> Callable[[Client], Client]:
    """Return a decorator that adds the options to the signature and docstring of a class whose `__init__` takes
    `**options`."""

    def completed(client: Client) -> Client:
        made: Any = client.__init__  # type: ignore[misc]
        signature = inspect.signature(made)
        named = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        _PARAMETERS[kind] = [item.name for item in named if item.name != "self"]
        for name, option in options_of(kind).items():
            named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default))
        made.__signature__ = signature.replace(parameters=named)
        if client.__doc__ is not None:  # the docstring is missing with python -OO
            texts = [f"- `{name}`: {option.text}" for name, option in options_of(kind).items()]
            lines = [fill(text, 120, initial_indent="    ", subsequent_indent="      ") for text in texts]
            ends_with_list = "\n    - `" in client.__doc__
            client.__doc__ = "\n".join((client.__doc__.rstrip(), *([] if ends_with_list else [""]), *lines, "    "))
        return client

    return completed


def parse_addresses(text: Any) -> list[str]:
    """Parse the addresses of name servers, `host:port;host:port`. Raises ConfigError."""
    if not isinstance(text, str):
        raise ConfigError(f"name_server: {text!r} is not a text; give 'host:port', several separated by ';'")
    addresses = [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not _HOST(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"name_server: {address!r} is not host:port, such as 127.0.0.1:9876")
    if not addresses or len(addresses) > MAX_NAME_SERVERS:
        raise ConfigError(f"name_server: expected 1 to {MAX_NAME_SERVERS} addresses, got {len(addresses)}")
    return addresses


def parse_position(text: str, topic: str) -> tuple[Queue, int]:
    """Parse the position of a message, `BROKER:QUEUE:OFFSET`, into a queue and an offset. Raises ConfigError."""
    broker, *numbers = text.rsplit(":", 2)
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(
            f"{text[:80]!r} is not the position of a message; use BROKER:QUEUE:OFFSET, such as broker-a:0:1234"
        )
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
    """Raise ConfigError for an invalid duration. `most` detects milliseconds, which other clients use for most
    durations."""
    if type(value) not in (int, float) or not (value > 0 or (may_be_zero and value == 0)):
        raise ConfigError(f"{name}: {value!r} is not a number of seconds {'from' if may_be_zero else 'above'} 0")
    if value > most:
        raise ConfigError(f"{name}: {value!r} is more than {most:.0f} seconds; for milliseconds give {value / 1000:g}")


def check_end(name: str, start: Any) -> None:
    """Check the start position of a group whose members share messages."""
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
    """Check the delay until a redelivery, as a timedelta or seconds; None means the delay of the delay level."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= MAX_INVISIBLE_S):
        raise ConfigError(f"{name}: {delay!r} is not a time from 0 to {MAX_INVISIBLE_S / 3600:.0f} hours")


def check_callable(name: str, value: Any, *takes: str) -> None:
    """Raise ConfigError if a value is not None and cannot be called with the arguments that `takes` describes, such as "a
    message"."""
    if value is None:
        return
    if not callable(value):
        raise ConfigError(f"{name}: {value!r} cannot be called; give a function or `async def` function")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        called = getattr(value, "__qualname__", repr(value))
        raise ConfigError(f"{name}: {called}{signature} is called with {' and '.join(takes)}: {error}") from None


def takes_message(handler: Callable[..., Any]) -> bool:
    """Return True if a handler of decoded bodies takes the message, too, as in `async def cook(order, message)`."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in kinds and item.default is item.empty for item in parameters) > 1


def check_handler(
    handler: Callable[..., Any] | None, decode: Any, middleware: Iterable[Any], *, takes_batches: bool = False
) -> None:
    taken = "a list of messages" if takes_batches else "a message"
    if decode is None:
        check_callable("handler", handler, taken)
    else:
        check_callable("decode", decode, "a body")
        if handler is None:
            raise ConfigError("decode: needs a handler; without a handler, decode message.body in your code")
        value = "a list of decoded bodies" if takes_batches else "a decoded body"
        check_callable("handler", handler, value, *((taken,) if takes_message(handler) else ()))
    for index, layer in enumerate(middleware):
        check_callable(f"middleware[{index}]", layer, taken, "the next layer")


def check_start(name: str, start: Any) -> None:
    if start not in ("last", "first") and not _is_long(start):
        raise ConfigError(f"{name}: {start!r} is neither 'last' nor 'first' nor a time in ms since 1970")
    check_ms(name, start)


def check_ms(name: str, time_ms: Any) -> None:
    """Raise ConfigError for a time before 1973, because it is most likely in seconds instead of ms. 0 is allowed and
    means the first message."""
    if isinstance(time_ms, int) and 0 < time_ms < EARLIEST_MS:
        raise ConfigError(f"{name}: {time_ms} ms since 1970 is before 1973; give ms, such as {time_ms}_000 for seconds")


def check_path(name: str, file: Any) -> None:
    if file is not None and not isinstance(file, str | os.PathLike):
        raise ConfigError(f"{name}: {file!r} is not a path")


def batch_limits(batch_size: Any, limits: PullLimits | None, wait_s: Any) -> PullLimits:
    """Check the options for batches. Return the limits for reading ahead, with pulls that are large enough for a batch."""
    check_count("batch_size", 1 if batch_size is None else batch_size, 1, MAX_BATCH_SIZE)
    if wait_s is not None:
        check_seconds("batch_wait_s", wait_s)
        if batch_size is None or wait_s > MAX_BATCH_WAIT_S:
            raise ConfigError(f"batch_wait_s: needs a batch_size, and is at most {MAX_BATCH_WAIT_S} s; got {wait_s!r}")
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


def check_position(place: Any) -> None:
    allowed = "'first', 'last', a time in ms since 1970 as an int, or an offset for each queue"
    if isinstance(place, Mapping):
        invalid = [f"{queue}: {offset!r}" for queue, offset in place.items() if not _is_long(offset)]
        if invalid:
            raise ConfigError(f"seek: {invalid[0]} is not an offset from 0; give {allowed}")
    elif place not in ("last", "first") and not _is_long(place):
        raise ConfigError(f"seek: {place!r} is not a position; give {allowed}")
    else:
        check_ms("seek", place)


def check_starts(starts: Any) -> None:
    """Check the return value of `on_assigned`."""
    if not isinstance(starts, Mapping):
        raise ConfigError(f"on_assigned returned {starts!r}; expected None or a mapping from queues to offsets")
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
    """Check the timeout of a call. A timeout of 0 or less is valid, for a call that times out immediately."""
    if type(value) not in (int, float) or math.isnan(value):
        raise ConfigError(f"timeout_s: {value!r} is not a number of seconds")


def check_strategy(name: str, strategy: Any) -> None:
    if isinstance(strategy, type) or not (
        isinstance(getattr(strategy, "name", None), str) and callable(getattr(strategy, "allocate", None))
    ):
        allowed = "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, STICKY or an object with `name` and `allocate`"
        raise ConfigError(f"{name}: {strategy!r} is not a strategy; import {allowed}")


def parse_subscriptions(subscriptions: Any) -> dict[str, Subscription]:
    """Parse the name of a topic, or a mapping from topics to filter expressions, into subscriptions by topic."""
    expressions = {subscriptions: "*"} if isinstance(subscriptions, str) else subscriptions
    if not isinstance(expressions, Mapping):
        raise ConfigError(
            f"subscriptions: expected a topic, or filters by topic such as {{'a': '*', 'b': 'new'}}; got {subscriptions!r}"
        )
    if not expressions:
        raise ConfigError("subscriptions: empty; give a topic, or a mapping from topics to filters")
    return {topic: _subscription(topic, expression) for topic, expression in expressions.items()}


def _subscription(topic: Any, expression: Any) -> Subscription:
    fault = names.topic_fault(topic) if isinstance(topic, str) else f"{topic!r} is not a text"
    if fault:
        raise ConfigError(f"subscriptions: {fault}")
    if not isinstance(expression, str):
        raise ConfigError(
            f"subscriptions: {topic}: {expression!r} is not an expression; use '*', 'TagA || TagB' or Sql(...)"
        )
    try:
        expression.encode()
        parsed = parse_subscription(topic, expression, version=int(time.time() * 1000))
    except UnicodeEncodeError as error:
        raise ConfigError(f"subscriptions: {topic}: the expression {unencodable(error)}; correct it") from None
    except SubscriptionError as error:
        raise ConfigError(f"subscriptions: {topic}: {error}") from None
    invalid = sorted(tag for tag in parsed.tags if re.search(r"[\s|,&]", tag) or tag == "*") if parsed.tags else []
    if invalid:
        raise ConfigError(
            f"subscriptions: {topic}: {invalid[0]!r} is not a tag; separate tags by '||', or filter by Sql(\"TAGS = '...'\")"
        )
    return parsed


def with_retries(
    group: str, subscriptions: dict[str, Subscription], *, broadcasting: bool
) -> Mapping[str, Subscription]:
    """Return the subscriptions with that of the group's retry topic, as Apache's
    DefaultMQPushConsumerImpl.copySubscription does. A broadcasting consumer has no retries, and no retry topic."""
    if broadcasting:
        return subscriptions
    retry = names.retry_topic(group)
    return {**subscriptions, retry: Subscription(retry, version=int(time.time() * 1000))}
