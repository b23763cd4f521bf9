"""Events and requests that the broker sends to clients. Each protocol server encodes them in its own protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...protocol.group_bodies import BrokerShare, Place
from ...protocol.headers import PushReply
from ...protocol.message import Record
from ...protocol.names import Queue


class GroupChanged(NamedTuple):
    """The members of a group have changed, or its queues of `topic`.

    `places` has, by topic, the receiver's position among the members; `shares` its queues where the broker allocates them.
    With them a Rocketlet member need not request the member list. If both are None, earlier ones are no longer valid.
    """

    group: str
    topic: str | None = None
    places: Mapping[str, Place] | None = None
    shares: Mapping[str, BrokerShare] | None = None


class OutcomeWanted(NamedTuple):
    """A check of a half message without an outcome. `checks` counts the checks of this message, including this one."""

    half: Record
    checks: int


class LiteTaken(NamedTuple):
    """Another client of an exclusive group has subscribed to a lite topic, which is no longer this client's."""

    group: str
    lite_topic: str
    client_id: str


class OffsetsReset(NamedTuple):
    """An administrator has reset the offsets of a group in a topic. `is_for_cpp`: True if the administrator's tool is a C++
    client; the queues are then encoded as C++ clients read them."""

    topic: str
    group: str
    timestamp_ms: int
    is_force: bool
    offsets: Mapping[Queue, int]
    is_for_cpp: bool = False


SessionEvent = GroupChanged | OutcomeWanted | LiteTaken | OffsetsReset


class ForwardedRequest(NamedTuple):
    """Fields of a tool's request that are forwarded to the client with the broker's request."""

    group: str
    client_id: str
    fields: Mapping[str, str | int | bool]


class RunningWanted(NamedTuple):
    """Requests the client's running info: subscriptions, queues and times."""

    asked: ForwardedRequest


class HandlingWanted(NamedTuple):
    """Requests that the client consume one message directly; `record` is its bytes in the log."""

    asked: ForwardedRequest
    record: bytes


class OffsetsWanted(NamedTuple):
    """Requests the offsets of a topic that a member has consumed, committed or not."""

    group: str
    topic: str


class ReplyWanted(NamedTuple):
    """Pushes the reply to a request of the client."""

    push: PushReply
    body: bytes


ClientRequest = RunningWanted | HandlingWanted | OffsetsWanted | ReplyWanted


class Answer(NamedTuple):
    """A client's response to a request. `detail` is the response as it arrived, for the protocol server that forwards it."""

    is_ok: bool
    body: bytes = b""
    detail: object = None
