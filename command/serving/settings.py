"""Options of servers from the command line, environment variables and a TOML file.

`--retain-hours 24` is `ROCKETLET_RETAIN_HOURS=24`, and `retain-hours = 24` in the file that `--config` or
`ROCKETLET_CONFIG` names. The command line takes precedence over the environment, and the environment over the file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ..config import OTHER_VARIABLES

PREFIX: Final = "ROCKETLET_"
_NOT_SETTINGS: Final = frozenset(("help", "config"))
_OF_KUBERNETES: Final = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+_)").match
_ADDRESS_OF_KUBERNETES: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+").fullmatch  # a value such as ROCKETLET_PORT has
_NEAR: Final = 0.74  # minimum similarity (difflib) of a variable that is rejected to an option, such as DTAA to DATA
_NEAR_WORD: Final = 0.6  # minimum similarity (difflib) of an option or choice that an error suggests
_PARSER: Final = "_parser"  # the attribute of parsed options that has the verb's parser
_TRUTHS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class SettingsParser(argparse.ArgumentParser):
    """An argument parser that suggests similar names in its errors. After `read_settings`, options that the command line
    lacks come from the environment and the file."""

    reads_settings = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Disable abbreviations of options, so that `--queue 3` does not set another option."""
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown arguments with the verb's parser, because its help has the options."""
        options, unknown = self.parse_known_args(args, namespace)
        parser: SettingsParser = options.__dict__.pop(_PARSER)
        if unknown:
            near = (parser._near(text) for text in unknown if text.startswith("--"))
            hint = "; ".join(f"did you mean {name}?" for name in near if name)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {hint}" if hint else ""))
        return options

    def _near(self, text: str) -> str | None:
        known = [name for action in self._actions for name in action.option_strings]
        return next(iter(difflib.get_close_matches(text.partition("=")[0], known, 1, _NEAR_WORD)), None)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for an invalid choice or verb that suggests the most similar one, or lists all if none is
        similar."""
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            near = difflib.get_close_matches(str(value), choices, 1, _NEAR_WORD)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the error, without the usage, which has thirty lines for a server."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the options\n")

    def read_settings(self) -> None:
        self.reads_settings = True
        _READING.add(self)
        help_text = "a TOML file of these options; each may also be an environment variable, such as ROCKETLET_DATA"
        self.add_argument("--config", type=Path, metavar="FILE", help=help_text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.reads_settings:
            self._take_defaults(os.environ, list(args or ()))
        options, unknown = super().parse_known_args(args, namespace)
        if not hasattr(options, _PARSER):  # a verb's parser ends before that of the whole command
            setattr(options, _PARSER, self)
        return options, unknown

    def _take_defaults(self, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        path = _config_path(arguments) or environment.get(f"{PREFIX}CONFIG")
        from_file = self._read(Path(path)) if path else {}
        ignored = sorted(name for name in environment if _is_of_kubernetes(name, environment[name]))
        environment = {name: value for name, value in environment.items() if name not in ignored}
        self.set_defaults(ignored_variables=ignored)
        typed = _typed(arguments)
        for action in self._actions:
            name = _name(action)
            if name is None:
                continue
            variable = PREFIX + name.replace("-", "_").upper()
            if typed.intersection(action.option_strings):
                pass
            elif environment.get(variable):
                self._set(action, environment[variable], f"${variable}")
            elif name in from_file:
                self._set(action, from_file.pop(name), f"{path}: {name}")
            from_file.pop(name, None)
        self._refuse_strange(environment)
        if from_file:
            known = ", ".join(filter(None, map(_name, self._actions)))
            self.error(f"{path}: unknown settings: {', '.join(from_file)}; there are {known}")

    def _refuse_strange(self, environment: Mapping[str, str]) -> None:
        """Reject a variable whose name is nearly that of an option, because such a mistake would stay unnoticed. Other
        variables may belong to another program, such as those that Kubernetes sets for a service with the name
        rocketlet."""
        options = (name for parser in _READING for name in map(_name, parser._actions) if name)
        known = {name.replace("-", "_").upper() for name in options} | OTHER_VARIABLES
        for variable in sorted(environment):
            name = variable.removeprefix(PREFIX)
            if name == variable or name in known or _OF_KUBERNETES(name):
                continue
            if near := difflib.get_close_matches(name, known, 1, _NEAR):
                self.error(f"${variable} is no setting; is ${PREFIX}{near[0]} meant?")

    def _read(self, path: Path) -> dict[str, Any]:
        import tomllib

        try:
            found = tomllib.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            self.error(f"--config: {path} cannot be read: {error.strerror}")
        except ValueError as error:
            self.error(f"--config: {path} is not TOML: {error}")
        return {name.replace("_", "-"): value for name, value in found.items()}

    def _set(self, action: argparse.Action, value: Any, place: str) -> None:
        """Set a value as the option's default, with the same checks as on the command line."""
        try:
            self.set_defaults(**{action.dest: _converted(action, value)})
        except (argparse.ArgumentTypeError, ValueError) as error:
            self.error(f"{place}: {error}")
        action.required = False


_READING: Final[weakref.WeakSet[SettingsParser]] = weakref.WeakSet()


def _is_of_kubernetes(variable: str, value: str) -> bool:
    """Return True if a variable has a value like those that Kubernetes sets for a service, such as rocketlet-console."""
    return variable.startswith(PREFIX) and _ADDRESS_OF_KUBERNETES(value) is not None


def _typed(arguments: Sequence[str]) -> set[str]:
    """Return the names of the options of a command line."""
    return {text.partition("=")[0] for text in arguments if text.startswith("-")}


def _config_path(arguments: Sequence[str]) -> str | None:
    words: Iterator[str] = iter(arguments)
    for word in words:
        if word == "--config":
            return next(words, None)
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _name(action: argparse.Action) -> str | None:
    """The option's name in a file; None for an option that is no setting."""
    longs = [text[2:] for text in action.option_strings if text.startswith("--")]
    return longs[0] if longs and action.dest not in _NOT_SETTINGS else None


def _converted(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:  # a switch
        truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
        if truth is None:
            raise ValueError(f"{value!r} is neither true nor false")
        return truth
    if isinstance(value, bool | list | dict):
        raise ValueError(f"{value!r} is not one value; give a text or a number")
    text = str(value)
    if action.choices is not None and text not in action.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(map(str, action.choices))}")
    return action.type(text) if callable(action.type) else text
