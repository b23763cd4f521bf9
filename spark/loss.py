"""Data loss: a position that is no longer in its queue. The error names the queue, the wanted offset and the present
ones."""

from __future__ import annotations

from collections.abc import Iterable

from ..client.log import get_logger
from ..protocol import names
from ..protocol.queue import Queue
from .extents import Extent
from .failures import DataLossError

log = get_logger("rocketlet.spark")

MOVED = (
    "A checkpoint holds for its own cluster. To go on in another one, start with a new checkpoint and startingTimestamp; or, "
    "where `rocketlet mirror` has copied the group, with startingOffsets=committed"
)
FROM_FIRST = "failOnDataLoss=false reads this topic from its first message on"
WITHOUT = "failOnDataLoss=false goes on without them"


def shown(queue: Queue) -> str:
    """A queue as users know it: they know their group, but perhaps no retry topics."""
    if queue.topic.startswith(names.RETRY_PREFIX):
        group = queue.topic.removeprefix(names.RETRY_PREFIX)
        return f"the retries of the group {group} on {queue.broker_name}, queue {queue.queue_id}"
    return str(queue)


def outside(queue: Queue, wanted: int, extent: Extent, *, is_same: bool, fail: bool) -> int:
    """The offset at which to continue from a position that is not in its queue. Raises DataLossError if that is to end the
    query.

    is_same: whether the queue is known to be the one that the position is of. The end of the same queue goes back only with
    a broker that lost unwritten messages; of another queue everything is new.
    """
    if wanted < extent.begin:
        reason = f"the messages {wanted} to {extent.begin} have expired. {WITHOUT}"
        return _tell(queue, wanted, extent, reason, extent.begin, fail)
    if is_same:
        reason = f"its broker has lost messages. failOnDataLoss=false goes on at its end, {extent.end}"
        return _tell(queue, wanted, extent, reason, extent.end, fail)
    reason = f"the topic or its broker was made anew. {FROM_FIRST}"
    return _tell(queue, wanted, extent, reason, extent.begin, fail)


def made_anew(queue: Queue, wanted: int, extent: Extent, *, fail: bool) -> int:
    """The offset at which to continue if the topic was created again. Raises DataLossError if that is to end the query."""
    reason = (
        f"these are other messages: the topic {queue.topic} on {queue.broker_name} was made anew, or this is another "
        f"cluster. {MOVED}; {FROM_FIRST}"
    )
    return _tell(queue, wanted, extent, reason, extent.begin, fail)


def elsewhere(brokers: Iterable[str], topic: str, *, fail: bool) -> None:
    """No broker of the checkpoint is here, others are. Raises DataLossError if that is to end the query."""
    former = ", ".join(sorted(brokers))
    text = f"the topic {topic} is on none of the brokers {former} of the checkpoint: this is another cluster"
    if fail:
        raise DataLossError(f"{text}. {MOVED}; {FROM_FIRST}")
    hint = "everything is read from the first message on"
    log.warning("checkpoint_of_another_cluster", topic=topic, reason=text, hint=hint)


def retired(queue: Queue, *, fail: bool) -> None:
    """A range cannot be read because no name server knows its broker. Raises DataLossError if it shall."""
    text = (
        f"{shown(queue)}: no name server knows {queue.broker_name}, which holds messages of a batch that is run again"
    )
    if fail:
        raise DataLossError(f"{text}. Start the broker; {WITHOUT}")
    log.warning("messages_lost", queue=str(queue), reason=text)


def _tell(queue: Queue, wanted: int, extent: Extent, reason: str, goes_on: int, fail: bool) -> int:
    text = f"{shown(queue)}: the query wants offset {wanted}, the broker holds {extent.begin} to {extent.end}; {reason}"
    if fail:
        raise DataLossError(text)
    log.warning("messages_lost", queue=str(queue), wanted=wanted, begin=extent.begin, end=extent.end, reason=reason,
                goes_on_at=goes_on)  # fmt: skip
    return goes_on
