"""The supervisor of broker processes, which restarts and stops them.

A broker that ends is restarted: immediately if it was ready for 60 s, otherwise after a pause, which doubles if it ends
soon again. If a broker ends before it was ready for the first time, the start of all brokers fails, because a restart
would most likely fail for the same reason.

Brokers run in sessions of their own, so that Ctrl-C reaches only this process, which stops them. Brokers also stop on
their own when this process ends for any reason, because that closes their standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import structlog

from ...client.errors import RocketletError
from ..config import MAX_RESTART_DELAY_S, RESTART_DELAY_S, STEADY_S, STOP_S
from .settings import PREFIX

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger("rocketlet.supervisor")

READY = b" is ready on "


class BrokerEnded(RocketletError):
    """The error for a broker that ended before it was ready."""


class Supervised:
    """One supervised broker. `command` has the program and its arguments; the program prints a line with `READY` when it
    is ready."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.restarts = 0
        self.is_ready = False
        self._command = command
        self._child: asyncio.subprocess.Process | None = None
        self._soon = 0  # deaths in a row, each soon after the start

    async def start(self) -> None:
        """Start the broker and wait until it is ready. Raises BrokerEnded or OSError."""
        # the command has all options; settings in the environment are those of `rocketlet start`
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        pipe = asyncio.subprocess.PIPE
        self._child = child = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
        )
        log.info("broker_started", broker=self.name, pid=child.pid)
        assert child.stdout is not None
        while READY not in (line := await child.stdout.readline()):
            if not line:
                raise BrokerEnded(f"the broker {self.name} ended before it was ready ({_end(await child.wait())})")
        self.is_ready = True

    async def keep(self) -> None:
        """Restart the broker whenever it has ended, until cancelled."""
        while True:
            await self._ended()
            self.restarts += 1
            with contextlib.suppress(BrokerEnded, OSError):  # `_ended` then logs the failure, and waits longer
                await self.start()

    async def _ended(self) -> None:
        """Wait until the broker has ended and may be restarted."""
        assert self._child is not None
        began_s = time.monotonic()
        status = await self._child.wait()
        was_steady = self.is_ready and time.monotonic() - began_s >= STEADY_S
        self.is_ready = False
        self._soon = 0 if was_steady else self._soon + 1
        delay_s = restart_delay_s(self._soon)
        log.error("broker_died", broker=self.name, pid=self._child.pid, reason=_end(status), restart_in_s=delay_s)
        await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """Stop the broker, and kill it if it does not end in time. Return when it has ended."""
        child, self.is_ready = self._child, False
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            log.error("broker_killed", broker=self.name, pid=child.pid, reason=f"it did not stop within {STOP_S:g} s")
            child.kill()
            await child.wait()


def restart_delay_s(deaths: int) -> float:
    """Return the pause before a restart. `deaths` is the number of consecutive ends soon after a start."""
    return 0.0 if deaths == 0 else min(RESTART_DELAY_S * 2.0 ** min(deaths - 1, 30), MAX_RESTART_DELAY_S)


def _end(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


class Supervisor:
    """Starts brokers on entry as a context manager, restarts those that end, and stops all on exit. If the event `done` is
    set while they start, entry stops them and returns."""

    def __init__(self, cluster: str, brokers: Sequence[Supervised], done: asyncio.Event) -> None:
        self.brokers = brokers
        self._cluster = cluster
        self._done = done
        self._keeping: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Wait until all brokers are ready or `done` is set. Raises BrokerEnded or OSError."""
        starting = [asyncio.ensure_future(broker.start()) for broker in self.brokers]
        started, done = asyncio.gather(*starting), asyncio.ensure_future(self._done.wait())
        try:
            await asyncio.wait((started, done), return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
                self._keeping = [asyncio.ensure_future(broker.keep()) for broker in self.brokers]
        except BaseException:
            await self._stop(starting)
            raise
        finally:
            done.cancel()
        if not started.done():
            await self._stop(starting)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stop(self._keeping)

    async def _stop(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(broker.stop() for broker in self.brokers))

    async def readiness(self) -> str | None:
        """Return a text with the brokers that are not ready; None if all are."""
        missing = [broker.name for broker in self.brokers if not broker.is_ready]
        return f"not ready: {', '.join(missing)}" if missing else None

    async def snapshot(self) -> list[Metric]:
        """Return the metrics for the metrics port."""
        from .supervisor_metrics import SupervisorMetrics

        return SupervisorMetrics(self._cluster).of(self.brokers)
