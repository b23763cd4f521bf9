"""A broker without sockets, what it acknowledged, what is left, and the work of the campaigns against the store."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import LIMITS, BrokerConfig, Limits
from rocketlet.broker.messages.timers import waiting_text
from rocketlet.broker.pops.pool import Receive
from rocketlet.broker.pops.requests import AckStatus, Delivered, PopClient, PopRequest, PopResult, Why
from rocketlet.broker.runtime.clock import MACHINE, Clock
from rocketlet.broker.runtime.jobs import Call, Job, do
from rocketlet.broker.store.files import StoreError
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.broker.store.store import Retention
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.message import decode_record, decode_records, encode_host
from rocketlet.testing.clock import MovableClock

from .common import Outcome

Place = tuple[str, int, int]  # topic, queue, offset

MAX_START_S = 20.0  # processor time
HOST = encode_host("127.0.0.1", 1)
ADDRESS = "127.0.0.1:1"
LATE = b"REAL_TOPIC\x01t\x02REAL_QID\x013"  # the properties of a delayed message for t:3


def open_broker(folder: Path, limits: Limits = LIMITS, clock: Clock = MACHINE, **settings: Any) -> BrokerController:
    """Return a broker over the folder that neither listens nor has timers. Raises StoreError."""
    settings = {"segment_bytes": 20_000, "metrics_port": None} | settings
    return BrokerController(BrokerConfig(data_dir=folder, address=ADDRESS, **settings), clock=clock, limits=limits)


def put(broker: BrokerController, queue: ConsumeQueue, body: bytes, properties: bytes = b"", code: int = 0) -> Place:
    """Store a message; return when the operating system has it. Raises StoreFull."""
    with broker.appender.batch() as now_ms:
        _, offset = broker.appender.stage(queue, body, properties, code, 0, 0, now_ms, HOST)
    return queue.topic, queue.queue_id, offset


def read_all(broker: BrokerController, *, whole: bool = False) -> dict[Place, bytes]:
    """Return the body, or the whole record, of every message that consumers of all queues would get."""
    found: dict[Place, bytes] = {}
    for queue in list(broker.store.queues.values()):
        offset = queue.begin
        while offset < queue.next:
            fetched = broker.store.fetch(queue, offset, 32)
            for piece in fetched.pieces:
                at = 0
                for record in decode_records(bytes(piece)):
                    content = bytes(piece[at : at + record.size]) if whole else record.body
                    found[record.topic, record.queue_id, record.queue_offset] = content
                    at += record.size
            if fetched.next_offset <= offset:
                raise RuntimeError("a fetch does not advance")
            offset = fetched.next_offset
    return found


def entries(broker: BrokerController) -> dict[Place, tuple[int, int]]:
    """Return the position and the size of every message, by the indexes."""
    found: dict[Place, tuple[int, int]] = {}
    for queue in broker.store.queues.values():
        for offset in range(queue.begin, queue.next):
            position, size, _ = queue.entry(offset)
            found[queue.topic, queue.queue_id, offset] = (position, size)
    return found


def is_reported(broker: BrokerController, place: Place, position: int, size: int) -> bool:
    """True if the loss of a message was reported: as lost, as damaged, or by a damaged or torn part of the log."""
    topic, queue, offset = place
    found = broker.recovered
    if any((lost.topic, lost.queue_id) == (topic, queue) and lost.begin <= offset < lost.end for lost in found.lost):
        return True
    areas = [*found.damage, (broker.store.end, found.torn_bytes)]
    return place in broker.store.damaged or any(at < position + size and position < at + end for at, end in areas)


def differences(expected: Mapping[Place, bytes], found: Mapping[Place, bytes]) -> tuple[list[Place], list[Place]]:
    """Return the missing messages, and those that nobody sent or that have another body."""
    missing = [place for place in expected if place not in found]
    return missing, [place for place, body in found.items() if expected.get(place) != body]


@dataclass
class Damaged:
    """A damaged copy of a folder, over which brokers start; `records` has the position and the record of each message that
    was stored, and `whole` the places of those whose bytes are still there."""

    folder: Path
    records: Mapping[Place, tuple[int, bytes]]
    what: str
    outcome: Outcome
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        segments = {int(path.name): path.read_bytes() for path in (self.folder / "commitlog").iterdir()}
        self.whole: set[Place] = set()
        for place, (position, record) in self.records.items():
            start = max((start for start in segments if start <= position), default=None)
            if start is not None and segments[start][position - start :][: len(record)] == record:
                self.whole.add(place)

    def fault(self, text: str) -> None:
        self.outcome.fault(f"{self.what}: {text}")

    def start(self) -> BrokerController:
        """Raises StoreError."""
        began_s = time.process_time()
        broker = open_broker(self.folder, **self.settings)
        took_s = time.process_time() - began_s
        self.outcome.highest("slowest_s", took_s)
        if took_s > MAX_START_S:
            self.fault(f"a start took {took_s:.0f} s")
        return broker

    def differences(self, found: Mapping[Place, bytes]) -> tuple[list[Place], list[Place]]:
        return differences({place: record for place, (_, record) in self.records.items()}, found)

    def start_again(self, broker: BrokerController, found: Mapping[Place, bytes]) -> None:
        """Stop a broker, and start another one, which must find the same messages, and nothing to repair."""
        broker.persist()
        broker.store.close()
        again = open_broker(self.folder, **self.settings)
        if any(differences(found, read_all(again, whole=True))):
            self.fault("other messages after a second start")
        if again.recovered.rebuilt:
            self.fault("a whole index is rebuilt by a second start")
        again.store.close()


# Work


class PowerCut(BaseException):
    """Nothing runs after this."""


KINDS = (
    *("send",) * 4, "late", "deliver", "persist", "save", "save", "topic", "expire", "commit", "make", "make", "delete"
)  # fmt: skip
SHORT_LIVED = ("a", "b")  # topics that are made and deleted again and again


class Work:
    """What is done with a broker, and what it has acknowledged. Saving, expiry and the removal of topics run in pieces
    between other steps, as in a broker; a job that waits for the device is in one line with the syncs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sent: dict[Place, bytes] = {}
        self.acknowledged: dict[Place, bytes] = {}
        self.late: dict[bytes, Place] = {}
        self.topics: set[str] = set()
        self.deleted: set[str] = set()
        self.deletions = 0
        self._steps = 0
        self._jobs: deque[Coroutine[Any, Any, object]] = deque()
        self._waits_for_device = False

    def step(self, broker: BrokerController, chance: random.Random) -> None:
        """Raises PowerCut, StoreError."""
        number, kind = self._steps, chance.choice(KINDS)
        self._steps += 1
        for _ in range(chance.choice((0, 1, 1, 3, 20))):
            self._continue()
        if kind == "send":
            self._send(broker, chance, number)
        elif kind == "save":
            self.begin(broker.saving())
        elif kind == "make":
            self._make_or_fill(broker, chance.choice(SHORT_LIVED), b"%d" % number)
        elif kind == "delete":
            self._delete(broker, chance.choice(SHORT_LIVED))
        elif kind == "late":
            body = b"late-%d" % number
            place = put(broker, broker.delays.queue(1), body, LATE, 1)
            self.sent[place] = body
            self.sync(broker, lambda: (self.acknowledged.update({place: body}), self.late.update({body: place})))
        elif kind == "deliver":
            broker.delays._deliver_due(1)
        elif kind == "persist":
            while self._jobs:
                self._continue()
            broker.persist()
        elif kind == "topic":
            name = f"topic-{number}"
            broker.topics.put(TopicConfig(name, 2, 2), broker.store.end)
            self.sync(broker, lambda: self.topics.add(name))
        elif kind == "expire":
            self.begin(broker.store.expiring(Retention(0, 200_000)))
        else:
            broker.offsets.put("g", "t", 0, broker.store.queue("t", 0).next)

    def _send(self, broker: BrokerController, chance: random.Random, number: int) -> None:
        for part in range(chance.randrange(1, 6)):
            body = b"%d-%d-" % (number, part) + chance.randbytes(chance.randrange(600))
            self.sent[put(broker, broker.store.queue("t", chance.randrange(3)), body)] = body
        if chance.random() < 0.8:
            self.sync(broker, lambda: self.acknowledged.update(self.sent))

    def _make_or_fill(self, broker: BrokerController, name: str, body: bytes) -> None:
        if broker.topics.get(name) is None:
            self.deleted.discard(name)
            broker.topics.put(TopicConfig(name, 1, 1), broker.store.end)
            self.sync(broker, lambda: self.topics.add(name))
        place = put(broker, broker.store.queue(name, 0), body)
        self.sent[place] = body
        self.sync(broker, lambda: self.acknowledged.update({place: body}))

    def _delete(self, broker: BrokerController, name: str) -> None:
        if broker.topics.get(name) is None:
            return
        self.topics.discard(name)
        for table in (self.sent, self.acknowledged):
            for place in [place for place in table if place[0] == name]:
                del table[place]
        broker.topics.delete(name, broker.store.end)
        self.begin(broker.store.deleting(name))
        self.sync(broker, lambda: self.deleted.add(name))
        self.deletions += 1

    # Jobs and the device

    def begin(self, job: Job[Any]) -> None:
        self._jobs.append(do(job, self._make))

    def _continue(self) -> None:
        """Do the next piece of the oldest job."""
        if self._jobs:
            try:
                self._jobs[0].send(None)
            except StopIteration:
                del self._jobs[0]
            except BaseException:  # a PowerCut, or a StoreError
                del self._jobs[0]
                raise

    async def _make(self, call: Call | None) -> None:
        self._waits_for_device = call is not None
        await _Turn()
        self._waits_for_device = False
        if call is not None:
            call()

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        """Stand for the thread that waits for the device, which makes one call after the other."""
        if self._waits_for_device:
            with suppress(StoreError):  # of the job, which is over then
                self._continue()
        done: Future[object] = Future()
        try:
            done.set_result(function(*arguments))
        except BaseException as error:  # a PowerCut, too
            done.set_exception(error)
        return done

    def sync(self, broker: BrokerController, acknowledge: Callable[[], object]) -> None:
        """Call `acknowledge` once what was written is kept as well as the settings want. Raises PowerCut."""
        flusher = broker.flusher
        if flusher is None:
            acknowledge()
            return
        outcomes: list[bool] = []

        async def flushed() -> None:
            flusher.after_sync(lambda: outcomes.append(True), lambda: outcomes.append(False))
            await flusher.drain()

        self.loop.run_until_complete(flushed())
        if not outcomes:
            raise PowerCut
        if outcomes[0]:
            acknowledge()

    def end(self) -> None:
        for job in self._jobs:
            job.close()
        self._jobs.clear()

    def counts(self, found: Mapping[Place, bytes]) -> dict[str, int]:
        cut_off = sum(place not in found for place in self.sent)
        return {"deleted": self.deletions, "acknowledged": len(self.acknowledged), "cut_off": cut_off}

    def faults(self, broker: BrokerController) -> Iterator[str]:
        """Compare what a broker has after its next start with what was acknowledged."""
        found = read_all(broker)
        delivered = {body for (topic, queue, _), body in found.items() if (topic, queue) == ("t", 3)}
        if differences(self.acknowledged, found)[0]:
            yield "an acknowledged message is gone"
        if any(body != self.sent[place] for place, body in found.items() if place in self.sent):
            yield "a message is not as it was sent"
        progress = broker.delays.progress.get(1, 0)
        if any(place[2] < progress and body not in delivered for body, place in self.late.items()):
            yield "a delayed message was neither delivered nor waits"
        if any(broker.topics.get(name) is None for name in self.topics):
            yield "an acknowledged topic is gone"
        for name in self.deleted:
            if broker.topics.get(name) is not None or any(topic == name for topic, _ in broker.store.queues):
                yield "a deleted topic is there again"


class _Turn:
    """Something else is done meanwhile."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class _Later(Clock):
    """The machine's clock, after all times that messages were sent to."""

    def time_s(self) -> float:
        return super().time_s() + 7200


class Timed:
    """Messages that are sent to a time: acknowledged ones are delivered, and recalled ones never."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._due_ms: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self._maybe_recalled: set[bytes] = set()
        self.recalled: set[bytes] = set()

    def step(self, broker: BrokerController, chance: random.Random) -> None:
        kind = chance.choice(("send", "send", "deliver", "recall", "carry", "save"))
        timers = broker.timers
        if kind == "send":
            self._send(broker, b"timed-%d" % len(self._due_ms), chance.choice((-5, -5, 3_600_000)))
        elif kind == "deliver":
            timers._deliver_due()
        elif kind == "carry":
            self._work.begin(timers.carrying(broker.store.end))
        elif kind == "save":
            self._work.begin(timers.saving_recalled())
        elif self._due_ms:
            self._recall(broker, chance.choice(sorted(self._due_ms)))

    def counts(self) -> dict[str, int]:
        return {"timed": len(self.acknowledged), "recalled": len(self.recalled)}

    def _send(self, broker: BrokerController, body: bytes, delay_ms: int) -> None:
        due_ms = self._due_ms[body] = broker.clock.time_ms() + delay_ms
        text = waiting_text(f"UNIQ_KEY\x01{body.decode()}", due_ms, "t", 3)
        put(broker, broker.timers.queue, body, text.encode(), due_ms)
        broker.timers.schedule_stored()
        self._work.sync(broker, lambda: self.acknowledged.add(body))

    def _recall(self, broker: BrokerController, body: bytes) -> None:
        self._maybe_recalled.add(body)
        work = broker.timers.recalling("t", self._due_ms[body], body.decode())
        try:
            while True:
                next(work)
        except StopIteration as end:
            if end.value:
                self._work.sync(broker, lambda: self.recalled.add(body))

    def faults(self, broker: BrokerController) -> Iterator[str]:
        """Deliver all waiting messages of a broker that was started again."""
        timers = broker.timers
        timers._clock = _Later()
        while (wait_s := timers.wait_s()) is not None and wait_s <= 0:
            timers._deliver_due()
        came = {body for (topic, queue, _), body in read_all(broker).items() if (topic, queue) == ("t", 3)}
        if self.acknowledged - self._maybe_recalled - came:
            yield "a message that was sent to a time neither came nor waits"
        if self.recalled & came:
            yield "a message that was recalled came"


GROUP, TOPIC = "sharing", "t"
INVISIBLE_MS = 600_000


class Popped:
    """Messages that clients share: an acknowledged one is never delivered again, one in flight is delivered to nobody else,
    and every other one is delivered."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._in_flight: dict[Place, str] = {}  # handles
        self.kept: dict[Place, str] = {}  # handles of which the disk knows
        self._asked: set[Place] = set()  # acknowledged, perhaps
        self.done: set[Place] = set()  # acknowledged, and the broker has confirmed it

    def step(self, broker: BrokerController, chance: random.Random) -> None:
        """Raises PowerCut."""
        kind = chance.choice(("pop", "pop", "pop", "ack", "ack", "nack", "later", "forget"))
        self._work.loop.run_until_complete(self._step(broker, chance, kind))
        if kind == "ack" or chance.random() < 0.7:
            self._work.sync(broker, lambda: self.kept.update(self._in_flight))

    async def _step(self, broker: BrokerController, chance: random.Random, kind: str) -> None:
        """Do what happens in one event-loop iteration of the broker."""
        held = sorted(self._in_flight)
        if kind == "pop":
            self._in_flight |= _pop(broker, chance.choice((1, 3, 8)))
        elif kind == "ack":
            self._ack(broker, chance.sample(held, len(held) // 2))
        else:
            for place in held[:1]:
                handle = self._free(place)
                if kind != "forget":
                    broker.pops.change(GROUP, TOPIC, handle, 0 if kind == "nack" else INVISIBLE_MS)
        broker.pops._writer.write()  # the end of the iteration, in which a power cut is raised

    def _ack(self, broker: BrokerController, places: list[Place]) -> None:
        handles = [self._free(place) for place in places]
        self._asked.update(places)

        def told(outcomes: Any) -> None:
            self.done.update(at for at, outcome in zip(places, outcomes, strict=True) if outcome is AckStatus.DONE)

        broker.pops.ack(GROUP, TOPIC, handles, told)

    def _free(self, place: Place) -> str:
        """Return the handle of a message that may be delivered to others from now on."""
        self.kept.pop(place, None)
        return self._in_flight.pop(place)

    def end(self, broker: BrokerController) -> None:
        """Stop the timers of a broker whose machine is off."""
        broker.pops._deadlines.stop()

    def counts(self) -> dict[str, int]:
        return {"popped": len(self.done), "in_flight": len(self.kept)}

    def faults(self, broker: BrokerController) -> list[str]:
        """Pop everything from a broker that was started again, whose clock is advanced."""
        found: list[str] = []
        self._work.loop.run_until_complete(self._check(broker, found))
        return found

    async def _check(self, broker: BrokerController, found: list[str]) -> None:
        wanted = {place for place in read_all(broker) if place[0] == TOPIC} - self.done - self._asked
        came = self._drain(broker, found)
        if came & self.kept.keys():
            found.append("a message in flight is delivered to another client")
        kept = {at: handle for at, handle in self.kept.items() if at in wanted}

        def told(outcomes: Any) -> None:
            if any(outcome is not AckStatus.DONE for outcome in outcomes):
                found.append("a restart has made a handle void")

        broker.pops.ack(GROUP, TOPIC, list(kept.values()), told)
        broker.pops._writer.write()
        assert isinstance(broker.clock, MovableClock)
        broker.clock.advance(2 * INVISIBLE_MS / 1000)
        came |= self._drain(broker, found)
        if wanted - came - kept.keys():
            found.append("a message that nobody has acknowledged is delivered to nobody")

    def _drain(self, broker: BrokerController, found: list[str]) -> set[Place]:
        came: set[Place] = set()
        while places := _pop(broker, 32).keys():
            if places & self.done:
                found.append("an acknowledged message is delivered again")
            if places & came:
                found.append("a message is delivered to two clients")
            came |= places
            broker.pops._writer.write()
        return came


class _Receive(Receive):
    """A receive that does not wait."""

    def respond(self, result: PopResult) -> None:
        raise AssertionError(f"a receive that does not wait got {result}")


def _pop(broker: BrokerController, count: int) -> dict[Place, str]:
    """Return the handles of messages."""
    request = PopRequest(GROUP, TOPIC, PopClient("c"), count, INVISIBLE_MS, from_first=True)
    result = broker.pops.receive(_Receive(request))
    assert result is not None and result.why in (Why.FOUND, Why.NOTHING_NEW), result
    return {_place(message): message.handle for message in result.messages}


def _place(message: Delivered) -> Place:
    record = decode_record(message.record)
    return record.topic, record.queue_id, record.queue_offset
