"""Apache's push consumers that pull without a heartbeat become members at once: after a restart of the broker, or on a new
connection.

Their next heartbeat comes up to 30 s later (MQClientInstance.startScheduledTask); nothing that a broker answers makes Java's
client send one earlier. It answers a broker that asks how it runs (ClientRemotingProcessor.getConsumerRunningInfo): its
subscriptions and its queues, without its client id. It is the client that has read the queue last.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog

from ....protocol.admin_answers import Running, decode_running
from ....protocol.bodies import ConsumerData, Heartbeat
from ....protocol.config import MAX_SUBSCRIPTIONS
from ....protocol.frame import Frame
from ....protocol.names import RETRY_PREFIX
from ....protocol.queue import Queue
from ....protocol.schema import BodyError
from ....protocol.subscription import SubscriptionError, parse_subscription
from ...broker import Broker
from ...config import MAX_RUNNING_INFO_BYTES, LimitExceeded
from ...sessions.events import Answer, Asked, RunningWanted
from ...sessions.refusal import Refusal
from ..answers import Refused
from ..connection import Connection
from .membership import introduced

log = structlog.get_logger("rocketlet.groups")

Place = tuple[str, str, int]  # group, topic, queue id


def ask_who(broker: Broker, connection: Connection, frame: Frame, place: Place) -> None:
    """Asks a client that pulls a queue how it runs, unless it is being asked already."""
    if not broker.clients.is_asked(connection):
        question = RunningWanted(Asked(place[0], broker.locks.last_reader(*place) or "", {}))
        answered = partial(_answered, broker, connection, place, frame.language, frame.version)
        with suppress(LimitExceeded):
            broker.clients.ask(connection, question, answered, by=connection)


def _answered(
    broker: Broker, connection: Connection, place: Place, language: int, version: int, reply: Answer | None
) -> None:
    members = broker.groups.members_of(place[0])
    client_id = broker.locks.last_reader(*place)
    is_there = client_id is None or any(member.client_id == client_id for member in members.values())
    if reply is None or not reply.is_ok or connection in members or is_there or connection.is_closed:
        return
    try:
        beat = _beat_of(broker, connection, place, str(client_id), reply.body)
        if beat is not None:
            introduced(broker, connection, beat, language, version)
            log.info("member_known_again", group=place[0], client=client_id)
    except (BodyError, SubscriptionError, Refused, Refusal, LimitExceeded) as fault:
        if connection.is_news("member_unreadable"):
            log.info("member_unreadable", group=place[0], client=client_id, reason=str(fault))


def _beat_of(broker: Broker, connection: Connection, place: Place, client_id: str, body: bytes) -> Heartbeat | None:
    """The heartbeat that the client would send; None if it does not read the queue, or may not read all its topics."""
    if len(body) > MAX_RUNNING_INFO_BYTES:
        return None
    running = decode_running(body)
    is_reader = Queue(place[1], broker.config.name, place[2]) in running.commit_offsets
    if not is_reader or place[1] not in running.subscriptions:
        return None
    if len(running.subscriptions) > MAX_SUBSCRIPTIONS or not _may_read(broker, connection, running):
        return None
    subscriptions = tuple(
        parse_subscription(topic, expression, version=running.versions[topic], kind=running.kinds[topic])
        for topic, expression in running.subscriptions.items()
    )
    where = running.properties.get("consumeFromWhere") or "CONSUME_FROM_LAST_OFFSET"
    return Heartbeat(client_id, (ConsumerData(place[0], "CONSUME_PASSIVELY", "CLUSTERING", where, subscriptions),))


def _may_read(broker: Broker, connection: Connection, running: Running) -> bool:
    acl = broker.acl
    topics = (topic for topic in running.subscriptions if not topic.startswith(RETRY_PREFIX))
    return acl is None or all(acl.may_subscribe(connection, topic) for topic in topics)
