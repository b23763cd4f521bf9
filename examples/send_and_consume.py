"""Sends ten messages and consumes them. Needs a broker: `rocketlet start`."""

from __future__ import annotations

import asyncio
import sys

from rocketlet import Consumer, Message, Producer


async def main(name_server: str = "127.0.0.1:9876") -> None:
    done = asyncio.Event()
    seen = 0

    async def handle(message: Message) -> None:
        nonlocal seen
        print(f"{message.queue} {message.queue_offset}: {message.body.decode()} (tag {message.tag})")
        seen += 1
        if seen == 10:
            done.set()

    async with Producer(name_server) as producer, Consumer(name_server, "examples", "greetings", handle, start="first"):
        for number in range(10):
            await producer.send("greetings", f"hello {number}".encode(), tag="even" if number % 2 == 0 else "odd")
        await asyncio.wait_for(done.wait(), 20)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
