"""The interface of a broker for tests, independent of where the broker runs: in this process, in another process, or in
a container."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from ..client.admin.admin_client import rebalanced
from ..client.config import TOPIC_QUEUES
from ..client.message import Message
from ..protocol.message import decode_records
from ..protocol.names import Queue
from . import operations, shapes
from .config import POLL_INTERVAL_S, WAIT_S
from .errors import UnknownName
from .faults import Fault, Injected, request_code
from .operations import Operation
from .tap import Request

T = TypeVar("T")


class BrokerTime(Protocol):
    """The clock of a broker under test."""

    @property
    def now_ms(self) -> int: ...

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None: ...


class BrokerFaults(Protocol):
    """The faults of a broker under test."""

    @property
    def injected(self) -> list[Injected]: ...

    def add(self, *faults: Fault) -> list[int]: ...

    def remove(self, *faults: Fault) -> None: ...

    def clear(self) -> None: ...


def _holds(condition: Callable[[], bool]) -> bool:
    """Return the value of a condition; False if its group or topic does not exist yet."""
    try:
        return condition()
    except UnknownName:
        return False


def _missing_name(condition: Callable[[], bool]) -> str:
    """Return the reason why a condition cannot be evaluated; empty if it can."""
    try:
        condition()
    except UnknownName as error:
        return str(error)
    return ""


class BrokerUnderTest(ABC):
    """A broker for tests: `Broker` or `RemoteBroker`. Annotate fixtures and helper functions with this type to accept
    both."""

    @property
    @abstractmethod
    def address(self) -> str:
        """`host:port` for clients: of the broker, which is a name server unless it registers with another one."""

    @property
    def endpoint(self) -> str:
        """The `endpoints` for 5.x clients in any language, if the broker can serve them."""
        return self.address

    @property
    @abstractmethod
    def clock(self) -> BrokerTime: ...

    @property
    @abstractmethod
    def faults(self) -> BrokerFaults: ...

    # Waiting

    async def rebalanced(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        """Wait until the group's rebalance is complete, and return the number of queues by client id.

        Raises TimeoutError, which names the reason.
        """
        return await rebalanced(self.address, group, members=members, timeout_s=timeout_s)

    async def consumed(self, group: str, topic: str, *, timeout_s: float = WAIT_S) -> None:
        """Wait until the group has committed every message of the topic, or acknowledged it in queues that members share.

        Raises:
            TimeoutError: with the number of messages that are not consumed, or another reason
            ValueError: the group is broadcasting, so that its members commit nothing to the broker
        """
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
        """Wait until the condition holds; while it raises UnknownGroup or UnknownTopic, it does not. Raises TimeoutError with
        the text of such an error, or with the result of `what`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not _holds(condition):  # noqa: ASYNC110 (the state may change in another thread)
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise TimeoutError(f"{_missing_name(condition) or what()}, after {timeout_s} s") from None

    async def skip_waits(self, condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
        """Wait until the condition holds. Meanwhile the clock advances to the next delayed message or redelivery, time after
        time. Raises TimeoutError."""

        def holds() -> bool:
            if _holds(condition):
                return True
            self._skip()
            return False

        await self.until(
            holds, timeout_s=timeout_s, what=lambda: _missing_name(condition) or "the condition does not hold"
        )

    # State

    @property
    def requests(self) -> list[Request]:
        """The requests of clients since the last `clear`, or the newest 9,000 or more of them, oldest first."""
        found = self._do(operations.requests, query=shapes.RequestFilter())
        return list(found)

    def requests_of(self, name: str, *, client: str | None = None) -> list[Request]:
        """Return those of `requests` with a name such as `SEND_MESSAGE_V2`, and of one client if `client` is given. Raises
        ValueError for an unknown name."""
        request_code(name)
        found = self._do(operations.requests, query=shapes.RequestFilter(name, client))
        return list(found)

    def messages(self, topic: str, *, key: str | None = None, waiting_for: str | None = None) -> list[Message]:
        """Return the stored messages of a topic, in the order of storing. Raises UnknownGroup, a KeyError.

        Args:
            key: only messages with this key
            waiting_for: only messages that this group has not committed
        """
        query = shapes.MessageFilter(key, waiting_for, record=True)
        return [_message(item) for item in self._do(operations.messages, query=query, topic=topic)]

    def dead_letters(self, group: str) -> list[Message]:
        """Return the dead letters of the group. Raises UnknownGroup."""
        query = shapes.MessageFilter(record=True)
        return [_message(item) for item in self._do(operations.dead_letters, query=query, group=group)]

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the group's committed offsets by queue id, of queues that have one. Raises UnknownGroup, UnknownTopic, and
        ValueError for a broadcasting group."""
        return self._progress(group, topic).committed

    def lag(self, group: str, topic: str) -> int:
        """Return the number of messages that the group has not committed, or not acknowledged in queues that members share.

        Raises UnknownGroup, UnknownTopic, and ValueError for a broadcasting group.
        """
        return self._progress(group, topic).lag

    def _progress(self, group: str, topic: str) -> shapes.Progress:
        return self._do(operations.progress, group=group, topic=topic)

    def owners(self, group: str) -> dict[Queue, str]:
        """Return the owner of each queue that has one. Raises UnknownGroup."""
        return {_queue(item.queue): item.client for item in self._do(operations.group, group=group).owners}

    def members(self, group: str) -> list[str]:
        """Return the client ids of the group's members. Raises UnknownGroup."""
        return self._do(operations.group, group=group).members

    def timeline(self, group: str) -> list[dict[str, Any]]:
        """Return the newest events of a group, such as joins, leaves and handed-over queues, oldest first, up to the
        broker's limits on events. Raises UnknownGroup."""
        return self._do(operations.timeline, group=group)

    @property
    def injected(self) -> list[Injected]:
        """The faults that have acted on a request since the last `clear`."""
        return list(self.faults.injected)

    def report(self) -> str:
        """Return a report for a failed test: the faults that acted, the groups with their owners, and the last requests."""
        return self._do(operations.report).text

    # Changes

    def create_topic(self, topic: str, queues: int = TOPIC_QUEUES, message_type: str = "") -> None:
        """Create a topic, or change it. Raises ValueError for an illegal name or type, or if messages would become
        unreadable.

        Args:
            queues: number of queues
            message_type: type of the topic's messages, such as PRIORITY; empty for any type
        """
        self._do(operations.create_topic, shapes.TopicOrder(queues, message_type), topic=topic)

    def create_group(self, group: str) -> None:
        """Create a group and its retry topic, unless they exist. A Java consumer whose retry topic did not exist when it
        started finds it only when it requests routes after 30 s."""
        self._do(operations.create_group, group=group)

    def take_lease(self, group: str, topic: str, queue_id: int) -> None:
        """End a member's lease as if it had expired. Raises KeyError if no member owns the queue."""
        self._do(operations.take_lease, shapes.QueueOwner(topic, queue_id), group=group)

    def rebalance(self, group: str) -> None:
        """Notify the members that the group has changed. Raises KeyError if it has no members."""
        self._do(operations.rebalance, group=group)

    # A `Broker` in a running event loop has `aclear`, `arestart`, `akill`, `astop` and `astart` for these.

    def clear(self) -> None:
        """Delete all topics, groups, messages, faults and requests, reset the clock, and disconnect all clients. The address
        does not change. Raises RuntimeError for a `Broker` that was given a folder."""
        self._do(operations.clean)

    def restart(self) -> None:
        """Save the state as after SIGTERM, close all connections immediately, and start on the same data."""
        self._do(operations.restart)

    def kill(self, *, lose: int = 0) -> None:
        """Stop as by SIGKILL, and start on the same data.

        Args:
            lose: number of last acknowledged messages that are lost, as after a power failure without `--flush sync`
        """
        self._do(operations.kill, shapes.Kill(lose))

    def stop(self) -> None:
        """Stop as by SIGTERM. Clients cannot connect until `start`."""
        self._do(operations.stop)

    def start(self) -> None:
        """Start after `stop`, with the same data and address."""
        self._do(operations.start)

    @abstractmethod
    def _do(
        self, operation: Operation[T], body: Struct | None = None, *, query: Struct | None = None, **path: str
    ) -> T:
        """Carry out an operation, and return its result.

        Args:
            body: the body of the request
            query: the parameters of the query
            path: the names in the path
        """

    def _skip(self) -> None:
        self._do(operations.skip)

    def _consumed_fault(self, group: str, topic: str) -> str:
        try:
            return self._progress(group, topic).missing
        except UnknownName as error:
            return str(error)


def _queue(queue: shapes.QueueName) -> Queue:
    return Queue(queue.topic, queue.broker, queue.queue_id)


def _message(item: shapes.MessageSeen) -> Message:
    assert item.record is not None
    (record,) = decode_records(item.record)
    return Message(record, _queue(item.queue), item.queue.topic)
