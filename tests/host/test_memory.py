"""`host.memory`: freed memory is used again, without the system's help."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from rocketlet.host import memory

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
