"""Frames that were made to hurt: the same seed makes the same ones."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, get_args, get_type_hints

import orjson
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.protocol import headers
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.message import BatchEntry, encode_batch

CODES = [int(code) for code in (*BROKER_REQUESTS, *NAME_SERVER_REQUESTS, *SENDS)]
FREQUENT = [*map(int, SENDS), RequestCode.HEART_BEAT, RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET]

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
OPAQUE = 1_234_567_890  # stands for one that our encoder would not write
BOMB_BYTES = 300 * 1024 * 1024  # inflated


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
        self._optional = [name for name, hint in self._header_fields.items() if type(None) in get_args(hint)]
        self._last = {name: self._field(name, hint) for name, hint in self._header_fields.items()}
        self._bodies: list[Callable[[], Any]] = [
            self._heartbeat,
            self._lock,
            self._group,
            self._check,
            self._registration,
        ]

    def request(self, opaque: int) -> Frame:
        """A request with something odd in one place, or nowhere."""
        chance = self._random.random
        if chance() < 0.03:
            return self._registration_request(opaque)
        code = self._random.choice(CODES if chance() < 0.7 else FREQUENT)
        if chance() < 0.03:
            code = self._random.choice(NUMBERS[:17])
        kind = self._random.choice((JSON, JSON, ROCKETMQ, MSGPACK))
        flag = self._random.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 3))
        ext = self._short() if code in SENDS and code != RequestCode.SEND_MESSAGE else self._ext()
        return Frame(code, opaque, ext, self._body(code), flag, language=0, serialize_type=kind)

    def frame(self, opaque: int) -> bytes:
        """One frame's bytes, whole unless its own length lies."""
        chance = self._random.random
        frame = self.request(opaque)
        kind = frame.serialize_type
        if kind == JSON and chance() < 0.05:
            odd = frame._replace(opaque=OPAQUE)
            try:
                data = encode(odd)
            except Exception:
                data = encode(replace_texts(odd))
            number = str(self._random.choice(NUMBERS))
            return with_opaque(data, number if chance() < 0.5 else f'"{number}"')
        try:
            data = encode(frame)
        except Exception:  # our encoder does not write what is too odd; JSON's text does
            data = encode(replace_texts(frame))
        return data if chance() < 0.85 else self._garbled(data)

    def _registration_request(self, opaque: int) -> Frame:
        """A broker that nobody knows registers, with all that a registration needs."""
        is_compressed = self._random.random() < 0.7
        body = self._compressed() if is_compressed else orjson.dumps(self._spoiled(self._registration()), default=str)
        number = self._random.randrange(5)
        ext = {
            "brokerName": f"foreign-{number}", "brokerAddr": f"10.0.0.{number}:1", "clusterName": "c",
            "haServerAddr": "", "brokerId": "0", "compressed": str(is_compressed).lower(), "bodyCrc32": "0",
        }  # fmt: skip
        return Frame(RequestCode.REGISTER_BROKER, opaque, ext, body)

    def _garbled(self, data: bytes) -> bytes:
        """Some bytes of header or body are others, the frame's length is right nine times of ten."""
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(4 if self._random.random() < 0.9 else 0, len(changed))
            changed[at] = self._random.choice((0, 0xFF, 0x7F, 0x80, changed[at] ^ 1 << self._random.randrange(8)))
        return bytes(changed)

    def _ext(self) -> dict[str, Any]:
        count = self._random.choice((0, 0, 1, 1, 3, 10))
        for name in self._random.sample(list(self._header_fields), 8):
            self._last[name] = self._field(name, self._header_fields[name])
        absent = {name for name in self._optional if self._random.random() < 0.5}
        ext = {name: value for name, value in self._last.items() if name not in absent}
        for wrong in self._random.sample(list(self._header_fields), count):
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
            return pick(TOPICS) if self._random.random() < 0.95 else pick(WORDS)
        if "roup" in name:
            return pick(GROUPS) if self._random.random() < 0.95 else pick(WORDS)
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
        if code == RequestCode.REGISTER_BROKER and chance > 0.5:
            return self._compressed()
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
            "groupName": pick(GROUPS) if self._random.random() < 0.95 else pick(WORDS),
            "consumeType": pick(("CONSUME_PASSIVELY", 0, 1)),
            "messageModel": pick(("CLUSTERING", "BROADCASTING")),
            "consumeFromWhere": pick((0, "CONSUME_FROM_LAST_OFFSET")),
            "unitMode": False,
            "allocateStrategy": pick((None, "AVG", "X")),
            "leaving": pick((True, False)),
            "assigned": [["t", "broker-a", pick((0, 1, -5))]],
            "queueCounts": {"broker-a": pick(({"t": 4}, {"t": 4}, {"t": 2**31}, [1], {"t": "x"}, "t"))},
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
            "groupName": self._random.choice((*GROUPS, "../../x", "x" * 300)),
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

    def _compressed(self) -> bytes:
        """A broker's topics as lines, with counts and lengths that lie, now and then very much of it."""
        lines = [f"{self._random.choice(TOPICS)} 4 {self._random.choice(NUMBERS[:17])} 6 SINGLE_TAG".encode()] * 3
        count = self._random.choice((3, 3, 0, 4, 2**31 - 1, 2**32 - 1))
        parts = [orjson.dumps({"timestamp": 1, "counter": 1}), *lines]
        data = [len(part).to_bytes(4, "big") + part for part in parts]
        data.insert(1, count.to_bytes(4, "big"))
        if self._random.random() < 0.2:
            data[-1] = self._random.choice((b"\xff\xff\xff\xffx", b"\0", b""))
        if self._random.random() < 0.1:
            return _bomb()
        return zlib.compress(b"".join(data))


@cache
def _bomb() -> bytes:
    stream = zlib.compressobj()
    return b"".join(stream.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)) + stream.flush()


def with_opaque(data: bytes, opaque: str) -> bytes:
    """A frame in JSON that was encoded with `OPAQUE`, with another one."""
    size = int.from_bytes(data[5:8], "big")
    header = data[8 : 8 + size].replace(b"%d" % OPAQUE, opaque.encode())
    rest = data[4:5] + len(header).to_bytes(3, "big") + header + data[8 + size :]
    return len(rest).to_bytes(4, "big") + rest


def replace_texts(frame: Frame) -> Frame:
    """The frame in JSON, whose numbers are text and may have any size."""
    ext = {key: str(value) for key, value in frame.ext.items()}
    return frame._replace(ext=ext, serialize_type=JSON, code=frame.code if abs(frame.code) < 2**60 else 999)
