"""Its tests: `pip install '.[pytest]' pytest-asyncio`, then `pytest`. The fixture `rocketlet` comes with the
package."""

from __future__ import annotations

import pytest
from rocketlet import Producer
from rocketlet.testing import Broker, Fault
from shipping import CarrierDown, Shipping

pytestmark = pytest.mark.asyncio


async def test_an_order_is_shipped_when_the_carrier_is_back(rocketlet: Broker) -> None:
    calls: list[str] = []

    def down_once(order: str) -> None:
        calls.append(order)
        if len(calls) == 1:
            raise CarrierDown

    service = Shipping(down_once)
    async with Producer(rocketlet.address) as producer, service.consumer(rocketlet.address):
        await producer.send("orders", b'{"id": "A1"}')
        await rocketlet.skip_waits(lambda: service.shipped == {"A1"})
    assert calls == ["A1", "A1"]


async def test_after_three_tries_an_order_is_a_dead_letter(rocketlet: Broker) -> None:
    calls: list[str] = []

    def down(order: str) -> None:
        calls.append(order)
        raise CarrierDown

    async with Producer(rocketlet.address) as producer, Shipping(down).consumer(rocketlet.address):
        await producer.send("orders", b'{"id": "A1"}')
        await rocketlet.skip_waits(lambda: len(rocketlet.dead_letters("shipping")) == 1)
    assert calls == ["A1"] * 3


async def test_unreadable_order_becomes_a_dead_letter_immediately(rocketlet: Broker) -> None:
    calls: list[str] = []
    async with Producer(rocketlet.address) as producer, Shipping(calls.append).consumer(rocketlet.address):
        await producer.send("orders", b"no JSON")
        await rocketlet.until(lambda: len(rocketlet.dead_letters("shipping")) == 1)
    assert calls == []


async def test_an_order_that_was_stored_twice_is_shipped_once(rocketlet: Broker) -> None:
    calls: list[str] = []
    rocketlet.create_topic("orders")
    rocketlet.faults.add(Fault.close("SEND_MESSAGE_V2", after=True))  # stored, but the producer gets no response
    async with Producer(rocketlet.address) as producer, Shipping(calls.append).consumer(rocketlet.address):
        await producer.send("orders", b'{"id": "A1"}', queue_key="A1")
        await rocketlet.consumed("shipping", "orders")
    assert len(rocketlet.messages("orders")) == 2
    assert calls == ["A1"]
