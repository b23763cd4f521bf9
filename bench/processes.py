"""CPU seconds and memory of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Used(NamedTuple):
    """By one process: its name, CPU seconds of its own and of children that have ended, resident bytes."""

    pid: int
    parent: int
    name: str
    cpu_s: float
    children_s: float
    resident_bytes: int


def used(pid: int) -> Used | None:
    """None if the process is gone."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    user, system, children_user, children_system = (int(field) / _TICKS_PER_S for field in fields[11:15])
    name = head.partition("(")[2]
    resident = int(fields[21]) * _PAGE_BYTES
    return Used(pid, int(fields[1]), name, user + system, children_user + children_system, resident)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process that runs, all of its threads, as finely as Linux counts."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def below(pid: int) -> Iterator[Used]:
    """The descendants of a process."""
    found = [item for item in map(used, _pids()) if item is not None]
    parents = {pid}
    while parents:
        children = [item for item in found if item.parent in parents]
        yield from children
        parents = {item.pid for item in children}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class SparkUse(NamedTuple):
    """By the processes of one Spark session: the JVM, and the Python processes that it has started."""

    jvm_s: float
    python_s: float
    jvm_bytes: int
    python_bytes: int


def spark_use(driver_pid: int) -> SparkUse:
    """driver_pid: the Python program that has started the JVM."""
    jvm = next(item for item in below(driver_pid) if item.name == "java")
    workers = list(below(jvm.pid))
    python_s = jvm.children_s + sum(item.cpu_s + item.children_s for item in workers)
    return SparkUse(jvm.cpu_s, python_s, jvm.resident_bytes, sum(item.resident_bytes for item in workers))
