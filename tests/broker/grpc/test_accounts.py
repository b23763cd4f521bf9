"""Permissions, by the accounts of the other protocol server."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.clients import GrpcClient as GrpcSession
from rocketlet.broker.grpc.server import METHODS
from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Finding, Harm
from rocketlet.protocol.bodies import Heartbeat, TopicConfig, encode_heartbeat
from rocketlet.protocol.codes import RequestCode

from ...conftest import Node
from ...support.accounts import ADMIN, SECRETS, AccountsFile, Wired, access, account, reload
from ...support.accounts import SEND as HALF_OF_ADMIN
from ...support.grpc_client import GrpcClient, message, resource, route, sending, signed
from ...support.requests import reply
from .conftest import Dial

OK, UNAUTHORIZED = 20000, 40100


@pytest.fixture
async def guarded(guarded: Node) -> Node:
    for name in ("orders", "secret"):
        guarded.broker.topics.put(TopicConfig(name, 1, 1), guarded.broker.store.end)
    return guarded


def authorization(access_key: str, **options: str) -> str:
    return signed(access_key, SECRETS.get(access_key, "x" * 8), **options)


async def code(client: GrpcClient, method: str, request: Any, **metadata: str) -> int:
    call = client.begin(method, end=False, path="", **metadata)
    call.send(request, end=True)
    answers = await call.all()
    return int(answers[0].status.code)


SEND = sending(message("orders"))
RECEIVE = schema.ReceiveMessageRequest(
    group=resource("shipping"), message_queue={"topic": {"name": "orders"}, "id": -1}, auto_renew=True, batch_size=1
)
RECEIVE.long_polling_timeout.FromMilliseconds(0)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("", "no_key"),
        ("MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=00", "no_key"),
        ("MQv2-HMAC-SHA1", "no_key"),
        ("rubbish, = ,,", "no_key"),
        (signed("no-such-key", "x"), "unknown_key"),
        (signed("orders-key", "another secret"), "signature"),
        (authorization("orders-key", date_time="20250101T000000Z"), "signature"),
        (authorization("orders-key").replace("Signature=", "Signature=ü"), "signature"),
        ("MQv2-HMAC-SHA1 Credential=orders-key", "signature"),
    ],
)
async def test_who_does_not_show_an_account_is_refused(
    guarded: Node, dial: Dial, file: AccountsFile, field: str, reason: str
) -> None:
    client = await dial(guarded.address)
    assert await code(client, "SendMessage", SEND, authorization=field) == UNAUTHORIZED
    assert file.acl.refused == {reason: 1}


async def test_doctor_names_refused_signatures_and_missing_permissions_of_grpc_clients(
    guarded: Node, dial: Dial
) -> None:
    client = await dial(guarded.address)
    wrong = signed("orders-key", "another secret")
    assert await code(client, "SendMessage", SEND, authorization=wrong) == UNAUTHORIZED
    for access_key in ("nobody-key", "orders-key"):
        field = authorization(access_key)
        assert await code(client, "ReceiveMessage", RECEIVE, authorization=field) == UNAUTHORIZED
    found = await refusals(guarded)
    texts = sorted(item.text.partition("requests, ")[2] for item in found)
    assert [text.partition(" ")[0] for text in texts] == ["permission:", "permission:", "signature:"]
    assert all("127.0.0.1 requested ReceiveMessage: No default permission for " in text for text in texts[:2])
    assert [text.rpartition("=")[2] for text in texts] == ["nobody-key", "orders-key", "orders-key"]
    assert "127.0.0.1 requested SendMessage: Check signature failed" in texts[2]
    assert {item.harm for item in found} == {Harm.STANDS}


async def refusals(node: Node) -> list[Finding]:
    """What doctor finds about refused requests and failing calls."""
    async with AdminClient(node.address, access=access(ADMIN)) as admin:
        found = await diagnose(admin, ObservationTimes(0, 0, 0))
    return [item for item in found if item.kind in ("requests_refused", "calls_failing", "old_client")]


async def test_doctor_has_no_finding_about_clients_with_permissions(guarded: Node, dial: Dial) -> None:
    client = await dial(guarded.address)
    calls = [("orders-key", "SendMessage", SEND, OK), ("readers-key", "ReceiveMessage", RECEIVE, OK)]
    calls.append(("readers-key", "ReceiveMessage", RECEIVE, 40401))
    beat = schema.HeartbeatRequest(group=resource("shipping"), client_type=3)
    for access_key, method, request, expected in [*calls, ("readers-key", "Heartbeat", beat, OK)]:
        field = authorization(access_key)
        assert await code(client, method, request, authorization=field) == expected
    assert await refusals(guarded) == []


async def test_a_signature_in_either_case_and_with_a_region_is_taken(guarded: Node, dial: Dial) -> None:
    client = await dial(guarded.address)
    field = authorization("orders-key")
    head, _, signature = field.rpartition("=")
    for shown in (field, f"{head}={signature.lower()}", field.replace("orders-key", "orders-key/region/service")):
        assert await code(client, "SendMessage", SEND, authorization=shown) == OK


@pytest.mark.parametrize(
    ("access_key", "method", "request_", "expected"),
    [
        ("orders-key", "SendMessage", SEND, OK),
        ("readers-key", "SendMessage", SEND, UNAUTHORIZED),
        ("orders-key", "SendMessage", sending(message("secret")), UNAUTHORIZED),
        ("orders-key", "SendMessage", sending(message("orders"), message("secret")), UNAUTHORIZED),
        ("orders-key", "QueryRoute", route("orders"), OK),
        ("readers-key", "QueryRoute", route("orders"), OK),
        ("nobody-key", "QueryRoute", route("orders"), UNAUTHORIZED),
        ("readers-key", "ReceiveMessage", RECEIVE, 40401),
        ("orders-key", "ReceiveMessage", RECEIVE, UNAUTHORIZED),
        ("trusted-key", "SendMessage", sending(message("secret")), OK),
        (ADMIN, "SendMessage", sending(message("secret")), OK),
    ],
)
async def test_what_an_account_may_do(
    guarded: Node, dial: Dial, access_key: str, method: str, request_: Any, expected: int
) -> None:
    client = await dial(guarded.address)
    assert await code(client, method, request_, authorization=authorization(access_key)) == expected


def filled(kind: Any) -> Any:
    """A request with the names of a topic and a group wherever it has some."""
    request = kind()
    names = {field.name for field in kind.DESCRIPTOR.fields}
    if "topic" in names:
        request.topic.name = "orders"
    if "group" in names:
        request.group.name = "shipping"
    if "messages" in names:
        request.messages.append(message("orders"))
    if "message_queue" in names:
        request.message_queue.topic.name = "orders"
    if "settings" in names:
        request.settings.subscription.group.name = "shipping"
        request.settings.subscription.subscriptions.add().topic.name = "orders"
    return request


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_no_method_is_open_to_an_account_without_permissions(guarded: Node, dial: Dial, method: str) -> None:
    client = await dial(guarded.address, authorization=authorization("nobody-key"))
    assert await code(client, method, filled(METHODS[method].request)) == UNAUTHORIZED


async def test_a_stream_of_a_stranger_is_ended_with_a_reason(guarded: Node, dial: Dial) -> None:
    client = await dial(guarded.address)
    call = client.begin("Telemetry")
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="orders")
    call.send(schema.TelemetryCommand(settings=settings))
    (answer,) = await call.all()
    assert (answer.status.code, call.status) == (UNAUTHORIZED, 0)


async def test_accounts_that_change_apply_immediately(guarded: Node, dial: Dial, file: AccountsFile) -> None:
    client = await dial(guarded.address, authorization=authorization("orders-key"))
    assert await code(client, "SendMessage", SEND) == OK
    file.write([account(ADMIN, admin=True), account("orders-key")])
    reload(file.acl)
    assert await code(client, "SendMessage", SEND) == UNAUTHORIZED


async def test_a_producer_is_not_shown_half_messages_of_others(guarded: Node, dial: Dial) -> None:
    """A client that says that it publishes to a topic would be shown them when their outcome is asked for."""
    client = await dial(guarded.address, authorization=authorization("readers-key"))
    call = client.begin("Telemetry")
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name="orders")
    call.send(schema.TelemetryCommand(settings=settings))
    assert (await call.next()).status.code == UNAUTHORIZED
    assert guarded.broker.clients.producers("orders") == []


async def test_a_transaction_of_another_topic_is_not_ended_through_a_topic_that_is_named_as_its_producers_group(
    guarded: Node, dial: Dial, wired: Wired
) -> None:
    admin = await wired(ADMIN)
    half = {**HALF_OF_ADMIN, "b": "secret", "i": "TRAN_MSG\x01true\x02PGROUP\x01orders"}
    sent = await admin.call(RequestCode.SEND_MESSAGE_V2, half, b"hidden")
    place = f"{str(sent.ext['msgId'])[-16:]}{int(sent.ext['queueOffset']):016X}"
    client = await dial(guarded.address, authorization=authorization("orders-key"))
    for resolution in (1, 2):
        ends = schema.EndTransactionRequest(
            topic=resource("orders"), message_id="m", transaction_id=place, resolution=resolution
        )
        assert await code(client, "EndTransaction", ends) == 40008
    assert guarded.broker.transactions.waiting == 1


async def test_clients_of_two_accounts_that_go_by_one_id_are_two(guarded: Node, dial: Dial, file: AccountsFile) -> None:
    """A client that goes by another's name would be asked for the outcome of its transactions, and shown them."""
    accounts = [account(ADMIN, admin=True), account("orders-key", topicPerms=["orders=PUB"])]
    file.rewrite(
        [*accounts, account("readers-key", topicPerms=["secret=PUB", "orders=SUB"], groupPerms=["shipping=SUB"])]
    )
    honest = await dial(guarded.address, authorization=authorization("orders-key"))
    await publishes(honest, "orders", OK)
    (producer,) = guarded.broker.clients.producers("orders")
    stranger = await dial(guarded.address, authorization=authorization("readers-key"))
    await publishes(stranger, "secret", OK)
    beat = schema.HeartbeatRequest(group=resource("shipping"), client_type=2)
    assert await code(stranger, "Heartbeat", beat) == OK
    assert await code(stranger, "ReceiveMessage", RECEIVE) == 40401
    bye = schema.NotifyClientTerminationRequest(group=resource("shipping"))
    assert await code(stranger, "NotifyClientTermination", bye) == OK
    session = guarded.broker.clients.producer_of("orders", "orders", b"")
    assert isinstance(session, GrpcSession)
    assert (session.client_id, session.account) == (producer.client_id, "orders-key")
    assert (session.topics, session.stream is not None, session.group) == (("orders",), True, "")


async def test_replies_to_a_client_do_not_go_to_who_claims_its_id(
    guarded: Node, dial: Dial, wired: Wired, file: AccountsFile
) -> None:
    waiting, thief = await wired("orders-key"), await wired("nobody-key")
    body = encode_heartbeat(Heartbeat("me"))
    for wire in (waiting, thief):
        assert (await wire.call(RequestCode.HEART_BEAT, body=body)).code == 0
    session = guarded.broker.clients.session_of("me")
    claiming = await dial(guarded.address, authorization=authorization("orders-key"), client_id="me")
    await publishes(claiming, "orders", OK)
    assert session is not None
    assert guarded.broker.clients.session_of("me") is session
    admin = await wired(ADMIN)
    opaque = admin.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply("me"), b"pong")
    waiting.write_answer(await waiting.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT))
    assert (await admin.answer(opaque)).code == 0
    back = await wired("orders-key")
    assert (await back.call(RequestCode.HEART_BEAT, body=body)).code == 0
    assert guarded.broker.clients.session_of("me") is not session, "its own client may reconnect"


async def publishes(client: GrpcClient, topic: str, expected: int) -> None:
    call = client.begin("Telemetry")
    settings = schema.Settings(client_type=1)
    settings.publishing.topics.add(name=topic)
    call.send(schema.TelemetryCommand(settings=settings))
    assert (await call.next()).status.code == expected


async def test_who_may_not_send_to_a_topic_does_not_create_it_by_asking_for_it(
    guarded: Node, dial: Dial, file: AccountsFile
) -> None:
    file.rewrite([account("orders-key", defaultTopicPerm="PUB"), account("readers-key", defaultTopicPerm="SUB")])
    reader = await dial(guarded.address, authorization=authorization("readers-key"))
    assert await code(reader, "QueryRoute", route("new")) == 40402
    assert guarded.broker.topics.get("new") is None
    sender = await dial(guarded.address, authorization=authorization("orders-key"), client_id="another@1")
    assert await code(sender, "QueryRoute", route("new")) == OK
    assert await code(reader, "QueryRoute", route("new")) == OK
