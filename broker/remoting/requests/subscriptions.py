"""Asks a foreign member what it subscribes to, where its heartbeat was lost.

Java's client changes the version of a subscription with each rebalance, and says so in a heartbeat. It gives that up if
another heartbeat is under way (MQClientInstance.sendHeartbeatToAllBrokerWithLock), as when members join within milliseconds.
Until its next one, up to 30 s later, its pulls name a version that no broker knows, and are refused.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog

from ....protocol.admin_answers import decode_running
from ....protocol.schema import BodyError
from ...broker import Broker
from ...config import MAX_RUNNING_INFO_BYTES, LimitExceeded
from ...sessions.events import Answer, Asked, RunningWanted
from ..connection import Connection

log = structlog.get_logger("rocketlet.groups")


def ask_for_versions(broker: Broker, connection: Connection, group_name: str) -> None:
    """Which versions a foreign member's subscriptions have. One that is asked already is not asked again."""
    group = broker.groups.get(group_name)
    member = group.foreign.get(connection) if group else None
    if member is not None and not broker.clients.is_asked(connection):
        question = RunningWanted(Asked(group_name, member.client_id, {}))
        answered = partial(_answered, broker, connection, group_name)
        with suppress(LimitExceeded):
            broker.clients.ask(connection, question, answered, by=connection)


def _answered(broker: Broker, connection: Connection, group_name: str, reply: Answer | None) -> None:
    group = broker.groups.get(group_name)
    member = group.foreign.get(connection) if group else None
    if group is None or member is None or reply is None or not reply.is_ok or len(reply.body) > MAX_RUNNING_INFO_BYTES:
        return
    try:
        running = decode_running(reply.body)
    except BodyError as error:
        if connection.is_news("member_unreadable"):
            log.info("member_unreadable", group=group_name, client=member.client_id, reason=str(error))
        return
    for topic, version in running.versions.items():
        known = member.subscriptions.get(topic)
        # Another expression has to come by a heartbeat, with all that is checked there.
        if known is not None and known.expression == running.subscriptions[topic]:
            group.take_version(member, topic, version)
