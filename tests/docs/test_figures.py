"""README.md, docs/index.md and bench/README.md have the figures of `bench/results/`, and a missed aim says why."""

from __future__ import annotations

import re

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
