"""The docs name no metric that the broker does not have: alerts are copied from there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\brocketlet_[a-z_]+\b")


def names_in(text: str) -> set[str]:
    return {name.removesuffix("_total") for name in NAME.findall(text)}


def test_every_metric_that_the_docs_name_is_one_of_the_brokers() -> None:
    named = {name: page for page in sorted(ROOT.glob("docs/**/*.md")) for name in names_in(page.read_text())}
    known = names_in((ROOT / "broker" / "metrics.py").read_text())
    assert named, "the docs say what to watch"
    fixtures = {"rocketlet_broker"}  # of pytest
    assert {name: str(page) for name, page in named.items() if name not in known | fixtures} == {}
