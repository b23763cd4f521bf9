"""The head of an answer with messages is the same as the general encoder makes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.codes import RESPONSE_FLAG, VERSION, Language
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode_head
from rocketlet.protocol.headers import PullMessageResult, encode_found_head, write

INT32 = st.integers(-(2**31), 2**31 - 1)
OFFSET = st.integers(0, 2**63 - 1)


@given(st.sampled_from([JSON, ROCKETMQ, MSGPACK]), INT32, st.tuples(OFFSET, OFFSET, OFFSET), st.integers(0, 2**24))
def test_it_is_what_the_encoder_makes(kind: int, opaque: int, offsets: tuple[int, int, int], size: int) -> None:
    ext = write(PullMessageResult(0, *offsets))
    frame = Frame(0, opaque, ext, b"", RESPONSE_FLAG, "FOUND", int(Language.JAVA), VERSION, kind)
    assert encode_found_head(kind, opaque, offsets, size) == encode_head(frame, size)
