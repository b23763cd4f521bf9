"""The programs in bench/ refuse what makes no sense before anything runs, and do as much as they say."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from rocketlet.client import AdminClient
from rocketlet.command.plumbing import logs
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.fast import MODULE
from rocketlet.protocol.properties import appended

from bench import calibration, cpu, five, peers, publish, restart, runner, scale, versions
from bench.calibration import Calibration
from bench.cpu import Measured
from bench.scale_broker import Row, started
from bench.steps import Meter

from ..conftest import Node

NO_JAVA_CLIENT = peers.java_fault("five-client-*/rocketmq-client-java-*.jar") or ""


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda level: None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rounds 0", "0 is not a whole number from 1"),
        ("--only rocketlet,kafka", "'kafka' is not one of rocketlet, apache"),
        ("--only rocketlet,", "'' is not one of rocketlet, apache"),
        ("--sizes 10,0", "0 is not a whole number from 1"),
        ("--sizes ten", "ten is not a whole number from 1"),
        ("--seconds 0", "0 is not a number above 0"),
        ("--seconds nan", "nan is not a number above 0"),
        ("--rates 100,-1", "-1 is not a number above 0"),
        ("--folder /nowhere/at/all", "/nowhere/at/all is not a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = runner.parser("A program.", ("rocketlet", "apache"))
    parser.add_argument("--sizes", type=runner.listed(whole(1)))
    parser.add_argument("--seconds", type=runner.positive)
    parser.add_argument("--rates", type=runner.listed(runner.positive))
    parser.add_argument("--folder", type=runner.folder)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments.split())
    assert said in capsys.readouterr().err


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    parser = runner.parser("A program.", ("rocketlet", "apache"))
    parser.add_argument("--sizes", type=runner.listed(whole(1)), default="10,100")
    parser.add_argument("--folder", type=runner.folder)
    options = parser.parse_args(["--only", "apache,rocketlet", "--rounds", "1", "--folder", str(tmp_path)])
    assert (options.only, options.rounds) == (["apache", "rocketlet"], 1)
    assert (options.sizes, options.folder) == ([10, 100], tmp_path)


def test_without_a_system_that_can_run_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {
        "apache": peers.System(peers.apache, lambda: "Java is missing"),
        "rocketlet": peers.System(peers.rocketlet),
    }
    monkeypatch.setattr(runner, "SYSTEMS", systems)
    assert runner.chosen(["rocketlet", "apache"], ()) == ["rocketlet"]
    with pytest.raises(SystemExit, match="nothing is left"):
        runner.chosen(["apache"], ())


@pytest.mark.parametrize(("present", "wanted", "rounds"), [
    (0, 1, 1), (0, 10_000, 3), (0, 10_000, 20), (10_000, 10_001, 3), (1_000_000, 10_000_000, 3),
])  # fmt: skip
async def test_a_restart_is_measured_over_no_more_messages_than_it_says(
    monkeypatch: pytest.MonkeyPatch, present: int, wanted: int, rounds: int
) -> None:
    stored = present

    async def ready_ms(folder: Path, messages: int = 0, *, dies: bool = False) -> float:
        nonlocal stored
        assert messages >= 0
        stored += messages
        return 1.0

    monkeypatch.setattr(restart, "ready_ms", ready_ms)
    found = await restart.measure(Path(), present, wanted, rounds)
    assert found == {"messages": wanted, "clean_ms": 1.0, "killed_ms": 1.0}
    assert stored == wanted


# What makes a figure honest: rounds in which the machine changed do not count, and peers are those that the page names.


USUAL = Calibration(100.0, 80.0, 300.0, 20.0)
SLOW = USUAL._replace(python_ns=111.0)
SLIGHTLY_SLOW = USUAL._replace(echo_us=21.9)


@pytest.mark.parametrize(
    ("calibrations", "counting"),
    [
        ((USUAL, USUAL, USUAL), [0, 1]),
        ((USUAL, SLIGHTLY_SLOW, USUAL), [0, 1]),
        ((USUAL, SLOW, USUAL, USUAL), [2]),
        ((SLOW, USUAL, USUAL, USUAL), [1, 2]),
        ((USUAL, USUAL, USUAL, SLOW), [0, 1]),
    ],
)
def test_round_beside_a_changed_machine_does_not_count(calibrations: list[Calibration], counting: list[int]) -> None:
    assert calibration.steady(calibrations) == counting


async def test_rounds_are_repeated_until_enough_of_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([USUAL, USUAL, SLOW, USUAL, USUAL])
    monkeypatch.setattr(calibration, "calibrate", lambda: next(speeds))
    measured = count(1)

    async def measure() -> runner.Values:
        return {"sends_per_s": float(next(measured))}

    figures = await runner.alternate(2, {"rocketlet": {"1": measure}}, warm_ups=1)
    assert figures.runs == {"rocketlet": {"1": [{"sends_per_s": 2.0}, {"sends_per_s": 5.0}]}}
    assert (figures.rejected, len(figures.calibrations)) == (2, 5)


async def test_all_rounds_are_shown_when_none_of_them_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([USUAL, SLOW, USUAL])
    monkeypatch.setattr(calibration, "calibrate", lambda: next(speeds))
    measured = count(1)

    async def measure() -> runner.Values:
        return {"sends_per_s": float(next(measured))}

    figures = await runner.alternate(2, {"rocketlet": {"1": measure}})
    assert figures.runs == {"rocketlet": {"1": [{"sends_per_s": 1.0}, {"sends_per_s": 2.0}]}}
    assert figures.rejected == 2


def test_calibration_measures_each_probe() -> None:
    assert all(value > 0 for value in calibration.calibrate())


def test_rows_of_several_runs_have_medians_ranges_and_ratios_by_round() -> None:
    ours = {"sends_per_s": 200.0, "p99_ms": 1.0}, {"sends_per_s": 400.0, "p99_ms": 2.0}
    apaches = {"sends_per_s": 100.0, "p99_ms": 3.0}, {"sends_per_s": 400.0, "p99_ms": 2.0}
    runs = [
        {"rounds": {"rocketlet": {"16": [mine]}, "apache": {"16": [its]}}}
        for mine, its in zip(ours, apaches, strict=True)
    ]
    made = publish.rows("sends", publish.together(runs), "2026-11-29, quiet")
    rate, latency = made.values()
    assert [rate, latency] == [
        "| `sends`: 1 KB, 16 in flight, sends/s | 300 (200 to 400) | 250 (1.5, 1 to 2) | | | 2026-11-29, quiet |",
        "| p99, 16 in flight, ms | 1.5 (1 to 2) | 2.5 (2, 1 to 3) | | | 2026-11-29, quiet |",
    ]
    page = "| p99, 16 in flight, ms | 9 | 9 (1) | | | 2026-11-22, quiet |\n"
    assert publish.merge(page, made) == (f"{latency}\n", [rate])


def test_page_of_measurements_names_the_versions_of_the_peers() -> None:
    page = (Path(peers.__file__).parent / "README.md").read_text()
    named = {
        f"RocketMQ is {versions.APACHE} and {versions.APACHE_FIVE}",
        f"nats-server {versions.NATS}",
        f"Kafka {versions.KAFKA}",
        f"PySpark {versions.KAFKA_SPARK}",
    }
    assert {name for name in named if name not in " ".join(page.split())} == set()


# The cost of each path, against the table: `python -m bench.cpu`. CI holds what is exact, the steps of the
# interpreter. And the functions and files of each path: `python -m bench.ways`.


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


@pytest.mark.java
@pytest.mark.skipif(bool(NO_JAVA_CLIENT), reason=NO_JAVA_CLIENT)
async def test_five_ends_when_a_java_client_fails_after_its_start(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(five, "numbers", count(1))
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("g2", consume_enable=False))
    server = five.Server(peers.Peer("ours", node.address, os.getpid()), node.address, ready_s=0.0)
    with pytest.raises(RuntimeError, match=r"the java client on ours: .*g2"):
        await five.run_client(server, "java", await five.command_of("java"), 16, 0, tmp_path / "log")


# The cost of growth: `python -m bench.scale`.


async def test_each_dimension_grows_and_its_operations_are_measured() -> None:
    async with started() as world:
        for dimension in sorted(scale.DIMENSIONS.values(), key=lambda item: item.grow in scale.OF_LITE_TOPICS):
            assert (await world.measured(2, partial(dimension.grow, world, 2))).us > 0
            for do in dimension.operations.values():
                row = await world.measured(2, partial(do, world), 2)
                assert row.us > 0
                assert row.step_ms > 0


def test_the_slope_is_that_of_the_largest_sizes() -> None:
    assert scale.slope([1, 10, 100, 1000], [50.0, 1.0, 10.0, 100.0]) == pytest.approx(1)
    assert scale.slope([10, 100, 1000], [7.0, 7.0, 7.0]) == pytest.approx(0)
    assert math.isnan(scale.slope([10], [1.0]))


def test_the_cheapest_batch_counts_and_its_shortest_longest_step() -> None:
    assert scale.cheapest([Row(3, 1, 0), Row(2, 5, 8)]) == Row(2, 1, 0)
