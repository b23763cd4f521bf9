"""Reads where messages were stored from the answer to a send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, repeat
from typing import Final, Literal

from ...protocol.codes import ResponseCode
from ...protocol.frame import Frame
from ...protocol.queue import Queue
from ..errors import AnswerUnreadable
from ..message import SendResult

_new_tuple: Final = tuple.__new__  # a NamedTuple's own constructor costs twice as much

# a full success, or stored but not yet flushed or copied: never to be sent again
STORED: Final[Mapping[int, Literal["ok", "flush timeout", "slave timeout", "no slave"]]] = {
    ResponseCode.SUCCESS: "ok",
    ResponseCode.FLUSH_DISK_TIMEOUT: "flush timeout",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "slave timeout",
    ResponseCode.SLAVE_NOT_AVAILABLE: "no slave",
}


def sent_result(answer: Frame, key: str, queue: Queue) -> SendResult:
    """Raises AnswerUnreadable."""
    code, _, ext, _, _, _, _, _, _ = answer
    try:
        queue_id = int(ext["queueId"])
        if queue_id != queue.queue_id:
            queue = queue._replace(queue_id=queue_id)
        return _new_tuple(SendResult, (key, str(ext["msgId"]), queue, int(ext["queueOffset"]), STORED[code], ""))
    except (KeyError, ValueError) as error:
        raise AnswerUnreadable(f"the answer to a send cannot be read: {error!r}") from error


def sent_results(answer: Frame, keys: Sequence[str], queue: Queue) -> Iterable[SendResult]:
    """The results of one request's messages, which lie one behind the other. Raises AnswerUnreadable."""
    first = sent_result(answer, keys[0], queue)
    offset_ids = first.offset_id.split(",")
    if len(offset_ids) != len(keys):
        raise AnswerUnreadable(f"{len(offset_ids)} ids for {len(keys)} messages")
    columns = keys, offset_ids, repeat(first.queue), count(first.queue_offset), repeat(first.status), repeat("")
    return map(_new_tuple, repeat(SendResult), zip(*columns, strict=False))
