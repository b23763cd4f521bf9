"""Dead letters of a group: look at them, send them again."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request

from ...client.admin.described import Topic
from ...client.arguments import parse_place
from ...client.errors import ConfigError, TopicNotFound
from ...client.message import Message
from ...protocol import names
from ...protocol import properties as props
from ..change import Change
from ..config import MAX_REPLAY, PAGE_ROWS
from ..console import Console
from ..form import Form, query_of
from ..page import Page, console_of
from ..text import number, part
from .messages import at_place, newest, rows_of

SHOWN_PLAN = 20


async def listed(request: Request) -> Page:
    console, group = console_of(request), request.path_params["group"]
    topic = await _topic(console, group)
    limit = query_of(request).number("limit", PAGE_ROWS, least=1, most=MAX_REPLAY)
    found = await newest(console, topic, limit, "*") if topic else []
    return Page(
        "dead_letters.html",
        {
            "group": group,
            "total": topic.messages if topic else 0,
            "rows": [(row, place_of(row.message), origin_of(row.message)) for row in await rows_of(reversed(found))],
            "limit": limit,
        },
    )


async def _topic(console: Console, group: str) -> Topic | None:
    try:
        return await console.admin.topic(names.dlq_topic(group))
    except TopicNotFound:
        return None


def place_of(message: Message) -> str:
    """What a form names a message by."""
    return f"{message.queue.broker_name}:{message.queue_id}:{message.queue_offset}"


def origin_of(message: Message) -> str:
    return message.properties.get(props.RETRY_TOPIC) or message.topic


async def replay(request: Request, form: Form) -> Change:
    """Sends one, some or all again. They stay where they are."""
    console, group = console_of(request), request.path_params["group"]
    to_group = form.choice("to", ("group", "topic"), "group") == "group"
    found = await _wanted(console, group, form)
    back = f"/groups/{part(group)}/dead"
    if not found:
        return Change("Nothing is chosen to be sent again.", None, back, "", ["Choose dead letters, or all of them."])

    async def act() -> str:
        for message in found:
            await console.admin.send_again(message, group=group if to_group else None)
        return f"{number(len(found))} messages were sent again {target}. The dead letters stay in {names.dlq_topic(group)}."

    origins = Counter(map(origin_of, found))
    target = f"to the retry topic of {group}" if to_group else f"to {', '.join(sorted(origins))}"
    effects = [
        f"Only members of {group} get them."
        if to_group
        else "Every group that reads the topic gets them, also those that have handled them.",
        "The dead letters stay where they are. What is sent again twice arrives twice.",
        "This page is the dry run: nothing has been sent yet.",
    ]
    shown = await rows_of(found[:SHOWN_PLAN])
    rows = [(row.message.message_id, origin_of(row.message), row.preview) for row in shown]
    if len(found) > SHOWN_PLAN:
        rows.append((f"and {number(len(found) - SHOWN_PLAN)} more", "", ""))
    question = f"Send {number(len(found))} messages again {target}?"
    return Change(question, act, back, "Send them", effects, ("message id", "topic", "body"), rows)


async def _wanted(console: Console, group: str, form: Form) -> list[Message]:
    topic = await _topic(console, group)
    if form.text("which") == "all" and topic is not None:
        if topic.messages > MAX_REPLAY:
            text = (
                f"{topic.messages} dead letters are more than {MAX_REPLAY}, which are sent again at once: choose some"
            )
            raise ConfigError(text)
        return await newest(console, topic, MAX_REPLAY, "*")
    places = [parse_place(text, names.dlq_topic(group)) for text in form.all("place")]
    return [await at_place(console, queue, offset) for queue, offset in places]
