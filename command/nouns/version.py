"""`rocketlet version`: the versions of this program and of the cluster's brokers."""

from __future__ import annotations

import argparse
import platform

from ... import __version__
from ...client.admin.admin_client import AdminClient
from ...client.errors import RocketletError
from ...protocol.fast import MODULE
from ..plumbing.administration import Commands, verb
from ..plumbing.output import Output
from .brokers import shown_version


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verb(commands, "version", "show the versions of this program and of the cluster's brokers", _version)


async def _version(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    rows: list[dict[str, object]] = [{"part": "rocketlet", "version": __version__}]
    rows.append({"part": "module", "version": MODULE})
    rows.append({"part": "python", "version": platform.python_version()})
    try:
        for broker in await admin.brokers():
            status = await admin.broker_status(broker.addresses.get(0, ""))
            rows.append({"part": broker.name, "version": shown_version(status)})
    except RocketletError as error:
        output.records(("part", "version"), rows)
        raise error
    output.records(("part", "version"), rows)
    return 0
