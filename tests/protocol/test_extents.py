from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.bodies import BodyError
from rocketlet.protocol.config import MAX_TOPICS_ASKED
from rocketlet.protocol.group_bodies import TopicExtent, decode_extents, decode_topics, encode_extents, encode_topics

SPANS = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=20)
EXTENTS = st.builds(
    lambda identity, rewinds, spans: TopicExtent(
        identity, rewinds, tuple(begin for begin, _ in spans), tuple(end for _, end in spans)
    ),
    st.text("0123456789abcdef", max_size=16),
    st.integers(0, 2**31),
    SPANS,
)


@given(st.dictionaries(st.text("abc%-", min_size=1), EXTENTS))
def test_what_a_broker_tells_is_read_back(extents: dict[str, TopicExtent]) -> None:
    assert decode_extents(encode_extents(extents)) == extents


def test_as_many_topics_as_are_allowed_may_be_asked_for() -> None:
    topics = [f"t{number}" for number in range(MAX_TOPICS_ASKED)]
    assert decode_topics(encode_topics(topics)) == topics
    with pytest.raises(BodyError, match=f"length <= {MAX_TOPICS_ASKED}"):
        decode_topics(encode_topics([*topics, "one more"]))


@given(st.binary(max_size=60))
def test_no_body_breaks_a_decoder(body: bytes) -> None:
    for decode in (decode_extents, decode_topics):
        try:
            decode(body)
        except BodyError:
            pass


@pytest.mark.parametrize("body", [b'{"t": ["a", 0, [1], []]}', b'{"t": ["a", 0, [1]]}', b'{"t": 5}', b"[]"])
def test_what_says_no_extents_is_refused(body: bytes) -> None:
    with pytest.raises(BodyError):
        decode_extents(body)
