"""`rocketlet groups`: lists groups, their members, their events and their settings."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from ...client.admin.admin_client import AdminClient
from ...client.wire.side_by_side import side_by_side
from ...protocol.counting import counted
from ...protocol.group_config import GroupConfig
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Output
from .group_report import report


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "groups", "list, show, create and delete consumer groups")
    list_ = verb(verbs, "list", "list consumer groups with their members and lag", _list)
    list_.add_argument("--system", action="store_true", help="also those that RocketMQ makes for itself")
    show = verb(verbs, "show", "show a group: its members, who owns which queue, and what happened", _show)
    show.add_argument("group")
    show.add_argument("--timeline", action="store_true", help="also show what happened, oldest first")
    show.add_argument(
        "--follow", action="store_true", help="with --timeline: keep printing new events until you press Ctrl-C"
    )
    create = verb(verbs, "create", "create a group, or change its settings", _create)
    create.add_argument("group")
    create.add_argument("--retries", type=int, default=16, help="before a message is a dead letter (default: 16)")
    create.add_argument("--retry-queues", type=int, default=1, help="queues of its retry topic (default: 1)")
    create.add_argument(
        "--consume", choices=("on", "off"), default="on", help="off: brokers give its members nothing (default: on)"
    )
    create.add_argument(
        "--orderly", action="store_true", help="messages shared among members come in order by message group"
    )
    strict = verb(verbs, "strict", "refuse members whose subscriptions differ from the others'", _strict)
    strict.add_argument("group")
    strict.add_argument("strict", choices=("on", "off"))
    delete = verb(verbs, "delete", "delete a group's settings and offsets", _delete)
    delete.add_argument("group")
    changing(delete)


async def _list(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    masters = await admin.masters()

    async def row(name: str) -> dict[str, object]:
        progress, connections = await asyncio.gather(
            admin.progress(name, masters=masters, times=False), admin.connections(name, masters)
        )
        members = {member.client_id for told in connections.values() for member in told.members}
        topics = sorted({queue.topic for queue in progress if not queue.topic.startswith("%")})
        lag = sum(max(item.lag, 0) for item in progress.values())
        return {"group": name, "members": len(members), "topics": topics, "lag": lag}

    names = await admin.groups(system=options.system)
    output.records(("group", "members", "topics", "lag"), await side_by_side(row, names))
    if not names:
        output.text("there is no group yet: its first consumer makes one")
    return 0


async def _show(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    await report(admin, options.group, output, timeline=options.timeline, follow=options.follow)
    return 0


async def _create(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    config = GroupConfig(
        options.group,
        consume_enable=options.consume == "on",
        retry_max_times=options.retries,
        retry_queues=options.retry_queues,
        consume_orderly=options.orderly,
    )
    known = (await admin.group_configs(options.group)).values()
    if known:
        config = replace(config, strict=any(item.strict for item in known))
    await admin.create_group(config)
    if output.as_json:
        output.json({"group": config.name, "retries": config.retry_max_times, "consume": options.consume})
    output.text(f"the group {options.group} is set: {options.retries} retries, consumption {options.consume}")
    return 0


async def _strict(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    for broker in await admin.set_strict(options.group, options.strict == "on"):
        if output.as_json:
            output.json({"broker": broker, "group": options.group, "strict": options.strict})
        output.text(f"{broker}: the group {options.group} is {'strict' if options.strict == 'on' else 'not strict'}")
    return 0


async def _delete(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    group = await admin.group(options.group)
    online = f", which has {counted(len(group.members), 'member')}" if group.members else ""
    if not confirmed(options, f"Delete the group {group.name}{online}, with its offsets?"):
        return 1
    await admin.delete_group(group.name)
    if output.as_json:
        output.json({"group": group.name, "change": "deleted"})
    output.text(f"the group {group.name} is deleted")
    return 0
