"""Bodies full of records: what a client writes must never become a message of somebody else.

Bodies with records, heads and marks in them are stored in topics and where a broker keeps messages that wait, alone or
between others of one append. A first append of the same sizes shows where the bytes of the next one will be, so that each
record inside claims its true place, with checksums that fit. The broker is killed, the log is damaged where the body is,
indexes and the checkpoint are lost, and a broker starts over it. That no request and no `fsck` uses such a record is tested
in `tests/`.

A fault is: a message that nobody sent, an honest one whose bytes are there and that is not found, damage in a log that nobody
damaged, a start that takes long, an index with entries for messages that no log can have had, other messages after a second
start.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocketlet.broker.broker import BrokerController
from rocketlet.protocol import names
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.message import (
    BEGIN_BYTES,
    BEGIN_MARK,
    CHECKSUM_BYTES,
    MAGIC,
    MAX_RECORD_BYTES,
    decode_record,
)  # fmt: skip

from tests.support import forged
from tests.support.stores import cut_log

from .common import Limit, Outcome
from .crash import attempt
from .store import HOST, Damaged, Place, entries, open_broker, put, read_all

INDEX_ENTRY_BYTES: Final = 20
SECTOR_BYTES: Final = 512
QUEUES = 2
UNMARKED: Final = 0.15  # share of the tries in which no marks show where records begin
UNMARKED_FAR: Final = 0.6  # the same where nothing but its offset is wrong with a record


FAR_OFFSET: Final = 1 << 22  # 84 MB of entries for messages that are lost before it
VICTIM: Final = "honest"
FORGED: Final = b"FORGED"
KEY: Final = "k"
FAR: Final = "a record far away"

Contents = Callable[[int], bytes]
"""Makes a body for a position in the log."""


def forged_record(at: int, topic: str, offset: int, text: str = "", body: bytes = FORGED, mark: bytes = b"") -> bytes:
    """Return a record that claims this place. mark: where an append has a mark that starts with the record."""
    properties = "\x02".join(filter(None, (text, f"KEYS\x01{KEY}"))) + mark.decode()
    return forged.record(at, body, topic, 0, offset, properties)


def mark_in(record: bytes) -> bytes:
    """Return the mark of a record, which every consumer can see; empty if it has none."""
    mark = record[-CHECKSUM_BYTES - BEGIN_BYTES : -CHECKSUM_BYTES]
    return mark if mark.startswith(BEGIN_MARK) else b""


def _row(at: int, count: int, topic: str, offset: int, text: str = "", mark: bytes = b"") -> bytes:
    found = b""
    for number in range(count):
        found += forged_record(at + len(found), topic, offset + number, text, mark=mark)
    return found


def contents_of(chance: random.Random, next_offset: int, known_mark: bytes) -> tuple[str, Contents]:
    count = chance.randrange(1, 30)
    half = f"PGROUP\x01p\x02REAL_TOPIC\x01{VICTIM}\x02REAL_QID\x010"
    kinds: dict[str, Contents] = {
        "records that continue the queue": lambda at: _row(at, count, VICTIM, next_offset),
        "records that were": lambda at: _row(at, count, VICTIM, 0),
        FAR: lambda at: _row(at, 1, VICTIM, FAR_OFFSET),
        "records with a known mark": lambda at: _row(at, count, VICTIM, next_offset, mark=known_mark),
        "half messages": lambda at: _row(at, count, names.HALF_TOPIC, 0, half),
        "delayed messages": lambda at: _row(at, count, names.SCHEDULE_TOPIC, 0, half),
        "heads": lambda at: forged.heads_at(at - forged.HEAD_BYTES, 200 * count),
        "a record of many bytes": lambda at: forged_record(at, VICTIM, next_offset, body=FORGED * 20_000),
        "bare heads": lambda at: (MAX_RECORD_BYTES.to_bytes(4, "big") + MAGIC.to_bytes(4, "big") + b"\0") * 300 * count,
    }
    kind = chance.choice(list(kinds))
    return kind, kinds[kind]


MARK, CHECKSUM = BEGIN_MARK.decode() + "A" * (BEGIN_BYTES - 2), "\x02\x0300000000"
PROPERTIES: Final = ("", f"A\x01b{MARK}{CHECKSUM}{MARK}{CHECKSUM}", f"KEYS\x01{KEY}")
"""Some have texts after them that look like marks and checksums, too."""
REPLIES: Final = names.reply_topic("DefaultCluster")
TOPICS: Final = ("t", "t", names.HALF_TOPIC, names.SCHEDULE_TOPIC, REPLIES, names.retry_topic("g"))


class Aimed(NamedTuple):
    """A body that is in the log: what is in it, where it begins, and the record that it is of."""

    what: str
    begin: int
    inside: tuple[int, ...]  # places that are records, if one believes them
    outer: int
    outer_size: int


def _inside(at: int, body: bytes) -> Iterator[int]:
    """The places in a body that are records by all that is in it."""
    found = body.find(MAGIC.to_bytes(4, "big"))
    while found >= 4 and len(body) - found > 36:
        with contextlib.suppress(ValueError):
            record = decode_record(body, found - 4)
            if record.physical_offset == at + found - 4:
                yield record.physical_offset
        found = body.find(MAGIC.to_bytes(4, "big"), found + 1)


class Try:
    """A folder with honest messages and one that is forged."""

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome) -> None:
        self._folder = folder
        self._chance = chance
        self._outcome = outcome
        self._settings: dict[str, Any] = {"segment_bytes": chance.choice((20_000, 1 << 20, 1 << 28))}

    def run(self) -> None:
        broker = open_broker(self._folder, **self._settings)
        for topic in ("t", VICTIM):
            broker.topics.put(TopicConfig(topic, QUEUES, QUEUES), broker.store.end)
        self._send(broker)
        aimed = self._aim(broker)
        self._send(broker)
        if self._chance.random() < 0.5:
            broker.persist()
        records = {at: (found[0], broker.store.read_log(*found)) for at, found in entries(broker).items()}
        broker.store.close()
        self._outcome.add(forged=len(aimed.inside))
        self._start_over(records, aimed)

    def _send(self, broker: BrokerController) -> None:
        for number in range(self._chance.randrange(1, 12)):
            body = b"honest %d" % number + self._chance.randbytes(self._chance.randrange(300))
            put(broker, broker.store.queue(VICTIM, number % QUEUES), body, b"KEYS\x01" + KEY.encode())

    def _aim(self, broker: BrokerController) -> Aimed:
        """Store a body whose contents know their place."""
        chance, store = self._chance, broker.store
        queue, properties = store.queue(chance.choice(TOPICS), 0), chance.choice(PROPERTIES).encode()
        last = store.queue(VICTIM, 0)
        own = store.read_log(*last.entry(last.next - 1)[:2])  # which everybody can pull
        kind, contents = contents_of(chance, last.next + 4, mark_in(own))
        before, filler = bytes(chance.choice((0, 3, 40))), bytes(chance.choice((0, 0, 50, 3000)))
        others = [b"x" * chance.randrange(40) for _ in range(chance.choice((0, 0, 1, 3)))]

        def append(body: bytes) -> int:
            """Return where the body begins in the log."""
            with broker.appender.batch() as now_ms:
                placed = [
                    broker.appender.stage(queue, content, properties, 0, 0, 0, now_ms, HOST)[0]
                    for content in (*others, body, b"last")
                ]
            return placed[len(others)] + forged.HEAD_BYTES

        base = store.end
        at = append(bytes(len(before) + len(contents(base)) + len(filler))) - base + store.end
        body = before + contents(at + len(before)) + filler
        append(body)
        outer = [found for found in entries(broker).values() if found[0] <= at < sum(found)]
        if len(outer) != 1 or store.read_log(at, len(body)) != body:
            raise RuntimeError("a body came to another place than the one before it showed")
        return Aimed(f"{kind} in {queue.topic}", at, tuple(_inside(at, body)), *outer[0])

    def _start_over(self, records: dict[Place, tuple[int, bytes]], aimed: Aimed) -> None:
        work = self._folder
        before_marks = self._chance.random() < (UNMARKED_FAR if aimed.what.startswith(FAR) else UNMARKED)
        damage = self._damaged(work, aimed, before_marks=before_marks)
        indexes = self._lose_indexes(work)
        if before_marks:
            (work / "marks.json").unlink()
        what = f"{aimed.what}; {damage} damaged; {indexes} lost{'; no marks' if before_marks else ''}"
        damaged = Damaged(work, records, what, self._outcome, self._settings)
        try:
            broker = damaged.start()
        except Exception as error:
            damaged.fault(f"{type(error).__name__}: {error}")
            return
        found = read_all(broker, whole=True)
        missing, wrong = damaged.differences(found)
        if wrong and not (before_marks and damage == "size"):
            damaged.fault("messages that nobody sent")
        if damage == "nothing" and (broker.recovered.damage or broker.recovered.torn_bytes):
            damaged.fault("a whole log is called damaged")
        lost = [place for place in missing if place in damaged.whole and place[0] == VICTIM]
        if lost and not (before_marks and damage != "nothing"):
            damaged.fault(f"{len(lost)} whole messages are not found")
        most = INDEX_ENTRY_BYTES * (len(found) + broker.store.end // 91)
        damaged.start_again(broker, found)
        if most < sum(path.stat().st_size for path in (work / "consumequeue").rglob("0*") if path.is_file()):
            damaged.fault("indexes have entries for messages that no log can have had")

    def _damaged(self, work: Path, aimed: Aimed, *, before_marks: bool) -> str:
        """Damages the record that the body is of; what of it, in words. `size` leads to a record in the body: before marks
        nothing distinguishes the two, and that record may come, but no more."""
        size = aimed.inside[0] - aimed.outer if aimed.inside else 91
        kinds: dict[str, tuple[int, bytes]] = {
            "nothing": (0, b""),
            "magic": (4, b"\0"),
            "place": (30, b"\xff\xff"),
            "body": (aimed.begin - aimed.outer, b"\xff\0\xff"),
            "tail": (aimed.outer_size - 5, b"\0\0"),
            "sector": (0, bytes(SECTOR_BYTES)),
            "size": (0, size.to_bytes(4, "big")),
            "end": (0, b""),
        }
        kind = "size" if before_marks and self._chance.random() < 0.5 else self._chance.choice(list(kinds))
        at, data = kinds[kind]
        if kind == "end":
            cut_log(work, aimed.outer + self._chance.randrange(1, aimed.outer_size))
        elif data:
            start = max(int(path.name) for path in (work / "commitlog").iterdir() if int(path.name) <= aimed.outer)
            with (work / "commitlog" / f"{start:020d}").open("r+b") as file:
                file.seek(aimed.outer - start + at)
                file.write(data[: aimed.outer_size - at])
        return kind

    def _lose_indexes(self, work: Path) -> str:
        kind = self._chance.choice(("nothing", "checkpoint", "indexes", "an index", "both", "both"))
        if kind in ("checkpoint", "both"):
            for path in work.glob("checkpoint.*"):
                path.unlink()
        if kind in ("indexes", "both"):
            shutil.rmtree(work / "consumequeue", ignore_errors=True)
        if kind == "an index":
            for path in (work / "consumequeue" / VICTIM).rglob("0*"):
                if path.is_file():
                    path.write_bytes(bytes(path.stat().st_size))
        return kind


def forge(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    for number in limit:
        with attempt(folder, outcome) as work:
            Try(work, random.Random(f"{seed}-{number}"), outcome).run()
