"""`rocketlet messages`: finds, tails and sends messages, and shows, replays and discards dead letters."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping
from functools import partial
from typing import Any

from ...client.admin.admin_client import AdminClient
from ...client.admin.dead_letters import DeadLetterTopic, Replay, dead_letters, mark
from ...client.admin.messages import matches
from ...client.config import parse_position
from ...client.errors import ConfigError, RocketletError
from ...client.message import Message
from ...client.producer import Producer
from ...protocol import names
from ...protocol.admin_bodies import Range
from ...protocol.names import Queue, counted
from ..plumbing.access import access_of
from ..plumbing.administration import Commands, changing, confirmed, noun, pairs, verb
from ..plumbing.console import ConsoleClient, add_console_option, show_jobs
from ..plumbing.numbers import moment, rate, seconds, since, whole
from ..plumbing.output import Instant, Output
from ..tools.frames import body_fields

TAIL_INTERVAL_S = 0.5
SHOWN_BODY = 200
SHOWN_ROWS = 500  # maximum rows of a table of dead letters; more are shown in further tables
_COLUMNS = ("time", "queue", "offset", "tag", "keys", "body")
_DEAD_COLUMNS = ("time", "queue", "offset", "tag", "keys", "state", "reason", "body")


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "messages", "find, follow, send and replay messages")
    _add_find(verbs)
    _add_tail(verbs)
    _add_send(verbs)
    dead = verb(verbs, "dead", "show a group's dead letters", _dead)
    dead.add_argument("group")
    dead.add_argument(
        "--all", action="store_true", help="all dead letters, by queue and offset; export them with --json"
    )
    dead.add_argument(
        "--limit", type=whole(1), default=20, help="maximum number of messages, newest first (default: 20)"
    )
    replay = _add_replay(verbs)
    discard = verb(verbs, "discard", "mark a group's dead letters as discarded", _discard)
    discard.add_argument("group")
    for parser in (replay, discard):
        parser.add_argument("--id", action="append", help="only this message; repeatable")
        parser.add_argument(
            "--again", action="store_true", help="include messages that were replayed or discarded before"
        )
        changing(parser)


def _add_find(verbs: Commands[argparse.ArgumentParser]) -> None:
    find = verb(verbs, "find", "find messages of a topic", _find)
    find.add_argument("topic")
    how = find.add_mutually_exclusive_group()
    how.add_argument("--key", help="messages with this key")
    how.add_argument("--id", help="the message with this message id or offset id")
    how.add_argument("--at", metavar="BROKER:QUEUE:OFFSET", help="messages from this position on")
    find.add_argument(
        "--since", metavar="WHEN", help="stored since 30s, 10m, 2h, 3d ago, or a time such as 2026-01-31T12:00"
    )
    find.add_argument("--text", help="messages with this text in the body")
    find.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="messages with this property"
    )
    find.add_argument(
        "--limit",
        type=whole(1),
        default=20,
        help="maximum number of messages; a search returns the newest (default: 20)",
    )


def _add_tail(verbs: Commands[argparse.ArgumentParser]) -> None:
    tail = verb(verbs, "tail", "show a topic's newest messages, and new messages as they are stored", _tail)
    tail.add_argument("topic")
    tail.add_argument("--last", type=whole(0), default=10, help="number of stored messages to start with (default: 10)")
    tail.add_argument("--tags", "--tag", default="*", metavar="A||B", help="only messages with these tags")
    tail.add_argument("--no-follow", action="store_true", help="exit after the newest message")


def _add_send(verbs: Commands[argparse.ArgumentParser]) -> None:
    send = verb(verbs, "send", "send a message", _send)
    send.add_argument("topic")
    send.add_argument("body", help="the body as text; - reads standard input")
    send.add_argument("--tag", "--tags", help="the message's tag")
    send.add_argument("--key", action="append", default=[], help="a key; repeatable")
    send.add_argument("--property", action="append", default=[], metavar="NAME=VALUE")
    send.add_argument("--delay-level", type=whole(0), default=0, help="a delay level of the broker, 1 to 18")
    send.add_argument(
        "--delay",
        type=seconds,
        metavar="SECONDS",
        help="the delay until delivery, on brokers that support delivery times",
    )
    send.add_argument("--priority", type=whole(0), help="the priority, in topics of the type PRIORITY")
    send.add_argument("--lite-topic", metavar="NAME", help="the lite topic, in topics of the type LITE")
    send.add_argument("--queue-key", help="key of the queue; messages with the same key keep their order")


def _add_replay(verbs: Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    replay = verb(verbs, "replay", "resend a group's new dead letters", _replay)
    replay.add_argument("group")
    replay.add_argument(
        "--to",
        choices=("group", "topic"),
        default="group",
        help="group: only this group receives them (default); topic: all groups that read the topic do",
    )
    replay.add_argument(
        "--topic",
        action="append",
        metavar="NAME",
        help="with --to topic: also to this one, which the group has not read",
    )
    replay.add_argument(
        "--rate", type=rate, default=math.inf, metavar="N/s", help="maximum rate, such as 20/s or 100/m"
    )
    replay.add_argument(
        "--stop-after", type=whole(1), default=1, metavar="N", help="stop after this many failed messages (default: 1)"
    )
    replay.add_argument(
        "--detach",
        action="store_true",
        help="let the console send them, and keep the progress over a restart; `rocketlet jobs` shows it",
    )
    replay.add_argument(
        "--at", type=moment, metavar="TIME", help="like --detach, but the console starts at this time, such as 02:00"
    )
    add_console_option(replay)
    replay.add_argument("--dry-run", action="store_true", help="only show the messages that would be sent")
    return replay


async def _find(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    if options.key:
        found = await admin.messages_with_key(options.topic, options.key, limit=options.limit)
    elif options.id:
        message = await admin.message(options.id, options.topic) or await _by_offset_id(admin, options.id)
        found = [message] if message else []
    elif options.at:
        queue, offset = parse_position(options.at, options.topic)
        found = [item async for item in _from(admin, queue, offset, options.limit)]
    elif options.since or options.text or options.property:
        found = await _searched(options, admin)
    else:
        found = await _newest(admin, (await admin.topic(options.topic)).ranges, options.limit, "*")
    _show(output, found[: options.limit])
    if not found:
        await admin.topic(options.topic)  # raises if the topic does not exist
        output.text("no message was found")
    return 0 if found else 1


async def _searched(options: argparse.Namespace, admin: AdminClient) -> list[Message]:
    """Return the newest messages that match. Read every message since the given time, or every stored message without
    one, because brokers search only by key and id."""
    topic = await admin.topic(options.topic)
    wanted = pairs("--property", options.property)
    since_ms = since(options.since) if options.since else 0
    found: list[Message] = []
    for queue, span in topic.ranges.items():
        begin = max(await admin.offset_at(queue, since_ms), span.begin) if since_ms else span.begin
        newest: deque[Message] = deque(maxlen=options.limit)
        async for part in admin.read(queue, begin, span.end):
            newest += (message for message in part if matches(message, options.text, wanted))
        found += newest
    return sorted(found, key=lambda message: message.store_ms)[-options.limit :]


async def _by_offset_id(admin: AdminClient, text: str) -> Message | None:
    try:
        return await admin.message(text)
    except ConfigError:  # not an offset id
        return None


async def _from(admin: AdminClient, queue: Queue, offset: int, limit: int) -> AsyncIterator[Message]:
    await admin.topic(queue.topic)  # raises if the topic does not exist
    async for messages in admin.read(queue, offset, offset + limit):
        for message in messages:
            yield message


async def _newest(admin: AdminClient, ranges: Mapping[Queue, Range], limit: int, tags: str) -> list[Message]:
    """Return up to `limit` messages that have the tags, oldest first, out of the newest `limit` of each queue."""
    found = [
        message
        for queue, span in ranges.items()
        if limit > 0 and span.begin < span.end
        async for part in admin.read(queue, max(span.begin, span.end - limit), span.end, expression=tags)
        for message in part
    ]
    return sorted(found, key=lambda message: message.store_ms)[-limit:] if limit > 0 else []


async def _tail(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    topic = await admin.topic(options.topic)
    ends = {queue: span.end for queue, span in topic.ranges.items()}
    for message in await _newest(admin, topic.ranges, options.last, options.tags):
        _line(output, message)
    while not options.no_follow:
        await asyncio.sleep(TAIL_INTERVAL_S)
        fresh: list[Message] = []
        for queue, span in (await admin.topic(options.topic)).ranges.items():
            begin = ends.get(queue, 0)
            async for part in admin.read(queue, begin, span.end, expression=options.tags):
                fresh += part
            ends[queue] = max(span.end, begin)
        for message in sorted(fresh, key=lambda message: message.store_ms):
            _line(output, message)
    return 0


def _show(output: Output, messages: list[Message]) -> None:
    output.records(_COLUMNS, [_record(message, output) for message in messages])


def _line(output: Output, message: Message) -> None:
    record = _record(message, output)
    if output.as_json:
        output.json(record)
    else:
        tag = f" [{record['tag']}]" if record["tag"] else ""
        keys = f" {record['keys']}" if record["keys"] else ""
        output.text(f"{record['time']}  {record['queue']}:{record['offset']}{tag}{keys}  {record['body']}")


def _record(message: Message, output: Output) -> dict[str, Any]:
    """Return the fields of a message for programs, or those of a table for people."""
    shown: dict[str, Any] = {
        "time": Instant(message.store_ms),
        "queue": f"{message.queue.broker_name}:{message.queue_id}" if message.queue.broker_name else message.queue_id,
        "offset": message.queue_offset,
        "tag": message.tag,
        "keys": " ".join(message.keys),
    }
    if not output.as_json:
        return {**shown, "body": _shortened(body_fields(message.record, 4 * SHOWN_BODY)["body"])}
    return {
        **shown,
        **_place(message.queue, message.queue_offset),
        "message_id": message.message_id,
        "offset_id": message.offset_id,
        "keys": message.keys,
        "reconsume_times": message.reconsume_times,
        "properties": message.properties,
        **body_fields(message.record),
    }


def _place(queue: Queue, offset: int) -> dict[str, Any]:
    """Return the fields of a position in a queue; the offset is None if the message has none there yet."""
    return {
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "offset": offset if offset >= 0 else None,
    }


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_BODY else f"{text[:SHOWN_BODY]}... ({len(text)} characters)"


async def _send(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    body = sys.stdin.buffer.read() if options.body == "-" else options.body.encode()
    properties = pairs("--property", options.property)
    async with Producer(options.nameserver, "rocketlet-command", access=access_of(options)) as producer:
        result = await producer.send(
            options.topic,
            body,
            tag=options.tag,
            keys=options.key,
            properties=properties,
            delay_level=options.delay_level,
            delay=options.delay,
            priority=options.priority,
            lite_topic=options.lite_topic,
            queue_key=options.queue_key,
        )
    if output.as_json:
        output.json({"message_id": result.message_id, **_place(result.queue, result.queue_offset)})
    at = f"at {result.queue_offset}" if result.queue_offset >= 0 else "when its time has come"
    output.text(f"stored in {result.queue} {at}, message id {result.message_id}")
    return 0


async def _dead(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    letters = await dead_letters(admin, options.group)
    if options.all:
        count = await _shown(output, _stored(admin, letters), letters, Counter())
    else:
        found = await _newest(admin, letters.ranges, options.limit, "*")
        output.records(_DEAD_COLUMNS, [_dead_record(letters, message, output) for message in found])
        count = len(found)
    if not count:
        await admin.group(options.group)  # raises if the group does not exist
        output.text(f"the group {options.group} has no dead letters")
    return 0


def _dead_record(letters: DeadLetterTopic, message: Message, output: Output) -> dict[str, Any]:
    return {**_record(message, output), "state": letters.state_of(message), "reason": message.failure}


async def _wanted(admin: AdminClient, letters: DeadLetterTopic, options: argparse.Namespace) -> AsyncIterator[Message]:
    """Iterate over the messages that --id names; without --id over the new ones, or with --again over all."""
    ids = options.id or ()
    async for message in _stored(admin, letters):
        is_named = message.message_id in ids or message.offset_id in ids
        if is_named or (not ids and (options.again or letters.state_of(message) == "new")):
            yield message


async def _stored(admin: AdminClient, letters: DeadLetterTopic) -> AsyncIterator[Message]:
    """Iterate over all dead letters, by queue and offset."""
    for queue, span in letters.ranges.items():
        async for part in admin.read(queue, span.begin, span.end):
            for message in part:
                yield message


async def _found(
    options: argparse.Namespace, admin: AdminClient, output: Output
) -> tuple[DeadLetterTopic, int, Counter[str]]:
    """Print the selected messages. Return the dead letters, the number of selected ones, and their number by the topic
    that they were first sent to."""
    letters = await dead_letters(admin, options.group)
    origins: Counter[str] = Counter()
    wanted = await _shown(output, _wanted(admin, letters, options), letters, origins)
    if not wanted:
        await admin.group(options.group)  # raises if the group does not exist
        dealt_with = letters.stored - letters.new
        output.text("no dead letter matches" + (f"; --again takes {dealt_with} that are not new" if dealt_with else ""))
    return letters, wanted, origins


async def _replay(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    """Resend the selected dead letters, and mark those that were sent; they stay in their topic. Read them twice, to show
    and to send them, because memory may not hold all of them."""
    letters, wanted, origins = await _found(options, admin, output)
    if not wanted:
        return 1
    target = f"the group {options.group}" if options.to == "group" else _spelled(origins)
    if options.dry_run:
        output.text(f"would be sent again: {counted(wanted, 'message')}, to {target}")
        return 0
    foreign = await _not_read(admin, options.group, origins) - set(options.topic or ()) if options.to == "topic" else ()
    if foreign:
        names_of = " ".join(f"--topic {name}" for name in sorted(foreign))
        print(
            f"the group has not read {', '.join(sorted(foreign))}, which dead letters have as their topic; a client that can "
            f"store dead letters can set any topic. Check them, and add {names_of} to send them there.",
            file=sys.stderr,
        )
        return 1
    if not confirmed(options, f"Send {counted(wanted, 'message')} again, to {target}?"):
        return 1
    if options.detach or options.at is not None:
        return await _detached(options, admin, output, letters, sorted(origins))
    to_group, limits = options.to == "group", {"rate_per_s": options.rate, "stop_after": options.stop_after}
    replayed = Replay(admin, options.group, to_group=to_group, **limits)
    await replayed.run(_wanted(admin, letters, options), partial(_report, output))
    again = counted(replayed.sent, "message was", "messages were")
    output.text(f"{again} sent again; the dead letters stay in {names.dlq_topic(options.group)}, marked")
    if replayed.failed:
        rest = "; the replay has stopped" if replayed.is_stopped else ""
        output.text(f"{counted(replayed.failed, 'message')} could not be sent{rest}")
    return 1 if replayed.failed else 0


async def _detached(
    options: argparse.Namespace, admin: AdminClient, output: Output, letters: DeadLetterTopic, origins: list[str]
) -> int:
    """Let the console resend the selected dead letters."""
    places = []
    if options.id or options.again:
        places = [
            {"broker": message.queue.broker_name, "queue": message.queue_id, "offset": message.queue_offset}
            async for message in _wanted(admin, letters, options)
        ]
    job = await ConsoleClient(options.console).post(
        "/api/jobs",
        {
            "group": options.group,
            "to": options.to,
            "topics": origins if options.to == "topic" else [],
            "places": places,
            "rate_per_s": options.rate if options.rate < math.inf else None,
            "stop_after": options.stop_after,
            "at_ms": options.at or 0,
        },
    )
    show_jobs(output, [job])
    output.text(f"the console sends them; `rocketlet jobs list` shows it, `rocketlet jobs stop {job['id']}` stops it")
    return 0


def _report(output: Output, message: Message, error: RocketletError | None) -> None:
    """Print the result for a message, as text only if it could not be sent."""
    if output.as_json:
        place = {"message_id": message.message_id, **_place(message.queue, message.queue_offset)}
        output.json({**place, "result": "failed" if error else "sent", "reason": str(error) if error else None})
    elif error:
        output.text(f"{message.message_id} could not be sent: {error}")


async def _discard(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    letters, wanted, _ = await _found(options, admin, output)
    if not wanted:
        return 1
    if not confirmed(options, f"Discard {wanted} dead letters of {options.group}?"):
        return 1
    places = [(message.queue, message.queue_offset) async for message in _wanted(admin, letters, options)]
    await mark(admin, options.group, places, "discarded")
    output.text(f"{len(places)} dead letters are discarded: doctor and replay leave them out until they expire")
    return 0


def _spelled(origins: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(origins.items()))


async def _not_read(admin: AdminClient, group: str, topics: Collection[str]) -> set[str]:
    """Return the topics that the group neither subscribes to nor has offsets in, at any broker."""
    known = await admin.group(group)
    read = {queue.topic for queue in known.progress}
    for connections in known.connections.values():
        read.update(connections.subscriptions)
    return set(topics) - read


async def _shown(
    output: Output, messages: AsyncIterator[Message], letters: DeadLetterTopic, origins: Counter[str]
) -> int:
    """Print messages in tables of up to SHOWN_ROWS, and count them in `origins` by the topic that they were first sent to.
    Return their number."""
    count, rows = 0, list[dict[str, Any]]()
    async for message in messages:
        rows.append(_dead_record(letters, message, output))
        origins[message.origin] += 1
        count += 1
        if len(rows) == SHOWN_ROWS:
            output.records(_DEAD_COLUMNS, rows)
            rows.clear()
    output.records(_DEAD_COLUMNS, rows)
    return count
