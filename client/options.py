"""The options of consumers, each declared once: its type, its meaning, its default and its check."""

from collections.abc import Mapping, Sequence
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
from .consuming.queues import Assigned, Listener
from .errors import ConfigError
from .wire.connection import Access

SeekPosition = Literal["first", "last"] | int | Mapping[Queue, int]
"""The target of a `seek`: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


def _unless_none(check: ArgumentCheck) -> ArgumentCheck:
    return lambda name, value: None if value is None else check(name, value)


def _kind(kind: type) -> ArgumentCheck:
    return partial(check_kind, kind=kind)


_TRIES: Final = _unless_none(partial(check_count, least=0, most=MAX_INT))


def _check_listener(name: str, value: Any) -> None:
    check_callable(name, value, "a set of queues")


class MemberOptions(TypedDict, total=False):
    """The options of both kinds of consumers, besides the handler."""

    concurrency: Annotated[
        int,
        Option(
            "how many handlers run concurrently. A SharedConsumer pops no more messages than that.",
            HANDLER_CONCURRENCY,
            partial(check_count, least=1, most=MAX_HANDLER_CONCURRENCY),
        ),
    ]
    max_reconsume_times: Annotated[
        int | None,
        Option("how often a message is retried. Default: the group's setting, which is 16 at first.", None, _TRIES),
    ]
    retry: Annotated[
        RetryPolicy | None,
        Option("which exceptions are retried, how often, and when.", None, _kind(RetryPolicy)),
    ]
    drain_s: Annotated[
        float,
        Option(
            "how long a consumer that stops, or gives up a queue, waits for running handlers. Messages still in "
            "handlers then are delivered again.",
            DRAIN_S,
            partial(check_seconds, may_be_zero=True, most=MAX_DRAIN_S),
        ),
    ]
    middleware: Annotated[Sequence[Middleware], Option("around every call of the handler.", (), check_layers)]
    access: Annotated[Access | None, Option("TLS, and the account that signs.", None, _kind(Access))]
    limits: Annotated[
        ClientLimits, Option("the client's bounds and intervals; tests set others.", CLIENT_LIMITS, _kind(ClientLimits))
    ]
    client_name: Annotated[
        str | None,
        Option(
            "what members are called everywhere, such as the pod's name. Default: address and process.",
            None,
            check_client_name,
        ),
    ]


class ConsumerOptions(MemberOptions, total=False):
    """The options of a Consumer, besides its handler and what that gets: `decode` and `batch_size`."""

    orderly: Annotated[
        bool,
        Option(
            "one handler for each queue, in order. A failed message blocks its queue and is retried.", False, check_bool
        ),
    ]
    suspend_queue_s: Annotated[
        float,
        Option(
            "how long a failed message holds up its queue, in order.",
            SUSPEND_QUEUE_S,
            partial(check_seconds, most=MAX_SUSPEND_QUEUE_S),
        ),
    ]
    broadcasting: Annotated[bool, Option("every member gets every message.", False, check_bool)]
    offsets_file: Annotated[
        Path | str | None,
        Option("keeps the offsets of a member that is broadcast to between its runs.", None, check_path),
    ]
    start: Annotated[
        Start,
        Option('where a group without offsets begins: "first", "last" or a time in ms.', "last", check_start),
    ]
    strategy: Annotated[Strategy, Option("how members share queues.", AVG, check_strategy)]
    pull: Annotated[PullLimits | None, Option("how far to read ahead.", None, check_pull_limits)]
    batch_wait_s: Annotated[
        float | None,
        Option(
            "a batch waits so long for `batch_size` messages of its queue. Default: it is what a pull brought.",
            None,
            _unless_none(check_seconds),
        ),
    ]
    commit_interval_s: Annotated[
        float,
        Option(
            "how often offsets are committed that neither a pull nor an idle queue has committed.",
            COMMIT_INTERVAL_S,
            partial(check_seconds, most=MAX_COMMIT_INTERVAL_S),
        ),
    ]
    on_assigned: Annotated[
        Assigned | None,
        Option(
            "is called with a set of queues that have come. It may return where to begin, an offset by queue.",
            None,
            _check_listener,
        ),
    ]
    on_revoked: Annotated[
        Listener | None, Option("is called with a set of queues that have gone.", None, _check_listener)
    ]


class SharedOptions(MemberOptions, total=False):
    """The options of a SharedConsumer, besides its handler and `decode`."""

    orderly: Annotated[
        bool,
        Option(
            "messages of one message group (`__SHARDINGKEY`) come one after the other, whoever gets them; those of a "
            "queue without one, too. On an Apache broker: those of a queue.",
            False,
            check_bool,
        ),
    ]
    start: Annotated[
        Literal["last", "first"], Option("where a group begins that is new to the topic.", "last", check_end)
    ]
    invisible_s: Annotated[
        float,
        Option(
            "visibility timeout: without an extension for this long, the message is redelivered. Running "
            "handlers extend it.",
            INVISIBLE_S,
            check_invisible,
        ),
    ]


def most_retries(options: MemberOptions, handler: object) -> int | None:
    """The maximum number of retries of a message; None for the group's setting. Raises ConfigError if two options say it, or
    a policy judges what no handler raises."""
    retry, times = options["retry"], options["max_reconsume_times"]
    if retry is None:
        return times
    if handler is None:
        raise ConfigError(
            "retry: only with a handler; without one give max_reconsume_times, and call consumer.retry(...)"
        )
    if times is not None:
        raise ConfigError(f"max_reconsume_times: {times} and the attempts of `retry` say the same; give one of them")
    return retry.attempts - 1


def check_models(options: ConsumerOptions) -> None:
    """Raises ConfigError for options that have no effect beside the others, or contradict them."""
    orderly, broadcasting, retry = options["orderly"], options["broadcasting"], options["retry"]
    if broadcasting:
        nothing = "every member gets every message, and nothing is retried"
        if orderly:
            raise ConfigError(f"orderly: not with broadcasting: {nothing}; use concurrency=1 for one message at a time")
        for name in ("retry", "max_reconsume_times"):
            if options[name] is not None:
                raise ConfigError(f"{name}: not with broadcasting: {nothing}")
    elif options["offsets_file"] is not None:
        raise ConfigError("offsets_file: only with broadcasting=True; other groups keep their offsets at the brokers")
    if not orderly and options["suspend_queue_s"] != SUSPEND_QUEUE_S:
        raise ConfigError("suspend_queue_s: only with orderly=True; retry=RetryPolicy(delays_s=...) has other delays")
    if retry is not None and orderly and retry.delays_s:
        raise ConfigError(
            "retry: delays_s: in order, a failed message is retried after suspend_queue_s; leave them out"
        )
    if retry is not None and not orderly:
        check_levels("retry", retry)
