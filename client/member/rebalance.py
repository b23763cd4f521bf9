"""WHEN queues change hands, and WHAT this member's share is: one loop that computes the share and asks `Leases` to get there.

Every member asks for the list of members and computes its own share (`shares`, by the strategies of
`protocol/allocation`). Members see changes at different moments, so shares overlap for a while; the locks in `leases` keep
owners single meanwhile.

A failed or empty lookup of routes or members changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from ...protocol import names
from ...protocol.allocation import subscribe_queues
from ...protocol.bodies import Route
from ...protocol.queue import Queue
from ...protocol.schema import BodyError
from ..errors import RocketletError
from ..lease import clock_s
from ..log import get_logger
from ..wire.cluster import Cluster
from .heartbeats import Heartbeats
from .leases import Leases
from .shares import Share, Shares

log = get_logger("rocketlet.membership")


class Rebalance:
    """Rebalances one member. `wake` starts a pass; `settled` is set while the member holds exactly its share."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Iterable[str],
        leases: Leases,
        shares: Shares,
        heartbeats: Heartbeats,
        *,
        wake: asyncio.Event,
        settled: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._topics = list(topics)
        self._leases = leases
        self._shares = shares
        self._heartbeats = heartbeats
        self._wake = wake
        self._settled = settled
        self._results: dict[str, set[Queue]] = {}
        self._queues: dict[str, tuple[Route, list[Queue]]] = {}
        self._grown: set[str] = set()
        self.missing: set[str] = set()  # topics that no name server knows

    def add_topics(self, topics: Iterable[str]) -> None:
        self._topics = list(dict.fromkeys((*self._topics, *topics)))
        self._wake.set()

    def grown(self, topic: str) -> None:
        """A topic has other queues than before: its route is looked up in the next pass."""
        if topic in self._topics:
            self._grown.add(topic)

    async def run_forever(self, *, leaving: bool = False) -> None:
        """leaving: takes nothing more, but sees to it that brokers know this member until everything is handed over."""
        step = self._keep_in_touch if leaving else self._pass
        while True:
            self._wake.clear()
            self._retry_s = self._limits.rebalance_interval_s
            try:
                await step()
            except Exception:
                log.exception("rebalance_failed")
                self._retry_s = self._limits.lock_retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._wake.wait()

    async def _pass(self) -> None:
        """Finds this member's share, gives up queues outside of it, and locks new ones."""
        await self._keep_in_touch()
        await self._look_up_grown()
        mine, complete = await self._share_of_all()
        leases = self._leases
        if mine != leases.owned.keys():
            self._settled.clear()
        for queue in leases.owned.keys() - mine:
            leases.release(queue)
        await leases.acquire(mine)
        if leases.are_doubtful:
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        holds_all = complete and mine == leases.owned.keys()
        if not holds_all:
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        if not holds_all or leases.are_releasing:
            self._settled.clear()
        else:
            self._settled.set()
            self._heartbeats.tell_news()  # so that watchers see the assignment as this member does

    async def _keep_in_touch(self) -> None:
        await self._register()
        await self._leases.reclaim()

    async def _register(self) -> None:
        """A broker that is new, or back, hears this member before it is asked for anything."""
        await self._heartbeats.register(patience_s=self._limits.register_patience_s)
        if not all(map(self._heartbeats.is_registered, self._cluster.masters().values())):
            self._retry_s = self._limits.reconnect_s

    async def _look_up_grown(self) -> None:
        grown, self._grown = self._grown, set()
        for topic in grown:
            try:
                await self._cluster.find_route(topic)
            except (RocketletError, BodyError) as error:
                log.info("lookup_failed", topic=topic, reason=str(error), hint="it is looked up again")
                self._grown.add(topic)
                self._retry_s = min(self._retry_s, self._limits.lock_retry_s)

    async def _share_of_all(self) -> tuple[set[Queue], bool]:
        """This member's queues of all topics; False with them if those of a topic are not known, and stay as they are."""
        mine: set[Queue] = set()
        complete = not self._leases.are_suspended
        for topic in self._topics:
            share = await self._share_of(topic)
            if share is None:
                complete = False
                share = {queue for queue in self._leases.owned if queue.topic == topic}
            mine |= share
        return mine, complete

    def _miss(self, topic: str) -> None:
        """Says once that a topic does not exist; a group's retry topic comes with its first retry."""
        if topic not in self.missing and not topic.startswith(names.RETRY_PREFIX):
            self.missing.add(topic)
            hint = (
                "create it, send to it, or check its name and its brokers; it is read from its start when it is there"
            )
            log.warning("topic_missing", topic=topic, hint=hint)

    async def _share_of(self, topic: str) -> set[Queue] | None:
        """The queues of a topic that are this member's; None if that cannot be known now."""
        began_s = clock_s()
        try:
            route = self._cluster.route(topic) or await self._cluster.find_route(topic)
            if route is None:
                self._retry_s = min(self._retry_s, self._limits.missing_route_interval_s)
                self._miss(topic)
                return set() if topic.startswith(names.RETRY_PREFIX) else None
            self.missing.discard(topic)
            queues = self._queues_of(topic, route)
            share = await self._shares.of(topic, queues)
        except (RocketletError, BodyError) as error:
            log.info("lookup_failed", topic=topic, reason=str(error), hint="the assignment stays")
            return None
        if share is None:
            self._heartbeats.forget()  # the broker forgot us: register again
            return None
        self._note(topic, share, clock_s() - began_s)
        if share.unknown:
            self._grown.add(topic)  # others know more brokers: the name server may, too, by the next pass
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        return set(share.mine)

    def _queues_of(self, topic: str, route: Route) -> list[Queue]:
        """Sorted once per route: there is a pass for each change of the group."""
        found = self._queues.get(topic)
        if found is None or found[0] is not route:
            found = self._queues[topic] = (route, subscribe_queues(topic, route))
        return found[1]

    def _note(self, topic: str, share: Share, look_up_s: float) -> None:
        """Logs an event if the result has changed, with the fields of Apache's `rebalanced result changed`."""
        mine, before = set(share.mine), self._results.get(topic, set())
        if topic in self._results and mine == before:
            return
        self._results[topic] = mine
        log.info(
            "rebalanced",
            strategy=self._shares.strategy_name,
            group=self._shares.group,
            topic=topic,
            client_id=self._shares.client_id,
            queues=len(share.queues),
            members=share.members,
            result_count=len(mine),
            result=sorted(map(str, mine)),
            added=sorted(map(str, mine - before)),
            removed=sorted(map(str, before - mine)),
            look_up_ms=round(look_up_s * 1000, 1),
        )
