"""The wheel and the source distribution: what is in them, and whether what was installed from them works."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import rocketlet

from ..conftest import Node
from .conftest import ROOT, Distributions, Environment, installed, interpreter, output

OURS_ALONE = ("tests", "bench", "campaigns", "simulation", "examples", "docs", "docker")
BESIDE_THE_PACKAGES = {
    *("LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml", "setup.py", "PKG-INFO", "setup.cfg"),
    *("protocol/_fast.pyx", "protocol/crc32.h"),
}
HAS_COMPILER = os.environ.get("ROCKETLET_PURE") != "1" and any(map(shutil.which, ("cc", "gcc", "clang")))

CLIENT = """
import asyncio, subprocess, sys
from rocketlet import Consumer, Message, Producer

async def main(address):
    done = asyncio.get_running_loop().create_future()

    async def handle(message: Message) -> None:
        done.set_result(message.body.decode())

    async with Producer(address) as producer:
        await producer.send("orders", b"it works")
    async with Consumer(address, "shipping", "orders", handle, start="first"):
        print(await asyncio.wait_for(done, 30))

"""
CLIENT_ALONE = CLIENT + "asyncio.run(main(sys.argv[1]))"
WITH_BROKER = (
    CLIENT
    + """
command = ["rocketlet", "start", "--host", "127.0.0.1", "--port", "0", "--data", "data"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
    try:
        ready = next(line for line in broker.stdout if "is ready on " in line)
        asyncio.run(main(ready.split("is ready on ")[1].split(":")[0] + ":" + ready.split(":")[1]))
    finally:
        broker.terminate()
"""
)
CLIENT_MB = 15


def modules() -> set[str]:
    """Every module of the package, by its place in the tree."""
    top = {path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in OURS_ALONE} | {
        ROOT / "adapters"
    }
    inside = {str(path.relative_to(ROOT)) for folder in top for path in folder.rglob("*.py")}
    pages = {
        str(path.relative_to(ROOT)) for kind in ("static/*", "templates/*") for path in (ROOT / "console").glob(kind)
    }
    schema = {"broker/grpc/service.binpb", "broker/grpc/service.proto"}
    return inside | pages | schema | {"__init__.py", "py.typed", "demo/page.html", "protocol/_fast.pyi"}


def test_the_wheel_holds_every_module_and_nothing_else(distributions: Distributions) -> None:
    packed = set(zipfile.ZipFile(distributions.wheel).namelist())
    information = {name for name in packed if ".dist-info/" in name}
    paths = (f"rocketlet/{name}".replace("rocketlet/spark/autoload", "pyspark_rocketlet") for name in modules())
    expected = {path.replace("rocketlet/adapters/", "rocketlet/") for path in paths}
    compiled = {"rocketlet/protocol/_fast.abi3.so"} if HAS_COMPILER else set()
    assert packed - information == expected | compiled
    assert any(name.endswith("licenses/LICENSE") for name in information)


def test_the_source_distribution_holds_what_the_wheel_is_built_from(distributions: Distributions) -> None:
    with tarfile.open(distributions.source) as archive:
        files = {name.partition("/")[2] for name in (entry.name for entry in archive if entry.isfile())}
    assert {name for name in files if ".egg-info/" not in name} == modules() | BESIDE_THE_PACKAGES


@pytest.mark.parametrize("setting", [{"CC": "no-such-compiler"}, {"ROCKETLET_PURE": "1"}], ids=["no compiler", "pure"])
def test_a_wheel_is_built_in_pure_python_without_a_compiler(
    setting: dict[str, str], distributions: Distributions, tmp_path: Path
) -> None:
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path]
    output([*command, distributions.source], cwd=tmp_path, env=os.environ | setting)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert "rocketlet/protocol/fast.py" in packed
    assert not [name for name in packed if "_fast" in name and not name.endswith(".pyi")]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_works_with_each_python_that_it_names(
    version: str, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Takes longer than others: it installs all that a broker needs."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    environment = installed(f"{distributions.wheel}[broker]", tmp_path_factory, f"python{version}", python)
    assert environment.run("python", "--version", cwd=tmp_path).startswith(f"Python {version}.")
    assert "it works" in environment.run("python", "-c", WITH_BROKER, cwd=tmp_path)


async def test_a_client_works_in_a_clean_environment_without_extras(
    clean: Environment, node: Node, tmp_path: Path
) -> None:
    module = "compiled" if HAS_COMPILER else "pure"
    assert clean.run("rocketlet", "--version", cwd=tmp_path) == f"rocketlet {rocketlet.__version__} ({module})\n"
    said = await asyncio.to_thread(clean.run, "python", "-c", CLIENT_ALONE, node.address, cwd=tmp_path)
    assert "it works" in said


def test_the_client_alone_is_small(clean: Environment) -> None:
    (site,) = clean.folder.glob("lib/python3*/site-packages")
    tools = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
    files = [path for path in site.rglob("*") if path.is_file()]
    ours = [path for path in files if not path.relative_to(site).parts[0].startswith(tools)]
    assert any(path.name == "consumer.py" for path in ours)
    assert sum(path.stat().st_size for path in ours) < CLIENT_MB * 1_000_000


def test_a_broker_without_its_extra_names_it(clean: Environment, tmp_path: Path) -> None:
    found = subprocess.run([clean.folder / "bin" / "rocketlet", "start"], cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert "pip install '.[broker]'" in found.stderr


def test_what_needs_an_extra_says_which(clean: Environment, tmp_path: Path) -> None:
    for module, extra in (("rocketlet.spark", "spark"), ("rocketlet.demo", "demo")):
        text = f"try:\n    import {module}.__main__\nexcept ImportError as error:\n    print(error)"
        said = clean.run(
            "python", "-c", text.replace(".__main__", "" if extra == "spark" else ".__main__"), cwd=tmp_path
        )
        assert f"pip install '.[{extra}]'" in said
