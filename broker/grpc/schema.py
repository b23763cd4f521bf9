"""The messages of package apache.rocketmq.v2, made from `service.binpb`.

They live in a pool of their own: the official Python client registers messages of the same names in protobuf's default pool,
and a test may run a broker in the process of its client. Their types are made when they are loaded, so mypy knows them as
Any.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "apache.rocketmq.v2"
SERVICE: Final = f"{PACKAGE}.MessagingService"


def _pool() -> descriptor_pool.DescriptorPool:
    content = pkgutil.get_data(__package__, "service.binpb")
    assert content is not None, "service.binpb is part of the package"
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL: Final = _pool()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


AckMessageRequest = _class("AckMessageRequest")
AckMessageResponse = _class("AckMessageResponse")
AckMessageResultEntry = _class("AckMessageResultEntry")
Assignment = _class("Assignment")
ChangeInvisibleDurationRequest = _class("ChangeInvisibleDurationRequest")
ChangeInvisibleDurationResponse = _class("ChangeInvisibleDurationResponse")
Endpoints = _class("Endpoints")
EndTransactionRequest = _class("EndTransactionRequest")
EndTransactionResponse = _class("EndTransactionResponse")
ForwardMessageToDeadLetterQueueRequest = _class("ForwardMessageToDeadLetterQueueRequest")
ForwardMessageToDeadLetterQueueResponse = _class("ForwardMessageToDeadLetterQueueResponse")
HeartbeatRequest = _class("HeartbeatRequest")
HeartbeatResponse = _class("HeartbeatResponse")
Message = _class("Message")
MessageQueue = _class("MessageQueue")
NotifyClientTerminationRequest = _class("NotifyClientTerminationRequest")
NotifyClientTerminationResponse = _class("NotifyClientTerminationResponse")
QueryAssignmentRequest = _class("QueryAssignmentRequest")
QueryAssignmentResponse = _class("QueryAssignmentResponse")
QueryRouteRequest = _class("QueryRouteRequest")
QueryRouteResponse = _class("QueryRouteResponse")
RecallMessageRequest = _class("RecallMessageRequest")
RecallMessageResponse = _class("RecallMessageResponse")
ReceiveMessageRequest = _class("ReceiveMessageRequest")
ReceiveMessageResponse = _class("ReceiveMessageResponse")
Resource = _class("Resource")
SendMessageRequest = _class("SendMessageRequest")
SendMessageResponse = _class("SendMessageResponse")
SendResultEntry = _class("SendResultEntry")
Settings = _class("Settings")
TelemetryCommand = _class("TelemetryCommand")
