"""Foreign clients, our own and Spark on our broker with TLS and accounts."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from rocketlet.broker.tls import Tls
from rocketlet.client import Consumer, Producer

from bench.peers import CACHE

from ..conftest import Node, Nodes, eventually
from ..support.accounts import ADMIN, SECRETS, AccountsFile, access, account, signed_wire
from ..support.certificates import Certificates
from ..support.handlers import Inbox
from .conftest import HERE, SMALL_JVM, Program, Run, missing, program
from .features import area

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
KEY = "service-key"
SECRETS[KEY] = "secret-of-service"
OURS = {"access": KEY, "secret": SECRETS[KEY]}
TLS = ("-Dtls.enable=true",)
feature = area("TLS and accounts")


@pytest.fixture
def accounts(tmp_path: Path) -> AccountsFile:
    file = AccountsFile(tmp_path / "plain_acl.yml")
    both = {"topicPerms": ["t=PUB|SUB", "t-copy=PUB|SUB"], "defaultGroupPerm": "SUB"}
    file.rewrite([account(ADMIN, admin=True), account(KEY, **both)])
    return file


@pytest.fixture
async def secured(nodes: Nodes, certificates: Certificates, accounts: AccountsFile) -> Node:
    """TLS and plain text, for accounts only."""
    node = await nodes.start(tls=Tls("permissive", certificates.files), acl=accounts.acl)
    wire = await signed_wire(node.address, ADMIN)
    ext = {"topic": "t", "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    answer = await wire.call(17, {**ext, "topicFilterType": "SINGLE_TAG", "order": "false"})
    assert answer.code == 0, answer.remark
    await wire.close()
    return node


@feature("Java's producer and consumer, each with TLS or without, on one port; signed requests")
@pytest.mark.parametrize(
    ("producer_jvm", "consumer_jvm"), [(TLS, TLS), (TLS, ()), ((), TLS)], ids=["both", "producer", "consumer"]
)
async def test_java_clients_with_and_without_tls(
    secured: Node, java: Run, producer_jvm: Sequence[str], consumer_jvm: Sequence[str]
) -> None:
    """The three of Apache's own suite: both sides by TLS, the one and the other."""
    inbox = Inbox()
    tls = access(KEY, tls=True, verify_tls=False)
    async with (
        java("consume", ns=secured.address, topic="t", group="g", jvm=consumer_jvm, **OURS) as consumer,
        Consumer(secured.address, "audit", "t", inbox, start="first", access=tls),
    ):
        await consumer.started()
        async with java("produce", ns=secured.address, topic="t", jvm=producer_jvm, **OURS) as producer:
            await consumer.until(lambda: len(consumer.bodies) == 20)
            await eventually(lambda: len(inbox.messages) == 20)
            await producer.until(lambda: len(producer.found("SENT")) == 20)  # prints after the message may have come
            assert {line[2] for line in producer.found("SENT")} == {"SEND_OK"}
    assert secured.broker.tls.handshakes >= bool(producer_jvm) + bool(consumer_jvm) + 1


@feature("Java checks the server's certificate and shows its own")
async def test_java_checks_certificates_and_shows_its_own(
    nodes: Nodes, certificates: Certificates, java: Run, tmp_path: Path
) -> None:
    node = await nodes.start(tls=Tls("enforcing", certificates.mutual))
    folder = certificates.folder
    key = (folder / "client.key", folder / "client.crt")
    split_pem(folder / "client.pem", *key)
    settings = tmp_path / "tls.properties"
    settings.write_text(
        "tls.test.mode.enable=false\ntls.client.authServer=true\n"
        f"tls.client.trustCertPath={folder}/ca.pem\ntls.client.certPath={key[1]}\ntls.client.keyPath={key[0]}\n"
    )
    jvm = (*TLS, "-Dtls.test.mode.enable=false", f"-Dtls.config.file={settings}")
    async with java("produce", ns=node.address, topic="t", count=3, jvm=jvm) as producer:
        await producer.until(lambda: len(producer.found("SENT")) == 3)


def split_pem(both: Path, key: Path, certificate: Path) -> None:
    """Java wants PKCS#8 and certificate in files of their own."""
    from cryptography.hazmat.primitives import serialization as kinds

    blocks = re.findall(r"-----BEGIN [^-]+-----.*?-----END [^-]+-----\n", both.read_text(), re.DOTALL)
    loaded = kinds.load_pem_private_key(next(block for block in blocks if "KEY" in block).encode(), None)
    key.write_bytes(loaded.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption()))
    certificate.write_text("".join(block for block in blocks if "CERTIFICATE" in block))


@feature("accounts: wrong secrets and missing permissions are refused")
async def test_java_is_refused(secured: Node, accounts: AccountsFile, java: Run) -> None:
    for options, reason, words in (
        ({"access": KEY, "secret": "a-wrong-secret"}, "signature", "No route info"),
        ({}, "no_key", "No route info"),
        ({**OURS, "topic": "forbidden"}, "permission", "still failed"),
    ):
        async with java("produce", **{"ns": secured.address, "topic": "t", "route_tries": 1, **options}) as peer:
            with pytest.raises(AssertionError):
                await peer.until(lambda peer=peer: bool(peer.found("SENT")))  # type: ignore[misc]
            assert words in " ".join(peer.found("FAILED")[0])
        assert accounts.acl.refused[reason] > 0


@feature("accounts: sends, batches, push, retries", client="Go 2.1.2")
@pytest.mark.go
@pytest.mark.skipif(bool(missing("go")), reason=missing("go"))
async def test_go_signs_on_the_same_port(nodes: Nodes, secured: Node, accounts: AccountsFile, go: Run) -> None:
    """Go's client has no TLS; it shares the port with clients that do."""
    inbox = Inbox()
    async with (
        go("consume", ns=secured.address, topic="t", group="g", **OURS) as consumer,
        Consumer(secured.address, "audit", "t", inbox, start="first", access=access(KEY, tls=True, verify_tls=False)),
    ):
        await consumer.started()
        async with go("produce", ns=secured.address, topic="t", **OURS) as producer:
            await producer.started()
            await consumer.until(lambda: len(consumer.bodies) == 18)
            await eventually(lambda: len(inbox.messages) == 18)
    assert not accounts.acl.refused


# mqadmin


def tools_file(folder: Path, access_key: str) -> None:
    """With whose keys mqadmin signs: conf/tools.yml of its home."""
    conf = folder / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "tools.yml").write_text(f"accessKey: {access_key}\nsecretKey: {SECRETS[access_key]}\n")
    (conf / "logback_tools.xml").write_text('<configuration><root level="OFF"/></configuration>')


@asynccontextmanager
async def mqadmin(peer: AbstractAsyncContextManager[Program], node: Node) -> AsyncIterator[object]:
    async with peer as tool:

        async def run(*words: str) -> str:
            before = len(tool.lines)
            await tool.write("\t".join((words[0], "-n", node.address, *words[1:])))
            await tool.until(lambda: "== done" in tool.lines[before:])
            return "\n".join(tool.lines[before : tool.lines.index("== done", before)])

        yield run


@feature("updateAclConfig, deleteAclConfig, updateGlobalWhiteAddr, clusterAclConfigVersion", client="mqadmin 4.9.8")
async def test_mqadmin_sets_up_accounts(secured: Node, accounts: AccountsFile, java: Run, tmp_path: Path) -> None:
    tools_file(tmp_path, ADMIN)
    async with mqadmin(java("mqadmin"), secured) as admin:
        text = await admin(  # type: ignore[operator]
            "updateAclConfig", "-b", secured.address, "-a", "fresh-key", "-s", "secret-of-fresh", "-t", "t=PUB,u=SUB",
            "-g", "g=SUB", "-i", "DENY", "-u", "SUB", "-w", "10.0.0.*", "-m", "false",
        )  # fmt: skip
        assert "success" in text
        found = accounts.acl.file.policy.accounts["fresh-key"]
        assert set(found.resources) == {"t", "u", "%RETRY%g"}
        assert found.white.matches("10.0.0.7")
        version = await admin("clusterAclConfigVersion", "-b", secured.address)  # type: ignore[operator]
        assert "broker-a" in version and secured.address in version
        text = await admin("updateGlobalWhiteAddr", "-b", secured.address, "-g", "10.1.0.*,10.2.0.1")  # type: ignore[operator]
        assert "success" in text
        assert accounts.acl.file.policy.is_white("10.1.0.9")
        text = await admin("deleteAclConfig", "-b", secured.address, "-a", "fresh-key")  # type: ignore[operator]
        assert "success" in text
        assert "fresh-key" not in accounts.acl.file.policy.accounts
    tools_file(tmp_path, KEY)
    async with mqadmin(java("mqadmin"), secured) as admin:
        text = await admin("deleteAclConfig", "-b", secured.address, "-a", KEY)  # type: ignore[operator]
        assert "Need admin permission" in text
    assert KEY in accounts.acl.file.policy.accounts


@feature("getAclConfig, without secrets", client="mqadmin 4.9.7")
async def test_an_older_mqadmin_shows_accounts(
    secured: Node, accounts: AccountsFile, programs: Path, tmp_path: Path, fetch_apache: Callable[[str], None]
) -> None:
    """4.9.8 has the command no more, for it showed the secrets."""
    jars = CACHE / "apache-4.9.7"
    await asyncio.to_thread(fetch_apache, "4.9.7")
    tools_file(tmp_path, ADMIN)
    old = program(
        "java", *SMALL_JVM, "-Drocketmq.client.logUseSlf4j=true", "-cp", f"{programs}/peer.jar:{jars}/*",
        "Peer", "mqadmin", ROCKETMQ_HOME=str(tmp_path),
    )  # fmt: skip
    async with mqadmin(old, secured) as admin:
        text = await admin("getAclConfig", "-b", secured.address)  # type: ignore[operator]
    assert KEY in text and ADMIN in text
    assert "secret-of" not in text


# Spark


@feature("a stream and a batch with TLS and accounts", client="Spark")
@pytest.mark.spark
async def test_spark_reads_and_writes_with_tls_and_accounts(
    secured: Node, certificates: Certificates, accounts: AccountsFile, tmp_path: Path
) -> None:
    pytest.importorskip("pyspark")
    tls = access(KEY, tls=True, ca_file=str(certificates.folder / "ca.pem"))
    async with Producer(secured.address, access=tls) as producer:
        for number in range(50):
            await producer.send("t", b"%d" % number, properties={"number": str(number)})
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "spark_job.py"), secured.address, "t", "g", str(tmp_path), f"accessKey={KEY}",
        f"secretKey={SECRETS[KEY]}", "tls=true", f"tlsCaFile={certificates.folder}/ca.pem",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    out, err = await child.communicate()
    assert out.split()[-4:] == [b"1225", b"50", b"50", b"9"], err[-3000:]
    assert not accounts.acl.refused
