"""A queue of which everything is handled is committed when nothing more comes: else the next pull says it."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from rocketlet.client.config import ClientLimits
from rocketlet.client.consuming.queues import OffsetCommitter, ProcessQueue
from rocketlet.client.message import Lease
from rocketlet.protocol.names import Queue

from ..conftest import eventually
from ..support.turns import passed

QUEUES = [Queue("t", "broker-a", number) for number in range(2)]


class Looks:
    """A member's commits, whose looks for idle queues are made by hand."""

    def __init__(self, epoch: int = 1, idle_commit_s: float = 3600.0) -> None:
        self.stored: list[Mapping[Queue, int]] = []
        self.queues = {queue: ProcessQueue(queue, 0, Lease(epoch)) for queue in QUEUES}
        self._spawned: list[Coroutine[Any, Any, None]] = []
        self._commits = OffsetCommitter(
            "g",
            self.queues,
            interval_s=3600.0,
            store=self._store,
            spawn=self._spawned.append,
            limits=ClientLimits(idle_commit_s=idle_commit_s),
        )  # never on its own

    async def _store(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        self.stored.append(offsets)
        return set(offsets)

    def handled(self, number: int, offset: int) -> None:
        process_queue = self.queues[QUEUES[number]]
        process_queue.next_offset = offset
        self._commits.queue_is_idle(process_queue)

    async def look(self) -> None:
        self._commits.stop_idle()
        self._commits._commit_idle()
        for work in self._spawned:
            await work
        self._spawned.clear()

    def stop(self) -> None:
        self._commits.stop_idle()


@pytest.fixture
def looks() -> Looks:
    return Looks()


async def test_what_falls_idle_between_two_checks_is_committed_in_one_request_by_the_next_one(looks: Looks) -> None:
    looks.handled(0, 1)
    looks.handled(1, 5)
    await looks.look()
    assert looks.stored == []
    await looks.look()
    assert looks.stored == [{QUEUES[0]: 1, QUEUES[1]: 5}]
    await looks.look()
    assert len(looks.stored) == 1
    looks.stop()


async def test_a_queue_that_gets_messages_again_and_again_is_left_to_its_pulls(looks: Looks) -> None:
    for offset in range(1, 10):
        looks.handled(0, offset)
        await looks.look()
    assert looks.stored == []
    await looks.look()
    assert looks.stored == [{QUEUES[0]: 9}], "then nothing came"
    looks.stop()


async def test_the_first_commit_of_a_queue_on_apaches_broker_which_no_pull_carries_does_not_wait(looks: Looks) -> None:
    apache = Looks(epoch=0)
    apache.handled(0, 1)
    await apache.look()
    assert apache.stored == [{QUEUES[0]: 1}]
    apache.handled(0, 2)
    await apache.look()
    assert len(apache.stored) == 1, "the pulls behind the next messages carry it"
    apache.stop()


async def test_nothing_is_committed_after_the_end() -> None:
    looks = Looks(epoch=0, idle_commit_s=0.0)
    looks.stop()  # nothing has fallen idle yet
    looks.handled(0, 1)
    looks.stop()
    await passed()
    assert looks._spawned == []


async def test_commits_continue_at_their_interval_also_when_one_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Mapping[Queue, int]] = []

    async def store(offsets: Mapping[Queue, int]) -> set[Queue]:
        told.append(offsets)
        if len(told) == 1:
            raise OSError("a fault")
        return {QUEUES[0]} if QUEUES[0] in offsets else set()

    queues = {queue: ProcessQueue(queue, 0, Lease(1)) for queue in QUEUES}
    commits = OffsetCommitter("g", queues, interval_s=0.001, store=store, spawn=lambda work: None)
    commits.start()
    await eventually(lambda: len(told) >= 3)
    await commits.stop()
    assert told[:3] == [dict.fromkeys(QUEUES, 0)] * 2 + [{QUEUES[1]: 0}], "one of them is stored since"
    assert caplog.text.count("commit_failed") == 1


async def test_what_was_lost_while_it_was_stored_is_not_noted(looks: Looks) -> None:
    async def store(offsets: Mapping[Queue, int]) -> set[Queue]:
        del looks.queues[QUEUES[0]]
        return set(offsets)

    looks._commits._store = store
    await looks._commits.commit()
    assert looks.queues[QUEUES[1]].committed == 0


async def test_a_queue_that_is_given_up_or_has_messages_again_is_not_committed_as_idle(looks: Looks) -> None:
    for number in range(2):
        looks.handled(number, 1)
    await looks.look()
    looks.queues[QUEUES[0]].stop()
    looks.queues[QUEUES[1]].messages = 1
    await looks.look()
    assert looks.stored == []
