"""Checks the header fields of a request (RFC 9113, 8.2 and 8.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..config import MAX_LAYOUT_BYTES, MAX_LAYOUT_FIELDS, MAX_LAYOUTS
from .hpack import Field

Fields = Mapping[bytes, bytes]
"""A request's, by name; values of a name that is there more than once are joined by `, `."""

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b":status")
)
_MAX_DIGITS: Final = 15
_TRAILERS: Final = b"trailers"


class MalformedRequest(ValueError):
    """The request is refused; the connection goes on."""


_known_names: Final[set[tuple[bytes, ...]]] = set()
"""Sets of names that were checked, in their order: a client sends the same ones in each call."""


def request_fields(fields: list[Field]) -> Fields:
    """Raises MalformedRequest."""
    names = tuple([name for name, _ in fields])
    if names not in _known_names:
        found = _checked(fields)
        if len(found) == len(names) <= MAX_LAYOUT_FIELDS and sum(map(len, names)) <= MAX_LAYOUT_BYTES:
            if len(_known_names) >= MAX_LAYOUTS:
                _known_names.clear()
            _known_names.add(names)
    else:
        found = dict(fields)
        _check_te(found.get(b"te", _TRAILERS))
    if not (found.get(b":method") and found.get(b":scheme") and found.get(b":path")):
        raise MalformedRequest("a request needs :method, :scheme and :path")
    return found


def _checked(fields: list[Field]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    is_behind_pseudo = False
    for name, value in fields:
        if name[:1] == b":":
            if is_behind_pseudo or name not in _PSEUDO or name in found:
                raise MalformedRequest(f"the pseudo-header field {_shown(name)} may not be there, or twice")
        else:
            is_behind_pseudo = True
            _check(name, value)
            if name in found:
                value = found[name] + b", " + value
        found[name] = value
    return found


def check_trailers(fields: list[Field]) -> None:
    """Raises MalformedRequest."""
    for name, value in fields:
        if name[:1] == b":":
            raise MalformedRequest("trailers have no pseudo-header fields")
        _check(name, value)


def _check(name: bytes, value: bytes) -> None:
    if not name.islower() and (not name or name != name.lower()):
        raise MalformedRequest(f"the header field {_shown(name)} is not in lower case")
    if name in _OF_CONNECTIONS:
        raise MalformedRequest(f"the header field {_shown(name)} has no place in HTTP/2")
    if name == b"te":
        _check_te(value)


def _check_te(value: bytes) -> None:
    if value != _TRAILERS:
        raise MalformedRequest("the header field te may say nothing but trailers")


def content_length(fields: Fields) -> int:
    """-1 without one. Raises MalformedRequest."""
    text = fields.get(b"content-length")
    if text is None:
        return -1
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise MalformedRequest("content-length is not a number")
    return int(text)


def _shown(name: bytes) -> str:
    return repr(name[:40])[1:]
