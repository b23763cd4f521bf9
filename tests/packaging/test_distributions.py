"""The wheel and the source distribution: what is in them, and whether what was installed from them works."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import rocketlet
import rocketlet.client
import yaml
from rocketlet.command.cli import parser

from ..conftest import PYRIGHT, Node, kept, made_once
from ..docs.snippets import snippets
from ..interop.conftest import fetched
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
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
    ]
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


# `import rocketlet`: which names there are, what loads when, and that a user's type checkers know them.


PUBLIC = (
    "rocketlet",
    "rocketlet.celery",
    "rocketlet.dramatiq",
    "rocketlet.otel",
    "rocketlet.spark",
    "rocketlet.sync",
    "rocketlet.taskiq",
    "rocketlet.testing",
)
"""The modules that users import; each says by `__all__` what is theirs."""
USER_CODE = """
from typing import assert_type

import rocketlet
from rocketlet import (
    CONSISTENT_HASH, STICKY, Access, Consumer, Message, Outgoing, Producer, PullLimits, Queue, Reject, RetryLater,
    SendResult, Sql, rebalanced,
)


async def handle(message: Message) -> RetryLater | Reject | None:
    assert_type(message.body, bytes)
    assert_type(message.queue, Queue)
    return RetryLater(delay_level=3) if message.tag else None


async def main() -> None:
    version: str = rocketlet.__version__
    async with Producer("127.0.0.1:9876", access=Access()) as producer:
        assert_type(await producer.send("orders", version.encode(), keys="4711"), SendResult)
        await producer.send_batch("orders", [Outgoing(b"one"), Outgoing(b"two")])
    limits = PullLimits(batch_size=32)
    async with Consumer("127.0.0.1:9876", "g", {"orders": Sql("price > 5")}, handle, strategy=STICKY, pull=limits):
        await rebalanced("127.0.0.1:9876", "g")
    async with Consumer("127.0.0.1:9876", "g", "orders", strategy=CONSISTENT_HASH) as consumer:
        assert_type(await consumer.assigned(), set[Queue])
        async for message in consumer:
            assert_type(message, Message)
"""
USER_FAULT = """
from rocketlet import Consumer, Message


async def handle(message: Message) -> None:
    print(message.boddy)


Consumer("127.0.0.1:9876", "group", "orders", handle)
"""


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a statement."""
    code = (
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps([*sys.modules.keys() - before]))"
    )
    return set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))


def test_the_public_names_are_the_clients_and_the_version() -> None:
    assert set(rocketlet.__all__) == {*rocketlet.client.__all__, "__version__"}
    assert set(rocketlet.__all__) <= set(dir(rocketlet))
    for name in rocketlet.client.__all__:
        assert getattr(rocketlet, name) is getattr(rocketlet.client, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prodcuer'"):
        rocketlet.Prodcuer  # noqa: B018 (the look-up is the test)
    with pytest.raises(ImportError, match="Prodcuer"):
        exec("from rocketlet import Prodcuer")


def test_importing_rocketlet_loads_nothing_else() -> None:
    assert loaded_by("import rocketlet") <= {"rocketlet", "rocketlet.client"} | STANDARD


STANDARD = loaded_by("import importlib, typing")


def test_the_client_loads_neither_broker_nor_spark() -> None:
    loaded = loaded_by("from rocketlet import Consumer, Producer")
    assert "rocketlet.client.consumer" in loaded
    ours = {name.split(".")[1] for name in loaded if name.startswith("rocketlet.")}
    assert ours == {"client", "host", "protocol"}
    assert not loaded & {"pyspark", "prometheus_client", "pandas", "pyarrow"}


def private_names(code: str) -> Iterator[str]:
    """Imports of a user's code that are of ours and not public, and attributes of public modules that are not."""
    tree = ast.parse(code)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rocketlet":
            names = [alias.name for alias in node.names]
            public = importlib.import_module(node.module or "").__all__ if node.module in PUBLIC else ()
            yield from (f"{node.module}.{name}" for name in names if name not in public)
        elif isinstance(node, ast.Import):
            ours = {alias.name for alias in node.names if alias.name.split(".")[0] == "rocketlet"}
            modules |= ours & set(PUBLIC)
            yield from sorted(ours - set(PUBLIC))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or (module := ast.unparse(node.value)) not in modules:
            continue
        if f"{module}.{node.attr}" not in PUBLIC and node.attr not in importlib.import_module(module).__all__:
            yield f"{module}.{node.attr}"


def codes_for_users() -> dict[str, str]:
    """The code of each example, and of each snippet of the documentation."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    codes = {
        f"{page.relative_to(ROOT)}:{item.line}": item.code for page in pages for item in snippets(page.read_text())
    }
    return codes | {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "examples").rglob("*.py"))}


def test_examples_and_documentation_use_public_names_only() -> None:
    codes = codes_for_users()
    assert len(codes) > 30
    assert [f"{place}: {name}" for place, code in codes.items() for name in private_names(code)] == []


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("from rocketlet.protocol.names import Queue", "rocketlet.protocol.names.Queue"),
        ("def f():\n    from rocketlet.testing import ports", "rocketlet.testing.ports"),
        ("from rocketlet.testing.broker import Broker", "rocketlet.testing.broker.Broker"),
        ("import rocketlet.client", "rocketlet.client"),
        ("import rocketlet.spark\nrocketlet.spark.planner", "rocketlet.spark.planner"),
        ("import rocketlet\nrocketlet.client.Producer", "rocketlet.client"),
    ],
)
def test_a_planted_private_name_is_found(planted: str, name: str) -> None:
    assert list(private_names(planted)) == [name]


@pytest.mark.parametrize("module", PUBLIC)
def test_each_module_of_the_documentation_says_what_is_public(module: str) -> None:
    found = importlib.import_module(module)
    assert len(set(found.__all__)) == len(found.__all__)
    for name in found.__all__:
        assert hasattr(found, name)
    texts = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    assert module in texts


@pytest.fixture(scope="session")
def project(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel alone: its types need none of its dependencies."""

    def make(folder: Path) -> None:
        venv.create(folder / ".venv", symlinks=True)
        (site,) = folder.glob(".venv/lib/python3*/site-packages")
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
        output([*pip, site, distributions.wheel], cwd=folder)
        (folder / "user.py").write_text(USER_CODE)
        (folder / "fault.py").write_text(USER_FAULT)

    return Environment(made_once(tmp_path_factory, "project", make) / ".venv")


def complaints(command: list[str | Path], folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout + done.stderr


def test_a_users_code_type_checks_with_mypy_strict(project: Environment) -> None:
    folder = project.folder.parent
    mypy: list[str | Path] = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--python-executable",
        project.python,
    ]
    assert complaints([*mypy, "user.py"], folder) == (0, "Success: no issues found in 1 source file\n")
    code, said = complaints([*mypy, "fault.py"], folder)
    assert code == 1
    assert '"Message" has no attribute "boddy"' in said


@pytest.mark.pyright
@pytest.mark.skipif(shutil.which("npx") is None, reason="needs Node with npx, which fetches pyright")
def test_a_users_code_type_checks_with_pyright_strict(project: Environment) -> None:
    folder = project.folder.parent
    settings = {"typeCheckingMode": "strict", "venvPath": ".", "venv": ".venv", "include": ["user.py", "fault.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    _, said = complaints(["npx", "--yes", PYRIGHT, "--outputjson"], folder)
    start = said.find("{")
    if start < 0:
        pytest.skip(f"npx fetches no pyright: {said[-300:]}")
    found = json.loads(said[start : said.rindex("}") + 1])["generalDiagnostics"]
    assert {Path(fault["file"]).name for fault in found} == {"fault.py"}, found
    assert 'Cannot access attribute "boddy"' in " ".join(fault["message"] for fault in found)


# The files around the code: what CI and releases run, and what `make help` promises.


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


def test_prometheus_scrapes_every_server_of_the_compose_file_that_has_metrics() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    servers = {
        f"{name}:{9100 if program in ('nameserver', 'broker') else 9890}"
        for name, service in services.items()
        for program in re.findall(r"\Arocketlet (nameserver|broker|console)\b", service.get("command") or "")
        if program == "console" or "--metrics-port 9100" in service["command"]
    }
    config = yaml.safe_load((ROOT / "docker" / "observe" / "prometheus.yml").read_text())
    targets = [static["targets"] for job in config["scrape_configs"] for static in job["static_configs"]]
    assert set(chain.from_iterable(targets)) == servers
    assert {"nameserver:9100", "broker-a:9100", "broker-b:9100", "console:9890"} == servers


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
    assert ".dev" in rocketlet.__version__ or rocketlet.__version__ in headings


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

    return kept(tmp_path_factory, "kubernetes-validate", make, [CHECKER])


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
