"""A broker in another process or a container, by its control port, with the interface `BrokerUnderTest`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Struct

from . import operations, shapes
from .config import ANSWER_S, WAIT_S
from .errors import UnknownGroup, UnknownTopic
from .fault_orders import fault_of, order_of
from .faults import Fault, Injected
from .operations import Operation
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
            self._address = self._do(operations.health).address
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
        self._do(operations.advertise, shapes.Advertise(address, external))

    # Waiting

    async def rebalanced(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        shares: dict[str, int] = {}
        missing = ""

        def is_rebalanced() -> bool:
            nonlocal missing
            wanted = shapes.WaitFor(shapes.Rebalanced(group, members), timeout_s=0)
            try:
                shares.update(self._do(operations.wait_for, wanted).shares)
            except TimeoutError as error:
                missing = str(error)
                return False
            return True

        await self.until(is_rebalanced, timeout_s=timeout_s, what=lambda: missing)
        return shares

    def _do(
        self, operation: Operation[T], body: Struct | None = None, *, query: Struct | None = None, **path: str
    ) -> T:
        return self._calls.do(operation, body, query=query, **path)


class _RemoteClock:
    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    @property
    def now_ms(self) -> int:
        return self._calls.do(operations.now).now_ms

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        self._calls.do(operations.advance, shapes.Advance(seconds, minutes, hours, days))


class _RemoteFaults:
    """Faults of a remote broker. Those that this process added are mapped by number to its `Fault` objects."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._ordered: dict[int, Fault] = {}

    @property
    def injected(self) -> list[Injected]:
        return [
            Injected(self._ordered.get(item.number) or fault_of(item.fault), item.request, item.client, item.number)
            for item in self._calls.do(operations.injected)
        ]

    def add(self, *faults: Fault) -> list[int]:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ValueError(f"{fault!r} is not a Fault; use Fault.answer(...) and the like")
        numbers = self._calls.do(operations.add_faults, [order_of(fault) for fault in faults]).numbers
        self._ordered |= dict(zip(numbers, faults, strict=True))
        return numbers

    def remove(self, *faults: Fault) -> None:
        if not faults:
            self._calls.do(operations.end_faults)
            return
        for item in self._calls.do(operations.faults):
            if (self._ordered.get(item.number) or fault_of(item.fault)) in faults:
                self.end(item.number)

    def end(self, number: int) -> None:
        """Remove a fault by its number. Raises KeyError if no fault in force has the number."""
        self._calls.do(operations.end_fault, number=str(number))

    def clear(self) -> None:
        self.remove()
        self._calls.do(operations.forget_injected)


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

    def do(self, operation: Operation[T], body: Any = None, *, query: Struct | None = None, **path: str) -> T:
        place = operation.path.format_map({name: quote(value, safe="") for name, value in path.items()})
        given = {name: value for name, value in msgspec.to_builtins(query or {}).items() if value is not None}
        found: T = self._call(
            operation.method, f"{place}?{urlencode(given)}" if given else place, operation.answer, body
        )
        return found

    def _call(self, method: str, path: str, answer: Any, body: Any) -> Any:
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
