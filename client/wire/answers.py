"""Reads servers' answers. An unreadable one raises an error of the client's tree, like every other failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...protocol.frame import Frame
from ...protocol.headers import HeaderError, read
from ...protocol.message import MessageError
from ...protocol.schema import BodyError
from ..errors import AnswerUnreadable

T = TypeVar("T")
H = TypeVar("H", bound=tuple[Any, ...])


def body_of(answer: Frame, decode: Callable[[bytes], T]) -> T:
    """Raises AnswerUnreadable."""
    try:
        return decode(answer.body)
    except (BodyError, MessageError) as error:
        raise AnswerUnreadable(str(error)) from error


def header_of(answer: Frame, kind: type[H]) -> H:
    """Raises AnswerUnreadable."""
    try:
        return read(kind, answer.ext)
    except HeaderError as error:
        raise AnswerUnreadable(f"the answer cannot be read: {error}") from error
