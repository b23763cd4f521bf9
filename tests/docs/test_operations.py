"""Docs, dashboard and alerts name no metric that the broker does not have, and every warning has its cure."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from rocketlet.broker.config import Limits
from rocketlet.client.config import ClientLimits
from rocketlet.command.cli import parser
from rocketlet.protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, Strategy
from rocketlet.protocol.names import Queue

ROOT = Path(__file__).parents[2]
MEASUREMENTS = (ROOT / "bench" / "README.md").read_text()
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
    leads_to = re.findall(r'runbook_url: "{{ \$externalLabels.docs_url }}/(\S+)"', rules)
    assert leads_to == [f"alerts/#{alert.lower()}" for alert in alerts]
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
    assert "| `retries` | `2` | Maximum number of retries of a send that gets no response in time" in page
    assert "| `strategy` | `AVG` | Strategy that allocates queues to members. |" in page


def test_the_reference_shows_the_settings_of_groups(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((ROOT / "docs" / "reference" / "administration.md").read_text())
    assert (
        "| `--retries` | `retry_max_times` | 16 | -1 to 1,000,000 | Retries before a message is dead-lettered |" in page
    )
    assert "| `--strict` | `strict` | off | on or off | Refuse members" in page
    assert "| attribute `priority.factor` | no |" in page
    assert "| `--type` | `message_type` |  | DELAY, FIFO, LITE, " in page


# Figures in README.md and docs/index.md are those of bench/README.md.


CLAIMS = (
    ("README.md", r"ready in ([\d.]+) s", "`start`: ready, s", 1),
    ("README.md", r"with (\d+) MiB of\s+memory", "`start`: memory, idle, MiB", 1),
    (
        "README.md",
        r"Apache's broker, (\d+) did",
        "`churn`: handled twice, 50 ms handlers, 8 queues, 3 members, messages",
        2,
    ),
    ("docs/index.md", r"ready in ([\d.]+) s", "`start`: ready, s", 1),
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("page", "claim", "path", "column"), CLAIMS)
def test_figure_in_a_sentence_is_that_of_the_measurements(page: str, claim: str, path: str, column: int) -> None:
    (row,) = (row for row in map(cells, MEASUREMENTS.splitlines()) if row[0] == path)
    found = re.search(claim, (ROOT / page).read_text())
    assert found is not None, f"{page} does not say it any more: change CLAIMS"
    decimals = len(found[1].partition(".")[2])
    assert float(found[1]) == round(float(row[column].split()[0]), decimals)


def test_figures_of_the_first_page_are_in_one_row_of_the_measurements_each() -> None:
    table = (ROOT / "README.md").read_text().partition("| times better |\n")[2].partition("\n\n")[0]
    rows = [cells(line) for line in table.splitlines()[1:]]
    assert len(rows) == 6
    measured = [row for row in map(cells, MEASUREMENTS.splitlines()) if len(row) == 6]
    for text, ours, other, ratio in rows:
        (figure, unit), (peer, *compared) = ours.split(), other.split()
        assert compared[1:] == [unit], text
        published = f"{peer} {compared[0]} ({ratio.replace(' (', ', ').rstrip(')')})"
        matching = [
            path
            for path, first, apache, _, others, _ in measured
            if first.split(" (")[0] == figure
            and path.endswith(f", {unit}")
            and published in (f"Apache {apache}", *others.split("; "))
        ]
        assert len(matching) == 1, text


def test_each_row_of_the_measurements_has_its_date_and_machine() -> None:
    machines = re.findall(r"^- \*(\w+)\*: ", MEASUREMENTS, re.MULTILINE)
    tables = re.findall(r"\| date, machine \|\n\|[-|]+\|\n((?:\|.*\n)+)", MEASUREMENTS)
    rows = [cells(line) for table in tables for line in table.splitlines()]
    assert len(rows) > 50
    dated = re.compile(rf"20\d\d-\d\d-\d\d, ({'|'.join(machines)})")
    assert [row for row in rows if len(row) != 6 or not (row[0] and row[1] and dated.fullmatch(row[5]))] == []


def test_each_missed_aim_has_its_figure_and_a_reason() -> None:
    section = MEASUREMENTS.partition("## Aims that are missed")[2].partition("## ")[0]
    _, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if len(row) != 3 or not re.match(r"[\d.]+.*; aim: ", row[1]) or " " not in row[2]] == []


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


def test_the_example_for_keda_has_documented_fields() -> None:
    """The fields of ScaledObject and of the trigger `prometheus` in KEDA's documentation of 2.13, which are strings."""
    example = yaml.safe_load((ROOT / "examples/keda/scaledobject.yaml").read_text())
    assert (example["apiVersion"], example["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = example["spec"]
    of_spec = {
        "scaleTargetRef", "pollingInterval", "cooldownPeriod", "idleReplicaCount", "minReplicaCount", "maxReplicaCount",
        "fallback", "advanced", "triggers",
    }  # fmt: skip
    assert spec.keys() <= of_spec
    assert spec["scaleTargetRef"].keys() <= {"apiVersion", "kind", "name", "envSourceContainerName"}
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "prometheus"
    required = {"serverAddress", "query", "threshold"}
    optional = {
        "activationThreshold", "queryParameters", "namespace", "cortexOrgID", "customHeaders", "ignoreNullValues",
        "unsafeSsl", "authModes", "timeout",
    }  # fmt: skip
    assert required <= trigger["metadata"].keys() <= required | optional
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    (metric,) = re.findall(r"rocketmq_\w+", trigger["metadata"]["query"])
    assert f'"{metric}"' in (ROOT / "broker/metrics.py").read_text()
