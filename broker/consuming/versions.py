"""Asks a foreign member for its subscriptions, where its heartbeat was lost.

Java's client changes the version of a subscription with each rebalance, and says so in a heartbeat. It gives that up if
another heartbeat is under way (MQClientInstance.sendHeartbeatToAllBrokerWithLock), as when members join within milliseconds.
Until its next one, up to 30 s later, its pulls name a version that no broker knows, and are refused.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import structlog

from ...protocol.admin_answers import decode_running
from ...protocol.schema import BodyError
from ..config import MAX_RUNNING_INFO_BYTES, LimitExceeded
from ..groups.members import ConsumerGroups
from ..sessions.clients import Clients
from ..sessions.events import Answer, Asked, RunningWanted
from ..sessions.session import Session

log = structlog.get_logger("rocketlet.groups")


class Versions:
    def __init__(self, groups: ConsumerGroups, clients: Clients) -> None:
        self._groups = groups
        self._clients = clients

    def ask(self, session: Session, group_name: str) -> None:
        """Asks a foreign member for the versions of its subscriptions, unless it is being asked already."""
        group = self._groups.get(group_name)
        member = group.foreign.get(session) if group else None
        if member is not None and not self._clients.is_asked(session):
            question = RunningWanted(Asked(group_name, member.client_id, {}))
            with suppress(LimitExceeded):
                self._clients.ask(session, question, partial(self._answered, session, group_name), by=session)

    def _answered(self, session: Session, group_name: str, reply: Answer | None) -> None:
        group = self._groups.get(group_name)
        member = group.foreign.get(session) if group else None
        if group is None or member is None or reply is None or not reply.is_ok:
            return
        if len(reply.body) > MAX_RUNNING_INFO_BYTES:
            return
        try:
            running = decode_running(reply.body)
        except BodyError as error:
            if session.is_news("member_unreadable"):
                log.info("member_unreadable", group=group_name, client=member.client_id, reason=str(error))
            return
        for topic, version in running.versions.items():
            known = member.subscriptions.get(topic)
            # Another expression has to come by a heartbeat, with all that is checked there.
            if known is not None and known.expression == running.subscriptions[topic]:
                group.take_version(member, topic, version)
                self._groups.generation.rise()
