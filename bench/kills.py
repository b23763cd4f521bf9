"""Members are killed with SIGKILL while messages flow: how many messages are handled twice, and how many are missing.

Rocketlet's members on Rocketlet's broker, beside Apache's Java members on Apache's broker and on ours. Each member is a
process of its own. It prints what it has handled when its handler is done: a message that was in a handler when its member
was killed counts once."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from rocketlet.client import Consumer, Message, Producer
from rocketlet.command.plumbing.numbers import whole

from . import common
from .churn import TOPIC, Handled, Run, make_topic, send_forever
from .peers import Peer, compiled, java_options

NAMES = ("rocketlet", "apache", "java-on-rocketlet")
GROUP = "kills"
READY_S = 120.0
KILL_PAUSE_S = 1.0  # before a killed member is replaced; Apache's broker needs no more, the socket is closed


class Member:
    """A consumer in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, run: Run) -> None:
        self._process = process
        self._name = name
        self._run = run
        self._is_ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, peer: Peer, name: str, run: Run, options: Any) -> Member:
        process = await asyncio.create_subprocess_exec(
            *await _command(peer, name, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        member = cls(process, name, run)
        assert process.stdin is not None
        process.stdin.write(f"join {name} {TOPIC}\n".encode())
        async with asyncio.timeout(READY_S):
            await member._is_ready.wait()
        return member

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            words = line.decode().split()
            if words[:1] == ["HANDLED"] and len(words) == 6:
                _, name, queue, body, begin_ms, end_ms = words
                self._run.handled.append(Handled(name, int(queue), body, float(begin_ms), float(end_ms)))
            elif words[:1] == ["DONE"]:
                self._is_ready.set()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reader

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader


async def _command(peer: Peer, name: str, options: Any) -> list[str]:
    handler = (str(options.handler_ms), str(options.threads))
    if peer.name in ("rocketlet", "python-on-apache"):
        return [sys.executable, "-m", "bench.kills", "--member", peer.address, name, *handler]
    program = ("-cp", await compiled("Churn.java"), "Churn", peer.address, GROUP, TOPIC, *handler)
    return ["java", *java_options(), "-Xmx128m", *program]


async def kills(peer: Peer, options: Any) -> dict[str, float]:
    """Kills one member after the other; each is replaced."""
    run = Run()
    await make_topic(peer.address, TOPIC, options.queues)
    per_kill: list[int] = []
    async with Producer(peer.address, timeout_s=10) as producer, _members(peer, run, options) as members:
        async with _sending(producer, run, options.rate):
            await asyncio.sleep(options.stay_s)
            for number in range(options.kills):
                before = _twice(run)
                await members.pop(0).kill()
                await asyncio.sleep(KILL_PAUSE_S)
                members.append(await Member.start(peer, f"next{number}", run, options))
                await asyncio.sleep(options.stay_s)
                per_kill.append(_twice(run) - before)
        end_s = time.monotonic() + 60
        while {item.body for item in run.handled} < run.sent and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
    handled = {item.body for item in run.handled}
    return {
        "kills": options.kills,
        "sent": len(run.sent),
        "twice": _twice(run),
        "twice_per_kill_p50": common.median([float(count) for count in per_kill]),
        "twice_per_kill_max": max(per_kill),
        "missing": len(run.sent - handled),
    }


def _twice(run: Run) -> int:
    counts = Counter(item.body for item in run.handled)
    return counts.total() - len(counts)


@asynccontextmanager
async def _members(peer: Peer, run: Run, options: Any) -> AsyncIterator[list[Member]]:
    members = [await Member.start(peer, f"steady{number}", run, options) for number in range(options.members)]
    try:
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@asynccontextmanager
async def _sending(producer: Producer, run: Run, rate: float) -> AsyncIterator[None]:
    sending = asyncio.create_task(send_forever(producer, run, rate))
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def be_member(address: str, name: str, handler_ms: int, threads: int) -> None:
    """The process of one of our members: does the same as Churn.java."""

    async def handle(message: Message) -> None:
        begin_ms = time.time() * 1000
        await asyncio.sleep(handler_ms / 1000)
        body = message.body.decode().strip()
        line = f"HANDLED {name} {message.queue_id} {body} {begin_ms:.3f} {time.time() * 1000:.3f}\n"
        os.write(1, line.encode())  # at once, whatever happens to this process

    async with Consumer(address, GROUP, TOPIC, handle, start="first", concurrency=threads):
        os.write(1, b"DONE\n")
        await asyncio.to_thread(lambda: [None for line in sys.stdin])


def _options() -> argparse.Namespace:
    parser = common.parser(__doc__ or "", NAMES)
    parser.add_argument("--kills", type=whole(1), default=10)
    parser.add_argument("--members", type=whole(1), default=3)
    parser.add_argument("--queues", type=whole(1), default=8)
    parser.add_argument("--rate", type=common.positive, default=300.0, help="messages a second")
    parser.add_argument("--handler-ms", type=whole(0), default=50)
    parser.add_argument("--threads", type=whole(1), default=20, help="handlers at once in each member")
    parser.add_argument(
        "--stay-s", type=common.positive, default=4.0, help="between a member's start and the next kill"
    )
    return parser.parse_args()


async def run() -> None:
    options = _options()
    names = common.chosen(options.only, NAMES)
    async with common.started(names) as peers:
        found = {name: await kills(peer, options) for name, peer in peers.items()}
    rows = [[key, *(item[key] for item in found.values())] for key in next(iter(found.values()))]
    load = f"{options.rate:.0f} messages/s, {options.queues} queues, {options.handler_ms} ms handlers"
    common.show(f"{load}, {options.members} members", ("", *found), rows)
    common.finish(options, "kills", found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        uvloop.run(be_member(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    else:
        uvloop.run(run())
