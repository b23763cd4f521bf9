"""A broker whose clients share messages is killed with SIGKILL at any moment and started again, again and again.

A fault is: a message that was acknowledged and is given again, one that is given while it is in other hands, one that was
sent and is given to nobody, a handle that a restart has made void, a broker that does not start again.
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
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import write
from rocketlet.protocol.message import Record, decode_records
from rocketlet.protocol.pop_headers import AckMessage, ChangeInvisibleTime, PopMessage
from rocketlet.protocol.popped import POP_CK
from rocketlet.protocol.properties import find
from rocketlet.testing.ports import free_port

from tests.conftest import Wire

from ._process import BrokerProcess
from .common import Limit, Outcome

DEFAULT_COUNT = 20
QUEUES = 4
SENDERS = 8
CLIENTS = 8
LOAD_S = (0.05, 1.0)  # how long there is load before the kill
INVISIBLE_S = 5.0
SURE_S = 2.5  # for how long it is acknowledged: later, others may get it at the same time
NACK_MS = 20
BEHIND_S = 0.2  # before the kill: what was popped so late need not be on the disk
LIVES = 10  # kills in one flush mode, before the other mode has its turn
LOSSES = (b"pop_journal_damaged", b"Traceback")
GROUP, TOPIC = "g", "t"


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    return uvloop.run(_run(limit, random.Random(seed), folder))


async def _run(limit: Limit, chance: random.Random, folder: Path) -> Outcome:
    outcome = Outcome(figures={"sent": 0, "acknowledged": 0, "given_again": 0, "kept_handles": 0})
    modes = [_Lives(folder / flush, flush, chance, outcome) for flush in ("os", "sync")]
    for number in limit:
        lives = modes[number // LIVES % 2]
        try:
            await lives.cycle()
        except Exception as error:
            outcome.fault(f"{lives.flush}: {type(error).__name__}: {error}")
        outcome.tried += 1
    for lives in modes:
        await lives.drain()
    return outcome


@dataclass(slots=True)
class _Hand:
    """A message in a client's hands. is_free: it may be given to others from now on."""

    record: Record
    since_s: float
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
            work += [asyncio.create_task(self._share(broker.address)) for _ in range(CLIENTS)]
            await asyncio.sleep(self._chance.uniform(*LOAD_S))
            await broker.kill()
            killed_s = time.monotonic()
            for found in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(found, BaseException) and not isinstance(found, (OSError, EOFError)):
                    self._outcome.fault(f"{self.flush}: a client: {type(found).__name__}: {found}")
        if any(words in broker.log for words in LOSSES[1:]):
            self._outcome.fault(f"{self.flush}: the broker had an exception")
        for hand in self._known.hands.values():
            if killed_s - hand.since_s < BEHIND_S:
                hand.is_free = True

    async def _send(self, producer: Producer, sender: int) -> None:
        with contextlib.suppress(RocketletError):
            for number in range(1_000_000):
                body = b"%d-%d-%d" % (self._began, sender, number)
                await producer.send(TOPIC, body)
                self._known.sent.add(body)
                self._outcome.figures["sent"] += 1

    async def _share(self, address: str) -> None:
        """A client, until the broker is killed."""
        wire = await _wire(address)
        try:
            await self._use_kept(wire)
            while True:
                for record in await self._popped(wire, self._chance.choice((1, 4, 32)), 200):
                    await self._handle(wire, record)
        finally:
            with contextlib.suppress(Exception):
                await wire.close()

    async def _use_kept(self, wire: Wire) -> None:
        """Clients acknowledge messages after the kill that they held before it."""
        known = self._known
        kept = [body for body, hand in known.hands.items() if not hand.is_free]
        for body in self._chance.sample(kept, len(kept) // 2):
            if body in known.hands and not known.hands[body].is_free:
                self._outcome.figures["kept_handles"] += 1
                await self._ack(wire, known.hands[body].record)

    async def _popped(self, wire: Wire, count: int, wait_ms: int) -> list[Record]:
        header = PopMessage(GROUP, TOPIC, -1, count, int(INVISIBLE_S * 1000), wait_ms, init_mode=0)
        asked_s = time.monotonic()
        answer = await wire.call(RequestCode.POP_MESSAGE, write(header))
        if answer.code not in (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT, ResponseCode.TOPIC_NOT_EXIST):
            self._outcome.fault(f"{self.flush}: a receive is answered with {answer.code}")
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            await asyncio.sleep(0.01)
        records = list(decode_records(answer.body)) if answer.code == 0 else []
        for record in records:
            self._take(record, asked_s)
        return records

    def _take(self, record: Record, asked_s: float) -> None:
        known, body = self._known, record.body
        if body in known.done:
            self._outcome.fault(f"{self.flush}: an acknowledged message is given again")
        hand = known.hands.get(body)
        is_early = hand is not None and time.monotonic() < hand.since_s + INVISIBLE_S
        if hand is not None and is_early and not hand.is_free:
            self._outcome.fault(f"{self.flush}: a message is in two hands")
        self._outcome.figures["given_again"] += body in known.given
        known.given.add(body)
        known.hands[body] = _Hand(record, asked_s)

    async def _handle(self, wire: Wire, record: Record) -> None:
        chance = self._chance.random()
        if chance < 0.8:
            await self._ack(wire, record)
        elif chance < 0.95:
            self._known.hands[record.body].is_free = True
            header = ChangeInvisibleTime(*_place(record), NACK_MS)
            await wire.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, write(header))

    async def _ack(self, wire: Wire, record: Record) -> None:
        known, body = self._known, record.body
        hand = known.hands.get(body)
        if hand is None or hand.record is not record or time.monotonic() > hand.since_s + SURE_S:
            return
        answer = await wire.call(RequestCode.ACK_MESSAGE, write(AckMessage(*_place(record))))
        if answer.code == 0 and time.monotonic() < hand.since_s + INVISIBLE_S:
            known.done.add(body)
            known.hands.pop(body, None)
            self._outcome.figures["acknowledged"] += 1
        elif answer.code != 0:
            self._outcome.fault(f"{self.flush}: an acknowledgement is answered with {answer.code}")

    async def drain(self) -> None:
        """In the end everything that was sent is given, and gone when it was acknowledged."""
        async with self._broker() as broker:
            wire = await _wire(broker.address)
            known = self._known
            try:
                await asyncio.sleep(INVISIBLE_S)  # now all can be popped that is not acknowledged
                while records := await self._popped(wire, 32, 1000):
                    for record in records:
                        await self._ack(wire, record)
            finally:
                await wire.close()
            if not known.sent <= known.given:
                self._outcome.fault(f"{self.flush}: {len(known.sent - known.given)} messages are given to nobody")
            await broker.end()


async def _wire(address: str) -> Wire:
    host, _, port = address.rpartition(":")
    return Wire(*await asyncio.open_connection(host, int(port)))


def _place(record: Record) -> tuple[str, str, int, str, int]:
    handle = str(find(record.properties, POP_CK))
    return GROUP, TOPIC, record.queue_id, handle, record.queue_offset
