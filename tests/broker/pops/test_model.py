"""Deliveries against a model that is simple, in any order of events, with kills that cut the journal at any byte."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rocketlet.broker.pops.deliveries import DeliveryState
from rocketlet.broker.pops.requests import AckStatus, Delivered, PopResult, Why
from rocketlet.protocol.message import decode_record

from ...support.examples import examples
from .world import World, client_of

NEW, OUT, FREE, DONE = "new", "out", "free", "done"
QUEUES = 2


@dataclass
class Message:
    """A message as the model knows it. is_sure: no kill has left a doubt. done_at: the journal's size behind its end."""

    body: str
    queue: int
    key: str
    state: str = NEW
    attempts: int = 0
    deadline_s: float = 0.0
    handle: str = ""
    is_sure: bool = True
    done_at: int = 0
    client: str = ""


class Shared(RuleBasedStateMachine):
    is_in_order = False

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, Message] = {}
        self.handles: dict[str, str] = {}
        self.reset_at = 0.0  # the journal's size when the last reset of an offset was saved

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self._folder.name) / "data", queues=QUEUES)
        self.world.group("g", consume_orderly=self.is_in_order, retry_max_times=1000)
        self.world.receive()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self._drain()
        self.world.kill()
        self._folder.cleanup()

    # Looking at the model

    @property
    def now_s(self) -> float:
        return self.world.clock.monotonic_s()

    def _expire(self) -> None:
        for message in self.messages.values():
            if message.state == OUT and message.deadline_s <= self.now_s:
                message.state = FREE

    def _is_due(self, message: Message) -> bool:
        """Whether a receive has to find it."""
        if message.state not in (NEW, FREE) or not message.is_sure:
            return False
        return not self.is_in_order or not self._before(message)

    def _before(self, message: Message) -> list[Message]:
        """The earlier ones of its message group that are not done for sure."""
        found = []
        for other in self.messages.values():
            if other is message:
                break
            if (other.queue, other.key) == (message.queue, message.key) and (other.state != DONE or not other.is_sure):
                found.append(other)
        return found

    # Rules

    @rule(queue=st.integers(0, QUEUES - 1), key=st.sampled_from("ab"))
    def send(self, queue: int, key: str) -> None:
        body = f"m{len(self.messages)}"
        self.messages[body] = Message(body, queue, key)
        self.world.send(body, queue=queue, __SHARDINGKEY=key)

    @rule(count=st.integers(1, 4), invisible_s=st.integers(1, 20), client=st.sampled_from("cd"))
    def receive(self, count: int, invisible_s: int, client: str) -> None:
        self._expire()
        received = self.world.receive(count, invisible_s * 1000, client=client)
        self._take(received, invisible_s, client)
        if len(received.messages) < count:
            due = [item.body for item in self.messages.values() if self._is_due(item)]
            assert not due, f"not given: {due}"

    def _take(self, received: PopResult, invisible_s: float, client: str) -> None:
        assert (received.why is Why.FOUND) == bool(received.messages)
        given: list[Message] = []
        for delivered in received.messages:
            message = self.messages[decode_record(delivered.record).body.decode()]
            self._check(message, delivered, given)
            given.append(message)
        for delivered, message in zip(received.messages, given, strict=True):
            was_done = message.state == DONE
            message.attempts = message.attempts + (not was_done) if message.is_sure else delivered.attempt
            message.state, message.deadline_s = OUT, self.now_s + invisible_s
            message.handle, message.is_sure = delivered.handle, True
            message.client = client
            self.handles[delivered.handle] = message.body

    def _check(self, message: Message, delivered: Delivered, given: list[Message]) -> None:
        assert message not in given
        assert delivered.queue_id == message.queue
        before = [other for other in self._before(message) if other not in given] if self.is_in_order else []
        assert not [other for other in before if other.is_sure], "an earlier one of its message group is not done"
        if message.is_sure:
            comes_with = self.is_in_order and any(
                (other.queue, other.key) == (message.queue, message.key) for other in given
            )
            assert message.state in (NEW, FREE) or comes_with, f"{message} is in flight at another client, or done"
            was_done = message.state == DONE
            assert delivered.attempt == max(message.attempts + (not was_done), 1)
        assert delivered.handle not in self.handles

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self._expire()
        handle = data.draw(st.sampled_from(sorted(self.handles)))
        message = self.messages[self.handles[handle]]
        (outcome,) = self.world.ack(handle)
        if outcome.is_done:
            is_ours = message.handle == handle
            if message.is_sure and not is_ours:
                # an older handle is done with what is finished, and with nothing else
                assert message.state == DONE
            if is_ours or not message.is_sure:
                if message.state != DONE or not message.is_sure:
                    message.done_at = self.world.frames.size
                message.state, message.is_sure = DONE, True
        else:
            assert message.handle != handle or not message.is_sure, outcome

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), seconds=st.integers(0, 30), is_counted=st.booleans())
    def change(self, data: st.DataObject, seconds: int, is_counted: bool) -> None:
        self._expire()
        handle = data.draw(st.sampled_from(sorted(self.handles)))
        message = self.messages[self.handles[handle]]
        changed = self.world.state.change("g", "t", handle, seconds * 1000, is_counted=is_counted)
        self.world.turn()
        if not message.is_sure:
            return
        if message.handle != handle:
            assert not changed.outcome.is_done or message.state == DONE
        elif message.state != DONE:
            assert changed.outcome.is_done
            message.attempts = max(message.attempts - (not is_counted), 0)
            message.state = OUT if seconds else FREE
            message.deadline_s = self.now_s + seconds

    @rule(count=st.integers(1, 4), client=st.sampled_from("cd"))
    def receive_and_lose(self, count: int, client: str) -> None:
        """The answer does not reach the client."""
        self._expire()
        received = self.world.receive(count, 5000, client=client)
        self._take(received, 5, client)
        self.world.state.put_back("g", received.messages)
        self.world.turn()
        for delivered in received.messages:
            message = self.messages[self.handles[delivered.handle]]
            message.state, message.attempts = FREE, max(message.attempts - 1, 0)

    @rule(queue=st.integers(0, QUEUES - 1), part=st.floats(0, 1))
    def reset(self, queue: int, part: float) -> None:
        """An administrator sets the group's offset."""
        sent = [message for message in self.messages.values() if message.queue == queue]
        offset = round(part * len(sent))
        if not sent or offset == self.world.offsets.get("g", "t", queue):
            return
        self.world.offsets.put("g", "t", queue, offset)
        self.world.state.offsets_reset("g", "t", queue)
        self.world.turn()
        for number, message in enumerate(sent):
            message.state, message.attempts = (DONE if number < offset else NEW), 0
            message.handle, message.done_at = "", 0
        self.reset_at = inf

    @rule(client=st.sampled_from("cd"))
    def lose_client(self, client: str) -> None:
        """A client without extended messages keeps what it has in flight."""
        self.world.state.client_gone(client_of(client))
        self.world.turn()

    @rule(milliseconds=st.integers(1, 15_000))
    def wait(self, milliseconds: int) -> None:
        self.world.advance(milliseconds / 1000)

    @rule()
    def save(self) -> None:
        before = self.world.frames.base
        self.world.save()
        base = self.world.frames.base
        if base != before:
            for message in self.messages.values():
                message.done_at = base
        if base != before or self.reset_at == inf:
            self.reset_at = self.world.frames.size

    @rule(cut=st.floats(0, 1), is_torn_at_the_end=st.booleans())
    def kill(self, cut: float, is_torn_at_the_end: bool) -> None:
        """Sometimes within the last frame, sometimes anywhere: as when the machine ends."""
        size = self.world.frames.size
        self.world.kill()
        at = size if is_torn_at_the_end and cut > 0.5 else int(size * cut)
        if self.world.journal.exists():
            assert self.world.journal.stat().st_size == size
            with self.world.journal.open("r+b") as file:
                file.truncate(at)
        self.world.advance(0.1)  # no start is quicker
        self.world.open()
        self.world.advance(0)  # deadlines that have passed meanwhile
        for message in self.messages.values():
            is_done = message.state == DONE
            if (self._is_provisional(message) if is_done else at < size) or (is_done and message.done_at > at):
                message.is_sure = False
            message.is_sure = message.is_sure and self.reset_at <= at

    def _is_provisional(self, message: Message) -> bool:
        return self.is_in_order and bool(self._before(message))

    @invariant()
    def offsets_say_what_is_done(self) -> None:
        if not hasattr(self, "world"):
            return
        for queue_id, numbers in self.world.state.pools.numbers("g", "t").items():
            assert numbers.committed <= numbers.next <= numbers.end
            committed = self.world.offsets.get("g", "t", queue_id)
            assert committed is not None
            assert committed <= numbers.next
            sent = [message for message in self.messages.values() if message.queue == queue_id]
            for message in sent[:committed]:
                assert message.state == DONE or not message.is_sure, "not done, and behind the group's offset"

    @invariant()
    def unfinished_messages_are_counted(self) -> None:
        if not hasattr(self, "world"):
            return
        pools = self.world.state.pools
        counted = Counter[DeliveryState]()
        for deliveries in pools.deliveries():
            states = Counter(item.state for item in deliveries.unfinished.values())
            assert states == Counter(deliveries.counts)
            counted += states
        assert sum((Counter(pool.counts) for pool in pools.all), Counter()) == counted
        assert (pools.unfinished("g"), counted[DeliveryState.FINISHED]) == (counted.total(), 0)

    def _drain(self) -> None:
        """In the end each message was given that is not done for sure, and nothing else."""
        seen: set[str] = set()
        for _ in range(400):
            self.world.advance(40)
            self._expire()
            received = self.world.receive(32, 10_000)
            if not received.messages:
                break
            self._take(received, 10, "c")
            seen.update(self.handles[message.handle] for message in received.messages)
            for delivered in received.messages:
                assert self.world.ack(delivered.handle) == [AckStatus.DONE]
                message = self.messages[self.handles[delivered.handle]]
                message.state = DONE
        assert all(message.state == DONE or not message.is_sure for message in self.messages.values())
        ends = list(self.world.state.pools.numbers("g", "t").values())
        assert all(numbers.lag == 0 for numbers in ends)


class InOrder(Shared):
    is_in_order = True


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
TestInOrder = InOrder.TestCase
TestInOrder.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
