"""The queues of a consumer alone: pauses, and handlers that outlive an ownership."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from rocketlet.client.consuming.queues import Assignment, ProcessQueue, Puller
from rocketlet.client.errors import ConfigError
from rocketlet.client.message import Lease
from rocketlet.protocol.names import Queue

ONE, TWO, THREE = (Queue("t", "a", number) for number in range(3))


class World:
    def __init__(self, **listeners: Any) -> None:
        self.pulled: list[Queue] = []
        self.resumed: list[Queue] = []
        listeners = {"on_assigned": None, "on_revoked": None} | listeners
        self.assignment = Assignment(
            cast("Puller", self), drain_s=60.0, on_resumed=lambda queue: self.resumed.append(queue.queue), **listeners
        )

    def pull(self, process_queue: ProcessQueue) -> None:
        self.pulled.append(process_queue.queue)

    def take(self, *queues: Queue) -> None:
        for queue in queues:
            self.assignment.take_queue(queue, 5, Lease(1))

    def paused(self) -> set[Queue]:
        return {queue for queue, found in self.assignment.queues.items() if found.is_paused}


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_queue_is_pulled_as_soon_as_it_is_taken(world: World) -> None:
    world.take(ONE)
    assert (world.pulled, world.resumed) == ([ONE], [])
    assert world.assignment.some(None) == world.assignment.some([ONE]) == [world.assignment.queues[ONE]]
    with pytest.raises(ConfigError, match="does not own t"):
        world.assignment.some([ONE, TWO])


async def test_a_pause_of_all_holds_for_those_that_come_and_one_of_some_does_not(world: World) -> None:
    world.take(ONE, TWO)
    world.assignment.pause([ONE])
    world.take(THREE)
    assert world.paused() == {ONE}
    world.assignment.pause(None)
    world.assignment.pause([ONE])
    assert world.paused() == {ONE, TWO, THREE}
    world.assignment.resume([ONE])
    assert world.paused() == {TWO, THREE}
    world.take(ONE)
    assert world.paused() == {ONE, TWO, THREE}, "all are paused, also those that come"
    world.pulled.clear()
    world.resumed.clear()
    world.assignment.resume(None)
    world.assignment.resume([ONE])
    assert (world.paused(), world.resumed) == (set(), [ONE, TWO, THREE, ONE])
    assert world.pulled == world.resumed
    world.take(ONE)
    assert world.paused() == set()


async def test_handlers_of_a_lost_queue_are_waited_for(world: World) -> None:
    world.take(ONE, TWO)
    lost = world.assignment.queues[ONE]
    lost.enter()
    for queue in (ONE, TWO, THREE):
        world.assignment.lose_queue(queue)
    assert [world.assignment.is_running(queue) for queue in (ONE, TWO)] == [True, False]
    assert (lost.is_dropped, world.assignment.queues) == (True, {})
    ending = asyncio.create_task(world.assignment.ended(ONE))
    await asyncio.sleep(0)
    assert not ending.done()
    lost.leave()
    await ending
    assert not world.assignment.is_running(ONE)


async def test_a_queue_is_given_up_when_its_handlers_have_ended(world: World) -> None:
    world.take(ONE)
    queue = world.assignment.queues[ONE]
    queue.enter()
    giving = asyncio.create_task(world.assignment.give_queue(ONE))
    await asyncio.sleep(0)
    assert (queue.is_stopped, giving.done()) == (True, False)
    queue.leave()
    assert await giving == 5
    assert await world.assignment.give_queue(TWO) is None
    world.assignment.lose_queue(ONE)


async def test_a_queue_that_is_lost_while_it_is_given_up_has_nothing_to_commit(world: World) -> None:
    world.take(ONE)
    queue = world.assignment.queues[ONE]
    queue.enter()
    giving = asyncio.create_task(world.assignment.give_queue(ONE))
    await asyncio.sleep(0)
    world.assignment.lose_queue(ONE)
    queue.leave()
    assert await giving is None


async def test_each_queue_is_revoked_once() -> None:
    revoked: list[set[Queue]] = []
    world = World(on_revoked=revoked.append)
    world.take(ONE, TWO)
    await world.assignment.give_queue(ONE)
    world.assignment.lose_queue(ONE)
    world.assignment.lose_queue(TWO)
    assert revoked == [{ONE}, {TWO}]


async def test_a_queue_is_suspended_until_its_broker_is_back(world: World) -> None:
    world.take(ONE)
    for change in (world.assignment.suspend_queue, world.assignment.resume_queue):
        change(TWO)
    world.assignment.suspend_queue(ONE)
    assert world.assignment.queues[ONE].is_suspended
    world.pulled.clear()
    world.assignment.resume_queue(ONE)
    assert (world.assignment.queues[ONE].is_suspended, world.pulled, world.resumed) == (False, [ONE], [ONE])


async def test_pulls_that_carry_offsets_are_known(world: World) -> None:
    world.take(ONE)
    assert [world.assignment.is_pull_committing(queue) for queue in (ONE, TWO)] == [False, False]
    world.assignment.queues[ONE].pull_commits = True
    assert world.assignment.is_pull_committing(ONE)


async def test_the_end_waits_for_what_runs_beside(world: World) -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(1)

    world.assignment.spawn(work())
    await world.assignment.finished()
    assert done == [1]
    assert not world.assignment._tasks
