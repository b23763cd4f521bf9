"""The lifecycle of a gRPC client: Telemetry, Heartbeat, NotifyClientTermination, and the events that the broker sends.

A client sends its settings on its Telemetry stream, which stays open, and on which the broker sends events.
Settings get a response immediately in every case, because clients wait for it at their start, some without a timeout.
The response needs every field: the Java client fails without a retry policy, producers without an exponential one, and
the Python client reads `metric`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ...protocol.bodies import GroupConfig, Work
from ...protocol.codes import Language
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.grpc import Status
from ..config import MAX_NAMED_CHARS, POLL_S, RECEIVE_BATCH, LimitExceeded
from ..messages.sending import max_attempts
from ..sessions.events import LiteTaken, OutcomeWanted, SessionEvent
from ..sessions.refusal import Refusal
from .calls import GrpcCall, set_status
from .clients import GrpcClient, HandlerContext
from .consuming import duration_ms
from .lite import LITE_CLIENTS, bind_lite_group, fill_lite
from .producing import asking
from .schema import (
    Code,
    HeartbeatResponse,
    NotifyClientTerminationResponse,
    StatusError,
    TelemetryCommand,
    check_count,
    group_of,
    status_code,
    topic_of,
)

PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER = 1, 2, 3
_NODE: Final = frozenset(("HTTP", "NODE_JS"))  # the names that Node's client sends
_NODE_READS_BACKOFFS: Final = (1, 0, 8)  # its first release that reads a list of backoffs
_is_version: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", re.ASCII).match
_NAMES: Final = {4: "PULL_CONSUMER"}
# Redeliveries wait as Apache's do: 1 to 30 s, 1 to 10 min, 20 and 30 min, 1 and 2 h
_BACKOFF_S: Final = (1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)
_NODE_CODE: Final = 8  # Language.NODE_JS of the schema
_SEND_ATTEMPTS: Final = 3
_VERSION: Final = 401  # V5_0_0, which tools show for these clients
_LANGUAGES: Final = {
    "JAVA": Language.JAVA,
    "CPP": Language.CPP,
    "DOTNET": Language.DOTNET,
    "PYTHON": Language.PYTHON,
    "GO": Language.GO,
    "HTTP": Language.HTTP,
}


def telemetry(context: HandlerContext, call: GrpcCall, command: Any) -> None:
    """Handle settings that a client sends on its stream; `command` is None if the client has ended the stream. Other commands
    are ignored."""
    if command is None:
        call.end()
        return
    if command.WhichOneof("command") != "settings":
        return
    try:
        answer = _apply_settings(context, call, command.settings)
    except (StatusError, Refusal) as error:
        refused = TelemetryCommand()
        set_status(refused.status, status_code(error), str(error))
        call.send(refused)
        call.end(Status.INVALID_ARGUMENT, str(error))
    else:
        call.send(answer)


def _apply_settings(context: HandlerContext, call: GrpcCall, settings: Any) -> Any:
    """Apply a client's settings, and return the response. Raises StatusError, Refusal."""
    kind = settings.WhichOneof("pub_sub")
    if settings.client_type in _NAMES:
        named = f"{_NAMES[settings.client_type]} of {call.text(b'x-mq-language')} {call.text(b'x-mq-client-version')}"
        raise StatusError(Code.UNRECOGNIZED_CLIENT_TYPE, f"this broker does not serve clients of the kind {named}")
    check_count(settings)
    if kind is None:
        raise StatusError(Code.BAD_REQUEST, "there is no publishing or subscription data")
    answer = TelemetryCommand()
    set_status(answer.status)
    answer.settings.CopyFrom(settings)
    answer.settings.metric.on = False
    if kind == "publishing":
        topics = tuple(topic_of(topic) for topic in settings.publishing.topics)
        client = context.clients.record_call(call)
        call.namespace = next((topic.resource_namespace for topic in settings.publishing.topics), "")
        _register_producer(context, call, client, topics)
        _for_producer(answer.settings)
    else:
        group = group_of(settings.subscription.group)
        for entry in settings.subscription.subscriptions:
            topic_of(entry.topic)
        is_lite = settings.client_type in LITE_CLIENTS
        config = bind_lite_group(context, settings) if is_lite else context.broker.group_configs.ensure(group)
        if config is not None and not is_lite:
            context.broker.group_configs.check_unbound(config)
        client = context.clients.record_call(call)
        client.group = group
        _for_consumer(answer.settings, config)
        if is_lite and config is not None:
            fill_lite(answer.settings.subscription, config)
    client.stream = call
    if settings.HasField("request_timeout"):
        client.request_timeout_s = max(duration_ms(settings.request_timeout) / 1000, 0.0)
    call.on_abort(lambda: _stream_closed(context, client, call))
    return answer


def _stream_closed(context: HandlerContext, client: GrpcClient, call: GrpcCall) -> None:
    """Handle the end of a client's telemetry stream, if the client has not opened another one. A lite consumer
    synchronizes its subscriptions again when it reconnects."""
    if client.stream is call:
        client.stream = None
        context.broker.pops.lite.client_gone(client.pop_client)


def _register_producer(context: HandlerContext, call: GrpcCall, client: GrpcClient, topics: tuple[str, ...]) -> None:
    """Register a producer, so that its transactions can be checked. The name of each topic is used as a producer group.
    Raises StatusError if these are too many."""
    language = _LANGUAGES.get(call.text(b"x-mq-language"), Language.OTHER)
    try:
        context.broker.clients.heartbeat(client, client.client_id, topics, int(language), _VERSION, is_asked=False)
    except LimitExceeded as error:
        raise StatusError(Code.TOO_MANY_REQUESTS, str(error)) from None
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
    policy.max_attempts = max_attempts(group or GroupConfig(""))
    if settings.user_agent.language == _NODE_CODE:
        # Node's client 1.0 ignores a list of times, and would dead-letter a message of an ordered or lite group at its first
        # failure. It reads these seconds as milliseconds
        policy.exponential_backoff.initial.seconds = _BACKOFF_S[0]
        policy.exponential_backoff.max.seconds = _BACKOFF_S[-1]
        policy.exponential_backoff.multiplier = 2
        return
    del policy.customized_backoff.next[:]
    for seconds in _BACKOFF_S:
        policy.customized_backoff.next.add().seconds = seconds


def heartbeat(context: HandlerContext, call: GrpcCall, request: Any) -> Any:
    if request.client_type in (PUSH_CONSUMER, SIMPLE_CONSUMER, *LITE_CLIENTS):
        group = group_of(request.group)
        context.clients.record_call(call).group = group
        _check_version(call)
        context.broker.pops.pools.clients.record_contact(call.client)
    elif request.client_type == PRODUCER:
        client = context.clients.record_call(call)
        if client.topics:
            _register_producer(context, call, client, client.topics)
    response = HeartbeatResponse()
    set_status(response.status)
    return response


def _check_version(call: GrpcCall) -> None:
    """Record a Node client whose version cannot read the settings of consumers, at each heartbeat, for `doctor`."""
    version = call.text(b"x-mq-client-version")
    if call.text(b"x-mq-language").upper() not in _NODE or not (found := _is_version(version)):
        return
    if tuple(map(int, found.groups())) < _NODE_READS_BACKOFFS:
        oldest = ".".join(map(str, _NODE_READS_BACKOFFS))
        reason = f"Node's client {version} cannot read the retry policy of consumers; use {oldest} or later"
        call.callers.note_outdated(f"{call.client_id[:MAX_NAMED_CHARS]} ({call.session.peer})", reason)


def notify_termination(context: HandlerContext, call: GrpcCall, request: Any) -> Any:
    if context.clients.leave(call.account, call.client_id, call.session):
        context.broker.pops.client_gone(call.client)
    response = NotifyClientTerminationResponse()
    set_status(response.status)
    return response


def send_event(do: Callable[[Work[None]], object], client: GrpcClient, event: SessionEvent) -> None:
    """Send an event on a client's Telemetry stream, if it is open: a check of a half message to a producer, a lite topic that
    another client has taken over to a lite consumer. Other events are not sent."""
    call = client.stream
    if call is None or call.is_over:
        return
    if isinstance(event, OutcomeWanted):
        do(asking(call, event.half))
    elif isinstance(event, LiteTaken):
        command = TelemetryCommand()
        command.notify_unsubscribe_lite_command.lite_topic = event.lite_topic
        call.send(command)
