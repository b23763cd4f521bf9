"""`rocketlet mirror`: copies topics and the progress of groups to another cluster, Rocketlet's or Apache's."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from datetime import datetime

from ...client.application import stop_signal
from ...client.errors import RocketletError
from ...migration.mirror import Begin, Mirror, Waiting
from ...protocol.names import Queue, counted
from ..plumbing.access import access_of, add_client_options
from ..plumbing.bar import drawn
from ..plumbing.numbers import whole
from ..plumbing.output import Output, complain

_FROM, _TO = "from-", "to-"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "mirror",
        help="copy topics and the progress of groups to another cluster",
        description="Copy topics with their messages, and the progress of groups, to another cluster. It resumes "
        "after the newest copies, so it may be stopped and restarted.",
    )
    parser.add_argument(
        "--from", dest="source", required=True, metavar="HOST:PORT", help="the name servers to copy from"
    )
    parser.add_argument("--to", dest="target", required=True, metavar="HOST:PORT", help="the name servers to copy to")
    parser.add_argument("--topics", type=_names, default=(), metavar="TOPIC[,...]", help="default: all")
    parser.add_argument(
        "--groups",
        type=_names,
        metavar="GROUP[,...]",
        help="groups whose progress is copied; default: all groups that read the topics",
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--last", type=whole(0), metavar="COUNT", help="start at the newest COUNT messages of each queue"
    )
    begin.add_argument("--since", type=_time_ms, metavar="TIME", help="start at a time, such as 2026-01-31T12:00:00")
    parser.add_argument("--follow", action="store_true", help="continue until SIGTERM or Ctrl-C")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one line of JSON for each queue, and for messages that are not due yet",
    )
    add_client_options(parser, _FROM)
    add_client_options(parser, _TO)
    parser.set_defaults(run=_mirror, log_level="warning")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _time_ms(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-01-31T12:00:00") from None


async def _mirror(options: argparse.Namespace) -> int:
    try:
        begin = Begin(last=options.last, since_ms=options.since)
        async with Mirror(
            options.source,
            options.target,
            topics=options.topics,
            groups=options.groups,
            begin=begin,
            source_access=access_of(options, _FROM),
            target_access=access_of(options, _TO),
        ) as mirror:
            async with drawn(lambda: mirror.progress):
                await _run(mirror, follows=options.follow)
            _report(mirror, await mirror.waiting(), Output(as_json=options.json))
    except (RocketletError, OSError) as error:
        complain(error)
        return 1
    return 0


async def _run(mirror: Mirror, *, follows: bool) -> None:
    if not follows:
        await mirror.run()
        return
    running = asyncio.create_task(mirror.run(follow=True))
    stopping = asyncio.create_task(stop_signal())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (running, stopping):
        task.cancel()
    ended = await asyncio.gather(running, stopping, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]


def _report(mirror: Mirror, waiting: Waiting, output: Output) -> None:
    rows = [
        {
            "topic": copy.source.topic,
            "from": _side(copy.source, output),
            "to": _side(copy.target, output),
            "copied": copy.copied,
            "next": copy.next,
            "deleted_before": copy.dropped,
        }
        for copy in mirror.copies.values()
    ]
    output.records(("topic", "from", "to", "copied", "next", "deleted_before"), rows)
    for group, queues in _by_group(mirror).items():
        output.text(f"the group {group} resumes at the same messages in {counted(queues, 'queue')}")
    if output.as_json:
        for record in _waiting_records(waiting):
            output.json(record)
    for group, count in waiting.retries.items():
        retries = counted(count, "message to retry, which stays", "messages to retry, which stay")
        output.text(f"the group {group} has {retries} at the source: let its members there handle them")
    for topic, count in waiting.delayed.items():
        output.text(f"{topic} has {count} delayed messages that are not due yet: run the mirror again when they are")


def _side(queue: Queue, output: Output) -> object:
    if output.as_json:
        return {"broker": queue.broker_name, "queue": queue.queue_id}
    return f"{queue.broker_name}:{queue.queue_id}"


def _waiting_records(waiting: Waiting) -> Iterable[dict[str, object]]:
    yield from ({"group": group, "to_retry": count} for group, count in waiting.retries.items())
    yield from ({"topic": topic, "delayed": count} for topic, count in waiting.delayed.items())


def _by_group(mirror: Mirror) -> dict[str, int]:
    found: dict[str, int] = {}
    for group, _ in mirror.offsets:
        found[group] = found.get(group, 0) + 1
    return found
