"""Data loss: errors and warnings for an offset that is no longer in its queue, and for a queue that has no route any more."""

from __future__ import annotations

from collections.abc import Iterable

from ..client.errors import RocketletError, get_logger
from ..protocol import names
from ..protocol.names import Queue, counted
from .extents import Extent
from .worker import DataLossError

log = get_logger("rocketlet.spark")


MOVED = (
    "A checkpoint is valid for its own cluster. In another one, start with a new checkpoint and startingTimestamp; or, "
    "where `rocketlet mirror` has copied the group, with startingOffsets=committed"
)
FROM_FIRST = "failOnDataLoss=false reads this topic from its first message on"
WITHOUT = "failOnDataLoss=false continues without them"


def shown(queue: Queue) -> str:
    """Return the name of a queue for users, who know their group but perhaps not its retry topic."""
    if queue.topic.startswith(names.RETRY_PREFIX):
        group = queue.topic.removeprefix(names.RETRY_PREFIX)
        return f"the retries of the group {group} on {queue.broker_name}, queue {queue.queue_id}"
    return str(queue)


def outside(queue: Queue, wanted: int, extent: Extent, *, is_same: bool, fail: bool) -> int:
    """Return the offset at which to continue, for a position that is not in its queue.

    Args:
        wanted: the position
        extent: offsets that the queue holds now
        is_same: True if the topic is known to be the same as when the position was recorded. The end of such a queue
            decreases only if its broker has lost messages that were not written to disk; all messages of another topic
            are new.
        fail: True if the option failOnDataLoss is set
    Raises:
        DataLossError: `fail` is True
    """
    if wanted < extent.begin:
        reason = f"the messages {wanted} to {extent.begin} have expired. {WITHOUT}"
        return _lost(queue, wanted, extent, reason, extent.begin, fail)
    if is_same:
        reason = f"its broker has lost messages. failOnDataLoss=false continues at its end, {extent.end}"
        return _lost(queue, wanted, extent, reason, extent.end, fail)
    reason = f"the topic or its broker was recreated. {FROM_FIRST}"
    return _lost(queue, wanted, extent, reason, extent.begin, fail)


def recreated(queue: Queue, wanted: int, extent: Extent, *, fail: bool) -> int:
    """Return the offset at which to continue after a topic was recreated. Raises DataLossError if `fail` is True."""
    reason = (
        f"these are other messages: the topic {queue.topic} on {queue.broker_name} was recreated, or this is another "
        f"cluster. {MOVED}; {FROM_FIRST}"
    )
    return _lost(queue, wanted, extent, reason, extent.begin, fail)


def other_cluster(brokers: Iterable[str], topic: str, *, fail: bool) -> None:
    """Log that none of the brokers in the checkpoint has a topic, while other brokers have it. Raises DataLossError if
    `fail` is True."""
    missing = ", ".join(sorted(brokers))
    text = f"the topic {topic} is on none of the brokers {missing} of the checkpoint: this is another cluster"
    if fail:
        raise DataLossError(f"{text}. {MOVED}; {FROM_FIRST}")
    hint = "everything is read from the first message on"
    log.warning("checkpoint_of_another_cluster", topic=topic, reason=text, hint=hint)


def gone(queue: Queue) -> RocketletError:
    """Return the error for a query that ends on its own and has a queue whose topic does not exist any more."""
    return RocketletError(
        f"{shown(queue)}: no name server has a route for the topic {queue.topic}, "
        f"so the number of its unread messages is unknown; {WITHOUT}"
    )


def unrouted(queue: Queue, readable: int, unread: int) -> RocketletError:
    """Return the error for a query that ends on its own and has unread messages in a queue that its topic no longer
    has."""
    return RocketletError(
        f"{shown(queue)}: the topic {queue.topic} has {counted(readable, 'readable queue')} on {queue.broker_name} now, and "
        f"{counted(unread, 'message')} in this one are unread. Make it readable (rocketlet topics set {queue.topic} "
        f"--read-queues {queue.queue_id + 1}); {WITHOUT}"
    )


def retired(queue: Queue, *, fail: bool) -> None:
    """Log that a range cannot be read because its broker is not registered. Raises DataLossError if `fail` is True."""
    text = (
        f"{shown(queue)}: no name server has a route to {queue.broker_name}, which holds messages of the planned batch"
    )
    if fail:
        raise DataLossError(f"{text}. Start the broker; {WITHOUT}")
    log.warning("messages_lost", queue=str(queue), reason=text)


def _lost(queue: Queue, wanted: int, extent: Extent, reason: str, resumed_at: int, fail: bool) -> int:
    text = f"{shown(queue)}: the query wants offset {wanted}, the broker holds {extent.begin} to {extent.end}; {reason}"
    if fail:
        raise DataLossError(text)
    log.warning("messages_lost", queue=str(queue), wanted=wanted, begin=extent.begin, end=extent.end, reason=reason,
                resumed_at=resumed_at)  # fmt: skip
    return resumed_at
