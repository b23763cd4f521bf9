"""Accounts that change while their clients wait."""

from __future__ import annotations

from rocketlet.broker.config import RELOAD_INTERVAL_S
from rocketlet.protocol.codes import RequestCode, ResponseCode

from ...conftest import Node, eventually
from ...support.accounts import ACCOUNTS, ADMIN, SEND, AccountsFile, Wired


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
