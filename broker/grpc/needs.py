"""The permissions that each request needs, with the words of the accounts' rules."""

from __future__ import annotations

from typing import Any

from ...protocol.config import MAX_SUBSCRIPTIONS
from ..access.accounts import Permission
from ..access.needs import Need, group, topic
from .codes import Code, Fault

PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY


def knows(request: Any) -> list[Need]:
    return [topic(request.topic.name, ANY)]


def publishes(request: Any) -> list[Need]:
    return [topic(request.topic.name, PUB)]


def sends(request: Any) -> list[Need]:
    return [topic(name, PUB) for name in {message.topic.name for message in request.messages}]


def consumes(request: Any) -> list[Need]:
    return [group(request.group.name), topic(request.topic.name, SUB)]


def receives(request: Any) -> list[Need]:
    return [group(request.group.name), topic(request.message_queue.topic.name, SUB)]


def is_of_group(request: Any) -> list[Need]:
    return [group(request.group.name)] if request.HasField("group") and request.group.name else []


def check_count(settings: Any) -> None:
    """Raises Fault for more topics than a client can have."""
    count = max(len(settings.publishing.topics), len(settings.subscription.subscriptions))
    if count > MAX_SUBSCRIPTIONS:
        raise Fault(Code.BAD_REQUEST, f"the settings name {count} topics; {MAX_SUBSCRIPTIONS} are allowed")


def settles(command: Any) -> list[Need]:
    """The needs of telemetry: each topic that a producer names, or a consumer's group with each of its topics."""
    settings = command.settings
    check_count(settings)
    found = [topic(resource.name, PUB) for resource in settings.publishing.topics]
    if settings.HasField("subscription"):
        found.append(group(settings.subscription.group.name))
        found += [topic(entry.topic.name, SUB) for entry in settings.subscription.subscriptions]
    return found
