"""Apache's exporter for Prometheus and its dashboard (2.1) ask and read, request by request."""

from __future__ import annotations

import re
from typing import Any

from rocketlet.protocol.bodies import GroupConfig, encode_group
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode

from ...conftest import Wire, create_topic
from ...support.requests import commit, join, pull, send, value

# The answer of Apache's 4.9.7, asked a minute after its start.
APACHE = """
EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity bootTimestamp brokerVersion brokerVersionDesc
commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset commitLogMinOffset consumeQueueDiskRatio
dispatchBehindBytes dispatchMaxBuffer earliestMessageTimeStamp getFoundTps getMessageEntireTimeMax getMissTps
getTotalTps getTransferedTps msgGetTotalTodayMorning msgGetTotalTodayNow msgGetTotalYesterdayMorning
msgPutTotalTodayMorning msgPutTotalTodayNow msgPutTotalYesterdayMorning pageCacheLockTimeMills
pullThreadPoolQueueCapacity pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putLatency99
putLatency999 putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax putMessageFailedTimes
putMessageSizeTotal putMessageTimesTotal putTps queryThreadPoolQueueCapacity
queryThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize remainHowManyDataToFlush
remainTransientStoreBufferNumbs runtime sendThreadPoolQueueCapacity sendThreadPoolQueueHeadWaitTimeMills
sendThreadPoolQueueSize startAcceptSendRequestTimeStamp
""".split()
TEXTS = {"brokerVersionDesc", "commitLogDirCapacity", "putMessageDistributeTime", "remainHowManyDataToFlush", "runtime"}
RATES = {name for name in APACHE if name.endswith("Tps")}
SEND = {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0, "j": 0, "k": "false", "m": "false"}


async def test_the_runtime_has_all_that_the_exporter_reads_in_the_forms_that_it_reads(wire: Wire) -> None:
    await create_topic(wire, "t")
    for properties in ("", "", "", "DELAY\x013\x02"):
        assert (await wire.call(Code.SEND_MESSAGE_V2, {**SEND, "i": properties}, b"x")).code == 0
    table = value(await wire.call(Code.GET_BROKER_RUNTIME_INFO))["table"]
    assert sorted(set(APACHE) - set(table)) == []
    for name in set(APACHE) - TEXTS - RATES:
        float(table[name])
    for name in RATES:
        assert [float(rate) for rate in table[name].split()], name
    assert re.fullmatch(r"Total : [\d.]+ GiB, Free : [\d.]+ GiB\.", table["commitLogDirCapacity"])
    levels = dict(level.split(":") for level in table["putMessageDistributeTime"].split())
    assert (len(levels), sum(map(int, levels.values()))) == (13, 4)
    assert table["remainHowManyDataToFlush"].split()[1][0] not in "KMGTPE"
    assert table["scheduleMessageOffset_3"] == "0,1"
    assert int(table["putMessageTimesTotal"]) == 4
    assert float(table["putMessageAverageSize"]) == int(table["putMessageSizeTotal"]) / 4 > 100


async def test_the_statistics_that_the_exporter_asks_for_count_messages_and_bytes(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await send(wire)
    pulled = await wire.call(Code.PULL_MESSAGE, pull())
    back = {"offset": 0, "group": "g", "delayLevel": 3, "originTopic": "t", "unitMode": "false"}
    assert (await wire.call(Code.CONSUMER_SEND_MSG_BACK, back)).code == 0
    for name, key, total in (
        ("TOPIC_PUT_NUMS", "t", 5),
        ("TOPIC_PUT_SIZE", "t", len(pulled.body)),
        ("GROUP_GET_NUMS", "t@g", 5),
        ("GROUP_GET_SIZE", "t@g", len(pulled.body)),
        ("SNDBCK_PUT_NUMS", "t@g", 1),
        ("BROKER_PUT_NUMS", "DefaultCluster", 6),
        ("BROKER_GET_NUMS", "DefaultCluster", 5),
    ):
        found = value(await wire.call(Code.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key}))
        assert {found[part]["sum"] for part in ("statsMinute", "statsHour", "statsDay")} == {total}, name
        assert found["statsMinute"]["tps"] > 0


TOPIC = {"topic": "t"}
GROUP = {"consumerGroup": "g"}
BOTH = {"topic": "t", "group": "g"}
QUEUE = {"topic": "t", "queueId": 0}
KV = {"namespace": "ORDER_TOPIC_CONFIG", "key": "t"}
NEW_TOPIC = {
    "topic": "new", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "order": "false",
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
}  # fmt: skip
ASKED: list[tuple[str, int, dict[str, Any], bytes]] = [
    ("examineBrokerClusterInfo", Code.GET_BROKER_CLUSTER_INFO, {}, b""),
    ("fetchAllTopicList", Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, b""),
    ("fetchTopicsByCLuster", Code.GET_TOPICS_BY_CLUSTER, {"cluster": "DefaultCluster"}, b""),
    ("examineTopicRouteInfo", Code.GET_ROUTEINFO_BY_TOPIC, TOPIC, b""),
    ("examineTopicStats", Code.GET_TOPIC_STATS_INFO, TOPIC, b""),
    ("examineTopicConfig", Code.GET_TOPIC_CONFIG, TOPIC, b""),
    ("getAllTopicConfig", Code.GET_ALL_TOPIC_CONFIG, {}, b""),
    ("createAndUpdateTopicConfig", Code.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC, b""),
    ("queryTopicConsumeByWho", Code.QUERY_TOPIC_CONSUME_BY_WHO, TOPIC, b""),
    ("examineConsumeStats", Code.GET_CONSUME_STATS, GROUP, b""),
    ("examineConsumeStats of a topic", Code.GET_CONSUME_STATS, {**GROUP, **TOPIC}, b""),
    ("fetchConsumeStatsInBroker", Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}, b""),
    ("examineConsumerConnectionInfo", Code.GET_CONSUMER_CONNECTION_LIST, GROUP, b""),
    ("examineProducerConnectionInfo", Code.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "p"}, b""),
    ("getAllProducerInfo", Code.GET_ALL_PRODUCER_INFO, {}, b""),
    ("fetchBrokerRuntimeStats", Code.GET_BROKER_RUNTIME_INFO, {}, b""),
    ("viewBrokerStatsData", Code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "t"}, b""),
    ("getBrokerConfig", Code.GET_BROKER_CONFIG, {}, b""),
    ("updateBrokerConfig", Code.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=72\n"),
    ("getAllSubscriptionGroup", Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, b""),
    ("examineSubscriptionGroupConfig", Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"}, b""),
    ("createAndUpdateSubscriptionGroupConfig", Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, encode_group(GroupConfig("h"))),
    ("queryConsumeTimeSpan", Code.QUERY_CONSUME_TIME_SPAN, BOTH, b""),
    ("cloneGroupOffset", Code.CLONE_GROUP_OFFSET, {"srcGroup": "g", "destGroup": "h", **TOPIC, "offline": "false"}, b""),
    ("maxOffset", Code.GET_MAX_OFFSET, QUEUE, b""),
    ("minOffset", Code.GET_MIN_OFFSET, QUEUE, b""),
    ("searchOffset", Code.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 0}, b""),
    ("earliestMsgStoreTime", Code.GET_EARLIEST_MSG_STORETIME, QUEUE, b""),
    ("updateConsumeOffset", Code.UPDATE_CONSUMER_OFFSET, {**GROUP, **QUEUE, "commitOffset": 1}, b""),
    ("resetOffsetByTimestamp", Code.INVOKE_BROKER_TO_RESET_OFFSET, {**BOTH, "timestamp": 0, "isForce": "true"}, b""),
    ("viewMessage", Code.VIEW_MESSAGE_BY_ID, {"offset": 0}, b""),
    ("createAndUpdateKvConfig", Code.PUT_KV_CONFIG, {**KV, "value": "broker-a:4"}, b""),
    ("getKVConfig", Code.GET_KV_CONFIG, KV, b""),
    ("getKVListByNamespace", Code.GET_KVLIST_BY_NAMESPACE, {"namespace": KV["namespace"]}, b""),
    ("deleteKvConfig", Code.DELETE_KV_CONFIG, KV, b""),
    ("wipeWritePermOfBroker", Code.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b""),
    ("addWritePermOfBroker", Code.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, b""),
    ("cleanExpiredConsumerQueue", Code.CLEAN_EXPIRED_CONSUMEQUEUE, {}, b""),
    ("cleanUnusedTopic", Code.CLEAN_UNUSED_TOPIC, {}, b""),
    ("getNamesrvConfig", Code.GET_NAMESRV_CONFIG, {}, b""),
    ("deleteSubscriptionGroup", Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "h"}, b""),
    ("deleteTopicInBroker", Code.DELETE_TOPIC_IN_BROKER, {"topic": "new"}, b""),
    ("deleteTopicInNameServer", Code.DELETE_TOPIC_IN_NAMESRV, {"topic": "new"}, b""),
]  # fmt: skip
# Only 5.x's brokers have it; the dashboard says that the broker does not support it.
OF_5 = {"createUser": 3001, "listUser": 3005, "createAcl": 3006, "listAcl": 3010, "getColdDataFlowCtrInfo": 2004}


async def test_each_of_their_requests_is_answered(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire)
    await join(wire, "c1", producers=("p",))
    for queue in range(4):
        await commit(wire, 0, queue)
    answers = {name: await wire.call(code, ext, body) for name, code, ext, body in ASKED}
    assert {name: answer.remark for name, answer in answers.items() if answer.code} == {}
    query = {**TOPIC, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
    assert (await wire.call(Code.QUERY_MESSAGE, query)).code == ResponseCode.QUERY_NOT_FOUND
    for code in (Code.GET_CONSUMER_RUNNING_INFO, Code.CONSUME_MESSAGE_DIRECTLY):  # asked of a member
        answer = await wire.call(code, {**GROUP, "clientId": "nobody", "msgId": "0" * 32, "brokerName": "broker-a"})
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "nobody" in (answer.remark or "")


async def test_what_5_has_is_refused_at_once_and_by_name(wire: Wire) -> None:
    for name, code in OF_5.items():
        assert (await wire.call(code, {})).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED, name
