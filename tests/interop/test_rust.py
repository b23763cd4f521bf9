"""The unmodified official Rust client of 5.x, over gRPC, on our broker. It has producers and simple consumers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.access import Acl, AclFile
from rocketlet.client import Producer

from ..conftest import Node, Nodes, made_once
from ..support.accounts import ACCOUNTS, AccountsFile
from .conftest import missing
from .features import area
from .official import ACCOUNTS as SIGNED
from .official import (
    FIFO,
    NORMAL,
    SIMPLE,
    TIMED,
    TRANSACTIONS,
    Official,
    check_consumed,
    check_producers,
    home_of,
    make_rust,
    rust,
)

pytestmark = [pytest.mark.rust, pytest.mark.long]
"""It takes minutes to compile, once on a machine."""

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
    await check_producers(nodes, official)


@feature(SIMPLE)
async def test_consumers(node: Node, official: Official) -> None:
    async with (
        official.run("simple", endpoint=node.address, topic="t", tags="TagA || TagC") as peer,
        Producer(node.address) as producer,
    ):
        await peer.until(lambda: node.broker.pops.pools.waits("g", "t") > 0)
        await check_consumed(node, producer, peer)


@feature(SIGNED)
async def test_accounts(nodes: Nodes, official: Official, tmp_path: Path) -> None:
    file = AccountsFile(tmp_path / "plain_acl.yml")
    file.write([*ACCOUNTS, {"accessKey": "five-key", "secretKey": "secret-of-five", "topicPerms": ["t=PUB"]}])
    node = await nodes.start(acl=Acl(AclFile(file.path)), transaction_check_interval_s=0.1, transaction_timeout_s=0.3)
    keys: dict[str, Any] = {"access": "five-key", "secret": "secret-of-five"}
    async with official.run("produce", endpoint=node.address, topic="t", **keys) as peer:
        await peer.until(lambda: bool(peer.found("DONE")) and bool(peer.found("ASKED")))
    assert len(peer.found("SENT")) == 11
