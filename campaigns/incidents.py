"""Incidents on real processes, one after the other: each must be named by `rocketlet doctor`, a metric, a log event and
/readyz, as far as they can know of it, within its time, and nothing else may be named.

A fault is: a tool that says nothing in time, or something else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from ._incidents import INCIDENTS, Incident, Stage
from .common import Limit, Outcome

DEFAULT_COUNT = len(INCIDENTS)
BESIDE = {"expired": {"no_members"}}  # which had lost nothing if it had members


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"seconds": {}})
    uvloop.run(_run(limit, folder, outcome))
    return outcome


async def _run(limit: Limit, folder: Path, outcome: Outcome) -> None:
    names = [limit.only] if limit.only else list(INCIDENTS)
    for number in limit:
        name = names[number % len(names)]
        home = folder / str(number)
        home.mkdir()
        async with AsyncExitStack() as stack:
            stage = Stage(home, stack)
            try:
                async with INCIDENTS[name].play(stage):
                    await _judge(name, INCIDENTS[name], stage, outcome)
            except (OSError, RuntimeError, TimeoutError) as error:
                outcome.fault(f"{name}: it could not be played: {error!r}")
        outcome.tried += 1


async def _judge(name: str, incident: Incident, stage: Stage, outcome: Outcome) -> None:
    began_s = time.monotonic()
    missing = {"doctor", "metric", "readyz", *(["log"] if incident.event else [])}
    others: set[tuple[str, str]] = set()
    while missing and time.monotonic() < began_s + incident.within_s:
        if "metric" in missing and await _measured(incident, stage):
            missing.discard("metric")
        if "log" in missing and f'"event": "{incident.event}"' in stage.log():
            missing.discard("log")
        if "readyz" in missing and (await _fetched(stage, incident.process, "readyz"))[0] == incident.readiness:
            missing.discard("readyz")
        findings, text = await doctor(stage)
        others = findings - {(incident.subject, incident.finding)} - {("shop", kind) for kind in BESIDE.get(name, ())}
        if (incident.subject, incident.finding) in findings or (not incident.finding and "no name server" in text):
            missing.discard("doctor")
        await asyncio.sleep(0.2)
    outcome.figures["seconds"][name] = round(time.monotonic() - began_s, 1)
    for tool in sorted(missing):
        outcome.fault(f"{name}: {tool} does not name it within {incident.within_s:g} s")
    for subject, kind in sorted(others):
        outcome.fault(f"{name}: doctor names {kind} of {subject}, too")


async def _measured(incident: Incident, stage: Stage) -> bool:
    _, text = await _fetched(stage, incident.process, "metrics")
    values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(incident.metric)]
    return bool(values) and (max(values) == 0 if incident.is_zero else max(values) > 0)


async def _fetched(stage: Stage, process: str, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{stage.metrics[process]}/{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def doctor(stage: Stage) -> tuple[set[tuple[str, str]], str]:
    """The subjects and kinds of what the command finds, and what else it says."""
    keys: dict[str, str] = {}
    if stage.access is not None:
        keys = {"ROCKETLET_ACCESS_KEY": stage.access.access_key, "ROCKETLET_SECRET_KEY": stage.access.secret_key}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", "doctor", "--json", "--nameserver", stage.address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **keys},
    )  # fmt: skip
    out, err = await child.communicate()
    found = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    return {(item["subject"], item["kind"]) for item in found}, err.decode()
