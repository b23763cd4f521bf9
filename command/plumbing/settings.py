"""Options of the verbs `create` and `set`, from the tables of settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ...protocol.settings import ON_OFF, ResourceSetting, Value


def add_settings(
    parser: argparse.ArgumentParser, settings: Mapping[str, ResourceSetting], *, creates: bool, defaults: bool = False
) -> None:
    """Add an option for each setting.

    Args:
        settings: the settings by their options
        creates: True if the verb creates the resource; an option then turns a setting on that is off by default
        defaults: True if the help names the default of each setting
    """
    for option, setting in settings.items():
        default = f" (default: {setting.shown(setting.default)})" if defaults else ""
        text = f"{setting.help}{default}"
        if creates and setting.default is False:
            parser.add_argument(f"--{option}", action="store_const", const="on", help=text)
        elif isinstance(setting.default, bool):
            parser.add_argument(f"--{option}", choices=ON_OFF, help=text)
        elif setting.choices:
            parser.add_argument(f"--{option}", type=type(setting.choices[0]), choices=setting.choices, help=text)
        elif setting.check is not None and isinstance(setting.default, str):
            parser.add_argument(f"--{option}", metavar=option.upper(), help=text)
        else:
            parser.add_argument(f"--{option}", type=int, metavar="N", help=text)


def given(options: argparse.Namespace, settings: Mapping[str, ResourceSetting]) -> dict[str, Value]:
    """Return the values of the given options by the arguments of `AdminClient`."""
    found: dict[str, Value] = {}
    for option, setting in settings.items():
        value = getattr(options, option.replace("-", "_"))
        if value is not None:
            found[setting.argument] = value == ON_OFF[0] if isinstance(setting.default, bool) else value
    return found
