"""Who may read a queue now: one question of pulls, held and repeated pulls, locks and commits. Asking has no effect."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from ...protocol.codes import PULL_SUBSCRIPTION, PULL_SUSPEND
from ...protocol.names import TOOLS_GROUP
from ..sessions.session import Session
from .group import NO_QUEUE, ConsumerGroup, GroupQueue
from .members import Member
from .owners import OwnerState
from .rates import TokenBucket
from .stages import QueueKey

# ------------------------------------------------------------------------------
# The question and its answers.
#
# A group's queue may be read by one client at a time, and several mechanisms decide by which: leases and locks, drains of
# foreign members, member lists, the guard of a reader, pools of clients that pop. `may_read` is the only place that combines
# them. What a request shows (progress, a claim, a contact) is recorded before, by the part that keeps it (`observe_pull`).
#
# Tools, broadcasting members, and readers that assign queues to themselves own nothing. A pull without PULL_SUSPEND is one of
# theirs: nothing but a pool stops it, and it never waits.


class ReadKind(Enum):
    PULL = auto()
    """A pull, before it is answered or held."""
    HELD = auto()
    """A pull that waited for a message, before it is answered."""
    REPEATED = auto()
    """A pull that is to be repeated without these checks, for as long as versions are the same."""
    LEASE = auto()
    """A lock of a Rocketlet member or of a pool, which is not held yet."""
    LOCK = auto()
    """A lock of one of Apache's clients, which is not held yet."""
    RENEWAL = auto()
    """The renewal of a lock of one of Apache's clients."""
    COMMIT = auto()
    """A commit that may be that of a tool."""
    MEMBER_COMMIT = auto()
    """A commit with a pull, or a one-way request, as members make them."""


class Read(NamedTuple):
    """What a client wants with a queue of a group.

    Attributes:
        key: topic and queue id.
        flags: the flags of a pull.
        offset: the offset of a pull or commit.
        epoch: the epoch that a commit contains; None without one.
        bucket: the tokens for the messages of a pull; None for a group without a rate.
    """

    session: Session
    group: ConsumerGroup
    key: QueueKey
    kind: ReadKind
    flags: int = 0
    offset: int = 0
    epoch: int | None = None
    bucket: TokenBucket | None = None


class WaitReason(Enum):
    """What a read waits for. A pull gets an empty response in the end, unless the comment says that it is retried."""

    HEARTBEAT = auto()
    """The client says by no heartbeat who it is, and another member may own the queue; a pull is refused for that."""
    OWN_DRAIN = auto()
    """The queue moves away from this reader."""
    OWNER = auto()
    """The member claims the queue of another owner, until the queue is its own."""
    LEASE = auto()
    """A Rocketlet member or the clients that pop own the queue."""
    DRAIN = auto()
    """The queue moves away from another reader; the pull is retried when that one is done."""
    READER = auto()
    """Another client reads the queue, and does not lock; the pull is retried when that one is done."""
    RATE = auto()
    """The group has received as many messages as its rate allows; the pull is retried when there is a token."""


class Allow(NamedTuple):
    """The read may happen."""


class Wait(NamedTuple):
    """The read may happen later. A lock is refused meanwhile, and a held pull gets an empty response."""

    until: WaitReason


class Refuse(NamedTuple):
    """The read may not happen, for this reason."""

    reason: str


class MoveTo(NamedTuple):
    """The reader must continue at another offset.

    Attributes:
        is_lost: True if the end of the queue was lost, so that the reader's offset is beyond it; False if another member has
            read the queue up to this offset.
    """

    offset: int
    is_lost: bool = False


Verdict = Allow | Wait | Refuse | MoveTo
ALLOWED: Final = Allow()
_APACHE_LOCKS: Final = (ReadKind.LOCK, ReadKind.RENEWAL)
_COMMITS: Final = (ReadKind.COMMIT, ReadKind.MEMBER_COMMIT)


def may_read(read: Read, now_s: float) -> Verdict:
    """Return whether a client may read a queue now."""
    if read.kind in _COMMITS:
        return _may_commit(read, now_s)
    if read.kind is ReadKind.LEASE:  # the most frequent lock: a request may have 8,192 queues
        group, (topic, queue_id) = read.group, read.key
        # a foreign member still handles messages of it; the group is notified when it does not
        if (group.foreign or group.drain is not None) and group.is_drained(topic, queue_id):
            return Wait(WaitReason.DRAIN)
        return Wait(WaitReason.LEASE) if group.pools and group.is_apart(topic, now_s) else ALLOWED
    if read.kind in _APACHE_LOCKS:
        return _may_lock(read, now_s)
    if read.group.pools and (fault := _pool_fault(read, now_s)) is not None:
        return Refuse(fault)
    return _may_pull(read, now_s) if read.flags & PULL_SUSPEND else ALLOWED


def is_lasting(read: Read) -> bool:
    """Return True if the answer to an allowed pull stays the same until the versions of group and queue change: it depends on
    no time, and what the client's next pulls show need not be recorded."""
    group, queue = read.group, read.group.queue(*read.key)
    if group.settings is not None and group.settings.has_rate:
        return False
    if queue is NO_QUEUE or queue.contest is not None or queue.former_end is not None:
        return False
    if queue.owner.state is OwnerState.AWAITED:  # each pull renews the reservation
        return False
    return read.key[0] not in group.pools and not group.is_moving(read.session) and not _has_ahead(read)


def _has_ahead(read: Read) -> bool:
    return read.group.finished_ahead(*read.key) is not None


# Pulls


def _may_pull(read: Read, now_s: float) -> Verdict:
    session, group, key = read.session, read.group, read.key
    queue = group.queue(*key)
    if session not in group.members and _needs_heartbeat(read, queue):
        return Wait(WaitReason.HEARTBEAT)
    if is_moving_away(group, session, key):
        return Wait(WaitReason.OWN_DRAIN)
    if group.has_bound_members and group.is_owned_by_other(session, *key, now_s):
        return Wait(WaitReason.OWNER)
    if queue.owner.holder is not None and _is_leased_to_another(session, queue):
        return Wait(WaitReason.LEASE)
    if group.drain is not None and is_gated(group, session, key):
        return Wait(WaitReason.DRAIN)
    if queue.reader not in (None, session) and must_wait_for_reader(session, queue):
        return Wait(WaitReason.READER)
    committed = _overtaken_at(read, now_s)
    if committed is not None:
        return MoveTo(committed)
    end = queue.former_end
    if end is not None and read.offset > end and queue.owner.is_leased_to(session):
        # Otherwise its offset would become valid as new messages are stored, and the member would never get those
        return MoveTo(end, is_lost=True)
    if read.bucket is not None and not read.bucket.available(now_s):
        return Wait(WaitReason.RATE)
    return ALLOWED


def _needs_heartbeat(read: Read, queue: GroupQueue) -> bool:
    """Return True if a client that is no member must send a heartbeat, because another member may own the queue by now.
    Without one, only a push consumer pulls without a subscription. Apache's broker uses the subscription of any member for it
    (ConsumerManager.findSubscriptionData)."""
    if read.flags & PULL_SUBSCRIPTION:
        return False
    return queue.owner.last_reader_id is not None or queue.owner.is_leased_to_another(read.session)


def is_moving_away(group: ConsumerGroup, session: Session, key: QueueKey) -> bool:
    """Return True if a queue moves away from its reader, which gets nothing more. A member with a list of itself alone pulls
    until it has handled everything; only then its pulls are held."""
    drain = group.drain
    if drain is None or session not in drain.moving.get(key, ()):
        return False
    return key in drain.waiting.get(session, ()) or not group.is_alone(session)


def is_gated(group: ConsumerGroup, session: Session, key: QueueKey) -> bool:
    """Return True if a pull is of a queue's next reader, which waits until the earlier one is done; of a member that claims
    queues by a list from before a restart, while their owners are not known; or of a member that claims what its owner reads,
    by a list that a peer has not reported yet."""
    drain = group.drain
    if drain is None or session not in group.foreign:
        return False
    is_unknown = drain.is_finding and session not in group.issued
    if drain.has(key) or (is_unknown and group.queue(*key).reader is not session):
        return True
    is_own = group.foreign[session].client_id == group.owner_of(*key)
    return not is_own and group.is_read_by_its_owner(*key)


def must_wait_for_reader(session: Session, queue: GroupQueue) -> bool:
    """Return True if a pull must wait for the queue's reader, which does not lock (`ReaderGuard`)."""
    reader = queue.reader
    if reader is None or reader is session or not is_guarded(queue, reader):
        return False
    return shares_without_lock(queue.group, session) and not queue.owner.is_held_by(session)


def is_guarded(queue: GroupQueue, reader: Session) -> bool:
    """Return True if other clients wait for this reader: for Apache's push consumers, and for other clients that have
    committed offsets of the queue here. A client that keeps its offsets elsewhere would never finish."""
    group = queue.group
    if group.name == TOOLS_GROUP or not shares_without_lock(group, reader):
        return False
    return reader in group.foreign or (queue.reader is reader and queue.has_committed)


def shares_without_lock(group: ConsumerGroup, session: Session) -> bool:
    """Return False for broadcasting members, which each read all queues, and for Rocketlet members, which lock queues.
    Return True for other members and for clients that are no members."""
    member = group.members.get(session)
    return member is None or (not member.data.strategy and member.data.message_model == "CLUSTERING")


def _is_leased_to_another(session: Session, queue: GroupQueue) -> bool:
    """Return True if a Rocketlet member or the pop pool owns the queue, and this client would read it beside the
    owner. Foreign members notice changes of the group late. A client without a heartbeat may have been such a member
    before it lost its connection. Rocketlet members lock a queue before they pull it, and broadcasting members share
    no queues."""
    return queue.owner.is_leased_to_another(session) and shares_without_lock(queue.group, session)


def _overtaken_at(read: Read, now_s: float) -> int | None:
    """Return the committed offset at which a foreign member must continue, if another member has read the queue since it
    loaded its offset; None otherwise."""
    session, group, key = read.session, read.group, read.key
    committed = group.offset(*key)
    if committed is None or read.offset >= committed:
        return None
    if group.is_behind_owner(*key, read.offset):
        member = group.members.get(session)
        # others may read from any offset
        is_push = member.is_foreign if member is not None else not read.flags & PULL_SUBSCRIPTION
        return committed if is_push else None
    return committed if group.is_new_reader(session, *key, now_s) else None


# Clients that pop


def shares_queues(member: Member) -> bool:
    """Return True if a member pulls, and neither broadcasts nor assigns queues to itself."""
    is_ours = bool(member.data.strategy) and member.data.message_model == "CLUSTERING"
    return not member.pops and (is_ours or member.is_foreign)


def _pool_fault(read: Read, now_s: float) -> str | None:
    """Return why a client may not pull a topic that clients pop; None if it may, because the topic is divided."""
    pool = read.group.pools.get(read.key[0])
    if pool is None or not (pool.is_divided or pool.is_used(now_s)):
        return None
    member = read.group.members.get(read.session)
    if pool.is_divided and (member is None or shares_queues(member)):
        return None
    return f"clients of the group {read.group.name} pop {read.key[0]}; members that share no queues need a group of their own"


# Locks


def _may_lock(read: Read, now_s: float) -> Verdict:
    session, group = read.session, read.group
    if not group.is_owned_by_other(session, *read.key, now_s):
        return ALLOWED
    if read.kind is ReadKind.RENEWAL and group.drain is not None and read.key in group.drain.waiting.get(session, ()):
        return ALLOWED  # its handlers run, and are waited for
    return Wait(WaitReason.OWNER)


# Commits


def _may_commit(read: Read, now_s: float) -> Verdict:
    """Return whether a client may commit an offset of the queue. Members commit with pulls or one-way requests, which
    distinguishes them from tools until a restarted broker has their heartbeats."""
    session, group, key, epoch = read.session, read.group, read.key, read.epoch
    queue = group.queues.get(key, NO_QUEUE)
    may_be_tool = read.kind is ReadKind.COMMIT and session not in group.members
    if group.pools and not may_be_tool and group.is_apart(key[0], now_s):
        return Refuse(
            f"clients of the group {group.name} pop {key[0]}, and only their acknowledgements move its offset"
        )
    if queue.owner.holder is not None or epoch is not None:
        fault = queue.commit_fault(session, key, epoch)
        if fault is not None:
            return Refuse(fault)
    if group.has_bound_members and _is_bystander(read, now_s):
        return Refuse(f"{key[0]}:{key[1]} has another owner, and this member does not read it")
    is_ours = session in group.members and session not in group.foreign
    if may_be_tool or is_ours or read.offset >= (group.offset(*key) or 0):
        return ALLOWED
    return _may_go_back(read, queue)


def _is_bystander(read: Read, now_s: float) -> bool:
    """Return True if a foreign member claims a queue of another owner, and has no message of it in its handlers."""
    session, group, key = read.session, read.group, read.key
    return group.is_owned_by_other(session, *key, now_s) and group.queue(*key).reader is not session


def _may_go_back(read: Read, queue: GroupQueue) -> Verdict:
    """Return whether a foreign member may commit a lower offset, or a client that commits like a member and has sent no
    heartbeat.

    Only the current reader may commit a lower offset. Members that are not the current reader may have queried the
    offset before another reader made progress, and commit it when they drop the queue. Administrators are not
    members, and may reset offsets.
    """
    group, (topic, queue_id), offset = read.group, read.key, read.offset
    if group.is_behind_owner(topic, queue_id, offset):
        return Refuse(f"{offset} is lower than the offset that the last owner of {topic}:{queue_id} has committed")
    if queue.reader is not read.session:
        committed = f"the committed offset {group.offset(topic, queue_id)} of {topic}:{queue_id}"
        return Refuse(f"{offset} is lower than {committed}, and this member does not read the queue")
    return ALLOWED
