"""`rocketlet topics`: lists topics, their messages and their readers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, cast

from ...client.admin.admin_client import AdminClient
from ...client.errors import ConfigError, TopicNotFound
from ...protocol.admin_bodies import LiteParent
from ...protocol.bodies import TopicConfig
from ...protocol.names import Queue, counted
from ...protocol.settings import TOPIC_OPTIONS, NewTopicSettings, TopicSettings, listed_settings, topic_report
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Instant, Output, complain
from ..plumbing.settings import add_settings, given

_NEW_OPTIONS: Final = {option: setting for option, setting in TOPIC_OPTIONS.items() if option != "read-queues"}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "topics", "list, show, create, change and delete topics")
    list_ = verb(verbs, "list", "list topics", _list)
    list_.add_argument("--system", action="store_true", help="include those that RocketMQ creates for its own use")
    show = verb(verbs, "show", "show a topic's queues and the groups that read it", _show)
    show.add_argument("topic")
    create = verb(
        verbs,
        "create",
        "create a topic on the brokers that do not have it, with the queues and the permission that it has on others",
        _create,
    )
    create.add_argument("topic")
    add_settings(create, _NEW_OPTIONS, creates=True)
    create.add_argument(
        "--lite", dest="type", action="store_const", const="LITE", help="the parent of lite topics: --type LITE"
    )
    create.add_argument("--broker", action="append", help="only on this broker; repeatable")
    set_ = verb(verbs, "set", "change a topic's settings", _set)
    set_.add_argument("topic")
    add_settings(set_, TOPIC_OPTIONS, creates=False)
    set_.add_argument("--broker", action="append", help="only on this broker; repeatable")
    set_.add_argument(
        "--allow-unreadable",
        action="store_true",
        help="stop reading queues even if they contain messages",
    )
    delete = verb(verbs, "delete", "delete a topic with its messages and offsets", _delete)
    delete.add_argument("topic")
    changing(delete)


async def _list(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    rows = []
    for name in await admin.topics(system=options.system):
        topic = await admin.topic(name)
        last_ms = max((span.last_ms for span in topic.ranges.values()), default=0)
        rows.append(
            {
                "topic": name,
                "brokers": sorted(topic.config),
                "queues": len(topic.ranges),
                "messages": topic.messages,
                "last_message": Instant(last_ms),
            }
        )
    output.records(("topic", "brokers", "queues", "messages", "last_message"), rows)
    if not rows:
        output.text("there is no topic yet: the first send to a topic creates it, or `rocketlet topics create NAME`")
    return 0


async def _show(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    topic = await admin.topic(options.topic)
    rows = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "begin": span.begin,
            "end": span.end,
            "messages": span.end - span.begin,
            "last_message": Instant(span.last_ms),
        }
        for queue, span in topic.ranges.items()
    ]
    output.records(("broker", "queue", "begin", "end", "messages", "last_message"), rows)
    for broker, config in sorted({**topic.config, **await admin.topic_settings(topic.name)}.items()):
        settings = topic_report(config)
        if output.as_json:
            output.json({"topic": topic.name, "broker": broker, "settings": settings})
        output.text(f"settings at {broker}: {listed_settings(settings)}")
    groups = await admin.consumed_by(options.topic)
    lite = await admin.lite_parent(options.topic)
    if lite is not None:
        groups = sorted({*groups, *lite.groups})
        if output.as_json:
            output.json(
                {
                    "topic": topic.name,
                    "lite_topics": lite.lite_topics,
                    "expiration_min": lite.expiration_min if lite.expiration_min > 0 else None,
                    "lite_groups": lite.groups,
                }
            )
        output.text(f"parent of {counted(lite.lite_topics, 'lite topic')}, {_expiration(lite)}")
    if await admin.message_type(topic.name) == "PRIORITY":
        await _show_levels(admin, topic.name, groups, output)
    output.text(f"read by: {', '.join(groups) or 'no group'}")
    return 0


async def _show_levels(admin: AdminClient, topic: str, groups: Iterable[str], output: Output) -> None:
    """Print the lag of each group in each priority level, the highest level first. A level is a queue id, on all
    brokers."""
    rows = []
    for group in groups:
        waiting: dict[int, int] = {}
        for queue, progress in (await admin.progress(group, topic, times=False)).items():
            waiting[queue.queue_id] = waiting.get(queue.queue_id, 0) + max(progress.lag, 0)
        rows += [
            {"topic": topic, "group": group, "level": level, "waiting": waiting[level]}
            for level in sorted(waiting, reverse=True)
        ]
    output.records(("group", "level", "waiting"), rows)


def _expiration(lite: LiteParent) -> str:
    if lite.expiration_min <= 0:
        return "which never expire"
    return f"deleted after {counted(lite.expiration_min, 'minute')} without a message"


async def _create(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    try:
        known = dict((await admin.topic(options.topic)).config)
    except TopicNotFound:
        known = {}
    values = cast("NewTopicSettings", given(options, _NEW_OPTIONS))
    created = await admin.create_topic(options.topic, **values, brokers=options.broker)
    for broker, config in sorted({**known, **created}.items()):
        how = "is created" if broker in created else "exists; `rocketlet topics set` changes it"
        _print(output, broker, config, how, {"created": broker in created})
    return 0


async def _set(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    values = cast("TopicSettings", given(options, TOPIC_OPTIONS))
    if not values:
        names = ", ".join(f"--{option}" for option in TOPIC_OPTIONS)
        raise ConfigError(f"nothing to change; give one of {names}")
    read_queues = options.queues if options.read_queues is None else options.read_queues
    if read_queues is not None and not options.allow_unreadable:
        topic = await admin.topic(options.topic)
        brokers = options.broker or topic.config
        wanted = {
            name: replace(topic.config[name], read_queues=read_queues) for name in brokers if name in topic.config
        }
        unreadable = topic.unreadable(wanted)
        if unreadable:
            await _show_unreadable(admin, topic.name, unreadable, output)
            return 1
    changed = await admin.change_topic(
        options.topic, **values, brokers=options.broker, allow_unreadable=options.allow_unreadable
    )
    for broker, config in sorted(changed.items()):
        _print(output, broker, config, "is changed", {})
    return 0


def _print(output: Output, broker: str, config: TopicConfig, how: str, more: dict[str, object]) -> None:
    settings = topic_report(config)
    if output.as_json:
        output.json({"broker": broker, "topic": config.name, **more, **settings})
    output.text(f"{broker}: the topic {config.name} {how}: {listed_settings(settings)}")


async def _show_unreadable(admin: AdminClient, topic: str, queues: Mapping[Queue, int], output: Output) -> None:
    """Print the messages that would become unreadable, and how many of them each group has not read."""
    groups = await admin.consumed_by(topic)
    lags = {group: await admin.progress(group, topic, times=False) for group in groups}
    rows = []
    for queue, messages in queues.items():
        unread = {
            group: min(found[queue].lag, messages)
            for group, found in lags.items()
            if queue in found and found[queue].lag > 0
        }
        rows.append(
            {
                "topic": topic,
                "broker": queue.broker_name,
                "queue": queue.queue_id,
                "messages": messages,
                "unread": unread,
            }
        )
    output.records(("broker", "queue", "messages", "unread"), rows)
    complain(
        f"{counted(sum(queues.values()), 'message')} would become unreadable: add --read-queues until the groups have read "
        "these queues, or --allow-unreadable"
    )


async def _delete(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    topic = await admin.topic(options.topic)
    if not confirmed(options, f"Delete the topic {topic.name} with {counted(topic.messages, 'message')}?"):
        return 1
    await admin.delete_topic(topic.name)
    if output.as_json:
        output.json({"topic": topic.name, "deleted_messages": topic.messages})
    output.text(f"the topic {topic.name} is deleted, with {counted(topic.messages, 'message')}")
    return 0
