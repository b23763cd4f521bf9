"""The state that pulls and commits look at."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LiveConfig
from ..groups.foreign.draining import Draining
from ..groups.members import ConsumerGroups
from ..groups.owning.locks import Locks
from ..groups.owning.offsets import Offsets
from ..groups.owning.watch import Watch
from ..groups.settings import GroupConfigs
from ..messages.appender import Appender
from ..messages.filters import Filters
from ..messages.held_pulls import HeldPulls
from ..messages.statistics import Statistics
from ..messages.topics import Topics
from ..pops.pops import Pops
from ..sessions.clients import Clients


@dataclass(frozen=True, slots=True)
class Parts:
    settings: LiveConfig
    topics: Topics
    appender: Appender
    held_pulls: HeldPulls
    filters: Filters
    statistics: Statistics
    clients: Clients
    groups: ConsumerGroups
    group_configs: GroupConfigs
    offsets: Offsets
    locks: Locks
    watch: Watch
    draining: Draining
    pops: Pops
