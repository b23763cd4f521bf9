"""`rocketlet completion SHELL`: prints code that makes a shell complete this command."""

from __future__ import annotations

import argparse
import importlib.util
import sys

_SHELLS = ("bash", "zsh", "fish")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion of this command for bash, zsh or fish; needs the extra `completion`",
        description="Print the completion of this command for a shell; this needs the extra `completion`. For bash: "
        'eval "$(rocketlet completion bash)"; for zsh: put the output into a file _rocketlet of a folder in $fpath; '
        "for fish: rocketlet completion fish > ~/.config/fish/completions/rocketlet.fish",
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_completion, log_level="warning")


async def _completion(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("shtab") is None:
        print("rocketlet: completion needs its extra: pip install '.[completion]'", file=sys.stderr)
        return 1
    import shtab

    from .cli import parser

    print(shtab.complete(parser(), options.shell))
    return 0
