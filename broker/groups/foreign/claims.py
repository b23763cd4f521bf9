"""Finds the foreign members that take themselves for the reader of a queue: by the list that each was given last, or
because it reads."""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.allocation import TopicQueues
from ....protocol.work import Work
from ...config import LIMITS, Limits
from ...sessions.session import Session
from ..members import ConsumerGroup
from ..owning.watch import Watch
from .drain import Drain, QueueKey
from .given import ALONE, Given

Readers = dict[int, list[Session]]  # the readers of a topic's queues here


class Claims:
    def __init__(self, broker_name: str, given: Given, watch: Watch, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._broker_name = broker_name
        self._given = given
        self._watch = watch

    def finding(self, group: ConsumerGroup, queues: TopicQueues) -> Work[Readers | None]:
        """Finds the foreign members that take themselves for the reader of each queue here; None if they are too many.
        Several may do so for one queue: one that has let go of it but not of others, and one that was told first that it is
        its own."""
        claims: Readers = {}
        left = self._limits.max_claims
        for number, of_list in enumerate(self._given.claims(group.name, queues)):
            if number:
                yield
            for share, sessions in of_list:
                # The list is one for all topics, also for those that its reader does not subscribe to.
                readers = [item for item in sessions if queues.topic in group.subscriptions_of(item)]
                left -= len(share) * len(readers)
                if left < 0:
                    return None
                for queue in share:
                    if queue.broker_name == self._broker_name:
                        claims.setdefault(queue.queue_id, []).extend(readers)
        return claims

    def losing(
        self, group: ConsumerGroup, topic: str, here: int, owners: list[str], claims: Readers
    ) -> Iterator[tuple[QueueKey, Session]]:
        """The queues here of which a foreign member takes itself for the reader, and will not be the owner any more."""
        for queue_id in range(here):
            place = topic, queue_id
            owner = owners[queue_id] if owners else None
            for session in (*claims.get(queue_id, ()), *self._last_reader(group, place)):
                member = group.members.get(session)
                if member is not None and member.client_id != owner:
                    yield place, session

    def letting_go(
        self, group: ConsumerGroup, drain: Drain, topic: str, here: int, claims: Readers
    ) -> Iterator[tuple[QueueKey, Session]]:
        """Queues with members that are drained of them and, by their last list, do not read them any more: these drop the
        queue, now or soon."""
        for queue_id in range(here):
            place = topic, queue_id
            for session in drain.moving.get(place, ()):
                has_list = self._given.of(group.name, session) not in (None, ALONE)
                if has_list and session not in claims.get(queue_id, ()):
                    yield place, session

    def _last_reader(self, group: ConsumerGroup, place: QueueKey) -> Iterator[Session]:
        """The session that pulled last, unless it was given a list by which the queue is its own or another's. One that was
        given none has read since before a restart."""
        reader = self._watch.reader(group.name, *place)
        if reader in group.foreign and self._given.of(group.name, reader) in (ALONE, None):
            yield reader
