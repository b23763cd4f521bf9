"""Options of `rocketlet start`, `broker` and `nameserver`, and the parsers of their values.

An option of the broker is one call of `add_argument` here. Its other names follow from the option's name: the setting in
the environment and in the file (`settings`), and the field of `BrokerConfig`, unless `_FIELDS` has another name.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ...broker.config import BrokerConfig
from ...broker.tls import TLS_MODES
from ..config import MAX_LOCAL_BROKERS, PORT_STEP
from ..plumbing import logs, numbers

# Fields of BrokerConfig that are not called like their options.
_FIELDS: Final = {"queues": "default_queues", "memory": "memory_bytes", "nameserver_account": "name_server_account"}

DEFAULT_DATA = "rocketlet-data"
DEFAULT_NAME = "broker-a"
AUTO = "auto"


def add_listen_options(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; 0.0.0.0: all, for clients on other machines (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--admin",
        choices=("any", "loopback"),
        default="any",
        help="addresses from which administrative requests are accepted: any, or only this machine (default: any)",
    )
    parser.add_argument(
        "--port", type=numbers.port, default=port, help=f"the port to listen on; 0 selects a free one (default: {port})"
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="minimum log level (default: info)")


def add_external_port_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--external-port",
        type=numbers.port,
        help="also listen on this port; clients that use it get the brokers' --advertise-external addresses",
    )


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    _identity_options(parser)
    _grpc_options(parser)
    _store_options(parser)
    _limit_options(parser)
    _control_options(parser)


def add_all_broker_options(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options of `rocketlet broker`."""
    add_listen_options(parser, port)
    add_access_options(parser)
    add_registration_options(parser)
    add_broker_options(parser)
    add_parent_option(parser)
    parser.add_argument(
        "--nameserver", required=True, metavar="HOST:PORT[;HOST:PORT]", help="the name servers to register with"
    )


def names_of_a_broker() -> list[str]:
    """Return the names of all options of `rocketlet broker`, as they are in a namespace."""
    parser = argparse.ArgumentParser(add_help=False)
    add_all_broker_options(parser, 0)
    return [action.dest for action in parser._actions]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of BrokerConfig that options set without conversion."""
    known = {item.name for item in fields(BrokerConfig)}
    named = {_FIELDS.get(name, name): value for name, value in vars(options).items()}
    return {name: value for name, value in named.items() if name in known}


def _control_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control-port",
        type=numbers.port,
        help="for tests: open an HTTP interface on this port that sets the broker's clock, injects faults and deletes data; "
        "0 selects a free port. Without --data the broker stores nothing permanently (default: no such interface)",
    )
    parser.add_argument(
        "--control-host",
        default="127.0.0.1",
        help="the address for --control-port; every client that can connect to it can delete all data (default: 127.0.0.1)",
    )


def _identity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help=f"the broker's name in the cluster (default: {DEFAULT_NAME})"
    )
    parser.add_argument("--cluster", default="DefaultCluster", help="the cluster's name (default: DefaultCluster)")
    parser.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        type=_advertised,
        help="address that clients connect to; auto: the one at which a client reaches the name server, or "
        "--advertise-external for clients from other networks (default: --host, or this host's address)",
    )
    parser.add_argument(
        "--advertise-external",
        metavar="HOST:PORT",
        help="address for clients that use a name server's --external-port, such as a container's published port; "
        "with --advertise auto also for clients from other networks (default there: localhost and --port)",
    )
    parser.add_argument(
        "--no-vip",
        action="store_true",
        help="do not listen on the port two below, which clients with the VIP channel use",
    )


def _grpc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grpc-port",
        type=numbers.port,
        help="also listen on this port, for official clients of 5.x, which --port serves, too; 0 selects a free one",
    )
    parser.add_argument(
        "--grpc-max-delay-hours",
        type=_hours,
        default=24.0,
        help="maximum delay that official clients of 5.x may request (maximum 960, as for clients of 4.9) "
        "(default: 24, as at Apache's proxy)",
    )


def _store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        help=f"the folder for messages and settings (default: ./{DEFAULT_DATA})",
    )
    parser.add_argument(
        "--flush",
        choices=("os", "sync"),
        default="os",
        help="acknowledge a message when the operating system has it (os, the default) or when it is synced to disk (sync)",
    )
    parser.add_argument(
        "--retain-hours", type=_hours, default=72.0, help="age from which messages are deleted, in hours (default: 72)"
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
        help="size of one file of the commit log (default: 256M)",
    )


def _limit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--queues",
        type=numbers.whole(1),
        default=8,
        help="maximum queues of a topic that a send creates (default: 8); clients request 4",
    )
    add_metrics_options(parser)
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="maximum memory of all connections, such as 512M: unfinished requests and unread responses "
        "(default: a quarter of the machine or container)",
    )


def add_metrics_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port",
        type=numbers.port,
        help="serve Prometheus metrics on this port, at /metrics (default: no metrics)",
    )
    parser.add_argument("--metrics-host", help="the address to serve metrics on, such as 127.0.0.1 (default: --host)")


def add_access_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--tls",
        choices=TLS_MODES,
        default="permissive",
        help="permissive: TLS and plain text on the same port (default); enforcing: TLS only; disabled: plain text only. "
        "Without --tls-cert, permissive uses a self-signed certificate if the packages for clients of 5.x are installed, "
        "and otherwise accepts plain text only",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="the certificate, PEM; reloaded when it changes")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM; default: in the same file")
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="authorities by which the certificates of TLS clients must be signed (default: clients need none)",
    )

    group.add_argument(
        "--acl",
        type=Path,
        metavar="FILE",
        help="accounts in the format of Apache's plain_acl.yml; reloaded when the file changes",
    )


def add_brokers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--brokers",
        type=_brokers,
        metavar="N",
        help="run N brokers, a, b, ..., in processes of their own, and restart a broker that dies: their ports follow --port "
        f"in steps of {PORT_STEP}, their metrics ports follow --metrics-port, their folders are in --data; --memory and "
        "--retain-bytes are totals of all brokers (default: one broker, in the name server's process)",
    )


def add_parent_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input ends, for example when the process at the other end of a pipe exits",
    )


def add_registration_options(parser: argparse.ArgumentParser) -> None:
    """Options of a broker whose name servers are other processes."""
    parser.add_argument(
        "--nameserver-tls",
        type=Path,
        metavar="CA_FILE",
        help="register over TLS; certificates of the authorities that sign the name servers' certificates",
    )
    parser.add_argument(
        "--nameserver-account", metavar="ACCESS_KEY", help="sign the registration as this account of the --acl file"
    )


def _brokers(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_LOCAL_BROKERS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of brokers; give 1 to {MAX_LOCAL_BROKERS}")
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
    found = re.fullmatch(r"(?:[^:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or not 0 < int(found[1] or 1) < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT; an IPv6 address is in brackets")
    return text


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give bytes, or a number with K, M, G or T")
    return int(digits) * unit
