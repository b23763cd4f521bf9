"""Finds what is wrong with one group, by two looks at it some seconds apart.

A queue is not called stuck because its offset stands: members commit every 5 s, a handler may take its time, and messages
that no filter wants are skipped without a commit. It is stuck if a message that its owner wants has waited for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ...protocol import names
from ...protocol.admin_answers import Running
from ...protocol.admin_bodies import Progress
from ...protocol.counting import counted
from ...protocol.pop_bodies import SHARED_OWNER
from ...protocol.queue import Queue
from ..config import LEAST_LAG, OLDEST_VERSION, SHORT_LAG_S
from .described import Group, Topic, are_broadcasting


class Harm(IntEnum):
    """How much a finding hurts, worst first."""

    LOSS = 0  # messages are lost, or will be soon
    STANDS = 1  # messages wait without progress; their handlers may be running
    TWICE = 2  # messages are handled more than once
    SLOW = 3
    RISK = 4


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """`subject` names the ill part, such as a group; `kind` is stable, for programs; `cure` says what to do."""

    harm: Harm
    kind: str
    subject: str
    text: str
    cure: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A group as it was seen twice, some seconds apart. `waiting_s`: by queue, for how long the next message that its owner
    wants has waited; only of queues that committed nothing meanwhile or too little, and only where it is too long. `full`:
    queues of which brokers give members that share nothing new, because too many messages are not acknowledged."""

    group: Group
    later: Mapping[Queue, Progress]
    topics: Mapping[str, Topic]
    running: Mapping[str, Running]
    disagreements: tuple[str, ...]
    seconds: float
    waiting_s: Mapping[Queue, float] = field(default_factory=dict)
    full: tuple[str, ...] = ()


def without_deleted(progress: Mapping[Queue, Progress], topics: Mapping[str, Topic]) -> dict[Queue, Progress]:
    """Deleted messages do not wait. Apache's brokers count them, and their 0 may mean that a group has committed
    nothing."""
    found: dict[Queue, Progress] = {}
    for queue, item in progress.items():
        topic = topics.get(queue.topic)
        begin = topic.ranges[queue].begin if topic and queue in topic.ranges else 0
        if item.consumer_offset < begin:
            lost = begin - item.consumer_offset if item.consumer_offset > 0 else 0
            item = item._replace(consumer_offset=begin, lost=max(lost, item.lost))
        found[queue] = item
    return found


def findings_of_group(seen: Observed) -> Iterator[Finding]:
    """The findings of all checks for a group that was looked at twice."""
    for check in _CHECKS:
        yield from check(seen)


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
    name, lag = seen.group.name, sum(max(item.lag, 0) for item in seen.later.values())
    if not seen.group.members:
        text = f"{_waiting(lag)} and the group has no members" if lag else "it has no members: new messages will wait"
        cure = "start its consumers, or delete the group if it is gone"
        yield Finding(Harm.STANDS if lag else Harm.RISK, "no_members", name, text, cure)
        return
    if seen.group.config and not any(config.consume_enable for config in seen.group.config.values()):
        text = "consumption is switched off by the group's settings"
        yield Finding(Harm.STANDS, "consumption_off", name, text, "switch consumeEnable on")
    owned = _owned(seen)
    unread = [queue for queue in _subscribed(seen) if queue not in owned]
    if unread:
        text = f"nobody reads {_some(unread)}"
        cure = "wait for a rebalance; if it stays, restart the members that subscribe to the topic"
        yield Finding(Harm.STANDS, "unread_queues", name, text, cure)


def _unreadable(seen: Observed) -> Iterator[Finding]:
    """Find messages that wait in queues which members may not read, because the topic has fewer of them than before."""
    of_topic: dict[str, list[Queue]] = {}
    for queue, item in seen.later.items():
        topic = seen.topics.get(queue.topic)
        config = topic.config.get(queue.broker_name) if topic is not None else None
        if config is not None and item.lag > 0 and queue.queue_id >= config.read_queues:
            of_topic.setdefault(queue.topic, []).append(queue)
    for name, queues in of_topic.items():
        lag, count = sum(seen.later[queue].lag for queue in queues), max(queue.queue_id for queue in queues) + 1
        text = f"{_some(queues)}: {_waiting(lag)}, and these queues may not be read any more"
        cure = f"rocketlet topics set {name} --read-queues {count}, until the group has read them"
        yield Finding(Harm.STANDS, "unreadable_messages", seen.group.name, text, cure)


def suspects_of(before: Mapping[Queue, Progress], later: Mapping[Queue, Progress]) -> list[Queue]:
    """Queues in which messages wait that nobody has popped, and nothing was committed between two looks."""
    return [
        queue
        for queue, now in later.items()
        if queue in before
        and min(now.waiting, before[queue].waiting) > 0
        and now.consumer_offset <= before[queue].consumer_offset
    ]


def _stuck(seen: Observed) -> Iterator[Finding]:
    """Finds members with stuck queues. A member's queues have one cause, so they are one finding."""
    owned = _owned(seen) if seen.group.members and seen.waiting_s else {}
    of_owner: dict[str, list[Queue]] = {}
    for queue in suspects_of(seen.group.progress, seen.later):
        if queue in owned and queue in seen.waiting_s:
            of_owner.setdefault(owned[queue][0], []).append(queue)
    for owner, queues in sorted(of_owner.items()):
        lag, longest_s = sum(seen.later[queue].lag for queue in queues), max(seen.waiting_s[queue] for queue in queues)
        harm, idle = Harm.STANDS, f"their owner {owner} has committed"
        cure = "look at that member's log: a slow or blocked handler, a paused consumer, or a message retried for ever"
        if owner == SHARED_OWNER:
            in_hand = sum(seen.later[queue].in_hand for queue in queues)
            idle = f"the members that share them, with {in_hand} of these in flight, have acknowledged"
            cure = "look at those members' logs: consumers that do not receive any more, or handlers that hang"
            if in_hand:
                harm, cure = (
                    Harm.SLOW,
                    "add members or concurrency if handlers need this long; if not, look at the members' logs",
                )
        text = (
            f"{_some(queues)}: {_waiting(lag)}, the oldest for {longest_s:.0f} s, and {idle} nothing for "
            f"{seen.seconds:.0f} s"
        )
        yield Finding(harm, "stuck_queue", seen.group.name, text, cure)


def _full(seen: Observed) -> Iterator[Finding]:
    if seen.full:
        shown = ", ".join(seen.full[:3]) + (f" and {len(seen.full) - 3} more" if len(seen.full) > 3 else "")
        text = f"{shown}: nothing new is given, because too many messages are popped and not acknowledged"
        cure = "see why its members neither acknowledge nor give back: handlers that hang, or a client that forgets to"
        yield Finding(Harm.STANDS, "too_many_in_hand", seen.group.name, text, cure)


def outpaced(seen: Observed) -> dict[Queue, tuple[int, int]]:
    """Queues with a lag to which more is sent than is consumed: how much of either. A filter may want nothing of it."""
    found: dict[Queue, tuple[int, int]] = {}
    for queue, now in seen.later.items():
        before = seen.group.progress.get(queue)
        if before is None:
            continue
        consumed = now.consumer_offset - before.consumer_offset
        arrived = now.broker_offset - before.broker_offset
        if arrived > consumed > 0 and now.lag > max(LEAST_LAG, SHORT_LAG_S * consumed / seen.seconds):
            found[queue] = arrived, consumed
    return found


def _growing(seen: Observed) -> Iterator[Finding]:
    """Finds lag that grows, topic by topic."""
    owned = _owned(seen) if seen.group.members else {}
    of_topic: dict[str, list[tuple[Queue, int, int]]] = {}
    for queue, (arrived, consumed) in outpaced(seen).items():
        if queue in owned and queue in seen.waiting_s:
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
    return "add members, or make the handlers faster (more of them at once, batches)"


def _twice(seen: Observed) -> Iterator[Finding]:
    group = seen.group.name
    if are_broadcasting(seen.group.connections):
        return
    owned = _owned(seen)
    shared = [queue for queue, owners in owned.items() if len(owners) > 1]
    if shared:
        readers = ", ".join(owned[shared[0]])
        text = f"{_some(shared)}: read by {readers} at once"
        yield Finding(Harm.TWICE, "two_readers", group, text, "see who disagrees below; restart the older member")
    for client_id, count in _namesakes(seen):
        text = f"{count} members call themselves {client_id}; they read the same queues"
        cure = "give each its own client id (instanceName in Java; containers that share a host name and pid)"
        yield Finding(Harm.TWICE, "client_id_twice", group, text, cure)


def _namesakes(seen: Observed) -> list[tuple[str, int]]:
    """Client ids that several members have, and how many."""
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
    disagreements = [text for text in seen.disagreements if not text.endswith(named)]  # one line for one cause
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
    owners = {client_id for ids in _owned(seen).values() for client_id in ids}
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
"""Kinds that are found in a well group, too, if a queue changes hands between two questions: a second look must find them."""

_CHECKS: tuple[Callable[[Observed], Iterator[Finding]], ...] = (
    _lost,
    _standing,
    _unreadable,
    _stuck,
    _full,
    _growing,
    _twice,
    _disagreeing,
    _idle,
    _old,
)


def _owned(seen: Observed) -> dict[Queue, list[str]]:
    """The members that say they read each queue, and the holder of its lock."""
    owners: dict[Queue, list[str]] = {queue: [client_id] for queue, client_id in seen.group.owners.items()}
    for client_id, member in seen.running.items():
        for queue in member.commit_offsets:
            known = owners.setdefault(queue, [])
            if client_id not in known:
                known.append(client_id)
    return owners


def _subscribed(seen: Observed) -> list[Queue]:
    """The queues that the members should read between them."""
    wanted = {topic for known in seen.group.connections.values() for topic in known.subscriptions}
    wanted |= {topic for member in seen.running.values() for topic in member.subscriptions}
    return [queue for name in sorted(wanted & seen.topics.keys()) for queue in seen.topics[name].ranges]


def _some(queues: list[Queue]) -> str:
    shown = ", ".join(map(str, queues[:3]))
    return shown if len(queues) <= 3 else f"{shown} and {len(queues) - 3} more"
