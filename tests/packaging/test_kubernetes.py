"""The manifest of docs/operations.md fits Kubernetes' published schema, and its command is one of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rocketlet.command.cli import parser

from ..conftest import made_once
from ..interop.conftest import fetched

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
