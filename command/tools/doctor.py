"""`rocketlet doctor`: prints findings, worst first, and how to fix them."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...client.admin.admin_client import AdminClient
from ...client.admin.diagnosis import Examined, ObservationTimes, diagnose
from ...client.admin.findings import HEADINGS, Harm
from ...client.config import LOOK_S, WATCH_S
from ...migration.mirror import MirrorProgress
from ..plumbing.administration import Commands, verb
from ..plumbing.bar import drawn
from ..plumbing.numbers import seconds
from ..plumbing.output import Output


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    doctor = verb(commands, "doctor", "report problems of a cluster and its groups, and how to fix them", _doctor)
    doctor.add_argument(
        "--watch",
        type=seconds,
        default=WATCH_S,
        metavar="SECONDS",
        help=f"how long to watch a queue that commits nothing, at most (default: {WATCH_S:g})",
    )


async def _doctor(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    """Print the findings. Return the exit status, which is 1 if a finding affects messages now."""
    examined = Examined()

    def progress() -> MirrorProgress | None:
        return MirrorProgress("groups examined", examined.done, examined.total) if examined.total else None

    patience = ObservationTimes(look_s=min(options.watch, LOOK_S), watch_s=options.watch)
    async with drawn(progress):
        findings = await diagnose(admin, patience, examined)
    for finding in findings:
        if output.as_json:
            output.json(asdict(finding) | {"harm": finding.harm.name.lower()})
    for harm, words in HEADINGS.items():
        found = [finding for finding in findings if finding.harm is harm]
        if found:
            output.text(f"{words}:")
        for finding in found:
            output.text(f"  {finding.subject}: {finding.text} [{finding.kind}]", f"    -> {finding.cure}")
    if not findings:
        output.text("no findings")
    return int(any(finding.harm < Harm.RISK for finding in findings))
