"""Committed offsets: the next message that a group reads of a queue. Saved every 5 s and at the end.

Rewinds are counted: a Spark query must know whether its group's offset is behind its checkpoint because somebody reset it,
or because the query was killed before it could commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

import orjson
import structlog

from ....protocol.names import IllegalName, group_fault
from ....protocol.work import joined
from ...config import LIMITS, LimitExceeded, Limits
from ...running.jobs import Job
from ...store.consume_queue import ConsumeQueue
from ...store.files import Save, read_state

log = structlog.get_logger("rocketlet.groups")

_REWINDS = "rewinds"  # beside keys with an @
_IDENTITIES = "identities"


class Offsets:
    """`identity_of(topic)` is an id that no later topic of the same name has; empty if it is not known."""

    def __init__(self, path: Path, identity_of: Callable[[str], str], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._path = path
        self._identity_of = identity_of
        self._offsets: dict[tuple[str, str], dict[int, int]] = {}
        self._dirty = False
        # The last commit of a lease's owner; by group and topic, so that a deleted topic costs one look a group.
        self._of_owners: dict[tuple[str, str], dict[int, int]] = {}
        state = read_state(path) or {}
        self._rewinds: dict[str, int] = state.pop(_REWINDS, {})
        self._saved_identities: dict[str, str] = state.pop(_IDENTITIES, {})
        for key, queues in state.items():
            topic, _, group = key.partition("@")
            self._offsets[topic, group] = {int(number): int(offset) for number, offset in queues.items()}
        self._count = sum(map(len, self._offsets.values()))
        self._encoded: dict[tuple[str, str], bytes] = {}  # entries of the state file, until their offsets change
        self._topics_of: dict[str, dict[str, None]] = {}
        self._groups_of: dict[str, dict[str, None]] = {}
        for topic, group in self._offsets:
            self._note(topic, group)

    def _note(self, topic: str, group: str) -> None:
        self._topics_of.setdefault(group, {})[topic] = None
        self._groups_of.setdefault(topic, {})[group] = None

    def forget_former(self, deleted: Container[str]) -> None:
        """Forgets offsets in topics that were deleted after these were saved, made anew or not."""
        for topic, saved in self._saved_identities.items():
            identity = self._identity_of(topic)
            if identity != saved and (identity or topic in deleted):
                self.forget_topic(topic)

    def clamp(self, queues: Mapping[tuple[str, int], ConsumeQueue]) -> None:
        """Sets back offsets beyond the end of their queue: the end was lost, and what will take its place is not read yet."""
        for (topic, group), offsets in self._offsets.items():
            for number, offset in offsets.items():
                queue = queues.get((topic, number))
                end = queue.next if queue else 0
                if offset > end:
                    log.warning(
                        "offset_set_back", group=group, topic=topic, queue=number, offset=offset, end=end,
                        hint="it was beyond the end of the queue",
                    )  # fmt: skip
                    offsets[number] = end
                    self._dirty = True

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        queues = self._offsets.get((topic, group))
        return None if queues is None else queues.get(queue_id)

    def knows(self, group: str, topic: str) -> bool:
        """Whether the group has an offset in any queue of the topic."""
        return bool(self._offsets.get((topic, group)))

    def put(self, group: str, topic: str, queue_id: int, offset: int, *, by_owner: bool = False) -> None:
        """by_owner: under a lease. Until somebody else has put an offset, nobody but an owner may go back behind it.

        Raises LimitExceeded, and IllegalName for a group that nothing is known of."""
        key = topic, group
        queues = self._offsets.get(key)
        if queues is None:
            fault = group_fault(group)
            if fault:
                raise IllegalName(fault)
        if queues is None or queue_id not in queues:
            if self._count >= self._limits.max_offsets:
                raise LimitExceeded(
                    f"this broker keeps {self._limits.max_offsets} offsets; delete groups that nobody needs"
                )
            self._count += 1
        if queues is None:
            queues = self._offsets[key] = {}
            self._note(topic, group)
        owners = self._of_owners.get(key)
        if by_owner:
            if owners is None:
                owners = self._of_owners[key] = {}
            owners[queue_id] = offset
        elif owners and owners.get(queue_id) != offset:
            owners.pop(queue_id, None)
        if offset < queues.get(queue_id, 0):
            self._rewinds[f"{topic}@{group}"] = self.rewinds(group, topic) + 1
        queues[queue_id] = offset
        self._encoded.pop(key, None)
        self._dirty = True

    def _of_owner(self, key: tuple[str, str], queue_id: int) -> int:
        owners = self._of_owners.get(key)
        return owners.get(queue_id, 0) if owners else 0

    def rewinds(self, group: str, topic: str) -> int:
        """How often the group's offset of a queue of the topic went back."""
        return self._rewinds.get(f"{topic}@{group}", 0)

    def mark(self, group: str, topic: str, queue_id: int) -> None:
        """The committed offset counts as an owner's: the next reader goes on from here."""
        offset = self.get(group, topic, queue_id)
        if offset is not None:
            self._of_owners.setdefault((topic, group), {})[queue_id] = offset

    def let_go_back(self, group: str, topic: str, queue_id: int) -> None:
        """An administrator sends the group back: a member may be behind the last owner again."""
        owners = self._of_owners.get((topic, group))
        if owners:
            owners.pop(queue_id, None)

    def is_behind_owner(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Whether an offset is one from before the last owner of a lease has gone on from it."""
        return offset < self._of_owner((topic, group), queue_id)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """The group's offsets in a topic, by queue id."""
        return dict(self._offsets.get((topic, group), {}))

    def topics_of(self, group: str) -> list[str]:
        return list(self._topics_of.get(group, ()))

    def groups(self) -> set[str]:
        """Every group that has an offset."""
        return set(self._topics_of)

    def groups_of(self, topic: str) -> list[str]:
        return list(self._groups_of.get(topic, ()))

    def encoded(self) -> Iterator[bytes]:
        """Everything, as it is saved: entries `"topic@group":{"queue id":offset}`."""
        for key in list(self._offsets):
            entry = self._encoded.get(key)
            queues = self._offsets.get(key)
            if queues is None:
                continue
            if entry is None:
                value = orjson.dumps(queues, option=orjson.OPT_NON_STR_KEYS)
                entry = self._encoded[key] = b"%b:%b" % (orjson.dumps("@".join(key)), value)
            yield entry

    def forget_group(self, group: str) -> None:
        for topic in self.topics_of(group):
            self._forget(topic, group)

    def forget_topic(self, topic: str) -> None:
        for group in self.groups_of(topic):
            self._forget(topic, group)

    def _forget(self, topic: str, group: str) -> None:
        queues = self._offsets.pop((topic, group))
        self._count -= len(queues)
        self._of_owners.pop((topic, group), None)
        self._encoded.pop((topic, group), None)
        for table, name, other in ((self._topics_of, group, topic), (self._groups_of, topic, group)):
            del table[name][other]
            if not table[name]:
                del table[name]
        self._rewinds.pop(f"{topic}@{group}", None)
        self._dirty = True

    def saving(self) -> Job[Save | None]:
        """How to save what has changed; None if nothing has."""
        if not self._dirty:
            return None
        self._dirty = False
        # First: an offset must not be saved with the identity of a topic that was made anew meanwhile.
        identities = {topic: identity for topic in self._groups_of if (identity := self._identity_of(topic))}
        yield None
        entries = yield from joined(self.encoded())
        rest = orjson.dumps({_REWINDS: self._rewinds, _IDENTITIES: identities})
        content = b"{%b%b%b" % (entries, b"," if entries else b"", rest[1:])
        return Save(self._path, content, self._again)

    def _again(self) -> None:
        self._dirty = True
