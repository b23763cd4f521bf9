"""A broker whose clients share messages is killed with SIGKILL at any moment and started again, again and again.

Half of the clients speak remoting, half gRPC; each may settle after a kill what another one held before it. A fault is: a
message that was acknowledged and is given again, one that is given while it is in other hands, one that was sent and is
given to nobody, a handle that a restart has made void, a broker that does not start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rocketlet.client import Producer, RocketletError
from rocketlet.testing.ports import free_port

from ._process import BrokerProcess
from ._sharers import INVISIBLE_S, SHARERS, TOPIC, Held, Refused, Sharer
from .common import Limit, Outcome

DEFAULT_COUNT = 20
QUEUES = 4
SENDERS = 8
CLIENTS = 8
LOAD_S = (0.05, 1.0)  # how long there is load before the kill
SURE_S = 5.0  # for how long it is acknowledged: later, others may get it at the same time
NACK_MS = 20
BEHIND_S = 0.4  # before the kill: what was popped so late need not be on the disk
LIVES = 10  # kills in one flush mode, before the other mode has its turn
EXCEPTION = b"Traceback"
FIGURES = ("sent", "acknowledged", "given_again", "kept_handles", *(sharer.figure for sharer in SHARERS))


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_run(limit, random.Random(seed), folder))


async def _run(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures=dict.fromkeys(FIGURES, 0))
    modes = [_Lives(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        lives = modes[number // LIVES % 2]
        try:
            await lives.cycle()
        except Exception as error:
            outcome.fault(f"{lives.flush}: {type(error).__name__}: {error}")
        outcome.tried += 1
    await asyncio.gather(*(lives.drain() for lives in modes))
    return outcome


@dataclass(slots=True)
class _Hand:
    """A message in a client's hands. since_s: when it was asked for; taken_s: when it was there. is_free: it may be given to
    others from now on."""

    held: Held
    since_s: float
    taken_s: float
    is_free: bool = False


@dataclass
class _Known:
    sent: set[bytes] = field(default_factory=set)
    done: set[bytes] = field(default_factory=set)  # acknowledged, and the broker has said so
    given: set[bytes] = field(default_factory=set)
    hands: dict[bytes, _Hand] = field(default_factory=dict)


class _Lives:
    def __init__(self, folder: Path, flush: str, chance: random.Random, outcome: Outcome) -> None:
        self.flush = flush
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._port = free_port()
        self._known = _Known()
        self._began = 0

    def _broker(self) -> BrokerProcess:
        return BrokerProcess(self._folder, self._port, "--flush", self.flush, "--queues", str(QUEUES))

    async def cycle(self) -> None:
        """A start, load, and a kill."""
        broker = await self._broker().__aenter__()
        self._began += 1
        async with Producer(broker.address, "p", retries=0, timeout_s=5) as producer:
            work = [asyncio.create_task(self._send(producer, number)) for number in range(SENDERS)]
            work += [asyncio.create_task(self._share(broker.address, number)) for number in range(CLIENTS)]
            await asyncio.sleep(self._chance.uniform(*LOAD_S))
            killed_s = time.monotonic()
            await broker.kill()
            for found in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(found, BaseException) and not isinstance(found, (OSError, EOFError)):
                    self._outcome.fault(f"{self.flush}: a client: {type(found).__name__}: {found}")
        if EXCEPTION in broker.log:
            self._outcome.fault(f"{self.flush}: the broker had an exception")
        for hand in self._known.hands.values():
            if killed_s - hand.taken_s < BEHIND_S:
                hand.is_free = True

    async def _send(self, producer: Producer, sender: int) -> None:
        with contextlib.suppress(RocketletError):
            for number in range(1_000_000):
                body = b"%d-%d-%d" % (self._began, sender, number)
                await producer.send(TOPIC, body)
                self._known.sent.add(body)
                self._outcome.figures["sent"] += 1

    async def _share(self, address: str, number: int) -> None:
        """A client, until the broker is killed."""
        async with SHARERS[number % len(SHARERS)](address, f"client-{number}") as sharer:
            await self._use_kept(sharer)
            while True:
                for held in await self._popped(sharer, self._chance.choice((1, 4, 32)), 200):
                    await self._handle(sharer, held)

    async def _use_kept(self, sharer: Sharer) -> None:
        """Clients acknowledge messages after the kill that they, or others, held before it."""
        known = self._known
        kept = [body for body, hand in known.hands.items() if not hand.is_free]
        for body in self._chance.sample(kept, len(kept) // 2):
            if body in known.hands and not known.hands[body].is_free:
                self._outcome.figures["kept_handles"] += 1
                await self._ack(sharer, known.hands[body].held)

    async def _popped(self, sharer: Sharer, count: int, wait_ms: int) -> list[Held]:
        asked_s = time.monotonic()
        try:
            found = await sharer.pop(count, wait_ms)
        except Refused as fault:
            self._outcome.fault(f"{self.flush}: a receive is answered with {fault}")
            return []
        for held in found:
            self._take(held, asked_s)
        self._outcome.figures[sharer.figure] += len(found)
        return found

    def _take(self, held: Held, asked_s: float) -> None:
        known, body = self._known, held.body
        if body in known.done:
            self._outcome.fault(f"{self.flush}: an acknowledged message is given again")
        hand = known.hands.get(body)
        is_early = hand is not None and time.monotonic() < hand.since_s + INVISIBLE_S
        if hand is not None and is_early and not hand.is_free:
            self._outcome.fault(f"{self.flush}: a message is in two hands")
        self._outcome.figures["given_again"] += body in known.given
        known.given.add(body)
        known.hands[body] = _Hand(held, asked_s, time.monotonic())

    async def _handle(self, sharer: Sharer, held: Held) -> None:
        chance = self._chance.random()
        if chance < 0.8:
            await self._ack(sharer, held)
        elif chance < 0.95:
            if hand := self._known.hands.get(held.body):  # another client may have acknowledged it
                hand.is_free = True
            with contextlib.suppress(Refused):  # its time may be over
                await sharer.nack(held, NACK_MS)

    async def _ack(self, sharer: Sharer, held: Held) -> None:
        known, body = self._known, held.body
        hand = known.hands.get(body)
        if hand is None or hand.held is not held or time.monotonic() > hand.since_s + SURE_S:
            return
        try:
            await sharer.ack(held)
        except Refused as fault:
            self._outcome.fault(f"{self.flush}: an acknowledgement is answered with {fault}")
            return
        if time.monotonic() < hand.since_s + INVISIBLE_S:
            known.done.add(body)
            known.hands.pop(body, None)
            self._outcome.figures["acknowledged"] += 1

    async def drain(self) -> None:
        """In the end everything that was sent is given, and gone when it was acknowledged."""
        async with self._broker() as broker:
            known = self._known
            async with SHARERS[0](broker.address, "last") as sharer:
                await asyncio.sleep(INVISIBLE_S)  # now all can be popped that is not acknowledged
                while found := await self._popped(sharer, 32, 1000):
                    for held in found:
                        await self._ack(sharer, held)
            if not known.sent <= known.given:
                self._outcome.fault(f"{self.flush}: {len(known.sent - known.given)} messages are given to nobody")
            await broker.end()
