"""A broker in another process or a container, by its control port, with the interface `BrokerUnderTest`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from ..client.config import TOPIC_QUEUES
from ..client.message import Message
from ..protocol.message import decode_records
from ..protocol.names import Queue
from . import shapes
from .config import ANSWER_S, WAIT_S
from .errors import UnknownGroup, UnknownName, UnknownTopic
from .fault_orders import fault_of, order_of
from .faults import Fault, Injected, request_code
from .tap import Request
from .under_test import BrokerTime, BrokerUnderTest

T = TypeVar("T")

_ERRORS: Final[Mapping[str, type[Exception]]] = {
    "ValueError": ValueError,
    "KeyError": KeyError,
    "UnknownGroup": UnknownGroup,
    "UnknownTopic": UnknownTopic,
    "TimeoutError": TimeoutError,
    "RuntimeError": RuntimeError,
}


class RemoteBroker(BrokerUnderTest):
    """A broker in another process.

    Calls block until the broker has responded. Between the calls of `rebalanced`, `consumed`, `until` and `skip_waits` the
    event loop runs. Calls raise ConnectionError if the control port does not respond.

    Args:
        control: address of `rocketlet start --control-port`, as `host:port` or a URL
        address: address of the broker for clients of this process, if it differs from the broker's own address, as with
            a published port of a container
    Raises:
        ValueError: `control` is not an address
    """

    def __init__(self, control: str, *, address: str | None = None) -> None:
        self._calls = _Calls(control)
        self._address = address
        self._clock = _RemoteClock(self._calls)
        self._faults = _RemoteFaults(self._calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The broker keeps running."""
        self._calls.close()

    @property
    def address(self) -> str:
        if self._address is None:
            self._address = self._calls.get("/health", shapes.Ready).address
        return self._address

    @property
    def clock(self) -> BrokerTime:
        return self._clock

    @property
    def faults(self) -> _RemoteFaults:
        return self._faults

    def advertise(self, address: str | None = None, *, external: str | None = None) -> None:
        """Change the addresses (`host:port`) that clients receive: inside of the broker's network, and outside.

        Raises ValueError.
        """
        self._calls.do("PUT", "/advertised", shapes.Advertise(address, external))

    # Waiting

    async def rebalanced(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        shares: dict[str, int] = {}
        missing = ""

        def is_rebalanced() -> bool:
            nonlocal missing
            wanted = shapes.WaitFor(shapes.Rebalanced(group, members), timeout_s=0)
            try:
                shares.update(self._calls.call("POST", "/wait-for", shapes.Waited, wanted).shares)
            except TimeoutError as error:
                missing = str(error)
                return False
            return True

        await self.until(is_rebalanced, timeout_s=timeout_s, what=lambda: missing)
        return shares

    # State

    @property
    def requests(self) -> list[Request]:
        return self._requests()

    def requests_of(self, name: str, *, client: str | None = None) -> list[Request]:
        request_code(name)
        return self._requests(name=name, client=client)

    def _requests(self, **query: str | None) -> list[Request]:
        found = self._calls.get("/requests", list[shapes.RequestSeen], query)
        return [
            Request(
                item.name, item.code, item.client, item.peer, item.group, item.topic, item.queue_id, item.ext,
                item.body, item.response, item.remark, item.at_s,
            )
            for item in found
        ]  # fmt: skip

    def messages(self, topic: str, *, key: str | None = None, waiting_for: str | None = None) -> list[Message]:
        query = {"key": key, "waiting_for": waiting_for, "record": "true"}
        found = self._calls.get(f"/topics/{_part(topic)}/messages", list[shapes.MessageSeen], query)
        return [_message(item) for item in found]

    def dead_letters(self, group: str) -> list[Message]:
        found = self._calls.get(f"/groups/{_part(group)}/dead-letters", list[shapes.MessageSeen], {"record": "true"})
        return [_message(item) for item in found]

    def committed(self, group: str, topic: str) -> dict[int, int]:
        return self._progress(group, topic).committed

    def lag(self, group: str, topic: str) -> int:
        return self._progress(group, topic).lag

    def _progress(self, group: str, topic: str) -> shapes.Progress:
        return self._calls.get(f"/groups/{_part(group)}/topics/{_part(topic)}", shapes.Progress)

    def owners(self, group: str) -> dict[Queue, str]:
        found = self._calls.get(f"/groups/{_part(group)}", shapes.GroupSeen)
        return {_queue(item.queue): item.client for item in found.owners}

    def members(self, group: str) -> list[str]:
        return self._calls.get(f"/groups/{_part(group)}", shapes.GroupSeen).members

    def timeline(self, group: str) -> list[dict[str, Any]]:
        return self._calls.get(f"/groups/{_part(group)}/timeline", shapes.Timeline)

    def report(self) -> str:
        return self._calls.get("/report", shapes.Text).text

    # Changes

    def create_topic(self, topic: str, queues: int = TOPIC_QUEUES, message_type: str = "") -> None:
        self._calls.do("PUT", f"/topics/{_part(topic)}", shapes.TopicOrder(queues, message_type))

    def create_group(self, group: str) -> None:
        self._calls.do("PUT", f"/groups/{_part(group)}")

    def take_lease(self, group: str, topic: str, queue_id: int) -> None:
        self._calls.do("POST", f"/groups/{_part(group)}/take-lease", shapes.QueueOwner(topic, queue_id))

    def rebalance(self, group: str) -> None:
        self._calls.do("POST", f"/groups/{_part(group)}/rebalance")

    def clear(self) -> None:
        self._calls.do("POST", "/clean")

    def restart(self) -> None:
        self._calls.do("POST", "/restart")

    def kill(self, *, lose: int = 0) -> None:
        self._calls.do("POST", "/kill", shapes.Kill(lose))

    def stop(self) -> None:
        self._calls.do("POST", "/stop")

    def start(self) -> None:
        self._calls.do("POST", "/start")

    def _skip(self) -> None:
        self._calls.do("POST", "/clock/skip")

    def _consumed_fault(self, group: str, topic: str) -> str:
        try:
            return self._progress(group, topic).missing
        except UnknownName as error:
            return str(error)


class _RemoteClock:
    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    @property
    def now_ms(self) -> int:
        return self._calls.get("/clock", shapes.Now).now_ms

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        self._calls.do("POST", "/clock/advance", shapes.Advance(seconds, minutes, hours, days))


class _RemoteFaults:
    """Faults of a remote broker. Those that this process added are mapped by number to its `Fault` objects."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._ordered: dict[int, Fault] = {}

    @property
    def injected(self) -> list[Injected]:
        found = self._calls.get("/faults/injected", list[shapes.FaultActed])
        return [
            Injected(self._ordered.get(item.number) or fault_of(item.fault), item.request, item.client, item.number)
            for item in found
        ]

    def add(self, *faults: Fault) -> list[int]:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ValueError(f"{fault!r} is not a Fault; use Fault.answer(...) and the like")
        orders = [order_of(fault) for fault in faults]
        numbers: list[int] = self._calls.call("POST", "/faults", shapes.Numbers, orders).numbers
        self._ordered |= dict(zip(numbers, faults, strict=True))
        return numbers

    def remove(self, *faults: Fault) -> None:
        if not faults:
            self._calls.do("DELETE", "/faults")
            return
        for item in self._calls.get("/faults", list[shapes.FaultInForce]):
            if (self._ordered.get(item.number) or fault_of(item.fault)) in faults:
                self.end(item.number)

    def end(self, number: int) -> None:
        """Remove a fault by its number. Raises KeyError if no fault in force has the number."""
        self._calls.do("DELETE", f"/faults/{number}")

    def clear(self) -> None:
        self.remove()
        self._calls.do("DELETE", "/faults/injected")


class _Calls:
    """Calls to the control port, on one persistent connection."""

    def __init__(self, control: str) -> None:
        url = urlsplit(control if "//" in control else f"http://{control}")
        if url.scheme != "http" or not url.hostname or not url.port:
            raise ValueError(f"control is {control!r}; it must be HOST:PORT, such as 127.0.0.1:9880")
        self._place = f"{url.hostname}:{url.port}"
        self._connection = HTTPConnection(url.hostname, url.port, timeout=ANSWER_S)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def get(self, path: str, answer: type[T], query: Mapping[str, str | None] | None = None) -> T:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        found: T = self.call("GET", f"{path}?{urlencode(given)}" if given else path, answer)
        return found

    def do(self, method: str, path: str, body: Any = None) -> None:
        self.call(method, path, Any, body)

    def call(self, method: str, path: str, answer: Any, body: Any = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        with self._lock:
            status, body_bytes = self._exchange(method, path, data, headers)
        if status == 200:
            return msgspec.json.decode(body_bytes, type=answer)
        try:
            problem = msgspec.json.decode(body_bytes, type=shapes.Problem)
        except msgspec.DecodeError:
            raise ConnectionError(
                f"{self._place} is not a control port: it returned {status} {body_bytes[:80]!r}"
            ) from None
        raise _ERRORS.get(problem.error, RuntimeError)(problem.message)

    def _exchange(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        is_kept = self._connection.sock is not None
        try:
            self._connection.request(method, path, data, headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (HTTPException, OSError) as error:
            self._connection.close()
            if is_kept and isinstance(error, ConnectionError):  # the server closed the idle connection
                return self._exchange(method, path, data, headers)
            raise ConnectionError(f"no control port responds at {self._place}: {error}") from None


def _part(name: str) -> str:
    return quote(name, safe="")


def _queue(queue: shapes.QueueName) -> Queue:
    return Queue(queue.topic, queue.broker, queue.queue_id)


def _message(item: shapes.MessageSeen) -> Message:
    assert item.record is not None
    (record,) = decode_records(item.record)
    return Message(record, _queue(item.queue), item.queue.topic)
