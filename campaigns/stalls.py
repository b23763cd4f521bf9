"""One large request, or one event of many clients, after the other: how long the event loop does nothing else meanwhile.

Everything is as large as the limits allow. There are no sockets: what is measured is the broker's own work, of which the
longest piece that nothing interrupts is what an honest client waits for. A fault is a request that is not answered, or not
with success, and a piece that costs more than half a second of processor time, which is several times the longest there is.
The times stand in the figures, in ms; what holds them down is tested by counting work, in `tests/broker`.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import structlog
import uvloop
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import LIMITS, MAX_QUEUES_PER_TOPIC, BrokerConfig
from rocketlet.broker.machine import Garbage
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.protocol.bodies import DataVersion, GroupConfig, TopicConfig, encode_registration
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Ext, Frame, FrameError, encode
from rocketlet.protocol.headers import PullMessage, write

from .common import Limit, Outcome
from .frames import Peer
from .store import put

LARGE = "large"
ANSWER_S = 30.0
MAX_PIECE_MS = 500.0  # processor time, which does not depend on other processes
TOO_LARGE = "the answer is larger than"  # than any client could read: made as far as that, and refused

Step = Callable[[], Awaitable[None]]


class Stalls:
    """The longest time between two turns of the event loop since it was last read: by the clock, and how long of it the
    loop's thread had the processor, which does not depend on what else runs on the machine, nor on other threads."""

    def __init__(self) -> None:
        self._last_s = (time.perf_counter(), time.thread_time())
        self._worst_s = (0.0, 0.0)
        self._is_running = True

    def tick(self) -> None:
        self._look()
        if self._is_running:
            asyncio.get_running_loop().call_soon(self.tick)

    def _look(self) -> None:
        now_s = (time.perf_counter(), time.thread_time())
        clock_s, cpu_s = (now - last for now, last in zip(now_s, self._last_s, strict=True))
        self._worst_s = max(self._worst_s[0], clock_s), max(self._worst_s[1], cpu_s)
        self._last_s = now_s

    def read(self) -> dict[str, float]:
        self._look()
        (clock_s, cpu_s), self._worst_s = self._worst_s, (0.0, 0.0)
        return {"stall_ms": round(clock_s * 1000, 1), "cpu_ms": round(cpu_s * 1000, 1)}

    def stop(self) -> None:
        self._is_running = False


class Attack:
    """`size` is the share of the limits that is used."""

    def __init__(self, server: Server, broker: BrokerController, outcome: Outcome, size: float) -> None:
        self._server = server
        self._broker = broker
        self._outcome = outcome
        self._size = size
        self._stalls = Stalls()
        self._peers: list[Peer] = []
        self._ask = Peer(server, 1)

    def _sized(self, number: int) -> int:
        return max(int(number * self._size), 2)

    async def run(self, limit: Limit) -> None:
        self._stalls.tick()
        steps = self._steps()
        for number in limit:
            name, step = steps[number % len(steps)]
            begin_s = time.perf_counter()
            try:
                await step()
            except TimeoutError:
                self._outcome.fault(f"{name}: no answer")
                self._ask = Peer(self._server, 1)
            took_ms = round((time.perf_counter() - begin_s) * 1000, 1)
            found = self._stalls.read()
            self._outcome.figures[name] = found | {"took_ms": took_ms}
            if found["cpu_ms"] > MAX_PIECE_MS:
                self._outcome.fault(f"{name}: one piece of work takes {found['cpu_ms']} ms of processor time")
            self._outcome.tried += 1
        self._stalls.stop()

    def _steps(self) -> list[tuple[str, Step]]:
        def asks(code: int, ext: Ext | None = None, body: bytes = b"") -> Step:
            return lambda: self._asked(code, ext or {}, body)

        at_topic: Ext = {"topic": LARGE}
        at_group: Ext = {"consumerGroup": "g-0", "topic": LARGE}
        return [
            ("nothing", self._nothing),
            ("registration, JSON", lambda: self._register(compressed=False)),
            ("registration, compressed", lambda: self._register(compressed=True)),
            ("write permission wiped", asks(Code.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "flood-False"})),
            ("list of all routes", asks(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)),
            ("its connection ends", self._hang_up),
            ("a topic with all queues", self._fill_topic),
            ("topic statistics", asks(Code.GET_TOPIC_STATS_INFO, at_topic)),
            ("consume statistics", asks(Code.GET_CONSUME_STATS, at_group)),
            ("consume times", asks(Code.QUERY_CONSUME_TIME_SPAN, {"group": "g-0", "topic": LARGE})),
            ("group's history", asks(Code.GET_GROUP_HISTORY, {"consumerGroup": "g-0"})),
            ("offsets of 100 groups", self._fill_offsets),
            ("all offsets", asks(Code.GET_ALL_CONSUMER_OFFSET)),
            ("statistics of all groups", asks(Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})),
            ("correction of offsets", asks(Code.QUERY_CORRECTION_OFFSET, {"topic": LARGE, "compareGroup": "g-1"})),
            ("offsets cloned", asks(Code.CLONE_GROUP_OFFSET, {"srcGroup": "g-0", "destGroup": "g-c", "topic": LARGE})),
            ("everything saved", self._saved),
            ("topic deleted", asks(Code.DELETE_TOPIC_IN_BROKER, at_topic)),
            ("topics and groups", self._fill_names),
            ("all topics", asks(Code.GET_ALL_TOPIC_CONFIG)),
            ("all groups", asks(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)),
            ("names saved", self._saved),
            ("members join", self._join),
            ("list of members", asks(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "crowd"})),
            ("members leave at once", self._leave),
            ("held pulls", self._hold),
            ("a message for all held pulls", self._wake),
            ("held pulls end at once", self._leave),
        ]  # fmt: skip

    async def _nothing(self) -> None:
        await asyncio.sleep(0.2)

    async def _asked(self, code: int, ext: Ext, body: bytes = b"") -> None:
        self._ask.send(encode(Frame(code, 7, {key: str(value) for key, value in ext.items()}, body)))
        await self._answered(self._ask, code)

    async def _answered(self, peer: Peer, code: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not peer.socket.written:
                await asyncio.sleep(0)
        try:
            found = [frame for frame in peer.received() if frame.is_response]
        except FrameError as error:
            self._outcome.fault(f"{Code(code).name}: {error}")
            self._ask = Peer(self._server, 1)
            return
        if len(found) == 1 and TOO_LARGE in (found[0].remark or ""):
            return
        if len(found) != 1 or found[0].code != 0:
            self._outcome.fault(f"{Code(code).name}: {[(frame.code, frame.remark) for frame in found]}")

    async def _register(self, *, compressed: bool) -> None:
        topics = [TopicConfig(f"a-topic-of-a-usual-name-{number}", 8, 8) for number in range(self._sized(50_000))]
        body = encode_registration(DataVersion(1, 1), topics)
        if compressed:
            lines = [f"{topic.name} 8 8 6 SINGLE_TAG".encode() for topic in topics]
            version = orjson.dumps({"timestamp": 1, "counter": 1})
            parts = [version, *lines]
            data = [len(part).to_bytes(4, "big") + part for part in parts]
            data.insert(1, len(lines).to_bytes(4, "big"))
            body = zlib.compress(b"".join(data))
        ext: Ext = {
            "brokerName": f"flood-{compressed}", "brokerAddr": f"10.0.0.1:{1 + compressed}", "clusterName": "c",
            "haServerAddr": "", "brokerId": 0, "compressed": str(compressed).lower(), "bodyCrc32": 0,
        }  # fmt: skip
        await asyncio.sleep(0)
        self._stalls.read()
        await self._asked(Code.REGISTER_BROKER, ext, body)

    async def _hang_up(self) -> None:
        self._ask.hang_up()
        await asyncio.sleep(0.05)
        self._ask = Peer(self._server, 1)

    async def _in_pieces(self, count: int, make: Callable[[int], object], piece: int = 50) -> None:
        for number in range(count):
            make(number)
            if number % piece == 0:
                await asyncio.sleep(0)

    async def _fill_topic(self) -> None:
        broker, queues = self._broker, self._sized(MAX_QUEUES_PER_TOPIC)
        broker.topics.put(TopicConfig(LARGE, queues, queues), broker.store.end)
        broker.group_configs.ensure("g-0")

        def fill(number: int) -> None:
            put(broker, broker.store.queue(LARGE, number), b"x")
            broker.offsets.put("g-0", LARGE, number, 1)

        await self._in_pieces(queues, fill)
        await asyncio.sleep(0)
        self._stalls.read()

    async def _fill_offsets(self) -> None:
        queues, broker = self._sized(MAX_QUEUES_PER_TOPIC), self._broker

        def fill(number: int) -> None:
            broker.group_configs.ensure(f"g-{number}")
            for queue in range(queues):
                broker.offsets.put(f"g-{number}", LARGE, queue, 1)

        await self._in_pieces(100, fill, 1)
        self._stalls.read()

    async def _saved(self) -> None:
        await self._broker.device.do(self._broker.saving())
        await asyncio.sleep(0)

    async def _fill_names(self) -> None:
        broker = self._broker

        def fill(number: int) -> None:
            broker.topics.put(TopicConfig(f"a-topic-of-a-usual-name-{number}", 8, 8), broker.store.end)

        await self._in_pieces(self._sized(49_000), fill)
        await self._in_pieces(self._sized(9_800), lambda number: broker.group_configs.put(GroupConfig(f"n-{number}")))
        self._stalls.read()

    async def _join(self) -> None:
        for number in range(self._sized(LIMITS.max_members)):
            peer = Peer(self._server, 1000 + number)
            self._peers.append(peer)
            consumer = {
                "groupName": "crowd", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [{"topic": "t", "subString": "*"}],
            }  # fmt: skip
            body = orjson.dumps({"clientID": f"c-{number}", "consumerDataSet": [consumer], "producerDataSet": []})
            peer.send(encode(Frame(Code.HEART_BEAT, 1, {}, body)))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0.1)

    async def _leave(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self._peers:  # as sockets that all end between two looks at them
            loop.call_soon(peer.hang_up)
        self._peers.clear()
        await asyncio.sleep(0.5)
        await self._settled()

    async def _settled(self) -> None:
        await self._asked(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})

    async def _hold(self) -> None:
        self._broker.topics.put(TopicConfig("t", 8, 8), self._broker.store.end)
        for number in range(self._sized(5000)):
            peer = Peer(self._server, 1000 + number)
            self._peers.append(peer)
            header = PullMessage("crowd", "t", 0, 0, 32, 4 | 2, 0, 60_000, subscription="*")
            ext = {key: str(value) for key, value in write(header).items()}
            frames = [encode(Frame(Code.PULL_MESSAGE, n, {**ext, "queueId": str(n)})) for n in (0, 0, 1, 2, 3, 4, 5, 6)]
            peer.send(b"".join(frames))
            if number % 20 == 0:
                await asyncio.sleep(0)
        self._stalls.read()

    async def _wake(self) -> None:
        ext = {"a": "p", "b": "t", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0", "i": ""}
        await self._asked(Code.SEND_MESSAGE_V2, ext, b"x" * 1000)
        async with asyncio.timeout(ANSWER_S):
            while not all(peer.socket.written for peer in self._peers):
                await asyncio.sleep(0.01)


DEFAULT_COUNT = 28


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    before = structlog.get_config()
    structlog.configure(processors=[lambda *_: ""], logger_factory=structlog.ReturnLoggerFactory())
    try:
        uvloop.run(_run(limit, folder, outcome))
    finally:
        structlog.configure(**before)
    return outcome


async def _run(limit: Limit, folder: Path, outcome: Outcome) -> None:
    is_short = limit.count is not None and limit.count < DEFAULT_COUNT
    routes = Routes()
    broker = BrokerController(BrokerConfig(folder / "data", "127.0.0.1:9", vip_channel=False), routes)
    async with Garbage(), Server(Listening("127.0.0.1", 0), broker=broker, routes=routes) as server:
        await Attack(server, broker, outcome, 0.02 if is_short else 1.0).run(limit)
