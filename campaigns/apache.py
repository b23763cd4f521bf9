"""The attacks of `exhaustion` on Apache's broker, by hand, to stand beside ours in docs/reliability.md.

Its faults are Apache's. Needs Java, and Maven for its jars.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from bench.peers import APACHE_HEAP, APACHE_VERSION, Apache, Peer

from ._attacks import ATTACKS, connect
from .common import Limit, Outcome
from .exhaustion import attack_all

DEFAULT_COUNT = len(ATTACKS)


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    uvloop.run(_run(limit, folder, outcome))
    return outcome


async def _run(limit: Limit, folder: Path, outcome: Outcome) -> None:
    async with Apache(folder, APACHE_VERSION, APACHE_HEAP) as system:
        peer = Peer("apache", system.broker_address, system.pid)
        try:
            await attack_all(peer, outcome, limit, 1.0, system.address)
        except (OSError, TimeoutError) as error:
            outcome.fault(f"the broker: {error!r}")
        try:
            await asyncio.wait_for(connect(peer.address), 10)
        except (OSError, TimeoutError) as error:
            outcome.fault(f"the broker is gone: {error!r}")
