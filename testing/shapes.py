"""JSON of the control interface: requests and responses. `bytes` are Base64.

Limits of single fields are declared here, checked when a request is decoded, and part of the schema. Combinations, such
as the fields of a fault, are checked where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ..client.config import TOPIC_QUEUES
from .config import MAX_DELAY_S, MAX_WAIT_S, WAIT_S
from .faults import Action
from .tap import Request

Count = Annotated[int, Meta(ge=1)]
Code = Annotated[str | int, Meta(description="a request code by name or number, such as SEND_MESSAGE_V2")]


class Problem(Struct):
    """Error of a call. `error` is the name of the exception that `RemoteBroker` raises: ValueError (400), KeyError,
    UnknownGroup or UnknownTopic (404), TimeoutError or RuntimeError (409)."""

    error: str
    message: str


class Done(Struct):
    """The call was successful."""


class Ready(Struct):
    """State of the broker. `address` is the address of name server and broker for clients on the broker's machine."""

    address: str
    broker: str
    is_running: bool


# Clock


class Now(Struct):
    """The broker's time in ms since the epoch."""

    now_ms: int


class Advance(Struct, forbid_unknown_fields=True):
    """How far to advance the broker's time. The parts are added, to at most 366 days."""

    seconds: float = 0.0
    minutes: float = 0.0
    hours: float = 0.0
    days: float = 0.0


class Skipped(Struct):
    """`skipped` is True if there was a delayed message or redelivery, to whose time the clock has advanced."""

    skipped: bool
    now_ms: int


# Faults


class FaultOrder(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A fault to inject. docs/testing.md lists the fields of each action. `times` null means without a limit."""

    action: Action
    code: Code | UnsetType = UNSET
    client: str | UnsetType | None = UNSET
    group: str | UnsetType | None = UNSET
    topic: str | UnsetType | None = UNSET
    queue_id: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    nth: Count | UnsetType = UNSET
    times: Count | UnsetType | None = UNSET
    probability: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    response: Annotated[str | int, Meta(description="a response code, such as SYSTEM_BUSY")] | UnsetType = UNSET
    remark: str | UnsetType = UNSET
    delay_s: Annotated[float, Meta(gt=0, le=MAX_DELAY_S)] | UnsetType = UNSET
    bytes_per_s: Count | UnsetType = UNSET
    queues: Count | UnsetType = UNSET


class FaultInForce(Struct):
    """A fault in force. `matched` is the number of matching requests, `acted` the number of those on which the fault
    acted."""

    number: int
    fault: FaultOrder
    matched: int
    acted: int


class FaultActed(Struct):
    """A fault that acted on a request. `text` describes both."""

    number: int
    fault: FaultOrder
    request: str
    client: str
    text: str


class Numbers(Struct):
    """The numbers of the faults, in the order in which they were sent."""

    numbers: list[int]


# State


class QueueName(Struct):
    """A queue."""

    topic: str
    broker: str
    queue_id: int


class MessageSeen(Struct):
    """A stored message. `text` is the body if it is UTF-8; otherwise null. `record` contains the bytes of the commit log if
    the query requests them; otherwise null."""

    queue: QueueName
    offset: int
    message_id: str
    body: bytes
    text: str | None
    tag: str
    keys: list[str]
    properties: dict[str, str]
    reconsume_times: int
    born_ms: int
    stored_ms: int
    record: bytes | None = None


class MessageFilter(Struct, forbid_unknown_fields=True):
    """Query of a list of messages."""

    key: Annotated[str, Meta(description="only messages with this key")] | None = None
    waiting_for: Annotated[str, Meta(description="only messages that this group has not committed")] | None = None
    record: Annotated[bool, Meta(description="include the bytes of the commit log")] = False


class RequestFilter(Struct, forbid_unknown_fields=True):
    """Query of the list of requests."""

    name: Annotated[str, Meta(description="only requests of this name, such as SEND_MESSAGE_V2")] | None = None
    client: Annotated[str, Meta(description="only requests of this client id")] | None = None


@dataclass(slots=True)
class RequestSeen(Request):
    """A request of a client. `response` is the code of the response, null if there is none yet; `text` describes the
    request."""

    text: str = ""

    @classmethod
    def of(cls, request: Request) -> RequestSeen:
        values = [getattr(request, item.name) for item in fields(Request)]
        seen = cls(*values)
        seen.text = str(request)
        return seen


class Owned(Struct):
    """A queue, and the client id of its owner."""

    queue: QueueName
    client: str


class GroupSeen(Struct):
    """Members of a group as client ids, and the owners of the queues that have one."""

    members: list[str]
    owners: list[Owned]


class Progress(Struct):
    """Progress of a group in a topic.

    Attributes:
        committed: committed offset by queue id
        lag: number of messages that are not committed, or not acknowledged in queues that members share
        missing: description of what the group has not consumed; empty if it has consumed everything
    """

    committed: dict[int, int]
    lag: int
    missing: str


class TopicOrder(Struct, forbid_unknown_fields=True):
    """Settings of a topic."""

    queues: Annotated[int, Meta(ge=1)] = TOPIC_QUEUES
    message_type: str = ""


class QueueOwner(Struct, forbid_unknown_fields=True):
    topic: str
    queue_id: Annotated[int, Meta(ge=0)]


class Kill(Struct, forbid_unknown_fields=True):
    """How to kill the broker. `lose` is the number of last acknowledged messages that are lost."""

    lose: Annotated[int, Meta(ge=0)] = 0


class Advertise(Struct, forbid_unknown_fields=True):
    """Addresses (HOST:PORT) that clients receive from now on: `address` inside of the broker's network, `external`
    outside. Null leaves an address unchanged."""

    address: str | None = None
    external: str | None = None


class Text(Struct):
    text: str


Timeline = list[dict[str, Any]]


# Waiting


class Condition(Struct, forbid_unknown_fields=True, tag_field="until"):
    pass


class Rebalanced(Condition, tag="rebalanced"):
    """The group's rebalance is complete, and it has `members` members if that is given."""

    group: str
    members: Count | None = None


class Consumed(Condition, tag="consumed"):
    """The group has committed, or acknowledged in shared queues, every message of the topic and at least one offset."""

    group: str
    topic: str


class Stored(Condition, tag="stored"):
    """The topic has at least `count` messages, with the key if one is given."""

    topic: str
    count: Count = 1
    key: str | None = None


class DeadLetters(Condition, tag="dead_letters"):
    """The group has at least `count` dead letters."""

    group: str
    count: Count = 1


class Members(Condition, tag="members"):
    """The group has at least `count` members."""

    group: str
    count: Count = 1


class Asked(Condition, tag="asked"):
    """Clients, or one client, have made at least `count` of the kept requests of this name."""

    name: str
    count: Count = 1
    client: str | None = None


class Acted(Condition, tag="injected"):
    """Faults have acted at least `count` times."""

    count: Count = 1


AnyCondition = Rebalanced | Consumed | Stored | DeadLetters | Members | Asked | Acted


class WaitFor(Struct, forbid_unknown_fields=True):
    """What to wait for. With `skip_waits`, the clock advances to the next delayed message until the condition holds."""

    condition: AnyCondition
    skip_waits: bool = False
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = WAIT_S


class Waited(Struct):
    """Result of a wait. After a rebalance, `shares` has the number of queues of each member."""

    shares: dict[str, int]
