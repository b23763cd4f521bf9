"""The state of a running broker, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..broker.broker import BrokerController
from ..client.message import Message
from ..protocol import names
from ..protocol import properties as props
from ..protocol.bodies import MESSAGE_TYPES, GroupConfig, TopicConfig, finish
from ..protocol.message import decode_records
from ..protocol.names import Queue, counted
from .errors import UnknownGroup, UnknownTopic


class StoredMessage(NamedTuple):
    """A message, and its bytes in the commit log."""

    message: Message
    record: bytes


def messages(
    broker: BrokerController, topic: str, *, key: str | None = None, waiting_for: str | None = None
) -> list[StoredMessage]:
    """Return stored messages of a topic, in the order of storing; none if the topic does not exist yet. Raises
    UnknownGroup.

    Args:
        key: only messages with this key
        waiting_for: only messages that this group has not committed
    """
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
    if waiting_for is not None and broker.pops.pools.is_bound(waiting_for, topic):
        found = [stored for stored in found if _waits_for(broker, waiting_for, stored.message)]
    return [stored for stored in found if key is None or key in stored.message.keys]


def _waits_for(broker: BrokerController, group: str, message: Message) -> bool:
    """Return True if a message of a lite topic waits for a lite group."""
    pool = broker.pops.pools.bound_lite_pool(group)
    lite = broker.lites.get(message.topic, message.lite_topic or "")
    if pool is None or lite is None or not pool.queues.has(lite):
        return False
    offset = int(props.find(message.record.properties, props.LITE_OFFSET) or 0)
    return offset >= pool.queues.committed(lite)


def committed(broker: BrokerController, group: str, topic: str) -> dict[int, int]:
    """Return the committed offset of each queue that has one. Raises UnknownGroup, and ValueError for a broadcasting
    group."""
    _check_group(broker, group)
    _check_offsets(broker, group)
    return dict(broker.offsets.of(group, topic))


def lag(broker: BrokerController, group: str, topic: str) -> int:
    """Return the number of messages that the group has not committed, or not acknowledged in shared queues.

    Raises UnknownGroup and UnknownTopic, because a misspelled name would have no lag, and ValueError for a broadcasting
    group.
    """
    _check_group(broker, group)
    _check_offsets(broker, group)
    if broker.topics.get(topic) is None:
        raise UnknownTopic(f"the broker has no topic {topic}; it has: {', '.join(sorted(topics(broker))) or 'none'}")
    return _lag(broker, group, topic)


def _lag(broker: BrokerController, group: str, topic: str) -> int:
    """Return the number of messages of the topic that the group has not committed; in popped queues, of those that are
    not acknowledged; of a lite group, of those in the lite topics that it has read or is subscribed to."""
    if broker.pops.pools.is_bound(group, topic):
        return finish(broker.progress.lag(group, topic)).messages
    offsets, shared = broker.offsets.of(group, topic), broker.pops.pools.numbers(group, topic)
    ends = {number: queue.next for (name, number), queue in broker.store.queues.items() if name == topic}
    return sum(
        shared[number].lag if number in shared else max(end - offsets.get(number, 0), 0) for number, end in ends.items()
    )


def _check_offsets(broker: BrokerController, group: str) -> None:
    found = broker.groups.get(group)
    if found is not None and found.members and found.message_model == "BROADCASTING":
        raise ValueError(
            f"each member of the broadcasting group {group} gets every message and stores its offsets itself; "
            "wait for the effects of your handlers instead"
        )


def consumed_fault(broker: BrokerController, group: str, topic: str) -> str:
    """Return the reason why the group has not consumed the whole topic, or has no offset in it; empty if it has consumed
    it. Raises ValueError for a broadcasting group."""
    _check_offsets(broker, group)
    missing = _lag(broker, group, topic)
    if missing:
        return f"{counted(missing, f'message of {topic} is', f'messages of {topic} are')} not consumed by {group}"
    offsets = broker.offsets.of(group, topic) or broker.lite_offsets.all.get((group, topic))
    return "" if offsets else f"{group} has committed nothing in {topic}"


def owners(broker: BrokerController, group: str) -> dict[Queue, str]:
    """Return the owner of each queue that has one. Raises UnknownGroup."""
    _check_group(broker, group)
    held = broker.groups.owners(group)
    return {Queue(topic, broker.config.name, number): client for (topic, number), client in sorted(held.items())}


def members(broker: BrokerController, group: str) -> list[str]:
    """Return the client ids of the members, including pop clients. Raises UnknownGroup."""
    _check_group(broker, group)
    found = broker.groups.get(group)
    named = [] if found is None else [member.client_id for member in found.members.values()]
    return sorted({*named, *broker.pops.pools.clients_of(group)})


def groups(broker: BrokerController) -> list[str]:
    """Return the groups with members."""
    return [group.name for group in broker.groups if group.members]


def topics(broker: BrokerController) -> dict[str, int]:
    """Return the number of read queues of each topic, without topics that every broker has."""
    return {topic.name: topic.read_queues for topic in broker.topics if not broker.topics.is_built_in(topic.name)}


def dead_letters(
    broker: BrokerController, group: str, *, key: str | None = None, waiting_for: str | None = None
) -> list[StoredMessage]:
    """Return the dead letters of a group. Raises UnknownGroup."""
    _check_group(broker, group)
    return messages(broker, names.dlq_topic(group), key=key, waiting_for=waiting_for)


def _check_group(broker: BrokerController, group: str) -> None:
    """Raise UnknownGroup for a group that was neither joined nor created and has neither offsets nor dead letters."""
    is_known = group in broker.group_configs or broker.groups.online(group) is not None
    is_kept = broker.topics.get(names.dlq_topic(group)) is not None or broker.offsets.topics_of(group)
    if not is_known and not is_kept:
        known = ", ".join(sorted(item.name for item in broker.groups if item.members)) or "none"
        raise UnknownGroup(f"the broker knows no group {group}; with members: {known}")


def timeline(broker: BrokerController, group: str) -> list[dict[str, Any]]:
    """Return the newest events of a group, such as joins, leaves and handed-over queues, oldest first, up to the broker's
    limits on events. Raises UnknownGroup."""
    _check_group(broker, group)
    return list(broker.history.of(group))


# Changes


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
    """Create a group and its retry topic, unless they exist. Raises IllegalName, LimitExceeded.

    A Java consumer whose retry topic did not exist when it started finds it only when it requests routes after 30 s.
    """
    if group not in broker.group_configs:
        broker.group_configs.put(GroupConfig(group))
    broker.topics.ensure(TopicConfig(names.retry_topic(group), 1, 1), broker.store.end)


def take_lease(broker: BrokerController, group: str, topic: str, queue_id: int) -> None:
    """End a member's lease as if it had expired. Raises KeyError if no member owns the queue."""
    try:
        broker.locks.end(group, topic, queue_id)
    except KeyError:
        raise KeyError(f"no member of {group} owns queue {queue_id} of {topic}") from None


def rebalance(broker: BrokerController, group: str) -> None:
    """Notify the members that the group has changed. Raises KeyError if it has no members."""
    found = broker.groups.online(group)
    if found is None:
        raise KeyError(f"the group {group} has no members")
    broker.changes.members_changed(found)
