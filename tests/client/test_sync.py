"""The facade for code without an event loop, from threads of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
from queue import Queue
from typing import Any
from unittest.mock import Mock

import pytest
from rocketlet.client import AdminClient as AsyncAdminClient
from rocketlet.client import ConfigError, Message, RetryLater, TopicNotFound
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.sync import AdminClient, Consumer, LiteConsumer, Producer, SharedConsumer
from rocketlet.sync.loop import Loop

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.topics import put


async def in_thread(work: Any) -> Any:
    """As a script does it: the broker of the test continues in the loop here."""
    return await asyncio.to_thread(work)


async def test_a_script_sends_and_receives(node: Node, one_queue: None) -> None:
    def script() -> list[bytes]:
        with Producer(node.address) as producer:
            results = [producer.send("t", b"%d" % number, keys="k") for number in range(5)]
            producer.send_batch("t", [b"5", b"6"])
            assert [result.queue_offset for result in results] == [0, 1, 2, 3, 4]
        seen = []
        with Consumer(node.address, "g", "t", start="first") as consumer:
            for message in consumer.messages(timeout_s=PATIENCE_S):
                seen.append(message.body)
                if message.body == b"2":
                    consumer.reject(message)
                if message.body == b"4":
                    break
            assert consumer.lag() == 3
            assert next(iter(consumer)).body == b"4", "again, because the loop was left"
        with Consumer(node.address, "g", "t") as consumer:
            last = [consumer.receive(timeout_s=PATIENCE_S) for _ in range(3)]
            for message in last:
                consumer.ack(message)
            with pytest.raises(TimeoutError):
                consumer.receive(timeout_s=0.01)
            assert list(consumer.messages(timeout_s=0.01)) == []
        return seen + [message.body for message in last]

    assert await in_thread(script) == [b"0", b"1", b"2", b"3", b"4", b"4", b"5", b"6"]
    assert node.broker.offsets.get("g", "t", 0) == 7
    assert node.broker.store.queue("%DLQ%g", 0).next == 1


async def test_a_handler_is_a_plain_function(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)

    def script() -> set[bytes]:
        seen: set[bytes] = set()
        enough = threading.Event()

        def handle(message: Message) -> None:
            seen.add(message.body)
            if len(seen) == 10:
                enough.set()

        with Consumer(node.address, "g", "t", handle) as consumer, Producer(node.address) as producer:
            for number in range(10):
                producer.send("t", b"%d" % number)
            assert enough.wait(PATIENCE_S)
            assert len(consumer.assigned()) >= 2
        return seen

    assert await in_thread(script) == {b"%d" % number for number in range(10)}


async def test_what_was_received_and_not_settled_does_not_hold_the_end_up(node: Node, one_queue: None) -> None:
    def script() -> bytes:
        with Producer(node.address) as producer:
            producer.send("t", b"x")
        for _ in range(2):
            with Consumer(node.address, "g", "t", start="first", drain_s=3600) as consumer:
                message = consumer.receive(timeout_s=PATIENCE_S)
        return message.body

    assert await in_thread(script) == b"x"


async def test_transactions_requests_and_errors(node: Node, one_queue: None) -> None:
    def script() -> None:
        with Producer(node.address, "p", check=lambda message: None) as producer:
            with producer.transaction("t", b"yes"):
                pass
            with pytest.raises(ZeroDivisionError), producer.transaction("t", b"no"):
                raise ZeroDivisionError

            def handle(message: Message) -> None:
                if message.body == b"ping":
                    producer.reply(message, b"pong")

            with Consumer(node.address, "g", "t", handle, start="first"):
                assert producer.request("t", b"ping", timeout_s=PATIENCE_S).body == b"pong"
        with pytest.raises(ConfigError, match="host:port"):
            Producer("nowhere")

    await in_thread(script)
    assert node.broker.store.queue("t", 0).next == 2


async def test_listeners_and_checks_may_block_as_handlers_may(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(transaction_check_interval_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    await create_topic(await connect(node.address), "t", 1)
    threads: dict[str, str] = {}
    checked = threading.Event()

    def note(what: str) -> None:
        threads[what] = threading.current_thread().name
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()  # Django's ORM, for one, looks

    def check(message: Any) -> bool:
        note("check")
        checked.set()
        return True

    def script() -> None:
        with Producer(node.address, "p", check=check) as producer:
            producer.send_oneway("t", b"0", queue_key="k")
            assert producer.queue_for("t", "k").queue_id == 0
            with monkeypatch.context() as patch, producer.transaction("t", b"maybe"):
                patch.setattr(ProducerTransactions, "end", unsent)
            assert checked.wait(PATIENCE_S)
            options: Any = {name: lambda queues, name=name: note(name) for name in ("on_assigned", "on_revoked")}
            with Consumer(node.address, "g", "t", start="first", **options) as consumer:
                consumer.ack(consumer.receive(timeout_s=PATIENCE_S))
                assert len(consumer.assignment()) >= 1

    async def unsent(*arguments: object, **options: object) -> None:
        """As if the process had died before it sent the outcome."""

    await in_thread(script)
    await eventually(lambda: node.broker.transactions.waiting == 0)
    assert node.broker.store.queue("t", 0).next == 2, "the check has committed the message"
    assert set(threads) == {"check", "on_assigned", "on_revoked"}
    assert "rocketlet" not in threads.values()
    with pytest.raises(ConfigError, match="is called with a message"):
        await in_thread(lambda: Producer(node.address, check=script))  # type: ignore[arg-type]


async def test_an_interrupted_wait_takes_no_message_with_it(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        """The next wait ends as by Ctrl-C."""

        def result(self: Any, timeout: float | None = None) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(concurrent.futures.Future, "result", result)

    def script() -> None:
        with Producer(node.address) as producer, Consumer(node.address, "g", "t", start="first") as consumer:
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                consumer.receive()
            producer.send("t", b"1")
            assert consumer.receive(timeout_s=PATIENCE_S).body == b"1"
        with Consumer(node.address, "g", "t", batch_size=2) as consumer:
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                next(consumer.batches())
            assert [message.body for message in next(consumer.batches())] == [b"1"]

    await in_thread(script)


async def test_a_handler_that_stops_its_consumer_gets_an_error(node: Node, one_queue: None) -> None:
    def script() -> str:
        errors: list[ConfigError] = []
        told = threading.Event()

        def handle(message: Message) -> None:
            with pytest.raises(ConfigError) as raised:
                consumer.stop()
            errors.append(raised.value)
            told.set()

        with Producer(node.address) as producer, Consumer(node.address, "g", "t", handle, start="first") as consumer:
            producer.send("t", b"x")
            assert told.wait(PATIENCE_S)
        return str(errors[0])

    assert "cannot stop its own consumer" in await in_thread(script)


async def test_the_loop_outlives_what_user_code_raises_in_it(caplog: pytest.LogCaptureFixture) -> None:
    async def leave(error: type[BaseException]) -> None:
        raise error

    def script() -> str:
        loop = Loop()
        for error in (SystemExit, KeyboardInterrupt):
            with pytest.raises(error):
                loop.run(leave(error))
        return loop.run(asyncio.sleep(0, "goes on"))

    assert await in_thread(script) == "goes on"
    assert "loop_interrupted" in caplog.text


async def test_a_cell_of_a_notebook_may_wait_and_a_coroutine_may_not() -> None:
    loop = Loop()
    wait = "import asyncio; result = loop.run(asyncio.sleep(0, 5))"
    cell: dict[str, Any] = {"loop": loop}
    exec(compile(wait, "<cell>", "exec"), cell)  # within the loop of this test, as a notebook's kernel does it
    assert cell["result"] == 5
    for given in (asyncio.sleep, lambda _: asyncio.sleep(0)):
        with pytest.raises(ConfigError, match="in a coroutine use"):
            loop.run(given(0))
    refused: list[ConfigError] = []

    def callback() -> None:
        with pytest.raises(ConfigError) as raised:
            loop.run(asyncio.sleep(0))
        refused.append(raised.value)

    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(refused) == 1


SCRIPT = """
import atexit, os, sys
import rocketlet.sync

def at_exit():
    producer.stop()
    print("stopped at exit")

atexit.register(at_exit)
from rocketlet.sync import Consumer, Producer
producer = Producer(sys.argv[1])
producer.start()
producer.send("t", b"x")
child = os.fork()
if not child:
    try:
        producer.send("t", b"y")
    except ValueError as error:
        print(str(error).partition(";")[2], flush=True)
    with Producer(sys.argv[1]) as own:
        print(own.send("t", b"z").status, flush=True)
    os._exit(0)
os.waitpid(child, 0)
consumer = Consumer(sys.argv[1], "g", "t", start="first")
consumer.start()
left_open = consumer.messages()
print(next(left_open).topic)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
async def test_a_script_ends_whatever_it_left_open_and_a_forked_child_makes_its_own(
    node: Node, one_queue: None
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, node.address]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, complained = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert said.decode().splitlines() == [
        " create a client in each process, after the fork",
        "ok",
        "t",
        "stopped at exit",
    ], complained.decode()
    assert process.returncode == 0


async def test_in_a_coroutine_it_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"rocketlet\.Producer"):
        Producer("127.0.0.1:1")


async def test_batches_are_acknowledged_when_the_next_is_asked_for_and_are_redelivered_after_a_break(
    node: Node, one_queue: None
) -> None:
    def script() -> list[list[bytes]]:
        with Producer(node.address) as producer:
            producer.send_batch("t", [b"%d" % number for number in range(5)])
        seen = []
        with Consumer(node.address, "g", "t", start="first", batch_size=2) as consumer:
            with pytest.raises(ConfigError, match=r"iterate over batches\(\)"):
                consumer.receive()
            for batch in consumer.batches(timeout_s=PATIENCE_S):
                seen.append([message.body for message in batch])
                if len(seen) == 2:
                    break
            again = consumer.batches(timeout_s=PATIENCE_S)
            seen += [[message.body for message in next(again)] for _ in range(2)]
            with Producer(node.address) as producer:
                producer.send("t", b"5")
            next(again)
            assert consumer.lag() == 1, "the last one is in flight"
        return seen

    assert await in_thread(script) == [[b"0", b"1"], [b"2", b"3"], [b"2", b"3"], [b"4"]]


async def test_members_that_share_messages(node: Node, one_queue: None) -> None:
    def script() -> list[bytes]:
        seen: list[bytes] = []
        handled = threading.Event()
        with Producer(node.address) as producer:
            for number in range(4):
                producer.send("t", b"%d" % number)
            with SharedConsumer(node.address, "g", "t", start="first") as consumer:
                consumer.retry(consumer.receive(timeout_s=PATIENCE_S), RetryLater(delay=0))
                for message in consumer.messages(timeout_s=PATIENCE_S):
                    seen.append(message.body)
                    if len(seen) == 4:
                        consumer.ack(message)
                        break
                with pytest.raises(TimeoutError):
                    consumer.receive(timeout_s=0.01)
            with SharedConsumer(node.address, "g", "t", lambda message: handled.set()):
                producer.send("t", b"last")
                assert handled.wait(PATIENCE_S)
        return seen

    assert sorted(await in_thread(script)) == [b"0", b"1", b"2", b"3"]
    assert node.broker.pops.pools.unfinished("g") == 0


async def test_lite_topics_are_received_in_order_and_a_taken_one_is_reported(node: Node) -> None:
    put(node, message_type="LITE")
    attributes = {"lite.bind.topic": "t", "lite.sub.model": "Exclusive"}
    node.broker.group_configs.put(GroupConfig("g", attributes=attributes))
    taken: Queue[str] = Queue()
    has_sent = threading.Event()

    def note(name: str) -> None:
        assert has_sent.wait(PATIENCE_S), "a listener that blocks must not keep the clients from working"
        taken.put(name)

    def script() -> None:
        with (
            Producer(node.address) as producer,
            LiteConsumer(node.address, "g", "t", lite_topics=["a"], on_taken=note) as consumer,
        ):
            consumer.subscribe("b", start="first")
            for name, body in (("a", b"1"), ("a", b"2"), ("b", b"3")):
                producer.send("t", body, lite_topic=name)
            assert consumer.lag() == 3
            seen: list[tuple[str | None, bytes]] = []
            for message in consumer.messages(timeout_s=PATIENCE_S):
                seen.append((message.lite_topic, message.body))
                if len(seen) == 3:
                    consumer.ack(message)
                    break
            assert sorted(seen, key=lambda item: item[1]) == [("a", b"1"), ("a", b"2"), ("b", b"3")]
            assert [body for name, body in seen if name == "a"] == [b"1", b"2"]
            consumer.unsubscribe("b")
            assert consumer.lite_topics == {"a"}
            handled: Queue[bytes] = Queue()
            with LiteConsumer(node.address, "g", "t", lambda message: handled.put(message.body)) as other:
                other.subscribe("a")
                producer.send("t", b"4", lite_topic="a")
                has_sent.set()
                assert handled.get(timeout=PATIENCE_S) == b"4"
            assert taken.get(timeout=PATIENCE_S) == "a"
            assert consumer.lite_topics == frozenset()

    await in_thread(script)


def test_it_is_refused_with_a_reason_where_gevent_has_replaced_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gevent.monkey", Mock(is_module_patched=lambda name: name == "threading"))
    with pytest.raises(ConfigError, match=r"gevent has replaced threads by greenlets.*patch_all"):
        Producer("127.0.0.1:1").start()


async def test_admin_client_runs_methods_without_a_loop(node: Node) -> None:
    async def created(admin: AsyncAdminClient) -> list[str]:
        await admin.create_topic("t", queues=2)
        return await admin.topics()

    def script() -> None:
        with AdminClient(node.address) as admin:
            assert "t" in admin.call(created)
            assert len(admin.call(lambda admin: admin.topic("t")).ranges) == 2
            with pytest.raises(TopicNotFound):
                admin.call(lambda admin: admin.topic("missing"))

    await in_thread(script)
