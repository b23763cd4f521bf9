"""Inputs of the fuzz campaigns: requests of remoting clients and messages of gRPC, nearly valid, with something unexpected
in one place. The same seed makes the same inputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import orjson
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.protocol import headers
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.message import BatchEntry, encode_batch

CODES = [int(code) for code in (*BROKER_REQUESTS, *NAME_SERVER_REQUESTS, *SENDS)]
FREQUENT = [*map(int, SENDS), RequestCode.HEART_BEAT, RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET]

TOPICS = tuple(
    "t u %RETRY%g %DLQ%g TBW102 SCHEDULE_TOPIC_XXXX RMQ_SYS_TRANS_HALF_TOPIC new broker-a".split()
)  # fmt: skip
GROUPS = ("g", "h", "p", "CID_RMQ_SYS_x", "TOOLS_CONSUMER")
SMALL = (0, 1, 2, 3, 4, 7, 8, 12, 100, -1, -2, 4096, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63))
NUMBERS = (*SMALL, 2**63, 2**64, 10**30)
WORDS = (
    *("", " ", "*", "A", "A || B", "||", "a > 5", "1e", "9" * 5000, "a IN ('x'", "\0", "\x01", "\x02", "../../x", "x" * 300),
    *("ä", "\U0001f600", "true", "false", "TAG", "SQL92", "nan", "1.5", "-", "%", "@", "broker-a", "127.0.0.1:1", "c1"),
)  # fmt: skip
PROPERTIES = (
    *("TAGS\x01A", "KEYS\x01k", "DELAY\x013", "DELAY\x01" + "9" * 4400, "TRAN_MSG\x01true", "PGROUP\x01p", "UNIQ_KEY\x01u"),
    *("REAL_TOPIC\x01t", "REAL_QID\x01x", "REAL_QID\x01-1", "WAIT\x01true", "RETRY_TOPIC\x01t", "REPLY_TO_CLIENT\x01c1"),
    *("CHECK_IMMUNITY_TIME_IN_SECONDS\x01" + "9" * 4400, "\x01", "\x02\x02", "a\x01b", "a", "DELAY\x01", "CLUSTER\x01x"),
    *("ORIGIN_MESSAGE_ID\x01x", "MAX_RECONSUME_TIMES\x01x"),
)  # fmt: skip
SQL = (
    *("a > 5", "a BETWEEN 1 AND 2", "a IS NOT NULL", "a IN ('x', 'y')", "NOT (a = 'x')", "a = TRUE", "1e", "9" * 5000),
    *("a > 1e999", "a = 'x", "(" * 500 + "a = 1" + ")" * 500, "a contains 'x'", "''", "a > -", "a = 1 OR " * 900 + "a = 2"),
    *("SELECT 1", "a.b > 1", "CASE WHEN a THEN 1 END", "a > 5 -- x", "/* a", "a = ?", "a = :x", "a = $1", "a = 0x1F"),
    *("CAST(a AS INT) = 1", "\0", "a = \\"),
)  # fmt: skip
UNEXPECTED: tuple[Any, ...] = (None, [], {}, [1], "x", 0, -1, 2**31, 2**63 - 1, 1e300, True, {"a": []}, "9" * 400)
MALFORMED = (b"", b"[", b"{}", b"null", b"5", b"\xff", b"{1:2}", b"[" * 2000, b'{"a":' * 1500, b"a=b\nc")

SUBSCRIPTION = {
    "topic": TOPICS,
    "subString": SQL,
    "subVersion": (1, 2**62),
    "expressionType": ("TAG", "SQL92", "", None),
}
CONSUMER = {
    "groupName": (*GROUPS, *GROUPS, *GROUPS, "", "x" * 300), "consumeType": ("CONSUME_PASSIVELY", 0, 1),
    "messageModel": ("CLUSTERING", "BROADCASTING"), "consumeFromWhere": (0, "CONSUME_FROM_LAST_OFFSET"), "unitMode": False,
    "allocateStrategy": (None, "AVG", "X"), "leaving": (True, False), "assigned": [["t", "broker-a", (0, 1, -5)]],
    "queueCounts": {"broker-a": ({"t": 4}, {"t": 4}, {"t": 2**31}, [1], {"t": "x"}, "t")},
    "subscriptionDataSet": [SUBSCRIPTION],
}  # fmt: skip
HEARTBEAT = {
    "clientID": ("c1", "c2", "c3"), "consumerDataSet": [CONSUMER], "producerDataSet": [{"groupName": GROUPS}],
}  # fmt: skip
LOCK = {
    "clientId": "c1", "consumerGroup": GROUPS, "handover": (True, False),
    "mqSet": [{"topic": TOPICS, "brokerName": "broker-a", "queueId": SMALL, "epoch": 1}],
}  # fmt: skip
CHECK = {
    "clientId": "c1", "group": "g", "topic": "t", "consumerGroup": "g", "strategyName": "AVG",
    "subscriptionData": {"topic": "t", "subString": SQL, "expressionType": "SQL92"},
}  # fmt: skip
GROUP = {"groupName": (*GROUPS, "../../x", "x" * 300), "retryQueueNums": SMALL, "retryMaxTimes": 3, "strict": False}
REGISTRATION = {
    "topicConfigSerializeWrapper": {
        "dataVersion": {"timestamp": 1, "counter": 1},
        "topicConfigTable": {"t": {"topicName": TOPICS, "readQueueNums": 4, "writeQueueNums": SMALL, "perm": 6}},
    }
}
BODIES: dict[int, Any] = {
    RequestCode.HEART_BEAT: HEARTBEAT, RequestCode.LOCK_BATCH_MQ: LOCK, RequestCode.UNLOCK_BATCH_MQ: LOCK,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: GROUP, RequestCode.CHECK_CLIENT_CONFIG: CHECK,
    RequestCode.QUERY_ASSIGNMENT: CHECK, RequestCode.REGISTER_BROKER: REGISTRATION,
}  # fmt: skip
"""Bodies in JSON; a tuple stands for one of its values."""


def _fields() -> dict[str, Any]:
    """Return every field of every header, with its type."""
    found: dict[str, Any] = {}
    for kind in vars(headers).values():
        if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == headers.__name__:
            for name, hint in get_type_hints(kind).items():
                first, *rest = name.split("_")
                found[first + "".join(part[:1].upper() + part[1:] for part in rest)] = hint
    return found


class Frames:
    """Requests of remoting clients."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pick = self._random.choice
        self._header_fields = _fields()
        self._optional = [name for name, hint in self._header_fields.items() if type(None) in get_args(hint)]
        self._last = {name: self._field(name, hint) for name, hint in self._header_fields.items()}

    def _is(self, share: float) -> bool:
        return self._random.random() < share

    def request(self, opaque: int) -> Frame:
        """Return a request with something unexpected in one place, or nowhere."""
        code = self._pick(CODES if self._is(0.7) else FREQUENT)
        if self._is(0.03):
            code = self._pick(SMALL)
        kind, flag = self._pick((JSON, JSON, ROCKETMQ, MSGPACK)), self._pick((0,) * 7 + (1, 2, 3))
        ext = self._short() if code in SENDS and code != RequestCode.SEND_MESSAGE else self._ext()
        return Frame(code, opaque, ext, self._body(code), flag, language=0, serialize_type=kind)

    def frame(self, opaque: int) -> bytes:
        """Return a frame, whole unless its length field is wrong."""
        data = encoded(self.request(opaque))
        return data if self._is(0.85) else self._changed(data)

    def _changed(self, data: bytes) -> bytes:
        """Change some bytes of the header or the body; the frame's length is right nine times of ten."""
        changed = bytearray(data)
        for _ in range(self._pick((1, 1, 2, 8))):
            at = self._random.randrange(4 if self._is(0.9) else 0, len(changed))
            changed[at] = self._pick((0, 0xFF, 0x7F, 0x80, changed[at] ^ 1 << self._random.randrange(8)))
        return bytes(changed)

    def _ext(self) -> dict[str, Any]:
        for name in self._random.sample(list(self._header_fields), 8):
            self._last[name] = self._field(name, self._header_fields[name])
        absent = {name for name in self._optional if self._is(0.5)}
        ext = {name: value for name, value in self._last.items() if name not in absent}
        for name in self._random.sample(list(self._header_fields), self._pick((0, 0, 1, 1, 3, 10))):
            ext[name] = self._pick(NUMBERS if self._is(0.5) else WORDS)
            if self._is(0.2):
                del ext[name]
        return ext

    def _short(self) -> dict[str, Any]:
        pick = self._pick
        ext = {
            "a": pick(GROUPS), "b": pick(TOPICS), "c": "TBW102", "d": pick((4, 4, 8, -1, 10**9)),
            "e": pick((0, 0, 1, -1, 99)), "f": pick((0, 0, 0, 4, 8, 12, 16, 48)), "g": int(time.time() * 1000), "h": 0,
            "i": self._properties(), "j": pick((0, 0, 3, 99)), "k": False, "m": pick((False, False, True)),
            "l": pick((0, 16, 3)),
        }  # fmt: skip
        if self._is(0.4):
            ext[pick(list(ext))] = pick(NUMBERS if self._is(0.5) else WORDS)
        if self._is(0.05):
            del ext[pick(list(ext))]
        return ext

    def _field(self, name: str, hint: Any) -> Any:
        if "opic" in name or "roup" in name:
            return self._pick((TOPICS if "opic" in name else GROUPS) if self._is(0.95) else WORDS)
        if name == "properties":
            return self._properties()
        if name in ("subscription", "expressionType"):
            return self._pick(SQL if name == "subscription" else ("TAG", "SQL92", "", "X"))
        if hint is bool:
            return self._pick(("true", "false", True, False))
        if hint in (int, int | None):
            return self._pick((0, 0, 1, 2, 3, 4, 8, 12) if self._is(0.9) else NUMBERS)
        return self._pick(("c1", "broker-a", "127.0.0.1:9", "DefaultCluster", "x", "TOPIC_PUT_NUMS"))

    def _properties(self) -> str:
        return "\x02".join(self._pick(PROPERTIES) for _ in range(self._random.randrange(5)))

    def _body(self, code: int) -> bytes:
        if code in SENDS or self._is(0.1):
            if self._is(0.5):
                return self._random.randbytes(self._random.randrange(60))
            size = self._random.randrange
            return encode_batch([BatchEntry(size(9), b"x" * size(9), self._properties()[:3000]) for _ in range(3)])
        if self._is(0.05):
            return self._pick(MALFORMED)
        if code == RequestCode.UPDATE_BROKER_CONFIG:
            return f"{self._pick(('transactionTimeOut', 'x', 'brokerName'))}={self._pick(NUMBERS)}".encode()
        return self._json(BODIES.get(code) or self._pick(list(BODIES.values())))

    def _json(self, template: Any) -> bytes:
        return orjson.dumps(self._spoiled(self._chosen(template)), default=str)

    def _chosen(self, template: Any) -> Any:
        if isinstance(template, tuple):
            return self._pick(template)
        if isinstance(template, dict):
            return {name: self._chosen(value) for name, value in template.items()}
        return [self._chosen(value) for value in template] if isinstance(template, list) else template

    def _spoiled(self, value: Any) -> Any:
        """Return the value with something unexpected in one place, three times of four."""
        if self._is(0.3) or not value:
            return self._pick(UNEXPECTED)
        if isinstance(value, dict):
            name = self._pick(list(value))
            return {**value, name: self._spoiled(value[name])} if self._is(0.8) else value
        return [*value[:-1], self._spoiled(value[-1])] if isinstance(value, list) else value


def encoded(frame: Frame) -> bytes:
    """Return a frame; in JSON, with its numbers as text, if our encoder does not write its values."""
    try:
        return encode(frame)
    except Exception:
        ext = {name: str(value) for name, value in frame.ext.items()}
        return encode(frame._replace(ext=ext, serialize_type=JSON, code=frame.code if abs(frame.code) < 2**60 else 999))


# Messages of gRPC

TEXTS = (
    *("t", "t", "t", "g", "g", "honest", "%RETRY%g", "%DLQ%g", "", " ", "a\x01b\x02c", "n" * 300, "SCHEDULE_TOPIC_XXXX"),
    *("0" * 32, "F" * 32, "*", "a || b", "a > 1 AND b IS NOT NULL", "host@1", "ü"),
)  # fmt: skip
INTS = (0, 1, 1, 2, 3, 4, 10, 32, 33, -1, 2**31 - 1, -(2**31), 1000)
LONGS = (*INTS, 2**63 - 1, -(2**63), 253_402_300_799)
NAMED = {"topic": "t", "group": "g"}
HANDLES = ["0 1 1 1 0 broker-a 0 0"]
"""The last receipt handles that the broker returned."""


def filled(kind: Any, chance: random.Random, depth: int = 0) -> Any:
    """Return a message with unexpected values in most of its fields."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < 0.2 or depth > 4:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(chance.choice((0, 1, 3, 130))):
                value[f"{chance.choice(TEXTS)}{chance.randrange(200)}"] = chance.choice(TEXTS)
        elif field.is_repeated:
            for _ in range(chance.choice((0, 1, 1, 2))):
                if field.message_type is None:
                    value.append(_value(field, chance))
                else:
                    added = value.add()
                    added.CopyFrom(filled(type(added), chance, depth + 1))
        elif field.message_type is None:
            setattr(message, field.name, _value(field, chance))
        elif field.name in NAMED and chance.random() < 0.9:
            value.name = NAMED[field.name]
        else:
            value.CopyFrom(filled(type(value), chance, depth + 1))
    return message


def _value(field: Any, chance: random.Random) -> Any:
    if field.name == "receipt_handle" and chance.random() < 0.9:
        return chance.choice(HANDLES)
    makers: dict[int, Callable[[], Any]] = {
        field.TYPE_STRING: lambda: chance.choice(TEXTS),
        field.TYPE_BYTES: lambda: chance.randbytes(chance.choice((0, 1, 20, 1000, 70_000))),
        field.TYPE_BOOL: lambda: chance.random() < 0.5,
        field.TYPE_FLOAT: lambda: chance.choice((0.0, 1.5, -1.0, float("inf"), float("nan"))),
        field.TYPE_INT64: lambda: chance.choice(LONGS),
    }
    return makers.get(field.type, lambda: chance.choice(INTS))()
