"""Settings of consumer groups, and their mode (pull or pop)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import orjson
import structlog

from ...protocol.bodies import DataVersion, GroupConfig, encode_group, joined, read_group
from ...protocol.group_bodies import PULL, RequestMode, decode_request_modes, encode_request_modes
from ...protocol.names import SYSTEM_GROUP_PREFIX, IllegalName, group_fault
from ...protocol.settings import group_settings_fault
from ..config import LimitExceeded
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..sessions.refusal import Reason, Refusal
from ..store.files import StoreFull, read_state, replace_state, write_state
from ..store.journals import Journal
from .group import ConsumerGroups

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# The settings of consumer groups, kept in a file. A broker that creates groups automatically does so at their first
# request.


def _checked(group: GroupConfig) -> GroupConfig:
    """Return a group's settings if they are valid. Raises IllegalName, LimitExceeded."""
    fault = group_fault(group.name)
    if fault:
        raise IllegalName(fault)
    fault = group_settings_fault(group)
    if fault:
        raise LimitExceeded(fault)
    return group


class GroupConfigs:
    """Stores the settings of groups.

    Attributes:
        version: the version of these settings, which differs from that of the topics, as at Apache's brokers
            (SubscriptionGroupManager).
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        path: Path,
        *,
        auto_create: bool,
    ) -> None:
        self._limits = runtime.limits
        self._path = path
        self._time_ms = time_ms = runtime.clock.time_ms
        self.version = DataVersion(time_ms())
        self.journal = Journal(path)
        self._is_behind = False  # True if neither the file nor the journal has all groups
        self.auto_create = auto_create
        self._generation = runtime.generation
        self._groups = groups
        self._count = 0
        saved = runtime.adoption.whole("groups", read_state(path), list[object]) or []
        runtime.adoption.each("groups", (*saved, *self.journal.read()), self._adopt)

    def _adopt(self, item: object) -> None:
        if isinstance(item, dict) and "deleted" in item:
            self._remove(item["deleted"])
        else:
            self._store(_checked(read_group(item)))

    def _store(self, settings: GroupConfig) -> None:
        group = self._groups.obtain(settings.name)
        self._count += group.settings is None
        group.settings = settings

    def _remove(self, name: str) -> None:
        group = self._groups.get(name)
        if group is not None and group.settings is not None:
            group.settings = None
            self._count -= 1
            self._groups.release(group)

    def get(self, name: str) -> GroupConfig | None:
        """Return the group's settings, or None if there is no such group."""
        group = self._groups.get(name)
        return group.settings if group is not None else None

    def ensure(self, name: str, *, orderly: bool = False) -> GroupConfig | None:
        """Return the group's settings. Create a missing group if groups are created automatically, or if it is one of
        RocketMQ's own; otherwise return None.

        Args:
            orderly: True to create it as an ordered group.

        Raises:
            IllegalName, LimitExceeded: the group cannot be created.
        """
        known = self._groups.get(name)
        group = known.settings if known is not None else None
        if group is None and (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            group = GroupConfig(name, consume_orderly=orderly)
            try:
                self.put(group)
            except StoreFull as error:  # a group that only reads can do so on a full disk; the next change saves it
                log.error("group_save_failed", group=name, reason=str(error), hint="it is kept in memory")
                self._store(group)
                self._is_behind = True
                self._touch()
        return group

    def consuming(self, name: str, *, orderly: bool = False) -> GroupConfig:
        """Return the settings of the group of a client that consumes; create a missing group as `ensure` does. Raises
        Refusal."""
        settings = self.ensure(name, orderly=orderly)
        if settings is None:
            raise Refusal(Reason.NO_GROUP, f"subscription group [{name}] does not exist; create it first")
        if not settings.consume_enable:
            raise Refusal(Reason.NOT_PERMITTED, f"subscription group no permission, {name}")
        return settings

    @staticmethod
    def bound_fault(group: GroupConfig) -> str | None:
        """Return why a consumer of topics may not use a group: it receives lite topics. None for other groups."""
        if not group.lite_topic:
            return None
        return (
            f"the group {group.name} receives lite topics of {group.lite_topic}; use a lite consumer or another group, or "
            f"stop its lite consumers and run `rocketlet groups set {group.name} --no-lite`"
        )

    def check_unbound(self, group: GroupConfig) -> None:
        """Raises Refusal for a group that receives lite topics."""
        fault = self.bound_fault(group)
        if fault is not None:
            raise Refusal(Reason.LITE_GROUP, fault)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter([group.settings for group in self._groups if group.settings is not None])

    def delete(self, name: str) -> None:
        """Delete a group's settings. Raises StoreFull."""
        self._keep({"deleted": name})
        self._remove(name)

    def put(self, group: GroupConfig) -> None:
        """Create or alter a group. Raises IllegalName, LimitExceeded, StoreFull."""
        _checked(group)
        if group.name not in self and self._count >= self._limits.max_groups:
            raise LimitExceeded(f"the broker has {self._limits.max_groups} groups, which is the maximum; delete some")
        self._keep(group)
        self._store(group)

    def _keep(self, change: GroupConfig | dict[str, str]) -> None:
        """Append a change to the journal. If both files lack an earlier change, write the whole file before."""
        if self._is_behind:
            write_state(self._path, list(self))
            self.journal.clear()
            self._is_behind = False
        self.journal.append(change)
        self._touch()

    def _touch(self) -> None:
        self.version = DataVersion(self._time_ms(), self.version.counter + 1)
        self._generation.increment()

    def saving(self) -> Job[None]:
        """Write the whole file if the journal has become long. Raises StoreFull; the next call retries."""
        if self.journal.lines > self._limits.journal_lines + self._count:
            yield from self.journal.shortening(self._saving())

    def _saving(self) -> Job[None]:
        groups = list(self)
        content = yield from joined(map(encode_group, groups))
        yield partial(replace_state, self._path, b"[%b]" % content)


# ------------------------------------------------------------------------------
# How the members of a group get a topic's messages: members pull from queues that are allocated to them (PULL), or pop
# any message (POP). Administrators set the mode, and members query it.


class RequestModes:
    """The modes of groups and topics, kept in a file. The default is PULL."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self._limits = runtime.limits
        self._path = path
        self._modes: dict[tuple[str, str], RequestMode] = {}
        state = read_state(path)
        runtime.adoption.each("request modes", () if state is None else (state,), self._adopt)

    def _adopt(self, state: object) -> None:
        self._modes = {(mode.group, mode.topic): mode for mode in decode_request_modes(orjson.dumps(state))}

    def __iter__(self) -> Iterator[RequestMode]:
        return iter(self._modes.values())

    def of(self, group: str, topic: str) -> RequestMode:
        return self._modes.get((group, topic)) or RequestMode(topic, group, PULL)

    def put(self, mode: RequestMode) -> None:
        """Set the mode of a group and topic. Raises LimitExceeded, StoreFull."""
        key = mode.group, mode.topic
        if key not in self._modes and len(self._modes) >= self._limits.max_request_modes:
            raise LimitExceeded(f"this broker keeps {self._limits.max_request_modes} request modes")
        modes = {**self._modes, key: mode}
        write_state(self._path, orjson.loads(encode_request_modes(modes.values())))
        self._modes = modes
