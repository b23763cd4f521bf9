"""Applications: declared handlers, on a broker in the test's memory."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from rocketlet import (
    AdminClient,
    ConfigError,
    Depends,
    Message,
    MessageIllegal,
    Queue,
    RetryLater,
    RetryPolicy,
    Rocketlet,
)
from rocketlet.testing import Broker

from ..conftest import PATIENCE_S, Node, eventually


class Order(pydantic.BaseModel):
    number: int


class Dish(pydantic.BaseModel):
    name: str


class Table(pydantic.BaseModel):
    number: int


class Guest(pydantic.BaseModel):
    table: Table


class Database:
    def __init__(self) -> None:
        self.rows: list[str] = []
        self.ended = 0


database = Database()


async def connection() -> AsyncIterator[Database]:
    yield database
    database.ended += 1


def cursor(db: Annotated[Database, Depends(connection)]) -> Iterator[list[str]]:
    yield db.rows


ended: list[str] = []


async def lease() -> AsyncIterator[str]:
    try:
        yield "lease"
    finally:
        ended.append("lease")


async def test_an_application_runs_in_the_memory_of_a_test() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Rocketlet) -> AsyncIterator[None]:
        app.state.kitchen = "open"
        events.append("begins")
        yield
        events.append("ends")

    app = Rocketlet(lifespan=lifespan)
    served: list[str] = []

    @app.subscriber("orders", group="kitchen", start="first")
    @app.publisher("dishes", tag="hot")
    async def cook(
        order: Order,
        message: Message,
        rows: Annotated[list[str], Depends(cursor)],
        db: Annotated[Database, Depends(connection)],
    ) -> Dish:
        assert rows is db.rows, "a dependency is called once for a message"
        rows.append(f"{order.number} {message.tag}")
        return Dish(name=f"dish {order.number}")

    @app.subscriber({"dishes": "hot"}, group="waiters", start="first", sharing=True)
    def serve(dish: Dish) -> None:
        served.append(dish.name)

    fake = Database()

    async def faked() -> Database:
        return fake

    app.dependency_overrides[connection] = faked
    async with Broker() as broker, app.at(broker.address):
        await app.publish("orders", Order(number=7), tag="new")
        await broker.until(lambda: served == ["dish 7"])
        assert (await app.health()).is_healthy
        assert (app.state.kitchen, fake.rows) == ("open", ["7 new"])
    assert events == ["begins", "ends"]
    assert (await app.health()).fault == "it is not running"


async def test_subscriber_of_lite_topics_subscribes_while_the_application_runs() -> None:
    app = Rocketlet()
    got: list[tuple[str | None, bytes]] = []

    @app.subscriber("CHAT", group="chats", lite_topics=["a"])
    async def answer(message: Message) -> None:
        got.append((message.lite_topic, message.body))

    with pytest.raises(ConfigError, match="no subscriber with lite_topics"):
        app.lite_consumer("chats")
    async with Broker() as broker:
        broker.create_topic("CHAT", message_type="LITE")
        async with app.at(broker.address):
            await app.publish("CHAT", b"1", lite_topic="a")
            await app.publish("CHAT", b"2", lite_topic="b")
            await broker.until(lambda: got == [("a", b"1")])
            await app.lite_consumer("chats").subscribe("b")
            await broker.until(lambda: got == [("a", b"1"), ("b", b"2")])
            await broker.consumed("chats", "CHAT")
            health = await app.health()
        assert (health.is_healthy, dict(health.lag)) == (True, {"chats: CHAT": 0})


async def test_a_handler_that_takes_too_long_is_ended_and_its_dependencies_too(node: Node) -> None:
    app = Rocketlet(node.address)

    @app.subscriber("t", group="g", timeout_s=0.01, start="first")
    async def hang(message: Message, held: Annotated[str, Depends(lease)]) -> None:
        await asyncio.Event().wait()

    async with app:
        await app.publish("t", b"x")
        await eventually(lambda: ended == ["lease"])
        await eventually(lambda: node.broker.store.queue("SCHEDULE_TOPIC_XXXX", 2).next == 1)


def test_mistakes_are_reported_where_they_are_declared() -> None:
    app = Rocketlet()
    with pytest.raises(ConfigError, match="runs in a thread, which cannot be ended"):

        @app.subscriber("t", group="g", timeout_s=1)
        def work(message: Message) -> None: ...

    def local() -> int:
        return 1

    with pytest.raises(ConfigError, match="its annotations cannot be evaluated: name 'local' is not defined"):

        @app.subscriber("t", group="g")
        async def lost(message: Message, number: Annotated[int, Depends(local)]) -> None: ...

    with pytest.raises(ConfigError, match="this application is not running"):
        app.producer  # noqa: B018


async def one(message: Message) -> None: ...


async def two(message: Message, other: str) -> None: ...


async def none() -> None: ...


async def an_order(order: Order) -> None: ...


async def orders(orders: list[Order]) -> None: ...


async def a_dict(order: dict[str, int]) -> None: ...


async def text(body: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (one, {"concurency": 3}, "unexpected keyword argument 'concurency'; did you mean 'concurrency'"),
        (one, {"sharing": True, "batch_size": 3}, "batch_size"),
        (one, {"concurrency": 0}, "concurrency: 0"),
        (one, {"start": "now"}, "start: 'now'"),
        (one, {"group": "my group"}, "group"),
        (one, {"subscriptions": {"t": "a,b"}}, "a,b"),
        (
            one,
            {"decode": Order.model_validate_json},
            "one: .* annotated Message; with decode it gets the decoded body",
        ),
        (two, {}, "two.*missing a required argument: 'other'"),
        (none, {}, "none.*too many positional arguments"),
        (an_order, {"batch_size": 10}, "an_order: .* annotated Order; with batch_size it gets a list"),
        (one, {"batch_size": 10}, "one: .* annotated Message; with batch_size it gets a list"),
        (orders, {}, r"orders: .* annotated list\[.*Order\]; without batch_size it gets one message"),
        (a_dict, {}, r"a_dict: .* annotated dict\[str, int\]; without decode="),
        (text, {}, "text: .* annotated str; without decode="),
        ("text", {}, "cannot be called"),
    ],
)
def test_a_mistake_of_a_subscriber_is_reported_where_it_is_declared(
    function: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        Rocketlet().subscriber(**{"subscriptions": "t", "group": "g"} | options)(function)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name_server": "localhost"}, "name_server: 'localhost' is not host:port"),
        ({"timeot_s": 3}, "timeot_s"),
        ({"encode": "json"}, "encode: 'json' cannot be called"),
        ({"group": ""}, "group"),
        ({"retries": -1}, "retries"),
    ],
)
def test_a_mistake_of_an_application_is_reported_where_it_is_made(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        Rocketlet(**arguments)


def test_a_mistake_of_a_publisher_is_reported_where_it_is_declared() -> None:
    options: dict[str, Any] = {"tags": "new"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'tags'; give tag=; a message has one tag"):
        Rocketlet().publisher("dishes", **options)
    with pytest.raises(MessageIllegal, match="my dishes"):
        Rocketlet().publisher("my dishes")


async def test_a_handler_of_batches_gets_a_list_of_its_model(node: Node) -> None:
    app, seen = Rocketlet(node.address), list[Order]()

    @app.subscriber("t", group="g", batch_size=10, start="first")
    async def store(orders: list[Order]) -> None:
        seen.extend(orders)

    async with app:
        await app.publish("t", Order(number=7))
        await eventually(lambda: seen == [Order(number=7)])


@pytest.mark.parametrize("other", ["t", "u"])
async def test_two_subscribers_of_one_group_are_refused(node: Node, other: str) -> None:
    app = Rocketlet(node.address)
    for topic in ("t", other):
        app.subscriber(topic, group="g")(lambda message: RetryLater())
    with pytest.raises(ConfigError, match=f"group: g: t and g: {other} have the same group g; give each its own"):
        await app.__aenter__()
    assert not (await app.health()).is_healthy


async def test_a_publisher_that_handles_nothing_is_refused(node: Node) -> None:
    app = Rocketlet(node.address)
    app.publisher("dishes")(lease)
    with pytest.raises(ConfigError, match="publisher: lease is not a subscriber; declare it"):
        await app.__aenter__()


def stored(node: Node, topic: str) -> bool:
    return node.broker.store.queue(topic, 0).next == 1


async def test_a_result_that_nobody_publishes_and_a_handler_out_of_time_are_named(node: Node) -> None:
    app = Rocketlet(node.address)

    @app.subscriber("slow", group="slow", timeout_s=0.01, start="first", retry=RetryPolicy(never=(TimeoutError,)))
    async def hang(message: Message) -> None:
        await asyncio.Event().wait()

    @app.subscriber("odd", group="odd", start="first", retry=RetryPolicy(never=(TypeError,)))
    async def cook(message: Message) -> bytes:
        return b"a dish"

    async with app, AdminClient(node.address) as admin:
        for group, reason in (
            ("slow", "TimeoutError: the handler did not end within its timeout_s of 0.01 s"),
            ("odd", "TypeError: the handler returned b'a dish'; add @app.publisher(topic) to send it, or return None"),
        ):
            await app.publish(group, b"x")
            dead = Queue(f"%DLQ%{group}", "broker-a", 0)
            await eventually(partial(stored, node, dead.topic))
            assert [item.failure async for part in admin.read(dead, 0, 1) for item in part] == [reason]


PROGRAM = """
from rocketlet import Message, Rocketlet
app = Rocketlet({address!r})

@app.subscriber("t", group="g", start="first")
def show(message: Message) -> None:
    print("got", message.body.decode(), flush=True)

app.run()
print("ended", flush=True)
"""


async def test_run_ends_with_sigterm_and_leaves_the_group(node: Node, tmp_path: Path) -> None:
    program = tmp_path / "service.py"
    program.write_text(PROGRAM.format(address=node.address))
    async with Rocketlet(node.address) as app:
        await app.publish("t", "one")
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"got one\n"
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.readline() == b"ended\n"
        assert await process.wait() == 0
    assert node.broker.groups.online("g") is None


def test_asyncapi_document_has_channels_operations_and_schemas_when_handlers_are_declared() -> None:
    app = Rocketlet("192.0.2.1:9876;192.0.2.2:9876")

    @app.subscriber({"guests": "new || back"}, group="waiters")
    @app.publisher("dishes", tag="hot")
    async def serve(guest: Guest) -> Dish | RetryLater:
        """Bring a dish.

        Quickly.
        """
        return Dish(name="soup")

    @app.subscriber("%RETRY%odd", group="others")
    async def look(message: Message) -> None: ...

    document = app.asyncapi(title="kitchen", version="2.0.0")
    assert (document["asyncapi"], document["info"]) == ("3.0.0", {"title": "kitchen", "version": "2.0.0"})
    assert [server["host"] for server in document["servers"].values()] == ["192.0.2.1:9876", "192.0.2.2:9876"]
    assert {channel["address"] for channel in document["channels"].values()} == {"guests", "dishes", "%RETRY%odd"}
    received = document["operations"]["receive_serve_guests"]
    assert (received["x-rocketmq-group"], received["x-rocketmq-filter"]) == ("waiters", "new || back")
    assert received["summary"] == "Bring a dish."
    sent = document["operations"]["send_serve_dishes"]
    assert (sent["action"], sent["x-rocketmq-tag"]) == ("send", "hot")
    assert sent["messages"] == [{"$ref": "#/channels/dishes/messages/Dish"}]
    schemas = document["components"]["schemas"]
    assert schemas["Guest"]["properties"]["table"] == {"$ref": "#/components/schemas/Table"}
    assert set(schemas) == {"Dish", "Guest", "Table"}
    assert document["components"]["messages"]["Bytes"]["contentType"] == "application/octet-stream"


async def test_application_publishes_json_and_names_what_it_accepts(rocketlet: Broker) -> None:
    rocketlet.create_topic("t", 1)
    app = Rocketlet(rocketlet.address)
    async with app:
        await app.publish("t", {"x": 1})
        await app.publish("t", [1, 2])
        with pytest.raises(MessageIllegal, match="expected bytes, str, dict, list or a model of pydantic"):
            await app.publish("t", 3)
    assert [message.body for message in rocketlet.messages("t")] == [b'{"x":1}', b"[1,2]"]
