"""Dead letters of a group: show, replay and discard them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request

from ...client.admin.dead_letters import dead_letters, mark
from ...client.config import parse_position
from ...client.message import Message
from ...protocol import names
from ...protocol import properties as props
from ...protocol.names import counted
from ..change import Change
from ..config import MAX_REPLAY, PAGE_ROWS
from ..console import Console
from ..form import FieldFault, Form, query_of
from ..jobs import DeadLetterPlace, ReplayOrder, words_of
from ..page import Page, console_of
from ..text import local_time, number, part
from .history import NEWEST, page_back, position_of
from .messages import at_place, rows_of

SHOWN_PLAN = 20
_COLUMNS = ("message id", "topic", "body")


async def listed(request: Request) -> Page:
    console, group = console_of(request), request.path_params["group"]
    letters = await dead_letters(console.admin, group)
    if not letters.ranges:
        await console.admin.group(group)  # raises if the group does not exist
    form = query_of(request)
    found = await page_back(console, letters.ranges, position_of(form), PAGE_ROWS)
    return Page(
        "dead_letters.html",
        {
            "group": group,
            "total": letters.stored,
            "new": letters.new,
            "rows": [
                (row, place_of(row.message), origin_of(row.message), letters.state_of(row.message))
                for row in await rows_of(found.messages)
            ],
            "before": form.text("before"),
            "older": found.older,
        },
    )


def place_of(message: Message) -> str:
    """Return the position of a message as a form contains it."""
    return f"{message.queue.broker_name}:{message.queue_id}:{message.queue_offset}"


def origin_of(message: Message) -> str:
    return message.properties.get(props.RETRY_TOPIC) or message.topic


async def replay(request: Request, form: Form) -> Change:
    """Return the change that adds a job, which resends the selected dead letters or all new ones, and marks those that were
    sent as replayed. They stay in their topic."""
    console, group = console_of(request), request.path_params["group"]
    to_group = form.choice("to", ("group", "topic"), "group") == "group"
    found = await _wanted(console, group, form)
    is_all = form.text("which") == "all"
    topics = sorted({*map(origin_of, found)})
    job = await console.jobs.plan(
        ReplayOrder(
            group=group,
            to="group" if to_group else "topic",
            topics=[] if to_group else topics,
            places=[] if is_all else [_place(message) for message in found],
            rate_per_s=_rate_per_s(form),
            stop_after=form.number("stop_after", 1, least=1),
            at_ms=form.time_ms("at", 0),
        ),
        by=request.state.user,
    )

    async def act() -> str:
        await console.jobs.add(job)
        starts = f"starts at {local_time(job.order.at_ms)}" if job.order.at_ms else "has started"
        return f"The replay of {words_of(job)} {starts}. The dead letters stay in {names.dlq_topic(group)}."

    effects = [
        f"Only members of {group} receive them."
        if to_group
        else "All groups that read the topic receive them, including groups that have handled them.",
        "The dead letters stay in their topic and are marked as replayed. A message that is resent twice arrives twice.",
        "This page is the dry run: nothing has been sent yet.",
    ]
    target = f"to the retry topic of {group}" if to_group else f"to {', '.join(topics)}"
    if job.order.at_ms:
        effects.insert(0, f"The console starts it at {local_time(job.order.at_ms)}.")
    question = f"Resend {counted(len(found), 'message')} {target}?"
    return Change(question, act, f"/jobs/{job.id}", "Resend", effects, _COLUMNS, await _plan(found))


def _place(message: Message) -> DeadLetterPlace:
    return DeadLetterPlace(message.queue.broker_name, message.queue_id, message.queue_offset)


def _rate_per_s(form: Form) -> float | None:
    """Return the rate of a replay; None without a limit."""
    given = form.text("rate")
    if not given:
        return None
    try:
        rate_per_s = float(given)
    except ValueError:
        rate_per_s = 0.0
    if not 0 < rate_per_s < math.inf:
        raise FieldFault("rate", f"{given[:40]!r} is not a number of messages per second above 0")
    return rate_per_s


async def discard(request: Request, form: Form) -> Change:
    """Return the change that marks the selected dead letters, or all new ones, as discarded."""
    console, group = console_of(request), request.path_params["group"]
    found = await _wanted(console, group, form)

    async def act() -> str:
        await mark(console.admin, group, [(item.queue, item.queue_offset) for item in found], "discarded")
        return f"{counted(len(found), 'dead letter is', 'dead letters are')} discarded."

    effects = ["They stay in their topic until they expire, and are no longer reported or replayed with the new ones."]
    question = f"Discard {counted(len(found), 'dead letter')} of {group}?"
    return Change(question, act, f"/groups/{part(group)}/dead", "Discard", effects, _COLUMNS, await _plan(found))


async def _plan(found: Sequence[Message]) -> list[tuple[str, str, str]]:
    shown = await rows_of(found[:SHOWN_PLAN])
    rows = [(row.message.message_id, origin_of(row.message), row.preview) for row in shown]
    if len(found) > SHOWN_PLAN:
        rows.append((f"and {number(len(found) - SHOWN_PLAN)} more", "", ""))
    return rows


async def _wanted(console: Console, group: str, form: Form) -> list[Message]:
    if form.text("which") == "all":
        letters = await dead_letters(console.admin, group)
        if letters.stored > MAX_REPLAY:
            raise FieldFault(
                "which",
                f"{letters.stored} dead letters are more than the {MAX_REPLAY} that one form takes: choose some, or "
                f"use `rocketlet messages replay {group}`",
            )
        stored = await page_back(console, letters.ranges, NEWEST, MAX_REPLAY)
        found = [message for message in stored.messages[::-1] if letters.state_of(message) == "new"]
        if not found:
            raise FieldFault(
                "which", "no dead letter is new; select the replayed or discarded ones that you want to resend"
            )
        return found
    places = [parse_position(text, names.dlq_topic(group)) for text in form.all("place")]
    if not places:
        raise FieldFault("which", "no message is selected; select some below, or choose all new messages")
    return [await at_place(console, queue, offset) for queue, offset in places]
