"""Bytes that cost more than they should: each parser, and each request code, with inputs that are searched for.

An input is something at the begin, something again and again, and something at the end. Those that cost most by their length
are kept and changed. A fault is: an input whose processor time grows faster than its length, one that costs more than a
microsecond or two a byte beside what any request costs, a request whose longest piece holds the others up, memory far beyond
the input's length, long work of one client side by side, and an exception that nobody expects.

Processor time is the thread's. It is measured again before it counts: the machine may be busy.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import uvloop
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import LIMITS, BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol.codes import RequestCode, request_name
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.message import BatchEntry, encode_batch

from ._fuzz import CODES, Fuzz
from ._subjects import MAX_TEXT_BYTES, PARSERS, PIECES, REFUSALS, Subject
from .common import Limit, Outcome
from .frames import Peer, faults_of

SMALL = 8  # the larger of the two inputs that are compared is so much longer
GROWTH: Final = 4.0  # beyond linear, that is a fault: quadratic work grows by eight
NOISE_S: Final = 0.03  # less is not compared
TRIFLE_S: Final = 0.001  # that any input may cost, and no search follows
BASE_S: Final = 0.06  # any input may cost this, however short
BYTE_S: Final = 3e-6  # and each byte this much more
PIECE_S: Final = 0.06  # for a piece of a request, before others have their turn
BASE_BYTES: Final = 8 << 20  # memory
BYTE_BYTES: Final = 64  # for each byte
MEMORY_EVERY: Final = 50  # tries; and each input that is the worst so far
KEPT: Final = 4  # worst inputs of a subject
NESTED: Final = b"\xfe"  # an end that stands for as many closing parentheses as are open
DEEP: Final = 900  # Python's own parsers give up beyond
_CLOSING: Final = {ord("["): ord("]"), ord("{"): ord("}"), ord("("): ord(")")}
COLLECT_EVERY: Final = 200  # tries: who happens to be measured while Python collects garbage is not slow
AGAIN: Final = 3  # measurements before something is a fault
BROKER_TRIES: Final = 400  # requests to one broker
PARSER_SHARE: Final = 0.7
SEARCHES: Final = 20  # by one client at once


class Input(NamedTuple):
    begin: bytes
    unit: bytes
    end: bytes

    def of(self, size: int) -> bytes:
        """Brackets that the unit opens are closed as often; where the end says so, only as often as a deep reader needs."""
        closed, is_nested = b"", self.end == NESTED
        if is_nested:
            closed = bytes(_CLOSING[byte] for byte in reversed(self.unit) if byte in _CLOSING)
            size = min(size, DEEP * (len(self.unit) + len(closed)))
        times = max((size - len(self.begin) - len(self.end)) // max(len(self.unit) + len(closed), 1), 1)
        return self.begin + self.unit * times + (closed * times if is_nested else self.end)


class Worst(NamedTuple):
    cost: float  # seconds for a byte
    input: Input


class Inputs:
    """Those that cost a subject most so far, and others like them."""

    def __init__(
        self, chance: random.Random, own: Sequence[bytes] = (), known: Sequence[tuple[bytes, bytes, bytes]] = ()
    ) -> None:
        self._chance = chance
        self._own = own
        self._known = [Input(*parts) for parts in known]
        self.worst: list[Worst] = []

    def next(self) -> Input:
        if self._known:
            return self._known.pop(0)
        if not self.worst or self._chance.random() < 0.3:
            end = NESTED if self._chance.random() < 0.2 else self._part(1)
            return Input(self._part(2), self._part(2) or b"a", end)
        kept = self._chance.choice(self.worst).input
        field = self._chance.randrange(3)
        if self._chance.random() < 0.3:  # something in the middle of a part
            old = kept[field]
            at = self._chance.randrange(len(old) + 1)
            return self._with(kept, field, old[:at] + self._chance.choice(PIECES) + old[at:])
        return self._with(kept, field, self._part(2))

    def _with(self, kept: Input, field: int, part: bytes) -> Input:
        parts = [*kept]
        parts[field] = part[:200]
        return Input(*parts)._replace(unit=parts[1] or b"a")

    def _part(self, most: int) -> bytes:
        pieces = self._own if self._own and self._chance.random() < 0.8 else PIECES
        return b"".join(self._chance.choices(pieces, k=self._chance.randrange(most + 1)))

    def cost(self, cost: float, given: Input) -> bool:
        """Whether nothing cost more before."""
        self.worst = sorted([*self.worst, Worst(cost, given)], reverse=True)[:KEPT]
        return self.worst[0].input is given


class Meter:
    """How long pieces of work take, in processor time of this thread."""

    def __init__(self) -> None:
        self.longest_s = self.total_s = 0.0

    @contextmanager
    def piece(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            took_s = time.thread_time() - began_s
            self.total_s += took_s
            self.longest_s = max(self.longest_s, took_s)


class Search:
    """Looks for costs and keeps the worst of each subject."""

    def __init__(self, outcome: Outcome, seed: int) -> None:
        self._outcome = outcome
        self._chance = random.Random(seed)
        self._inputs = {name: Inputs(self._chance, subject.pieces, subject.known) for name, subject in PARSERS.items()}
        self._inputs |= {request_name(code): Inputs(self._chance) for code in CODES}
        self._fuzz = Fuzz(seed)

    # Parsers

    def parse(self, number: int) -> None:
        names = list(PARSERS)
        name = names[number % len(names)]
        subject, inputs = PARSERS[name], self._inputs[name]
        given = inputs.next()
        size = self._chance.choice((subject.most, subject.most // 4, 2000))
        large = given.of(size)
        took_s = self._time(name, subject, large)
        is_worst = inputs.cost(max(took_s - TRIFLE_S, 0) / len(large), given)
        if took_s > NOISE_S:
            self._compare(name, subject, given, size)
        if is_worst or number % MEMORY_EVERY == 0:
            self._weigh(name, subject, large)

    def _time(self, name: str, subject: Subject, data: bytes) -> float:
        began_s = time.thread_time()
        try:
            subject.run(data)
        except REFUSALS:
            pass
        except Exception as error:
            self._outcome.fault(f"{name}: {type(error).__name__} leaves it: {str(error)[:80]}")
        return time.thread_time() - began_s

    def _compare(self, name: str, subject: Subject, given: Input, size: int) -> None:
        """Time is at its least when nobody disturbs."""
        large, small = given.of(size), given.of(size // SMALL)
        large_s = min(self._time(name, subject, large) for _ in range(AGAIN))
        small_s = min(self._time(name, subject, small) for _ in range(AGAIN))
        if large_s > BASE_S + BYTE_S * len(large):
            self._outcome.fault(f"{name}: {len(large)} bytes cost more than {BYTE_S * 1e6:g} us each")
        elif large_s > NOISE_S and large_s / max(small_s, 1e-4) > GROWTH * len(large) / len(small):
            self._outcome.fault(f"{name}: time grows faster than the length")

    def _weigh(self, name: str, subject: Subject, data: bytes) -> None:
        tracemalloc.start()
        try:
            self._time(name, subject, data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak > BASE_BYTES + BYTE_BYTES * len(data):
            self._outcome.fault(f"{name}: more memory than {BASE_BYTES >> 20} MiB and {BYTE_BYTES} bytes for each")

    # Requests

    async def ask(self, server: Server, broker: BrokerController, number: int) -> None:
        code = CODES[number % len(CODES)]
        name = request_name(code)
        inputs = self._inputs[name]
        given = inputs.next()
        data = given.of(self._chance.choice((MAX_TEXT_BYTES, 8000)))
        frame = self._grown(code, data)
        try:
            raw = encode(frame)
        except Exception:  # our encoder does not write it
            return
        meter = await self._measured(server, broker, raw, name)
        inputs.cost(max(meter.total_s - TRIFLE_S, 0) / len(raw), given)
        if self._is_much(meter, len(raw)):
            for _ in range(AGAIN - 1):
                again = await self._measured(server, broker, raw, name)
                meter.longest_s = min(meter.longest_s, again.longest_s)
                meter.total_s = min(meter.total_s, again.total_s)
            if meter.longest_s > PIECE_S:
                self._outcome.fault(f"{name}: a piece of it takes more than {PIECE_S * 1000:.0f} ms")
            elif self._is_much(meter, len(raw)):
                self._outcome.fault(f"{name}: {BYTE_S * 1e6:g} us a byte, and more")

    def _is_much(self, meter: Meter, size: int) -> bool:
        return meter.longest_s > PIECE_S or meter.total_s > BASE_S + BYTE_S * size

    def _grown(self, code: int, data: bytes) -> Frame:
        """A request with the data in one of its fields, or as its body."""
        frame = self._fuzz.request(1)._replace(code=code, flag=0)
        if self._chance.random() < 0.5:
            return frame._replace(body=data)
        texts = [name for name, value in frame.ext.items() if isinstance(value, str)]
        field = self._chance.choice(texts or ["x"])
        return frame._replace(ext={**frame.ext, field: data.decode(errors="replace")})

    async def _measured(self, server: Server, broker: BrokerController, raw: bytes, name: str) -> Meter:
        meter = Meter()
        peer = Peer(server, 7)
        with meter.piece():
            peer.send(raw)
        await self._finish(broker, meter)
        peer.hang_up()
        await asyncio.sleep(0)
        return meter

    async def _finish(self, broker: BrokerController, meter: Meter) -> None:
        while broker.turns.waiting:
            with meter.piece():
                await asyncio.sleep(0)

    async def stored(self, server: Server, broker: BrokerController, number: int) -> None:
        """Messages of clients that others search for, with bodies and properties made for that."""
        given = self._inputs[request_name(RequestCode.QUERY_MESSAGE)].next() if number % 2 else Input(b"", b"k", b"")
        body, topic = given.of(40_000), f"q{number}"
        put = Peer(server, 8)
        put.send(_encoded(RequestCode.UPDATE_AND_CREATE_TOPIC, topic=topic, readQueueNums=1, writeQueueNums=1, perm=6))
        for _ in range(8):
            ext: dict[str, str | int | bool] = {
                "a": "p",
                "b": topic,
                "c": "TBW102",
                "d": 1,
                "e": 0,
                "f": 0,
                "g": 1,
                "h": 0,
                "i": "KEYS\x01x",
            }
            put.send(encode(Frame(RequestCode.SEND_MESSAGE_V2, 1, ext, body)))
        query = _encoded(
            RequestCode.QUERY_MESSAGE, topic=topic, key="k", maxNum=64, beginTimestamp=0, endTimestamp=2**62
        )
        meter = await self._measured(server, broker, query, "QUERY_MESSAGE")
        if meter.total_s > BASE_S + BYTE_S * 8 * len(body) / 10:
            again = await self._measured(server, broker, query, "QUERY_MESSAGE")
            if again.total_s > BASE_S + BYTE_S * 8 * len(body) / 10:
                self._outcome.fault("QUERY_MESSAGE: what is in bodies makes a search take longer")
        put.hang_up()

    async def searched(self, server: Server, broker: BrokerController) -> None:
        """Searches that take several turns, many of one client."""
        peer = Peer(server, 9)
        peer.send(
            _encoded(RequestCode.UPDATE_AND_CREATE_TOPIC, topic="many", readQueueNums=1, writeQueueNums=1, perm=6)
        )
        batch = encode_batch([BatchEntry(0, b"x", "")] * 4000)
        ext = {
            "a": "p",
            "b": "many",
            "c": "TBW102",
            "d": "1",
            "e": "0",
            "f": "0",
            "g": "1",
            "h": "0",
            "i": "",
            "m": "true",
        }
        for _ in range(5):
            peer.send(encode(Frame(RequestCode.SEND_BATCH_MESSAGE, 1, ext, batch)))
            await self._finish(broker, Meter())
        query = _encoded(
            RequestCode.QUERY_MESSAGE, topic="many", key="none", maxNum=64, beginTimestamp=0, endTimestamp=2**62
        )
        peer.send(query * SEARCHES)
        most = 0
        while peer.connection.kept or broker.turns.waiting:
            most = max(most, broker.turns.waiting)
            await asyncio.sleep(0)
        if most > LIMITS.max_searches:
            self._outcome.fault("QUERY_MESSAGE: one client has many searches side by side")
        peer.hang_up()

    def figures(self) -> dict[str, object]:
        """The worst of each subject: nanoseconds for a byte, and the input."""
        found = {name: inputs.worst[0] for name, inputs in self._inputs.items() if inputs.worst}
        worst = sorted(found.items(), key=lambda item: -item[1].cost)
        return {
            "worst_ns_per_byte": {name: round(item.cost * 1e9) for name, item in worst},
            "worst_inputs": {name: repr(tuple(item.input))[:120] for name, item in worst[:10]},
        }


def _encoded(code: RequestCode, **ext: str | int) -> bytes:
    return encode(Frame(code, 1, {name: str(value) for name, value in ext.items()}))


class _Serving:
    """A new broker after some hundred requests: what they have made there costs all that follow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    async def serve(self, search: Search, outcome: Outcome, numbers: Iterator[int]) -> bool:
        """Whether there is more to try."""
        self._count += 1
        config = BrokerConfig(self._folder / f"data-{self._count}", "127.0.0.1:9", vip_channel=False)
        routes = Routes()
        broker = BrokerController(config, routes)
        asked = 0
        async with Server(Listening("127.0.0.1", 0), broker=broker, routes=routes) as server:
            server.reports.is_due = lambda *_: True  # type: ignore[method-assign]
            await search.searched(server, broker)
            for number in numbers:
                outcome.tried += 1
                if number % COLLECT_EVERY == 0:
                    gc.collect()
                if number % 10 < PARSER_SHARE * 10:
                    search.parse(number)
                    continue
                asked += 1
                if asked % 20 == 1:
                    await search.stored(server, broker, number)
                else:
                    await search.ask(server, broker, asked)
                if asked >= BROKER_TRIES:
                    return True
        return False


async def _run(limit: Limit, search: Search, outcome: Outcome, folder: Path) -> None:
    numbers, serving = iter(limit), _Serving(folder)
    while await serving.serve(search, outcome, numbers):
        pass


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    before = structlog.get_config()
    structlog.configure(processors=[faults_of(outcome)], logger_factory=structlog.ReturnLoggerFactory())
    search = Search(outcome, seed)
    gc.disable()
    try:
        uvloop.run(_run(limit, search, outcome, folder))
    finally:
        gc.enable()
        structlog.configure(**before)
    outcome.figures.update(search.figures())
    print(f"worst: {list(outcome.figures['worst_ns_per_byte'].items())[:3]}", file=sys.stderr)
    return outcome
