"""`rocketlet mirror` as a process: once, followed until SIGTERM, and what it refuses."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import orjson
from rocketlet.client import Producer
from rocketlet.testing import Broker

from ..conftest import eventually


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rocketlet.command.cli",
        "mirror",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_it_copies_once_and_says_what(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Broker() as there, Producer(rocketlet.address) as producer:
        await producer.send_batch("orders", [b"1", b"2", b"3"])
        await producer.send("orders", b"in 2 hours", delay_level=18)
        child = await started("--from", rocketlet.address, "--to", there.address, "--last", "2", "--json")
        out, err = await child.communicate()
        assert (child.returncode, err) == (0, b"")
        queue, waits = map(orjson.loads, out.splitlines())
        assert (queue["copied"], waits) == (2, {"topic": "orders", "delayed": 1})
        assert [message.body for message in there.messages("orders")] == [b"2", b"3"]


async def test_it_follows_until_it_is_stopped(rocketlet: Broker) -> None:
    rocketlet.create_topic("orders", queues=1)
    async with Broker() as there, Producer(rocketlet.address) as producer:
        child = await started("--from", rocketlet.address, "--to", there.address, "--follow", "--topics", "orders")
        for number in range(3):
            await producer.send("orders", b"%d" % number)
            await eventually(lambda number=number: len(there.messages("orders")) == number + 1)  # type: ignore[misc]
        child.send_signal(signal.SIGTERM)
        out, _ = await child.communicate()
        assert child.returncode == 0
        assert b"broker-a:0" in out


async def test_wrong_options_are_explained() -> None:
    for arguments, text in (
        (("--from", "a:1", "--to", "b:1", "--since", "yesterday"), b"is not a time such as"),
        (("--from", "127.0.0.1:1", "--to", "127.0.0.1:1"), b"source and target are both"),
    ):
        child = await started(*arguments)
        _, err = await child.communicate()
        assert child.returncode
        assert text in err
        assert b"Traceback" not in err
