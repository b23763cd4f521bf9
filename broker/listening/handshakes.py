"""Decides which TLS handshakes run, and which wait.

Every client that connects can ask for a private-key operation, and copying a hello costs it nothing. 400 at once stopped
the event loop for 223 ms. So a few begin at a time; the others wait, and each client address has one in turn, so that an
address that asks for very many keeps only itself waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Protocol

from ..config import LIMITS, Limits


class Entering(Protocol):
    """A client that asks for a handshake."""

    @property
    def address(self) -> str: ...

    @property
    def is_gone(self) -> bool: ...

    async def shake_hands(self, first: bytes) -> None: ...

    def abort(self) -> None: ...

    def refuse(self, reason: str) -> None: ...


class Handshakes:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._waiting: dict[str, deque[tuple[Entering, bytes]]] = {}  # by address; the first address is the next
        self._running: dict[Entering, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[Entering] = set()
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self, entering: Entering, first: bytes) -> None:
        """Starts a handshake, or has it wait. first: the client's first bytes."""
        self._waiting.setdefault(entering.address, deque()).append((entering, first))
        self.waiting += 1
        if self.waiting > self._limits.max_waiting_handshakes:
            self._drop()
        self._go_on()

    def opened(self, entering: Entering) -> None:
        """The private-key operation is done; the rest takes no longer than a request."""
        self._opening.discard(entering)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and len(self._opening) < self._limits.opening_handshakes:
            entering, first = self._next()
            if entering.is_gone:
                continue
            if len(self._running) >= self._limits.max_handshakes:
                self._make_room()
            self._opening.add(entering)
            self._running[entering] = None
            task = asyncio.create_task(self._run(entering, first), name="tls handshake")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> tuple[Entering, bytes]:
        address = next(iter(self._waiting))
        queue = self._waiting.pop(address)
        if len(queue) > 1:
            self._waiting[address] = queue
        self.waiting -= 1
        return queue.popleft()

    async def _run(self, entering: Entering, first: bytes) -> None:
        try:
            await entering.shake_hands(first)
        finally:
            self._running.pop(entering, None)
            self.opened(entering)

    def _drop(self) -> None:
        """Drops the newest waiting handshake of the address that has most of them."""
        address = max(self._waiting, key=lambda address: len(self._waiting[address]))
        entering, _ = self._waiting[address].pop()
        if not self._waiting[address]:
            del self._waiting[address]
        self.waiting -= 1
        entering.refuse("too many TLS handshakes wait")

    def _make_room(self) -> None:
        """Ends the oldest running handshake of the address that has most of them: it has had its chance."""
        address, _ = Counter(entering.address for entering in self._running).most_common(1)[0]
        oldest = next(entering for entering in self._running if entering.address == address)
        del self._running[oldest]  # its task ends later; the next one that comes must end another
        oldest.abort()
