"""Strangers who call by gRPC: a call of any method, with a wrong `authorization` or none, on a connection of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS
from rocketlet.protocol.grpc import encode_message

from tests.support.accounts import ADMIN, SECRETS
from tests.support.grpc_client import signed

from ._http2 import GREETING, answers_in, call_frames, split
from .calls import filled

DATE = "20260101T000000Z"
OPEN = frozenset(("Heartbeat", "Telemetry", "NotifyClientTermination"))
"""Methods that an account without permissions may call, for a client that names neither a topic nor a group."""

Sign = Callable[[random.Random], str]


def _of_another_time(chance: random.Random) -> str:
    return signed(ADMIN, SECRETS[ADMIN], "20250101T000000Z")


def _odd(chance: random.Random) -> str:
    return chance.choice(
        ("x", "MQv2-HMAC-SHA1", f"MQv2-HMAC-SHA1 Credential={ADMIN}", signed(ADMIN, "")[:-4], " = ,,=")
    )


NOBODY_CALLS = "gRPC: an account without permissions"
CURIOUS_CALLS = "gRPC: an account that may read all topics but these"
PLAIN_CALLS = "gRPC: an administrator without TLS"
SIGNS: dict[str, Sign] = {
    NOBODY_CALLS: lambda chance: signed("nobody-key", SECRETS["nobody-key"]),
    CURIOUS_CALLS: lambda chance: signed("curious-key", SECRETS["curious-key"]),
    "gRPC: no key": lambda chance: "",
    "gRPC: an empty key": lambda chance: signed("", ""),
    "gRPC: an unknown key": lambda chance: signed("a-stranger", "secret-of-a-stranger"),
    "gRPC: another secret": lambda chance: signed(ADMIN, chance.choice((SECRETS["nobody-key"], "x" * 100))),
    "gRPC: a signature of another time": _of_another_time,
    "gRPC: an odd signature": _odd,
    PLAIN_CALLS: lambda chance: signed(ADMIN, SECRETS[ADMIN]),
}


class StrangeCall:
    """denied: topics that nobody here may read. written: the bytes that came back, once there are some."""

    def __init__(self, stranger: str, chance: random.Random, denied: Sequence[str]) -> None:
        self._stranger = stranger
        self.method = chance.choice(list(METHODS))
        request = filled(METHODS[self.method].request, chance)
        if stranger == CURIOUS_CALLS:
            self.method, request = "ReceiveMessage", _looking_around(chance, denied)
        fields = {b"x-mq-client-id": b"stranger", b"x-mq-date-time": DATE.encode(), b"grpc-timeout": b"5S"}
        if authorization := SIGNS[stranger](chance):
            fields[b"authorization"] = authorization.encode()
        message = encode_message(request.SerializeToString())
        self.data = GREETING + call_frames(1, self.method, message, *fields.items())
        self.written = b""

    @property
    def is_done(self) -> bool:
        """Whether the broker says that it did what was asked for."""
        is_answered = any(frame.kind == 0 for frame in split(self.written))
        answers = answers_in(self.written, self.method, 1) if is_answered else []
        return any(answer.status.code == 20000 for answer in answers)

    @property
    def is_allowed(self) -> bool:
        return self._stranger == NOBODY_CALLS and self.method in OPEN


def _looking_around(chance: random.Random, denied: Sequence[str]) -> object:
    """A receive of denied messages, or of those that brokers keep of other topics and groups."""
    request = schema.ReceiveMessageRequest(
        group={"name": chance.choice(("g", "h"))},
        message_queue={"topic": {"name": chance.choice(denied)}, "id": -1},
        batch_size=32,
        auto_renew=True,
    )
    request.long_polling_timeout.FromMilliseconds(0)
    return request
