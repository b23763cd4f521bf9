"""The commands that query and change a cluster, Rocketlet's or Apache's: `rocketlet NOUN VERB`.

Each command is a coroutine that gets its options, an AdminClient and an Output, and returns the exit status. After a
RocketletError or an OSError, the caller prints the error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from ...client.admin.admin_client import AdminClient
from ...client.errors import ConfigError, RocketletError
from ..config import NAME_SERVER, NAME_SERVER_VARIABLE
from .access import access_of, add_client_options
from .output import Output, complain

Commands = argparse._SubParsersAction
Command = Callable[[argparse.Namespace, AdminClient, Output], Awaitable[int]]


def noun(commands: Commands[argparse.ArgumentParser], name: str, text: str) -> Commands[argparse.ArgumentParser]:
    """Add a noun, and return the parsers of its verbs."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    return parser.add_subparsers(required=True, metavar="VERB")


def verb(
    commands: Commands[argparse.ArgumentParser], name: str, text: str, command: Command
) -> argparse.ArgumentParser:
    """Add a verb that runs a command, with the options that all verbs have."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument(
        "--nameserver",
        default=os.environ.get(NAME_SERVER_VARIABLE, NAME_SERVER),
        metavar="HOST:PORT[;HOST:PORT]",
        help=f"the name servers to query (default: ${NAME_SERVER_VARIABLE}, or {NAME_SERVER})",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each record")
    add_client_options(parser)
    parser.set_defaults(run=partial(_run, command), log_level="warning")
    return parser


async def _run(command: Command, options: argparse.Namespace) -> int:
    try:
        async with AdminClient(options.nameserver, access=access_of(options)) as admin:
            return await command(options, admin, Output(as_json=options.json))
    except BrokenPipeError:  # the reader of stdout has closed it
        raise
    except (RocketletError, OSError) as error:
        complain(error)
    return 1


def confirmed(options: argparse.Namespace, question: str) -> bool:
    """Return True if the command may continue: with --yes, or if the next line of standard input is y or yes."""
    if options.yes:
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # programs read stdout
    answer = sys.stdin.readline()
    if not answer:
        print("no answer on stdin; add --yes to continue without confirmation", file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def changing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse `name=value` texts; the last value of a name counts. Raises ConfigError with the name of the option."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text!r}: use NAME=VALUE")
        found[name] = value
    return found
