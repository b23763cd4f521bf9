"""Bytes that cost more than they should: each parser, and each request code, with inputs that are searched for.

An input is a start, a part that is repeated, and an end. Those that cost most by their length are kept and changed. A fault
is: an input whose processor time grows faster than its length, one that costs more than some microseconds a byte beside the
cost of any request, a request whose longest piece of work blocks others, memory far above the input's length, and an
unexpected exception.

Processor time is the thread's. It is measured again before it counts, because the machine may be busy.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rocketlet.broker.messages.filters import FilterError, parse_filter
from rocketlet.client.message import Message
from rocketlet.command.tools.frames import body_fields
from rocketlet.console.message_text import body_of, preview
from rocketlet.protocol import bodies, group_bodies, properties
from rocketlet.protocol import message as records
from rocketlet.protocol.bodies import BodyError, decode_registration, finish
from rocketlet.protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB, request_name
from rocketlet.protocol.frame import Frame, FrameError, FrameReader, encode
from rocketlet.protocol.message import MessageError, Record, decode_record, encode_record
from rocketlet.protocol.names import IllegalName, Queue, SubscriptionError, parse_subscription

from tests.support.peers import Peer

from .common import Limit, Outcome, Serving, config_in, serving
from .corpus import CODES, Frames

SMALL = 8  # the larger of the two inputs that are compared is longer by this factor
GROWTH: Final = 4.0  # above linear growth, that is a fault: quadratic work grows by eight
NOISE_S: Final = 0.03  # less is not compared
TRIFLE_S: Final = 0.001  # any input may cost this, and no search follows
BASE_S: Final = 0.06  # any input may cost this, however short
BYTE_S: Final = 3e-6  # and each byte this much more
PIECE_S: Final = 0.06  # for a piece of a request, before requests of others are served
BASE_BYTES: Final = 8 << 20  # memory
BYTE_BYTES: Final = 64  # for each byte
MEMORY_EVERY: Final = 50  # tries; memory is also measured for each input that is the worst so far
KEPT: Final = 4  # worst inputs of a subject
NESTED: Final = b"\xfe"  # an end that stands for closing parentheses, as many as are open
DEEP: Final = 900  # Python's own parsers refuse deeper nesting
COLLECT_EVERY: Final = 200  # tries, because an input that is measured while Python collects garbage is not slow
REPEATS: Final = 3  # measurements before something is a fault
BROKER_REQUESTS: Final = 400  # to one broker; what they create there costs all that follow
PARSER_SHARE: Final = 0.7
REFUSALS: Final = (FilterError, FrameError, MessageError, BodyError, SubscriptionError, IllegalName, UnicodeError)
"""How invalid bytes are refused. Any other exception is a fault."""
MAX_TEXT_BYTES: Final = 32_000  # for properties and for expressions
MAX_BODY_BYTES: Final = 64_000
_CLOSING: Final = {ord("["): ord("]"), ord("{"): ord("}"), ord("("): ord(")")}

# Parsers: each takes bytes of an attacker, and does with them what a broker, console or command does.

PIECES: Final = (
    *(b"(", b")", b"STRUCT(", b"NOT ", b"NOT (", b"CASE WHEN ", b"a = 1 OR ", b"a = 1 AND ", b"'x', ", b"a IN ("),
    *(b"'", b"''", b'"', b"--", b"/*", b"a", b" ", b"\t", b"1", b"9", b"0x", b"0xf", b"0x1p", b".", b"1.", b"e1"),
    *(b"-", b"+", b"||", b"A || ", b"*", b"$", b"_", b"\x01", b"\x02", b"a\x01b\x02", b"\x02\x03", b"KEYS\x01k"),
    *(b"k", b"k ", b"TAGS\x01", b"DELAY\x01", b"UNIQ_KEY\x01k\x02", b"[", b"]", b"{", b"}", b'{"a":', b'"a":1,'),
    *(b'"a",', b"{1:", b"x:", b",", b"\\", b"\\u00e9", b"null,", b"[1],", b"1e9,", b'{"groupName":"g"},'),
    *(b'{"consumerDataSet":[', b'{"mqSet":[', b'{"queueId":1},', b'{"clientID":"c","consumerDataSet":['),
    *(b"\xda\xa3 \xa7", b"\x00\x00\x01\x00\xda\xa3 \xa7", b"\x00", b"\xff", b"\x81", b"\x91", b"\xdc\xff\xff"),
    *(b"\0\0\0\x17" + bytes(12), b"\0\0\0\x16" + bytes(18), b"\xc3\xa9", b"\xc4\xb0", b"\n", b"\r\n", b"%", b"/"),
    *(b":", b"=", b"<", b">"),
)  # fmt: skip
"""Bytes that mean something to some parser."""
_NUMBERS: Final = (b"1", b"9", b"0", b"0x", b"0x1p", b"0xf", b".", b"e1", b"-", b"+", b" ", b"\t", b"a", b"d", b"NaN")
_FILTER: Final = (
    *(b"(", b"NOT (", b"a = 1 OR ", b"a = 1 AND ", b"'x', ", b"a IN (", b"'", b"--", b"/*", b"1", b"1.", b"a", b" ", b"e"),
)  # fmt: skip
_PAIRS: Final = (b"a", b"\x01", b"\x02", b"a\x01b\x02", b"KEYS\x01", b"TAGS\x01", b"UNIQ_KEY\x01", b"\x02\x03")
_JSON: Final = (
    *(b"[", b"{", b"{1:", b'"', b'"a":', b",", b"1", b"-", b"x:", b"\\", b"null", b'{"clientID":"c","consumerDataSet":['),
)  # fmt: skip

_HOST = bytes(8)
_SHARED = records.Shared(b"\x01t", 0, 0, 0, _HOST, 0, _HOST, 0)
_FILTERS = [
    parse_filter(text) for text in ("a > 1.5", "a > 1", "a = TRUE", "a = 2.5", "a IN ('x', 'y')", "a BETWEEN 1 AND 2")
]
_INFLATED = 16 << 20


class Parser(NamedTuple):
    """A parser that takes up to `most` bytes; `pieces` mean something to it."""

    run: Callable[[bytes], object]
    most: int
    pieces: Sequence[bytes] = ()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _frame(kind: int, data: bytes) -> object:
    head = (kind << 24 | len(data)).to_bytes(4, "big") + data
    return FrameReader().feed(len(head).to_bytes(4, "big") + head)


def _values(data: bytes) -> object:
    text = "a\x01" + _text(data).replace("\x02", " ")
    return [found(text) for found in _FILTERS]


def _names(data: bytes) -> object:
    text = _text(data)
    return [properties.find(text, name) for name in (properties.KEYS, properties.TAGS, properties.UNIQUE_KEY)]


def _record(data: bytes, *, is_packed: bool) -> Record:
    body, flag = data, 0
    if is_packed:
        body, flag = zlib.compress(data.ljust(_INFLATED, b"\0"), 1), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
    record = encode_record(0, 0, 0, 0, flag, 0, _HOST, 0, _HOST, 0, 0, body, b"\x01t", b"")
    return decode_record(record)


_BOMB = _record(b"bomb", is_packed=True)


def _shown(record: Record) -> object:
    message = Message(record, Queue("t", "b", 0), "t")
    return body_of(message), preview(message), body_fields(message.record, 800)


PARSERS: Final[dict[str, Parser]] = {
    "filter": Parser(lambda data: parse_filter(_text(data)), MAX_TEXT_BYTES, _FILTER),
    "value that a filter compares": Parser(_values, MAX_TEXT_BYTES, _NUMBERS),
    "tag expression": Parser(lambda data: parse_subscription("t", _text(data)), MAX_TEXT_BYTES),
    "properties": Parser(lambda data: properties.decode(_text(data)), MAX_TEXT_BYTES, _PAIRS),
    "names of properties": Parser(_names, MAX_TEXT_BYTES),
    "properties without one": Parser(lambda data: properties.without(_text(data), "a"), MAX_TEXT_BYTES, _PAIRS),
    "properties of a dead letter": Parser(lambda data: properties.shortened(_text(data), 1000), MAX_TEXT_BYTES, _PAIRS),
    "JSON header": Parser(lambda data: _frame(0, data), MAX_BODY_BYTES),
    "binary header": Parser(lambda data: _frame(1, data), MAX_BODY_BYTES),
    "MessagePack header": Parser(lambda data: _frame(77, data), MAX_BODY_BYTES),
    "frames": Parser(lambda data: FrameReader().feed(data), MAX_BODY_BYTES),
    "heartbeat": Parser(bodies.decode_heartbeat, MAX_BODY_BYTES, _JSON),
    "locks": Parser(group_bodies.decode_lock_request, MAX_BODY_BYTES, _JSON),
    "client check": Parser(group_bodies.decode_client_check, MAX_BODY_BYTES, _JSON),
    "registration": Parser(lambda data: finish(decode_registration(data)), MAX_BODY_BYTES, _JSON),
    "batch": Parser(records.decode_batch, MAX_BODY_BYTES),
    "records of a batch": Parser(
        lambda data: records.encode_records(records.split(data, b"CLUSTER\x01c"), _SHARED, 0, 0), MAX_BODY_BYTES
    ),
    "records of an answer": Parser(lambda data: list(records.decode_records(data)), MAX_BODY_BYTES),
    "body that is shown": Parser(lambda data: _shown(_record(data, is_packed=False)), MAX_BODY_BYTES),
    "compressed body that is shown": Parser(lambda data: _shown(_BOMB), MAX_TEXT_BYTES),
    "garbled zlib": Parser(
        lambda data: records.begin_of(data, SYS_COMPRESSED | SYS_COMPRESSION_ZLIB, 1000), MAX_BODY_BYTES
    ),
}


class Input(NamedTuple):
    start: bytes
    unit: bytes
    end: bytes

    def of(self, size: int) -> bytes:
        """Return the input with this size; if its end is NESTED, with the brackets closed that the unit opens."""
        closed, is_nested = b"", self.end == NESTED
        if is_nested:
            closed = bytes(_CLOSING[byte] for byte in reversed(self.unit) if byte in _CLOSING)
            size = min(size, DEEP * (len(self.unit) + len(closed)))
        times = max((size - len(self.start) - len(self.end)) // max(len(self.unit) + len(closed), 1), 1)
        return self.start + self.unit * times + (closed * times if is_nested else self.end)


class Worst(NamedTuple):
    cost: float  # seconds for a byte
    input: Input


class Inputs:
    """The inputs that cost a parser or a request most so far, and others like them."""

    def __init__(self, chance: random.Random, own: Sequence[bytes] = ()) -> None:
        self._chance = chance
        self._own = own
        self.worst: list[Worst] = []

    def next(self) -> Input:
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
        """Keep an input if it is one of the worst. Return True if it is the worst."""
        self.worst = sorted([*self.worst, Worst(cost, given)], reverse=True)[:KEPT]
        return self.worst[0].input is given


class Search:
    """Searches for costs, and keeps the worst inputs of each parser and request."""

    def __init__(self, outcome: Outcome, seed: int) -> None:
        self._outcome = outcome
        self._chance = random.Random(seed)
        self._inputs = {name: Inputs(self._chance, parser.pieces) for name, parser in PARSERS.items()}
        self._inputs |= {request_name(code): Inputs(self._chance) for code in CODES}
        self._corpus = Frames(seed)

    def parse(self, number: int) -> None:
        name = list(PARSERS)[number % len(PARSERS)]
        parser, inputs = PARSERS[name], self._inputs[name]
        given = inputs.next()
        size = self._chance.choice((parser.most, parser.most // 4, 2000))
        large = given.of(size)
        took_s = self._time(name, parser, large)
        is_worst = inputs.cost(max(took_s - TRIFLE_S, 0) / len(large), given)
        if took_s > NOISE_S:
            self._compare(name, parser, large, given.of(size // SMALL))
        if is_worst or number % MEMORY_EVERY == 0:
            self._measure_memory(name, parser, large)

    def _time(self, name: str, parser: Parser, data: bytes) -> float:
        start_s = time.thread_time()
        try:
            parser.run(data)
        except REFUSALS:
            pass
        except Exception as error:
            self._outcome.fault(f"{name}: unexpected {type(error).__name__}: {str(error)[:80]}")
        return time.thread_time() - start_s

    def _compare(self, name: str, parser: Parser, large: bytes, small: bytes) -> None:
        """The least of several times is the one without disturbance."""
        large_s, small_s = (min(self._time(name, parser, data) for _ in range(REPEATS)) for data in (large, small))
        if large_s > BASE_S + BYTE_S * len(large):
            self._outcome.fault(f"{name}: {len(large)} bytes cost more than {BYTE_S * 1e6:g} us each")
        elif large_s > NOISE_S and large_s / max(small_s, 1e-4) > GROWTH * len(large) / len(small):
            self._outcome.fault(f"{name}: time grows faster than the length")

    def _measure_memory(self, name: str, parser: Parser, data: bytes) -> None:
        tracemalloc.start()
        try:
            self._time(name, parser, data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak > BASE_BYTES + BYTE_BYTES * len(data):
            self._outcome.fault(f"{name}: more memory than {BASE_BYTES >> 20} MiB and {BYTE_BYTES} bytes for each")

    async def request(self, running: Serving, number: int) -> None:
        """Send a request with an input in one of its fields, or as its body."""
        code = CODES[number % len(CODES)]
        name = request_name(code)
        given = self._inputs[name].next()
        data = given.of(self._chance.choice((MAX_TEXT_BYTES, 8000)))
        try:
            raw = encode(self._with(self._corpus.request(1)._replace(code=code, flag=0), data))
        except Exception:  # our encoder does not write it
            return
        longest_s, total_s = await self._measured(running, raw)
        self._inputs[name].cost(max(total_s - TRIFLE_S, 0) / len(raw), given)
        most_s = BASE_S + BYTE_S * len(raw)
        for _ in range(REPEATS - 1):
            if longest_s <= PIECE_S and total_s <= most_s:
                return
            longest_s, total_s = map(min, (longest_s, total_s), await self._measured(running, raw))
        if longest_s > PIECE_S:
            self._outcome.fault(f"{name}: a piece of it takes more than {PIECE_S * 1000:.0f} ms")
        elif total_s > most_s:
            self._outcome.fault(f"{name}: {BYTE_S * 1e6:g} us a byte, and more")

    def _with(self, frame: Frame, data: bytes) -> Frame:
        if self._chance.random() < 0.5:
            return frame._replace(body=data)
        texts = [name for name, value in frame.ext.items() if isinstance(value, str)]
        return frame._replace(ext={**frame.ext, self._chance.choice(texts or ["x"]): data.decode(errors="replace")})

    async def _measured(self, running: Serving, raw: bytes) -> tuple[float, float]:
        """Return the processor time of the longest piece of work of a request, and of all of them."""
        peer, times_s = Peer(running.server, 7), [time.thread_time()]
        peer.send(raw)
        times_s.append(time.thread_time())
        while running.broker.turns.waiting:
            await asyncio.sleep(0)
            times_s.append(time.thread_time())
        peer.hang_up()
        await asyncio.sleep(0)
        return max(after - before for before, after in itertools.pairwise(times_s)), times_s[-1] - times_s[0]

    def figures(self) -> dict[str, object]:
        """Return the worst input of each parser and request, and its nanoseconds for a byte."""
        found = {name: inputs.worst[0] for name, inputs in self._inputs.items() if inputs.worst}
        worst = sorted(found.items(), key=lambda item: -item[1].cost)
        return {
            "worst_ns_per_byte": {name: round(item.cost * 1e9) for name, item in worst},
            "worst_inputs": {name: repr(tuple(item.input))[:120] for name, item in worst[:10]},
        }


async def cost(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    search, numbers, requests = Search(outcome, seed), iter(limit), itertools.count()
    gc.disable()
    number: int | None = 0
    while number is not None:
        async with serving(config_in(folder / str(next(requests)))) as running:
            while (number := next(numbers, None)) is not None:
                if number % COLLECT_EVERY == 0:
                    gc.collect()
                if number % 10 < PARSER_SHARE * 10:
                    search.parse(number)
                else:
                    await search.request(running, asked := next(requests))
                    if asked % BROKER_REQUESTS == 0:
                        break
    outcome.figures |= search.figures()
