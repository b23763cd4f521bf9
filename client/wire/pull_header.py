"""The header of a pull that stands alone: it brings its own filter."""

from __future__ import annotations

from ...protocol.codes import PULL_SUBSCRIPTION
from ...protocol.frame import Ext
from ...protocol.headers import PullMessage, write
from ...protocol.names import TOOLS_GROUP
from ...protocol.queue import Queue
from ...protocol.subscription import Subscription


def pull_header(
    group: str,
    queue: Queue,
    offset: int,
    count: int,
    subscription: Subscription,
    *,
    max_bytes: int | None = None,
    identity: str | None = None,
) -> Ext:
    """A PULL_MESSAGE that brings its own filter, waits for nothing and commits nothing.

    max_bytes: how much the answer may hold, for more than a pull holds usually. identity: the topic's (`protocol.extents`);
    another topic of the name is not read. Apache's brokers know neither."""
    return write(
        PullMessage(
            group or TOOLS_GROUP,
            queue.topic,
            queue.queue_id,
            offset,
            count,
            PULL_SUBSCRIPTION,
            0,
            0,
            0,
            subscription.expression,
            subscription.kind,
            max_bytes,
            identity,
        )
    )
