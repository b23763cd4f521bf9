"""A broker for tests: the real broker, on real sockets, in this process.

It runs in the running event loop (`async with Broker() as broker`), or in a thread with an event loop of its own (`with
Broker() as broker`), for tests without asyncio and for one broker in many tests.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from ..broker.config import BrokerConfig
from ..broker.server import Listening
from ..client.config import TOPIC_QUEUES, parse_addresses
from ..client.message import Message
from ..protocol.names import Queue
from . import state
from .clock import BrokerClock
from .faults import Faults
from .loop_thread import LoopThread
from .report import report
from .rig import Rig
from .tap import Request
from .under_test import BrokerUnderTest

T = TypeVar("T")

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
        self._rig = Rig(replace(config, **settings), Listening(port=port), folder=folder, run=self._do)

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

    def clear(self) -> None:
        """Delete all topics, groups, messages, faults and requests, and disconnect all clients. The address does not
        change.

        In a running event loop use `await aclear()`. Raises RuntimeError if the broker was given a folder.
        """
        self._in_thread(self._rig.clear, "aclear")

    async def aclear(self) -> None:
        """Like `clear`, in a running event loop."""
        await self._rig.clear()

    def restart(self) -> None:
        """Stop as by SIGTERM, and start on the same data. In a running event loop use `await arestart()`."""
        self._in_thread(self._rig.restart, "arestart")

    async def arestart(self) -> None:
        """Like `restart`, in a running event loop."""
        await self._rig.restart()

    def kill(self, *, lose: int = 0) -> None:
        """Stop as by SIGKILL, and start on the same data. In a running event loop use `await akill()`.

        Args:
            lose: number of last acknowledged messages that are lost, as after a power failure without `--flush sync`
        """
        self._in_thread(lambda: self._rig.kill(lose=lose), "akill")

    async def akill(self, *, lose: int = 0) -> None:
        """Like `kill`, in a running event loop."""
        await self._rig.kill(lose=lose)

    def stop(self) -> None:
        """Stop as by SIGTERM. Clients cannot connect until `start`. In a running event loop use `await astop()`."""
        self._in_thread(self._rig.stop, "astop")

    async def astop(self) -> None:
        """Like `stop`, in a running event loop."""
        await self._rig.stop()

    def start(self) -> None:
        """Start after `stop`, with the same data and address. In a running event loop use `await astart()`."""
        self._in_thread(self._rig.start, "astart")

    async def astart(self) -> None:
        """Like `start`, in a running event loop."""
        await self._rig.start()

    def _in_thread(self, work: Callable[[], Coroutine[Any, Any, None]], other: str) -> None:
        if self._thread is None:
            raise RuntimeError(f"this broker runs in the event loop of the test; use `await broker.{other}()`")
        self._thread.wait(work())

    # State

    @property
    def requests(self) -> list[Request]:
        return self._rig.requests

    def messages(self, topic: str, *, key: str | None = None, waiting_for: str | None = None) -> list[Message]:
        found = self._do(lambda: state.messages(self._rig.running, topic, key=key, waiting_for=waiting_for))
        return [stored.message for stored in found]

    def dead_letters(self, group: str) -> list[Message]:
        found = self._do(lambda: state.dead_letters(self._rig.running, group))
        return [stored.message for stored in found]

    def committed(self, group: str, topic: str) -> dict[int, int]:
        return self._do(lambda: state.committed(self._rig.running, group, topic))

    def lag(self, group: str, topic: str) -> int:
        return self._do(lambda: state.lag(self._rig.running, group, topic))

    def owners(self, group: str) -> dict[Queue, str]:
        return self._do(lambda: state.owners(self._rig.running, group))

    def members(self, group: str) -> list[str]:
        return self._do(lambda: state.members(self._rig.running, group))

    def timeline(self, group: str) -> list[dict[str, Any]]:
        return self._do(lambda: state.timeline(self._rig.running, group))

    def report(self) -> str:
        return self._do(lambda: report(self._rig))

    # Changes

    def create_topic(self, topic: str, queues: int = TOPIC_QUEUES, message_type: str = "") -> None:
        self._do(lambda: state.create_topic(self._rig.running, topic, queues, message_type))

    def create_group(self, group: str) -> None:
        self._do(lambda: state.create_group(self._rig.running, group))

    def take_lease(self, group: str, topic: str, queue_id: int) -> None:
        self._do(lambda: state.take_lease(self._rig.running, group, topic, queue_id))

    def rebalance(self, group: str) -> None:
        self._do(lambda: state.rebalance(self._rig.running, group))

    # Internals

    def _do(self, action: Callable[[], T]) -> T:
        """Run a function in the broker's thread, if it has one, and return its result."""
        return action() if self._thread is None else self._thread.do(action)

    def _skip(self) -> None:
        self._do(self._rig.skip)

    def _consumed_fault(self, group: str, topic: str) -> str:
        return self._do(lambda: state.consumed_fault(self._rig.running, group, topic))
