"""What the site takes from the code when it is built, so that it cannot go stale: the command's help, and the limits.

<!-- help: start -->              the output of `rocketlet start --help`
<!-- source: client/config.py --> a file of the repository
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = re.sub(r"<!-- help -->", lambda _: _commands(), markdown)
    markdown = re.sub(r"<!-- log events: (.*?) -->", lambda found: _events(ROOT / found[1]), markdown)
    return re.sub(r"<!-- source: (.*?) -->", lambda found: _fenced("python", (ROOT / found[1]).read_text()), markdown)


def _commands() -> str:
    names = re.findall(r"^    (\w[\w-]*)(?: |$)", _help(), re.MULTILINE)
    return "\n\n".join(f"## `rocketlet {name}`\n\n{_fenced('text', _help(name))}" for name in names)


def _help(*command: str) -> str:
    rocketlet = Path(sys.executable).with_name("rocketlet")
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [rocketlet, *command, "--help"], capture_output=True, text=True, check=True, env=environment
    ).stdout


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _events(folder: Path) -> str:
    rows: dict[str, tuple[set[str], list[str]]] = {}
    for path in sorted(folder.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("log"), level), [ast.Constant(str(event)), *_], fields):
                    levels, known = rows.setdefault(event, (set(), []))
                    levels.add("error" if level == "exception" else level)
                    known += [
                        field.arg for field in fields if field.arg and field.arg not in (*known, "hint", "exc_info")
                    ]
    lines = [
        f"| `{event}` | {', '.join(sorted(rows[event][0]))} | {', '.join(rows[event][1])} |" for event in sorted(rows)
    ]
    return "\n".join(("| Event | Level | Fields |", "|---|---|---|", *lines))
