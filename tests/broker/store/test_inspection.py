"""`rocketlet fsck`: says what is whole and what is not, changes nothing unless it is told to repair."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from rocketlet.broker.store.files import StoreError
from rocketlet.broker.store.recovery import inspect
from rocketlet.command.tools.fsck import fsck

from ...support.stores import bodies, filled, kill, open_store, put, reopened


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def segment(folder: Path) -> Path:
    return max((folder / "commitlog").iterdir())


def index(folder: Path) -> Path:
    return next((folder / "consumequeue" / "t" / "1").iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_body(folder: Path) -> None:
    flip(segment(folder), segment(folder).stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit of a body": (
        lambda folder: flip(segment(folder), segment(folder).stat().st_size // 2),
        "no whole message",
    ),
    "a cut log": (lambda folder: cut(segment(folder)), "bytes at its end are gone"),
    "a flipped bit of an index": (lambda folder: flip(index(folder), 100), "1 message is not where the index says"),
    "a lost index": (lambda folder: index(folder).unlink(), "100 messages are not where the index says"),
    "a damaged checkpoint": (lambda folder: flip(folder / "checkpoint.json", 5), "checksum"),
    "a lost log": (lambda folder: segment(folder).unlink(), "are not in the commit log"),
}


def test_a_whole_folder_is_said_to_be_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    before = snapshot(tmp_path)
    assert fsck(tmp_path, repairs=False, is_json=False) == 0
    assert "whole    commit log, 300 messages" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


def test_messages_behind_the_checkpoint_are_no_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recover([("t", 0)])
    for number in range(10):
        put(store, b"%d" % number)
    kill(store)
    assert fsck(tmp_path, repairs=False, is_json=False) == 0


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    expected = filled(tmp_path)
    damage, words = DAMAGE[name]
    damage(tmp_path)
    before = snapshot(tmp_path)
    assert fsck(tmp_path, repairs=False, is_json=False) == 1
    out = capsys.readouterr().out
    assert words in out
    assert "repair:" in out
    assert snapshot(tmp_path) == before
    assert fsck(tmp_path, repairs=True, is_json=True) == 0
    assert orjson.loads(capsys.readouterr().out.splitlines()[-1])["repaired"] is True
    store, found = reopened(tmp_path)
    assert (found.rebuilt, found.lost) == ((), ())
    left = [bodies(store, queue=queue) for queue in range(3)]
    if name in ("a lost log", "a cut log", "a flipped bit of a body"):
        assert all(set(some) <= set(all_) for some, all_ in zip(left, expected, strict=True))
    else:
        assert left == expected
    store.close()


def test_a_folder_that_is_none_or_in_use_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rocketlet.command.cli", "fsck", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, "is not a data folder" in done.stderr) == (1, True)
    assert not (tmp_path / "nothing").exists()
    filled(tmp_path)
    store, _ = reopened(tmp_path)
    with pytest.raises(StoreError, match="another broker uses"):
        list(inspect(tmp_path))
    store.close()


def test_what_is_odd_in_a_folder_is_named_as_text_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)
    os.mkfifo(tmp_path / "groups.json")
    os.mkfifo(tmp_path / "commitlog" / ("9" * 18))
    for name in (b"\x1b[2J", b"\xff"):
        queue = os.fsencode(tmp_path / "consumequeue") + b"/" + name + b"/0"
        os.makedirs(queue)
        Path(os.fsdecode(queue), "0" * 20).write_bytes(bytes(40))
    (tmp_path / "consumequeue" / "t" / "\u00b2").mkdir()
    (tmp_path / "\x1b[2J.json").write_bytes(b"{")
    for is_json in (False, True):
        assert fsck(tmp_path, repairs=False, is_json=is_json) == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "x1b[2J" in out
        assert "groups.json" in out
    (tmp_path / "groups.json").unlink()
    store, _ = reopened(tmp_path)
    store.close()
    assert len(list(tmp_path.rglob("consumequeue/*/0/0*"))) == 3
