"""The JSON of the control interface: requests and answers. `bytes` are Base64.

Numbers and texts that a caller gives are checked here, where their limits are in the schema; combinations, such as the
fields of a fault, are checked where they are used.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ..client.config import TOPIC_QUEUES
from .config import MAX_DELAY_S, MAX_WAIT_S, WAIT_S
from .faults import Action

Count = Annotated[int, Meta(ge=1)]
Code = Annotated[str | int, Meta(description="a request code by name or number, such as SEND_MESSAGE_V2")]


class Problem(Struct):
    """Why a call failed. `error` is the name of the exception that the Python kit raises: ValueError (400), KeyError (404),
    TimeoutError or RuntimeError (409)."""

    error: str
    message: str


class Done(Struct):
    """The call has been carried out."""


class Ready(Struct):
    """`address`: the name server and the broker, as a client on the broker's machine reaches them."""

    address: str
    broker: str
    is_running: bool


# Clock


class Now(Struct):
    """ms since the epoch, as the broker stamps messages."""

    now_ms: int


class Advance(Struct, forbid_unknown_fields=True):
    """How far the broker's time moves on; the parts add up, to 366 days at most."""

    seconds: float = 0.0
    minutes: float = 0.0
    hours: float = 0.0
    days: float = 0.0


class Skipped(Struct):
    """Whether a delayed message waited, to whose time the clock has moved."""

    skipped: bool
    now_ms: int


# Faults


class FaultOrder(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A fault to inject. docs/testing.md says which fields an action takes; `times` null is without end."""

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
    """`matched`: requests that it fits; `acted`: those on which it acted."""

    number: int
    fault: FaultOrder
    matched: int
    acted: int


class FaultActed(Struct):
    """`text` is a line for people."""

    number: int
    fault: FaultOrder
    request: str
    client: str
    text: str


class Numbers(Struct):
    """The numbers of the faults, in the order in which they were given."""

    numbers: list[int]


# State


class QueueName(Struct):
    topic: str
    broker: str
    queue_id: int


class MessageSeen(Struct):
    """`text` is the body if it is UTF-8. `record`: the bytes of the commit log, if they were asked for."""

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
    key: Annotated[str, Meta(description="only messages with this key")] | None = None
    waiting_for: Annotated[str, Meta(description="only messages that this group has not committed")] | None = None
    record: Annotated[bool, Meta(description="also the bytes of the commit log")] = False


class RequestFilter(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="only requests of this name, such as SEND_MESSAGE_V2")] | None = None
    client: Annotated[str, Meta(description="only requests of this client id")] | None = None


class RequestSeen(Struct):
    """`response` is the answer's code, null without one (yet); `text` is a line for people."""

    name: str
    code: int
    client: str
    peer: str
    group: str | None
    topic: str | None
    queue_id: int | None
    ext: dict[str, str | int | bool]
    body: bytes
    response: int | None
    remark: str | None
    at_s: float
    text: str


class Owned(Struct):
    queue: QueueName
    client: str


class GroupSeen(Struct):
    """`members`: client ids; `owners`: the owner of each queue."""

    members: list[str]
    owners: list[Owned]


class Progress(Struct):
    """`committed`: the offset by queue id; `lag`: messages that are not committed; `missing` says so in words, empty if
    nothing is."""

    committed: dict[int, int]
    lag: int
    missing: str


class TopicOrder(Struct, forbid_unknown_fields=True):
    queues: Annotated[int, Meta(ge=1)] = TOPIC_QUEUES
    message_type: str = ""


class QueueOwner(Struct, forbid_unknown_fields=True):
    topic: str
    queue_id: Annotated[int, Meta(ge=0)]


class Kill(Struct, forbid_unknown_fields=True):
    """lose: so many of the last acknowledged messages are gone."""

    lose: Annotated[int, Meta(ge=0)] = 0


class Advertise(Struct, forbid_unknown_fields=True):
    """HOST:PORT that clients are told from now on: `address` inside of the broker's network, `external` outside of it."""

    address: str | None = None
    external: str | None = None


class Text(Struct):
    text: str


Timeline = list[dict[str, Any]]


# Waiting


class Condition(Struct, forbid_unknown_fields=True, tag_field="until"):
    pass


class Rebalanced(Condition, tag="rebalanced"):
    """The group's rebalance is over; with `members`, it has so many."""

    group: str
    members: Count | None = None


class Consumed(Condition, tag="consumed"):
    """The group has committed every message of the topic."""

    group: str
    topic: str


class Stored(Condition, tag="stored"):
    """The topic has at least `count` messages."""

    topic: str
    count: Count = 1
    key: str | None = None


class DeadLetters(Condition, tag="dead_letters"):
    """The group has given up on at least `count` messages."""

    group: str
    count: Count = 1


class Members(Condition, tag="members"):
    """The group has at least `count` members."""

    group: str
    count: Count = 1


class Asked(Condition, tag="asked"):
    """Clients have made at least `count` requests of this name."""

    name: str
    count: Count = 1
    client: str | None = None


class Acted(Condition, tag="injected"):
    """Faults have acted at least `count` times."""

    count: Count = 1


AnyCondition = Rebalanced | Consumed | Stored | DeadLetters | Members | Asked | Acted


class WaitFor(Struct, forbid_unknown_fields=True):
    """skip_waits: no delayed message waits meanwhile; the clock moves to whatever is due next."""

    condition: AnyCondition
    skip_waits: bool = False
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = WAIT_S


class Waited(Struct):
    """`shares`: how many queues each member owns, of a group that is rebalanced."""

    shares: dict[str, int]
