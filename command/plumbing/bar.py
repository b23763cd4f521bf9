"""A progress bar on stderr. Nothing is drawn if stderr is not a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from ...migration.mirror import MirrorProgress
from .output import printable

WIDTH = 30
DRAWN_EVERY_S = 0.2
_CLEAR = "\r\x1b[K"


def bar(progress: MirrorProgress) -> str:
    share = progress.done / progress.total if progress.total else 1.0
    filled = int(WIDTH * share)
    counts = f"{progress.done:,} of {progress.total:,}"
    return f"{printable(progress.topic)} [{'#' * filled}{'-' * (WIDTH - filled)}] {int(100 * share)} %, {counts}"


def clear() -> None:
    """Erase the bar before other text is printed."""
    if sys.stderr.isatty():
        print(_CLEAR, end="", file=sys.stderr, flush=True)


@asynccontextmanager
async def drawn(progress: Callable[[], MirrorProgress | None]) -> AsyncIterator[None]:
    """Draw the bar of `progress()` while the block runs; none while that is None. The last bar stays on the terminal."""

    def draw(end: str = "") -> None:
        now = progress()
        if now is not None:
            print(_CLEAR + bar(now), end=end, file=sys.stderr, flush=True)

    async def draw_forever() -> None:
        while True:
            draw()
            await asyncio.sleep(DRAWN_EVERY_S)

    if not sys.stderr.isatty():
        yield
        return
    drawing = asyncio.create_task(draw_forever())
    try:
        yield
    finally:
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing
        draw("\n")
