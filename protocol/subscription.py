"""Tag expressions: `*` or `TagA || TagB`. The broker filters by Java's hash of a tag, the client by its text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from struct import unpack
from typing import Final
from zlib import crc32

from . import properties as props
from .config import MAX_EXPRESSION_CHARS, MAX_EXPRESSION_TAGS, MAX_KEPT_TAG_CHARS, MAX_SUMMARY_CHARS

ALL: Final = "*"
TAG: Final = "TAG"
SQL92: Final = "SQL92"
_HASHED: Final = 256  # UTF-16 units whose products are added up at once
_POWERS: Final = tuple(pow(31, exponent, 1 << 32) for exponent in range(_HASHED + 1))


class Sql(str):
    """Filters by message properties, evaluated by the broker: `Sql("price > 5 AND kind IN ('a', 'b')")`."""

    __slots__ = ()


def java_hash(text: str) -> int:
    """Java's `String.hashCode`: over UTF-16 units, wrapped to a signed 32-bit number."""
    data = text.encode("utf-16-be", "surrogatepass")
    units = unpack(f">{len(data) // 2}H", data)
    value = 0
    for at in range(0, len(units), _HASHED):
        piece = units[at : at + _HASHED]
        value = value * _POWERS[len(piece)] + sum(map(mul, reversed(piece), _POWERS)) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


_known_hash = lru_cache(maxsize=4096)(java_hash)


def tag_code(properties: str) -> int:
    """The hash of a message's tag, which a broker filters by; 0 without a tag."""
    tag = props.find(properties, props.TAGS)
    if not tag:
        return 0
    return _known_hash(tag) if len(tag) <= MAX_KEPT_TAG_CHARS else java_hash(tag)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One member's subscription to one topic. `version` is the time of the subscription (ms; ns from Go)."""

    topic: str
    expression: str = ALL
    tags: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    version: int = 0
    kind: str = TAG

    @property
    def takes_all(self) -> bool:
        return self.kind == TAG and self.expression == ALL

    @property
    def summary(self) -> str:
        """The expression; of a long one its beginning, and what tells it apart from others that begin so."""
        text = self.expression
        if len(text) <= MAX_SUMMARY_CHARS:
            return text
        tail = f"... ({len(text)} characters, {crc32(text.encode('utf-8', 'surrogatepass')):08x})"
        return text[: MAX_SUMMARY_CHARS - len(tail)] + tail

    def matches_code(self, code: int) -> bool:
        """Whether a message whose tag has this hash may match: the broker's filter."""
        return self.expression == ALL or self.kind != TAG or code in self.codes


class SubscriptionError(ValueError):
    """The expression cannot be read."""


def parse_subscription(topic: str, expression: str | None, *, version: int = 0, kind: str | None = TAG) -> Subscription:
    """A subscription from its text. Raises SubscriptionError if the text names no tag at all, or too many, or is too long."""
    text = expression or ALL
    if len(text) > MAX_EXPRESSION_CHARS:
        raise SubscriptionError(f"the expression has {len(text)} characters; {MAX_EXPRESSION_CHARS} are allowed")
    kind = kind or TAG
    if kind != TAG:
        return Subscription(topic, text, version=version, kind=kind)
    if text.strip() == ALL:
        return Subscription(topic, version=version)
    tags = frozenset(part.strip() for part in text.split("||") if part.strip())
    if not tags:
        raise SubscriptionError(f"the tag expression {text!r} names no tag; use `*` or `TagA || TagB`")
    if len(tags) > MAX_EXPRESSION_TAGS:
        raise SubscriptionError(f"the tag expression names {len(tags)} tags; {MAX_EXPRESSION_TAGS} are allowed")
    return Subscription(topic, text, tags, frozenset(map(java_hash, tags)), version)
