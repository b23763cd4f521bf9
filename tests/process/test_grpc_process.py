"""`rocketlet start` for official clients of 5.x: its options, and the certificate that it signs."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S
from ..support.grpc_client import grpc_client, message, route, sending


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
