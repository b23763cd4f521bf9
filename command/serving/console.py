"""`rocketlet console`: the web page in a process of its own; with `rocketlet start --console-port` in the process of the
name server."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from ...client.errors import ConfigError, RocketletError
from ...client.wire.connection import Access
from ...console.config import DEFAULT_PORT
from ..config import NAME_SERVER, NAME_SERVER_VARIABLE
from ..plumbing import logs, numbers
from ..plumbing.access import access_of, add_client_options
from .listening import listening_fault, listening_socket

log = structlog.get_logger("rocketlet")

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
    with listening_socket(options.host, options.port) as listening:
        async with _serving(*cluster, options.host, listening, read_only=options.read_only, hosts=hosts) as url:
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
    use would otherwise stop the broker after its start. Raises OSError."""
    options.console_socket = None
    if getattr(options, "console_port", None) is None:  # `rocketlet broker` has no such option
        yield
        return
    with listening_socket(options.console_host, options.console_port) as options.console_socket:
        yield


@asynccontextmanager
async def beside_broker(options: argparse.Namespace, address: str) -> AsyncIterator[str | None]:
    """Run the console of `rocketlet start` while the block runs, and yield its URL; None without a console. The console
    signs with the keys in the environment, if there are any."""
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
    async with _serving(address, access, host, options.console_socket, read_only=read_only) as url:
        yield url


@asynccontextmanager
async def _serving(
    name_server: str,
    access: Access,
    host: str,
    listening: socket.socket,
    *,
    read_only: bool,
    hosts: tuple[str, ...] = (),
) -> AsyncIterator[str]:
    if not all(map(importlib.util.find_spec, _NEEDED)):
        raise ConfigError("the console needs its extra: pip install '.[console]'")
    from ...console.server import ConsoleServer

    if not _is_loopback(host):
        hint = "it has no login: whoever reaches it can do what its keys can; put a proxy with a login before it"
        log.warning("console_open", host=host, read_only=read_only, hint=hint)
    async with ConsoleServer(
        name_server, access=access, host=host, listening=listening, hosts=hosts, read_only=read_only
    ) as server:
        yield server.url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
