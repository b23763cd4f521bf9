from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import (
    DEAD_LETTER_RETRY_S,
    LIMITS,
    MAX_IDLE_LITE,
    PERSIST_INTERVAL_S,
    POOL_IDLE_S,
    RENEWAL_STEPS_S,
    STANDSTILL_S,
    BrokerConfig,
    Limits,
)
from rocketlet.broker.pops.dead_letters import DeadLetterWriter
from rocketlet.broker.pops.deliveries import Delivery, JournalKey
from rocketlet.broker.pops.journal import encode_ack, encode_base, encode_definition, encode_pop, replay
from rocketlet.broker.pops.lite_subscriptions import LiteSync
from rocketlet.broker.pops.pool import QueueDeliveries
from rocketlet.broker.pops.requests import AckStatus, PopRequest, PopResult, Why
from rocketlet.broker.store import disk
from rocketlet.protocol.bodies import GroupConfig, TopicConfig, finish
from rocketlet.protocol.group_bodies import LiteAction, LiteOffset, OffsetPolicy
from rocketlet.protocol.headers import SendMessage
from rocketlet.protocol.message import decode_record
from rocketlet.protocol.names import Subscription
from rocketlet.protocol.properties import LITE_TOPIC, find
from rocketlet.testing.clock import MovableClock
from structlog.testing import capture_logs

from .world import HOST, FakeSession, Received, World, bodies, client_of, handles


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data")


def test_messages_are_in_one_client_s_hands_and_gone_when_acknowledged(world: World) -> None:
    for number in range(4):
        world.send(f"m{number}", queue=number % 2)
    first = world.receive(3)
    assert sorted(bodies(first)) == ["m0", "m1", "m2"] or len(first.messages) == 3
    assert {message.attempt for message in first.messages} == {1}
    second = world.receive(client="d")
    assert len(second.messages) == 1
    assert world.receive().why is Why.NOTHING_NEW
    assert set(world.ack(*handles(first), *handles(second))) == {AckStatus.DONE}
    assert {number.lag for number in world.state.pools.numbers("g", "t").values()} == {0}
    assert [world.offsets.get("g", "t", queue) for queue in (0, 1)] == [2, 2]


def test_one_that_is_not_acknowledged_is_redelivered_to_the_millisecond(world: World) -> None:
    world.send("m")
    first = world.receive(invisible_ms=10_000)
    got = world.wait(wait_ms=20_000)
    world.advance(9.999)
    assert not got
    world.advance(0.001)
    assert bodies(got[0]) == ["m"]
    assert got[0].messages[0].attempt == 2
    assert got[0].messages[0].handle != first.messages[0].handle
    assert world.ack(*handles(first)) == [AckStatus.REDELIVERED]
    assert world.ack(*handles(got[0])) == [AckStatus.DONE]
    assert world.ack(*handles(got[0])) == [AckStatus.DONE]


def test_a_message_is_put_back_when_its_receive_cannot_be_answered(world: World) -> None:
    def respond(result: PopResult) -> None:
        raise ConnectionError

    world.receive()
    with capture_logs() as logs:
        world.begin(PopRequest("g", "t", client_of("c"), 32, 60_000, 20_000), respond)
        world.send("m")
        world.turn()
    assert [item["event"] for item in logs] == ["receive_not_answered"]
    received = world.receive(client="d")
    assert bodies(received) == ["m"]
    assert received.messages[0].attempt == 1, "the attempt does not count"


def test_a_receive_waits_for_a_message_and_each_message_wakes_one(world: World) -> None:
    waits = [world.wait(client=f"c{number}", invisible_ms=60_000) for number in range(3)]
    world.send("a", queue=1)
    assert [bodies(got[0]) if got else None for got in waits] == [["a"], None, None]
    world.send("b", queue=0)
    world.advance(20)
    assert [got[0].why for got in waits] == [Why.FOUND, Why.FOUND, Why.NOTHING_NEW]


def test_a_nack_is_redelivered_at_its_time_and_immediately_with_none(world: World) -> None:
    world.send("m")
    handle = handles(world.receive())[0]
    got = world.wait()
    assert world.state.change("g", "t", handle, 3000).outcome is AckStatus.DONE
    world.advance(2.999)
    assert not got
    world.advance(0.001)
    again = world.wait()
    world.state.change("g", "t", handles(got[0])[0], 0)
    assert [message.attempt for message in again[0].messages] == [3]


def test_a_client_that_lost_a_message_learns_it_though_another_has_finished_it(world: World) -> None:
    """A renewal of such a message succeeded, so its client took it for its own."""
    world.send("m")
    (lost,) = handles(world.receive(invisible_ms=1000))
    world.advance(1)
    again = world.receive(client="d")
    world.ack(*handles(again))
    for invisible_ms in (30_000, 0):
        assert world.state.change("g", "t", lost, invisible_ms).outcome is AckStatus.FINISHED
    assert world.ack(lost) == [AckStatus.DONE], "it is done, whoever did it"
    assert world.receive().why is Why.NOTHING_NEW


def test_a_handle_stays_the_same_when_its_time_is_changed(world: World) -> None:
    world.send("m")
    handle = handles(world.receive(invisible_ms=1000))[0]
    changed = world.state.change("g", "t", handle, 60_000)
    assert changed.handle == handle
    world.advance(59)
    assert world.ack(handle) == [AckStatus.DONE]


def test_an_acknowledgement_that_is_late_counts_until_somebody_else_has_the_message(world: World) -> None:
    world.send("m")
    received = world.receive(invisible_ms=1000)
    world.advance(2)
    assert world.ack(*handles(received)) == [AckStatus.LATE]
    assert world.receive().why is Why.NOTHING_NEW


def test_an_answer_that_was_not_taken_is_there_immediately_and_counts_as_no_try(world: World) -> None:
    world.send("m")
    received = world.receive()
    got = world.wait()
    world.state.put_back("g", received.messages)
    world.turn()
    assert [message.attempt for message in got[0].messages] == [1]


def test_a_thousand_receives_whose_client_takes_none_of_their_answers_are_ended_one_by_one(world: World) -> None:
    def not_taken(received: PopResult) -> None:
        ended.append(received.why)
        world.state.put_back("g", received.messages)

    ended: list[Why] = []
    for _ in range(1000):
        world.begin(PopRequest("g", "t", client_of("gone"), 32, 10_000, 20_000), not_taken)
    world.send("m")
    world.turn()
    assert ended == [Why.FOUND] * 1000
    assert [message.attempt for message in world.receive().messages] == [1]


def test_a_message_that_fails_too_often_becomes_a_dead_letter_with_the_reason(world: World) -> None:
    world.group("g", retry_max_times=2)
    world.send("m", UNIQ_KEY="id")
    for attempt in (1, 2, 3):
        received = world.receive(invisible_ms=1000)
        assert [message.attempt for message in received.messages] == [attempt]
        world.advance(1)
    assert world.receive().why is Why.NOTHING_NEW
    (dead,) = world.receive(group="undertaker", topic="%DLQ%g").messages
    assert b"DLQ_ORIGIN_TOPIC\x01t" in dead.record
    assert b"DLQ_ORIGIN_MESSAGE_ID\x01id" in dead.record
    assert b"DLQ_REASON\x01tried 3 times; no client acknowledged it in time" in dead.record
    assert world.offsets.get("g", "t", 0) == 1


def test_a_reason_with_the_marks_of_properties_writes_none(world: World) -> None:
    world.send("m")
    (handle,) = handles(world.receive())
    world.state.to_dead_letters("g", "t", handle, "no\x02TAGS\x01forged", lambda outcomes: None)
    world.turn()
    (dead,) = world.receive(group="undertaker", topic="%DLQ%g").messages
    assert find(decode_record(dead.record).properties, "TAGS") is None


def test_a_dead_letter_that_a_client_asks_for_twice_is_one(world: World) -> None:
    world.send("m")
    handle = handles(world.receive())[0]
    got: list[AckStatus] = []
    for _ in range(2):
        world.state.to_dead_letters("g", "t", handle, "no", got.extend)
    world.turn()
    world.state.to_dead_letters("g", "t", handle, "no", got.extend)
    world.turn()
    assert got == [AckStatus.DONE] * 3
    assert len(world.receive(group="undertaker", topic="%DLQ%g").messages) == 1


def test_one_message_that_fails_loses_no_other_of_its_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.group("g", retry_max_times=0)
    for number in range(5):
        world.send(f"m{number}")
    dead_letter, broken = DeadLetterWriter.dead_letter, {2}

    def failing(writer: DeadLetterWriter, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        if delivery.offset in broken:
            raise ValueError("a value that nobody thought of")
        dead_letter(writer, deliveries, delivery, reason)

    monkeypatch.setattr(DeadLetterWriter, "dead_letter", failing)
    world.receive(invisible_ms=10_000)
    world.advance(10)
    assert world.state.pools.unfinished("g") == 1
    assert bodies(world.receive(group="undertaker", topic="%DLQ%g")) == ["m0", "m1", "m3", "m4"]
    assert "a value that nobody thought of" in world.state.unstored_dead_letters.texts()[0]
    broken.clear()
    world.advance(DEAD_LETTER_RETRY_S)
    assert world.state.pools.unfinished("g") == 0
    assert bodies(world.receive(group="undertaker", topic="%DLQ%g")) == ["m2"]


def test_record_of_an_undefined_queue_sets_no_other_record_aside() -> None:
    defined = encode_definition(1, JournalKey("i", "g", "t", 0)) + encode_base(1, 5, 0)
    popped = encode_pop(1, 7, 10, 20, [Delivery(5), Delivery(6)])
    undefined = encode_ack(2, [Delivery(0)]) + encode_ack(1, [Delivery(5)])
    queues, unread, fault = replay([defined, undefined, popped + encode_ack(1, [Delivery(6)]), b"?", popped])
    assert (queues[1].next, list(queues[1].unfinished)) == (7, [5])
    assert (unread, list(queues)) == ([undefined, b"?", popped], [1])
    assert fault is not None


def test_deliveries_whose_end_fails_end_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        world.send(f"m{number}")
    world.receive(invisible_ms=10_000)

    def failing(name: str) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(world.groups, "get", failing)
        world.advance(10)
    assert world.receive(client="d").why is Why.NOTHING_NEW
    world.advance(DEAD_LETTER_RETRY_S)
    assert len(world.receive(client="d").messages) == 5


def test_handles_of_others_are_not_taken(world: World) -> None:
    world.send("m")
    world.send("m", topic="u")
    handle = handles(world.receive())[0]
    world.receive(group="other")
    assert world.ack("rubbish") == [AckStatus.UNREADABLE]
    assert world.ack("1 2 3 4 5 6 7 ²") == [AckStatus.UNREADABLE]
    assert world.ack(handle.replace(" b ", " c ")) == [AckStatus.UNKNOWN]
    assert world.ack(handle, topic="u") == [AckStatus.UNKNOWN]
    assert world.ack(handle, group="nobody") == [AckStatus.UNKNOWN]


def test_a_forged_handle_of_a_message_that_was_never_popped_is_unknown(world: World) -> None:
    world.group("g", consume_orderly=True)
    for body in ("a1", "a2"):
        world.send(body, __SHARDINGKEY="a")
    first = world.receive(1)
    assert bodies(first) == ["a1"]
    assert world.receive(client="d").why is Why.NOTHING_NEW, "a2 was read, and waits for a1"
    offset, _, *rest = handles(first)[0].split()
    forged = " ".join((offset, "0", *rest[:-1], "1"))
    assert world.state.change("g", "t", forged, 1000).outcome is AckStatus.UNKNOWN
    assert world.ack(forged) == [AckStatus.UNKNOWN]
    world.ack(*handles(first))
    assert bodies(world.receive()) == ["a2"]


def test_a_restart_loses_neither_acknowledgements_nor_times(world: World) -> None:
    for number in range(3):
        world.send(f"m{number}")
    received = world.receive(invisible_ms=10_000)
    world.ack(received.messages[1].handle)
    world.kill()
    world.advance(4)
    world.open()
    got = world.wait()
    assert not got
    assert world.ack(received.messages[0].handle) == [AckStatus.DONE]
    world.advance(5.999)
    assert not got
    world.advance(0.001)
    assert bodies(got[0]) == ["m2"]
    assert got[0].messages[0].attempt == 2


def test_what_the_broker_extends_stays_with_its_client_while_that_has_contact(world: World) -> None:
    world.send("m")
    world.receive(auto_renew=True, invisible_ms=60_000)
    got = world.wait(client="d", wait_ms=4 * 3600_000)
    for _ in range(100):
        world.advance(60)
        world.state.pools.clients.record_contact(client_of("c"))
    assert not got
    world.state.client_gone(client_of("c"))
    assert [message.attempt for message in got[0].messages] == [2]


def test_what_the_broker_extends_is_given_to_others_after_three_hours(world: World) -> None:
    world.send("m")
    world.receive(auto_renew=True, invisible_ms=60_000)
    got = world.wait(client="d", wait_ms=4 * 3600_000)
    for _ in range(179):
        world.advance(60)
        world.state.pools.clients.record_contact(client_of("c"))
    assert not got
    world.advance(60)
    assert bodies(got[0]) == ["m"]


def test_a_client_that_is_silent_loses_what_the_broker_extends(world: World) -> None:
    world.send("m")
    world.receive(auto_renew=True, invisible_ms=60_000)
    got = world.wait(client="d", wait_ms=4 * 3600_000)
    world.advance(119)
    world.state.expire_clients()
    assert not got
    world.advance(1)
    world.state.expire_clients()
    assert bodies(got[0]) == ["m"]


def test_in_order_the_messages_of_a_message_group_wait_for_the_first(world: World) -> None:
    world.group("g", consume_orderly=True)
    for body, key in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b")):
        world.send(body, __SHARDINGKEY=key)
    first = world.receive(2)
    assert bodies(first) == ["a1", "a2"]
    second = world.receive(1)
    assert bodies(second) == ["b1"]
    assert world.receive().why is Why.NOTHING_NEW
    world.ack(*handles(first))
    assert bodies(world.receive()) == ["a3"]
    world.ack(*handles(second))
    assert bodies(world.receive()) == ["b2"]


def test_in_order_a_nack_of_the_first_brings_all_behind_it(world: World) -> None:
    world.group("g", consume_orderly=True)
    for number in range(3):
        world.send(f"a{number}", __SHARDINGKEY="a")
    first = world.receive()
    world.ack(first.messages[1].handle)
    world.state.change("g", "t", first.messages[0].handle, 0)
    again = world.receive()
    assert bodies(again) == ["a0", "a1", "a2"]
    assert [message.attempt for message in again.messages] == [2, 1, 2]
    world.ack(*handles(again))
    assert world.offsets.get("g", "t", 0) == 3


def test_in_order_one_that_was_done_and_never_taken_comes_with_the_first_as_its_first_attempt(world: World) -> None:
    world.group("g", consume_orderly=True)
    for number in range(2):
        world.send(f"a{number}", __SHARDINGKEY="a")
    lost = world.receive()
    world.state.put_back("g", lost.messages)
    world.turn()
    assert world.ack(lost.messages[1].handle) == [AckStatus.LATE]
    assert [message.attempt for message in world.receive().messages] == [1, 1]


def test_in_order_the_same_attempt_gets_the_same_messages(world: World) -> None:
    world.group("g", consume_orderly=True)
    world.send("a0", __SHARDINGKEY="a")
    first = world.receive(attempt_id="x")
    again = world.receive(attempt_id="x")
    assert again.messages == first.messages
    assert world.receive(attempt_id="y").why is Why.NOTHING_NEW


def test_a_group_that_is_sent_elsewhere_continues_from_there(world: World) -> None:
    for number in range(3):
        world.send(f"m{number}")
    received = world.receive()
    world.ack(received.messages[0].handle)
    world.offsets.put("g", "t", 0, 0)
    world.state.offsets_reset("g", "t")
    again = world.receive()
    assert bodies(again) == ["m0", "m1", "m2"]
    assert world.ack(received.messages[1].handle) == [AckStatus.REDELIVERED]
    world.ack(*handles(again))
    assert world.offsets.get("g", "t", 0) == 3


def test_broker_extends_no_message_of_before_a_reset(world: World) -> None:
    for number in range(2):
        world.send(f"m{number}")
    world.receive(auto_renew=True)
    world.offsets.put("g", "t", 0, 1)
    world.state.offsets_reset("g", "t")
    world.state.pools.clients.remove_client(client_of("c"))
    assert client_of("c") not in world.state.pools.clients.all, "it has neither a pool nor a message in flight"


def test_a_topic_or_group_that_is_deleted_ends_its_receives(world: World) -> None:
    got = world.wait()
    other = world.wait(group="h")
    world.state.group_deleted("g")
    assert [received.why for received in got] == [Why.GROUP_GONE]
    world.state.topic_deleted("t")
    assert [received.why for received in other] == [Why.TOPIC_GONE]


def test_tags_that_share_a_hash_are_distinguished_and_others_are_passed(world: World) -> None:
    from rocketlet.protocol.names import parse_subscription

    world.send("a", TAGS="Aa")
    world.send("b", TAGS="BB")  # the same hash in Java
    world.send("c", TAGS="c")
    received = world.receive(subscription=parse_subscription("t", "BB"))
    assert bodies(received) == ["b"]
    world.ack(*handles(received))
    assert world.offsets.get("g", "t", 0) == 3


def test_a_disk_that_takes_nothing_keeps_acknowledgements_from_being_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send("m")
    received = world.receive(invisible_ms=10_000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        assert world.ack(*handles(received)) == [AckStatus.NOT_KEPT]
    again = world.receive()
    assert bodies(again) == ["m"]
    assert world.ack(*handles(again)) == [AckStatus.NOT_KEPT]
    world.save()  # the file is rewritten
    assert world.ack(*handles(world.receive())) == [AckStatus.DONE]
    world.kill()
    world.open()
    assert world.receive().why is Why.NOTHING_NEW


def test_who_pops_is_known_for_two_minutes_or_until_it_leaves(world: World) -> None:
    world.receive(client="a")
    world.receive(client="b")
    assert world.state.pools.clients_of("g") == {"a": [Subscription("t")], "b": [Subscription("t")]}
    world.state.client_gone(client_of("a"))
    assert world.state.pools.clients_of("g") == {"b": [Subscription("t")]}
    world.advance(121)
    world.state.expire_clients()
    assert world.state.pools.clients_of("g") == {}


# Times that pass while no broker runs: nothing is lost, given too early, or given twice.


HOUR_S = 3600


def down(world: World, seconds: float) -> None:
    """The broker is killed and started again this much later."""
    world.kill()
    world.clock.advance(seconds)
    world.open()


def given(world: World) -> list[tuple[str, int]]:
    """Everything that another client can pop, with its attempts."""
    found: list[tuple[str, int]] = []
    while (result := world.receive(client="d")).why is Why.FOUND:
        found += zip(bodies(result), [message.attempt for message in result.messages], strict=True)
    return sorted(found)


@pytest.mark.parametrize("seconds", [10, HOUR_S, 40 * 24 * HOUR_S])
def test_deadlines_that_passed_leave_clients_a_second_to_acknowledge_and_bring_each_message_once(
    world: World, seconds: int
) -> None:
    for number in range(4):
        world.send(f"m{number}", queue=number % 2)
    held = world.receive(invisible_ms=5000)
    done, late, *_ = handles(held)
    world.ack(done)
    down(world, seconds)
    assert given(world) == []
    world.advance(STANDSTILL_S - 0.001)
    assert given(world) == []
    assert world.ack(late) == [AckStatus.DONE]
    world.advance(0.001)
    left = sorted(bodies(held)[2:])
    assert given(world) == [(body, 2) for body in left]
    assert set(world.ack(*handles(held)[2:])) == {AckStatus.REDELIVERED}
    down(world, 0)
    assert given(world) == []


def test_a_deadline_that_has_not_passed_is_the_same_moment_after_the_start(world: World) -> None:
    world.send("m")
    world.receive(invisible_ms=10_000)
    down(world, 9.5)
    world.advance(0.499)
    assert given(world) == []
    world.advance(0.001)
    assert given(world) == [("m", 2)]


def test_a_nack_whose_time_passed_comes_once(world: World) -> None:
    world.send("m")
    (handle,) = handles(world.receive(invisible_ms=5000))
    world.state.change("g", "t", handle, 30_000)
    world.turn()
    down(world, HOUR_S)
    world.advance(STANDSTILL_S)
    assert given(world) == [("m", 2)]


def test_the_last_attempt_that_ended_meanwhile_is_one_dead_letter(world: World) -> None:
    world.group("g", retry_max_times=0)
    world.send("m")
    world.receive(invisible_ms=5000)
    for _ in range(2):
        down(world, HOUR_S)
        world.advance(STANDSTILL_S)
        assert given(world) == []
    assert len(world.receive(group="undertaker", topic="%DLQ%g").messages) == 1


@pytest.mark.parametrize("renewals", [0, 2])
def test_a_message_that_the_broker_extended_ends_at_its_deadline_though_its_client_comes_back(
    world: World, renewals: int
) -> None:
    """The broker may have ended before its response was there: the client would never acknowledge it, and keep contact."""
    world.send("m")
    (handle,) = handles(world.receive(auto_renew=True, invisible_ms=60_000))
    ends_s = 60.0
    for step_s in RENEWAL_STEPS_S[:renewals]:
        world.advance(ends_s)
        ends_s = step_s
        world.state.pools.clients.record_contact(client_of("c"))
    down(world, 10)
    for _ in range(9):
        world.state.pools.clients.record_contact(client_of("c"))
        world.advance((ends_s - 10.001) / 9)
    assert given(world) == []
    assert world.state.change("g", "t", handle, 50).outcome is AckStatus.DONE, "its handle stays good"
    world.advance(0.049)
    assert given(world) == []
    world.advance(0.001)
    assert given(world) == [("m", 2)]


def test_a_client_may_acknowledge_after_a_restart_what_the_broker_extended(world: World) -> None:
    world.send("m")
    (handle,) = handles(world.receive(auto_renew=True, invisible_ms=60_000))
    down(world, HOUR_S)
    assert world.ack(handle) == [AckStatus.DONE]
    world.advance(HOUR_S)
    assert given(world) == []


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_journal_that_was_lost_is_said_once(world: World, is_empty: bool) -> None:
    for number in range(3):
        world.send(f"m{number}")
    world.ack(*handles(world.receive())[1:])
    world.save()
    world.kill()
    if is_empty:
        world.journal.write_bytes(b"")
    else:
        world.journal.unlink()
    with capture_logs() as logs:
        world.open()
    assert [log["file"] for log in logs if log["event"] == "pop_journal_lost"] == [str(world.journal)]
    assert given(world) == [("m0", 1), ("m1", 1), ("m2", 1)]
    world.kill()
    with capture_logs() as logs:
        world.open()
    assert not [log for log in logs if log["event"] == "pop_journal_lost"]


def test_a_journal_of_which_nothing_is_left_is_not_said_to_be_lost(world: World) -> None:
    world.kill()
    world.limits = replace(world.limits, pop_journal_bytes=-1)  # it is rewritten with each save
    world.open()
    world.send("m")
    world.receive()
    world.state.group_deleted("g")
    for _ in range(3):
        world.save()
    world.kill()
    with capture_logs() as logs:
        world.open()
    assert not [log for log in logs if log["event"] == "pop_journal_lost"]


def test_a_deleted_group_does_not_return_when_a_message_was_acknowledged_in_the_same_iteration(world: World) -> None:
    world.send("m")
    world.state.ack("g", "t", handles(world.receive()), lambda outcomes: None)
    world.state.group_deleted("g")
    world.offsets.group_deleted("g")
    world.turn()
    world.kill()
    world.open()
    assert not world.state.pools.all
    assert world.offsets.get("g", "t", 0) is None


def test_in_order_a_message_group_comes_from_its_first_one_on(world: World) -> None:
    world.group("g", consume_orderly=True)
    for number in range(3):
        world.send(f"m{number}", __SHARDINGKEY="k")
    world.receive(count=2, invisible_ms=5000)
    down(world, HOUR_S)
    assert given(world) == []
    world.advance(STANDSTILL_S)
    assert bodies(world.receive(count=3)) == ["m0", "m1", "m2"]


def test_deleted_group_stays_without_offsets_when_its_pool_ended_just_before(world: World) -> None:
    world.send("m")
    world.ack(*handles(world.receive()))
    world.advance(LIMITS.heartbeat_limit_s + POOL_IDLE_S)
    world.state.expire_clients()
    world.offsets.group_deleted("g")
    world.state.group_deleted("g")
    world.save()
    world.kill()
    world.open()
    assert world.offsets.get("g", "t", 0) is None


# Offsets of queues that left their pool. Until the state file of offsets has them, only the journal does.


def send(broker: BrokerController, properties: str = "") -> None:
    broker.sending.stage(SendMessage("p", "t", "TBW102", 4, 0, 0, 1, 0, properties), b"m", HOST)
    broker.sending.commit()


async def acknowledged_and_left(folder: Path, *, cut: Path | None = None) -> BrokerController:
    """Return a broker whose group g has acknowledged two messages of t, and pops t no longer. `cut` becomes its folder
    without the second message."""
    clock = MovableClock(stands=True)
    broker = BrokerController(BrokerConfig(data_dir=folder, address="127.0.0.1:1"), None, clock)
    broker.topics.put(TopicConfig("t", 1, 1), broker.store.end)
    broker.group_configs.put(GroupConfig("g"))
    send(broker)
    broker.persist()
    if cut is not None:
        shutil.copytree(folder, cut)
    send(broker)
    if cut is None:
        broker.persist()
    result = broker.pops.receive(Received(PopRequest("g", "t", client_of("c"), 32, 10_000), print))
    assert result is not None
    outcomes = asyncio.get_running_loop().create_future()
    broker.pops.ack("g", "t", handles(result), outcomes.set_result)
    assert await outcomes == [AckStatus.DONE] * 2
    clock.advance(LIMITS.heartbeat_limit_s + POOL_IDLE_S)
    broker.pops.expire_clients()
    assert broker.pops.pools.find("g", "t") is None, "the pool is not used any more"
    return broker


def killed(broker: BrokerController, folder: Path) -> BrokerController:
    """Return a broker that starts from what a killed one has written."""
    shutil.copytree(broker.config.data_dir, folder)
    broker.store.close()
    return BrokerController(BrokerConfig(data_dir=folder, address="127.0.0.1:1"), None, MovableClock(stands=True))


async def test_acknowledgements_survive_a_kill_when_saving_the_offsets_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await acknowledged_and_left(tmp_path / "data")

    def full(temporary: Path, path: Path) -> None:
        if path == broker.config.data_dir / "offsets.json":
            raise OSError(28, "No space left on device")
        replaced(temporary, path)

    replaced = disk.replace
    with monkeypatch.context() as patch:
        patch.setattr(disk, "replace", full)
        for _ in range(3):
            broker.persist()
    for name in ("killed", "killed after the start"):
        broker = killed(broker, tmp_path / name)
        assert broker.offsets.get("g", "t", 0) == 2, name
    broker.store.close()


async def test_new_messages_are_not_skipped_when_the_end_of_a_left_queue_was_lost_and_the_broker_is_killed_again(
    tmp_path: Path,
) -> None:
    cut = tmp_path / "cut"
    broker = await acknowledged_and_left(tmp_path / "data", cut=cut)
    shutil.copy(broker.config.data_dir / "pops.journal", cut / "pops.journal")
    broker.store.close()
    broker = BrokerController(BrokerConfig(data_dir=cut, address="127.0.0.1:1"), None, MovableClock(stands=True))
    assert broker.offsets.get("g", "t", 0) == 1, "the second message was lost"
    send(broker)
    broker = killed(broker, tmp_path / "killed")
    assert broker.offsets.get("g", "t", 0) == 1, "the new message was not read"
    broker.store.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_offsets_are_on_the_disk_after_a_stop_when_a_save_was_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    broker = await acknowledged_and_left(tmp_path / "data")
    begun, find_topics = asyncio.Event(), broker.groups.topics_with_offsets

    def beginning() -> list[str]:
        begun.set()
        return find_topics()

    monkeypatch.setattr(broker.groups, "topics_with_offsets", beginning)
    if is_cancelled:  # as after `device_stop_s`
        saving = asyncio.create_task(broker.device.do(broker.saving()))
        await begun.wait()
        saving.cancel()
    else:
        broker.start()
        assert isinstance(broker.clock, MovableClock)
        broker.clock.advance(PERSIST_INTERVAL_S)
        await begun.wait()
    await broker.stop()
    broker = BrokerController(
        BrokerConfig(data_dir=tmp_path / "data", address="127.0.0.1:1"), None, MovableClock(stands=True)
    )
    assert broker.offsets.get("g", "t", 0) == 2
    broker.store.close()


async def test_broker_starts_when_it_was_killed_during_a_rewrite_of_the_journal_with_a_new_queue(
    tmp_path: Path,
) -> None:
    """The queue was opened before, by a receive that only checks whether there is a message."""
    clock = MovableClock(stands=True)
    config = BrokerConfig(data_dir=tmp_path / "data", address="127.0.0.1:1")
    broker = BrokerController(config, None, clock, limits=Limits(pop_journal_bytes=0))
    broker.topics.put(TopicConfig("t", 1, 1), broker.store.end)
    for group in ("g", "h"):
        broker.group_configs.put(GroupConfig(group))
    send(broker)
    assert broker.pops.receive(Received(PopRequest("h", "t", client_of("d"), 1, 10_000), print)) is not None
    assert broker.pops.receive(Received(PopRequest("g", "t", client_of("c"), 0, 10_000), print)) is not None
    broker.persist()
    assert broker.pops.receive(Received(PopRequest("h", "t", client_of("d"), 1, 10_000), print)) is not None
    rewriting = broker.pops.saving()
    next(rewriting)
    assert broker.pops.receive(Received(PopRequest("g", "t", client_of("c"), 1, 10_000), print)) is not None
    await asyncio.sleep(0)  # then the record of the pop is written
    await asyncio.sleep(0)
    broker = killed(broker, tmp_path / "killed")
    assert broker.pops.pools.unfinished("g") == 1
    broker.store.close()


async def left_lite_topic(folder: Path) -> tuple[BrokerController, str]:
    """Return a broker whose group g has acknowledged the message of many lite topics of t, and one of these whose deliveries
    have ended."""
    broker = BrokerController(BrokerConfig(data_dir=folder, address="127.0.0.1:1"), None, MovableClock())
    broker.topics.put(TopicConfig("t", 1, 1, message_type="LITE"), broker.store.end)
    broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "t"}))
    names = [f"s{number}" for number in range(MAX_IDLE_LITE + 1)]
    for name in names:
        send(broker, f"{LITE_TOPIC}\x01{name}")
    client = client_of("c")
    finish(broker.pops.lite.sync(LiteSync(client, FakeSession(), "g", "t", LiteAction.PARTIAL_ADD, names)))
    while (result := broker.pops.receive(Received(PopRequest("g", "t", client, 32, 10_000), print))) is not None:
        if result.why is not Why.FOUND:
            break
        outcomes = asyncio.get_running_loop().create_future()
        broker.pops.ack("g", "t", handles(result), outcomes.set_result)
        assert set(await outcomes) == {AckStatus.DONE}
    queues = broker.pops.pools.lite_pool("g", "t").queues.deliveries
    return broker, next(name for name in names if broker.lites.of("t")[name] not in queues)


async def test_recreated_lite_topic_has_no_offset_when_its_idle_deliveries_ended_just_before(tmp_path: Path) -> None:
    broker, name = await left_lite_topic(tmp_path / "data")
    broker.persist()
    assert broker.pops.expiry.delete(broker.lites.of("t")[name])
    send(broker, f"{LITE_TOPIC}\x01{name}")
    broker = killed(broker, tmp_path / "killed")
    assert broker.lites.of("t")[name].next == 1
    assert broker.lite_offsets.of("g", "t").get(name, 0) == 0
    broker.store.close()


@pytest.mark.parametrize(("policy", "offset"), [(OffsetPolicy.MAX, 3), (OffsetPolicy.MIN, 0)])
async def test_offset_of_a_lite_topic_that_was_set_survives_a_kill_when_its_idle_deliveries_ended_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: OffsetPolicy, offset: int
) -> None:
    broker, name = await left_lite_topic(tmp_path / "data")
    for _ in range(2):
        send(broker, f"{LITE_TOPIC}\x01{name}")
    with monkeypatch.context() as patch:  # the offsets are saved, and the journal is not yet
        patch.setattr(broker.pops, "begin_saving", lambda: None)
        broker.persist()
    option = LiteOffset(policy)
    change = LiteSync(client_of("d"), FakeSession(), "g", "t", LiteAction.PARTIAL_ADD, [name], option)
    finish(broker.pops.lite.sync(change))
    broker = killed(broker, tmp_path / "killed")
    assert broker.lite_offsets.of("g", "t")[name] == offset
    broker.store.close()


async def test_offset_that_was_reset_and_saved_survives_a_kill_when_the_queue_left_its_pool_before(
    tmp_path: Path,
) -> None:
    broker = await acknowledged_and_left(tmp_path / "data")
    broker.offsets.put("g", "t", 0, 0)
    broker.persist()
    broker = killed(broker, tmp_path / "killed")
    assert broker.offsets.get("g", "t", 0) == 0
    broker.store.close()


def test_unfinished_messages_of_a_group_that_was_bound_for_a_while_are_not_skipped(world: World) -> None:
    """Its pool of queues ends when the group is bound to the parent, and the broker is killed meanwhile."""
    world.topics.put(TopicConfig("t", 2, 2, message_type="LITE"), world.store.end)
    world.receive()
    for number in range(3):
        world.send(f"{number}")
    assert bodies(world.receive()) == ["0", "1", "2"]
    world.groups.put(GroupConfig("g", attributes={"lite.bind.topic": "t"}))
    world.state.lite_pool("g", "t")
    world.kill()
    world.open()
    assert world.offsets.get("g", "t", 0) == 0
