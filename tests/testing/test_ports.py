"""Free ports: nobody else gets them before they are listened on, and they can be listened on."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from rocketlet.broker.config import VIP_DISTANCE
from rocketlet.testing.ports import HELD, free_port


def test_a_port_is_given_once() -> None:
    ports = [free_port() for _ in range(HELD)]
    given = {*ports, *(port - VIP_DISTANCE for port in ports)}
    assert len(given) == 2 * HELD
    for _ in range(10 * HELD):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in given


@pytest.mark.parametrize("distance", [0, VIP_DISTANCE])
async def test_nobody_can_bind_it_but_servers_can_listen(distance: int) -> None:
    port = free_port() - distance
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):  # and again, after a restart
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        server.close()
        await server.wait_closed()


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_few_descriptors_are_held() -> None:
    """They are counted, not compared by number: other tests of this process may have any of them open."""
    for _ in range(HELD):
        free_port()
    before = open_descriptors()
    for _ in range(3 * HELD):
        free_port()
    assert open_descriptors() < before + 10
