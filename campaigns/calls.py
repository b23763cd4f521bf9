"""Fuzzed calls of every gRPC method, against a broker: HTTP/2 frames, header blocks and messages with something odd.

Most calls are nearly right: each field of a message has a value that some handler reads, many of them at a limit or beyond.
Some have bytes changed, frames in between, windows that never open, or are given up. They enter where a socket's bytes do. A
fault is: an exception that the broker did not expect, a call of an honest client that is not answered with success, what a
client is charged for beyond its connection, and a folder that the broker does not start from again.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import uvloop
from google.protobuf.message import DecodeError
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol import http2
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.grpc import encode_message
from rocketlet.protocol.headers import SendMessage

from ._http2 import Peer, split
from .common import Limit, Outcome
from .frames import config_in, faults_of

CALLS_PER_CONNECTION = 40
HONEST_EVERY = 50
ANSWER_CHECKS = 5000
"""How often an honest client checks for its response, 1 ms apart."""
TEXTS = ("t", "t", "t", "g", "g", "honest", "%RETRY%g", "%DLQ%g", "", " ", "a\x01b\x02c", "n" * 300, "SCHEDULE_TOPIC_XXXX",
         "0" * 32, "F" * 32, "*", "a || b", "a > 1 AND b IS NOT NULL", "host@1", "ü")  # fmt: skip
NUMBERS = (0, 1, 1, 2, 3, 4, 10, 32, 33, -1, 2**31 - 1, -(2**31), 1000)
LONGS = (*NUMBERS, 2**63 - 1, -(2**63), 253_402_300_799)

BODIES = (
    gzip.compress(b"one") + gzip.compress(b"two"),
    gzip.compress(bytes(MAX_BODY_BYTES + 1)),
    gzip.compress(bytes(MAX_BODY_BYTES))[:-8] + bytes(8),
    gzip.compress(b"") * 500,
)
"""Bodies in gzip: of several members, too large, with a wrong checksum."""
INTS = (0, 1, -1, 2**31 - 1, -(2**31))

NAMED = {"topic": "t", "group": "g"}
HANDLES = ["0 1 1 1 0 broker-a 0 0"]
"""Receipt handles that were given out last."""


def filled(kind: Any, choose: random.Random, depth: int = 0) -> Any:
    """A message with odd values in most of its fields."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if choose.random() < 0.2 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(choose.choice((0, 1, 3, 130))):
                getattr(message, field.name)[f"{choose.choice(TEXTS)}{choose.randrange(200)}"] = choose.choice(TEXTS)
        elif field.is_repeated:
            for _ in range(choose.choice((0, 1, 1, 2))):
                _append(message, field, choose, depth)
        elif field.name in NAMED and choose.random() < 0.9 and field.message_type is not None:
            getattr(message, field.name).name = NAMED[field.name]
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(filled(_class_of(message, field), choose, depth + 1))
        else:
            setattr(message, field.name, _value(field, choose))
    return message


def _class_of(message: Any, field: Any) -> Any:
    return type(getattr(message, field.name))


def _append(message: Any, field: Any, choose: random.Random, depth: int) -> None:
    if field.message_type is not None:
        added = getattr(message, field.name).add()
        added.CopyFrom(filled(type(added), choose, depth + 1))
    else:
        getattr(message, field.name).append(_value(field, choose))


def _value(field: Any, choose: random.Random) -> Any:
    if field.name == "receipt_handle" and choose.random() < 0.9:
        return choose.choice(HANDLES)
    if field.type == field.TYPE_STRING:
        return choose.choice(TEXTS)
    if field.type == field.TYPE_BYTES:
        if field.name == "body" and choose.random() < 0.2:
            return choose.choice(BODIES)
        return choose.randbytes(choose.choice((0, 1, 20, 1000, 70_000)))
    if field.type == field.TYPE_BOOL:
        return choose.random() < 0.5
    if field.type == field.TYPE_FLOAT:
        return choose.choice((0.0, 1.5, -1.0, float("inf"), float("nan")))
    return choose.choice(LONGS if field.type == field.TYPE_INT64 else NUMBERS)


def _keep_handles(written: bytes) -> None:
    """Keeps the handles of messages that came whole in one frame of data."""
    for kind, _, _, payload in split(written):
        if kind == http2.DATA and b" broker-a " in payload:
            try:
                answer = schema.ReceiveMessageResponse.FromString(payload[5:])
            except DecodeError:
                continue
            HANDLES.append(answer.message.system_properties.receipt_handle)
            del HANDLES[:-20]


class Attack:
    def __init__(self, outcome: Outcome, config: BrokerConfig, seed: int) -> None:
        self._outcome = outcome
        self._config = config
        self._choose = random.Random(seed)
        self._slowest_ms = 0.0

    async def run(self, limit: Limit) -> None:
        routes = Routes()
        broker = BrokerController(self._config, routes)
        for name in ("t", "honest"):
            broker.topics.put(TopicConfig(name, 4, 4), broker.store.end)
        async with Server(Listening("127.0.0.1", 0), broker=broker, routes=routes) as server:
            peer = Peer(server, 1)
            for number in limit:
                if number % CALLS_PER_CONNECTION == 0 or peer.socket.is_closed:
                    peer.hang_up()
                    peer = Peer(server, number % 60_000 + 2)
                self._outcome.tried += 1
                self._feed(peer, self._some(peer))
                _keep_handles(b"".join(peer.socket.written))
                peer.socket.written.clear()
                if number % HONEST_EVERY == 0:
                    await self._be_honest(server)
                    self._store_extremes(broker)
            peer.hang_up()
            await server._turns.done()
            if server.memory.used_bytes or server.connections:
                self._outcome.fault(f"{server.memory.used_bytes} bytes are counted for nobody")
            if broker.pops.waiting:
                self._outcome.fault(f"{broker.pops.waiting} receives wait for nobody")

    def _feed(self, peer: Peer, data: bytes) -> None:
        begin_s = time.process_time()  # the machine may do something else
        try:
            peer.send(data)
        except Exception as error:
            self._outcome.fault(f"escaped: {error!r}")
        took_ms = 1000 * (time.process_time() - begin_s)
        if took_ms > self._slowest_ms:
            self._slowest_ms = took_ms
            self._outcome.figures["slowest_ms"] = round(took_ms, 1)
            self._outcome.figures["slowest_call"] = data[:120].decode("latin-1")

    def _some(self, peer: Peer) -> bytes:
        choose = self._choose
        method = choose.choice(list(METHODS))
        message = filled(METHODS[method].request, choose).SerializeToString()
        timeout = choose.choice((b"5S", b"5S", b"0n", b"1m", b"99999999H", b"x", b""))
        data = peer.call(method, encode_message(message), choose.choice(TEXTS), timeout)
        kind = choose.random()
        if kind < 0.1:  # some bytes are others
            changed = bytearray(data)
            for _ in range(choose.randint(1, 4)):
                changed[choose.randrange(len(changed))] = choose.randrange(256)
            return bytes(changed)
        if kind < 0.15:  # given up
            return data + http2.encode_reset(peer.last_id, choose.choice((0, 8, 2**32 - 1)))
        if kind < 0.25:  # another frame in between
            return data + self._frame(peer)
        if kind < 0.28:
            return data[: choose.randrange(len(data))]
        return data

    def _frame(self, peer: Peer) -> bytes:
        choose = self._choose
        if choose.random() < 0.5:
            setting = choose.choice(list(http2.Setting))
            return http2.encode_settings({setting: choose.choice((0, 1, 100, 16_384, 65_535, 2**31 - 1, 2**32 - 1))})
        stream_id = choose.choice((0, peer.last_id + 2, max(peer.last_id, 1), 2))
        payload = choose.randbytes(choose.choice((0, 4, 5, 8, 20)))
        return http2.encode(choose.randrange(11), choose.randrange(256), stream_id, payload)

    def _store_extremes(self, broker: BrokerController) -> None:
        """Store a message as a remoting client may send it, with values that these clients' types cannot hold."""
        choose = self._choose
        born_ms = choose.choice((*LONGS, 253_402_300_800_000))
        header = SendMessage(
            "p", "t", "TBW102", 4, choose.randrange(4), 0, born_ms, choose.choice(INTS), "", choose.choice(INTS)
        )
        broker.sending.stage(header, b"extreme", bytes(8))
        broker.sending.commit()

    async def _be_honest(self, server: Server) -> None:
        """A message is stored, whatever others do."""
        honest = Peer(server, 60_100)
        message = schema.Message(topic={"name": "honest"}, body=b"honest")
        message.system_properties.message_id = "01ID"
        request = schema.SendMessageRequest(messages=[message]).SerializeToString()
        honest.send(honest.call("SendMessage", encode_message(request)))
        answer = b"\xa0\x9c\x01"  # 20000, as a varint
        for _ in range(ANSWER_CHECKS):  # the server may serve it some event-loop iterations later, in pieces
            if honest.socket.is_closed or answer in b"".join(honest.socket.written):
                break
            await asyncio.sleep(0.001)
        if answer not in b"".join(honest.socket.written):
            self._outcome.fault("an honest client was not answered with success")
        honest.hang_up()
        await asyncio.sleep(0)


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    before = structlog.get_config()
    processors: list[Callable[..., Any]] = [faults_of(outcome)]
    structlog.configure(processors=processors, logger_factory=structlog.ReturnLoggerFactory())
    begin_s = time.perf_counter()
    try:
        config = config_in(folder)
        uvloop.run(Attack(outcome, config, seed).run(limit))
        outcome.figures["per_second"] = round(outcome.tried / (time.perf_counter() - begin_s))
        uvloop.run(_start_again(outcome, config))
    finally:
        structlog.configure(**before)
    return outcome


async def _start_again(outcome: Outcome, config: BrokerConfig) -> None:
    try:
        await BrokerController(config).stop()
    except Exception as error:
        outcome.fault(f"the broker does not start again: {error!r}")
