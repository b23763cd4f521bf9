"""`rocketlet groups`: lists groups, their members, their events and their settings."""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

from ...client.admin.admin_client import AdminClient, are_broadcasting
from ...client.errors import ConfigError
from ...client.wire.connection import gather_limited
from ...protocol import names
from ...protocol.bodies import GroupConfig
from ...protocol.names import counted
from ...protocol.settings import GROUP_OPTIONS, GroupSettings, group_report, listed_settings, new_group
from ..plumbing.administration import Commands, changing, confirmed, noun, verb
from ..plumbing.output import Output
from ..plumbing.settings import add_settings, given
from .group_report import handlers, report


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "groups", "list, show, create, change and delete consumer groups")
    list_ = verb(verbs, "list", "list consumer groups with their members and lag", _list)
    list_.add_argument("--system", action="store_true", help="include those that RocketMQ creates for its own use")
    show = verb(verbs, "show", "show a group: its members, the owner of each queue, and its events", _show)
    show.add_argument("group")
    show.add_argument("--timeline", action="store_true", help="also show its events, oldest first")
    show.add_argument(
        "--follow", action="store_true", help="with --timeline: keep printing new events until you press Ctrl-C"
    )
    show.add_argument(
        "--handlers", action="store_true", help="show the handlers that are running, with their stacks, longest first"
    )
    create = verb(verbs, "create", "create a group on the brokers that do not have it", _create)
    create.add_argument("group")
    add_settings(create, GROUP_OPTIONS, creates=True, defaults=True)
    set_ = verb(verbs, "set", "change a group's settings", _set)
    set_.add_argument("group")
    add_settings(set_, GROUP_OPTIONS, creates=False)
    set_.add_argument(
        "--no-lite", action="store_true", help="make a lite group a group of topics; stop its clients first"
    )
    delete = verb(verbs, "delete", "delete a group's settings, offsets and retries", _delete)
    delete.add_argument("group")
    delete.add_argument("--dead-letters", action="store_true", help="delete its dead letters, too")
    changing(delete)


async def _list(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    masters = await admin.masters()

    async def row(name: str) -> dict[str, object]:
        progress, connections = await asyncio.gather(
            admin.progress(name, masters=masters, times=False), admin.connections(name, masters)
        )
        members = {member.client_id for told in connections.values() for member in told.members}
        topics = sorted({queue.topic for queue in progress if not queue.topic.startswith("%")})
        lag = None if are_broadcasting(connections) else sum(max(item.lag, 0) for item in progress.values())
        return {"group": name, "members": len(members), "topics": topics, "lag": lag}

    names = await admin.groups(system=options.system)
    output.records(("group", "members", "topics", "lag"), await gather_limited(row, names))
    if not names:
        output.text("there is no group yet: a group's first consumer creates it")
    return 0


async def _show(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    if options.handlers:
        await handlers(admin, options.group, output)
    else:
        await report(admin, options.group, output, timeline=options.timeline, follow=options.follow)
    return 0


async def _create(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    config = new_group(options.group, _given(options))
    created = await admin.create_group(config)
    for broker, found in sorted((await admin.group_configs(options.group)).items()):
        is_new = broker in created
        how = "is created" if is_new else "exists; `rocketlet groups set` changes it"
        _print(output, broker, found, how, {"created": is_new})
    return 0


async def _set(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    changes = _given(options)
    if not changes and not options.no_lite:
        names = ", ".join(f"--{option}" for option in GROUP_OPTIONS)
        raise ConfigError(f"nothing to change; give {names} or --no-lite")
    changed = await admin.change_group(options.group, lite=False if options.no_lite else None, **changes)
    configs = await admin.group_configs(options.group)
    for broker in changed:
        _print(output, broker, configs[broker], "is changed", {})
    return 0


def _given(options: argparse.Namespace) -> GroupSettings:
    return cast("GroupSettings", given(options, GROUP_OPTIONS))


def _print(output: Output, broker: str, config: GroupConfig, how: str, more: dict[str, object]) -> None:
    settings = group_report(config)
    if output.as_json:
        output.json({"broker": broker, "group": config.name, **more, **settings})
    output.text(f"{broker}: the group {config.name} {how}: {listed_settings(settings)}")


async def _delete(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    group = await admin.group(options.group)
    online = f", which has {counted(len(group.members), 'member')}" if group.members else ""
    letters = counted(await admin.dead_letter_count(group.name) or 0, "dead letter")
    kept = f"and {letters}" if options.dead_letters else f"but not its {letters}"
    if not confirmed(options, f"Delete the group {group.name}{online}, with its offsets and retries, {kept}?"):
        return 1
    stay = await admin.delete_group(group.name, dead_letters=options.dead_letters)
    if output.as_json:
        output.json({"group": group.name, "change": "deleted", "dead_letters": stay})
    output.text(f"the group {group.name} is deleted")
    if stay:
        output.text(
            f"{counted(stay, 'dead letter stays', 'dead letters stay')} in {names.dlq_topic(group.name)}; "
            f"`rocketlet topics delete {names.dlq_topic(group.name)}` deletes them"
        )
    return 0
