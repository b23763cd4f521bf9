"""Messages that are sent to a time, in a campaign against the store: acknowledged ones come, and recalled ones never."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from rocketlet.broker.broker import Broker
from rocketlet.broker.messages.later import waiting_text
from rocketlet.broker.runtime import Clock, Job

from ._ledger import put, read_all

KINDS = ("send", "send", "deliver", "recall", "carry", "save")
DELAYS_MS = (-5, -5, 3_600_000)
QUEUE = 3  # in the topic t


class _Later(Clock):
    """The machine's, behind all times that messages were sent to."""

    def time_s(self) -> float:
        return super().time_s() + 7200


class Timed:
    """sync: calls an action when what was written is kept. begin: begins a job, whose pieces come between other steps."""

    def __init__(self, sync: Callable[[Broker, Callable[[], object]], None], begin: Callable[[Job[Any]], None]) -> None:
        self._sync = sync
        self._begin = begin
        self._due_ms: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self.asked_back: set[bytes] = set()  # and perhaps recalled
        self.recalled: set[bytes] = set()

    def step(self, broker: Broker, chance: random.Random) -> None:
        kind = chance.choice(KINDS)
        timers = broker.timers
        if kind == "send":
            self._send(broker, b"timed-%d" % len(self._due_ms), chance.choice(DELAYS_MS))
        elif kind == "deliver":
            timers._deliver_due()
        elif kind == "carry":
            self._begin(timers.carrying(broker.store.end))
        elif kind == "save":
            self._begin(timers.saving_recalled())
        elif self._due_ms:
            self._recall(broker, chance.choice(sorted(self._due_ms)))

    def _send(self, broker: Broker, body: bytes, delay_ms: int) -> None:
        due_ms = self._due_ms[body] = broker.clock.time_ms() + delay_ms
        text = waiting_text(f"UNIQ_KEY\x01{body.decode()}", due_ms, "t", QUEUE)
        put(broker, broker.timers.queue, body, text.encode(), due_ms)
        broker.timers.take()
        self._sync(broker, lambda: self.acknowledged.add(body))

    def _recall(self, broker: Broker, body: bytes) -> None:
        self.asked_back.add(body)
        work = broker.timers.recalling("t", self._due_ms[body], body.decode())
        try:
            while True:
                next(work)
        except StopIteration as end:
            if end.value:
                self._sync(broker, lambda: self.recalled.add(body))

    def faults(self, broker: Broker) -> Iterator[str]:
        """The faults of a broker that was started behind the cut. It delivers all messages that wait."""
        timers = broker.timers
        timers._clock = _Later()
        while (wait_s := timers.wait_s()) is not None and wait_s <= 0:
            timers._deliver_due()
        came = {body for (topic, queue, _), body in read_all(broker).items() if (topic, queue) == ("t", QUEUE)}
        if self.acknowledged - self.asked_back - came:
            yield "a message that was sent to a time neither came nor waits"
        if self.recalled & came:
            yield "a message that was recalled came"
