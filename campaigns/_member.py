"""A member as a process: `python -m campaigns._member ADDRESS GROUP TOPIC NAME [pops]`, until its input ends.

It writes a line when a handler begins, and one when it ends: B or E, queue, epoch, body, time in ms. Nothing is written of a
message whose lease is over, and it is not handled: what a handler may know, it heeds.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time

import uvloop
from rocketlet.client import Consumer, Message, RetryLater, SharedConsumer
from rocketlet.command.plumbing import logs

HANDLER_S = (0.002, 0.1)
LONG_HANDLER_S = 8.0
LONG_SHARE = 0.002


async def main(address: str, group: str, topic: str, name: str, kind: str = "pulls") -> None:
    async def handle(message: Message) -> RetryLater | None:
        begin_ms = time.time() * 1000
        if message.lease_lost:
            return RetryLater()
        what = f"{message.queue.broker_name}:{message.queue_id} {message.epoch} {message.body.decode()}"
        os.write(1, f"B {what} {begin_ms:.3f}\n".encode())
        await asyncio.sleep(LONG_HANDLER_S if random.random() < LONG_SHARE else random.uniform(*HANDLER_S))
        os.write(1, f"E {what} {time.time() * 1000:.3f}\n".encode())
        return None

    logs.configure("error")
    async with (
        SharedConsumer(address, group, topic, handle, start="first", concurrency=16)
        if kind == "pops"
        else Consumer(address, group, topic, handle, start="first", concurrency=16)
    ):
        os.write(1, b"READY\n")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
