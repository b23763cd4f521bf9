"""A client that has proven its account over TLS need not sign on that connection; the proof counts nowhere else."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from typing import Any

import pytest
from rocketlet.broker.tls import Tls
from rocketlet.client import AdminClient, Producer
from rocketlet.client.admin.diagnosis import Harm, Patience, diagnose
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import MSGPACK
from rocketlet.protocol.headers import Signer

from ...conftest import Node, Nodes, eventually
from ...support.accounts import ACCOUNTS, ADMIN, SECRETS, SEND, AccountsFile, SignedWire, access, account, signed_wire
from ...support.certificates import Certificates


async def tls_wire(node: Node, certificates: Certificates, access_key: str, **versions: Any) -> SignedWire:
    context = certificates.client_context()
    for name, version in versions.items():
        setattr(context, name, version)
    host, _, port = node.address.rpartition(":")
    wire = SignedWire(*await asyncio.open_connection(host, int(port), ssl=context))
    wire.access_key, wire.secret = access_key, SECRETS[access_key]
    return wire


def channel_of(wire: SignedWire) -> str:
    binding = wire._writer.get_extra_info("ssl_object").get_channel_binding("tls-unique")
    return str(binding.hex())


async def identified(wire: SignedWire) -> int:
    return (await wire.call(RequestCode.IDENTIFY, {"channel": channel_of(wire)}, serialize_type=MSGPACK)).code


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_is_identified_needs_no_signature_on_that_connection(
    nodes: Nodes, file: AccountsFile, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "orders-key", maximum_version=version)
    other = await tls_wire(node, certificates, "orders-key")
    assert await identified(wire) == 0
    wire.access_key = other.access_key = ""
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    assert "No default permission" in ((await wire.call(310, {**SEND, "b": "other"}, b"x")).remark or "")
    assert "No accessKey" in ((await other.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    await wire.close()
    await other.close()


async def test_a_proof_is_worth_nothing_elsewhere(nodes: Nodes, file: AccountsFile, certificates: Certificates) -> None:
    """Neither on another TLS connection nor on a plain one nor by the signature of another request."""
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    honest, thief = [await tls_wire(node, certificates, "orders-key") for _ in range(2)]
    plain = await signed_wire(node.address, "orders-key")
    stolen = {"channel": channel_of(honest)}
    stolen["Signature"] = Signer(honest.secret).signature({**stolen, "AccessKey": "orders-key"}, b"")
    own = {"channel": channel_of(thief), "Signature": stolen["Signature"]}
    for wire, ext in ((thief, stolen), (thief, own), (thief, {}), (plain, stolen), (plain, {"channel": ""})):
        assert (await wire.call(RequestCode.IDENTIFY, ext)).code != 0
        wire.access_key = ""
        assert "No accessKey" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
        wire.access_key = "orders-key"
    for wire in (honest, thief, plain):
        await wire.close()


async def test_a_white_address_is_no_proof(nodes: Nodes, file: AccountsFile, certificates: Certificates) -> None:
    """An account that passes unsigned today must not be believed tomorrow."""
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "trusted-key")
    wire.secret = "a-wrong-secret"
    assert await identified(wire) != 0
    file.rewrite([*ACCOUNTS[:-1], account("trusted-key", topicPerms=["orders=PUB"])])
    wire.access_key = ""
    assert "No accessKey" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    await wire.close()


async def test_a_changed_secret_ends_what_was_proven_and_a_changed_permission_holds(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire = await tls_wire(node, certificates, "orders-key")
    assert await identified(wire) == 0
    wire.access_key = ""
    file.rewrite([account("orders-key", topicPerms=["orders=SUB"])])
    assert "No default permission" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    file.rewrite([{**account("orders-key"), "secretKey": "another-secret"}])
    with pytest.raises(ConnectionResetError):
        await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")
    assert not any(queue.next for queue in node.broker.store.queues.values())


async def test_our_client_identifies_itself_and_comes_back_after_a_change(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    by_tls = access("orders-key", tls=True, ca_file=str(certificates.folder / "ca.pem"))
    async with Producer(node.address, access=by_tls) as producer:
        await producer.send("orders", b"1")
        known = [connection.known for connection in node.server._connections]
        await eventually(lambda: any(getattr(item, "identified", None) for item in known))
        for number in range(3):
            await producer.send("orders", b"%d" % number)
        file.rewrite([account("orders-key", topicPerms=["orders=PUB"], defaultTopicPerm="PUB")])
        await producer.send("orders", b"2")
        await producer.send("other", b"2")


async def test_refusals_and_handshakes_are_metrics(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files), metrics_port=0)
    by_tls, plain = await tls_wire(node, certificates, "nobody-key"), await signed_wire(node.address, "")
    for wire in (by_tls, plain):
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0
        await wire.close()
    url = f"http://127.0.0.1:{node.server.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    for line in (
        'rocketlet_requests_refused_total{broker="broker-a",cluster="DefaultCluster",reason="permission"} 1.0',
        'rocketlet_requests_refused_total{broker="broker-a",cluster="DefaultCluster",reason="no_key"} 1.0',
        'rocketlet_tls_handshakes_total{broker="broker-a",cluster="DefaultCluster",outcome="done"} 1.0',
        'rocketlet_tls_handshakes_total{broker="broker-a",cluster="DefaultCluster",outcome="failed"} 0.0',
    ):
        assert line in text


async def test_an_account_changes_its_secret_while_its_clients_work(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    proven = await tls_wire(node, certificates, "orders-key")
    signing = await signed_wire(node.address, "orders-key")
    assert await identified(proven) == 0
    proven.access_key = ""
    rotated = account("orders-key", topicPerms=["orders=PUB"])
    rotated |= {"secretKey": "a-new-secret", "formerSecretKey": SECRETS["orders-key"]}
    others = [entry for entry in ACCOUNTS if entry["accessKey"] != "orders-key"]
    file.rewrite([*others, rotated])

    async def sends(wire: SignedWire) -> bool:
        return (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0

    assert [await sends(proven), await sends(signing)] == [True, True]
    assert file.acl.former == {"orders-key": 1}, "the other proved itself before"
    renewed = await signed_wire(node.address, "orders-key")
    renewed.secret = "a-new-secret"
    assert await sends(renewed)
    del rotated["formerSecretKey"]
    file.rewrite([*others, rotated])
    assert [await sends(signing), await sends(renewed)] == [False, True]
    with pytest.raises(ConnectionError):
        await sends(proven)
    for wire in (proven, signing, renewed):
        await wire.close()


async def test_a_secret_that_is_set_from_afar_is_the_only_one(file: AccountsFile) -> None:
    file.rewrite([account("orders-key", formerSecretKey="the-one-before")])
    file.acl.file.put_account({"accessKey": "orders-key", "secretKey": "a-new-secret"})
    assert file.acl.file.policy.accounts["orders-key"].former is None
    assert "the-one-before" not in file.path.read_text()


async def test_doctor_names_who_is_refused_and_why(nodes: Nodes, file: AccountsFile) -> None:
    node = await nodes.start(acl=file.acl)
    wire = await signed_wire(node.address, "orders-key")
    wire.secret = "not-its-secret"
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0
    await wire.close()
    async with AdminClient(node.address, access=access(ADMIN)) as admin:
        (finding,) = [one for one in await diagnose(admin, Patience(0, 0, 0)) if one.kind == "requests_refused"]
    assert (finding.harm, finding.subject) == (Harm.STANDS, "broker-a")
    assert "127.0.0.1 asked for SEND_MESSAGE_V2 (310): Check signature failed for accessKey=orders-key" in finding.text
