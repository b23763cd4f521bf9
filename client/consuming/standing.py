"""Names queues whose oldest message is not acknowledged for long, and an event loop that stood still."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ...protocol.queue import Queue
from ..config import BLOCKED_LOOK_S, BLOCKED_NAMING_S, BLOCKED_S, ClientLimits
from ..log import get_logger
from .process_queue import ProcessQueue

log = get_logger("rocketlet.consumer")


@dataclass(slots=True)
class Front:
    """The oldest message of a queue that is not acknowledged; named again when it has stood twice as long."""

    offset: int
    since_s: float
    next_naming_s: float
    was_named: bool = False


class Standing:
    """Looked at now and then, so that a message costs nothing."""

    def __init__(self, group: str, limits: ClientLimits) -> None:
        self._group = group
        self._limits = limits
        self._fronts: dict[Queue, Front] = {}
        self._blocks = 0  # since they were named last, with the longest of them
        self._longest_s = 0.0
        self._next_block_s = -math.inf

    async def watch(self) -> None:
        """Looks for ever whether the event loop stands still: it can tell only afterwards, by how late a timer is."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(BLOCKED_LOOK_S)
            now_s = time.monotonic()
            self._blocked(now_s - began_s - BLOCKED_LOOK_S, now_s)

    def _blocked(self, late_s: float, now_s: float) -> None:
        """The block may have begun as early as the last look."""
        if late_s + BLOCKED_LOOK_S <= BLOCKED_S:
            return
        self._blocks += 1
        self._longest_s = max(self._longest_s, late_s)
        if now_s < self._next_block_s:
            return
        log.warning(
            "event_loop_blocked",
            group=self._group,
            seconds=round(self._longest_s, 1),
            times=self._blocks,
            hint="make a handler that blocks a plain function; it then runs in a thread",
        )
        self._next_block_s, self._blocks, self._longest_s = now_s + BLOCKED_NAMING_S, 0, 0.0

    def look(self, process_queues: Iterable[ProcessQueue]) -> None:
        now_s = time.monotonic()
        fronts = {
            process_queue.queue: self._front(process_queue, now_s)
            for process_queue in process_queues
            if process_queue.runs and not process_queue.is_held
        }
        for queue in self._fronts.keys() - fronts.keys():
            self._end(queue, now_s)
        self._fronts = fronts

    def _front(self, process_queue: ProcessQueue, now_s: float) -> Front:
        front, offset = self._fronts.get(process_queue.queue), process_queue.commit_offset
        if front is None or front.offset != offset:
            self._end(process_queue.queue, now_s)
            return Front(offset, now_s, now_s + self._limits.standing_s)
        if now_s >= front.next_naming_s:
            standing_s = now_s - front.since_s
            log.warning(
                "queue_stuck",
                group=self._group,
                queue=str(process_queue.queue),
                offset=offset,
                message=process_queue.runs[0].messages[process_queue.runs[0].done].message_id,
                seconds=round(standing_s, 1),
                handlers=process_queue.running,
                cached=process_queue.messages,
                hint="its oldest message is not acknowledged",
            )
            front.was_named, front.next_naming_s = True, now_s + standing_s
        return front

    def _end(self, queue: Queue, now_s: float) -> None:
        front = self._fronts.get(queue)
        if front is not None and front.was_named:
            seconds = round(now_s - front.since_s, 1)
            log.info("queue_unstuck", group=self._group, queue=str(queue), offset=front.offset, seconds=seconds)
