"""Every Python snippet of README and docs runs, and prints what the page says it prints."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import Node
from . import snippets as runner
from .snippets import run_page, snippets

ROOT = Path(__file__).parents[2]
NEEDS_SPARK = [
    pytest.mark.spark,
    pytest.mark.skipif(
        shutil.which("java") is None or importlib.util.find_spec("pyspark") is None,
        reason="Java or PySpark is missing, which this page needs",
    ),
]


def pages() -> list[object]:
    """Each page that has Python in it; those with Spark need Java."""
    found: list[object] = []
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text()
        if any(snippets(text)):
            marks = NEEDS_SPARK if any("pyspark" in snippet.code for snippet in snippets(text)) else ()
            found.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return found


async def test_readme_and_then_the_tutorial_run_in_one_folder_on_one_broker(node: Node, tmp_path: Path) -> None:
    """As by somebody who has just come; Spark has a page of its own."""
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text().partition("Spark reads and writes")[0])
    for page in (readme, ROOT / "docs/tutorial.md"):
        await runs(page, node, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", pages())
async def test_every_snippet_of_the_page_runs(page: Path, node: Node, tmp_path: Path) -> None:
    await runs(page, node, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_backwards", [False, True])
async def test_how_to_pages_run_on_one_broker_in_any_order(is_backwards: bool, node: Node, tmp_path: Path) -> None:
    """Each page has topics and groups of its own, so that none finds what another one has left."""
    guides = sorted(ROOT.glob("docs/how-to/*.md"), reverse=is_backwards)
    for page in [item for item in guides if any(snippets(item.read_text()))]:
        await runs(page, node, tmp_path)


async def runs(page: Path, node: Node, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    folder = tmp_path / "reader"
    folder.mkdir(exist_ok=True)
    child = await asyncio.create_subprocess_exec(
        sys.executable, runner.__file__, page, node.address,
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await child.communicate()
    assert child.returncode == 0, said.decode()


def test_a_snippet_that_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nprint(1 + 1)\n```\n\n```output\n2\n```\n")
    run_page(page, "127.0.0.1:1")
    page.write_text(page.read_text().replace("2\n", "3\n"))
    with pytest.raises(AssertionError, match=r"page\.md:4: the page shows\n3\nit printed\n2"):
        run_page(page, "127.0.0.1:1")


def test_a_failing_snippet_is_named_by_page_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # programs are saved there
    page = tmp_path / "page.md"
    page.write_text('text\n\n```python\nx = 1\n```\n\n```python title="program.py"\n\nraise SystemExit(x)\n```\n')
    with pytest.raises(AssertionError, match=r"page\.md:8: program\.py failed"):
        run_page(page, "127.0.0.1:1")
