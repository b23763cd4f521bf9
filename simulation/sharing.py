"""A simulated run of a group whose members share messages, or some do and others pull queues.

Beside what `world` checks of members that pull:

- Nobody gets a message while it is in other hands, whether those pop or pull, nor once it was acknowledged: also over stops
  and kills of the broker.
- A message that was handed back comes again when its time is over, and not before.
- In a group in order, a message comes when those of its message group before it are done, or together with them.
- In the end every message was handled well by somebody who had it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rocketlet.broker.pops.deliveries import SHARDING_KEY
from rocketlet.client import Message, Producer
from rocketlet.client.errors import RocketletError
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.names import Queue

from .hands import Hand, Place
from .loop import SimLoop
from .popping import PoppingMember
from .violations import Violation, raise_later
from .world import Node, World

if TYPE_CHECKING:
    from rocketlet.broker.broker import Broker

    from .foreign import ForeignMember
    from .member import Member

ROUNDING_S = 0.002  # times on the disk are in ms
LATE_S = 1.0
CALM_S = 15.0  # after whatever stirs the group, a message may be late for so long
UNWRITTEN_S = 0.5  # a delivery so shortly before a kill need not be on the disk
FORGIVEN_S = 45.0  # after a kill, members that pull may go on from older offsets
ROUTINE = (" handles ", " gets ", " takes ", " gives ", " reads ", " drops ", "not sent")
KEYS = 3


class SharingWorld(World):
    def __init__(self, seed: int, loop: SimLoop, folder: Path, scenario: str | None = None) -> None:
        super().__init__(seed, loop, folder, "")
        is_mixed = self.rng.random() < 0.5
        self.kinds = ("pops", "pops", "ours", "foreign") if is_mixed else ("pops",)
        self.plan = replace(
            self.plan, mixed=False, long_handlers=0.0, drain_s=30.0, orderly=not is_mixed and self.rng.random() < 0.4
        )
        self._hands: dict[Place, Hand] = {}
        self._done: set[Place] = set()
        self._maybe: set[bytes] = set()
        self._sent: dict[tuple[Queue, str], list[int]] = defaultdict(list)
        self._stirred_s = 0.0

    def note(self, text: str) -> None:
        if not any(word in text for word in ROUTINE):
            self._stirred_s = self.loop.time()
        if "restarts" in text and "foreign" in self.kinds:  # Apache's client repeats messages without a commit
            super().crashed()
        super().note(text)

    async def start_node(self, node: Node) -> None:
        await super().start_node(node)
        assert node.broker is not None
        if self.plan.orderly:
            node.broker.group_configs.put(GroupConfig(self.group, consume_orderly=True))

    def crashed(self) -> None:
        super().crashed()
        for hand in self._hands.values():
            if hand.since_s > self.loop.time() - UNWRITTEN_S:
                hand.is_free = True

    async def join(self, topics: tuple[str, ...] | None = None, *, foreign: bool = False) -> None:
        kind = self.rng.choice(self.kinds)
        if kind != "pops":
            await super().join(topics, foreign=kind == "foreign")
            return
        member = PoppingMember(self, f"p{len(self.members)}", topics or tuple(self.topics))
        self.members.append(cast("Member", member))
        self.note(f"{member.name} joins")
        with member.process.running():
            task = asyncio.create_task(self._enter(cast("Member", member)))
        while not task.done() and not member.process.is_dead:
            await asyncio.wait({task}, timeout=1)

    # Words of clients that pop

    def given(self, member: PoppingMember, hands: Sequence[Hand]) -> None:
        together = {hand.place for hand in hands}
        for hand in hands:
            self.note(f"{member.name} gets {hand.queue} {hand.record.queue_offset} for the {hand.attempt}. time")
            last = self._hands.get(hand.place)
            if last is not None and hand.popped_s < last.popped_s:  # it stood still while the answer lay in its socket
                continue
            fault = self._fault_of(hand) or (self._disorder(hand, together) if self.plan.orderly else None)
            if fault:
                raise_later(Violation(f"{hand.queue} {hand.record.queue_offset} is given to {member.name}, {fault}"))
            self._hands[hand.place] = hand
            hand.since_s = self.loop.time()

    def _fault_of(self, hand: Hand) -> str | None:
        now_s, before = self.loop.time(), self._hands.get(hand.place)
        if hand.place in self._done:
            return "and was acknowledged"
        if before is not None and not before.is_free and now_s < before.held_s - ROUNDING_S:
            return f"and is {before.member.name}'s until {before.held_s:.3f}"
        if before is not None and before.due_s is not None and self._stirred_s < before.due_s - CALM_S:
            late_s = now_s - before.due_s
            if late_s > LATE_S:
                return f"{late_s:.3f} s after its time"
        queue = hand.queue
        times = self.handlings[queue.topic, queue.broker_name, queue.queue_id, hand.record.queue_offset]
        if times and not self._may_repeat(*times[-1]) and not self._was_killed():
            return f"and {times[-1][1].name}, which pulls, has handled it"
        return None

    def _disorder(self, hand: Hand, together: set[Place]) -> str | None:
        for offset in self._sent[hand.queue, hand.key]:
            place = hand.queue, offset
            if offset >= hand.record.queue_offset:
                return None
            other = self._hands.get(place)
            if place not in self._done and place not in together and not (other is not None and other.is_sent):
                return f"before {offset} of its message group"
        return None

    def acknowledging(self, hand: Hand) -> None:
        hand.is_sent = True
        if self._hands.get(hand.place) is hand:  # else the broker must not take it
            self._maybe.add(hand.record.body)

    def acknowledged_by(self, hand: Hand) -> bool:
        """Whether the message is done: it was in these hands when the broker said so."""
        if self._hands.get(hand.place) is not hand or hand.is_free or self.loop.time() >= hand.held_s:
            return False
        self._done.add(hand.place)
        self._bodies[hand.record.body] += 1
        return True

    # Words of members that pull

    def handled(self, member: Member | ForeignMember, message: Message) -> None:
        super().handled(member, message)
        place = message.queue, message.queue_offset
        hand = self._hands.get(place)
        fault = None
        if place in self._done:
            fault = None if self._was_killed() else "which was acknowledged"
        elif hand is not None and not hand.is_free and self.loop.time() < hand.held_s - ROUNDING_S:
            fault = f"which is {hand.member.name}'s until {hand.held_s:.3f}"
        if fault:
            raise_later(Violation(f"{member.name} handles {message.queue} {message.queue_offset}, {fault}"))

    def _was_killed(self) -> bool:
        return any(crash > self.loop.time() - FORGIVEN_S for crash in self._crashes)

    async def _send_forever(self) -> None:
        async with Producer(self.name_server, retries=0) as producer:
            while True:
                topic, key = self.rng.choice(self.topics), f"k{self.rng.randrange(KEYS)}"
                self.numbers += 1
                body = b"%d" % self.numbers
                try:
                    result = await producer.send(topic, body, queue_key=key, properties={SHARDING_KEY: key})
                    self.acknowledged.append((topic, body))
                    self._sent[result.queue, key].append(result.queue_offset)
                except RocketletError as error:
                    self.note(f"not sent: {type(error).__name__}")
                await asyncio.sleep(self.rng.expovariate(8))

    async def _watch_unread(self) -> None:
        """A queue that is popped has no reader."""

    # The end

    def _fault(self) -> str | None:
        left = [item for item in self.acknowledged if not self._bodies[item[1]] and item[1] not in self._maybe]
        if left:
            return f"{len(left)} messages were never handled to their end: {left[:3]}"
        for node in self.nodes:
            assert node.broker is not None
            for topic in self.topics:
                config = node.broker.topics.get(topic)
                for queue_id in range(config.read_queues if config else 0):
                    fault = self._queue_fault(node.broker, Queue(topic, node.name, queue_id))
                    if fault:
                        return fault
        return None

    def _queue_fault(self, broker: Broker, queue: Queue) -> str | None:
        stored = broker.store.queues.get((queue.topic, queue.queue_id))
        end = stored.next if stored else 0
        offset = broker.offsets.get(self.group, queue.topic, queue.queue_id) or 0
        return None if offset == end else f"{queue} is committed to {offset} of {end}"
