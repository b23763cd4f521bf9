"""Twenty clusters of which `rocketlet doctor` must say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rocketlet.client import (
    Consumer,
    Message,
    Reject,
    RetryLater,
    Sql,
    rebalanced,
)
from rocketlet.client.admin.dead_letters import mark
from rocketlet.protocol.names import Queue, dlq_topic

from ...conftest import eventually
from ...support.pacing import pace, pass_real_time, work_for
from .. import topics
from ..handlers import Inbox, fill
from ..requests import commit
from .stage import Cluster, Stage

WELL: list[Cluster] = []


def well(function: Callable[[Stage], AsyncIterator[None]]) -> None:
    WELL.append(asynccontextmanager(function))


@well
async def topic_without_groups(stage: Stage) -> AsyncIterator[None]:
    await fill(stage.node, 10)
    yield


@well
async def idle_member(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node)
    await stage.consumer(Inbox())
    yield


@well
async def all_read(stage: Stage) -> AsyncIterator[None]:
    await fill(stage.node, 100)
    inbox = Inbox()
    await stage.consumer(inbox)
    await eventually(lambda: len(inbox.messages) == 100)
    yield


@well
async def load_and_commits_every_5_s(stage: Stage) -> AsyncIterator[None]:
    """It was called stuck: doctor watched for 2 s. No queue is idle, so that nothing commits earlier."""

    async def handle(message: Message) -> None:
        await work_for(0.5)

    await stage.consumer(handle, concurrency=200)
    await stage.load()
    yield


@well
async def slow_handlers_that_keep_up(stage: Stage) -> AsyncIterator[None]:
    async def handle(message: Message) -> None:
        await work_for(3)

    await stage.consumer(handle)
    await stage.load(pause_s=0.5)
    yield


@well
async def lag_of_a_few_messages_that_grows(stage: Stage) -> AsyncIterator[None]:
    """It was called growing at one message."""

    async def handle(message: Message) -> None:
        await work_for(1)

    await stage.consumer(handle, concurrency=1)
    await stage.load(pause_s=0.2)
    yield


@well
async def filter_by_tag_that_wants_little(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(), {"t": "rare"})
    await stage.load(at_once=20, tag="common")
    yield


@well
async def filter_by_sql_that_wants_little(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(), {"t": Sql("kind = 'rare'")})
    await stage.load(at_once=20, properties={"kind": "common"})
    yield


@well
async def ordered_load(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(), orderly=True)
    await stage.load(queue_key="account-7")
    yield


@well
async def broadcast_load(stage: Stage) -> AsyncIterator[None]:
    for name in ("a", "b"):
        await stage.consumer(Inbox(), broadcasting=True, offsets_file=stage.folder / f"{name}.json")
    await stage.load()
    yield


@well
async def batches_that_wait(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(), batch_size=500, batch_wait_s=4.0)
    await stage.load()
    yield


@well
async def shared_load(stage: Stage) -> AsyncIterator[None]:
    for _ in range(3):
        await stage.sharing(Inbox())
    await stage.load()
    yield


@well
async def shared_retry_that_waits(stage: Stage) -> AsyncIterator[None]:
    inbox = Inbox(RetryLater(delay=600))
    await stage.sharing(inbox)
    await fill(stage.node, 1)
    await eventually(lambda: len(inbox.messages) == 1)
    yield


@well
async def retry_that_waits(stage: Stage) -> AsyncIterator[None]:
    inbox = Inbox(RetryLater(delay_level=16))
    await stage.consumer(inbox)
    await fill(stage.node, 1)
    await eventually(lambda: len(inbox.messages) == 1)
    yield


@well
async def delayed_messages(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox())
    await fill(stage.node, 20, delay=3600)
    yield


@well
async def members_that_divide(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node)
    for _ in range(3):
        await stage.consumer(Inbox())
    await rebalanced(stage.node.address, "g", members=3)
    await stage.load()
    yield


@well
async def a_deployment(stage: Stage) -> AsyncIterator[None]:
    """Members are replaced one after the other, all the time."""
    topics.put(stage.node)

    async def rolling() -> None:
        members = [Consumer(stage.node.address, "g", "t", Inbox(), start="first") for _ in range(2)]
        for member in members:
            await member.start()
        try:
            while True:
                members.append(Consumer(stage.node.address, "g", "t", Inbox(), start="first"))
                await members[-1].start()
                await members.pop(0).stop()
                await pace(0.7)
        finally:
            await asyncio.gather(*(member.stop() for member in members))

    stage.background(rolling())
    await stage.load()
    await pass_real_time(0.5)
    yield


@well
async def dead_letters_that_were_dealt_with(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(Reject("not yet")))
    await fill(stage.node, 2)
    await eventually(lambda: stage.node.broker.store.queue(dlq_topic("g"), 0).next == 2)
    queue, admin = Queue(dlq_topic("g"), stage.node.config.name, 0), await stage.admin()
    await mark(admin, "g", [(queue, 0)], "replayed")
    await mark(admin, "g", [(queue, 1)], "discarded")
    yield


@well
async def foreign_member(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=2)
    await fill(stage.node, 4)
    await stage.foreign("c1", 0, 1)
    for number in range(2):
        await commit(await stage.wire(), 2, number)
    yield


@well
async def paused_with_nothing_to_read(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node)
    consumer = await stage.consumer(Inbox())
    await consumer.pause()
    yield
