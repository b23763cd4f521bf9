"""The producer on a real broker: where messages go, what fails and how it says so."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    Consumer,
    MessageIllegal,
    Outgoing,
    Producer,
    RequestTimeout,
    SendResult,
    TopicNotFound,
)
from rocketlet.client.config import BATCH_BYTES, BATCH_MESSAGES, ONEWAY_AT_ONCE, ClientLimits
from rocketlet.client.sending.accumulator import Batch, UniqueKeys
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import SYS_COMPRESSED, RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES
from rocketlet.protocol.frame import MSGPACK, Frame
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue
from rocketlet.protocol.properties import decode
from rocketlet.testing import Broker, Fault
from rocketlet.testing.ports import free_port

from ..client.conftest import connected, only_connection, set_send_timeout, tasks_named
from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.requests import pull
from .conftest import Requests, stored


async def stored_producer(wire: Wire, topic: str = "t", queues: int = 4) -> list[Any]:
    found: list[Any] = []
    for queue in range(queues):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic, queue=queue))
        found += decode_records(answer.body)
    return found


async def test_a_message_is_where_the_result_says(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        result = await producer.send("t", b"hello", tag="A", keys=["k1", "k2"], properties={"colour": "blau"})
    (record,) = await stored_producer(wire)
    assert (record.queue_id, record.queue_offset, record.offset_id) == (
        result.queue.queue_id,
        result.queue_offset,
        result.offset_id,
    )
    properties = decode(record.properties)
    assert properties == {
        "TAGS": "A", "KEYS": "k1 k2", "colour": "blau", "UNIQ_KEY": result.message_id, "CLUSTER": "DefaultCluster",
    }  # fmt: skip


async def test_sends_take_queues_in_turn_and_keys_always_the_same(node: Node, four_queues: None) -> None:
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
    assert {record.body for record in await stored_producer(wire, "fresh", 2)} == {b"x", b"y"}


async def test_large_bodies_travel_compressed(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"z" * 4096)
        await producer.send("t", b"z" * 4095)
    sizes = sorted(len(record.body) for record in await stored_producer(wire))
    assert sizes[0] < 100
    assert sizes[1] == 4095


async def test_a_batch_lies_in_one_queue_in_order(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    async with Producer(node.address) as producer:
        result = await producer.send_batch("t", [b"one", Outgoing(b"two", tag="B", keys="k"), b"three"])
    found = await stored_producer(wire)
    assert [record.body for record in found] == [b"one", b"two", b"three"]
    assert {record.queue_id for record in found} == {result.queue.queue_id}
    assert result.message_id.split(",") == [decode(record.properties)["UNIQ_KEY"] for record in found]


async def test_oneway_sends_wait_for_a_broker_that_reads_nothing(node: Node, four_queues: None) -> None:
    """Nobody answers them, so nothing else holds back who sends faster than the broker takes."""
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


async def test_others_have_their_turn_between_oneway_sends(node: Node, four_queues: None) -> None:
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
    assert [record.body for record in await stored_producer(wire)] == [b"quiet"]


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"topic": "a b", "body": b"x"}, "characters"),
    ({"topic": "t", "body": b""}, "empty"),
    ({"topic": "t", "body": "text"}, "must be bytes"),
    ({"topic": "t", "body": b"x" * 4_194_305}, "maximum 4194304"),
    ({"topic": "t", "body": b"x", "properties": {"TAGS": "A"}}, "RocketMQ's own"),
    ({"topic": "t", "body": b"x", "properties": {"a": " "}}, "blank"),
    ({"topic": "t", "body": b"x", "properties": {"a": "x" * 33_000}}, "bytes; maximum"),
    ({"topic": "t", "body": b"x", "tag": "a\x02b"}, "U\\+0001"),
    ({"topic": "t", "body": b"x", "delay_level": -1}, "delay level"),
]


async def test_a_message_that_no_broker_would_take_is_refused_before_it_is_sent(node: Node) -> None:
    for arguments, reason in TOO_MUCH:
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
    assert len(await stored_producer(wire)) >= 8


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
            await connection.request_unchecked(RequestCode.SEND_MESSAGE_V2, {}, timeout_s=0.001)
        pending = connection.request_unchecked(RequestCode.SEND_MESSAGE_V2, {})
        connection.close()
        with pytest.raises(ConnectionFailed, match="closed the connection"):
            await pending
        node.server.serve = serve


async def test_a_process_that_was_suspended_reads_what_came_before_it_gives_up(node: Node) -> None:
    """Timers run before sockets are read: a deadline that passed meanwhile says nothing about who was asked."""
    async with connected(node, ClientLimits(deadline_sweep_s=3600.0)) as connection:
        answer = connection.request_unchecked(RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout_s=0.0)
        connection._sweep_due_s -= 3 * 3600.0
        connection.sweep_deadlines()
        assert (await answer).code == 0
        answer = connection.request_unchecked(RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout_s=0.0)
        connection.sweep_deadlines()
        with pytest.raises(RequestTimeout):
            await answer


async def test_many_concurrent_sends_are_all_stored(node: Node, four_queues: None) -> None:
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


NO_TEXTS: list[tuple[dict[str, Any], str]] = [
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
]


async def test_what_is_no_text_is_refused_by_name(node: Node) -> None:
    for arguments, reason in NO_TEXTS:
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
        asked = [connection.request_unchecked(RequestCode.GET_BROKER_CLUSTER_INFO, {}) for _ in range(3)]
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


# Single sends that travel together: each has its own result and error, and order holds.


async def test_messages_of_one_turn_travel_together_and_each_knows_its_place(
    node: Node, four_queues: None, requests: Requests
) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        requests.taken()
        results = await asyncio.gather(
            *(producer.send("t", b"%d" % number, tag=f"T{number}", keys=f"k{number}") for number in range(50))
        )
        assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE]
        assert len({result.queue for result in results}) == 1, "those that may go anywhere go together"
        await producer.send("t", b"alone")
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2]
    by_offset_id = {record.offset_id: record for record in await stored(node)}
    assert len(by_offset_id) == 52
    for number, result in enumerate(results):
        record = by_offset_id[result.offset_id]
        assert (record.body, record.queue_id, record.queue_offset) == (
            b"%d" % number,
            result.queue.queue_id,
            result.queue_offset,
        )
        assert (record.tag, record.keys, record.message_id) == (f"T{number}", [f"k{number}"], result.message_id)


async def test_order_by_key_holds_though_some_messages_must_travel_alone(node: Node, four_queues: None) -> None:
    """Large bodies are compressed, and delayed ones wait: neither may be in a batch."""
    async with Producer(node.address, compress_over_bytes=1000) as producer:
        await producer.send("t", b"first")
        sends = [
            producer.send("t", b"%d " % number + b"x" * (2000 if number % 7 == 3 else 1), queue_key=f"k{number % 5}")
            for number in range(200)
        ]
        results = await asyncio.gather(*sends)
    for key in range(5):
        mine = [result for number, result in enumerate(results) if number % 5 == key]
        assert len({result.queue for result in mine}) == 1
        offsets = [result.queue_offset for result in mine]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
async def test_the_first_messages_of_a_producer_keep_their_order(
    rocketlet: Broker, batching: bool, is_there: bool
) -> None:
    """None of them overtakes the one that makes the connection."""
    if is_there:
        rocketlet.create_topic("t")
    async with Producer(rocketlet.address, batching=batching) as producer:
        sends = (producer.send("t", b"%d" % number, queue_key="k") for number in range(20))
        results = await asyncio.gather(*sends)
    assert [result.queue_offset for result in results] == list(range(20))
    assert [request.name for request in rocketlet.requests].count("HEART_BEAT") == 1


async def test_a_heartbeat_that_was_refused_is_said_again_by_the_next_send(rocketlet: Broker) -> None:
    rocketlet.create_topic("t")
    rocketlet.faults.add(Fault.answer("HEART_BEAT", response="SYSTEM_ERROR"))
    async with Producer(rocketlet.address, retries=0) as producer:
        sends = (producer.send("t", b"%d" % number) for number in range(3))
        failed = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(error) for error in failed] == [BrokerRefused] * 3
        await producer.send("t", b"x")
    assert [request.name for request in rocketlet.requests].count("HEART_BEAT") == 2


async def test_a_batch_ends_at_its_limits(node: Node, four_queues: None, requests: Requests) -> None:
    async with Producer(node.address, compress_over_bytes=1 << 20) as producer:
        await producer.send("t", b"first")
        requests.taken()
        await asyncio.gather(*(producer.send("t", b"x") for _ in range(BATCH_MESSAGES + 1)))
        assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2]
        half = os.urandom(BATCH_BYTES // 2)
        results = await asyncio.gather(*(producer.send("t", half) for _ in range(3)))
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2] * 3, "two halves and their properties are too much"
        assert len({result.queue for result in results}) > 1, "a full batch passes the turn on"
        whole = os.urandom(BATCH_BYTES)
        await asyncio.gather(producer.send("t", whole), producer.send("t", b"x"))
    assert len(await stored(node)) == 1 + BATCH_MESSAGES + 1 + 3 + 2


def test_no_id_comes_twice_when_the_counter_starts_over() -> None:
    keys = UniqueKeys()
    keys.stamp(0)
    assert len({keys.next() for _ in range(3 * 65_536 + 5)}) == 3 * 65_536 + 5
    keys.stamp(0)
    taken = [key for count in (1, 255, 256, 257, 65_536, 70_000, 3) for key in (*keys.take(count), keys.next())]
    assert len(set(taken)) == len(taken) == 136_308 + 7
    assert {len(key) for key in taken} == {UniqueKeys.CHARS}


async def test_a_message_that_is_refused_takes_no_other_with_it(nodes: Nodes) -> None:
    """The broker adds its cluster to the properties: with a long name they get too long for it, and only for it."""
    node = await nodes.start(cluster="c" * 115)
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t")
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        results = await asyncio.gather(
            *(producer.send("t", b"%d" % number, keys="k" * (32_100 if number == 3 else 1)) for number in range(8)),
            return_exceptions=True,
        )
        with pytest.raises(MessageIllegal, match=r"the properties have 32\d+ bytes; maximum 32155"):
            await producer.send("t", b"x", keys="k" * 32_660)
    assert [number for number, result in enumerate(results) if isinstance(result, BrokerRefused)] == [3]
    bodies = [record.body for record in await stored(node)]
    assert sorted(bodies) == sorted([b"first", *(b"%d" % number for number in range(8) if number != 3)])


async def test_a_sender_that_gives_up_takes_no_other_with_it(node: Node, four_queues: None) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        sends = [asyncio.ensure_future(producer.send("t", b"%d" % number)) for number in range(6)]
        sends[2].cancel()  # before it was taken
        await asyncio.sleep(0)
        sends[4].cancel()  # it may be on its way
        results = await asyncio.gather(*sends, return_exceptions=True)
    assert [number for number, item in enumerate(results) if isinstance(item, asyncio.CancelledError)] == [2, 4]
    bodies = {record.body for record in await stored(node)}
    assert bodies >= {b"first", b"0", b"1", b"3", b"5"}
    assert b"2" not in bodies


async def test_a_message_that_is_refused_alone_in_its_turn_stops_nothing(node: Node, four_queues: None) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        for odd in ({"tag": " "}, {"properties": {"a": "x" * 40_000}}, {"message_id": "\x01"}, {"queue_key": "\udc00"}):
            with pytest.raises(MessageIllegal):
                await producer.send("t", b"odd", **odd)
            await asyncio.sleep(0)  # the turn ends with nothing to send
            await producer.send("t", b"second")
    assert len(await stored(node)) == 5


@pytest.mark.parametrize("odd", [{"properties": {"a": "\ud800"}}, {"tag": "\udfff"}, {"keys": ["a", "\udbff"]}])
async def test_what_utf_8_cannot_hold_is_refused_and_takes_no_other_with_it(
    node: Node, four_queues: None, odd: dict[str, Any]
) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        sends = [producer.send("t", b"1"), producer.send("t", b"2", **odd), producer.send("t", b"3")]
        before, refused, after = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(refused, MessageIllegal)
        assert "half a surrogate pair" in str(refused)
        assert isinstance(before, SendResult)
        assert isinstance(after, SendResult)
        with pytest.raises(MessageIllegal, match="half a surrogate pair"):
            await producer.send_batch("t", [Outgoing(b"x", **odd)])


async def test_who_gives_up_is_not_sent_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    failed = asyncio.Event()
    async with Producer(node.address, timeout_s=PATIENCE_S) as producer:
        await producer.send("t", b"first")
        await producer.send("t", b"second")

        async def look_again(topic: str) -> None:
            failed.set()
            await asyncio.Event().wait()

        async def again(*arguments: object) -> object:
            tried.append(arguments)
            raise AssertionError

        monkeypatch.setattr(producer, "_refresh_route", look_again)
        monkeypatch.setattr(producer, "_send", again)
        sends = [asyncio.ensure_future(producer.send("t", body)) for body in (b"given up", b"waits")]
        await asyncio.sleep(0)
        only_connection(producer).abort()
        await failed.wait()
        sends[0].cancel()
        await asyncio.wait(sends[:1])
        await eventually(lambda: len(tasks_named("resend")) == 1)
    assert not tried
    with pytest.raises(ConfigError, match="has been stopped"):  # a producer that stops reports it to who waits
        await sends[1]


async def test_an_attempt_that_is_cancelled_before_it_begins_fails_for_who_waits(node: Node) -> None:
    async with Producer(node.address) as producer:
        queue = (await producer.send("t", b"first")).queue
        connection = only_connection(producer)
        accumulator = producer._accumulator
        assert accumulator is not None
        batch = Batch(accumulator, connection, queue, 0, connection.running_s() + PATIENCE_S, limit=1)
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        batch.messages.append((future, "", b"x", "", None, None))
        batch.close(producer._keys)
        producer._failed(batch, ConnectionFailed("gone"))
        for task in producer._resending:
            task.cancel()
        with pytest.raises(ConfigError, match="cancelled while it sent"):
            await asyncio.wait_for(future, PATIENCE_S)


async def test_a_lost_broker_fails_each_and_another_takes_them(nodes: Nodes, wire: Wire, node: Node) -> None:
    other = await nodes.start(name="broker-b", name_servers=(node.address,))
    await create_topic(wire, "t")
    async with Producer(node.address, retries=3) as producer:
        await producer.send("t", b"first")
        await other.stop()
        results = await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(20)))
        assert {result.queue.broker_name for result in results} == {"broker-a"}
        await node.stop()
        failed = await asyncio.gather(
            *(producer.send("t", b"late", queue_key=f"k{number}") for number in range(20)), return_exceptions=True
        )
    assert all(isinstance(error, ConnectionFailed | RequestTimeout) for error in failed)
    assert len(failed) == 20


async def test_batching_can_be_switched_off(node: Node, four_queues: None, requests: Requests) -> None:
    async with Producer(node.address, batching=False) as producer:
        await producer.send("t", b"first")
        requests.taken()
        results: list[SendResult] = await asyncio.gather(*(producer.send("t", b"x") for _ in range(8)))
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2] * 8
        assert len({result.queue for result in results}) == 4


async def test_queues_of_brokers_that_are_met_for_the_first_time_take_their_turn(nodes: Nodes, node: Node) -> None:
    await nodes.start(name="broker-b", name_servers=(node.address,))
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t", queues=4)

        async def is_on_both() -> bool:
            return len((await admin.topic("t")).ranges) == 8

        await eventually(is_on_both)
    for _ in range(8):  # each begins at another queue
        async with Producer(node.address) as producer:
            assert len({(await producer.send("t", b"x")).queue for _ in range(8)}) == 8


@pytest.mark.parametrize(
    "ext",
    [{}, {"msgId": "A", "queueId": 0, "queueOffset": 1}, {"msgId": "A,B", "queueId": "x", "queueOffset": 1}],
    ids=["nothing", "one id for two", "no number"],
)
async def test_an_answer_that_does_not_say_where_fails_each_sender_immediately(
    node: Node, four_queues: None, monkeypatch: pytest.MonkeyPatch, ext: dict[str, str | int]
) -> None:
    """And nothing is sent again: the messages are stored."""
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        call = Connection.call

        def garbled(connection: Connection, code: int, header: Any, body: bytes, answered: Any, *rest: Any) -> None:
            def answer(found: Any) -> None:
                answered(found._replace(ext=ext) if code == RequestCode.SEND_BATCH_MESSAGE else found)

            call(connection, code, header, body, answer, *rest)

        monkeypatch.setattr(Connection, "call", garbled)
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(producer.send("t", b"a"), producer.send("t", b"b"), return_exceptions=True)
        assert all("stored the messages, but did not return their offsets" in str(error) for error in found)
    assert len(await stored(node)) == 3


@pytest.mark.parametrize("waiting", [{"delay_level": 1}, {"delay": 5}, {"delay_level": 1, "priority": 3}])
async def test_result_of_a_message_that_waits_for_its_time_has_no_offset(node: Node, waiting: dict[str, Any]) -> None:
    async with Producer(node.address) as producer:
        assert (await producer.send("t", b"x", **waiting)).queue_offset == -1


async def test_result_of_a_message_in_a_transaction_has_no_offset(node: Node) -> None:
    async with Producer(node.address, "p", check=lambda message: None) as producer:
        async with producer.transaction("t", b"x") as half:
            assert half.queue_offset == -1
        assert node.broker.store.queue("t", half.queue.queue_id).next == 1


async def test_messages_of_a_message_group_have_it_and_go_to_one_queue(node: Node) -> None:
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", None, start="first") as consumer:
        for number in range(5):
            await producer.send("t", b"%d" % number, message_group="order-1", properties={"a": "b"})
        found = [await anext(consumer) for _ in range(5)]
        assert len({message.queue for message in found}) == 1
        assert {message.message_group for message in found} == {"order-1"}
        assert (await producer.resend(found[0])).queue == found[0].queue
        for group in ("", " ", "a\x01", 5):
            with pytest.raises(MessageIllegal, match="message group"):
                await producer.send("t", b"x", message_group=group)  # type: ignore[arg-type]
