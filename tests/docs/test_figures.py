"""README.md, docs/index.md and bench/README.md have the figures of `bench/results/`, and a missed aim says why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import readme

ROOT = readme.ROOT
CLAIMS = (
    ("README.md", r"ready in ([\d.]+) s", "start", "ready", None),
    ("README.md", r"with (\d+) MiB of\s+memory", "start", "memory, idle", None),
    (
        "README.md",
        r"Apache's broker, (\d+) did",
        "churn",
        "handled twice, 50 ms handlers, 8 queues, 3 members",
        "Apache",
    ),
    ("docs/index.md", r"ready in ([\d.]+) s", "start", "ready", None),
)


def test_both_pages_are_what_the_files_say() -> None:
    assert readme.PAGE.read_text() == readme.page(), "run `python -m bench.readme`"
    assert readme.README.read_text() == readme.front(), "run `python -m bench.readme`"


@pytest.mark.parametrize(("page", "claim", "program", "path", "peer"), CLAIMS)
def test_a_figure_in_a_sentence_is_that_of_its_file(
    page: str, claim: str, program: str, path: str, peer: str | None
) -> None:
    (row,) = (row for row in readme.rows() if (row.program, row.path) == (program, path))
    measured = row.peers[peer] if peer else row.ours
    assert measured is not None
    found = re.search(claim, (ROOT / page).read_text())
    assert found is not None, f"{page} does not say it any more: change CLAIMS"
    decimals = len(found[1].partition(".")[2])
    assert float(found[1]) == round(measured, decimals)


def test_each_row_names_its_machine_and_why_it_misses_its_aim() -> None:
    rows = readme.rows()
    assert {row.machine for row in rows} <= readme.MACHINES.keys()
    assert [row.path for row in rows if row.missed_aims() and not row.missed] == []
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", row.date) for row in rows)


def test_an_aim_is_missed_by_the_ratio_or_by_our_own_figure() -> None:
    def row(aim: dict[str, float]) -> readme.Row:
        return readme.Row("sends", "2026-11-22", "quiet", "", "ms", "less", 2, {"Apache": 3}, aim=aim)

    assert row({"Apache": 1.5}).missed_aims() == []
    assert row({"Apache": 1.6}).missed_aims() == ["1.6 times Apache's"]
    assert row({"most": 1}).missed_aims() == ["at most 1 ms"]
    assert row({"least": 3}).missed_aims() == ["at least 3 ms"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file of results; the pages are not written."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(readme, "FOLDER", tmp_path)
    monkeypatch.setattr(readme, "main", lambda: None)
    old = {"unit": "rows/s", "better": "more", "ours": 1, "peers": {"Kafka": 2}}
    rows = [
        {"path": "read", **old, "aim": {"Kafka": 1.5}, "missed": "It took long.", "ratios": {"Kafka": [0.5, 0.4, 0.6]}},
        {"path": "written", **old, "aim": {"Kafka": 1.0}, "missed": "It took long, too.", "first": True},
        {"path": "not measured", **old},
    ]
    runs = [{"date": "2026-11-21", "machine": "busy", "rows": rows}]
    (tmp_path / "results" / "spark.json").write_text(json.dumps({"measured": runs}))
    return tmp_path / "results" / "spark.json"


def test_figures_that_are_kept_replace_those_of_the_same_paths(results: Path) -> None:
    found = {"read": {"ours": 30, "Kafka": 10}, "written": {"ours": 9, "Kafka": 10}}
    assert readme.renew("spark", "quiet", "2026-11-23", found) == ["written: It took long, too."]
    read, written, other = readme.rows()
    assert (read.date, read.machine, read.ours, read.peers, read.missed) == (
        "2026-11-23",
        "quiet",
        30,
        {"Kafka": 10},
        "",
    )
    assert read.ratio("Kafka") == 3
    assert (written.ratio("Kafka"), written.first, written.missed) == (0.9, True, "It took long, too.")
    assert (other.path, other.date, other.machine, other.ours) == ("not measured", "2026-11-21", "busy", 1)


def test_an_aim_that_is_missed_again_needs_a_reason(results: Path) -> None:
    readme.renew("spark", "quiet", "2026-11-23", {"read": {"ours": 30, "Kafka": 10}})
    assert readme.renew("spark", "quiet", "2026-11-24", {"read": {"ours": 10, "Kafka": 10}}) == [
        "read: why is its aim missed?"
    ]


def test_a_path_without_a_row_is_not_kept(results: Path) -> None:
    with pytest.raises(KeyError):
        readme.renew("spark", "quiet", "2026-11-23", {"nobody measured it": {"ours": 1}})


def test_each_figure_that_spark_keeps_has_its_row() -> None:
    from bench import spark

    assert {row.path for row in readme.rows() if row.program == "spark"} == set(spark.KEPT)
