"""Bodies about group members: member lists, locks, assignments, pop requests, and offsets of queues."""

from __future__ import annotations

import base64
import binascii
import enum
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
from .config import (
    MAX_AGREED_IDS,
    MAX_AGREED_LISTS,
    MAX_ID_CHARS,
    MAX_LITE_SYNCS,
    MAX_SYNCED_LITE_TOPICS,
    MAX_TOPICS_ASKED,
)
from .headers import AgreeOnMembers
from .message import Receipt
from .names import Queue, Subscription

# ------------------------------------------------------------------------------
# Bodies of membership: locks, member lists, assignments, filters. Rocketlet's own fields are ignored by Apache's peers.


@dataclass(frozen=True, slots=True)
class LockRequest:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ.

    Rocketlet's own fields:
        handover: True if the lock is a lease, which ends when the client closes its connection, or when it is not renewed
            in time
        epochs: epoch of the lease of each queue
        offsets: offset of each queue to commit before the queue is unlocked, or when its lease is renewed
    """

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
    queues = tuple(map(queue_of, items))
    epochs = {queue: item.epoch for queue, item in zip(queues, items, strict=True) if item.epoch is not None}
    offsets = {queue: item.offset for queue, item in zip(queues, items, strict=True) if item.offset is not None}
    return LockRequest(data.client_id, data.consumer_group, queues, bool(data.handover), epochs, offsets)


def encode_locked(epochs: Mapping[Queue, int], offsets: Mapping[Queue, int] | None = None) -> bytes:
    """Return the response to LOCK_BATCH_MQ, with the locked queues; or a Rocketlet broker's response to
    UNLOCK_BATCH_MQ, with the unlocked queues.

    Rocketlet's own fields, which other clients ignore, are the epochs of the leases, and offsets: the group's committed
    offset of a newly locked queue, or the offset that this request has committed.
    """
    return encode_json(LockAnswerShape(locked_items(epochs, offsets or {})))


def locked_items(epochs: Mapping[Queue, int], offsets: Mapping[Queue, int]) -> list[LockedShape]:
    """Return the items of a response with locked queues, of which `encode_locked_items` makes the body: a part at a time,
    because 8,192 items take milliseconds."""
    return [LockedShape(*queue, epoch, offsets.get(queue)) for queue, epoch in epochs.items()]


def encode_locked_items(items: list[LockedShape]) -> bytes:
    return encode_json(LockAnswerShape(items))


@answers("lock answer", LockAnswerShape)
def decode_locked(data: LockAnswerShape) -> dict[Queue, int]:
    """Return the locked queues with the epochs of their leases; 0 from an Apache broker, which has no epochs."""
    return {queue_of(item): item.epoch or 0 for item in data.locked or ()}


@answers("lock answer", LockAnswerShape)
def decode_committed(data: LockAnswerShape) -> dict[Queue, int]:
    """Return the offsets in the response, of the queues that have one; see `encode_locked`."""
    return {queue_of(item): item.offset for item in data.locked or () if item.offset is not None}


def encode_members(client_ids: Iterable[str]) -> bytes:
    """Return the response to GET_CONSUMER_LIST_BY_GROUP."""
    return orjson.dumps({"consumerIdList": list(client_ids)})


class MemberListShape(Shape):
    consumer_id_list: list[str] | None = None


@answers("consumer list", MemberListShape)
def decode_members(data: MemberListShape) -> list[str]:
    return data.consumer_id_list or []


class BrokerShare(NamedTuple):
    """The queues of a topic that a broker has allocated to one member.

    Attributes:
        members: number of members of the topic
        queues: number of queues of the topic
        numbers: ids of the member's queues by broker name
    """

    members: Int
    queues: Int
    numbers: dict[str, QueueList[QueueCount]]

    def of(self, topic: str) -> list[Queue]:
        """Return the member's queues."""
        return sorted(Queue(topic, name, number) for name, numbers in self.numbers.items() for number in numbers)


def encode_shares(shares: Mapping[str, BrokerShare]) -> str:
    """Return one member's shares by topic as JSON."""
    return encode_json(shares).decode()


@reads("shares", dict[str, BrokerShare])
def decode_shares(data: dict[str, BrokerShare]) -> dict[str, BrokerShare]:
    return data


def encode_seen_queues(counts: Mapping[str, int]) -> str:
    """Return the number of queues that members see on each broker as JSON."""
    return orjson.dumps(counts).decode()


@reads("seen queues", dict[str, QueueCount])
def decode_seen_queues(data: dict[str, int]) -> dict[str, int]:
    return data


class Place(NamedTuple):
    """A member's position in a topic: its index among the members, -1 if it is none of them; the number of members; and
    the number of queues that the members see."""

    position: Int
    members: Int
    queues: Int


def encode_places(places: Mapping[str, Place]) -> str:
    """Return one member's places by topic as JSON."""
    return encode_json(places).decode()


@reads("places", dict[str, Place])
def decode_places(data: dict[str, Place]) -> dict[str, Place]:
    return data


class AssignmentRequest(Shape):
    """QUERY_ASSIGNMENT: a member requests its share of a topic, allocated by a strategy."""

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
    """CHECK_CLIENT_CONFIG: a client queries whether the broker can filter by its subscription."""

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
# AGREE_ON_MEMBERS, Rocketlet's own request: two brokers synchronize their state of a group that has foreign members on
# both.
#
# Fields of its header:
# - `number` and the field after it: numbers of the sender's last message with news, and of the receiver's last message
#   that the sender has received
# - `asks`: True if the receiver must respond with a message of its own
# - `digest`: digest of the members of the topics that both brokers have
# - `token`: a secret between the two brokers. The receiver sends it to the sender's registered address with
#   CONFIRM_WORD, to verify that the sender has sent the message.


Ids = Annotated[list[Text], Meta(max_length=MAX_AGREED_IDS)]
Digest = Annotated[str, Meta(max_length=MAX_ID_CHARS)]


@dataclass(frozen=True, slots=True)
class AgreedMembers:
    """Body of AGREE_ON_MEMBERS.

    Attributes:
        waiting: client ids that are still being drained
        given: clients that received a member list since the last message, by the digest of the list
    """

    waiting: frozenset[str] = frozenset()
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class PeerMessage(NamedTuple):
    """A message about a group that one broker sends to another broker."""

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
# JSON bodies of POP requests (5.x).


PULL: Final = "PULL"
POP: Final = "POP"
SHARED_OWNER: Final = "(shared)"
"""In GET_GROUP_HISTORY: the owner of queues whose messages are shared by all clients of the group."""
MAX_BITS: Final = 4096  # maximum messages in one entry, and in one request


class BatchAck(NamedTuple):
    """Acknowledged messages of one pop request, with their queue offsets."""

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
    revive_qid: Any = wire(name="rq", default=0)  # written for Apache's brokers; not read here


class BatchAcksShape(Shape):
    acks: list[BatchAckShape] | None = None
    broker_name: Text = ""


@reads("batch acknowledgement", BatchAcksShape)
def decode_batch_acks(data: BatchAcksShape) -> list[BatchAck]:
    """Decode BATCH_ACK_MESSAGE. Raises BodyError, including for more than 4096 messages."""
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
    """Return the body of BATCH_ACK_MESSAGE.

    Args:
        broker_name: name of the broker
        group: name of the group
        acks: for each pop request, the topic, a receipt, and the acknowledged offsets, none of which may be below the
            receipt's start offset
    """
    entries = [
        BatchAckShape(
            group, topic, of.queue_id, of.start_offset, of.pop_ms, of.invisible_ms, of.mark,
            base64.b64encode(_bit_set(offset - of.start_offset for offset in offsets)).decode(), of.revive_qid,
        )
        for topic, of, offsets in acks
    ]  # fmt: skip
    return encode_json(BatchAcksShape(entries, broker_name))


def _bit_set(numbers: Iterable[int]) -> bytes:
    """Return bytes like java.util.BitSet.toByteArray."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _bits(bits: str | list[int]) -> list[int]:
    """Return the numbers of the bits that are set; bit 0 is the lowest bit of the first byte. fastjson writes bytes as
    base64."""
    if isinstance(bits, str):
        if len(bits) > MAX_BITS:
            raise BodyError("a bit set is too long")
        try:
            data = base64.b64decode(bits, validate=True)
        except binascii.Error as error:
            raise BodyError(f"a bit set is not base64: {error}") from None
    else:
        data = bytes(value & 0xFF for value in bits[:MAX_BITS])  # Java's bytes are signed
    return [8 * at + bit for at, value in enumerate(data) if value for bit in range(8) if value >> bit & 1]


# ------------------------------------------------------------------------------
# The body of LITE_SUBSCRIPTION_CTL (5.5): the lite topics that clients are subscribed to (LiteSubscriptionDTO, OffsetOption).


class LiteAction(enum.Enum):
    """How a client changes the set of lite topics that it is subscribed to. The values are those of gRPC."""

    PARTIAL_ADD = 0
    """Add lite topics. Only here an offset option counts."""
    PARTIAL_REMOVE = 1
    """Remove lite topics."""
    COMPLETE_ADD = 2
    """Replace the set. Clients repeat that every 30 s."""
    COMPLETE_REMOVE = 3
    """Forget the client."""


class OffsetPolicy(enum.Enum):
    """Where a group continues in a lite topic. The values of the first three are those of both protocols."""

    LAST = 0
    """At its committed offset, or at the first message."""
    MIN = 1
    """At the first message."""
    MAX = 2
    """After the last message."""
    OFFSET = 3
    """At an offset."""
    TAIL = 4
    """This many messages before the committed offset."""
    TIMESTAMP = 5
    """At the first message that was stored at a time in ms, or later."""


class LiteOffset(NamedTuple):
    """Where a group continues in the lite topics that a client adds. `value` is the offset, number or time of the policy;
    other policies ignore it."""

    policy: OffsetPolicy
    value: int = 0


class LiteSubscription(NamedTuple):
    """A change of one client's subscriptions to lite topics of a parent topic."""

    action: LiteAction
    client_id: str
    group: str
    topic: str
    names: tuple[str, ...] = ()
    offset: LiteOffset | None = None


_POLICY: Final = "POLICY"
_OFFSET_TYPES: Final = {
    "OFFSET": OffsetPolicy.OFFSET,
    "TAIL_N": OffsetPolicy.TAIL,
    "TIMESTAMP": OffsetPolicy.TIMESTAMP,
}
_OFFSET_NAMES: Final = {policy: name for name, policy in _OFFSET_TYPES.items()}
_POLICIES: Final = {policy.value: policy for policy in (OffsetPolicy.LAST, OffsetPolicy.MIN, OffsetPolicy.MAX)}


class LiteOffsetShape(Shape):
    type: Text = _POLICY
    value: Long = 0


class LiteSubscriptionShape(Shape):
    action: Text
    client_id: Text
    group: Text
    topic: Text
    lite_topic_set: Annotated[list[Text], Meta(max_length=MAX_SYNCED_LITE_TOPICS)] | None = None
    version: Long = 0
    offset_option: LiteOffsetShape | None = None


class LiteSubscriptionsShape(Shape):
    subscription_set: Annotated[list[LiteSubscriptionShape], Meta(max_length=MAX_LITE_SYNCS)] | None = None


def encode_lite_subscription(change: LiteSubscription) -> bytes:
    option = None
    if change.offset is not None:
        policy, value = change.offset
        name = _OFFSET_NAMES.get(policy)
        option = LiteOffsetShape(_POLICY, policy.value) if name is None else LiteOffsetShape(name, value)
    item = LiteSubscriptionShape(
        change.action.name, change.client_id, change.group, change.topic, list(change.names), 0, option
    )
    return encode_json(LiteSubscriptionsShape([item]))


@reads("lite subscriptions", LiteSubscriptionsShape)
def decode_lite_subscriptions(data: LiteSubscriptionsShape) -> list[LiteSubscription]:
    """Decode LITE_SUBSCRIPTION_CTL. Raises BodyError, including for more lite topics than one request may have."""
    found: list[LiteSubscription] = []
    count = 0
    for item in data.subscription_set or ():
        action = LiteAction.__members__.get(item.action)
        if action is None:
            known = ", ".join(LiteAction.__members__)
            raise BodyError(f"action: got {item.action[:40]!r}; expected one of {known}")
        names = tuple(dict.fromkeys(item.lite_topic_set or ()))
        count += len(names)
        if count > MAX_SYNCED_LITE_TOPICS:
            raise BodyError(f"the request has more than {MAX_SYNCED_LITE_TOPICS} lite topics")
        offset = _lite_offset(item.offset_option) if item.offset_option is not None else None
        found.append(LiteSubscription(action, item.client_id, item.group, item.topic, names, offset))
    if not found:  # a request without a subscription would need no permission
        raise BodyError("subscriptionSet: got no subscription; expected at least one")
    return found


def _lite_offset(option: LiteOffsetShape) -> LiteOffset:
    if option.type == _POLICY:
        return LiteOffset(_POLICIES.get(option.value, OffsetPolicy.LAST))
    policy = _OFFSET_TYPES.get(option.type)
    if policy is None:
        known = ", ".join((_POLICY, *_OFFSET_TYPES))
        raise BodyError(f"offsetOption: got the type {option.type[:40]!r}; expected one of {known}")
    return LiteOffset(policy, option.value)


# ------------------------------------------------------------------------------
# Request modes: whether a group pulls a topic's queues or pops its messages.


class RequestMode(NamedTuple):
    """How the members of a group receive a topic's messages.

    Attributes:
        mode: `PULL` or `POP`
        share_queues: Apache's number of further members whose queues a member also pops from. A Rocketlet broker stores
            it without using it: every member pops from all queues.
    """

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
    """Decode SET_MESSAGE_REQUEST_MODE."""
    return _mode(data.topic, data.consumer_group, data.mode, data.pop_share_queue_num)


def _mode(topic: str, group: str, mode: str | int | None, share_queues: int) -> RequestMode:
    named = {PULL: PULL, POP: POP, 0: PULL, 1: POP, None: PULL}.get(mode)
    if named is None:
        raise BodyError(f"the mode {str(mode)[:MAX_ID_CHARS]!r} is neither PULL nor POP")
    return RequestMode(topic, group, named, share_queues)


def encode_request_modes(modes: Iterable[RequestMode]) -> bytes:
    """Return the response to GET_ALL_MESSAGE_REQUEST_MODE."""
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
    """Return the response to QUERY_ASSIGNMENT in POP mode: queue id -1, which stands for any queue, of each broker."""
    return encode_assignment((Queue(topic, name, -1) for name in broker_names), POP)


# ------------------------------------------------------------------------------
# GET_QUEUE_OFFSETS, Rocketlet's own request: the first and last offsets of all queues of some topics, in one response
# per broker.
#
# Apache's request for these offsets, GET_TOPIC_STATS_INFO, is for one topic. The response of GET_TOPIC_STATS_INFO is
# many times longer, and does not distinguish a topic from a later one with the same name.


# remark of the response to a pull that names another identity than the topic's
TOPIC_RECREATED: Final = "TOPIC_MADE_ANEW"


class TopicExtent(NamedTuple):
    """Offsets of a topic on one broker.

    Attributes:
        identity: an id that changes whenever the topic is created, including on a new disk
        rewinds: number of times that the requesting group's offset was decreased in one of the queues
        begins: first offset of each queue, by queue id
        ends: offset after the last message of each queue, by queue id
    """

    identity: Text
    rewinds: Long
    begins: tuple[Long, ...]
    ends: tuple[Long, ...]


def encode_topics(topics: Iterable[str]) -> bytes:
    """Return the body of the request."""
    return orjson.dumps(list(topics))


@reads("topics", Annotated[list[Text], Meta(max_length=MAX_TOPICS_ASKED)])
def decode_topics(data: list[str]) -> list[str]:
    return data


def encode_extents(extents: Mapping[str, TopicExtent]) -> bytes:
    """Return the body of the response."""
    return encode_json(extents)


@answers("queue offsets", dict[Text, TopicExtent])
def decode_extents(data: dict[str, TopicExtent]) -> dict[str, TopicExtent]:
    for extent in data.values():
        if len(extent.begins) != len(extent.ends):
            raise ValueError(
                f"got {len(extent.begins)} first offsets and {len(extent.ends)} last offsets; expected equal numbers"
            )
    return data
