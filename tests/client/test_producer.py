"""The producer on a real broker: where messages go, what fails and how it says so."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import pytest
from rocketlet.client import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    Outgoing,
    Producer,
    RequestTimeout,
    TopicNotFound,
)
from rocketlet.client.config import ONEWAY_AT_ONCE, ClientLimits
from rocketlet.protocol.codes import SYS_COMPRESSED, RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.frame import MSGPACK, Frame
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue
from rocketlet.protocol.properties import decode
from rocketlet.testing.ports import free_port

from ..client.conftest import connected, only_connection, set_send_timeout
from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.requests import pull


async def stored(wire: Wire, topic: str = "t", queues: int = 4) -> list[Any]:
    found: list[Any] = []
    for queue in range(queues):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic, queue=queue))
        found += decode_records(answer.body)
    return found


async def test_a_message_is_where_the_result_says(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        result = await producer.send("t", b"hello", tag="A", keys=["k1", "k2"], properties={"colour": "blau"})
    (record,) = await stored(wire)
    assert (record.queue_id, record.queue_offset, record.offset_id) == (
        result.queue.queue_id,
        result.queue_offset,
        result.offset_id,
    )
    properties = decode(record.properties)
    assert properties == {
        "TAGS": "A", "KEYS": "k1 k2", "colour": "blau", "UNIQ_KEY": result.message_id, "CLUSTER": "DefaultCluster",
    }  # fmt: skip


async def test_sends_take_queues_in_turn_and_keys_always_the_same(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        turns = [(await producer.send("t", b"x")).queue.queue_id for _ in range(8)]
        assert sorted(turns) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len({(await producer.send("t", b"x", queue_key="plane")).queue for _ in range(5)}) == 1
        queue = (await producer.send("t", b"x")).queue
        assert (await producer.send("t", b"x", queue=queue)).queue == queue


async def test_a_new_topic_is_made_by_the_first_send(node: Node, wire: Wire) -> None:
    async with Producer(node.address, default_queues=2) as producer:
        await producer.send("fresh", b"x")
        await producer.send("fresh", b"y")
    assert {record.body for record in await stored(wire, "fresh", 2)} == {b"x", b"y"}


async def test_large_bodies_travel_compressed(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"z" * 4096)
        await producer.send("t", b"z" * 4095)
    sizes = sorted(len(record.body) for record in await stored(wire))
    assert sizes[0] < 100
    assert sizes[1] == 4095


async def test_a_batch_lies_in_one_queue_in_order(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        result = await producer.send_batch("t", [b"one", Outgoing(b"two", tag="B", keys="k"), b"three"])
    found = await stored(wire)
    assert [record.body for record in found] == [b"one", b"two", b"three"]
    assert {record.queue_id for record in found} == {result.queue.queue_id}
    assert result.message_id.split(",") == [decode(record.properties)["UNIQ_KEY"] for record in found]


async def test_oneway_sends_wait_for_a_broker_that_reads_nothing(node: Node, wire: Wire) -> None:
    """Nobody answers them, so nothing else holds back who sends faster than the broker takes."""
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send_oneway("t", b"first")
        connection = only_connection(producer)
        connection.pause_writing()
        waiting = asyncio.create_task(producer.send_oneway("t", b"second"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        connection.resume_writing()
        await waiting
        connection.pause_writing()
        set_send_timeout(producer, 0.02)
        with pytest.raises(RequestTimeout, match="did not read the message in time"):
            await producer.send_oneway("t", b"third")
        connection.resume_writing()


async def test_others_have_their_turn_between_oneway_sends(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send_oneway("t", b"x")
        others = asyncio.Event()
        asyncio.get_running_loop().call_soon(others.set)
        sent = 0
        while not others.is_set():
            await producer.send_oneway("t", b"x")
            sent += 1
            assert sent <= ONEWAY_AT_ONCE


async def test_a_oneway_send_arrives(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send_oneway("t", b"quiet")
        await eventually(lambda: node.broker.store.end > 0)
    assert [record.body for record in await stored(wire)] == [b"quiet"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topic": "a b", "body": b"x"}, "characters"),
        ({"topic": "t", "body": b""}, "empty"),
        ({"topic": "t", "body": "text"}, "must be bytes"),
        ({"topic": "t", "body": b"x" * 4_194_305}, "4194304 are allowed"),
        ({"topic": "t", "body": b"x", "properties": {"TAGS": "A"}}, "RocketMQ's own"),
        ({"topic": "t", "body": b"x", "properties": {"a": " "}}, "blank"),
        ({"topic": "t", "body": b"x", "properties": {"a": "x" * 33_000}}, "are allowed"),
        ({"topic": "t", "body": b"x", "tag": "a\x02b"}, "U\\+0001"),
        ({"topic": "t", "body": b"x", "delay_level": -1}, "delay level"),
    ],
)
async def test_a_message_that_no_broker_would_take_is_refused_before_it_is_sent(
    node: Node, arguments: dict[str, Any], reason: str
) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=reason):
            await producer.send(**arguments)
    assert node.broker.store.end == 0


async def test_a_refusal_names_broker_code_and_reason(nodes: Nodes) -> None:
    node = await nodes.start(auto_create_topics=True)
    async with Producer(node.address, retries=0) as producer:
        with pytest.raises(
            BrokerRefused, match=rf"{node.address}.*NO_PERMISSION \(16\): .*SCHEDULE_TOPIC_XXXX.* is forbidden$"
        ):
            await producer.send("SCHEDULE_TOPIC_XXXX", b"x")


async def test_an_unknown_topic_where_none_may_be_made_is_named(nodes: Nodes) -> None:
    node = await nodes.start(auto_create_topics=False)
    async with Producer(node.address) as producer:
        with pytest.raises(TopicNotFound, match="nowhere"):
            await producer.send("nowhere", b"x")


async def test_without_a_name_server_the_error_names_each_address() -> None:
    port = free_port()
    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}"):
        async with Producer(f"127.0.0.1:{port}"):
            pass
    for wrong in ("", "nohost", "h:port"):
        with pytest.raises(ConfigError, match="name_server"):
            Producer(wrong)
    with pytest.raises(ConfigError, match="group"):
        Producer("h:1", "DEFAULT_PRODUCER")


async def test_the_second_name_server_serves_when_the_first_is_away(node: Node) -> None:
    async with Producer(f"127.0.0.1:{free_port()};{node.address}") as producer:
        await producer.send("t", b"x")


async def test_a_send_goes_to_another_broker_when_one_is_gone(nodes: Nodes, connect: Connect) -> None:
    home = await nodes.start(name="home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    for node in (home, guest):
        await create_topic(await connect(node.address), "t")
    wire = await connect(home.address)
    async with Producer(home.address) as producer:
        while len({(await producer.send("t", b"x")).queue.broker_name for _ in range(8)}) < 2:
            pass
        await guest.stop()
        results = [await producer.send("t", b"x") for _ in range(8)]
    assert {result.queue.broker_name for result in results} == {"home"}
    assert len(await stored(wire)) >= 8


async def test_a_peer_that_does_not_answer_is_a_timeout_that_names_it(node: Node) -> None:
    node.server.serve = lambda connection: connection.requests.clear()
    with pytest.raises(ConnectionFailed, match=f"{node.address} did not respond"):
        async with Producer(node.address):
            pass


async def test_timeouts_and_lost_connections_are_distinguished(node: Node) -> None:
    async with connected(node) as connection:
        serve = node.server.serve
        node.server.serve = lambda connection: connection.requests.clear()
        with pytest.raises(RequestTimeout, match="SEND_MESSAGE"):
            await connection.ask(RequestCode.SEND_MESSAGE_V2, {}, timeout_s=0.001)
        pending = connection.ask(RequestCode.SEND_MESSAGE_V2, {})
        connection.close()
        with pytest.raises(ConnectionFailed, match="closed the connection"):
            await pending
        node.server.serve = serve


async def test_a_process_that_was_suspended_reads_what_came_before_it_gives_up(node: Node) -> None:
    """Timers run before sockets are read: a deadline that passed meanwhile says nothing about who was asked."""
    async with connected(node, ClientLimits(deadline_sweep_s=3600.0)) as connection:
        answer = connection.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout_s=0.0)
        connection._sweep_due_s -= 3 * 3600.0
        connection.sweep_deadlines()
        assert (await answer).code == 0
        answer = connection.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout_s=0.0)
        connection.sweep_deadlines()
        with pytest.raises(RequestTimeout):
            await answer


async def test_many_concurrent_sends_are_all_stored(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address, timeout_s=PATIENCE_S) as producer:  # sent again, some would be there twice
        results = await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(2000)))
    places = {(result.queue, result.queue_offset) for result in results}
    assert len(places) == 2000
    assert sum(node.broker.store.queue("t", queue).next for queue in range(4)) == 2000


async def test_the_connection_opens_in_json_and_switches(node: Node) -> None:
    async with connected(node) as connection:
        answer = await connection.request(RequestCode.GET_BROKER_CLUSTER_INFO, {})
        assert answer.serialize_type == MSGPACK


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name_server": None}, "None is not a text"),
        ({"name_server": "localhost"}, "'localhost' is not host:port"),
        ({"name_server": "https://h:1"}, "is not host:port"),
        ({"group": 5}, "group: 5 is not a text"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 3000}, "timeout_s: 3000 is more than 600 seconds; for milliseconds give 3"),
        ({"check": bool}, "group: `check` needs a group of its own"),
        ({"retries": -1}, "retries"),
        ({"compress_over_bytes": -1}, "compress_over_bytes"),
        ({"default_queues": 0}, "default_queues"),
        ({"default_queues": 2**31}, "default_queues: 2147483648 is not a whole number from 1 to 2147483647"),
        ({"check": True}, "check: True cannot be called"),
        ({"check": lambda: True}, "is called with a message: too many"),
        ({"middleware": [lambda sending: None]}, "is called with a sending and the next layer"),
        ({"middleware": print}, r"is not a list; give \[print\]"),
        ({"access": "key"}, r"access: 'key' is a str; give Access\(...\)"),
        ({"default_queues": 2**31}, "default_queues"),
    ],
)
def test_wrong_settings_are_refused_when_the_producer_is_made(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Producer(**{"name_server": "h:1", **arguments})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topic": 5}, "the topic 5 is not a text"),
        ({"keys": 4711}, "the keys 4711 are neither a text nor texts"),
        ({"keys": [4711]}, "the keys"),
        ({"queue_key": 12}, r"the queue key 12 is not a text; use str\(12\)"),
        ({"tag": 5}, "the tag 5 is not a text"),
        ({"message_id": 5}, "the message id 5 is not a text"),
        ({"message_id": ""}, "the message id is empty; leave it out"),
        ({"properties": {"a": 5}}, "'a' is 5; names and values must be text"),
        ({"properties": [("a", "b")]}, "not a mapping"),
        ({"delay_level": "3"}, "the delay level is '3'"),
        ({"delay_level": 2**31}, "the delay level is 2147483648"),
        ({"delay_level": True}, "the delay level is True"),
        ({"queue": "t:0"}, "'t:0' is not a Queue of the topic t"),
        ({"queue": ("t", "broker-a", 0)}, "is not a Queue of the topic t"),
        ({"queue": Queue("u", "broker-a", 0)}, "is not a Queue of the topic t"),
        ({"queue": Queue("t", "broker-a", -1)}, "is not a Queue of the topic t"),
    ],
)
async def test_what_is_no_text_is_refused_by_name(node: Node, arguments: dict[str, Any], reason: str) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=reason):
            await producer.send(**{"topic": "t", "body": b"x", **arguments})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (b"one", "the batch is bytes; a batch takes a list"),
        (None, "the batch is NoneType"),
        (["one"], r"'one' is str; a batch takes a list of bytes or Outgoing\(...\)"),
        ([Outgoing(b"one", flag=2**31)], "the flag 2147483648 is not a number of 32 bits"),
        ([Outgoing(b"one", flag="x")], "the flag 'x'"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_batch_is_refused_by_name(node: Node, messages: Any, reason: str) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=reason):
            await producer.send_batch("t", messages)


async def test_a_request_has_a_time_or_none(node: Node) -> None:
    async with Producer(node.address) as producer:
        for timeout_s in ("1", None, float("nan"), True):
            with pytest.raises(ConfigError, match=r"timeout_s: .* is not a number of seconds"):
                await producer.request("t", b"x", timeout_s=timeout_s)  # type: ignore[arg-type]
        with pytest.raises(RequestTimeout):
            await producer.request("t", b"x", timeout_s=-1)
        forever = asyncio.ensure_future(producer.request("t", b"x", timeout_s=float("inf")))
        await asyncio.sleep(0)
        assert not forever.done()
        forever.cancel()


async def test_a_producer_whose_stop_is_cancelled_is_closed(node: Node) -> None:
    producer = Producer(node.address)
    await producer.start()
    await producer.send("t", b"x")
    stopping = asyncio.ensure_future(producer.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])
    await eventually(lambda: not node.server.connections)


async def test_a_body_that_compression_would_make_larger_is_sent_as_it_is(node: Node, wire: Wire) -> None:
    bodies = [random.Random(size).randbytes(size) for size in (5000, MAX_BODY_BYTES - 1000, MAX_BODY_BYTES)]
    await create_topic(wire, "t", 1)
    found: list[Any] = []
    async with Producer(node.address) as producer:
        for body in bodies:
            await producer.send("t", body)
    for offset in range(len(bodies)):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull("t", offset=offset, max_msg_nums=1))
        found += decode_records(answer.body)
    assert [record.body for record in found] == bodies
    assert not any(record.sys_flag & SYS_COMPRESSED for record in found)


async def test_a_producer_that_does_not_run_says_so_immediately(node: Node) -> None:
    producer = Producer(node.address)
    with pytest.raises(ConfigError, match="has not been started"):
        await producer.send("t", b"x")
    async with producer:
        queue = (await producer.send("t", b"x")).queue
    for send in (producer.send("t", b"x"), producer.send("t", b"x", queue=queue), producer.send_batch("t", [b"x"])):
        with pytest.raises(ConfigError, match="has been stopped; create a new one"):
            await send
    with pytest.raises(ConfigError, match="has been stopped"):
        await producer.send_oneway("t", b"x")


async def test_a_connection_has_only_this_many_requests_in_flight(node: Node) -> None:
    async with connected(node, ClientLimits(max_in_flight=2)) as connection:
        asked = [connection.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {}) for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Frame, Frame, ConnectionFailed]
    assert "2 requests in flight" in str(answers[2])


def test_a_refusal_comes_whole_out_of_another_process() -> None:
    refused = BrokerRefused(RequestCode.SEND_MESSAGE_V2, ResponseCode.SYSTEM_BUSY, "too much", "127.0.0.1:9876")
    copied = pickle.loads(pickle.dumps(refused))
    assert (str(copied), copied.code, copied.remark, copied.address) == (
        str(refused),
        ResponseCode.SYSTEM_BUSY,
        "too much",
        "127.0.0.1:9876",
    )
