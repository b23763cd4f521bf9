"""A model of a client that shares messages (POP): it handles, renews, hands back, forgets and oversleeps them by chance."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from rocketlet.client import RocketletError
from rocketlet.client.wire.cluster import Cluster
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import (
    FROM_FIRST,
    AckMessage,
    ChangeInvisibleTime,
    PopMessage,
    PopMessageResult,
    UnregisterClient,
    read,
    write,
)
from rocketlet.protocol.message import POP_CK, Record, decode_records
from rocketlet.protocol.names import Queue, parse_subscription
from rocketlet.protocol.properties import find

from .hands import Hand
from .loop import Process

if TYPE_CHECKING:
    from .sharing import SharingWorld

HEARTBEAT_S = 10.0
POLL_S = 5.0
INVISIBLE_S = 4.0
BATCH = 8
RETRY_S = 1.0
LAST_TRY, LAST_TRY_IN_ORDER = 4, 2  # from then on a message is handled well: a run is to end
REMOTE = 3.0  # a request may take so long beyond its wait


class PoppingMember:
    """As `world.Member`, to those who look at members. It owns no queue."""

    blind_until_s = 0.0
    is_blind = False

    def __init__(self, world: SharingWorld, name: str, topics: tuple[str, ...]) -> None:
        self.name = name
        self.topics = topics
        self.process = Process(name)
        self.has_left = False
        self.client_id = f"192.0.2.2@{name}"
        self._world = world
        self._cluster = Cluster(world.name_server)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_awake(self) -> bool:
        return not self.process.is_paused

    def believes_in(self, queue: Queue) -> bool:
        return False

    def assignment(self) -> set[Queue]:
        return set()

    async def join(self) -> None:
        for topic in self.topics:
            await self._cluster.find_route(topic)
        await self._beat()
        self._spawn(self._beat_forever())
        for topic in self.topics:
            for broker_name in sorted(self._cluster.masters()):
                self._spawn(self._pop_forever(topic, broker_name))

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for broker_name in self._cluster.masters():
            await self._said(
                broker_name,
                RequestCode.UNREGISTER_CLIENT,
                write(UnregisterClient(self.client_id, consumer_group=self._world.group)),
            )
        await self._cluster.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._beat()

    async def _beat(self) -> None:
        wanted = tuple(parse_subscription(topic, "*") for topic in self.topics)
        data = ConsumerData(self._world.group, "CONSUME_POP", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", wanted)
        for broker_name in self._cluster.masters():
            await self._said(
                broker_name, RequestCode.HEART_BEAT, {}, bodies.encode_heartbeat(Heartbeat(self.client_id, (data,)))
            )

    async def _said(self, broker_name: str, code: int, ext: object, body: bytes = b"") -> bool:
        """Whether the broker has said yes."""
        try:
            connection = await self._cluster.broker(broker_name)
            answer = await connection.ask(code, ext, body, timeout_s=REMOTE)  # type: ignore[arg-type]
        except RocketletError:
            return False
        return answer.code == ResponseCode.SUCCESS

    # Messages

    async def _pop_forever(self, topic: str, broker_name: str) -> None:
        attempt = uuid.UUID(int=self._world.rng.getrandbits(128)).hex
        while True:
            is_in_order = self._world.plan.orderly
            header = PopMessage(
                self._world.group, topic, -1, BATCH, int(INVISIBLE_S * 1000), int(POLL_S * 1000), FROM_FIRST,
                attempt_id=attempt if is_in_order else None, order=is_in_order,
            )  # fmt: skip
            try:
                connection = await self._cluster.broker(broker_name)
                answer = await connection.ask(RequestCode.POP_MESSAGE, write(header), timeout_s=POLL_S + REMOTE)
            except RocketletError:
                await asyncio.sleep(RETRY_S)
                continue
            attempt = uuid.UUID(int=self._world.rng.getrandbits(128)).hex
            if answer.code == ResponseCode.SUCCESS:
                result = read(PopMessageResult, answer.ext)
                popped_s = self._world.loop.time() - time.time() + result.pop_time / 1000
                self._take_in(topic, broker_name, list(decode_records(answer.body)), popped_s)
            elif answer.code != ResponseCode.POLLING_TIMEOUT:
                self._world.note(f"{self.name} is refused: {answer.code} {answer.remark}")
                await asyncio.sleep(RETRY_S)

    def _take_in(self, topic: str, broker_name: str, records: list[Record], popped_s: float) -> None:
        hands = [
            Hand(self, record, Queue(topic, broker_name, record.queue_id), popped_s, popped_s + INVISIBLE_S)
            for record in records
        ]
        self._world.given(self, hands)
        if self._world.plan.orderly:
            runs: dict[tuple[Queue, str], list[Hand]] = {}
            for hand in hands:
                runs.setdefault((hand.queue, hand.key), []).append(hand)
            for run in runs.values():
                for number, hand in enumerate(run):
                    hand.behind = run[number + 1 :]
                self._spawn(self._handle_run(run))
        else:
            for hand in hands:
                self._spawn(self._handle(hand))

    async def _handle_run(self, run: list[Hand]) -> None:
        """One after the other. If one fails, those behind it will come again with it."""
        for hand in run:
            if not await self._handle(hand):
                hand.free_behind()
                return

    async def _handle(self, hand: Hand) -> bool:
        """Whether it is done and acknowledged."""
        chance = self._world.rng.random()
        is_in_order = self._world.plan.orderly
        if hand.attempt >= (LAST_TRY_IN_ORDER if is_in_order else LAST_TRY) or chance < 0.6:
            await asyncio.sleep(self._world.rng.uniform(0, 0.3 if is_in_order else 1.5))
            return await self._ack(hand)
        if chance < 0.72:
            return await self._hand_back(hand, self._world.rng.choice((0.0, 0.3, 1.0, 3.0)))
        if chance < 0.84:
            return await self._handle_long(hand)
        if chance < 0.92:
            return False  # forgotten: its time runs out
        await asyncio.sleep(INVISIBLE_S + self._world.rng.uniform(0, 3))
        await self._ack(hand)
        return False

    async def _handle_long(self, hand: Hand) -> bool:
        """Renews it twice, and is longer at it than its time."""
        for _ in range(2):
            await asyncio.sleep(INVISIBLE_S * 0.6)
            sent_s = self._world.loop.time()
            if not await self._change(hand, INVISIBLE_S):
                return False
            hand.renewed(sent_s + INVISIBLE_S, self._world.loop.time())
        await asyncio.sleep(INVISIBLE_S * 0.6)
        return await self._ack(hand)

    async def _hand_back(self, hand: Hand, delay_s: float) -> bool:
        sent_s = self._world.loop.time()
        hand.held_s = min(hand.held_s, sent_s + delay_s)
        hand.free_behind()
        if await self._change(hand, delay_s):
            hand.due_s = self._world.loop.time() + delay_s
        return False

    async def _change(self, hand: Hand, seconds: float) -> bool:
        header = ChangeInvisibleTime(*self._place(hand), int(seconds * 1000))
        return await self._said(hand.queue.broker_name, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, write(header))

    async def _ack(self, hand: Hand) -> bool:
        self._world.acknowledging(hand)
        is_answered = await self._said(
            hand.queue.broker_name, RequestCode.ACK_MESSAGE, write(AckMessage(*self._place(hand)))
        )
        return is_answered and self._world.acknowledged_by(hand)

    def _place(self, hand: Hand) -> tuple[str, str, int, str, int]:
        handle = str(find(hand.record.properties, POP_CK))
        return self._world.group, hand.queue.topic, hand.queue.queue_id, handle, hand.record.queue_offset
