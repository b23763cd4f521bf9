from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ...conftest import Node
from ...support.grpc_client import GrpcClient, grpc_client

Dial = Callable[..., Awaitable[GrpcClient]]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """`await dial("host:port")` gives a client; all are closed at the end."""
    clients: list[GrpcClient] = []

    async def open_client(address: str, **options: Any) -> GrpcClient:
        clients.append(await grpc_client(address, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        await client.close()


@pytest.fixture
async def client(node: Node, dial: Dial) -> GrpcClient:
    return await dial(node.address)
