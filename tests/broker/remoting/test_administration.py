"""Administrators ask: answers that mqadmin does not show, and bad input."""

from __future__ import annotations

import zlib
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import Limits
from rocketlet.broker.groups.settings import GroupConfigs
from rocketlet.broker.messages.topics import Topics
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.protocol import admin_bodies, bodies, names
from rocketlet.protocol.admin_bodies import QueueProgress
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, encode_group
from rocketlet.protocol.codes import Language, RequestCode, ResponseCode
from rocketlet.protocol.message import decode_record
from rocketlet.protocol.names import Queue

from ...conftest import Connect, Node, Nodes, Wire, create_topic
from ...support.locks import make_groups
from ...support.requests import commit, join, pull, send, value

ALL_GROUPS = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG


async def test_topics_groups_offsets_and_delays_are_listed(wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    await join(wire, "c1", producers=("p",))
    await commit(wire, 0)
    topics = value(await wire.call(RequestCode.GET_ALL_TOPIC_CONFIG))["topicConfigTable"]
    assert topics["t"]["readQueueNums"] == 2
    groups = value(await wire.call(ALL_GROUPS))["subscriptionGroupTable"]
    assert groups["g"]["retryMaxTimes"] == 16
    assert value(await wire.call(RequestCode.GET_ALL_CONSUMER_OFFSET)) == {"offsetTable": {"t@g": {"0": 0}}}
    assert value(await wire.call(RequestCode.GET_ALL_DELAY_OFFSET)) == {"offsetTable": {}}
    system = value(await wire.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))["topicList"]
    assert {"TBW102", names.SCHEDULE_TOPIC, "broker-a"} <= set(system)
    assert "t" not in system
    listed = value(await wire.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS))
    assert set(listed["topicList"]) == {"DefaultCluster", "broker-a"}
    of_cluster = value(await wire.call(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "DefaultCluster"}))
    assert "t" in of_cluster["topicList"]
    assert value(await wire.call(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "x"})) == {"topicList": []}
    assert b"orderMessageEnable" in (await wire.call(RequestCode.GET_NAMESRV_CONFIG)).body
    producers = value(await wire.call(RequestCode.GET_ALL_PRODUCER_INFO))["data"]["p"]
    assert [(item["clientId"], item["remoteIP"][0]) for item in producers] == [("c1", "/")]


async def test_one_topic_and_one_group_are_shown(wire: Wire) -> None:
    ext = {"topic": "t", "readQueueNums": 3, "writeQueueNums": 3, "perm": 6}
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, {**ext, "attributes": "+message.type=FIFO"})
    await join(wire, "c1")

    async def shown() -> Any:
        return value(await wire.call(RequestCode.GET_TOPIC_CONFIG, {"topic": "t", "lo": "true"}))

    assert ((await shown())["readQueueNums"], (await shown())["attributes"]) == (3, {"message.type": "FIFO"})
    listed = value(await wire.call(RequestCode.GET_ALL_TOPIC_CONFIG))["topicConfigTable"]
    assert listed["t"]["attributes"] == {"message.type": "FIFO"}
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)  # says nothing of them
    assert (await shown())["attributes"] == {"message.type": "FIFO"}
    for changes, hint in {"+message.type=ODD": "NORMAL", "+queue.type=BatchCQ": "message.type", "x": "use"}.items():
        answer = await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, {**ext, "attributes": changes})
        assert (answer.code, hint in (answer.remark or "")) == (1, True), changes
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, {**ext, "attributes": "-message.type"})
    assert (await shown())["attributes"] == {}
    group = value(await wire.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"}))
    assert (group["groupName"], group["retryMaxTimes"]) == ("g", 16)
    assert (await wire.call(RequestCode.GET_TOPIC_CONFIG, {"topic": "x"})).code == ResponseCode.TOPIC_NOT_EXIST
    answer = await wire.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "x"})
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_a_topics_message_type_is_kept_over_a_restart(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    ext = {"topic": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "attributes": "+message.type=DELAY"}
    await (await connect(node.address)).call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
    await node.stop()
    node = await nodes.start(data_dir=node.broker.config.data_dir)
    topic = node.broker.topics.get("t")
    assert topic is not None
    assert topic.message_type == "DELAY"


async def test_topics_of_a_list_are_created_changed_and_deleted(node: Node, wire: Wire) -> None:
    fresh = {"topicName": "a", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
    typed = {**fresh, "topicName": "b", "attributes": {"+message.type": "FIFO"}}
    body = orjson.dumps({"topicConfigList": [fresh, typed]})
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)).code == 0
    assert [node.broker.topics.get(name).message_type for name in "ab"] == ["", "FIFO"]  # type: ignore[union-attr]
    wider = {**fresh, "topicName": "b", "readQueueNums": 5, "writeQueueNums": 5}
    await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=orjson.dumps({"topicConfigList": [wider]}))
    changed = node.broker.topics.get("b")
    assert changed is not None
    assert (changed.read_queues, changed.message_type) == (5, "FIFO")
    for bad in ({**fresh, "topicName": "c d"}, {**fresh, "topicName": "TBW102"}, {**typed, "attributes": {"x": "y"}}):
        body = orjson.dumps({"topicConfigList": [{**fresh, "topicName": "new"}, bad]})
        assert (await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)).code == 1
    assert node.broker.topics.get("new") is None
    for wanted, code in ((["a", "TBW102"], 1), (["a", "b"], 0)):
        body = orjson.dumps({"topicList": wanted})
        assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER_LIST, body=body)).code == code
        assert (node.broker.topics.get("a") is None) is (code == 0)


async def test_settings_that_apaches_tools_do_not_know_are_kept_when_they_change_a_group(
    node: Node, wire: Wire
) -> None:
    """`mqadmin updateSubGroup` sends all fields of Apache's brokers, and `strict` is none of them."""
    node.broker.group_configs.put(GroupConfig("g", strict=True, retry_max_times=3))
    group = {"groupName": "g", "retryQueueNums": 2, "consumeEnable": True}
    for code, body in (
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, orjson.dumps(group)),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, orjson.dumps({"groupConfigList": [group]})),
    ):
        assert (await wire.call(code, body=body)).code == 0
        assert node.broker.group_configs.get("g") == GroupConfig("g", strict=True, retry_queues=2)
    body = orjson.dumps(group | {"strict": False})
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
    assert node.broker.group_configs.get("g") == GroupConfig("g", retry_queues=2)


async def test_groups_of_a_list_are_created_and_deleted(node: Node, wire: Wire) -> None:
    groups = [{"groupName": "g1", "retryMaxTimes": 3}, {"groupName": "g2", "consumeMessageOrderly": True}]
    for listed, code in (([*groups, {"groupName": "g 3"}], 1), (groups, 0)):
        body = orjson.dumps({"groupConfigList": listed})
        assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body)).code == code
        known = {group.name: group for group in node.broker.group_configs}
        assert ("g1" in known) is (code == 0)
    assert (known["g1"].retry_max_times, known["g2"].consume_orderly) == (3, True)
    await create_topic(wire, "t")
    await commit(wire, 0, group="g1")
    await commit(wire, 0, group="g2")
    for name, clean, offset in (("g1", True, None), ("g2", False, 0)):
        body = orjson.dumps({"groupNameList": [name], "cleanOffset": clean})
        assert (await wire.call(RequestCode.DELETE_SUBSCRIPTIONGROUP_LIST, body=body)).code == 0
        assert name not in {group.name for group in node.broker.group_configs}
        assert node.broker.offsets.get(name, "t", 0) == offset


async def test_progress_spans_and_corrections(wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    for _ in range(4):
        await send(wire)
    await commit(wire, 3)
    await commit(wire, 1, group="behind")
    ext = {"topic": "t", "group": "g"}
    spans = value(await wire.call(RequestCode.QUERY_CONSUME_TIME_SPAN, ext))["consumeTimeSpanSet"]
    assert [item["messageQueue"]["queueId"] for item in spans] == [0, 1]
    assert spans[0]["minTimeStamp"] <= spans[0]["consumeTimeStamp"] <= spans[0]["maxTimeStamp"]
    assert spans[1]["maxTimeStamp"] == -1
    assert (
        await wire.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "x", "group": "g"})
    ).code == ResponseCode.TOPIC_NOT_EXIST
    ext = {"compareGroup": "behind", "topic": "t", "filterGroups": "g"}
    assert value(await wire.call(RequestCode.QUERY_CORRECTION_OFFSET, ext)) == {"correctionOffsets": {"0": 3}}
    stats = admin_bodies.decode_consume_stats(
        (await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})).body
    )
    assert stats[Queue("t", "broker-a", 0)].lag == 1
    assert value(await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "nobody"}))["offsetTable"] == {}


async def test_statistics_count_what_went_through(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await send(wire)
    await wire.call(RequestCode.PULL_MESSAGE, pull())
    for name, key in (("TOPIC_PUT_NUMS", "t"), ("GROUP_GET_NUMS", "t@g")):
        found = value(await wire.call(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key}))
        assert {found[part]["sum"] for part in ("statsMinute", "statsHour", "statsDay")} == {5}
    answer = await wire.call(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": "NOPE", "statsKey": "t"})
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "TOPIC_PUT_NUMS" in (answer.remark or "")


@pytest.mark.still
async def test_the_rate_of_a_day_is_that_of_the_time_since_midnight_or_the_start(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await send(wire)
    node.clock.advance(10)
    found = value(await wire.call(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "t"}))
    assert found["statsDay"]["tps"] == 0.5


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"brokerName=x", 16, "cannot be changed"),
        (b"brokerPermission=9", 1, "brokerPermission"),
        (b"brokerPermission=many", 1, "not a number"),
        (b"# nothing\n\n", 0, ""),
    ],
)
async def test_a_wrong_setting_is_refused_with_what_is_allowed(
    node: Node, wire: Wire, body: bytes, code: int, words: str
) -> None:
    answer = await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=body)
    assert answer.code == code
    assert words in (answer.remark or "")
    assert node.broker.config.permission == 6


async def test_read_only_broker_refuses_sends_to_ordered_topics_only(wire: Wire) -> None:
    """As Apache's brokers of 4.9 and 5.5 do: other clients learn from routes that they should send elsewhere."""
    await create_topic(wire, "plain")
    await create_topic(wire, "ordered", order=True)
    for permission, ordered in ((4, ResponseCode.NO_PERMISSION), (6, 0), (0, ResponseCode.NO_PERMISSION)):
        await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=%d" % permission)
        assert (await send(wire, topic="plain")).code == 0
        assert (await send(wire, topic="ordered")).code == ordered


async def test_permissions_change_while_the_broker_runs(wire: Wire) -> None:
    await create_topic(wire, "t")
    await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2\nautoCreateSubscriptionGroup=false")
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull())).code == ResponseCode.NO_PERMISSION
    route = bodies.decode_route((await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})).body)
    assert [queue.perm for queue in route.queues] == [2]
    await wire.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=6")
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull())).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, (
        "groups are not made any more"
    )


async def test_kv_settings_are_kept_by_namespace(wire: Wire) -> None:
    put = {"namespace": "n", "key": "k", "value": "v"}
    assert (await wire.call(RequestCode.GET_KV_CONFIG, put)).code == ResponseCode.QUERY_NOT_FOUND
    assert (
        await wire.call(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    ).code == ResponseCode.QUERY_NOT_FOUND
    assert (await wire.call(RequestCode.PUT_KV_CONFIG, put)).code == 0
    assert (await wire.call(RequestCode.GET_KV_CONFIG, put)).ext["value"] == "v"
    assert value(await wire.call(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})) == {"table": {"k": "v"}}
    assert (await wire.call(RequestCode.DELETE_KV_CONFIG, put)).code == 0
    assert (await wire.call(RequestCode.GET_KV_CONFIG, put)).code == ResponseCode.QUERY_NOT_FOUND
    assert (await wire.call(RequestCode.PUT_KV_CONFIG, {"namespace": "n"})).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.limits(max_kv_keys=2, max_kv_namespaces=2)
async def test_the_name_server_keeps_only_this_many_settings(node: Node, wire: Wire) -> None:
    codes = [
        (await wire.call(RequestCode.PUT_KV_CONFIG, {"namespace": name, "key": key, "value": "v"})).code
        for name, key in (("a", "1"), ("a", "2"), ("a", "3"), ("a", "1"), ("b", "1"), ("c", "1"))
    ]
    assert codes == [0, 0, 1, 0, 0, 1]


async def test_a_group_online_is_reset_by_telling_its_members(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 2)
    for _ in range(3):
        await send(wire)
    ext = {"topic": "t", "group": "g", "timestamp": -1, "isForce": "true"}
    assert (
        await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, "topic": "x"})
    ).code == ResponseCode.SYSTEM_ERROR
    assert (await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)).code == ResponseCode.SYSTEM_ERROR, (
        "the group has no offset yet"
    )
    for queue in range(2):
        await commit(wire, 0, queue)
    assert (await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)).code == ResponseCode.CONSUMER_NOT_ONLINE
    two = await connect(node.address)
    await join(two, "c1")
    wanted = {Queue("t", "broker-a", 0): 3, Queue("t", "broker-a", 1): 0}
    answer = await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
    assert admin_bodies.decode_offsets(answer.body) == wanted
    told = await two.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    assert told.is_oneway
    assert admin_bodies.decode_offsets(told.body) == wanted
    await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, "isForce": "false"})
    told = await two.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    assert set(admin_bodies.decode_offsets(told.body).values()) == {0}, "without force only back"


async def test_a_reset_of_one_queue_leaves_the_others_where_they_are(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 2)
    for queue in range(2):
        for _ in range(3):
            await send(wire, queue=queue)
        await commit(wire, 3, queue)
    member = await connect(node.address)
    await join(member, "c1")
    ext = {"topic": "t", "group": "g", "timestamp": 0, "isForce": "false", "queueId": 1, "offset": 2}
    for fields, offset in (({}, 2), ({"offset": -1}, 0), ({"offset": 3}, 3)):
        answer = await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, **fields})
        assert admin_bodies.decode_offsets(answer.body) == {Queue("t", "broker-a", 1): offset}
        told = await member.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert admin_bodies.decode_offsets(told.body) == {Queue("t", "broker-a", 1): offset}
    for fields, reason in (({"offset": 4}, "t:1 has the offsets 0 to 3, not 4"), ({"queueId": 2}, "t has no queue 2")):
        refused = await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, **fields})
        assert (refused.code, reason in str(refused.remark)) == (ResponseCode.SYSTEM_ERROR, True)


async def test_a_c_client_that_resets_gets_its_own_form(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 1)
    await commit(wire, 0)
    two = await connect(node.address)
    await join(two, "c1")
    ext = {"topic": "t", "group": "g", "timestamp": 0, "isForce": "true"}
    await wire.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext, language=Language.CPP)
    told = await two.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    assert isinstance(orjson.loads(told.body)["offsetTable"], list)


async def test_members_are_asked_and_their_answers_passed_on(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 1)
    sent = await send(wire, b"try me")
    two = await connect(node.address)
    await join(two, "c2")
    ext = {"topic": "t", "group": "g", "clientAddr": "c2"}
    opaque = wire.send(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, ext)
    asked = await two.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
    two.write_answer(asked, admin_bodies.encode_client_status({Queue("t", "broker-a", 0): 7}))
    table = value(await wire.answer(opaque))["consumerTable"]
    assert list(table) == ["c2"]
    assert list(table["c2"].values()) == [7]
    opaque = wire.send(
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        {"consumerGroup": "g", "clientId": "c2", "msgId": str(sent.ext["msgId"])},
    )
    asked = await two.request(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    assert decode_record(asked.body).body == b"try me"
    assert asked.ext["brokerName"] == "broker-a"
    two.write_answer(asked, b'{"consumeResult":0}')
    assert (await wire.answer(opaque)).body == b'{"consumeResult":0}'


async def test_who_is_not_there_is_not_waited_for(node: Node, wire: Wire, connect: Connect) -> None:
    await create_topic(wire, "t", 1)
    nobody = {"consumerGroup": "g", "clientId": "c9", "msgId": "00"}
    for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY):
        assert (await wire.call(code, nobody)).code == ResponseCode.SYSTEM_ERROR
    assert (
        await wire.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "t", "group": "g"})
    ).code == ResponseCode.SYSTEM_ERROR
    two = await connect(node.address)
    await join(two, "c9")
    answer = await wire.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, nobody)
    assert "no message has the id 00" in (answer.remark or "")
    opaque = wire.send(RequestCode.GET_CONSUMER_RUNNING_INFO, nobody)
    await two.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    await two.close()
    assert (await wire.answer(opaque)).code == ResponseCode.CONSUME_MSG_TIMEOUT


async def test_an_offset_out_of_range_leaves_an_event(wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    await send(wire)
    await wire.call(RequestCode.PULL_MESSAGE, pull(offset=9))
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(names.OFFSET_MOVED_TOPIC))
    event = orjson.loads(decode_record(answer.body).body)
    assert (event["consumerGroup"], event["offsetRequest"], event["offsetNew"]) == ("g", 9, 1)
    assert event["messageQueue"] == {"brokerName": "broker-a", "queueId": 0, "topic": "t"}


async def test_a_compressed_registration_is_read(wire: Wire) -> None:
    def part(text: str) -> bytes:
        return len(text.encode()).to_bytes(4, "big") + text.encode()

    plain = part('{"counter":1,"timestamp":2}') + (1).to_bytes(4, "big") + part("far 3 3 6 SINGLE_TAG") + part("[]")
    body = zlib.compress(plain, 9)
    ext = {
        "brokerName": "broker-z",
        "brokerAddr": "127.0.0.1:9",
        "clusterName": "DefaultCluster",
        "haServerAddr": "127.0.0.1:8",
        "brokerId": 0,
        "compressed": "true",
        "bodyCrc32": zlib.crc32(body) & 0x7FFFFFFF,
    }
    assert (await wire.call(RequestCode.REGISTER_BROKER, ext, body)).code == 0
    route = bodies.decode_route((await wire.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "far"})).body)
    assert [(queue.broker_name, queue.read_queues) for queue in route.queues] == [("broker-z", 3)]
    answer = await wire.call(RequestCode.REGISTER_BROKER, {**ext, "bodyCrc32": 0}, b"no zlib")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "compressed" in (answer.remark or "")


async def test_topics_and_groups_survive_a_kill_whatever_their_journals_hold(nodes: Nodes) -> None:
    node = await nodes.start(limits=Limits(journal_lines=3))
    topics, groups = node.broker.topics, node.broker.group_configs
    for number in range(40):
        topics.put(TopicConfig(f"t{number}", number, number), 0)
        groups.put(GroupConfig(f"g{number}", retry_max_times=number))
        if number % 3 == 0:
            topics.delete(f"t{number}", 0)
            groups.delete(f"g{number}")
        config = node.config
        kept = {
            topic.name: topic.read_queues for topic in Topics(Runtime(node.clock), config) if topic.name[1:].isdigit()
        }
        assert kept == {f"t{item}": item for item in range(number + 1) if item % 3}
        again = GroupConfigs(Runtime(node.clock), make_groups(), config.data_dir / "groups.json", auto_create=True)
        assert {group.name: group.retry_max_times for group in again} == {
            f"g{item}": item for item in range(number + 1) if item % 3
        }


async def test_the_groups_have_a_version_of_their_own(wire: Wire) -> None:
    async def version(code: RequestCode) -> Any:
        return value(await wire.call(code))["dataVersion"]["counter"]

    topics, groups = await version(RequestCode.GET_ALL_TOPIC_CONFIG), await version(ALL_GROUPS)
    await create_topic(wire, "t", 1)
    assert (await version(RequestCode.GET_ALL_TOPIC_CONFIG), await version(ALL_GROUPS)) == (topics + 1, groups)
    body = encode_group(GroupConfig("new"))
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)).code == 0
    assert (await version(RequestCode.GET_ALL_TOPIC_CONFIG), await version(ALL_GROUPS)) == (topics + 1, groups + 1)


async def test_progress_in_columns_says_what_progress_in_objects_says(wire: Wire) -> None:
    await create_topic(wire, "t", 3)
    await create_topic(wire, "u", 1)
    for _ in range(4):
        await send(wire)
    await commit(wire, 3)
    await commit(wire, 0, topic="u")
    said = await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    objects = admin_bodies.decode_consume_stats(said.body)
    ext = {"consumerGroup": "g", "columns": True}
    columns = await wire.call(RequestCode.GET_CONSUME_STATS, ext)
    assert admin_bodies.decode_consume_stats(columns.body) == objects
    assert objects[Queue("t", "broker-a", 0)].last_ms > 0
    assert len(objects) == 4


async def test_progress_without_times_reads_nothing(node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topic(wire, "t", 1)
    await send(wire)
    await send(wire)
    await commit(wire, 1)
    read: list[int] = []

    def store_time_ms(queue: ConsumeQueue, offset: int) -> int:
        read.append(offset)
        return 7

    monkeypatch.setattr(node.broker.store, "store_time_ms", store_time_ms)
    ext: dict[str, Any] = {"consumerGroup": "g", "columns": True, "times": False}
    columns = await wire.call(RequestCode.GET_CONSUME_STATS, ext)
    told = value(await wire.call(RequestCode.GET_GROUP_HISTORY, {"consumerGroup": "g", "lag": False}))
    assert (read, told["lag"]) == ([], [])
    queue = Queue("t", "broker-a", 0)
    assert admin_bodies.decode_consume_stats(columns.body) == {queue: QueueProgress(2, 1, 0)}
    ext["times"] = True
    columns = await wire.call(RequestCode.GET_CONSUME_STATS, ext)
    assert admin_bodies.decode_consume_stats(columns.body) == {queue: QueueProgress(2, 1, 7)}
    assert read == [0]
