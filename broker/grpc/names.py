"""Names in requests, checked."""

from __future__ import annotations

import re
from typing import Any, Final

from ...protocol import names
from .codes import Code, Fault

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
_SYSTEM_PREFIX: Final = "RMQ_SYS_"


def topic_of(resource: Any) -> str:
    """Raises Fault."""
    name: str = resource.name
    fault = names.topic_fault(name)
    if fault:
        raise Fault(Code.ILLEGAL_TOPIC, fault)
    if names.is_system_topic(name) or name.startswith(_SYSTEM_PREFIX):
        raise Fault(Code.ILLEGAL_TOPIC, f"cannot access system topic: {name}")
    return name


def group_of(resource: Any) -> str:
    """Raises Fault."""
    name: str = resource.name
    fault = names.group_fault(name)
    if fault:
        raise Fault(Code.ILLEGAL_CONSUMER_GROUP, fault)
    if names.is_system_group(name):
        raise Fault(Code.ILLEGAL_CONSUMER_GROUP, f"cannot access system group: {name}")
    return name


def has_control(text: str) -> bool:
    """Whether a text has characters that end a property, or are none that anybody means."""
    return _CONTROL(text) is not None
