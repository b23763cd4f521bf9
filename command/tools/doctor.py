"""`rocketlet doctor`: what is wrong, worst first, and what to do about it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...client.admin.admin_client import AdminClient
from ...client.admin.diagnosis import Harm, Patience, diagnose
from ...client.config import LOOK_S, WATCH_S
from ..plumbing.administration import Commands, verb
from ..plumbing.numbers import seconds
from ..plumbing.output import Output

_WORDS = {
    Harm.LOSS: "messages are lost or given up",
    Harm.STANDS: "messages wait without progress",
    Harm.TWICE: "messages are handled more than once",
    Harm.SLOW: "messages are handled late",
    Harm.RISK: "may hurt later",
}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    doctor = verb(commands, "doctor", "say what is wrong with a cluster and its groups, and what to do", _doctor)
    doctor.add_argument(
        "--watch",
        type=seconds,
        default=WATCH_S,
        metavar="SECONDS",
        help=f"how long to watch a queue that commits nothing, at most (default: {WATCH_S:g})",
    )


async def _doctor(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    """The exit status is 1 if something is found that hurts now."""
    findings = await diagnose(admin, Patience(look_s=min(options.watch, LOOK_S), watch_s=options.watch))
    for finding in findings:
        if output.as_json:
            output.json(asdict(finding) | {"harm": finding.harm.name.lower()})
    for harm, words in _WORDS.items():
        found = [finding for finding in findings if finding.harm is harm]
        if found:
            output.text(f"{words}:")
        for finding in found:
            output.text(f"  {finding.subject}: {finding.text} [{finding.kind}]", f"    -> {finding.cure}")
    if not findings:
        output.text("nothing is wrong that can be seen from here")
    return int(any(finding.harm < Harm.RISK for finding in findings))
