"""`settled` waits until a group has come to rest. For tests and deployments."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from ...protocol import names
from ...protocol.allocation import CONSISTENT_HASH
from ...protocol.counting import counted
from ...protocol.queue import Queue
from ..config import CLIENT_LIMITS, ClientLimits
from ..errors import RocketletError
from ..wire.access import Access
from .admin_client import AdminClient

LOOK_S = 0.05
_EVEN: Final = frozenset(("AVG", "AVG_BY_CIRCLE", "STICKY", ""))  # the last: Apache's clients do not say theirs


Look = Callable[[], Awaitable[list[dict[str, Any]]]]
"""Asks each broker of a cluster about a group, as `AdminClient.history` does."""


async def settled(
    name_server: str,
    group: str,
    *,
    members: int | None = None,
    timeout_s: float = 30.0,
    access: Access | None = None,
    limits: ClientLimits = CLIENT_LIMITS,
) -> dict[str, int]:
    """Waits until each queue of the group has one owner, no member is leaving, and the members' shares of each topic differ
    by one queue at most. With CONSISTENT_HASH the shares are compared with its own; those of a strategy that is neither this
    nor AVG, AVG_BY_CIRCLE or STICKY are not looked at. Returns how many queues each member owns, by client id: a member
    may hear of its last queue a moment after its broker, so `await consumer.assigned()` before you ask it.

    `members`: wait until the group has this many, too. Raises TimeoutError, which says what is missing, and RocketletError.
    Apache's brokers do not know who owns what, so it needs Rocketlet's.
    """
    async with AdminClient(name_server, access=access, limits=limits) as admin:
        return await settled_by(lambda: admin.history(group), group, members=members, timeout_s=timeout_s)


async def settled_by(look: Look, group: str, *, members: int | None, timeout_s: float) -> dict[str, int]:
    """Like `settled`, by the reports that `look` returns."""
    missing = "nothing was heard"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                reports = await look()
                if not reports:
                    raise RocketletError("the name server knows no broker")
                missing, owned = _judged(reports, members)
                if not missing:
                    return owned
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise TimeoutError(f"the group {group} has not settled in {timeout_s} s: {missing}") from None


def _is_hashed(owned_by: Mapping[Queue, str], clients: Sequence[str]) -> bool:
    """Whether CONSISTENT_HASH gives each queue of a topic to its owner."""
    queues = sorted(owned_by)
    return all(
        owned_by[queue] == client for client in clients for queue in CONSISTENT_HASH.allocate(client, queues, clients)
    )


def _judged(reports: list[dict[str, Any]], members: int | None) -> tuple[str, dict[str, int]]:
    """Why the group is not settled (empty if it is), and how many queues each member owns."""
    subscriptions = {item["clientId"]: item["subscriptions"] for report in reports for item in report["members"]}
    if members is not None and len(subscriptions) != members:
        return f"it has {counted(len(subscriptions), 'member')}", {}
    if not subscriptions:
        return "it has no members", {}
    leaving = [item["clientId"] for report in reports for item in report["members"] if item["leaving"]]
    if leaving:
        return f"{leaving[0]} is leaving", {}
    if any(report.get("draining") for report in reports):
        return "members from Apache's clients still handle messages of queues that move", {}
    strategies = {item["clientId"]: item["strategy"] for report in reports for item in report["members"]}
    owned_by: dict[Queue, str] = {}
    shares: dict[str, Counter[str]] = {}
    for report in reports:
        owners = {(item["topic"], item["queueId"]): item["clientId"] for item in report["owners"]}
        for topic, count in report["queues"].items():
            for number in range(count):
                owner = owners.get((topic, number))
                if owner is None or owner not in subscriptions:
                    return f"{topic}@{report['broker']}:{number} has no owner", {}
                shares.setdefault(topic, Counter())[owner] += 1
                owned_by[Queue(topic, report["broker"], number)] = owner
    for topic, share in shares.items():
        clients = names.sorted_ids([client for client, topics in subscriptions.items() if topic in topics])
        used = {strategies[client] for client in clients}
        counts = [share[client] for client in clients]
        if used <= _EVEN and max(counts) - min(counts) > 1:
            return f"the shares of {topic} are {sorted(counts)}", {}
        if used == {CONSISTENT_HASH.name} and not _is_hashed(
            {queue: owner for queue, owner in owned_by.items() if queue.topic == topic}, clients
        ):
            return f"the shares of {topic} are not those of CONSISTENT_HASH yet", {}
    return "", {client: sum(share[client] for share in shares.values()) for client in subscriptions}
