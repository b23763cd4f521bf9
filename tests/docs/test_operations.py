"""Docs, dashboard and alerts name no metric that the broker does not have, and every warning has its cure."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from rocketlet.broker.config import Limits
from rocketlet.client.config import ClientLimits
from rocketlet.command.cli import parser
from rocketlet.protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, Strategy
from rocketlet.protocol.names import Queue

from bench import readme

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\brocketlet_[a-z_]+\b")
SUFFIX = re.compile(r"(?<=_seconds)_(bucket|count|sum)\b")  # endings of a histogram's series


def names_in(text: str) -> set[str]:
    return {name.removesuffix("_total") for name in NAME.findall(text)}


def test_every_metric_that_is_named_is_one_of_the_brokers() -> None:
    pages = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("docker/observe/*")])
    named = {name: page for page in pages for name in names_in(SUFFIX.sub("", page.read_text()))}
    files = ("broker/metrics", "command/serving/supervisor_metrics", "console/metrics")
    known = {name for file in files for name in names_in((ROOT / f"{file}.py").read_text())}
    assert named, "the docs say what to watch"
    fixtures = {"rocketlet_broker", "rocketlet_endpoint"}  # pytest's
    assert {name: str(page) for name, page in named.items() if name not in known | fixtures} == {}


def test_every_alert_leads_to_its_section_with_commands_that_exist() -> None:
    rules = (ROOT / "docker/observe/alerts.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert re.findall(r"runbook: (\S+)", rules) == [f"docs/alerts.md#{alert.lower()}" for alert in alerts]
    sections = re.split(r"^## ", (ROOT / "docs/alerts.md").read_text(), flags=re.MULTILINE)[1:]
    commands = {section.split("\n", 1)[0]: re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for section in sections}
    assert sorted(commands) == sorted(alerts)
    for alert, fences in commands.items():
        (fence,) = fences
        lines = [line.partition("#")[0].split() for line in fence.splitlines()]
        assert lines, alert
        for name, *arguments in lines:
            if name == "rocketlet":
                parser(*arguments[:1]).parse_args(arguments)  # exits if there is no such command, or not with these


def test_every_warning_and_error_of_the_log_has_a_cure() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    logged = {
        event
        for room in ("broker", "command", "client", "migration", "sync", "console", "spark", "testing")
        for path in (ROOT / room).rglob("*.py")
        for event in re.findall(r"log\.(?:warning|error|critical|exception)\(\s*\"(\w+)\"", path.read_text())
    }
    assert logged
    assert sorted(event for event in logged if f"`{event}`" not in page) == []
    said = set(re.findall(r"`(\w+)`", page.partition("## Log events that need")[2])) - {
        "hint",
        "peer",
        "reason",
        "seconds",
    }
    assert sorted(name for name in said - logged if "_" in name and name.islower() and name != "drain_s") == []


# The reference shows every limit with its unit, and says of each what it limits.


PAGE = (ROOT / "docs" / "reference" / "limits.md").read_text()


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_limits_of_each_package() -> None:
    shown = set(re.findall(r"<!-- limits: (\S+) -->", PAGE))
    assert shown == {str(path.relative_to(ROOT)) for path in ROOT.glob("*/config.py")}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/config.py")), ids=lambda path: path.parent.name)
def test_each_limit_is_said_in_words(hooks: ModuleType, path: Path) -> None:
    rows = [line for line in hooks.limits(path).splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if len(row.split(" | ")[2].split()) < 3] == []


@pytest.mark.parametrize(
    ("package", "limits", "row"),
    [
        ("broker", Limits, "| `max_locks` | 200,000 | locks of all groups together"),
        ("client", ClientLimits, "| `reconnect_s` | 0.2 s | how long a broken connection"),
    ],
)
def test_the_limits_that_are_handed_in_are_shown_with_their_units(
    hooks: ModuleType, package: str, limits: type[Limits] | type[ClientLimits], row: str
) -> None:
    found = hooks.limits(ROOT / package / "config.py")
    assert row in found
    assert all(f"| `{item.name}` |" in found for item in fields(limits))


def test_a_value_has_its_unit(hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limited.py").write_text(
        "# Sizes\n\nA_BYTES: int = 65_536  # a body\nB_BYTES: int = 1000  # | a head\n\n"
        "# Times\n\n# how\n# long\nC_S: float = 0.5\n"
    )
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "rocketlet.limited", ModuleType("limited"))
    vars(sys.modules["rocketlet.limited"]).update(A_BYTES=65_536, B_BYTES=1000, C_S=0.5)
    sizes, times = hooks.limits(tmp_path / "limited.py").split("**Times**")
    assert "| `A_BYTES` | 64 KiB | a body |" in sizes
    assert "| `B_BYTES` | 1,000 bytes | \\| a head |" in sizes
    assert "| `C_S` | 0.5 s | how long |" in times


def test_the_reference_shows_the_options_of_each_client(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((ROOT / "docs" / "reference" / "client.md").read_text())
    assert "| `concurrency` | `20` | Maximum number of handlers that run concurrently." in page
    assert "| `invisible_s` | `30.0` | Visibility timeout in seconds: a message" in page
    assert "| `retries` | `2` | How often a send that a broker refuses is retried" in page
    assert "| `strategy` | `AVG` | Strategy that allocates queues to members. |" in page


# README.md, docs/index.md and bench/README.md have the figures of `bench/results/`, and a missed aim says why.


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


@pytest.mark.parametrize("strategy", [AVG, AVG_BY_CIRCLE, CONSISTENT_HASH])
def test_share_of_queues_that_a_join_or_leave_moves_is_that_of_the_page(strategy: Strategy) -> None:
    page = (ROOT / "docs/how-to/consume.md").read_text()
    found = re.search(rf"^\| {strategy.name}\b[^|]*\| (\d+) to (\d+) %", page, re.MULTILINE)
    assert found, "the page has a row for each strategy that brokers can compute"
    queues = [Queue("orders", "broker-a", number) for number in range(64)]
    moved = []
    for count in range(3, 7):
        members = sorted(f"10.0.0.{number}@{number * 7919}" for number in range(count))
        before = owners(strategy, queues, members)
        for leaving in members:
            after = owners(strategy, queues, [member for member in members if member != leaving])
            moved.append(sum(before[queue] != after[queue] for queue in queues) / len(queues))
    assert (int(found[1]), int(found[2])) == (round(100 * min(moved)), round(100 * max(moved)))


def owners(strategy: Strategy, queues: list[Queue], members: list[str]) -> dict[Queue, str]:
    return {queue: member for member in members for queue in strategy.allocate(member, queues, members)}
