"""The broker as a process: how it starts and ends, what survives SIGKILL and a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from rocketlet.client import (
    Access,
    AdminClient,
    BrokerRefused,
    Consumer,
    LiteConsumer,
    Message,
    Producer,
    RocketletError,
)
from rocketlet.command.cli import parser
from rocketlet.protocol import group_bodies
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import UnregisterClient, UpdateOffset, write
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S, Connect, eventually
from ..support.certificates import Certificates
from ..support.grpc_client import grpc_client, message, route, sending
from ..support.requests import QUEUE, join, lock
from .conftest import Start


async def consume_all(address: str, topic: str, count: int) -> set[bytes]:
    seen: set[bytes] = set()
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.add(message.body)
        if len(seen) >= count:
            done.set()

    async with Consumer(address, "all", topic, handle, start="first"), asyncio.timeout(PATIENCE_S):
        await done.wait()
    return seen


async def test_it_says_how_to_connect_and_ends_cleanly(start: Start) -> None:
    broker = await start()
    async with Producer(broker.address) as producer:
        await producer.send("t", b"x")
    out, err = await broker.end()
    assert f"Producer(name_server='{broker.address}')".encode() in out
    assert broker.child.returncode == 0
    assert b'"event": "closing"' in err, "logs are JSON when nobody watches"
    assert b"Traceback" not in err


@pytest.mark.parametrize("flush", ["os", "sync"])
async def test_every_acknowledged_message_survives_sigkill_in_full_load(start: Start, flush: str) -> None:
    port = free_port()
    broker = await start("--flush", flush, port=port)
    acknowledged: set[bytes] = set()
    target = 3000 if flush == "os" else 300

    async def send(producer: Producer, worker: int) -> None:
        with contextlib.suppress(RocketletError):
            for number in range(100_000):
                body = b"%d-%d" % (worker, number)
                await producer.send("t", body)
                acknowledged.add(body)

    async with Producer(broker.address, retries=0) as producer:
        workers = [asyncio.create_task(send(producer, number)) for number in range(64)]
        await eventually(lambda: len(acknowledged) >= target)
        await broker.kill()
        await asyncio.gather(*workers)
    again = await start(port=port)
    found = await consume_all(again.address, "t", len(acknowledged))
    assert acknowledged <= found
    _, err = await again.end()
    assert b"recovered" in err


async def test_a_torn_tail_is_cut_off_and_said_so(start: Start, tmp_path: Path) -> None:
    port = free_port()
    broker = await start(port=port)
    async with Producer(broker.address) as producer:
        for number in range(10):
            await producer.send("t", b"%d" % number)
    await broker.kill()
    (segment,) = (tmp_path / "data" / "commitlog").iterdir()
    with segment.open("ab") as file:
        file.write(b"\0\0\1\0half a message")
    again = await start(port=port)
    assert len(await consume_all(again.address, "t", 10)) == 10
    _, err = await again.end()
    assert b"torn_message_cut_off" in err


async def test_offsets_survive_a_clean_end(start: Start) -> None:
    port = free_port()
    broker = await start(port=port)
    async with Producer(broker.address) as producer:
        await producer.send("t", b"one")
    assert await consume_all(broker.address, "t", 1) == {b"one"}
    await broker.end()
    again = await start(port=port)
    async with Producer(again.address) as producer:
        await producer.send("t", b"two")
    assert await consume_all(again.address, "t", 1) == {b"two"}


RARELY_SAVES = """
import sys
from rocketlet.broker import broker
from rocketlet.command import cli

broker.PERSIST_INTERVAL_S = 3600

sys.exit(cli.main(sys.argv[1:]))
"""


async def committed(address: str, group: str = "all") -> dict[int, int]:
    async with AdminClient(address) as admin:
        return {queue.queue_id: item.consumer_offset for queue, item in (await admin.progress(group, "t")).items()}


async def test_offsets_of_members_that_leave_survive_sigkill(start: Start) -> None:
    port = free_port()
    broker = await start("--queues", "2", port=port, program=RARELY_SAVES)
    async with Producer(broker.address) as producer:
        for number in range(4):
            await producer.send("t", b"%d" % number)
    await consume_all(broker.address, "t", 4)
    known = await committed(broker.address)
    assert sum(known.values()) == 4
    await broker.kill()
    again = await start(port=port)
    assert await committed(again.address) == known
    async with Producer(again.address) as producer:
        await producer.send("t", b"new")
    assert await consume_all(again.address, "t", 1) == {b"new"}


@pytest.mark.parametrize("by", ["commit and unlock", "unlock with an offset", "commit and leave"])
async def test_the_offset_of_an_unlocked_queue_survives_sigkill(start: Start, connect: Connect, by: str) -> None:
    port = free_port()
    broker = await start(port=port, program=RARELY_SAVES)
    async with Producer(broker.address) as producer:
        for number in range(8):
            await producer.send("t", b"%d" % number, queue=QUEUE)
    wire = await connect(broker.address)
    await join(wire, "c", strategy="AVG")
    ((queue, epoch),) = group_bodies.decode_locked((await lock(wire, "c")).body).items()
    offsets = {queue: 8} if by == "unlock with an offset" else {}
    if not offsets:
        header = UpdateOffset("g", "t", 0, 8, epoch)
        assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(header))).code == 0
    if by == "commit and leave":
        leave = write(UnregisterClient("c", consumer_group="g"))
        assert (await wire.call(RequestCode.UNREGISTER_CLIENT, leave)).code == 0
    else:
        request = LockRequest("c", "g", (queue,), handover=True, epochs={queue: epoch}, offsets=offsets)
        body = group_bodies.encode_lock_request(request)
        assert (await wire.call(RequestCode.UNLOCK_BATCH_MQ, body=body)).code == 0
    await broker.kill()
    again = await start(port=port)
    assert (await committed(again.address, "g"))[0] == 8


async def test_lite_topics_lose_nothing_and_keep_their_order_through_kills(start: Start) -> None:
    """Each message is handled, first in the order of its lite topic, and acknowledged ones are not redelivered."""
    port, names, count = free_port(), [f"n{number}" for number in range(8)], 40
    broker = await start(port=port)
    seen: dict[str, list[int]] = {name: [] for name in names}
    handled = 0

    async def handle(message: Message) -> None:
        nonlocal handled
        assert message.lite_topic is not None
        number = int(message.body)
        if number not in seen[message.lite_topic]:
            seen[message.lite_topic].append(number)
        handled += 1

    async def send_all(producer: Producer[bytes], name: str) -> None:
        for number in range(count):
            while True:
                with contextlib.suppress(RocketletError):
                    await producer.send("CHAT", b"%d" % number, lite_topic=name)
                    break

    async with AdminClient(broker.address) as admin:
        await admin.create_topic("CHAT", message_type="LITE")
    member = partial(LiteConsumer, broker.address, "g", "CHAT", handle, invisible_s=2.0)
    async with (
        member(lite_topics=names[:5]),
        member(lite_topics=names[3:]),
        Producer(broker.address) as producer,
        asyncio.TaskGroup() as sending,
    ):
        for name in names:
            sending.create_task(send_all(producer, name))
        for limit in (30, 120):
            await eventually(lambda limit=limit: handled > limit)  # type: ignore[misc]
            await broker.kill()
            broker = await start(port=port)
        await eventually(lambda: all(len(numbers) == count for numbers in seen.values()))
    assert seen == {name: list(range(count)) for name in names}
    again: list[tuple[str | None, bytes]] = []

    async def note(message: Message) -> None:
        again.append((message.lite_topic, message.body))

    await broker.kill()
    broker = await start(port=port)
    async with LiteConsumer(broker.address, "g", "CHAT", note, lite_topics=names), Producer(broker.address) as producer:
        for name in names:
            await producer.send("CHAT", b"last", lite_topic=name)
        await eventually(lambda: len(again) >= len(names))
    assert sorted(again) == [(name, b"last") for name in names]


async def test_a_killed_broker_that_restarts_gives_its_members_their_queues_back(start: Start) -> None:
    port = free_port()
    broker = await start(port=port)
    seen: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        seen[message.body] += 1

    async with Producer(broker.address) as producer:
        await producer.send("t", b"first")
        async with Consumer(broker.address, "g", "t", handle, start="first", commit_interval_s=300) as consumer:
            owned = await consumer.assigned()
            for number in range(100):
                await producer.send("t", b"%d" % number)
            await eventually(lambda: len(seen) == 101)
            await broker.kill()
            await start(port=port)
            await eventually(lambda: not any(item.is_suspended for item in consumer.queues.values()))
            assert consumer.assignment() == owned
            await producer.send("t", b"last")
            await eventually(lambda: b"last" in seen)
    assert set(seen.values()) == {1}, "though nothing was committed before the kill"


async def test_a_full_disk_refuses_sends_and_serves_pulls(start: Start) -> None:
    small_disk = (
        "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    )
    broker = await start(before=small_disk)
    sent = 0
    async with Producer(broker.address, retries=0) as producer:
        with pytest.raises(BrokerRefused, match=r"SERVICE_NOT_AVAILABLE \(14\).*disk may be full") as refused:
            while True:
                await producer.send("t", os.urandom(3000))
                sent += 1
        assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
        with pytest.raises(BrokerRefused):
            await producer.send("t", os.urandom(30_000))
    assert 80 < sent < 100
    assert len(await consume_all(broker.address, "t", sent)) == sent


async def test_idle_connections_take_no_descriptor_that_messages_need(start: Start, tmp_path: Path) -> None:
    few_files = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 128))"
    port = free_port()
    broker = await start("--queues", "64", port=port, before=few_files)
    acknowledged: set[bytes] = set()
    async with Producer(broker.address, retries=0) as producer:
        await producer.send("t", b"first")
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
        for number in range(500):
            body = b"%d" % number
            await producer.send("t", body)
            acknowledged.add(body)
    for connection in idle:
        connection.close()
    _, err = await broker.end()
    assert b"few_open_files" in err
    assert b"connection_refused" in err
    again = await start(port=port)
    assert acknowledged <= await consume_all(again.address, "t", 501)
    _, err = await again.end()
    assert b"torn_message_cut_off" not in err


async def test_two_brokers_do_not_share_a_folder(start: Start, tmp_path: Path) -> None:
    await start()
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "rocketlet.command.cli",
            "start",
            "--port",
            str(free_port()),
            "--data",
            tmp_path / "data",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 1
    assert "another broker uses the data folder" in found.stderr


async def test_a_broker_says_when_other_machines_can_reach_it(start: Start) -> None:
    port = free_port()
    broker = await start(port=port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)
    _, err = await broker.end()
    assert b"listening_to_other_machines" not in err
    everywhere = await start("--host", "0.0.0.0", port=port)
    socket.create_connection(("127.0.0.2", port), timeout=20).close()
    _, err = await everywhere.end()
    assert b"listening_to_other_machines" in err


@pytest.mark.parametrize("command", [["start"], ["broker", "--nameserver", "x:1"], ["nameserver"]])
def test_the_default_host_is_this_machine(command: list[str]) -> None:
    assert parser().parse_args(command).host == "127.0.0.1"


HANGS = """
import sys, threading
from rocketlet.broker.store import disk
from rocketlet.command import cli
from rocketlet.command.serving import serve
serve._termination.__defaults__ = (None, 0.2)
write = sys.stdout.write
def written(text):
    if "is ready" in text:  # its start syncs, too
        disk.sync = lambda descriptor: threading.Event().wait()
    return write(text)
sys.stdout.write = written
sys.exit(cli.main(sys.argv[1:]))
"""


async def test_a_broker_whose_disk_hangs_at_the_end_ends_and_keeps_what_was_acknowledged(
    start: Start, tmp_path: Path
) -> None:
    port = free_port()
    process = await start(port=port, program=HANGS)
    async with Producer(process.address) as producer:
        await producer.send("t", b"kept")
    _, err = await process.end()
    assert process.child.returncode == 1
    assert b"stop_given_up" in err
    again = await start(port=port)
    assert await consume_all(again.address, "t", 1) == {b"kept"}


async def stored(admin: AdminClient, topic: str, least: int) -> int:
    """How many messages a topic has, as soon as these are this many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(RocketletError):
                found = (await admin.topic(topic)).messages
                if found >= least:
                    return found


async def test_delayed_messages_come_once_through_kills(start: Start) -> None:
    """Progress was saved every 5 s only, and what had come meanwhile came again after a kill."""
    port, count = free_port(), 300
    broker = await start(port=port)
    begin = datetime.now(UTC)
    async with Producer(broker.address) as producer, AdminClient(broker.address) as admin:
        await admin.create_topic("t", queues=1)
        times = [begin + timedelta(milliseconds=10 * number) for number in range(count)]
        sends = [producer.send("t", b"time %d" % number, at=at) for number, at in enumerate(times)]
        await asyncio.gather(
            *sends, *(producer.send("t", b"level %d" % number, delay_level=1) for number in range(count))
        )
        for least in (20, 200, 450, 2 * count):
            await stored(admin, "t", least)
            await broker.kill()
            broker = await start(port=port)
        await producer.send("t", b"the last", delay_level=1)
        assert await stored(admin, "t", 2 * count + 1) == 2 * count + 1
    assert len(await consume_all(broker.address, "t", 2 * count + 1)) == 2 * count + 1


# TLS and accounts from the command line.


async def run(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Status, output and errors of a command."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


async def test_tls_is_set_up_by_options(start: Start, certificates: Certificates) -> None:
    folder = certificates.folder
    options = (
        "--tls-cert",
        f"{folder}/server.pem",
        "--tls-key",
        f"{folder}/server.key",
        "--tls-ca",
        f"{folder}/ca.pem",
    )
    broker = await start("--tls", "enforcing", *options)
    secured = Access(tls=True, ca_file=f"{folder}/ca.pem", cert_file=f"{folder}/client.pem")
    async with Producer(broker.address, access=secured) as producer:
        await producer.send("t", b"x")
    shown = ("--tls", "--tls-ca", f"{folder}/ca.pem", "--tls-cert", f"{folder}/client.pem")
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, *shown)
    assert (status, "no broker knows the group g" in err) == (1, True)
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address)
    assert status == 1
    assert "turn TLS on" in err


async def test_accounts_are_set_up_by_options(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text("accounts: [{accessKey: admin-key, secretKey: its-secret, admin: true}]")
    file.chmod(0o600)
    broker = await start("--acl", str(file))
    async with Producer(broker.address, access=Access(access_key="admin-key", secret_key="its-secret")) as producer:
        await producer.send("t", b"x")
    keys = {"ROCKETLET_ACCESS_KEY": "admin-key", "ROCKETLET_SECRET_KEY": "its-secret"}
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, **keys)
    assert (status, "no broker knows the group g" in err) == (1, True)
    secret = tmp_path / "secret"
    secret.write_text("its-secret\n")
    shown = ("--access-key", "admin-key", "--secret-key-file", str(secret))
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, *shown)
    assert (status, "no broker knows the group g" in err) == (1, True)
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address)
    assert (status, "No accessKey is configured" in err) == (1, True)


# `rocketlet start` for official clients of 5.x: its options, and the certificate that it signs.


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[tuple[int, int]]:
    """The broker's port, and the one of its own that gRPC has."""
    port, grpc_port = free_port(), free_port()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", "start", "--port", str(port), "--grpc-port", str(grpc_port),
        "--data", str(tmp_path / "data"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        lines = [(await child.stdout.readline()).decode() for _ in range(3)]
    assert f'for gRPC clients: setEndpoints("127.0.0.1:{port}")' in lines[2]
    yield port, grpc_port
    child.send_signal(signal.SIGTERM)
    await child.communicate()
    assert child.returncode == 0


async def test_both_ports_take_grpc_with_tls_and_without(ports: tuple[int, int]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    for port in ports:
        for tls in (None, context):
            client = await grpc_client(f"127.0.0.1:{port}", tls=tls, client_id=f"client-{port}-{tls is None}")
            found = await client.call("QueryRoute", route("t", "127.0.0.1", port))
            assert found.message_queues[0].broker.endpoints.addresses[0].port == port
            assert (await client.call("SendMessage", sending(message("t")))).status.code == 20000
            await client.close()
