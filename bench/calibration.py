"""The speed of this machine, measured before the first round and after each, so that rounds in which it changed are rejected.

Four probes, about half a second together: a loop in Python (the processor), a copy in memory, a write into the folder of
temporary data (page cache and file system), and an echo over loopback (system calls and wake-ups)."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

MOVED: Final = 0.10  # a round counts if each probe stayed within this part of its median, at both ends of the round
REPEATS: Final = 9  # the median of this many is the probe's value
LOOPS: Final = 100_000
COPIED_BYTES: Final = 32 << 20
WRITTEN_BYTES: Final = 16 << 20
CHUNK_BYTES: Final = 1 << 16
ECHOES: Final = 200


class Calibration(NamedTuple):
    """What the machine does in its probes. Times, so that less is better."""

    python_ns: float
    """One iteration of a loop that adds to a dict."""
    copy_us: float
    """A copy of 1 MiB in memory."""
    pwrite_us: float
    """A write of 1 MiB into a file of the folder for temporary files, in pieces of 64 KiB."""
    echo_us: float
    """One byte to another thread and back, over TCP on loopback."""

    def moved(self, other: Calibration) -> float:
        """Return the largest relative change of a probe."""
        return max(abs(mine / its - 1) for mine, its in zip(self, other, strict=True))

    def __str__(self) -> str:
        return (
            f"loop {self.python_ns:.1f} ns, copy {self.copy_us:.0f} µs/MiB, pwrite {self.pwrite_us:.0f} µs/MiB, "
            f"echo {self.echo_us:.1f} µs"
        )


def calibrate() -> Calibration:
    """Measure the machine. It blocks this thread for about half a second."""
    with ExitStack() as stack:
        return Calibration(
            _median(_loop) / LOOPS * 1e9,
            _median(_copy(), COPIED_BYTES),
            _median(_write(stack), WRITTEN_BYTES),
            _median(_echo(stack)) / ECHOES * 1e6,
        )


def steady(calibrations: Sequence[Calibration]) -> list[int]:
    """Return the numbers of the rounds, from 0, that count: round N lies between calibrations N and N + 1."""
    usual = Calibration(*(statistics.median(values) for values in zip(*calibrations, strict=True)))
    held = [found.moved(usual) <= MOVED for found in calibrations]
    return [number for number in range(len(calibrations) - 1) if held[number] and held[number + 1]]


def _median(run: Callable[[], object], size_bytes: int = 0) -> float:
    """Return the seconds that `run` takes, or the µs for each MiB of a size."""
    found = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - began_s)
    seconds = statistics.median(found)
    return seconds / size_bytes * (1 << 20) * 1e6 if size_bytes else seconds


def _loop() -> None:
    counts: dict[int, int] = {}
    for number in range(LOOPS):
        counts[number & 1023] = counts.get(number & 1023, 0) + number


def _copy() -> Callable[[], object]:
    source, target = bytearray(COPIED_BYTES), bytearray(COPIED_BYTES)

    def copy() -> None:
        memoryview(target)[:] = source

    copy()  # the first copy makes the pages
    return copy


def _write(stack: ExitStack) -> Callable[[], object]:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "written"
    file = stack.enter_context(path.open("wb", buffering=0))
    chunk = os.urandom(CHUNK_BYTES)

    def write() -> None:
        for position in range(0, WRITTEN_BYTES, CHUNK_BYTES):
            os.pwrite(file.fileno(), chunk, position)

    write()  # the first write allocates
    return write


def _echo(stack: ExitStack) -> Callable[[], object]:
    """The two threads run on two processors where there are two: the time is 5 times as long there as on one, and the
    kernel would choose one or the other by chance."""
    allowed = sorted(os.sched_getaffinity(0))
    stack.callback(os.sched_setaffinity, 0, allowed)
    os.sched_setaffinity(0, allowed[:1])  # of this thread alone
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    near = stack.enter_context(socket.create_connection(listener.getsockname()))
    far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def respond() -> None:
        os.sched_setaffinity(0, allowed[-1:])
        with far:
            while found := far.recv(1):
                far.sendall(found)

    thread = threading.Thread(target=respond)
    thread.start()
    stack.callback(thread.join)
    stack.callback(near.shutdown, socket.SHUT_WR)

    def echo() -> None:
        for _ in range(ECHOES):
            near.sendall(b"x")
            near.recv(1)

    return echo


if __name__ == "__main__":
    print(calibrate())
