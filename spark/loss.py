"""Data loss: a position that is no longer in its queue. The error names the queue, what was wanted and what is there."""

from __future__ import annotations

from ..client.log import get_logger
from ..protocol.queue import Queue
from .extents import Extent
from .failures import DataLossError

log = get_logger("rocketlet.spark")

REMEDY = "set failOnDataLoss to false to go on without them, or start with a new checkpoint"


def outside(queue: Queue, wanted: int, extent: Extent, *, is_same: bool, fail: bool) -> int:
    """Where to continue from a position that is not in its queue. Raises DataLossError if that is to end the query.

    is_same: whether the queue is known to be the one that the position is of. The end of the same queue went back only with
    a broker that lost what it had not yet written; of another queue everything is new.
    """
    if wanted < extent.begin:
        reason, goes_on = f"the messages {wanted} to {extent.begin} have expired", extent.begin
    else:
        reason = "its broker has lost messages" if is_same else "the topic or its broker was made anew"
        goes_on = extent.end if is_same else extent.begin
    return _tell(queue, wanted, extent, reason, goes_on, fail)


def made_anew(queue: Queue, wanted: int, extent: Extent, *, fail: bool) -> int:
    """Where to continue if the topic was created again. Raises DataLossError if that is to end the query."""
    reason = f"these are other messages: the topic {queue.topic} on {queue.broker_name} was made anew"
    return _tell(queue, wanted, extent, reason, extent.begin, fail)


def retired(queue: Queue, *, fail: bool) -> None:
    """A range cannot be read because no name server knows its broker. Raises DataLossError if it shall."""
    text = f"{queue}: no name server knows the broker {queue.broker_name}, which holds messages of a batch that is run again"
    if fail:
        raise DataLossError(f"{text}. Start the broker; or {REMEDY}")
    log.warning("messages_lost", queue=str(queue), reason=text)


def _tell(queue: Queue, wanted: int, extent: Extent, reason: str, goes_on: int, fail: bool) -> int:
    text = f"{queue}: the query wants offset {wanted}, the broker holds {extent.begin} to {extent.end}; {reason}"
    if fail:
        raise DataLossError(f"{text}. Messages may be lost: {REMEDY}")
    log.warning("messages_lost", queue=str(queue), wanted=wanted, begin=extent.begin, end=extent.end, reason=reason,
                goes_on_at=goes_on)  # fmt: skip
    return goes_on
