"""Files that users name: limits, pipes, folders, files that grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rocketlet.host import files


@pytest.mark.parametrize("read", [files.check_file, files.read_file])
def test_only_a_regular_file_within_its_limit_is_taken(
    tmp_path: Path, read: Callable[[Path, int], bytes | None]
) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"12345")
    os.mkfifo(pipe)
    assert read(file, 5) in (None, b"12345")
    with pytest.raises(OSError, match="it has 5 bytes; 4 are allowed"):
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
    check = files._check

    def grow(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        file.write_bytes(b"123456")

    monkeypatch.setattr(files, "_check", grow)
    with pytest.raises(OSError, match="it grew beyond 5 bytes"):
        files.read_file(file, 5)
