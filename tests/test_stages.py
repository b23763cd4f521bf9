"""State machines allow what they draw, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import pytest
from rocketlet.broker.groups import stages
from rocketlet.broker.groups.stages import Drain
from rocketlet.broker.pops import deliveries
from rocketlet.broker.pops.deliveries import Delivery
from rocketlet.client.consuming import queues
from rocketlet.client.message import Lease
from rocketlet.protocol.names import Queue


class Machine(NamedTuple):
    """`make` gives one in a state; `legal`: by state what each event leads to, in the events' order, - where it cannot be."""

    module: Any
    stages: type[Enum]
    events: type[Enum]
    make: Callable[[Any], Any]
    field: str
    legal: str


def _drain(stage: stages.DrainStage) -> Drain:
    made = Drain(0.0)
    made.stage = stage
    return made


def _sync(stage: stages.SyncStage) -> stages.PeerSync:
    made = stages.PeerSync()
    made.stage = stage
    return made


def _queue(state: queues.QueueState) -> queues.ProcessQueue:
    made = queues.ProcessQueue(Queue("t", "b", 0), 0, Lease(1))
    made.state = state
    return made


MACHINES = {
    "process queue": Machine(
        queues,
        queues.QueueState,
        queues.QueueEvent,
        _queue,
        "state",
        """
        suspend   resume  stop    drop
        SUSPENDED RUNNING STOPPED DROPPED RUNNING
        SUSPENDED RUNNING STOPPED DROPPED SUSPENDED
        STOPPED   STOPPED STOPPED DROPPED STOPPED
        -         -       -       -       DROPPED
        """,
    ),
    "synchronization": Machine(
        stages,
        stages.SyncStage,
        stages.SyncEvent,
        _sync,
        "stage",
        """
        change  find   agree give_up
        FINDING ASKING -     SILENT  FINDING
        FINDING -      DONE  DONE    ASKING
        FINDING -      -     DONE    DONE
        FINDING ASKING -     -       SILENT
        """,
    ),
    "drain": Machine(
        stages,
        stages.DrainStage,
        stages.DrainEvent,
        _drain,
        "stage",
        """
        change  find     find_nobody finish   agree    give_up
        FINDING DRAINING AGREEING    FINDING  -        NOTIFIED FINDING
        FINDING -        -           AGREEING -        NOTIFIED DRAINING
        FINDING -        -           -        NOTIFIED NOTIFIED AGREEING
        FINDING DRAINING AGREEING    -        -        -        NOTIFIED
        """,
    ),
    "delivery": Machine(
        deliveries,
        deliveries.DeliveryState,
        deliveries.Event,
        lambda state: Delivery(0, state),
        "state",
        """
        pop       release change    acknowledge  refuse  finish   forget
        IN_FLIGHT VISIBLE -         ACKNOWLEDGED -       -        FINISHED BEHIND
        IN_FLIGHT -       IN_FLIGHT ACKNOWLEDGED -       -        FINISHED VISIBLE
        IN_FLIGHT VISIBLE IN_FLIGHT ACKNOWLEDGED -       -        FINISHED IN_FLIGHT
        IN_FLIGHT -       -         -            VISIBLE FINISHED FINISHED ACKNOWLEDGED
        -         -       -         -            -       -        FINISHED FINISHED
        """,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_allows_what_its_table_says(name: str) -> None:
    _, stages, all_events, make, field, legal = MACHINES[name]
    found = []
    for stage in stages:
        row = []
        for event in all_events:
            machine = make(stage)
            try:
                getattr(machine, "transition" if hasattr(machine, "transition") else "turn")(event)
            except KeyError:
                assert getattr(machine, field) is stage
                row.append("-")
            else:
                row.append(getattr(machine, field).name)
        found.append([*row, stage.name])
    events, *rows = (line.split() for line in legal.strip().splitlines())
    assert [event.name.lower() for event in all_events] == events
    assert found == rows


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_drawn_where_it_lives(name: str) -> None:
    machine = MACHINES[name]
    picture = "\n".join(line for line in inspect.getsource(machine.module).splitlines() if line.startswith("#"))
    assert set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", picture)) >= {stage.name for stage in machine.stages}
