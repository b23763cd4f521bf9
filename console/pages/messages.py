"""Pages that find messages by id, key, time or position, follow a topic, and show a message and its state in groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from ...client.admin.admin_client import Topic
from ...client.admin.messages import matches
from ...client.admin.trace import trace_of, tracks
from ...client.errors import ConfigError, TopicNotFound
from ...client.message import Message
from ...protocol import names
from ...protocol.names import TRACE_TOPIC, Queue
from ..config import LISTED_TOPICS, MAX_FOUND, TAIL_BATCH, TAIL_MESSAGES
from ..console import Console
from ..form import FieldFault, Form, faults_of, query_of
from ..message_text import body_of, preview
from ..page import Page, console_of, is_load, status_of
from ..samples import now_ms
from ..text import part
from .history import NEWEST, MessagePage, PagePosition, page_back, position_of

WAYS = {
    "newest": "newest",
    "id": "message id",
    "key": "key",
    "time": "time",
    "offset": "queue and offset",
    "content": "text or property",
}
_FIELDS = ("value", "tags", "begin", "end", "broker", "queue", "offset", "body", "property")
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. `href` is the path of its page; empty if its broker is unknown."""

    message: Message
    href: str
    preview: str


async def found(request: Request) -> Page:
    console, form = console_of(request), query_of(request)
    topic, way = form.text("topic"), form.text("by", "newest")
    history, rows, faults, status = None, None, dict[str, str](), 200
    try:
        if topic or form.text("value"):
            history = await search(console, form)
            rows = await rows_of(history.messages)
    except (ConfigError, TopicNotFound) as error:
        status = status_of(error)
        faults = {"topic": str(error)} if isinstance(error, TopicNotFound) else faults_of(error)
    topics = [name for name in await console.topics.list(now=is_load(request)) if not names.is_made_by_brokers(name)]
    fields = {name: form.text(name) for name in _FIELDS}
    return Page(
        "messages.html",
        {
            **fields,
            "topic": topic,
            "topics": topics[:LISTED_TOPICS],
            "way": way if way in WAYS else "newest",
            "ways": WAYS,
            "limit": form.text("limit", "20"),
            "is_searching": way == "content" or form.text("tags", "*") != "*",
            "rows": rows,
            "before": form.text("before"),
            "older": history.older if history is not None else None,
            "parameters": {**fields, "topic": topic, "by": form.text("by"), "limit": form.text("limit")},
            "most": MAX_FOUND,
            "faults": faults,
        },
        status,
    )


async def search(console: Console, form: Form) -> MessagePage:
    """Return a page of the messages that a form describes. Raises RocketletError; FieldFault if a field is invalid."""
    topic, way = form.text("topic"), form.text("by", "newest")
    limit = form.number("limit", 20, least=1, most=MAX_FOUND)
    tags = form.text("tags", "*")
    if way == "id":
        return MessagePage(await _by_id(console, form.text("value"), topic), None)
    if not topic:
        raise FieldFault("topic", "name the topic to search")
    if way == "key":
        return MessagePage(await _by_key(console, topic, form, limit), None)
    ranges = (await console.admin.topic(topic)).ranges
    if way == "offset":
        queue = Queue(topic, form.text("broker"), form.number("queue", 0))
        begin = form.number("offset", 0)
        if queue not in ranges:
            raise FieldFault("queue", f"the topic has no queue {queue}")
        return MessagePage(await _read(console, queue, begin, begin + limit, tags), None)
    if way == "time":
        begin_ms, end_ms = form.time_ms("begin", 0), form.time_ms("end", now_ms() + DAY_MS)
        position = position_of(form, PagePosition(end_ms))
        return await page_back(console, ranges, position, limit, begin_ms=begin_ms, tags=tags)
    is_wanted = _condition(form) if way == "content" else None
    return await page_back(console, ranges, position_of(form), limit, tags=tags, is_wanted=is_wanted)


async def _by_key(console: Console, topic: str, form: Form, limit: int) -> list[Message]:
    key = form.text("value")
    if not key:
        raise FieldFault("value", "give the key to search for")
    begin_ms, end_ms = form.time_ms("begin", 0), form.time_ms("end", now_ms() + DAY_MS)
    found = await console.admin.messages_with_key(topic, key, begin_ms=begin_ms, end_ms=end_ms, limit=limit)
    return found[-limit:]


async def _by_id(console: Console, text: str, topic: str) -> list[Message]:
    """Return the messages with an id. A sender's message id needs the topic; an offset id contains the position."""
    if not text:
        raise FieldFault("value", "give the message id to search for")
    if topic:
        copies = await console.admin.copies(text, topic)
        if copies:
            return copies
    try:
        message = await console.admin.message(text)
    except ConfigError:
        if topic:
            return []
        raise
    return [] if message is None else [await _placed(console, message)]


async def _placed(console: Console, message: Message) -> Message:
    """Return the message with the name of the broker whose address it contains, or of the only broker; without a name if
    there is neither."""
    masters = {broker.addresses.get(0, ""): broker.name for broker in await console.admin.brokers()}
    host, port = message.record.store_host[:-4], message.record.store_host[-4:]
    address = ".".join(map(str, host)) + f":{int.from_bytes(port, 'big')}" if len(host) == 4 else ""
    name = masters.get(address) or (next(iter(masters.values())) if len(masters) == 1 else "")
    return Message(message.record, message.queue._replace(broker_name=name), message.topic)


def _condition(form: Form) -> Callable[[Message], bool]:
    """Return the condition that messages have a text in their body and a property. Raises FieldFault."""
    text, pair = form.text("body"), form.text("property")
    name, separator, value = pair.partition("=")
    if pair and not (separator and name):
        raise FieldFault("property", f"{pair[:80]!r} is not NAME=VALUE")
    if not text and not pair:
        raise FieldFault("body", "give a text of the body, or a property")
    return partial(matches, text=text or None, wanted={name: value} if pair else {})


async def _read(console: Console, queue: Queue, begin: int, end: int, tags: str) -> list[Message]:
    return [message async for some in console.admin.read(queue, begin, end, expression=tags) for message in some]


def _in_time(messages: list[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: (message.store_ms, message.queue, message.queue_offset))


async def rows_of(messages: Iterable[Message]) -> list[MessageRow]:
    """Return rows for messages. A thread computes them, because bodies may be compressed and a broker may use the event
    loop."""
    return await asyncio.to_thread(lambda: list(map(_row_of, messages)))


def _row_of(message: Message) -> MessageRow:
    return MessageRow(message, href_of(message), preview(message))


def href_of(message: Message) -> str:
    queue = message.queue
    if not queue.broker_name:
        return ""
    return f"/messages/{part(queue.topic)}/{part(queue.broker_name)}/{queue.queue_id}/{message.queue_offset}"


async def at_place(console: Console, queue: Queue, offset: int) -> Message:
    """Return the message at a position. Raises TopicNotFound if there is none."""
    if queue in (await console.admin.topic(queue.topic)).ranges:
        for message in await _read(console, queue, offset, offset + 1, "*"):
            return message
    raise TopicNotFound(f"there is no message at {queue} {offset}; it may have been deleted because of its age")


async def shown(request: Request) -> Page:
    console, given = console_of(request), request.path_params
    queue = Queue(given["topic"], given["broker"], given["queue"])
    message = await at_place(console, queue, given["offset"])
    body = await asyncio.to_thread(body_of, message)
    wanted = query_of(request).text("as")
    form = next((form for form in body.forms if form.name == wanted), body.forms[0])
    host, port = message.born_host
    return Page(
        "message.html",
        {
            "message": message,
            "here": href_of(message),
            "queue": queue,
            "body": body,
            "form": form,
            "born": f"{host}:{port}",
            "place": f"{queue.topic}/{queue.broker_name}/{queue.queue_id}/{message.queue_offset}",
            "tracks": await tracks(console.admin, message) if not queue.topic.startswith("%") else [],
        },
    )


async def traced(request: Request) -> Page:
    """Return the page with the message trace of Apache's format, which clients write."""
    console, form = console_of(request), query_of(request)
    message_id, topic = form.text("id"), form.text("topic", TRACE_TOPIC)
    events = await trace_of(console.admin, message_id, topic=topic) if message_id else []
    return Page("trace.html", {"id": message_id, "topic": topic, "events": events, "default": TRACE_TOPIC})


@dataclass(slots=True)
class _Tail:
    """The state of an open page: its offset in each queue, and its messages."""

    ends: dict[Queue, int]
    messages: list[Message]
    skipped: int = 0


async def tailed(request: Request) -> Page:
    """Return the page with the newest messages, to which its event stream adds new ones."""
    console, form = console_of(request), query_of(request)
    name, tags, text = request.path_params["topic"], form.text("tags", "*"), form.text("text")
    topic = await console.admin.topic(name)
    tail: _Tail | None = getattr(request.state, "tail", None)
    if tail is None:
        ends = {queue: span.end for queue, span in topic.ranges.items()}
        newest = await page_back(console, topic.ranges, NEWEST, TAIL_MESSAGES, tags=tags)
        tail = request.state.tail = _Tail(ends, _holding(newest.messages[::-1], text))
    else:
        fresh = [message async for message in _fresh(console, topic, tail, tags)]
        tail.messages = (tail.messages + _holding(_in_time(fresh), text))[-TAIL_MESSAGES:]
    rows = await rows_of(reversed(tail.messages))
    shown = {"topic": name, "rows": rows, "tags": form.text("tags"), "text": text, "skipped": tail.skipped}
    return Page("tail.html", shown)


async def _fresh(console: Console, topic: Topic, tail: _Tail, tags: str) -> AsyncIterator[Message]:
    """Iterate over the messages since the last poll, except those before the newest TAIL_BATCH of a queue, which are
    counted in `skipped`."""
    for queue, span in topic.ranges.items():
        seen = tail.ends.get(queue, span.begin)
        begin = max(seen, span.end - TAIL_BATCH)
        tail.skipped += max(begin - seen, 0)
        tail.ends[queue] = max(span.end, seen)
        for message in await _read(console, queue, begin, span.end, tags) if begin < span.end else ():
            yield message


def _holding(messages: list[Message], text: str) -> list[Message]:
    """Return the messages whose stored body, keys or properties contain a text. Compressed bodies are not decompressed."""
    if not text:
        return messages
    wanted = text.encode()
    return [item for item in messages if wanted in item.record.body or text in item.record.properties]
