"""A message that is sent to a time comes then, through stops and kills of its broker. A model says which must have come."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig, Limits
from rocketlet.broker.messages.later import waiting_text
from rocketlet.broker.runtime import MovableClock, run
from rocketlet.broker.store import schedule
from rocketlet.broker.store.store import Retention
from rocketlet.protocol.bodies import TopicConfig

HOST = b"\x7f\0\0\1\0\0\0\1"


LIMITS_OF_FEW = Limits(run_keys=8, runs_to_merge=2, timer_deliveries_at_once=3)


class Times(RuleBasedStateMachine):
    """`due`: of each message that was acknowledged, when it is due, ms; `came`: those that have been delivered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(schedule, "RUN_BLOCK_KEYS", 4)
        self.patch.setattr(schedule, "_BLOCK_BYTES", 4 * schedule.KEY_BYTES + 4)
        self.clock = MovableClock(stands=True)
        self.numbers = itertools.count()
        self.due: dict[int, int] = {}
        self.came: list[int] = []
        self.recalled: set[int] = set()
        self.broker: BrokerController

    @initialize()
    def start(self) -> None:
        config = BrokerConfig(self.folder, "127.0.0.1:1", segment_bytes=4000)
        self.broker = BrokerController(config, None, self.clock, limits=LIMITS_OF_FEW)
        if self.broker.topics.get("t") is None:
            self.broker.topics.put(TopicConfig("t", 1, 1), 0)
        self.queue = self.broker.store.queue("t", 0)
        self.seen = self.queue.next
        self.broker.timers.start()

    def teardown(self) -> None:
        self.clock.stop()
        self.broker.timers.stop()
        self.broker.store.close()
        self.broker.device._thread.shutdown()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def look(self) -> None:
        """Notes what has come."""
        for offset in range(self.seen, self.queue.next):
            record = self.broker.store.message(self.queue, offset)
            if record.body == b"filling":
                continue
            number = int(record.body)
            assert number not in self.recalled
            assert number not in self.came, "delivered twice"
            assert self.due[number] <= self.clock.time_s() * 1000 + 0.01, "delivered before its time"
            self.came.append(number)
        self.seen = self.queue.next

    @rule(after_ms=st.lists(st.integers(1, 60), min_size=1, max_size=12))
    def send(self, after_ms: list[int]) -> None:
        timers = self.broker.timers
        with self.broker.appender.batch() as now_ms:
            for delay_ms in after_ms:
                number, due_ms = next(self.numbers), now_ms + delay_ms
                text = waiting_text(f"UNIQ_KEY\x01u{number}", due_ms, "t", 0)
                self.broker.appender.stage(timers.queue, b"%d" % number, text.encode(), due_ms, 0, 0, now_ms, HOST)
                self.due[number] = due_ms
        timers.take()

    @rule(ms=st.integers(0, 40))
    def advance(self, ms: int) -> None:
        self.clock.advance(ms / 1000)
        self.look()

    @rule()
    def save(self) -> None:
        self.broker.persist()

    @rule()
    def restart(self) -> None:
        self.broker.timers.stop()
        self.broker.persist(closes=True)
        self.start_again()

    @rule()
    def kill(self) -> None:
        self.broker.timers.stop()
        self.start_again()

    def start_again(self) -> None:
        self.clock.stop()
        self.broker.store.close()
        self.broker.device._thread.shutdown()
        self.start()

    @rule(filling=st.integers(0, 10), steps=st.none() | st.integers(0, 4))
    def expire(self, filling: int, steps: int | None) -> None:
        """steps: after which it is killed."""
        with self.broker.appender.batch() as now_ms:
            for _ in range(filling):
                self.broker.appender.stage(self.queue, b"filling", b"x" * 500, 0, 0, 0, now_ms, HOST)
        self.look()
        expiring = self.broker.store.expiring(Retention(0, 4000), self.broker.timers.carrying)
        if steps is None:
            run(expiring)
        for call in itertools.islice(expiring, steps or 0):
            if call is not None:
                call()
        self.look()
        if steps is not None:
            expiring.close()
            self.kill()

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.due)))
        found = yielded(self.broker.timers.recalling("t", self.due[number], f"u{number}"))
        assert found == (number not in self.came and number not in self.recalled)
        if found:
            self.recalled.add(number)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A file that nobody needs is lost: its content is made again."""
        folder = self.folder / "timers"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if files:
            path = data.draw(st.sampled_from(files))
            content = bytearray(path.read_bytes())
            if content:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 0xFF
                path.write_bytes(bytes(content))

    @invariant()
    def nothing_is_late(self) -> None:
        if not hasattr(self, "queue"):
            return
        late = {
            number
            for number, due_ms in self.due.items()
            if due_ms < self.clock.time_s() * 1000 - 1 and number not in self.recalled
        }
        self.clock.advance(0)
        self.look()
        assert late <= set(self.came)
        waiting = len(self.due) - len(set(self.came)) - len(self.recalled)
        assert self.broker.timers.waiting >= waiting


def yielded(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


TestTimes = Times.TestCase
TestTimes.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
