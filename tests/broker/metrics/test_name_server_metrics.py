"""A name server that runs alone measures itself."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from pathlib import Path

from rocketlet.testing.ports import free_port

from bench.peers import listening, process

from ...conftest import Connect, Nodes, create_topic


async def test_a_name_server_tells_of_its_brokers_and_of_those_that_are_gone(
    nodes: Nodes, connect: Connect, tmp_path: Path
) -> None:
    port, metrics_port = free_port(), free_port()
    command = (
        sys.executable, "-m", "rocketlet.command.cli", "nameserver", "--port", str(port), "--metrics-port", str(metrics_port),
    )  # fmt: skip
    async with process(command, tmp_path / "log") as pid:
        await listening(metrics_port, pid=pid)
        node = await nodes.start(name_servers=(f"127.0.0.1:{port}",))
        await create_topic(await connect(node.address), "t")

        async def metrics() -> list[str]:
            return (await asyncio.to_thread(get, f"http://127.0.0.1:{metrics_port}/metrics")).splitlines()

        assert "rocketlet_name_server_brokers 1.0" in await metrics()
        await node.stop()
        gone = 'rocketlet_name_server_departed_broker{broker="broker-a",cluster="DefaultCluster"} 1.0'
        assert gone in await metrics()
        assert await asyncio.to_thread(get, f"http://127.0.0.1:{metrics_port}/readyz") == "ok\n"


def get(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())
