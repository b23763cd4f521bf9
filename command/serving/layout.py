"""Lays out the brokers of `rocketlet start --brokers N`: names, ports and folders, and the command line of each.

With the name server on port P, broker a listens on P + 3 and b on P + 6; their VIP channels are two below. With metrics
on port M, those of broker a are on M + 1. Port 0 selects free ports instead. The folders have the names of the brokers.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path
from typing import Final, NamedTuple

from ...broker.machine import default_budget
from ...client.errors import ConfigError
from ..config import MAX_LOCAL_BROKERS, PORT_STEP
from .server_options import AUTO, DEFAULT_NAME, names_of_a_broker

NAMES: Final = string.ascii_lowercase[:MAX_LOCAL_BROKERS]
NOT_PASSED: Final = frozenset(("control_port", "control_host", "grpc_port"))
"""Options that the brokers of `--brokers` do not get. `arguments` passes on all other options of a broker."""


class BrokerLayout(NamedTuple):
    """The name, ports, folder and advertised addresses of one broker. `advertise` and `external` are the values of
    `--advertise` and `--advertise-external`."""

    name: str
    port: int
    metrics_port: int | None
    folder: Path
    advertise: str | None
    external: str | None


_COMMAND: Final = f"{__package__.rpartition('.')[0]}.cli"


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot be combined with --brokers, or need it."""
    if options.brokers is None:
        if options.nameserver_tls or options.nameserver_account:
            raise ConfigError("--nameserver-tls and --nameserver-account are for --brokers; one broker needs neither")
        return
    if options.name != DEFAULT_NAME:
        raise ConfigError("--name does not go with --brokers: they are called a, b, ...")
    if options.grpc_port is not None:
        raise ConfigError("--grpc-port does not go with --brokers: each serves gRPC on its own port")
    if options.control_port is not None:
        raise ConfigError("--control-port does not go with --brokers: a broker under test runs alone")
    if options.advertise == AUTO:
        raise ConfigError("--advertise auto does not go with --brokers; give the address that clients can reach")
    if options.tls == "enforcing" and options.nameserver_tls is None:
        raise ConfigError("with --tls enforcing the brokers register over TLS: give --nameserver-tls CA_FILE")
    if options.acl and not options.nameserver_account:
        raise ConfigError(
            "with --acl the brokers sign their registration: give --nameserver-account, one with `admin: true`"
        )


def check_folder(data: Path, brokers: int | None) -> None:
    """Raise ConfigError if the folder has data of a broker that this start would not run. `brokers` is the number that
    --brokers gives; None for one broker in the name server's process."""
    used = [name for name in NAMES if (data / name / "lock").exists()]
    if brokers is None and used:
        raise ConfigError(f"{data} holds the data of brokers {', '.join(used)}; give --brokers {_count(used)}")
    if brokers is not None and (data / "lock").exists():
        hint = f"start without --brokers, or give another folder; to keep its messages, move all of it to {data / 'a'}"
        raise ConfigError(f"{data} holds the data of a broker that was started without --brokers; {hint}")
    left = [name for name in used if name not in NAMES[:brokers]]
    if left:
        hint = "to have fewer, let the groups read those brokers' messages to the end, and move their folders away"
        raise ConfigError(f"{data} also holds the data of {', '.join(left)}; give --brokers {_count(used)}; {hint}")


def _count(used: list[str]) -> int:
    return NAMES.index(used[-1]) + 1


def places(options: argparse.Namespace, data: Path) -> list[BrokerLayout]:
    """Return the layout of each broker. Raises ConfigError if a port would exceed 65535."""
    made = []
    for number, name in enumerate(NAMES[: options.brokers], 1):
        port = _port(options.port, PORT_STEP * number)
        metrics = None if options.metrics_port is None else _port(options.metrics_port, number)
        steps = PORT_STEP * (number - 1)
        advertise, external = _shifted(options.advertise, steps), _shifted(options.advertise_external, steps)
        made.append(BrokerLayout(name, port, metrics, data / name, advertise, external))
    return made


def _port(base: int, distance: int) -> int:
    if base == 0:
        from ...testing.ports import free_port

        return free_port()
    if base + distance > 65_535:
        raise ConfigError(f"port {base} is too high: the brokers' ports follow it, up to {base + distance}")
    return base + distance


def _shifted(address: str | None, steps: int) -> str | None:
    """Return broker a's address with the port of another broker; unchanged if the address has no port."""
    if address is None or steps == 0:
        return address
    host, separator, port = address.rpartition(":")
    return f"{host}:{_port(int(port), steps)}" if separator and port.isdecimal() else address


def arguments(options: argparse.Namespace, place: BrokerLayout, name_server: str) -> list[str]:
    """Return the command that runs one broker. Each broker gets an equal part of --memory and --retain-bytes."""
    shared = {
        "memory": options.memory or default_budget(),
        "retain_bytes": options.retain_bytes,
    }
    values = {
        **{name: getattr(options, name, None) for name in names_of_a_broker() if name not in NOT_PASSED},
        **{name: max(value // options.brokers, 1) for name, value in shared.items() if value is not None},
        "name": place.name,
        "port": place.port,
        "data": place.folder,
        "metrics_port": place.metrics_port,
        "advertise": place.advertise,
        "advertise_external": place.external,
        "nameserver": name_server,
        "stop_with_stdin": True,
    }
    return [sys.executable, "-m", _COMMAND, "broker", *_written(values)]


def _written(values: dict[str, object]) -> list[str]:
    written = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            written.append(option)
        elif value is not None and value is not False:
            written.append(f"{option}={value}")
    return written
