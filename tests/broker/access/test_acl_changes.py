"""Accounts that change while their clients wait."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.broker.config import RELOAD_INTERVAL_S
from rocketlet.broker.messages import filters
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode

from ...conftest import Node, eventually
from ...support.accounts import ACCOUNTS, ADMIN, SECRETS, SEND, AccountsFile, Wired
from ...support.grpc_client import grpc_client, signed
from ...support.requests import pop, pull
from ..grpc.receives import NOTHING, begin, received, request


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


async def test_requests_that_wait_for_their_filter_end_when_their_accounts_change(
    guarded: Node, wired: Wired, file: AccountsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed account got messages by a POP whose filter was parsed after the account had been removed."""
    guarded.broker.topics.put(TopicConfig("orders", 1, 1), guarded.broker.store.end)
    removed, admin = await wired("readers-key"), await wired(ADMIN)
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "orders"}, b"secret")).code == 0
    is_slow, parsing = True, filters.parsing

    def slowly(*arguments: Any) -> Any:
        while is_slow:
            yield
        return (yield from parsing(*arguments))

    monkeypatch.setattr(filters, "parsing", slowly)
    filtered = {"expType": "SQL92", "exp": "a IS NULL"}
    popped = removed.send(RequestCode.POP_MESSAGE, pop("orders", consumerGroup="shipping", **filtered))
    pulled = removed.send(
        RequestCode.PULL_MESSAGE,
        pull("orders", subscription="a IS NULL", expression_type="SQL92", consumer_group="shipping"),
    )
    grpc = await grpc_client(guarded.address, authorization=signed("readers-key", SECRETS["readers-key"]))
    of_group: dict[str, Any] = {"group": {"name": "shipping"}, "message_queue": {"topic": {"name": "orders"}}}
    call = begin(grpc, request(filter_expression={"type": 2, "expression": "a IS NULL"}, **of_group))
    allowed = admin.send(RequestCode.POP_MESSAGE, pop("orders", consumerGroup="admins", **filtered))
    await eventually(lambda: guarded.broker.filters.waiting == 4)
    file.rewrite([item for item in ACCOUNTS if item["accessKey"] != "readers-key"])
    guarded.clock.advance(RELOAD_INTERVAL_S)
    is_slow = False
    assert await received(call) == (NOTHING, [])
    assert {(await removed.answer(opaque)).body for opaque in (popped, pulled)} == {b""}
    assert b"secret" in (await admin.answer(allowed)).body
    await grpc.close()
