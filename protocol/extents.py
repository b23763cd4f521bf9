"""GET_QUEUE_OFFSETS, Rocketlet's own request: where all queues of some topics begin and end, in one answer per broker.

Apache's answer to the same question, GET_TOPIC_STATS_INFO, is for one topic, many times longer, and does not tell a
topic from another one that was made later under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import orjson
from msgspec import Meta

from .config import MAX_TOPICS_ASKED
from .schema import Long, Text, answers, reads

MADE_ANEW: Final = "TOPIC_MADE_ANEW"  # the remark to a pull of another topic than the one whose identity it names


class TopicExtent(NamedTuple):
    """One topic on one broker. `begins` and `ends` have an offset per queue, by its number; an end is exclusive.

    identity: changes whenever the topic is created, on a new disk, too. rewinds: how often the offset of the asking group
    went back in one of the queues.
    """

    identity: str
    rewinds: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]


def encode_topics(topics: Iterable[str]) -> bytes:
    """The request's body."""
    return orjson.dumps(list(topics))


@reads("topics", Annotated[list[Text], Meta(max_length=MAX_TOPICS_ASKED)])
def decode_topics(data: list[str]) -> list[str]:
    return data


def encode_extents(extents: Mapping[str, TopicExtent]) -> bytes:
    """The answer's body."""
    return orjson.dumps({topic: tuple(extent) for topic, extent in extents.items()})


@answers("queue offsets", dict[Text, tuple[Text, Long, list[Long], list[Long]]])
def decode_extents(data: dict[str, tuple[str, int, list[int], list[int]]]) -> dict[str, TopicExtent]:
    return {topic: _extent(*fields) for topic, fields in data.items()}


def _extent(identity: str, rewinds: int, begins: list[int], ends: list[int]) -> TopicExtent:
    if len(begins) != len(ends):
        raise ValueError(f"{len(begins)} queues begin and {len(ends)} end")
    return TopicExtent(identity, rewinds, tuple(begins), tuple(ends))
