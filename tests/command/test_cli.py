"""The command as a whole: what it imports, and how shells complete it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from rocketlet.broker.machine import default_budget
from rocketlet.client import AdminClient, Consumer, Message, Producer
from rocketlet.client.config import parse_addresses
from rocketlet.client.errors import ConfigError
from rocketlet.command.cli import main, parser
from rocketlet.command.config import (
    MAX_INFLATED_BYTES,
    MAX_LOCAL_BROKERS,
    MAX_RESTART_DELAY_S,
    PORT_STEP,
    RESTART_DELAY_S,
)
from rocketlet.command.plumbing.output import Output
from rocketlet.command.plumbing.repeats import RepeatedEvents
from rocketlet.command.serving import layout, serve, server_options
from rocketlet.command.serving.serve import _bind, _config
from rocketlet.command.serving.supervisor import restart_delay_s
from rocketlet.command.tools.dump import Dump
from rocketlet.command.tools.frames import fields, lines
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import BrokerData, QueueData, Route
from rocketlet.protocol.codes import RESPONSE_FLAG, RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.message import compressed, encode_record
from rocketlet.testing import Broker, Cluster

from ..conftest import eventually


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def imported(commands: tuple[str, ...], *packages: str) -> list[str]:
    """The modules of these packages that are imported to understand commands."""
    code = f"""
import json, sys
from rocketlet.command.cli import parser
for command in {commands!r}:
    parser(command)
print(json.dumps([name for name in sys.modules if name.startswith({packages!r})]))
"""
    return list(json.loads(python(code)))


def test_a_command_that_asks_a_cluster_imports_no_broker() -> None:
    commands = ("topics", "groups", "offsets", "messages", "brokers", "doctor", "completion")
    assert imported(commands, "rocketlet.broker", "prometheus_client", "rocketlet.spark", "structlog", "rich") == []


SERVERS = ("start", "broker", "nameserver")


def test_a_server_imports_neither_the_console_nor_what_administrators_use() -> None:
    """They would add a tenth to the time in which it is ready."""
    assert imported(SERVERS, "rocketlet.client.admin", "rocketlet.console.pages", "jinja2", "starlette") == []


def test_a_server_does_not_import_what_structlog_can_do_without() -> None:
    """rich would add a sixth to the time in which it is ready, and an eighth to its memory."""
    assert imported(SERVERS, "rich", "pygments", "attr") == []
    program = "from rocketlet.command.cli import parser; parser('start'); import rich; print(rich.__name__)"
    assert python(program).strip() == "rich"


def test_a_server_is_ready_before_it_loads_what_grpc_needs() -> None:
    """It would add a tenth to the time. A client that comes immediately is served all the same."""
    program = """
import asyncio, sys
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
async def main():
    async with Server(Listening(), broker=None, routes=Routes()) as server:
        print([name for name in sys.modules if name.startswith(("google", "hpack", "rocketlet.broker.grpc"))])
        print(server.grpc_server is not None)
asyncio.run(main())
"""
    assert python(program).splitlines() == ["[]", "True"]


def test_what_such_a_command_logs_looks_like_all_logs() -> None:
    """structlog comes with the first record that the level lets through."""
    program = """
import sys
from rocketlet.command import cli
from rocketlet.client.errors import get_logger
cli.configure_logs("warning")
log = get_logger("rocketlet.some")
log.info("not this")
assert "structlog" not in sys.modules
log.warning("lost", message="4711")
log.warning("again")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = (orjson.loads(line) for line in ran.stderr.splitlines())
    assert (first["event"], first["message"], first["level"], second["event"]) == ("lost", "4711", "warning", "again")


def test_completion_knows_nouns_verbs_and_options(tmp_path: Path) -> None:
    shells = ("bash", "zsh", "fish")
    command = (
        f"from rocketlet.command.cli import main\nfor shell in {shells}: main(['completion', shell]); print('\\0')"
    )
    for shell, script in zip(shells, python(command).split("\0\n"), strict=False):
        for word in ("topics", "create", "retain-hours"):
            assert word in script
        (tmp_path / shell).write_text(script)
        if shutil.which(shell):
            subprocess.run([shell, "-n", tmp_path / shell], check=True)
    if shutil.which("bash"):
        assert completed_by_bash(tmp_path / "bash") == ["create"]


def completed_by_bash(script: Path) -> list[str]:
    asking = f"source {script}; COMP_WORDS=(rocketlet topics cr) COMP_CWORD=2; _shtab_rocketlet rocketlet cr topics; "
    found = subprocess.run(["bash", "-c", asking + "echo ${COMPREPLY[@]}"], capture_output=True, text=True, check=True)
    return found.stdout.split()


# Warnings that repeat are written once a minute.


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s


def test_a_line_is_written_once_and_then_each_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    repeats = RepeatedEvents(clock.now_s)

    def written(method: str = "warning", **fields: object) -> dict[str, object] | None:
        try:
            return dict(repeats.process(None, method, {"event": "name_server_unreachable", **fields}))
        except structlog.DropEvent:
            return None

    line = {"event": "name_server_unreachable", "address": "a"}
    assert written(address="a") == line
    for clock.s in range(1, 60):
        assert written(address="a") is None
    assert written(address="b") == line | {"address": "b"}, "a line that differs is another"
    assert written("info", address="a") == line, "only warnings and errors count"
    clock.s = 60.0
    assert written(address="a") == line | {"repeated": 59}
    clock.s = 120.0
    assert written(address="a") == line
    monkeypatch.setattr("rocketlet.command.plumbing.repeats.REPEATS_KNOWN", 2)
    written(address="c")
    written(address="d")
    assert written(address="a") == line, "it was forgotten"


def test_lines_of_logging_are_left_out_too() -> None:
    repeats = RepeatedEvents(Time().now_s)

    def record(**fields: object) -> logging.LogRecord:
        made = logging.LogRecord("rocketlet.cluster", logging.WARNING, "f", 1, "text", (), None)
        made.event, made.fields = "route_not_refreshed", fields
        return made

    assert [repeats.filter(record(topic=topic)) for topic in ("t", "t", "u")] == [True, False, True]


# Which ports, folders and options the brokers of `rocketlet start --brokers N` get, and what is refused.


OWN = {"name", "port", "data", "metrics_port", "advertise", "advertise_external", "nameserver", "stop_with_stdin"}
"""Options of which each broker gets its own."""
SHARED = {"memory", "retain_bytes"}


def started(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["start", *arguments])


def broker_of(options: argparse.Namespace, number: int) -> argparse.Namespace:
    """The options with which a broker of them runs."""
    place = layout.places(options, Path("d"))[number]
    return parser().parse_args(layout.arguments(options, place, "127.0.0.1:9876")[3:])


def test_an_option_of_the_broker_is_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One call of `add_argument` is enough: here of a field of BrokerConfig that has no option."""
    options_of_a_broker = server_options.add_broker_options

    def planted(parser: argparse.ArgumentParser) -> None:
        options_of_a_broker(parser)
        parser.add_argument("--transaction-check-interval-s", type=float, default=60.0, help="how often, in seconds")

    for module in (server_options, serve):
        monkeypatch.setattr(module, "add_broker_options", planted)
    for name in ("start", "broker"):
        with pytest.raises(SystemExit):
            parser().parse_args([name, "--help"])
        assert "--transaction-check-interval-s" in capsys.readouterr().out
    monkeypatch.setenv("ROCKETLET_TRANSACTION_CHECK_INTERVAL_S", "5")
    options = started("--brokers=2")
    monkeypatch.delenv("ROCKETLET_TRANSACTION_CHECK_INTERVAL_S")
    assert options.transaction_check_interval_s == 5.0
    assert broker_of(options, 1).transaction_check_interval_s == 5.0
    assert _config(options, "h:1", ()).transaction_check_interval_s == 5.0
    file = tmp_path / "rocketlet.toml"
    file.write_text("transaction-check-interval-s = 7\n")
    assert started(f"--config={file}").transaction_check_interval_s == 7.0


def test_brokers_get_the_options_of_the_start() -> None:
    options = started(
        "--brokers=2", "--host=0.0.0.0", "--admin=loopback", "--log-level=debug", "--tls=enforcing", "--tls-cert=c",
        "--tls-key=k", "--tls-ca=ca", "--acl=a", "--nameserver-tls=n", "--nameserver-account=x", "--cluster=-c",
        "--no-vip", "--flush=sync", "--retain-hours=1.5", "--segment-bytes=1M", "--queues=3", "--metrics-host=h",
        "--grpc-max-delay-hours=48",
    )  # fmt: skip
    layout.check(options)
    found = broker_of(options, 1)
    passed = set(server_options.names_of_a_broker()) - OWN - SHARED - layout.NOT_PASSED
    assert {name: getattr(found, name) for name in passed} == {name: getattr(options, name) for name in passed}
    unsaid = vars(started())
    assert [name for name in passed if getattr(options, name) == unsaid[name]] == [], "each was given"
    assert found.stop_with_stdin, "it stops with its supervisor"


def test_limits_of_all_together_are_shared_out() -> None:
    found = broker_of(started("--brokers=4", "--memory=64M", "--retain-bytes=20G"), 0)
    assert (found.memory, found.retain_bytes) == (16 << 20, 5 << 30)
    unsaid = broker_of(started("--brokers=4"), 0)
    assert (unsaid.memory, unsaid.retain_bytes) == (default_budget() // 4, None)


def test_ports_leave_room_for_the_vip_channels() -> None:
    options = started(
        "--brokers=3", "--port=9876", "--metrics-port=9100", "--advertise=h:7000", "--advertise-external=e:80"
    )
    places = layout.places(options, Path("d"))
    assert [place[:4] for place in places] == [
        ("a", 9879, 9101, Path("d/a")),
        ("b", 9882, 9102, Path("d/b")),
        ("c", 9885, 9103, Path("d/c")),
    ]
    assert [place[4:] for place in places] == [("h:7000", "e:80"), ("h:7003", "e:83"), ("h:7006", "e:86")]
    ports = {place.port for place in places} | {place.port - 2 for place in places} | {9876}
    assert len(ports) == 7, "no VIP channel takes another's port"
    (one,) = layout.places(started("--brokers=1", "--advertise=h"), Path("d"))
    assert (one.metrics_port, one.advertise, one.external) == (None, "h", None)


def test_port_0_takes_free_ports() -> None:
    ports = [place.port for place in layout.places(started("--brokers=3", "--port=0"), Path("d"))]
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))


def test_ports_end_at_65535() -> None:
    last = 65_535 - 2 * PORT_STEP
    assert layout.places(started("--brokers=2", f"--port={last}"), Path("d"))[-1].port == 65_535
    with pytest.raises(ConfigError, match=f"port {last + 1} is too high"):
        layout.places(started("--brokers=2", f"--port={last + 1}"), Path("d"))


def test_there_are_as_many_brokers_as_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert [place.name for place in layout.places(started(f"--brokers={MAX_LOCAL_BROKERS}"), Path("d"))][-1] == "z"
    for count in ("0", str(MAX_LOCAL_BROKERS + 1), "two"):
        with pytest.raises(SystemExit):
            started(f"--brokers={count}")
        assert f"{count} is not a number of brokers; give 1 to 26" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--brokers 2 --name x", "--name does not go with --brokers"),
        ("--brokers 2 --control-port 0", "--control-port does not go with --brokers"),
        ("--brokers 2 --grpc-port 0", "--grpc-port does not go with --brokers"),
        ("--brokers 2 --advertise auto", "--advertise auto does not go with --brokers"),
        ("--brokers 2 --tls enforcing --tls-cert c", "give --nameserver-tls"),
        ("--brokers 2 --acl a", "give --nameserver-account"),
        ("--nameserver-tls c", "are for --brokers"),
        ("--nameserver-account c", "are for --brokers"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout.check(started(*arguments.split()))


def used(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "lock").touch()
    return folder


def test_a_folder_is_used_with_as_many_brokers_or_more(tmp_path: Path) -> None:
    folder = used(tmp_path, "a", "b", "c")
    layout.check_folder(folder, 3)
    layout.check_folder(folder, 4)
    with pytest.raises(ConfigError, match="also holds the data of c; give --brokers 3"):
        layout.check_folder(folder, 2)
    with pytest.raises(ConfigError, match="holds the data of brokers a, b, c; give --brokers 3"):
        layout.check_folder(folder, None)


def test_a_folder_of_one_broker_in_the_name_servers_process_stays_its_own(tmp_path: Path) -> None:
    folder = used(tmp_path, "x") / "x"
    layout.check_folder(folder, None)
    with pytest.raises(ConfigError, match="started without --brokers"):
        layout.check_folder(folder, 1)
    layout.check_folder(tmp_path / "new", None)
    layout.check_folder(tmp_path / "new", 2)


def test_a_broker_that_dies_soon_again_and_again_is_started_ever_later() -> None:
    assert restart_delay_s(0) == 0.0, "it ran for long before"
    delays = [restart_delay_s(deaths) for deaths in range(1, 20)]
    assert delays[:3] == [RESTART_DELAY_S, 2 * RESTART_DELAY_S, 4 * RESTART_DELAY_S]
    assert delays == sorted(delays)
    assert restart_delay_s(10**6) == MAX_RESTART_DELAY_S


def advertising(address: str) -> Namespace:
    return parser().parse_args(["broker", "--nameserver=h:1", f"--advertise={address}"])


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1:9876"),
        ("0.0.0.0", "broker.example", "broker.example:9876"),
        ("0.0.0.0", "broker.example:5", "broker.example:5"),
        ("::1", None, "[::1]:9876"),
        ("::", "[2001:db8::1]", "[2001:db8::1]:9876"),
        ("::", "[2001:db8::1]:5", "[2001:db8::1]:5"),
    ],
)
def test_the_address_that_is_returned_is_one_that_clients_take(host: str, advertise: str | None, told: str) -> None:
    if advertise is not None:
        assert advertising(advertise).advertise == advertise
    assert _bind(Namespace(host=host, port=9876, advertise=advertise)) == told
    assert parse_addresses(told) == [told]


@pytest.mark.parametrize("text", ["", ":5", "h:0", "h:65536", "h:x", "::1", "[::1", "[h]", "a:b:5"])
def test_what_is_no_address_is_not_advertised(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        advertising(text)
    assert "an IPv6 address is in brackets" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("code", "ext", "body"),
    [
        (RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": "a", "secretKey": "new-secret"}, b""),
        (
            RequestCode.AUTH_CREATE_USER,
            {"username": "a"},
            b'{"username":"a", "password" : "new-\\"secret","userType":"Super"}',
        ),
        (RequestCode.AUTH_UPDATE_USER, {"username": "a"}, b'{"password":"new-secret"}'),
    ],
)
def test_dump_hides_new_secrets(code: int, ext: dict[str, str], body: bytes) -> None:
    frame = Frame(code, 1, ext, body)
    shown = json.dumps(fields(frame, None)) + "".join(lines(frame, None))
    assert "secret" not in shown.replace("secretKey", "")
    assert "***" in shown


# `rocketlet dump` between real clients and a real broker.


Start = Callable[..., Awaitable[str]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(address, as_json=True)`: the address of a dump that leads there."""
    begun: list[Dump] = []

    async def starting(address: str, *, as_json: bool = False, only: frozenset[str] | None = None) -> str:
        dump = Dump("127.0.0.1", Output(as_json=as_json), only)
        begun.append(dump)
        host, _, port = address.rpartition(":")
        return f"127.0.0.1:{await dump.listen(0, (host, int(port)))}"

    yield starting
    for dump in begun:
        dump.close()


async def test_what_clients_and_broker_say_is_shown(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Message] = []
    async with Broker() as broker:
        broker.create_topic("orders", 1)
        address = await start(broker.address)
        async with Producer(address) as producer, Consumer(address, "g", "orders", seen.append, start="first"):
            await producer.send("orders", b"\x1b[31mA1", tag="new", keys="k1")
            await broker.until(lambda: len(seen) == 1)
            (sent,) = broker.requests_of("SEND_MESSAGE_V2")
    said = capsys.readouterr().out
    assert "\x1b" not in said, "a message cannot colour the terminal"
    assert "-> SEND_MESSAGE_V2 (310) #" in said
    assert "topic=orders" in said
    assert "<- SEND_MESSAGE_V2 #" in said
    assert r'orders:0 at 0 tag=new keys=k1 "\u001b[31mA1"' in said
    assert "-> HEART_BEAT (34) #" in said
    assert sent.peer.startswith("127.0.0.1:")


async def test_clients_reach_all_brokers_of_a_cluster_through_it(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Cluster(brokers=2) as cluster:
        await cluster.create_topic("t", 1)
        address = await start(cluster.address, as_json=True)
        async with Producer(address) as producer:
            names = {(await producer.send("t", b"%d" % number)).queue.broker_name for number in range(4)}
        async with AdminClient(address) as admin:
            assert {broker.name for broker in await admin.brokers()} == names == {"broker-a", "broker-b"}
        behind = {broker.address for broker in cluster.brokers}
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    sends = [record for record in records if record["request"] == "SEND_MESSAGE_V2"]
    assert {record["to"] for record in sends} == behind
    asked = [record for record in sends if record["from"] == "client"]
    assert {record["body"] for record in asked} == {"0", "1", "2", "3"}
    assert {record["response"] for record in sends if record["from"] == "broker"} == {0}
    assert asked[0]["header"]["topic"] == "t"


async def test_only_some_requests_are_shown(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    async with Broker() as broker:
        address = await start(broker.address, as_json=True, only=frozenset(("SEND_MESSAGE_V2",)))
        async with Producer(address) as producer:
            await producer.send("t", b"x")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [record["from"] for record in records] == ["client", "broker"]


async def test_what_is_no_frame_is_passed_on(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # a TLS client's hello

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    address = await start(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    for part in (hello, b"more"):
        writer.write(part)
        assert await reader.readexactly(len(part)) == part
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    server.close()
    assert capsys.readouterr().out == ""


async def test_a_route_with_an_address_without_a_port_is_forwarded_unchanged(start: Start) -> None:
    route = bodies.encode_route(Route((QueueData("b", 1, 1, 6, 0),), (BrokerData("b", {0: "nowhere"}, "c"),)))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (asked,) = FrameReader().feed(await reader.read(10_000))
        writer.write(encode(Frame(0, asked.opaque, body=route, flag=RESPONSE_FLAG)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = await start(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(encode(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 1, {"topic": "t"})))
    (frame,) = FrameReader().feed(await reader.read(10_000))
    assert frame.body == route
    writer.close()
    server.close()


async def test_a_client_gets_an_error_when_nobody_is_behind(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    address = await start("127.0.0.1:1")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    assert await reader.read() == b""
    writer.close()
    assert "cannot connect to 127.0.0.1:1" in capsys.readouterr().out


async def test_a_side_that_is_gone_takes_the_other_with_it_and_raises_nothing(start: Start) -> None:
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def serve(*streams: Any) -> None:
        await accepted.put(streams)

    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = await start(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for is_client in (True, False, True):  # the last one only gives time to the others
        client = await asyncio.open_connection(*address.split(":"))
        client[1].write(b"\xff" * 8)  # no frame: it passes immediately
        broker = await accepted.get()
        assert await broker[0].readexactly(8)
        gone, left = (client, broker) if is_client else (broker, client)
        reset = struct.pack("ii", 1, 0)  # the last bytes are not waited for: the peer gets a reset
        gone[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        gone[1].transport.abort()
        assert await left[0].read() == b""
        left[1].close()
    server.close()
    assert faults == []


async def test_ctrl_c_ends_open_connections_and_raises_nothing(start: Start) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with Broker() as broker:
        address = await start(broker.address)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await broker.until(lambda: bool(_serving()))
        for task in _serving():
            task.cancel()  # as asyncio.run does with all tasks
        assert await reader.read() == b""
        await broker.until(lambda: not _serving())
        writer.close()
    assert faults == []


def _serving() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "Dump.listen" in repr(task.get_coro())]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["70000"], "70000 is not a port"),
        (["0", "--to", "9876"], "'9876' is not HOST:PORT"),
        (["0", "--to", "host:x"], "x is not a port"),
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dump", *arguments])
    assert reason in capsys.readouterr().err


def test_an_unknown_request_is_reported(run_quietly: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_quietly(["dump", "0", "--only", "PULL"]) == 1
    assert "no request is called PULL" in capsys.readouterr().err


@pytest.fixture
def run_quietly(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """Leaves the logs as they are for other tests."""
    from rocketlet.command.plumbing import logs

    monkeypatch.setattr(logs, "configure", lambda level: None)
    return main


@pytest.mark.parametrize("as_json", [True, False])
def test_compressed_bodies_are_inflated_as_far_as_they_are_shown(as_json: bool) -> None:
    """A hostile broker's answer had `dump` take 4.4 GB."""
    body, flag = compressed(b"0123456789" * 300_000)
    record = encode_record(0, 0, 0, 0, flag, 0, bytes(8), 0, bytes(8), 0, 0, body, b"\x01t", b"")
    frame = Frame(0, 1, {}, record * 40)
    tracemalloc.start()
    if as_json:
        messages = fields(frame, RequestCode.PULL_MESSAGE)["messages"]
        assert [len(one["body"]) for one in messages] == [MAX_INFLATED_BYTES] * 16 + [0] * 24
        assert all(one["body_is_cut"] for one in messages)
    else:
        shown = list(lines(frame, RequestCode.PULL_MESSAGE))
        assert all("... (800 characters)" in line for line in shown[1:])
    assert tracemalloc.get_traced_memory()[1] < 40 * 1024 * 1024
    tracemalloc.stop()


# `rocketlet mirror` as a process: once, followed until SIGTERM, and what it refuses.


async def started_dump(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rocketlet.command.cli",
        "mirror",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_it_copies_once_and_says_what(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Broker() as there, Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"1", b"2", b"3"])
        await producer.send("orders", b"in 2 hours", delay_level=18)
        child = await started_dump("--from", rocketlet.address, "--to", there.address, "--last", "2", "--json")
        out, err = await child.communicate()
        assert (child.returncode, err) == (0, b"")
        queue, waits = map(orjson.loads, out.splitlines())
        assert (queue["copied"], waits) == (2, {"topic": "orders", "delayed": 1})
        assert [message.body for message in there.messages("orders")] == [b"2", b"3"]


async def test_it_follows_until_it_is_stopped(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Broker() as there, Producer(rocketlet.address) as producer:
        child = await started_dump("--from", rocketlet.address, "--to", there.address, "--follow", "--topics", "orders")
        for number in range(3):
            await producer.send("orders", b"%d" % number)
            await eventually(lambda number=number: len(there.messages("orders")) == number + 1)  # type: ignore[misc]
        child.send_signal(signal.SIGTERM)
        out, _ = await child.communicate()
        assert child.returncode == 0
        assert b"broker-a:0" in out


async def test_wrong_options_are_explained() -> None:
    for arguments, text in (
        (("--from", "a:1", "--to", "b:1", "--since", "yesterday"), b"is not a time such as"),
        (("--from", "127.0.0.1:1", "--to", "127.0.0.1:1"), b"source and target are both"),
    ):
        child = await started_dump(*arguments)
        _, err = await child.communicate()
        assert child.returncode
        assert text in err
        assert b"Traceback" not in err
