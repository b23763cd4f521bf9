"""The state's events for clients, and its questions. Each door writes them in its own protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...protocol.group_bodies import BrokerShare, Place
from ...protocol.headers import PushReply
from ...protocol.message import Record
from ...protocol.queue import Queue


class GroupChanged(NamedTuple):
    """The group of a member is another than before, or `topic` has other queues. By topic: which of the members the
    receiver is, or its share where the broker shares out, so that it need not ask. Where there are none for it any more,
    its earlier shares are over."""

    group: str
    topic: str | None = None
    places: Mapping[str, Place] | None = None
    shares: Mapping[str, BrokerShare] | None = None


class OutcomeWanted(NamedTuple):
    """A half message whose outcome its producer has not said. checks: how often it was asked for, with this time."""

    half: Record
    checks: int


class OffsetsReset(NamedTuple):
    """An administrator has set the offsets of a group in a topic. `is_for_cpp`: the one who asked reads a list of queues."""

    topic: str
    group: str
    timestamp_ms: int
    is_force: bool
    offsets: Mapping[Queue, int]
    is_for_cpp: bool = False


Event = GroupChanged | OutcomeWanted | OffsetsReset


class Asked(NamedTuple):
    """Fields of the request that a tool has sent, which are handed on with a question."""

    group: str
    client_id: str
    fields: Mapping[str, str | int | bool]


class RunningWanted(NamedTuple):
    """How the client is running: its subscriptions, queues and times."""

    asked: Asked


class HandlingWanted(NamedTuple):
    """The client is to handle a message now, whatever its offset; the record as it lies in the log."""

    asked: Asked
    record: bytes


class OffsetsWanted(NamedTuple):
    """The offsets of a topic that are in the hands of a member."""

    group: str
    topic: str


class ReplyWanted(NamedTuple):
    """The client is to take the reply to a request of its own."""

    push: PushReply
    body: bytes


Question = RunningWanted | HandlingWanted | OffsetsWanted | ReplyWanted


class Answer(NamedTuple):
    """A client's answer to a question. `detail` is for the door that passes it on: the answer as it came."""

    is_ok: bool
    body: bytes = b""
    detail: object = None
