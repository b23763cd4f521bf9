"""A pull that was checked stays checked until something changes that its checks depend on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from rocketlet.broker.config import CHECKED_PULL_BYTES, MAX_CHECKED_PULLS
from rocketlet.broker.groups.group import ConsumerGroup, GroupQueue
from rocketlet.broker.groups.members import ALONE
from rocketlet.broker.groups.pulling import CheckedPull, Pull
from rocketlet.broker.remoting.connection import KeptPulls
from rocketlet.broker.sessions import Session
from rocketlet.protocol import bodies, fast
from rocketlet.protocol.admin_bodies import encode_running_info
from rocketlet.protocol.bodies import GroupConfig, TopicConfig
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, Language, RequestCode, ResponseCode
from rocketlet.protocol.fast import IS_COMPILED
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, encode
from rocketlet.protocol.group_bodies import LockRequest, encode_lock_request
from rocketlet.protocol.headers import PullMessage, write
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue

from ...conftest import Connect, Node, Wire, create_topic, eventually
from ...support.accounts import ACCOUNTS, ADMIN, AccountsFile, Wired
from ...support.requests import SUBSCRIBED, SUSPEND, commit, heartbeat, join, lock, popped, pull, send

Change = Callable[[Node, Wire, Wire], Awaitable[Any]]


class Checks:
    """Counts the pulls that are checked. The group of the tests is there: the first pull would make it, which is a change."""

    def __init__(self, node: Node) -> None:
        self.count = 0
        node.broker.group_configs.ensure("g")
        self._pull = node.broker.pulling.pull
        node.broker.pulling.pull = self._counted  # type: ignore[method-assign]

    def _counted(self, pull: Pull, ask_who: Callable[[], None] | None = None, attempt: int = 1) -> Any:
        self.count += 1
        return self._pull(pull, ask_who, attempt)


async def asked(wire: Wire, offset: int = 0, kind: int = JSON, group: str = "g", **fields: Any) -> list[bytes]:
    fields["consumer_group"] = group
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset, **fields), serialize_type=kind)
    return [record.body for record in decode_records(answer.body)] if answer.code == 0 else [b"%d" % answer.code]


async def filled(wire: Wire, topic: str = "t", count: int = 4) -> None:
    await create_topic(wire, topic, 2)
    for number in range(count):
        await send(wire, b"%d" % number, topic=topic)


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
    assert (committed, checked) == (3 if flags & PULL_COMMIT_OFFSET else None, 5)
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
    group = node.broker.groups.get("g")
    assert group is not None
    await eventually(lambda: not node.broker.groups.obtain("g").is_moving(next(iter(group.members))))
    checks = Checks(node)
    for offset in range(4):
        got = await asked(wire, offset, flags=SUSPEND | 1, sub_version=10, commit_offset=offset)
        assert got == [b"%d" % number for number in range(offset, 4)]
    assert (checks.count, node.broker.offsets.get("g", "t", 0)) == (1, 3)
    # Behind what the group has committed, it may have to continue from there: that is checked.
    await commit(wire, 3)
    await asked(wire, 1, flags=SUSPEND | 1, sub_version=10, commit_offset=1)
    assert checks.count == 2


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
    assert checks.count == 3 + 1, "the first one waited for its filter, and was checked again"


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
    group = node.broker.groups.get("g")
    assert group is not None
    session = next(iter(group.members))
    group.foreign[session] = group.members[session]
    waits = wire.send(RequestCode.PULL_MESSAGE, pull(flags=0, sub_version=11))
    question = await wire.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    said = {"topic": "t", "subString": "*", "expressionType": "TAG", "subVersion": 11}
    wire.write_answer(question, encode_running_info({}, [said], {}))
    await wire.answer(waits)


async def _locked(node: Node, wire: Wire, other: Wire) -> None:
    body = encode_lock_request(LockRequest("c1", "g", (Queue("t", "broker-a", 1),), handover=True))
    assert (await wire.call(RequestCode.LOCK_BATCH_MQ, body=body)).code == 0


async def _unlocked(node: Node, wire: Wire, other: Wire) -> None:
    await lock(wire, "c1", code=RequestCode.UNLOCK_BATCH_MQ)


async def _lease_expired(node: Node, wire: Wire, other: Wire) -> None:
    node.broker.locks.end("g", "t", 0)


async def _drained(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.get("g")
    assert group is not None
    node.broker.draining.begin_change(group)


async def _bound(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.get("g")
    assert group is not None
    group.is_uneven = True
    node.broker.draining.allotment.put(group, {})


async def _told_of_itself_alone(node: Node, wire: Wire, other: Wire) -> None:
    group = node.broker.groups.get("g")
    assert group is not None
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
    "a queue is locked": _locked,
    "a queue is unlocked": _unlocked,
    "a lease expires": _lease_expired,
    "a drain begins": _drained,
    "members are bound": _bound,
    "a member gets a list of itself alone": _told_of_itself_alone,
    "settings change": _settings_changed,
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_raises_the_number_and_the_next_pull_is_checked(
    node: Node, wire: Wire, connect: Connect, change: str
) -> None:
    await filled(wire)
    await heartbeat(wire, strategy="AVG")
    await lock(wire, "c1")
    checks, other = Checks(node), await connect(node.address)
    for _ in range(3):
        await asked(wire, flags=0)
    before, generation = checks.count, node.broker.generation.number
    assert before == 1
    await CHANGES[change](node, wire, other)
    assert node.broker.generation.number > generation
    changed = checks.count
    await asked(wire, flags=0)
    assert checks.count > changed


async def test_as_long_as_anybody_pops_each_pull_is_checked(node: Node, wire: Wire) -> None:
    await filled(wire)
    checks = Checks(node)
    await asked(wire)
    await popped(wire, consumerGroup="another")
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

    known: object = None
    peer = "192.0.2.1:40000"

    def __init__(self) -> None:
        self.charged_bytes = 0

    def charge(self, size: int) -> None:
        self.charged_bytes += size


def test_a_connection_keeps_the_pulls_of_as_many_queues_as_the_limit_says() -> None:
    pulls, session = KeptPulls(), cast("Session", peer := Peer())
    frames = [asking(queue_id=number) for number in range(MAX_CHECKED_PULLS + 1)]
    checked = CheckedPull(
        1, GroupQueue(ConsumerGroup("g"), ("t", 0)), SUBSCRIBED, 32, None, None, "t@g", is_recorded=False
    )
    for frame in frames[:-1]:
        pulls.keep(session, frame, checked)
    assert all(pulls.like(frame) == (checked, 0, 0) for frame in frames[:-1])
    of_one = CHECKED_PULL_BYTES + sum(len(name) for name in frames[0].ext if name not in VARYING) + len("gt")
    assert peer.charged_bytes == MAX_CHECKED_PULLS * of_one
    pulls.keep(session, frames[-1], checked)
    assert pulls.like(frames[0]) is None, "the oldest makes room"
    assert all(pulls.like(frame) == (checked, 0, 0) for frame in frames[1:])
    assert peer.charged_bytes == MAX_CHECKED_PULLS * of_one
    for frame in frames:
        assert pulls.like(frame._replace(language=int(Language.GO))) is None
        assert pulls.like(frame._replace(serialize_type=ROCKETMQ)) is None
        pulls.keep(session, frame, None)
    assert peer.charged_bytes == 0


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled module: make dev")
def test_connection_keeps_one_charged_name_for_each_queue_when_headers_differ() -> None:
    pulls, session = KeptPulls(), cast("Session", peer := Peer())
    checked = CheckedPull(
        1, GroupQueue(ConsumerGroup("g"), ("t", 0)), SUBSCRIBED, 32, None, None, "t@g", is_recorded=False
    )
    frame, other = asking(), asking(queue_id=1)
    pulls.keep(session, frame, checked)
    of_one = peer.charged_bytes
    for number in range(3):
        pulls.keep(session, other, checked)  # so that the next pull may get a name
        again = frame._replace(remark=f"remark {number}")
        data = encode(again)
        pulls.name(session, data, 0, again)
        key = fast.pull_key(data, 0, 1000)
        assert key is not None
        assert pulls.named == {key: checked}
        assert peer.charged_bytes == 2 * of_one + len(key)
    for item in (frame, other):
        pulls.keep(session, item, None)
    assert (pulls.named, peer.charged_bytes) == ({}, 0)


VARYING = ("queueOffset", "commitOffset")


def asking(**fields: Any) -> Frame:
    header = PullMessage("g", "t", 0, 0, 32, SUBSCRIBED, 0, 0)._replace(**fields)
    return Frame(RequestCode.PULL_MESSAGE, 1, write(header), language=int(Language.JAVA))


def changed(frame: Frame, **fields: ExtValue) -> Frame:
    return frame._replace(ext={**frame.ext, **fields})


def test_a_pull_is_like_another_if_all_but_its_offsets_and_signature_is_the_same() -> None:
    pulls, session = KeptPulls(), cast("Session", Peer())
    checked = CheckedPull(
        1, GroupQueue(ConsumerGroup("g"), ("t", 0)), SUBSCRIBED, 32, None, None, "t@g", is_recorded=False
    )
    pulls.keep(session, changed(asking(), Signature="s1", extra="e"), checked)
    again = changed(asking(queue_offset=7, commit_offset=5), Signature="s2", extra="e")
    assert pulls.like(again) == (checked, 7, 5)
    assert again.ext["queueOffset"] == 7, "the frame stays as it is: it may have to be checked"
    others: list[dict[str, ExtValue]] = [
        {"extra": "f"}, {"another": "e"}, {"sysFlag": 0}, {"maxMsgNums": 33}, {"queueId": 1}, {"subVersion": 1},
        {"subscription": "*"}, {"suspendTimeoutMillis": 1}, {"queueOffset": "x"}, {"queueOffset": 1 << 63},
        {"commitOffset": -(1 << 63) - 1},
    ]  # fmt: skip
    assert [pulls.like(changed(again, **fields)) for fields in others] == [None] * len(others)
    for name in again.ext:
        if name != "Signature":
            ext = {key: value for key, value in again.ext.items() if key != name}
            assert pulls.like(again._replace(ext=ext)) is None
