"""Every method that is served, with its handler and the permissions that it needs.

Another method is another line here, and one in docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import acknowledgements, needs, recalls, receives, routes, schema, telemetry, transactions
from .calls import Method

SEND: Final = "SendMessage"


def _staged(*_: object) -> None:
    """SendMessage has no handler: it is staged (`sends.Sends`)."""
    raise AssertionError("a send is staged")


METHODS: Final[Mapping[str, Method]] = {
    method.name: method
    for method in (
        # names
        Method("QueryRoute", schema.QueryRouteRequest, schema.QueryRouteResponse, routes.query_route, needs.knows),
        Method(
            "QueryAssignment",
            schema.QueryAssignmentRequest,
            schema.QueryAssignmentResponse,
            routes.query_assignment,
            needs.consumes,
        ),
        # life of a client
        Method(
            "Telemetry",
            schema.TelemetryCommand,
            schema.TelemetryCommand,
            telemetry.telemetry,
            needs.settles,
            is_stream=True,
            is_open=True,
        ),
        Method("Heartbeat", schema.HeartbeatRequest, schema.HeartbeatResponse, telemetry.heartbeat, needs.is_of_group),
        Method(
            "NotifyClientTermination",
            schema.NotifyClientTerminationRequest,
            schema.NotifyClientTerminationResponse,
            telemetry.notify_termination,
            needs.is_of_group,
        ),
        # producers
        Method(SEND, schema.SendMessageRequest, schema.SendMessageResponse, _staged, needs.sends),
        Method(
            "EndTransaction",
            schema.EndTransactionRequest,
            schema.EndTransactionResponse,
            transactions.end_transaction,
            needs.publishes,
        ),
        Method(
            "RecallMessage",
            schema.RecallMessageRequest,
            schema.RecallMessageResponse,
            recalls.recall_message,
            needs.publishes,
        ),
        # consumers
        Method(
            "ReceiveMessage",
            schema.ReceiveMessageRequest,
            schema.ReceiveMessageResponse,
            receives.receive_message,
            needs.receives,
            is_stream=True,
        ),
        Method(
            "AckMessage",
            schema.AckMessageRequest,
            schema.AckMessageResponse,
            acknowledgements.ack_message,
            needs.consumes,
        ),
        Method(
            "ChangeInvisibleDuration",
            schema.ChangeInvisibleDurationRequest,
            schema.ChangeInvisibleDurationResponse,
            acknowledgements.change_invisible_duration,
            needs.consumes,
        ),
        Method(
            "ForwardMessageToDeadLetterQueue",
            schema.ForwardMessageToDeadLetterQueueRequest,
            schema.ForwardMessageToDeadLetterQueueResponse,
            acknowledgements.forward_to_dead_letters,
            needs.consumes,
        ),
    )
}
