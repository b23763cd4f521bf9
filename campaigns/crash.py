"""What a crash leaves: a broker works on a disk that fails, or loses power, or whose files are damaged, and starts again.

disk   The store's calls to the operating system fail: full, read-only, I/O errors, no descriptors. A fault: an
       acknowledged message is gone or not as it was sent, something is acknowledged after the device failed, anything but
       StoreError is raised, a broker does not start or cannot be read on a full disk, or takes no messages afterwards.
pop    The same as power, with clients that pop messages in each try.
power  A model takes every system call of the store. The content of a file at its last sync is kept; of later writes nothing,
       a beginning, or pages with holes of zeros are kept, and names that changed since their folder was synced are kept up to
       any one of them. Every third time the broker is killed instead, with `--flush os`. A fault: what `store.Work`, `Timed`
       and `Popped` name, and a start that fails.
files  A file is cut, zeroed, overwritten, flipped, padded, emptied or deleted. A fault: a start that fails without the file's
       name, a message that is not as it was stored or is gone without a report, one whose bytes are in place and that is not
       found, other messages after a second start, an offset that is used twice, a whole index that is rebuilt, a delay
       level that a damaged message stops.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.store import disk as system_calls
from rocketlet.broker.store.files import StoreError, StoreFailed
from rocketlet.protocol import names
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.testing.clock import MovableClock

from .common import Limit, Outcome
from .store import (
    LATE,
    Damaged,
    Place,
    Popped,
    PowerCut,
    Timed,
    Work,
    entries,
    is_reported,
    open_broker,
    put,
    read_all,
)  # fmt: skip

STEPS = 60
SEGMENT_BYTES = 10_000

# A disk that fails

FAILURES: dict[str, dict[str, tuple[int, float]]] = {
    "full": {"write": (errno.ENOSPC, 1.0), "create": (errno.ENOSPC, 0.5)},
    "short": {"write": (errno.ENOSPC, 0.5), "truncate": (errno.ENOSPC, 0.3)},
    "read-only": dict.fromkeys(("write", "change", "truncate", "replace"), (errno.EROFS, 1.0)),
    "EIO on write": {"write": (errno.EIO, 1.0), "truncate": (errno.EIO, 0.5)},
    "EIO on sync": {"sync": (errno.EIO, 1.0), "truncate": (errno.EIO, 0.5)},
    "EIO on read": {"read_at": (errno.EIO, 0.3)},
    "no descriptors": {"open": (errno.EMFILE, 0.7)},
}
"""The error of each call and its share of the calls, by kind of failure. A full or failing disk may write a part."""


def standing_in(device: object) -> AbstractContextManager[object]:
    """Let the store call the public functions of a device instead of the operating system's."""
    names = [name for name in dir(device) if not name.startswith("_") and hasattr(system_calls, name)]
    calls: dict[str, Any] = {name: getattr(device, name) for name in names}
    patched: AbstractContextManager[object] = mock.patch.multiple(system_calls, **calls)
    return patched


class FailingDisk:
    """A disk. kind: the present kind of failure, or None."""

    def __init__(self, chance: random.Random) -> None:
        self.kind: str | None = None
        self.met = 0
        self._chance = chance

    def _call(self, name: str) -> None:
        """Raises OSError if this call fails."""
        number, share = FAILURES.get(self.kind or "", {}).get(name, (0, 0.0))
        if self._chance.random() < share:
            self.met += 1
            raise OSError(number, os.strerror(number))

    def write(self, descriptor: int, data: Any) -> int:
        try:
            self._call("write")
        except OSError as error:
            written = self._chance.randrange(len(data)) if self._chance.random() < 0.5 else 0
            if written and error.errno != errno.EROFS:
                os.write(descriptor, data[:written])
                if error.errno == errno.ENOSPC:
                    return written
            raise
        return os.write(descriptor, data)

    def open_file(self, path: Any, flags: int, mode: int = 0o777) -> int:
        self._call("open")
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            self._call("change")
        if flags & os.O_CREAT and not os.path.exists(path):
            self._call("create")
        return os.open(path, flags, mode)

    def truncate(self, descriptor: int, size: int) -> None:
        self._call("truncate")
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._call("sync")

    def read_at(self, descriptor: int, size: int, position: int) -> bytes:
        self._call("read_at")
        return os.pread(descriptor, size, position)

    def replace(self, source: Any, target: Any) -> None:
        self._call("replace")
        os.replace(source, target)


@contextmanager
def attempt(folder: Path, outcome: Outcome) -> Iterator[Path]:
    """An empty folder for one try; an exception is a fault."""
    work = folder / "work"
    work.mkdir()
    try:
        yield work
    except Exception as error:
        outcome.fault(f"{type(error).__name__}: {error}".replace(str(folder), ""))
    shutil.rmtree(work, ignore_errors=True)


def disk(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    loop = asyncio.new_event_loop()
    for number in limit:
        with attempt(folder, outcome) as work:
            _on_failing_disk(work, random.Random(f"{seed}-{number}"), outcome, Work(loop))
    loop.close()


def _on_failing_disk(folder: Path, chance: random.Random, outcome: Outcome, work: Work) -> None:
    settings: dict[str, Any] = {"flush": chance.choice(("os", "sync")), "segment_bytes": SEGMENT_BYTES}
    device, kind = FailingDisk(chance), chance.choice(list(FAILURES))
    with standing_in(device):
        broker = open_working(folder, work, **settings)
        start, end = sorted((chance.randrange(STEPS), chance.randrange(STEPS)))
        has_failed = False
        for number in range(STEPS):
            device.kind = kind if start <= number < end else None
            before = len(work.acknowledged)
            try:
                work.step(broker, chance)
            except StoreError as error:
                outcome.add(refused=1)
                has_failed = has_failed or isinstance(error, StoreFailed)
            if has_failed and len(work.acknowledged) > before:
                outcome.fault(f"{kind}: something was acknowledged after the device had failed")
        work.end()
        device.kind = chance.choice((None, kind))
        broker.persist(closes=chance.random() < 0.5)
        broker.store.close()
        device.kind = kind if kind in ("full", "short") else None
        open_broker(folder, **settings).store.close()
    if kind == "EIO on read":
        work.late.clear()  # the broker reports a delayed message that cannot be read as damaged, and sets it aside
    broker = open_broker(folder, **settings)  # the disk works again
    for fault in work.faults(broker):
        outcome.fault(f"{kind}: {fault}")
    if put(broker, broker.store.queue("t", 0), b"after") in work.acknowledged:
        outcome.fault(f"{kind}: an offset is used twice")
    broker.persist(closes=True)
    broker.store.close()
    outcome.add(acknowledged=len(work.acknowledged), faults_met=device.met)


def open_working(folder: Path, work: Work, limits: Limits = LIMITS, **settings: Any) -> BrokerController:
    """Return a broker with a topic, whose device is the work's."""
    broker = open_broker(folder, limits, **settings)
    broker.topics.put(TopicConfig("t", 4, 4), 0)
    if broker.flusher is not None:
        vars(broker.device)["_thread"] = work
    return broker


# A power cut

PAGE_BYTES = 512
CALLS = 400  # calls of the store to the device, after one of which the power fails
TIMED_SHARE = 0.3  # share of the tries that also send messages to times
POPPED_SHARE = 0.3  # share in which clients share messages
_LIMITS = Limits(journal_lines=-13, run_keys=3)  # 13 topics exist from the start, so journals are often shortened


class Inode:
    """A file: what its last sync kept, and what was done since: (position, bytes), or (size, None) for a cut."""

    def __init__(self) -> None:
        self.kept = b""
        self.since: list[tuple[int, bytes | None]] = []
        self.size = 0

    def resize(self, size: int) -> None:
        self.since.append((size, None))
        self.size = size

    def synced(self) -> None:
        self.kept = bytes(_applied(self.kept, self.since))
        self.since.clear()

    def after_cut(self, chance: random.Random) -> bytes:
        """Return the device's content after a power cut."""
        how = chance.choice(("nothing", "all", "beginning", "beginning", "holes"))
        if how == "nothing":
            return self.kept
        if how == "all":
            return bytes(_applied(self.kept, self.since))
        if how == "beginning":
            count = chance.randrange(len(self.since) + 1)
            done = self.since[:count]
            if count < len(self.since) and (data := self.since[count][1]):  # and a part of the next one
                done.append((self.since[count][0], data[: chance.randrange(len(data) + 1)]))
            return bytes(_applied(self.kept, done))
        whole = _applied(self.kept, self.since)
        for page in range(0, len(whole), PAGE_BYTES):
            old, new = self.kept[page : page + PAGE_BYTES], whole[page : page + PAGE_BYTES]
            if new != old and chance.random() < 0.5:
                whole[page : page + len(new)] = old[: len(new)].ljust(len(new), b"\0")
        return bytes(whole)


def _applied(data: bytes, changes: list[tuple[int, bytes | None]]) -> bytearray:
    found = bytearray(data)
    for at, new in changes:
        if new is None:
            del found[at:]
            found.extend(bytes(at - len(found)))
        else:
            found.extend(bytes(max(at - len(found), 0)))
            found[at : at + len(new)] = new
    return found


class Device:
    """The disk below the store. `_calls_left` until the power fails; None for never."""

    def __init__(self) -> None:
        self._calls_left: int | None = None
        self._names: dict[str, Inode] = {}
        self._kept_names: dict[str, Inode] = {}
        self._changes: list[tuple[str, Inode | None]] = []  # names that came (or were replaced), or went
        self._open: dict[int, Inode] = {}

    def _call(self) -> None:
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left < 0:
                raise PowerCut

    def _name(self, name: Any, inode: Inode | None) -> None:
        self._changes.append((str(name), inode))
        _keep(self._names, str(name), inode)

    def open_file(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        existed = os.path.exists(path)
        descriptor = os.open(path, flags, mode)
        if flags & os.O_DIRECTORY:
            return descriptor
        inode = self._names.get(str(path))
        if inode is None or not existed:
            inode = Inode()
            self._name(path, inode)
        if flags & os.O_TRUNC and inode.size:
            inode.resize(0)
        self._open[descriptor] = inode
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        self._call()
        written = os.write(descriptor, data)
        inode = self._open[descriptor]
        inode.since.append((inode.size, bytes(data[:written])))
        inode.size += written
        return written

    def truncate(self, descriptor: int, size: int) -> None:
        self._call()
        os.ftruncate(descriptor, size)
        self._open[descriptor].resize(size)

    def cut(self, path: Any, size: int) -> None:
        self._call()
        os.truncate(path, size)
        self._names[str(path)].resize(size)

    def sync(self, descriptor: int) -> None:
        self._call()
        self._open[descriptor].synced()

    def sync_folder(self, path: str | Path) -> None:
        self._call()
        kept, self._changes = self._changes, []
        for name, inode in kept:
            if os.path.dirname(name) == str(path):
                _keep(self._kept_names, name, inode)
            else:
                self._changes.append((name, inode))

    def replace(self, source: Any, target: Any) -> None:
        self._call()
        os.replace(source, target)
        self._name(target, self._names[str(source)])
        self._name(source, None)

    def link(self, source: Any, target: Any) -> None:
        self._call()
        os.link(source, target)
        self._name(target, self._names[str(source)])

    def remove(self, path: Any) -> None:
        self._call()
        os.unlink(path)
        self._name(path, None)

    def _after_cut(self, folder: Path, target: Path, chance: random.Random) -> None:
        """Write what a power cut leaves of a folder into another one."""
        names = dict(self._kept_names)
        for name, inode in self._changes[: chance.randrange(len(self._changes) + 1)]:
            _keep(names, name, inode)
        for path in folder.rglob("*"):
            if path.is_dir():  # folders are there immediately
                (target / path.relative_to(folder)).mkdir(parents=True, exist_ok=True)
        for name, inode in names.items():
            if Path(name).is_relative_to(folder):  # unlike files of the system
                to = target / Path(name).relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(inode.after_cut(chance))


def _keep(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def power(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    _cuts(limit, seed, folder, outcome, popped_share=POPPED_SHARE)


def pop(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    _cuts(limit, seed, folder, outcome, popped_share=1.0)


def _cuts(limit: Limit, seed: int, folder: Path, outcome: Outcome, *, popped_share: float) -> None:
    loop = asyncio.new_event_loop()
    for number in limit:
        # apart, so that a seed stays the same when another kind of work is added
        chances = {name: random.Random(f"{seed}-{number}-{name}") for name in ("", "times", "popped")}
        with attempt(folder, outcome) as work:
            _power_cut(work, chances, outcome, loop, popped_share)
    loop.close()


def _power_cut(
    folder: Path,
    chances: dict[str, random.Random],
    outcome: Outcome,
    loop: asyncio.AbstractEventLoop,
    popped_share: float,
) -> None:
    chance, device, work = chances[""], Device(), Work(loop)
    timed, popped = Timed(work), Popped(work)
    active: list[tuple[Work | Timed | Popped, random.Random]] = [(work, chance)]
    for beside, name, share in ((timed, "times", TIMED_SHARE), (popped, "popped", popped_share)):
        if chances[name].random() < share:
            active.append((beside, chances[name]))
    before, after = folder / "before", folder / "after"
    is_kill = chance.random() < 0.33
    settings: dict[str, Any] = {"flush": "os" if is_kill else "sync", "segment_bytes": 8000, "delay_levels_ms": (0,)}
    with standing_in(device):
        broker = open_working(before, work, _LIMITS, **settings)
        device._calls_left = chance.randrange(CALLS)
        with suppress(PowerCut):
            for _ in range(STEPS):
                for part, own in active:
                    part.step(broker, own)
        work.end()
        popped.end(broker)
        device._calls_left = None
        if is_kill:
            shutil.copytree(before, after)
        else:
            device._after_cut(before, after, chance)
        broker.store.close()
    broker = open_broker(after, _LIMITS, MovableClock(stands=True), **settings)
    for part, _ in reversed(active):
        for fault in part.faults(broker):
            outcome.fault(fault)
    found = read_all(broker)
    put(broker, broker.store.queue("t", 0), b"after")
    broker.persist(closes=True)
    broker.store.close()
    outcome.add(killed=is_kill, **work.counts(found), **timed.counts(), **popped.counts())


# Damaged files

TEMPLATES = 4  # folders to start from; every second one was killed
MESSAGES = 400
AT_ONCE: dict[str, Any] = {"delay_levels_ms": (0,)}  # delayed messages are due immediately
TOPICS = {"t": 4, "u": 1}  # queues
DELIVERED = (("t", 3), (names.NOTES_TOPIC, 0))  # where a delivery of delayed messages writes

Change = Callable[[bytearray, random.Random], object]


def _overwrite(data: bytearray, chance: random.Random, with_: bytes) -> None:
    at = chance.randrange(len(data))
    data[at : at + len(with_)] = with_[: len(data) - at]


def _alter(data: bytearray, chance: random.Random) -> None:
    """Change a digit into another one, so that JSON stays JSON."""
    end = data.find(b"\n#crc32 ")
    digits = [at for at, byte in enumerate(data[:end] if end > 0 else data) if byte in b"0123456789"]
    if digits:
        at = chance.choice(digits)
        data[at] = chance.choice([digit for digit in b"0123456789" if digit != data[at]])


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


CHANGES: dict[str, Change] = {
    "cut": lambda data, chance: data.__delitem__(slice(chance.randrange(len(data)), None)),
    "beheaded": lambda data, chance: data.__delitem__(slice(0, chance.randrange(1, len(data) + 1))),
    "zeroed": lambda data, chance: _overwrite(data, chance, bytes(chance.randrange(1, len(data) + 1))),
    "overwritten": lambda data, chance: _overwrite(data, chance, chance.randbytes(chance.randrange(1, 200))),
    "flipped": _flip,
    "padded": lambda data, chance: data.extend(chance.choice((bytes, chance.randbytes))(chance.randrange(1, 300))),
    "emptied": lambda data, chance: data.clear(),
    "altered": _alter,
}


class Template:
    """A folder and what was flushed into it: the position and the record of each message. Flushed is what a checkpoint
    knows: of what a killed broker wrote after it, only a cut within a message can be seen."""

    def __init__(self, folder: Path, seed: int, *, is_killed: bool) -> None:
        self.folder = folder
        self.records: dict[Place, tuple[int, bytes]] = {}
        self.committed: dict[str, int] = {}
        self.waiting: dict[Place, bytes] = {}  # delayed messages that were not delivered
        chance = random.Random(seed)
        broker = open_broker(folder, **AT_ONCE)
        for name, queues in TOPICS.items():
            broker.topics.put(TopicConfig(name, queues, queues), broker.store.end)
        for number in range(MESSAGES):
            self._add(broker, chance, number)
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
        for place, (position, size) in entries(broker).items():
            self.records[place] = position, broker.store.read_log(position, size)
        broker.store.close()

    def _add(self, broker: BrokerController, chance: random.Random, number: int) -> None:
        into = broker.store.queue(*chance.choice((("t", 0), ("t", 1), ("t", 2), ("u", 0))))
        put(broker, into, b"%d-" % number + chance.randbytes(chance.randrange(200)))
        if number % 20 == 0:
            place = put(broker, broker.delays.queue(1), b"late-%d" % number, LATE, 1)
            if number < MESSAGES // 2:
                broker.delays._deliver_due(1)
            else:
                self.waiting[place] = b"late-%d" % number


def files(limit: Limit, seed: int, folder: Path, outcome: Outcome) -> None:
    templates = [Template(folder / f"template-{n}", seed + n, is_killed=n % 2 == 1) for n in range(TEMPLATES)]
    for number in limit:
        chance, template = random.Random(f"{seed}-{number}"), templates[number % TEMPLATES]
        with attempt(folder, outcome) as work:
            shutil.copytree(template.folder, work, dirs_exist_ok=True)
            damaged = _Damaged(work, template.records, _damage(work, chance), outcome, AT_ONCE)
            try:
                damaged.check(template)
            except Exception as error:
                damaged.fault(f"{type(error).__name__}: {error}")


def _damage(folder: Path, chance: random.Random) -> str:
    """Change one file, at times two; return what was done, in words."""
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
        elif data := bytearray(path.read_bytes()):
            CHANGES[name](data, chance)
            path.write_bytes(data)
        kind = path.parent.name if path.name.isdigit() and not path.parent.name.isdigit() else path.name
        done.append(f"{'index' if kind.isdigit() else kind} {name}")
    return " and ".join(done)


class _Damaged(Damaged):
    """A damaged copy of a template."""

    def check(self, template: Template) -> None:
        try:
            broker = self.start()
        except StoreError as error:
            self.outcome.add(refused=1)
            if ".json is damaged" not in str(error):
                self.fault(f"refused without a file's name: {error}")
            return
        found = read_all(broker, whole=True)
        missing, wrong = self.differences(found)
        if wrong:
            self.fault("messages that nobody sent")
        if self.whole & set(missing):
            self.fault("a whole message is not found")
        end = max(broker.store.end, template.flushed_to)
        for place in missing:
            position, record = self.records[place]
            if position < end and not is_reported(broker, place, position, len(record)):
                self.fault("gone without a report")
        self.outcome.add(kept=len(found), reported=len(missing))
        broker.delays._deliver_due(1)
        found |= {place: record for place, record in read_all(broker, whole=True).items() if place[:2] in DELIVERED}
        self._check_state(broker, template)
        self._write(broker, found, template.flushed_to)
        self.start_again(broker, found)

    def _check_state(self, broker: BrokerController, template: Template) -> None:
        """Nothing is other than it was: what is damaged is found to be so, and recreated."""
        for name, queues in TOPICS.items():
            config = broker.topics.get(name)
            if config is not None and max(config.read_queues, config.write_queues) > queues:
                self.fault("a topic has queues that nobody made")
        delivered = {body for (topic, queue, _), body in read_all(broker).items() if (topic, queue) == ("t", 3)}
        is_known = broker.topics.get("t") is not None
        if is_known and any(place in self.whole and body not in delivered for place, body in template.waiting.items()):
            self.fault("a whole delayed message is not delivered")
        queue = broker.store.queues.get(("t", 0))
        for group, offset in template.committed.items():
            found = broker.offsets.get(group, "t", 0)
            if found is not None and found != min(offset, queue.next if queue is not None else 0):
                self.fault("a group stands where it never stood, or beyond the end")
        if broker.delays.progress.get(1, 0) > broker.delays.queue(1).next:
            self.fault("a delay level stands beyond the end")

    def _write(self, broker: BrokerController, found: dict[Place, bytes], flushed_to: int) -> None:
        for queue in [queue for queue in broker.store.queues.values() if queue.topic in TOPICS]:
            place = put(broker, queue, b"new")
            position, _ = self.records.get(place, (flushed_to, b""))
            if "checkpoint" not in self.what and position < flushed_to:
                self.fault("an offset is used twice")
            found[place] = broker.store.read_log(*queue.entry(place[2])[:2])
