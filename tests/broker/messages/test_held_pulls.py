"""Held pulls that one event ends together are ended in pieces, so that others do not wait for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rocketlet.broker.messages.held_pulls import HeldPull, HeldPulls
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.runtime.turns import Turns
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing.clock import MovableClock

from ...support.stores import open_store
from ..pops.world import FakeSession

PULLS, QUEUES = 200, 20


class Held:
    """200 held pulls of 20 queues, of one session."""

    def __init__(self, folder: Path) -> None:
        self.soon: list[Callable[[], object]] = []
        self.turns = Turns(turn_s=-1, call_soon=self.soon.append)
        runtime = Runtime(MovableClock(stands=True), turns=self.turns)
        self.at_once = runtime.limits.affected_at_once
        self.pulls, self.session, self.answered = HeldPulls(runtime), FakeSession(), 0
        store = open_store(folder)
        self.queues: list[ConsumeQueue] = [store.queue("t", number) for number in range(QUEUES)]
        for number in range(PULLS):
            pull = HeldPull(self.session, "g", self.queues[number % QUEUES], None, 0, self._answer)
            assert self.pulls.hold(pull, 30)
        store.begin_batch()
        for queue in self.queues:
            store.stage(queue, b"x", b"", 0, 0, 0, 1, bytes(8))
        store.commit()

    def _answer(self) -> None:
        self.answered += 1

    def give_turns(self) -> None:
        self.turns.turn_s = 60
        while self.soon:
            self.soon.pop()()


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path / "data")


@pytest.mark.parametrize("event", ["messages", "topic deleted", "session's account changed", "stop"])
def test_pulls_are_answered_in_pieces(held: Held, event: str) -> None:
    pulls = held.pulls
    events: dict[str, Callable[[], object]] = {
        "messages": lambda: pulls.wake(held.queues),
        "topic deleted": lambda: pulls.release_topic("t"),
        "session's account changed": lambda: held.turns.do_some(pulls.releasing([held.session]), held.at_once),
        "stop": pulls.answer_all,
    }
    events[event]()
    assert 0 < held.answered <= held.at_once
    held.give_turns()
    assert (held.answered, pulls.count) == (PULLS, 0)


def test_held_pulls_that_no_message_matches_are_checked_by_one_work_at_a_time(held: Held) -> None:
    never, queue = parse_subscription("t", "never"), held.queues[0]
    for _ in range(2 * held.at_once):
        assert held.pulls.hold(HeldPull(held.session, "g", queue, never, queue.next, held._answer), 30)
    for _ in range(100):
        held.pulls.wake([queue])
    assert held.turns.waiting == 1
    held.give_turns()
    assert held.answered == PULLS // QUEUES


def test_pulls_of_a_session_that_is_gone_are_dropped_in_pieces(held: Held) -> None:
    held.pulls.drop(held.session)
    assert PULLS - held.at_once <= held.pulls.count < PULLS
    held.pulls.wake(held.queues)
    held.give_turns()
    assert (held.pulls.count, held.session.held_pulls) == (0, 0)
