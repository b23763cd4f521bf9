"""How soon a broker is ready again over 1,000 queues with 10^4 to 10^7 messages: after SIGTERM, and after SIGKILL with
5 seconds of sends behind the last checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.messages.topics import Topics
from rocketlet.broker.runtime import Runtime
from rocketlet.broker.store.store import Store
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.message import encode_host

from . import runner

QUEUES = 1000
QUEUES_PER_TOPIC = 10
BATCH = 1000  # messages of one append
UNSAVED = 100_000  # messages behind the last checkpoint, as a busy broker has after 5 s
BODY = b"x" * 100
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000)
HOST = encode_host("127.0.0.1", 1)


def topic_of(queue: int) -> str:
    return f"restart-{queue // QUEUES_PER_TOPIC}"


def create_topics(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    topics = Topics(Runtime(), BrokerConfig(data_dir=folder, address="127.0.0.1:1"))
    for queue in range(0, QUEUES, QUEUES_PER_TOPIC):
        topics.put(TopicConfig(topic_of(queue), QUEUES_PER_TOPIC, QUEUES_PER_TOPIC), 0)


def open_store(folder: Path) -> Store:
    store = Store(folder, segment_bytes=256 << 20, tag_code_of=lambda record: 0)
    store.recover([(topic_of(queue), 0) for queue in range(0, QUEUES, QUEUES_PER_TOPIC)])
    return store


def fill(folder: Path, messages: int, *, unsaved: int = 0, dies: bool = False) -> None:
    """Adds messages, to all queues in turn; a checkpoint is written before the last `unsaved`."""
    store = open_store(folder)
    queues = [store.queue(topic_of(number), number % QUEUES_PER_TOPIC) for number in range(QUEUES)]
    stage = store.stage
    for first in range(0, messages, BATCH):
        if unsaved and messages - first == unsaved:
            store.checkpoint()
        now_ms = store.begin_batch()
        for number in range(first, min(first + BATCH, messages)):
            stage(queues[number % QUEUES], BODY, b"", 0, 0, 0, now_ms, HOST)
        store.commit()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if not unsaved:
        store.checkpoint()
    store.close()


def fill_and_die(folder: Path, messages: int) -> None:
    """Adds messages in a process that is killed before it saves a checkpoint."""
    child = os.fork()
    if not child:
        fill(folder, messages, unsaved=messages, dies=True)
    os.waitpid(child, 0)


def start(folder: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Return a broker over the folder, and how long it took until it said that it is ready, ms."""
    watch = runner.Stopwatch()
    child = subprocess.Popen(
        [sys.executable, "-m", "rocketlet.command.cli", "start", "--host", "127.0.0.1", "--port", "0", "--no-vip",
         "--log-level", "error", "--data", str(folder)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    while b"ready on" not in child.stdout.readline():
        if child.poll() is not None:
            raise RuntimeError("the broker ended before it was ready")
    return child, watch.read_s()[0] * 1000


def end(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    child.send_signal(number)
    child.wait()


def measure(folder: Path, present: int, wanted: int, rounds: int) -> dict[str, float]:
    """Fills the folder up, then starts a broker over it after each kind of end."""
    unsaved = min(UNSAVED, wanted // 10, (wanted - present) // rounds)
    fill(folder, wanted - present - rounds * unsaved)
    clean_ms: list[float] = []
    killed_ms: list[float] = []
    end(start(folder)[0], signal.SIGTERM)
    for _ in range(rounds):
        child, taken_ms = start(folder)
        clean_ms.append(taken_ms)
        end(child, signal.SIGTERM)
        fill_and_die(folder, unsaved)
        child, taken_ms = start(folder)
        killed_ms.append(taken_ms)
        end(child, signal.SIGTERM)
    return {"messages": wanted, "clean_ms": runner.median(clean_ms), "killed_ms": runner.median(killed_ms)}


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    growth: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="rocketlet-restart-", dir=options.folder) as name:
        folder = Path(name)
        create_topics(folder)
        present = 0
        for wanted in [size for size in GROWTH if size < options.messages] + [options.messages]:
            growth.append(measure(folder, present, wanted, options.rounds))
            present = wanted
    columns = ("messages", "ready after a clean end, ms", "after SIGKILL, ms")
    runner.show("A broker over stored messages", columns, [list(found.values()) for found in growth])
    return {"queues": QUEUES, **growth[-1], "growth": growth}


if __name__ == "__main__":
    made = runner.parser(__doc__)
    made.add_argument("--messages", type=whole(1), default=GROWTH[-1])
    made.add_argument("--folder", type=runner.folder, help="where 2.5 GB are written; default: a temporary folder")
    runner.main("restart", made, run)
