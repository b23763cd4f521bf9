"""The Celery transport, with prefork workers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import Access, AdminClient, ConfigError
from rocketlet.protocol.names import Queue
from rocketlet.sync import Producer
from rocketlet.testing import Broker, Fault

from ..conftest import PATIENCE_S, Node, eventually

celery = pytest.importorskip("celery", reason="needs Celery")
kombu = pytest.importorskip("kombu", reason="needs Celery")
pytest.importorskip("rocketlet.celery", reason="needs an installation that knows it: make dev")

TASKS = """
import os
import sys
import time
from pathlib import Path

import rocketlet.celery
from celery import Celery
from celery.exceptions import Reject

app = Celery("tasks", broker=os.environ["BROKER"])
app.conf.broker_transport_options = {"consumer": {"invisible_s": 2, "client_name": f"worker-{os.getpid()}"}}
app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 1
app.conf.worker_lost_wait = 0.1
here = Path(__file__).parent


def note(text):
    with open(here / "notes", "a") as notes:
        notes.write(text + "\\n")


@app.task
def add(one, two):
    note(f"sum {one + two}")


@app.task(bind=True, max_retries=3)
def flaky(self):
    note(f"flaky {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)


@app.task(bind=True)
def late(self, due):
    note(f"late {time.time() >= due}")


@app.task(bind=True, acks_late=True)
def refuse(self):
    raise Reject("not today", requeue=False)


@app.task(acks_late=True, acks_on_failure_or_timeout=False)
def charge(card):
    raise ValueError(f"no such card: {card}")


@app.task(bind=True)
def hang(self):
    note(f"hang {os.getpid()} {self.request.delivery_info['redelivered']}")
    while not (here / "go").exists():
        time.sleep(0.01)
    note("hang ended")


@app.task
def chained(number):
    add.delay(number, number)  # sent by the worker's forked process
"""


class Celery:
    """An application whose workers are processes, and what their tasks wrote."""

    def __init__(self, node: Node, folder: Path, stack: AsyncExitStack) -> None:
        self.node, self.folder, self._stack = node, folder, stack
        (folder / "tasks.py").write_text(TASKS)
        self.app: Any = celery.Celery("tasks", broker=f"rocketlet://{node.address}")

    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    async def wrote(self, wanted: str | Callable[[str], bool], count: int = 1) -> None:
        is_wanted = wanted if callable(wanted) else wanted.__eq__
        await eventually(lambda: sum(map(is_wanted, self.notes())) >= count)

    async def send(self, name: str, *arguments: object, **options: Any) -> None:
        await asyncio.to_thread(self.app.send_task, f"tasks.{name}", arguments, **options)

    async def worker(self, *options: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "celery", "-A", "tasks", "worker", "--pool", "prefork", "-c", "2", *options),
            cwd=self.folder,
            env={**os.environ, "BROKER": f"rocketlet://{self.node.address}", "C_FORCE_ROOT": "1"},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self._stack.push_async_callback(end, process)
        return process


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def running(node: Node, folder: Path) -> AsyncIterator[Celery]:
    async with AsyncExitStack() as stack:
        found = Celery(node, folder, stack)
        yield found
        await asyncio.to_thread(found.app.close)


async def test_celery_tasks_run_retry_and_wait_for_their_time(node: Node, tmp_path: Path) -> None:
    async with running(node, tmp_path) as tasks:
        await tasks.send("add", 1, 2)  # before any worker runs
        worker = await tasks.worker()
        await tasks.wrote("sum 3")
        await tasks.send("flaky")
        await tasks.wrote("flaky 2")
        await tasks.send("late", time.time() + 1, countdown=1)
        await tasks.wrote("late True")
        await tasks.send("chained", 20)
        await tasks.wrote("sum 40")
        found = await asyncio.to_thread(tasks.app.control.inspect(timeout=PATIENCE_S, limit=1).registered)
        ((name, registered),) = found.items()
        assert "tasks.add" in registered
        assert await asyncio.to_thread(tasks.app.control.ping, [name], PATIENCE_S) == [{name: {"ok": "pong"}}]
        revoked = await asyncio.to_thread(
            tasks.app.control.revoke, "an-id", reply=True, destination=[name], timeout=PATIENCE_S
        )
        assert list(revoked[0]) == [name]
        await tasks.send("add", 500, 1, task_id="an-id")
        for number, task in enumerate(("refuse", "charge"), 1):
            await tasks.send(task, *(["4711"] if task == "charge" else []))
            await eventually(lambda number=number: node.broker.store.queue("%DLQ%celery", 0).next == number)  # type: ignore[misc]
        async with AdminClient(node.address) as admin:
            dead = [
                message
                async for part in admin.read(Queue("%DLQ%celery", node.config.name, 0), 0, 2)
                for message in part
            ]
        assert [re.sub(r":\d+ ", " ", message.failure).split("; ")[:2] for message in dead] == [
            ["Reject: not today", "tasks.py in refuse"],
            ["ValueError: no such card: 4711", "tasks.py in charge"],
        ]
        assert "sum 501" not in tasks.notes(), "it was revoked"
        for number in range(50):
            await tasks.send("add", 1000, number)
        await tasks.wrote(lambda note: note.startswith("sum 1"), 50)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.wait(), PATIENCE_S) == 0
        assert node.broker.pops.pools.unfinished("celery") == 0
        assert tasks.notes().count("sum 3") == tasks.notes().count("late True") == 1


async def test_celery_task_runs_in_another_worker_when_its_worker_is_killed(node: Node, tmp_path: Path) -> None:
    async with running(node, tmp_path) as tasks:
        await tasks.send("hang")
        killed = await tasks.worker()
        await tasks.wrote(lambda note: note.endswith("False"))
        os.killpg(killed.pid, signal.SIGKILL)  # the worker and its pool
        await killed.wait()
        await tasks.worker()
        await tasks.wrote(lambda note: note.endswith("True"))
        (tmp_path / "go").touch()
        await tasks.wrote("hang ended")
        await eventually(lambda: node.broker.pops.pools.unfinished("celery") == 0)
        assert tasks.notes().count("hang ended") == 1


async def test_celery_task_runs_again_when_its_pool_process_is_killed(node: Node, tmp_path: Path) -> None:
    async with running(node, tmp_path) as tasks:
        await tasks.send("hang")
        worker = await tasks.worker()
        await tasks.wrote(lambda note: note.endswith("False"))
        os.kill(int(tasks.notes()[0].split()[1]), signal.SIGKILL)
        await tasks.wrote(lambda note: note.endswith("True"))
        worker.send_signal(signal.SIGTERM)  # while the task runs, which the worker waits for
        (tmp_path / "go").touch()
        assert await asyncio.wait_for(worker.wait(), PATIENCE_S) == 0
        assert tasks.notes().count("hang ended") == 1
        assert node.broker.pops.pools.unfinished("celery") == 0


async def test_full_celery_worker_leaves_tasks_to_other_workers(node: Node, tmp_path: Path) -> None:
    async with running(node, tmp_path) as tasks:
        await tasks.worker("-c", "1", "-n", "first@here")
        await tasks.send("hang")
        await tasks.wrote(lambda note: note.startswith("hang"))
        await tasks.worker("-c", "1", "-n", "second@here")
        for number in range(10):
            await tasks.send("add", number, 100)
        await tasks.wrote(lambda note: note.startswith("sum 10"), 10)
        assert "hang ended" not in tasks.notes()
        (tmp_path / "go").touch()
        await tasks.wrote("hang ended")


def test_celery_transport_refuses_two_accounts() -> None:
    connection = celery.Celery(
        broker="rocketlet://key:secret@127.0.0.1:1", broker_transport_options={"access": Access()}
    )
    with pytest.raises(ConfigError, match="access: the broker URL has an account, too"):
        connection.connection().connect()


async def test_celery_queues_can_be_read_and_purged_by_kombu(node: Node) -> None:
    def script() -> None:
        with kombu.Connection(
            f"rocketlet://{node.address}", transport_options={"queue_name_prefix": "x."}
        ) as connection:
            queue = connection.SimpleQueue("a/b")
            for number in range(3):
                queue.put({"number": number}, priority=0)
            first = queue.get(timeout=PATIENCE_S)
            first.requeue()
            seen = [queue.get(timeout=PATIENCE_S) for _ in range(3)]
            assert sorted(message.payload["number"] for message in seen) == [0, 1, 2]
            again = [message for message in seen if message.delivery_info["redelivered"]]
            assert [message.payload for message in again] == [first.payload]
            seen[0].ack()
            seen[1].requeue()
            seen[2].requeue()
            assert queue.clear() == 2
            with pytest.raises(queue.Empty):
                queue.get(block=False)

    await asyncio.to_thread(script)
    assert node.broker.pops.pools.unfinished("x-a-b") == 0


def later(days: float = 0.0, **parts: float) -> dict[str, str]:
    return {"eta": (datetime.now(UTC) + timedelta(days=days, **parts)).isoformat()}


async def test_celery_task_beyond_the_limit_of_the_broker_is_delayed_again(node: Node) -> None:
    def script() -> None:
        with kombu.Connection(f"rocketlet://{node.address}") as connection:
            queue = connection.SimpleQueue("tasks")
            connection.transport.delays.longest = timedelta(seconds=0.5)
            queue.put({"number": 1}, headers=later(seconds=4.5))
            message = queue.get(timeout=PATIENCE_S)
            eta = datetime.fromisoformat(message.headers["eta"])
            assert eta - datetime.now(UTC) <= timedelta(seconds=1)
            message.ack()

    await asyncio.to_thread(script)
    stored = [queue.next for (name, _), queue in node.broker.store.queues.items() if name == "tasks"]
    assert sum(stored) > 1, "it was sent again"
    assert node.broker.pops.pools.unfinished("tasks") == 0


def test_celery_task_is_delayed_by_the_limit_of_apache_when_the_broker_refuses_a_longer_delay() -> None:
    with Broker() as broker:
        broker.create_topic("tasks", 1)
        with kombu.Connection(f"rocketlet://{broker.address}") as connection:
            queue = connection.SimpleQueue("tasks")
            broker.faults.add(Fault.answer("SEND_MESSAGE_V2", response="MESSAGE_ILLEGAL", times=1))
            queue.put({"number": 1}, headers=later(days=10))
            assert connection.transport.delays.longest == timedelta(days=3)
            assert len(broker.requests_of("SEND_MESSAGE_V2")) == 2
            queue.put({"number": 2}, headers=later(days=10))
            assert len(broker.requests_of("SEND_MESSAGE_V2")) == 3
            assert broker.messages("tasks") == []


def test_celery_messages_of_others_are_rejected_and_broadcasts_skipped() -> None:
    with Broker() as broker, Producer(broker.address) as producer:
        broker.create_topic("all", 1)
        with kombu.Connection(f"rocketlet://{broker.address}") as connection:
            received: list[object] = []
            exchange = kombu.Exchange("all", type="fanout")
            channel = connection.channel()
            queues = [kombu.Queue("tasks"), kombu.Queue("mine", exchange)]
            parts = b'{"properties": {"delivery_info": %s}, "headers": %s}'
            info = b'{"exchange": "", "routing_key": "tasks"}'
            bodies = [b"\xff", b"[]", b"{}", parts % (b"[]", b"{}"), parts % (info, b'{"eta": "today"}')]
            with kombu.Consumer(channel, queues, callbacks=[lambda body, message: received.append(body)], no_ack=True):
                for body in bodies:
                    producer.send("tasks", body)
                    producer.send("all", body)
                sender = kombu.Producer(connection.channel())
                sender.publish("a broadcast", exchange=exchange)
                sender.publish("a task", exchange="", routing_key="tasks")
                while len(received) < 2 or len(broker.messages("%DLQ%tasks")) < len(bodies):
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.05)
        assert sorted(map(str, received)) == ["a broadcast", "a task"]
        dead = broker.messages("%DLQ%tasks")
        assert sorted(message.body for message in dead) == sorted(bodies)
        assert all(message.failure.startswith("not a message of Celery: ") for message in dead)


def test_celery_reject_that_is_carried_out_later_has_its_reason() -> None:
    from celery.worker.request import ExceptionInfo
    from rocketlet.celery.request import TaskRequest

    with Broker() as broker, kombu.Connection(f"rocketlet://{broker.address}") as connection:
        app = celery.Celery("tasks", set_as_current=False)

        def charge() -> None: ...

        queue = connection.SimpleQueue("tasks")
        queue.put([[], {}, {}], headers={"id": "an-id", "task": "charge"})
        message = queue.get(timeout=PATIENCE_S)
        later: list[Callable[[], None]] = []
        request = TaskRequest(
            message,
            app=app,
            task=app.task(name="charge", acks_late=True, acks_on_failure_or_timeout=False)(charge),
            on_reject=lambda log, errors, requeue: later.append(lambda: message.reject(requeue=requeue)),
        )
        try:
            raise ValueError("no such card")
        except ValueError:
            request.on_failure(ExceptionInfo())
        assert broker.messages("%DLQ%tasks") == []
        (reject,) = later
        reject()
        asyncio.run(eventually(lambda: broker.messages("%DLQ%tasks") != []))
        (dead,) = broker.messages("%DLQ%tasks")
        assert dead.failure.startswith("ValueError: no such card; test_celery.py:")
