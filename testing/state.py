"""A running broker's state, as tests look at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..broker.broker import BrokerController
from ..client.message import Message
from ..protocol import names
from ..protocol.bodies import MESSAGE_TYPES, GroupConfig, TopicConfig
from ..protocol.message import decode_records
from ..protocol.names import Queue, counted
from .errors import UnknownGroup, UnknownTopic


class StoredMessage(NamedTuple):
    """A message, and the bytes that the commit log has of it."""

    message: Message
    record: bytes


def messages(
    broker: BrokerController, topic: str, *, key: str | None = None, waiting_for: str | None = None
) -> list[StoredMessage]:
    """The messages in the order of their storing; those with a key; those that a group has not committed. Raises
    UnknownGroup. A topic that nobody has sent to has none: it comes into being with its first message."""
    if waiting_for is not None:
        _check_group(broker, waiting_for)
    committed = broker.offsets.of(waiting_for, topic) if waiting_for is not None else {}
    found: list[StoredMessage] = []
    for (name, number), queue in list(broker.store.queues.items()):
        if name != topic:
            continue
        place = Queue(topic, broker.config.name, number)
        for offset in range(max(queue.begin, committed.get(number, 0)), queue.next):
            position, size, _ = queue.entry(offset)
            raw = broker.store.read_log(position, size)
            found += [StoredMessage(Message(record, place, topic), raw) for record in decode_records(raw)]
    found.sort(key=lambda stored: stored.message.record.physical_offset)
    return [stored for stored in found if key is None or key in stored.message.keys]


def committed(broker: BrokerController, group: str, topic: str) -> dict[int, int]:
    """Raises UnknownGroup, and ValueError if each member has every message."""
    _check_group(broker, group)
    _check_offsets(broker, group)
    return dict(broker.offsets.of(group, topic))


def lag(broker: BrokerController, group: str, topic: str) -> int:
    """Raises UnknownGroup and UnknownTopic, for a mistyped name has no lag, either; and ValueError if each member has every
    message."""
    _check_group(broker, group)
    _check_offsets(broker, group)
    if broker.topics.get(topic) is None:
        raise UnknownTopic(f"the broker has no topic {topic}; it has: {', '.join(sorted(topics(broker))) or 'none'}")
    return _lag(broker, group, topic)


def _lag(broker: BrokerController, group: str, topic: str) -> int:
    """Messages of the topic that the group has not committed; of queues whose messages are shared, those not acknowledged."""
    offsets, shared = broker.offsets.of(group, topic), broker.pops.numbers(group, topic)
    ends = {number: queue.next for (name, number), queue in broker.store.queues.items() if name == topic}
    return sum(
        shared[number].lag if number in shared else max(end - offsets.get(number, 0), 0) for number, end in ends.items()
    )


def _check_offsets(broker: BrokerController, group: str) -> None:
    found = broker.groups.get(group)
    if found is not None and found.members and found.message_model == "BROADCASTING":
        raise ValueError(
            f"each member of {group} gets every message and keeps its own offsets, of which the broker knows nothing; "
            "wait for what your handlers do"
        )


def consumed_fault(broker: BrokerController, group: str, topic: str) -> str:
    """Why the group has not consumed the topic; empty if it has. Raises ValueError if each member has every message."""
    _check_offsets(broker, group)
    missing = _lag(broker, group, topic)
    if missing:
        return f"{counted(missing, f'message of {topic} is', f'messages of {topic} are')} not consumed by {group}"
    return "" if broker.offsets.of(group, topic) else f"{group} has committed nothing in {topic}"


def owners(broker: BrokerController, group: str) -> dict[Queue, str]:
    """The owner of each queue. Raises UnknownGroup."""
    _check_group(broker, group)
    held = broker.groups.owners(group)
    return {Queue(topic, broker.config.name, number): client for (topic, number), client in sorted(held.items())}


def members(broker: BrokerController, group: str) -> list[str]:
    """Client ids, also of those that share messages. Raises UnknownGroup."""
    _check_group(broker, group)
    found = broker.groups.get(group)
    named = [] if found is None else [member.client_id for member in found.members.values()]
    return sorted({*named, *broker.pops.clients(group)})


def groups(broker: BrokerController) -> list[str]:
    """The groups that have members."""
    return [group.name for group in broker.groups if group.members]


def topics(broker: BrokerController) -> dict[str, int]:
    """Queues by name, without the topics that every broker has."""
    return {topic.name: topic.read_queues for topic in broker.topics if not broker.topics.is_built_in(topic.name)}


def dead_letters(
    broker: BrokerController, group: str, *, key: str | None = None, waiting_for: str | None = None
) -> list[StoredMessage]:
    """Raises UnknownGroup."""
    _check_group(broker, group)
    return messages(broker, names.dlq_topic(group), key=key, waiting_for=waiting_for)


def _check_group(broker: BrokerController, group: str) -> None:
    """Raises UnknownGroup for a group that nobody has joined or created, and that has neither offsets nor dead letters."""
    is_known = group in broker.group_configs or broker.groups.online(group) is not None
    is_kept = broker.topics.get(names.dlq_topic(group)) is not None or broker.offsets.topics_of(group)
    if not is_known and not is_kept:
        known = ", ".join(sorted(item.name for item in broker.groups if item.members)) or "none"
        raise UnknownGroup(f"the broker knows no group {group}; with members: {known}")


def timeline(broker: BrokerController, group: str) -> list[dict[str, Any]]:
    """The events of a group: joins, leaves and queues that changed hands, oldest first. Raises UnknownGroup."""
    _check_group(broker, group)
    return list(broker.history.of(group))


# Ordering


def create_topic(broker: BrokerController, topic: str, queues: int, message_type: str = "") -> None:
    """Create a topic, or change its number of queues, and its type if one is named; its other settings stay.

    Raises ValueError if messages would become unreadable, or for an unknown type; IllegalName, LimitExceeded."""
    if message_type and message_type not in MESSAGE_TYPES:
        raise ValueError(f"message_type is {message_type!r}; expected one of {', '.join(sorted(MESSAGE_TYPES))}")
    found = broker.topics.get(topic)
    lost = sum(
        queue.next - queue.begin
        for queue_id in range(queues, found.read_queues if found is not None else 0)
        if (queue := broker.store.queues.get((topic, queue_id))) is not None
    )
    if found is not None and lost:
        raise ValueError(
            f"queues is {queues}: {counted(lost, 'message')} of {topic} in queues {queues} to {found.read_queues - 1} would "
            "become unreadable; create the topic with its queues before messages are sent"
        )
    wanted = TopicConfig(topic) if found is None else found
    changed = replace(wanted, read_queues=queues, write_queues=queues)
    broker.topics.put(replace(changed, message_type=message_type or wanted.message_type), broker.store.end)


def create_group(broker: BrokerController, group: str) -> None:
    """Create a group and its retry topic, unless they exist. A Java consumer otherwise finds its retry topic when it next
    asks for routes, after 30 s. Raises IllegalName, LimitExceeded."""
    if group not in broker.group_configs:
        broker.group_configs.put(GroupConfig(group))
    broker.topics.ensure(TopicConfig(names.retry_topic(group), 1, 1), broker.store.end)


def take_lease(broker: BrokerController, group: str, topic: str, queue_id: int) -> None:
    """Ends a member's lease as if it had run out. Raises KeyError if nobody holds the queue."""
    try:
        broker.locks.end(group, topic, queue_id)
    except KeyError:
        raise KeyError(f"nobody in {group} holds queue {queue_id} of {topic}") from None


def rebalance(broker: BrokerController, group: str) -> None:
    """Tells the members that the group has changed. Raises KeyError if it has none."""
    found = broker.groups.online(group)
    if found is None:
        raise KeyError(f"the group {group} has no members")
    broker.notifications.changed(found)
