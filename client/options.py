"""The options of consumers, each declared once: its type, description, default and check."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

from ..protocol.allocation import AVG, Strategy
from ..protocol.names import Queue
from .config import (
    CLIENT_LIMITS,
    COMMIT_INTERVAL_S,
    DRAIN_S,
    HANDLER_CONCURRENCY,
    INVISIBLE_S,
    MAX_COMMIT_INTERVAL_S,
    MAX_DRAIN_S,
    MAX_HANDLER_CONCURRENCY,
    MAX_INT,
    MAX_SUSPEND_QUEUE_S,
    SUSPEND_QUEUE_S,
    ArgumentCheck,
    ClientLimits,
    Option,
    PullLimits,
    Start,
    check_bool,
    check_callable,
    check_client_name,
    check_count,
    check_end,
    check_invisible,
    check_kind,
    check_layers,
    check_path,
    check_pull_limits,
    check_seconds,
    check_start,
    check_strategy,
)
from .consuming.handling import Middleware, RetryPolicy, check_levels
from .consuming.once import HandledIds, check_store
from .consuming.once import layer as once_layer
from .consuming.queues import Assigned, Listener
from .errors import ConfigError
from .wire.connection import Access

SeekPosition = Literal["first", "last"] | int | Mapping[Queue, int]
"""The target of a `seek`: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


def _unless_none(check: ArgumentCheck) -> ArgumentCheck:
    return lambda name, value: None if value is None else check(name, value)


def _kind(kind: type) -> ArgumentCheck:
    return partial(check_kind, kind=kind)


_RETRIES: Final = _unless_none(partial(check_count, least=0, most=MAX_INT))


def _check_listener(name: str, value: Any) -> None:
    check_callable(name, value, "a set of queues")


def _check_taken(name: str, value: Any) -> None:
    check_callable(name, value, "the name of a lite topic")


class MemberOptions(TypedDict, total=False):
    """The options that all consumers have in common, except the handler."""

    concurrency: Annotated[
        int,
        Option(
            "maximum number of handlers that run concurrently. A SharedConsumer with a handler requests no more "
            "messages than it has free handlers, except one of each topic and broker when it starts.",
            HANDLER_CONCURRENCY,
            partial(check_count, least=1, most=MAX_HANDLER_CONCURRENCY),
        ),
    ]
    max_reconsume_times: Annotated[
        int | None,
        Option(
            "maximum number of retries of a message. Default: the group's setting, which is 16 unless it was changed.",
            None,
            _RETRIES,
        ),
    ]
    retry: Annotated[
        RetryPolicy | None,
        Option("after which exceptions a message is retried, how often, and when.", None, _kind(RetryPolicy)),
    ]
    drain_s: Annotated[
        float,
        Option(
            "maximum time in seconds for which a consumer waits for running handlers when it stops or releases a queue. "
            "Messages whose handlers are still running after that are redelivered.",
            DRAIN_S,
            partial(check_seconds, may_be_zero=True, most=MAX_DRAIN_S),
        ),
    ]
    middleware: Annotated[
        Sequence[Middleware], Option("layers around every call of the handler, the outermost first.", (), check_layers)
    ]
    once: Annotated[
        HandledIds | None,
        Option(
            "store of the ids of handled messages, an object with `once(message_id)`: a message whose id it has is "
            "acknowledged without a call of the handler. It needs a handler of single messages.",
            None,
            check_store,
        ),
    ]
    access: Annotated[Access | None, Option("TLS settings, and the account that signs requests.", None, _kind(Access))]
    limits: Annotated[
        ClientLimits,
        Option("limits and intervals of the client, which tests change.", CLIENT_LIMITS, _kind(ClientLimits)),
    ]
    client_name: Annotated[
        str | None,
        Option(
            "name of this client in client ids, logs and tools, such as the pod's name. Default: IP address and process id.",
            None,
            check_client_name,
        ),
    ]


class ConsumerOptions(MemberOptions, total=False):
    """The options of a Consumer, except `handler`, `decode` and `batch_size`."""

    orderly: Annotated[
        bool,
        Option(
            "True to handle the messages of a queue one after the other, in order. A failed message blocks its queue "
            "while it is retried.",
            False,
            check_bool,
        ),
    ]
    suspend_queue_s: Annotated[
        float,
        Option(
            "time in seconds for which a failed message blocks its queue before each retry, with `orderly`.",
            SUSPEND_QUEUE_S,
            partial(check_seconds, most=MAX_SUSPEND_QUEUE_S),
        ),
    ]
    broadcasting: Annotated[bool, Option("True to deliver every message to every member.", False, check_bool)]
    offsets_file: Annotated[
        Path | str | None,
        Option("file that keeps the offsets of a broadcasting member between its runs.", None, check_path),
    ]
    start: Annotated[
        Start,
        Option(
            'start position of a group without committed offsets: "first", "last" or a store time in ms since the epoch.',
            "last",
            check_start,
        ),
    ]
    strategy: Annotated[Strategy, Option("strategy that allocates queues to members.", AVG, check_strategy)]
    pull: Annotated[PullLimits | None, Option("limits for reading ahead of the handlers.", None, check_pull_limits)]
    batch_wait_s: Annotated[
        float | None,
        Option(
            "maximum time in seconds for which a batch waits until it has `batch_size` messages of its queue. Default: no "
            "wait; a batch has messages of one pull.",
            None,
            _unless_none(check_seconds),
        ),
    ]
    commit_interval_s: Annotated[
        float,
        Option(
            "interval in seconds at which changed offsets are committed that no pull has carried.",
            COMMIT_INTERVAL_S,
            partial(check_seconds, most=MAX_COMMIT_INTERVAL_S),
        ),
    ]
    on_assigned: Annotated[
        Assigned | None,
        Option(
            "callback for assigned queues, with a set of them. It may return the offsets to start from, by queue.",
            None,
            _check_listener,
        ),
    ]
    on_revoked: Annotated[
        Listener | None, Option("callback for revoked queues, with a set of them.", None, _check_listener)
    ]


class PopOptions(MemberOptions, total=False):
    """The options that SharedConsumer and LiteConsumer have in common, except the handler."""

    invisible_s: Annotated[
        float,
        Option(
            "visibility timeout in seconds: a message that is not settled or extended within this time is redelivered. The "
            "consumer extends it while the handler is running.",
            INVISIBLE_S,
            check_invisible,
        ),
    ]


class SharedOptions(PopOptions, total=False):
    """The options of a SharedConsumer, except `handler` and `decode`."""

    orderly: Annotated[
        bool,
        Option(
            "True to deliver the messages of one message group (`__SHARDINGKEY`) one after the other, even to different "
            "members, and likewise the messages of a queue that have no message group. On Apache's brokers this applies to "
            "all messages of a queue.",
            False,
            check_bool,
        ),
    ]
    start: Annotated[
        Literal["last", "first"],
        Option('start position of a group that is new to the topic: "last" or "first".', "last", check_end),
    ]


class LiteOptions(PopOptions, total=False):
    """The options of a LiteConsumer, except `lite_topics`, `handler` and `decode`."""

    orderly: Annotated[
        bool,
        Option(
            "True to handle the messages of a lite topic one after the other, in order. A failed message blocks its lite "
            "topic until it is redelivered. False to handle them concurrently, when they arrive together.",
            True,
            check_bool,
        ),
    ]
    on_taken: Annotated[
        Callable[[str], object] | None,
        Option(
            "callback for a lite topic that another member of an exclusive group has subscribed to, with its name.",
            None,
            _check_taken,
        ),
    ]


def most_retries(options: MemberOptions, handler: object) -> int | None:
    """Return the maximum number of retries of a message; None for the group's setting.

    Raises ConfigError if both `retry` and `max_reconsume_times` are given, or `retry` without a handler.
    """
    retry, times = options["retry"], options["max_reconsume_times"]
    if retry is None:
        return times
    if handler is None:
        raise ConfigError(
            "retry: needs a handler; without a handler give max_reconsume_times, and call consumer.retry(...)"
        )
    if times is not None:
        raise ConfigError(
            f"max_reconsume_times: {times} conflicts with the attempts of `retry`; give only one of these options"
        )
    return retry.attempts - 1


def layers_of(options: MemberOptions, handler: object, *, takes_batches: bool = False) -> Sequence[Middleware]:
    """Return the layers around the handler, with that of `once` as the innermost.

    Raises ConfigError if `once` is given without a handler of single messages.
    """
    if options["once"] is None:
        return options["middleware"]
    if handler is None:
        raise ConfigError("once: needs a handler; without a handler check the ids in your code")
    if takes_batches:
        raise ConfigError("once: not supported with batch_size, because a batch has one outcome; leave one of them out")
    return (*options["middleware"], once_layer(options["once"]))


def check_models(options: ConsumerOptions) -> None:
    """Raise ConfigError for options that conflict with other options or have no effect together with them."""
    orderly, broadcasting, retry = options["orderly"], options["broadcasting"], options["retry"]
    if broadcasting:
        reason = "because messages are never retried then"
        if orderly:
            raise ConfigError(
                f"orderly: not supported with broadcasting, {reason}; use concurrency=1 for one message at a time"
            )
        for name in ("retry", "max_reconsume_times"):
            if options[name] is not None:
                raise ConfigError(f"{name}: not supported with broadcasting, {reason}; leave it out")
        if options["once"] is not None:
            raise ConfigError(
                "once: not supported with broadcasting, because every member handles a message; leave it out"
            )
    elif options["offsets_file"] is not None:
        raise ConfigError(
            "offsets_file: needs broadcasting=True, because brokers store the offsets of other groups; leave it out"
        )
    if not orderly and options["suspend_queue_s"] != SUSPEND_QUEUE_S:
        raise ConfigError("suspend_queue_s: needs orderly=True; otherwise use retry=RetryPolicy(delays_s=...)")
    if retry is not None and orderly and retry.delays_s:
        raise ConfigError(
            "retry: delays_s: not supported with orderly=True, which retries after suspend_queue_s; leave them out"
        )
    if retry is not None and not orderly:
        check_levels("retry", retry)
