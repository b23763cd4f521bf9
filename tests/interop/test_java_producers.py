"""Unmodified Java producers (4.9.8) on our broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rocketlet.client import Consumer, Message, Producer
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.names import TRACE_TOPIC
from rocketlet.protocol.properties import decode

from bench import versions
from bench.peers import Apache

from ..conftest import eventually
from ..support.handlers import Inbox
from .conftest import START_S, Cluster, Run, StartCluster, missing, on_one_broker_and_two
from .features import area
from .systems import HEAP

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
feature = area("Producers")


@on_one_broker_and_two
@feature("synchronous sends, compressed bodies, keys, tags, user properties with non-ASCII text")
async def test_what_java_sends_python_receives(cluster: Cluster, java: Run) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        java("produce", ns=cluster.address, topic="t") as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == 20)
    sent = peer.found("SENT")
    assert [line[2] for line in sent] == ["SEND_OK"] * 20
    assert sorted(line[3] for line in sent) == sorted(message.message_id for message in inbox.messages)
    assert sorted(line[4] for line in sent) == sorted(message.offset_id for message in inbox.messages)
    message = next(message for message in inbox.messages if message.keys == ["key-7"])
    assert (message.body, message.tag) == (b"java-7-" + b"x" * 5000, "odd")
    assert len(message.record.body) < 1000, "Java compresses bodies over 4 KiB"
    assert message.properties["farbe"] == "grün"
    assert "WAIT" not in decode(message.record.properties)


@feature("sends that make their topic")
async def test_java_makes_a_topic_by_sending_to_it(cluster: Cluster, java: Run) -> None:
    async with java("produce", ns=cluster.address, topic="fresh", count=3) as peer:
        await peer.until(lambda: len(peer.found("SENT")) == 3)
    assert cluster.stored("fresh") == 3


@feature("asynchronous and one-way sends, sends to a queue and by selector")
async def test_java_sends_in_every_way(cluster: Cluster, java: Run) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        java("sends", ns=cluster.address, topic="t") as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == 5)
    assert sorted(inbox.bodies) == sorted([b"sync", b"async", b"oneway", b"queue", b"selector"])
    queues = {line[1]: line[5] for line in peer.found("SENT")}
    assert (queues["queue"], queues["selector"]) == ("2", "3")


@pytest.mark.parametrize(("count", "size"), [(40, 0), (200, 0), (40, 104_000)])
@feature("batches, also of more than 32 messages and close to 4 MiB")
async def test_java_sends_batches(cluster: Cluster, java: Run, count: int, size: int) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        java("batch", ns=cluster.address, topic="t", count=count, size=size) as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == count)
    assert Counter(inbox.bodies) == Counter(b"batch-%d" % number + b"x" * size for number in range(count))
    assert len(peer.found("SENT")[0][4].split(",")) == count, "an id per message"


@feature("delayed messages")
async def test_java_delays_messages(start_cluster: StartCluster, brokers: int, java: Run) -> None:
    cluster = await start_cluster(brokers, delay_levels_ms=(300,) * 18)
    await cluster.create_topic("t")
    inbox = Inbox()
    async with (
        Consumer(cluster.address, "g", "t", inbox, start="first"),
        java("produce", ns=cluster.address, topic="t", count=3, delay=4) as peer,
    ):
        await peer.until(lambda: len(inbox.messages) == 3)
    assert all(message.store_ms - message.born_ms >= 300 for message in inbox.messages)
    assert {message.properties["DELAY"] for message in inbox.messages} == {"4"}


@feature("transactions: commit and rollback")
async def test_java_ends_transactions(cluster: Cluster, java: Run) -> None:
    await cluster.create_topic("t")
    inbox = Inbox()
    async with Consumer(cluster.address, "g", "t", inbox, start="first"):
        for outcome, body in (("ROLLBACK_MESSAGE", "no"), ("COMMIT_MESSAGE", "yes")):
            async with java("transaction", ns=cluster.address, topic="t", outcome=outcome, body=body) as peer:
                await peer.started()
        await eventually(lambda: len(inbox.messages) == 1)
        await eventually(lambda: all(node.broker.transactions.waiting == 0 for node in cluster.nodes))
    assert inbox.bodies == [b"yes"]
    assert inbox.messages[0].record.sys_flag & 0xC == 8


@feature("transactions: unknown, then asked for by the broker, also of another producer of the group")
async def test_java_is_asked_for_an_outcome(start_cluster: StartCluster, brokers: int, java: Run) -> None:
    cluster = await start_cluster(
        brokers, transaction_check_interval_s=0.05, transaction_timeout_s=0.5, transaction_check_max=10**6
    )
    await cluster.create_topic("t")
    inbox = Inbox()
    options = {"ns": cluster.address, "topic": "t", "outcome": "UNKNOW"}
    async with Consumer(cluster.address, "g", "t", inbox, start="first"):
        async with java("transaction", **options, body="first", check="COMMIT_MESSAGE") as peer:
            await peer.until(lambda: b"first" in inbox.bodies)
        topic, times, body = peer.found("ASKED")[0][1:]
        assert (topic, body) == ("t", "first")
        assert int(times) >= 1
        async with java("transaction", **options, body="orphan") as peer:
            await peer.started()
            await peer.kill()
        async with java("transaction", **options, check="COMMIT_MESSAGE") as other:
            await other.until(lambda: b"orphan" in inbox.bodies)
        assert {line[3] for line in other.found("ASKED")} == {"orphan"}, "more than once if its answer takes long"
    assert Counter(inbox.bodies)[b"orphan"] == 1


@feature("request and reply")
async def test_java_requests_and_java_replies(cluster: Cluster, java: Run) -> None:
    for topic in ("t", "t_warm"):
        await cluster.create_topic(topic)
    async with java("reply", ns=cluster.address, topic="t") as replier:
        await replier.started()
        async with java("request", ns=cluster.address, topic="t") as requester:
            await requester.until(lambda: bool(requester.found("REPLY")))
        assert requester.lines[-1] == "REPLY pong to ping"
        await replier.until(lambda: bool(replier.found("SENT")))
        assert replier.found("SENT")[0][2] == "SEND_OK"


@feature("request and reply with our client at either end")
async def test_python_and_java_ask_each_other(cluster: Cluster, java: Run) -> None:
    for topic in ("t", "t_warm"):
        await cluster.create_topic(topic)
    async with Producer(cluster.address, "python_askers") as producer:
        async with java("reply", ns=cluster.address, topic="t") as replier:
            await replier.started()
            reply = await producer.request("t", b"ping from python", timeout_s=100)
        assert reply.body == b"pong to ping from python"

        async def answer(message: Message) -> None:
            await producer.reply(message, b"python says pong")

        async with (
            Consumer(cluster.address, "python_repliers", "t", answer),
            java("request", ns=cluster.address, topic="t") as requester,
        ):
            await requester.until(lambda: bool(requester.found("REPLY")))
        assert requester.lines[-1] == "REPLY python says pong"


@feature("the message trace")
async def test_java_traces_what_it_sends(cluster: Cluster, java: Run) -> None:
    await cluster.create_topic("t")
    async with java("trace", ns=cluster.address, topic="t") as peer:
        await peer.until(lambda: cluster.stored(TRACE_TOPIC) == 1)
    key = peer.found("SENT")[0][3]
    stores = [node.broker.store for node in cluster.nodes]
    store = next(store for store in stores if store.queue(TRACE_TOPIC, 0).next)
    assert key.encode() in store.message(store.queue(TRACE_TOPIC, 0), 0).body


@feature("the VIP channel (broker port - 2)")
async def test_java_sends_over_the_vip_channel(start_cluster: StartCluster, java: Run) -> None:
    cluster = await start_cluster(1)
    await cluster.create_topic("t")
    server = cluster.nodes[0].server
    async with java(
        "transaction", ns=cluster.address, topic="t", vip="true", outcome="COMMIT_MESSAGE", body="fast"
    ) as peer:
        await peer.started()
        assert sum(connection.is_vip for connection in server.connections) == 1
    assert cluster.stored("t") == 1


async def errors(java: Run, name_server: str, broker: str) -> dict[str, tuple[str, str]]:
    """Code and remark by the mistake."""
    async with java("errors", ns=name_server, broker=broker, topic="t") as peer:
        await peer.until(lambda: len(peer.found("ERROR")) == 9)
    return {line[1]: (line[2], " ".join(line[3:])) for line in peer.found("ERROR")}


@feature(
    "errors: illegal and forbidden topics, no such topic or queue, too large; the codes are Apache's, side by side"
)
async def test_errors_have_the_codes_of_apaches_broker(
    cluster: Cluster, java: Run, tmp_path: Path, fetch_apache: Callable[[str], None]
) -> None:
    await asyncio.to_thread(fetch_apache, versions.APACHE)
    async with Apache(tmp_path, versions.APACHE, HEAP) as apache:
        theirs = await errors(java, apache.address, apache.broker_address)
    codes_of_apache = {name: code for name, (code, _) in theirs.items()}
    ours = await errors(java, cluster.address, cluster.nodes[0].address)
    # Apache's broker makes the topic and the group; ours takes the group's name for a mistake.
    assert codes_of_apache.pop("retry-group") == str(int(ResponseCode.SUCCESS))
    assert ours.pop("retry-group")[0] == str(int(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST))
    assert {name: code for name, (code, _) in ours.items()} == codes_of_apache
    facts = {
        "illegal-topic": "no such topic!",
        "long-topic": "127",
        "system-topic": "SCHEDULE_TOPIC_XXXX",
        "half-topic": "RMQ_SYS_TRANS_HALF_TOPIC",
        "no-topic": "nobody_made_it",
        "queue-id": "[99]",
        "too-large": "4194304",
        "properties": "32255",
    }
    for name, fact in facts.items():
        assert fact in ours[name][1]


@feature("errors: no route, and a broker that may not be written to")
async def test_java_learns_that_it_may_not_write(start_cluster: StartCluster, java: Run) -> None:
    cluster = await start_cluster(1, auto_create_topics=False)
    async with java("produce", ns=cluster.address, topic="nobody_made_it", route_tries=1) as peer:
        await eventually(lambda: bool(peer.found("FAILED")), START_S)
    assert "No route info of this topic" in " ".join(peer.found("FAILED")[0])
    await cluster.create_topic("t", perm=4)
    async with java("produce", ns=cluster.address, topic="t", route_tries=1) as peer:
        await eventually(lambda: bool(peer.found("FAILED")), START_S)
    assert "No route info of this topic" in " ".join(peer.found("FAILED")[0])


async def test_python_and_java_can_be_asked_about_one_transaction_group(start_cluster: StartCluster, java: Run) -> None:
    """A Python producer sends, dies, and Java of the same group is asked."""
    cluster = await start_cluster(
        1, transaction_check_interval_s=0.05, transaction_timeout_s=0.2, transaction_check_max=10**6
    )
    await cluster.create_topic("t")
    inbox = Inbox()
    async with Consumer(cluster.address, "g", "t", inbox, start="first"):
        gate = asyncio.Event()
        async with Producer(cluster.address, "mixed", check=lambda message: None) as producer:

            async def work() -> None:
                async with producer.transaction("t", b"from python"):
                    await gate.wait()

            task = asyncio.create_task(work())
            await eventually(lambda: cluster.nodes[0].broker.transactions.waiting == 1)
        async with java(
            "transaction", ns=cluster.address, topic="t", group="mixed", outcome="UNKNOW", check="COMMIT_MESSAGE"
        ) as peer:
            await peer.until(lambda: b"from python" in inbox.bodies)
        gate.set()
        await task
    assert Counter(inbox.bodies)[b"from python"] == 1
