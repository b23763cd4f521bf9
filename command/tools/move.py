"""`rocketlet move`: moves the producers and groups of a cluster to another cluster, or back."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...client.errors import RocketletError
from ...migration.move import GroupPlan, Move, Plan, Taken
from ..plumbing.access import access_of, add_client_options
from ..plumbing.bar import clear, drawn
from ..plumbing.output import Output, complain

_FROM, _TO = "from-", "to-"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "move",
        help="move producers and groups to another cluster, step by step, or back",
        description="Move producers and groups to another cluster. Without a step, copy the messages that are not "
        "at the target yet. Then use --producers, and --group for one group after the other. Each step may be repeated.",
    )
    parser.add_argument(
        "--from", dest="source", required=True, metavar="HOST:PORT", help="the name servers of the source cluster"
    )
    parser.add_argument(
        "--to", dest="target", required=True, metavar="HOST:PORT", help="the name servers of the target cluster"
    )
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "--dry-run", action="store_true", help="show the topics, the groups, and what cannot be moved; change nothing"
    )
    step.add_argument(
        "--producers", action="store_true", help="make the source's topics read-only, and copy the last messages"
    )
    step.add_argument(
        "--group",
        metavar="GROUP",
        help="wait until GROUP's members have stopped, then move its offsets and pending retries",
    )
    parser.add_argument(
        "--back", action="store_true", help="move back: messages that came from --to are not copied a second time"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each record")
    add_client_options(parser, _FROM)
    add_client_options(parser, _TO)
    parser.set_defaults(run=_move, log_level="warning")


async def _move(options: argparse.Namespace) -> int:
    output = Output(as_json=options.json)

    def say(text: str) -> None:
        clear()
        output.text(text)

    try:
        async with Move(
            options.source,
            options.target,
            returns=options.back,
            source_access=access_of(options, _FROM),
            target_access=access_of(options, _TO),
            say=say,
        ) as move:
            return await _step(options, move, output)
    except (RocketletError, OSError) as error:
        complain(error)
        return 1


async def _step(options: argparse.Namespace, move: Move, output: Output) -> int:
    if options.group:
        async with drawn(lambda: move.progress):
            taken = await move.take(options.group)
        output.records(("group", "lag", "retries", "dead"), [_group_row(taken)])
        output.text(f"start the members of {options.group} with {options.target} now")
        return 0
    plan = await move.plan()
    if options.dry_run or plan.blocks:
        _show(plan, output)
        return 1 if plan.blocks else 0
    if options.producers:
        async with drawn(lambda: move.progress):
            copied = await move.close()
        output.records(("copied",), [{"copied": copied}])
        output.text(f"{options.source} is read-only: start the producers with {options.target} now,")
        output.text("then move group by group: --group " + ", --group ".join(group.name for group in plan.groups))
        return 0
    _show(plan, output)
    async with drawn(lambda: move.progress):
        copied = await move.copy()
    output.records(("copied",), [{"copied": copied}])
    output.text("all messages that can be copied are at the target; repeat this as needed, then use --producers")
    return 0


def _group_row(group: GroupPlan | Taken) -> dict[str, object]:
    row = asdict(group)
    return {"group": row.pop("name"), **row}


def _show(plan: Plan, output: Output) -> None:
    output.records(("topic", "messages"), [{"topic": name, "messages": count} for name, count in plan.topics.items()])
    output.records(("group", "members", "lag", "retries", "dead"), list(map(_group_row, plan.groups)))
    for text in plan.stays:
        output.text(f"stays: {text}")
    for text in plan.blocks:
        output.text(f"first: {text}")
    if output.as_json:
        output.json({"stays": plan.stays, "blocks": plan.blocks})
