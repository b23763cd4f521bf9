"""The same bytes to two brokers, one with the compiled module and one without: responses, logs and indexes must be equal.

Most frames are sends of all three codes in three encodings: single messages and batches, with properties that mean something
to a broker and properties that mean nothing, to topics that there are and topics that there are not, with numbers at the
edges, some with bytes changed. Pulls come between them, and topics are changed and deleted. A fault is any difference. The
functions of the module also get bytes that need not be frames: they may decline them, and must not fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rocketlet.broker import runtime
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BATCH_TURN_MESSAGES, BrokerConfig
from rocketlet.broker.messages import sending
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting import connection, dispatch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.server import Listening, Serve, Server, Taps
from rocketlet.protocol import fast
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import MAX_REQUEST_HEADER_BYTES
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Ext, ExtValue, Frame, encode
from rocketlet.protocol.headers import SendMessage, write
from rocketlet.protocol.message import encode_batch

from .common import Limit, Outcome
from .corpus import NUMBERS, PROPERTIES
from .peers import Peer

KINDS = (JSON, ROCKETMQ, MSGPACK)
CODES = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
)
TOPICS = (*("t",) * 16, *("u",) * 8, "made", "%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "t\0", "x" * 130, "")
PLAIN = ("TAGS\x01A", "KEYS\x01k", "WAIT\x01true", "UNIQ_KEY\x017F000001", "colour\x01rot", "größe\x01ä")
TEXTS = (
    *("TAGS\x01A", "TAGS\x01", "TAGS\x01ä", "TAGS\x01\U0001f600x", "WAIT\x01true", "WAIT\x01", "AWAIT\x01x", "MODEL\x01x"),
    *("UNIQ_KEY\x017F000001", "colour\x01red", "é" * 3, 'a\x01"b\\c/\n\t', "x\x01\x7f"),
    *("TIMER_DELAY_MS\x01100", "TIMER_DX\x01x", "_SYS_MSG_PRIORITY_\x012", "_SYS_MSG_PRIORITY_\x01x"),
    *PROPERTIES,
)  # fmt: skip
SHORT_NAMES = dict(
    zip(write(SendMessage("", "", "", 0, 0, 0, 0, 0, "", 0, False, False, 0)), "abcdefghijkml", strict=True)
)
OTHER_KEYS = ("firstId", "acceptEncoding", "AccessKey", "n", "zz", "topic", "b")
EDGES: tuple[ExtValue, ...] = (*NUMBERS, "", "x", "+1", "01", "1_0", "é")
OTHERS: tuple[ExtValue, ...] = (True, "MSGPACK", "é")
BATCHES = (0, 1, 1, 2, 5, 40)
LARGE_BATCHES = (513, BATCH_TURN_MESSAGES, BATCH_TURN_MESSAGES + 1)
REPORTED_BYTES = 300
LETTERS = b'\x00\x01\x02\x09"\\uQ{}:,\x7f\x80\xff01'


class Pair:
    """Two brokers with the same clock, of which the first uses the compiled module for sends."""

    def __init__(self, folder: Path) -> None:
        clock = MovableClock(stands=True)
        self.nodes = [Node(folder / name, clock, is_compiled=name == "compiled") for name in ("compiled", "pure")]
        self._compared = 0

    def put_topic(self, config: TopicConfig) -> None:
        for node in self.nodes:
            node.broker.topics.put(config, node.broker.store.end)

    def delete_topic(self, name: str) -> None:
        for node in self.nodes:
            if node.broker.topics.get(name) is not None:
                node.broker.topics.delete(name, node.broker.store.end)
                node.broker.store.delete_topic(name)

    @property
    def taken(self) -> int:
        """Sends that the compiled module has taken."""
        return self.nodes[0].taken

    @property
    def repeated(self) -> int:
        """Pulls that the compiled module has repeated."""
        return self.nodes[0].repeated

    async def difference(self, reads: list[bytes]) -> str | None:
        """Return what differs after both brokers have read the same bytes; None if nothing does."""
        with still():
            for node in self.nodes:
                for data in reads:
                    if not node.peer.socket.is_closed:
                        node.peer.send(data)
            while not all(node.is_done for node in self.nodes):
                await asyncio.sleep(0)
        seen = [node.seen() for node in self.nodes]
        if seen[0] != seen[1]:
            at = next((at for at, (one, other) in enumerate(zip(*seen, strict=False)) if one != other), 0)
            shown = (data[max(at - REPORTED_BYTES, 0) : at + REPORTED_BYTES] for data in seen)
            return "responses differ at {}: {!r} and {!r}".format(at, *shown)
        ends = [node.broker.store.end for node in self.nodes]
        if ends[0] != ends[1]:
            return f"the logs end at {ends[0]} and {ends[1]}"
        size = ends[0] - self._compared
        if size and len({node.broker.store.read_log(self._compared, size) for node in self.nodes}) > 1:
            return f"the logs differ after {self._compared}"
        if self.nodes[0].indexes(self._compared) != self.nodes[1].indexes(self._compared):
            return f"the indexes differ after {self._compared}"
        self._compared = ends[0]
        return None


def in_python(serve: Serve) -> Serve:
    """Return the function without the compiled module."""

    def served(connection: RemotingConnection) -> None:
        with mock.patch.object(dispatch, "IS_COMPILED", False):
            serve(connection)

    return served


class Node:
    def __init__(self, folder: Path, clock: MovableClock, *, is_compiled: bool) -> None:
        routes = Routes(clock)
        config = BrokerConfig(folder, "127.0.0.1:9", name="broker-a", vip_channel=False)
        self.broker = BrokerController(config, routes, clock)
        taps = Taps() if is_compiled else Taps(serve=in_python)
        self.server = Server(Listening("127.0.0.1", 0), broker=self.broker, routes=routes, taps=taps)
        self.broker.store._marks._key = b"the same in both"
        self.taken = self.repeated = 0
        take = self.broker.store.take_pulls
        self.broker.store.take_pulls = lambda *args: self._count_pulls(take(*args))
        stage = self.broker.store.stage_sends
        self.broker.store.stage_sends = lambda *args: self._count(stage(*args))  # type: ignore[method-assign]
        self.peer = Peer(self.server, 1)

    @property
    def is_done(self) -> bool:
        """Whether everything that the broker has read is served."""
        return self.peer.socket.is_closed or self.peer.connection.is_reading

    def _count(self, taken: fast.EncodedSends | None) -> fast.EncodedSends | None:
        self.taken += taken.sends if taken is not None else 0
        return taken

    def _count_pulls(self, served: fast.ServedPulls | None) -> fast.ServedPulls | None:
        self.repeated += served.served if served is not None else 0
        return served

    def seen(self) -> bytes:
        """Return what the client has received; it connects again if its connection was closed."""
        data, self.peer.socket.written = b"".join(self.peer.socket.written), []
        if self.peer.socket.is_closed:
            self.peer.connection.connection_lost(None)
            self.peer = Peer(self.server, 1)
            data += b" closed"
        return data

    def indexes(self, position: int) -> object:
        """Return each queue's state, and its entries of messages after a position."""
        found = []
        for key, queue in sorted(self.broker.store.queues.items()):
            first = queue._first_from(position)
            found.append((key, queue.begin, queue.next, queue.put_bytes, queue.entries(first, queue.next - first)))
        return found


@contextlib.contextmanager
def still() -> Iterator[None]:
    """No piece of work is ever over, and the broker chooses the first queue: chance decides nothing."""
    clock = SimpleNamespace(**vars(time) | {"perf_counter": lambda: 0.0})
    with (
        mock.patch.object(runtime, "time", clock),
        mock.patch.object(dispatch, "time", clock),
        mock.patch.object(connection, "time", clock),
        mock.patch.object(sending, "random", SimpleNamespace(randrange=lambda count: 0)),
    ):
        yield


class Writer:
    """Makes reads of a socket; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pick = self._random.choice

    def reads(self) -> list[bytes]:
        kinds = self._pick((*((kind,) for kind in KINDS), KINDS))
        count = self._pick((1, 2, 5, 20, 100))
        changes = self._pick((0.0, 0.0, 0.0, 0.3))  # a header that cannot be read ends the connection
        pulls = self._pick((0.02, 0.02, 0.5))
        frames = [self._frame(self._pick(kinds), number, changes, pulls) for number in range(count)]
        data = b"".join(frames)
        cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(self._pick((0, 0, 1, 3))))
        return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if begin < end]

    def topic(self) -> TopicConfig:
        return TopicConfig(
            self._pick("tu"), self._random.randrange(1, 5), self._random.randrange(1, 5), self._pick((6, 6, 4, 2))
        )

    @property
    def chance(self) -> float:
        return self._random.random()

    def _frame(self, kind: int, opaque: int, changes: float, pulls: float) -> bytes:
        if self.chance < 0.03:
            opaque = self._pick((-1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, -(2**31)))
        data = encode(self._pull(kind, opaque) if self.chance < pulls else self._send(kind, opaque))
        return self._changed(data) if self.chance < changes else data

    def _pull(self, kind: int, opaque: int) -> Frame:
        fields: Ext = {
            "consumerGroup": "g", "topic": self._pick("tttu"), "queueId": 0, "queueOffset": self._random.randrange(30),
            "maxMsgNums": self._pick((1, 1, 32)), "sysFlag": self._pick((4, 4, 4, 5)), "commitOffset": self._pick((0, 0, 3)),
            "suspendTimeoutMillis": 0, "subscription": "*",
        }  # fmt: skip
        return Frame(RequestCode.PULL_MESSAGE, opaque, _as_text(kind, fields), serialize_type=kind)

    def _send(self, kind: int, opaque: int) -> Frame:
        code = self._pick(CODES)
        is_batch = self.chance < 0.2
        body = self._batch() if is_batch else self._random.randbytes(self._pick((0, 1, 30, 100, 1000, 20_000)))
        queue_id, sys_flag = self._pick((0, 0, 0, 1, 1, 3, 7, -1)), self._pick((0, 0, 0, 1, 4, 8, 0x31))
        flag, reconsume_times = self._pick((0, 0, 1, -1)), self._pick((0, 0, 1))
        ext = write(
            SendMessage(
                "p", self._pick(TOPICS), "TBW102", 4, queue_id, sys_flag, 1_795_641_579_886, flag, self._properties(),
                reconsume_times, False, is_batch, 16,
            )
        )  # fmt: skip
        if self.chance < 0.05:
            edge: ExtValue = self._pick(EDGES)
            ext[self._pick(list(ext))] = edge
        if self.chance < 0.05:
            del ext[self._pick(list(ext))]
        if self.chance < 0.1:
            other: ExtValue = self._pick(OTHERS)
            ext[self._pick(OTHER_KEYS)] = other
        if code != RequestCode.SEND_MESSAGE:
            ext = {SHORT_NAMES.get(name, name): value for name, value in ext.items()}
        if kind != MSGPACK or self.chance < 0.05:
            ext = _as_text(kind, ext)
        flag = self._pick((0,) * 20 + (1, 2, 2, 3))
        remark = self._pick((None,) * 20 + ("", "x"))
        try:
            encode(frame := Frame(code, opaque, ext, body, flag, remark, self._pick((0, 9, 12)), serialize_type=kind))
        except (OverflowError, ValueError):  # a number that MessagePack does not have
            return Frame(code, opaque, _as_text(kind, ext), body, serialize_type=kind)
        return frame

    def _properties(self) -> str:
        texts = PLAIN if self.chance < 0.7 else TEXTS
        found = "\x02".join(self._pick(texts)[:400] for _ in range(self._pick((0, 1, 2, 3, 5))))
        return found + self._pick(("", "", "", "\x02", "\x02\x02")) + ("x" * 32_200 if self.chance < 0.01 else "")

    def _batch(self) -> bytes:
        count = self._pick(BATCHES if self.chance < 0.98 else LARGE_BATCHES)
        entries = [
            (self._pick((0, 0, 7, -1)), self._random.randbytes(self._pick((0, 1, 50, 300))), self._properties()[:3000])
            for _ in range(count)
        ]
        body = encode_batch(entries)
        return self._changed_bytes(body) if self.chance < 0.1 else body

    def _changed(self, data: bytes) -> bytes:
        """The header is another one, its sizes mostly right."""
        if self.chance < 0.05:
            return self._changed_bytes(data)
        size = int.from_bytes(data[5:8], "big")
        header, body = self._changed_bytes(data[8 : 8 + size]), data[8 + size :]
        total = 4 + len(header) + len(body)
        return b"".join((total.to_bytes(4, "big"), data[4:5], len(header).to_bytes(3, "big"), header, body))

    def _changed_bytes(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._pick((1, 1, 2, 4))):
            at = self._random.randrange(len(changed) + 1)
            how = self.chance
            if how < 0.5:
                changed[at : at + 1] = bytes((self._pick(LETTERS),))
            elif how < 0.7:
                del changed[at : at + self._random.randrange(1, 5)]
            elif how < 0.9:
                changed[at:at] = self._random.randbytes(self._random.randrange(1, 5))
            else:
                changed[at : at + 4] = self._pick((-1, 0, 1, 22, 2**31 - 1, -(2**31))).to_bytes(4, "big", signed=True)
        return bytes(changed)

    def damaged(self, data: bytes) -> Iterator[bytes]:
        """Bytes that need not be frames."""
        yield data[: self._random.randrange(len(data) + 1)]
        yield data[self._random.randrange(len(data) + 1) :]
        yield self._changed_bytes(data)


def _as_text(kind: int, ext: Ext) -> dict[str, ExtValue]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in ext.items()}


QUEUE = SimpleNamespace(next=5)
PASSED: dict[bytes, tuple[Any, bytes]] = {b"\0t\0%d" % number: (QUEUE, b"\x01t") for number in range(4)}
TEXTS_OF_BROKER = bytes(8), b"00" * 8, b"CLUSTER\x01c", b"r"


def try_functions(data: bytes) -> None:
    """Call the module's functions for sends and pulls with bytes of any kind."""
    limits = sending._RUN_LIMITS
    source = fast.PullSource(lambda offset, count: data[:16] + bytes(count * 20), 0, 1 << 60, 0, 1000, 32, False)
    for at in (0, len(data) // 2):
        key = fast.pull_key(data, at, MAX_REQUEST_HEADER_BYTES)
        served = fast.take_pulls(
            data, at, MAX_REQUEST_HEADER_BYTES, {key or b"": None}, lambda *_: source, lambda position: (0, len(data), 3),
            lambda descriptor, size, start: data[start : start + size], lambda part, before: 0,
            (array("Q", (0, len(data) // 2)), array("I", (0, 0)), len(data), 0), (0, 0, b""), (0, 1 << 20, 1000, 1000),
        )  # fmt: skip
        assert served is None or at < served.end <= len(data)
        taken = fast.take_sends(data, at, b"", PASSED, 0, 1, b"", lambda _: b"", bytes(20), TEXTS_OF_BROKER, limits)
        assert taken is None or at < taken.end <= len(data)


async def sends(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    pair, writer = Pair(folder), Writer(seed)
    for name in "tu":
        pair.put_topic(TopicConfig(name, 4, 4))
    for number in limit:
        if number % 20 == 19:
            pair.put_topic(writer.topic())
        if number % 50 == 49:
            pair.delete_topic("u")
        reads = writer.reads()
        for data in reads:
            for damaged in writer.damaged(data):
                try_functions(damaged)
        outcome.add(read_bytes=sum(map(len, reads)))
        difference = await pair.difference(reads)
        if difference is not None:
            outcome.fault(f"{difference} (read {number})")
            break  # from now on everything differs
    outcome.figures |= {"log_bytes": pair.nodes[0].broker.store.end, "taken": pair.taken, "repeated": pair.repeated}
    if not pair.taken:
        outcome.fault("the compiled module took no send: make dev")
