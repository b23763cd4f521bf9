"""A broker's background tasks end with it."""

from __future__ import annotations

import inspect

from rocketlet.broker.runtime import MovableClock, Tasks


async def test_what_has_not_begun_when_the_broker_stops_is_closed() -> None:
    """Else Python says of each that it was never awaited."""

    async def answered() -> None: ...

    tasks, work = Tasks(MovableClock()), answered()
    tasks.spawn(work)
    await tasks.stop()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
