"""The state that all pages share."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from ..client.admin.admin_client import AdminClient
from ..client.producer import Producer
from .config import MAX_NOTICES, MAX_WATCHES
from .group_watch import GroupWatch
from .oldest import Oldest
from .rotation import Rotation
from .samples import GroupSample, TopicSample, sample_group, sample_topic


class Console:
    """`cluster` is what pages call the cluster, `read_only` whether nothing may be changed. `producer` makes one."""

    def __init__(
        self, admin: AdminClient, producer: Callable[[], Producer[bytes]], *, cluster: str, read_only: bool = False
    ) -> None:
        self.admin: Final = admin
        self.producer: Final = producer
        self.cluster: Final = cluster
        self.read_only: Final = read_only
        self.groups = Rotation[GroupSample](self._group_names, partial(sample_group, admin))
        self.topics = Rotation[TopicSample](partial(admin.topics, system=True), partial(sample_topic, admin))
        self.oldest = Oldest(admin)
        self.examining = asyncio.Lock()  # one look at the whole cluster at a time
        self.closing = asyncio.Event()
        self.streams = 0
        self._watches: OrderedDict[str, GroupWatch] = OrderedDict()
        self._notices: OrderedDict[str, str] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(item.run(), name="samples") for item in (self.groups, self.topics)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _group_names(self) -> list[str]:
        return await self.admin.groups(system=True)

    def watch(self, group: str) -> GroupWatch:
        """The close look at a group, shared by all pages that show it; the one that was not looked at for longest goes."""
        found = self._watches.pop(group, None) or GroupWatch(self.admin, group)
        self._watches[group] = found
        if len(self._watches) > MAX_WATCHES:
            self._watches.popitem(last=False)
        return found

    def forget_watch(self, group: str) -> None:
        self._watches.pop(group, None)

    def notice(self, text: str) -> str:
        """Keeps the report of a change, for the page that comes after it. Returns its key."""
        key = secrets.token_urlsafe(9)
        self._notices[key] = text
        if len(self._notices) > MAX_NOTICES:
            self._notices.popitem(last=False)
        return key

    def notice_of(self, key: str) -> str:
        return self._notices.get(key, "")
