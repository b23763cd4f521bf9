"""Unmodified Java members that start one after another, as in the balancing tests of Apache's integration suite: each gets
its share of what is sent 5 s later, and once one has left, the others get theirs of what is sent at once.

Each try has a topic and a Java process of its own. BALANCE_PEER=apache tries Apache's broker instead of ours.

A fault is: a share that is off by more than Apache's tests allow (a tenth of all messages), and a message that nobody has
handled after 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rocketlet.client import Producer

from bench.churn import Run, make_topic, members_of
from bench.common import STARTERS
from bench.peers import Peer

from .common import Limit, Outcome

DEFAULT_COUNT = 20
MEMBERS, QUEUES, MESSAGES = 4, 8, 240
ALLOWED = MESSAGES // 10
STAY_S, PATIENCE_S = 5.0, 30.0  # as Apache's tests wait


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"other than AVG": 0, "twice": 0})
    uvloop.run(_run(limit, folder, outcome))
    return outcome


async def _run(limit: Limit, folder: Path, outcome: Outcome) -> None:
    names = {"rocketlet": "java-on-rocketlet", "apache": "apache"}
    async with STARTERS[names[os.environ.get("BALANCE_PEER", "rocketlet")]](folder) as peer:
        for number in limit:
            try:
                await _try(peer, f"t{number}", outcome)
            except (TimeoutError, RuntimeError) as error:
                outcome.fault("the Java members did not start")
                print(f"t{number}: {error!r}", flush=True)
            outcome.tried += 1


async def _try(peer: Peer, topic: str, outcome: Outcome) -> None:
    run = Run()
    await make_topic(peer.address, topic, QUEUES)
    handlers = argparse.Namespace(handler_ms=0, threads=20)
    async with Producer(peer.address) as producer, members_of(peer, run, handlers) as members:
        names = [f"member{number}" for number in range(MEMBERS)]
        for name in names:
            await members.join(name, topic)
        await asyncio.sleep(STAY_S)
        await _send(producer, topic, "start", run)
        _judge("start", await _shares(run, "start", names), outcome)
        await members.leave(names.pop())
        await _send(producer, topic, "leave", run)
        _judge("leave", await _shares(run, "leave", names), outcome)
    outcome.figures["twice"] += len(run.handled) - len({item.body for item in run.handled})


async def _send(producer: Producer, topic: str, when: str, run: Run) -> None:
    for number in range(MESSAGES):
        await producer.send(topic, f"{when}{number}".encode())
        run.sent.add(f"{when}{number}")


async def _shares(run: Run, when: str, names: Sequence[str]) -> list[int]:
    """How many messages each member has handled, when all are."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        found = {item.body: item.member for item in run.handled if item.body.startswith(when)}
        if len(found) == MESSAGES or time.monotonic() > end_s:
            counted = Counter(found.values())
            return [counted[name] for name in names]
        await asyncio.sleep(0.05)


def _judge(when: str, shares: list[int], outcome: Outcome) -> None:
    if sum(shares) != MESSAGES:
        outcome.fault(f"{when}: not all messages were handled by the members that stay")
    if any(abs(share - MESSAGES / len(shares)) > ALLOWED for share in shares):
        outcome.fault(f"{when}: shares are off by more than {ALLOWED}")
        print(f"{when}: {shares}", flush=True)
    outcome.figures["other than AVG"] += sorted(shares) != _avg(len(shares))


def _avg(members: int) -> list[int]:
    """How many messages each member gets if only the owner reads a queue."""
    few, more = divmod(QUEUES, members)
    return [(few + (number >= members - more)) * MESSAGES // QUEUES for number in range(members)]
