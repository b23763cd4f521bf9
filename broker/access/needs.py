"""The permissions that a request needs."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol import names
from .accounts import Permission


class Need(NamedTuple):
    """`resource`: a topic, or the retry topic of a group, as in the accounts."""

    resource: str
    permission: Permission


def topic(name: str, permission: Permission) -> Need:
    """A topic; of a retry topic the group counts, for reading and for writing, as Apache's."""
    return Need(name, Permission.SUB if name.startswith(names.RETRY_PREFIX) else permission)


def group(name: str) -> Need:
    return Need(names.retry_topic(name), Permission.SUB)
