"""`rocketlet jobs`: shows and stops the replays of a console."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial

from ...client.errors import RocketletError
from ..plumbing.administration import Commands, noun
from ..plumbing.console import ConsoleClient, add_console_option, show_jobs
from ..plumbing.output import Output, complain


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "jobs", "show and stop the replays of a console")
    _verb(verbs, "list", "list the replays with their progress, newest first", _list)
    stop = _verb(verbs, "stop", "stop a replay; what it has sent stays sent", _stop)
    stop.add_argument("id")


def _verb(
    verbs: Commands[argparse.ArgumentParser],
    name: str,
    text: str,
    command: Callable[[argparse.Namespace, ConsoleClient, Output], Awaitable[int]],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each record")
    add_console_option(parser)
    parser.set_defaults(run=partial(_run, command), log_level="warning")
    return parser


async def _run(
    command: Callable[[argparse.Namespace, ConsoleClient, Output], Awaitable[int]], options: argparse.Namespace
) -> int:
    try:
        return await command(options, ConsoleClient(options.console), Output(as_json=options.json))
    except RocketletError as error:
        complain(error)
    return 1


async def _list(options: argparse.Namespace, console: ConsoleClient, output: Output) -> int:
    jobs = await console.get("/api/jobs")
    show_jobs(output, jobs)
    if not jobs:
        output.text("the console has no replay")
    return 0


async def _stop(options: argparse.Namespace, console: ConsoleClient, output: Output) -> int:
    show_jobs(output, [await console.post(f"/api/jobs/{options.id}/stop")])
    return 0
