"""PULL_MESSAGE: a pull's outcome, in the words of Apache's broker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from ....protocol.codes import Language, ResponseCode
from ....protocol.extents import MADE_ANEW
from ....protocol.frame import Frame
from ....protocol.headers import PullMessage, PullMessageResult, read, write
from ....protocol.pulled import encode_found_head
from ...broker import Broker
from ...config import FOREIGN_PULL_MESSAGES
from ...consuming.outcomes import Outcome, Pulled
from ...consuming.pulling import Fault, Pull
from ...sessions.refusal import Refusal
from ..answers import Buffers, answer, refused, reply_type, small
from ..connection import Connection
from .strangers import ask_who

_PYTHON: Final = int(Language.PYTHON)  # Python 3.11 takes 0.2 us to find a member of an enum
# with Apache's names of what its store finds (GetMessageStatus)
_CODES: Final[Mapping[Outcome, tuple[int, str]]] = {
    Outcome.NO_MATCH: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
    Outcome.AT_END: (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE"),
    Outcome.EMPTY: (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE"),
    Outcome.EMPTIED: (ResponseCode.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE"),
    Outcome.BELOW: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL"),
    Outcome.BEYOND: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    Outcome.MADE_ANEW: (ResponseCode.PULL_OFFSET_MOVED, MADE_ANEW),
}


def pull_message(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    again = connection.pulls.like(frame)
    if again is not None:
        found = broker.pulling.checked.pull(connection, *again)
        if found is not None:
            return _encoded(frame, found)
    header = read(PullMessage, frame.ext)
    # Apache's broker gives 32 at most, whatever is asked (maxTransferCountOnMessageInMemory)
    is_ours = frame.language == _PYTHON
    limit = header.max_msg_nums if is_ours else min(header.max_msg_nums, FOREIGN_PULL_MESSAGES)
    generation = broker.generation.number
    pull = Pull(connection, header, limit, lambda: partial(_answer, connection, small(frame)))
    pulled = broker.pulling.pull(pull, lambda: ask_who(broker, connection, frame, header[:3]))
    if pulled is None:
        return None
    if pulled.outcome is Outcome.FOUND:
        connection.pulls.keep(connection, frame, broker.pulling.kept(pull, generation))
    return _encoded(frame, pulled)


def _answer(connection: Connection, frame: Frame, outcome: Pulled | Fault) -> None:
    """Answers a pull that has waited."""
    if isinstance(outcome, Pulled):
        connection.write(_encoded(frame, outcome))
    elif isinstance(outcome, Refusal):
        connection.write(refused(outcome).answer(frame))
    else:
        connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(outcome)))


def _encoded(frame: Frame, pulled: Pulled) -> Buffers:
    outcome, next_offset, begin, end, pieces = pulled
    if outcome is Outcome.FOUND:
        offsets = next_offset, begin, end
        return [encode_found_head(reply_type(frame), frame.opaque, offsets, sum(map(len, pieces))), *pieces]
    code, remark = _CODES[outcome]
    return answer(frame, code, write(PullMessageResult(0, next_offset, begin, end)), remark=remark)
