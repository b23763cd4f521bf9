"""The permissions that each request needs, and the account that has sent it.

The table of handlers has a rule beside each of them. Where Apache's PlainAccessValidator has a rule for a code, the rule
is the same here, except that CONSUMER_SEND_MSG_BACK needs permission for the message's topic, too. Apache's broker accepts
signed requests with other codes without a permission. Here, most of them need permission for the topic or group that they
name, or for the topic of the message at the position that they name, or an administrator (see the tables in `dispatch`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from ...protocol import bodies, group_bodies, names
from ...protocol import properties as props
from ...protocol.codes import EXT_CHANNEL, ResponseCode, request_name
from ...protocol.frame import Frame
from ...protocol.group_bodies import decode_topics
from ...protocol.headers import ACCESS_KEY, EndTransaction, LogOffset, SendBack, Signer, read
from ...protocol.message import Record
from ..access import Acl, Need, Permission, Unauthorized, group, topic
from .connection import RemotingConnection
from .responses import ResponseError

_new_tuple = tuple.__new__
PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY


class StoredRecords(Protocol):
    """The part of the broker's store that rules use."""

    def record_at(self, position: int) -> Record | None: ...


Needs = Callable[[Frame, StoredRecords | None], Iterable[Need]]


class Rule(NamedTuple):
    """The rule of a request code. A request from a white address passes. Other requests need an account that has the
    permissions of `needs` (`Account.may`), and that is an administrator if `is_admin`. `needs` raises the same errors as a
    handler for headers and bodies that cannot be decoded."""

    is_admin: bool
    needs: Needs | None = None


WITH_ACCOUNT = Rule(is_admin=False)
ADMIN = Rule(is_admin=True)


def needing(needs: Needs) -> Rule:
    return Rule(False, needs)


def named(frame: Frame, field: str) -> str:
    """Return the text that a handler reads from a header field; empty if the field is missing."""
    value = frame.ext.get(field)
    return "" if value is None else str(value)


def fields(*, topics: Iterable[str] = (), groups: Iterable[str] = (), permission: Permission = SUB) -> Rule:
    """Return a rule from the header fields that contain topics and groups. A field that is missing or empty needs no
    permission, because the handler refuses the request or does not need the field."""
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
    """Return the permissions for QUERY_CORRECTION_OFFSET: the topic, and the named groups. Without `filterGroups`, the
    handler compares all groups of the topic, and only the topic's permission is needed for them."""
    others = [name for name in named(frame, "filterGroups").split(",") if name]
    compared = named(frame, "compareGroup")
    return [topic(named(frame, "topic"), SUB), *(group(name) for name in (compared, *others) if name)]


def _message_at(position: int, records: StoredRecords | None) -> list[Need]:
    """Return the permission for a message named by its position in the log; none if there is no message. For a delayed or
    half message, the permission is that of the system topic where the message waits, because the message may never be
    delivered to its destination."""
    record = records.record_at(position) if records is not None else None
    return [topic(record.topic, SUB)] if record is not None else []


def _ended(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permission to send to the topic for which a half message is meant, or to the topic of a message that is
    no half message; none if there is no message."""
    position = read(EndTransaction, frame.ext).commit_log_offset
    record = records.record_at(position) if records is not None else None
    if record is None:
        return []
    meant = props.find(record.properties, props.REAL_TOPIC) if record.topic == names.HALF_TOPIC else None
    return [topic(meant or record.topic, PUB)]


def _sent_back(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permissions for the group and for the topic of the message, if there is one. The message is redelivered
    to the group, so without the topic's permission a group could read any message."""
    header = read(SendBack, frame.ext)
    return [group(header.group), *_message_at(header.offset, records)]


def _batch_ack(frame: Frame, records: StoredRecords | None) -> list[Need]:
    """Return the permissions for the topics and groups of the acknowledgements."""
    acks = group_bodies.decode_batch_acks(frame.body)
    return [need for ack in acks for need in (group(ack.group), topic(ack.topic, SUB))]


def _lite_syncs(frame: Frame, records: StoredRecords | None) -> list[Need]:
    syncs = group_bodies.decode_lite_subscriptions(frame.body)
    return [need for sync in syncs for need in (group(sync.group), topic(sync.topic, SUB))]


SEND = _sends_to("topic")
SEND_V2 = _sends_to("b")
READS_TOPIC_AS_GROUP = fields(topics=("topic",), groups=("consumerGroup",))
SEND_BACK = needing(_sent_back)
VIEW = needing(lambda frame, records: _message_at(read(LogOffset, frame.ext).offset, records))
END_TRANSACTION = needing(_ended)
BATCH_ACK = needing(_batch_ack)
LITE_SYNCS = needing(_lite_syncs)
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
PARENT_TOPIC = fields(topics=("parentTopic",))
OF_GROUP_AND_TOPIC = fields(topics=("topic",), groups=("group",))
CLONE = fields(topics=("topic",), groups=("srcGroup", "destGroup"))


# ------------------------------------------------------------------------------
# Finds the account of a request, which contains the account's access key and is signed with its secret, unless it comes
# from a white address.
#
# With TLS, a Rocketlet client authenticates its connection once (IDENTIFY): it signs the channel binding of this
# connection, so that the signature is useless on another one. The connection's other requests then need no signature
# until the account is deleted or its secret is replaced.


def authorize(
    acl: Acl, connection: RemotingConnection, frame: Frame, rule: Rule, records: StoredRecords | None
) -> None:
    """Check the account and permissions of a request. Raises ResponseError, and a handler's errors for a request that cannot
    be decoded. `records` is the broker's store; None in a process without a broker."""
    try:
        account = acl.account_of(connection, frame.ext.get(ACCESS_KEY), partial(_has_signed, frame))
        if account is not None:
            needs = rule.needs(frame, records) if rule.needs is not None else None
            acl.check(account, frame.code, needs, is_admin=rule.is_admin)
    except Unauthorized as fault:
        acl.note_refusal(connection, request_name(frame.code), fault)
        # as Apache's brokers: SYSTEM_ERROR with the text of their AclException
        raise ResponseError(ResponseCode.SYSTEM_ERROR, f"AclException: {fault}") from None


def _has_signed(frame: Frame, signer: Signer) -> bool:
    try:
        return signer.has_signed(frame.ext, frame.body)
    except (TypeError, ValueError):  # MessagePack fields whose names have types that cannot be sorted
        return False


def identify(acl: Acl, connection: RemotingConnection, frame: Frame) -> None:
    """IDENTIFY: authenticate the connection as an account. Raises ResponseError without TLS, for an unknown account, or for a
    signature that does not match; the client then continues to sign each request."""
    channel = connection.channel
    account = acl.file.policy.accounts.get(str(frame.ext.get(ACCESS_KEY)))
    is_proven = (
        account is not None
        and channel != ""
        and hmac.compare_digest(str(frame.ext.get(EXT_CHANNEL)).encode(), channel.encode())
        and acl.identify(connection, account, partial(_has_signed, frame))
    )
    if not is_proven:
        raise ResponseError(
            ResponseCode.NO_PERMISSION,
            "IDENTIFY needs TLS, a known account, and its signature of the connection's channel binding",
        )
