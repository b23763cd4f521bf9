"""The reference shows every limit with its unit, and says of each what it limits."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from rocketlet.broker.config import Limits
from rocketlet.client.config import ClientLimits

ROOT = Path(__file__).parents[2]
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
