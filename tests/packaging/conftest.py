"""The wheel and the source distribution, built once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..conftest import made_once

ROOT = Path(__file__).parents[2]
NO_INDEX = ("Could not find a version", "No matching distribution", "NewConnectionError", "Max retries exceeded")


@dataclass(frozen=True, slots=True)
class Distributions:
    wheel: Path
    source: Path


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of its own, with nothing but what is installed into it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        """The output of a command of the environment. It sees neither this repository nor our packages."""
        return output([self.folder / "bin" / arguments[0], *arguments[1:]], cwd=cwd, env=self.variables())

    def variables(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return clean | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{clean['PATH']}"}


def output(command: list[str | Path], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Skips the test where pip finds no package index; fails it for every other fault."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    if done.returncode and any(words in done.stderr for words in NO_INDEX):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return built(tmp_path_factory)


def built(factory: pytest.TempPathFactory) -> Distributions:
    """Once, for all who need a wheel: two builds at a time would write into the same folders of this repository."""

    def build(folder: Path) -> None:
        output([sys.executable, "-m", "build", "--outdir", folder, ROOT], cwd=folder)

    folder = made_once(factory, "distributions", build)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distributions(wheel, source)


@pytest.fixture(scope="session")
def clean(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel with its dependencies and no extras."""
    return installed(str(distributions.wheel), tmp_path_factory, "clean")


def interpreter(version: str) -> str | None:
    """A Python of this machine, such as 3.12; a shim of pyenv may lead nowhere."""
    name = f"python{version}"
    found = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", "import venv, ssl"], capture_output=True).returncode == 0:
            return path
    return None


def installed(
    requirement: str, factory: pytest.TempPathFactory, name: str, python: str = sys.executable
) -> Environment:
    def make(folder: Path) -> None:  # without a pip, which would take longer than what it installs
        output([python, "-m", "venv", "--without-pip", "--symlinks", folder], cwd=folder)
        environment = Environment(folder)
        pip = (sys.executable, "-m", "pip", "--python", environment.python)
        output([*pip, "install", "--quiet", requirement], cwd=folder, env=environment.variables())

    return Environment(made_once(factory, name, make))
