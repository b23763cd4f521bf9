"""A broker with accounts, and wires that sign as one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..conftest import Node, Nodes
from ..support.accounts import AccountsFile, SignedWire, Wired, signed_wire


@pytest.fixture
def file(tmp_path: Path) -> AccountsFile:
    return AccountsFile(tmp_path / "plain_acl.yml")


@pytest.fixture
async def guarded(nodes: Nodes, file: AccountsFile) -> Node:
    return await nodes.start(acl=file.acl)


@pytest.fixture
async def wired(guarded: Node) -> AsyncIterator[Wired]:
    """`await wired("orders-key")` gives a wire that signs as that account; an empty key one that does not."""
    wires: list[SignedWire] = []

    async def open_wire(access_key: str) -> SignedWire:
        wires.append(await signed_wire(guarded.address, access_key))
        return wires[-1]

    yield open_wire
    for wire in wires:
        await wire.close()
