"""Producer and push consumer for RocketMQ 4.9 brokers, Rocketlet's or Apache's, in asyncio.

consumer, shared_consumer, producer   what applications use
application, dependencies, annotations   handlers that are declared where they are written
wire        servers: sockets, TLS, routes
sending     where a message goes, and what is tried again
member      one client in one consumer group: heartbeats, rebalance, leases, offsets
sharing     messages that members share: receives, renewals, what is said of them
consuming   pulls, process queues, handlers, commits
admin       what an administrator asks and sets
any_consumer   the common part of both consumers
receiving   a Consumer that is asked for messages
lifecycle   a client starts once and stops once
options     the options of consumers, each declared once
arguments   how options and other arguments are checked
message     a message as an application sees it
lease       how long a queue belongs to a member
signals     waits until the process is told to stop
tasks       how background tasks end
errors, config, log

Names load when they are first used: whoever needs a part, such as a Spark worker, does not load the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..protocol.allocation import (
        AVG,
        AVG_BY_CIRCLE,
        CONSISTENT_HASH,
        STICKY,
        Configured,
        MachineRoomNearby,
        Strategy,
    )
    from ..protocol.group_config import GroupConfig
    from ..protocol.headers import PutAccount
    from ..protocol.queue import Queue
    from ..protocol.subscription import Sql
    from .admin.admin_client import AdminClient
    from .admin.described import Group, Topic
    from .admin.message_trace import MessageTrace
    from .admin.offset_change import OffsetChange
    from .admin.settling import settled
    from .application import Health, Rocketlet
    from .config import ClientLimits, PullLimits, Start
    from .consumer import Consumer, Reject, RetryLater
    from .consuming.retrying import RetryPolicy
    from .dependencies import Depends
    from .errors import (
        AnswerUnreadable,
        BrokerRefused,
        ConfigError,
        ConnectionFailed,
        MessageIllegal,
        RequestFailed,
        RequestTimeout,
        RocketletError,
        TopicNotFound,
    )
    from .member.offsets import Position
    from .message import Message, Outgoing, SendResult
    from .producer import Producer, Sending
    from .shared_consumer import SharedConsumer
    from .signals import stop_signal
    from .wire.access import Access

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
    "..protocol.group_config": ("GroupConfig",),
    "..protocol.headers": ("PutAccount",),
    "..protocol.queue": ("Queue",),
    "..protocol.subscription": ("Sql",),
    ".wire.access": ("Access",),
    ".admin.admin_client": ("AdminClient",),
    ".admin.described": (
        "Group",
        "Topic",
    ),
    ".admin.offset_change": ("OffsetChange",),
    ".application": ("Health", "Rocketlet"),
    ".consuming.retrying": ("RetryPolicy",),
    ".dependencies": ("Depends",),
    ".config": (
        "ClientLimits",
        "PullLimits",
        "Start",
    ),
    ".consumer": (
        "Consumer",
        "Reject",
        "RetryLater",
    ),
    ".errors": (
        "AnswerUnreadable",
        "BrokerRefused",
        "ConfigError",
        "ConnectionFailed",
        "MessageIllegal",
        "RequestFailed",
        "RequestTimeout",
        "RocketletError",
        "TopicNotFound",
    ),
    ".message": (
        "Message",
        "Outgoing",
        "SendResult",
    ),
    ".admin.message_trace": ("MessageTrace",),
    ".member.offsets": ("Position",),
    ".producer": ("Producer", "Sending"),
    ".shared_consumer": ("SharedConsumer",),
    ".admin.settling": ("settled",),
    ".signals": ("stop_signal",),
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
    "ClientLimits",
    "ConfigError",
    "Configured",
    "ConnectionFailed",
    "Consumer",
    "Depends",
    "Group",
    "GroupConfig",
    "Health",
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
    "settled",
    "stop_signal",
]


def __getattr__(name: str) -> Any:
    """Loads the module of a public name when it is asked for, and keeps the name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | globals().keys())
