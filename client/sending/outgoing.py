"""Turns a message into its wire form, and refuses messages that no broker would take. Each function raises
MessageIllegal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...protocol import names
from ...protocol import properties as props
from ...protocol.config import MAX_BODY_BYTES, SENT_PROPERTY_BYTES
from ...protocol.queue import Queue
from ..errors import MessageIllegal
from ..message import Outgoing

if TYPE_CHECKING:  # whose stubs every type checker has; it need not be installed
    from typing_extensions import TypeVar

    Body = TypeVar("Body", default=bytes)
else:
    from typing import TypeVar

    Body = TypeVar("Body")

PROPERTY_BYTES: Final = SENT_PROPERTY_BYTES - 100  # the broker adds its own


def checked_body(body: bytes) -> bytes:
    if not isinstance(body, bytes):
        raise MessageIllegal(f"the body is {type(body).__name__}; it must be bytes, such as text.encode()")
    if not body:
        raise MessageIllegal("the body is empty")
    if len(body) > MAX_BODY_BYTES:
        raise MessageIllegal(f"the body has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
    return body


def encoded_by(encode: Callable[[Any], bytes | str], value: Any) -> bytes:
    """The bytes that `Producer(encode=...)` makes of a body."""
    try:
        made = encode(value)
    except Exception as error:
        raise MessageIllegal(f"the body {value!r:.200} cannot be encoded: {error!r}") from error
    if isinstance(made, str):
        return encoded("body", made)
    if not isinstance(made, bytes):
        raise MessageIllegal(f"encode returned {type(made).__name__}; it must return bytes or text")
    return made


def properties_text(
    tag: str | None,
    keys: str | Sequence[str],
    properties: Mapping[str, str] | None,
    unique_key: str,
    later: str,
    *,
    is_again: bool = False,
) -> str:
    """The properties' text. `unique_key` is checked already, `later` is the property that keeps the message back.
    is_again: of a message that was sent before, perhaps by a client that takes any tag. Raises MessageIllegal."""
    text = f"UNIQ_KEY\x01{unique_key}"
    if tag:
        if "||" in _plain("tag", tag) and not is_again:
            raise MessageIllegal(
                f"the tag {tag!r} holds '||', which separates tags: a message has one; nobody would get it"
            )
        text = f"TAGS\x01{tag}\x02{text}"
    if keys:
        joined = _one_key(_plain("keys", keys)) if isinstance(keys, str) else _plain("keys", _joined(keys))
        text = f"KEYS\x01{joined}\x02{text}"
    if later:
        text = f"{later}\x02{text}"
    if properties:
        if not isinstance(properties, Mapping):
            raise MessageIllegal(f"the properties {properties!r} are not a mapping of texts")
        fault = props.reserved_fault(properties)
        if fault:
            raise MessageIllegal(fault)
        text = f"{text}\x02{props.encode(properties)}"
    size_bytes = len(text) if text.isascii() else len(encoded("properties' text", text))
    if size_bytes > PROPERTY_BYTES:
        raise MessageIllegal(f"the properties have {size_bytes} bytes; {PROPERTY_BYTES} are allowed")
    return text


def encoded(name: str, text: str) -> bytes:
    """UTF-8, which has no bytes for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise MessageIllegal(f"the {name} holds {half!r}, half a surrogate pair, which UTF-8 cannot hold") from None


def checked_id(message_id: str) -> str:
    if message_id == "":
        raise MessageIllegal("the message id is empty; leave it out for a new one")
    return _plain("message id", message_id)


def check_topic(topic: str) -> None:
    fault = names.topic_fault(topic) if isinstance(topic, str) else f"the topic {topic!r} is not a text"
    if fault:
        raise MessageIllegal(fault)


def check_queue(topic: str, queue: Queue | None) -> None:
    if queue is not None and not (isinstance(queue, Queue) and queue.topic == topic and queue.queue_id >= 0):
        raise MessageIllegal(f"the queue {queue!r} is not a Queue of the topic {topic}")


def check_flag(flag: int) -> None:
    if type(flag) is not int or not -(2**31) <= flag < 2**31:
        raise MessageIllegal(f"the flag {flag!r} is not a number of 32 bits")


def outgoing(messages: Iterable[Any], encode: Callable[[Any], Any]) -> tuple[Outgoing, ...]:
    """The messages of a batch. `encode` makes the body of values that are neither bytes nor an Outgoing."""
    allowed = "a batch takes a list of bytes or Outgoing(...)"
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise MessageIllegal(f"the batch is {type(messages).__name__}; {allowed}")
    bodies = (item if isinstance(item, Outgoing) else encode(item) for item in messages)
    items = tuple(Outgoing(item) if isinstance(item, bytes) else item for item in bodies)
    odd = [item for item in items if not isinstance(item, Outgoing)]
    if odd:
        raise MessageIllegal(f"{odd[0]!r} is {type(odd[0]).__name__}; {allowed}")
    return items


def _joined(keys: Sequence[str]) -> str:
    if not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in keys):
        raise MessageIllegal(f"the keys {keys!r} are neither a text nor texts; use str(...)")
    return " ".join(map(_one_key, keys))


def _one_key(key: str) -> str:
    """Brokers and consumers split keys at blanks."""
    if len(key.split()) > 1:
        raise MessageIllegal(
            f"the key {key!r} holds blanks, at which brokers split it; give {key.split()!r}, or no blanks"
        )
    return key


def _plain(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise MessageIllegal(f"the {name} {text!r} is not a text; use str({text!r})")
    if not text.strip() or "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"the {name} {text!r} may neither be blank nor hold U+0001 or U+0002")
    return text
