"""Commits: who may say how far a group is in a queue, and the offsets that are kept."""

from __future__ import annotations

import structlog

from ..sessions.session import Session
from .parts import Parts

log = structlog.get_logger("rocketlet.broker")


class Commits:
    def __init__(self, parts: Parts) -> None:
        self._groups = parts.groups
        self._pops = parts.pops
        self._locks = parts.locks
        self._draining = parts.draining
        self._offsets = parts.offsets
        self._watch = parts.watch
        self._store = parts.appender.store
        self._topics = parts.topics

    def fence_fault(
        self,
        session: Session,
        group: str,
        queue: tuple[str, int],
        offset: int,
        epoch: int | None,
        *,
        may_be_tool: bool = True,
    ) -> str | None:
        """Why this client may not say how far a group is in a queue; None if it may. may_be_tool: an administrator asks like
        that. Members that pull do not: their commits come with pulls, or one-way. They are known by that as long as a
        broker that was started again has no heartbeat of them."""
        is_member = self._is_member(session, group)
        if self._pops.pools and self._pops.is_apart(group, queue[0]) and (is_member or not may_be_tool):
            return f"clients of the group {group} pop {queue[0]}, and only they say how far it has come"
        if not may_be_tool and not is_member:
            self._locks.heard_reader(group, *queue, session)
        fault = self._locks.commit_fault(group, queue, session, epoch)
        allotment = self._draining.allotment
        if fault is None and group in allotment.bound and allotment.is_bystander(group, session, *queue):
            return f"{queue[0]}:{queue[1]} is another's; this member does not read it"
        goes_back = fault is None and offset < (self._offsets.get(group, queue[0], queue[1]) or 0)
        if goes_back and (self.is_foreign_member(session, group) or not (is_member or may_be_tool)):
            return self._stale_fault(session, group, queue, offset)
        return fault

    def store(self, session: Session, group: str, queue: tuple[str, int], offset: int, *, by_owner: bool) -> None:
        topic, queue_id = queue
        if self._draining.is_pending(group) and offset > (self._offsets.get(group, topic, queue_id) or 0):
            self._draining.advanced(group, session)
        end = self._locks.note_commit(group, topic, queue_id, offset)
        if end != offset:
            log.warning(
                "offset_set_back", group=group, topic=topic, queue=queue_id, offset=offset, end=end,
                hint="the member read messages that were lost before this start; their offsets are given again",
            )  # fmt: skip
        self._offsets.put(group, topic, queue_id, end, by_owner=by_owner)
        if self._pops.pools:
            self._pops.sent_elsewhere(group, topic, queue_id)

    def carried(self, session: Session, group: str, queue: tuple[str, int], offset: int) -> None:
        """The commit that a pull carries. One that may not be stored is none."""
        fault = self.fence_fault(session, group, queue, offset, None, may_be_tool=False)
        fault = fault or self.offset_fault(group, queue, offset)
        if fault is None:
            self.store(session, group, queue, offset, by_owner=self._locks.is_leased_to(group, *queue, session))

    def _stale_fault(self, session: Session, group: str, queue: tuple[str, int], offset: int) -> str | None:
        """Why a foreign member's commit that goes back is refused; None if it is not. Only who reads the queue may go back:
        others have loaded their offset before somebody else came further, and say it when they drop the queue. An
        administrator is no member and may go back."""
        if self._offsets.is_behind_owner(group, *queue, offset):
            return f"{offset} is behind what the last owner of {queue[0]}:{queue[1]} has committed"
        if self._watch.reader(group, *queue) is not session:
            committed = f"{self._offsets.get(group, *queue)}, which the group has committed of {queue[0]}:{queue[1]}"
            return f"{offset} is behind {committed}; this member does not read it"
        return None

    def _is_member(self, session: Session, group: str) -> bool:
        found = self._groups.get(group)
        return found is not None and session in found.members

    def is_foreign_member(self, session: Session, group: str) -> bool:
        """Whether Apache's push consumer is at the other end, as a member of the group."""
        found = self._groups.get(group)
        member = found.members.get(session) if found else None
        return member is not None and member.is_foreign

    def offset_fault(self, group: str, queue: tuple[str, int], offset: int) -> str | None:
        """Why an offset cannot be a group's; None if it can, or is set back. Apache's broker takes any number."""
        former_end = self._locks.former_end(group, *queue)
        if former_end is not None:
            offset = min(offset, former_end)
        found = self._store.queues.get(queue)
        if found is not None:
            begin, end = found.begin, found.next
        else:
            begin = end = 0
            topic = self._topics.get(queue[0])
            if topic is None or not 0 <= queue[1] < max(topic.read_queues, topic.write_queues):
                return f"there is no queue {queue[0]}:{queue[1]}"
        if begin <= offset <= end:
            return None
        return f"{offset} is not between the start {begin} and the end {end} of {queue[0]}:{queue[1]}"
