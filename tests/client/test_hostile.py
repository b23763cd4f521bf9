"""Servers that answer what none should, and files that are none: errors of the client, within its limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import orjson
import pytest
from rocketlet.broker.cluster import Link
from rocketlet.broker.tls import Tls
from rocketlet.client import (
    Access,
    AnswerUnreadable,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    Producer,
    RequestTimeout,
    SharedConsumer,
    Sql,
)
from rocketlet.client.admin.admin_client import AdminClient
from rocketlet.client.config import MAX_OFFSETS_BYTES, MAX_TLS_FILE_BYTES, MAX_TRIED_AT_ONCE, ClientLimits, PullLimits
from rocketlet.client.consuming.handling import AdminRequests
from rocketlet.client.consuming.queues import ProcessQueue, Puller
from rocketlet.client.member.membership import Broadcast
from rocketlet.client.member.offsets import begin_offset
from rocketlet.client.message import Lease
from rocketlet.client.sending.accumulator import sent_result
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection, Connections
from rocketlet.protocol.bodies import BodyError, QueueData, Route, decode_route, encode_route
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, RequestCode, ResponseCode
from rocketlet.protocol.config import MAX_ROUTE_QUEUES, MAX_TOPIC_QUEUES
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.message import encode_host, encode_record, offset_in, split_records
from rocketlet.protocol.names import Queue, parse_subscription, tag_code

from ..client.conftest import tasks_named
from ..conftest import Node, eventually
from ..support.certificates import Certificates
from ..support.handlers import Inbox, fill
from ..support.turns import passed

QUEUE = Queue("t", "b", 0)
HOST = encode_host("127.0.0.1", 1)
RECORD = encode_record(0, 0, 0, 0, 0, 0, HOST, 0, HOST, 0, 0, b"body", b"\x01t", b"")


# Routes


@pytest.mark.parametrize(
    "address", ["127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:0", "x", "", ":", "\0:1", "a" * 300 + ":1"]
)
async def test_an_address_that_is_none(address: str) -> None:
    connections = Connections(Access(), Mock(), Mock())
    with pytest.raises(ConnectionFailed):
        await connections.get(address)
    with pytest.raises((ValueError, OSError)):  # a broker that reports a group to others checks these
        await Link(address, Tls(), None).request(Frame(1))


def test_a_route_has_this_many_queues_at_most() -> None:
    brokers = MAX_ROUTE_QUEUES // MAX_TOPIC_QUEUES
    most = [QueueData(f"b{number}", MAX_TOPIC_QUEUES, 1, 6) for number in range(brokers)]
    assert len(decode_route(encode_route(Route(tuple(most), ()))).queues) == brokers
    with pytest.raises(BodyError, match="maximum"):
        decode_route(encode_route(Route((*most, QueueData("c", 0, 1, 6)), ())))


# Records that cannot be read

NOT_UTF_8 = b"TAGS\x01T\x02k\x01\xd6\xd0\x02"


def store_raw(node: Node, properties: bytes) -> None:
    """Stores a message in queue 0 of t with these bytes as its properties, as Apache's brokers do with those of a batch."""
    appender = node.broker.appender
    with appender.batch() as now_ms:
        queue = node.broker.store.queue("t", 0)
        code = tag_code(properties.decode(errors="replace"))
        appender.stage(queue, b"raw", properties, code, 0, 0, now_ms, node.broker.store.store_host)


@pytest.mark.parametrize("expression", ["*", "T"])
@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_properties_that_are_not_utf_8_are_delivered_with_replaced_characters(
    node: Node, one_queue: None, kind: Any, expression: str
) -> None:
    store_raw(node, NOT_UTF_8)
    inbox = Inbox()
    async with kind(node.address, "g", {"t": expression}, inbox, start="first"):
        await fill(node, 1, tag="T")
        await eventually(lambda: len(inbox.messages) == 2)
    raw = next(message for message in inbox.messages if message.body == b"raw")
    assert (raw.tag, raw.properties["k"]) == ("T", "\ufffd\ufffd")
    async with AdminClient(node.address) as admin:
        found = [piece async for piece in admin.read(Queue("t", "broker-a", 0), 0, 2, expression=expression)]
        assert [message.body for message in found[0]] == [b"raw", b"0"]


def damaged(record: bytes) -> bytes:
    """The record with properties of another size than it has room for."""
    size_at = record.rindex(b"\x01t") + 2
    return record[:size_at] + b"\x7f\xff" + record[size_at + 2 :]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_size": 5}, {"orderly": True}, {"orderly": True, "batch_size": 5}])
async def test_a_record_that_cannot_be_read_is_a_dead_letter_or_skipped_and_stops_no_other(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_known: bool
) -> None:
    """is_known: the broker finds the message at the place that its record names."""
    await fill(node, 5)

    def split(data: bytes) -> list[bytes]:
        records = split_records(data)
        for number, record in enumerate(records):
            if offset_in(record) == 2:
                place = record[28:36] if is_known else b"\x7f" * 8
                records[number] = damaged(record[:28] + place + record[36:])
        return records

    monkeypatch.setattr("rocketlet.client.consuming.queues.split_records", split)
    bodies: list[bytes] = []

    async def handle(argument: Message | list[Message]) -> None:
        got = [message.body for message in (argument if isinstance(argument, list) else [argument])]
        bodies.extend(got)

    async with Consumer(node.address, "g", "t", handle, start="first", **options):
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 5)
    assert sorted(bodies) == [b"0", b"1", b"3", b"4"]
    dead = node.broker.store.queues.get(("%DLQ%g", 0))
    assert (dead.next if dead is not None else 0) == is_known


# Pulls that lead nowhere


class Pulls:
    """A queue's puller, and the broker that answers it."""

    def __init__(self, *, commits: bool = False, **limits: Any) -> None:
        self.asked = 0
        self.committed: list[int | None] = []  # by each pull
        self.queue = ProcessQueue(QUEUE, 0, Lease(1 if commits else 0))
        self._answered: Callable[[Frame | Exception], None] | None = None
        cluster = Mock(connected=lambda name: self, limits=ClientLimits(**{"pull_busy_delay_s": 3600.0, **limits}))
        self.puller = Puller(
            cluster,
            "g",
            {"t": parse_subscription("t", "*", version=1)},
            PullLimits(),
            span_counts=False,
            commits=commits,
            on_messages=lambda queue, messages, offset: cast("None", queue.add(messages, offset, 1)),
            on_moved=self._moved,
        )
        self.puller.pull(self.queue)

    def running_s(self) -> float:
        return 0.0

    def call(
        self, code: int, ext: Any, body: bytes, answered: Callable[[Frame | Exception], None], due_s: float
    ) -> None:
        self.asked += 1
        self.committed.append(ext["commitOffset"] if ext["sysFlag"] & PULL_COMMIT_OFFSET else None)
        self._answered = answered

    def _moved(self, queue: ProcessQueue, offset: int) -> None:
        queue.move(offset)
        self.puller.pull(queue)

    def fail(self) -> None:
        assert self._answered is not None
        self._answered(RequestTimeout("the broker does not respond"))

    def answer(self, code: int, next_offset: int, remark: str | None = None) -> int:
        """How many pulls there were then."""
        assert self._answered is not None
        answered, self._answered = self._answered, None
        ext = {"nextBeginOffset": str(next_offset), "minOffset": "0", "maxOffset": "9", "suggestWhichBrokerId": "0"}
        answered(Frame(code, ext=ext, remark=remark))
        return self.asked


@pytest.mark.parametrize("code", [ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY])
async def test_a_broker_that_never_holds_a_pull_is_not_asked_without_an_end(code: int) -> None:
    pulls = Pulls()
    assert pulls.answer(code, 0) == 2  # a pull may be released immediately
    assert pulls.answer(code, 5) == 3  # or lead on, behind what a filter does not take
    assert pulls.answer(code, 9) == 4
    assert pulls.answer(code, 9) == 4
    assert pulls.queue.pull.is_pending


async def test_a_broker_that_moves_a_pull_on_and_has_nothing_there_is_not_asked_without_an_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pulls = Pulls()
    assert pulls.answer(ResponseCode.PULL_OFFSET_MOVED, 7) == 2
    assert pulls.answer(ResponseCode.PULL_OFFSET_MOVED, 5) == 2
    assert pulls.queue.pull.is_pending and pulls.queue.next_offset == 7
    assert ["pull_refused" in record.getMessage() for record in caplog.records] == [True]


async def test_refusal_that_repeats_is_logged_once_and_then_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    pulls = Pulls(pull_error_delay_s=0.0)

    async def refuse(remark: str) -> list[Any]:
        asked = pulls.answer(ResponseCode.SUBSCRIPTION_PARSE_FAILED, 0, remark)
        await eventually(lambda: pulls.asked > asked)
        return [cast("Any", record).fields for record in caplog.records]

    for _ in range(3):
        (first,) = await refuse("a wrong filter")
    assert (first["code"], first["remark"]) == ("SUBSCRIPTION_PARSE_FAILED (23)", "a wrong filter")
    assert first["hint"] == "correct the filter '*'; no message of the topic is delivered until then"
    assert len(await refuse("another")) == 2
    await refuse("another")
    pulls.puller._limits = ClientLimits(pull_error_delay_s=0.0, log_repeat_s=0.0)
    assert (await refuse("another"))[-1]["repeated"] == 1


async def test_response_to_a_pull_from_before_a_seek_is_ignored() -> None:
    pulls = Pulls()
    pulls.queue.seek(7)
    assert pulls.answer(ResponseCode.PULL_NOT_FOUND, 3) == 1
    assert pulls.queue.next_offset == 7


async def test_offset_that_a_failed_pull_carried_is_committed_by_the_next_one() -> None:
    pulls = Pulls(commits=True, pull_error_delay_s=0.0)
    pulls.answer(ResponseCode.PULL_NOT_FOUND, 5)
    pulls.fail()
    await eventually(lambda: pulls.asked == 3)
    assert pulls.committed == [None, 5, 5], "it is unknown whether the broker has stored it"


# Administrative requests of brokers


async def test_a_broker_that_asks_and_does_not_read_is_left(caplog: pytest.LogCaptureFixture) -> None:
    size = len(encode(Frame(0, 1, {}, bytes(1000), 1)))
    asked: list[Frame] = []

    def answer(connection: Connection, frame: Frame) -> None:
        asked.append(frame)
        connection.respond(frame, body=bytes(1000))

    def frames(count: int) -> bytes:
        return encode(Frame(RequestCode.GET_CONSUMER_RUNNING_INFO, 1)) * count

    connection = Connection("127.0.0.1:1", Access(), answer, Mock(), ClientLimits(max_unread_bytes=1000 + 10 * size))
    transport = Mock(get_write_buffer_size=lambda: 1000, is_closing=lambda: False)
    connection.connection_made(transport)
    connection.data_received(frames(10))
    connection.write_now()
    connection.data_received(frames(10))
    assert not transport.abort.called
    connection.data_received(frames(5))
    assert transport.abort.called
    assert len(asked) == 21, "what came behind is not checked"
    assert ["connection_closed_unread" in record.getMessage() for record in caplog.records] == [True]


async def test_only_this_many_messages_are_tried_in_one_turn() -> None:
    asked, spawned, connection = Mock(group="g"), list[Any](), Mock()
    cluster = ClusterView("127.0.0.1:1")
    AdminRequests(cluster, asked, spawned.append)
    frame = Frame(RequestCode.CONSUME_MESSAGE_DIRECTLY, 1, {"consumerGroup": "g"}, RECORD)
    for _ in range(MAX_TRIED_AT_ONCE + 1):
        cluster._answers[frame.code](connection, frame)
    assert len(spawned) == MAX_TRIED_AT_ONCE
    assert connection.respond.call_args.args[1] == ResponseCode.SYSTEM_BUSY
    for work in spawned:
        work.close()


async def test_only_this_much_is_checked_in_one_turn() -> None:
    may_end, checked = asyncio.Event(), list[str]()

    async def check(message: Any) -> bool:
        checked.append(message.topic)
        await may_end.wait()
        return True

    cluster = ClusterView("127.0.0.1:1", limits=ClientLimits(max_checked_bytes=2 * len(RECORD)))
    ProducerTransactions(cluster, "g", check)
    ext = {"tranStateTableOffset": "0", "commitLogOffset": "0", "transactionId": "x"}
    frame = Frame(RequestCode.CHECK_TRANSACTION_STATE, 1, ext, RECORD)
    for count in (2, 4):
        for _ in range(5):
            cluster._answers[frame.code](Mock(), frame)
        may_end.set()
        while tasks_named("transaction check"):
            await asyncio.sleep(0)
        await passed()
        assert len(checked) == count


# Files


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, max(MAX_OFFSETS_BYTES, MAX_TLS_FILE_BYTES) + 1)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def keeping(offsets_file: Path) -> Broadcast:
    return Broadcast(ClusterView("127.0.0.1:1"), "g", {}, Mock(), start="first", offsets_file=offsets_file)


@pytest.mark.parametrize("make", [pipe, huge, link_to_itself, Path.mkdir])
async def test_what_is_no_file_or_a_huge_one_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "file")
    with pytest.raises(ConfigError, match="offsets_file"):
        keeping(tmp_path / "file")
    for name in ("ca_file", "cert_file"):
        with pytest.raises(ConfigError, match="TLS files"):
            Access(tls=True, **{name: str(tmp_path / "file")}).check_files()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[" * 100_000, "[1]", '[["t", "b", 0]]', '[["t", "b", -1, 0]]', '[["t", "b", 2147483648, 0]]',
        '[["t", "b", 0, 9223372036854775808]]', '[["t", "b", 0, 1e400]]', '[["t", 1, 0, 0]]', '"' + "x" * 10_000 + '"',
    ],
)  # fmt: skip
async def test_offsets_that_cannot_be_are_named_in_short(tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").write_text(text)
    with pytest.raises(ConfigError, match="is damaged") as caught:
        keeping(tmp_path / "offsets")
    assert len(str(caught.value)) < 600


async def test_offsets_are_written_through_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "offsets"
    link.symlink_to(file)
    await keeping(link).commit({QUEUE: 5})
    assert link.is_symlink()
    assert orjson.loads(link.read_bytes()) == orjson.loads(file.read_bytes()) == [[*QUEUE, 5]]


def test_an_encrypted_key_asks_nobody(certificates: Certificates) -> None:
    """OpenSSL would ask on the terminal, and the program would stand."""
    from cryptography.hazmat.primitives import serialization as kinds

    path = certificates.folder / "server.key"
    key = kinds.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.BestAvailableEncryption(b"secret"))
    )
    access = Access(tls=True, cert_file=str(certificates.files.certificate), key_file=str(path))
    with pytest.raises(ConfigError, match="openssl pkey"):
        access.check_files()


# Answers that no broker of ours gives: what a client raises for them is one of its own errors.


GOOD = {"msgId": "0" * 32, "queueId": "0", "queueOffset": "1"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"queueId": "x"},
        {"queueId": "None"},
        {"queueOffset": ""},
        {"queueOffset": "[]"},
        {"queueId": None},
        {"msgId": None},
        {"queueOffset": None},
    ],
)
async def test_a_send_whose_answer_cannot_be_read(node: Node, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    ext = {name: text for name, text in {**GOOD, **wrong}.items() if text is not None}
    with pytest.raises(AnswerUnreadable):
        sent_result(Frame(0, ext=ext), "key", Queue("t", "b", 0))
    _spoil(monkeypatch, ext)
    async with Producer(node.address, batching=False) as producer:
        with pytest.raises(AnswerUnreadable, match="the response to a send"):
            await producer.send("t", b"x")


@pytest.mark.parametrize("ext", [{}, {"offset": "x"}, {"offset": str(1 << 63)}])
@pytest.mark.parametrize("start", ["first", "last", 1])
async def test_an_offset_that_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch, start: Any, ext: dict[str, str]
) -> None:
    cluster = ClusterView(node.address)
    async with Producer(node.address) as producer:
        await producer.send("t", b"x")
    connection = await cluster.connection(node.address)
    _spoil(monkeypatch, ext)
    with pytest.raises(AnswerUnreadable):
        await begin_offset(connection, Queue("t", "broker-a", 0), start)
    await cluster.close()


def _spoil(monkeypatch: pytest.MonkeyPatch, ext: dict[str, str]) -> None:
    """All answers that have no body have these fields."""
    whole = Connection.call

    def call(connection: Connection, code: int, asked: Any, body: bytes, answered: Any, *rest: Any) -> None:
        def spoilt(answer: Frame | Exception) -> None:
            if isinstance(answer, Frame) and not answer.body:
                answer = answer._replace(ext=ext)
            answered(answer)

        whole(connection, code, asked, body, spoilt, *rest)

    monkeypatch.setattr(Connection, "call", call)


# Texts that UTF-8 cannot encode, such as names of files and arguments of a command that are not UTF-8


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.topic("a\udc80"),
        lambda admin: admin.delete_topic("a\udc80"),
        lambda admin: admin.consumed_by("a\udc80"),
        lambda admin: admin.group("a\udc80"),
        lambda admin: admin.delete_group("a\udc80"),
        lambda admin: admin.delete_account("a\udc80"),
        lambda admin: admin.put_white_addresses(["a\udc80"]),
        lambda admin: admin.messages_with_key("t", "a\udc80"),
    ],
)
async def test_administration_refuses_a_text_that_utf_8_cannot_encode(
    node: Node, four_queues: None, call: Callable[[AdminClient], Awaitable[object]]
) -> None:
    async with AdminClient(node.address) as admin:
        with pytest.raises(ConfigError, match="half a surrogate pair"):
            await call(admin)


@pytest.mark.parametrize("expression", ["a\udc80", Sql("a = '\udc80'")])
@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
def test_members_refuse_an_expression_that_utf_8_cannot_encode(kind: type[Any], expression: str) -> None:
    with pytest.raises(ConfigError, match=r"subscriptions: t: the expression contains .* half a surrogate pair"):
        kind("127.0.0.1:1", "g", {"t": expression}, print)
