"""Docs, dashboard and alerts name no metric that the broker does not have, and every warning has its cure."""

from __future__ import annotations

import re
from pathlib import Path

from rocketlet.command.cli import parser

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
    said = set(re.findall(r"`(\w+)`", page.partition("## Log events that ask")[2])) - {
        "hint",
        "peer",
        "reason",
        "seconds",
    }
    assert sorted(name for name in said - logged if "_" in name and name.islower() and name != "drain_s") == []
