"""The site takes these from the code when it is built, so that it cannot go stale: the command's help, and the limits.

<!-- help: start -->              the output of `rocketlet start --help`
<!-- metrics: broker/metrics.py --> a table of what is measured
<!-- options: client.options.ConsumerOptions --> a table of what a client takes
<!-- settings: GROUP_OPTIONS --> a table of protocol/settings.py
<!-- limits: client/config.py --> a table of its constants, and of the fields of its class Limits
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from rocketlet.client.config import options_of
from rocketlet.command.cli import parser, subcommands
from rocketlet.protocol import settings

ROOT = Path(__file__).parents[1]


os.environ["COLUMNS"] = "100"  # how wide argparse writes


MERMAID = ROOT / ".docs" / "node_modules" / "mermaid" / "dist" / "mermaid.min.js"  # which `make docs` installs
LOGO = ROOT / "console" / "static" / "icon.svg"
_FOUND_FIRST = ("index.md", "how-to/", "tutorial.md", "testing.md", "faq.md", "troubleshooting.md")  # by the search
_FOUND_LAST = ("reference/", "architecture.md", "decisions/")


def on_config(config: Any) -> Any:
    """Offer links to edit pages if the build has the address of the repository."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the logo, and mermaid, so that the pages load nothing from other hosts."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, config.theme["logo"], abs_src_path=str(LOGO)))
    if MERMAID.exists():
        files.append(File.generated(config, "javascripts/mermaid.min.js", abs_src_path=str(MERMAID)))
        config.extra_javascript.append("javascripts/mermaid.min.js")
    return files


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    if page is not None and page.file.src_uri.startswith(_FOUND_FIRST):
        page.meta.setdefault("search", {"boost": 4})
    if page is not None and page.file.src_uri.startswith(_FOUND_LAST):
        page.meta.setdefault("search", {"boost": 0.3})
    if not MERMAID.exists():  # the theme would load it from another host
        markdown = markdown.replace("```mermaid", "```text")
    markdown = re.sub(r"<!-- help -->", lambda _: _commands(parser()), markdown)
    markdown = re.sub(r"<!-- log events: (.*?) -->", lambda found: _events(ROOT / found[1]), markdown)
    markdown = re.sub(r"<!-- options: (.*?)\.(\w+) -->", lambda found: options(found[1], found[2]), markdown)
    markdown = re.sub(r"<!-- metrics: (.*?) -->", lambda found: _metrics(ROOT / found[1]), markdown)
    markdown = re.sub(r"<!-- settings: (.*?) -->", lambda found: settings_table(found[1]), markdown)
    return re.sub(r"<!-- limits: (.*?) -->", lambda found: limits(ROOT / found[1]), markdown)


def _commands(whole: argparse.ArgumentParser) -> str:
    """A section for each command of the parser, and below it for each of its verbs."""
    parts: list[str] = []
    for below in subcommands(whole):
        parts += [f"{'#' * len(below.prog.split())} `{below.prog}`", _fenced("text", below.format_help())]
    return "\n\n".join(parts)


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


def options(module: str, name: str) -> str:
    """A table of the options that a class declares: name, default and meaning."""
    kind = vars(importlib.import_module(f"rocketlet.{module}"))[name]
    rows = [
        f"| `{option}` | `{getattr(found.default, 'name', repr(found.default))}` | {found.text[:1].upper()}{found.text[1:]} |"
        for option, found in options_of(kind).items()
    ]
    return "\n".join(("| Option | Default | Meaning |", "|---|---|---|", *rows))


def settings_table(name: str) -> str:
    """A table of settings: option, name, default, bounds, meaning, name on the wire, and whether Apache's tools reset it."""
    rows = []
    for option, item in getattr(settings, name).items():
        bounds = "on or off" if isinstance(item.default, bool) else f"{item.least:,} to {item.most:,}"
        bounds = ", ".join(map(str, item.choices)) or ("-1 or 1 to 43,200" if item.check else bounds)
        text = item.help[:1].upper() + item.help[1:]
        cells = (f"`--{option}`", f"`{item.argument}`", item.shown(item.default), bounds, text)
        kept = "attribute" if item.is_attribute else "field"
        resets = "no" if item.is_attribute or item.is_own else "yes"
        rows.append(f"| {' | '.join(map(str, cells))} | {kept} `{item.name}` | {resets} |")
    head = "| Option | Name | Default | Values | Meaning | On the wire | Apache's tools reset it |"
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows))


_UNITS = {
    "S": "s",
    "SECONDS": "s",
    "MS": "ms",
    "BYTES": "bytes",
    "HOURS": "hours",
    "CHARS": "characters",
    "DAYS": "days",
}
_SIZES = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def limits(path: Path) -> str:
    """A table of a module's numbers and those of its class of limits: name, value with its unit, and the comment beside or
    above, by section."""
    lines = path.read_text().splitlines()
    values = dict(vars(_module(path)))
    found: dict[str, list[str]] = {}
    section = ""
    tree = ast.parse("\n".join(lines))
    starts = {node.lineno: node for node in tree.body if isinstance(node, ast.AnnAssign)}
    for made in tree.body:
        if isinstance(made, ast.ClassDef) and made.name.endswith("Limits") and made.name != "PullLimits":
            starts |= {node.lineno: node for node in made.body if isinstance(node, ast.AnnAssign)}
            values |= {item.name: item.default for item in fields(values[made.name])}
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("# ") and not lines[number - 2] and not lines[number]:
            section = f"**{line.lstrip()[2:]}**\n\n"
        node = starts.get(number)
        if node is None or not isinstance(node.target, ast.Name) or not isinstance(values[node.target.id], int | float):
            continue
        beside = re.search(r"  # (.*)$", "\n".join(lines[number - 1 : node.end_lineno]), re.MULTILINE)
        text = beside[1] if beside else _comment_above(lines, number - 1)
        name = node.target.id
        row = f"| `{name}` | {_with_unit(name.upper(), values[name])} | {text.replace(chr(124), chr(92) + chr(124))} |"
        found.setdefault(section, []).append(row)
    head = "| Limit | Value | |\n|---|---|---|\n"
    return "\n\n".join(section + head + "\n".join(rows) for section, rows in found.items())


def _comment_above(lines: list[str], end: int) -> str:
    """Return the comment that ends before the line of this index, which may have several lines."""
    first = end
    while first and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(line.strip().removeprefix("# ") for line in lines[first:end])


def _module(path: Path) -> ModuleType:
    """Import a module of the package, even if what its package needs, such as PySpark, is not installed."""
    name = "rocketlet." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    try:
        return importlib.import_module(name)
    except ImportError:
        package = sys.modules[name.rpartition(".")[0]] = ModuleType(name.rpartition(".")[0])
        package.__path__ = [str(path.parent)]
        return importlib.import_module(name)


def _with_unit(name: str, value: float) -> str:
    unit = "" if name.endswith("_PER_S") else _UNITS.get(name.rpartition("_")[2], "")
    for size, larger in _SIZES if unit == "bytes" else ():
        if value >= size and value % size == 0:
            return f"{value // size:,} {larger}"
    return f"{value:,} {unit}".strip() if isinstance(value, int) else f"{value:,.10g} {unit}".strip()
