"""A plugin of pytest that runs tests in forked processes: once each, to see which lines it runs, then a few for each mistake.

Tests are imported once, before the first fork, so that a mistake costs no start of Python. Nothing that a test does or leaves
reaches another try: each ends with its process.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypedDict

import coverage
import orjson
import pytest

AT_ONCE: Final = 3  # processes; tests wait a lot
KNOWN: Final = "mutants/runs"
"""The runs of tests in the cache of pytest."""
FOREIGN: Final = ("java", "go", "node", "pypi", "spark", "browser", "pyright")
"""Markers of tests that run programs of others, which have no mistake."""


@dataclass(slots=True)
class Test:
    """One that passes without any mistake. `lines`: which it runs, by the file's path."""

    item: pytest.Item
    seconds: float
    lines: dict[str, set[int]]


class Run(TypedDict):
    """A test without any mistake. `lines`: which it runs, by the file's path. `of`: digests of the files it is of."""

    is_passed: bool
    seconds: float
    lines: dict[str, list[int]]
    of: dict[str, str]


@dataclass(slots=True, eq=False)
class Checks:
    """The plugin. `files`: whose lines are looked for. `then`: called with the tests, the quickest first."""

    root: Path
    files: list[str]
    folder: Path
    then: Callable[[Checks, list[Test]], None]
    error: BaseException | None = None
    _failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of the one that runs all tests here."""
        try:
            self.then(self, self._measured(session))
        except BaseException as error:  # pytest would print it, and go on
            self.error = error
        return True

    def passes(self, item: pytest.Item) -> bool:
        """In this process, with all fixtures made for it alone."""
        self._failed.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self._failed

    def _measured(self, session: pytest.Session) -> list[Test]:
        """The tests that pass and run any of the files. Raises RuntimeError if there is none."""
        digests = {path: _digest(self.root / path) for path in self.files}
        digests |= {str(path): _digest(path) for path in {item.path for item in session.items}}
        assert session.config.cache is not None
        known: dict[str, Run] = session.config.cache.get(KNOWN, {})
        missing = [item for item in session.items if not _is_fresh(item, known.get(item.nodeid), digests)]
        print(f"{len(missing)} of {len(session.items)} tests are measured", file=sys.stderr, flush=True)
        known |= self._runs(missing, digests)
        session.config.cache.set(KNOWN, known)
        tests = [
            Test(item, found["seconds"], {path: set(lines) for path, lines in found["lines"].items()})
            for item in session.items
            if (found := known[item.nodeid])["is_passed"] and found["lines"]
        ]
        if not tests:
            raise RuntimeError("no test passed")
        return sorted(tests, key=lambda test: test.seconds)

    def _runs(self, items: list[pytest.Item], digests: dict[str, str]) -> dict[str, Run]:
        """By the tests' names, from a few processes."""
        parts = [self.folder / f"runs-{number}.json" for number in range(AT_ONCE)]

        def measuring(number: int) -> int:
            runs = {item.nodeid: self._run_of(item, digests) for item in items[number::AT_ONCE]}
            parts[number].write_bytes(orjson.dumps(runs))
            return 0

        pids = [forked(partial(measuring, number), self.folder) for number in range(AT_ONCE)]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        for pid in pids:
            sweep(pid)
        if any(codes):
            raise RuntimeError("the tests could not be measured")
        return {name: found for part in parts for name, found in orjson.loads(part.read_bytes()).items()}

    def _run_of(self, item: pytest.Item, digests: dict[str, str]) -> Run:
        names = {str(self.root / path): path for path in self.files}
        watch = coverage.Coverage(data_file=None, config_file=False, include=list(names))
        watch.set_option("run:disable_warnings", ["no-data-collected"])  # many tests run none of the files
        began_s = time.monotonic()
        with watch.collect():
            is_passed = self.passes(item)
        seconds = time.monotonic() - began_s
        data = watch.get_data()
        lines = {names[name]: sorted(data.lines(name) or ()) for name in data.measured_files() if name in names}
        of = {path: digests[path] for path in (str(item.path), *lines)}
        return {"is_passed": is_passed, "seconds": seconds, "lines": lines, "of": of}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_fresh(item: pytest.Item, found: Run | None, digests: dict[str, str]) -> bool:
    """Whether neither the test's file nor one that it ran has changed since."""
    return (
        found is not None
        and str(item.path) in found["of"]
        and all(digests.get(path) == digest for path, digest in found["of"].items())
    )


def collect(paths: Iterable[str], plugin: Checks) -> None:
    """Collects the tests of these paths, and runs the plugin. Raises what it raised, and RuntimeError without any test."""
    without = [word for name in ("rerunfailures", "xdist") for word in ("-p", f"no:{name}")]
    ours = " and ".join(f"not {name}" for name in FOREIGN)
    with redirect_stdout(sys.stderr):
        code = pytest.main([*without, "-q", "-s", "-m", ours, *paths], plugins=[plugin])
    if plugin.error is not None:
        raise plugin.error
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"tests could not be collected: pytest ended with {code!r}")


def forked(work: Callable[[], int], folder: Path) -> int:
    """The process that does it, silent, in a session of its own, and with its own place for temporary files. Its code is what
    `work` returns, 255 after an exception."""
    pid = os.fork()
    if not pid:
        code = 255
        told = os.dup(2)
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            own = folder / str(os.getpid())
            own.mkdir()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
            code = work()
        except BaseException:
            os.write(told, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return pid


def sweep(pid: int) -> None:
    """Ends what an ended process has started and left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def quickest(tests: list[Test], path: str, lines: range, *, count: int, seconds: float) -> Iterator[Test]:
    """The tests that run one of the lines: at most so many, which take at most so long."""
    for test in tests:
        if count and test.seconds <= seconds and not test.lines.get(path, set()).isdisjoint(lines):
            count -= 1
            seconds -= test.seconds
            yield test
