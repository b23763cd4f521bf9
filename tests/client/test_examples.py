"""The examples and adapters of other libraries, each run against a broker."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    Consumer,
    Message,
    MessageIllegal,
    Producer,
    RetryLater,
    SharedConsumer,
)
from rocketlet.testing.clock import MovableClock

from ..conftest import PATIENCE_S, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


async def test_a_fastapi_service_sends_and_consumes(node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="needs FastAPI")
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    await create_topic(wire, "orders", 2)
    monkeypatch.setenv("NAME_SERVER", node.address)
    app = example("fastapi_service").app
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
        asyncio.timeout(PATIENCE_S),
    ):
        assert (await client.post("/orders/7", params={"dish": "soup"})).status_code == 202

        async def is_stored() -> bool:
            return bool((await client.get("/orders/7")).status_code != 404)

        await eventually(is_stored)
        assert (await client.get("/orders/7")).json() == {"dish": "soup"}
    assert node.broker.groups.online("kitchen") is None, "the application has left"


async def test_the_fastapi_service_of_the_guide_starts_on_a_broker_without_its_topic(node: Node) -> None:
    pytest.importorskip("fastapi", reason="needs FastAPI")
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    guide = (EXAMPLES.parent / "docs/how-to/integrate.md").read_text()
    program = guide.partition('title="app.py"\n')[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(program.replace("127.0.0.1:9876", node.address), names)
    app = names["app"]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop") as client,
        asyncio.timeout(PATIENCE_S),
    ):
        assert (await client.get("/healthz")).json() == {"lag": 0}
        assert (await client.post("/orders/7", params={"dish": "soup"})).status_code == 202


async def test_an_outbox_sends_what_commits_and_nothing_else(node: Node, wire: Wire, tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="needs SQLAlchemy")
    shop = example("outbox")
    await create_topic(wire, "orders", 2)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    shop.metadata.create_all(engine)
    for number in range(5):
        shop.place_order(engine, str(number), f"dish {number}")
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        shop.place_order(engine, "0", "the same number again")
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "orders", inbox, start="first"):
        real = producer.send

        async def dies_after_the_second(*arguments: Any, **options: Any) -> Any:
            result = await real(*arguments, **options)
            if result.queue_offset is not None and options["queue_key"] == "1":
                raise RuntimeError("the relay died after the broker had the message")
            return result

        producer.send = dies_after_the_second  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="died"):
            await shop.relay_once(engine, producer)
        producer.send = real  # type: ignore[method-assign]
        assert await shop.relay_once(engine, producer) == 4
        assert await shop.relay_once(engine, producer) == 0
        await eventually(lambda: len(inbox.messages) == 6)
    assert sorted(set(inbox.bodies)) == [b"dish %d" % number for number in range(5)]
    engine.dispose()
    assert len({message.message_id for message in inbox.messages}) == 5, "what was sent twice has one id"


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_message_id_is_handled_once_when_the_store_has_it(node: Node, tmp_path: Path, kind: Any) -> None:
    ledger = example("handled_once").Ledger(tmp_path / "payments.db")
    fails = ["b"]
    done = Inbox()

    async def pay(message: Message) -> RetryLater | None:
        await ledger.pay(message)
        if message.body.decode() in fails:
            fails.clear()
            return RetryLater(delay_level=1)  # neither its effect nor its id is kept
        await done(message)
        return None

    def rows() -> list[str]:
        return sorted(row[0] for row in ledger.database.execute("select body from payments"))

    options: dict[str, Any] = {"once": ledger, "concurrency": 1, "start": "first"}
    async with Producer(node.address) as producer, kind(node.address, "g", "payments", pay, **options):
        for body, message_id in ((b"a", "1"), (b"a again", "1"), (b"b", "2"), (b"c", "3"), (b"c again", "3")):
            await producer.send("payments", body, message_id=message_id, queue_key="one queue")
        await eventually(lambda: len(rows()) == 2)
        node.clock.advance(1)
        await eventually(lambda: rows() == ["a", "b", "c"])
        await producer.send("payments", b"b again", message_id="2", queue_key="one queue")
        await producer.send("payments", b"d", queue_key="one queue")
        await eventually(lambda: rows() == ["a", "b", "c", "d"])
    assert sorted(done.bodies) == [b"a", b"b", b"c", b"d"]
    ledger.database.close()


async def test_a_relay_that_cannot_send_ends_its_program_with_the_reason(node: Node, tmp_path: Path) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="needs SQLAlchemy")
    shop = example("outbox")
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sqlalchemy.create_engine(database)
    shop.metadata.create_all(engine)
    shop.place_order(engine, "1", "")  # no message may be empty
    engine.dispose()
    with pytest.raises(MessageIllegal, match="the body is empty"):
        await shop.main(node.address, database)


async def test_taskiq_tasks_run_and_run_again_if_their_worker_dies(node: Node, wire: Wire) -> None:
    pytest.importorskip("taskiq", reason="needs taskiq")
    adapter = pytest.importorskip("rocketlet.taskiq", reason="needs an installation that knows it: make dev")
    from taskiq.api import run_receiver_task
    from taskiq.brokers.inmemory_broker import InmemoryResultBackend

    await create_topic(wire, "taskiq", 2)
    results: Any = InmemoryResultBackend()
    broker = adapter.RocketletBroker(node.address, drain_s=0).with_result_backend(results)
    started = asyncio.Event()

    @broker.task  # type: ignore[untyped-decorator, unused-ignore]
    async def add(one: int, two: int) -> int:
        return one + two

    @broker.task(queue_key="k")  # type: ignore[untyped-decorator, unused-ignore]
    async def never_ends() -> None:
        started.set()
        await asyncio.Event().wait()

    await broker.startup()
    worker = asyncio.create_task(run_receiver_task(broker))
    kicked = [await add.kiq(number, 1) for number in range(10)]
    found = [(await task.wait_result(timeout=PATIENCE_S)).return_value for task in kicked]
    assert found == list(range(1, 11))
    await never_ends.kiq()
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    await broker.shutdown()
    again: list[Message] = []

    async def handle(message: Message) -> None:
        again.append(message)

    async with Consumer(node.address, "taskiq", "taskiq", handle):
        await eventually(lambda: any(b"never_ends" in message.body for message in again))
    assert len(again) == 1


async def test_taskiq_tasks_are_delayed_and_shared_by_labels(nodes: Nodes) -> None:
    pytest.importorskip("taskiq", reason="needs taskiq")
    adapter = pytest.importorskip("rocketlet.taskiq", reason="needs an installation that knows it: make dev")
    from taskiq.api import run_receiver_task

    node = await nodes.start(clock=MovableClock(stands=True))
    async with AdminClient(node.address) as admin:
        await admin.create_topic("taskiq", queues=4, message_type="PRIORITY")
    broker = adapter.RocketletBroker(node.address, sharing=True)
    done: list[str] = []

    @broker.task  # type: ignore[untyped-decorator, unused-ignore]
    async def note(text: str) -> None:
        done.append(text)

    await broker.startup()
    at = datetime.fromtimestamp(node.clock.time_s(), UTC) + timedelta(seconds=60)
    await note.kicker().with_labels(at=at.isoformat()).kiq("at")
    await note.kicker().with_labels(delay=30).kiq("delay")
    await note.kicker().with_labels(priority=3).kiq("urgent")
    worker = asyncio.create_task(run_receiver_task(broker))
    await eventually(lambda: done == ["urgent"])
    assert node.broker.store.queue("taskiq", 3).next == 1, "the other messages may go to any queue later"
    node.clock.advance(30)
    await eventually(lambda: done == ["urgent", "delay"])
    node.clock.advance(30)
    await eventually(lambda: done == ["urgent", "delay", "at"])
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    await broker.shutdown()


async def test_jobs_are_shared_by_workers(node: Node, wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    await create_topic(wire, "jobs", 1)
    await example("share_jobs").main(node.address)
    said = capsys.readouterr().out
    assert "job 5, attempt 2" in said
    assert said.count(": job ") == 10, "the broker's log speaks of job 7, too"
    await eventually(lambda: node.broker.store.queue("%DLQ%workers", 0).next == 1)
