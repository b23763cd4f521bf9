"""Fixes that can be taken out of what others depend on: clients that share messages, and moves to another cluster."""

from __future__ import annotations

from collections.abc import Mapping

from rocketlet.broker.grpc import authentication, door, receives
from rocketlet.broker.grpc.calls import Method
from rocketlet.broker.grpc.table import METHODS
from rocketlet.broker.pops.book import Book
from rocketlet.broker.pops.deliveries import QueueDeliveries
from rocketlet.broker.store.frames import Frames
from rocketlet.client.admin.mirror import Mirror, QueueCopy
from rocketlet.protocol.admin_bodies import Range
from rocketlet.protocol.http2 import connection
from rocketlet.protocol.http2.connection import Http2

from ._removal import Change, Lines, Removal


async def _from_the_begin(mirror: Mirror, copy: QueueCopy, span: Range) -> int:
    return span.begin


def _without_needs(name: str) -> Mapping[str, Method]:
    """The table of methods, in which everybody with an account may call that one."""
    return {**METHODS, name: METHODS[name]._replace(needs=lambda request: [])}


SHARED: dict[str, Removal] = {
    "resets-counted": Removal(
        "calls that are given up at once are counted", "floods", 40,
        [Change(Http2, "_count_reset", lambda self: None)], "HTTP/2",
    ),
    "controls-counted": Removal(
        "frames that carry nothing are counted", "floods", 40,
        [Change(Http2, "_count_control", lambda self, count=1: None)], "HTTP/2",
    ),
    "blocks-ended": Removal(
        "a header block has an end", "floods", 40,
        [Change(connection, name, 1 << 30) for name in ("MAX_HEADER_FRAMES", "MAX_HEADER_LIST_BYTES")], "HTTP/2",
    ),
    "windows-counted": Removal(
        "a setting that changes many windows counts as many", "floods", 80,
        [Change(Http2, "_set", Lines("self._count_control(len(self.streams) // _COUNTED_STREAMS)", "pass"))], "HTTP/2",
    ),
    "not-taken-given": Removal(
        "messages of an answer that nobody takes go back", "floods", 40,
        [Change(receives.Receiving, "aborted", Lines("if self.given:", "if False:"))], "POP",
    ),
    "calls-authorized": Removal(
        "a call needs an account", "access", 1_000, [Change(door, "authorize", lambda acl, call, request: None)], "ACL",
    ),
    "calls-signed": Removal(
        "the signature of a call is checked", "access", 1_000,
        [Change(authentication, "_has_signed", lambda call, shown, signer: True)], "ACL",
    ),
    "receives-ruled": Removal(
        "a receive has its rule in the table", "access", 2_000,
        [Change(door, "METHODS", _without_needs("ReceiveMessage"))], "ACL",
    ),
    "pop-synced": Removal(
        "an acknowledgement of a shared message is synced before the answer", "power", 200,
        [Change(Frames, "syncs", lambda self: [])], "POP",
    ),
    "hands-kept": Removal(
        "a restart knows in whose hands messages are", "power", 100,
        [Change(QueueDeliveries, "adopt", Lines("if found.deadline_ms else", "if False else"))], "POP",
    ),
    "pops-noted": Removal(
        "messages that are popped are noted on the disk", "power", 100,
        [Change(Book, "popped", lambda self, deliveries, taken: None)], "POP",
    ),
    "move-goes-on": Removal(
        "a copy that was killed goes on behind the newest copy over there", "move", 1,
        [Change(Mirror, "_place", _from_the_begin)], "O",
    ),
}  # fmt: skip
