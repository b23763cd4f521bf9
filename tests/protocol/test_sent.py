"""The answer to a send is the same as the general encoder makes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.codes import RESPONSE_FLAG, VERSION, Language
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, encode
from rocketlet.protocol.headers import encode_sent

IDS = st.lists(st.integers(0, 2**63 - 1).map(lambda position: f"7F000001{position:016X}"), min_size=1, max_size=40)
INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.sampled_from([JSON, ROCKETMQ, MSGPACK]), INT32, IDS.map(",".join), INT32, st.integers(0, 2**63 - 1))
def test_it_is_what_the_encoder_makes(kind: int, opaque: int, ids: str, queue_id: int, offset: int) -> None:
    ext: dict[str, ExtValue] = {"msgId": ids, "queueId": queue_id, "queueOffset": offset}
    if kind != MSGPACK:
        ext |= {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    frame = Frame(0, opaque, ext, b"", RESPONSE_FLAG, None, int(Language.JAVA), VERSION, kind)
    assert encode_sent(kind, opaque, ids, queue_id, offset, "DefaultRegion") == encode(frame)
