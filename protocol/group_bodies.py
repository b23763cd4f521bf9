"""Bodies about group members: member lists, locks, assignments, pop requests, and extents of queues."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import orjson
from msgspec import Meta
from msgspec import field as wire

from .bodies import (
    MESSAGE_MODELS,
    BodyError,
    Enum,
    Expression,
    Int,
    Long,
    QueueCount,
    QueueList,
    QueueShape,
    Shape,
    Text,
    answers,
    encode_json,
    encode_subscription,
    queue_json,
    queue_of,
    reads,
)
from .config import MAX_AGREED_IDS, MAX_AGREED_LISTS, MAX_ID_CHARS, MAX_TOPICS_ASKED
from .headers import AgreeOnMembers
from .message import Receipt
from .names import Queue, Subscription

# ------------------------------------------------------------------------------
# The bodies of membership: locks, member lists, assignments, filters; fields that are ours are ignored by others.


@dataclass(frozen=True, slots=True)
class LockRequest:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. The rest is ours. `handover`: the lock is ownership, freed when the socket closes.
    `offsets`: committed before a queue is unlocked, or while it is renewed."""

    client_id: str
    group: str
    queues: tuple[Queue, ...]
    handover: bool = False
    epochs: Mapping[Queue, int] = field(default_factory=dict)
    offsets: Mapping[Queue, int] = field(default_factory=dict)


class LockedShape(QueueShape, omit_defaults=True):
    epoch: Long | None = None
    offset: Long | None = None


class LockShape(Shape):
    client_id: Text
    consumer_group: Text
    mq_set: QueueList[LockedShape] | None = None
    handover: bool | None = None


class LockAnswerShape(Shape):
    locked: list[LockedShape] | None = wire(name="lockOKMQSet", default=None)


def encode_lock_request(request: LockRequest) -> bytes:
    locked = [LockedShape(*queue, request.epochs.get(queue), request.offsets.get(queue)) for queue in request.queues]
    return encode_json(LockShape(request.client_id, request.group, locked, request.handover))


@reads("lock", LockShape)
def decode_lock_request(data: LockShape) -> LockRequest:
    items = data.mq_set or ()
    return LockRequest(
        data.client_id,
        data.consumer_group,
        tuple(map(queue_of, items)),
        bool(data.handover),
        {queue_of(item): item.epoch for item in items if item.epoch is not None},
        {queue_of(item): item.offset for item in items if item.offset is not None},
    )


def encode_locked(epochs: Mapping[Queue, int], offsets: Mapping[Queue, int] | None = None) -> bytes:
    """LOCK_BATCH_MQ's answer: the queues that were locked. Their epochs are ours, and so is how far the group has committed
    those that were newly acquired, or what was committed by this request; others ignore them. UNLOCK_BATCH_MQ's from us: the
    queues that were unlocked."""
    known = offsets or {}
    locked = [LockedShape(*queue, epoch, known.get(queue)) for queue, epoch in epochs.items()]
    return encode_json(LockAnswerShape(locked))


@answers("lock answer", LockAnswerShape)
def decode_locked(data: LockAnswerShape) -> dict[Queue, int]:
    """The queues that were locked, with their epochs; 0 where the broker has none (Apache's)."""
    return {queue_of(item): item.epoch or 0 for item in data.locked or ()}


@answers("lock answer", LockAnswerShape)
def decode_committed(data: LockAnswerShape) -> dict[Queue, int]:
    """The group's offsets in queues that were locked, as far as the broker returns them."""
    return {queue_of(item): item.offset for item in data.locked or () if item.offset is not None}


def encode_members(client_ids: Iterable[str]) -> bytes:
    """GET_CONSUMER_LIST_BY_GROUP's answer."""
    return orjson.dumps({"consumerIdList": list(client_ids)})


class MemberListShape(Shape):
    consumer_id_list: list[str] | None = None


@answers("consumer list", MemberListShape)
def decode_members(data: MemberListShape) -> list[str]:
    return data.consumer_id_list or []


class BrokerShare(NamedTuple):
    """One member's queues of a topic, as a broker has shared them out: their numbers by broker, the number of queues, and the
    number of members."""

    members: Int
    queues: Int
    numbers: dict[str, QueueList[QueueCount]]

    def of(self, topic: str) -> list[Queue]:
        return sorted(Queue(topic, name, number) for name, numbers in self.numbers.items() for number in numbers)


def encode_shares(shares: Mapping[str, BrokerShare]) -> str:
    """One member's shares by topic."""
    return encode_json(shares).decode()


@reads("shares", dict[str, BrokerShare])
def decode_shares(data: dict[str, BrokerShare]) -> dict[str, BrokerShare]:
    return data


def encode_seen_queues(counts: Mapping[str, int]) -> str:
    """How many queues of a topic members see, by broker."""
    return orjson.dumps(counts).decode()


@reads("seen queues", dict[str, QueueCount])
def decode_seen_queues(data: dict[str, int]) -> dict[str, int]:
    return data


class Place(NamedTuple):
    """A member's position among those of a topic, -1 for none, how many they are, and how many queues they see in all."""

    position: Int
    members: Int
    queues: Int


def encode_places(places: Mapping[str, Place]) -> str:
    """One member's places by topic."""
    return encode_json(places).decode()


@reads("places", dict[str, Place])
def decode_places(data: dict[str, Place]) -> dict[str, Place]:
    return data


class AssignmentRequest(Shape):
    """QUERY_ASSIGNMENT: a member queries its share of a topic, by a strategy."""

    topic: Text
    group: Text = wire(name="consumerGroup")
    client_id: Text
    strategy_name: Text | None = None
    message_model: Enum | None = None

    @property
    def strategy(self) -> str:
        return self.strategy_name or "AVG"

    @property
    def is_broadcasting(self) -> bool:
        return MESSAGE_MODELS.get(self.message_model) == "BROADCASTING"


@reads("assignment request", AssignmentRequest)
def decode_assignment_request(data: AssignmentRequest) -> AssignmentRequest:
    return data


def encode_assignment(queues: Iterable[Queue], mode: str = "PULL") -> bytes:
    items = [{"attachments": {}, "messageQueue": queue_json(queue), "mode": mode} for queue in queues]
    return orjson.dumps({"messageQueueAssignments": items})


class FilterShape(Shape):
    sub_string: Expression | None = None
    expression_type: Text | None = None


class ClientCheck(Shape):
    """CHECK_CLIENT_CONFIG: a client asks if the broker can filter by its subscription."""

    client_id: Text
    group: Text
    subscription: FilterShape | None = wire(name="subscriptionData", default=None)


@reads("client check", ClientCheck)
def decode_client_check(data: ClientCheck) -> ClientCheck:
    return data


def encode_client_check(client_id: str, group: str, subscription: Subscription) -> bytes:
    value = {"clientId": client_id, "group": group, "subscriptionData": encode_subscription(subscription)}
    return orjson.dumps(value)


# ------------------------------------------------------------------------------
# AGREE_ON_MEMBERS, Rocketlet's own request: two brokers talk about a group that has foreign members on both.
#
# Its header has `number`: of the last word that said something new. `heard`: the number of the other's last word that
#     came.
# `asks`: this word is to be answered by one of the other's. `digest`: of the members of the topics that both have.
#     `token`:
# what only the two know, so that the other can ask with CONFIRM_WORD, at the registered address, whether this broker
#     said it.


Ids = Annotated[list[Text], Meta(max_length=MAX_AGREED_IDS)]
Digest = Annotated[str, Meta(max_length=MAX_ID_CHARS)]


@dataclass(frozen=True, slots=True)
class AgreedMembers:
    """The body. waiting: the client ids that are still drained. given: who was given the list of members with that digest,
    since the last word."""

    waiting: frozenset[str] = frozenset()
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Word(NamedTuple):
    """One message of a broker to another one about a group."""

    header: AgreeOnMembers
    members: AgreedMembers


def encode_agreed_members(members: AgreedMembers) -> bytes:
    return orjson.dumps({"waiting": sorted(members.waiting), "given": members.given})


class MembersShape(Shape):
    waiting: Ids
    given: Annotated[dict[Digest, Ids], Meta(max_length=MAX_AGREED_LISTS)]


@reads("members", MembersShape)
def decode_agreed_members(data: MembersShape) -> AgreedMembers:
    return AgreedMembers(frozenset(data.waiting), {digest: tuple(ids) for digest, ids in data.given.items()})


# ------------------------------------------------------------------------------
# The JSON bodies of messages that are shared (POP), 5.x's.


PULL: Final = "PULL"
POP: Final = "POP"
SHARED_OWNER: Final = "(shared)"
"""In GET_GROUP_HISTORY, our own: the owner of queues whose messages all clients of the group share."""
MAX_BITS: Final = 4096  # in one entry, as in one request


class BatchAck(NamedTuple):
    """Messages of one pop. offsets: in the queue."""

    group: str
    topic: str
    mark: str
    queue_id: int
    pop_ms: int
    invisible_ms: int
    offsets: tuple[int, ...]


class BatchAckShape(Shape):
    group: Text = wire(name="c")
    topic: Text = wire(name="t")
    queue_id: Int = wire(name="q")
    start_offset: Long = wire(name="so")
    pop_ms: Long = wire(name="pt")
    invisible_ms: Long = wire(name="it", default=0)
    mark: Text = wire(name="r", default="0")
    bits: str | list[int] = wire(name="b", default="")
    revive_qid: Any = wire(name="rq", default=0)  # written for Apache's brokers, and not read


class BatchAcksShape(Shape):
    acks: list[BatchAckShape] | None = None
    broker_name: Text = ""


@reads("batch acknowledgement", BatchAcksShape)
def decode_batch_acks(data: BatchAcksShape) -> list[BatchAck]:
    """BATCH_ACK_MESSAGE. Raises BodyError, also for more than 4096 messages."""
    found: list[BatchAck] = []
    count = 0
    for item in data.acks or ():
        offsets = tuple(item.start_offset + number for number in _bits(item.bits))
        count += len(offsets)
        if count > MAX_BITS:
            raise BodyError(f"more than {MAX_BITS} messages are acknowledged")
        found.append(
            BatchAck(item.group, item.topic, item.mark, item.queue_id, item.pop_ms, item.invisible_ms, offsets)
        )
    return found


def encode_batch_acks(broker_name: str, group: str, acks: Iterable[tuple[str, Receipt, Sequence[int]]]) -> bytes:
    """The body of acknowledgements: topics, each with a receipt of a pop and the offsets that are acknowledged, none below
    its start offset."""
    entries = [
        BatchAckShape(
            group, topic, of.queue_id, of.start_offset, of.pop_ms, of.invisible_ms, of.mark,
            base64.b64encode(_bit_set(offset - of.start_offset for offset in offsets)).decode(), of.revive_qid,
        )
        for topic, of, offsets in acks
    ]  # fmt: skip
    return encode_json(BatchAcksShape(entries, broker_name))


def _bit_set(numbers: Iterable[int]) -> bytes:
    """The bytes of java.util.BitSet.toByteArray."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _bits(bits: str | list[int]) -> list[int]:
    """The numbers of the bits that are set; the lowest of the first byte is 0. fastjson writes bytes as base64."""
    if isinstance(bits, str):
        if len(bits) > MAX_BITS:
            raise BodyError("a bit set is too long")
        try:
            data = base64.b64decode(bits, validate=True)
        except binascii.Error as error:
            raise BodyError(f"a bit set is no base64: {error}") from None
    else:
        data = bytes(value & 0xFF for value in bits[:MAX_BITS])  # Java's bytes have signs
    return [8 * at + bit for at, value in enumerate(data) if value for bit in range(8) if value >> bit & 1]


class RequestMode(NamedTuple):
    """How the members of a group get a topic's messages: `PULL` or `POP`. share_queues: that several members may pop from;
    below 1: all from all."""

    topic: str
    group: str
    mode: str = PULL
    share_queues: int = 0


class RequestModeShape(Shape):
    topic: Text
    consumer_group: Text
    mode: str | int | None = None
    pop_share_queue_num: Int = 0


@reads("request mode", RequestModeShape)
def decode_request_mode(data: RequestModeShape) -> RequestMode:
    """SET_MESSAGE_REQUEST_MODE."""
    return _mode(data.topic, data.consumer_group, data.mode, data.pop_share_queue_num)


def _mode(topic: str, group: str, mode: str | int | None, share_queues: int) -> RequestMode:
    named = {PULL: PULL, POP: POP, 0: PULL, 1: POP, None: PULL}.get(mode)
    if named is None:
        raise BodyError(f"the mode {str(mode)[:MAX_ID_CHARS]!r} is neither PULL nor POP")
    return RequestMode(topic, group, named, share_queues)


def encode_request_modes(modes: Iterable[RequestMode]) -> bytes:
    """The answer of GET_ALL_MESSAGE_REQUEST_MODE."""
    found: dict[str, dict[str, RequestModeShape]] = {}
    for mode in modes:
        found.setdefault(mode.topic, {})[mode.group] = RequestModeShape(*mode)
    return encode_json({"messageRequestModeMap": found})


@answers("request modes")
def decode_request_modes(data: dict[str, dict[str, dict[str, dict[str, str | int]]]]) -> list[RequestMode]:
    return [
        _mode(topic, group, item.get("mode"), int(item.get("popShareQueueNum", 0)))
        for topic, groups in data["messageRequestModeMap"].items()
        for group, item in groups.items()
    ]


def encode_pop_assignment(topic: str, broker_names: Iterable[str]) -> bytes:
    """The answer of QUERY_ASSIGNMENT where members pop: any queue of each broker."""
    return encode_assignment((Queue(topic, name, -1) for name in broker_names), POP)


# ------------------------------------------------------------------------------
# GET_QUEUE_OFFSETS, Rocketlet's own request: where all queues of some topics begin and end, in one answer per broker.
#
# Apache's answer to the same question, GET_TOPIC_STATS_INFO, is for one topic, many times longer, and does not show a
# topic from another one that was made later under its name.


MADE_ANEW: Final = "TOPIC_MADE_ANEW"  # the remark to a pull of another topic than the one whose identity it names


class TopicExtent(NamedTuple):
    """One topic on one broker. `begins` and `ends` have an offset per queue, by its number; an end is exclusive.

    identity: changes whenever the topic is created, on a new disk, too. rewinds: how often the offset of the asking group
    went back in one of the queues.
    """

    identity: Text
    rewinds: Long
    begins: tuple[Long, ...]
    ends: tuple[Long, ...]


def encode_topics(topics: Iterable[str]) -> bytes:
    """The request's body."""
    return orjson.dumps(list(topics))


@reads("topics", Annotated[list[Text], Meta(max_length=MAX_TOPICS_ASKED)])
def decode_topics(data: list[str]) -> list[str]:
    return data


def encode_extents(extents: Mapping[str, TopicExtent]) -> bytes:
    """The answer's body."""
    return encode_json(extents)


@answers("queue offsets", dict[Text, TopicExtent])
def decode_extents(data: dict[str, TopicExtent]) -> dict[str, TopicExtent]:
    for extent in data.values():
        if len(extent.begins) != len(extent.ends):
            raise ValueError(f"{len(extent.begins)} queues begin and {len(extent.ends)} end")
    return data
