"""Rows of 200 bytes through a standalone Spark cluster of two workers, written and read at the same time, and then 1,000
triggers of few rows: whether all arrive once, and what memory processes take meanwhile. With --fill, our sink writes all rows
before Spark reads them, without Spark, which takes a fraction of the time.

It can be stopped at any time and goes on where it was: everything is in --folder. The curve is in its `memory.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyspark
import uvloop
from rocketlet.command.plumbing.numbers import whole
from rocketlet.spark.options import write_options
from rocketlet.spark.sink import send_all
from rocketlet.testing.ports import free_port

from . import common
from .peers import Peer, listening, process, rocketlet
from .processes import below, proportional_bytes, used
from .spark import create_topic
from .spark_soak_job import BODY_BYTES, PART_ROWS, ROWS, TRIGGERS, State

MIB = 1 << 20
SAMPLE_S = 5.0
FILL_ROWS = 20_000  # encoded at once
START_TIMEOUT_S = 300.0  # for a JVM beside other work
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
SHOWN = 20  # points of the curve that are printed


def parser() -> Any:
    made = common.parser(__doc__ or "")
    made.add_argument("--rows", type=whole(1), default=100_000_000)
    made.add_argument("--triggers", type=whole(0), default=1000)
    made.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "rocketlet" / "spark-soak")
    made.add_argument(
        "--batch-rows", type=whole(1), default=500_000, help="the most rows of a trigger that reads them all"
    )
    made.add_argument("--fill", action="store_true", help="write all rows first, without Spark")
    made.add_argument("--anew", action="store_true", help="begin again instead of going on")
    return made


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A master and two workers with one core each. The master's address."""
    port = free_port()
    environment = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(folder / "work"), "SPARK_NO_DAEMONIZE": "1"}
    command = (str(SPARK_CLASS), "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1")
    async with AsyncExitStack() as stack:
        log = folder / "cluster.log"
        ports = ("--port", str(port), "--webui-port", str(free_port()))
        await stack.enter_async_context(process((*command, *ports), log, **environment))
        await listening(port, START_TIMEOUT_S)
        for _ in range(2):
            worker = (
                str(SPARK_CLASS), "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "1",
                "--memory", "1g", "--webui-port", str(free_port()), f"spark://127.0.0.1:{port}",
            )  # fmt: skip
            await stack.enter_async_context(process(worker, log, **environment))
        yield f"spark://127.0.0.1:{port}"


def memory(broker: Peer, driver_pid: int | None) -> dict[str, float]:
    """MiB: the broker, the driver's JVM and its Python, the executors' JVMs and theirs, both workers together. Pages that
    several processes share count once: Spark forks its Python workers."""
    found = {"broker": broker.resident_mib(), "driver": 0.0, "driver_python": 0.0, "executors": 0.0, "python": 0.0}
    for item in (used(driver_pid), *below(driver_pid)) if driver_pid else ():
        if item is not None:
            found["driver" if item.name == "java" else "driver_python"] += proportional_bytes(item.pid) / MIB
    for item in below(os.getpid()):
        try:
            command = Path(f"/proc/{item.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"CoarseGrainedExecutorBackend" in command:
            found["executors"] += proportional_bytes(item.pid) / MIB
            found["python"] += sum(proportional_bytes(worker.pid) for worker in below(item.pid)) / MIB
    return {name: round(value, 1) for name, value in found.items()}


def numbered(begin: int, end: int) -> Iterator[pa.RecordBatch]:
    """Rows as the job writes them: the bodies are numbers."""
    for at in range(begin, end, FILL_ROWS):
        numbers = pa.array(np.arange(at, min(at + FILL_ROWS, end)))
        yield pa.record_batch({"body": pc.utf8_rpad(numbers.cast(pa.string()), BODY_BYTES, "x")})


class Soak:
    def __init__(self, options: Any, broker: Peer, master: str) -> None:
        self._options = options
        self._folder: Path = options.folder
        self._broker = broker
        self._master = master
        self._state_file = self._folder / "state.json"

    def state(self) -> dict[str, Any]:
        """The job's notes: rows written, rows read and the sum of their numbers, triggers."""
        return json.loads(self._state_file.read_text()) if self._state_file.exists() else {}

    async def fill(self) -> None:
        """All rows, by our sink. A part that was cut off by a stop is written again, as the job does it."""
        state, options = State(self._folder), write_options({"nameServer": self._broker.address, "topic": ROWS})
        for begin in range(state.noted["written"], self._options.rows, PART_ROWS):
            end = min(begin + PART_ROWS, self._options.rows)
            state.begin(end)
            await asyncio.to_thread(send_all, options, numbered(begin, end))
            state.note(written=end)
            self._sample(None)

    async def run(self) -> None:
        arguments = (
            sys.executable, "-m", "bench.spark_soak_job", self._master, self._broker.address, str(self._folder),
            str(self._options.rows), str(self._options.triggers), str(self._options.batch_rows),
        )  # fmt: skip
        with (self._folder / "job.log").open("ab") as log:
            environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
            child = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log, env=environment)
        try:
            while (await self._ended(child)) is None:
                self._sample(child.pid)
        finally:
            if child.returncode is None:
                child.terminate()
                await child.wait()
        if child.returncode:
            raise RuntimeError(f"the job ended with {child.returncode}; see {self._folder / 'job.log'}")

    async def _ended(self, child: asyncio.subprocess.Process) -> int | None:
        try:
            return await asyncio.wait_for(child.wait(), SAMPLE_S)
        except TimeoutError:
            return None

    def _sample(self, driver_pid: int | None) -> None:
        if driver_pid is not None and used(driver_pid) is None:
            return
        state = self.state()
        done = {name: state.get(name, 0) for name in ("written", "rows", "triggers")}
        point = {"at_s": round(time.time(), 1), **done}
        with (self._folder / "memory.jsonl").open("a") as curve:
            curve.write(json.dumps(point | memory(self._broker, driver_pid)) + "\n")

    def curve(self) -> list[dict[str, float]]:
        """Points by the time that the job ran, pauses between two runs left out."""
        points = [json.loads(line) for line in (self._folder / "memory.jsonl").read_text().splitlines()]
        ran_s, before_s = 0.0, points[0]["at_s"] if points else 0.0
        for point in points:
            ran_s += min(point["at_s"] - before_s, 2 * SAMPLE_S)
            before_s, point["at_s"] = point["at_s"], round(ran_s)
        return points


def check(state: dict[str, Any], rows: int) -> None:
    if state["doubled"]:  # a part was cut off by a stop, and was written again
        assert state["rows"] >= rows, f"{state['rows']} of {rows} rows were read"
        return
    assert state["rows"] == rows, f"{state['rows']} of {rows} rows were read"
    assert state["sum"] == rows * (rows - 1) // 2, (
        "the sum of the numbers is wrong: rows are missing and others came twice"
    )


async def run() -> None:
    options = parser().parse_args()
    if options.anew:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    async with rocketlet(options.folder) as broker, cluster(options.folder) as master:
        for topic in (ROWS, TRIGGERS):
            await create_topic(broker, None, topic, 4)
        soak = Soak(options, broker, master)
        if options.fill:
            await soak.fill()
        await soak.run()
    state, points = soak.state(), soak.curve()
    check(state, options.rows)
    names = [name for name in points[0] if name != "at_s"]
    for phase in ("rows", "triggers"):
        chosen = [point for point in points if bool(point["triggers"]) == (phase == "triggers")]
        shown = chosen[:: max(len(chosen) // SHOWN, 1)]
        common.show(f"Memory, MiB: {phase}", ("s", *names), [[p["at_s"], *(p[n] for n in names)] for p in shown])
    common.finish(options, "spark_soak", {**state, "curve": points[:: max(len(points) // 200, 1)]})


if __name__ == "__main__":
    uvloop.run(run())
