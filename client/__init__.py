"""Producer and push consumer for RocketMQ 4.9 brokers, Rocketlet's or Apache's, in asyncio.

producer, consumer   what users call
membership           WHEN: heartbeats, rebalance, locks, hand-over of queues
allocation           HOW: the allocation strategies, pure
process_queue        what was pulled of one queue and not yet acknowledged
transactions         half messages and their outcome
questions            what brokers ask a consumer for an administrator
pulling, handling    bytes to messages; messages to the user's handler
cluster, connection  name servers, routes, sockets
message, errors, config
"""

from ..protocol.subscription import Sql
from .allocation import Strategy
from .config import Start
from .consumer import Consumer, Reject, RetryLater
from .errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
)
from .message import Message, Outgoing
from .producer import Producer, SendResult

__all__ = [
    "BrokerRefused",
    "ConfigError",
    "ConnectionFailed",
    "Consumer",
    "Message",
    "MessageIllegal",
    "Outgoing",
    "Producer",
    "Reject",
    "RequestTimeout",
    "RetryLater",
    "RocketletError",
    "SendResult",
    "Sql",
    "Start",
    "Strategy",
    "TopicNotFound",
]
