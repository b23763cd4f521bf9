"""The report for a failed test."""

from __future__ import annotations

from . import state
from .rig import Rig

SHOWN_REQUESTS = 20


def report(rig: Rig) -> str:
    """Return the faults that acted, the members and owners of each group, and the last requests."""
    lines = [f"fault: {item}" for item in rig.faults.injected]
    if rig.is_running:
        broker = rig.running
        for group in state.groups(broker):
            lines.append(f"group {group}: members {state.members(broker, group)}")
            lines += [f"  {queue} is held by {client}" for queue, client in state.owners(broker, group).items()]
    else:
        lines.append("the broker is stopped")
    return "\n".join([*lines, *(f"request: {item}" for item in rig.requests[-SHOWN_REQUESTS:])])
