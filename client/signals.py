"""`stop_signal`: a service that stops gracefully, in one line."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def stop_signal() -> signal.Signals:
    """Returns when the process is told to stop, by SIGTERM (systemd, Docker, Kubernetes) or SIGINT (Ctrl-C); which it was.

        async with Consumer(...):
            await stop_signal()

    The block then ends as blocks do: running handlers finish, offsets are committed, queues handed over. A second signal is
    not waited for any more, and ends the process at once. Where a loop has no signal handlers (Windows) this never returns;
    Ctrl-C raises KeyboardInterrupt there.
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
