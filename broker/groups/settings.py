"""The settings of consumer groups: made at the first heartbeat, kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog

from ...protocol.bodies import GroupConfig, group_json, read_group
from ...protocol.names import SYSTEM_GROUP_PREFIX, IllegalName, group_fault
from ..config import MAX_GROUPS, MAX_RETRY_QUEUES, MAX_RETRY_TIMES, LimitExceeded, within
from ..store.files import StoreFull, read_state, write_state

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
    def __init__(self, path: Path, *, auto_create: bool) -> None:
        self._path = path
        self.auto_create = auto_create
        self._groups: dict[str, GroupConfig] = {}
        for item in read_state(path) or ():
            group = read_group(item)
            try:
                _checked(group)
            except (IllegalName, LimitExceeded) as fault:
                log.warning("group_settings_skipped", group=group.name, reason=str(fault))
                continue
            self._groups[group.name] = group

    def find(self, name: str) -> GroupConfig | None:
        """The group's settings, made with defaults if groups may be made so; None if not.

        Raises IllegalName, LimitExceeded."""
        group = self._groups.get(name)
        if group is None and (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            group = GroupConfig(name)
            try:
                self.put(group)
            except StoreFull as error:  # a group that only reads can do so on a full disk; the next change saves it
                log.error("group_save_failed", group=name, reason=str(error), hint="it is kept in memory")
                self._groups[name] = group
        return group

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(list(self._groups.values()))

    def delete(self, name: str) -> None:
        """Forgets a group's settings. Raises StoreFull."""
        kept = {key: group for key, group in self._groups.items() if key != name}
        write_state(self._path, [group_json(group) for group in kept.values()])
        self._groups = kept

    def put(self, group: GroupConfig) -> None:
        """Creates or alters a group. Raises IllegalName, LimitExceeded, StoreFull."""
        _checked(group)
        if group.name not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise LimitExceeded(f"this broker takes {MAX_GROUPS} groups; delete some")
        write_state(self._path, [group_json(item) for item in {**self._groups, group.name: group}.values()])
        self._groups[group.name] = group
