"""A batch that is too long for one turn is known as such before any of its records is made."""

from __future__ import annotations

import pytest
from rocketlet.broker.config import BATCH_TURN_BYTES, BATCH_TURN_MESSAGES
from rocketlet.broker.messages.sending import LongBatch, _short
from rocketlet.protocol.message import encode_batch


def batch(messages: int, body: bytes = b"x") -> bytes:
    return encode_batch([(0, body, "")] * messages)


def test_a_batch_of_the_most_messages_is_short() -> None:
    pieces = _short(batch(BATCH_TURN_MESSAGES), b"")
    assert sum(len(piece.flags) for piece in pieces) == BATCH_TURN_MESSAGES


@pytest.mark.parametrize("body", [batch(BATCH_TURN_MESSAGES + 1), batch(1, bytes(BATCH_TURN_BYTES))])
def test_a_longer_one_is_refused_at_once(body: bytes) -> None:
    with pytest.raises(LongBatch):
        _short(body, b"")
