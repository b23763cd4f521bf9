"""The `rocketlet` command."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from .. import __version__
from ..broker.access.accounts import AclError
from ..broker.broker import Broker
from ..broker.config import BrokerConfig
from ..broker.nameserver.routes import Routes
from ..broker.net.tls import TlsError
from ..broker.open_files import raise_limit
from ..broker.server import Server
from ..broker.store.files import StoreError
from ..client.errors import RocketletError
from . import brokers, doctor, groups, logs, messages, offsets, topics
from .access import acl_of, add_registration_options, add_server_options, tls_of
from .settings import SettingsParser

log = structlog.get_logger("rocketlet")

DEFAULT_PORT = 9876
BROKER_PORT = 10911


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logs.configure(options.log_level)
    try:
        return _run(options)
    except (StoreError, TlsError, AclError, RocketletError) as error:
        print(f"rocketlet: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        sys.stderr.close()
    except OSError as error:
        print(f"rocketlet: cannot listen: {error.strerror}", file=sys.stderr)
    return 1


def _run(options: argparse.Namespace) -> int:
    if options.run in (_start, _broker) and not all(map(importlib.util.find_spec, ("prometheus_client", "sqlglot"))):
        print("rocketlet: a broker needs its extra: pip install 'rocketlet[broker]'", file=sys.stderr)
        return 1
    if importlib.util.find_spec("uvloop") is None:  # it does not exist for Windows, and a client does not need it
        return int(asyncio.run(options.run(options)))
    import uvloop

    return int(uvloop.run(options.run(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocketlet",
        description="Start RocketMQ brokers and name servers, and administer clusters, Rocketlet's or Apache's.",
    )
    parser.add_argument("--version", action="version", version=f"rocketlet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=SettingsParser)
    start = commands.add_parser("start", help="run a name server and a broker on one port")
    _listen_options(start, DEFAULT_PORT)
    add_server_options(start)
    _external_port_option(start)
    _broker_options(start)
    start.set_defaults(run=_start)
    start.read_settings()
    broker = commands.add_parser("broker", help="run a broker that registers with one or more name servers")
    _listen_options(broker, BROKER_PORT)
    add_server_options(broker)
    add_registration_options(broker)
    _broker_options(broker)
    broker.add_argument(
        "--nameserver", required=True, metavar="HOST:PORT[;HOST:PORT]", help="the name servers to register with"
    )
    broker.set_defaults(run=_broker)
    broker.read_settings()
    nameserver = commands.add_parser("nameserver", help="run a name server")
    _listen_options(nameserver, DEFAULT_PORT)
    add_server_options(nameserver)
    _external_port_option(nameserver)
    nameserver.set_defaults(run=_nameserver)
    nameserver.read_settings()
    for nouns in (topics, groups, offsets, messages, brokers, doctor):
        nouns.add_to(commands)
    fsck = commands.add_parser("fsck", help="check a data folder that no broker uses: what is whole, what is not")
    fsck.add_argument("folder", type=Path, metavar="DIR", help="the data folder")
    fsck.add_argument("--repair", action="store_true", help="also repair what can be repaired")
    fsck.add_argument("--json", action="store_true", help="print one JSON object")
    fsck.add_argument("--log-level", choices=logs.LEVELS, default="error")
    fsck.set_defaults(run=_fsck, host="", port=0)
    return parser


def _listen_options(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; 0.0.0.0: all, for clients on other machines (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--admin",
        choices=("any", "loopback"),
        default="any",
        help="where requests that administrate may come from: anywhere, or this machine (default: any)",
    )
    parser.add_argument(
        "--port", type=_port, default=port, help=f"the port to listen on; 0 takes any free one (default: {port})"
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="what to log at least (default: info)")


def _external_port_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--external-port",
        type=_port,
        help="also listen on this port; clients that ask there are told the brokers' --advertise-external addresses",
    )


def _broker_options(parser: argparse.ArgumentParser) -> None:
    _identity_options(parser)
    _store_options(parser)
    _limit_options(parser)


def _identity_options(parser: argparse.ArgumentParser) -> None:
    """Who the broker is, and where clients find it."""
    parser.add_argument("--name", default="broker-a", help="the broker's name in the cluster (default: broker-a)")
    parser.add_argument("--cluster", default="DefaultCluster", help="the cluster's name (default: DefaultCluster)")
    parser.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        type=_advertised,
        help="the address that clients are told to connect to (default: --host, or this host's address)",
    )
    parser.add_argument(
        "--advertise-external",
        metavar="HOST:PORT",
        help="the address for clients that ask at a name server's --external-port, such as the published port of a container",
    )
    parser.add_argument(
        "--no-vip",
        action="store_true",
        help="do not listen on the port two below, which clients with the VIP channel use",
    )


def _store_options(parser: argparse.ArgumentParser) -> None:
    """What is kept, where, and for how long."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("rocketlet-data"),
        help="the folder for messages and settings (default: ./rocketlet-data)",
    )
    parser.add_argument(
        "--flush",
        choices=("os", "sync"),
        default="os",
        help="acknowledge a message when the operating system has it (os, the default) or when it is on the disk (sync)",
    )
    parser.add_argument(
        "--retain-hours", type=_hours, default=72.0, help="delete messages that are older (default: 72)"
    )
    parser.add_argument(
        "--retain-bytes",
        type=_size,
        default=None,
        metavar="SIZE",
        help="delete the oldest messages beyond this size, such as 20G (default: no limit)",
    )
    parser.add_argument(
        "--segment-bytes",
        type=_size,
        default="256M",
        metavar="SIZE",
        help="the size of a file of the commit log (default: 256M)",
    )


def _limit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--queues",
        type=_positive,
        default=8,
        help="how many queues a topic that a send creates gets at most (default: 8); clients ask for 4",
    )
    parser.add_argument(
        "--metrics-port", type=_port, help="serve Prometheus metrics on this port, at /metrics (default: no metrics)"
    )
    parser.add_argument("--metrics-host", help="the address to serve metrics on, such as 127.0.0.1 (default: --host)")
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="what connections may hold together, such as 512M: unfinished requests and unread answers "
        "(default: a quarter of the machine or container)",
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of hours from 0")
    return hours


def _advertised(text: str) -> str:
    host, separator, port = text.partition(":")
    if not host or (separator and (not port.isdigit() or not 0 < int(port) < 65_536)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT")
    return text


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give bytes, or a number with K, M, G or T")
    return int(digits) * unit


async def _start(options: argparse.Namespace) -> int:
    raise_limit()
    tls, acl = tls_of(options), acl_of(options)
    address = _bind(options)
    routes = Routes()
    broker = Broker(_config(options, address, ()), routes, tls=tls, acl=acl)
    async with Server(
        options.host,
        options.port,
        broker=broker,
        routes=routes,
        external_port=options.external_port,
        tls=tls,
        acl=acl,
        admin_is_local=_admin_is_local(options),
    ) as server:
        done = _termination()
        _announce(broker)
        print(
            f"rocketlet is ready on {address}: name server and broker {broker.config.name}\n"
            f"  Python   Producer(name_server={address!r})\n"
            f"  Java     producer.setNamesrvAddr({_quoted(address)})\n"
            f"  Spark    .option({_quoted('nameServer')}, {_quoted(address)})",
            flush=True,
        )
        await done.wait()
        log.info("closing", port=server.port)
    return 0


def _admin_is_local(options: argparse.Namespace) -> bool:
    return bool(options.admin == "loopback")


def _quoted(text: str) -> str:
    return f'"{text}"'


async def _broker(options: argparse.Namespace) -> int:
    raise_limit()
    tls, acl = tls_of(options), acl_of(options)
    address = _bind(options)
    name_servers = tuple(part for part in options.nameserver.replace(",", ";").split(";") if part)
    broker = Broker(_config(options, address, name_servers), tls=tls, acl=acl)
    async with Server(
        options.host,
        options.port,
        broker=broker,
        routes=None,
        tls=tls,
        acl=acl,
        admin_is_local=_admin_is_local(options),
    ) as server:
        done = _termination()
        _announce(broker)
        print(f"rocketlet broker {broker.config.name} is ready on {address}", flush=True)
        await done.wait()
        log.info("closing", port=server.port)
    return 0


async def _nameserver(options: argparse.Namespace) -> int:
    raise_limit()
    async with Server(
        options.host,
        options.port,
        broker=None,
        routes=Routes(),
        external_port=options.external_port,
        tls=tls_of(options),
        acl=acl_of(options),
        admin_is_local=_admin_is_local(options),
    ) as server:
        done = _termination()
        print(f"rocketlet name server is ready on {options.host}:{server.port}", flush=True)
        await done.wait()
        log.info("closing", port=server.port)
    return 0


async def _fsck(options: argparse.Namespace) -> int:
    from .fsck import fsck

    return fsck(options.folder, repairs=options.repair, is_json=options.json)


def _bind(options: argparse.Namespace) -> str:
    """The advertised address. With port 0 a free port is chosen here, because it must be known before listening."""
    if options.port == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, 0))
            options.port = probe.getsockname()[1]
    host, _, port = (options.advertise or "").partition(":")
    return f"{host or _reachable(options.host)}:{port or options.port}"


def _reachable(host: str) -> str:
    if host not in ("0.0.0.0", "::", ""):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only asks which address would be used
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _config(options: argparse.Namespace, address: str, name_servers: tuple[str, ...]) -> BrokerConfig:
    return BrokerConfig(
        data_dir=options.data,
        address=address,
        external_address=options.advertise_external,
        name=options.name,
        cluster=options.cluster,
        name_servers=name_servers,
        flush=options.flush,
        default_queues=options.queues,
        retain_hours=options.retain_hours,
        retain_bytes=options.retain_bytes,
        segment_bytes=options.segment_bytes,
        vip_channel=not options.no_vip,
        metrics_port=options.metrics_port,
        name_server_account=getattr(options, "nameserver_account", None),
        metrics_host=options.metrics_host,
        memory_bytes=options.memory,
    )


def _announce(broker: Broker) -> None:
    found = broker.recovered
    if found.torn_bytes:
        log.warning("torn_message_cut_off", bytes=found.torn_bytes, hint="the commit log ended in it")
    for position, size in found.damage:
        log.error("commit_log_damaged", position=position, bytes=size, hint="what is readable is in damaged/")
    for topic, queue_id, begin, end in found.lost:
        log.error("messages_lost", topic=topic, queue=queue_id, first=begin, last=end - 1)
    if found.rebuilt:
        log.warning("indexes_rebuilt", queues=len(found.rebuilt), some=found.rebuilt[:10])
    if found.records:
        log.info("recovered", messages=found.records)


def _termination() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C, from before the broker says that it is ready."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.report_unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    return done


if __name__ == "__main__":
    sys.exit(main())
