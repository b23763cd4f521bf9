"""One call costs little, and little is kept for it, whatever its client has put into it, or others into messages."""

from __future__ import annotations

import gc
import gzip
import tracemalloc
import zlib
from typing import Any

import pytest
from rocketlet.broker.config import (
    DELIVERIES_BYTES,
    LIMITS,
    LITE_SYNCED_NAME_BYTES,
    MAX_POP_BYTES,
    POOL_BYTES,
    POOL_IDLE_S,
    POP_CLIENTS_POLL_INTERVAL_S,
    POPPER_BYTES,
    TAG_BYTES,
)
from rocketlet.broker.grpc import schema, server
from rocketlet.broker.grpc.clients import GrpcClient as GrpcSession
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.config import (
    MAX_BODY_BYTES,
    MAX_ID_CHARS,
    MAX_SUBSCRIPTIONS,
    MAX_SUMMARY_CHARS,
    MAX_SYNCED_LITE_TOPICS,
)
from rocketlet.protocol.message import RecallHandle
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, eventually
from ...support.grpc_client import GrpcClient, message, resource, route, sending
from ...support.requests import send_v2
from ...support.turns import give_no_turn
from .conftest import Dial
from .receives import OK, begin, joined, receive, received, request

TOO_LARGE, ILLEGAL_FILTER = 41301, 40010


@pytest.fixture
async def node(nodes: Nodes) -> Node:
    node = await nodes.start(clock=MovableClock(stands=True))
    node.broker.topics.put(TopicConfig("t", 1, 1), node.broker.store.end)
    return node


async def test_bodies_of_a_call_inflate_to_what_a_call_may_have(node: Node, client: GrpcClient) -> None:
    """A call of 400 KB stored 400 MB, and stopped the broker for 2.5 s."""
    bomb = gzip.compress(bytes(MAX_BODY_BYTES))
    sent = [message("t", bomb, message_id=f"{number}", body_encoding=2) for number in range(3)]
    assert (await client.call("SendMessage", sending(*sent[:1]))).status.code == OK
    answer = await client.call("SendMessage", sending(*sent))
    assert (answer.status.code, "send several" in answer.status.message) == (TOO_LARGE, True)
    assert node.broker.store.queue("t", 0).next == 1


@pytest.mark.parametrize(
    "bomb",
    [gzip.compress(bytes(MAX_BODY_BYTES + 1)), gzip.compress(bytes(MAX_BODY_BYTES))[:-8] + bytes(8)],
    ids=["too large", "wrong checksum"],
)
async def test_bodies_that_fail_to_inflate_count_as_those_that_do(node: Node, client: GrpcClient, bomb: bytes) -> None:
    """They counted with 4 KB each, so a thousand of them in one call stopped the broker for 24 s."""
    assert (await client.call("SendMessage", sending(message("t", bomb, body_encoding=2)))).status.code == OK
    sent = [message("t", bomb, message_id=f"{number}", body_encoding=2) for number in range(2)]
    answer = await client.call("SendMessage", sending(*sent))
    assert (answer.status.code, "send several" in answer.status.message) == (TOO_LARGE, True)
    assert node.broker.store.queue("t", 0).next == 1


@pytest.fixture
def one_piece_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one piece of work is done in an event-loop iteration, so a body of the maximum size takes 64 iterations."""
    monkeypatch.setattr(server, "PIECE_S", -1)


@pytest.mark.usefixtures("one_piece_each")
async def test_messages_of_others_are_stored_while_bodies_are_inflated(
    node: Node, client: GrpcClient, dial: Dial
) -> None:
    sent = message("t", gzip.compress(bytes(MAX_BODY_BYTES)), body_encoding=2)
    call = client.begin("SendMessage")
    call.send(sending(sent, sent), end=True)
    other = await dial(node.address, client_id="other")
    await other.call("SendMessage", sending(message("t")))
    answer = await call.next()
    assert answer.status.code == TOO_LARGE
    assert node.broker.store.queue("t", 0).next == 1


@pytest.mark.usefixtures("one_piece_each")
async def test_a_call_that_its_client_gives_up_while_bodies_are_inflated_stores_nothing(
    node: Node, client: GrpcClient
) -> None:
    call = client.begin("SendMessage")
    call.send(sending(message("t", gzip.compress(bytes(MAX_BODY_BYTES)), body_encoding=2)), end=True)
    call.cancel()
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    assert node.broker.store.queue("t", 0).next == 1


async def test_messages_that_fail_to_inflate_are_given_as_many_as_an_answer_may_have(
    node: Node, client: GrpcClient, connect: Connect
) -> None:
    """They counted with their few KB, so a receive of 32 inflated 128 MiB."""
    await joined(client)
    wire = await connect(node.address)
    for _ in range(4):
        bomb = zlib.compress(bytes(MAX_BODY_BYTES + 1))
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(f=1), bomb)).code == 0
    assert [len(await receive(client)) for _ in range(4)] == [1] * 4
    assert await receive(client) == []


async def test_messages_that_inflate_are_given_in_turns_and_as_many_as_an_answer_may_have(
    node: Node, client: GrpcClient, connect: Connect
) -> None:
    """32 messages of 64 KB stopped the broker for 6.5 s: each inflated to 63 MiB."""
    await joined(client)
    wire = await connect(node.address)
    bodies = [zlib.compress(bytes(MAX_BODY_BYTES // 2))] * 6 + [zlib.compress(bytes(32 << 20))] * 3
    for body in bodies:
        assert (await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(f=1), body)).code == 0
    first = await receive(client)
    assert [len(found.body) for found in first] == [MAX_BODY_BYTES // 2] * 3, "the others have gone back"
    rest = await receive(client)
    assert [len(found.body) for found in rest] == [MAX_BODY_BYTES // 2] * 3
    for _ in range(3):  # those that are too large count as what was inflated of them
        (bomb,) = await receive(client)
        assert len(bomb.body) == len(bodies[-1])
        rest.append(bomb)
    assert {found.system_properties.delivery_attempt for found in [*first, *rest]} == {1}
    assert MAX_POP_BYTES == MAX_BODY_BYTES


async def test_a_receive_that_waits_counts_with_its_filter(node: Node, client: GrpcClient, connect: Connect) -> None:
    """A thousand tags take 160 KB, and a connection may wait a thousand times."""
    await joined(client)
    expression = "||".join(map(str, range(1000)))
    before = charged(node)
    asked = request(wait_ms=10_000, filter_expression={"type": 1, "expression": expression})
    call = begin(client, asked)
    await eventually(lambda: node.broker.pops.waiting == 1)
    assert charged(node) - before > 1000 * TAG_BYTES
    call.cancel()
    await eventually(lambda: node.broker.pops.waiting == 0)
    assert charged(node) - before <= MAX_SUMMARY_CHARS, "what it asked for is in reports on the group"
    before = charged(node)
    wire = await connect(node.address)
    fields: dict[str, Any] = {
        "consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 1, "invisibleTime": 20_000,
        "pollTime": 10_000, "bornTime": 0, "initMode": 0, "expType": "TAG", "exp": expression, "order": False,
    }  # fmt: skip
    opaque = wire.send(RequestCode.POP_MESSAGE, fields)
    await eventually(lambda: node.broker.pops.waiting == 1)
    assert charged(node) - before > 1000 * TAG_BYTES
    node.clock.advance(10)
    await wire.answer(opaque)
    assert charged(node) - before < 2 * POPPER_BYTES + MAX_SUMMARY_CHARS


async def test_clients_that_pop_are_charged_for_all_that_is_kept_of_them_and_it_goes_with_them(
    node: Node, client: GrpcClient
) -> None:
    """Receives with long expressions in very many topics, and every queue checked: what is kept is charged."""
    count = 100
    for number in range(count):
        node.broker.topics.put(TopicConfig(f"t{number}", 4, 4), node.broker.store.end)
        await client.call("SendMessage", sending(message(f"t{number}", b"x")))
    expressions = ["||".join(f"{topic}-{number}" for number in range(1000)) for topic in range(count)]
    await joined(client)
    before = charged(node)
    tracemalloc.start()
    try:
        for number, expression in enumerate(expressions):
            asked = request(filter_expression={"type": 1, "expression": expression})
            asked.message_queue.topic.name = f"t{number}"
            await received(begin(client, asked))
        client.calls.clear()
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(node.broker.pops.pools.all) == count + 1
    assert kept_bytes < 1.2 * (charged(node) - before)
    assert charged(node) - before < count * (POOL_BYTES + DELIVERIES_BYTES + POPPER_BYTES + 2 * MAX_SUMMARY_CHARS)
    await client.close()
    await eventually(lambda: not node.server.connections)
    node.clock.advance(POOL_IDLE_S)
    node.clock.advance(POP_CLIENTS_POLL_INTERVAL_S)
    await eventually(lambda: not node.broker.pops.pools.all)
    assert node.server.memory.used_bytes == 0


def charged(node: Node) -> int:
    return sum(connection.charged_bytes for connection in node.server.connections)


@pytest.mark.parametrize("kind", [1, 2])
async def test_an_expression_has_an_end(client: GrpcClient, kind: int) -> None:
    expression = {"type": kind, "expression": "a" * 65_537}
    code, _ = await received(begin(client, request(filter_expression=expression)))
    assert code == ILLEGAL_FILTER


@pytest.mark.parametrize("kind", ["publishing", "subscription"])
async def test_settings_name_as_many_topics_as_a_client_may_have(node: Node, client: GrpcClient, kind: str) -> None:
    """200,000 stopped the broker for 0.2 s, and 400,000 were kept."""
    settings = schema.Settings(client_type=1 if kind == "publishing" else 2)
    if kind == "publishing":
        settings.publishing.topics.extend(resource(f"t{number}") for number in range(MAX_SUBSCRIPTIONS + 1))
    else:
        settings.subscription.group.name = "g"
        for number in range(MAX_SUBSCRIPTIONS + 1):
            settings.subscription.subscriptions.add().topic.name = f"t{number}"
    call = client.begin("Telemetry")
    call.send(schema.TelemetryCommand(settings=settings))
    assert (await call.next()).status.code == 40000
    assert node.broker.clients.all_producers() == {}


async def test_a_client_that_publishes_to_too_many_topics_keeps_what_it_had(node: Node, client: GrpcClient) -> None:
    for count, expected in ((2, OK), (LIMITS.max_producer_groups + 1, 42900)):
        settings = schema.Settings(client_type=1)
        settings.publishing.topics.extend(resource(f"t{number}") for number in range(count))
        call = client.begin("Telemetry")
        call.send(schema.TelemetryCommand(settings=settings))
        assert (await call.next()).status.code == expected
    session = node.broker.clients.producer_of("t0", "t0", b"")
    assert isinstance(session, GrpcSession)
    assert session.topics == ("t0", "t1")


async def test_a_client_id_has_an_end(node: Node, client: GrpcClient) -> None:
    answer = await client.call("QueryRoute", route("t"), x_mq_client_id="c" * (MAX_ID_CHARS + 1))
    assert answer.status.code == 40000


async def test_a_client_id_has_no_control_characters(client: GrpcClient) -> None:
    """It is part of the reason in a dead letter, where such characters begin another property."""
    answer = await client.call("QueryRoute", route("t"), x_mq_client_id="c\x02TAGS\x01a")
    assert (answer.status.code, "control characters" in answer.status.message) == (40000, True)


async def test_recalls_of_a_connection_are_looked_for_one_after_the_other_and_large_messages_one_in_a_piece(
    node: Node, client: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of one client kept everybody's long requests waiting for 2.3 s, and 64 of 4 MiB took 0.4 s in one piece."""
    due_ms = node.clock.time_ms() + 3_600_000
    for number in range(4):
        sent = message("t", bytes(200_000), message_id=f"{number}")
        sent.system_properties.delivery_timestamp.FromMilliseconds(due_ms)
        assert (await client.call("SendMessage", sending(sent))).status.code == OK
    assert sum(1 for _ in node.broker.timers.recalling("t", due_ms, "none")) == 4
    handle = RecallHandle("t", node.config.name, due_ms, "none").encoded()
    give_no_turn(monkeypatch, node)
    calls = [client.begin("RecallMessage") for _ in range(20)]
    for call in calls:
        call.send(schema.RecallMessageRequest(topic=resource("t"), recall_handle=handle), end=True)
    await client.call("QueryRoute", route("t"))
    assert node.broker.turns.waiting == 1
    monkeypatch.undo()
    assert {(await call.next()).status.code for call in calls} == {40401}


# A request is charged to its connection until the work for it has ended


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The charges of a connection after each change."""
    found = [0]
    charge = RemotingConnection.charge

    def noted(self: RemotingConnection, size: int) -> None:
        charge(self, size)
        found.append(self.charged_bytes)

    monkeypatch.setattr(RemotingConnection, "charge", noted)
    return found


@pytest.mark.usefixtures("one_piece_each")
async def test_bodies_are_charged_while_others_of_the_call_are_inflated(
    node: Node, client: GrpcClient, charges: list[int]
) -> None:
    await client.call("SendMessage", sending(message("t")))
    before = charges[-1]
    body = gzip.compress(bytes(MAX_BODY_BYTES - 1))
    assert (await client.call("SendMessage", sending(message("t", body, body_encoding=2)))).status.code == OK
    assert max(charges) >= before + MAX_BODY_BYTES
    await eventually(lambda: charges[-1] <= before)


@pytest.mark.usefixtures("one_piece_each")
async def test_inflated_bodies_are_not_charged_after_the_client_has_given_up(
    node: Node, client: GrpcClient, charges: list[int]
) -> None:
    await client.call("SendMessage", sending(message("t")))
    before = charges[-1]
    call = client.begin("SendMessage")
    call.send(sending(message("t", gzip.compress(bytes(MAX_BODY_BYTES)), body_encoding=2)), end=True)
    await eventually(lambda: max(charges) > before + MAX_BODY_BYTES // 4)
    call.cancel()
    assert (await client.call("SendMessage", sending(message("t")))).status.code == OK
    await eventually(lambda: charges[-1] <= before)


async def test_names_of_a_synchronization_are_charged_until_it_has_ended(
    node: Node, client: GrpcClient, charges: list[int]
) -> None:
    node.broker.topics.put(TopicConfig("CHAT", 1, 1, message_type="LITE"), 0)
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "CHAT"}))

    def synced(count: int) -> Any:
        names = [f"s{number}" for number in range(count)]
        return schema.SyncLiteSubscriptionRequest(
            action=2, group=resource("g"), topic=resource("CHAT"), lite_topic_set=names
        )

    assert (await client.call("SyncLiteSubscription", synced(1))).status.code == OK
    pool = node.broker.pops.pools.find_lite("g", "CHAT")
    assert pool is not None
    (subscriber,) = pool.queues.subscribers.values()
    subscriber.is_syncing = True  # as while the client's last synchronization is carried out
    before = charges[-1]
    call = client.begin("SyncLiteSubscription")
    call.send(synced(MAX_SYNCED_LITE_TOPICS), end=True)
    await eventually(lambda: charges[-1] >= before + MAX_SYNCED_LITE_TOPICS * LITE_SYNCED_NAME_BYTES)
    subscriber.is_syncing = False
    assert (await call.next()).status.code == 42902, "more than the quota"
    await eventually(lambda: charges[-1] <= before)
