"""The unmodified official clients of 5.x, over gRPC, on our broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.access import Acl, AclFile
from rocketlet.broker.tls import Tls
from rocketlet.client import Consumer, Producer
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.testing.ports import free_port

from ..conftest import Node, Nodes
from ..support.accounts import ACCOUNTS, AccountsFile
from ..support.certificates import Certificates
from ..support.handlers import Inbox
from .conftest import Program, Run, StartCluster
from .features import area
from .official import ACCOUNTS as SIGNED
from .official import (
    CLIENTS,
    FIFO,
    NORMAL,
    SIMPLE,
    TIMED,
    TRANSACTIONS,
    Official,
    check_consumed,
    check_producers,
    home_of,
    made,
)

pytestmark = pytest.mark.timeout(300)

feature = area("Official clients of 5.x")


@pytest.fixture(
    params=[
        pytest.param("go", marks=pytest.mark.go),
        pytest.param("java", marks=pytest.mark.java),
        pytest.param("node", marks=pytest.mark.node),
        pytest.param("python", marks=pytest.mark.pypi),
    ]
)
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Official:
    return CLIENTS[request.param][2](made(tmp_path_factory, request.param), home_of(tmp_path))


def put(node: Node, **settings: Any) -> None:
    node.broker.topics.put(TopicConfig("t", 4, 4, **settings), node.broker.store.end)


async def popping(node: Node, peer: Program) -> None:
    """A new group begins with what comes after its first receive."""
    await peer.started()
    await peer.until(lambda: node.broker.pops.pools.waits("g", "t") > 0)


@feature(NORMAL)
@feature(FIFO)
@feature(TIMED)
@feature("producer: timed messages recalled")
@feature(TRANSACTIONS)
async def test_producers(nodes: Nodes, official: Official) -> None:
    await check_producers(nodes, official)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("push", marks=feature("push consumer: by tag, with retries at their time")),
        pytest.param("simple", marks=feature(SIMPLE)),
    ],
)
async def test_consumers(node: Node, official: Official, mode: str) -> None:
    put(node)
    async with (
        official.run(mode, endpoint=node.address, topic="t", tags="TagA || TagC") as peer,
        Producer(node.address) as producer,
    ):
        await popping(node, peer)
        await check_consumed(node, producer, peer)


@feature("push consumer: in order of a message group")
async def test_consumers_in_order(node: Node, official: Official) -> None:
    put(node)
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=True))
    async with (
        official.run("push", endpoint=node.address, topic="t") as peer,
        official.run("produce", endpoint=node.address, topic="t") as sender,
    ):
        await popping(node, peer)
        await sender.until(lambda: bool(sender.found("DONE")))
        await peer.until(lambda: sum(body.startswith("fifo") for body in peer.bodies) >= 5)
    assert [body for body in peer.bodies if body.startswith("fifo")] == [f"fifo-{number}" for number in range(5)]


@feature("messages with priorities, the most urgent received first")
async def test_urgent_messages_are_received_first(node: Node, official: Official) -> None:
    put(node, message_type="PRIORITY")
    async with official.run("urgent", endpoint=node.address, topic="t") as sender:
        await sender.until(lambda: bool(sender.found("DONE")))
    async with official.run("simple", endpoint=node.address, topic="t") as peer:
        await peer.until(lambda: len(peer.bodies) == 3)
    assert peer.bodies == [f"priority-{priority}" for priority in (3, 2, 1)]


def put_lite(node: Node, *, is_ordered: bool = False, **attributes: str) -> None:
    """`is_ordered`: clients handle one message of a batch after the other."""
    put(node, message_type="LITE")
    attributes = {"lite.bind.topic": "t", **{name.replace("_", "."): value for name, value in attributes.items()}}
    node.broker.group_configs.put(GroupConfig("g", consume_orderly=is_ordered, attributes=attributes))


async def told(peer: Program, *lines: str) -> None:
    """Have a client of the mode `lite` execute commands."""
    for line in lines:
        before = len(peer.found("DID"))
        await peer.write(line)
        await peer.until(lambda before=before: len(peer.found("DID")) > before or bool(peer.found("REFUSED")))  # type: ignore[misc]
        assert not peer.found("REFUSED"), peer.lines


def received(peer: Program, name: str) -> list[str]:
    """Return the bodies of a lite topic."""
    return [line[5] for line in peer.found("GOT") if line[2] == name]


@feature("lite topics: messages of subscribed ones, also from before the subscription, in order")
async def test_subscribed_lite_topics_are_received(node: Node, official: Official) -> None:
    put_lite(node, is_ordered=True)
    async with official.run("lite", endpoint=node.address, topic="t") as peer:
        await peer.started()
        for number in range(2):
            await told(peer, *(f"send {name} {name}-{number}" for name in "abc"))
        await told(peer, "subscribe a", "subscribe b", "send a a-2")
        await peer.until(lambda: len(peer.bodies) == 5)
        assert sorted(node.broker.lites.of("t")) == ["a", "b", "c"]
        assert received(peer, "a") == ["a-0", "a-1", "a-2"]
        assert received(peer, "b") == ["b-0", "b-1"]
        await told(peer, "unsubscribe b", "send b b-2", "send a a-3")
        await peer.until(lambda: "a-3" in peer.bodies)
        await told(peer, "subscribe c")
        await peer.until(lambda: received(peer, "c") == ["c-0", "c-1"])
    assert "b-2" not in peer.bodies


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
@feature("lite topics: a failed message is redelivered before the next one")
async def test_failed_message_of_a_lite_topic_is_redelivered_first(
    node: Node, official: Official, is_ordered: bool
) -> None:
    put_lite(node, is_ordered=is_ordered)
    async with official.run("lite", endpoint=node.address, topic="t") as peer:
        await peer.started()
        await told(peer, "send a bad", "send a next", "subscribe a")
        await peer.until(lambda: "next" in peer.bodies and len(peer.bodies) >= 3)
        pool = node.broker.pops.pools.find_lite("g", "t")
        assert pool is not None
        await peer.until(lambda: pool.queues.lag(node.broker.lites.of("t")["a"]) == 0)
    assert peer.bodies.count("bad") == 2


OFFSETS = {"": 0, "min": 0, "max": 5, "last": 0, "offset 3": 3, "offset 99": 5, "tail 2": 3}
"""The offset of the first message that a group receives of a lite topic with 5 messages, of which it has handled 5 or, for
`last` and no option, none."""


@pytest.mark.parametrize(
    "official",
    [pytest.param("java", marks=pytest.mark.java), pytest.param("node", marks=pytest.mark.node)],
    indirect=True,
)
@feature("lite topics: the offset at which a subscription begins")
async def test_subscription_to_a_lite_topic_begins_at_an_offset(node: Node, official: Official) -> None:
    put_lite(node, is_ordered=True)
    async with official.run("lite", endpoint=node.address, topic="t") as peer:
        await peer.started()
        for name, (option, first) in zip("abcdefg", OFFSETS.items(), strict=True):
            await told(peer, *(f"send {name} {number}" for number in range(5)))
            if option.startswith("tail"):  # it counts from the committed offset
                await told(peer, f"subscribe {name}")
                await peer.until(lambda name=name: len(received(peer, name)) == 5)  # type: ignore[misc]
                await told(peer, f"unsubscribe {name}")
                peer.lines.clear()
            await told(peer, f"subscribe {name} {option}".strip(), f"send {name} 5")
            await peer.until(lambda name=name: "5" in received(peer, name))  # type: ignore[misc]
            assert received(peer, name) == [str(number) for number in range(first, 6)], option


@pytest.mark.parametrize(
    "official",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("go", "java", "node")],
    indirect=True,
)
@feature("lite topics: one client at a time in an exclusive group")
async def test_second_client_of_an_exclusive_group_evicts_the_first(node: Node, official: Official) -> None:
    put_lite(node, is_ordered=True, lite_sub_model="Exclusive")
    async with (
        official.run("lite", endpoint=node.address, topic="t") as first,
        official.run("lite", endpoint=node.address, topic="t") as second,
    ):
        await first.started()
        await second.started()
        await told(first, "subscribe a", "subscribe b", "send a 0")
        await first.until(lambda: first.bodies == ["0"])
        await told(second, "subscribe a")
        for number in range(1, 4):
            await told(first, f"send a {number}")
        await second.until(lambda: second.bodies == ["1", "2", "3"])
        if official.name.startswith("Java"):  # Go shows no lite topics, and Node 1.0.8 does not read the notification
            await told(first, "names")
            assert first.found("NAMES") == [["NAMES", "b"]]
        await told(first, "send b last")
        await first.until(lambda: first.bodies == ["0", "last"])


@pytest.mark.parametrize("official", [pytest.param("java", marks=pytest.mark.java)], indirect=True)
async def test_client_is_refused_a_lite_topic_beyond_its_quota_or_with_an_illegal_name(
    node: Node, official: Official
) -> None:
    put_lite(node, lite_sub_client_quota="2")
    async with official.run("lite", endpoint=node.address, topic="t") as peer:
        await peer.started()
        await told(peer, "subscribe a", "subscribe b")
        for number, line in enumerate(("subscribe c", "send a.b 0", "send a 1"), 1):
            await peer.write(line)
            if number < 3:
                await peer.until(lambda number=number: len(peer.found("REFUSED")) == number)  # type: ignore[misc]
        await peer.until(lambda: peer.bodies == ["1"])
    refused = [line[1] for line in peer.found("REFUSED")]
    assert refused == ["LiteSubscriptionQuotaExceededException", "BadRequestException"]


@feature("push consumer: dead letters by the group's limit")
async def test_dead_letters(node: Node, official: Official) -> None:
    put(node)
    node.broker.group_configs.put(GroupConfig("g", retry_max_times=1))
    async with (
        official.run("push", endpoint=node.address, topic="t") as peer,
        Producer(node.address) as producer,
    ):
        await popping(node, peer)
        await producer.send("t", b"worse")
        queues = node.broker.store.queues
        await peer.until(lambda: ("%DLQ%g", 0) in queues and queues["%DLQ%g", 0].next == 1)
    assert peer.bodies == ["worse", "worse"]


@feature("topics of two brokers")
async def test_topics_of_two_brokers(start_cluster: StartCluster, official: Official) -> None:
    """A client is given the address of one; the route has both."""
    cluster = await start_cluster(2)
    await cluster.create_topic("t")
    async with (
        official.run("push", endpoint=cluster.nodes[0].address, topic="t") as peer,
        Producer(cluster.address) as producer,
    ):
        for node in cluster.nodes:
            await popping(node, peer)
        for number in range(20):
            await producer.send("t", b"%d" % number)
        await peer.until(lambda: len(peer.bodies) == 20)
    assert Counter(peer.bodies) == Counter(map(str, range(20)))
    assert all(
        any(queue.next for (name, _), queue in node.broker.store.queues.items() if name == "t")
        for node in cluster.nodes
    )


@feature("TLS")
@feature(SIGNED)
async def test_tls_and_accounts(nodes: Nodes, official: Official, certificates: Certificates, tmp_path: Path) -> None:
    """Java and Go check no certificate, so the broker's own will do; Python and Node check it."""
    is_checked = official.name.startswith(("Node", "Python"))
    file = AccountsFile(tmp_path / "plain_acl.yml")
    file.write([*ACCOUNTS, {"accessKey": "five-key", "secretKey": "secret-of-five", "topicPerms": ["t=PUB"]}])
    node = await nodes.start(
        tls=Tls("enforcing", certificates.files) if is_checked else Tls(signs_itself=True),
        acl=Acl(AclFile(file.path)),
        transaction_check_interval_s=0.1,
        transaction_timeout_s=0.3,
    )
    put(node)
    authority = str(certificates.folder / "ca.pem")
    trust = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": authority, "NODE_EXTRA_CA_CERTS": authority}
    keys = {"access": "five-key", "secret": "secret-of-five"}
    async with official.run("produce", environment=trust, endpoint=node.address, topic="t", tls="yes", **keys) as peer:
        await peer.until(lambda: bool(peer.found("DONE")) and bool(peer.found("ASKED")))
    assert len(peer.found("SENT")) == 12


@feature("push consumer: a restart of the broker")
async def test_a_broker_restarts_under_a_consumer(nodes: Nodes, official: Official) -> None:
    port = free_port()
    node = await nodes.start(port=port)
    put(node)
    async with official.run("push", endpoint=node.address, topic="t") as peer:
        await popping(node, peer)
        for body in (b"before", b"after"):
            async with Producer(node.address) as producer:
                await producer.send("t", body, tag="TagA")
            await peer.until(lambda body=body: body.decode() in peer.bodies)  # type: ignore[misc]
            if body == b"before":
                await node.stop()
                node = await nodes.start(port=port)
    assert Counter(peer.bodies) == Counter(["before", "after"])


@pytest.mark.java
@pytest.mark.parametrize("official", [pytest.param("python", marks=pytest.mark.pypi)], indirect=True)
@feature("push consumer: one group with Java 4.9's and our own, each message handled once")
async def test_one_group_with_members_that_pull(node: Node, official: Official, java: Run) -> None:
    put(node)
    inbox, sent = Inbox(), list[str]()

    async def send(kind: str, until: Callable[[], int], peer: Program) -> None:
        async with Producer(node.address) as producer:
            for number in range(20):
                sent.append(f"{kind}-{number}")
                await producer.send("t", sent[-1].encode(), tag="TagA")
        await peer.until(lambda: until() >= len(sent))

    def is_shared_out() -> bool:
        """Our member and the pool hold leases, and Java's reads a queue."""
        group, readers = (
            node.broker.groups.get("g"),
            [node.broker.groups.queue("g", "t", number).reader for number in range(4)],
        )
        is_read = group is not None and any(reader in group.foreign for reader in readers)
        return is_read and len(set(node.broker.groups.owners("g").values())) == 2

    async with official.run("push", endpoint=node.address, topic="t") as popping_peer:
        await popping(node, popping_peer)
        await send("popped", lambda: len(popping_peer.bodies), popping_peer)
        async with (
            java("consume", ns=node.address, group="g", topic="t") as pulling_peer,
            Consumer(node.address, "g", "t", inbox),
        ):
            await pulling_peer.until(is_shared_out)

            def count() -> int:
                return len(popping_peer.bodies) + len(pulling_peer.bodies) + len(inbox.messages)

            await send("mixed", count, pulling_peer)
            await pulling_peer.until(lambda: any(body.startswith("mixed") for body in pulling_peer.bodies))
        await send("again", count, popping_peer)
    handled = popping_peer.bodies + pulling_peer.bodies + [body.decode() for body in inbox.bodies]
    assert Counter(handled) == Counter(sent)
