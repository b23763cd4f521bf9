"""The permissions that each request needs, with the words of the accounts' rules."""

from __future__ import annotations

from typing import Any

from ..access.accounts import Permission
from ..access.needs import Need, group, topic

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


def settles(command: Any) -> list[Need]:
    """Of telemetry: each topic that a producer names, and the group with each topic that a consumer does."""
    settings = command.settings
    found = [topic(resource.name, PUB) for resource in settings.publishing.topics]
    if settings.HasField("subscription"):
        found.append(group(settings.subscription.group.name))
        found += [topic(entry.topic.name, SUB) for entry in settings.subscription.subscriptions]
    return found
