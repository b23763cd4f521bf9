"""Reads and writes JSON as Apache's fastjson does, with unquoted numbers and objects as keys of maps.

    {"brokerAddrs":{0:"10.0.0.1:10911"}}        {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}

An object as a key becomes the text of that object, so that the result is an ordinary `dict[str, ...]`. Valid JSON,
the common case, goes to orjson at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from .config import MAX_DEPTH

# Possessive, and matched from one token to the next: bad text costs its length once, not its square.
_TOKEN = re.compile(r'\s*+("(?:[^"\\]|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]++)', re.DOTALL)


# A table of a broker has one such key for each queue: read by the token, a thousand of them take 15 ms.
_MEMBER = r'"[^"\x00-\x1f]*+":(?:"[^"\x00-\x1f]*+"|-?[1-9]\d{0,17}+|0)'
_OBJECT_KEY = re.compile(rf"(\{{{_MEMBER}(?:,{_MEMBER})*+\}})(?=:)")


class JsonError(ValueError):
    """The text is neither JSON nor fastjson's dialect of it."""


def loads(data: bytes) -> Any:
    """The value of a JSON body. Raises JsonError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        text = data.decode()
        try:
            return orjson.loads(_with_text_keys(text))
        except orjson.JSONDecodeError:
            return _Reader(text).document()
    except (UnicodeDecodeError, IndexError):
        raise JsonError(f"this is not JSON: {data[:80]!r}") from None


def object_keys(pairs: Iterable[tuple[Any, Any]]) -> bytes:
    """A map whose keys are objects, as fastjson writes it and Go's client expects it: `{{"a":1}:2}`."""
    return b"{%b}" % b",".join(object_key(key, value) for key, value in pairs)


def object_key(key: Any, value: Any) -> bytes:
    """One entry of such a map."""
    return b"%b:%b" % (orjson.dumps(key), orjson.dumps(value))


def _with_text_keys(text: str) -> str:
    """The text with the text of each small object that is a key in its place; as it is where that is not plain to see.

    Without a backslash, what follows an even number of quotes is outside of a string."""
    if "\\" in text:
        return text
    parts = _OBJECT_KEY.split(text)
    if any(part.count('"') % 2 for part in parts[::2]):
        return text
    parts[1::2] = ['"' + key.replace('"', '\\"') + '"' for key in parts[1::2]]
    return "".join(parts)


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._at = 0
        end = 0
        while match := _TOKEN.match(text, end):
            self._tokens.append(match[1])
            end = match.end()
        if text[end:].strip():
            raise JsonError(f"this is not JSON from character {end} on: {text[end : end + 40]!r}")

    def document(self) -> Any:
        value = self._value(0)
        if self._at != len(self._tokens):
            raise JsonError(f"text after the JSON value: {self._tokens[self._at][:40]!r}")
        return value

    def _next(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise JsonError(f"JSON nested deeper than {MAX_DEPTH}")
        token = self._next()
        if token == "{":
            return self._object(depth)
        if token == "[":
            return self._array(depth)
        return _scalar(token)

    def _array(self, depth: int) -> list[Any]:
        values: list[Any] = []
        while self._peek() != "]":
            values.append(self._value(depth + 1))
            if self._peek() == ",":
                self._next()
        self._next()
        return values

    def _object(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while self._peek() != "}":
            key = self._value(depth + 1)
            if self._next() != ":":
                raise JsonError("a key has no colon after it")
            pairs[key if isinstance(key, str) else orjson.dumps(key).decode()] = self._value(depth + 1)
            if self._peek() == ",":
                self._next()
        self._next()
        return pairs


def _scalar(token: str) -> Any:
    try:
        return orjson.loads(token)
    except orjson.JSONDecodeError:
        raise JsonError(f"this is not a JSON value: {token[:40]!r}") from None
