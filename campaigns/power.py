"""Power cuts, by a model of what was synced: a broker with `--flush sync` works, the power fails, it starts again.

The model takes every system call of the store. A file's content at its last sync is there for certain. Any part of later
writes may be there: nothing, a beginning, pages with holes of zeros between. Names of files that came, went or were
replaced since their folder was synced are there up to any one of them, in their order. Folders themselves are there at
once.

Long work is done in pieces as a broker does it (`store.jobs`): saving, expiry and the removal of topics go on while messages
come, and what waits for the device waits in one line with the syncs. Every third time the broker is killed instead, with
`--flush os`: what it wrote is there. In some tries clients share the messages (`_popped`).

A fault is: a message that was acknowledged and is gone, a delayed one that was neither delivered nor waits, a topic that was
acknowledged and is gone, one that was deleted and is there again, a start that fails, a message that is not as it was sent;
of shared ones, one that is given though it was acknowledged or is in other hands, or that nobody gets.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rocketlet.broker.broker import Broker
from rocketlet.broker.config import Limits
from rocketlet.broker.runtime import Call, Job, MovableClock, do
from rocketlet.broker.store.store import Flusher, Retention
from rocketlet.protocol.bodies import TopicConfig

from ._device import Device, PowerCut
from ._ledger import LATE, Place, differences, open_broker, put, read_all
from ._popped import Popped
from ._timed import Timed
from .common import Limit, Outcome

DEFAULT_COUNT = 1000
STEPS = 60
CALLS = 400  # calls of the store to the device, after one of which the power fails
TIMED_SHARE = 0.3  # this share of tries sends messages to times, too
POPPED_SHARE = 0.3  # and in this one clients share messages
AMID_SHARE = 0.2  # in this share of tries a job saves state that somebody waits for
_LIMITS = Limits(
    journal_lines=-13, run_keys=3
)  # there are 13 topics from the start: journals are shortened again and again
KINDS = (
    *("send",) * 4, "late", "deliver", "persist", "save", "save", "topic", "expire", "commit", "make", "make", "delete"
)  # fmt: skip
SHORT_LIVED = ("a", "b")  # topics that are made and deleted again and again


@dataclass(slots=True)
class Work:
    """The messages that were sent, those that were acknowledged, and the acknowledged topics."""

    loop: asyncio.AbstractEventLoop
    sent: dict[Place, bytes] = field(default_factory=dict)
    acknowledged: dict[Place, bytes] = field(default_factory=dict)
    late: dict[bytes, Place] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    deletions: int = 0
    _jobs: deque[Coroutine[Any, Any, object]] = field(default_factory=deque)
    _waits_for_device: bool = False

    def step(self, broker: Broker, chance: random.Random, number: int) -> None:
        kind = chance.choice(KINDS)
        for _ in range(chance.choice((0, 1, 1, 3, 20))):
            self._go_on()
        if kind == "send":
            self._send(broker, chance, number)
        elif kind == "save":
            self._begin(broker.saving())
        elif kind == "make":
            self._make_or_fill(broker, chance.choice(SHORT_LIVED), b"%d" % number)
        elif kind == "delete":
            self._delete(broker, chance.choice(SHORT_LIVED))
        elif kind == "late":
            body = b"late-%d" % number
            place = put(broker, broker.delays.queue(1), body, LATE, 1)
            self.sent[place] = body

            def is_kept() -> None:
                self.acknowledged[place] = body
                self.late[body] = place

            self._sync(broker, is_kept)
        elif kind == "deliver":
            broker.delays._deliver_due(1)
        elif kind == "persist":
            while self._jobs:
                self._go_on()
            broker.persist()
        elif kind == "topic":
            name = f"topic-{number}"
            broker.topics.put(TopicConfig(name, 2, 2), broker.store.end)
            self._sync(broker, lambda: self.topics.add(name))
        elif kind == "expire":
            self._begin(broker.store.expiring(Retention(0, 200_000)))
        else:
            broker.offsets.put("g", "t", 0, broker.store.queue("t", 0).next)

    def _send(self, broker: Broker, chance: random.Random, number: int) -> None:
        sent: dict[Place, bytes] = {}
        for part in range(chance.randrange(1, 6)):
            body = b"%d-%d-" % (number, part) + chance.randbytes(chance.randrange(600))
            sent[put(broker, broker.store.queue("t", chance.randrange(3)), body)] = body
        self.sent |= sent
        if chance.random() < 0.8:
            self._sync(broker, lambda: self.acknowledged.update(self.sent))

    def save_amid_sends(self, broker: Broker, device: Device, chance: random.Random) -> None:
        """A job has messages of several segments synced, while somebody waits for them; soon after, the power fails."""
        device.calls_left = CALLS
        while self._jobs:
            self._go_on()
        sent: dict[Place, bytes] = {}
        for part in range(chance.randrange(1, 30)):
            body = b"amid-%d" % part + bytes(700)
            sent[put(broker, broker.store.queue("t", 3), body)] = body
        self.sent |= sent
        self._begin(broker.saving())
        for _ in range(chance.choice((1, 1, 2, 3, 5))):
            self._go_on()
        self._sync(broker, lambda: self.acknowledged.update(sent))
        device.calls_left = chance.randrange(6)

    def _make_or_fill(self, broker: Broker, name: str, body: bytes) -> None:
        if broker.topics.get(name) is None:
            self.deleted.discard(name)
            broker.topics.put(TopicConfig(name, 1, 1), broker.store.end)
            self._sync(broker, lambda: self.topics.add(name))
        place = put(broker, broker.store.queue(name, 0), body)
        self.sent[place] = body
        self._sync(broker, lambda: self.acknowledged.update({place: body}))

    def _delete(self, broker: Broker, name: str) -> None:
        if broker.topics.get(name) is None:
            return
        self.topics.discard(name)
        for table in (self.sent, self.acknowledged):
            for place in [place for place in table if place[0] == name]:
                del table[place]
        broker.topics.delete(name, broker.store.end)
        self._begin(broker.store.deleting(name))
        self._sync(broker, lambda: self.deleted.add(name))
        self.deletions += 1

    def _begin(self, job: Job[Any]) -> None:
        self._jobs.append(do(job, self._make))

    def _go_on(self) -> None:
        """The next piece of the oldest job."""
        if self._jobs:
            try:
                self._jobs[0].send(None)
            except StopIteration:
                del self._jobs[0]
            except PowerCut:
                del self._jobs[0]
                raise

    async def _make(self, call: Call | None) -> None:
        self._waits_for_device = call is not None
        await _Turn()
        self._waits_for_device = False
        if call is not None:
            call()

    def end(self) -> None:
        for job in self._jobs:
            job.close()
        self._jobs.clear()

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        """Stands for the thread that waits for the device, which makes one call after the other."""
        if self._waits_for_device:
            self._go_on()
        done: Future[object] = Future()
        try:
            done.set_result(function(*arguments))
        except BaseException as error:  # a PowerCut, too
            done.set_exception(error)
        return done

    def _sync(self, broker: Broker, acknowledge: Callable[[], object]) -> None:
        """Raises PowerCut."""
        flusher = broker.flusher
        if flusher is None:
            acknowledge()
            return
        was_told: list[bool] = []

        def told(is_synced: bool) -> None:
            was_told.append(is_synced)
            if is_synced:
                acknowledge()

        self.loop.run_until_complete(_flushed(flusher, told))
        if not was_told:
            raise PowerCut


async def _flushed(flusher: Flusher, told: Callable[[bool], None]) -> None:
    flusher.after_sync(lambda: told(True), lambda: told(False))
    await flusher.drain()


class _Turn:
    """Something else is done meanwhile."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Others(NamedTuple):
    """The chances of each kind of work beside the first one, apart: a seed stays the same when another kind is added."""

    amid: random.Random
    times: random.Random
    popped: random.Random


FIGURES = ("acknowledged", "cut_off", "deleted", "killed", "timed", "recalled", "popped", "in_hands")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures=dict.fromkeys(FIGURES, 0))
    loop = asyncio.new_event_loop()
    for number in limit:
        chance = random.Random(f"{seed}-{number}")
        others = Others(*(random.Random(f"{seed}-{number}-{name}") for name in ("amid", "times", "popped")))
        try:
            _try(folder, chance, others, outcome, loop)
        except Exception as error:
            outcome.fault(f"{type(error).__name__}: {error}".replace(str(folder), ""))
        outcome.tried += 1
        for name in ("before", "after"):
            shutil.rmtree(folder / name, ignore_errors=True)
    loop.close()
    return outcome


def _try(
    folder: Path,
    chance: random.Random,
    others: Others,
    outcome: Outcome,
    loop: asyncio.AbstractEventLoop,
) -> None:
    device, work = Device(), Work(loop)
    amid, times, pops = others
    timed = Timed(work._sync, work._begin) if times.random() < TIMED_SHARE else None
    popped = Popped(loop, work._sync) if pops.random() < POPPED_SHARE else None
    before, after = folder / "before", folder / "after"
    is_kill = chance.random() < 0.33
    settings: dict[str, Any] = {"flush": "os" if is_kill else "sync", "segment_bytes": 8000, "delay_levels_ms": (0,)}
    with device.below():
        broker = open_broker(before, _LIMITS, **settings)
        broker.topics.put(TopicConfig("t", 4, 4), 0)
        if broker.flusher is not None:
            vars(broker.device)["_thread"] = work
        device.calls_left = chance.randrange(CALLS)
        amid_step = amid.randrange(10) if amid.random() < AMID_SHARE else None
        with suppress(PowerCut):
            for number in range(STEPS):
                if number == amid_step:
                    work.save_amid_sends(broker, device, amid)
                work.step(broker, chance, number)
                if timed is not None:
                    timed.step(broker, times)
                if popped is not None:
                    popped.step(broker, pops)
        work.end()
        if popped is not None:
            popped.end(broker)
        device.calls_left = None
        if is_kill:
            shutil.copytree(before, after)
        else:
            device.after_cut(before, after, chance)
        broker.store.close()
    outcome.figures["killed"] += is_kill
    clock = MovableClock(stands=True)
    broker = open_broker(after, _LIMITS, clock, **settings)
    for fault in popped.faults(broker, clock) if popped is not None else ():
        outcome.fault(fault)
    outcome.figures["popped"] += len(popped.done) if popped is not None else 0
    outcome.figures["in_hands"] += len(popped.kept) if popped is not None else 0
    _judge(broker, work, timed, outcome)
    put(broker, broker.store.queue("t", 0), b"after")
    broker.persist(closes=True)
    broker.store.close()


def _judge(broker: Broker, work: Work, timed: Timed | None, outcome: Outcome) -> None:
    """Compares what a broker found again with what was acknowledged."""
    found = read_all(broker)
    delivered = {body for (topic, queue, _), body in found.items() if (topic, queue) == ("t", 3)}
    missing, _ = differences(work.acknowledged, found)
    if missing:
        outcome.fault("an acknowledged message is gone")
    if any(body != work.sent[place] for place, body in found.items() if place in work.sent):
        outcome.fault("a message is not as it was sent")
    progress = broker.delays.progress.get(1, 0)
    if any(place[2] < progress and body not in delivered for body, place in work.late.items()):
        outcome.fault("a delayed message was neither delivered nor waits")
    if any(broker.topics.get(name) is None for name in work.topics):
        outcome.fault("an acknowledged topic is gone")
    for name in work.deleted:
        if broker.topics.get(name) is not None or any(topic == name for topic, _ in broker.store.queues):
            outcome.fault("a deleted topic is there again")
    for fault in timed.faults(broker) if timed is not None else ():
        outcome.fault(fault)
    outcome.figures["timed"] += len(timed.acknowledged) if timed is not None else 0
    outcome.figures["recalled"] += len(timed.recalled) if timed is not None else 0
    outcome.figures["deleted"] += work.deletions
    outcome.figures["acknowledged"] += len(work.acknowledged)
    outcome.figures["cut_off"] += len(work.sent) - len([place for place in work.sent if place in found])
