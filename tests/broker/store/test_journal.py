"""Changes of a state file, a line each: whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.store import disk
from rocketlet.broker.store.files import StoreFull
from rocketlet.broker.store.journals import Journal


def test_changes_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.json")
    assert journal.read() == []
    for value in ({"a": 1}, ["b\n"], None):
        journal.append(value)
    assert Journal(tmp_path / "x.json").read() == [{"a": 1}, ["b\n"], None]
    journal.clear()
    assert Journal(tmp_path / "x.json").read() == []
    assert journal.lines == 0


@given(cut=st.integers(0, 200))
def test_a_journal_that_is_cut_off_keeps_its_whole_lines_and_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.journal"
    path.unlink(missing_ok=True)
    journal = Journal(tmp_path / "x.json")
    for number in range(5):
        journal.append({"number": number})
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    again = Journal(tmp_path / "x.json")
    kept = again.read()
    assert kept == [{"number": number} for number in range(data.count(b"\n"))]
    again.append("next")
    assert Journal(tmp_path / "x.json").read() == [*kept, "next"]


def test_a_damaged_line_and_what_follows_it_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.json")
    for number in range(3):
        journal.append(number)
    path = tmp_path / "x.journal"
    path.write_bytes(path.read_bytes().replace(b" 1\n", b" 7\n"))
    assert Journal(tmp_path / "x.json").read() == [0]


def test_a_change_that_the_disk_refuses_is_not_kept_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "x.json")
    journal.append("first")
    write = disk.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) <= 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-12])

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(StoreFull, match="No space"):
        journal.append("second")
    monkeypatch.undo()
    journal.append("third")
    assert Journal(tmp_path / "x.json").read() == ["first", "third"]
