"""Changes of a group: create, change, delete, reset its offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from starlette.requests import Request

from ...client.admin.admin_client import OffsetChange, To
from ...client.errors import ConfigError, TopicNotFound
from ...protocol import names
from ...protocol.bodies import GroupConfig
from ...protocol.names import Queue, counted
from ...protocol.settings import (
    GROUP_OPTIONS,
    ON_OFF,
    GroupSettings,
    ResourceSetting,
    Value,
    group_report,
    listed_settings,
    new_group,
)
from ..change import Change
from ..config import PAGE_ROWS
from ..form import FieldFault, Form, query_of
from ..page import Page, console_of
from ..text import local_time, number, part


async def new(request: Request) -> Page:
    return Page("group_form.html", {"name": "", "fields": _fields(GroupConfig(""))})


async def settings(request: Request) -> Page:
    admin, name = console_of(request).admin, request.path_params["group"]
    known = await admin.group_configs(name)
    if not known:
        raise ConfigError(f"no broker knows the group {name}; `rocketlet groups list` shows all")
    return Page("group_form.html", {"name": name, "fields": _fields(next(iter(known.values())))})


def _fields(config: GroupConfig) -> list[tuple[str, ResourceSetting, Value]]:
    """Return the name of each field of the form, its setting, and its value in a group."""
    return [(option.replace("-", "_"), setting, setting.value(config)) for option, setting in GROUP_OPTIONS.items()]


async def put(request: Request, form: Form) -> Change:
    """Return the change that creates a group, or sets its settings to those of the form. Settings for which the form has no
    field stay unchanged."""
    admin, name = console_of(request).admin, form.text("group")
    fault = names.group_fault(name)
    if fault:
        raise FieldFault("group", fault)
    known = await admin.group_configs(name)
    before = next(iter(known.values()), GroupConfig(name))
    values = {setting.field: _value(form, field, setting, value) for field, setting, value in _fields(before)}
    given = cast("GroupSettings", values)
    config = new_group(name, given)

    async def act() -> str:
        await admin.create_group(config)
        if known:
            await admin.change_group(name, **given)
        await console_of(request).groups.list(now=True)
        return f"The group {name} {'was changed' if known else 'was created'}: {listed_settings(group_report(config))}."

    effects = [f"Its settings: {listed_settings(group_report(config))}."]
    if known and before.consume_enable and not config.consume_enable:
        effects.append("Its members get no more messages until you switch consumption on again.")
    question = f"Change the group {name}?" if known else f"Create the group {name}?"
    return Change(question, act, f"/groups/{part(name)}", "Change it" if known else "Create it", effects)


def _value(form: Form, field: str, setting: ResourceSetting, present: Value) -> Value:
    """Return the value of a field; the present one if the form lacks the field."""
    if field not in form:
        return present
    if isinstance(present, bool):
        return form.choice(field, ON_OFF) == "on"
    if isinstance(present, str):
        return form.text(field).strip()
    return form.number(field, present, least=setting.least, most=setting.most)


async def delete(request: Request, form: Form) -> Change:
    console, name = console_of(request), request.path_params["group"]
    group = await console.admin.group(name)

    async def act() -> str:
        kept = await console.admin.delete_group(name)
        console.forget_watch(name)
        await console.groups.list(now=True)
        stay = f" {counted(kept, 'dead letter stays', 'dead letters stay')} in {names.dlq_topic(name)}." if kept else ""
        return f"The group {name}, its offsets and its retries are deleted.{stay}"

    effects = [
        f"Its offsets of {counted(len(group.progress), 'queue')} and its retries are deleted. "
        "A new group of the same name starts without offsets.",
        f"Its {counted(letters, 'dead letter')} will stay in {names.dlq_topic(name)}."
        if (letters := await console.admin.dead_letter_count(name))
        else "It has no dead letters.",
    ]
    if group.members:
        effects.append(
            f"It has {counted(len(group.members), 'member')} now, which will recreate it unless they are stopped first."
        )
    return Change(f"Delete the group {name}?", act, "/groups", "Delete it", effects, is_harmful=True)


async def reset_form(request: Request) -> Page:
    name = request.path_params["group"]
    group = await console_of(request).admin.group(name)
    topics = {queue.topic for queue in group.progress}
    topics |= {topic for known in group.connections.values() for topic in known.subscriptions}
    mine = sorted(topic for topic in topics if not topic.startswith("%"))
    values = {"group": name, "topics": mine, "topic": query_of(request).text("topic"), "members": len(group.members)}
    return Page("reset.html", values)


async def reset(request: Request, form: Form) -> Change:
    admin, group = console_of(request).admin, request.path_params["group"]
    topic = form.text("topic")
    to = _place(form, topic)
    try:
        changes = await admin.preview_reset(group, topic, to)
    except TopicNotFound as error:
        raise FieldFault("topic", str(error)) from error
    skipped, repeated = (sum(getattr(item, name) for item in changes.values()) for name in ("skipped", "repeated"))
    effect = (
        f"{counted(skipped, 'message is', 'messages are')} skipped, {counted(repeated, 'is', 'are')} delivered again"
    )

    async def act() -> str:
        done = await admin.reset(group, topic, to)
        return f"The offsets of {group} in {topic} were set in {counted(len(done), 'queue')}: {effect}."

    rows = [_row(*item) for item in list(changes.items())[:PAGE_ROWS]]
    if len(changes) > PAGE_ROWS:
        rows.append((f"and {number(len(changes) - PAGE_ROWS)} more", "", "", "", ""))
    return Change(
        f"Reset {group} in {topic} to {_named(to)}?",
        act,
        f"/groups/{part(group)}",
        "Reset it",
        [f"{effect}.", "Connected members continue from there immediately."],
        ("queue", "from", "to", "skips", "repeats"),
        rows,
        is_harmful=bool(skipped),
    )


def _row(queue: Queue, change: OffsetChange) -> tuple[object, ...]:
    before = "none" if change.before is None else change.before
    return f"{queue.broker_name}:{queue.queue_id}", before, change.after, change.skipped, change.repeated


def _named(to: To) -> str:
    if isinstance(to, int):
        return local_time(to)
    return {"first": "its first message", "last": "its end"}[to] if isinstance(to, str) else "the given offsets"


def _place(form: Form, topic: str) -> To:
    to = form.choice("to", ("first", "last", "time", "offsets"))
    if to == "first":
        return "first"
    if to == "time":
        time_ms = form.time_ms("time", -1)
        if time_ms < 0:
            raise FieldFault("time", "give a time such as 2026-01-31T12:00")
        return time_ms
    return _offsets(form.text("offsets"), topic) if to == "offsets" else "last"


def _offsets(text: str, topic: str) -> Mapping[Queue, int]:
    """Parse lines of BROKER:QUEUE=OFFSET."""
    found: dict[Queue, int] = {}
    for line in filter(None, map(str.strip, text.replace(",", "\n").splitlines())):
        place, _, offset = line.partition("=")
        broker, _, queue_id = place.strip().rpartition(":")
        if not broker or not queue_id.isdecimal() or not offset.strip().isdecimal():
            raise FieldFault("offsets", f"{line[:80]!r} is not BROKER:QUEUE=OFFSET, such as broker-a:0=1234")
        found[Queue(topic, broker, int(queue_id))] = int(offset)
    if not found:
        raise FieldFault("offsets", "give a line BROKER:QUEUE=OFFSET for each queue")
    return found
