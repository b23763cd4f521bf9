"""The site builds; a broken link, a missing anchor or a page that is in no menu ends the build."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import rocketlet
import rocketlet.testing

from ..conftest import Node, Nodes
from . import snippets as runner
from .snippets import run_page, snippets

ROOT = Path(__file__).parents[2]

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="needs the extra `docs`: make dev installs it"
)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        config,
        "--site-dir",
        folder,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@needs_mkdocs
def test_the_site_builds_and_its_reference_has_every_public_name(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = "".join(page.read_text() for page in (tmp_path / "reference").rglob("index.html"))
    constants = {"AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH", "STICKY"}  # they are named in a sentence
    missing = {
        name
        for name in set(rocketlet.__all__) - constants - {"__version__"}
        if not re.search(rf'id="rocketlet\.client\.(\w+\.)?{name}"', reference)
    }
    assert not missing
    assert "Consumer.release" not in reference, "it is for Rocketlet's own parts"
    kit = (tmp_path / "reference" / "testing" / "index.html").read_text()
    assert all(f'id="rocketlet.testing.{name}"' in kit for name in rocketlet.testing.__all__)
    assert "timeout_s" in kit
    commands = (tmp_path / "reference" / "command" / "index.html").read_text()
    assert all(f"<code>rocketlet {name}</code>" in commands for name in ("start", "broker", "nameserver", "groups"))
    assert "--advertise-external" in commands


@needs_mkdocs
def test_each_broken_link_ends_the_build(tmp_path: Path) -> None:
    """With the settings of the site, but one page, no menu and no plugins. A warning ends the build."""
    (tmp_path / "docs").mkdir()
    page, config = tmp_path / "docs" / "index.md", tmp_path / "mkdocs.yml"
    settings = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[0]
    config.write_text(re.sub(r"(?m)^hooks:.*\n|^plugins:\n(?: .*\n)+", "", settings))
    page.write_text("# Home\n")
    assert build(tmp_path / "site", config).returncode == 0
    links = ("gone.md", "index.md#gone", "/gone")
    page.write_text("# Home\n\n" + "\n\n".join(f"[gone]({link})" for link in links) + "\n")
    built = build(tmp_path / "site", config)
    assert built.returncode != 0
    warnings = [line for line in (built.stdout + built.stderr).splitlines() if "WARNING" in line]
    assert [sum(f"'{link}'" in line for line in warnings) for link in links] == [1, 1, 1], warnings


# Documents are read in editors and in diffs, too: lines are short.


MAX_CHARACTERS = 140
FOLDERS = ("docs", "bench", "examples", "docker", ".github")


def long_lines(text: str) -> list[int]:
    """The numbers of lines that are too long, outside of tables and code."""
    found, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif len(line) > MAX_CHARACTERS and not is_code and not line.lstrip().startswith("|"):
            found.append(number)
    return found


def test_no_line_of_a_document_is_too_long() -> None:
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    assert len(pages) > 20
    too_long = [f"{page.relative_to(ROOT)}:{number}" for page in pages for number in long_lines(page.read_text())]
    assert too_long == []


def test_tables_and_code_may_be_wide() -> None:
    wide = "x" * 141
    assert long_lines(f"{wide}\n| {wide} |\n```\n{wide}\n```\n{wide[1:]}\n") == [1]


# Every Python snippet of README and docs runs, and prints what the page says it prints.


IN_ONE_SPARK = (ROOT / "README.md", ROOT / "docs/spark.md")
"""Pages with a Spark session, which runs as long as its process. A virtual machine takes longer to start than a page."""
GUIDES = sorted(ROOT.glob("docs/how-to/*.md"))
NEEDS_SPARK = [
    pytest.mark.spark,
    pytest.mark.skipif(
        shutil.which("java") is None or importlib.util.find_spec("pyspark") is None,
        reason="Java or PySpark is missing, which this page needs",
    ),
]


def has_python(page: Path) -> bool:
    return any(snippets(page.read_text()))


def pages() -> list[object]:
    """Each page that has Python in it; those with Spark need Java. Guides run together below: one that needs another one
    fails in the order in which it comes first."""
    found: list[object] = [pytest.param(IN_ONE_SPARK, id="README.md and docs/spark.md", marks=NEEDS_SPARK)]
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        if has_python(page) and page not in (*IN_ONE_SPARK, *GUIDES):
            marks = NEEDS_SPARK if any("pyspark" in snippet.code for snippet in snippets(page.read_text())) else ()
            found.append(pytest.param([page], id=str(page.relative_to(ROOT)), marks=marks))
    return found


async def test_readme_and_then_the_tutorial_run_in_one_folder_on_one_broker(node: Node, tmp_path: Path) -> None:
    """As by somebody who has just come; Spark has a page of its own."""
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text().partition("Spark reads and writes")[0])
    for page in (readme, ROOT / "docs/tutorial.md"):
        await runs(page, node, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pages", pages())
async def test_every_snippet_of_the_page_runs(pages: Sequence[Path], nodes: Nodes, tmp_path: Path) -> None:
    """Each page has a broker of its own."""
    brokers = [await nodes.start(data_dir=tmp_path / page.stem) for page in pages]
    await run_pages([(page, node.address) for page, node in zip(pages, brokers, strict=True)], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_backwards", [False, True])
async def test_how_to_pages_run_on_one_broker_in_any_order(is_backwards: bool, node: Node, tmp_path: Path) -> None:
    """Each page has topics and groups of its own, so that none finds what another one has left."""
    await run_pages(
        [(page, node.address) for page in sorted(filter(has_python, GUIDES), reverse=is_backwards)], tmp_path
    )


async def runs(page: Path, node: Node, tmp_path: Path) -> None:
    await run_pages([(page, node.address)], tmp_path)


async def run_pages(places: Sequence[tuple[Path, str]], tmp_path: Path) -> None:
    """Run the snippets of pages in one process, each page with its name server."""
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    folder = tmp_path / "reader"
    folder.mkdir(exist_ok=True)
    child = await asyncio.create_subprocess_exec(
        sys.executable, runner.__file__, *(part for place in places for part in place),
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
