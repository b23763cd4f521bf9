"""Accounts, signatures and permissions, as Apache's plain ACL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from threading import Event
from typing import Any

import msgpack
import orjson
import pytest
from rocketlet.broker.access import AclError, Permission
from rocketlet.broker.config import RELOAD_INTERVAL_S
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, NAME_SERVER_REQUESTS, SENDS
from rocketlet.broker.remoting.permissions import WITH_ACCOUNT, Rule
from rocketlet.broker.server import Listening, Server
from rocketlet.client import AdminClient, BrokerRefused, Consumer, Message, Producer, RocketletError
from rocketlet.client.admin.dead_letters import Replay, dead_letters
from rocketlet.protocol import bodies, group_bodies
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat, TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ
from rocketlet.protocol.group_bodies import (
    LiteAction,
    LiteSubscription,
    LockRequest,
    decode_locked,
    encode_lite_subscription,
    encode_lock_request,
    encode_topics,
)
from rocketlet.protocol.headers import Signer
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import MARKS_TOPIC, TRACE_TOPIC, Queue, parse_subscription, retry_topic
from rocketlet.protocol.properties import find
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Node, Nodes, Wire, eventually
from ...support.accounts import ACCOUNTS, ADMIN, KEYS, SECRETS, SEND, AccountsFile, Wired, access, account, signed_wire
from ...support.grpc_client import grpc_client, signed
from ...support.handlers import Inbox
from ...support.requests import beat, pop, send
from ...support.topics import put
from ..grpc.receives import NOTHING, begin, received, request

# Every request code


TABLE: dict[int, Rule] = {
    **SENDS,
    **{code: rule for code, (_, rule) in BROKER_REQUESTS.items()},
    **{code: rule for code, (_, rule) in NAME_SERVER_REQUESTS.items()},
}
# An account without any permission may still do this: learn where things are, and answer who asked it.
FOR_EVERY_ACCOUNT = {
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.IDENTIFY,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_DEPARTED_BROKERS,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_TOPICS_BY_CLUSTER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_KV_CONFIG,
    RequestCode.GET_KVLIST_BY_NAMESPACE,
}
EVERYTHING = {  # the header fields by which any request names a topic or group
    **SEND, "topic": "orders", "consumerGroup": "shipping", "group": "shipping", "groupName": "shipping",
    "producerGroup": "p", "srcGroup": "shipping", "destGroup": "other", "compareGroup": "shipping", "clientID": "c",
    "delayLevel": 1, "tranStateTableOffset": 0, "commitOrRollback": 8, "parentTopic": "orders",
}  # fmt: skip


def body_of(code: int) -> bytes:
    subscriptions = (parse_subscription("orders", "*", version=1),)
    if code == RequestCode.HEART_BEAT:
        return bodies.encode_heartbeat(Heartbeat("c", (ConsumerData("shipping", subscriptions=subscriptions),)))
    if code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        return group_bodies.encode_lock_request(LockRequest("c", "shipping", (Queue("orders", "broker-a", 0),)))
    if code == RequestCode.CHECK_CLIENT_CONFIG:
        return group_bodies.encode_client_check("c", "shipping", subscriptions[0])
    if code == RequestCode.QUERY_ASSIGNMENT:
        return orjson.dumps({"topic": "orders", "consumerGroup": "shipping", "clientId": "c"})
    if code == RequestCode.BATCH_ACK_MESSAGE:
        return orjson.dumps({"acks": [{"c": "shipping", "t": "orders", "q": 0, "so": 0, "pt": 1, "b": "AQ=="}]})
    if code == RequestCode.LITE_SUBSCRIPTION_CTL:
        change = LiteSubscription(LiteAction.COMPLETE_ADD, "c", "shipping", "orders")
        return group_bodies.encode_lite_subscription(change)
    if code == RequestCode.GET_QUEUE_OFFSETS:
        return encode_topics(["orders"])
    return b""


async def positions(wired: Wired, guarded: Node) -> tuple[int, int]:
    """The positions of a message in `orders`, and of a half message that is meant for it."""
    admin = await wired(ADMIN)
    half = {**SEND, "f": 4, "i": "TRAN_MSG\1true\2PGROUP\1p\2"}
    for ext in (SEND, half):
        assert (await admin.call(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code == 0
    (stored,) = [queue for queue in guarded.broker.store.queues.values() if queue.topic == "orders" and queue.next]
    half_queue = guarded.broker.store.queue("RMQ_SYS_TRANS_HALF_TOPIC", 0)
    return stored.entry(0)[0], half_queue.entry(0)[0]


@pytest.mark.parametrize("code", sorted(TABLE), ids=lambda code: RequestCode(code).name)
async def test_every_request_needs_an_account_and_what_its_rule_says(
    guarded: Node, wired: Wired, file: AccountsFile, code: int
) -> None:
    """None is forgotten: without a signature nothing is served, and without permissions only what is listed here."""
    message, half = await positions(wired, guarded)
    ext = {**EVERYTHING, "offset": message, "commitLogOffset": half}
    stranger, nobody = await wired(""), await wired("nobody-key")
    refusal = await stranger.call(code, ext, body_of(code))
    assert (refusal.code, "No accessKey is configured" in (refusal.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    refusal = await nobody.call(code, ext, body_of(code))
    is_refused = "AclException: N" in (refusal.remark or "")
    assert is_refused == (code not in FOR_EVERY_ACCOUNT), refusal.remark
    assert (TABLE[code] is WITH_ACCOUNT) == (code in FOR_EVERY_ACCOUNT)


def test_the_tables_overlap_nowhere() -> None:
    assert len(TABLE) == len(SENDS) + len(BROKER_REQUESTS) + len(NAME_SERVER_REQUESTS)


# Accounts


async def test_clients_do_what_their_accounts_may(guarded: Node) -> None:
    inbox = Inbox()
    async with (
        Producer(guarded.address, access=access("orders-key")) as producer,
        Consumer(guarded.address, "shipping", "orders", inbox, start="first", access=access("readers-key")),
    ):
        for number in range(5):
            await producer.send("orders", b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 5)
        with pytest.raises(BrokerRefused, match="No default permission for topic:other"):
            await producer.send("other", b"x")
    async with Producer(guarded.address, access=access("readers-key")) as producer:
        with pytest.raises(BrokerRefused, match="topic:orders"):
            await producer.send("orders", b"x")


@pytest.mark.parametrize("encoding", ["auto", "json", "rocketmq"])
async def test_signatures_hold_in_every_encoding(guarded: Node, encoding: Any) -> None:
    async with Producer(guarded.address, access=access("orders-key", encoding=encoding)) as producer:
        for _ in range(3):  # with `auto` the third is in MessagePack
            await producer.send("orders", "größe".encode(), tag="T", keys="größe")
    with pytest.raises(RocketletError, match="Check signature failed"):
        wrong = access("orders-key", encoding=encoding)
        object.__setattr__(wrong, "secret_key", "another-secret")
        async with Producer(guarded.address, access=wrong) as producer:
            await producer.send("orders", b"x")


async def test_white_addresses_need_no_signature(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    trusted, stranger = await wired("trusted-key"), await wired("")
    trusted.secret = "a-wrong-secret"
    assert (await trusted.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    assert (await stranger.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0
    file.rewrite(ACCOUNTS, white=("127.0.0.1",))
    assert (await stranger.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0  # on the open connection
    file.rewrite(ACCOUNTS, white=("10.0.0.1",))
    assert (await stranger.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code != 0


async def test_each_account_of_a_connection_is_judged_as_itself(guarded: Node, wired: Wired) -> None:
    """One that has signed, one whose address needs no signature, and the first again, without."""
    wire = await wired("orders-key")
    for key, secret, may in (
        ("orders-key", SECRETS["orders-key"], True),
        ("orders-key", "a-wrong-secret", False),
        ("trusted-key", "a-wrong-secret", True),
        ("orders-key", "a-wrong-secret", False),
        ("trusted-key", "a-wrong-secret", True),
    ):
        wire.access_key, wire.secret = key, secret
        assert ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0) is may


async def test_a_changed_account_holds_on_open_connections(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    wire = await wired("orders-key")
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    file.rewrite([account(ADMIN, admin=True)])
    assert "No acl config" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    file.rewrite([account("orders-key", topicPerms=["orders=SUB"])])
    assert "No default permission" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")


async def test_the_server_checks_the_file_on_its_own(nodes: Nodes, file: AccountsFile) -> None:
    node = await nodes.start(acl=file.acl)
    file.write([account(ADMIN, admin=True)])
    node.clock.advance(RELOAD_INTERVAL_S)
    assert set(file.acl.file.policy.accounts) == set(KEYS)  # it may be half written
    node.clock.advance(RELOAD_INTERVAL_S)
    await eventually(lambda: set(file.acl.file.policy.accounts) == {ADMIN})


async def test_everybody_may_trace(wired: Wired) -> None:
    nobody = await wired("nobody-key")
    assert (await nobody.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": TRACE_TOPIC}, b"x")).code == 0


async def test_an_account_gets_the_names_of_topics_that_it_may_use(guarded: Node) -> None:
    async with AdminClient(guarded.address, access=access(ADMIN)) as admin:
        for name in ("orders", "payroll"):
            await admin.create_topic(name)
        assert {"orders", "payroll", "TBW102"} <= set(await admin.topics(system=True))
    for key, told in {"orders-key": {"orders"}, "nobody-key": set[str]()}.items():
        async with AdminClient(guarded.address, access=access(key)) as reader:
            assert set(await reader.topics(system=True)) - {"TBW102"} == told, key


async def test_messages_for_a_retry_topic_need_its_group(guarded: Node, wired: Wired) -> None:
    guarded.broker.group_configs.put(GroupConfig("shipping"))
    readers, orders = await wired("readers-key"), await wired("orders-key")
    ext = {**SEND, "b": retry_topic("shipping")}
    assert (await readers.call(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code == 0
    assert "group:shipping" in ((await orders.call(RequestCode.SEND_MESSAGE_V2, ext, b"x")).remark or "")


async def test_a_message_is_not_fetched_by_its_place_or_by_sending_it_back(guarded: Node, wired: Wired) -> None:
    """Apache asks for no topic there."""
    admin, readers = await wired(ADMIN), await wired("readers-key")
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret"}, b"x")).code == 0
    (queue,) = [queue for queue in guarded.broker.store.queues.values() if queue.topic == "secret" and queue.next]
    position = queue.entry(0)[0]
    for code, ext in (
        (RequestCode.VIEW_MESSAGE_BY_ID, {"offset": position}),
        (RequestCode.CONSUMER_SEND_MSG_BACK, {"offset": position, "group": "shipping", "delayLevel": 1}),
    ):
        answer = await readers.call(code, ext)
        assert "topic:secret" in (answer.remark or "")


async def test_half_messages_are_shown_only_to_who_may_send_to_their_topic(nodes: Nodes, file: AccountsFile) -> None:
    """Any client that knows a producer group's name can join it."""
    node = await nodes.start(acl=file.acl, transaction_timeout_s=0.0)
    beat = bodies.encode_heartbeat(Heartbeat("c", (), ("p",)))
    wires = [await signed_wire(node.address, key) for key in ("nobody-key", "orders-key", "readers-key")]
    for wire in wires:
        assert (await wire.call(RequestCode.HEART_BEAT, {}, beat)).code == 0
    half = {**SEND, "f": 4, "g": int(time.time() * 1000), "i": "TRAN_MSG\1true\2PGROUP\1p\2"}
    assert (await wires[1].call(RequestCode.SEND_MESSAGE_V2, half, b"x")).code == 0
    sender, wires[1] = wires[1], await signed_wire(node.address, "orders-key")
    assert (await wires[1].call(RequestCode.HEART_BEAT, {}, beat)).code == 0
    await sender.close()  # the broker asks others only after the sender has gone
    await eventually(lambda: len(node.broker.clients.all_producers()["p"]) == 3)
    before = len(wires[1].requests)
    for _ in range(3):
        node.clock.advance(31)
        await node.broker.turns.done()
    for wire in wires:
        await wire.call(RequestCode.GET_BROKER_CLUSTER_INFO)  # the broker's question came before this answer
    assert [len(wire.requests) for wire in wires] == [0, before + 3, 0]
    for wire in wires:
        await wire.close()


# Registration


async def test_only_signed_brokers_register(nodes: Nodes, file: AccountsFile) -> None:
    port = free_port()
    await nodes.stack.enter_async_context(
        Server(Listening("127.0.0.1", port, acl=file.acl), broker=None, routes=Routes())
    )
    address = f"127.0.0.1:{port}"
    with capture_logs() as logs:
        await nodes.start(name="stranger", name_servers=(address,))
    assert "name_server_refused" in {entry["event"] for entry in logs}
    await nodes.start(name="broker-b", name_servers=(address,), acl=file.acl, name_server_account=ADMIN)
    async with Producer(address, access=access(ADMIN)) as producer:
        assert (await producer.send("orders", b"x")).queue.broker_name == "broker-b"
    with pytest.raises(AclError, match="no account missing"):
        await nodes.start(name="broker-c", name_servers=(address,), acl=file.acl, name_server_account="missing")


async def test_only_administrators_replay_and_mark_dead_letters(
    guarded: Node, file: AccountsFile, wired: Wired
) -> None:
    """Marks hide dead letters, so they are not for everybody who may send to most topics. A replay whose messages could
    not be marked sends none."""
    file.rewrite(
        [account(ADMIN, admin=True), account("orders-key", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB")]
    )
    marks = Queue(MARKS_TOPIC, guarded.config.name, 0)
    async with AdminClient(guarded.address, access=access(ADMIN)) as admin:
        await admin.create_group(GroupConfig("g"))
        await admin.create_topic("orders", queues=1)
        await admin.create_topic("%DLQ%g", queues=1)
        await admin.create_topic(MARKS_TOPIC, queues=1)
        await send(await wired(ADMIN), b"poison", topic="%DLQ%g", properties="RETRY_TOPIC\x01orders")
        ((letter,),) = [found async for found in admin.read(Queue("%DLQ%g", guarded.config.name, 0), 0, 1)]

        async def selected() -> AsyncIterator[Message]:
            yield letter

        async with AdminClient(guarded.address, access=access("orders-key")) as other:
            with pytest.raises(BrokerRefused, match="No default permission"):
                await other.store(marks, b"{}")
            with pytest.raises(BrokerRefused, match="No default permission"):
                await Replay(other, "g", to_group=False).run(selected())
            assert (await dead_letters(other, "g")).new == 1
        assert guarded.broker.store.queue("orders", 0).next == 0
        replayed = Replay(admin, "g", to_group=False)
        await replayed.run(selected())
        assert replayed.sent == 1
        assert (await dead_letters(admin, "g")).new == 0
    assert guarded.broker.store.queue("orders", 0).next == 1


# Client ids


HANDLE_FIELDS = {"extraInfo": "POP_CK", "offset": "INNER_MULTI_QUEUE_OFFSET"}
OTHER_ACCOUNT = (
    "the client id c of the group shipping is in use by a client of another account; give each client an id of its own"
)


async def test_client_id_of_another_account_gives_no_queue_and_no_lite_topic(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    members = [
        account(key, defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB") for key in ("orders-key", "readers-key")
    ]
    file.rewrite([account(ADMIN, admin=True), *members])
    put(guarded, message_type="LITE")
    guarded.broker.topics.put(TopicConfig("orders", 1, 1), guarded.broker.store.end)
    attributes = {"lite.bind.topic": "t", "lite.sub.model": "Exclusive"}
    guarded.broker.group_configs.put(GroupConfig("lite", attributes=attributes))
    member, other, again = await wired("orders-key"), await wired("readers-key"), await wired("orders-key")

    async def sync(wire: Wire, *names: str, action: LiteAction = LiteAction.COMPLETE_ADD) -> None:
        change = LiteSubscription(action, "c", "lite", "t", names)
        body = encode_lite_subscription(change)
        assert (await wire.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=body)).code == 0

    async def receives(wire: Wire) -> bool:
        assert (await send(member, b"1", properties="__LITE_TOPIC\x01a")).code == 0
        fields = {"consumerGroup": "lite", "clientId": "c", "topic": "t", "maxMsgNum": 1, "pollTime": 0, "bornTime": 0}
        answer = await wire.call(RequestCode.POP_LITE_MESSAGE, {**fields, "invisibleTime": 60_000})
        if answer.code == 0:
            (record,) = decode_records(answer.body)
            place = {"consumerGroup": "lite", "topic": "t", "queueId": 0, "liteTopic": "a"}
            place |= {name: find(record.properties, key) for name, key in HANDLE_FIELDS.items()}
            assert (await wire.call(RequestCode.ACK_MESSAGE, place)).code == 0
        return answer.code == 0

    await sync(member, "a")
    await sync(other, "a")
    taken = {"liteTopic": "a", "consumerGroup": "lite", "clientId": "c"}
    assert (await other.request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)).ext == taken, "the whole set is refused"
    assert (await receives(other), await receives(member)) == (False, True)
    await sync(other, "a", action=LiteAction.PARTIAL_ADD)
    assert (await member.request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)).ext == taken, "the loss is not silent"
    assert (await receives(member), await receives(other)) == (False, True)
    await sync(member, "a", action=LiteAction.PARTIAL_ADD)
    await sync(again, "a")
    assert (await receives(member), await receives(again)) == (False, True), "a reconnect of its own account"
    assert member.requests == []

    assert (await beat(member, "c", {"orders": "*"}, "shipping")).code == 0
    refused = await beat(other, "c", {"orders": "*"}, "shipping")
    assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, OTHER_ACCOUNT)
    assert (await beat(other, "c", {"orders": "*"}, "others")).code == 0, "another group has its own ids"
    assert (await beat(again, "c", {"orders": "*"}, "shipping")).code == 0
    lock = encode_lock_request(LockRequest("c", "shipping", (Queue("orders", guarded.config.name, 0),)))
    assert decode_locked((await again.call(RequestCode.LOCK_BATCH_MQ, body=lock)).body)
    refused = await other.call(RequestCode.LOCK_BATCH_MQ, body=lock)
    assert (refused.code, refused.remark) == (ResponseCode.SYSTEM_ERROR, OTHER_ACCOUNT)
    await again.close()
    await member.close()
    await eventually(lambda: not guarded.broker.groups.members_of("shipping"))
    assert (await beat(other, "c", {"orders": "*"}, "shipping")).code == 0, "nobody has the id any more"


# Hostile requests


async def test_what_was_signed_cannot_be_changed(wired: Wired) -> None:
    wire = await wired("orders-key")
    signature = Signer(wire.secret).signature({**SEND, "AccessKey": "orders-key"}, b"x")
    for ext, body in (
        ({**SEND, "e": 1}, b"x"),
        (SEND, b"y"),
        ({**SEND, "l": 1}, b"x"),
        ({**SEND, "b": "order"}, b"sx"),
    ):
        answer = await wire.call(RequestCode.SEND_MESSAGE_V2, {**ext, "Signature": signature}, body)
        assert "Check signature failed" in (answer.remark or ""), ext


ODD_FIELDS: list[dict[Any, Any]] = [
    {"b": None}, {"b": ["orders"]}, {"b": {"x": 1}}, {"b": 0}, {"b": False}, {"b": b"orders"},
    {b"b": "orders", "b": "other"},
    {"AccessKey": None}, {"AccessKey": 5}, {"AccessKey": ["orders-key"]}, {"AccessKey": {"a": 1}},
    {"AccessKey": "x" * 100_000},
    {"Signature": None}, {"Signature": 5}, {"Signature": True}, {"Signature": b"bytes"}, {"Signature": ["list"]},
    {"Signature": "\N{SNOWMAN}"}, {"Signature": "x" * 1_000_000}, {f"field-{number}": "x" for number in range(10_000)},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=range(len(ODD_FIELDS)))
async def test_odd_fields_are_refused_and_hurt_nobody(guarded: Node, wired: Wired, odd: dict[Any, Any]) -> None:
    """In MessagePack, where a value may be of any kind. It is refused, or the connection is closed; nothing is stored."""
    wire, honest = await wired(""), await wired("orders-key")
    fields: dict[Any, Any] = {**SEND, "AccessKey": "orders-key", "Signature": "x" * 28, **odd}
    header = msgpack.packb((RequestCode.SEND_MESSAGE_V2, 0, 1, 3, 409, None, fields))
    with capture_logs() as logs:
        wire.write((4 + len(header)).to_bytes(4, "big") + (MSGPACK << 24 | len(header)).to_bytes(4, "big") + header)
        try:
            assert (await wire.answer(1)).code == ResponseCode.SYSTEM_ERROR
        except ConnectionResetError:
            pass
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not any(queue.next for queue in guarded.broker.store.queues.values())
    assert (await honest.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0


async def test_fields_that_look_empty_are_not_overlooked(wired: Wired) -> None:
    """0 and False are names, too, for a handler makes texts of them."""
    nobody = await wired("nobody-key")
    for name in (0, False):
        ext = {"topic": name, "consumerGroup": name, "queueId": 0}
        answer = await nobody.call(RequestCode.QUERY_CONSUMER_OFFSET, ext, serialize_type=MSGPACK)
        assert "No default permission" in (answer.remark or "")


@pytest.mark.parametrize("serialize_type", [JSON, ROCKETMQ, MSGPACK])
async def test_a_oneway_request_without_permission_has_no_effect(
    guarded: Node, wired: Wired, serialize_type: int
) -> None:
    nobody = await wired("nobody-key")
    nobody.send(RequestCode.SEND_MESSAGE_V2, SEND, b"x", flag=2, serialize_type=serialize_type)
    await nobody.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert not any(queue.next for queue in guarded.broker.store.queues.values())


async def test_refusals_are_logged_once_counted_and_hold_no_secret(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    nobody, stranger = await wired("nobody-key"), await wired("")
    with capture_logs() as logs:
        for _ in range(3):
            answers = [
                await nobody.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x"),
                await nobody.call(RequestCode.UPDATE_BROKER_CONFIG, {}, b"x=y"),
                await nobody.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "Signature": "wrong"}, b"x"),
                await stranger.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x"),
                await stranger.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "AccessKey": "no-such-account"}, b"x"),
            ]
    reasons = ["permission", "admin", "signature", "no_key", "unknown_key"]
    assert file.acl.refused == dict.fromkeys(reasons, 3)
    assert [entry["reason"] for entry in logs] == reasons
    shown = str(logs) + str(answers)
    assert not [secret for secret in SECRETS.values() if secret in shown]
    assert all(answer.code == ResponseCode.SYSTEM_ERROR for answer in answers)


async def test_who_is_asked_does_not_get_the_signature_of_who_asks(guarded: Node, wired: Wired) -> None:
    member, admin = await wired("readers-key"), await wired(ADMIN)
    assert (await member.call(RequestCode.HEART_BEAT, {}, body_of(RequestCode.HEART_BEAT))).code == 0
    admin.send(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "shipping", "clientId": "c"})
    request = await member.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert not {"AccessKey", "Signature"} & set(request.ext)


# mqadmin's commands


async def test_accounts_are_set_up_over_the_wire(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    admin = await wired(ADMIN)
    fresh = {
        "accessKey": "fresh-key",
        "secretKey": "secret-of-fresh",
        "topicPerms": "orders=PUB,other=SUB",
        "admin": "false",
    }
    with capture_logs() as logs:
        assert (await admin.call(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, fresh)).code == 0
    assert "secret-of-fresh" not in str(logs)
    wire = await wired("")
    wire.access_key, wire.secret = "fresh-key", "secret-of-fresh"
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    white = {"globalWhiteAddrs": "10.0.0.{1,2},10.0.1.*"}
    assert (await admin.call(RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, white)).code == 0
    found = orjson.loads((await admin.call(RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG)).body)
    assert found["globalWhiteAddrs"] == ["10.0.0.{1,2}", "10.0.1.*"]
    assert {entry["accessKey"] for entry in found["plainAccessConfigs"]} == {*KEYS, "fresh-key"}
    assert "secret-of" not in str(found)
    version = await admin.call(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
    assert orjson.loads(str(version.ext["version"]))["counter"] == 2
    assert (await admin.call(RequestCode.DELETE_ACL_CONFIG, {"accessKey": "fresh-key"})).code == 0
    assert "No acl config" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")


@pytest.mark.parametrize(
    ("code", "ext", "failure", "reason"),
    [
        (50, {"accessKey": "fresh-key", "secretKey": "short"}, 209, "at least 7"),
        (50, {"accessKey": "fresh-key", "secretKey": "long-enough", "topicPerms": "a"}, 209, "write name=PUB"),
        (51, {"accessKey": "no-such-account"}, 210, "no account"),
        (53, {"globalWhiteAddrs": "10.0.0"}, 211, "neither IPv4"),
        (53, {"globalWhiteAddrs": "", "aclFileFullPath": "/etc/passwd"}, 211, "one ACL file"),
    ],
)
async def test_changes_that_cannot_be_are_refused(
    wired: Wired, file: AccountsFile, code: int, ext: dict[str, str], failure: int, reason: str
) -> None:
    before = file.path.read_bytes()
    answer = await (await wired(ADMIN)).call(code, ext)
    assert (answer.code, reason in (answer.remark or "")) == (failure, True), answer.remark
    assert file.path.read_bytes() == before


# Users and ACLs of 5.x


def acl_of(*entries: Mapping[str, object]) -> bytes:
    return orjson.dumps({"policies": [{"policyType": "Custom", "entries": entries}]})


def allowed(resource: str, *actions: str, **fields: object) -> dict[str, object]:
    return {"resource": resource, "actions": actions, "decision": "Allow", **fields}


async def test_users_of_5_are_accounts_of_the_file(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    admin = await wired(ADMIN)
    user = {"username": "fresh-user", "password": "secret-of-fresh", "userType": "Normal"}
    name = {"username": "fresh-user"}
    with capture_logs() as logs:
        assert (await admin.call(RequestCode.AUTH_CREATE_USER, name, orjson.dumps(user))).code == 0
    assert "secret-of-fresh" not in str(logs)
    refused = await admin.call(RequestCode.AUTH_CREATE_USER, name, orjson.dumps(user))
    assert (refused.code, "exists already" in (refused.remark or "")) == (1, True)
    shown = orjson.loads((await admin.call(RequestCode.AUTH_GET_USER, name)).body)
    assert shown == {"username": "fresh-user", "userType": "Normal", "userStatus": "enable"}
    listed = orjson.loads((await admin.call(RequestCode.AUTH_LIST_USER, {"filter": "fresh"})).body)
    assert listed == [shown]
    everybody = orjson.loads((await admin.call(RequestCode.AUTH_LIST_USER)).body)
    assert {item["username"] for item in everybody} == {*KEYS, "fresh-user"}
    wire = await wired("")
    wire.access_key, wire.secret = "fresh-user", "secret-of-fresh"
    assert "No default permission" in ((await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).remark or "")
    change = orjson.dumps({"password": "another-secret", "userType": "Super"})
    assert (await admin.call(RequestCode.AUTH_UPDATE_USER, name, change)).code == 0
    wire.secret = "another-secret"
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    for _ in range(2):  # deleting it again is no fault
        assert (await admin.call(RequestCode.AUTH_DELETE_USER, name)).code == 0
    missing = await admin.call(RequestCode.AUTH_GET_USER, name)
    assert missing.code == ResponseCode.USER_NOT_EXIST


async def test_acls_of_5_are_permissions_of_the_file(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    admin, wire = await wired(ADMIN), await wired("nobody-key")
    subject = {"subject": "User:nobody-key"}
    entries = allowed("Topic:orders", "Pub"), allowed("Group:shipping", "Sub"), allowed("Topic:*", "Sub")
    assert (await admin.call(RequestCode.AUTH_CREATE_ACL, subject, acl_of(*entries))).code == 0
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    nobody = guarded.broker.acl.file.policy.accounts["nobody-key"]  # type: ignore[union-attr]
    assert (nobody.default_topic, nobody.resources["%RETRY%shipping"]) == (Permission.SUB, Permission.SUB)
    shown = orjson.loads((await admin.call(RequestCode.AUTH_GET_ACL, subject)).body)
    found = {item["resource"]: (item["decision"], item["actions"]) for item in shown["policies"][0]["entries"]}
    assert (shown["subject"], found) == (
        "User:nobody-key",
        {
            "Topic:orders": ("Allow", ["Pub"]),
            "Topic:*": ("Allow", ["Sub"]),
            "Group:shipping": ("Allow", ["Sub"]),
        },
    )
    denied = {"resource": "Topic:orders", "actions": ["Pub", "Sub"], "decision": "Deny"}
    assert (await admin.call(RequestCode.AUTH_UPDATE_ACL, subject, acl_of(denied))).code == 0
    assert (await wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 1
    listed = await admin.call(RequestCode.AUTH_LIST_ACL, {"subjectFilter": "nobody", "resourceFilter": "Topic:orders"})
    (only,) = orjson.loads(listed.body)
    assert [item["decision"] for item in only["policies"][0]["entries"]] == ["Deny"]
    one = {**subject, "resource": "Topic:orders"}
    assert (await admin.call(RequestCode.AUTH_DELETE_ACL, one)).code == 0
    assert (await admin.call(RequestCode.AUTH_DELETE_ACL, one)).code == ResponseCode.POLICY_NOT_EXIST
    assert (await admin.call(RequestCode.AUTH_DELETE_ACL, subject)).code == 0
    nobody = guarded.broker.acl.file.policy.accounts["nobody-key"]  # type: ignore[union-attr]
    assert (nobody.default_topic, dict(nobody.resources)) == (Permission.DENY, {})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (allowed("Cluster:DefaultCluster", "All"), "type Super"),
        (allowed("Topic:orders-*", "Pub"), "Topic:NAME"),
        (allowed("Topic:a b", "Pub"), "resource"),
        (allowed("Topic:orders", "Create"), "type Super"),
        (allowed("Topic:orders"), "expected Sub"),
        (allowed("Group:shipping", "Pub"), "expected Sub"),
        (allowed("Topic:orders", "Pub", sourceIps=["10.0.0.1"]), "every address"),
        (allowed("Topic:orders", "Pub", decision="Deny"), "allow the other"),
        (allowed("Topic:orders", "Pub", decision="Maybe"), "Allow or Deny"),
    ],
)
async def test_acl_that_the_file_cannot_express_is_refused_with_a_reason(
    wired: Wired, file: AccountsFile, entry: dict[str, object], reason: str
) -> None:
    before = file.path.read_bytes()
    entries = allowed("Topic:fine", "Pub"), entry
    answer = await (await wired(ADMIN)).call(
        RequestCode.AUTH_CREATE_ACL, {"subject": "User:nobody-key"}, acl_of(*entries)
    )
    assert (answer.code, reason in (answer.remark or "")) == (ResponseCode.INVALID_PARAMETER, True), answer.remark
    assert file.path.read_bytes() == before


@pytest.mark.parametrize(
    ("code", "ext", "body", "refusal", "reason"),
    [
        (3001, {"username": "short"}, {"password": "long-enough"}, 1, "at least 7"),
        (3001, {"username": "fresh-user"}, {"userType": "Normal"}, 1, "secretKey"),
        (3001, {"username": "fresh-user"}, {"password": "long-enough", "userType": "King"}, 29, "Super or Normal"),
        (3002, {"username": "nobody-key"}, {"userStatus": "disable"}, 29, "cannot be disabled"),
        (3002, {"username": "no-such-user"}, {"password": "long-enough"}, 3001, "no user"),
        (3006, {"subject": "User:no-such-user"}, {"policies": []}, 3001, "no user"),
        (3009, {"subject": "nobody-key"}, {}, 29, "User:NAME"),
    ],
)
async def test_user_that_the_file_cannot_express_is_refused_with_a_reason(
    wired: Wired, file: AccountsFile, code: int, ext: dict[str, str], body: object, refusal: int, reason: str
) -> None:
    before = file.path.read_bytes()
    answer = await (await wired(ADMIN)).call(code, ext, orjson.dumps(body))
    assert (answer.code, reason in (answer.remark or "")) == (refusal, True), answer.remark
    assert file.path.read_bytes() == before


async def test_others_are_served_while_an_account_is_written(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 accounts take 0.4 s."""
    may_go_on, began = Event(), Event()

    def slow(*_: object) -> None:
        began.set()
        assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr("rocketlet.broker.access.replace_file", slow)
    admin, other = await wired(ADMIN), await wired("orders-key")
    fresh = {"accessKey": "fresh-key", "secretKey": "secret-of-fresh"}
    putting = asyncio.create_task(admin.call(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, fresh))
    await eventually(began.is_set)
    assert (await other.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x")).code == 0
    assert not putting.done()
    may_go_on.set()
    assert (await putting).code == 0


async def test_a_broker_without_accounts_says_how_to_have_some(node: Node) -> None:
    wire = await signed_wire(node.address, "")
    for code in (50, 51, 52, 53, 54):
        ext = {"accessKey": "fresh-key", "secretKey": "long-enough", "globalWhiteAddrs": ""}
        assert "--acl" in ((await wire.call(code, ext)).remark or "")
    await wire.close()


async def test_many_clients_at_the_same_time_are_distinguished(guarded: Node, wired: Wired) -> None:
    wires = [await wired(key) for key in ("orders-key", "nobody-key") * 5]
    answers = await asyncio.gather(*(wire.call(RequestCode.SEND_MESSAGE_V2, SEND, b"x") for wire in wires))
    assert [answer.code for answer in answers] == [0, 1] * 5


# Accounts that change while their clients wait.


async def test_a_pull_that_is_held_ends_when_its_account_changes(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    """A removed account got messages for another 60 s."""
    removed, other, sender = await wired("readers-key"), await wired("orders-key"), await wired(ADMIN)
    ext = {**SEND, "b": "orders"}
    assert (await sender.call(RequestCode.SEND_MESSAGE_V2, ext, b"before")).code == 0
    queue = next(queue for queue in guarded.broker.store.queues.values() if queue.topic == "orders" and queue.next)
    pull = {
        "consumerGroup": "shipping", "topic": "orders", "queueId": queue.queue_id, "queueOffset": queue.next,
        "maxMsgNums": 1, "sysFlag": 6, "commitOffset": 0, "suspendTimeoutMillis": 60_000, "subscription": "*",
        "subVersion": 0,
    }  # fmt: skip
    held = removed.send(RequestCode.PULL_MESSAGE, pull)
    also_held = sender.send(RequestCode.PULL_MESSAGE, pull | {"consumerGroup": "admins"})
    await eventually(lambda: guarded.broker.held_pulls.count == 2)
    file.rewrite([item for item in ACCOUNTS if item["accessKey"] != "readers-key"])
    guarded.clock.advance(RELOAD_INTERVAL_S)
    assert (await removed.answer(held)).code == ResponseCode.PULL_NOT_FOUND
    assert guarded.broker.held_pulls.count == 1, "nobody else's ends"
    assert (await sender.call(RequestCode.SEND_MESSAGE_V2, ext | {"e": queue.queue_id}, b"after")).code == 0
    assert (await sender.answer(also_held)).code == 0
    assert "No acl config" in ((await removed.call(RequestCode.PULL_MESSAGE, pull)).remark or "")
    await other.close()


async def test_receives_that_wait_end_when_their_accounts_change(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    """A removed account got messages by a POP that waited, of both servers."""
    guarded.broker.topics.put(TopicConfig("orders", 1, 1), guarded.broker.store.end)
    removed, admin = await wired("readers-key"), await wired(ADMIN)
    grpc = await grpc_client(guarded.address, authorization=signed("readers-key", SECRETS["readers-key"]))
    waits = pop("orders", consumerGroup="shipping", pollTime=20_000)
    opaque = removed.send(RequestCode.POP_MESSAGE, waits)
    removed.access_key, removed.secret = ADMIN, SECRETS[ADMIN]  # another account asks on the same connection
    assert (await removed.call(RequestCode.POP_MESSAGE, waits | {"pollTime": 0})).code != 0
    also_waiting = admin.send(RequestCode.POP_MESSAGE, waits | {"consumerGroup": "admins"})
    of_group: dict[str, Any] = {"group": {"name": "shipping"}, "message_queue": {"topic": {"name": "orders"}}}
    call = begin(grpc, request(wait_ms=20_000, **of_group))
    await eventually(lambda: guarded.broker.pops.waiting == 3)
    file.rewrite([item for item in ACCOUNTS if item["accessKey"] != "readers-key"])
    guarded.clock.advance(RELOAD_INTERVAL_S)
    assert (await removed.answer(opaque)).code == ResponseCode.POLLING_TIMEOUT
    assert await received(call) == (NOTHING, [])
    assert guarded.broker.pops.waiting == 1, "nobody else's ends"
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "orders"}, b"after")).code == 0
    assert (await admin.answer(also_waiting)).code == 0
    (answer,) = await begin(grpc, request(**of_group)).all()
    assert answer.status.code == 40100
    await grpc.close()


async def test_a_pull_that_is_held_ends_when_its_address_is_white_no_more(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    file.rewrite(ACCOUNTS, white=("127.0.0.1",))
    guarded.clock.advance(RELOAD_INTERVAL_S)
    anybody = await wired("")
    guarded.broker.topics.put(TopicConfig("orders", 1, 1), guarded.broker.store.end)
    opaque = anybody.send(RequestCode.POP_MESSAGE, pop("orders", consumerGroup="shipping", pollTime=20_000))
    await eventually(lambda: guarded.broker.pops.waiting == 1)
    file.rewrite(ACCOUNTS)
    guarded.clock.advance(RELOAD_INTERVAL_S)
    assert (await anybody.answer(opaque)).code == ResponseCode.POLLING_TIMEOUT
