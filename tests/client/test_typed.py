"""Typed messages: what is sent and handled are values; a body that says nothing is a dead letter immediately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pydantic
import pytest
from rocketlet.client import (
    AdminClient,
    ConfigError,
    Consumer,
    Message,
    MessageIllegal,
    Outgoing,
    Producer,
    RetryLater,
    SharedConsumer,
)
from rocketlet.protocol.names import Queue

from ..conftest import Node, Wire, create_topic, eventually


class Order(pydantic.BaseModel):
    number: int
    dish: str = "soup"


class Ticket(msgspec.Struct):
    number: int


async def dead_of(node: Node, group: str) -> list[Message]:
    end = node.broker.store.queue(f"%DLQ%{group}", 0).next
    async with AdminClient(node.address) as admin:
        queue = Queue(f"%DLQ%{group}", "broker-a", 0)
        return [message async for part in admin.read(queue, 0, end) for message in part]


async def test_models_are_sent_and_handled(node: Node) -> None:
    seen: list[tuple[Order, str]] = []

    async def cook(order: Order, message: Message) -> None:
        seen.append((order, message.keys[0] if message.keys else ""))

    async with (
        Producer(node.address, encode=Order.model_dump_json) as producer,
        Consumer(node.address, "g", "t", cook, decode=Order.model_validate_json, start="first"),
    ):
        await producer.send("t", Order(number=1), keys="k")
        await producer.send("t", b'{"number": 2}')
        await producer.send_batch("t", [Order(number=3), Outgoing(b'{"number": 4, "dish": "stew"}')])
        await producer.send_oneway("t", Order(number=5))
        await eventually(lambda: len(seen) == 5)
    assert sorted((order.number, order.dish, key) for order, key in seen) == [
        (1, "soup", "k"), (2, "soup", ""), (3, "soup", ""), (4, "stew", ""), (5, "soup", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["async", "in a thread", "shared"])
async def test_a_body_that_cannot_be_decoded_is_given_up_with_the_reason(node: Node, kind: str) -> None:
    seen: list[int] = []

    def take(ticket: Ticket) -> None:
        seen.append(ticket.number)

    async def take_soon(ticket: Ticket) -> None:
        seen.append(ticket.number)

    decoder = msgspec.json.Decoder(Ticket)
    handler = take if kind == "in a thread" else take_soon
    kinds = SharedConsumer if kind == "shared" else Consumer
    async with (
        Producer(node.address, encode=msgspec.json.encode) as producer,
        kinds(node.address, "g", "t", handler, decode=decoder.decode, start="first"),
    ):
        await producer.send("t", b"[]")
        await producer.send("t", Ticket(7))
        await eventually(lambda: seen == [7] and node.broker.store.queue("%DLQ%g", 0).next == 1)
    (dead,) = await dead_of(node, "g")
    assert dead.body == b"[]"
    assert "the body cannot be decoded: ValidationError: Expected `object`, got `array`" in dead.failure


async def test_of_a_batch_only_what_cannot_be_decoded_is_given_up(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Producer(node.address) as producer:
        await producer.send_batch("t", [b"1", b"two", b"3"])
    seen: list[list[int]] = []

    async def store(numbers: list[int], messages: list[Message]) -> RetryLater | None:
        assert [int(message.body) for message in messages] == numbers
        seen.append(numbers)
        return RetryLater(delay_level=1) if len(seen) == 1 else None

    async with Consumer(node.address, "g", "t", store, decode=int, batch_size=10, start="first"):
        await eventually(lambda: len(seen) == 1 and node.broker.offsets.get("g", "t", 0) == 3)
        node.clock.advance(1)
        await eventually(lambda: sum(map(len, seen)) == 4)
    assert seen[0] == [1, 3]
    assert [message.body for message in await dead_of(node, "g")] == [b"two"], "and is handed back once"


async def test_a_value_that_cannot_be_encoded_raises_where_it_is_sent(node: Node) -> None:
    async with Producer(node.address, encode=Order.model_dump_json) as producer:
        with pytest.raises(MessageIllegal, match=r"the body 7 cannot be encoded: "):
            await producer.send("t", 7)  # type: ignore[arg-type]
    async with Producer(node.address, encode=lambda value: value) as odd:
        with pytest.raises(MessageIllegal, match="encode returned int; it must return bytes or text"):
            await odd.send("t", 7)  # type: ignore[arg-type]


async def test_decode_is_for_handlers(node: Node) -> None:
    with pytest.raises(ConfigError, match=r"decode: needs a handler; without a handler, decode message\.body"):
        Consumer(node.address, "g", "t", decode=int)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"handler: .* is called with a decoded body"):
        Consumer(node.address, "g", "t", lambda: None, decode=int)  # type: ignore[arg-type]


if TYPE_CHECKING:

    @dataclass
    class Wrong:
        number: int

    async def of_another(wrong: Wrong) -> None: ...

    async def checked(address: str) -> None:
        """Type checkers see whether encode, decode and handler fit."""
        Consumer(address, "g", "t", of_another, decode=Order.model_validate_json)  # type: ignore[misc]
        async with Producer(address, encode=Order.model_dump_json) as producer:
            await producer.send("t", Wrong(1))  # type: ignore[arg-type]
        async with Producer(address) as plain:
            await plain.send("t", "text")  # type: ignore[arg-type]
