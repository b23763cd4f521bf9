"""Fixes that can be taken out of what others depend on: clients that share messages, and moves to another cluster."""

from __future__ import annotations

from rocketlet.client.admin.mirror import Mirror, QueueCopy
from rocketlet.protocol.admin_bodies import Range

from ._removal import Change, Removal


async def _from_the_begin(mirror: Mirror, copy: QueueCopy, span: Range) -> int:
    return span.begin


SHARED: dict[str, Removal] = {
    "move-goes-on": Removal(
        "a copy that was killed goes on behind the newest copy over there", "move", 1,
        [Change(Mirror, "_place", _from_the_begin)], "O",
    ),
}  # fmt: skip
