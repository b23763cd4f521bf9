"""`stop_signal`: a service that stops gracefully, in one line."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def stop_signal() -> signal.Signals:
    """Waits until the process is told to stop, by SIGTERM (systemd, Docker, Kubernetes) or SIGINT (Ctrl-C). Returns which.

        async with Consumer(...):
            await stop_signal()

    Leaving the block then lets running handlers finish, commits offsets and hands over queues. A second signal ends the
    process at once. On Windows, where loops have no signal handlers, this never returns, and Ctrl-C raises KeyboardInterrupt.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def tell(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    added: list[signal.Signals] = []
    try:
        for number in SIGNALS:
            loop.add_signal_handler(number, tell, number)
            added.append(number)
    except NotImplementedError:
        pass
    try:
        return await came
    finally:
        for number in added:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
