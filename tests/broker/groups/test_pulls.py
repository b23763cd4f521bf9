"""PULL_MESSAGE: every check in its order, every status, and long polling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from rocketlet.broker.config import (
    BULK_PULL_BYTES,
    BULK_PULL_MESSAGES,
    CHECKED_PULL_BYTES,
    LIMITS,
    MAX_CHECKED_PULLS,
    MAX_RUNNING_INFO_BYTES,
    PULL_BYTES,
    PULL_MESSAGES,
)
from rocketlet.broker.groups.group import ConsumerGroup, GroupQueue
from rocketlet.broker.groups.members import ALONE
from rocketlet.broker.groups.pulling import CheckedPull, Pull
from rocketlet.broker.remoting.kept_pulls import KeptPulls
from rocketlet.broker.sessions.session import Session
from rocketlet.broker.store.files import Unreadable
from rocketlet.protocol import bodies, fast
from rocketlet.protocol.admin_bodies import encode_running_info
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, finish
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, Language, RequestCode, ResponseCode
from rocketlet.protocol.fast import IS_COMPILED
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Frame, encode
from rocketlet.protocol.group_bodies import (
    TOPIC_RECREATED,
    LockRequest,
    decode_extents,
    encode_lock_request,
    encode_topics,
)
from rocketlet.protocol.headers import PullMessage, write
from rocketlet.protocol.message import decode_records, encode_batch
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.accounts import ACCOUNTS, ADMIN, AccountsFile, Wired
from ...support.requests import SUBSCRIBED, SUSPEND, bodies_of, commit, heartbeat, join, lock, popped, pull, send


@pytest.fixture
async def still(nodes: Nodes) -> Node:
    """A broker whose clock stands: no held pull ends because its time is up."""
    return await nodes.start(clock=MovableClock(stands=True))


async def test_a_broker_that_may_not_be_read_refuses_first(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(permission=2)
    answer = await (await connect(node.address)).call(RequestCode.PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.NO_PERMISSION


async def test_an_unknown_group_comes_before_an_unknown_topic(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(auto_create_groups=False)
    answer = await (await connect(node.address)).call(RequestCode.PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "subscription group [g] does not exist" in (answer.remark or "")


async def test_a_group_that_may_not_consume_is_refused(wire: Wire) -> None:
    group = bodies.encode_group(GroupConfig("g", consume_enable=False))
    assert (await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)).code == 0
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("nowhere"))).code == ResponseCode.NO_PERMISSION


async def test_an_unknown_topic_a_closed_one_and_a_wrong_queue_are_refused(wire: Wire) -> None:
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("nowhere"))).code == ResponseCode.TOPIC_NOT_EXIST
    await create_topic(wire, "closed", perm=2)
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull("closed", queue=99))).code == ResponseCode.NO_PERMISSION
    await create_topic(wire, "t")
    for queue in (-1, 4):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue))
        assert (answer.code, "illegal" in (answer.remark or "")) == (1, True)


async def test_a_bad_expression_in_the_request_is_23(wire: Wire) -> None:
    await create_topic(wire, "t")
    assert (
        await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="||"))
    ).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


async def test_without_the_subscription_bit_the_heartbeat_decides(wire: Wire) -> None:
    await create_topic(wire, "t")
    await create_topic(wire, "other")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))
    assert (answer.code, "group info not exist" in (answer.remark or "")) == (24, True)
    await heartbeat(wire, topic="other")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))
    assert (answer.code, "subscription not exist" in (answer.remark or "")) == (24, True)
    await heartbeat(wire)
    assert (
        await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    ).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=9))).code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("version", "expression", "size", "code"),
    [
        (11, "*", MAX_RUNNING_INFO_BYTES, ResponseCode.SUCCESS),
        (11, "*", MAX_RUNNING_INFO_BYTES + 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        (10, "*", 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        (11, "A", 1, ResponseCode.SUBSCRIPTION_NOT_LATEST),
    ],
)
async def test_a_member_whose_heartbeat_was_lost_is_asked_what_it_subscribes_to(
    wire: Wire, version: int, expression: str, size: int, code: int
) -> None:
    """Java's client gives a heartbeat up that is due while another is under way, and sends none for the next 30 s. Its pulls
    name the version that the lost one had. Another expression must come by a heartbeat: messages would be skipped."""
    await create_topic(wire, "t")
    await send(wire)
    await heartbeat(wire)
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    asked = await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert (asked.ext["consumerGroup"], asked.ext["clientId"]) == ("g", "c1")
    said = {"topic": "t", "subString": expression, "expressionType": "TAG", "subVersion": version}
    wire.write_answer(asked, encode_running_info({}, [{**said, "topic": "other"}, said], {}).ljust(size))
    assert (await wire.answer(waits)).code == code


async def test_broadcasting_can_be_forbidden(wire: Wire) -> None:
    await create_topic(wire, "t")
    group = bodies.encode_group(GroupConfig("g", consume_broadcast_enable=False))
    await wire.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    await heartbeat(wire, message_model="BROADCASTING")
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(flags=0))).code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize(("kind", "expression", "code"), [("SQL92", "a +", 23), ("CLASS", "a", 1)])
async def test_a_filter_that_the_broker_does_not_understand_is_refused(
    wire: Wire, kind: str, expression: str, code: int
) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription=expression, expression_type=kind))
    assert answer.code == code
    assert expression in (answer.remark or "") or kind in (answer.remark or "")


async def test_a_sql_filter_lets_through_what_matches_and_moves_past_the_rest(wire: Wire) -> None:
    await create_topic(wire, "t")
    for number in range(1000):
        await send(wire, b"%d" % number, properties=f"a\x01{number}\x02TAGS\x01x")
    filtered: dict[str, Any] = {"subscription": "a >= 990 AND TAGS = 'x'", "expression_type": "SQL92"}
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(**filtered))
    assert (answer.code, answer.remark, answer.ext["nextBeginOffset"]) == (20, "NO_MATCHED_MESSAGE", "800")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=800, **filtered))
    assert [record.body for record in decode_records(answer.body)] == [b"%d" % number for number in range(990, 1000)]
    assert answer.ext["nextBeginOffset"] == "1000"


async def test_a_held_pull_with_a_sql_filter_is_answered_by_a_match(still: Node, connect: Connect) -> None:
    wire = await connect(still.address)
    await create_topic(wire, "t")
    opaque = wire.send(
        RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, subscription="a = 1", expression_type="SQL92")
    )
    await send(await connect(still.address), b"yes", properties="a\x011")
    answer = await wire.answer(opaque)
    assert [record.body for record in decode_records(answer.body)] == [b"yes"]


async def test_offsets_are_answered_as_apache_answers_them(wire: Wire) -> None:
    await create_topic(wire, "t")

    async def status(offset: int) -> tuple[int, str | None, int]:
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset))
        assert {"suggestWhichBrokerId", "minOffset", "maxOffset"} < answer.ext.keys()
        return answer.code, answer.remark, int(answer.ext["nextBeginOffset"])

    assert await status(0) == (19, "NO_MESSAGE_IN_QUEUE", 0)
    assert await status(7) == (21, "NO_MESSAGE_IN_QUEUE", 0)
    for _ in range(3):
        await send(wire)
    assert await status(1) == (0, "FOUND", 3)
    assert await status(3) == (19, "OFFSET_OVERFLOW_ONE", 3)
    assert await status(4) == (21, "OFFSET_OVERFLOW_BADLY", 3)
    assert await status(-1) == (21, "OFFSET_TOO_SMALL", 0)


async def test_tags_are_filtered_by_hash_and_the_offset_moves_on(wire: Wire) -> None:
    await create_topic(wire, "t")
    for tag in ("A", "B", "", "A"):
        await send(wire, tag.encode() or b"-", tag=tag)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="A || C"))
    assert [record.body for record in decode_records(answer.body)] == [b"A", b"A"]
    assert int(answer.ext["nextBeginOffset"]) == 4
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(subscription="C"))
    assert (answer.code, answer.remark, int(answer.ext["nextBeginOffset"])) == (20, "NO_MATCHED_MESSAGE", 4)


async def test_a_pull_takes_as_many_as_asked_and_256_kib_at_most(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(6):
        await send(wire, b"x" * 100_000)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull())
    assert int(answer.ext["nextBeginOffset"]) == 2
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(max_msg_nums=1))
    assert int(answer.ext["nextBeginOffset"]) == 1
    await send(wire, b"x" * 4_000_000)
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=6))
    assert len(answer.body) > 4_000_000


@pytest.mark.parametrize("serialize_type", [JSON, ROCKETMQ, MSGPACK])
async def test_a_held_pull_is_answered_by_the_arriving_message_in_its_encoding(
    still: Node, connect: Connect, serialize_type: int
) -> None:
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    opaque = waiting.send(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND), serialize_type=serialize_type)
    assert (await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})).code == 0
    await send(wire, b"here")
    answer = await waiting.answer(opaque)
    assert (answer.code, answer.serialize_type) == (0, serialize_type)
    assert [record.body for record in decode_records(answer.body)] == [b"here"]


async def test_a_held_pull_sleeps_through_messages_of_other_tags(still: Node, connect: Connect) -> None:
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    opaque = waiting.send(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, subscription="A"))
    await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    await send(wire, b"not this", tag="B")
    await send(wire, b"this", tag="A")
    answer = await waiting.answer(opaque)
    assert [record.body for record in decode_records(answer.body)] == [b"this"]
    assert int(answer.ext["nextBeginOffset"]) == 2


async def test_messages_that_a_held_pull_passes_are_progress_and_lower_commits_are_no_reset(
    still: Node, connect: Connect
) -> None:
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    await heartbeat(waiting, expression="A")
    await send(wire, b"for it", tag="A")
    flags = SUBSCRIBED | SUSPEND
    assert (await waiting.call(RequestCode.PULL_MESSAGE, pull(flags=flags, subscription="A"))).code == 0
    waiting.send(RequestCode.PULL_MESSAGE, pull(offset=1, flags=flags, subscription="A"))

    def progress() -> tuple[int | None, int, int]:
        lag = finish(still.broker.progress.lag("g", "t")).messages
        return still.broker.offsets.get("g", "t", 0), lag, still.broker.offsets.rewinds("g", "t")

    await commit(waiting, 0)
    for _ in range(2):
        await send(wire, b"for others", tag="B")
    assert progress() == (0, 3, 0), "the first message may still be handled"
    await commit(waiting, 1)
    assert progress() == (3, 0, 0)
    await send(wire, b"for others", tag="B")
    await eventually(lambda: progress() == (4, 0, 0))
    await commit(waiting, 1)
    assert progress() == (4, 0, 0), "the member does not know yet that it continues at 4"
    still.broker.offsets.allow_lower_offset("g", "t", 0)
    await commit(waiting, 2)
    assert progress() == (2, 2, 1), "the member commits what an administrator has set"
    await send(wire, b"for others", tag="B")
    await eventually(lambda: progress() == (5, 0, 1))
    await commit(waiting, 0)
    assert progress() == (0, 5, 2), "a lower offset than its own is a reset"
    await commit(waiting, 1)
    await commit(wire, 2)
    assert progress() == (2, 3, 3), "an administrator's offset is a reset"
    await commit(waiting, 1)
    await waiting.close()
    await eventually(lambda: not still.broker.groups.members_of("g"))
    assert progress() == (5, 0, 3)


async def test_a_held_pull_ends_when_its_time_is_up(wire: Wire) -> None:
    await create_topic(wire, "t")
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND, suspend_timeout_millis=30))
    assert answer.code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize("expression", ["*", "B"])
async def test_a_held_pull_of_a_topic_that_is_deleted_returns_immediately(
    still: Node, connect: Connect, expression: str
) -> None:
    """Held on, it would sleep through the messages of a topic that is recreated."""
    wire, waiting = await connect(still.address), await connect(still.address)
    await create_topic(wire, "t")
    await send(wire, b"seen", tag="A", queue=0)
    held = pull(flags=SUBSCRIBED | SUSPEND, offset=1, subscription=expression)
    opaque = waiting.send(RequestCode.PULL_MESSAGE, held)
    await waiting.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"})
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert (await waiting.answer(opaque)).code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_commits_its_offset_if_the_bit_says_so(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(3):
        await send(wire)
    for offset in (2, 9):  # the second is beyond the end
        await wire.call(RequestCode.PULL_MESSAGE, pull(flags=SUBSCRIBED | 0x1, commit_offset=offset))
    query = {"consumerGroup": "g", "topic": "t", "queueId": "0"}
    assert int((await wire.call(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext["offset"]) == 2


async def test_foreign_clients_get_32_messages_at_most_as_from_apache(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    for _ in range(50):
        await send(wire)
    for language, count in ((Language.JAVA, 32), (Language.GO, 32), (Language.PYTHON, 50)):
        answer = await wire.call(RequestCode.PULL_MESSAGE, pull(max_msg_nums=50), language=language)
        assert len(list(decode_records(answer.body))) == count


async def batch(wire: Wire, count: int, body: bytes) -> None:
    fields = {"a": "g", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0, "i": "", "j": 0, "m": "true"}
    answer = await wire.call(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch([(0, body, "")] * count))
    assert answer.code == 0


async def test_a_pull_gives_more_to_whoever_says_how_much_it_takes(wire: Wire) -> None:
    await create_topic(wire, "t")
    for _ in range(5):
        await batch(wire, 1000, b"-")

    async def got(**fields: Any) -> tuple[int, int]:
        answer = await wire.call(
            RequestCode.PULL_MESSAGE, pull(max_msg_nums=100_000, **fields), language=Language.PYTHON
        )
        return sum(1 for _ in decode_records(answer.body)), len(answer.body)

    assert (await got())[0] == PULL_MESSAGES
    assert (await got(max_msg_bytes=1 << 40))[0] == BULK_PULL_MESSAGES
    assert (await got(max_msg_bytes=1))[0] == 1
    for _ in range(3):
        await batch(wire, 1000, b"x" * 1000)
    for limit, given in (
        (PULL_BYTES, {}),
        (BULK_PULL_BYTES, {"max_msg_bytes": 1 << 40}),
        (5000, {"max_msg_bytes": 5000}),
    ):
        count, size = await got(offset=5000, **given)
        assert size <= limit < size + size // count


async def test_a_lite_pull_is_a_pull(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    held = wire.send(RequestCode.LITE_PULL_MESSAGE, pull(flags=SUBSCRIBED | SUSPEND))
    await send(wire, b"first")
    answer = await wire.answer(held)
    assert [record.body for record in decode_records(answer.body)] == [b"first"]
    answer = await wire.call(RequestCode.LITE_PULL_MESSAGE, pull("nowhere"))
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_that_names_an_identity_reads_no_other_topic(wire: Wire) -> None:
    await create_topic(wire, "t")
    await send(wire)
    extents = await wire.call(RequestCode.GET_QUEUE_OFFSETS, body=encode_topics(["t"]))
    identity = decode_extents(extents.body)["t"].identity
    assert (await wire.call(RequestCode.PULL_MESSAGE, pull(topic_identity=identity))).code == ResponseCode.SUCCESS
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic_identity="another"))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, TOPIC_RECREATED)


async def test_a_pull_that_had_to_wait_for_its_subscription_gets_an_error_if_that_cannot_be_read(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    await send(wire)
    await heartbeat(wire)

    def unreadable(*_: object) -> None:
        raise Unreadable("the disk does not answer")

    monkeypatch.setattr(node.broker.store, "fetch", unreadable)
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    await heartbeat(wire, version=11)
    answer = await wire.answer(waits)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "the disk does not answer")


@pytest.mark.still
async def test_nothing_is_kept_for_who_hung_up_while_a_pull_waited(node: Node, connect: Connect) -> None:
    member, gone = await connect(node.address), await connect(node.address)
    await create_topic(member, "t")
    await heartbeat(member)
    gone.send(RequestCode.PULL_MESSAGE, pull(flags=SUSPEND, sub_version=11))
    await bodies_of(gone)  # so the pull before it is waiting
    await gone.close()
    await eventually(lambda: len(node.server.connections) == 1 and not node.broker.turns.waiting)
    await heartbeat(member, version=11)
    node.clock.advance(1)
    assert node.broker.groups.queue("g", "t", 0).reader is None
    assert node.broker.held_pulls.count == 0


# A pull that was checked stays checked until something changes that its checks depend on.


Change = Callable[[Node, Wire, Wire], Awaitable[Any]]
compiled = pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled module: make dev")


class Checks:
    """Counts the pulls that are checked. The group of the tests is there: the first pull would make it, which is a change."""

    def __init__(self, node: Node) -> None:
        self.count = 0
        node.broker.group_configs.ensure("g")
        self._pull = node.broker.pulling.pull
        node.broker.pulling.pull = self._counted  # type: ignore[method-assign]

    def _counted(self, pull: Pull, request_membership: Callable[[], None] | None = None, attempt: int = 1) -> Any:
        self.count += 1
        return self._pull(pull, request_membership, attempt)


async def asked(wire: Wire, offset: int = 0, kind: int = JSON, group: str = "g", **fields: Any) -> list[bytes]:
    fields["consumer_group"] = group
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset, **fields), serialize_type=kind)
    return [record.body for record in decode_records(answer.body)] if answer.code == 0 else [b"%d" % answer.code]


async def filled(wire: Wire, topic: str = "t", count: int = 4) -> None:
    await create_topic(wire, topic, 2)
    for number in range(count):
        await send(wire, b"%d" % number, topic=topic)


@compiled
@pytest.mark.parametrize("kind", [JSON, ROCKETMQ, MSGPACK])
async def test_the_next_pulls_of_a_queue_are_not_checked_again(node: Node, wire: Wire, kind: int) -> None:
    await filled(wire)
    checks = Checks(node)
    assert [await asked(wire, offset, kind) for offset in (1, 2, 0)] == [
        [b"1", b"2", b"3"],
        [b"2", b"3"],
        [b"0", b"1", b"2", b"3"],
    ]
    assert checks.count == 1


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ, MSGPACK])
@pytest.mark.parametrize("flags", [SUBSCRIBED, SUBSCRIBED | PULL_COMMIT_OFFSET])
async def test_pulls_of_one_read_get_the_responses_that_each_gets_alone(
    node: Node, wire: Wire, kind: int, flags: int
) -> None:
    await create_topic(wire, "t", 2)
    for size in (10, 100_000, 10, 200_000, 200_000, 10):
        await send(wire, bytes(size), topic="t")
    checks = Checks(node)
    asked = [
        pull(offset=offset, commit_offset=commit_offset, flags=flags, max_msg_nums=limit)
        for offset, commit_offset, limit in (
            *((0, 0, 2), (2, 1, 2), (4, 4, 2), (1, 2, 2), (6, 5, 2), (0, 0, 2), (0, 0, 1), (1, 0, 1)),
            *((7, 6, 2), (3, 9, 2), (2, 1, 2), (5, 3, 2)),
        )
    ]
    code = RequestCode.PULL_MESSAGE
    alone = [await wire.call(code, ext, serialize_type=kind) for ext in asked]
    committed, checked = node.broker.offsets.get("g", "t", 0), checks.count
    assert (committed, checked) == (3 if flags & PULL_COMMIT_OFFSET else None, 5 if IS_COMPILED else len(asked))
    frames = [Frame(code, 1000 + number, ext, serialize_type=kind) for number, ext in enumerate(asked)]
    wire.write(b"".join(encode(frame._replace(language=int(Language.JAVA))) for frame in frames))
    together = [await wire.answer(frame.opaque) for frame in frames]
    assert [answer._replace(opaque=0) for answer in together] == [answer._replace(opaque=0) for answer in alone]
    assert node.broker.offsets.get("g", "t", 0) == committed


async def test_thousand_pulls_of_one_write_are_answered_and_a_call_serves_up_to_64(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(wire, count=1)
    counts: list[int] = []
    take = node.broker.store.take_pulls

    def counted(*args: Any) -> Any:
        served = take(*args)
        counts.append(served.served if served is not None else 0)
        return served

    monkeypatch.setattr(node.broker.store, "take_pulls", counted)
    for _ in range(2):
        assert await asked(wire, 0, MSGPACK, max_msg_nums=1) == [b"0"]
    frames = [
        Frame(RequestCode.PULL_MESSAGE, 1000 + number, pull(max_msg_nums=1), serialize_type=MSGPACK)
        for number in range(1000)
    ]
    wire.write(b"".join(encode(frame._replace(language=int(Language.JAVA))) for frame in frames))
    for frame in frames:
        answer = await wire.answer(frame.opaque)
        assert [record.body for record in decode_records(answer.body)] == [b"0"]
    assert max(counts, default=0) <= 64
    assert sum(counts) > 64 or not IS_COMPILED


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ, MSGPACK])
async def test_repeated_pulls_return_messages_of_the_queue_as_it_is_now(node: Node, wire: Wire, kind: int) -> None:
    await filled(wire)
    assert [await asked(wire, offset, kind, max_msg_nums=2) for offset in (0, 2)] == [[b"0", b"1"], [b"2", b"3"]]
    await send(wire, b"4", topic="t")
    await send(wire, b"5", topic="t")
    assert [await asked(wire, offset, kind, max_msg_nums=2) for offset in (3, 5)] == [[b"3", b"4"], [b"5"]]
    assert (await wire.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    await filled(wire, count=1)
    await send(wire, b"new", topic="t")
    for _ in range(2):
        assert await asked(wire, 0, kind, max_msg_nums=2) == [b"0", b"new"]


async def test_a_pull_that_differs_in_more_than_its_offset_is_checked(node: Node, wire: Wire) -> None:
    await filled(wire)
    checks = Checks(node)
    assert await asked(wire) == [b"0", b"1", b"2", b"3"]
    assert await asked(wire, max_msg_nums=2) == [b"0", b"1"]
    assert await asked(wire, flags=0) == [b"%d" % ResponseCode.SUBSCRIPTION_NOT_EXIST]
    assert await asked(wire, topic="other") == [b"%d" % ResponseCode.TOPIC_NOT_EXIST]
    assert checks.count == 4


async def test_a_foreign_members_pulls_commit_on_the_way(node: Node, wire: Wire) -> None:
    await filled(wire)
    await heartbeat(wire)
    group = node.broker.groups.obtain("g")
    node.clock.advance(LIMITS.drained_wait_s)
    await eventually(lambda: not node.broker.groups.obtain("g").is_moving(next(iter(group.members))))
    checks = Checks(node)
    for offset in range(4):
        got = await asked(wire, offset, flags=SUSPEND | 1, sub_version=10, commit_offset=offset)
        assert got == [b"%d" % number for number in range(offset, 4)]
    assert (checks.count, node.broker.offsets.get("g", "t", 0)) == (1 if IS_COMPILED else 4, 3)
    # Behind what the group has committed, it may have to continue from there: that is checked.
    await commit(wire, 3)
    checks.count = 0
    await asked(wire, 1, flags=SUSPEND | 1, sub_version=10, commit_offset=1)
    assert checks.count == 1


@compiled
async def test_a_filter_by_tags_is_kept_and_one_by_properties_is_not(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    for number in range(4):
        await send(wire, b"%d" % number, tag="odd" if number % 2 else "even")
    checks = Checks(node)
    for _ in range(2):
        assert await asked(wire, subscription="odd", expression_type="TAG") == [b"1", b"3"]
    assert await asked(wire, 3, subscription="odd", expression_type="TAG") == [b"3"]
    assert checks.count == 1
    for _ in range(2):
        assert await asked(wire, subscription="TAGS = 'even'", expression_type="SQL92") == [b"0", b"2"]
    assert checks.count == 3


async def test_the_end_of_the_queue_another_reader_and_a_begin_that_moved_are_seen(
    node: Node, wire: Wire, connect: Connect
) -> None:
    await filled(wire)
    checks = Checks(node)
    await asked(wire)
    assert await asked(wire, 4) == [b"%d" % ResponseCode.PULL_NOT_FOUND]
    other = await connect(node.address)
    await asked(other)
    await asked(wire)
    assert checks.count == 4
    node.broker.store.queues["t", 0].begin = 2
    assert await asked(wire, 1) == [b"%d" % ResponseCode.PULL_OFFSET_MOVED]
    assert await asked(wire, 2) == [b"2", b"3"]


async def _topic_closed(node: Node, wire: Wire, other: Wire) -> None:
    await create_topic(other, "t", 2, perm=2)


async def _topic_deleted(node: Node, wire: Wire, other: Wire) -> None:
    assert (await other.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0


async def _another_topic_made(node: Node, wire: Wire, other: Wire) -> None:
    node.broker.topics.put(TopicConfig("another", 1, 1), 0)


async def _group_closed(node: Node, wire: Wire, other: Wire) -> None:
    body = bodies.encode_group(GroupConfig("g", consume_enable=False))
    assert (await other.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0


async def _group_deleted(node: Node, wire: Wire, other: Wire) -> None:
    assert (await other.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})).code == 0


async def _member_joined(node: Node, wire: Wire, other: Wire) -> None:
    await join(other, "c2", strategy="AVG")


async def _member_left(node: Node, wire: Wire, other: Wire) -> None:
    ext = {"clientID": "c1", "consumerGroup": "g"}
    assert (await wire.call(RequestCode.UNREGISTER_CLIENT, ext)).code == 0


async def _subscribed_to_something_else(node: Node, wire: Wire, other: Wire) -> None:
    await heartbeat(wire, expression="some", version=11, strategy="AVG")


async def _said_a_later_version(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.obtain("g")
    session = next(iter(group.members))
    group.foreign[session] = group.members[session]
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    question = await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    said = {"topic": "t", "subString": "*", "expressionType": "TAG", "subVersion": 11}
    wire.write_answer(question, encode_running_info({}, [said], {}))
    await wire.answer(waits)


async def _unlocked(node: Node, wire: Wire, other: Wire) -> None:
    await lock(wire, "c1", code=RequestCode.UNLOCK_BATCH_MQ)


async def _lease_expired(node: Node, wire: Wire, other: Wire) -> None:
    node.broker.locks.end("g", "t", 0)


async def _drained(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.obtain("g")
    node.broker.draining.begin_change(group)


async def _bound(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.obtain("g")
    group.is_uneven = True
    node.broker.draining.allotment.put(group, {})


async def _told_of_itself_alone(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.obtain("g")
    session = next(iter(group.members))
    node.broker.draining.allotment.issue(node.broker.groups.obtain("g"), session, "c1", ALONE)
    assert node.broker.groups.obtain("g").is_moving(session)


async def _settings_changed(node: Node, wire: Wire, other: Wire) -> None:
    assert (await other.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2")).code == 0


CHANGES: dict[str, Change] = {
    "a topic is closed": _topic_closed,
    "a topic is deleted": _topic_deleted,
    "another topic is made": _another_topic_made,
    "a group is closed": _group_closed,
    "a group is deleted": _group_deleted,
    "a member joins": _member_joined,
    "a member leaves": _member_left,
    "a member subscribes to something else": _subscribed_to_something_else,
    "a member says a later version": _said_a_later_version,
    "the queue is unlocked": _unlocked,
    "a lease expires": _lease_expired,
    "a drain begins": _drained,
    "members are bound": _bound,
    "a member gets a list of itself alone": _told_of_itself_alone,
    "settings change": _settings_changed,
}


@compiled
@pytest.mark.parametrize("change", CHANGES)
async def test_next_pull_is_checked_after_a_change(node: Node, wire: Wire, connect: Connect, change: str) -> None:
    await filled(wire)
    await heartbeat(wire, strategy="AVG")
    await lock(wire, "c1")
    checks, other = Checks(node), await connect(node.address)
    for _ in range(3):
        await asked(wire, flags=0)
    assert checks.count == 1
    await CHANGES[change](node, wire, other)
    changed = checks.count
    await asked(wire, flags=0)
    assert checks.count > changed


async def _another_queue_locked(node: Node, wire: Wire, other: Wire) -> None:
    body = encode_lock_request(LockRequest("c1", "g", (Queue("t", "broker-a", 1),), handover=True))
    assert (await wire.call(RequestCode.LOCK_BATCH_MQ, body=body)).code == 0


async def _member_of_another_group_joined(node: Node, wire: Wire, other: Wire) -> None:
    await heartbeat(other, group="another")
    await asked(wire, flags=0)  # its settings and its retry topic are new
    await heartbeat(other, group="another", expression="some", version=11)


async def _popped_by_another_group(node: Node, wire: Wire, other: Wire) -> None:
    await popped(other, consumerGroup="another")
    await asked(wire, flags=0)  # its settings are new
    await popped(other, consumerGroup="another")


OTHERS_CHANGES: dict[str, Change] = {
    "another queue is locked": _another_queue_locked,
    "a member joins another group": _member_of_another_group_joined,
    "another group pops the topic": _popped_by_another_group,
}


@compiled
@pytest.mark.parametrize("change", OTHERS_CHANGES)
async def test_next_pull_is_not_checked_after_a_change_of_others(
    node: Node, wire: Wire, connect: Connect, change: str
) -> None:
    await filled(wire)
    await heartbeat(wire, strategy="AVG")
    await lock(wire, "c1")
    checks, other = Checks(node), await connect(node.address)
    for _ in range(3):
        await asked(wire, flags=0)
    await OTHERS_CHANGES[change](node, wire, other)
    changed = checks.count
    for _ in range(2):
        await asked(wire, flags=0)
    assert checks.count == changed


@compiled
async def test_pull_that_the_module_does_not_repeat_gives_its_queue_to_no_other_pull(node: Node, wire: Wire) -> None:
    for topic in ("a", "b"):
        await create_topic(wire, topic)
        await send(wire, topic.encode(), topic=topic)

    async def pulled(code: int, topic: str, offset: int) -> list[bytes]:
        header = pull(topic, offset=offset) | {"consumerGroup": f"of-{topic}"}
        return [record.body for record in decode_records((await wire.call(code, header)).body)]

    for _ in range(2):
        assert await pulled(RequestCode.LITE_PULL_MESSAGE, "a", 0) == [b"a"]
        assert await pulled(RequestCode.PULL_MESSAGE, "b", 1) == []
    assert await pulled(RequestCode.PULL_MESSAGE, "b", 0) == [b"b"]


async def test_each_pull_is_checked_while_clients_of_its_group_pop_its_topic(node: Node, wire: Wire) -> None:
    await filled(wire)
    checks = Checks(node)
    await asked(wire)
    await popped(wire)
    for _ in range(2):
        await asked(wire)
    assert checks.count == 3


async def test_accounts_that_change_raise_the_number(guarded: Node, file: AccountsFile, wired: Wired) -> None:
    admin, readers = await wired(ADMIN), await wired("readers-key")
    await create_topic(admin, "orders", 1)
    await send(admin, b"0", topic="orders")
    for _ in range(2):
        assert await asked(readers, topic="orders", group="shipping") == [b"0"]
    generation = guarded.broker.generation.number
    file.rewrite([account for account in ACCOUNTS if account["accessKey"] != "readers-key"])
    assert guarded.broker.generation.number > generation
    assert await asked(readers, topic="orders", group="shipping") == [b"%d" % ResponseCode.SYSTEM_ERROR]


def test_an_account_that_identifies_itself_raises_the_number(file: AccountsFile) -> None:
    policy, generation = file.acl.file, file.acl.file.generation.number
    assert file.acl.identify(cast("Session", Peer()), policy.policy.accounts[ADMIN], lambda signer: True)
    assert policy.generation.number > generation


class Peer:
    """A session, as far as it is charged and judged."""

    authentication: object = None
    peer = "192.0.2.1:40000"

    def __init__(self) -> None:
        self.charged_bytes = 0

    def charge(self, size: int) -> None:
        self.charged_bytes += size


@compiled
def test_connection_keeps_charged_pulls_of_as_many_queues_as_the_limit_says() -> None:
    pulls, session = KeptPulls(), cast("Session", peer := Peer())
    checked = CheckedPull(
        1, 0, GroupQueue(ConsumerGroup("g"), ("t", 0)), SUBSCRIBED, 32, None, None, "t@g", is_recorded=False
    )

    def key_of(frame: Frame) -> bytes:
        found = fast.pull_key(encode(frame), 0, 1000)
        assert found is not None
        return found

    frames = [asking(queue_id=number) for number in range(MAX_CHECKED_PULLS + 1)]
    frames.append(frames[-1]._replace(remark="another header of the same queue"))
    keys = [key_of(frame) for frame in frames]
    for frame in frames:
        pulls.keep(session, frame, checked)
        pulls.name(session, encode(frame), 0, frame)
        pulls.name(session, encode(frames[0]), 0, frames[0])  # was not kept
    kept = [*keys[1:-2], keys[-1]]
    assert list(pulls.named) == kept, "the oldest makes room, and a queue has one pull"
    assert peer.charged_bytes == MAX_CHECKED_PULLS * CHECKED_PULL_BYTES + sum(map(len, kept))
    for frame in frames:
        pulls.keep(session, frame, None)
    assert (pulls.named, peer.charged_bytes) == ({}, 0)


def asking(**fields: Any) -> Frame:
    header = PullMessage("g", "t", 0, 0, 32, SUBSCRIBED, 0, 0)._replace(**fields)
    return Frame(RequestCode.PULL_MESSAGE, 1, write(header), language=int(Language.JAVA))
