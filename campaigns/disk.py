"""A disk that is full, read-only, failing or slow, below a broker that works: what it acknowledged is there afterwards.

Faults are put in at the store's calls to the operating system. Where this process may mount, every fourth try has a real
small file system instead, which fills up and is made read-only. A fault is: a message that was acknowledged and is gone, one
that is not as it was sent, something acknowledged after the device failed, anything raised but StoreError, a broker that
does not start or cannot be read while the disk is full, or that does not take messages again when there is room.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rocketlet.broker.broker import Broker
from rocketlet.broker.store import disk
from rocketlet.broker.store.files import StoreError, StoreFailed, StoreFull
from rocketlet.protocol.bodies import TopicConfig

from ._ledger import Place, differences, open_broker, put, read_all
from .common import Limit, Outcome

DEFAULT_COUNT = 500
STEPS = 60
SMALL_DISK = "256k"
FAULTS = ("full", "short", "read-only", "EIO on write", "EIO on sync", "EIO on read", "slow", "no descriptors")
DEVICE_FAULTS = ("EIO on write", "EIO on sync")


@contextmanager
def standing_in(device: object, calls: Sequence[str]) -> Iterator[None]:
    """The store calls these functions of a device instead of the operating system's."""
    before = {name: getattr(disk, name) for name in calls}
    for name in calls:
        setattr(disk, name, getattr(device, name))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(disk, name, call)


class Faults:
    """Wraps the calls; `kind` says what goes wrong at present, None for nothing."""

    def __init__(self, chance: random.Random) -> None:
        self.kind: str | None = None
        self._chance = chance
        self.met = 0

    def _fail(self, number: int) -> None:
        self.met += 1
        raise OSError(number, os.strerror(number))

    def write(self, descriptor: int, data: Any) -> int:
        if self.kind == "full" or (self.kind == "short" and self._chance.random() < 0.5):
            if self._chance.random() < 0.5:
                self._fail(errno.ENOSPC)
            return self._part(descriptor, data)
        if self.kind == "read-only":
            self._fail(errno.EROFS)
        if self.kind == "EIO on write":
            if self._chance.random() < 0.5:
                self._part(descriptor, data)
            self._fail(errno.EIO)
        if self.kind == "slow":
            time.sleep(0.001)
        return os.write(descriptor, data)

    def _part(self, descriptor: int, data: Any) -> int:
        size = self._chance.randrange(len(data)) if len(data) > 1 else 0
        if not size:
            self._fail(errno.ENOSPC)
        return os.write(descriptor, data[:size])

    def open_file(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self.kind == "no descriptors" and self._chance.random() < 0.7:
            self._fail(errno.EMFILE)
        if self.kind == "full" and flags & os.O_CREAT and not os.path.exists(path) and self._chance.random() < 0.5:
            self._fail(errno.ENOSPC)
        if self.kind == "read-only" and flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            self._fail(errno.EROFS)
        return os.open(path, flags, mode)

    def truncate(self, descriptor: int, size: int) -> None:
        if self.kind == "read-only" or (self.kind in DEVICE_FAULTS and self._chance.random() < 0.5):
            self._fail(errno.EROFS if self.kind == "read-only" else errno.EIO)
        if self.kind == "short" and self._chance.random() < 0.3:
            self._fail(errno.ENOSPC)
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        if self.kind == "EIO on sync":
            self._fail(errno.EIO)
        if self.kind == "slow":
            time.sleep(0.002)

    def read_at(self, descriptor: int, size: int, position: int) -> bytes:
        if self.kind == "EIO on read" and self._chance.random() < 0.3:
            self._fail(errno.EIO)
        return os.pread(descriptor, size, position)

    def replace(self, source: Any, target: Any) -> None:
        if self.kind == "read-only":
            self._fail(errno.EROFS)
        os.replace(source, target)

    @contextmanager
    def below(self) -> Iterator[None]:
        calls = ("write", "open_file", "truncate", "sync", "read_at", "replace")
        with standing_in(self, calls):
            yield


class Work:
    """Sends, saves and reads; keeps what was acknowledged."""

    def __init__(self, broker: Broker, chance: random.Random) -> None:
        self.broker = broker
        self._chance = chance
        self.sent: dict[Place, bytes] = {}
        self.acknowledged: dict[Place, bytes] = {}
        self.refused = 0
        self.device_failed = False

    def step(self, number: int) -> bool:
        """Whether something was acknowledged."""
        chance, broker = self._chance, self.broker
        kind = chance.choice(("send", "send", "send", "send", "save", "read", "topic", "group"))
        try:
            if kind == "send":
                return self._send(number)
            if kind == "save":
                broker.offsets.put("g", "t", 0, 0)
                broker.persist()
            elif kind == "topic":
                broker.topics.put(TopicConfig(f"topic-{number}", 1, 1), broker.store.end)
            elif kind == "group":
                broker.group_configs.ensure(f"group-{number}")
            else:
                read_all(broker)
        except StoreError as error:
            self.refused += 1
            self.device_failed = self.device_failed or (kind == "send" and isinstance(error, StoreFailed))
        return False

    def _send(self, number: int) -> bool:
        body = b"%d-" % number + self._chance.randbytes(self._chance.randrange(3000))
        place = put(self.broker, self.broker.store.queue("t", self._chance.randrange(8)), body)
        self.sent[place] = body
        if self.broker.flusher is not None and not self.broker.flusher.sync():
            self.device_failed = True
            return False
        self.acknowledged[place] = body
        return True


def run(limit: Limit, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(figures={"acknowledged": 0, "refused": 0, "faults_met": 0, "real_disks": 0})
    can_mount = _can_mount(folder / "probe")
    for number in limit:
        chance = random.Random(f"{seed}-{number}")
        is_real = can_mount and number % 4 == 3
        try_one: Callable[[Path, random.Random, Outcome], str] = _on_small_disk if is_real else _with_faults
        work = folder / "work"
        work.mkdir()
        try:
            try_one(work, chance, outcome)
        except Exception as error:
            outcome.fault(f"{type(error).__name__}: {error}".replace(str(folder), ""))
        outcome.tried += 1
        shutil.rmtree(work, ignore_errors=True)
    return outcome


def _with_faults(folder: Path, chance: random.Random, outcome: Outcome) -> str:
    settings: dict[str, Any] = {"flush": chance.choice(("os", "sync")), "segment_bytes": 10_000}
    faults = Faults(chance)
    kind = chance.choice(FAULTS)
    with faults.below():
        broker = open_broker(folder, **settings)
        broker.topics.put(TopicConfig("t", 8, 8), 0)
        work = Work(broker, chance)
        begins, ends = sorted((chance.randrange(STEPS), chance.randrange(STEPS)))
        for number in range(STEPS):
            faults.kind = kind if begins <= number < ends else None
            had_failed = work.device_failed
            if work.step(number) and had_failed:
                outcome.fault(f"{kind}: something was acknowledged after the device had failed")
        faults.kind = chance.choice((None, kind))
        broker.persist(closes=chance.random() < 0.5)
        broker.store.close()
        faults.kind = kind if kind in ("full", "short", "slow") else None
        open_broker(folder, **settings).store.close()
    _check(folder, settings, work, kind, outcome)
    outcome.figures["faults_met"] += faults.met
    return kind


def _check(folder: Path, settings: dict[str, Any], work: Work, kind: str, outcome: Outcome) -> None:
    """Starts a broker on a disk that is well again."""
    broker = open_broker(folder, **settings)
    found = read_all(broker)
    missing, _ = differences(work.acknowledged, found)
    if missing:
        outcome.fault(f"{kind}: an acknowledged message is gone")
    if any(found[place] != body for place, body in work.acknowledged.items() if place in found):
        outcome.fault(f"{kind}: a message is not as it was sent")
    if put(broker, broker.store.queue("t", 0), b"after") in work.acknowledged:
        outcome.fault(f"{kind}: an offset is given again")
    broker.persist(closes=True)
    broker.store.close()
    outcome.figures["acknowledged"] += len(work.acknowledged)
    outcome.figures["refused"] += work.refused


def _on_small_disk(folder: Path, chance: random.Random, outcome: Outcome) -> str:
    mount = folder / "disk"
    _mount(mount, f"size={SMALL_DISK}")
    settings: dict[str, Any] = {"flush": chance.choice(("os", "sync")), "segment_bytes": 10_000}
    try:
        broker = open_broker(mount / "data", **settings)
        broker.topics.put(TopicConfig("t", 8, 8), 0)
        work = Work(broker, chance)
        for number in range(STEPS * 5):
            work.step(number)
        broker.persist(closes=True)
        broker.store.close()
        if not work.refused:
            outcome.fault("small disk: it did not fill up")
        broker = open_broker(mount / "data", **settings)
        broker.group_configs.ensure("unknown")
        missing, _ = differences(work.acknowledged, read_all(broker))
        if missing:
            outcome.fault("small disk: an acknowledged message cannot be read while it is full")
        broker.store.close()
        _check_read_only(mount, settings, work, outcome)
        _mount(mount, "remount,rw,size=8m")
        _check(mount / "data", settings, work, "small disk", outcome)
        outcome.figures["real_disks"] += 1
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True, capture_output=True)
    return "small disk"


def _check_read_only(mount: Path, settings: dict[str, Any], work: Work, outcome: Outcome) -> None:
    _mount(mount, "remount,ro")
    broker = open_broker(mount / "data", **settings)
    missing, _ = differences(work.acknowledged, read_all(broker))
    if missing:
        outcome.fault("read-only disk: an acknowledged message cannot be read")
    try:
        put(broker, broker.store.queue("t", 0), b"refused")
    except StoreFull:
        pass
    else:
        outcome.fault("read-only disk: a message was acknowledged")
    broker.persist()
    broker.store.close()


def _mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, capture_output=True, text=True
    )


def _can_mount(folder: Path) -> bool:
    try:
        _mount(folder, "size=64k")
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
