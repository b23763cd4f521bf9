"""Bodies full of records: what a client writes must never become a message of somebody else.

An attacker sends bodies with records, heads and marks in them, in every way in which a body gets into the log. A first send
of the same size shows where the bytes of the next one will be, so that each record inside claims its true place, with
checksums that fit. Then the folder is copied, as a kill leaves it; the log is damaged where the body is, indexes and the
checkpoint are lost, and a broker starts over it. That neither the running broker nor `fsck` uses such a record is tested in
`tests/`.

A fault is: a message that nobody sent, an honest one whose bytes are there and that is not found, damage in a log that nobody
damaged, a start that takes long, an index with entries for messages that no log can have had, other messages after a second
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocketlet.broker.server import Server
from rocketlet.protocol import names
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Ext, Frame
from rocketlet.protocol.message import (
    BEGIN_BYTES,
    BEGIN_MARK,
    CHECKSUM_BYTES,
    MAGIC,
    MAX_RECORD_BYTES,
    decode_record,
    encode_batch,
)

from tests.support import forged
from tests.support.peers import SEND, Peer, request
from tests.support.stores import cut_log

from .common import Limit, Outcome, config_in, serving
from .store import Damaged, entries, read_all

TRIES_OF_A_FOLDER = 8
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


class Client(Peer):
    """An attacker, whose requests wait for their responses."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, 2)
        self._number = 0

    async def ask(self, code: RequestCode, ext: Ext, body: bytes = b"") -> Frame:
        """Raises TimeoutError."""
        self._number += 1
        self.send(request(code, dict(ext), body, self._number))
        async with asyncio.timeout(60.0):
            while True:
                for frame in self.received():
                    if frame.is_response and frame.opaque == self._number:
                        return frame
                await asyncio.sleep(0)

    async def put(self, body: bytes, code: RequestCode = RequestCode.SEND_MESSAGE_V2, **fields: Any) -> Frame:
        return await self.ask(code, {**SEND, **fields}, body)


def _position(frame: Frame) -> int:
    return int(str(frame.ext["msgId"])[-16:], 16)


async def _committed(attacker: Client, body: bytes) -> Frame:
    half = await WAYS["half message"](attacker, body)
    if half.code:
        return half
    end = {"producerGroup": "p", "tranStateTableOffset": half.ext["queueOffset"], "commitLogOffset": _position(half)}
    return await attacker.ask(RequestCode.END_TRANSACTION, {**end, "commitOrRollback": 8})


async def _sent_back(attacker: Client, body: bytes) -> Frame:
    sent = await attacker.put(body)
    if sent.code:
        return sent
    back: Ext = {"group": "g", "delayLevel": -1, "originMsgId": "", "originTopic": "t", "unitMode": "false"}
    return await attacker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, {**back, "offset": _position(sent)})


MARK, CHECKSUM = BEGIN_MARK.decode() + "A" * (BEGIN_BYTES - 2), "\x02\x0300000000"
WAYS: dict[str, Callable[[Client, bytes], Awaitable[Frame]]] = {
    "message": lambda attacker, body: attacker.put(body),
    # texts after the properties that look like marks and checksums, too
    "message with marks": lambda attacker, body: attacker.put(body, i=f"A\x01b{MARK}{CHECKSUM}{MARK}{CHECKSUM}"),
    "batch": lambda attacker, body: attacker.put(
        encode_batch([(0, b"first", ""), (0, body, ""), (0, b"last", "")]), RequestCode.SEND_BATCH_MESSAGE, m="true"
    ),
    "reply": lambda attacker, body: attacker.put(
        body, RequestCode.SEND_REPLY_MESSAGE_V2, i="REPLY_TO_CLIENT\x01nobody"
    ),
    "half message": lambda attacker, body: attacker.put(body, i="TRAN_MSG\x01true\x02PGROUP\x01p", f=4),
    "committed message": _committed,
    "delayed message": lambda attacker, body: attacker.put(body, i="DELAY\x012"),
    "returned message": _sent_back,
}
"""The ways of a body into the log."""


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


class Round:
    """A folder, its broker and an attacker, for some tries."""

    def __init__(self, folder: Path, chance: random.Random, outcome: Outcome) -> None:
        self._chance = chance
        self._outcome = outcome
        self._folder = folder
        sizes = (20_000, 1 << 20, 1 << 28)
        self._config = config_in(folder, segment_bytes=chance.choice(sizes), transaction_sweep_s=3600)

    async def run(self, tries: Iterator[int]) -> bool:
        """Return True if there may be more to try."""
        async with serving(self._config) as (broker, server):
            self._broker = broker
            for topic in ("t", VICTIM):
                broker.topics.put(TopicConfig(topic, QUEUES, QUEUES), broker.store.end)
            self._attacker = Client(server)
            await self._honest_sends()
            count = 0
            for _ in itertools.islice(tries, TRIES_OF_A_FOLDER):
                await self._try()
                count += 1
            self._attacker.hang_up()
        return count == TRIES_OF_A_FOLDER

    async def _honest_sends(self) -> None:
        for number in range(self._chance.randrange(1, 12)):
            body = b"honest %d" % number + self._chance.randbytes(self._chance.randrange(300))
            if (await self._attacker.put(body, b=VICTIM, e=number % QUEUES, i=f"KEYS\x01{KEY}")).code:
                self._outcome.fault("an honest send was refused")

    async def _try(self) -> None:
        aimed = await self._aim()
        await self._honest_sends()
        if aimed is not None:
            self._outcome.add(forged=len(aimed.inside))
        if self._chance.random() < 0.5:
            self._broker.persist()
        work = self._folder / "work"
        async with self._broker.device._jobs:  # nobody writes a state file meanwhile
            shutil.copytree(self._config.data_dir, work)
        try:
            self._start_over(work, aimed)
        finally:
            shutil.rmtree(work)

    async def _aim(self) -> Aimed | None:
        """Sends a body whose contents know their place; None if the broker refuses it."""
        chance, store = self._chance, self._broker.store
        name, way = chance.choice(list(WAYS.items()))
        last = store.queue(VICTIM, 0)
        own = store.read_log(*last.entry(last.next - 1)[:2])  # which everybody can pull
        kind, contents = contents_of(chance, last.next + 4, mark_in(own))
        before, filler = bytes(chance.choice((0, 3, 40))), bytes(chance.choice((0, 0, 50, 3000)))
        size = len(before) + len(contents(store.end)) + len(filler)
        token = chance.randbytes(16)
        base = store.end
        sent = await way(self._attacker, token + bytes(size - 16))
        if store.end == base:
            if sent.code != ResponseCode.MESSAGE_ILLEGAL:
                self._outcome.fault(f"{kind}, {name}: refused with {sent.code}, {sent.remark}")
            return None
        log = store.read_log(base, store.end - base)
        found = [at for at in range(len(log)) if log.startswith(token, at)] if len(log) < 100_000 else [log.find(token)]
        base = store.end
        at = base + chance.choice(found)
        body = before + contents(at + len(before)) + filler
        await way(self._attacker, body)
        places = [place for place in entries(self._broker).values() if place[0] <= at < sum(place)]
        if len(places) != 1 or store.read_log(at, len(body)) != body:
            self._outcome.add(missed=1)
            return None
        return Aimed(f"{kind}, {name}", at, tuple(_inside(at, body)), *places[0])

    # After a kill

    def _start_over(self, work: Path, aimed: Aimed | None) -> None:
        positions = entries(self._broker)
        records = {at: (positions[at][0], found) for at, found in read_all(self._broker, whole=True).items()}
        is_far = aimed is not None and aimed.what.startswith(FAR)
        before_marks = self._chance.random() < (UNMARKED_FAR if is_far else UNMARKED)
        damage = self._damaged(work, aimed, before_marks=before_marks) if aimed else "nothing"
        indexes = self._lose_indexes(work)
        if before_marks:
            (work / "marks.json").unlink()
        what = f"{aimed.what if aimed else 'nothing'}; {damage} damaged; {indexes} lost"
        what += "; no marks" if before_marks else ""
        damaged = Damaged(work, records, what, self._outcome, {"segment_bytes": self._config.segment_bytes})
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


async def forge(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    tries = iter(limit)
    for number in itertools.count():
        path = folder / str(number)
        has_more = await Round(path, random.Random(f"{seed}-{number}"), outcome).run(tries)
        shutil.rmtree(path)
        if not has_more:
            return
