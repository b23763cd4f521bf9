"""Files that users name: limits, pipes, folders, files that grow."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from rocketlet.host import files, memory


@pytest.mark.parametrize("read", [files.check_file, files.read_file])
def test_only_a_regular_file_within_its_limit_is_taken(
    tmp_path: Path, read: Callable[[Path, int], bytes | None]
) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"12345")
    os.mkfifo(pipe)
    assert read(file, 5) in (None, b"12345")
    with pytest.raises(OSError, match=r"it has 5 bytes \(maximum 4\)"):
        read(file, 4)
    with pytest.raises(OSError, match="not a regular file"):
        read(pipe, 5)
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path, 5)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", 5)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    status = os.fstat

    def grow(descriptor: int) -> os.stat_result:
        found = status(descriptor)
        file.write_bytes(b"123456")
        return found

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(OSError, match="it grew beyond 5 bytes"):
        files.read_file(file, 5)


# `host.memory`: freed memory is used again, without the system's help.


FAULTS = """
    import resource, sys
    from rocketlet.host import memory

    if sys.argv[1] == "keep":
        print(memory.keep_freed())
    else:
        print("as it is")
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def turn() -> None:
        pieces = [bytearray(300_000) for _ in range(10)]
        for piece in pieces:
            piece += bytes(700_000)
    turn()
    before = faults()
    for _ in range(20):
        turn()
    print(faults() - before)
"""


def faults(how: str) -> int:
    """Pages that the system gave a process which turned 20 times 10 MB."""
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULTS), how], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    if said[0] == "False":
        pytest.skip("this C library has no mallopt")
    return int(said[1])


def test_freed_memory_is_used_again() -> None:
    assert faults("keep") * 10 < faults("leave")


def test_a_library_without_the_setting_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: None) -> object:
        return object()

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert memory.keep_freed() is False
