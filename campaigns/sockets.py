"""The frames of `frames` through sockets: the same ones at our broker and at Apache's, by hand. `--only apache` takes one.

Eight connections send them, and read what comes; one that the broker closes is opened again. After every 50 frames an
honest client sends a message. Its waits, exceptions in the broker's log, closed connections, memory, and how many of the
acknowledged messages are found at the end, stand in the figures. A fault is one of ours: of Apache's
broker there are figures only.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import FrameError, FrameReader
from rocketlet.protocol.headers import CreateTopic, PullMessage, write
from rocketlet.protocol.message import MessageError, decode_records

from bench.peers import APACHE_HEAP, APACHE_VERSION, Apache, Peer, rocketlet
from tests.conftest import Wire

from ._attacks import connect, send
from ._fuzz import Fuzz
from .common import Limit, Outcome

DEFAULT_COUNT = 20_000
CONNECTIONS = 8
FRAMES_PER_SEND = 50
PATIENCE_S = 20.0
SUBSCRIBED = 4
EXCEPTION = re.compile(rb"^(?:Caused by: )?(?:[a-z]\w*\.)+(\w*(?:Exception|Error))\b", re.MULTILINE)
LOGBACK = """<configuration>
<appender name="errors" class="ch.qos.logback.core.FileAppender"><file>%s</file>
<encoder><pattern>%%d %%p %%m%%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="errors"/></root>
</configuration>
"""


class Hostile:
    """A connection that sends frames; its answers are read and counted."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.answers = self.closed = self.unreadable = 0

    async def send(self, data: bytes) -> None:
        writer = self._writer
        if writer is None or writer.transport.is_closing():
            reader, fresh = await asyncio.wait_for(connect(self._address), PATIENCE_S)
            self._reading = asyncio.create_task(self._read(reader, fresh))
            self._writer = writer = fresh
        try:
            writer.write(data)
        except RuntimeError:  # uvloop's, of a transport that was closed just now
            self._writer = None

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        try:
            while data := await reader.read(1 << 20):
                self.answers += sum(frame.is_response for frame in frames.feed(data))
        except FrameError:
            self.unreadable += 1
        except OSError:
            pass
        self.closed += 1
        writer.transport.abort()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


class Honest:
    """Sends to a queue of its own. Connects anew after a silence."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._wire: Wire | None = None
        self.waits_ms: list[float] = []
        self.silences = 0
        self.refusals: Counter[int] = Counter()
        self.stored: list[bytes] = []

    async def _call(self, code: int, ext: dict[str, Any], body: bytes = b"") -> Any:
        if self._wire is None:
            self._wire = Wire(*await connect(self._address))
        try:
            return await asyncio.wait_for(self._wire.call(code, ext, body), PATIENCE_S)
        except (OSError, FrameError):
            await self._wire.close()
            self._wire = None
            raise

    async def begin(self) -> None:
        ext = {key: str(value) for key, value in write(CreateTopic("honest", 1, 1, 6)).items()}
        await self._call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)

    async def send(self, body: bytes) -> None:
        began_s, frame = time.perf_counter(), send("honest")
        try:
            answer = await self._call(frame.code, dict(frame.ext), body)
        except (OSError, FrameError):
            self.silences += 1
            return
        self.waits_ms.append((time.perf_counter() - began_s) * 1000)
        if answer.code == 0:
            self.stored.append(body)
        else:
            self.refusals[answer.code] += 1

    async def found(self) -> int:
        """How many of the acknowledged messages can be pulled."""
        bodies: set[bytes] = set()
        offset = 0
        while True:
            header = PullMessage("check", "honest", 0, offset, 32, SUBSCRIBED, 0, 0, subscription="*")
            answer = await self._call(
                RequestCode.PULL_MESSAGE, {key: str(value) for key, value in write(header).items()}
            )
            if answer.code != 0:
                return len(bodies.intersection(self.stored))
            bodies.update(record.body for record in decode_records(answer.body))
            offset = int(str(answer.ext["nextBeginOffset"]))

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()


async def _attack(peer: Peer, limit: Limit, seed: int) -> dict[str, Any]:
    fuzz, chance = Fuzz(seed), random.Random(~seed)
    honest, hostile = Honest(peer.address), [Hostile(peer.address) for _ in range(CONNECTIONS)]
    await honest.begin()
    resident_mib = peak_mib = peer.resident_mib()
    began_s, frames = time.perf_counter(), 0
    for number in limit:
        try:
            await chance.choice(hostile).send(fuzz.frame(number + 1))
        except OSError:
            honest.silences += 1
        frames += 1
        if number % FRAMES_PER_SEND == 0:
            await honest.send(b"honest %d" % number)
            peak_mib = max(peak_mib, peer.resident_mib())
            await asyncio.sleep(0)
    took_s = time.perf_counter() - began_s
    await asyncio.sleep(1)
    for item in hostile:
        await item.close()
    waits = sorted(honest.waits_ms)
    try:
        found: int | str = await honest.found()
    except (OSError, FrameError, MessageError, LookupError) as error:
        found = f"{error!r}"
    await honest.close()
    return {
        "frames": frames, "per_second": round(frames / took_s), "answers": sum(item.answers for item in hostile),
        "closed": sum(item.closed for item in hostile) - CONNECTIONS, "unreadable": sum(item.unreadable for item in hostile),
        "p50_ms": round(waits[len(waits) // 2], 1), "p99_ms": round(waits[len(waits) * 99 // 100], 1),
        "max_ms": round(waits[-1], 1), "silences": honest.silences, "refusals": dict(honest.refusals),
        "acknowledged": len(honest.stored), "found": found,
        "first_mib": round(resident_mib), "peak_mib": round(peak_mib), "last_mib": round(peer.resident_mib()),
    }  # fmt: skip


@asynccontextmanager
async def _ours(folder: Path) -> AsyncIterator[tuple[Peer, Path]]:
    async with rocketlet(folder, "--memory", "128M") as peer:
        yield peer, folder / "rocketlet.log"


@asynccontextmanager
async def _apaches(folder: Path) -> AsyncIterator[tuple[Peer, Path]]:
    system = Apache(folder, APACHE_VERSION, APACHE_HEAP)
    log = folder / "apache.log"
    for file in ("logback_broker.xml", "rmq.broker.logback.xml"):
        (system.home / "conf" / file).write_text(LOGBACK % log)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(system)
        yield Peer("apache", system.broker_address, system.pid), log


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    uvloop.run(_run(limit, seed, folder, outcome))
    return outcome


async def _run(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    for name, serving in (("rocketlet", _ours), ("apache", _apaches)):
        if limit.only in (None, name):
            async with serving(folder) as (peer, log):
                found = await _attack(peer, limit, seed)
            text = log.read_bytes() if log.exists() else b""
            exceptions = Counter(match.decode() for match in EXCEPTION.findall(text))
            outcome.figures[name] = {**found, "exceptions": dict(exceptions.most_common(8)), "log_bytes": len(text)}
            outcome.tried += found["frames"]
    ours = outcome.figures.get("rocketlet", {})
    for what in ("silences", "refusals", "exceptions", "unreadable"):
        if ours.get(what):
            outcome.fault(f"{what}: {ours[what]}")
    if ours.get("found") != ours.get("acknowledged"):
        outcome.fault(f"{ours['acknowledged']} messages were acknowledged, {ours['found']} found")
