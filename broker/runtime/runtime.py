"""What every part of a broker runs on, in one object."""

from __future__ import annotations

from ..config import LIMITS, Limits
from .adoption import Adoption
from .clock import MACHINE, Clock
from .generation import Generation
from .tasks import Tasks
from .turns import Turns


class Runtime:
    """The clock, limits, tasks, deferred work and generation of one broker. Each part takes from it what it needs.

    Args:
        clock: the source of time for state that expires, becomes due or gets a timestamp.
        limits: the limits in force.
        generation: the number by which cached checks are invalidated; the accounts' file has it, too.
        tasks: background tasks.
        turns: long work in pieces.
    """

    __slots__ = ("adoption", "clock", "generation", "limits", "tasks", "turns")

    def __init__(
        self,
        clock: Clock = MACHINE,
        limits: Limits = LIMITS,
        generation: Generation | None = None,
        tasks: Tasks | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.adoption = Adoption()
        self.clock = clock
        self.limits = limits
        self.generation = generation if generation is not None else Generation()
        self.tasks = tasks if tasks is not None else Tasks(clock)
        self.turns = turns if turns is not None else Turns(call_soon=clock.call_soon, limits=limits)
