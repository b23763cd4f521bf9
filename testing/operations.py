"""Operations on a broker under test: `BrokerUnderTest`, the HTTP routes of the control interface and their OpenAPI
description come from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, get_type_hints, overload

from msgspec import Struct

from ..client.admin.admin_client import rebalanced_by
from ..client.message import Message
from ..protocol.names import Queue
from . import shapes, state
from .config import POLL_INTERVAL_S
from .errors import UnknownName
from .fault_orders import fault_of, order_of
from .report import report as report_of
from .rig import Rig
from .tap import Request

T = TypeVar("T")


class Call(NamedTuple):
    """Contents of a request: the names in its path, its query, and its body."""

    path: Mapping[str, str]
    query: Any
    body: Any


class Operation(NamedTuple, Generic[T]):
    """One operation on a broker under test: of the control interface, and of `BrokerUnderTest`.

    Attributes:
        name: id of the operation in the description: the name of the function in camel case
        act: function `act(rig, call)`; it returns the response or an awaitable of it
        answer: type of the response
        body: type of the request's body; None for no body
        query: type of the query parameters; None for no parameters
    """

    method: str
    path: str
    name: str
    summary: str
    act: Callable[[Rig, Call], T | Awaitable[T]]
    answer: type[T]
    body: Any = None
    query: type[Struct] | None = None


class _Declare(Protocol):
    @overload
    def __call__(self, act: Callable[[Rig, Call], Coroutine[Any, Any, T]]) -> Operation[T]: ...

    @overload
    def __call__(self, act: Callable[[Rig, Call], T]) -> Operation[T]: ...


def _operation(
    method: str, path: str, summary: str, *, body: Any = None, query: type[Struct] | None = None
) -> _Declare:
    """Declare a function `act(rig, call)` as an operation, whose response has the type that the function returns."""

    def declare(act: Callable[[Rig, Call], Any]) -> Operation[Any]:
        first, *others = act.__name__.split("_")
        name = first + "".join(map(str.capitalize, others))
        return Operation(method, path, name, summary, act, get_type_hints(act)["return"], body, query)

    return declare


# Clock


@_operation("GET", "/clock", "The broker's time")
def now(rig: Rig, call: Call) -> shapes.Now:
    return shapes.Now(rig.clock.now_ms)


@_operation(
    "POST",
    "/clock/advance",
    "Advance the broker's time, and run the timers that become due",
    body=shapes.Advance,
)
def advance(rig: Rig, call: Call) -> shapes.Now:
    body: shapes.Advance = call.body
    rig.clock.advance(body.seconds, minutes=body.minutes, hours=body.hours, days=body.days)
    return shapes.Now(rig.clock.now_ms)


@_operation("POST", "/clock/skip", "Move the clock to the next delayed message")
def skip(rig: Rig, call: Call) -> shapes.Skipped:
    return shapes.Skipped(rig.skip(), rig.clock.now_ms)


# Faults


@_operation("POST", "/faults", "Add faults", body=list[shapes.FaultOrder])
def add_faults(rig: Rig, call: Call) -> shapes.Numbers:
    faults = [fault_of(order) for order in call.body]
    return shapes.Numbers(rig.faults.add(*faults))


@_operation("GET", "/faults", "The faults in force")
def faults(rig: Rig, call: Call) -> list[shapes.FaultInForce]:
    return [
        shapes.FaultInForce(item.number, order_of(item.fault), item.matched, item.acted) for item in rig.faults.in_force
    ]


@_operation("DELETE", "/faults", "End all faults; frozen clients resume")
def end_faults(rig: Rig, call: Call) -> shapes.Done:
    rig.faults.remove()
    return shapes.Done()


@_operation("GET", "/faults/injected", "The faults that acted")
def injected(rig: Rig, call: Call) -> list[shapes.FaultActed]:
    return [
        shapes.FaultActed(item.number, order_of(item.fault), item.request, item.client, str(item))
        for item in rig.faults.injected
    ]


@_operation("DELETE", "/faults/injected", "Clear the list of faults that acted")
def forget_injected(rig: Rig, call: Call) -> shapes.Done:
    rig.faults.injected.clear()
    return shapes.Done()


@_operation("DELETE", "/faults/{number}", "End one fault")
def end_fault(rig: Rig, call: Call) -> shapes.Done:
    number = call.path["number"]
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"number is {number!r}; it must be a number that POST /faults returned")
    rig.faults.end(int(number))
    return shapes.Done()


# State


def _queue(queue: Queue) -> shapes.QueueName:
    return shapes.QueueName(queue.topic, queue.broker_name, queue.queue_id)


def _message(message: Message, record: bytes | None) -> shapes.MessageSeen:
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        text = None
    return shapes.MessageSeen(
        queue=_queue(message.queue),
        offset=message.queue_offset,
        message_id=message.message_id,
        body=message.body,
        text=text,
        tag=message.tag or "",
        keys=list(message.keys),
        properties=message.properties,
        reconsume_times=message.reconsume_times,
        born_ms=message.born_ms,
        stored_ms=message.store_ms,
        record=record,
    )


@_operation(
    "GET",
    "/topics/{topic}/messages",
    "Stored messages, in the order of storing",
    query=shapes.MessageFilter,
)
def messages(rig: Rig, call: Call) -> list[shapes.MessageSeen]:
    topic, query = call.path["topic"], call.query
    return _messages_seen(state.messages(rig.running, topic, key=query.key, waiting_for=query.waiting_for), query)


@_operation("GET", "/groups/{group}/dead-letters", "Dead letters of the group", query=shapes.MessageFilter)
def dead_letters(rig: Rig, call: Call) -> list[shapes.MessageSeen]:
    group, query = call.path["group"], call.query
    return _messages_seen(state.dead_letters(rig.running, group, key=query.key, waiting_for=query.waiting_for), query)


def _messages_seen(found: list[state.StoredMessage], query: shapes.MessageFilter) -> list[shapes.MessageSeen]:
    return [_message(stored.message, stored.record if query.record else None) for stored in found]


@_operation("GET", "/topics", "Queues by topic")
def topics(rig: Rig, call: Call) -> dict[str, int]:
    return state.topics(rig.running)


@_operation("PUT", "/topics/{topic}", "Create or alter a topic", body=shapes.TopicOrder)
def create_topic(rig: Rig, call: Call) -> shapes.Done:
    state.create_topic(rig.running, call.path["topic"], call.body.queues, call.body.message_type)
    return shapes.Done()


@_operation("GET", "/groups", "Groups with members")
def groups(rig: Rig, call: Call) -> list[str]:
    return state.groups(rig.running)


@_operation("PUT", "/groups/{group}", "Create a group and its retry topic")
def create_group(rig: Rig, call: Call) -> shapes.Done:
    state.create_group(rig.running, call.path["group"])
    return shapes.Done()


@_operation("GET", "/groups/{group}", "Members and owners")
def group(rig: Rig, call: Call) -> shapes.GroupSeen:
    group = call.path["group"]
    owners = [shapes.Owned(_queue(queue), client) for queue, client in state.owners(rig.running, group).items()]
    return shapes.GroupSeen(state.members(rig.running, group), owners)


@_operation("GET", "/groups/{group}/timeline", "Events of the group, oldest first")
def timeline(rig: Rig, call: Call) -> shapes.Timeline:
    return state.timeline(rig.running, call.path["group"])


@_operation("GET", "/groups/{group}/topics/{topic}", "Committed offsets and lag of the group")
def progress(rig: Rig, call: Call) -> shapes.Progress:
    broker, group, topic = rig.running, call.path["group"], call.path["topic"]
    return shapes.Progress(
        state.committed(broker, group, topic),
        state.lag(broker, group, topic),
        state.consumed_fault(broker, group, topic),
    )


@_operation(
    "POST",
    "/groups/{group}/take-lease",
    "End a member's lease as if it had expired",
    body=shapes.QueueOwner,
)
def take_lease(rig: Rig, call: Call) -> shapes.Done:
    state.take_lease(rig.running, call.path["group"], call.body.topic, call.body.queue_id)
    return shapes.Done()


@_operation("POST", "/groups/{group}/rebalance", "Notify the members that the group has changed")
def rebalance(rig: Rig, call: Call) -> shapes.Done:
    state.rebalance(rig.running, call.path["group"])
    return shapes.Done()


@_operation("GET", "/requests", "Requests of clients, decoded, oldest first", query=shapes.RequestFilter)
def requests(rig: Rig, call: Call) -> list[shapes.RequestSeen]:
    return [shapes.RequestSeen.of(item) for item in _requests_of(rig, call.query.name, call.query.client)]


def _requests_of(rig: Rig, name: str | None, client: str | None) -> list[Request]:
    return [item for item in rig.requests if name in (None, item.name) and client in (None, item.client)]


@_operation("GET", "/report", "A report for a failed test")
def report(rig: Rig, call: Call) -> shapes.Text:
    return shapes.Text(report_of(rig))


# Lifecycle


@_operation("GET", "/health", "The address of the broker, and whether it is running")
def health(rig: Rig, call: Call) -> shapes.Ready:
    return shapes.Ready(rig.address, rig.name, rig.is_running)


@_operation("PUT", "/advertised", "Change the addresses that clients receive", body=shapes.Advertise)
def advertise(rig: Rig, call: Call) -> shapes.Done:
    body: shapes.Advertise = call.body
    if body.address is None and body.external is None:
        raise ValueError("address is missing; give `address`, `external` or both, as HOST:PORT")
    for name in ("address", "external"):
        _check_address(name, getattr(body, name))
    rig.advertise(body.address, body.external)
    return shapes.Done()


def _check_address(name: str, value: str | None) -> None:
    if value is None:
        return
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ValueError(f"{name} is {value!r}; it must be HOST:PORT, such as localhost:9876")


@_operation("POST", "/clean", "Delete all topics, groups, messages, faults and requests")
async def clean(rig: Rig, call: Call) -> shapes.Done:
    await rig.clear()
    return shapes.Done()


@_operation("POST", "/restart", "Stop as by SIGTERM, and start")
async def restart(rig: Rig, call: Call) -> shapes.Done:
    await rig.restart()
    return shapes.Done()


@_operation("POST", "/kill", "Stop as by SIGKILL, and start", body=shapes.Kill)
async def kill(rig: Rig, call: Call) -> shapes.Done:
    await rig.kill(lose=call.body.lose)
    return shapes.Done()


@_operation("POST", "/stop", "Stop as by SIGTERM")
async def stop(rig: Rig, call: Call) -> shapes.Done:
    await rig.stop()
    return shapes.Done()


@_operation("POST", "/start", "Start a stopped broker")
async def start(rig: Rig, call: Call) -> shapes.Done:
    await rig.start()
    return shapes.Done()


# Waiting


def _missing(rig: Rig, condition: shapes.AnyCondition) -> str:
    """Return the reason why the condition does not hold; empty if it holds."""
    try:
        return _missing_checked(rig, condition)
    except UnknownName as error:  # the group or topic may be created later
        return str(error.args[0])


def _missing_checked(rig: Rig, condition: shapes.AnyCondition) -> str:
    """Return the reason why the condition does not hold; empty if it holds. Raises UnknownName."""
    if isinstance(condition, shapes.Consumed):
        return state.consumed_fault(rig.running, condition.group, condition.topic)
    if isinstance(condition, shapes.Stored):
        found, what = len(state.messages(rig.running, condition.topic, key=condition.key)), "messages"
    elif isinstance(condition, shapes.DeadLetters):
        found, what = len(state.dead_letters(rig.running, condition.group)), "dead letters"
    elif isinstance(condition, shapes.Members):
        found, what = len(state.members(rig.running, condition.group)), "members"
    elif isinstance(condition, shapes.Asked):
        found, what = len(_requests_of(rig, condition.name, condition.client)), f"requests {condition.name}"
    else:
        assert isinstance(condition, shapes.Acted)
        found, what = len(rig.faults.injected), "faults that acted"
    return "" if found >= condition.count else f"there are {found} {what} of {condition.count}"


@_operation("POST", "/wait-for", "Wait until the condition holds", body=shapes.WaitFor)
async def wait_for(rig: Rig, call: Call) -> shapes.Waited:
    body: shapes.WaitFor = call.body
    if isinstance(body.condition, shapes.Rebalanced):
        return shapes.Waited(await _rebalanced(rig, body.condition, body.timeout_s))
    end_s = asyncio.get_running_loop().time() + body.timeout_s
    while missing := _missing(rig, body.condition):
        if asyncio.get_running_loop().time() >= end_s:
            raise TimeoutError(f"{missing}, after {body.timeout_s} s")
        if body.skip_waits:
            rig.skip()
        await asyncio.sleep(POLL_INTERVAL_S)
    return shapes.Waited({})


async def _rebalanced(rig: Rig, condition: shapes.Rebalanced, timeout_s: float) -> dict[str, int]:
    assert rig.running
    group = condition.group
    return await rebalanced_by(
        lambda: rig.reports(group), group, members=condition.members, timeout_s=max(timeout_s, POLL_INTERVAL_S)
    )


OPERATIONS: Final = [value for value in vars().values() if isinstance(value, Operation)]
"""All operations, in the order above."""
