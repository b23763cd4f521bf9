"""The findings of `rocketlet doctor` about one group, from two observations that are some seconds apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal, NamedTuple

import msgspec

from ...protocol import names
from ...protocol.admin_bodies import QueueProgress, Running, RunningHandler
from ...protocol.group_bodies import SHARED_OWNER
from ...protocol.names import Queue, counted
from ..config import (
    LEAST_LAG,
    OLDEST_VERSION,
    REASON_CHARS,
    SHORT_LAG_S,
)
from .admin_client import Group, LiteGroup, Topic, are_broadcasting

# A committed offset that does not change is no proof of a stuck queue: by default members commit every 5 s, a handler may run
# for long, and messages that do not match the filter are passed over only when the held pull returns. A queue is stuck if a
# message that matches the owner's filter has waited for long.


class Harm(IntEnum):
    """The severity of a finding, worst first."""

    LOSS = 0  # messages are lost, or will be lost soon
    STANDS = 1  # messages wait without progress; their handlers may be running
    TWICE = 2  # messages are handled more than once
    SLOW = 3  # messages are handled late
    RISK = 4  # messages are not affected yet


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A finding about a group, topic, broker or the cluster.

    Attributes:
        kind: a stable name of the kind of finding, for programs.
        subject: the name of the group, topic or broker; `cluster` for a finding about the cluster.
        text: the problem, for users.
        cure: how to fix it, for users.
        about: the type of the subject.
    """

    harm: Harm
    kind: str
    subject: str
    text: str
    cure: str
    about: Literal["group", "topic", "broker", "cluster"] = "group"


HEADINGS: Final[Mapping[Harm, str]] = {
    Harm.LOSS: "messages are lost or dead-lettered",
    Harm.STANDS: "messages wait without progress",
    Harm.TWICE: "messages are handled more than once",
    Harm.SLOW: "messages are handled late",
    Harm.RISK: "may cause problems later",
}
"""The heading of the findings of each severity, worst first."""


class BlockedMessage(NamedTuple):
    """The next message of a queue that matches its owner's filter.

    Attributes:
        seconds: the time for which the message has waited.
        message_id, offset: the id and offset of the message; empty and -1 if they are unknown.
        attempt: the number of the current attempt to handle it, from 1.
        reason: the reason why the previous attempt failed, if known.
        member: the client id of the member whose handler is named by `handler`.
        handler: the call that handles the message, or the longest one of the queue's owner; None if none is known.
    """

    seconds: float
    message_id: str = ""
    offset: int = -1
    attempt: int = 1
    reason: str = ""
    member: str = ""
    handler: RunningHandler | None = None

    def named(self, queue: Queue) -> str:
        """Return a text about the message for a finding; an empty one if the message is unknown."""
        if self.offset < 0:
            return ""
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        reason = f"; the attempt before failed: {self.reason[:REASON_CHARS]}" if self.reason else ""
        oldest = f"; the oldest is message {self.message_id} at offset {self.offset} of {queue}{attempt}{reason}"
        handler = self.handler
        if handler is None:
            return oldest
        place = f", now at {handler.place}" if handler.stack else ""
        if handler.message_id == self.message_id:
            return f"{oldest}; its handler at {self.member} has run for {handler.age_ms / 1000:.0f} s{place}"
        return f"{oldest}; {self.member} handles {handler.named()}{place}"


class BlockedLiteTopic(NamedTuple):
    """A lite topic whose next message waits for too long, and waited at both observations.

    Attributes:
        seconds: the time for which the message has waited.
        messages: the number of messages that the group has not finished.
        in_flight: how many of them are in flight.
        is_subscribed: True if a member of the group is subscribed to the lite topic.
        is_busy: True if the group has messages in flight, or finished some between the observations.
    """

    name: str
    seconds: float
    messages: int
    in_flight: int
    is_subscribed: bool
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """Two observations of a group.

    Attributes:
        group: the group at the first observation.
        later: the progress at the second observation.
        topics: the topics to which the group subscribes, by name.
        running: the reports of members, by client id.
        disagreements: the conflicts between members that brokers report.
        seconds: the time between the observations.
        waiting: by queue, the next message that matches its owner's filter, if it has waited too long. Only queues that
            committed nothing between the observations, or less than arrived, are included.
        full: queues of which brokers return no new messages to pop members, because too many are not acknowledged.
        limited: topics of which brokers hand out messages at the group's rate, so that messages wait.
        moving: queues for which a member reported a higher offset in the second observation, committed or not.
        lite: the messages that a lite group has not finished; None for other groups, and without members.
        blocked_lite: the lite topics of a lite group whose next message waits for too long.
    """

    group: Group
    later: Mapping[Queue, QueueProgress]
    topics: Mapping[str, Topic]
    running: Mapping[str, Running]
    disagreements: tuple[str, ...]
    seconds: float
    waiting: Mapping[Queue, BlockedMessage] = field(default_factory=dict)
    full: tuple[str, ...] = ()
    limited: frozenset[str] = frozenset()
    moving: frozenset[Queue] = frozenset()
    lite: LiteGroup | None = None
    blocked_lite: tuple[BlockedLiteTopic, ...] = ()


def without_deleted(progress: Mapping[Queue, QueueProgress], topics: Mapping[str, Topic]) -> dict[Queue, QueueProgress]:
    """Return the progress without deleted messages, which Apache's brokers count as lag. Offset 0 at an Apache broker
    may also mean that the group has committed nothing."""
    begins = {queue: span.begin for topic in topics.values() for queue, span in topic.ranges.items() if span.begin > 0}
    found = dict(progress)
    for queue in begins.keys() & progress.keys():
        item, begin = progress[queue], begins[queue]
        if item.consumer_offset < begin:
            lost = begin - item.consumer_offset if item.consumer_offset > 0 else 0
            found[queue] = msgspec.structs.replace(item, consumer_offset=begin, lost=max(lost, item.lost))
    return found


def findings_of_group(seen: Observed) -> Iterator[Finding]:
    """Return the findings of all checks for a group that was observed twice."""
    for check in _CHECKS:
        yield from check(seen)


def _of_a_moment(seen: Observed) -> Iterator[Finding]:
    """Return the findings of kinds that count only if they are found twice, some seconds apart."""
    for check in (_standing, _twice, _idle):
        yield from (finding for finding in check(seen) if finding.kind in OF_A_MOMENT)


def _waiting(count: int) -> str:
    return counted(count, "message waits", "messages wait")


def _lost(seen: Observed) -> Iterator[Finding]:
    subscribed = {queue.topic for queue in _subscribed(seen)}
    for queue, progress in seen.later.items():
        if progress.lost and (not seen.group.members or queue.topic in subscribed):
            text = (
                f"{queue}: {counted(progress.lost, 'message was', 'messages were')} deleted before the group read them"
            )
            yield Finding(
                Harm.LOSS, "retention", seen.group.name, text, "keep messages longer, or add consumers to catch up"
            )


def _standing(seen: Observed) -> Iterator[Finding]:
    name = seen.group.name
    if not seen.group.members:
        lag = sum(max(item.lag, 0) for item in seen.later.values())
        text = f"{_waiting(lag)} and the group has no members" if lag else "it has no members: new messages will wait"
        cure = "start its consumers, or delete the group if it is gone"
        yield Finding(Harm.STANDS if lag else Harm.RISK, "no_members", name, text, cure)
        return
    if seen.group.config and not any(config.consume_enable for config in seen.group.config.values()):
        text = "consumption is switched off by the group's settings"
        yield Finding(Harm.STANDS, "consumption_off", name, text, "switch consumeEnable on")
    owned = owned_by(seen)
    unread = [queue for queue in _subscribed(seen) if queue not in owned]
    if unread and (
        owned or not are_broadcasting(seen.group.connections)
    ):  # queues of broadcasting members have no owner
        text = f"nobody reads {_some(unread)}"
        cure = "wait for a rebalance; if it stays, restart the members that subscribe to the topic"
        yield Finding(Harm.STANDS, "unread_queues", name, text, cure)


def _unreadable(seen: Observed) -> Iterator[Finding]:
    """Find messages that wait in queues which members may not read, because the topic has fewer of them than before."""
    of_topic: dict[str, list[Queue]] = {}
    readable = {
        (topic.name, broker): config.read_queues
        for topic in seen.topics.values()
        for broker, config in topic.config.items()
    }
    fewest = min(readable.values(), default=0)
    for queue, item in seen.later.items():
        if queue[2] >= fewest and item.lag > 0 and queue.queue_id >= readable.get(queue[:2], math.inf):
            of_topic.setdefault(queue.topic, []).append(queue)
    for name, queues in of_topic.items():
        lag, count = sum(seen.later[queue].lag for queue in queues), max(queue.queue_id for queue in queues) + 1
        text = f"{_some(queues)}: {_waiting(lag)}, and these queues may not be read any more"
        cure = f"rocketlet topics set {name} --read-queues {count}, until the group has read them"
        yield Finding(Harm.STANDS, "unreadable_messages", seen.group.name, text, cure)


def suspects_of(before: Mapping[Queue, QueueProgress], later: Mapping[Queue, QueueProgress]) -> list[Queue]:
    """Return the queues with messages that are neither handled nor popped, and without a commit between two
    observations."""
    return [queue for queue, now in later.items() if queue in before and _is_suspect(before[queue], now)]


def _is_suspect(before: QueueProgress, now: QueueProgress) -> bool:
    offset = before.consumer_offset
    return (
        now.consumer_offset <= offset
        and before.broker_offset - before.in_hand > offset
        and now.broker_offset - now.in_hand > now.consumer_offset
    )


def _stuck(seen: Observed) -> Iterator[Finding]:
    """Find members with stuck queues. A member's queues have one cause, so they are one finding."""
    owned = owned_by(seen) if seen.group.members and seen.waiting else {}
    of_owner: dict[str, list[Queue]] = {}
    before = seen.group.progress
    for queue in seen.waiting:
        is_limited = queue.topic in seen.limited
        if queue in owned and queue in before and _is_suspect(before[queue], seen.later[queue]) and not is_limited:
            of_owner.setdefault(owned[queue][0], []).append(queue)
    for owner, queues in sorted(of_owner.items()):
        lag, oldest = (
            sum(seen.later[queue].lag for queue in queues),
            max(queues, key=lambda queue: seen.waiting[queue].seconds),
        )
        harm, idle = Harm.STANDS, f"their owner {owner} has committed"
        cure = "check that member's log: a slow or blocked handler, a paused consumer, or a message retried forever"
        if owner == SHARED_OWNER:
            in_hand = sum(seen.later[queue].in_hand for queue in queues)
            idle = f"the members that share them, with {in_hand} of these in flight, have acknowledged"
            cure = "check those members' logs: consumers that do not receive any more, or handlers that hang"
            if in_hand:
                harm, cure = (
                    Harm.SLOW,
                    "add members or concurrency if handlers need this long; if not, check the members' logs",
                )
        message = seen.waiting[oldest].named(oldest)
        text = (
            f"{_some(queues)}: {_waiting(lag)}, the oldest for {seen.waiting[oldest].seconds:.0f} s, and {idle} nothing "
            f"for {seen.seconds:.0f} s{message}"
        )
        yield Finding(harm, "stuck_queue", seen.group.name, text, cure)


def _stuck_lite(seen: Observed) -> Iterator[Finding]:
    """Find lite topics without progress."""
    name, lite = seen.group.name, seen.lite
    if lite is not None and lite.topic in seen.limited:
        return
    unread = [item for item in seen.blocked_lite if not item.is_subscribed]
    if unread and lite is not None:
        text = (
            f"{_some_lite(unread)} of {lite.topic}: {_waiting(sum(item.messages for item in unread))}, the oldest for "
            f"{unread[0].seconds:.0f} s, and no member is subscribed"
        )
        cure = "subscribe a member; without one, an expiration of lite topics deletes the messages unread"
        yield Finding(Harm.RISK, "lite_topic_unread", name, text, cure)
    for harm, cause, cure in _LITE_CAUSES:
        stuck = [item for item in seen.blocked_lite if item.is_subscribed and _lite_cause(item) is cause]
        if stuck and lite is not None:
            waits = _waiting(sum(item.messages - item.in_flight for item in stuck))
            text = f"{_some_lite(stuck)} of {lite.topic}: {waits}, the oldest for {stuck[0].seconds:.0f} s, and {cause}"
            yield Finding(harm, "stuck_lite_topic", name, text, cure)


_NOT_RECEIVED: Final = "the members that are subscribed receive none of them"
_OTHERS_FIRST: Final = "the members that are subscribed handle messages of other lite topics"
_EARLIER_FIRST: Final = "an earlier message of each is in flight"
_LITE_CAUSES: Final = (
    (
        Harm.STANDS,
        _NOT_RECEIVED,
        "check those members' logs: consumers that do not receive any more, or handlers that hang",
    ),
    (
        Harm.SLOW,
        _OTHERS_FIRST,
        "add members or concurrency if handlers need this long; if not, check the members' logs",
    ),
    (
        Harm.SLOW,
        _EARLIER_FIRST,
        "make handlers faster; if they are not slow, check the members' logs",
    ),
)


def _lite_cause(item: BlockedLiteTopic) -> str:
    if item.in_flight:
        return _EARLIER_FIRST
    return _OTHERS_FIRST if item.is_busy else _NOT_RECEIVED


def _some_lite(found: list[BlockedLiteTopic]) -> str:
    shown = ", ".join(item.name for item in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{'lite topic' if len(found) == 1 else 'lite topics'} {shown}{more}"


def _full(seen: Observed) -> Iterator[Finding]:
    if seen.full:
        shown = ", ".join(seen.full[:3]) + (f" and {len(seen.full) - 3} more" if len(seen.full) > 3 else "")
        text = f"{shown}: brokers return no new messages, because too many are popped and not acknowledged"
        cure = "check why members do not settle messages: handlers that hang, or a client that never acknowledges"
        yield Finding(Harm.STANDS, "too_many_in_hand", seen.group.name, text, cure)


def outpaced(seen: Observed) -> dict[Queue, tuple[int, int]]:
    """Return the queues whose lag grows, with the numbers of messages that arrived and that were consumed between the
    observations. The group's filter may match none of the messages that arrived."""
    found: dict[Queue, tuple[int, int]] = {}
    for queue, now in seen.later.items():
        before = seen.group.progress.get(queue)
        if before is None or now.consumer_offset <= before.consumer_offset:
            continue
        consumed = now.consumer_offset - before.consumer_offset
        arrived = now.broker_offset - before.broker_offset
        if arrived > consumed and now.lag > max(LEAST_LAG, SHORT_LAG_S * consumed / seen.seconds):
            found[queue] = arrived, consumed
    return found


def _growing(seen: Observed) -> Iterator[Finding]:
    """Find topics whose lag grows."""
    owned = owned_by(seen) if seen.group.members and seen.waiting else {}
    of_topic: dict[str, list[tuple[Queue, int, int]]] = {}
    for queue, (arrived, consumed) in outpaced(seen).items() if owned else ():
        if queue in owned and queue in seen.waiting and queue.topic not in seen.limited:
            of_topic.setdefault(queue.topic, []).append((queue, arrived, consumed))
    for topic, found in of_topic.items():
        lag = sum(seen.later[queue].lag for queue, _, _ in found)
        arrive = sum(arrived for _, arrived, _ in found) / seen.seconds
        are_consumed = sum(consumed for _, _, consumed in found) / seen.seconds
        text = (
            f"{_some([queue for queue, _, _ in found])}: {_waiting(lag)}; {arrive:.0f} messages/s arrive, "
            f"{are_consumed:.0f} are consumed"
        )
        yield Finding(Harm.SLOW, "growing_lag", seen.group.name, text, _cure_of_lag(seen, topic))


def _cure_of_lag(seen: Observed, name: str) -> str:
    topic, members = seen.topics.get(name), len(seen.group.members)
    queues = len(topic.ranges) if topic else 0
    if members >= queues and SHARED_OWNER not in seen.group.owners.values():
        return f"{name} has {counted(queues, 'queue')} for {counted(members, 'member')}: add queues, or faster handlers"
    return "add members, or make the handlers faster (higher concurrency, batches)"


def _twice(seen: Observed) -> Iterator[Finding]:
    group = seen.group.name
    if are_broadcasting(seen.group.connections):
        return
    owned = owned_by(seen)
    shared = [queue for queue, owners in owned.items() if len(owners) > 1]
    if shared:
        readers = ", ".join(owned[shared[0]])
        text = f"{_some(shared)}: read by {readers} at the same time"
        yield Finding(Harm.TWICE, "two_readers", group, text, "see conflicting members below; restart the older one")
    for client_id, count in _namesakes(seen):
        text = f"{count} members have the client id {client_id}; they read the same queues"
        cure = "give each its own client id (instanceName in Java; containers that share a host name and pid)"
        yield Finding(Harm.TWICE, "client_id_twice", group, text, cure)


def _namesakes(seen: Observed) -> list[tuple[str, int]]:
    """Return client ids that several members have, with the number of members."""
    return [
        (client_id, count)
        for known in seen.group.connections.values()
        for client_id, count in Counter(member.client_id for member in known.members).items()
        if count > 1
    ]


def _disagreeing(seen: Observed) -> Iterator[Finding]:
    group = seen.group.name
    cure = "give all members of the group the same subscriptions, strategy and model, or use two groups"
    named = tuple(f"live connections with the client id {client_id}" for client_id, _ in _namesakes(seen))
    disagreements = [text for text in seen.disagreements if not text.endswith(named)]  # reported as `client_id_twice`
    for text in disagreements:
        yield Finding(Harm.STANDS, "disagreement", group, text, cure)
    wanted: dict[str, list[str]] = {}
    for client_id, member in sorted(seen.running.items()):
        mine = {topic: text for topic, text in member.subscriptions.items() if not topic.startswith(names.RETRY_PREFIX)}
        wanted.setdefault(str(sorted(mine.items())), []).append(client_id)
    if len(wanted) > 1 and not disagreements:
        kinds = "; ".join(f"{' and '.join(ids)}: {text}" for text, ids in wanted.items())
        yield Finding(Harm.STANDS, "disagreement", group, f"members have different subscriptions: {kinds}", cure)


def _idle(seen: Observed) -> Iterator[Finding]:
    owners = {client_id for ids in owned_by(seen).values() for client_id in ids}
    idle = [member.client_id for member in seen.group.members if member.client_id not in owners]
    if idle and seen.running and SHARED_OWNER not in owners:
        queues = len(_subscribed(seen))
        text = f"{len(idle)} of {len(seen.group.members)} members have no queue: {', '.join(idle[:3])}"
        yield Finding(
            Harm.RISK,
            "idle_members",
            seen.group.name,
            text,
            f"the topics have {counted(queues, 'queue')}: add queues, or stop them",
        )


def _old(seen: Observed) -> Iterator[Finding]:
    for member in seen.group.members:
        if member.language == "JAVA" and 0 < member.version < OLDEST_VERSION:
            text = f"{member.client_id} at {member.address} uses a client older than 4.9"
            yield Finding(Harm.RISK, "old_client", seen.group.name, text, "upgrade it")


OF_A_MOMENT = frozenset(("two_readers", "unread_queues", "idle_members"))
"""Kinds of findings that occur in a healthy group, too, if a queue moves to another member between two queries. They
count only if a second observation finds them, too."""

_CHECKS: tuple[Callable[[Observed], Iterator[Finding]], ...] = (
    _lost,
    _standing,
    _unreadable,
    _stuck,
    _stuck_lite,
    _full,
    _growing,
    _twice,
    _disagreeing,
    _idle,
    _old,
)


def owned_by(seen: Observed) -> dict[Queue, list[str]]:
    """Return, for each queue, the holder of its lock and the members that report it as theirs."""
    owners: dict[Queue, list[str]] = {queue: [client_id] for queue, client_id in seen.group.owners.items()}
    for client_id, member in seen.running.items():
        for queue in member.commit_offsets:
            known = owners.setdefault(queue, [])
            if client_id not in known:
                known.append(client_id)
    return owners


def _subscribed(seen: Observed) -> list[Queue]:
    """Return the queues of all topics to which members subscribe."""
    wanted = {topic for known in seen.group.connections.values() for topic in known.subscriptions}
    wanted |= {topic for member in seen.running.values() for topic in member.subscriptions}
    return [queue for name in sorted(wanted & seen.topics.keys()) for queue in seen.topics[name].ranges]


def _some(queues: list[Queue]) -> str:
    shown = ", ".join(map(str, queues[:3]))
    return shown if len(queues) <= 3 else f"{shown} and {len(queues) - 3} more"
