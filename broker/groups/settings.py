"""The settings of consumer groups: created with the first heartbeat, kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog

from ...protocol.bodies import DataVersion
from ...protocol.group_config import GroupConfig, group_json, read_group
from ...protocol.names import SYSTEM_GROUP_PREFIX, IllegalName, group_fault
from ...protocol.schema import BodyError
from ...protocol.work import joined
from ..config import LIMITS, MAX_RETRY_QUEUES, MAX_RETRY_TIMES, LimitExceeded, Limits, within
from ..running.jobs import Job
from ..sessions.generation import Generation
from ..store.files import StoreFull, read_state, replace_state, write_state
from ..store.journal import Journal

MAX_LONG = 2**63 - 1

log = structlog.get_logger("rocketlet.groups")


def _checked(group: GroupConfig) -> GroupConfig:
    """A group that may come into being. Raises IllegalName, LimitExceeded."""
    fault = group_fault(group.name)
    if fault:
        raise IllegalName(fault)
    within("retryQueueNums", group.retry_queues, 0, MAX_RETRY_QUEUES)
    within("retryMaxTimes", group.retry_max_times, -1, MAX_RETRY_TIMES)
    within("brokerId", group.broker_id, -1, MAX_LONG)
    within("whichBrokerWhenConsumeSlowly", group.slow_broker_id, -1, MAX_LONG)
    return group


class GroupConfigs:
    """`version` changes with them. Apache's brokers number it apart from that of the topics (SubscriptionGroupManager)."""

    def __init__(
        self,
        path: Path,
        time_ms: Callable[[], int],
        generation: Generation | None = None,
        limits: Limits = LIMITS,
        *,
        auto_create: bool,
    ) -> None:
        self._limits = limits
        self._path = path
        self._time_ms = time_ms
        self.version = DataVersion(time_ms())
        self.journal = Journal(path)
        self._is_behind = False  # whether neither file nor journal has all groups
        self.auto_create = auto_create
        self._generation = generation or Generation()
        self._groups: dict[str, GroupConfig] = {}
        for item in (*(read_state(path) or ()), *self.journal.read()):
            if "deleted" in item:
                self._groups.pop(item["deleted"], None)
                continue
            try:
                group = _checked(read_group(item))
            except (IllegalName, BodyError, LimitExceeded) as fault:
                log.warning("group_settings_skipped", group=item.get("groupName"), reason=str(fault))
                continue
            self._groups[group.name] = group

    def ensure(self, name: str, *, orderly: bool = False) -> GroupConfig | None:
        """The group's settings, made with defaults if groups may be made so; None if not. orderly: of one that is made.

        Raises IllegalName, LimitExceeded."""
        group = self._groups.get(name)
        if group is None and (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            group = GroupConfig(name, consume_orderly=orderly)
            try:
                self.put(group)
            except StoreFull as error:  # a group that only reads can do so on a full disk; the next change saves it
                log.error("group_save_failed", group=name, reason=str(error), hint="it is kept in memory")
                self._groups[name] = group
                self._is_behind = True
                self._touch()
        return group

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(list(self._groups.values()))

    def delete(self, name: str) -> None:
        """Forgets a group's settings. Raises StoreFull."""
        self._keep({"deleted": name})
        self._groups.pop(name, None)

    def put(self, group: GroupConfig) -> None:
        """Creates or alters a group. Raises IllegalName, LimitExceeded, StoreFull."""
        _checked(group)
        if group.name not in self._groups and len(self._groups) >= self._limits.max_groups:
            raise LimitExceeded(f"this broker takes {self._limits.max_groups} groups; delete some")
        self._keep(group_json(group))
        self._groups[group.name] = group

    def _keep(self, change: dict[str, Any]) -> None:
        """A change costs a line."""
        if self._is_behind:
            write_state(self._path, [group_json(item) for item in self._groups.values()])
            self.journal.clear()
            self._is_behind = False
        self.journal.append(change)
        self._touch()

    def _touch(self) -> None:
        self.version = DataVersion(self._time_ms(), self.version.counter + 1)
        self._generation.rise()

    def saving(self) -> Job[None]:
        """Writes the whole file when the journal has become long. Raises StoreFull; it is tried again the next time."""
        if self.journal.lines > self._limits.journal_lines + len(self._groups):
            yield from self.journal.shortening(self._saving())

    def _saving(self) -> Job[None]:
        groups = list(self._groups.values())
        content = yield from joined(orjson.dumps(group_json(group)) for group in groups)
        yield partial(replace_state, self._path, b"[%b]" % content)
