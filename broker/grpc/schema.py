"""The protobuf messages of RocketMQ 5, status codes, and the checks of names and permissions in requests."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ...protocol import names
from ...protocol.config import MAX_SUBSCRIPTIONS
from ..access import Need, Permission, group, topic
from ..sessions.refusal import Reason, Refusal

# ------------------------------------------------------------------------------
# The messages of package apache.rocketmq.v2, loaded from `service.binpb`.
#
# These messages have a descriptor pool of their own, because the official Python client registers messages of the same
# names in protobuf's default pool, and a test may run a broker in the process of its client. Each class is created when it
# is imported, so mypy sees it as Any.


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


def __getattr__(name: str) -> Any:
    """Return the class of a message, such as `SendMessageRequest`."""
    try:
        globals()[name] = found = _class(name)
    except KeyError:
        raise AttributeError(name) from None
    return found


# ------------------------------------------------------------------------------
# The status codes of responses. The numbers are RocketMQ's; clients decide by them whether to retry.


class Code(IntEnum):
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    NOT_IMPLEMENTED = 50100
    MASTER_PERSISTENCE_TIMEOUT = 50401


class StatusError(Exception):
    """Refuses a call with a status code and a text."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


_REASONS: Final[Mapping[Reason, Code]] = {
    Reason.NOT_PERMITTED: Code.FORBIDDEN,
    Reason.NO_TOPIC: Code.TOPIC_NOT_FOUND,
    Reason.NO_QUEUE: Code.BAD_REQUEST,
    Reason.NO_GROUP: Code.CONSUMER_GROUP_NOT_FOUND,
    Reason.ILLEGAL_MESSAGE: Code.MESSAGE_CORRUPTED,
    Reason.ILLEGAL: Code.BAD_REQUEST,
    Reason.BAD_EXPRESSION: Code.ILLEGAL_FILTER_EXPRESSION,
    Reason.NOT_SUBSCRIBED: Code.FORBIDDEN,
    Reason.UNKNOWN_MEMBER: Code.FORBIDDEN,
    Reason.SUBSCRIPTION_NOT_LATEST: Code.TOO_MANY_REQUESTS,
    Reason.TOO_MANY_LITE_TOPICS: Code.LITE_TOPIC_QUOTA_EXCEEDED,
    Reason.LITE_GROUP: Code.ILLEGAL_CONSUMER_GROUP,
    Reason.NOT_LITE: Code.ILLEGAL_TOPIC,
    Reason.ILLEGAL_LITE_TOPIC: Code.ILLEGAL_LITE_TOPIC,
    Reason.ILLEGAL_OFFSET: Code.ILLEGAL_OFFSET,
    Reason.TOO_MANY_LITE_SUBSCRIPTIONS: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    Reason.BUSY: Code.TOO_MANY_REQUESTS,
}


def status_code(error: StatusError | Refusal) -> Code:
    return error.code if isinstance(error, StatusError) else _REASONS[error.reason]


OK_TEXT: Final = "OK"


# ------------------------------------------------------------------------------
# The permissions that each request needs, as `plain_acl.yml` names them.


PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY


def knows(request: Any) -> list[Need]:
    return [topic(full_name(request.topic), ANY)]


def publishes(request: Any) -> list[Need]:
    return [topic(full_name(request.topic), PUB)]


def sends(request: Any) -> list[Need]:
    return [topic(name, PUB) for name in {full_name(message.topic) for message in request.messages}]


def consumes(request: Any) -> list[Need]:
    return [group(full_name(request.group)), topic(full_name(request.topic), SUB)]


def receives(request: Any) -> list[Need]:
    return [group(full_name(request.group)), topic(full_name(request.message_queue.topic), SUB)]


def is_of_group(request: Any) -> list[Need]:
    return [group(full_name(request.group))] if request.HasField("group") and request.group.name else []


def check_count(settings: Any) -> None:
    """Raises StatusError if the settings name more topics than a client may have."""
    count = max(len(settings.publishing.topics), len(settings.subscription.subscriptions))
    if count > MAX_SUBSCRIPTIONS:
        raise StatusError(Code.BAD_REQUEST, f"the settings name {count} topics; maximum {MAX_SUBSCRIPTIONS}")


def settings_needs(command: Any) -> list[Need]:
    """Return the permissions for a Telemetry command: a producer's topics, or a consumer's group and topics. Raises
    StatusError for too many topics."""
    settings = command.settings
    check_count(settings)
    found = [topic(full_name(resource), PUB) for resource in settings.publishing.topics]
    if settings.HasField("subscription"):
        found.append(group(full_name(settings.subscription.group)))
        found += [topic(full_name(entry.topic), SUB) for entry in settings.subscription.subscriptions]
    return found


# ------------------------------------------------------------------------------
# Checks of names. A resource of the namespace `teamA` is named `teamA%name` everywhere in the broker, so that topics
# and groups of two namespaces are separate. Responses have the names without the namespace, as the client wrote them.


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
_SYSTEM_PREFIX: Final = "RMQ_SYS_"


def full_name(resource: Any) -> str:
    return names.with_namespace(resource.name, resource.resource_namespace)


def topic_of(resource: Any) -> str:
    """Return the topic's name with its namespace. Raises StatusError for an invalid name or a system topic."""
    name = full_name(resource)
    fault = _namespace_fault(resource) or names.topic_fault(resource.name) or names.topic_fault(name)
    if fault:
        raise StatusError(Code.ILLEGAL_TOPIC, fault)
    for known in (name, resource.name):
        if names.is_system_topic(known) or known.startswith(_SYSTEM_PREFIX):
            raise StatusError(Code.ILLEGAL_TOPIC, f"cannot access system topic: {known}")
    return name


def group_of(resource: Any) -> str:
    """Return the group's name with its namespace. Raises StatusError for an invalid name or a system group."""
    name = full_name(resource)
    fault = _namespace_fault(resource) or names.group_fault(resource.name) or names.group_fault(name)
    if fault:
        raise StatusError(Code.ILLEGAL_CONSUMER_GROUP, fault)
    for known in (name, resource.name):
        if names.is_system_group(known):
            raise StatusError(Code.ILLEGAL_CONSUMER_GROUP, f"cannot access system group: {known}")
    return name


def _namespace_fault(resource: Any) -> str | None:
    """Return an error for a namespace with a percent sign, with which two namespaces could form the same name."""
    return "the namespace has a percent sign" if "%" in resource.resource_namespace else None


def set_resource(resource: Any, name: str, namespace: str) -> None:
    """Fill in a topic's name as a client of this namespace knows it."""
    resource.name = names.without_namespace(name, namespace)
    if resource.name != name:
        resource.resource_namespace = namespace


def has_control(text: str) -> bool:
    """Return True if a text has control characters. Two of them separate properties in records."""
    return _CONTROL(text) is not None
