"""Fuzzed frames of every request code in three encodings, against a broker with its name server.

Most frames are nearly right: headers with every field that any handler reads, bodies of the right shape, and something odd
in one place; some have bytes changed, lengths that lie, or are cut into pieces. They enter where a socket's bytes do, many
connections at once. A fault is: an exception that the broker did not expect, an answer that nobody can read or that another
connection asked for, an honest client whose message is not stored, and a folder that the broker does not start from again.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import structlog
import uvloop
from rocketlet.broker.broker import Broker
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver.routes import Routes
from rocketlet.broker.net.connection import Connection
from rocketlet.broker.requests.table import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.broker.server import Server
from rocketlet.protocol import headers
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, FrameError, FrameReader, encode
from rocketlet.protocol.message import BatchEntry, encode_batch

from .common import Limit, Outcome

DEFAULT_COUNT = 20_000

CODES = [int(code) for code in (*BROKER_REQUESTS, *NAME_SERVER_REQUESTS, *SENDS)]
FRAMES_PER_TURN = 50
SLOW_S = 0.1

TOPICS = [
    "t",
    "u",
    "%RETRY%g",
    "%DLQ%g",
    "TBW102",
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "new",
    "broker-a",
]
GROUPS = ["g", "h", "p", "CID_RMQ_SYS_x", "TOOLS_CONSUMER"]
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    12,
    100,
    -1,
    -2,
    4096,
    2**31 - 1,
    -(2**31),
    2**31,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64,
    10**30,
]
WORDS = [
    "",
    " ",
    "*",
    "A",
    "A || B",
    "||",
    "a > 5",
    "1e",
    "9" * 5000,
    "a IN ('x'",
    "\0",
    "\x01",
    "\x02",
    "../../x",
    "x" * 300,
    "ä",
    "\U0001f600",
    "true",
    "false",
    "TAG",
    "SQL92",
    "nan",
    "1.5",
    "-",
    "%",
    "@",
    "broker-a",
    "127.0.0.1:1",
    "c1",
]
PROPERTIES = [
    "TAGS\x01A",
    "KEYS\x01k",
    "DELAY\x013",
    "DELAY\x01" + "9" * 4400,
    "TRAN_MSG\x01true",
    "PGROUP\x01p",
    "UNIQ_KEY\x01u",
    "REAL_TOPIC\x01t",
    "REAL_QID\x01x",
    "REAL_QID\x01-1",
    "WAIT\x01true",
    "RETRY_TOPIC\x01t",
    "REPLY_TO_CLIENT\x01c1",
    "CHECK_IMMUNITY_TIME_IN_SECONDS\x01" + "9" * 4400,
    "\x01",
    "\x02\x02",
    "a\x01b",
    "a",
    "DELAY\x01",
    "CLUSTER\x01x",
    "ORIGIN_MESSAGE_ID\x01x",
    "MAX_RECONSUME_TIMES\x01x",
]
SQL = [
    "a > 5",
    "a BETWEEN 1 AND 2",
    "a IS NOT NULL",
    "a IN ('x', 'y')",
    "NOT (a = 'x')",
    "a = TRUE",
    "1e",
    "9" * 5000,
    "a > 1e999",
    "a = 'x",
    "(" * 500 + "a = 1" + ")" * 500,
    "a contains 'x'",
    "''",
    "a > -",
    "a = 1 OR " * 900 + "a = 2",
    "SELECT 1",
    "a.b > 1",
    "CASE WHEN a THEN 1 END",
    "a > 5 -- x",
    "/* a",
    "a = ?",
    "a = :x",
    "a = $1",
    "a = 0x1F",
    "CAST(a AS INT) = 1",
    "\0",
    "a = \\",
]


def _fields() -> dict[str, type]:
    """Every field of every header, with its type."""
    found: dict[str, type] = {}
    for kind in vars(headers).values():
        if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == headers.__name__:
            for name, hint in get_type_hints(kind).items():
                first, *rest = name.split("_")
                found[first + "".join(part[:1].upper() + part[1:] for part in rest)] = hint
    return found


class Fuzz:
    """Makes frames; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._header_fields = _fields()
        self._last = {name: self._field(name, hint) for name, hint in self._header_fields.items()}
        self._bodies: list[Callable[[], Any]] = [
            self._heartbeat,
            self._lock,
            self._group,
            self._check,
            self._registration,
        ]

    def frame(self, opaque: int) -> bytes:
        """One frame's bytes, whole unless its own length lies."""
        chance = self._random.random
        code = self._random.choice(CODES) if chance() < 0.97 else self._random.choice(NUMBERS[:17])
        kind = self._random.choice((JSON, JSON, ROCKETMQ, MSGPACK))
        flag = self._random.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 3))
        ext = self._short() if code in SENDS and code != RequestCode.SEND_MESSAGE else self._ext()
        frame = Frame(code, opaque, ext, self._body(code), flag, language=0, serialize_type=kind)
        try:
            data = encode(frame)
        except Exception:  # our encoder does not write what is too odd; JSON's text does
            data = encode(replace_texts(frame))
        return data if chance() < 0.85 else self._garbled(data)

    def _garbled(self, data: bytes) -> bytes:
        """Some bytes of header or body are others, the frame's length is right nine times of ten."""
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(4 if self._random.random() < 0.9 else 0, len(changed))
            changed[at] = self._random.choice((0, 0xFF, 0x7F, 0x80, changed[at] ^ 1 << self._random.randrange(8)))
        return bytes(changed)

    def _ext(self) -> dict[str, Any]:
        odd = self._random.random() < 0.6
        wrong = self._random.choice(list(self._header_fields)) if odd else ""
        for name in self._random.sample(list(self._header_fields), 8):
            self._last[name] = self._field(name, self._header_fields[name])
        ext = dict(self._last)
        if wrong:
            ext[wrong] = self._random.choice(NUMBERS) if self._random.random() < 0.5 else self._random.choice(WORDS)
            if self._random.random() < 0.2:
                del ext[wrong]
        return ext

    def _short(self) -> dict[str, Any]:
        pick = self._random.choice
        ext = {
            "a": pick(GROUPS),
            "b": pick(TOPICS),
            "c": "TBW102",
            "d": pick((4, 4, 8, -1, 10**9)),
            "e": pick((0, 0, 1, -1, 99)),
            "f": pick((0, 0, 0, 4, 8, 12, 16, 48)),
            "g": int(time.time() * 1000),
            "h": 0,
            "i": self._properties(),
            "j": pick((0, 0, 3, 99)),
            "k": False,
            "m": pick((False, False, True)),
            "l": pick((0, 16, 3)),
        }
        if self._random.random() < 0.4:
            ext[pick(list(ext))] = pick(NUMBERS) if self._random.random() < 0.5 else pick(WORDS)
        if self._random.random() < 0.05:
            del ext[pick(list(ext))]
        return ext

    def _field(self, name: str, hint: Any) -> Any:
        pick = self._random.choice
        if "opic" in name:
            return pick(TOPICS)
        if "roup" in name:
            return pick(GROUPS)
        if name == "properties":
            return self._properties()
        if name in ("subscription", "expressionType"):
            return pick(SQL) if name == "subscription" else pick(("TAG", "SQL92", "", "X"))
        if hint is bool:
            return pick(("true", "false", True, False))
        if hint in (int, int | None):
            return pick((0, 0, 1, 2, 3, 4, 8, 12)) if self._random.random() < 0.9 else pick(NUMBERS)
        return pick(("c1", "broker-a", "127.0.0.1:9", "DefaultCluster", "x", "TOPIC_PUT_NUMS"))

    def _properties(self) -> str:
        return "\x02".join(self._random.choice(PROPERTIES) for _ in range(self._random.randrange(5)))

    def _body(self, code: int) -> bytes:
        chance = self._random.random()
        if code in SENDS or chance < 0.1:
            if self._random.random() < 0.5:
                return self._random.randbytes(self._random.randrange(60))
            entries = [
                BatchEntry(self._random.randrange(9), b"x" * self._random.randrange(9), self._properties()[:3000])
                for _ in range(3)
            ]
            return encode_batch(entries)
        if chance < 0.15:
            return self._random.choice(
                (b"", b"[", b"{}", b"null", b"5", b"\xff", b"{1:2}", b"[" * 2000, b'{"a":' * 1500, b"a=b\nc")
            )
        make = {
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._lock,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._group,
            RequestCode.CHECK_CLIENT_CONFIG: self._check,
            RequestCode.QUERY_ASSIGNMENT: self._check,
            RequestCode.REGISTER_BROKER: self._registration,
        }.get(RequestCode(code) if code in CODES else RequestCode.SEND_MESSAGE, self._random.choice(self._bodies))
        if code == RequestCode.UPDATE_BROKER_CONFIG:
            return f"{self._random.choice(('transactionTimeOut', 'x', 'brokerName'))}={self._random.choice(NUMBERS)}".encode()
        return orjson.dumps(self._spoiled(make()), default=str)

    def _spoiled(self, value: Any) -> Any:
        """The value with something odd in one place, three times of four."""
        if self._random.random() < 0.3 or not value:
            return self._random.choice(
                (None, [], {}, [1], "x", 0, -1, 2**31, 2**63 - 1, 1e300, True, {"a": []}, "9" * 400)
            )
        if isinstance(value, dict):
            key = self._random.choice(list(value))
            return {**value, key: self._spoiled(value[key])} if self._random.random() < 0.8 else value
        if isinstance(value, list):
            return [*value[:-1], self._spoiled(value[-1])]
        return value

    def _heartbeat(self) -> Any:
        pick = self._random.choice
        consumer = {
            "groupName": pick(GROUPS),
            "consumeType": pick(("CONSUME_PASSIVELY", 0, 1)),
            "messageModel": pick(("CLUSTERING", "BROADCASTING")),
            "consumeFromWhere": pick((0, "CONSUME_FROM_LAST_OFFSET")),
            "unitMode": False,
            "allocateStrategy": pick((None, "AVG", "X")),
            "leaving": pick((True, False)),
            "assigned": [["t", "broker-a", pick((0, 1, -5))]],
            "queueCounts": {"broker-a": {"t": 4}},
            "subscriptionDataSet": [
                {
                    "topic": pick(TOPICS),
                    "subString": pick(SQL),
                    "subVersion": pick((1, 2**62)),
                    "expressionType": pick(("TAG", "SQL92", "", None)),
                }
            ],
        }
        return {
            "clientID": pick(("c1", "c2", "c3")),
            "consumerDataSet": [consumer],
            "producerDataSet": [{"groupName": pick(GROUPS)}],
        }

    def _lock(self) -> Any:
        queue = {
            "topic": self._random.choice(TOPICS),
            "brokerName": "broker-a",
            "queueId": self._random.choice(NUMBERS[:17]),
            "epoch": 1,
        }
        return {
            "clientId": "c1",
            "consumerGroup": self._random.choice(GROUPS),
            "handover": self._random.choice((True, False)),
            "mqSet": [queue],
        }

    def _group(self) -> Any:
        return {
            "groupName": self._random.choice(GROUPS),
            "retryQueueNums": self._random.choice(NUMBERS[:17]),
            "retryMaxTimes": 3,
            "strict": False,
        }

    def _check(self) -> Any:
        data = {"topic": "t", "subString": self._random.choice(SQL), "expressionType": "SQL92"}
        return {
            "clientId": "c1",
            "group": "g",
            "subscriptionData": data,
            "topic": "t",
            "consumerGroup": "g",
            "strategyName": "AVG",
        }

    def _registration(self) -> Any:
        topic = {
            "topicName": self._random.choice(TOPICS),
            "readQueueNums": 4,
            "writeQueueNums": self._random.choice(NUMBERS[:17]),
            "perm": 6,
        }
        return {
            "topicConfigSerializeWrapper": {
                "dataVersion": {"timestamp": 1, "counter": 1},
                "topicConfigTable": {"t": topic},
            }
        }


def replace_texts(frame: Frame) -> Frame:
    """The frame in JSON, whose numbers are text and may have any size."""
    ext = {key: str(value) for key, value in frame.ext.items()}
    return frame._replace(ext=ext, serialize_type=JSON, code=frame.code if abs(frame.code) < 2**60 else 999)


class Socket(asyncio.Transport):
    """What a connection writes to, in memory."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__({"peername": (host, port)})
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, data: Any) -> None:
        self.written.extend(map(bytes, data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Peer:
    """A connection of the broker's, driven without a socket."""

    def __init__(self, server: Server, port: int, host: str = "127.0.0.1") -> None:
        self.socket = Socket(port, host)
        self.connection = Connection(server)
        self.connection.connection_made(self.socket)
        self._reader = FrameReader()

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def received(self) -> list[Frame]:
        """Raises FrameError for answers that cannot be read."""
        data, self.socket.written = b"".join(self.socket.written), []
        return self._reader.feed(data)

    def hang_up(self) -> None:
        self.socket.close()
        self.connection.connection_lost(None)


class Attack:
    def __init__(self, outcome: Outcome, config: BrokerConfig, seed: int) -> None:
        self._outcome = outcome
        self._config = config
        self._fuzz = Fuzz(seed)
        self._random = random.Random(~seed)
        self.stored: list[bytes] = []
        self.slowest_s = 0.0

    async def run(self, limit: Limit) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._outcome.fault(f"escaped: {context.get('exception')!r}"))
        routes = Routes()
        broker = Broker(self._config, routes)
        async with Server("127.0.0.1", 0, broker=broker, routes=routes) as server:
            honest = Peer(server, 1)
            self._make_topics(honest)
            hostile: list[Peer] = []
            for number in limit:
                if number % FRAMES_PER_TURN == 0:
                    await self._turn(server, honest, hostile, number)
                self._attack(self._random.choice(hostile))
                self._outcome.tried += 1
            for peer in (honest, *hostile):
                peer.hang_up()

    def _make_topics(self, honest: Peer) -> None:
        for topic in ("t", "u", "honest"):
            ext = {"topic": topic, "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
            honest.send(encode(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, 1, ext)))
        honest.received()

    async def _turn(self, server: Server, honest: Peer, hostile: list[Peer], number: int) -> None:
        """Others connect, an honest client sends a message, and the loop runs its timers."""
        await asyncio.sleep(0)
        for peer in [peer for peer in hostile if peer.socket.is_closed]:
            hostile.remove(peer)
            peer.connection.connection_lost(None)
        while len(hostile) < 8:
            hostile.append(Peer(server, 1000 + self._random.randrange(60_000)))
        if self._random.random() < 0.05:
            hostile.pop().hang_up()
            hostile.append(Peer(server, 999))
        self._honest_send(honest, number)

    def _honest_send(self, honest: Peer, number: int) -> None:
        body = b"honest %d" % number
        ext = {
            "a": "p",
            "b": "honest",
            "c": "TBW102",
            "d": "4",
            "e": "0",
            "f": "0",
            "g": "1",
            "h": "0",
            "i": "",
        }
        honest.send(encode(Frame(RequestCode.SEND_MESSAGE_V2, number & 0xFFFFFFF, ext, body)))
        answers = [frame for frame in honest.received() if frame.is_response]
        if len(answers) != 1 or answers[0].opaque != number & 0xFFFFFFF:
            self._outcome.fault(f"an honest client got {len(answers)} answers, which were others'")
        elif answers[0].code == 0 and int(answers[0].ext["queueOffset"]) != len(self.stored):
            self._outcome.fault("an honest client was told another offset than its message's")
        if answers and answers[0].code == 0:
            self.stored.append(body)
        elif answers:
            self._outcome.fault(f"an honest send was refused: {answers[0].remark}")

    def _attack(self, peer: Peer) -> None:
        opaque = self._random.randrange(1 << 31)
        data = self._fuzz.frame(opaque)
        begin_s = time.perf_counter()
        try:
            if self._random.random() < 0.05:
                for at in range(0, len(data), max(len(data) // 3, 1)):
                    peer.send(data[at : at + max(len(data) // 3, 1)])
            else:
                peer.send(data)
        except Exception as error:
            self._outcome.fault(f"escaped: {error!r}")
        took_s = time.perf_counter() - begin_s
        if took_s > self.slowest_s:
            self.slowest_s = took_s
            self._outcome.figures["slowest_ms"] = round(took_s * 1000, 1)
            self._outcome.figures["slowest_frame"] = data[:160].decode("latin-1")
        try:
            peer.received()
        except FrameError as error:
            self._outcome.fault(f"an answer cannot be read: {error}")


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    before = structlog.get_config()
    structlog.configure(processors=[_faults_of(outcome)], logger_factory=structlog.ReturnLoggerFactory())
    begin_s = time.perf_counter()
    try:
        config = BrokerConfig(folder / "data", "127.0.0.1:9", vip_channel=False, transaction_sweep_s=0.5)
        config = replace(config, delay_levels_ms=(5,) * 18, transaction_timeout_s=0.1)
        attack = Attack(outcome, config, seed)
        uvloop.run(attack.run(limit))
        outcome.figures["per_second"] = round(outcome.tried / (time.perf_counter() - begin_s))
        uvloop.run(_check_folder(outcome, config, attack.stored))
    finally:
        structlog.configure(**before)
    outcome.figures["honest"] = len(attack.stored)
    outcome.figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return outcome


def _faults_of(outcome: Outcome) -> Callable[[Any, str, Any], str]:
    """A processor of log events: what a request may not cause is a fault."""

    def look(logger: Any, method: str, event: Any) -> str:
        text = str(event.get("event", ""))
        if method in ("error", "exception", "critical") or "failed" in text:
            import sys

            error = sys.exc_info()[1]
            where = ""
            if error is not None and error.__traceback__ is not None:
                last = error.__traceback__
                while last.tb_next is not None:
                    last = last.tb_next
                where = f" at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
            outcome.fault(
                f"{text} {event.get('request', event.get('action', ''))}: {type(error).__name__}: {str(error)[:80]}{where}"
            )
        return ""

    return look


async def _check_folder(outcome: Outcome, config: BrokerConfig, stored: list[bytes]) -> None:
    """The broker starts again, and has every message of the honest client."""
    try:
        broker = Broker(config)
    except Exception as error:
        outcome.fault(f"the broker does not start again: {error!r}")
        return
    queue = broker.store.queue("honest", 0)
    found = [broker.store.message(queue, offset).body for offset in range(queue.begin, queue.next)]
    if found != stored:
        outcome.fault(f"{len(found)} messages of an honest client are stored, {len(stored)} were acknowledged")
    await broker.stop()
