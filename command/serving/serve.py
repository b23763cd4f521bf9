"""`rocketlet start`, `broker` and `nameserver`: run servers until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from ...broker.access import Acl, AclError, AclFile
from ...broker.broker import BrokerController
from ...broker.config import BrokerConfig
from ...broker.machine import Garbage, TooFewOpenFiles, raise_limit
from ...broker.nameserver import Networks, Routes, parse_networks
from ...broker.server import Listening, Server
from ...broker.store.files import StoreError
from ...broker.tls import Tls, TlsError, TlsFiles, can_sign
from ...client.config import parse_addresses
from ...client.errors import ConfigError, RocketletError
from ...host.address import local_address
from ...host.memory import keep_freed
from ..config import STOP_S, SUPERVISOR_STOP_S
from ..plumbing import logs
from . import console, control, layout
from .listening import listening_fault
from .server_options import (
    AUTO,
    DEFAULT_DATA,
    add_access_options,
    add_all_broker_options,
    add_broker_options,
    add_brokers_option,
    add_external_port_option,
    add_listen_options,
    add_metrics_options,
    add_registration_options,
    settings_of,
)
from .settings import SettingsParser
from .supervisor import READY, Supervised, Supervisor

if TYPE_CHECKING:
    from ...broker.metrics import Measured

log = structlog.get_logger("rocketlet")


_NETWORKS = Path("/proc/net/route")
DEFAULT_PORT = 9876
BROKER_PORT = 10911

Run = Callable[[argparse.Namespace], Awaitable[int]]


def add_to(commands: argparse._SubParsersAction[SettingsParser]) -> None:
    start = _server(commands, "start", "run a name server and a broker on one port", _start)
    _add_listening(start)
    add_external_port_option(start)
    add_broker_options(start)
    add_brokers_option(start)
    add_registration_options(start)
    console.add_start_options(start)
    start.read_settings()
    broker = _server(commands, "broker", "run a broker that registers with one or more name servers", _broker)
    add_all_broker_options(broker, BROKER_PORT)
    broker.read_settings()
    nameserver = _server(commands, "nameserver", "run a name server", _nameserver)
    _add_listening(nameserver)
    add_external_port_option(nameserver)
    add_metrics_options(nameserver)
    nameserver.read_settings()


def _server(commands: argparse._SubParsersAction[SettingsParser], name: str, text: str, run: Run) -> SettingsParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}, until SIGTERM or Ctrl-C.")
    parser.set_defaults(run=partial(_served, run))
    return parser


def _add_listening(parser: SettingsParser) -> None:
    add_listen_options(parser, DEFAULT_PORT)
    add_access_options(parser)


async def _served(run: Run, options: argparse.Namespace) -> int:
    """Run a server, and return the exit status. Print an expected error as one line."""
    needs_extra = run is not _nameserver or options.metrics_port is not None
    if needs_extra and importlib.util.find_spec("prometheus_client") is None:
        print("rocketlet: a broker, or --metrics-port, needs an extra: pip install '.[broker]'", file=sys.stderr)
        return 1
    if options.ignored_variables:
        hint = "Kubernetes sets them for a service of this name; settings are not of the form tcp://host:port"
        log.warning("variables_ignored", variables=options.ignored_variables, hint=hint)
    if problem := control.fault(options):
        print(f"rocketlet: {problem}", file=sys.stderr)
        return 1
    try:
        _check_advertised(options)
        with console.reserved(options):
            keep_freed()
            async with Garbage():
                return await run(options)
    except (StoreError, TooFewOpenFiles, TlsError, AclError, RocketletError) as error:
        print(f"rocketlet: {error}", file=sys.stderr)
    except OSError as error:
        print(f"rocketlet: {listening_fault(error, options.host, options.port)}", file=sys.stderr)
    return 1


def _check_advertised(options: argparse.Namespace) -> None:
    """Raise ConfigError if the host of --advertise is unknown, because the broker puts its IP address into message ids."""
    host = _advertised(options)[0] if hasattr(options, "advertise") else ""
    if host:
        try:
            socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except OSError:
            raise ConfigError(
                f"--advertise: the host name {host} is unknown; give a name that this machine can resolve"
            ) from None


async def _start(options: argparse.Namespace) -> int:
    layout.check(options)
    if options.data is not None or options.control_port is None:
        layout.check_folder(_data(options), options.brokers)
    raise_limit()
    if options.brokers is not None:
        return await _start_several(options)
    tls, acl = tls_of(options), acl_of(options)
    address = _bind(options)
    networks = _networks(options)
    config = _config(options, address, ())
    if options.control_port is not None:
        return await _start_controlled(options, config, tls, acl, networks)
    routes = Routes(networks=networks)
    broker = BrokerController(config, routes, tls=tls, acl=acl)
    async with (
        Server(_listening(options, tls, acl), broker=broker, routes=routes) as server,
        console.beside_broker(options, address, _data(options)) as page,
    ):
        done = _termination()
        _announce(broker)
        print(_ready(config) + _line_of(page), flush=True)
        await done.wait()
        log.info("closing", port=server.port)
    return 0


def _ready(config: BrokerConfig) -> str:
    if config.name_servers:
        return f"rocketlet broker {config.name}{READY.decode()}{config.address}"
    outside = config.external_address
    more = f"\n  Outside  {outside}: the same, for clients of other networks" if outside else ""
    return (
        f"rocketlet is ready on {config.address}: name server and broker {config.name}\n{_hints(config.address)}{more}"
    )


def _hints(address: str) -> str:
    return (
        f"  Python   Producer(name_server={address!r})\n"
        f"  Java     producer.setNamesrvAddr({_quoted(address)}){_grpc_hint(address)}\n"
        f"  Spark    .option({_quoted('nameServer')}, {_quoted(address)})"
    )


def _grpc_hint(address: str) -> str:
    return f", and for gRPC clients: setEndpoints({_quoted(address)})" if has_grpc() else ""


def _line_of(page: str | None) -> str:
    return f"\n  Console  {page}" if page else ""


async def _start_controlled(
    options: argparse.Namespace, config: BrokerConfig, tls: Tls, acl: Acl | None, networks: Networks | None = None
) -> int:
    listening = _listening(options, tls, acl)
    async with (
        control.controlled(options, config, listening, networks) as url,
        console.beside_broker(options, config.address, config.data_dir) as page,
    ):
        done = _termination(options)
        print(f"{_ready(config)}{_line_of(page)}\n  Control  {url}/openapi.json", flush=True)
        await done.wait()
        log.info("closing", port=options.port)
    return 0


def _listening(options: argparse.Namespace, tls: Tls, acl: Acl | None) -> Listening:
    return Listening(
        options.host,
        options.port,
        external_port=getattr(options, "external_port", None),
        grpc_port=getattr(options, "grpc_port", None),
        tls=tls,
        acl=acl,
        admin_is_local=_admin_is_local(options),
    )


async def _start_several(options: argparse.Namespace) -> int:
    """Run a name server in this process, and each broker in a process of its own."""
    done = _termination(stop_s=SUPERVISOR_STOP_S)
    routes = Routes()
    async with Server(_listening(options, tls_of(options), acl_of(options)), broker=None, routes=routes) as server:
        places = layout.places(options, _data(options))
        options.port = server.port
        address = f"{_advertised_host(options)}:{server.port}"
        # with TLS the brokers need the name that clients use, because the certificate is for that name
        host = _advertised_host(options) if options.nameserver_tls else _local(options.host)
        commands = [layout.arguments(options, place, f"{host}:{server.port}") for place in places]
        brokers = [Supervised(place.name, command) for place, command in zip(places, commands, strict=True)]
        async with Supervisor(options.cluster, brokers, done) as supervisor:
            async with (
                _metrics(options, supervisor) as port,
                console.beside_broker(options, address, _data(options)) as page,
            ):
                if not done.is_set():
                    print(_ready_several(address, places) + _line_of_metrics(port) + _line_of(page), flush=True)
                await done.wait()
            log.info("closing", port=server.port)
    return 0


def _ready_several(address: str, places: Sequence[layout.BrokerLayout]) -> str:
    brokers = "".join(
        f"\n  Broker   {place.name}: port {place.port}{_metrics_of(place)}, {place.folder}" for place in places
    )
    return f"rocketlet is ready on {address}: name server and {len(places)} brokers\n{_hints(address)}{brokers}"


def _line_of_metrics(port: int | None) -> str:
    return f"\n  Metrics  port {port}: of all brokers' processes, and whether all are ready" if port else ""


def _metrics_of(place: layout.BrokerLayout) -> str:
    return "" if place.metrics_port is None else f", metrics {place.metrics_port}"


@asynccontextmanager
async def _metrics(options: argparse.Namespace, measured: Measured) -> AsyncIterator[int | None]:
    """Serve the metrics of a name server or supervisor while the block runs, and yield their port; None without
    --metrics-port."""
    if options.metrics_port is None:
        yield None
        return
    from ...broker.metrics import MetricsPort

    served = MetricsPort(measured, options.metrics_host or options.host, options.metrics_port)
    try:
        yield served.port
    finally:
        await asyncio.to_thread(served.close)


def _admin_is_local(options: argparse.Namespace) -> bool:
    return bool(options.admin == "loopback")


def _quoted(text: str) -> str:
    return f'"{text}"'


async def _broker(options: argparse.Namespace) -> int:
    raise_limit()
    logs.name_broker(options.name)
    tls, acl = tls_of(options), acl_of(options)
    address = _bind(options)
    name_servers = tuple(parse_addresses(options.nameserver))
    if options.advertise == AUTO:
        print("rocketlet: --advertise auto needs the name server in the same process: rocketlet start", file=sys.stderr)
        return 1
    config = _config(options, address, name_servers)
    if options.control_port is not None:
        return await _start_controlled(options, config, tls, acl)
    broker = BrokerController(config, tls=tls, acl=acl)
    async with Server(_listening(options, tls, acl), broker=broker, routes=None) as server:
        done = _termination(options)
        _announce(broker)
        print(_ready(config), flush=True)
        await done.wait()
        log.info("closing", port=server.port)
    return 0


async def _nameserver(options: argparse.Namespace) -> int:
    raise_limit()
    routes, tls = Routes(), tls_of(options)
    async with Server(_listening(options, tls, acl_of(options)), broker=None, routes=routes) as server:
        done = _termination()
        async with _name_server_metrics(options, routes, server, tls):
            print(f"rocketlet name server is ready on {_reachable(options.host)}:{server.port}", flush=True)
            await done.wait()
        log.info("closing", port=server.port)
    return 0


def _name_server_metrics(
    options: argparse.Namespace, routes: Routes, server: Server, tls: Tls
) -> AbstractAsyncContextManager[int | None]:
    if options.metrics_port is None:
        return nullcontext()
    from ...broker.metrics import NameServerMetrics

    return _metrics(options, NameServerMetrics(routes, server.connections, tls))


def tls_of(options: argparse.Namespace) -> Tls:
    """Return the TLS settings that options describe. Raises TlsError."""
    if options.tls_cert is None and (options.tls_key or options.tls_ca):
        raise TlsError("--tls-key or --tls-ca is given, --tls-cert is not")
    files = TlsFiles(options.tls_cert, options.tls_key, options.tls_ca) if options.tls_cert else None
    signs_itself = files is None and options.tls != "disabled" and has_grpc()
    return Tls(options.tls, files, getattr(options, "nameserver_tls", None), signs_itself=signs_itself)


def has_grpc() -> bool:
    """Return True if the packages that serve official clients of 5.x (gRPC) are installed."""
    return can_sign() and importlib.util.find_spec("google") is not None


def acl_of(options: argparse.Namespace) -> Acl | None:
    """Return the accounts of --acl; None without this option. Raises AclError."""
    account = getattr(options, "nameserver_account", None)
    if account and not options.acl:
        raise AclError("--nameserver-account names an account of the file that --acl gives; give --acl, too")
    try:
        return Acl(AclFile(options.acl)) if options.acl else None
    except ImportError:
        raise AclError("--acl needs PyYAML; install it with: pip install '.[acl]'") from None


def _bind(options: argparse.Namespace) -> str:
    """Return the address that the broker registers. With --port 0, first set a free port, because the address needs it
    before the server listens."""
    if options.port == 0:
        with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, 0))
            options.port = probe.getsockname()[1]
    return f"{_advertised_host(options)}:{_advertised(options)[1] or options.port}"


def _advertised_host(options: argparse.Namespace) -> str:
    host = _advertised(options)[0] or _reachable(options.host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _advertised(options: argparse.Namespace) -> tuple[str, str]:
    """Return host and port of --advertise; empty texts for what is not given, or with `auto`."""
    told = "" if options.advertise == AUTO else options.advertise or ""
    host, separator, port = told.rpartition(":")
    return (host, port) if separator and not told.endswith("]") else (told, "")


def _local(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    found = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{found}]" if ":" in found else found


def _reachable(host: str) -> str:
    if host not in ("0.0.0.0", "::", ""):
        return host
    return local_address()


def _external(options: argparse.Namespace) -> str | None:
    if options.advertise == AUTO and options.advertise_external is None:
        return f"localhost:{options.port}"
    return str(options.advertise_external) if options.advertise_external else None


def _networks(options: argparse.Namespace) -> Networks | None:
    """Return the networks of this machine or container for --advertise auto; otherwise None. On systems other than Linux
    they are empty, so that every IPv4 client but a local one counts as one from another network."""
    if options.advertise != AUTO:
        return None
    try:
        return parse_networks(_NETWORKS.read_text())
    except OSError:
        return Networks()


def _config(options: argparse.Namespace, address: str, name_servers: tuple[str, ...]) -> BrokerConfig:
    found = {
        **settings_of(options),
        "data_dir": _data(options),
        "address": address,
        "external_address": _external(options),
        "name_servers": name_servers,
        "vip_channel": not options.no_vip,
    }
    return BrokerConfig(**found)


def _data(options: argparse.Namespace) -> Path:
    return options.data or Path(DEFAULT_DATA)


def _announce(broker: BrokerController) -> None:
    found = broker.recovered
    if found.torn_bytes:
        log.warning("torn_message_cut_off", bytes=found.torn_bytes, hint="the commit log ended in it")
    for position, size in found.damage:
        log.error("commit_log_damaged", position=position, bytes=size, hint="its bytes are kept in damaged/")
    for topic, queue_id, begin, end in found.lost:
        log.error("messages_lost", topic=topic, queue=queue_id, first=begin, last=end - 1)
    if found.rebuilt:
        log.warning("indexes_rebuilt", queues=len(found.rebuilt), some=found.rebuilt[:10])
    if found.records:
        log.info("recovered", messages=found.records)


def _termination(options: argparse.Namespace | None = None, stop_s: float = STOP_S) -> asyncio.Event:
    """Return an event that SIGTERM or Ctrl-C sets, and with --stop-with-stdin the end of standard input. The process then
    has `stop_s` to end before `_give_up` ends it."""
    done = asyncio.Event()
    stop = partial(_stop, done, stop_s)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.report_unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if getattr(options, "stop_with_stdin", False):
        loop.add_reader(sys.stdin.fileno(), _read_stdin, stop)
    return done


def _stop(done: asyncio.Event, stop_s: float) -> None:
    if not done.is_set():
        done.set()
        watch = threading.Timer(stop_s, _give_up, (stop_s,))
        watch.daemon = True
        watch.start()


def _give_up(stop_s: float) -> None:
    """End the process immediately, as SIGKILL would, because a disk that does not respond would keep it running forever."""
    hint = "check the disk; the next start reads the log again"
    log.critical("stop_given_up", reason=f"it did not stop within {stop_s:g} s", hint=hint)
    os._exit(1)


def _read_stdin(stop: Callable[[], None]) -> None:
    """Read and discard standard input; stop the server at its end."""
    descriptor = sys.stdin.fileno()
    if not os.read(descriptor, 4096):
        asyncio.get_running_loop().remove_reader(descriptor)
        stop()
