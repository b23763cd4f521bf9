"""Producer and push consumer for RocketMQ 4.9 brokers, Rocketlet's or Apache's, in asyncio.

producer, consumer   what users call
sender, outgoing     where messages go and what is tried again; what may be sent
requests             request and reply
membership           one client in one consumer group: heartbeats, rebalance and leases together
heartbeats           tells brokers that the member is here
rebalance            WHEN queues change hands
leases               HOW a queue changes hands, and how long it is ours
hand_overs           what is given up at one time, in one request
assignment           the queues that a consumer owns now; who is told of them, what is paused
process_queue        what was pulled of one queue and not yet acknowledged
commits              when a consumer commits
standing             names queues that stand, and a blocked event loop
settling             waits for a group to come to rest
signals              waits until the process is told to stop
deliveries           messages for a consumer without a handler
shares               whose queues are whose, asked of brokers
admin, message_search  what an administrator asks and sets
track, ownership     what became of a message; who owned which queue when
mirror               copies topics and groups to another cluster
transactions         half messages and their outcome
questions            what brokers ask a consumer for an administrator
pulling, handling    bytes to messages; messages to the user's handler
cluster, connection  name servers, routes, sockets
running_time         timeouts that do not count what the process stood still for
home                 the process and the event loop that a client lives in
answers              reads what servers answer
tasks                how what runs in the background ends
access               TLS, Apache's ACL, the encoding of headers
message_trace        Apache's message trace
offsets              where a queue is read from, and how far the group has come
options, listeners    what consumers are given
arguments            and how it is checked
message, errors, config, log

Names load when they are first used: whoever needs a part, such as a Spark worker, does not load the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, STICKY, Strategy
    from ..protocol.bodies import Queue
    from ..protocol.subscription import Sql
    from .access import Access
    from .admin import AdminClient, Group, Topic
    from .config import PullLimits, Start
    from .consumer import Consumer, Reject, RetryLater
    from .errors import (
        AnswerUnreadable,
        BrokerRefused,
        ConfigError,
        ConnectionFailed,
        MessageIllegal,
        RequestTimeout,
        RocketletError,
        TopicNotFound,
    )
    from .message import Message, Outgoing, SendResult
    from .message_trace import MessageTrace
    from .offset_change import OffsetChange
    from .offsets import Position
    from .producer import Producer, Sending
    from .settling import settled
    from .signals import stop_signal

_NAMES: Final = {
    "..protocol.allocation": (
        "AVG",
        "AVG_BY_CIRCLE",
        "CONSISTENT_HASH",
        "STICKY",
        "Strategy",
    ),
    "..protocol.bodies": ("Queue",),
    "..protocol.subscription": ("Sql",),
    ".access": ("Access",),
    ".admin": (
        "AdminClient",
        "Group",
        "Topic",
    ),
    ".offset_change": ("OffsetChange",),
    ".config": (
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
        "RequestTimeout",
        "RocketletError",
        "TopicNotFound",
    ),
    ".message": (
        "Message",
        "Outgoing",
        "SendResult",
    ),
    ".message_trace": ("MessageTrace",),
    ".offsets": ("Position",),
    ".producer": (
        "Producer",
        "Sending",
    ),
    ".settling": ("settled",),
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
    "ConfigError",
    "ConnectionFailed",
    "Consumer",
    "Group",
    "Message",
    "MessageIllegal",
    "MessageTrace",
    "OffsetChange",
    "Outgoing",
    "Position",
    "Producer",
    "PullLimits",
    "Queue",
    "Reject",
    "RequestTimeout",
    "RetryLater",
    "RocketletError",
    "SendResult",
    "Sending",
    "Sql",
    "Start",
    "Strategy",
    "Topic",
    "TopicNotFound",
    "settled",
    "stop_signal",
]


def __getattr__(name: str) -> Any:
    """Loads the module of a public name when it is asked for, and keeps what was found."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | globals().keys())
