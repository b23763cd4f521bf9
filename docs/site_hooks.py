"""What the site takes from the code when it is built, so that it cannot go stale: the command's help, and the limits.

<!-- help: start -->              the output of `rocketlet start --help`
<!-- metrics: broker/observing/metrics.py --> a table of what is measured
<!-- source: client/config.py --> a file of the repository
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from pathlib import Path
from typing import Any

from rocketlet.command.cli import parser

ROOT = Path(__file__).parents[1]


os.environ["COLUMNS"] = "100"  # how wide argparse writes


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = re.sub(r"<!-- help -->", lambda _: _commands(parser()), markdown)
    markdown = re.sub(r"<!-- log events: (.*?) -->", lambda found: _events(ROOT / found[1]), markdown)
    markdown = re.sub(r"<!-- metrics: (.*?) -->", lambda found: _metrics(ROOT / found[1]), markdown)
    return re.sub(r"<!-- source: (.*?) -->", lambda found: _fenced("python", (ROOT / found[1]).read_text()), markdown)


def _commands(whole: argparse.ArgumentParser) -> str:
    """A section for each command of the parser, and below it for each of its verbs."""
    parts: list[str] = []
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                heading = f"{'#' * len(below.prog.split())} `{below.prog}`"
                parts += [heading, _fenced("text", below.format_help()), _commands(below)]
    return "\n\n".join(part for part in parts if part)


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


def _metrics(path: Path) -> str:
    rows: list[str] = []
    for call in ast.walk(ast.parse(path.read_text())):
        match call:
            case ast.Call(
                ast.Attribute(ast.Name("self"), "_gauge" | "_counter" | "_histogram" as kind),
                [ast.Constant(str(name)), ast.Constant(str(text)), *labels],
            ):
                said = [label.value for label in labels if isinstance(label, ast.Constant) and label.value]
                if any(isinstance(label, ast.Starred) for label in labels):
                    said += ["topic", "group"]
                suffix = "_total" if kind == "_counter" else ""
                rows.append(f"| `{name}{suffix}` | {kind[1:]} | {', '.join(map(str, said))} | {text} |")
    return "\n".join(("| Metric | Type | Further labels | Meaning |", "|---|---|---|---|", *sorted(rows)))
