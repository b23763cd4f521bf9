"""The `rocketlet` command. It imports only the modules that the given command needs, so that it starts quickly."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence

from .. import __version__
from ..protocol.fast import MODULE
from .serving.settings import SettingsParser

_MODULES = {
    "start": "serving.serve",
    "broker": "serving.serve",
    "nameserver": "serving.serve",
    "topics": "nouns.topics",
    "groups": "nouns.groups",
    "offsets": "nouns.offsets",
    "messages": "nouns.messages",
    "jobs": "nouns.jobs",
    "brokers": "nouns.brokers",
    "acl": "nouns.acl",
    "bench": "tools.bench",
    "doctor": "tools.doctor",
    "asyncapi": "tools.asyncapi",
    "dump": "tools.dump",
    "console": "serving.console",
    "top": "tools.top",
    "mirror": "tools.mirror",
    "move": "tools.move",
    "fsck": "tools.fsck",
    "backup": "tools.backup",
    "restore": "tools.backup",
    "completion": "completion",
    "version": "nouns.version",
}
"""Each command's module, which has `add_to(commands)`."""

_NOUNS = frozenset(name for name, module in _MODULES.items() if module.startswith("nouns.") and name != "version")
OPTIONS_WITH_VALUE = frozenset(
    ("--nameserver", "--tls-ca", "--tls-cert", "--tls-key", "--access-key", "--secret-key-file")
)
"""The options of every verb that have a value."""
SWITCHES = frozenset(("--json", "--tls"))
"""The options of every verb that have no value."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = hoisted(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        parser().print_help()
        return 0
    options = parser(*arguments[:1]).parse_args(arguments)
    configure_logs(options.log_level)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it
        sys.stderr.close()
        return 1


def hoisted(arguments: Sequence[str]) -> list[str]:
    """Move options that every verb has from before the verb to after it, where the verb's parser accepts them. Return the
    arguments unchanged if another option precedes the verb."""
    words: list[str] = []
    early: list[str] = []
    rest = list(arguments)
    while rest and len(words) < (2 if words and words[0] in _NOUNS else 1):
        text = rest.pop(0)
        if text.partition("=")[0] in OPTIONS_WITH_VALUE:
            early += [text, *(rest[:1] if "=" not in text else ())]
            del rest[: "=" not in text]
        elif text in SWITCHES:
            early.append(text)
        elif text.startswith("-"):
            return list(arguments)
        else:
            words.append(text)
    return [*words, *early, *rest]


def configure_logs(level: str) -> None:
    """Configure logging now if structlog is imported already, as for a broker. Other commands configure logging at
    their first log entry, because they seldom log and importing structlog would double their start time."""
    if "structlog" in sys.modules:
        from .plumbing import logs

        logs.configure(level)
    else:
        logging.basicConfig(handlers=[_FirstRecord(level)], level=level.upper(), force=True)


class _FirstRecord(logging.Handler):
    """Configures logging at the first record, and passes the record on."""

    def __init__(self, log_level: str) -> None:
        super().__init__()
        self._log_level = log_level

    def emit(self, record: logging.LogRecord) -> None:
        from .plumbing import logs

        logs.configure(self._log_level)
        logging.getLogger().handle(record)


def _run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("uvloop") is None:  # it does not exist for Windows, and a client does not need it
        return int(asyncio.run(options.run(options)))
    import uvloop

    return int(uvloop.run(options.run(options)))


def parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of one command, or of all commands if there is no such command."""
    whole = SettingsParser(
        prog="rocketlet",
        description="Start RocketMQ brokers and name servers, and administer clusters, Rocketlet's or Apache's.",
    )
    whole.add_argument("--version", action="version", version=f"rocketlet {__version__} ({MODULE})")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=SettingsParser)
    modules = [_MODULES[command]] if command in _MODULES else dict.fromkeys(_MODULES.values())
    if _MODULES["start"] in modules:
        _import_structlog()
    for name in modules:
        importlib.import_module(f".{name}", __package__).add_to(commands)
    return whole


def subcommands(known: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Iterate over the parsers of a parser's commands and verbs, each before those below it."""
    for action in known._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield below
                yield from subcommands(below)


def _import_structlog() -> None:
    """Import structlog without rich, which structlog imports if it is installed, to show errors with their local
    variables. Our logs do not show them (`logs.py`), and importing rich takes a sixth of a server's start time."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment] # an import of it raises ImportError, as where it is missing
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


if __name__ == "__main__":
    sys.exit(main())
