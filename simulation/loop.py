"""An event loop on a virtual clock, with a network inside: real code of brokers and clients, no socket and no waiting.

A `Process` is everything that was started in its context: its callbacks can be put off (it is frozen) or dropped (it
is killed), and its bytes held up while its sockets stay open (a silent partition). Bytes written together arrive
together, in order within a connection, after a random delay.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import random
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest import mock

EPOCH_S = 1_700_000_000.0
MAX_DELAY_S = 0.05
MAX_TURNS = 20_000

# One call's handle, empty until it is scheduled: a call cancelled while its process is frozen is not made afterwards.
_Handle = list[asyncio.Handle]

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def fix_hashes(module: str) -> None:
    """Start a program again with hashes that are the same in each run, unless they are: sets would differ in order."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def running() -> Process | None:
    """Whose code this is."""
    return _process.get()


class Process:
    """Tasks that run together and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.freezes_at = -1  # the code of a request: the process freezes as soon as that is written
        self.is_freezing = False
        self.silent_until_s = 0.0  # its traffic arrives after this: TCP sends it again and again
        self.transports: list[Transport] = []
        self._deferred: list[tuple[_Handle, Callable[..., object], tuple[Any, ...], contextvars.Context]] = []

    @property
    def is_silent(self) -> bool:
        """Whether its traffic is held up."""
        return time.monotonic() < self.silent_until_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tasks that are started in this block belong to the process."""
        token = _process.set(self)
        try:
            yield
        finally:
            _process.reset(token)

    async def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task of the process to its end."""
        with self.running():
            task = asyncio.create_task(work)
        await task

    def call(self, handle: _Handle, callback: Callable[..., object], *arguments: Any) -> None:
        if self.is_dead or any(item.cancelled() for item in handle):
            return
        if self.is_paused:
            self._deferred.append((handle, callback, arguments, contextvars.copy_context()))
        else:
            callback(*arguments)

    def asks(self, code: int) -> None:
        """A client of it makes a request."""
        if code == self.freezes_at:
            self.freezes_at, self.is_freezing = -1, True

    def has_written(self) -> None:
        if self.is_freezing:
            self.is_freezing, self.is_paused = False, True

    def resume(self) -> None:
        self.is_paused = False
        loop = cast("SimLoop", asyncio.get_running_loop())
        deferred, self._deferred = self._deferred, []
        for handle, callback, arguments, context in deferred:
            asyncio.SelectorEventLoop.call_soon(loop, self.call, handle, callback, *arguments, context=context)

    def kill(self) -> None:
        """Nothing of it runs any more; its sockets close."""
        self.is_dead = True
        for transport in list(self.transports):
            transport.cut()


class _Clock(selectors.SelectSelector):
    """Stands where a selector stands: instead of waiting, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MAX_TURNS:
            raise RuntimeError(f"{MAX_TURNS} turns of the loop without time passing: something runs in circles")
        self.now_s += max(timeout, 0.0)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)
        self.random = random.Random(seed)
        self.servers: dict[int, Server] = {}
        self._ports = itertools.count(40_000)

    def time(self) -> float:
        return self.clock.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        process = (context or contextvars.copy_context()).get(_process)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        handle: _Handle = []
        handle.append(super().call_soon(process.call, handle, callback, *args, context=context))
        return handle[0]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        process = (context or contextvars.copy_context()).get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        handle: _Handle = []
        handle.append(super().call_at(when, process.call, handle, callback, *args, context=context))
        return handle[0]

    def delay_s(self) -> float:
        """How long bytes are on their way: mostly a millisecond, sometimes much longer."""
        return self.random.uniform(0.0002, 0.002) if self.random.random() < 0.9 else self.random.uniform(0, MAX_DELAY_S)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """Call the function immediately, because no thread knows this clock."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if port in self.servers:
            raise OSError(98, "Address already in use")
        self.servers[port] = Server(self, protocol_factory, port)
        return self.servers[port]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        process = _process.get()
        silent_s = process.silent_until_s - self.time() if process is not None else 0.0
        await asyncio.sleep(max(silent_s, 0.0) + self.delay_s())
        server = self.servers.get(port)
        if server is None or server.process is None or server.process.is_dead:
            raise ConnectionRefusedError(111, "Connection refused")
        mine = ("127.0.0.1", next(self._ports))
        near = Transport(self, mine, ("127.0.0.1", port))
        far = Transport(self, ("127.0.0.1", port), mine)
        near.peer, far.peer = far, near
        protocol = protocol_factory()
        near.attach(protocol, contextvars.copy_context())
        server.context.run(self.call_soon, far.attach, None, server.context, server.factory)
        await asyncio.sleep(self.delay_s())
        return near, protocol

    def cancel_all(self) -> None:
        """Cancels every task that is left. Those of killed processes never end."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=1))


class Server:
    def __init__(self, loop: SimLoop, factory: Callable[[], asyncio.Protocol], port: int) -> None:
        self._loop = loop
        self.factory = factory
        self.port = port
        self.context = contextvars.copy_context()
        self.process = _process.get()
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def close(self) -> None:
        if self._loop.servers.get(self.port) is self:
            del self._loop.servers[self.port]


class Transport(asyncio.Transport):
    """One end of a connection."""

    peer: Transport

    def __init__(self, loop: SimLoop, mine: tuple[str, int], theirs: tuple[str, int]) -> None:
        super().__init__({"peername": theirs, "sockname": mine})
        self._loop = loop
        self._protocol: asyncio.Protocol | None = None
        self._context = contextvars.copy_context()
        self._arrives_s = 0.0
        self._early: list[bytes] = []
        self._is_closing = False
        self._is_lost = False
        self._is_cut = False

    def attach(
        self,
        protocol: asyncio.Protocol | None,
        context: contextvars.Context,
        factory: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        self._context = context
        process = context.get(_process)
        if process is not None:
            process.transports.append(self)
        self._protocol = protocol or (factory() if factory else None)
        assert self._protocol is not None
        self._protocol.connection_made(self)
        early, self._early = self._early, []
        for data in early:
            self._receive(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """The broker's ports decide by the first byte who speaks on."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def _later(self, callback: Callable[..., object], *arguments: Any, target: Transport) -> None:
        """Runs at the other end when it arrives: in order, and in the context of whom it belongs to."""
        ends = (self._context.get(_process), target._context.get(_process))
        heard_s = max((process.silent_until_s for process in ends if process is not None), default=0.0)
        sent_s = max(self._loop.time(), heard_s)
        # later than what was sent before: timers of one moment run in any order, and a stream keeps its own
        target._arrives_s = max(target._arrives_s + 1e-6, sent_s + self._loop.delay_s())
        context = target._context
        context.copy().run(self._loop.call_at, target._arrives_s, callback, *arguments)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._later(self.peer._receive, bytes(data), target=self.peer)
            process = self._context.get(_process)
            if process is not None:
                process.has_written()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _receive(self, data: bytes) -> None:
        if self._protocol is None:
            self._early.append(data)
        elif not self._is_lost and not self._is_cut:
            self._protocol.data_received(data)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._context.copy().run(self._loop.call_soon, self._lose)
            self._later(self.peer._lose, target=self.peer)

    abort = close

    def cut(self, mine_s: float = 0.0, theirs_s: float = 0.0) -> None:
        """The connection breaks; each end sees it after its own time, and what is on the way is lost."""
        for end, seconds in ((self, mine_s), (self.peer, theirs_s)):
            end._is_closing = end._is_cut = True
            end._context.copy().run(self._loop.call_at, self._loop.time() + seconds, end._lose)

    def _lose(self) -> None:
        if self._is_lost:
            return
        self._is_closing = self._is_lost = True
        process = self._context.get(_process)
        if process is not None and self in process.transports:
            process.transports.remove(self)
        if self._protocol is not None:
            self._protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_reading(self) -> bool:
        return True

    def can_write_eof(self) -> bool:
        return False


def virtual_time(loop: SimLoop) -> AbstractContextManager[object]:
    """Every clock of the time module is the loop's."""
    return mock.patch.multiple(
        time,
        monotonic=loop.time,
        perf_counter=loop.time,
        time=lambda: EPOCH_S + loop.time(),
        time_ns=lambda: int((EPOCH_S + loop.time()) * 1e9),
        clock_gettime=lambda clock: loop.time(),
    )
