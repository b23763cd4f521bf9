"""Conversion of faults to and from JSON, with the same checks and errors as `Fault`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from msgspec import UNSET

from ..protocol.codes import RequestCode
from .faults import WHICH, Action, Fault
from .shapes import FaultOrder

_OWN: Final[Mapping[Action, tuple[str, ...]]] = {  # fields of each action, in addition to those that select requests
    "answer": ("code", "response", "remark"),
    "late": ("code", "delay_s"),
    "silence": ("code",),
    "drop": ("code",),
    "close": ("code",),
    "close_after": ("code",),
    "lose": ("code",),
    "slow": ("code", "bytes_per_s"),
    "freeze": (),
    "route": ("queues",),
}
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "answer": ("code", "response"),
    "late": ("code", "delay_s"),
    "slow": ("code", "bytes_per_s"),
    "freeze": ("client",),
    "route": ("topic", "queues"),
}
_MAKERS: Final[Mapping[str, Callable[..., Fault]]] = {
    "answer": Fault.answer,
    "late": Fault.late,
    "silence": Fault.silence,
    "drop": Fault.drop,
    "close": Fault.close,
    "close_after": lambda code, **rest: Fault.close(code, after=True, **rest),
    "lose": Fault.lose,
    "slow": Fault.slow,
    "freeze": Fault.freeze,
    "route": Fault.route,
}


def fault_of(order: FaultOrder) -> Fault:
    """Return the fault of a JSON object. Raises ValueError, which names the invalid field."""
    given = {name: value for name in FaultOrder.__struct_fields__ if (value := getattr(order, name)) is not UNSET}
    action = given.pop("action")
    allowed = ("client",) if action == "freeze" else (*_OWN[action], *WHICH)
    for name in given:
        if name not in allowed:
            raise ValueError(f"the fault {action!r} has no field {name!r}; allowed: {', '.join(allowed)}")
    for name in _NEEDED.get(action, ("code",)):
        if given.get(name) is None:
            raise ValueError(f"{name} is missing; the fault {action!r} needs it")
    return _MAKERS[action](**given)


def order_of(fault: Fault) -> FaultOrder:
    """Return the JSON object of a fault. Raises ValueError for a fault that changes routes with a function."""
    if fault.change_route is not None:
        raise ValueError("change: a function cannot be sent to another process; use `queues` with a remote broker")
    given: dict[str, Any] = {"action": fault.action}
    allowed = ("client",) if fault.action == "freeze" else (*_OWN[fault.action], *WHICH)
    for item in fields(fault):
        if item.name in allowed:
            given[item.name] = getattr(fault, item.name)
    for name in ("client", "group", "topic", "queue_id"):
        if given.get(name) is None:
            given.pop(name, None)
    if isinstance(given.get("code"), int) and given["code"] in RequestCode.__members__.values():
        given["code"] = RequestCode(given["code"]).name
    return FaultOrder(**given)
