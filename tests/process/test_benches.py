"""The programs in bench/ refuse what makes no sense before anything runs, and do as much as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocketlet.command.plumbing import logs

from bench import peers, restart, runner


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
    parser.add_argument("--sizes", type=runner.counts)
    parser.add_argument("--seconds", type=runner.positive)
    parser.add_argument("--rates", type=runner.positives)
    parser.add_argument("--folder", type=runner.folder)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments.split())
    assert said in capsys.readouterr().err


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    parser = runner.parser("A program.", ("rocketlet", "apache"))
    parser.add_argument("--sizes", type=runner.counts, default="10,100")
    parser.add_argument("--folder", type=runner.folder)
    options = parser.parse_args(["--only", "apache,rocketlet", "--rounds", "1", "--folder", str(tmp_path)])
    assert (options.only, options.rounds, options.sizes, options.folder) == ("apache,rocketlet", 1, [10, 100], tmp_path)


def test_without_a_system_that_can_run_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {
        "apache": peers.System(peers.apache, lambda: "Java is missing"),
        "rocketlet": peers.System(peers.rocketlet),
    }
    monkeypatch.setattr(runner, "SYSTEMS", systems)
    assert runner.chosen("rocketlet,apache", ()) == ["rocketlet"]
    with pytest.raises(SystemExit, match="nothing is left"):
        runner.chosen("apache", ())


@pytest.mark.parametrize(("present", "wanted", "rounds"), [
    (0, 1, 1), (0, 10_000, 3), (0, 10_000, 20), (10_000, 10_001, 3), (1_000_000, 10_000_000, 3),
])  # fmt: skip
def test_a_restart_is_measured_over_no_more_messages_than_it_says(
    monkeypatch: pytest.MonkeyPatch, present: int, wanted: int, rounds: int
) -> None:
    stored = present

    def fill(folder: Path, messages: int) -> None:
        nonlocal stored
        assert messages >= 0
        stored += messages

    monkeypatch.setattr(restart, "fill", fill)
    monkeypatch.setattr(restart, "fill_and_die", fill)
    monkeypatch.setattr(restart, "start", lambda folder: (None, 1.0))
    monkeypatch.setattr(restart, "end", lambda child, number: None)
    assert restart.measure(Path(), present, wanted, rounds)["messages"] == wanted == stored
