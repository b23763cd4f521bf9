"""The cost of each path, against the table: `python -m bench.cpu`. CI holds what is exact, the steps of the interpreter.
And the functions and files of each path: `python -m bench.ways`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rocketlet.protocol.fast import MODULE
from rocketlet.protocol.properties import appended

from bench import cpu, runner, ways
from bench.cpu import Measured
from bench.steps import Meter

NAN = float("nan")
KNOWN = {"send": {"steps": 100.0, "cost": 1.0}}


def test_no_path_takes_a_fifth_more_steps_than_the_table_says() -> None:
    if cpu.VERSION not in cpu.read_tables():
        pytest.skip(f"{cpu.TABLE.name} has no table of Python {cpu.VERSION}, and steps differ by version")
    command = (sys.executable, "-m", "bench.cpu", "--exact")
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("steps", "cost", "fails"), [
    (100.0, 1.0, False), (120.0, 1.2, False), (120.1, 1.0, True), (100.0, 1.21, True), (50.0, NAN, False), (121.0, NAN, True),
])  # fmt: skip
def test_a_fifth_is_allowed_and_no_more(steps: float, cost: float, fails: bool) -> None:
    assert bool(cpu.faults({"send": Measured(steps, cost, NAN)}, KNOWN)) is fails


def test_a_path_must_be_in_the_table_and_what_is_there_must_be_measured() -> None:
    found = Measured(100.0, NAN, NAN)
    assert len(cpu.faults({"send": found, "new": found}, KNOWN)) == 1
    assert len(cpu.faults({}, KNOWN)) == 1


def counted(times: int, *, pausing: bool = False) -> int:
    meter = Meter()
    meter.start(counts=True)
    for _ in range(times):
        appended("A\x01b", "C", "d")
    if pausing:
        with meter.paused():
            appended("A\x01b", "C", "d")
    meter.stop()
    return meter.steps


def test_each_call_of_ours_counts_the_same_and_what_is_paused_does_not() -> None:
    assert counted(0) == 0
    assert counted(1) > 1
    assert counted(7) == 7 * counted(1) == counted(7, pausing=True)


def test_result_of_a_benchmark_names_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    runner.finish(argparse.Namespace(json=True), "sends", {})
    assert json.loads(capsys.readouterr().out)["machine"]["module"] == MODULE


def test_ways_counts_the_functions_and_files_of_each_path() -> None:
    command = (sys.executable, "-m", "bench.ways", "--json")
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    paths = ("send", "pull", "pop_ack", "grpc_receive_ack", "java_joins", "own_joins_broker", "own_joins_client")
    for path in paths:
        assert found[path].keys() == {"functions", "files"}
        assert found[path]["functions"] > found[path]["files"] > 5
    assert found["pop_ack"]["functions"] > found["send"]["functions"], "a send is part of it"


SOURCE = """
Tell = Callable[[str], None]
class Locks:
    def __init__(self, limits: Limits, on_free: Tell | None, *, ask: Callable[[], int]) -> None:
        self._locks: dict[LeaseKey, Lock] = {}
        self._sessions: dict[Session, Lock] = {}
    def _forget_group(self, group: str) -> None: ...
    def dropped(self) -> None: ...
class Outside(NamedTuple):
    locks: Locks
    tell: Tell
class Found(NamedTuple):
    locks: Locks
    count: int
@dataclass(slots=True)
class Drain:
    waiting: dict[str, int] = field(default_factory=dict)
    def __init__(self, outside: Outside, found: Found) -> None: ...
"""


def test_shape_finds_maps_callbacks_and_bags_by_its_rules(tmp_path: Path) -> None:
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "locks.py").write_text(SOURCE)
    found = {rule: [name.split()[1] for name in names] for rule, names in ways.Source(tmp_path).shape().items()}
    assert found == {
        "maps": ["Locks._locks"],
        "map_fields": ["Drain.waiting"],
        "forget_or_drop": ["_forget_group", "dropped"],
        "callbacks": ["Locks(on_free)", "Locks(ask)", "Outside(tell)"],
        "bags": ["Outside"],
    }
