"""The files around the code: what CI and releases run, and what `make help` promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rocketlet
import yaml
from rocketlet.command.cli import parser

from ..conftest import made_once
from ..interop.conftest import fetched
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


# The changelog is for users: Keep a Changelog's sections, and releases that fit a page.


SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
MAX_RELEASE_LINES = 60
MAX_LINE_CHARACTERS = 140


def faults_of(text: str) -> list[str]:
    """Everything that breaks the form, in words."""
    faults = [f"too long a line: {line}" for line in text.splitlines() if len(line) > MAX_LINE_CHARACTERS]
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = release.split("\n", 1)[0]
        lines = [line for line in release.splitlines() if line.strip()]
        if not name.startswith("[Unreleased]") and len(lines) > MAX_RELEASE_LINES:
            faults.append(f"{name} has {len(lines)} lines, {MAX_RELEASE_LINES} are allowed")
        found = re.findall(r"^### (.+)$", release, re.MULTILINE)
        if len(found) != len(set(found)) or not set(found) <= set(SECTIONS):
            faults.append(f"{name} has the sections {found}; take each of {SECTIONS} once at most")
    return faults


def test_the_changelog_has_its_form() -> None:
    assert faults_of((ROOT / "CHANGELOG.md").read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("## [1.0.0]\n### News\n", "sections"),
        ("## [1.0.0]\n### Added\n### Added\n", "sections"),
        ("## [1.0.0]\n### Added\n" + "- a bullet\n" * 60, "has 62 lines"),
        ("x" * 141, "too long a line"),
    ],
)
def test_what_breaks_the_form_is_found(text: str, fault: str) -> None:
    (found,) = faults_of(text)
    assert fault in found


# The manifest of docs/operations.md fits Kubernetes' published schema, and its command is one of ours.


PAGE = Path(__file__).parents[2] / "docs/operations.md"
CHECKER = "kubernetes-validate==1.37.0"  # it brings the schemas of the versions that it knows


@pytest.fixture
def manifest() -> str:
    (found,) = re.findall(r'```yaml title="rocketlet.yaml"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        fetched([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), CHECKER], folder)

    return made_once(tmp_path_factory, "kubernetes-validate", make)


def faults(checker: Path, manifest: str, folder: Path) -> str:
    """The checker's words, empty if it finds nothing."""
    path = folder / "manifest.yaml"
    path.write_text(manifest)
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", str(path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checker)}, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.pypi
def test_the_manifest_fits_the_schema(checker: Path, manifest: str, tmp_path: Path) -> None:
    assert faults(checker, manifest, tmp_path) == ""


@pytest.mark.pypi
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("readOnlyRootFilesystem", "readOnlyRoot"), ("replicas: 1", "replicas: one"), ("mountPath", "path")],
)
def test_the_check_finds_wrong_fields(right: str, wrong: str, checker: Path, manifest: str, tmp_path: Path) -> None:
    assert right in manifest
    assert faults(checker, manifest.replace(right, wrong), tmp_path) != ""


def test_the_pod_runs_our_command_without_rights(manifest: str) -> None:
    _, stateful = yaml.safe_load_all(manifest)
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    assert program == "rocketlet"
    options = parser(arguments[0]).parse_args(arguments)
    assert options.metrics_port in [port["containerPort"] for port in container["ports"]]
    assert str(options.data) in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
