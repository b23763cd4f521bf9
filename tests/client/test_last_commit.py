"""Apache's broker carries pulls and commits out in several threads: the last commit of a hand-over is the one that counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from rocketlet.client import Consumer
from rocketlet.client.config import LAST_COMMIT_CHECKS, ClientLimits
from rocketlet.protocol.codes import RequestCode

from ..conftest import Connect, Node, Nodes, create_topic, eventually
from ..support.apache_locks import AS_APACHES, ApacheLocks, at_once
from ..support.handlers import Inbox, fill

PULL, COMMIT, QUERY = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.QUERY_CONSUMER_OFFSET


@pytest.fixture
def threads() -> Iterator[ApacheLocks]:
    apache = ApacheLocks()
    with apache.installed(PULL, COMMIT):
        yield apache


@pytest.fixture
async def apache(threads: ApacheLocks, nodes: Nodes, connect: Connect) -> Node:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 1)
    return node


class Undone:
    """The first pull is not carried out, until `times` commits of what is handled have been: each is undone by it."""

    def __init__(self, node: Node, times: float) -> None:
        self.node = node
        self.left = times
        self.pull: Callable[[], None] | None = None
        self.commits = 0

    def run(self, code: int, work: Callable[[], None]) -> None:
        if code == PULL and self.pull is None:
            self.pull = work
            return
        before = offset(self.node)
        work()
        if offset(self.node) != before:
            self.commits += 1
            if self.left > 0 and self.pull is not None:
                self.left -= 1
                self.pull()


class Waiting:
    """Requests of one code wait."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.works: list[Callable[[], None]] = []

    def run(self, code: int, work: Callable[[], None]) -> None:
        if code == self.code:
            self.works.append(work)
        else:
            work()

    async def begin(self, threads: ApacheLocks, node: Node) -> None:
        """Until one waits."""
        threads.run = self.run
        await fill(node, 1)
        await eventually(lambda: bool(self.works))

    async def carried_out_before(self, task: asyncio.Task[None], threads: ApacheLocks) -> None:
        """Those that wait are carried out when the task has asked for one as well, and it ends."""
        await eventually(lambda: len(self.works) > 1 or task.done())
        threads.run = at_once
        for work in self.works:
            work()
        await task


def offset(node: Node) -> int | None:
    return node.broker.offsets.get("g", "t", 0)


@asynccontextmanager
async def two_handled(node: Node) -> AsyncIterator[tuple[Consumer, Inbox]]:
    """A member that has handled two messages and committed the first: its next pull carries the offset 2."""
    inbox = Inbox()
    await fill(node, 1)
    async with Consumer(
        node.address,
        "g",
        "t",
        inbox,
        start="first",
        access=AS_APACHES,
        limits=ClientLimits(idle_commit_s=3600.0, route_interval_s=0.01),
    ) as consumer:
        await handled(inbox, 1)
        await consumer.commit()
        await fill(node, 1)
        await handled(inbox, 2)
        yield consumer, inbox


async def handled(inbox: Inbox, count: int) -> None:
    await eventually(lambda: len(inbox.messages) == count)


async def test_the_last_commit_waits_for_pulls_that_are_carried_out_late(threads: ApacheLocks, apache: Node) -> None:
    pulls = Waiting(PULL)
    async with two_handled(apache) as (consumer, inbox):
        await pulls.begin(threads, apache)
        await handled(inbox, 3)
        leaving = asyncio.create_task(consumer.stop())
        await pulls.carried_out_before(leaving, threads)
    assert offset(apache) == 3


@pytest.mark.parametrize(
    ("times", "commits", "stored"),
    [(1, 2, 3), (LAST_COMMIT_CHECKS, LAST_COMMIT_CHECKS + 1, 3), (math.inf, LAST_COMMIT_CHECKS + 1, 2)],
)
async def test_a_last_commit_that_was_undone_is_repeated(
    threads: ApacheLocks, apache: Node, times: float, commits: int, stored: int
) -> None:
    undone = Undone(apache, times)
    async with two_handled(apache) as (_, inbox):
        threads.run = undone.run
        await fill(apache, 1)
        await handled(inbox, 3)
    assert undone.commits == commits
    assert offset(apache) == stored
    assert threads.owners() == {}


async def test_a_place_that_is_sought_is_committed_behind_pulls_that_are_carried_out_late(
    threads: ApacheLocks, apache: Node
) -> None:
    pulls = Waiting(PULL)
    async with two_handled(apache) as (consumer, inbox):
        await pulls.begin(threads, apache)
        await handled(inbox, 3)
        await consumer.pause()
        seeking = asyncio.create_task(consumer.seek("first"))
        await pulls.carried_out_before(seeking, threads)
        assert offset(apache) == 0


async def test_a_commit_waits_for_the_one_before_it(threads: ApacheLocks, apache: Node) -> None:
    commits = Waiting(COMMIT)
    async with two_handled(apache) as (consumer, inbox):
        threads.run = commits.run
        committing = asyncio.create_task(consumer.commit())
        await eventually(lambda: bool(commits.works))
        await fill(apache, 1)
        await handled(inbox, 3)
        leaving = asyncio.create_task(consumer.stop())
        await eventually(lambda: not consumer.assignment())
        await apache.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 10)  # meanwhile its other requests arrive
        threads.run = at_once
        for work in reversed(commits.works):
            work()
        await asyncio.gather(committing, leaving)
    assert offset(apache) == 3


async def test_nothing_is_looked_up_where_no_pull_commits(threads: ApacheLocks, apache: Node) -> None:
    asked: list[int] = []

    def note(code: int, work: Callable[[], None]) -> None:
        asked.append(code)
        work()

    async with two_handled(apache):
        threads.run = note
    assert offset(apache) == 2
    assert QUERY not in asked and PULL not in asked
