"""What a request needs, in the words of Apache's ACL (`plain_acl.yml`); the table of requests has one for each code."""

from __future__ import annotations

from enum import Enum


class Permission(Enum):
    """PUB and SUB are about the topics and groups that the request names."""

    NONE = "none"  # whoever can connect: routes, offsets of queues, answers
    PUB = "pub"  # sends to a topic
    SUB = "sub"  # reads a topic for a group
    ADMIN = "admin"  # sets up topics, groups and brokers, or looks into what is not the client's own
    BROKER = "broker"  # tells a name server of a broker
