"""`--control-port`: runs the broker on a test rig with an HTTP interface. Both are imported only with this option."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from ...broker.config import BrokerConfig
from ...host.address import is_loopback

if TYPE_CHECKING:  # loaded when a broker is controlled
    from ...broker.nameserver import Networks
    from ...broker.server import Listening

log = structlog.get_logger("rocketlet.control")


def fault(options: argparse.Namespace) -> str | None:
    """Return why `--control-port` cannot be served; None if it can, or if it is not given."""
    if getattr(options, "control_port", None) is None:
        return None
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        return "--control-port needs its extra: pip install '.[control]'"
    return None


@asynccontextmanager
async def controlled(
    options: argparse.Namespace, config: BrokerConfig, listening: Listening, networks: Networks | None
) -> AsyncIterator[str]:
    """Run the broker and its control interface while the block runs, and yield the interface's URL."""
    from ...testing.control import Control
    from ...testing.rig import Rig

    if not is_loopback(options.control_host):
        log.warning(
            "control_open_to_other_machines", host=options.control_host, port=options.control_port,
            hint="anybody who reaches it can delete everything",
        )  # fmt: skip
    rig = Rig(config, listening, networks=networks, folder=options.data, empties=True)
    await rig.open()
    try:
        async with Control(rig, options.control_host, options.control_port) as control:
            host = f"[{options.control_host}]" if ":" in options.control_host else options.control_host
            yield f"http://{host}:{control.port}"
    finally:
        await rig.close()
