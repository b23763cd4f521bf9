"""Fuzzed requests of remoting clients and of gRPC to a broker in this process.

The bytes enter where those of a socket do, over many connections, with an honest client beside them.

frames  Requests of every code in three encodings, nearly all nearly valid. A fault: an unexpected exception, a response that
        cannot be read or belongs to another connection, an honest client whose message is not stored, a topic or group that
        may not exist, memory without a limit, a file outside of the data folder, a folder that the broker does not start
        from.
calls   The same over HTTP/2 for every method. Also a fault: memory that is charged after its client has gone.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import MAX_QUEUES_PER_TOPIC, BrokerConfig
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS
from rocketlet.protocol import http2
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_RETRY_QUEUES
from rocketlet.protocol.frame import FrameError

from tests.support import grpc_client
from tests.support.peers import SEND, GrpcPeer, Peer, request, responses_in, split

from .common import Limit, Outcome, Serving, config_in, peak_mib, serving
from .corpus import HANDLES, TEXTS, Frames, filled
from .store import read_all

EVERY = 50  # tries between two messages of an honest client
LEGAL = re.compile(r"[%|a-zA-Z0-9_-]{1,127}\Z").match
MAX_MIB = 400  # resident, of which half is what the campaign itself keeps
MAX_ITERATIONS = 500  # event-loop iterations, of a few ms each, in which a request must be done
CALLS_PER_CONNECTION = 40
RESPONSE_CHECKS = 5000  # how often an honest client checks for its response, 1 ms apart


def quick(config: BrokerConfig) -> BrokerConfig:
    """Return the settings with timers that expire soon."""
    levels = (5,) * len(config.delay_levels_ms)
    return replace(config, transaction_check_interval_s=0.5, delay_levels_ms=levels, transaction_timeout_s=0.1)


class Honest:
    """Clients of both protocols that send messages. `stored`: the acknowledged bodies of the remoting client."""

    def __init__(self, serving: Serving, outcome: Outcome) -> None:
        self._server = serving.server
        self._outcome = outcome
        self._peer = Peer(serving.server, 1)
        self.stored: list[bytes] = []
        for topic in ("t", "u", "honest", "honest-grpc"):
            serving.broker.topics.put(TopicConfig(topic, 4, 4), serving.broker.store.end)

    def send(self, body: bytes, number: int) -> None:
        self._peer.send(request(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "honest"}, body, number))
        found = [frame for frame in self._peer.received() if frame.is_response]
        if [frame.opaque for frame in found] != [number]:
            self._outcome.fault(f"an honest client got {len(found)} responses, which belong to others")
        elif found[0].code:
            self._outcome.fault(f"an honest send was refused: {found[0].remark}")
        else:
            if int(str(found[0].ext["queueOffset"])) != len(self.stored):
                self._outcome.fault("an honest client got another offset than its message's")
            self.stored.append(body)

    async def call(self) -> None:
        """Send a message by gRPC; the server may serve the call some event-loop iterations later, in pieces."""
        peer, written = GrpcPeer(self._server, 60_100), b""
        peer.send(peer.call("SendMessage", grpc_client.sending(grpc_client.message("honest-grpc", b"honest"))))
        for _ in range(RESPONSE_CHECKS):
            written += peer.take()
            codes = [found.status.code for found in responses_in(written, "SendMessage", peer.last_id)]
            if codes or peer.socket.is_closed:
                break
            await asyncio.sleep(0.001)
        if codes != [20000]:
            self._outcome.fault("an honest client was not served")
        peer.hang_up()
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        self._peer.hang_up()


class Attack:
    """Hostile connections to a broker, beside an honest client. `step` does one try."""

    def __init__(self, serving: Serving, outcome: Outcome, seed: int) -> None:
        self._broker, self._server = serving
        self._outcome = outcome
        self._random = random.Random(~seed)
        self.honest = Honest(serving, outcome)

    async def step(self, number: int) -> None:
        raise NotImplementedError

    def _feed(self, peer: Peer | GrpcPeer, data: bytes) -> None:
        """Send bytes, and measure the processor time of their read."""
        start_s = time.process_time()
        try:
            peer.send(data)
        except Exception as error:
            self._outcome.fault(f"escaped: {error!r}")
        took_ms = 1000 * (time.process_time() - start_s)
        self._outcome.highest("slowest_ms", took_ms, slowest=data[:160].decode("latin-1"))

    async def end(self) -> None:
        self.honest.hang_up()


async def _run(attack: type[Attack], limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    """Attack a broker, which then must start again, and have every message of the honest client."""
    config = quick(config_in(folder))
    async with serving(config) as running:
        attacking = attack(running, outcome, seed)
        for number in limit:
            await attacking.step(number)
        await attacking.end()
    honest = attacking.honest
    try:
        broker = BrokerController(config)
    except Exception as error:
        outcome.fault(f"the broker does not start again: {error!r}")
        return
    found = sorted(body for (topic, _, _), body in read_all(broker).items() if topic == "honest")
    if found != sorted(honest.stored):
        outcome.fault(f"{len(found)} messages of an honest client are stored, {len(honest.stored)} were acknowledged")
    await broker.stop()
    for path in config.data_dir.parent.iterdir():
        if path != config.data_dir:
            outcome.fault(f"a file outside of the data folder: {path.name}")


# Frames


class FrameAttack(Attack):
    def __init__(self, serving: Serving, outcome: Outcome, seed: int) -> None:
        super().__init__(serving, outcome, seed)
        self._corpus = Frames(seed)
        self._hostile: list[Peer] = []

    async def step(self, number: int) -> None:
        """Let a hostile connection read bytes; once in a while others connect, and an honest client sends."""
        if number % EVERY == 0:
            await asyncio.sleep(0)
            self._reconnect()
            self.honest.send(b"honest %d" % number, number)
            await self._finish()
            self._check_limits()
        data = b"".join(self._corpus.frame(2 * number + at) for at in range(2 if number % 10 == 0 else 1))
        peer = self._random.choice(self._hostile)
        size = max(len(data) // 3, 1) if self._random.random() < 0.05 else len(data)
        for at in range(0, len(data), size):
            self._feed(peer, data[at : at + size])
        try:
            peer.received()
        except FrameError as error:
            self._outcome.fault(f"a response cannot be read: {error}")

    def _reconnect(self) -> None:
        for peer in [peer for peer in self._hostile if peer.socket.is_closed or self._random.random() < 0.01]:
            self._hostile.remove(peer)
            peer.hang_up()
        while len(self._hostile) < 8:
            self._hostile.append(Peer(self._server, 1000 + self._random.randrange(60_000)))

    async def _finish(self) -> None:
        """Let the work of requests end."""
        turns = self._broker.turns
        for _ in range(MAX_ITERATIONS):
            if not turns.waiting:
                return
            await asyncio.sleep(0)
        self._outcome.fault(f"a request is not done after {MAX_ITERATIONS} event-loop iterations")
        for peer in self._hostile:
            peer.socket.close()

    def _check_limits(self) -> None:
        for topic in self._broker.topics:
            if not LEGAL(topic.name) or max(topic.read_queues, topic.write_queues) > MAX_QUEUES_PER_TOPIC:
                self._outcome.fault("there is a topic that may not exist")
        for group in self._broker.group_configs:
            if not LEGAL(group.name) or not 0 <= group.retry_queues <= MAX_RETRY_QUEUES:
                self._outcome.fault("there is a group that may not exist")
        self._outcome.highest("peak_mib", peak_mib())
        if peak_mib() > MAX_MIB:
            self._outcome.fault(f"more than {MAX_MIB} MiB of memory")
            peak_mib(is_counted_from_now=True)

    async def end(self) -> None:
        for peer in self._hostile:
            peer.hang_up()
        self._outcome.figures["honest"] = len(self.honest.stored)
        await super().end()


async def frames(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    await _run(FrameAttack, limit, seed, folder, outcome)


# Calls


class CallAttack(Attack):
    def __init__(self, serving: Serving, outcome: Outcome, seed: int) -> None:
        super().__init__(serving, outcome, seed)
        self._peer = GrpcPeer(self._server, 1)

    async def step(self, number: int) -> None:
        if number % CALLS_PER_CONNECTION == 0 or self._peer.socket.is_closed:
            self._peer.hang_up()
            self._peer = GrpcPeer(self._server, number % 60_000 + 2)
        self._feed(self._peer, self._call())
        _keep_handles(self._peer.take())
        if number % EVERY == 0:
            await self.honest.call()

    def _call(self) -> bytes:
        chance, peer = self._random, self._peer
        method = chance.choice(list(METHODS))
        timeout = chance.choice((b"5S", b"5S", b"0n", b"1m", b"99999999H", b"x", b""))
        data = peer.call(method, filled(METHODS[method].request, chance), chance.choice(TEXTS), timeout)
        kind = chance.random()
        if kind < 0.1:  # change some bytes
            changed = bytearray(data)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            return bytes(changed)
        if kind < 0.15:
            return data + http2.encode_reset(peer.last_id, chance.choice((0, 8, 2**32 - 1)))
        if kind < 0.25:
            return data + self._frame()
        return data[: chance.randrange(len(data))] if kind < 0.28 else data

    def _frame(self) -> bytes:
        chance, last_id = self._random, self._peer.last_id
        if chance.random() < 0.5:
            setting = chance.choice(list(http2.Setting))
            return http2.encode_settings({setting: chance.choice((0, 1, 100, 16_384, 65_535, 2**31 - 1, 2**32 - 1))})
        stream_id, size = chance.choice((0, last_id + 2, max(last_id, 1), 2)), chance.choice((0, 4, 5, 8, 20))
        return http2.encode(chance.randrange(11), chance.randrange(256), stream_id, chance.randbytes(size))

    async def end(self) -> None:
        """Disconnect all clients, after which nothing may be charged for them."""
        self._peer.hang_up()
        await super().end()
        await self._server._turns.done()
        if self._server.memory.used_bytes or self._server.connections:
            self._outcome.fault(f"{self._server.memory.used_bytes} bytes are charged for clients that have gone")
        if self._broker.pops.waiting:
            self._outcome.fault(f"{self._broker.pops.waiting} receives wait for clients that have gone")


def _keep_handles(written: bytes) -> None:
    """Keep the receipt handles of messages that arrived whole in one DATA frame."""
    for kind, _, _, payload in split(written):
        if kind == http2.DATA and b" broker-a " in payload:
            try:
                found = schema.ReceiveMessageResponse.FromString(payload[5:])
            except DecodeError:
                continue
            HANDLES.append(found.message.system_properties.receipt_handle)
            del HANDLES[:-20]


async def calls(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    await _run(CallAttack, limit, seed, folder, outcome)
