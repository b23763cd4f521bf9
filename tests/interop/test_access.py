"""ACL and TLS, of which only Apache's broker has the other side, and the encodings of headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from rocketlet.client import Access, BrokerRefused, ConfigError, ConnectionFailed, Consumer, Producer

from bench.peers import Apache

from ..conftest import eventually
from ..support.handlers import Inbox
from .features import area
from .systems import HEAP, System

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
SECURED = Access(access_key="service-1", secret_key="its-secret")
ACL = """
globalWhiteRemoteAddresses:
accounts:
- accessKey: service-1
  secretKey: its-secret
  admin: false
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: PUB|SUB
"""
feature = area("Our client on Apache's broker", client="Apache 4.9.7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def authority(folder: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(folder / "ca.pem")
    return made


@pytest.fixture(scope="module")
def secured(folder: Path, authority: trustme.CA, fetch_apache: Callable[[str], None]) -> Iterator[System]:
    """Apache's name server and broker, which take signed requests over TLS only."""
    fetch_apache("4.9.7")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pkcs8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(key.private_bytes(*pkcs8))
    (folder / "tls.properties").write_text(
        f"tls.test.mode.enable=false\ntls.server.need.client.auth=none\n"
        f"tls.server.certPath={folder}/server.pem\ntls.server.keyPath={folder}/server.key\n"
    )
    options = (f"-Dtls.config.file={folder}/tls.properties", "-Dtls.server.mode=permissive")
    apache = Apache(folder, "4.9.7", HEAP, options=options, aclEnable="true")
    (apache.home / "conf" / "plain_acl.yml").write_text(ACL)
    system = System(apache)
    yield system
    system.stop()


async def exchange(system: System, access: Access | None, topic: str) -> None:
    inbox = Inbox()
    async with (
        Producer(system.address, access=access) as producer,
        Consumer(system.address, f"g-{topic}", topic, inbox, start="first", access=access),
    ):
        for number in range(5):
            await producer.send(topic, b"%d" % number, tag="T", keys="größe")
        await eventually(lambda: len(inbox.messages) == 5)


@feature("ACL: signed requests")
async def test_signed_requests_are_served_and_others_refused(secured: System) -> None:
    await exchange(secured, SECURED, "acl")
    for access, reason in ((None, "No accessKey"), (Access(access_key="service-1", secret_key="wrong"), "signature")):
        async with Producer(secured.address, access=access) as producer:
            with pytest.raises(BrokerRefused, match=f"(?i){reason}"):
                await producer.send("acl", b"x")


@feature("TLS: encrypted sockets, certificates checked")
async def test_sockets_are_encrypted_and_certificates_are_checked(secured: System, folder: Path) -> None:
    await exchange(secured, replace(SECURED, tls=True, ca_file=str(folder / "ca.pem")), "tls")
    await exchange(secured, replace(SECURED, tls=True, verify_tls=False), "tls")
    with pytest.raises(ConnectionFailed, match="certificate"):
        async with Producer(secured.address, access=replace(SECURED, tls=True)):
            pass


@feature("headers in JSON and in RocketMQ's binary encoding")
@pytest.mark.parametrize("encoding", ["json", "rocketmq"])
async def test_headers_in_either_encoding(secured: System, encoding: Literal["json", "rocketmq"]) -> None:
    await exchange(secured, replace(SECURED, encoding=encoding), f"headers-{encoding}")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"access_key": "a"}, "give both or neither"),
        ({"encoding": "xml"}, "expected one of auto, json, rocketmq"),
        ({"ca_file": "/ca.pem"}, "TLS is off"),
        ({"tls": True, "key_file": "/key.pem"}, "a key without a certificate"),
    ],
)
def test_what_contradicts_itself_is_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Access(**wrong)  # type: ignore[arg-type]


async def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        Producer("127.0.0.1:1", access=Access(tls=True, ca_file="/no/such.pem"))
