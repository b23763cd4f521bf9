"""What a seed decides of a run, before it begins."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LONGEST_HANDLER_S = 60.0


@dataclass
class Plan:
    """A seed's decisions.

    Attributes:
        long_handlers: The share of messages whose handlers run for 5 to 60 s.
        unread_limit_s: How soon a queue has a reader.
        backlog_limit_s: How long no member handles a queue with a backlog at most.
        kinds: Kinds of members, where some share messages.
        expression: The tags that members want.
    """

    brokers: int
    topics: int
    queues: int
    members: int
    gentle: bool
    mixed: bool
    orderly: bool
    sticky: bool
    handler_s: float
    long_handlers: float
    drain_s: float
    lost_notifications: float
    events: int
    scenario: str = ""
    unread_limit_s: float = 2.0
    backlog_limit_s: float = math.inf
    kinds: tuple[str, ...] = ("ours",)
    expression: str = "*"

    @property
    def is_calm(self) -> bool:
        """Whether every hand-over should be a matter of moments."""
        return self.gentle and not self.long_handlers and not self.lost_notifications

    @classmethod
    def of(cls, rng: random.Random) -> Plan:
        long_handlers = rng.choice((0.0, 0.0, 0.03))
        return cls(
            brokers=rng.choice((1, 1, 2)),
            topics=rng.choice((1, 2)),
            queues=rng.choice((1, 3, 4, 8)),
            members=rng.randint(1, 4),
            gentle=rng.random() < 0.5,
            mixed=rng.random() < 0.3,
            orderly=rng.random() < 0.3,
            sticky=rng.random() < 0.3,
            handler_s=rng.choice((0.001, 0.02, 0.2)),
            long_handlers=long_handlers,
            drain_s=rng.choice((30.0, LONGEST_HANDLER_S + 5.0)) if long_handlers else 30.0,
            lost_notifications=rng.choice((0.0, 0.0, 0.3)),
            events=rng.randint(2, 8),
        )
