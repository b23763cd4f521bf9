"""Every file of a data folder cut, zeroed, garbled, flipped, padded, emptied, deleted; the broker is then started over it.

Flushed is what a checkpoint knows: of what a killed broker wrote after it, only a cut within a message can be seen.
A fault is: a start that fails with anything but a reason that names the file, a message that is not as it was stored, bit by
bit, one that was flushed and is gone without a word (unless nothing is left that says what was there), one whose bytes are
all where they were and that is not found, one that is gone after a second start only, an offset that is given again, an index
that is rebuilt although it is whole, a delay level that one damaged message stops, a second broker that gets in.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rocketlet.broker.broker import Broker
from rocketlet.broker.store.files import Folder, StoreError
from rocketlet.protocol.bodies import TopicConfig

from ._ledger import LATE, Place, differences, is_said, open_broker, put, read_all
from .common import Limit, Outcome

DEFAULT_COUNT = 1000
HANG_S = 20.0
TEMPLATES = 4  # folders to start from; every second one was killed
MESSAGES = 400
AT_ONCE: dict[str, Any] = {"delay_levels_ms": (0,)}  # delayed messages are due at once
TOPICS = {"t": 4, "u": 1}  # queues
NOTHING_LEFT = "the log's end, the checkpoint and the indexes"  # nothing says what was there

Change = Callable[[bytearray, random.Random], object]


def _overwrite(data: bytearray, chance: random.Random, with_: bytes) -> None:
    at = chance.randrange(len(data))
    data[at : at + len(with_)] = with_[: len(data) - at]


def _alter(data: bytearray, chance: random.Random) -> None:
    """A digit becomes another one: what was JSON is still JSON."""
    end = data.find(b"\n#crc32 ")
    digits = [at for at, byte in enumerate(data[:end] if end > 0 else data) if byte in b"0123456789"]
    if digits:
        at = chance.choice(digits)
        data[at] = chance.choice([digit for digit in b"0123456789" if digit != data[at]])


CHANGES: dict[str, Change] = {
    "cut": lambda data, chance: data.__delitem__(slice(chance.randrange(len(data)), None)),
    "beheaded": lambda data, chance: data.__delitem__(slice(0, chance.randrange(1, len(data) + 1))),
    "zeroed": lambda data, chance: _overwrite(data, chance, bytes(chance.randrange(1, len(data) + 1))),
    "garbled": lambda data, chance: _overwrite(data, chance, chance.randbytes(chance.randrange(1, 200))),
    "flipped": lambda data, chance: data.__setitem__(
        at := chance.randrange(len(data)), data[at] ^ 1 << chance.randrange(8)
    ),
    "padded": lambda data, chance: data.extend(chance.choice((bytes, chance.randbytes))(chance.randrange(1, 300))),
    "emptied": lambda data, chance: data.clear(),
    "altered": lambda data, chance: _alter(data, chance),
}


class Template:
    """A folder and what was flushed into it: each message's record, and where it lies in the log."""

    def __init__(self, folder: Path, seed: int, *, is_killed: bool) -> None:
        self.folder = folder
        self.stored: dict[Place, bytes] = {}
        self.records: dict[Place, tuple[int, int]] = {}
        self.committed: dict[str, int] = {}
        self.waiting: dict[Place, bytes] = {}  # delayed messages that were not delivered
        chance = random.Random(seed)
        broker = open_broker(folder, **AT_ONCE)
        for name, queues in TOPICS.items():
            broker.topics.put(TopicConfig(name, queues, queues), broker.store.end)
        for number in range(MESSAGES):
            into = broker.store.queue(*chance.choice((("t", 0), ("t", 1), ("t", 2), ("u", 0))))
            put(broker, into, b"%d-" % number + chance.randbytes(chance.randrange(200)))
            if number % 20 == 0:
                place = put(broker, broker.delays.queue(1), b"late-%d" % number, LATE, 1)
                if number < MESSAGES // 2:
                    broker.delays._deliver_due(1)
                else:
                    self.waiting[place] = b"late-%d" % number
            if number == MESSAGES * 3 // 4:
                for group, offset in (("g", 20), ("h", broker.store.queue("t", 0).next)):
                    broker.group_configs.ensure(group)
                    broker.offsets.put(group, "t", 0, offset)
                    self.committed[group] = offset
                broker.persist()
                self.flushed_to = broker.store.end
        if not is_killed:
            broker.persist(closes=True)
            self.flushed_to = broker.store.end
        for queue in broker.store.queues.values():
            for offset in range(queue.next):
                position, size, _ = queue.entry(offset)
                self.stored[queue.topic, queue.queue_id, offset] = broker.store.read_log(position, size)
                self.records[queue.topic, queue.queue_id, offset] = (position, size)
        broker.store.close()


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"kept": 0, "said": 0, "refused": 0, "slowest_s": 0.0})
    templates = [Template(folder / f"template-{n}", seed + n, is_killed=n % 2 == 1) for n in range(TEMPLATES)]
    for number in limit:
        chance = random.Random(f"{seed}-{number}")
        template = templates[number % TEMPLATES]
        work = folder / "work"
        shutil.copytree(template.folder, work)
        kind = chance.random()
        lose = _damage if kind > 0.1 else partial(_tear_end if kind > 0.05 else _lose_end, template)
        what = lose(work, chance)
        began_s = time.monotonic()
        try:
            _try(template, work, what, outcome)
        except Exception as error:
            outcome.fault(f"{what}: {type(error).__name__}: {error}")
        taken_s = time.monotonic() - began_s
        outcome.figures["slowest_s"] = max(outcome.figures["slowest_s"], round(taken_s, 2))
        if taken_s > HANG_S:
            outcome.fault(f"{what}: {taken_s:.0f} s")
        outcome.tried += 1
        shutil.rmtree(work)
    return outcome


def _damage(folder: Path, chance: random.Random) -> str:
    """Changes one file, at times two; what was done, in words."""
    done: list[str] = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        kinds: dict[str, list[Path]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            kinds.setdefault(path.parent.name if path.name.isdigit() else path.stem, []).append(path)
        path = chance.choice(kinds[chance.choice(list(kinds))])
        name = chance.choice([*CHANGES, "deleted"])
        if path.suffix == ".json" and chance.random() < 0.3:
            name = "altered"  # which only a checksum shows
        if name == "deleted":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            if data:
                CHANGES[name](data, chance)
            path.write_bytes(data)
        kind = path.parent.name if path.name.isdigit() and not path.parent.name.isdigit() else path.name
        done.append(f"{'index' if kind.isdigit() else kind} {name}")
    return " and ".join(done)


def _lose_end(template: Template, folder: Path, chance: random.Random) -> str:
    """Cuts the log between two messages, and removes all that is derived from it."""
    end, _ = chance.choice(list(template.records.values()))
    for path in (folder / "commitlog").glob("*"):
        if int(path.name) >= end:
            path.unlink()
        elif int(path.name) + path.stat().st_size > end:
            os.truncate(path, end - int(path.name))
    for path in folder.glob("checkpoint.*"):
        path.unlink()
    shutil.rmtree(folder / "consumequeue")
    return NOTHING_LEFT


def _tear_end(template: Template, folder: Path, chance: random.Random) -> str:
    """Zeros the log from within a message on, as a power cut does, and an index, so that more of the log is read."""
    log = max((folder / "commitlog").glob("*"), key=lambda path: int(path.name))
    position, size = chance.choice([record for record in template.records.values() if record[0] >= int(log.name)])
    data = log.read_bytes()
    torn = position - int(log.name) + chance.randrange(1, size)
    log.write_bytes(data[:torn] + bytes(len(data) - torn))
    index = chance.choice(sorted(path for path in (folder / "consumequeue").rglob("*") if path.is_file()))
    index.write_bytes(bytes(index.stat().st_size))
    return "the log's end zeroed and an index zeroed"


def _intact(template: Template, work: Path) -> set[Place]:
    """The messages whose bytes are still where they were."""
    segments = {int(path.name): path.read_bytes() for path in (work / "commitlog").glob("*")}
    found: set[Place] = set()
    for place, (position, size) in template.records.items():
        start = max((start for start in segments if start <= position), default=None)
        if start is not None and segments[start][position - start :][:size] == template.stored[place]:
            found.add(place)
    return found


def _try(template: Template, work: Path, what: str, outcome: Outcome) -> None:
    intact = _intact(template, work)
    try:
        broker = open_broker(work, **AT_ONCE)
    except StoreError as error:
        outcome.figures["refused"] += 1
        if ".json is damaged" not in str(error):
            outcome.fault(f"{what}: refused without a file's name: {error}")
        return
    _lose_lock(work, what, outcome)
    found = _checked(template, broker, what, outcome)
    if any(place not in found for place in intact):
        outcome.fault(f"{what}: a whole message is not found")
    broker.delays._deliver_due(1)
    found |= {place: record for place, record in read_all(broker, whole=True).items() if place[:2] == ("t", 3)}
    _check_state(template, broker, intact, what, outcome)
    ends = {key: queue.next for key, queue in broker.store.queues.items()}
    for queue in [queue for queue in broker.store.queues.values() if queue.topic in ("t", "u")]:
        place = put(broker, queue, b"new")
        is_known = (
            "checkpoint" not in what and template.records.get(place, (template.flushed_to, 0))[0] < template.flushed_to
        )
        if is_known:
            outcome.fault(f"{what}: an offset is given again")
        found[place] = broker.store.read_log(*queue.entry(place[2])[:2])
    for group, offset in template.committed.items():
        found_offset, end = broker.offsets.get(group, "t", 0), ends.get(("t", 0), 0)
        if found_offset is not None and found_offset != min(offset, end):
            outcome.fault(f"{what}: a group stands where it never stood, or behind the end")
    if broker.delays.progress.get(1, 0) > broker.delays.queue(1).next:
        outcome.fault(f"{what}: a delay level stands behind the end")
    _flip_written(template, broker, found, what, outcome)
    broker.persist()
    broker.store.close()
    again = open_broker(work, **AT_ONCE)
    missing, wrong = differences(found, read_all(again, whole=True))
    if missing or wrong:
        outcome.fault(f"{what}: other messages after a second start")
    if again.recovered.rebuilt:
        outcome.fault(f"{what}: a whole index is rebuilt by a second start")
    again.store.close()


def _flip_written(template: Template, broker: Broker, found: dict[Place, bytes], what: str, outcome: Outcome) -> None:
    """A bit of a message that this broker has written, and flips on the disk while it runs: it is not delivered, and said."""
    new = sorted(place for place in found if place not in template.stored and place[:2] != ("t", 3))
    if not new:
        return
    place = new[len(new) // 2]
    position, size, _ = broker.store.queue(*place[:2]).entry(place[2])
    log = max(
        (path for path in (broker.config.data_dir / "commitlog").iterdir() if int(path.name) <= position),
        key=lambda path: int(path.name),
    )
    at, was = position - int(log.name) + size // 2, found.pop(place)
    with log.open("r+b") as file:
        file.seek(at)
        file.write(bytes((was[size // 2] ^ 1,)))
    fetched = broker.store.fetch(
        broker.store.queue(*place[:2]), place[2], 1
    )  # alone: read with older ones, all are checked
    if fetched.pieces or read_all(broker, whole=True) != found or place not in broker.store.damaged:
        outcome.fault(f"{what}: a bit flipped while the broker runs is delivered, or hides other messages")


def _lose_lock(work: Path, what: str, outcome: Outcome) -> None:
    """Somebody tidies up while the broker runs."""
    (work / "lock").unlink()
    try:
        Folder(work).unlock()
    except StoreError:
        return
    outcome.fault(f"{what}: without the file `lock` a second broker gets in")


def _check_state(template: Template, broker: Broker, intact: set[Place], what: str, outcome: Outcome) -> None:
    """Nothing is other than it was: what is damaged is found to be so, and made anew."""
    for name, queues in TOPICS.items():
        config = broker.topics.get(name)
        if config is not None and max(config.read_queues, config.write_queues) > queues:
            outcome.fault(f"{what}: a topic has queues that nobody made")
    delivered = {body for (topic, queue, _), body in read_all(broker).items() if (topic, queue) == ("t", 3)}
    is_known = broker.topics.get("t") is not None
    if is_known and any(place in intact and body not in delivered for place, body in template.waiting.items()):
        outcome.fault(f"{what}: a whole delayed message is not delivered")


def _checked(template: Template, broker: Broker, what: str, outcome: Outcome) -> dict[Place, bytes]:
    found = read_all(broker, whole=True)
    missing, wrong = differences(template.stored, found)
    if wrong:
        outcome.fault(f"{what}: messages that nobody sent")
    end = max(broker.store.end, template.flushed_to)
    unsaid = [
        place
        for place in missing
        if template.records[place][0] < end and not is_said(broker, place, *template.records[place])
    ]
    if unsaid and what != NOTHING_LEFT:
        outcome.fault(f"{what}: gone without a word")
    outcome.figures["kept"] += len(found)
    outcome.figures["said"] += len(missing)
    return found
