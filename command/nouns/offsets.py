"""`rocketlet offsets`: shows and resets the committed offsets of a group."""

from __future__ import annotations

import argparse
from datetime import datetime

from ...client.admin.admin_client import AdminClient, OffsetChange, To
from ...client.errors import ConfigError
from ...protocol.names import Queue, counted
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Instant, Output


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "offsets", "show and reset the offsets of a group")
    show = verb(verbs, "show", "show a group's offsets and lag", _show)
    show.add_argument("group")
    show.add_argument("topic", nargs="?", default="", help="only of this topic")
    reset = verb(verbs, "reset", "reset a group to another position", _reset)
    reset.add_argument("group")
    reset.add_argument("topic")
    reset.add_argument(
        "--to",
        required=True,
        metavar="WHERE",
        help="first, last, a time such as 2026-01-31T12:00:00, or BROKER:QUEUE=OFFSET[,...] for a group without members",
    )
    reset.add_argument(
        "--dry-run", action="store_true", help="only show which messages would be skipped or delivered again"
    )
    changing(reset)


async def _show(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    progress = await admin.progress(options.group, options.topic)
    if not progress:
        raise ConfigError(f"the group {options.group} has no offsets; `rocketlet groups list` shows all")
    rows = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "committed": item.consumer_offset,
            "end": item.broker_offset,
            "lag": max(item.lag, 0),
            "last_consumed": Instant(item.last_ms),
        }
        for queue, item in progress.items()
    ]
    output.records(("topic", "broker", "queue", "committed", "end", "lag", "last_consumed"), rows)
    output.text(
        f"{counted(sum(max(item.lag, 0) for item in progress.values()), 'message is', 'messages are')} not consumed yet"
    )
    return 0


async def _reset(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    to = parsed_place(options.to, options.topic)
    await admin.group(options.group)  # raises if the group does not exist; a reset would create it
    changes = await admin.preview_reset(options.group, options.topic, to)
    output.records(
        ("broker", "queue", "before", "after", "skips", "repeats"), [_row(*item) for item in changes.items()]
    )
    skipped, repeated = (sum(getattr(item, name) for item in changes.values()) for name in ("skipped", "repeated"))
    effect = f"{counted(skipped, 'message')} skipped, {repeated} delivered again"
    if options.dry_run:
        output.text(f"would be: {effect}")
        return 0
    if not confirmed(options, f"Reset the group {options.group} in {options.topic}: {effect}?"):
        return 1
    await admin.reset(options.group, options.topic, to)
    output.text(f"reset: {effect}")
    return 0


def _row(queue: Queue, change: OffsetChange) -> dict[str, object]:
    return {
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "before": change.before,
        "after": change.after,
        "skips": change.skipped,
        "repeats": change.repeated,
    }


def parsed_place(text: str, topic: str) -> To:
    """Parse `first`, `last`, a local time (ISO 8601) or `BROKER:QUEUE=OFFSET` pairs. Raises ConfigError."""
    places: dict[str, To] = {"first": "first", "last": "last"}
    if text in places:
        return places[text]
    try:
        if "=" in text:
            return dict(_queue_offset(part, topic) for part in text.split(","))
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ConfigError(
            f"--to {text!r}: use first, last, a time such as 2026-01-31T12:00:00, or BROKER:QUEUE=OFFSET"
        ) from None


def _queue_offset(text: str, topic: str) -> tuple[Queue, int]:
    place, _, offset = text.partition("=")
    broker, _, queue_id = place.rpartition(":")
    return Queue(topic, broker, int(queue_id)), int(offset)
