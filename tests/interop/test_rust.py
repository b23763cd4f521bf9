"""The unmodified official Rust client of 5.x, over gRPC, on our broker. It has producers and simple consumers."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.access.acl import Acl
from rocketlet.broker.access.file import AclFile
from rocketlet.client import Consumer, Producer

from ..conftest import Node, Nodes, made_once
from ..support.accounts import ACCOUNTS, AccountsFile
from ..support.handlers import Inbox
from .conftest import missing
from .features import area
from .official import ACCOUNTS as SIGNED
from .official import FIFO, NORMAL, SIMPLE, TIMED, TRANSACTIONS, Official, home_of, make_rust, rust

pytestmark = [pytest.mark.rust, pytest.mark.long]
"""It takes minutes to compile, once."""

SENT = Counter(
    [f"{kind}-{number}" for kind in ("normal", "fifo") for number in range(5)] + "delayed committed unknown".split()
)
feature = area("Official clients of 5.x")


@pytest.fixture
def official(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Official:
    if missing("cargo", "cc"):
        pytest.skip(missing("cargo", "cc"))
    return rust(made_once(tmp_path_factory, "official-rust", partial(make_rust)), home_of(tmp_path))


@feature(NORMAL)
@feature(FIFO)
@feature(TIMED)
@feature(TRANSACTIONS)
async def test_producers(nodes: Nodes, official: Official) -> None:
    node = await nodes.start(transaction_sweep_s=0.1, transaction_timeout_s=0.3)
    inbox = Inbox()
    async with (
        Consumer(node.address, "g", "t", inbox, start="first"),
        official.run("produce", endpoint=node.address, topic="t") as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == SENT.total() and bool(peer.found("DONE")))
    assert Counter(body.decode() for body in inbox.bodies) == SENT
    assert peer.found("ASKED")[0] == ["ASKED", "unknown"]
    message = next(message for message in inbox.messages if message.body == b"normal-3")
    assert (message.tag, message.keys, message.properties["farbe"]) == ("TagA", ["key-3"], "grün")
    in_order = [message for message in inbox.messages if message.body.startswith(b"fifo")]
    assert len({message.queue_id for message in in_order}) == 1
    assert [message.body for message in sorted(in_order, key=lambda message: message.queue_offset)] == [
        b"fifo-%d" % number for number in range(5)
    ]


@feature(SIMPLE)
async def test_consumers(node: Node, official: Official) -> None:
    async with (
        official.run("simple", endpoint=node.address, topic="t", tags="TagA || TagC") as peer,
        Producer(node.address) as producer,
    ):
        await peer.until(lambda: node.broker.pops.waits("g", "t") > 0)
        for number in range(5):
            await producer.send("t", b"%d" % number, tag="TagA", keys="k", properties={"farbe": "grün"})
        await producer.send("t", b"unwanted", tag="TagB")
        await producer.send("t", b"bad", tag="TagC")
        await peer.until(lambda: len(peer.bodies) == 7)
        await peer.until(lambda: sum(item.lag for item in node.broker.pops.numbers("g", "t").values()) == 0)
    assert Counter(peer.bodies) == Counter(["0", "1", "2", "3", "4", "bad", "bad"])
    assert [line[4] for line in peer.found("GOT") if line[5] == "bad"] == ["1", "2"]
    assert next(line for line in peer.found("GOT") if line[5] == "3") == ["GOT", "t", "TagA", "k", "1", "3", "grün"]


@feature(SIGNED)
async def test_accounts(nodes: Nodes, official: Official, tmp_path: Path) -> None:
    file = AccountsFile(tmp_path / "plain_acl.yml")
    file.write([*ACCOUNTS, {"accessKey": "five-key", "secretKey": "secret-of-five", "topicPerms": ["t=PUB"]}])
    node = await nodes.start(acl=Acl(AclFile(file.path)), transaction_sweep_s=0.1, transaction_timeout_s=0.3)
    keys: dict[str, Any] = {"access": "five-key", "secret": "secret-of-five"}
    async with official.run("produce", endpoint=node.address, topic="t", **keys) as peer:
        await peer.until(lambda: bool(peer.found("DONE")) and bool(peer.found("ASKED")))
    assert len(peer.found("SENT")) == 11
