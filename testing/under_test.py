"""A test's view of a broker, the same wherever the broker runs: in this process, in another, in a container."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from ..client.admin.admin_client import rebalanced
from ..client.config import TOPIC_QUEUES
from ..client.message import Message
from ..protocol.names import Queue
from .config import LOOK_S, WAIT_S
from .errors import UnknownName
from .faults import Fault, Injected, request_code
from .tap import Request


class BrokerTime(Protocol):
    """The broker's time."""

    @property
    def now_ms(self) -> int: ...

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None: ...


class BrokerFaults(Protocol):
    """The faults in force."""

    @property
    def injected(self) -> list[Injected]: ...

    def add(self, *faults: Fault) -> list[int]: ...

    def remove(self, *faults: Fault) -> None: ...

    def clear(self) -> None: ...


def _holds(condition: Callable[[], bool]) -> bool:
    """A group may come into being while one waits for it."""
    try:
        return condition()
    except UnknownName:
        return False


def _told(condition: Callable[[], bool]) -> str:
    """Why a condition cannot be looked at; empty if it can."""
    try:
        condition()
    except UnknownName as error:
        return str(error)
    return ""


class BrokerUnderTest(ABC):
    """`Broker` and `RemoteBroker` are two of it. Annotate fixtures and helpers with this type to take both."""

    @property
    @abstractmethod
    def address(self) -> str:
        """`host:port` of the name server and the broker, for clients."""

    @property
    def endpoint(self) -> str:
        """The `endpoints` of clients of 5.x, in any language."""
        return self.address

    @property
    @abstractmethod
    def clock(self) -> BrokerTime: ...

    @property
    @abstractmethod
    def faults(self) -> BrokerFaults: ...

    # Waiting

    async def rebalanced(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        """Returns when the rebalance is over; the number of queues by client id. Raises TimeoutError, which says what is
        missing."""
        return await rebalanced(self.address, group, members=members, timeout_s=timeout_s)

    async def consumed(self, group: str, topic: str, *, timeout_s: float = WAIT_S) -> None:
        """Returns when the group has committed every message of the topic. Raises TimeoutError, which says how many lack, and
        ValueError for a group whose members each get every message: they commit nothing to the broker."""
        await self.until(
            lambda: not self._consumed_fault(group, topic),
            timeout_s=timeout_s,
            what=lambda: self._consumed_fault(group, topic),
        )

    async def until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float = WAIT_S,
        what: Callable[[], str] = lambda: "the condition does not hold",
    ) -> None:
        """Returns when the condition holds. Raises TimeoutError with `what` is missing."""
        try:
            async with asyncio.timeout(timeout_s):
                while not _holds(condition):  # noqa: ASYNC110 -- what changes may be in another thread
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"{_told(condition) or what()}, after {timeout_s} s") from None

    async def skip_waits(self, condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
        """Returns when the condition holds, and lets no delayed message wait meanwhile: the clock jumps to when the next one
        is due, again and again. A retry chain of hours takes as long as its handlers do."""

        def holds() -> bool:
            if _holds(condition):
                return True
            self._skip()
            return False

        await self.until(holds, timeout_s=timeout_s, what=lambda: _told(condition) or "the condition does not hold")

    # Looking

    @property
    @abstractmethod
    def requests(self) -> list[Request]:
        """The requests of clients since the last `clear`, oldest first."""

    def requests_of(self, name: str, *, client: str | None = None) -> list[Request]:
        """The requests with a name such as `SEND_MESSAGE_V2`. Raises ValueError for a name that none has."""
        request_code(name)
        return [item for item in self.requests if item.name == name and client in (None, item.client)]

    @abstractmethod
    def messages(self, topic: str, *, key: str | None = None, waiting_for: str | None = None) -> list[Message]:
        """All stored messages of a topic, in the order of their storing; those with a `key`; those that the group
        `waiting_for` has not committed. Raises UnknownGroup, a KeyError."""

    @abstractmethod
    def dead_letters(self, group: str) -> list[Message]:
        """The messages that the group has given up. Raises UnknownGroup."""

    @abstractmethod
    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's offset by queue id. Raises UnknownGroup, and ValueError as `consumed` does."""

    @abstractmethod
    def lag(self, group: str, topic: str) -> int:
        """Messages of the topic that the group has not committed. Raises UnknownGroup, UnknownTopic, and ValueError as
        `consumed` does."""

    @abstractmethod
    def owners(self, group: str) -> dict[Queue, str]:
        """The owner of each queue. Raises UnknownGroup."""

    @abstractmethod
    def members(self, group: str) -> list[str]:
        """Client ids of the group's members. Raises UnknownGroup."""

    @abstractmethod
    def timeline(self, group: str) -> list[dict[str, Any]]:
        """The events of a group: joins, leaves and queues that changed hands, oldest first. Raises UnknownGroup."""

    @property
    def injected(self) -> list[Injected]:
        """The faults that have acted."""
        return list(self.faults.injected)

    @abstractmethod
    def report(self) -> str:
        """Everything a developer needs to see when a test failed: faults, groups, and the last requests."""

    # Ordering

    @abstractmethod
    def create_topic(self, topic: str, queues: int = TOPIC_QUEUES, message_type: str = "") -> None:
        """Create a topic, or change it. `message_type`: what it is for, such as PRIORITY; empty: any messages.

        Raises ValueError for an illegal name or type."""

    @abstractmethod
    def create_group(self, group: str) -> None:
        """Creates a group with its retry topic, which a Java consumer otherwise learns of with its next look at the routes,
        after 30 s."""

    @abstractmethod
    def take_lease(self, group: str, topic: str, queue_id: int) -> None:
        """Ends a member's lease as if it had run out. Raises KeyError if nobody holds the queue."""

    @abstractmethod
    def rebalance(self, group: str) -> None:
        """Tells the members that the group has changed. Raises KeyError if it has none."""

    @abstractmethod
    def clear(self) -> None:
        """Makes the broker as new: without topics, groups, messages, faults and requests. Cuts connected clients off. The
        address stays."""

    @abstractmethod
    def restart(self) -> None:
        """Stops as by SIGTERM and starts again on the same data."""

    @abstractmethod
    def kill(self, *, lose: int = 0) -> None:
        """Stops as by SIGKILL and starts again; the last `lose` messages that were acknowledged are gone, as after a power
        cut without `--flush sync`."""

    @abstractmethod
    def stop(self) -> None:
        """Stops as by SIGTERM. Clients find nobody at the address, until `start`."""

    @abstractmethod
    def start(self) -> None:
        """Starts again after `stop`, on the same data and address."""

    @abstractmethod
    def _skip(self) -> None: ...

    @abstractmethod
    def _consumed_fault(self, group: str, topic: str) -> str: ...
