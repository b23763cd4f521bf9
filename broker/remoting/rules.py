"""The rules beside the handlers in the table: what each request needs.

Where Apache's PlainAccessValidator has a rule for a code, it is the same here. Apache lets every signed request with another
code pass. Here, a request about a topic or group needs permission for that topic or group, and one about the whole broker
needs an administrator. A request for a message by its position needs permission for the message's topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from ...protocol import bodies, group_bodies, names, pop_bodies
from ...protocol import properties as props
from ...protocol.extents import decode_topics
from ...protocol.frame import Frame
from ...protocol.headers import EndTransaction, LogOffset, SendBack, read
from ...protocol.message import Record
from ..access.accounts import Permission
from ..access.needs import Need, group, topic

PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY
_new_tuple = tuple.__new__


class StoredRecords(Protocol):
    """The broker's store, as far as a rule looks into it."""

    def record_at(self, position: int) -> Record | None: ...


Needs = Callable[[Frame, StoredRecords | None], Iterable[Need]]


class Rule(NamedTuple):
    """A client that passes has an account, or comes from a white address. `needs` raises the same errors as a handler for
    headers and bodies that cannot be read."""

    is_admin: bool
    needs: Needs | None = None


KNOWN = Rule(is_admin=False)
ADMIN = Rule(is_admin=True)


def needing(needs: Needs) -> Rule:
    return Rule(False, needs)


def named(frame: Frame, field: str) -> str:
    """The text that a handler reads from a header field; empty if the field is missing."""
    value = frame.ext.get(field)
    return "" if value is None else str(value)


def fields(*, topics: Iterable[str] = (), groups: Iterable[str] = (), permission: Permission = SUB) -> Rule:
    """The header fields that name topics and groups; one that is missing or empty needs nothing, for its handler
    refuses it or does without it."""
    topic_fields, group_fields = tuple(topics), tuple(groups)

    def needs(frame: Frame, records: StoredRecords | None) -> list[Need]:
        found = [topic(name, permission) for field in topic_fields if (name := named(frame, field))]
        return found + [group(name) for field in group_fields if (name := named(frame, field))]

    return needing(needs)


def _sends_to(field: str) -> Rule:
    def needs(frame: Frame, records: StoredRecords | None) -> tuple[Need]:
        name = frame.ext.get(field)
        name = name if type(name) is str else named(frame, field)
        return (_new_tuple(Need, (name, SUB if name.startswith(names.RETRY_PREFIX) else PUB)),)

    return needing(needs)


def _heartbeat(frame: Frame, records: StoredRecords | None) -> Iterable[Need]:
    for consumer in bodies.decode_heartbeat(frame.body).consumers:
        yield group(consumer.group)
        for subscription in consumer.subscriptions:
            yield topic(subscription.topic, SUB)


def _locks(frame: Frame, records: StoredRecords | None) -> list[Need]:
    request = group_bodies.decode_lock_request(frame.body)
    return [group(request.group), *(topic(name, SUB) for name in {queue.topic for queue in request.queues})]


def _assignment(frame: Frame, records: StoredRecords | None) -> list[Need]:
    request = group_bodies.decode_assignment_request(frame.body)
    return [group(request.group), topic(request.topic, SUB)]


def _client_check(frame: Frame, records: StoredRecords | None) -> list[Need]:
    return [group(group_bodies.decode_client_check(frame.body).group)]


def _extents(frame: Frame, records: StoredRecords | None) -> list[Need]:
    asked = named(frame, "consumerGroup")
    return [*(topic(name, ANY) for name in decode_topics(frame.body)), *([group(asked)] if asked else [])]


def _corrected(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """The topic and the groups that are compared. Without `filterGroups` those are all groups of the topic."""
    others = [name for name in named(frame, "filterGroups").split(",") if name]
    compared = named(frame, "compareGroup")
    return [topic(named(frame, "topic"), SUB), *(group(name) for name in (compared, *others) if name)]


def _message_at(position: int, records: StoredRecords | None) -> list[Need]:
    """The topic of a message that is named by its place in the log: of one that waits there, or has no outcome yet, the
    system topic that it waits in. A reader of its destination cannot tell whether it will ever be there."""
    record = records.record_at(position) if records is not None else None
    return [topic(record.topic, SUB)] if record is not None else []


def _ended(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """The topic that a half message is meant for."""
    position = read(EndTransaction, frame.ext).commit_log_offset
    record = records.record_at(position) if records is not None else None
    if record is None:
        return []
    meant = props.find(record.properties, props.REAL_TOPIC) if record.topic == names.HALF_TOPIC else None
    return [topic(meant or record.topic, PUB)]


def _sent_back(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """The message becomes one of the group: without its topic's permission, a group could fetch any message so."""
    header = read(SendBack, frame.ext)
    return [group(header.group), *_message_at(header.offset, records)]


def _batch_ack(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """The topic may be a group's retry topic, which needs the group's permissions."""
    acks = pop_bodies.decode_batch_acks(frame.body)
    return [need for ack in acks for need in (group(ack.group), topic(ack.topic, SUB))]


SEND = _sends_to("topic")
SEND_V2 = _sends_to("b")
READS = fields(topics=("topic",), groups=("consumerGroup",))
SEND_BACK = needing(_sent_back)
VIEW = needing(lambda frame, records: _message_at(read(LogOffset, frame.ext).offset, records))
END_TRANSACTION = needing(_ended)
BATCH_ACK = needing(_batch_ack)
HEARTBEAT = needing(_heartbeat)
LOCKS = needing(_locks)
ASSIGNMENT = needing(_assignment)
CLIENT_CHECK = needing(_client_check)
EXTENTS = needing(_extents)
CORRECTION = needing(_corrected)
READS_TOPIC = fields(topics=("topic",))
MAY_KNOW_TOPIC = fields(topics=("topic",), permission=ANY)  # producers ask for offsets, too
OF_GROUP = fields(groups=("consumerGroup",))
GROUP = fields(groups=("group",))
OF_GROUP_AND_TOPIC = fields(topics=("topic",), groups=("group",))
CLONE = fields(topics=("topic",), groups=("srcGroup", "destGroup"))
