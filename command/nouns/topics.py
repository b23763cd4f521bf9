"""`rocketlet topics`: lists topics, their messages and their readers."""

from __future__ import annotations

import argparse

from ...client.admin.admin_client import AdminClient
from ...client.config import TOPIC_QUEUES
from ...protocol.counting import counted
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Output, local_time


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "topics", "list, show, create and delete topics")
    list_ = verb(verbs, "list", "list topics", _list)
    list_.add_argument("--system", action="store_true", help="also those that RocketMQ makes for itself")
    show = verb(verbs, "show", "show a topic's queues and the groups that read it", _show)
    show.add_argument("topic")
    create = verb(verbs, "create", "create a topic, or change its queues and permission", _create)
    create.add_argument("topic")
    create.add_argument(
        "--queues", type=int, default=TOPIC_QUEUES, help=f"how many on each broker (default: {TOPIC_QUEUES})"
    )
    create.add_argument(
        "--perm", type=int, choices=(0, 2, 4, 6), default=6, help="6 reads and writes, 4 only reads, 2 only writes"
    )
    create.add_argument("--broker", action="append", help="only on this broker; may be given several times")
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
                "last_message": local_time(last_ms),
            }
        )
    output.records(("topic", "brokers", "queues", "messages", "last_message"), rows)
    if not rows:
        output.text("there is no topic yet: the first send to it makes one, or rocketlet topics create NAME")
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
            "last_message": local_time(span.last_ms),
        }
        for queue, span in topic.ranges.items()
    ]
    output.records(("broker", "queue", "begin", "end", "messages", "last_message"), rows)
    groups = await admin.consumed_by(options.topic)
    output.text(f"read by: {', '.join(groups) or 'no group'}")
    return 0


async def _create(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    await admin.create_topic(options.topic, queues=options.queues, perm=options.perm, brokers=options.broker)
    if output.as_json:
        output.json({"topic": options.topic, "queues": options.queues, "perm": options.perm})
    output.text(f"the topic {options.topic} has {counted(options.queues, 'queue')} on each of its brokers")
    return 0


async def _delete(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    topic = await admin.topic(options.topic)
    if not confirmed(options, f"Delete the topic {topic.name} with {counted(topic.messages, 'message')}?"):
        return 1
    await admin.delete_topic(topic.name)
    if output.as_json:
        output.json({"topic": topic.name, "deleted_messages": topic.messages})
    output.text(f"the topic {topic.name} is deleted, with {counted(topic.messages, 'message')}")
    return 0
