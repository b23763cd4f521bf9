"""JSON bodies are checked once, where they come in: msgspec checks their types, counts and lengths.

A `Shape` names the fields that are read; others are ignored, as fastjson ignores them. Like fastjson it accepts numbers and
booleans as text. Behind `reads`, a decoder finds the types that its shape says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from . import fastjson_text
from .config import (
    MAX_ANSWER_BYTES,
    MAX_DIALECT_BYTES,
    MAX_EXPRESSION_CHARS,
    MAX_ID_CHARS,
    MAX_JSON_BYTES,
    MAX_REQUEST_QUEUES,
    MAX_TOPIC_QUEUES,
)
from .subscription import SubscriptionError

T = TypeVar("T")
S = TypeVar("S")


Long = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
QueueCount = Annotated[int, Meta(ge=0, le=MAX_TOPIC_QUEUES)]
Text = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Expression = Annotated[str, Meta(max_length=MAX_EXPRESSION_CHARS)]
Enum = str | int  # fastjson reads an enum by its name or by its ordinal
QueueList = Annotated[list[T], Meta(max_length=MAX_REQUEST_QUEUES)]


class BodyError(ValueError):
    """A body cannot be read. The text says why."""


class Shape(msgspec.Struct, rename="camel"):
    """The fields of a JSON object that are read."""


class QueueShape(Shape):
    topic: Text
    broker_name: Text
    queue_id: Int


def reads(
    name: str, shape: Any = Any, *, max_bytes: int = MAX_JSON_BYTES, max_dialect_bytes: int = MAX_DIALECT_BYTES
) -> Callable[[Callable[[S], T]], Callable[[bytes], T]]:
    """Makes a decoder of JSON bytes out of one of values of a shape; what cannot be read is a BodyError."""
    decoder = msgspec.json.Decoder(shape, strict=False)

    def parse(body: bytes) -> Any:
        if len(body) > max_bytes:
            raise BodyError(f"it has {len(body)} bytes; {max_bytes} are allowed")
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # no JSON; perhaps fastjson's dialect of it
            if len(body) > max_dialect_bytes:
                raise
            return msgspec.convert(fastjson_text.loads(body), shape, strict=False)

    def decorate(decode: Callable[[S], T]) -> Callable[[bytes], T]:
        @wraps(decode)
        def decode_body(body: bytes) -> T:
            try:
                return decode(parse(body))
            except SubscriptionError as error:
                raise BodyError(f"{name}: {error}") from None
            except (ValueError, RecursionError, *_UNSHAPED) as error:
                raise BodyError(f"the {name} body cannot be read: {error or repr(error)}") from None

        return decode_body

    return decorate


_UNSHAPED = (KeyError, TypeError, AttributeError, IndexError, OverflowError)  # decoders without a shape raise these


def answers(name: str, shape: Any = Any) -> Callable[[Callable[[S], T]], Callable[[bytes], T]]:
    """Like `reads`, for answers of brokers and name servers, which may be as large as a frame."""
    return reads(name, shape, max_bytes=MAX_ANSWER_BYTES, max_dialect_bytes=MAX_ANSWER_BYTES)


def shaped(value: Any, shape: type[S]) -> S:
    """A JSON value that is decoded already, such as one of a state file. Raises BodyError."""
    try:
        return msgspec.convert(value, shape, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BodyError(str(error)) from None
