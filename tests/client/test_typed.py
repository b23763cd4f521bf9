"""Typed messages: what is sent and handled are values; a body that says nothing is a dead letter immediately."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
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

from ..conftest import PATIENCE_S, PYRIGHT, Node, eventually


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


async def test_of_a_batch_only_what_cannot_be_decoded_is_given_up(node: Node, one_queue: None) -> None:
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


# A type checker reads a user's code: a wrong attribute, handler or option is an error.


ROOT = Path(__file__).parents[2]
PROGRAM = """
from rocketlet import Rocketlet, sync
from rocketlet.client import Consumer, Message, RetryLater


def plain(m: Message) -> None: ...
async def coroutine(m: Message) -> RetryLater | None: ...
async def batch(ms: list[Message]) -> None: ...


Consumer("h:1", "g", "t", plain)
Consumer("h:1", "g", "t", coroutine, start="first", concurrency=3)
Consumer("h:1", "g", "t", batch, batch_size=5)
Consumer("h:1", "g", "t", lambda m: print(m.body))
Consumer("h:1", "g", "t", lambda m: print(m.boddy))  # error
Consumer("h:1", "g", "t", lambda ms: print(ms[0].boddy), batch_size=5)  # error
Consumer("h:1", "g", "t", batch)  # error
Consumer("h:1", "g", "t", coroutine, batch_size=5)  # error
Consumer("h:1", "g", "t", lambda m: True)  # error
Consumer("h:1", "g", "t", start="earliest")  # error
Consumer("h:1", "g", "t", nonsense=1)  # error


async def use(consumer: Consumer) -> None:
    async for m in consumer:
        print(m.body, m.boddy)  # error
    print((await consumer.receive()).boddy)  # error
    async for ms in consumer.batches():
        print(ms[0].boddy)  # error
    print((await anext(consumer)).boddy)  # error


sync.Producer("h:1", retries=5).send("t", b"x", tag="a")
sync.Producer("h:1", retires=5)  # error
sync.Producer("h:1").send("t", b"x", tags="a")  # error
sync.Consumer("h:1", "g", "t", start="first", batch_size=3)
sync.Consumer("h:1", "g", "t", start="begin")  # error


app = Rocketlet()
app.subscriber("t", group="g", start="first", batch_size=10)(batch)
app.subscriber("t", group="g", sharing=True, invisible_s=5)(plain)
app.subscriber("t", group="g", lite_topics=["a"])(plain)
app.subscriber("t", group="g", concurency=3)  # error
app.subscriber("t", group="g", sharing=True, batch_size=10)  # error
app.publisher("t", tag="a")(plain)
app.publisher("t", tags="a")  # error
"""


WANTED = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# error")}


def test_mistakes_in_handlers_are_found_by_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    config = str(ROOT / "pyproject.toml")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", config, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S * 4, check=False)
    # by the name alone: what mypy has seen before it says with the folder of that time
    errors = {int(number) for number in re.findall(r"program\.py:(\d+): error:", found.stdout)}
    assert errors == WANTED, found.stdout + found.stderr


@pytest.mark.pyright
@pytest.mark.skipif(shutil.which("npx") is None, reason="needs Node with npx, which fetches pyright")
def test_mistakes_in_handlers_are_found_by_pyright(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"typeCheckingMode": "strict", "include": ["program.py"], "extraPaths": [str(ROOT / ".types")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["npx", "--yes", PYRIGHT, "--outputjson"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S * 4, check=False)
    start = found.stdout.find("{")
    if start < 0:
        pytest.skip(f"npx fetches no pyright: {(found.stdout + found.stderr)[-300:]}")
    faults = json.loads(found.stdout[start:])["generalDiagnostics"]
    errors = {fault["range"]["start"]["line"] + 1 for fault in faults}
    assert errors == WANTED, faults
