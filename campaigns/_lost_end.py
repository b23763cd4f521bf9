"""The log's end is lost, as in a power cut, and written over by a client who has read the marks that were there."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from rocketlet.broker.broker import Broker
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.message import body_begin

from ._forged import FORGED, VICTIM, forged_record, mark_in
from ._ledger import open_broker, put, read_all

ATTACKER = "t"


def is_forged_behind_a_lost_end(broker: Broker, work: Path, chance: random.Random) -> bool:
    """Whether a record in a body, in the place of one that was lost, with its mark, becomes a message. `work`: a copy of the
    broker's folder."""
    store = broker.store
    places = sorted(
        queue.entry(offset)[:2] for queue in store.queues.values() for offset in range(queue.begin, queue.next)
    )
    marked = [(at, mark) for at, size in places if (mark := mark_in(store.read_log(at, size)))]
    lost_from = chance.choice([at for at, _ in places])
    targets = [(at, mark) for at, mark in marked if lost_from + 200 < at]
    if not targets:
        return False
    target, mark = chance.choice(targets)
    segment_bytes = broker.config.segment_bytes
    _cut_log(work, lost_from)
    again = open_broker(work, segment_bytes=segment_bytes)
    if again.store.end != lost_from:  # a segment begins elsewhere
        again.store.close()
        return False
    again.topics.ensure(TopicConfig(ATTACKER, 1, 1), again.store.end)
    put(again, again.store.queue(ATTACKER, 0), b"")  # to know how much stands before a body
    head = again.store.read_log(lost_from, again.store.end - lost_from)
    begin = again.store.end + body_begin(head)
    if begin < target:
        offset = again.store.queue(VICTIM, 0).next
        inner = forged_record(target, VICTIM, offset, mark=mark)
        outer = again.store.end
        put(again, again.store.queue(ATTACKER, 0), bytes(target - begin) + inner)
        again.store.close()
        _garble(work, outer + 4)
        again = open_broker(work, segment_bytes=segment_bytes)
    bodies = read_all(again).values()
    again.store.close()
    return FORGED in bodies


def _cut_log(work: Path, end: int) -> None:
    """And loses what is derived from it."""
    for path in (work / "commitlog").iterdir():
        if int(path.name) >= end:
            path.unlink()
        elif int(path.name) + path.stat().st_size > end:
            os.truncate(path, end - int(path.name))
    _lose_indexes(work)


def _garble(work: Path, position: int) -> None:
    path = max(
        (path for path in (work / "commitlog").iterdir() if int(path.name) <= position), key=lambda path: path.name
    )
    with path.open("r+b") as file:
        file.seek(position - int(path.name))
        file.write(b"\0")
    _lose_indexes(work)


def _lose_indexes(work: Path) -> None:
    shutil.rmtree(work / "consumequeue", ignore_errors=True)
    for path in work.glob("checkpoint.*"):
        path.unlink()
