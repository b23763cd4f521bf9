"""The common part of campaigns: their limit, their outcome, and a broker in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server

PROGRESS_S = 5.0


@dataclass(slots=True)
class Outcome:
    """`faults` has a text for each kind of fault, with its count; `figures` is what else was measured."""

    tried: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Count a fault, and print its text to standard error if the text is new."""
        if text not in self.faults:
            print(f"fault: {text}", file=sys.stderr, flush=True)
        self.faults[text] = self.faults.get(text, 0) + 1

    def highest(self, name: str, value: float, **about: Any) -> None:
        """Keep the highest value of a figure, with what is known about it."""
        if value > self.figures.get(name, -1.0):
            self.figures |= {name: round(value, 2), **about}

    def add(self, **counts: int) -> None:
        """Add to figures that are counts."""
        for name, count in counts.items():
            self.figures[name] = self.figures.get(name, 0) + count

    def log_processor(self, logger: Any, method: str, event: Any) -> str:
        """A structlog processor that counts errors: no request may cause one."""
        text = str(event.get("event", ""))
        if method in ("error", "exception", "critical") or "failed" in text:
            about = event.get("request", event.get("action", ""))
            self.fault(f"{text} {about}: {_described(sys.exc_info()[1])}")
        return ""


def _described(error: BaseException | None) -> str:
    last = error.__traceback__ if error is not None else None
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last is not None else ""
    return f"{type(error).__name__}: {str(error)[:80]}{where}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a campaign: `for number in limit` counts its tries, and prints the progress every 5 s.

    Attributes:
        outcome: The outcome of the campaign.
        count: The number of tries.
        seconds: The duration.
        only: The only thing to try, where there are several.
        ends_at_fault: True if the campaign ends at its first fault.
    """

    outcome: Outcome
    count: int | None = None
    seconds: float | None = None
    only: str | None = None
    ends_at_fault: bool = False

    def __iter__(self) -> Iterator[int]:
        start_s = printed_s = time.monotonic()
        end_s = start_s + self.seconds if self.seconds is not None else float("inf")
        number = 0
        while (self.count is None or number < self.count) and (now_s := time.monotonic()) < end_s:
            if now_s >= printed_s + PROGRESS_S:
                printed_s = now_s
                print(f"{number} tried in {now_s - start_s:.0f} s", file=sys.stderr, flush=True)
            yield number
            self.outcome.tried = number = number + 1
            if self.ends_at_fault and self.outcome.faults:
                return


class Serving(NamedTuple):
    broker: BrokerController
    server: Server


@asynccontextmanager
async def serving(config: BrokerConfig) -> AsyncIterator[Serving]:
    """A broker with its name server, for peers without a socket. It logs each event, not only the first of a kind."""
    routes = Routes()
    broker = BrokerController(config, routes)
    async with Server(Listening("127.0.0.1", 0), broker=broker, routes=routes) as server:
        server.reports.is_due = lambda *_: True  # type: ignore[method-assign]
        yield Serving(broker, server)


def config_in(folder: Path, **settings: Any) -> BrokerConfig:
    return BrokerConfig(folder / "data", "127.0.0.1:9", vip_channel=False, **settings)


def peak_mib(process: int | str = "self", *, is_counted_from_now: bool = False) -> int:
    """Return a process's peak memory. Not ru_maxrss, because a child starts with its parent's memory.

    Args:
        process: The process's id.
        is_counted_from_now: True if the peak is its present memory, and counting restarts (proc(5): clear_refs).
    """
    if is_counted_from_now:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    return int(Path(f"/proc/{process}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
