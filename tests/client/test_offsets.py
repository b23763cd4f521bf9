"""Commits at Apache's brokers, which refuse none: a later one must not be followed by an earlier one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rocketlet.client.member.offsets import GroupOffsets
from rocketlet.client.wire.cluster import Cluster
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.queue import Queue

from ..support.turns import passed

QUEUES = [Queue("t", "broker-a", number) for number in range(3)]


class Line:
    """A connection to a broker that answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # queue id, offset
        self.unanswered: list[asyncio.Future[None]] = []

    def request(self, code: int, ext: dict[str, Any], *, timeout_s: float) -> asyncio.Future[None]:
        self.sent.append((int(ext["queueId"]), int(ext["commitOffset"])))
        answer = asyncio.get_running_loop().create_future()
        self.unanswered.append(answer)
        return answer

    async def answer(self) -> None:
        for answer in self.unanswered:
            answer.set_result(None)
        self.unanswered.clear()
        await passed()


async def test_the_first_commit_goes_alone_and_a_later_one_overtakes_none_that_waits() -> None:
    line = Line()
    offsets = GroupOffsets(cast("Cluster", SimpleNamespace(connected=lambda name: line)), "g")
    storing = [asyncio.create_task(offsets.store(queue, 1, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1)]
    await line.answer()
    storing += [asyncio.create_task(offsets.store(queue, 2, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2)], "a commit waits for the one before it of the same queue"
    await line.answer()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    await line.answer()
    assert all(task.done() and task.exception() is None for task in storing)
    assert (len(offsets._turns), len(offsets._first)) == (0, 0), "nothing is kept of queues that nobody commits"


async def test_one_pull_shows_that_those_before_it_are_begun_with() -> None:
    asked: list[tuple[int, int]] = []

    async def ask(code: int, ext: dict[str, Any], *, timeout_s: float) -> None:
        asked.append((code, int(ext["sysFlag"])))

    offsets = GroupOffsets(cast("Cluster", SimpleNamespace(connected=lambda name: SimpleNamespace(ask=ask))), "g")
    await asyncio.gather(*(offsets.pulls_stored(queue, 1) for queue in QUEUES))
    assert asked == [(RequestCode.PULL_MESSAGE, PULL_SUBSCRIPTION)], "it neither commits nor waits"
    await offsets.pulls_stored(QUEUES[0], 1)
    assert len(asked) == 2, "pulls may have come between"
