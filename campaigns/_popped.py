"""Messages that clients share, in a campaign against the store: one that was acknowledged never comes again, one that is in
somebody's hands comes to nobody else, and every other one comes again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from rocketlet.broker.broker import Broker
from rocketlet.broker.pops.deliveries import AckStatus, Delivered, PopClient, PopRequest, PopResult, Why
from rocketlet.broker.runtime import MovableClock
from rocketlet.protocol.message import decode_record

from ._ledger import Place, read_all

GROUP, TOPIC = "sharing", "t"
INVISIBLE_MS = 600_000
KINDS = ("pop", "pop", "pop", "ack", "ack", "nack", "later", "forget")
COUNTS = (1, 3, 8)


class Popped:
    """sync: calls an action when what was written is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sync: Callable[[Broker, Callable[[], object]], None]) -> None:
        self._loop = loop
        self._sync = sync
        self._hands: dict[Place, str] = {}  # handles, of messages that nobody else may get
        self.kept: dict[Place, str] = {}  # those of which the disk knows
        self._asked: set[Place] = set()  # acknowledged, perhaps
        self.done: set[Place] = set()  # acknowledged, and the broker has said so

    def step(self, broker: Broker, chance: random.Random) -> None:
        """Raises PowerCut."""
        kind = chance.choice(KINDS)
        self._run(self._step(broker, chance, kind))
        if kind == "ack" or chance.random() < 0.7:
            self._sync(broker, lambda: self.kept.update(self._hands))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    async def _step(self, broker: Broker, chance: random.Random, kind: str) -> None:
        """One turn of the broker's loop."""
        held = sorted(self._hands)
        if kind == "pop":
            for message in _pop(broker, chance.choice(COUNTS)):
                self._hands[_place(message)] = message.handle
        elif kind == "ack":
            self._ack(broker, chance.sample(held, len(held) // 2))
        else:
            for place in held[:1]:
                handle = self._free(place)
                if kind != "forget":
                    invisible_ms = 0 if kind == "nack" else INVISIBLE_MS
                    broker.pops.change(GROUP, TOPIC, handle, invisible_ms)
        broker.pops._settling.write()  # the end of this turn, in which a power cut is raised

    def _ack(self, broker: Broker, places: list[Place]) -> None:
        handles = [self._free(place) for place in places]
        self._asked.update(places)

        def told(outcomes: Any) -> None:
            self.done.update(at for at, outcome in zip(places, outcomes, strict=True) if outcome is AckStatus.DONE)

        broker.pops.ack(GROUP, TOPIC, handles, told)

    def _free(self, place: Place) -> str:
        """It may be given to others from now on."""
        self.kept.pop(place, None)
        return self._hands.pop(place)

    def end(self, broker: Broker) -> None:
        """The machine is off: no timer of its broker runs."""
        broker.pops._deadlines.stop()

    def faults(self, broker: Broker, clock: MovableClock) -> Iterator[str]:
        """The faults of a broker that was started behind the cut, whose clock is moved on."""
        found: list[str] = []
        self._run(self._look(broker, clock, found))
        yield from found

    async def _look(self, broker: Broker, clock: MovableClock, found: list[str]) -> None:
        wanted = {place for place in read_all(broker) if place[0] == TOPIC} - self.done - self._asked
        came = self._drain(broker, found)
        if came & self.kept.keys():
            found.append("a message that was in somebody's hands is given to another client")
        kept = [(at, handle) for at, handle in self.kept.items() if at in wanted]
        broker.pops.ack(GROUP, TOPIC, [handle for _, handle in kept], lambda outcomes: _judge(outcomes, found))
        broker.pops._settling.write()
        clock.advance(2 * INVISIBLE_MS / 1000)
        came |= self._drain(broker, found)
        if wanted - came - {at for at, _ in kept}:
            found.append("a message that nobody has acknowledged is given to nobody")

    def _drain(self, broker: Broker, found: list[str]) -> set[Place]:
        came: set[Place] = set()
        while messages := _pop(broker, 32):
            places = set(map(_place, messages))
            if places & self.done:
                found.append("an acknowledged message is given again")
            if places & came:
                found.append("a message is given twice at a time")
            came |= places
            broker.pops._settling.write()
        return came


def _judge(outcomes: Any, found: list[str]) -> None:
    if any(outcome is not AckStatus.DONE for outcome in outcomes):
        found.append("a restart has made a handle void")


def _pop(broker: Broker, count: int) -> tuple[Delivered, ...]:
    received: list[PopResult] = []
    broker.pops.receive(PopRequest(GROUP, TOPIC, PopClient("c"), count, INVISIBLE_MS, from_first=True), received.append)
    assert received[0].why in (Why.FOUND, Why.NOTHING_NEW), received[0]
    return received[0].messages


def _place(message: Delivered) -> Place:
    record = decode_record(message.record)
    return record.topic, record.queue_id, record.queue_offset
