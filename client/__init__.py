"""Asyncio client for RocketMQ brokers of Rocketlet and of Apache (4.9 and later): producer, consumers, administration.

consumer, shared_consumer, lite_consumer, producer   the classes that applications use
application  `Rocketlet`: handlers declared with decorators
options      the options of consumers
message      messages and leases
cloudevents  events of CloudEvents as messages
wire         connections to name servers and brokers, routes
sending      the path of a message to a broker
member       one client in one consumer group: heartbeats, rebalance, leases, offsets
consuming    pull requests, process queues, handlers, commits
sharing      receives (POP), renewals and acknowledgements of SharedConsumer and LiteConsumer
admin        administration of a cluster
config, errors

A public name is imported when it is first used, so that a process that needs one part, such as a Spark worker, does not
load the other parts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..protocol.admin_bodies import LiteParent
    from ..protocol.allocation import (
        AVG,
        AVG_BY_CIRCLE,
        CONSISTENT_HASH,
        STICKY,
        Configured,
        MachineRoomNearby,
        Strategy,
    )
    from ..protocol.bodies import GroupConfig
    from ..protocol.headers import PutAccount
    from ..protocol.names import Queue, Sql
    from .admin.admin_client import AdminClient, Group, LiteGroup, OffsetChange, Topic, rebalanced
    from .admin.trace import MessageTrace
    from .application import Depends, Health, Rocketlet, stop_signal
    from .cloudevents import CloudEvent
    from .config import ClientLimits, PullLimits, Start
    from .consumer import Consumer
    from .consuming.handling import Reject, RetryLater, RetryPolicy
    from .consuming.once import HandledIds
    from .errors import (
        AnswerUnreadable,
        BrokerRefused,
        ChangeIncomplete,
        ConfigError,
        ConnectionFailed,
        MessageIllegal,
        RequestFailed,
        RequestTimeout,
        RocketletError,
        TopicNotFound,
        TransactionContradicted,
    )
    from .lite_consumer import LiteConsumer
    from .member.offsets import Position
    from .message import Message, Outgoing, SendResult
    from .producer import Producer
    from .sending.accumulator import Sending
    from .shared_consumer import SharedConsumer
    from .wire.connection import Access

_NAMES: Final = {
    "..protocol.allocation": (
        "AVG",
        "AVG_BY_CIRCLE",
        "CONSISTENT_HASH",
        "STICKY",
        "Configured",
        "MachineRoomNearby",
        "Strategy",
    ),
    "..protocol.admin_bodies": ("LiteParent",),
    "..protocol.bodies": ("GroupConfig",),
    "..protocol.headers": ("PutAccount",),
    "..protocol.names": (
        "Queue",
        "Sql",
    ),
    ".admin.admin_client": (
        "AdminClient",
        "Group",
        "LiteGroup",
        "Topic",
        "OffsetChange",
        "rebalanced",
    ),
    ".admin.trace": ("MessageTrace",),
    ".application": (
        "Health",
        "Rocketlet",
        "Depends",
        "stop_signal",
    ),
    ".cloudevents": ("CloudEvent",),
    ".config": (
        "ClientLimits",
        "PullLimits",
        "Start",
    ),
    ".consumer": ("Consumer",),
    ".consuming.handling": (
        "Reject",
        "RetryLater",
        "RetryPolicy",
    ),
    ".consuming.once": ("HandledIds",),
    ".errors": (
        "AnswerUnreadable",
        "BrokerRefused",
        "ChangeIncomplete",
        "ConfigError",
        "ConnectionFailed",
        "MessageIllegal",
        "RequestFailed",
        "RequestTimeout",
        "RocketletError",
        "TopicNotFound",
        "TransactionContradicted",
    ),
    ".member.offsets": ("Position",),
    ".message": (
        "Message",
        "Outgoing",
        "SendResult",
    ),
    ".producer": ("Producer",),
    ".sending.accumulator": ("Sending",),
    ".lite_consumer": ("LiteConsumer",),
    ".shared_consumer": ("SharedConsumer",),
    ".wire.connection": ("Access",),
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AVG",
    "AVG_BY_CIRCLE",
    "CONSISTENT_HASH",
    "STICKY",
    "Access",
    "AdminClient",
    "AnswerUnreadable",
    "BrokerRefused",
    "ChangeIncomplete",
    "ClientLimits",
    "CloudEvent",
    "ConfigError",
    "Configured",
    "ConnectionFailed",
    "Consumer",
    "Depends",
    "Group",
    "GroupConfig",
    "HandledIds",
    "Health",
    "LiteConsumer",
    "LiteGroup",
    "LiteParent",
    "MachineRoomNearby",
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
    "TransactionContradicted",
    "rebalanced",
    "stop_signal",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use, and cache the name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | globals().keys())
