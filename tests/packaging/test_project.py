"""The files around the code: what CI and releases run, and what `make help` promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rocketlet
import yaml

from .conftest import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return found


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", ())]


def test_ci_runs_the_gate_and_builds_distributions_and_images() -> None:
    commands = [step.get("run") for step in steps("ci.yml")]
    assert ".ci/run" in commands
    assert "python -m build" in commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_readme_names_the_command_that_the_gate_calls() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1].removeprefix("exec ")
    assert f"\n{command} " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_images_are_built_for_both_architectures(name: str) -> None:
    built = [step["with"] for step in steps(name) if step.get("uses", "").startswith("docker/build-push-action")]
    assert built
    assert all(options["platforms"] == "linux/amd64,linux/arm64" for options in built)
    assert {options.get("target") for options in built} == {None, "spark"}
    assert {bool(options["push"]) for options in built} == {name == "release.yml"}


def test_only_a_tag_publishes_and_only_after_ci() -> None:
    release = workflow("release.yml")
    assert set(release[True]) == {"push"}  # YAML 1.1 reads the key `on` as a boolean
    assert set(release[True]["push"]) == {"tags"}
    publishing = [job for job in release["jobs"].values() if "environment" in job]
    assert publishing
    assert all({"ci", "version"} <= set(job["needs"]) for job in publishing)


def test_the_changelog_begins_with_what_is_unreleased_and_knows_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert rocketlet.__version__ in headings


def test_make_help_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.findall(r"^  make (\S+)", listed.stdout, re.MULTILINE) == targets.split()


def test_the_hooks_for_commits_are_valid() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", config], check=True, timeout=60)


def test_a_clone_may_have_any_name(tmp_path: Path) -> None:
    """As that of an archive's folder, which no package of Python's could have."""
    clone = tmp_path / "rocketlet-main"
    (clone / "tests").mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "__init__.py",
        "bench",
        "tests/__init__.py",
        "tests/side_by_side.py",
        "tests/support",
    ):
        (clone / name).symlink_to(ROOT / name)
    shutil.copy(
        ROOT / "tests" / "conftest.py", clone / "tests"
    )  # by its real place, pytest would take it for another's
    (clone / "tests" / "test_nothing.py").write_text("def test_nothing() -> None: ...")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=clone, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_link_to_a_file_leads_somewhere() -> None:
    """In the pages that stand outside of docs/; the site's build checks docs/ itself."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("bench/*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not Path(page.parent, target).exists()
    ]
    assert not broken
