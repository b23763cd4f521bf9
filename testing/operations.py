"""Operations on a broker under test: `BrokerUnderTest`, the HTTP routes of the control interface and their OpenAPI
description come from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

from ..client.admin.admin_client import rebalanced_by
from ..client.message import Message
from ..protocol.names import Queue
from . import shapes, state
from .config import POLL_INTERVAL_S
from .errors import UnknownName
from .fault_orders import fault_of, order_of
from .report import report
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
        name: id of the operation in the description
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


# Clock


def _now(rig: Rig, call: Call) -> shapes.Now:
    return shapes.Now(rig.clock.now_ms)


def _advance(rig: Rig, call: Call) -> shapes.Now:
    body: shapes.Advance = call.body
    rig.clock.advance(body.seconds, minutes=body.minutes, hours=body.hours, days=body.days)
    return shapes.Now(rig.clock.now_ms)


def _skip(rig: Rig, call: Call) -> shapes.Skipped:
    return shapes.Skipped(rig.skip(), rig.clock.now_ms)


# Faults


def _add_faults(rig: Rig, call: Call) -> shapes.Numbers:
    faults = [fault_of(order) for order in call.body]
    return shapes.Numbers(rig.faults.add(*faults))


def _faults(rig: Rig, call: Call) -> list[shapes.FaultInForce]:
    return [
        shapes.FaultInForce(item.number, order_of(item.fault), item.matched, item.acted) for item in rig.faults.in_force
    ]


def _end_faults(rig: Rig, call: Call) -> shapes.Done:
    rig.faults.remove()
    return shapes.Done()


def _end_fault(rig: Rig, call: Call) -> shapes.Done:
    number = call.path["number"]
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"number is {number!r}; it must be a number that POST /faults returned")
    rig.faults.end(int(number))
    return shapes.Done()


def _injected(rig: Rig, call: Call) -> list[shapes.FaultActed]:
    return [
        shapes.FaultActed(item.number, order_of(item.fault), item.request, item.client, str(item))
        for item in rig.faults.injected
    ]


def _forget_injected(rig: Rig, call: Call) -> shapes.Done:
    rig.faults.injected.clear()
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


def _messages(rig: Rig, call: Call) -> list[shapes.MessageSeen]:
    topic, query = call.path["topic"], call.query
    return _messages_seen(state.messages(rig.running, topic, key=query.key, waiting_for=query.waiting_for), query)


def _dead_letters(rig: Rig, call: Call) -> list[shapes.MessageSeen]:
    group, query = call.path["group"], call.query
    return _messages_seen(state.dead_letters(rig.running, group, key=query.key, waiting_for=query.waiting_for), query)


def _messages_seen(found: list[state.StoredMessage], query: shapes.MessageFilter) -> list[shapes.MessageSeen]:
    return [_message(stored.message, stored.record if query.record else None) for stored in found]


def _topics(rig: Rig, call: Call) -> dict[str, int]:
    return state.topics(rig.running)


def _create_topic(rig: Rig, call: Call) -> shapes.Done:
    state.create_topic(rig.running, call.path["topic"], call.body.queues, call.body.message_type)
    return shapes.Done()


def _groups(rig: Rig, call: Call) -> list[str]:
    return state.groups(rig.running)


def _create_group(rig: Rig, call: Call) -> shapes.Done:
    state.create_group(rig.running, call.path["group"])
    return shapes.Done()


def _group(rig: Rig, call: Call) -> shapes.GroupSeen:
    group = call.path["group"]
    owners = [shapes.Owned(_queue(queue), client) for queue, client in state.owners(rig.running, group).items()]
    return shapes.GroupSeen(state.members(rig.running, group), owners)


def _timeline(rig: Rig, call: Call) -> shapes.Timeline:
    return state.timeline(rig.running, call.path["group"])


def _progress(rig: Rig, call: Call) -> shapes.Progress:
    broker, group, topic = rig.running, call.path["group"], call.path["topic"]
    return shapes.Progress(
        state.committed(broker, group, topic),
        state.lag(broker, group, topic),
        state.consumed_fault(broker, group, topic),
    )


def _take_lease(rig: Rig, call: Call) -> shapes.Done:
    state.take_lease(rig.running, call.path["group"], call.body.topic, call.body.queue_id)
    return shapes.Done()


def _rebalance(rig: Rig, call: Call) -> shapes.Done:
    state.rebalance(rig.running, call.path["group"])
    return shapes.Done()


def _requests(rig: Rig, call: Call) -> list[shapes.RequestSeen]:
    return [shapes.RequestSeen.of(item) for item in _requests_of(rig, call.query.name, call.query.client)]


def _requests_of(rig: Rig, name: str | None, client: str | None) -> list[Request]:
    return [item for item in rig.requests if name in (None, item.name) and client in (None, item.client)]


def _report(rig: Rig, call: Call) -> shapes.Text:
    return shapes.Text(report(rig))


# Lifecycle


def _ready(rig: Rig, call: Call) -> shapes.Ready:
    return shapes.Ready(rig.address, rig.name, rig.is_running)


def _advertise(rig: Rig, call: Call) -> shapes.Done:
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


async def _clean(rig: Rig, call: Call) -> shapes.Done:
    await rig.clear()
    return shapes.Done()


async def _restart(rig: Rig, call: Call) -> shapes.Done:
    await rig.restart()
    return shapes.Done()


async def _kill(rig: Rig, call: Call) -> shapes.Done:
    await rig.kill(lose=call.body.lose)
    return shapes.Done()


async def _stop(rig: Rig, call: Call) -> shapes.Done:
    await rig.stop()
    return shapes.Done()


async def _start(rig: Rig, call: Call) -> shapes.Done:
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


async def _wait_for(rig: Rig, call: Call) -> shapes.Waited:
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


HEALTH: Final = Operation(
    "GET", "/health", "health", "The address of the broker, and whether it is running", _ready, shapes.Ready
)
NOW: Final = Operation("GET", "/clock", "now", "The broker's time", _now, shapes.Now)
ADVANCE: Final = Operation(
    "POST",
    "/clock/advance",
    "advance",
    "Advance the broker's time, and run the timers that become due",
    _advance,
    shapes.Now,
    shapes.Advance,
)
SKIP: Final = Operation(
    "POST", "/clock/skip", "skip", "Move the clock to the next delayed message", _skip, shapes.Skipped
)
WAIT_FOR: Final = Operation(
    "POST", "/wait-for", "waitFor", "Wait until the condition holds", _wait_for, shapes.Waited, shapes.WaitFor
)
FAULTS: Final = Operation("GET", "/faults", "faults", "The faults in force", _faults, list[shapes.FaultInForce])
ADD_FAULTS: Final = Operation(
    "POST", "/faults", "addFaults", "Add faults", _add_faults, shapes.Numbers, list[shapes.FaultOrder]
)
END_FAULTS: Final = Operation(
    "DELETE", "/faults", "endFaults", "End all faults; frozen clients resume", _end_faults, shapes.Done
)
INJECTED: Final = Operation(
    "GET", "/faults/injected", "injected", "The faults that acted", _injected, list[shapes.FaultActed]
)
FORGET_INJECTED: Final = Operation(
    "DELETE", "/faults/injected", "forgetInjected", "Clear the list of faults that acted", _forget_injected, shapes.Done
)
END_FAULT: Final = Operation("DELETE", "/faults/{number}", "endFault", "End one fault", _end_fault, shapes.Done)
TOPICS: Final = Operation("GET", "/topics", "topics", "Queues by topic", _topics, dict[str, int])
CREATE_TOPIC: Final = Operation(
    "PUT", "/topics/{topic}", "createTopic", "Create or alter a topic", _create_topic, shapes.Done, shapes.TopicOrder
)
MESSAGES: Final = Operation(
    "GET",
    "/topics/{topic}/messages",
    "messages",
    "Stored messages, in the order of storing",
    _messages,
    list[shapes.MessageSeen],
    None,
    shapes.MessageFilter,
)
GROUPS: Final = Operation("GET", "/groups", "groups", "Groups with members", _groups, list[str])
CREATE_GROUP: Final = Operation(
    "PUT", "/groups/{group}", "createGroup", "Create a group and its retry topic", _create_group, shapes.Done
)
GROUP: Final = Operation("GET", "/groups/{group}", "group", "Members and owners", _group, shapes.GroupSeen)
TIMELINE: Final = Operation(
    "GET", "/groups/{group}/timeline", "timeline", "Events of the group, oldest first", _timeline, shapes.Timeline
)
DEAD_LETTERS: Final = Operation(
    "GET",
    "/groups/{group}/dead-letters",
    "deadLetters",
    "Dead letters of the group",
    _dead_letters,
    list[shapes.MessageSeen],
    None,
    shapes.MessageFilter,
)
PROGRESS: Final = Operation(
    "GET",
    "/groups/{group}/topics/{topic}",
    "progress",
    "Committed offsets and lag of the group",
    _progress,
    shapes.Progress,
)
TAKE_LEASE: Final = Operation(
    "POST",
    "/groups/{group}/take-lease",
    "takeLease",
    "End a member's lease as if it had expired",
    _take_lease,
    shapes.Done,
    shapes.QueueOwner,
)
REBALANCE: Final = Operation(
    "POST",
    "/groups/{group}/rebalance",
    "rebalance",
    "Notify the members that the group has changed",
    _rebalance,
    shapes.Done,
)
REQUESTS: Final = Operation(
    "GET",
    "/requests",
    "requests",
    "Requests of clients, decoded, oldest first",
    _requests,
    list[shapes.RequestSeen],
    None,
    shapes.RequestFilter,
)
REPORT: Final = Operation("GET", "/report", "report", "A report for a failed test", _report, shapes.Text)
ADVERTISE: Final = Operation(
    "PUT",
    "/advertised",
    "advertise",
    "Change the addresses that clients receive",
    _advertise,
    shapes.Done,
    shapes.Advertise,
)
CLEAR: Final = Operation(
    "POST", "/clean", "clean", "Delete all topics, groups, messages, faults and requests", _clean, shapes.Done
)
RESTART: Final = Operation("POST", "/restart", "restart", "Stop as by SIGTERM, and start", _restart, shapes.Done)
KILL: Final = Operation("POST", "/kill", "kill", "Stop as by SIGKILL, and start", _kill, shapes.Done, shapes.Kill)
STOP: Final = Operation("POST", "/stop", "stop", "Stop as by SIGTERM", _stop, shapes.Done)
START: Final = Operation("POST", "/start", "start", "Start a stopped broker", _start, shapes.Done)

OPERATIONS: Final = [value for value in vars().values() if isinstance(value, Operation)]
"""All operations, in the order above."""
