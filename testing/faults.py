"""Faults between a client and a broker, injected by a test.

    broker.faults.add(Fault.answer("SEND_MESSAGE_V2", code=ResponseCode.SYSTEM_BUSY, times=3))
    broker.faults.add(Fault.close("SEND_MESSAGE_V2", after=True, nth=2))       # stored, yet not acknowledged
    broker.faults.add(Fault.freeze(client="10.0.0.7@4711"))

A fault acts on requests with its code, and with its client, group, topic and queue if these are given. It acts on the
`nth` matching request (counted from 1) and later ones, on each with a probability by a seed, until it has acted on
`times` requests. `faults.injected` lists the faults that acted on a request, which a freeze does not.
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Literal, get_args

from msgspec.structs import replace

from ..broker.config import MAX_QUEUES_PER_TOPIC
from ..broker.grpc.schema import Code
from ..protocol.bodies import Route
from ..protocol.codes import RequestCode, ResponseCode, code_name, request_name
from .clock import Run, run_here
from .config import MAX_DELAY_S

Action = Literal["answer", "late", "silence", "drop", "close", "close_after", "lose", "slow", "freeze", "route"]
ACTIONS: Final = get_args(Action)
WHICH: Final = ("client", "group", "topic", "queue_id", "nth", "times", "probability", "seed")
_ANY: Final = -1
CALLS: Final = (
    "AckMessage",
    "ChangeInvisibleDuration",
    "EndTransaction",
    "ForwardMessageToDeadLetterQueue",
    "Heartbeat",
    "NotifyClientTermination",
    "QueryAssignment",
    "QueryRoute",
    "RecallMessage",
    "ReceiveMessage",
    "SendMessage",
    "SyncLiteSubscription",
    "Telemetry",
)
"""The gRPC calls that can be the `code` of a fault."""
_OF_BROKERS: Final = frozenset(
    {
        RequestCode.CHECK_TRANSACTION_STATE,
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
    }
)
"""Requests that brokers send on their own."""
_OF_BOTH: Final = frozenset(
    {
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
    }
)
"""Requests that an administrator sends to a broker, which forwards them to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault; the functions below create faults. `code` is a request code as name or number, or the name of a gRPC call.
    `times` is 1 by default, and None for no limit."""

    action: Action
    code: int | str = _ANY
    client: str | None = None
    group: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    nth: int = 1
    times: int | None = 1
    probability: float = 1.0
    seed: int = 0
    response: int = 0
    remark: str = ""
    delay_s: float = 0.0
    bytes_per_s: int = 0
    queues: int | None = None
    change_route: Callable[[Route], Route] | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action is {self.action!r}; allowed: {', '.join(ACTIONS)}")
        for name, least in (("nth", 1), ("times", 1), ("queue_id", 0), ("queues", 1), ("seed", None)):
            _check_whole(name, getattr(self, name), least)
        for name in ("client", "group", "topic", "remark"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}; it must be text")
        if not _is_number(self.probability) or not 0.0 < self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability!r}; expected more than 0 and at most 1")
        if self.action == "late" and not (_is_number(self.delay_s) and 0 < self.delay_s <= MAX_DELAY_S):
            raise ValueError(f"delay_s is {self.delay_s!r}; expected more than 0 and at most {MAX_DELAY_S:.0f}")
        if self.action == "slow":
            _check_whole("bytes_per_s", self.bytes_per_s, 1)
        self._check_sender()
        if self.action == "freeze" and not self.client:
            raise ValueError(f"client is {self.client!r}; freezing needs the id of a client")
        if self.action == "route" and not self.topic:
            raise ValueError(f"topic is {self.topic!r}; a changed route needs the name of a topic")
        if self.change_route is not None and not callable(self.change_route):
            raise ValueError(f"change is {self.change_route!r}; it must be a function of a Route that returns another")
        if self.queues is not None and self.queues > MAX_QUEUES_PER_TOPIC:
            raise ValueError(f"queues is {self.queues}; maximum {MAX_QUEUES_PER_TOPIC}")

    def _check_sender(self) -> None:
        """Check that the side on which the fault acts sends the request. Raises ValueError."""
        if self.action == "lose":
            if self.code not in _OF_BROKERS | _OF_BOTH:
                allowed = ", ".join(sorted(code.name for code in _OF_BROKERS | _OF_BOTH))
                raise ValueError(
                    f"lose: {name_of(self.code)} is a request of clients; use Fault.drop, or lose one of {allowed}"
                )
        elif self.code in _OF_BROKERS:
            raise ValueError(f"{self.action}: {name_of(self.code)} is a request of brokers; use Fault.lose")

    @staticmethod
    def answer(code: str | int, *, response: int | str, remark: str = "injected by a test", **which: object) -> Fault:
        """The request is not processed. Its response, if it is not one-way, has a code such as `ResponseCode.SYSTEM_BUSY`,
        for a gRPC call one such as "TOO_MANY_REQUESTS"."""
        return _fault("answer", code, which, response=response_code(response, code), remark=remark)

    @staticmethod
    def late(code: str | int, *, delay_s: float, **which: object) -> Fault:
        """The request is processed. Its response is sent `delay_s` later, by the broker's clock."""
        return _fault("late", code, which, delay_s=delay_s)

    @staticmethod
    def silence(code: str | int, **which: object) -> Fault:
        """The request is processed, but gets no response."""
        return _fault("silence", code, which)

    @staticmethod
    def drop(code: str | int, **which: object) -> Fault:
        """The request is lost before it is processed, and gets no response."""
        return _fault("drop", code, which)

    @staticmethod
    def close(code: str | int, *, after: bool = False, **which: object) -> Fault:
        """The connection is closed before the request is processed; with `after`, it is closed after that, without a
        response."""
        return _fault("close_after" if after else "close", code, which)

    @staticmethod
    def lose(code: str | int, **which: object) -> Fault:
        """A request that the broker sends on its own, such as NOTIFY_CONSUMER_IDS_CHANGED, is lost."""
        return _fault("lose", code, which)

    @staticmethod
    def slow(code: str | int, *, bytes_per_s: int, **which: object) -> Fault:
        """The response is sent slowly, by the broker's clock."""
        return _fault("slow", code, which, bytes_per_s=bytes_per_s)

    @staticmethod
    def freeze(*, client: str) -> Fault:
        """The client is frozen until the fault is removed: its requests do not arrive, nothing is sent to it, and its
        leases expire. Its connection stays open."""
        return Fault(action="freeze", client=client, times=None)

    @staticmethod
    def route(
        topic: str, change: Callable[[Route], Route] | None = None, *, queues: int | None = None, **which: object
    ) -> Fault:
        """Clients that request the topic's route by remoting get the result of `change`, or a route with `queues` queues on
        each broker."""
        if (change is None) == (queues is None):
            raise ValueError("queues is missing; give a route's `queues` or a function that changes it, one of both")
        which.setdefault("times", None)
        fields = {**which, "topic": topic}
        return _fault("route", RequestCode.GET_ROUTEINFO_BY_TOPIC, fields, change_route=change, queues=queues)

    def changed(self, route: Route) -> Route:
        """Return the route that clients receive, for a fault that changes routes."""
        if self.change_route is not None:
            return self.change_route(route)
        count = self.queues or 0
        changed = [replace(data, read_queues=count, write_queues=count) for data in route.queues]
        return replace(route, queues=tuple(changed))

    def __str__(self) -> str:
        where = ", ".join(
            f"{name}={value}"
            for name in ("client", "group", "topic", "queue_id")
            if (value := getattr(self, name)) is not None
        )
        what = f" with {answer_name(self.code, self.response)}" if self.action == "answer" else ""
        of = "" if self.code == _ANY else f" {name_of(self.code)}"
        return f"{self.action}{of}{what}{f' ({where})' if where else ''}"


def _fault(action: Action, code: str | int, which: dict[str, object], **settings: object) -> Fault:
    for name in which:
        if name not in WHICH:
            raise ValueError(f"a fault has no field {name!r}; allowed: {', '.join(WHICH)}")
    return Fault(action=action, code=request_code(code), **settings, **which)  # type: ignore[arg-type] # checked by Fault


def name_of(code: int | str) -> str:
    return code if isinstance(code, str) else request_name(code)


def answer_name(code: int | str, response: int) -> str:
    """Return the name of a response code, in the protocol of the request; 0 is the request code of recorded gRPC calls."""
    if code == 0 or isinstance(code, str):
        return Code(response).name if response in Code._value2member_map_ else str(response)
    return code_name(response)


def request_code(code: str | int) -> int | str:
    """Return the request code of a name or number; the name of a gRPC call unchanged. Raises ValueError for an unknown
    name, and suggests similar ones."""
    if code in CALLS:
        return code
    if isinstance(code, int) and not isinstance(code, bool):
        if code < 0:
            raise ValueError(f"code is {code}; expected 0 or more")
        return int(code)
    try:
        return int(RequestCode[code])  # type: ignore[misc] # another type raises TypeError
    except (KeyError, TypeError):
        near = difflib.get_close_matches(str(code).upper(), RequestCode.__members__, 3)
        near += difflib.get_close_matches(str(code), CALLS, 1)
        hint = f"did you mean {' or '.join(near)}?" if near else "see rocketlet.protocol.codes.RequestCode"
        raise ValueError(f"code: unknown request {code!r}; {hint}") from None


def response_code(code: str | int, request: str | int = _ANY) -> int:
    """Return the response code of a name or number, in the protocol of the request. Raises ValueError."""
    names: type[IntEnum] = Code if request in CALLS else ResponseCode
    if isinstance(code, int) and not isinstance(code, bool):
        return int(code)
    try:
        return int(names[code])  # type: ignore[index] # another type raises TypeError
    except (KeyError, TypeError):
        allowed = ", ".join(names.__members__)
        raise ValueError(f"response: unknown response {code!r}; allowed: {allowed}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(name: str, value: Any, least: int | None) -> None:
    if value is None and name in ("times", "queue_id", "queues"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise ValueError(
            f"{name} is {value!r}; expected " + ("a whole number" if least is None else f"{least} or more")
        )


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that acted. `number` is the number of the fault."""

    fault: Fault
    request: str
    client: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.fault} on {self.request} of {self.client or 'a client without a name'}"


@dataclass(slots=True)
class Ordered:
    """A fault in force: its number, the number of matching requests, and the number of those on which it acted."""

    number: int
    fault: Fault
    random: random.Random
    matched: int = 0
    acted: int = 0


@dataclass(slots=True)
class Faults:
    """The faults in force, and the faults that acted.

    Args:
        on_end: called after faults are removed, so that frozen clients resume
        run: calls a function in the broker's thread
    """

    on_end: Callable[[], None]
    run: Run = run_here
    injected: list[Injected] = field(default_factory=list)
    _ordered: list[Ordered] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, *faults: Fault) -> list[int]:
        """Add faults, and return their numbers. Raises ValueError."""
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ValueError(f"{fault!r} is not a Fault; use Fault.answer(...) and the like")
        added = [Ordered(next(self._numbers), fault, random.Random(fault.seed)) for fault in faults]
        self.run(lambda: self._ordered.extend(added))
        return [item.number for item in added]

    def remove(self, *faults: Fault) -> None:
        """Remove the faults that equal one of these, or all faults without arguments."""
        self._keep(lambda item: bool(faults) and item.fault not in faults)

    def end(self, number: int) -> None:
        """Remove a fault by its number. Raises KeyError if no fault in force has the number."""
        if all(item.number != number for item in self._ordered):
            raise KeyError(f"no fault in force has the number {number}")
        self._keep(lambda item: item.number != number)

    def _keep(self, stays: Callable[[Ordered], bool]) -> None:
        def keep() -> None:
            self._ordered = [item for item in self._ordered if stays(item)]
            self.on_end()

        self.run(keep)

    def clear(self) -> None:
        """Remove all faults, and clear the list of faults that acted."""
        self.remove()
        self.injected.clear()

    @property
    def in_force(self) -> list[Ordered]:
        """The faults in force, in the order in which they were added."""
        return list(self._ordered)

    def frozen(self) -> frozenset[str]:
        """The ids of frozen clients."""
        return frozenset(
            item.fault.client for item in self._ordered if item.fault.action == "freeze" and item.fault.client
        )

    @property
    def is_empty(self) -> bool:
        return not self._ordered

    def acting(self, actions: Iterable[Action], request: Seen) -> Fault | None:
        """Return the first fault with one of the actions that acts on a request, and record that it acted; None if no such
        fault acts."""
        for item in self._ordered:
            fault = item.fault
            if fault.action not in actions or not request.matches(fault):
                continue
            item.matched += 1
            if item.matched < fault.nth or (fault.times is not None and item.acted >= fault.times):
                continue
            if fault.probability < 1.0 and item.random.random() >= fault.probability:
                continue
            item.acted += 1
            self.injected.append(Injected(fault, request.name, request.client, item.number))
            return fault
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """The fields of a request by which faults select requests."""

    code: int | str
    client: str
    group: str | None
    topic: str | None
    queue_id: int | None

    @property
    def name(self) -> str:
        return name_of(self.code)

    def matches(self, fault: Fault) -> bool:
        return (
            (fault.code in (_ANY, self.code))
            and (fault.client is None or fault.client == self.client)
            and (fault.group is None or fault.group == self.group)
            and (fault.topic is None or fault.topic == self.topic)
            and (fault.queue_id is None or fault.queue_id == self.queue_id)
        )
