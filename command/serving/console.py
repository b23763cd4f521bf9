"""`rocketlet console`: the web page in a process of its own; with `rocketlet start --console-port` in the process of the
name server."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from ...client.errors import ConfigError, RocketletError
from ...client.wire.connection import Access
from ...console.config import DEFAULT_PORT
from ...host.address import is_loopback
from ..config import NAME_SERVER, NAME_SERVER_VARIABLE
from ..plumbing import logs, numbers
from ..plumbing.access import access_of, add_client_options
from .listening import listening_fault, listening_socket

if TYPE_CHECKING:
    from ...console.login import Sessions

log = structlog.get_logger("rocketlet")

DEFAULT_FOLDER = "rocketlet-console"
_NEEDED = ("jinja2", "starlette", "uvicorn")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "serve a web page that shows a cluster, Rocketlet's or Apache's, and changes it"
    parser = commands.add_parser("console", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument(
        "--nameserver",
        default=os.environ.get(NAME_SERVER_VARIABLE, NAME_SERVER),
        metavar="HOST:PORT[;HOST:PORT]",
        help=f"the name servers to query (default: ${NAME_SERVER_VARIABLE}, or {NAME_SERVER})",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=numbers.port,
        default=DEFAULT_PORT,
        help=f"the port; 0 selects a free one (default: {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that browsers may use, besides localhost, this machine's name and addresses; may be repeated",
    )
    parser.add_argument("--read-only", action="store_true", help="disable all changes")
    _add_login_options(parser, "")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(DEFAULT_FOLDER),
        metavar="DIR",
        help=f"the folder that keeps replays over a restart, created with the first one (default: {DEFAULT_FOLDER})",
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info")
    add_client_options(parser)
    parser.set_defaults(run=_console)


def add_start_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the console")
    group.add_argument(
        "--console-port",
        type=numbers.port,
        help="also serve the console, a web page, on this port (default: no console)",
    )
    group.add_argument(
        "--console-host", default="127.0.0.1", help="the address to serve the console on (default: 127.0.0.1)"
    )
    group.add_argument("--console-read-only", action="store_true", help="disable all changes in the console")
    _add_login_options(group, "console-")


def _add_login_options(group: argparse._ActionsContainer, side: str) -> None:
    group.add_argument(
        f"--{side}logins",
        type=Path,
        metavar="FILE",
        help="the users of the console, a line NAME look PASSWORD or NAME operate PASSWORD for each",
    )
    group.add_argument(
        f"--{side}no-login",
        action="store_true",
        help="serve the console without a login at an address that other machines reach, such as behind a proxy with one",
    )


def _sessions(options: argparse.Namespace, side: str) -> Sessions | None:
    """Return the sessions of the users that have to log in; None if nobody has to. Raises ConfigError."""
    host, logins, no_login = (getattr(options, f"{side}{name}") for name in ("host", "logins", "no_login"))
    option = f"--{side}".replace("_", "-")
    if logins is not None:
        if no_login:
            raise ConfigError(f"{option}no-login: {option}logins is given, too; remove one of them")
        from ...console.login import Sessions, read_users

        return Sessions(read_users(logins))
    if not (no_login or is_loopback(host)):
        raise ConfigError(
            f"{option}host: other machines reach {host}, and the console has no users; give {option}logins FILE, or "
            f"{option}no-login if a proxy with a login is in front of it"
        )
    return None


async def _console(options: argparse.Namespace) -> int:
    try:
        return await _served(options)
    except RocketletError as error:
        print(f"rocketlet: {error}", file=sys.stderr)
    except OSError as error:
        print(f"rocketlet: {listening_fault(error, options.host, options.port)}", file=sys.stderr)
    return 1


async def _served(options: argparse.Namespace) -> int:
    cluster, hosts = (options.nameserver, access_of(options)), tuple(options.allow_host)
    sessions = _sessions(options, "")
    with listening_socket(options.host, options.port) as listening:
        async with _serving(
            *cluster,
            options.host,
            listening,
            read_only=options.read_only,
            sessions=sessions,
            folder=options.data,
            hosts=hosts,
        ) as url:
            await _shown(url)
    return 0


async def _shown(url: str) -> None:
    """Wait for SIGTERM or Ctrl-C while the console is served."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    print(f"rocketlet console is ready on {url}", flush=True)
    await done.wait()


@contextmanager
def reserved(options: argparse.Namespace) -> Iterator[None]:
    """Listen on the console's port for `beside_broker`. This happens before the broker starts, because a port that is in
    use would otherwise stop the broker after its start. Raises OSError, and ConfigError for wrong users."""
    options.console_socket = None
    if getattr(options, "console_port", None) is None:  # `rocketlet broker` has no such option
        yield
        return
    options.console_sessions = _sessions(options, "console_")
    with listening_socket(options.console_host, options.console_port) as options.console_socket:
        yield


@asynccontextmanager
async def beside_broker(options: argparse.Namespace, address: str, data: Path) -> AsyncIterator[str | None]:
    """Run the console of `rocketlet start` while the block runs, and yield its URL; None without a console. The console
    signs with the keys in the environment, if there are any, and keeps its jobs in the data folder."""
    if options.console_socket is None:
        yield None
        return
    access = Access(
        access_key=os.environ.get("ROCKETLET_ACCESS_KEY", ""),
        secret_key=os.environ.get("ROCKETLET_SECRET_KEY", "") if os.environ.get("ROCKETLET_ACCESS_KEY") else "",
        tls=options.tls == "enforcing",
        verify_tls=False,  # certificates need not name the addresses that it uses
    )
    host, read_only = options.console_host, options.console_read_only
    sessions = options.console_sessions
    async with _serving(
        address, access, host, options.console_socket, read_only=read_only, sessions=sessions, folder=data / "console"
    ) as url:
        yield url


@asynccontextmanager
async def _serving(
    name_server: str,
    access: Access,
    host: str,
    listening: socket.socket,
    *,
    read_only: bool,
    sessions: Sessions | None,
    folder: Path,
    hosts: tuple[str, ...] = (),
) -> AsyncIterator[str]:
    if not all(map(importlib.util.find_spec, _NEEDED)):
        raise ConfigError("the console needs its extra: pip install '.[console]'")
    from ...console.server import ConsoleServer

    if sessions is None and not is_loopback(host):
        hint = "it has no login: whoever reaches it can do what its keys can; put a proxy with a login before it"
        log.warning("console_open", host=host, read_only=read_only, hint=hint)
    async with ConsoleServer(
        name_server, access=access, host=host, listening=listening, hosts=hosts, read_only=read_only, sessions=sessions,
        folder=folder,
    ) as server:  # fmt: skip
        yield server.url
