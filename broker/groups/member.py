"""One client's membership in one group: its own word on itself, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ...protocol.bodies import ConsumerData
from ...protocol.names import RETRY_PREFIX
from ...protocol.subscription import Subscription
from ..config import MEMBER_BYTES, PLACE_BYTES
from ..sessions.memory import subscription_bytes
from ..sessions.session import Session

POPS: Final = "CONSUME_POP"  # the kind of a member that pops messages and pulls no queue

Shape = frozenset[tuple[str, str]]  # topics and expressions, of long ones their summaries


@dataclass(slots=True, eq=False)
class Member:
    """One client's membership in one group. Times are of the monotonic clock, in seconds. topics: its subscribed ones,
    without the retry topic that all members have. has_pulled: though the group's members are to pop. is_presumed: it has
    sent no heartbeat, and its id is that of the queue's last reader."""

    client_id: str
    connection: Session
    data: ConsumerData
    language: int
    version: int
    seen_s: float
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    shape: Shape = frozenset()
    charged_bytes: int = 0
    has_news: bool = False
    sees_others: bool = False  # other numbers of queues than before
    has_pulled: bool = False
    is_presumed: bool = False

    @property
    def is_foreign(self) -> bool:
        """Apache's push consumers in a group that shares queues: they do not say how they allocate."""
        # Apache's pull consumers divide queues among themselves, and broadcasting ones share nothing: both are left
        # alone.
        data = self.data
        return not data.strategy and data.message_model == "CLUSTERING" and data.consume_type == "CONSUME_PASSIVELY"

    @property
    def pops(self) -> bool:
        return self.data.consume_type == POPS

    @property
    def is_seat(self) -> bool:
        """Whether it only stands for a client, which cannot be told or asked anything here."""
        return self.pops and not self.connection.peer

    @property
    def listed_id(self) -> str:
        """Its name in the list by which members share queues out. One that pops is the last of all: the first ones are given
        the group's retry topic, which it does not read."""
        return f"~{self.client_id}" if self.pops else self.client_id

    def update(self, data: ConsumerData, now_s: float) -> bool:
        """Takes over a heartbeat. True if a topic came or went, or the member is about to leave."""
        before = self.subscriptions.keys()
        fresh = {item.topic: item for item in data.subscriptions}
        for topic, old in self.subscriptions.items():
            new = fresh.get(topic)
            # The newer one stays, as in ConsumerGroupInfo.updateSubscription: versions are the times at which clients
            # subscribed.
            if new is not None and new.version <= old.version:
                fresh[topic] = old
        last = self.data
        changed = before != fresh.keys() or data.leaving != last.leaving or data.strategy != last.strategy
        self.has_news = data.assigned != last.assigned
        self.sees_others = data.queue_counts != last.queue_counts
        if before != fresh.keys():
            self.topics = frozenset(topic for topic in fresh if not topic.startswith(RETRY_PREFIX))
        self.subscriptions = fresh
        self.data = data
        self.seen_s = now_s
        return changed


def shape_of(subscriptions: Iterable[Subscription]) -> Shape:
    return frozenset((item.topic, item.summary) for item in subscriptions)


def size_of(data: ConsumerData) -> int:
    """About how many bytes a membership takes."""
    seen = len(data.queue_counts) + sum(map(len, data.queue_counts.values()))
    subscriptions = sum(map(subscription_bytes, data.subscriptions))
    return MEMBER_BYTES + subscriptions + PLACE_BYTES * (len(data.assigned) + seen)
