"""The disk below the store, by a model of what was synced, and what of it a power cut leaves."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .disk import standing_in

PAGE_BYTES = 512


@dataclass(slots=True, eq=False)
class Inode:
    """A file: what its last sync kept, and what was done since: (position, bytes), or (size, None) for a cut."""

    kept: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)
    size: int = 0

    def synced(self) -> None:
        self.kept = bytes(_applied(self.kept, self.since))
        self.since.clear()

    def after_cut(self, chance: random.Random) -> bytes:
        """The device's content after a power cut."""
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
            if whole[page : page + PAGE_BYTES] != self.kept[page : page + PAGE_BYTES] and chance.random() < 0.5:
                old = self.kept[page : page + PAGE_BYTES]
                size = len(whole[page : page + PAGE_BYTES])
                whole[page : page + size] = old[:size] + bytes(size - len(old[:size]))
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


class PowerCut(BaseException):
    """Nothing runs after this."""


class Device:
    """The disk below the store, and what of it a power cut leaves. `calls_left` until the power fails; None for never."""

    def __init__(self) -> None:
        self.calls_left: int | None = None
        self._names: dict[str, Inode] = {}
        self._kept_names: dict[str, Inode] = {}
        self._changes: list[tuple[str, Inode | None]] = []  # names that came (or were replaced), or went
        self._open: dict[int, tuple[Inode, bool]] = {}

    def _call(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise PowerCut

    def open_file(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        name, existed = str(path), os.path.exists(path)
        descriptor = os.open(path, flags, mode)
        if flags & os.O_DIRECTORY:
            return descriptor
        inode = self._names.get(name)
        if inode is None or not existed:
            inode = Inode()
            self._name(name, inode)
        if flags & os.O_TRUNC and inode.size:
            inode.since.append((0, None))
            inode.size = 0
        self._open[descriptor] = (inode, bool(flags & os.O_APPEND))
        return descriptor

    def _name(self, name: str, inode: Inode | None) -> None:
        self._changes.append((name, inode))
        if inode is None:
            self._names.pop(name, None)
        else:
            self._names[name] = inode

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        self._call()
        written = os.write(descriptor, data)
        inode, _ = self._open[descriptor]
        inode.since.append((inode.size, bytes(data[:written])))
        inode.size += written
        return written

    def truncate(self, descriptor: int, size: int) -> None:
        self._call()
        os.ftruncate(descriptor, size)
        inode, _ = self._open[descriptor]
        inode.since.append((size, None))
        inode.size = size

    def cut(self, path: Any, size: int) -> None:
        self._call()
        os.truncate(path, size)
        inode = self._names[str(path)]
        inode.since.append((size, None))
        inode.size = size

    def sync(self, descriptor: int) -> None:
        self._call()
        self._open[descriptor][0].synced()

    def sync_folder(self, path: str | Path) -> None:
        self._call()
        kept, self._changes = self._changes, []
        for name, inode in kept:
            if os.path.dirname(name) == str(path):
                self._keep(self._kept_names, name, inode)
            else:
                self._changes.append((name, inode))

    @staticmethod
    def _keep(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode

    def replace(self, source: Any, target: Any) -> None:
        self._call()
        os.replace(source, target)
        inode = self._names[str(source)]
        self._name(str(target), inode)
        self._name(str(source), None)

    def link(self, source: Any, target: Any) -> None:
        self._call()
        os.link(source, target)
        self._name(str(target), self._names[str(source)])

    def remove(self, path: Any) -> None:
        self._call()
        os.unlink(path)
        self._name(str(path), None)

    def after_cut(self, folder: Path, target: Path, chance: random.Random) -> None:
        """Writes what a power cut leaves of a folder into another one."""
        names = dict(self._kept_names)
        for name, inode in self._changes[: chance.randrange(len(self._changes) + 1)]:
            self._keep(names, name, inode)
        for path in folder.rglob("*"):
            if path.is_dir():
                (target / path.relative_to(folder)).mkdir(parents=True, exist_ok=True)
        for name, inode in names.items():
            if not Path(name).is_relative_to(folder):  # such as what the system says of its start
                continue
            to = target / Path(name).relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(inode.after_cut(chance))

    @contextmanager
    def below(self) -> Iterator[None]:
        """The store works on this device."""
        calls = ("open_file", "close", "write", "truncate", "cut", "sync", "sync_folder", "replace", "link", "remove")
        with standing_in(self, calls):
            yield
