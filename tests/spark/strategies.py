"""Ranges of queues for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from rocketlet.protocol.names import Queue

QUEUES = st.builds(Queue, st.sampled_from("tu"), st.sampled_from(["a", "b:1"]), st.integers(0, 9))


RANGES = st.dictionaries(QUEUES, st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda p: (p[0], p[0] + p[1])))
