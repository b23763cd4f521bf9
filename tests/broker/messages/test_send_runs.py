"""One call of the compiled module stages the sends of a read that lie one after the other, exactly as Python stages each."""

from __future__ import annotations

import asyncio
import errno
import threading
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocketlet.broker.config import BATCH_RUN_BYTES, BATCH_RUN_MESSAGES, BATCH_TURN_BYTES, BATCH_TURN_MESSAGES
from rocketlet.broker.store import disk
from rocketlet.broker.tls import Tls
from rocketlet.protocol import fast
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_BODY_BYTES, MAX_REQUEST_HEADER_BYTES, SENT_PROPERTY_BYTES
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.headers import PullMessage, SendMessage, write
from rocketlet.protocol.message import encode_batch

from ...conftest import Connect, Node, Nodes, Wire, create_topic
from ...support.accounts import ACCOUNTS, AccountsFile, account, identified, tls_wire
from ...support.certificates import Certificates
from ...support.examples import examples
from ...support.pairs import Pair
from ...support.requests import SUBSCRIBED, SUSPEND, pull
from ...support.topics import put

pytestmark = pytest.mark.skipif(fast.MODULE == "pure", reason="needs the compiled module: make dev")
KINDS = [JSON, ROCKETMQ, MSGPACK]
SHORT_NAMES = dict(
    zip(write(SendMessage("", "", "", 0, 0, 0, 0, 0, "", 0, False, False, 0)), "abcdefghijkml", strict=True)
)
BROKERS_OWN = len("\x02CLUSTER\x01DefaultCluster")


def header(code: int = RequestCode.SEND_MESSAGE_V2, **fields: Any) -> dict[str, Any]:
    """The fields of a send's header, by the names that its code has for them."""
    found = write(SendMessage("p", "t", "TBW102", 4, 0, 0, 1, 0)._replace(**fields))
    return found if code == RequestCode.SEND_MESSAGE else {SHORT_NAMES[name]: value for name, value in found.items()}


class Runs:
    """Counts the sends that the module takes."""

    def __init__(self, node: Node, wire: Wire) -> None:
        self._wire = wire
        self.taken = 0
        self._stage = node.broker.store.stage_sends
        node.broker.store.stage_sends = self._counted  # type: ignore[assignment, method-assign]

    def _counted(self, *arguments: Any) -> fast.EncodedSends | None:
        found = self._stage(*arguments)
        self.taken += found.sends if found is not None else 0
        return found

    async def send(
        self, body: bytes = b"x", *, kind: int = JSON, code: int = 310, more: Any = None, **fields: Any
    ) -> Frame:
        return await self._wire.call(code, header(code, **fields) | (more or {}), body, serialize_type=kind)


@pytest.fixture
async def runs(node: Node, wire: Wire) -> Runs:
    await create_topic(wire, "t")
    return Runs(node, wire)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [10, 310, 320])
async def test_sends_to_a_queue_that_took_a_message_are_taken(runs: Runs, wire: Wire, kind: int, code: int) -> None:
    texts = "", "TAGS\x01ä\x02WAIT\x01true\x02KEYS\x01k", "größe\x01\U0001f600"
    for number, text in enumerate(texts):
        found = await runs.send(b"%d" % number, kind=kind, code=code, properties=text)
        assert (found.code, int(found.ext["queueOffset"])) == (0, number)
    assert runs.taken == 2, "the first one is checked"
    body = encode_batch([(1, b"3", "a\x01b"), (2, b"4", "")])
    found = await runs.send(body, kind=kind, code=code, batch=True)
    assert (runs.taken, found.code, int(found.ext["queueOffset"]), str(found.ext["msgId"]).count(",")) == (3, 0, 3, 1)
    pulled = await wire.call(RequestCode.PULL_MESSAGE, pull("t"))
    assert pulled.body.count(b"\x02CLUSTER") + pulled.body.count(b"\0CLUSTER") >= 2


CHANGES: dict[str, Callable[[Node], object]] = {
    "topic deleted": lambda node: node.broker.topics.delete("t", node.broker.store.end),
    "write queues shrunk": lambda node: node.broker.topics.put(TopicConfig("t", 1, 1), 0),
    "permission changed": lambda node: node.broker.topics.put(TopicConfig("t", 4, 4, 4), 0),
    "another topic created": lambda node: node.broker.topics.put(TopicConfig("u", 1, 1), 0),
    "group changed": lambda node: node.broker.group_configs.put(GroupConfig("g")),
    "settings changed": lambda node: node.broker.settings.change(node.broker.settings.now),
    "index deleted": lambda node: node.broker.store.delete_topic("t"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_keeps_the_next_send_from_being_taken(node: Node, runs: Runs, change: str) -> None:
    for _ in range(3):
        await runs.send(queue_id=2)
    assert runs.taken == 2
    CHANGES[change](node)
    after = await runs.send(queue_id=2)
    assert runs.taken == 2, "it is checked again"
    if change == "write queues shrunk":
        assert "queueId[2] is illegal" in (after.remark or "")
    else:
        assert after.code == 0


NEVER_TAKEN: dict[str, dict[str, Any]] = {
    "retry topic": {"topic": "%RETRY%g"},
    "dead letters": {"topic": "%DLQ%g"},
    "system topic": {"topic": "SCHEDULE_TOPIC_XXXX"},
    "queue that the broker chooses": {"queue_id": -1},
    "delayed": {"properties": "DELAY\x011"},
    "sent to a time": {"properties": "TIMER_DELAY_MS\x0110000"},
    "priority": {"properties": "_SYS_MSG_PRIORITY_\x013"},
    "lite topic": {"properties": "__LITE_TOPIC\x01a"},
    "message of a parent topic": {"topic": "parent", "properties": "__LITE_TOPIC\x01a"},
    "half message": {"properties": "TRAN_MSG\x01true\x02PGROUP\x01p"},
    "signed": {"more": {"AccessKey": "a"}},
    "response in another encoding": {"more": {"acceptEncoding": "MSGPACK"}},
    "garbled number": {"more": {"f": "+0"}},
    "too long properties": {"properties": "x" * (SENT_PROPERTY_BYTES - BROKERS_OWN + 1)},
    "too large body": {"body": bytes(MAX_BODY_BYTES + 1)},
}


@pytest.mark.parametrize("never", NEVER_TAKEN)
async def test_a_send_that_needs_more_than_a_checked_queue_is_never_taken(node: Node, runs: Runs, never: str) -> None:
    node.broker.group_configs.put(GroupConfig("g"))
    put(node, "parent", message_type="LITE")
    await runs.send()
    for _ in range(3):
        await runs.send(**NEVER_TAKEN[never])
    assert runs.taken == 0
    for _ in range(2):  # another topic may be there now
        await runs.send()
    assert runs.taken > 0


@pytest.mark.parametrize("is_lite", [True, False])
async def test_batch_with_the_name_of_the_lite_topic_property_is_checked(node: Node, runs: Runs, is_lite: bool) -> None:
    await runs.send()
    await runs.send()
    entries = [(0, b"x", "a\x01b"), (0, b"__LITE_TOPIC\x01", "__LITE_TOPIC\x01a" if is_lite else "x__LITE_TOPIC\x01a")]
    found = await runs.send(encode_batch(entries), batch=True)
    assert (found.code == ResponseCode.MESSAGE_ILLEGAL, "lite topics" in (found.remark or "")) == (is_lite, is_lite)
    assert runs.taken == 1


async def test_sends_at_the_limits_are_taken(runs: Runs) -> None:
    await runs.send()
    longest = "x" * (SENT_PROPERTY_BYTES - BROKERS_OWN)
    entry = len(encode_batch([(0, b"", "")]))
    bodies = [
        encode_batch([(0, b"", "")] * BATCH_RUN_MESSAGES),
        encode_batch([(0, bytes(BATCH_RUN_BYTES - entry), "")]),
        encode_batch([(0, b"", longest)]),
    ]
    for body in bodies:
        assert (await runs.send(body, batch=True)).code == 0
    assert (await runs.send(properties=longest)).code == 0
    assert (await runs.send(bytes(MAX_BODY_BYTES))).code == 0
    assert runs.taken == 5
    for body in (
        encode_batch([(0, b"", "")] * (BATCH_RUN_MESSAGES + 1)),
        encode_batch([(0, bytes(BATCH_RUN_BYTES), "")]),
    ):
        assert (await runs.send(body, batch=True)).code == 0
    assert (await runs.send(encode_batch([(0, b"", longest + "x")]), batch=True)).code == ResponseCode.MESSAGE_ILLEGAL
    assert runs.taken == 5


async def in_one_read(wire: Wire, count: int, *, flag: int = 0, **fields: Any) -> list[int]:
    """Sends frames with one write; the numbers of those that are answered."""
    first = wire._opaque + 1
    wire._opaque += count
    frames = (Frame(310, first + number, header(**fields), b"x", flag) for number in range(count))
    wire.write(b"".join(map(encode, frames)))
    return list(range(first, first + count))


async def test_a_run_is_counted_by_histogram_and_statistics(node: Node, runs: Runs, wire: Wire) -> None:
    await runs.send()
    times = node.broker.request_times[310]
    before = sum(times.counts)
    for opaque in await in_one_read(wire, 20):
        assert (await wire.answer(opaque)).code == 0
    queue = node.broker.store.queues["t", 0]
    assert (runs.taken, sum(times.counts) - before, queue.next) == (20, 20, 21)
    size = sum(queue.entry(offset)[1] for offset in range(21))
    assert queue.put_bytes == size


async def test_one_way_sends_of_a_run_are_stored_and_not_answered(node: Node, runs: Runs, wire: Wire) -> None:
    await runs.send()
    await in_one_read(wire, 3, flag=2)
    assert int((await runs.send()).ext["queueOffset"]) == 4
    assert runs.taken == 4
    assert wire._answers == {}


async def test_a_held_pull_is_answered_by_a_run(node: Node, runs: Runs, wire: Wire, connect: Connect) -> None:
    await runs.send()
    reader = await connect(node.address)
    for offset in range(3):  # the group's first pull is a change, after which the queue is checked again
        held = reader.send(RequestCode.PULL_MESSAGE, pull("t", offset=offset + 1, flags=SUSPEND | SUBSCRIBED))
        await reader.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
        assert (await runs.send()).code == 0
        assert (await reader.answer(held)).code == 0
    assert runs.taken == 2


async def test_each_send_of_a_run_is_refused_while_the_disk_is_full(
    node: Node, runs: Runs, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runs.send()
    end = node.broker.store.end

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        for opaque in await in_one_read(wire, 10):
            answer = await wire.answer(opaque)
            assert (answer.code, "No space left" in (answer.remark or "")) == (ResponseCode.SERVICE_NOT_AVAILABLE, True)
    assert (runs.taken, node.broker.store.end, node.broker.store.queues["t", 0].next) == (10, end, 1)
    assert int((await runs.send()).ext["queueOffset"]) == 1


async def test_a_run_with_flush_sync_is_answered_after_the_sync(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    runs = Runs(node, wire)
    await runs.send()
    may_sync = threading.Event()
    sync = disk.sync

    def slow(descriptor: int) -> None:
        assert may_sync.wait(60)
        sync(descriptor)

    monkeypatch.setattr(disk, "sync", slow)
    opaques = await in_one_read(wire, 5)
    other = await connect(node.address)
    while runs.taken < 5:
        assert (await other.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    answered = asyncio.create_task(wire.answer(opaques[0]))
    assert (await other.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    assert not answered.done()
    may_sync.set()
    assert [(await answered).code, *[(await wire.answer(opaque)).code for opaque in opaques[1:]]] == [0] * 5


async def test_each_send_of_a_run_is_refused_after_a_failed_sync(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    runs = Runs(node, wire)
    await runs.send()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "sync", fail)
    for opaque in await in_one_read(wire, 3):
        answer = await wire.answer(opaque)
        assert (answer.code, "disk fails" in str(answer.remark)) == (ResponseCode.SERVICE_NOT_AVAILABLE, True)
        assert "full" not in str(answer.remark)
    assert runs.taken == 3


async def test_sends_of_an_account_on_a_proven_connection_are_taken_until_its_permissions_change(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wire, other = [await tls_wire(node, certificates, "orders-key") for _ in range(2)]
    assert await identified(wire) == 0
    wire.access_key = other.access_key = ""
    node.broker.topics.put(TopicConfig("orders", 4, 4), 0)
    runs, others = Runs(node, wire), Runs(node, other)
    for number in range(3):
        assert int((await runs.send(topic="orders")).ext["queueOffset"]) == number
    assert runs.taken == 2
    for _ in range(2):
        assert "No accessKey" in ((await others.send(topic="orders")).remark or "")
    file.rewrite([account("orders-key", topicPerms=["orders=SUB"])])
    assert "No default permission" in ((await runs.send(topic="orders")).remark or "")
    file.rewrite([one for one in ACCOUNTS if one["accessKey"] != "orders-key"])
    with pytest.raises(ConnectionResetError):
        await runs.send(topic="orders")
    assert runs.taken == 2
    await other.close()


async def test_an_account_does_not_profit_from_the_checks_of_another(
    nodes: Nodes, file: AccountsFile, certificates: Certificates
) -> None:
    node = await nodes.start(acl=file.acl, tls=Tls("permissive", certificates.files))
    wires = [await tls_wire(node, certificates, key) for key in ("orders-key", "nobody-key")]
    for wire in wires:
        assert await identified(wire) == 0
        wire.access_key = ""
    allowed, refused = [Runs(node, wire) for wire in wires]
    for _ in range(2):
        assert (await allowed.send(topic="orders")).code == 0
        assert "No default permission" in ((await refused.send(topic="orders")).remark or "")
    for wire in wires:
        await wire.close()


# ------------------------------------------------------------------------------
# Compiled and in Python: the same log, indexes and responses.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Pair]]:
    with asyncio.Runner() as runner:

        async def make(folder: Path) -> Pair:
            made = Pair(folder)
            for name in "tu":
                made.put_topic(TopicConfig(name, 2, 2))
            return made

        yield runner, runner.run(make(tmp_path_factory.mktemp("pair")))


NAMES = ("TAGS", "KEYS", "WAIT", "AWAIT", "DELAY", "TRAN_MSG", "_SYS_MSG_PRIORITY_", "__LITE_TOPIC", "a", "")
ITEMS = st.sampled_from(NAMES) | st.text(max_size=5)
TEXTS = st.lists(
    st.tuples(ITEMS, st.sampled_from(("\x01", "\x01", "")), st.text(max_size=8)).map("".join), max_size=5
).map("\x02".join)
SAFE_TEXTS = TEXTS.map(lambda text: text.encode(errors="replace").decode())
BODIES = st.binary(max_size=100) | st.builds(
    lambda part, count: part * count, st.binary(min_size=1, max_size=20), st.integers(6, 1000)
)
ENTRY = st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=100), SAFE_TEXTS)
SIZES_OF_LARGE_BATCHES = 40, 513, BATCH_TURN_MESSAGES, BATCH_TURN_MESSAGES + 1
LARGE_BATCHES = st.builds(lambda entry, count: [entry] * count, ENTRY, st.sampled_from(SIZES_OF_LARGE_BATCHES))
ENTRIES = st.integers(0, 9).flatmap(lambda number: st.lists(ENTRY, max_size=10) if number else LARGE_BATCHES)
SENT_TO = (*"tttttttttuuuu", "made", "%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "t\0", "x" * 130, "")
VALUES = st.sampled_from(("", "x", "+1", "01", "1_0", "é", "MSGPACK", str(2**63), "9" * 30, True, -1, 2**31, 2**63 - 1))
OTHER_KEYS = "firstId", "acceptEncoding", "AccessKey", "n", "zz", "topic", "b", "", "é"


PULLS = st.builds(
    lambda offset, count, flag: write(
        PullMessage("g", "t", 0, offset, count, SUBSCRIBED | flag, 0, 0, subscription="*")
    ),
    st.integers(0, 30),
    st.sampled_from((1, 32)),
    st.sampled_from((0, 1)),
)
TOPICS = st.builds(
    TopicConfig, st.sampled_from("tu"), st.integers(1, 4), st.integers(1, 4), st.sampled_from((6, 6, 4, 2))
)


@st.composite
def frames(draw: st.DrawFn, *, may_be_damaged: bool = True) -> bytes:
    """A send or a pull, which may have unexpected fields, and be malformed in one place."""
    code = draw(st.sampled_from((10, 310, 310, 320)))
    batch = draw(st.booleans())
    body = encode_batch(draw(ENTRIES)) if batch else draw(BODIES)
    ext = header(
        code,
        topic=draw(st.sampled_from(SENT_TO)),
        queue_id=draw(st.sampled_from((0, 0, 1, 2))),
        sys_flag=draw(st.sampled_from((0, 1, 0x30, 8))),
        born_timestamp=draw(st.integers(-(2**40), 2**62)),
        flag=draw(st.integers(-(2**31), 2**31)),
        properties=draw(SAFE_TEXTS),
        reconsume_times=draw(st.integers(0, 2**31)),
        batch=batch,
    )
    kind = draw(st.sampled_from(KINDS))
    opaque = draw(st.integers(-1, 2**31 - 1))
    if draw(st.integers(0, 3)) == 0:
        code, ext, body = 11, draw(PULLS), b""
    unexpected = draw(st.integers(0, 19))
    if unexpected == 1:
        del ext[draw(st.sampled_from(sorted(ext)))]
    elif unexpected in (2, 3):
        ext[draw(st.sampled_from(OTHER_KEYS if unexpected == 2 else sorted(ext)))] = draw(VALUES)
    flag = draw(st.sampled_from((*(0,) * 9, 1, 2, 2, 2, 3)))
    remark = draw(st.sampled_from((*(None,) * 9, "", "x")))
    language = draw(st.sampled_from((0, 9, 12)))
    data = encode(Frame(code, opaque, ext, body, flag, remark, language, serialize_type=kind))
    damage = draw(st.integers(0, 9)) if may_be_damaged else 9
    if damage > 2:
        return data
    if damage == 0:
        at = draw(st.integers(8, len(data) - 1))
        return data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]
    size = int.from_bytes(data[5:8], "big")
    at = draw(st.integers(8, 8 + size))
    head = data[8:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) : 8 + size]
    total = len(data) - size + len(head) - 4
    return total.to_bytes(4, "big") + data[4:5] + len(head).to_bytes(3, "big") + head + data[8 + size :]


@st.composite
def reads(draw: st.DrawFn) -> bytes:
    """Up to 20 frames, or up to 100 of which some are equal; half of the reads have malformed ones."""
    found = draw(st.lists(frames(may_be_damaged=draw(st.booleans())), min_size=1, max_size=20))
    count = draw(st.sampled_from((len(found), len(found), len(found), 21, 100)))
    return b"".join(found[number % len(found)] for number in range(count))


@given(
    data=reads(),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    topic=st.none() | TOPICS,
    deletes=st.integers(0, 9).map(lambda number: number == 0),
)
@settings(max_examples=examples(50))
def test_compiled_and_python_store_and_answer_the_same(
    pair: tuple[asyncio.Runner, Pair], data: bytes, cuts: list[float], topic: TopicConfig | None, deletes: bool
) -> None:
    runner, brokers = pair
    if topic is not None:
        brokers.put_topic(topic)
    if deletes:
        brokers.delete_topic("u")
    places = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    assert runner.run(brokers.difference([data[begin:end] for begin, end in pairwise(places)])) is None


LIMITS_OF_RUNS = (
    MAX_BODY_BYTES,
    SENT_PROPERTY_BYTES,
    BATCH_TURN_BYTES,
    BATCH_TURN_MESSAGES,
    1000,
    10,
    MAX_REQUEST_HEADER_BYTES,
)
PASSED: dict[bytes, tuple[Any, bytes]] = {
    b"\0t\0%d" % number: (SimpleNamespace(next=5), b"\x01t") for number in range(4)
}


@given(data=frames(), start=st.floats(0, 1), end=st.floats(0, 1), position=st.sampled_from((0, 2)))
def test_functions_decline_a_part_of_a_frame(data: bytes, start: float, end: float, position: int) -> None:
    data = data[int(start * len(data)) :][: int(end * len(data)) + 1]
    at = position and len(data) // position
    source = fast.PullSource(lambda offset, count: data[:16] + bytes(count * 20), None, 0, 1 << 60, 0, 1000, 32, False)
    key = fast.pull_key(data, at, MAX_REQUEST_HEADER_BYTES)
    served = fast.take_pulls(
        data, at, MAX_REQUEST_HEADER_BYTES, {key or b"": None}, lambda *_: source, lambda position: (0, len(data), 3),
        lambda descriptor, size, start: data[start : start + size], lambda part, before: 0,
        (array("Q", (0, len(data) // 2)), array("I", (0, 0)), len(data), 0), (0, 0, b""), (0, 1 << 20, 1000, 1000),
    )  # fmt: skip
    assert served is None or at < served.end <= len(data)
    texts = bytes(8), b"00" * 8, b"CLUSTER\x01c", b"r"
    taken = fast.take_sends(data, at, b"", PASSED, 0, 1, b"", lambda _: b"", bytes(20), texts, LIMITS_OF_RUNS)
    assert taken is None or at < taken.end <= len(data)


def test_pulls_of_one_broker_of_the_pair_are_repeated_by_the_module(pair: tuple[asyncio.Runner, Pair]) -> None:
    runner, brokers = pair
    brokers.put_topic(TopicConfig("v", 1, 1))
    before = [node.repeated for node in brokers.nodes]
    send = encode(Frame(310, 1, header(topic="v"), b"x"))
    one = write(PullMessage("g", "v", 0, 0, 32, SUBSCRIBED, 0, 0, subscription="*"))
    pulls = b"".join(encode(Frame(11, number, one)) for number in range(5))
    assert runner.run(brokers.difference([send, pulls, pulls])) is None
    counts = [node.repeated - count for node, count in zip(brokers.nodes, before, strict=True)]
    assert counts[0] > 0 == counts[1]


def test_only_one_broker_of_the_pair_uses_the_module(pair: tuple[asyncio.Runner, Pair]) -> None:
    runner, brokers = pair
    brokers.put_topic(TopicConfig("t", 2, 2))
    before = [node.taken for node in brokers.nodes]
    send = encode(Frame(310, 1, header(), b"x"))
    assert runner.run(brokers.difference([send, send * 3])) is None
    assert [node.taken - count for node, count in zip(brokers.nodes, before, strict=True)] in ([3, 0], [4, 0])
