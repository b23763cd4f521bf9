"""The control interface over HTTP: what programs in other languages have of the kit."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Networks, parse_networks
from rocketlet.broker.server import Listening
from rocketlet.broker.tls import Tls
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.command.cli import main
from rocketlet.testing import RemoteBroker
from rocketlet.testing.config import MAX_BODY_BYTES
from rocketlet.testing.control import Control, application
from rocketlet.testing.operations import OPERATIONS
from rocketlet.testing.rig import Rig

from ..support.accounts import ADMIN, AccountsFile, access
from ..support.certificates import Certificates

COMMAND = [sys.executable, "-m", "rocketlet.command.cli", "start", "--port", "0", "--log-level", "error", "--no-vip"]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(BrokerConfig(Path(), "", default_queues=2, vip_channel=False), Listening())
    await rig.open()
    yield rig
    await rig.close()


@pytest.fixture
async def http(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Control(rig, "127.0.0.1", 0) as control,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{control.port}", timeout=60) as client,
    ):
        yield client


async def body_of(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def problem(answer: httpx.Response, error: str) -> str:
    status = {"ValueError": 400, "KeyError": 404}.get(error, 409)
    found = await body_of(answer, status)
    assert found["error"] == error
    return str(found["message"])


def calls() -> list[tuple[str, str, Any, str]]:
    """A call for each operation, in an order in which all succeed; the last part is the operation's id."""
    wait = {"condition": {"until": "stored", "topic": "t"}, "timeout_s": 5}
    freeze = {"action": "freeze", "client": "c"}
    return [
        ("GET", "/health", None, "health"),
        ("GET", "/clock", None, "now"),
        ("POST", "/clock/advance", {"minutes": 2, "seconds": 0.5}, "advance"),
        ("POST", "/clock/skip", None, "skip"),
        ("POST", "/wait-for", wait, "waitFor"),
        ("POST", "/faults", [{"action": "drop", "code": 10, "times": None}, freeze], "addFaults"),
        ("GET", "/faults", None, "faults"),
        ("DELETE", "/faults/1", None, "endFault"),
        ("DELETE", "/faults", None, "endFaults"),
        ("GET", "/faults/injected", None, "injected"),
        ("DELETE", "/faults/injected", None, "forgetInjected"),
        ("GET", "/topics", None, "topics"),
        ("PUT", "/topics/u", {"queues": 3}, "createTopic"),
        ("GET", "/topics/t/messages?key=k&record=true", None, "messages"),
        ("GET", "/groups", None, "groups"),
        ("PUT", "/groups/h", None, "createGroup"),
        ("GET", "/groups/g", None, "group"),
        ("GET", "/groups/g/timeline", None, "timeline"),
        ("GET", "/groups/g/dead-letters", None, "deadLetters"),
        ("GET", "/groups/g/topics/t", None, "progress"),
        ("POST", "/groups/g/take-lease", {"topic": "t", "queue_id": 0}, "takeLease"),
        ("POST", "/groups/g/rebalance", None, "rebalance"),
        ("GET", "/requests?name=SEND_MESSAGE_V2", None, "requests"),
        ("GET", "/report", None, "report"),
        ("PUT", "/advertised", {"external": "localhost:1"}, "advertise"),
        ("POST", "/restart", None, "restart"),
        ("POST", "/kill", {"lose": 1}, "kill"),
        ("POST", "/stop", None, "stop"),
        ("POST", "/start", None, "start"),
        ("POST", "/clean", None, "clean"),
    ]  # fmt: skip


async def test_every_operation_is_described_and_answers_as_described(rig: Rig, http: httpx.AsyncClient) -> None:
    document = await body_of(await http.get("/openapi.json"))
    validate(document)
    described = {item["operationId"]: item for path in document["paths"].values() for item in path.values()}
    assert set(described) == {name for *_, name in calls()}
    by_name = {operation.name: operation for operation in OPERATIONS}
    async with (
        Producer(rig.address) as producer,
        Consumer(rig.address, "g", "t", lambda message: None, start="first"),
    ):
        await producer.send("t", b"x", keys="k")
        await body_of(await http.post("/wait-for", json={"condition": {"until": "rebalanced", "group": "g"}}))
        for method, path, body, name in calls():
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 200, (name, answer.text)
            msgspec.json.decode(answer.content, type=by_name[name].answer)
            schema = described[name]["responses"]["200"]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())


async def test_no_path_is_served_that_is_not_described(rig: Rig) -> None:
    served = {(method, route.path) for route in application(rig, is_local=True).routes for method in route.methods}  # type: ignore[attr-defined]
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    assert {item for item in served - described if item[0] != "HEAD"} == {("GET", "/openapi.json")}


WRONG: list[tuple[str, str, Any, str]] = [
    ("POST", "/faults", [{"action": "drp", "code": 10}], r"'drp' - at `\$\[0\].action`; allowed: .*\"drop\""),
    ("POST", "/faults", [{"action": "drop"}], "code is missing; the fault 'drop' needs it"),
    ("POST", "/faults", [{"action": "drop", "code": "SEND_MESAGE_V2"}], "code: .*did you mean SEND_MESSAGE_V2"),
    ("POST", "/faults", [{"action": "drop", "code": 10, "nth": 0}], r"`\$\[0\].nth`; allowed: .*\"minimum\":1"),
    ("POST", "/faults", [{"action": "drop", "code": 10, "nht": 1}], "field `nht`.*; allowed: action, code, client"),
    ("POST", "/faults", [{"action": "drop", "code": 10, "delay_s": 1}], "'drop' has no field 'delay_s'; allowed: code"),
    ("POST", "/faults", [{"action": "drop", "code": 10, "probability": 2}], r"probability`; allowed: .*\"maximum\":1"),
    ("POST", "/faults", [{"action": "answer", "code": 10, "response": "BUSY"}], "response: unknown response 'BUSY'"),
    ("POST", "/faults", [{"action": "late", "code": 10}], "delay_s is missing"),
    ("POST", "/faults", [{"action": "freeze", "code": 10}], "'freeze' has no field 'code'; allowed: client"),
    ("POST", "/faults", [{"action": "route", "topic": "t"}], "queues is missing"),
    ("POST", "/faults", {"action": "drop", "code": 10}, "Expected `array`"),
    ("DELETE", "/faults/x", None, "number is 'x'"),
    ("POST", "/clock/advance", {"hours": -1}, "the clock cannot be set back"),
    ("POST", "/clock/advance", {"days": 366.01}, "maximum .* .366 days."),
    ("POST", "/clock/advance", {"weeks": 1}, "field `weeks`; allowed: seconds, minutes, hours, days"),
    ("POST", "/wait-for", {"condition": {"until": "x"}}, "condition.until`; allowed: .*consumed"),
    ("POST", "/wait-for", {"condition": {"until": "members", "group": "g", "count": 0}}, "count`; allowed: .*minimum"),
    ("POST", "/wait-for", {"condition": {"until": "injected"}, "timeout_s": 600.1}, r"timeout_s`; allowed: .*600"),
    ("PUT", "/topics/a%20b", {"queues": 1}, "a b"),
    ("PUT", "/topics/t", {"queues": 0}, r"queues`; allowed: .*\"minimum\":1"),
    ("PUT", "/topics/t", {"queues": 5000}, "5000 is not between"),
    ("GET", "/topics/t/messages?kye=k", None, "field `kye`; allowed: key, waiting_for, record"),
    ("GET", "/clock?x=1", None, "x is not a parameter; /clock has no parameters"),
    ("PUT", "/advertised", {}, "address is missing"),
    ("PUT", "/advertised", {"address": "localhost"}, "address is 'localhost'; it must be HOST:PORT"),
    ("POST", "/kill", {"lose": 1}, "the broker has only 0 messages"),
]  # fmt: skip


async def test_error_for_bad_input_names_its_field_and_what_is_allowed(http: httpx.AsyncClient) -> None:
    for method, path, body, reason in WRONG:
        said = await problem(await http.request(method, path, json=body), "ValueError")
        assert re.search(reason, said), (path, body, said)


async def test_what_is_not_there_and_what_is_too_large(http: httpx.AsyncClient) -> None:
    assert "no fault in force has the number 7" in await problem(await http.delete("/faults/7"), "KeyError")
    assert "has no members" in await problem(await http.post("/groups/g/rebalance"), "KeyError")
    lease = {"topic": "t", "queue_id": 1}
    assert "no member of g owns" in await problem(await http.post("/groups/g/take-lease", json=lease), "KeyError")
    assert (await http.get("/nothing")).status_code == 404
    blank = b" " * (MAX_BODY_BYTES - 2) + b"{}"
    assert (await http.post("/kill", content=blank)).status_code == 200
    assert "more than" in await problem(await http.post("/kill", content=blank + b" "), "ValueError")
    assert "not JSON" in await problem(await http.post("/kill", content=b"{"), "ValueError")


async def test_a_retry_chain_ends_among_the_dead_letters_in_one_call(rig: Rig, http: httpx.AsyncClient) -> None:
    async def handle(message: Message) -> None:
        raise ValueError("never")

    began_ms = (await http.get("/clock")).json()["now_ms"]
    async with Producer(rig.address) as producer, Consumer(rig.address, "g", "t", handle, start="first"):
        await producer.send("t", b"poison", tag="T", keys="k")
        wanted = {"condition": {"until": "dead_letters", "group": "g"}, "skip_waits": True}
        await body_of(await http.post("/wait-for", json=wanted))
    (found,) = await body_of(await http.get("/groups/g/dead-letters"))
    assert (found["text"], found["tag"], found["reconsume_times"]) == ("poison", "T", 17)
    assert (await http.get("/clock")).json()["now_ms"] - began_ms > 4.7 * 3_600_000


async def test_a_condition_that_does_not_hold_in_time_says_what_is_missing(http: httpx.AsyncClient) -> None:
    for condition, missing in (
        ({"until": "stored", "topic": "t", "count": 2}, "there are 0 messages of 2, after 0.0 s"),
        ({"until": "consumed", "group": "g", "topic": "t"}, "g has committed nothing in t"),
        ({"until": "members", "group": "g"}, "the broker knows no group g"),
        ({"until": "rebalanced", "group": "g"}, "the group g is not rebalanced"),
    ):
        answer = await http.post("/wait-for", json={"condition": condition, "timeout_s": 0})
        assert missing in await problem(answer, "TimeoutError")


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with a name server elsewhere"])
async def test_a_broker_with_accounts_and_tls_says_when_a_group_is_rebalanced(tmp_path: Path, is_alone: bool) -> None:
    """The kit needs no account for its own broker; of a cluster it asks with the account that the broker has there."""
    accounts = AccountsFile(tmp_path / "plain_acl.yml")
    listening = Listening(acl=accounts.acl, tls=Tls("permissive", Certificates.make(tmp_path).files))
    settings = BrokerConfig(Path(), "", default_queues=2, vip_channel=False)
    async with AsyncExitStack() as stack:

        async def opened(settings: BrokerConfig) -> Rig:
            rig = Rig(settings, listening)
            await rig.open()
            stack.push_async_callback(rig.close)
            return rig

        rig = await opened(settings)
        if not is_alone:
            elsewhere = replace(settings, name="broker-b", name_servers=(rig.address,), name_server_account=ADMIN)
            rig = await opened(elsewhere)
        control = await stack.enter_async_context(Control(rig, "127.0.0.1", 0))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{control.port}", timeout=60)
        )
        signs = access(ADMIN, tls=True, verify_tls=False)
        await body_of(await http.put("/topics/t", json={"queues": 2}))
        async with Consumer(rig.name_server, "g", "t", lambda message: None, access=signs) as consumer:
            answer = await http.post(
                "/wait-for", json={"condition": {"until": "rebalanced", "group": "g", "members": 1}}
            )
            assert (await body_of(answer))["shares"] == {consumer.client_id: 3}  # with the retry topic


async def test_a_stopped_broker_says_so_and_starts_again(rig: Rig, http: httpx.AsyncClient) -> None:
    async with Producer(rig.address) as producer:
        await producer.send("t", b"kept")
        await body_of(await http.post("/stop"))
        assert (await http.get("/health")).json()["is_running"] is False
        assert "is not running" in await problem(await http.get("/topics"), "RuntimeError")
        assert "is not running" in await problem(await http.post("/stop"), "RuntimeError")
        assert "the broker is stopped" in (await http.get("/report")).json()["text"]
        await body_of(await http.post("/clock/advance", json={"hours": 1}))
        await body_of(await http.post("/start"))
        assert "the broker is running" in await problem(await http.post("/start"), "RuntimeError")
        await producer.send("t", b"later")
    assert [item["text"] for item in (await http.get("/topics/t/messages")).json()] == ["kept", "later"]


async def test_requests_are_cleared_when_the_broker_has_a_given_folder(tmp_path: Path) -> None:
    rig = Rig(BrokerConfig(Path(), "", vip_channel=False), Listening(), folder=tmp_path / "data", empties=True)
    await rig.open()
    try:
        async with Producer(rig.address) as producer:
            await producer.send("t", b"x")
        assert rig.requests
        await rig.clear()
        assert rig.requests == []
    finally:
        await rig.close()


async def test_messages_that_a_group_still_has_to_consume(rig: Rig, http: httpx.AsyncClient) -> None:
    async with Producer(rig.address) as producer:
        await producer.send("t", b"\xff", queue_key="one")
        async with Consumer(rig.address, "g", "t", lambda message: None, start="first"):
            wanted = {"condition": {"until": "consumed", "group": "g", "topic": "t"}}
            await body_of(await http.post("/wait-for", json=wanted))
        await producer.send("t", b"new", queue_key="one")
    (found,) = (await http.get("/topics/t/messages?waiting_for=g")).json()
    assert found["text"] == "new"
    everything = (await http.get("/topics/t/messages")).json()
    assert [item["text"] for item in everything] == [None, "new"]


async def test_web_pages_and_other_names_of_this_machine_are_turned_away(http: httpx.AsyncClient) -> None:
    assert "origin" in await problem(await http.post("/clean", headers={"origin": "https://example.org"}), "ValueError")
    assert (await http.get("/clock", headers={"host": "rebound.example.org"})).status_code == 400
    assert (await http.get("/clock", headers={"host": "localhost:1"})).status_code == 200


async def test_the_advertised_address_changes_while_clients_are_connected(rig: Rig, http: httpx.AsyncClient) -> None:
    async def told() -> list[str]:
        async with AdminClient(rig.address) as admin:
            return [broker.addresses[0] for broker in await admin.brokers()]

    async with Producer(rig.address) as producer:
        await producer.send("t", b"x")
        await body_of(await http.put("/advertised", json={"address": "localhost:4711"}))
        assert await told() == ["localhost:4711"]
        await body_of(await http.post("/restart"))
        assert await told() == ["localhost:4711"]
        await body_of(await http.put("/advertised", json={"address": rig.address}))
        await producer.send("t", b"y")
    assert await told() == [rig.address]


async def test_clients_get_the_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 and 127.0.0.2 are two addresses of one broker; what comes from elsewhere gets the published one."""
    settings = BrokerConfig(Path(), "10.9.9.9:1", external_address="localhost:49153", vip_channel=False)
    rig = Rig(settings, Listening(host="0.0.0.0"), networks=Networks())
    await rig.open()
    port = rig.address.rpartition(":")[2]
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            async with AdminClient(f"{host}:{port}") as admin:
                assert [broker.addresses[0] for broker in await admin.brokers()] == [f"{host}:{port}"]
        monkeypatch.setattr(Networks, "is_outside", lambda self, address: True)
        async with AdminClient(f"127.0.0.1:{port}") as admin:
            assert [broker.addresses[0] for broker in await admin.brokers()] == ["localhost:49153"]
            rig.advertise(None, "example.org:1")
            assert [broker.addresses[0] for broker in await admin.brokers()] == ["example.org:1"]
        monkeypatch.undo()
        rig.advertise("settled:2", None)
        async with AdminClient(f"127.0.0.2:{port}") as admin:
            assert [broker.addresses[0] for broker in await admin.brokers()] == ["settled:2"]
    finally:
        await rig.close()


def test_who_comes_from_outside_of_a_container() -> None:
    """As Docker's default bridge has it: 172.17.0.0/16 behind 172.17.0.1."""
    text = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
        "odd\tline\nnothing\t0\tzz\t0\t0\t0\t0\t0\t0\t0\t0\n"
    )
    networks = parse_networks(text)
    clients = ("172.17.0.1", "172.17.0.9", "192.168.65.1", "203.0.113.7", "127.0.0.1", "::1", "2001:db8::1")
    assert [networks.is_outside(client) for client in clients] == [True, False, True, True, False, False, False]
    assert parse_networks("") == Networks()


def test_data_is_kept_only_where_it_was_asked_for(tmp_path: Path) -> None:
    command = [*COMMAND, "--control-port", "0", "--data", str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(5)]
        with RemoteBroker(said[4].split()[1]) as broker:

            async def send() -> None:
                async with Producer(broker.address) as producer:
                    await producer.send("t", b"kept")

            asyncio.run(send())
            broker.restart()
            assert len(broker.messages("t")) == 1
            broker.clear()
            assert broker.messages("t") == []
            asyncio.run(send())
        child.terminate()
    assert child.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    assert (tmp_path / "data" / "commitlog").is_dir()


def test_a_broker_without_a_name_server_of_its_own_has_a_control_port_too(tmp_path: Path) -> None:
    command = [
        *[*COMMAND[:3], "broker", "--nameserver", "127.0.0.1:1", "--port", "0", "--control-port", "0"],
        *["--data", str(tmp_path), "--log-level", "error"],
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(2)]
        child.terminate()
    assert child.returncode == 0, said
    assert said[1].split()[0] == "Control"


def test_without_the_option_nothing_of_the_kit_is_loaded_and_one_port_is_open(tmp_path: Path) -> None:
    """Linux lists what a process listens on in /proc."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "--data", str(tmp_path)]
    log = tmp_path / "imports"
    with (
        log.open("w") as imports,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=imports, text=True) as child,
    ):
        assert child.stdout is not None
        said = child.stdout.readline()
        listening = listening_ports(child.pid)
        child.terminate()
    loaded = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines()}
    assert "rocketlet.broker.server" in loaded
    assert not loaded & {"rocketlet.testing", "starlette", "uvicorn"}
    assert [f"{host}:{port}" for host, port in listening] == [said.split()[4].rstrip(":")]


def listening_ports(pid: int) -> set[tuple[str, int]]:
    inodes = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
            host, _, port = parts[1].partition(":")
            found.add((".".join(str(byte) for byte in bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


async def test_a_control_port_that_cannot_be_opened_is_reported(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["start", "--control-port", "70000"])
    assert "70000 is not a port" in capsys.readouterr().err
    with pytest.raises(OSError, match="assign"):
        Control(rig, "192.0.2.1", 0)


def test_a_remote_broker_that_is_none_is_reported() -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        RemoteBroker("localhost")
    with pytest.raises(ConnectionError, match=r"no control port responds at 127\.0\.0\.1:1"):
        RemoteBroker("127.0.0.1:1").messages("t")
