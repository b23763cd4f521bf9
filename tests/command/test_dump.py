"""`rocketlet dump` between real clients and a real broker."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer
from rocketlet.command.cli import main
from rocketlet.command.config import MAX_INFLATED_BYTES
from rocketlet.command.plumbing.output import Output
from rocketlet.command.tools.dump import Dump
from rocketlet.command.tools.frames import fields, lines
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.message import compressed, encode_record
from rocketlet.testing import Broker, Cluster

from ..conftest import eventually

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


async def test_a_client_gets_an_error_when_nobody_is_behind(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    address = await start("127.0.0.1:1")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    assert await reader.read() == b""
    writer.close()
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().out


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


async def started(*arguments: str) -> asyncio.subprocess.Process:
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
        child = await started("--from", rocketlet.address, "--to", there.address, "--last", "2", "--json")
        out, err = await child.communicate()
        assert (child.returncode, err) == (0, b"")
        queue, waits = map(orjson.loads, out.splitlines())
        assert (queue["copied"], waits) == (2, {"topic": "orders", "delayed": 1})
        assert [message.body for message in there.messages("orders")] == [b"2", b"3"]


async def test_it_follows_until_it_is_stopped(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Broker() as there, Producer(rocketlet.address) as producer:
        child = await started("--from", rocketlet.address, "--to", there.address, "--follow", "--topics", "orders")
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
        child = await started(*arguments)
        _, err = await child.communicate()
        assert child.returncode
        assert text in err
        assert b"Traceback" not in err
