"""The patterns of `whiteRemoteAddress` and `globalWhiteRemoteAddresses`, in Apache's grammar (RemoteAddressStrategyFactory).

    10.0.0.1                one address             2001:db8::1
    10.0.0.1,10.0.0.2       several                 10.0.0.{1,2,7}       2001:db8::{1,2}
    10.0.*.*                any number there        2001:db8:0:0:0:0:0:*
    10.0.0.20-60            from, to                2001:db8::1-ff
    *                       every address; also *.*.*.* and *:*:*:*:*:*:*:*
    (nothing)               none

Apache does not check what follows the first range, and some of its patterns match more than they say
(`10.0.1-5.7` matches 10.0.3.9). Here every part counts.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, ip_address
from typing import Final, NamedTuple

Span = tuple[int, int]

_ANY: Final = frozenset(("*", "*.*.*.*", "*:*:*:*:*:*:*:*"))
_MAX_ALTERNATIVES: Final = 1000


class PatternError(ValueError):
    """The text is not a pattern. The error says why."""


class AddressPattern(NamedTuple):
    """Addresses as tuples of spans, four for each of IPv4, eight of IPv6; `matches_all` for `*`."""

    alternatives: tuple[tuple[Span, ...], ...]
    matches_all: bool = False

    def matches(self, host: str) -> bool:
        """`host`: an address without its port."""
        if self.matches_all or not self.alternatives:
            return self.matches_all
        numbers = _numbers(host)
        return any(
            len(spans) == len(numbers)
            and all(low <= number <= high for number, (low, high) in zip(numbers, spans, strict=True))
            for spans in self.alternatives
        )


def parse_pattern(text: str) -> AddressPattern:
    """Raises PatternError."""
    text = text.strip()
    if text in _ANY:
        return AddressPattern((), matches_all=True)
    pieces = _expanded(text) if text.endswith("}") else text.split(",")
    if len(pieces) > _MAX_ALTERNATIVES:
        raise PatternError(f"the address pattern has {len(pieces)} alternatives; {_MAX_ALTERNATIVES} are allowed")
    return AddressPattern(tuple(_spans(piece.strip()) for piece in pieces if piece.strip()))


def _expanded(text: str) -> list[str]:
    """`10.0.0.{1,2}` spelled out; braces may stand in the last part only, as Apache has it."""
    found = re.fullmatch(r"([^{}]*[.:])\{([^{}]*)\}", text)
    if found is None:
        raise PatternError(f"the address pattern {text!r} has braces elsewhere than around its last part")
    return [found[1] + part.strip() for part in found[2].split(",")]


def _spans(text: str) -> tuple[Span, ...]:
    numbers = _numbers(text)
    if numbers:
        return tuple((number, number) for number in numbers)
    is_ipv6 = ":" in text
    parts = _ipv6_parts(text) if is_ipv6 else text.split(".")
    if len(parts) != (8 if is_ipv6 else 4):
        raise PatternError(f"the address pattern {text!r} is neither IPv4 nor IPv6")
    return tuple(_span(part.strip(), text, is_ipv6=is_ipv6) for part in parts)


def _ipv6_parts(text: str) -> list[str]:
    """Eight parts; `::` is as many zeros as are missing."""
    head, double, tail = text.partition("::")
    left, right = (side.split(":") if side else [] for side in (head, tail))
    missing = 8 - len(left) - len(right)
    return [*left, *["0"] * missing, *right] if double and missing > 0 else text.split(":")


def _span(part: str, text: str, *, is_ipv6: bool) -> Span:
    highest = 0xFFFF if is_ipv6 else 255
    if part == "*":
        return 0, highest
    found = re.fullmatch(r"([0-9a-fA-F]{1,4})(?:-([0-9a-fA-F]{1,4}))?", part)
    try:
        if found is None:
            raise ValueError(part)
        low, high = (int(number, 16 if is_ipv6 else 10) for number in (found[1], found[2] or found[1]))
    except ValueError:
        raise PatternError(f"the address pattern {text!r} has the part {part!r}; write a number, a-b or *") from None
    if not low <= high <= highest:
        allowed = "0 to ffff" if is_ipv6 else "0 to 255"
        raise PatternError(f"the address pattern {text!r} has the part {part!r}; {allowed} is allowed")
    return low, high


def _numbers(host: str) -> tuple[int, ...]:
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ()
    if not isinstance(address, IPv4Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    packed = address.packed
    if len(packed) == 4:
        return tuple(packed)
    return tuple(int.from_bytes(packed[at : at + 2], "big") for at in range(0, 16, 2))
