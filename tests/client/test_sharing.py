"""The parts of a member that shares messages, each alone: who gets the next message, and what one request says of many."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.client import Message, RetryLater
from rocketlet.client.message import Lease, clock_s
from rocketlet.client.sharing.receiving import SharedDelivery, SlotDispatcher
from rocketlet.client.sharing.settling import _by_pop, delay_of
from rocketlet.protocol.group_bodies import decode_batch_acks, encode_batch_acks
from rocketlet.protocol.message import MessageError, Receipt, receipt_of, starts_of, tried_in
from rocketlet.protocol.names import Queue


def delivery(offset: int = 0, start: int | None = None, pop_ms: int = 1, **place: Any) -> SharedDelivery:
    receipt = Receipt(offset if start is None else start, pop_ms, 30_000, 0, "0", "b", 0, offset)
    message = Message(b"", Queue("t", "b", 0), "t", Lease(0, 100.0))
    return SharedDelivery(message, receipt._replace(**place))


class Back:
    """A dispatcher whose unwanted messages are kept."""

    def __init__(self) -> None:
        self.unwanted: list[SharedDelivery] = []
        self.dispatcher = SlotDispatcher(self.unwanted.append)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_receive_gets_as_many_places_as_somebody_waits_for() -> None:
    dispatcher = Back().dispatcher
    reserving = asyncio.create_task(dispatcher.reserve(32))
    await turn()
    assert not reserving.done()
    takers = [asyncio.create_task(dispatcher.take()) for _ in range(3)]
    assert await reserving == 1, "the first taker's"
    assert await dispatcher.reserve(32) == 2
    messages = [delivery(number) for number in range(3)]
    dispatcher.put(messages[:1], 1)
    dispatcher.put(messages[1:], 2)
    assert [await taker for taker in takers] == messages


async def test_sources_take_turns_where_there_are_fewer_places() -> None:
    dispatcher = Back().dispatcher
    dispatcher.sources = 2
    taker = asyncio.create_task(dispatcher.take())
    await turn()
    assert await dispatcher.reserve(32) == 1
    assert dispatcher.is_short, "the other source would wait"
    second = asyncio.create_task(dispatcher.reserve(32))
    third = asyncio.create_task(dispatcher.reserve(32))
    await turn()
    dispatcher.put((), 1)
    assert await second == 1
    assert not third.done()
    taker.cancel()
    third.cancel()


async def test_a_cancelled_wait_loses_no_message_and_no_place() -> None:
    dispatcher = Back().dispatcher
    first = asyncio.create_task(dispatcher.take())
    await turn()
    dispatcher.put([came := delivery()], await dispatcher.reserve(1))
    first.cancel()
    assert await dispatcher.take() is came
    reserving = asyncio.create_task(dispatcher.reserve(1))
    await turn()
    waiting = asyncio.create_task(dispatcher.take())
    await asyncio.sleep(0)  # it is granted a place, and has not run yet
    reserving.cancel()
    await turn()
    assert await dispatcher.reserve(1) == 1
    waiting.cancel()


async def test_a_pause_and_the_end_want_nothing() -> None:
    back = Back()
    dispatcher = back.dispatcher
    taker = asyncio.create_task(dispatcher.take())
    await turn()
    places = await dispatcher.reserve(1)
    dispatcher.pause()
    dispatcher.put([first := delivery()], places)
    assert back.unwanted == [first]
    dispatcher.resume()
    dispatcher.put([second := delivery()], await dispatcher.reserve(1))
    dispatcher.pause()  # before the taker runs
    await turn()
    assert back.unwanted == [first, second]
    dispatcher.close()
    assert await taker is None


@given(st.sets(st.integers(0, 20_000), min_size=1, max_size=50), st.booleans())
def test_acknowledgements_of_many_messages_name_each_of_them(offsets: set[int], is_ours: bool) -> None:
    deliveries = [delivery(offset, pop_ms=1 + offset % 2) for offset in offsets]
    body = encode_batch_acks("b", "g", _by_pop(deliveries, is_ours=is_ours))
    found = decode_batch_acks(body)
    assert {(ack.pop_ms, offset) for ack in found for offset in ack.offsets} == {(1 + of % 2, of) for of in offsets}
    assert all((ack.group, ack.topic, ack.mark, ack.queue_id) == ("g", "t", "0", 0) for ack in found)


def test_apache_s_check_points_stay_apart_and_ours_are_one_entry() -> None:
    deliveries = [delivery(7, start=7), delivery(9, start=8), delivery(8, start=8)]
    assert len(_by_pop(deliveries, is_ours=True)) == 1
    (_, first, offsets), (_, second, others) = _by_pop(deliveries, is_ours=False)
    assert (first.start_offset, offsets, second.start_offset, others) == (7, [7], 8, [8, 9])


def test_a_lease_that_is_over_is_not_renewed_by_an_answer_that_comes_late() -> None:
    found = delivery()
    assert found.lease.is_over
    assert not found.renewed(found.receipt, clock_s(), 30.0)
    assert found.message.lease_lost


def test_receipts_are_apache_s_text() -> None:
    receipt = receipt_of("5 1795411322073 60000 3 1 broker-a 2 7 4200046")
    assert receipt == Receipt(5, 1795411322073, 60000, 3, "1", "broker-a", 2, 7)
    assert receipt.text == "5 1795411322073 60000 3 1 broker-a 2 7"
    assert [receipt._replace(mark=mark).topic("g", "t") for mark in "012"] == ["t", "%RETRY%g_t", "%RETRY%g+t"]
    assert starts_of("0 2 5;1 0 9") == {2: 5}
    assert tried_in("0 qo2%7 3;0 2 1") == {"qo2%7": 3, "2": 1}
    for read in (receipt_of, starts_of, tried_in):
        with pytest.raises(MessageError):
            read("rubbish")


def test_a_delay_is_any_time_or_a_level_s() -> None:
    class Tried:
        def __init__(self, times: int) -> None:
            self.reconsume_times = times

    def seconds(outcome: RetryLater, times: int = 0) -> float:
        return delay_of(outcome, Tried(times))  # type: ignore[arg-type]

    assert seconds(RetryLater(delay=2.5)) == 2.5
    assert seconds(RetryLater(delay=timedelta(minutes=1))) == 60
    assert [seconds(RetryLater(), times) for times in (0, 1, 2, 16, 99)] == [10, 30, 60, 7200, 7200]
    assert [seconds(RetryLater(delay_level=level)) for level in (1, 18, 99)] == [1, 7200, 7200]
