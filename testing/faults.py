"""What may go wrong between a client and a broker, ordered by a test.

    broker.faults.add(Fault.answer("SEND_MESSAGE_V2", code=ResponseCode.SYSTEM_BUSY, times=3))
    broker.faults.add(Fault.close("SEND_MESSAGE_V2", after=True, nth=2))       # stored, yet not acknowledged
    broker.faults.add(Fault.freeze(client="10.0.0.7@4711"))

A fault acts on requests of its code, and of its client, group, topic and queue where these are given; on the `nth` of them
(from 1) and those behind it, `times` in all; or on each with a probability, by a seed. What acted is in `faults.injected`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from ..protocol.bodies import Route
from ..protocol.codes import RequestCode, ResponseCode, code_name, request_name

Action = Literal["answer", "late", "silence", "drop", "close", "close_after", "lose", "slow", "freeze", "route"]
_ANY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Made by the functions below. `code` is a request code, by name or number; `times` None is without end."""

    action: Action
    code: int = _ANY
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
    change_route: Callable[[Route], Route] | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("nth", self.nth, 1), ("times", self.times, 1), ("queue_id", self.queue_id, 0)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; {least} or more is allowed")
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability!r}; more than 0 and at most 1 is allowed")
        if self.action == "late" and self.delay_s <= 0:
            raise ValueError(f"delay_s is {self.delay_s!r}; more than 0 is allowed")
        if self.action == "slow" and self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s!r}; 1 or more is allowed")
        for name in ("client", "group", "topic"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}; it must be text")

    @staticmethod
    def answer(code: str | int, *, response: int | str, remark: str = "ordered by a test", **which: object) -> Fault:
        """The request is not carried out; it is answered with a response code such as `ResponseCode.SYSTEM_BUSY`."""
        return _fault("answer", code, which, response=response_code(response), remark=remark)

    @staticmethod
    def late(code: str | int, *, delay_s: float, **which: object) -> Fault:
        """The request is carried out; its answer comes `delay_s` of the broker's time later."""
        return _fault("late", code, which, delay_s=delay_s)

    @staticmethod
    def silence(code: str | int, **which: object) -> Fault:
        """The request is carried out and never answered."""
        return _fault("silence", code, which)

    @staticmethod
    def drop(code: str | int, **which: object) -> Fault:
        """The request is lost on its way: neither carried out nor answered."""
        return _fault("drop", code, which)

    @staticmethod
    def close(code: str | int, *, after: bool = False, **which: object) -> Fault:
        """The connection breaks: before the request is carried out, or `after` that, without an answer."""
        return _fault("close_after" if after else "close", code, which)

    @staticmethod
    def lose(code: str | int, **which: object) -> Fault:
        """What the broker sends on its own, such as NOTIFY_CONSUMER_IDS_CHANGED, is lost on its way."""
        return _fault("lose", code, which)

    @staticmethod
    def slow(code: str | int, *, bytes_per_s: int, **which: object) -> Fault:
        """The answer trickles, in the broker's time."""
        return _fault("slow", code, which, bytes_per_s=bytes_per_s)

    @staticmethod
    def freeze(*, client: str) -> Fault:
        """The member stands still: nothing that it sends arrives, nothing reaches it, and its leases end, until the fault is
        removed. Its connection stays open."""
        return Fault(action="freeze", client=client, times=None)

    @staticmethod
    def route(topic: str, change: Callable[[Route], Route], **which: object) -> Fault:
        """Who asks for the topic's route is told what `change` makes of it."""
        which.setdefault("times", None)
        return _fault("route", RequestCode.GET_ROUTEINFO_BY_TOPIC, {**which, "topic": topic}, change_route=change)

    def __str__(self) -> str:
        where = ", ".join(
            f"{name}={value}"
            for name in ("client", "group", "topic", "queue_id")
            if (value := getattr(self, name)) is not None
        )
        what = f" with {code_name(self.response)}" if self.action == "answer" else ""
        of = "" if self.code == _ANY else f" {request_name(self.code)}"
        return f"{self.action}{of}{what}{f' ({where})' if where else ''}"


def _fault(action: Action, code: str | int, which: dict[str, object], **settings: object) -> Fault:
    allowed = ("client", "group", "topic", "queue_id", "nth", "times", "probability", "seed")
    for name in which:
        if name not in allowed:
            raise ValueError(f"a fault has no field {name!r}; allowed: {', '.join(allowed)}")
    return Fault(action=action, code=request_code(code), **settings, **which)  # type: ignore[arg-type]


def request_code(code: str | int) -> int:
    """By name or number. Raises ValueError, which names the nearest."""
    if isinstance(code, int):
        return int(code)
    try:
        return int(RequestCode[code])
    except KeyError:
        import difflib

        near = difflib.get_close_matches(str(code).upper(), RequestCode.__members__, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see rocketlet.protocol.codes.RequestCode"
        raise ValueError(f"no request is called {code!r}; {hint}") from None


def response_code(code: str | int) -> int:
    if isinstance(code, int):
        return int(code)
    try:
        return int(ResponseCode[code])
    except KeyError:
        raise ValueError(f"no response is called {code!r}; allowed: {', '.join(ResponseCode.__members__)}") from None


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that acted: on which request, of whom."""

    fault: Fault
    request: str
    client: str

    def __str__(self) -> str:
        return f"{self.fault} on {self.request} of {self.client or 'a client without a name'}"


@dataclass(slots=True)
class _Ordered:
    fault: Fault
    random: random.Random
    matched: int = 0
    acted: int = 0


@dataclass(slots=True)
class Faults:
    """The faults in force, and what they did."""

    injected: list[Injected] = field(default_factory=list)
    _ordered: list[_Ordered] = field(default_factory=list)

    def add(self, *faults: Fault) -> None:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ValueError(f"{fault!r} is not a Fault; use Fault.answer(...) and the like")
            self._ordered.append(_Ordered(fault, random.Random(fault.seed)))

    def remove(self, *faults: Fault) -> None:
        """Ends faults before they have acted as often as they may; all without arguments."""
        self._ordered = [item for item in self._ordered if faults and item.fault not in faults]

    def clear(self) -> None:
        """Ends all faults and forgets what they did."""
        self._ordered.clear()
        self.injected.clear()

    def frozen(self) -> frozenset[str]:
        """The client ids that stand still."""
        return frozenset(
            item.fault.client for item in self._ordered if item.fault.action == "freeze" and item.fault.client
        )

    @property
    def is_empty(self) -> bool:
        return not self._ordered

    def acting(self, actions: Iterable[Action], request: Seen) -> Fault | None:
        """The first fault that acts on a request now; it is counted and noted."""
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
            self.injected.append(Injected(fault, request.name, request.client))
            return fault
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """What of a request faults go by."""

    code: int
    client: str
    group: str | None
    topic: str | None
    queue_id: int | None

    @property
    def name(self) -> str:
        return request_name(self.code)

    def matches(self, fault: Fault) -> bool:
        return (
            (fault.code in (_ANY, self.code))
            and (fault.client is None or fault.client == self.client)
            and (fault.group is None or fault.group == self.group)
            and (fault.topic is None or fault.topic == self.topic)
            and (fault.queue_id is None or fault.queue_id == self.queue_id)
        )
