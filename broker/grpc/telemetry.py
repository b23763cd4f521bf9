"""The life of a client: settings on a stream that stays open (Telemetry), Heartbeat, NotifyClientTermination.

Settings are answered in every case, and at once: clients wait for them at their start, some without an end. They need every
field: the Java client fails without a policy, producers without the exponential kind; the Python client looks at `metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import structlog

from ...protocol.codes import Language
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.group_config import GroupConfig
from ...protocol.grpc import Status
from ...protocol.work import Work
from ..config import POLL_S, RECEIVE_BATCH, LimitExceeded
from ..sessions.events import Event, OutcomeWanted
from .calls import Call, set_status
from .clients import GrpcClient
from .codes import Code, Fault
from .hall import Hall
from .names import group_of, topic_of
from .needs import check_count
from .schema import HeartbeatResponse, NotifyClientTerminationResponse, TelemetryCommand
from .transactions import asking

log = structlog.get_logger("rocketlet.grpc")

PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER = 1, 2, 3
_NAMES: Final = {4: "PULL_CONSUMER", 5: "LITE_PUSH_CONSUMER", 6: "LITE_SIMPLE_CONSUMER"}
# Redeliveries wait as Apache's do: 1 to 30 s, 1 to 10 min, 20 and 30 min, 1 and 2 h
_BACKOFF_S: Final = (1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)
_SEND_ATTEMPTS: Final = 3
_VERSION: Final = 401  # as which tools show these clients: V5_0_0
_LANGUAGES: Final = {
    "JAVA": Language.JAVA,
    "CPP": Language.CPP,
    "DOTNET": Language.DOTNET,
    "PYTHON": Language.PYTHON,
    "GO": Language.GO,
    "HTTP": Language.HTTP,
}


def telemetry(hall: Hall, call: Call, command: Any) -> None:
    """Each command of the stream; None: the client has ended it."""
    if command is None:
        call.end()
        return
    if command.WhichOneof("command") != "settings":
        return
    try:
        answer = _settle(hall, call, command.settings)
    except Fault as fault:
        refused = TelemetryCommand()
        set_status(refused.status, fault.code, str(fault))
        call.send(refused)
        call.end(Status.INVALID_ARGUMENT, str(fault))
    else:
        call.send(answer)


def _settle(hall: Hall, call: Call, settings: Any) -> Any:
    """Takes a client's settings; the answer. Raises Fault."""
    kind = settings.WhichOneof("pub_sub")
    if settings.client_type in _NAMES:
        named = f"{_NAMES[settings.client_type]} of {call.text(b'x-mq-language')} {call.text(b'x-mq-client-version')}"
        raise Fault(Code.UNRECOGNIZED_CLIENT_TYPE, f"this broker does not serve clients of the kind {named}")
    check_count(settings)
    if kind is None:
        raise Fault(Code.BAD_REQUEST, "there is no publishing or subscription data")
    answer = TelemetryCommand()
    set_status(answer.status)
    answer.settings.CopyFrom(settings)
    answer.settings.metric.on = False
    if kind == "publishing":
        topics = tuple(topic_of(topic) for topic in settings.publishing.topics)
        client = hall.clients.hear(call)
        _publish(hall, call, client, topics)
        _for_producer(answer.settings)
    else:
        group = group_of(settings.subscription.group)
        for entry in settings.subscription.subscriptions:
            topic_of(entry.topic)
        client = hall.clients.hear(call)
        client.group = group
        _for_consumer(answer.settings, hall.broker.group_configs.ensure(group))
    client.stream = call
    call.on_abort(lambda: _closed(client, call))
    return answer


def _closed(client: GrpcClient, call: Call) -> None:
    if client.stream is call:
        client.stream = None


def _publish(hall: Hall, call: Call, client: GrpcClient, topics: tuple[str, ...]) -> None:
    """A producer may be asked for the outcome of transactions: its group is the topic. Raises Fault."""
    language = _LANGUAGES.get(call.text(b"x-mq-language"), Language.OTHER)
    try:
        hall.broker.clients.heartbeat(client, client.client_id, topics, int(language), _VERSION, is_asked=False)
    except LimitExceeded as error:
        raise Fault(Code.TOO_MANY_REQUESTS, str(error)) from None
    client.topics = topics


def _for_producer(settings: Any) -> None:
    settings.publishing.max_body_size = MAX_BODY_BYTES
    settings.publishing.validate_message_type = True
    policy = settings.backoff_policy
    policy.max_attempts = _SEND_ATTEMPTS
    backoff = policy.exponential_backoff
    backoff.initial.nanos = 10_000_000
    backoff.max.seconds = 1
    backoff.multiplier = 2


def _for_consumer(settings: Any, group: GroupConfig | None) -> None:
    subscription = settings.subscription
    subscription.fifo = group is not None and group.consume_orderly
    subscription.receive_batch_size = RECEIVE_BATCH
    subscription.long_polling_timeout.seconds = int(POLL_S)
    policy = settings.backoff_policy
    policy.max_attempts = (group.retry_max_times if group is not None else 16) + 1
    del policy.customized_backoff.next[:]
    for seconds in _BACKOFF_S:
        policy.customized_backoff.next.add().seconds = seconds


def heartbeat(hall: Hall, call: Call, request: Any) -> Any:
    if request.client_type in (PUSH_CONSUMER, SIMPLE_CONSUMER):
        group = group_of(request.group)
        hall.clients.hear(call).group = group
        hall.broker.pops.heard(call.client)
    elif request.client_type == PRODUCER:
        client = hall.clients.hear(call)
        if client.topics:
            _publish(hall, call, client, client.topics)
    response = HeartbeatResponse()
    set_status(response.status)
    return response


def notify_termination(hall: Hall, call: Call, request: Any) -> Any:
    if hall.clients.leave(call.account, call.client_id, call.session):
        hall.broker.pops.client_gone(call.client)
    response = NotifyClientTerminationResponse()
    set_status(response.status)
    return response


def tell(do: Callable[[Work[None]], object], client: GrpcClient, event: Event) -> None:
    """Tells a client of an event. Only producers hear something: of half messages whose outcome is not known."""
    call = client.stream
    if call is not None and not call.is_over and isinstance(event, OutcomeWanted):
        do(asking(call, event.half))
