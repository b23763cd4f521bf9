"""Topics in which brokers keep what is of others: delayed and half messages, replies, dead letters, traces."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import ConsumerData, GroupConfig, Heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import TRACE_TOPIC, parse_subscription

from ...conftest import Node
from ...support.accounts import ACCOUNTS, ADMIN, SEND, AccountsFile, Wired, account

PULL: dict[str, Any] = {
    "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
    "subVersion": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "DefaultCluster_REPLY_TOPIC",
        "%DLQ%theirs",
        "%RETRY%theirs",
        TRACE_TOPIC,
    ],
)
async def test_no_request_shows_in_another_topic_what_is_denied(
    guarded: Node, wired: Wired, file: AccountsFile, topic: str
) -> None:
    """An account that may read all topics but one read that one's delayed and half messages, replies and dead letters."""
    curious = account("readers-key", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB")
    curious |= {"topicPerms": ["secret=DENY"], "groupPerms": ["theirs=DENY"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), curious])
    admin, reader = await wired(ADMIN), await wired("readers-key")
    guarded.broker.group_configs.put(GroupConfig("theirs"))
    for text in ("KEYS\1k", "KEYS\1k\2DELAY\x0118", "KEYS\1k\2TRAN_MSG\1true\2PGROUP\1p"):
        assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")).code == 0
    dead = {**SEND, "b": "%RETRY%theirs", "j": 99, "i": "KEYS\1k"}
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, dead, b"hidden")).code == 0
    queue_id = 17 if topic.startswith("SCHEDULE") else 0
    pull = {**PULL, "topic": topic, "queueId": queue_id, "consumerGroup": "ours"}
    query = {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 2**62}
    for code, ext in (
        (RequestCode.PULL_MESSAGE, pull),
        (RequestCode.QUERY_MESSAGE, query),
        (RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id}),
        (RequestCode.GET_TOPIC_STATS_INFO, {"topic": topic}),
        (RequestCode.QUERY_CONSUME_QUEUE, {"topic": topic, "queueId": queue_id, "index": 0, "count": 1}),
    ):
        for asked in (ext, {**ext, "consumerGroup": ""}):
            refused = await reader.call(code, asked)
            assert (refused.code, "No default permission for" in (refused.remark or "")) == (1, True), (code, refused)
        allowed = await admin.call(code, ext)
        assert "AclException" not in (allowed.remark or "")
    subscriptions = (parse_subscription(topic, "*", version=1),)
    beat = bodies.encode_heartbeat(Heartbeat("c", (ConsumerData("ours", subscriptions=subscriptions),)))
    assert "No default permission" in ((await reader.call(RequestCode.HEART_BEAT, body=beat)).remark or "")


async def test_no_place_in_the_log_shows_what_is_denied(guarded: Node, wired: Wired, file: AccountsFile) -> None:
    curious = account("readers-key", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB")
    curious |= {"topicPerms": ["secret=DENY"], "groupPerms": ["theirs=DENY"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), curious])
    admin, reader = await wired(ADMIN), await wired("readers-key")
    guarded.broker.group_configs.put(GroupConfig("theirs"))
    for text in ("", "DELAY\x0118", "TRAN_MSG\1true\2PGROUP\1p", "REAL_TOPIC\1open\2DELAY\x0118"):
        assert (await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")).code == 0
    dead = {**SEND, "b": "%RETRY%theirs", "j": 99}
    assert (await admin.call(RequestCode.SEND_MESSAGE_V2, dead, b"hidden")).code == 0
    reply = {**SEND, "i": "REPLY_TO_CLIENT\1nobody"}
    await admin.call(RequestCode.SEND_REPLY_MESSAGE_V2, reply, b"hidden")
    queues = [queue for queue in guarded.broker.store.queues.values() if queue.next]
    places = [queue.entry(offset)[0] for queue in queues for offset in range(queue.next)]
    assert len(places) == 6
    for place in places:
        sent_back = {"offset": place, "group": "ours", "delayLevel": 1, "originMsgId": "", "originTopic": ""}
        for code, ext in (
            (RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place}),
            (RequestCode.CONSUMER_SEND_MSG_BACK, sent_back),
        ):
            refused = await reader.call(code, ext)
            assert (refused.code, "No default permission for" in (refused.remark or "")) == (1, True), (place, refused)
        assert (await admin.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place})).code == 0


async def test_what_waits_is_shown_to_nobody_who_may_only_read_where_it_goes(
    guarded: Node, wired: Wired, file: AccountsFile
) -> None:
    """A delayed message is not due, a half one may be rolled back: sent back, its group would handle it."""
    reader = account("readers-key", defaultTopicPerm="DENY", defaultGroupPerm="SUB") | {"topicPerms": ["secret=SUB"]}
    file.rewrite([*(item for item in ACCOUNTS if item["accessKey"] != "readers-key"), reader])
    admin, reads = await wired(ADMIN), await wired("readers-key")
    due_ms = guarded.broker.clock.time_ms() + 3_600_000
    for text, code in (
        ("", 0),
        ("DELAY\x0118", 1),
        (f"TIMER_DELIVER_MS\x01{due_ms}", 1),
        ("TRAN_MSG\x01true\x02PGROUP\x01p", 1),
    ):
        sent = await admin.call(RequestCode.SEND_MESSAGE_V2, {**SEND, "b": "secret", "i": text}, b"hidden")
        place = int(str(sent.ext["msgId"])[-16:], 16)
        sent_back = {"offset": place, "group": "ours", "delayLevel": 1, "originMsgId": "", "originTopic": ""}
        assert (await reads.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place})).code == code, text
        assert (await reads.call(RequestCode.CONSUMER_SEND_MSG_BACK, sent_back)).code == code, text
