"""`python -m simulation.rolls 10`: ten rolls of foreign members over a backlog; how long each queue was not read.

A queue is not read while it has a backlog and no member will handle what it was given of it. `--scenario`: on two brokers."""

from __future__ import annotations

import argparse
import logging
import statistics

import structlog

from .patches import Violation
from .scenarios import simulate
from .world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rolls", type=int)
    parser.add_argument("--scenario", choices=("foreign-roll", "foreign-roll-of-two"), default="foreign-roll")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    worlds = [_world(seed, options.scenario) for seed in range(options.rolls)]
    times = [len(moments) for world in worlds for moments in world.handlings.values()]
    pauses = sorted(pause_s for world in worlds for pause_s in world.unread_s.values())
    marks = statistics.quantiles(pauses, n=100)
    print(
        f"{len(times)} messages, {sum(count > 1 for count in times)} handled twice; the longest pause of a queue: "
        f"median {marks[49]:.2f} s, 99 % {marks[98]:.2f} s, most {pauses[-1]:.2f} s"
    )


def _world(seed: int, scenario: str) -> World:
    try:
        return simulate(seed, scenario)
    except Violation as violation:
        return violation.world  # type: ignore[attr-defined, no-any-return]


if __name__ == "__main__":
    main()
