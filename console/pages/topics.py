"""Topics: a list of all with their rates, and a page for each with its queues, readers and producers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from starlette.requests import Request

from ...client.admin.admin_client import Topic
from ...client.errors import RocketletError
from ...protocol import names
from ...protocol.admin_bodies import Range
from ...protocol.bodies import MAX_LITE_EXPIRATION_MIN
from ...protocol.config import MAX_TOPIC_QUEUES
from ...protocol.names import Queue, counted
from .. import charts
from ..change import Change
from ..config import PAGE_ROWS
from ..console import Console
from ..form import FieldFault, Form, query_of
from ..page import Page, console_of, is_load
from ..samples import TopicSample
from ..text import part
from .listing import listing
from .paging import part_of

PERMS = {6: "send and read", 4: "only read", 2: "only send", 0: "neither"}

TYPES = {
    "": "not given, as on brokers of 4.9",
    "NORMAL": "NORMAL",
    "FIFO": "FIFO: ordered in each message group",
    "DELAY": "DELAY: delivered at a time",
    "TRANSACTION": "TRANSACTION: with half messages",
    "PRIORITY": "PRIORITY: a queue for each level",
    "LITE": "LITE: the parent of lite topics",
    "MIXED": "MIXED: any of these",
}
"""The attribute `message.type` of a new topic, which brokers of 5.x have."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    name: str
    sample: TopicSample | None
    spark: str


@dataclass(frozen=True, slots=True)
class QueueRow:
    queue: Queue
    range: Range
    oldest_ms: int | None

    @property
    def messages(self) -> int:
        return self.range.end - self.range.begin


async def listed(request: Request) -> Page:
    console, now = console_of(request), is_load(request)
    await console.topics.list(now=now)
    known = console.topics.found
    topics = listing(
        query_of(request),
        console.topics.names,
        is_system=console.is_own_topic,
        figures={
            "rate": lambda name: known[name].rate or 0 if name in known else -1,
            "messages": lambda name: known[name].messages if name in known else -1,
            "last": lambda name: known[name].last_ms if name in known else -1,
        },
    )
    await console.topics.show(topics.part.items, now=now)
    samples = [known[name] for name in topics.names if name in known]
    return Page(
        "topics.html",
        {
            "topics": topics,
            "rows": [_row(console, name) for name in topics.part.items],
            "rate": sum(item.rate or 0 for item in samples),
            "messages": sum(item.messages for item in samples),
        },
    )


def _row(console: Console, name: str) -> TopicRow:
    sample = console.topics.found.get(name)
    return TopicRow(name, sample, charts.spark(tuple(sample.rates)) if sample else "")


async def shown(request: Request) -> Page:
    console, form = console_of(request), query_of(request)
    name = request.path_params["topic"]
    await console.topics.show([name], now=is_load(request))
    topic = await console.admin.topic(name)
    lite, message_type = await asyncio.gather(console.admin.lite_parent(name), console.admin.message_type(name))
    readers = sorted({*await console.admin.consumed_by(name), *(lite.groups if lite is not None else ())})
    shown_readers = readers[:PAGE_ROWS]
    await console.groups.show(shown_readers, now=is_load(request))
    shown = part_of(list(topic.ranges), form.number("page", 1))
    sample = console.topics.found.get(name)
    return Page(
        "topic.html",
        {
            "topic": topic,
            "lite": lite,
            "message_type": message_type,
            "part": shown,
            "rows": await asyncio.gather(*(_queue_row(console, topic, queue) for queue in shown.items)),
            "sample": sample,
            "chart": charts.lines_of(tuple(sample.rates), what="messages/s") if sample else {},
            "readers": [(group, console.groups.found.get(group)) for group in shown_readers],
            "readers_total": len(readers),
            "retention": await _retention(console, topic),
            "producers": await _producers(console),
            "perms": PERMS,
        },
    )


async def _queue_row(console: Console, topic: Topic, queue: Queue) -> QueueRow:
    span = topic.ranges[queue]
    if span.begin == span.end:
        return QueueRow(queue, span, None)
    return QueueRow(queue, span, await console.oldest.of(queue, span.begin))


async def _retention(console: Console, topic: Topic) -> dict[str, str]:
    """Return the retention in hours of each broker of the topic, without brokers that do not report it."""
    found: dict[str, str] = {}
    for broker in await console.admin.brokers():
        if broker.name in topic.config and 0 in broker.addresses:
            try:
                settings = await console.admin.broker_config(broker.addresses[0])
            except RocketletError:  # for example, the account may not query settings
                continue
            if "fileReservedTime" in settings:
                found[broker.name] = settings["fileReservedTime"].removesuffix(".0")
    return found


async def _producers(console: Console) -> dict[str, int]:
    """Return the number of connected producers by group, without those that consumers contain to send messages back; empty
    if the query fails. Brokers do not report to which topics they send."""
    try:
        found = await console.admin.producers()
        return {group: len(members) for group, members in found.items() if group != names.INNER_PRODUCER_GROUP}
    except RocketletError:
        return {}


async def new(request: Request) -> Page:
    brokers = [broker.name for broker in await console_of(request).admin.brokers()]
    return Page("topic_form.html", _form({"name": "", "queues": 4, "perm": 6, "brokers": brokers}))


async def settings(request: Request) -> Page:
    topic = await console_of(request).admin.topic(request.path_params["topic"])
    config = next(iter(topic.config.values()), None)
    values = {"name": topic.name, "queues": config.read_queues if config else 4, "perm": config.perm if config else 6}
    return Page("topic_form.html", _form({**values, "brokers": sorted(topic.config)}))


def _form(values: dict[str, object]) -> dict[str, object]:
    return {
        **values,
        "perms": PERMS,
        "types": TYPES,
        "most_queues": MAX_TOPIC_QUEUES,
        "most_minutes": MAX_LITE_EXPIRATION_MIN,
    }


async def put(request: Request, form: Form) -> Change:
    """Return the change that creates a topic, or changes its settings."""
    admin, name = console_of(request).admin, form.text("topic")
    fault = names.topic_fault(name)
    if fault:
        raise FieldFault("topic", fault)
    queues = form.number("queues", 4, least=1, most=MAX_TOPIC_QUEUES)
    perm = form.number("perm", 6, most=7)
    message_type = form.choice("type", tuple(TYPES))
    lite_expiration_min = _lite_expiration_min(form, message_type)
    brokers = form.all("broker") or [broker.name for broker in await admin.brokers()]
    topic = await admin.topic(name) if name in await admin.topics(system=True) else None
    config = topic.config if topic is not None else {}
    changed = {
        broker: replace(config[broker], read_queues=queues, write_queues=queues)
        for broker in brokers
        if broker in config
    }
    unreadable = topic.unreadable(changed) if topic is not None else {}

    async def act() -> str:
        await admin.create_topic(
            name, queues=queues, perm=perm, brokers=brokers, message_type=message_type,
            lite_expiration_min=lite_expiration_min,
        )  # fmt: skip
        if changed:
            await admin.change_topic(
                name, queues=queues, perm=perm, brokers=list(changed), allow_unreadable=bool(unreadable)
            )
        await console_of(request).topics.list(now=True)
        done = "was changed to" if changed else "was created with"
        has = counted(queues, "queue")
        return f"The topic {name} {done} {has} on {', '.join(brokers)}; clients may {PERMS.get(perm, perm)}."

    effects = [f"{counted(queues, 'queue')} on each of {', '.join(brokers)}. Clients may {PERMS.get(perm, perm)}."]
    if message_type and not changed:
        effects.append(f"Its type is {TYPES[message_type]}.")
    if unreadable:
        has = counted(sum(unreadable.values()), "message is", "messages are")
        effects.append(f"{has} in queues beyond {queues}, which groups will not read.")
    question = f"Change the topic {name}?" if changed else f"Create the topic {name}?"
    button = "Change it" if changed else "Create it"
    return Change(question, act, f"/topics/{part(name)}", button, effects, is_harmful=bool(unreadable))


def _lite_expiration_min(form: Form, message_type: str) -> int | None:
    if not form.text("lite_expiration"):
        return None
    if message_type != "LITE":
        raise FieldFault("lite_expiration", "only topics of the type LITE have lite topics; leave it empty")
    return form.number("lite_expiration", 0, least=1, most=MAX_LITE_EXPIRATION_MIN)


async def delete(request: Request, form: Form) -> Change:
    admin, name = console_of(request).admin, request.path_params["topic"]
    topic = await admin.topic(name)
    readers = await admin.consumed_by(name)

    async def act() -> str:
        await admin.delete_topic(name)
        await console_of(request).topics.list(now=True)
        return f"The topic {name} is deleted, with {counted(topic.messages, 'message')}."

    effects = [
        f"{counted(topic.messages, 'message is', 'messages are')} deleted for good, on {', '.join(sorted(topic.config))}."
    ]
    if readers:
        effects.append(f"These groups read it: {', '.join(readers)}.")
    return Change(f"Delete the topic {name}?", act, "/topics", "Delete it", effects, is_harmful=True)
