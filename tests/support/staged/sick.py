"""Twenty clusters, each with all that is wrong with it, by subject and kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from rocketlet.client import (
    Consumer,
    Message,
    Reject,
    rebalanced,
)
from rocketlet.protocol.bodies import (
    ConsumerData,
    DataVersion,
    GroupConfig,
    Heartbeat,
    encode_heartbeat,
    encode_registration,
)
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import RegisterBroker, write
from rocketlet.protocol.names import dlq_topic, parse_subscription
from rocketlet.testing.ports import free_port

from ...conftest import create_topic, eventually
from ...support.pacing import work_for
from .. import topics
from ..handlers import Inbox, fill
from ..sick_cluster import AN_OLD_VERSION
from .stage import Cluster, Findings, Hanging, Stage

SICK: list[tuple[Cluster, Findings]] = []


def sick(*findings: tuple[str, str]) -> Callable[[Callable[[Stage], AsyncIterator[None]]], None]:
    def added(function: Callable[[Stage], AsyncIterator[None]]) -> None:
        SICK.append((asynccontextmanager(function), set(findings)))

    return added


async def _forgotten(stage: Stage) -> None:
    topics.put(stage.node)
    async with Consumer(stage.node.address, "g", "t", Inbox(), start="first") as consumer:
        await consumer.assigned()
        await consumer.commit()


@sick(("g", "no_members"))
async def messages_and_no_member(stage: Stage) -> AsyncIterator[None]:
    await _forgotten(stage)
    await fill(stage.node, 3)
    yield


@sick(("g", "no_members"))
async def no_member_any_more(stage: Stage) -> AsyncIterator[None]:
    await _forgotten(stage)
    yield


@sick(("g", "stuck_queue"))
async def handler_that_hangs(stage: Stage) -> AsyncIterator[None]:
    hanging = Hanging()
    await stage.consumer(hanging, drain_s=0)
    await fill(stage.node, 3)
    await eventually(lambda: len(hanging.messages) == 3)
    await rebalanced(stage.node.address, "g", members=1)
    yield


@sick(("g", "stuck_queue"))
async def paused_with_messages(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node)
    consumer = await stage.consumer(Inbox())
    await consumer.pause()
    await fill(stage.node, 3)
    yield


@sick(("g", "stuck_queue"))
async def message_that_fails_for_ever_in_order(stage: Stage) -> AsyncIterator[None]:
    inbox = Inbox("what no handler returns")
    await stage.consumer(inbox, orderly=True)
    await fill(stage.node, 3, queue_key="account-7")
    await eventually(lambda: len(inbox.messages) > 0)
    await rebalanced(stage.node.address, "g", members=1)
    yield


@sick(("g", "stuck_queue"))
async def shared_handlers_that_hang(stage: Stage) -> AsyncIterator[None]:
    hanging = Hanging()
    await stage.sharing(hanging, concurrency=1, drain_s=0)
    await fill(stage.node, 30)
    await eventually(lambda: len(hanging.messages) == 1)
    yield


@sick(("g", "growing_lag"))
async def more_than_is_handled(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)

    async def handle(message: Message) -> None:
        await work_for(0.02)

    await fill(stage.node, 500)
    await stage.consumer(handle, concurrency=1, commit_interval_s=0.05)
    await stage.load(at_once=50)
    yield


@sick(("g", "dead_letters"))
async def given_up(stage: Stage) -> AsyncIterator[None]:
    await stage.consumer(Inbox(Reject("no such dish")))
    await fill(stage.node, 1)
    await eventually(lambda: stage.node.broker.store.queue(dlq_topic("g"), 0).next == 1)
    yield


@sick(("g", "consumption_off"))
async def switched_off(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    await (await stage.admin()).create_group(GroupConfig("g", consume_enable=False))
    await stage.foreign("c1", 0)
    yield


@sick(("g", "unread_queues"))
async def queue_that_nobody_reads(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=2)
    await stage.foreign("c1", 0)
    yield


@sick(("g", "two_readers"))
async def two_that_read_one_queue(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    for client_id in ("c1", "c2"):
        await stage.foreign(client_id, 0)
    yield


@sick(("g", "client_id_twice"))
async def one_name_for_two(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    for _ in range(2):
        await stage.foreign("c1", 0)
    yield


@sick(("g", "disagreement"))
async def different_filters(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node)
    for expression in ("*", "paid"):
        await stage.consumer(Inbox(), {"t": expression})
    await rebalanced(stage.node.address, "g", members=2)
    yield


@sick(("g", "idle_members"))
async def more_members_than_queues(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    await stage.foreign("c1", 0)
    await stage.foreign("c2")
    yield


@sick(("g", "old_client"))
async def client_of_before_4_9(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    await stage.foreign("c1", 0, version=AN_OLD_VERSION)
    yield


@sick(("t", "permission"))
async def topic_that_takes_nothing(stage: Stage) -> AsyncIterator[None]:
    await create_topic(await stage.wire(), "t", perm=4)
    yield


@sick(("t", "permission"))
async def topic_that_gives_nothing(stage: Stage) -> AsyncIterator[None]:
    await create_topic(await stage.wire(), "t", perm=2)
    yield


@sick(("broker-z", "broker_away"))
async def broker_that_nobody_reaches(stage: Stage) -> AsyncIterator[None]:
    await _registered(stage, "broker-z", f"127.0.0.1:{free_port()}", 0)
    yield


@sick(("broker-z", "no_master"))
async def broker_without_master(stage: Stage) -> AsyncIterator[None]:
    await _registered(stage, "broker-z", f"127.0.0.1:{free_port()}", 1)
    yield


async def _registered(stage: Stage, name: str, address: str, number: int) -> None:
    header = RegisterBroker(name, address, "DefaultCluster", "", number)
    body = encode_registration(DataVersion(1), [])
    assert (await (await stage.wire()).call(RequestCode.REGISTER_BROKER, write(header), body)).code == 0


@sick(("broker-a", "heartbeat_refused"))
async def subscription_that_is_too_long(stage: Stage) -> AsyncIterator[None]:
    topics.put(stage.node, queues=1)
    subscription = replace(parse_subscription("t", "paid"), expression="x" * 65_537)
    beat = Heartbeat("c1", (ConsumerData("g", subscriptions=(subscription,)),))
    assert (await (await stage.wire()).call(RequestCode.HEART_BEAT, {}, encode_heartbeat(beat))).code != 0
    yield
