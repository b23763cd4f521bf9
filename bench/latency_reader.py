"""The other end of `bench.latency`: a process with members of one group, which note when a message reaches a handler.

`python -m bench.latency_reader ADDRESS` takes orders from stdin, a line each, and answers each with a line:

    members N       lets members join or leave, one after the other with a pause, until there are N: DONE
    drain COUNT     reads a backlog of COUNT messages with a group of its own: DONE
    samples RUN     SAMPLES, and in hex two int64 for each handled message of that run: its number, and the ns from the time
                    for which it was scheduled. The run is forgotten then.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from array import array
from collections import defaultdict
from contextlib import AsyncExitStack

import uvloop
from rocketlet.client import Consumer, Message
from rocketlet.command.plumbing import logs

from . import drain
from .peers import Peer
from .runner import BODY_BYTES

NAME = "latency"  # names the topic, the group, the stream
HEAD = struct.Struct(
    ">qII"
)  # when a message was due (ns of CLOCK_MONOTONIC, shared by all processes), the run, its number
PADDING = b"." * (BODY_BYTES - HEAD.size)
PAUSE_S = 0.1  # between members that join or leave one after the other


class Reader:
    """The messages that handlers saw, by run."""

    def __init__(self) -> None:
        self._samples: dict[int, array[int]] = defaultdict(lambda: array("q"))

    async def handle(self, message: Message) -> None:
        due_ns, run, number = HEAD.unpack_from(message.body)
        self._samples[run].extend((number, time.monotonic_ns() - due_ns))

    def take(self, run: int) -> array[int]:
        return self._samples.pop(run, array("q"))


class Members:
    def __init__(self, address: str, reader: Reader) -> None:
        self._address = address
        self._reader = reader
        self._present: list[AsyncExitStack] = []

    async def be(self, count: int) -> None:
        while len(self._present) < count:
            stack = AsyncExitStack()
            consumer = Consumer(self._address, NAME, NAME, self._reader.handle, start="first")
            await stack.enter_async_context(consumer)
            self._present.append(stack)
            await asyncio.sleep(PAUSE_S)
        while len(self._present) > count:
            await self._present.pop().aclose()
            await asyncio.sleep(PAUSE_S)


async def run(address: str) -> None:
    reader = Reader()
    members = Members(address, reader)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    drained = 0
    while line := (await lines.readline()).decode():
        order, number = line.split()
        answer = "DONE"
        if order == "samples":
            answer = f"SAMPLES {reader.take(int(number)).tobytes().hex()}"
        elif order == "members":
            await members.be(int(number))
        else:
            drained += 1
            await drain.in_batches(Peer("", address, 0), int(number), drained)
        print(answer, flush=True)
    await members.be(0)


if __name__ == "__main__":
    logs.configure("error")
    uvloop.run(run(*sys.argv[1:]))
