"""Sends a message that the user writes or copies from another one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from ...client.errors import MessageIllegal, RocketletError
from ...client.message import Message
from ...client.sending.accumulator import properties_text
from ...protocol import names
from ...protocol.message import MessageError
from ...protocol.names import Queue
from ..change import Change
from ..config import LISTED_TOPICS, MAX_SENT_DELAY_S, TYPED_BODY_BYTES
from ..console import Console
from ..form import FieldFault, Form, query_of
from ..page import Page, console_of, is_load, typed_of
from ..text import duration, number, part, size, visible
from .messages import at_place


@dataclass(frozen=True, slots=True)
class Draft:
    """The form's initial values. `kept_bytes` is the size of a body that is copied without being in the form, because it is
    too large or not text."""

    topic: str = ""
    tag: str = ""
    keys: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    body: str = ""
    kept_bytes: int | None = None


async def new(request: Request) -> Page:
    console, query, typed = console_of(request), query_of(request), typed_of(request)
    copied = query.text("copy") or typed.text("copy")
    draft = Draft(topic=query.text("topic"))
    if copied:
        draft = await asyncio.to_thread(_draft, await _copied(console, copied))
    topics = [name for name in await console.topics.list(now=is_load(request)) if not names.is_made_by_brokers(name)]
    lines = "\n".join(f"{name}={value}" for name, value in draft.properties.items() if "\n" not in value)
    left_out = [name for name, value in draft.properties.items() if "\n" in value]
    return Page(
        "message_form.html",
        {"draft": draft, "copy": copied, "topics": topics[:LISTED_TOPICS], "lines": lines, "left_out": left_out},
    )


async def _copied(console: Console, place: str) -> Message:
    """Return the message at a place TOPIC/BROKER/QUEUE/OFFSET. Raises FieldFault or TopicNotFound."""
    topic, _, rest = place.partition("/")
    broker, queue, offset = (*rest.rsplit("/", 2), "", "")[:3]
    if not broker or not queue.isdecimal() or not offset.isdecimal():
        raise FieldFault("copy", f"{place[:80]!r} is not TOPIC/BROKER/QUEUE/OFFSET")
    return await at_place(console, Queue(topic, broker, int(queue)), int(offset))


def _draft(message: Message) -> Draft:
    body = _body(message)
    text = _typed(body)
    kept_bytes = len(body) if text is None else None
    keys = " ".join(message.keys)
    return Draft(message.origin, message.tag or "", keys, message.user_properties, text or "", kept_bytes)


def _body(message: Message) -> bytes:
    try:
        return message.body
    except MessageError as error:
        raise FieldFault("copy", f"its body cannot be read: {error}") from error


def _typed(body: bytes) -> str | None:
    """Return the body as text if a form can contain it and would submit the same bytes; otherwise None."""
    if len(body) > TYPED_BODY_BYTES:
        return None
    try:
        text = body.decode()
    except ValueError:
        return None
    return text if visible(text) == text else None


async def send(request: Request, form: Form) -> Change:
    console = console_of(request)
    topic, tag, keys = form.text("topic"), form.text("tag"), form.text("keys").split()
    if topic not in await console.admin.topics(system=True):
        raise FieldFault("topic", f"no broker has the topic {topic!r}; create it first" if topic else "name the topic")
    properties = _properties(form.raw("properties"))
    for name, given in {"tag": (tag, (), {}), "keys": (None, keys, {}), "properties": (None, (), properties)}.items():
        try:
            properties_text(*given, "", "")
        except MessageIllegal as error:
            raise FieldFault(name, str(error)) from error
    if "body" in form:
        body = form.raw("body").encode()
    else:  # a copy of a body that a form cannot contain
        body = await asyncio.to_thread(_body, await _copied(console, form.text("copy")))
    if not body:
        raise FieldFault("body", "it is empty: RocketMQ has no messages without a body")
    delay_s, lite_topic = _delay_s(form), form.text("lite_topic") or None
    priority = form.number("priority", 0) if form.text("priority") else None
    readers = await _readers(console, topic)

    async def act() -> str:
        order = form.text("queue_key") or None
        async with console.producer() as producer:
            sent = await producer.send(
                topic, body, tag=tag or None, keys=keys, properties=properties, queue_key=order,
                delay=delay_s, priority=priority, lite_topic=lite_topic,
            )  # fmt: skip
        if delay_s:
            return f"The message {sent.message_id} was sent to {topic}; consumers get it in {duration(delay_s * 1000)}."
        return f"The message {sent.message_id} was sent to {sent.queue}, offset {number(sent.queue_offset)}."

    more = [
        f"delay {duration(delay_s * 1000)}" if delay_s else "",
        f"priority {priority}" if priority is not None else "",
        f"lite topic {lite_topic}" if lite_topic else "",
    ]
    about = [f"{size(len(body))}, tag {tag or 'none'}, keys {' '.join(keys) or 'none'}", *filter(None, more)]
    effects = [f"{', '.join(about)}.", readers]
    return Change(f"Send this message to {topic}?", act, f"/topics/{part(topic)}/tail", "Send it", effects)


async def _readers(console: Console, topic: str) -> str:
    try:
        readers = await console.admin.consumed_by(topic)
    except RocketletError:  # for example, the account may send, but not query
        return "The console may not see which groups read the topic."
    return f"These groups get it: {', '.join(readers)}." if readers else "No group reads the topic now."


def _delay_s(form: Form) -> float | None:
    """Return the delay in seconds; None for immediate delivery."""
    given = form.text("delay")
    if not given:
        return None
    try:
        delay_s = float(given)
    except ValueError:
        delay_s = -1.0
    if not 0 <= delay_s <= MAX_SENT_DELAY_S:
        raise FieldFault("delay", f"{given[:40]!r} is not a number of seconds from 0 to {MAX_SENT_DELAY_S}")
    return delay_s or None


def _properties(text: str) -> dict[str, str]:
    """Parse lines of NAME=VALUE."""
    found: dict[str, str] = {}
    for line in filter(str.strip, text.split("\n")):
        name, separator, value = line.partition("=")
        if not separator or not name.strip():
            raise FieldFault("properties", f"{line[:80]!r} is not NAME=VALUE")
        if name.strip() in found:
            raise FieldFault("properties", f"{name.strip()!r} has two lines; give one")
        found[name.strip()] = value
    return found
