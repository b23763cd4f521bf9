"""Attackers take all they can of one limited resource of a broker, with an honest client beside them.

The honest client sends a message every 5 ms. A fault is: it is refused, or waits for more than 20 s; it gets another offset
than its message's; the broker ends; its memory exceeds the budget by more than a broker needs. The figures have the latencies
of the honest client (p50, p99, max), the time for which the broker ran during such a send (`p50_broker_ms`,
`p99_broker_ms`), and what the attacker found; without an attack they are `calm`.

Attacks on the memory of clients have a broker with `--memory 64M` each, which may have 160 MiB resident.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from rocketlet.broker.config import LIMITS
from rocketlet.demo.processes import Child
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write

from bench.peers import Peer, rocketlet
from tests.conftest import Wire
from tests.support.peers import SEND

from ._attacks import ATTACKS, LEAN, QUEUES, TOPIC
from .common import Limit, Outcome, peak_mib
from .processes import connect

BUDGET_MIB = 128
BASE_MIB = 200  # interpreter, indexes, the topics and groups that the limits allow, one answer to each connection
LEAN_BUDGET_MIB, LEAN_RESIDENT_MIB = 64, 160
PAUSE_S = 0.005
CALM_S = 3.0


class Honest:
    """A client that sends to a topic of its own. `waits_ms` is cleared by whoever reads it. `broker_ms`: for how long the
    broker's thread ran during each wait."""

    def __init__(self, wire: Wire, outcome: Outcome, pid: int) -> None:
        self._wire = wire
        self._outcome = outcome
        self._pid = pid
        self.waits_ms: list[float] = []
        self.broker_ms: list[float] = []
        self.sent = 0

    async def run(self) -> None:
        while True:
            begin_s, begin_ms = time.perf_counter(), _ran_ms(self._pid)
            try:
                header = {**SEND, "b": "honest"}
                answer = await self._wire.call(RequestCode.SEND_MESSAGE_V2, header, b"honest")
            except (OSError, TimeoutError) as error:
                self._outcome.fault(f"the honest client: {error!r}")
                return
            self.waits_ms.append((time.perf_counter() - begin_s) * 1000)
            self.broker_ms.append(_ran_ms(self._pid) - begin_ms)
            if answer.code != 0:
                self._outcome.fault(f"the honest client was refused: {answer.code} {answer.remark}")
            elif int(str(answer.ext["queueOffset"])) != self.sent:
                self._outcome.fault("the honest client got another offset than its message's")
            self.sent += answer.code == 0
            await asyncio.sleep(PAUSE_S)

    def figures(self) -> dict[str, float]:
        waits, self.waits_ms = sorted(self.waits_ms), []
        ran, self.broker_ms = sorted(self.broker_ms), []
        if not waits:
            return {}
        return {
            "p50_ms": round(waits[len(waits) // 2], 1),
            "p99_ms": round(waits[len(waits) * 99 // 100], 1),
            "max_ms": round(waits[-1], 1),
            "p50_broker_ms": round(ran[len(ran) // 2], 2),
            "p99_broker_ms": round(ran[len(ran) * 99 // 100], 2),
        }


@asynccontextmanager
async def attacked(folder: Path, budget_mib: int, outcome: Outcome, name: str) -> AsyncIterator[tuple[Peer, Honest]]:
    """A broker with an honest client. Everything that ends the broker is a fault."""
    try:
        async with rocketlet(folder, "--memory", f"{budget_mib}M", "--log-level", "error", name=name) as peer:
            wire = await connect(peer.address)
            for topic, queues in (("honest", 1), (TOPIC, QUEUES)):
                await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))
            honest = Honest(wire, outcome, peer.pid)
            running = asyncio.create_task(honest.run())
            yield peer, honest
            if running.done():
                outcome.fault("the honest client has gone")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await wire.close()
    except (OSError, TimeoutError) as error:
        outcome.fault(f"the broker: {error!r}")


async def exhaustion(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    log = folder / "attacks.log"
    is_short = limit.count is not None and limit.count <= len(ATTACKS) and limit.only is None
    names = [limit.only] if limit.only else [name for name in ATTACKS if not (is_short and name.startswith("more "))]
    share = 0.05 if is_short else 1.0
    async with attacked(folder, BUDGET_MIB, outcome, "rocketlet") as (peer, honest):
        await asyncio.sleep(CALM_S * share)
        outcome.figures["calm"] = honest.figures() | {"resident_mib": round(peer.resident_mib())}
        for number in limit:
            name = names[number % len(names)]
            size = max(int(ATTACKS[name][1] * share), 1)
            if name not in LEAN:
                outcome.figures[name] = await _figures(name, size, peer, honest, outcome, log)
                continue
            async with attacked(folder, LEAN_BUDGET_MIB, outcome, f"{number}-lean") as (lean, beside):
                await asyncio.sleep(0.5)
                idle = {"idle_mib": round(lean.resident_mib())}
                outcome.figures[name] = idle | await _figures(name, size, lean, beside, outcome, log)
                if outcome.figures[name]["peak_mib"] > LEAN_RESIDENT_MIB:
                    outcome.fault(f"{name}: over {LEAN_RESIDENT_MIB} MiB resident with a budget of {LEAN_BUDGET_MIB}")
    accepted = outcome.figures.get("groups", {}).get("responses", {}).get("0", 0)
    if accepted > LIMITS.max_memberships // 100:
        outcome.fault(f"{accepted} heartbeats with 100 new groups each were accepted")
    largest = max((figures.get("peak_mib", 0) for figures in outcome.figures.values()), default=0)
    if largest > BUDGET_MIB + BASE_MIB:
        outcome.fault(f"{largest} MiB resident with a budget of {BUDGET_MIB}")


async def _figures(name: str, size: int, peer: Peer, honest: Honest, outcome: Outcome, log: Path) -> dict[str, Any]:
    peak_mib(peer.pid, is_counted_from_now=True)
    found = await _attack(name, peer, size, outcome, log)
    memory = {"resident_mib": round(peer.resident_mib()), "peak_mib": peak_mib(peer.pid)}
    await asyncio.sleep(0.5)
    return honest.figures() | memory | found


async def _attack(name: str, peer: Peer, size: int, outcome: Outcome, log: Path) -> dict[str, Any]:
    command = (sys.executable, "-m", "campaigns._attacks", name, peer.address, str(size))
    child, start_s = await Child.start(command, log), time.perf_counter()
    try:
        await child.wait_for("ready")
        took_s = time.perf_counter() - start_s
        await asyncio.sleep(1)
        await child.close()
        return {"took_s": round(took_s, 1), **orjson.loads(await child.wait_for())}
    except RuntimeError as error:
        outcome.fault(f"the attack {name}: {error}")
        return {}
    finally:
        await child.stop()


def _ran_ms(pid: int) -> float:
    """For how long a process's main thread ran on a processor (Documentation/scheduler/sched-stats)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
