"""Numbers are said with their nouns."""

from __future__ import annotations

import pytest
from rocketlet.protocol.names import counted


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (12_345, "12,345 messages")]
)
def test_one_is_singular_and_all_others_plural(count: int, text: str) -> None:
    assert counted(count, "message") == text


def test_a_verb_goes_with_its_number() -> None:
    assert [counted(count, "queue is", "queues are") for count in (1, 2)] == ["1 queue is", "2 queues are"]
