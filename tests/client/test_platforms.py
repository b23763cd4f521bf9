"""The client where Python has no more than on Windows: modules and sockets' options of POSIX are missing."""

from __future__ import annotations

import asyncio
import sys

from ..conftest import PATIENCE_S, Node, Wire, create_topic

PROGRAM = """
import asyncio
import os
import socket
import sys

for name in "crypt fcntl grp posix_ipc pty pwd resource syslog termios tty uvloop".split():
    sys.modules[name] = None
del os.fork, os.register_at_fork
for name in ("SO_REUSEPORT", "TCP_USER_TIMEOUT"):
    if hasattr(socket, name):
        delattr(socket, name)


class WindowsLoop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, *arguments):
        raise NotImplementedError

    def add_reader(self, *arguments):
        raise NotImplementedError


import rocketlet.sync
from rocketlet import AdminClient, Consumer, Producer, SharedConsumer


async def main(address):
    seen, done = [], asyncio.Event()

    async def handle(message):
        seen.append(message.body)
        if len(seen) == 10:
            done.set()

    async with Producer(address) as producer, Consumer(address, "g", "t", handle, start="first"):
        for number in range(10):
            await producer.send("t", b"%d" % number)
        await done.wait()
    async with SharedConsumer(address, "shared", "t", start="first") as consumer:
        await consumer.ack(await consumer.receive(timeout_s=60))
    async with AdminClient(address) as admin:
        print(len(seen), len(await admin.brokers()))


with asyncio.Runner(loop_factory=WindowsLoop) as runner:
    runner.run(main(sys.argv[1]))
"""


async def test_client_works_without_the_modules_of_posix(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, node.address), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, errors = await asyncio.wait_for(child.communicate(), PATIENCE_S)
    assert said.split() == [b"10", b"1"], errors.decode()
