"""The kit, asked about a name that is nobody's."""

from __future__ import annotations

import pytest
from rocketlet import Consumer, Producer
from rocketlet.testing import Broker, UnknownGroup, UnknownTopic


async def test_a_mistyped_group_or_topic_is_not_one_of_which_there_is_nothing() -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        await producer.send("t", b"x")
        async with Consumer(broker.address, "shipping", "t", lambda message: None, start="first"):
            await broker.consumed("shipping", "t")
        assert broker.dead_letters("shipping") == []
        with pytest.raises(UnknownGroup, match="the broker knows no group shiping; with members: "):
            broker.dead_letters("shiping")
        for about in (broker.lag, broker.committed):
            about("shipping", "t")
            with pytest.raises(UnknownGroup, match="shiping"):
                about("shiping", "t")
        for asked in (broker.members, broker.owners, broker.timeline):
            asked("shipping")
            with pytest.raises(UnknownGroup, match="shiping"):
                asked("shiping")
        with pytest.raises(UnknownGroup, match="shiping"):
            broker.messages("t", waiting_for="shiping")
        with pytest.raises(UnknownTopic, match=r"the broker has no topic tt; it has: .*t"):
            broker.lag("shipping", "tt")


@pytest.mark.parametrize(
    ("group", "topic", "said"),
    [("shiping", "t", "the broker knows no group shiping"), ("shipping", "tt", "the broker has no topic tt")],
)
async def test_waiting_for_a_mistyped_name_ends_with_it(group: str, topic: str, said: str) -> None:
    async with Broker() as broker:
        broker.create_topic("t")
        broker.create_group("shipping")
        with pytest.raises(TimeoutError, match=said):
            await broker.until(lambda: broker.lag(group, topic) == 0, timeout_s=0.01)


async def test_a_group_whose_members_each_get_everything_has_no_lag_that_a_broker_knows() -> None:
    async with Broker() as broker, Producer(broker.address) as producer:
        await producer.send("t", b"x")
        async with Consumer(broker.address, "caches", "t", lambda message: None, start="first", broadcasting=True):
            for about in (broker.lag, broker.committed):
                with pytest.raises(
                    ValueError,
                    match="each member of the broadcasting group caches gets every message and stores its offsets",
                ):
                    about("caches", "t")
            with pytest.raises(ValueError, match="wait for the effects of your handlers"):
                await broker.consumed("caches", "t")


async def test_a_mistyped_request_was_not_asked_never() -> None:
    async with Broker() as broker:
        assert broker.requests_of("SEND_MESSAGE_V2") == []
        with pytest.raises(ValueError, match="unknown request 'SEND_MESAGE'; did you mean SEND_MESSAGE"):
            broker.requests_of("SEND_MESAGE")
