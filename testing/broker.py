"""A broker for tests: the real broker, on real sockets, in this process.

It runs in the running event loop (`async with Broker() as broker`), or in a thread with an event loop of its own (`with
Broker() as broker`), for tests without asyncio and for one broker in many tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from msgspec import Struct

from ..broker.config import BrokerConfig
from ..broker.server import Listening
from ..client.config import parse_addresses
from .clock import BrokerClock
from .faults import Faults, request_code
from .loop_thread import LoopThread
from .operations import Call, Operation
from .rig import Rig
from .tap import Request
from .under_test import BrokerUnderTest

T = TypeVar("T")

_ASYNC_NAMES: Final = {"clean": "clear"}
_SETTINGS: Final = frozenset(item.name for item in fields(BrokerConfig)) - {"data_dir", "address"}


class Broker(BrokerUnderTest):
    """A broker in this process.

    `address` is the address of name server and broker for clients. `clock` advances the broker's time, and `faults`
    injects faults.

    Args:
        folder: folder for the data; by default a temporary folder, in memory if the system supports it
        port: port to listen on; 0 for a free port
        name_server: address of another name server to register with; by default the broker has its own
        settings: settings of `rocketlet.broker.config.BrokerConfig`, such as `default_queues=4`
    Raises:
        ValueError: a setting does not exist, or an address is invalid
    """

    def __init__(
        self, *, folder: Path | None = None, port: int = 0, name_server: str | None = None, **settings: Any
    ) -> None:
        wrong = sorted(settings.keys() - _SETTINGS)
        if wrong:
            raise ValueError(f"a broker has no setting {', '.join(wrong)}; settings: {', '.join(sorted(_SETTINGS))}")
        if not 0 <= port <= 65_535:
            raise ValueError(f"port is {port}; expected 0 to 65535")
        if name_server is not None:
            settings["name_servers"] = tuple(parse_addresses(name_server))
        config = BrokerConfig(data_dir=Path(), address="", vip_channel=False)
        self._thread: LoopThread | None = None
        self._rig = Rig(replace(config, **settings), Listening(port=port), folder=folder, run=self._run)

    # Lifecycle

    async def __aenter__(self) -> Self:
        await self._rig.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._rig.close()

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        try:
            self._thread.wait(self._rig.open())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._thread is not None
        self._thread.wait(self._rig.close())
        self._thread.stop()
        self._thread = None

    @property
    def address(self) -> str:
        return self._rig.address

    @property
    def endpoint(self) -> str:
        """The `endpoints` for 5.x clients in any language. Raises RuntimeError if protobuf is not installed."""
        return self._rig.endpoint

    @property
    def clock(self) -> BrokerClock:
        return self._rig.clock

    @property
    def faults(self) -> Faults:
        return self._rig.faults

    @property
    def folder(self) -> Path:
        """The folder of the broker's data."""
        return self._rig.folder

    async def aclear(self) -> None:
        """Like `clear`, in a running event loop."""
        await self._rig.clear()

    async def arestart(self) -> None:
        """Like `restart`, in a running event loop."""
        await self._rig.restart()

    async def akill(self, *, lose: int = 0) -> None:
        """Like `kill`, in a running event loop."""
        await self._rig.kill(lose=lose)

    async def astop(self) -> None:
        """Like `stop`, in a running event loop."""
        await self._rig.stop()

    async def astart(self) -> None:
        """Like `start`, in a running event loop."""
        await self._rig.start()

    @property
    def requests(self) -> list[Request]:
        return self._rig.requests

    def requests_of(self, name: str, *, client: str | None = None) -> list[Request]:
        request_code(name)
        return [item for item in self.requests if item.name == name and client in (None, item.client)]

    # Internals

    def _run(self, action: Callable[[], T]) -> T:
        """Run a function in the broker's thread, if it has one, and return its result."""
        return action() if self._thread is None else self._thread.do(action)

    def _do(
        self, operation: Operation[T], body: Struct | None = None, *, query: Struct | None = None, **path: str
    ) -> T:
        call = Call(path, query, body)
        if inspect.iscoroutinefunction(operation.act):
            if self._thread is None:
                name = f"a{_ASYNC_NAMES.get(operation.name, operation.name)}"
                raise RuntimeError(f"this broker runs in the event loop of the test; use `await broker.{name}()`")
            done: T = self._thread.wait(operation.act(self._rig, call))
            return done
        return self._run(lambda: cast("T", operation.act(self._rig, call)))
