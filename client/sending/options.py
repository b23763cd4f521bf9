"""The options of producers and of sends. A producer's are declared once: type, meaning, default and check."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, TypedDict

from ...protocol.names import Queue
from ..config import (
    CLIENT_LIMITS,
    COMPRESS_OVER_BYTES,
    MAX_INT,
    MAX_SEND_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    SEND_RETRIES,
    TOPIC_QUEUES,
    ClientLimits,
    Option,
    check_bool,
    check_callable,
    check_client_name,
    check_count,
    check_kind,
    check_layers,
    check_seconds,
)
from ..wire.connection import Access
from .accumulator import SendMiddleware
from .requests import Check


def _check_layers(name: str, layers: Any) -> None:
    check_layers(name, layers)
    for layer in layers:
        check_callable(name, layer, "a sending", "the next layer")


class ProducerOptions(TypedDict, total=False):
    """The options of a Producer, besides its name server, its group and `encode`."""

    timeout_s: Annotated[
        float,
        Option(
            "maximum time in seconds for a send, including its retries.",
            REQUEST_TIMEOUT_S,
            partial(check_seconds, most=MAX_SEND_TIMEOUT_S),
        ),
    ]
    retries: Annotated[
        int,
        Option(
            "maximum number of retries of a send that gets no response in time, or that a broker rejects although another "
            "queue or broker may accept it, each in another queue if possible. While no broker can be reached, a send is "
            "retried until `timeout_s` has passed, however often; 0 means no retry at all.",
            SEND_RETRIES,
            partial(check_count, least=0),
        ),
    ]
    compress_over_bytes: Annotated[
        int,
        Option(
            "minimum size in bytes of a body that is compressed.", COMPRESS_OVER_BYTES, partial(check_count, least=0)
        ),
    ]
    default_queues: Annotated[
        int,
        Option(
            "maximum number of queues on each broker for a topic that a send creates. The broker may allow fewer "
            "(`rocketlet start --queues`, 8; Apache's `defaultTopicQueueNums`).",
            TOPIC_QUEUES,
            partial(check_count, least=1, most=MAX_INT),
        ),
    ]
    batching: Annotated[
        bool,
        Option(
            "True to combine the messages that one event-loop iteration sends to one queue into one request, or into two "
            "if client and broker then work concurrently. Batching adds no delay, and each message has its own result. "
            "Delayed, compressed and transactional messages are sent alone.",
            True,
            check_bool,
        ),
    ]
    check: Annotated[
        Check | None,
        Option(
            "callback for transactions. It gets a `Message` whose outcome the broker does not know, and returns True to "
            "commit it, False to roll it back, or None if the outcome is not known yet. The broker may send the check to "
            "any producer of the group, even after a restart.",
            None,
            lambda name, value: check_callable(name, value, "a message"),
        ),
    ]
    middleware: Annotated[
        Sequence[SendMiddleware],
        Option(
            "layers around `send`, `send_batch`, `send_oneway` and the sends of transactions: `async def layer(sending, "
            "call): return await call(sending)`. A layer with a method `transaction_ended(end)` gets each outcome that was "
            "sent to a broker.",
            (),
            _check_layers,
        ),
    ]
    access: Annotated[
        Access | None,
        Option(
            "TLS settings, and the account that signs requests.",
            None,
            lambda name, value: check_kind(name, value, Access),
        ),
    ]
    limits: Annotated[
        ClientLimits,
        Option(
            "limits and intervals of the client, which tests change.",
            CLIENT_LIMITS,
            lambda name, value: check_kind(name, value, ClientLimits),
        ),
    ]
    client_name: Annotated[
        str | None,
        Option(
            "name of this client in client ids, logs and tools, such as the pod's name. Default: IP address and process id.",
            None,
            check_client_name,
        ),
    ]


class MessageOptions(TypedDict, total=False):
    """The options of any message."""

    tag: str | None
    keys: str | Sequence[str]
    properties: Mapping[str, str] | None
    queue_key: str | None


class SendOptions(MessageOptions, total=False):
    """The further options of a plain send."""

    delay_level: int
    delay: timedelta | float | None
    at: datetime | None
    priority: int | None
    lite_topic: str | None
    message_group: str | None
    queue: Queue | None
    message_id: str | None
