"""Runs the Python snippets of Markdown pages, in order: `python snippets.py PAGE NAME_SERVER...`, in an empty folder.

- A snippet without a title runs in this process. All of a page share their names, as if typed into one session that allows
  `await` everywhere.
- A snippet with a title is saved under that name: `conftest.py` for others, `test_*.py` is run by pytest, and every other
  file as a program.
- The fence `output` after a snippet holds exactly what it prints.
- Nothing runs that a reader does not see.

A failure names the page and the line.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1:9876"
BLOCK = re.compile(
    r'^ *```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^ *```$(?:\s+^ *```output\n(?P<output>.*?)^ *```$)?',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Snippet:
    """`output` is None where the page does not show any. `line`: of the code's first line in the page, from 1."""

    code: str
    title: str | None
    output: str | None
    line: int


def snippets(text: str) -> Iterator[Snippet]:
    for found in BLOCK.finditer(text):
        yield Snippet(
            inspect.cleandoc("\n" + found["code"]) + "\n",
            found["title"],
            None if found["output"] is None else inspect.cleandoc("\n" + found["output"]),
            text.count("\n", 0, found.start("code")) + 1,
        )


def run_page(page: Path, name_server: str) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    with asyncio.Runner() as runner:
        for snippet in snippets(page.read_text().replace(ADDRESS, name_server)):
            run = run_file if snippet.title else run_here
            said = run(snippet, page, names, runner)
            if snippet.output is not None and said.strip() != snippet.output.strip():
                raise AssertionError(f"{page}:{snippet.line}: the page shows\n{snippet.output}\nit printed\n{said}")


def run_here(snippet: Snippet, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> str:
    source = "\n" * (snippet.line - 1) + snippet.code
    code = compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        outcome = eval(code, names)
        if inspect.iscoroutine(outcome):
            runner.run(asyncio.wait_for(outcome, 180))
    return said.getvalue()


def run_file(snippet: Snippet, page: Path, names: dict[str, Any], runner: asyncio.Runner) -> str:
    name = str(snippet.title)
    Path(name).write_text(snippet.code)
    if name == "conftest.py":
        return ""
    with_pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    command = [sys.executable, *(with_pytest if name.startswith("test_") else ()), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise AssertionError(f"{page}:{snippet.line}: {name} failed\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for page, name_server in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run_page(Path(page), name_server)
