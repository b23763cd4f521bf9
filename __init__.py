"""RocketMQ for Python: an asyncio client, a broker and a Spark source, wire-compatible with Apache RocketMQ.

    from rocketlet import Consumer, Producer

The names in `__all__` are the public API, and so are those of `rocketlet.sync`, `rocketlet.testing`, `rocketlet.otel` and
`rocketlet.taskiq`, `rocketlet.spark` with its options, and the `rocketlet` command.
Everything else is private: it may change in any release.

Names load when they are first used. `import rocketlet` alone loads nothing, and the client loads neither broker nor Spark.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import (
        AVG,
        AVG_BY_CIRCLE,
        CONSISTENT_HASH,
        STICKY,
        Access,
        AdminClient,
        AnswerUnreadable,
        BrokerRefused,
        ConfigError,
        ConnectionFailed,
        Consumer,
        Depends,
        Group,
        GroupConfig,
        Health,
        Message,
        MessageIllegal,
        MessageTrace,
        OffsetChange,
        Outgoing,
        Position,
        Producer,
        PullLimits,
        PutAccount,
        Queue,
        Reject,
        RequestFailed,
        RequestTimeout,
        RetryLater,
        RetryPolicy,
        Rocketlet,
        RocketletError,
        Sending,
        SendResult,
        SharedConsumer,
        Sql,
        Start,
        Strategy,
        Topic,
        TopicNotFound,
        settled,
        stop_signal,
    )

__version__ = "0.1.0"

__all__ = [
    "AVG",
    "AVG_BY_CIRCLE",
    "CONSISTENT_HASH",
    "STICKY",
    "Access",
    "AdminClient",
    "AnswerUnreadable",
    "BrokerRefused",
    "ConfigError",
    "ConnectionFailed",
    "Consumer",
    "Depends",
    "Group",
    "GroupConfig",
    "Health",
    "Message",
    "MessageIllegal",
    "MessageTrace",
    "OffsetChange",
    "Outgoing",
    "Position",
    "Producer",
    "PullLimits",
    "PutAccount",
    "Queue",
    "Reject",
    "RequestFailed",
    "RequestTimeout",
    "RetryLater",
    "RetryPolicy",
    "Rocketlet",
    "RocketletError",
    "SendResult",
    "Sending",
    "SharedConsumer",
    "Sql",
    "Start",
    "Strategy",
    "Topic",
    "TopicNotFound",
    "__version__",
    "settled",
    "stop_signal",
]


def __getattr__(name: str) -> Any:
    """Loads the client when one of its names is asked for, and keeps what was found."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import client

    found = globals()[name] = getattr(client, name)
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | globals().keys())
