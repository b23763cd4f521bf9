"""`rocketlet asyncapi MODULE:APP`: the AsyncAPI document of an application."""

from __future__ import annotations

import argparse
import importlib
import sys

import orjson

from ...client.application import Rocketlet
from ...client.errors import ConfigError
from ..plumbing.output import complain


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "print the AsyncAPI 3.0 document of an application's handlers as JSON"
    parser = commands.add_parser("asyncapi", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument(
        "application", metavar="MODULE:APP", help="the module, and its `Rocketlet`, such as service:app"
    )
    parser.add_argument("--title", default="Rocketlet application", help="the document's title (default: %(default)s)")
    parser.add_argument("--app-version", default="1.0.0", help="the application's version (default: %(default)s)")
    parser.set_defaults(run=_asyncapi, log_level="warning")


async def _asyncapi(options: argparse.Namespace) -> int:
    try:
        document = _application(options.application).asyncapi(title=options.title, version=options.app_version)
    except ConfigError as error:
        complain(error)
        return 1
    print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    return 0


def _application(text: str) -> Rocketlet:
    """Import an application with the current folder on the path, as `python -m` does. Raises ConfigError."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name or module.startswith("."):
        raise ConfigError(f"MODULE:APP: got {text!r}; expected a module and a name in it, such as service:app")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"MODULE:APP: {error}; run the command in the folder of the module") from None
    if not isinstance(found, Rocketlet):
        raise ConfigError(f"MODULE:APP: {name} of {module} is {type(found).__name__}; expected a Rocketlet application")
    return found
