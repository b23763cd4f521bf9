"""AGREE_ON_MEMBERS, Rocketlet's own request: two brokers talk about a group that has foreign members on both.

Its header has `number`: of the last word that said something new. `heard`: the number of the other's last word that came.
`asks`: this word is to be answered by one of the other's. `digest`: of the members of the topics that both have. `token`:
what only the two know, so that the other can ask with CONFIRM_WORD, at the registered address, whether this broker said it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import orjson
from msgspec import Meta

from .config import MAX_AGREED_IDS, MAX_AGREED_LISTS, MAX_ID_CHARS
from .headers import AgreeOnMembers
from .schema import Shape, Text, reads

Ids = Annotated[list[Text], Meta(max_length=MAX_AGREED_IDS)]
Digest = Annotated[str, Meta(max_length=MAX_ID_CHARS)]


@dataclass(frozen=True, slots=True)
class Members:
    """The body. waiting: the client ids that are still drained. given: who was given the list of members with that digest,
    since the last word."""

    waiting: frozenset[str] = frozenset()
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Word(NamedTuple):
    """One message of a broker to another one about a group."""

    header: AgreeOnMembers
    members: Members


def encode_members(members: Members) -> bytes:
    return orjson.dumps({"waiting": sorted(members.waiting), "given": members.given})


class MembersShape(Shape):
    waiting: Ids
    given: Annotated[dict[Digest, Ids], Meta(max_length=MAX_AGREED_LISTS)]


@reads("members", MembersShape)
def decode_members(data: MembersShape) -> Members:
    return Members(frozenset(data.waiting), {digest: tuple(ids) for digest, ids in data.given.items()})
