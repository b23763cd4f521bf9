"""The settings of consumer groups: made at the first heartbeat, kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog

from ..protocol.bodies import GroupConfig, group_json, read_group
from ..protocol.names import SYSTEM_GROUP_PREFIX, IllegalName, group_fault
from .config import MAX_GROUPS
from .store.files import read_state, write_state

log = structlog.get_logger("rocketlet.groups")


class GroupConfigs:
    def __init__(self, path: Path, *, auto_create: bool) -> None:
        self._path = path
        self.auto_create = auto_create
        self._groups: dict[str, GroupConfig] = {}
        for item in read_state(path) or ():
            group = read_group(item)
            fault = group_fault(group.name)
            if fault:
                log.warning("group settings left out", reason=fault)
                continue
            self._groups[group.name] = group

    def find(self, name: str) -> GroupConfig | None:
        """The group's settings, made with defaults if groups may be made so; None if not.

        Raises IllegalName, StoreFull."""
        group = self._groups.get(name)
        if group is None and (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            if len(self._groups) >= MAX_GROUPS:
                return None
            group = GroupConfig(name)
            self.put(group)
        return group

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(list(self._groups.values()))

    def delete(self, name: str) -> None:
        """Forgets a group's settings. Raises StoreFull."""
        kept = {key: group for key, group in self._groups.items() if key != name}
        write_state(self._path, [group_json(group) for group in kept.values()])
        self._groups = kept

    def put(self, group: GroupConfig) -> None:
        """Creates or alters a group. Raises IllegalName, StoreFull."""
        fault = group_fault(group.name)
        if fault:
            raise IllegalName(fault)
        write_state(self._path, [group_json(item) for item in {**self._groups, group.name: group}.values()])
        self._groups[group.name] = group
