"""The cost of a command beside mqadmin's of the same purpose: wall clock and processor time. Each is a fresh process, and
all ask the same broker of ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rocketlet.client import AdminClient, Consumer, Message, Producer

from . import common
from .peers import APACHE_VERSION, LOGGING, apache_fault, apache_jars, rocketlet

TOOLS = ("rocketlet", "mqadmin")
TOPIC, GROUP = "orders", "shop"
OURS = {
    "topics": ("topics", "list"),
    "topic": ("topics", "show", TOPIC),
    "groups": ("groups", "list"),
    "group": ("groups", "show", GROUP),
    "offsets": ("offsets", "show", GROUP),
    "brokers": ("brokers", "list"),
    "message by key": ("messages", "find", TOPIC, "--key", "k1"),
    "dead letters": ("messages", "dead", GROUP),
}
THEIRS = {
    "topics": ("topicList",),
    "topic": ("topicStatus", "-t", TOPIC),
    "groups": ("consumerProgress",),
    "group": ("consumerProgress", "-g", GROUP),
    "offsets": ("consumerProgress", "-g", GROUP),
    "brokers": ("clusterList",),
    "message by key": ("queryMsgByKey", "-t", TOPIC, "-k", "k1"),
}


async def measure(rounds: int, tools: Sequence[str]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Wall and processor time (s) of each round, by tool and purpose."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        mqadmin = await _mqadmin(Path(folder)) if "mqadmin" in tools else ()
        async with rocketlet(Path(folder)) as peer:
            await _fill(peer.address)
            for _ in range(rounds):
                for purpose, words in OURS.items():
                    command = (sys.executable, "-m", "rocketlet.command.cli", *words, "--nameserver", peer.address)
                    found["rocketlet"][purpose].append(await asyncio.to_thread(_cost, command))
                    if mqadmin and purpose in THEIRS:
                        command = (*mqadmin, *THEIRS[purpose], "-n", peer.address)
                        found["mqadmin"][purpose].append(await asyncio.to_thread(_cost, command))
    return found


async def _mqadmin(home: Path) -> tuple[str, ...]:
    """How to start it; nothing if it cannot run here."""
    fault = apache_fault()
    if fault:
        common.console.print(f"mqadmin is left out: {fault}")
        return ()
    (home / "conf").mkdir()
    (home / "conf" / "logback_tools.xml").write_text(LOGGING)
    jars = await apache_jars(APACHE_VERSION)
    main = "org.apache.rocketmq.tools.command.MQAdminStartup"
    return "java", f"-Drocketmq.home.dir={home}", f"-Duser.home={home}", "-cp", f"{jars}/*", main


async def _fill(address: str) -> None:
    """A group that has read a topic, and is there."""
    seen: list[Message] = []
    async with AdminClient(address) as admin, Producer(address) as producer:
        await admin.create_topic(TOPIC, queues=8)
        await producer.send(TOPIC, b"x", keys="k1")
        async with Consumer(address, GROUP, TOPIC, seen.append, start="first"):
            while not seen:
                await asyncio.sleep(0.01)


def _cost(command: tuple[str, ...]) -> tuple[float, float]:
    """Wall and processor time, s. Raises RuntimeError if the command fails."""
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {child.returncode}: {said.decode(errors='replace')[-1000:]}"
        )
    return time.perf_counter() - began_s, usage.ru_utime + usage.ru_stime


async def run() -> None:
    options = common.parser(__doc__ or "", TOOLS).parse_args()
    tools = options.only.split(",") if options.only else TOOLS
    found = await measure(options.rounds, tools)
    medians = {
        tool: {
            purpose: {
                "wall_s": common.median([wall for wall, _ in costs]),
                "cpu_s": common.median([cpu for _, cpu in costs]),
            }
            for purpose, costs in purposes.items()
        }
        for tool, purposes in found.items()
    }
    rows = [
        [
            purpose,
            *(medians.get(tool, {}).get(purpose, {}).get(what, "-") for what in ("wall_s", "cpu_s") for tool in TOOLS),
        ]
        for purpose in OURS
    ]
    columns = ("purpose", *(f"{tool}, {what} s" for what in ("wall", "processor") for tool in TOOLS))
    common.show("A command, s (medians)", columns, rows)
    common.finish(options, "command", {"rounds": options.rounds, "medians": medians})


if __name__ == "__main__":
    uvloop.run(run())
