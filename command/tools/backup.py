"""`rocketlet backup` and `rocketlet restore`: copy a data folder, which a broker may be using, and check the copy."""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from ...broker.config import DELAY_LEVELS_MS, HANDOVER_LEASE_S, BrokerConfig
from ...broker.messages.delays import tag_code_of
from ...broker.messages.topics import Topics
from ...broker.runtime.runtime import Runtime
from ...broker.store.files import StoreError
from ...broker.store.recovery import copying, finish, inspect, partial_of
from ...broker.store.store import Store
from ..plumbing import logs
from ..plumbing.output import complain, printable

_MIB = 1 << 20


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "copy a broker's data folder, while it runs or not, and check the copy"
    backup = commands.add_parser("backup", help=text, description=text[0].upper() + text[1:] + ".")
    backup.add_argument("data", type=Path, metavar="DATA", help="the broker's data folder")
    backup.add_argument("copy", type=Path, metavar="FOLDER", help="the target: a new or empty folder")
    backup.set_defaults(run=_backup)
    text = "make a data folder of a backup, and check it"
    restore = commands.add_parser("restore", help=text, description=text[0].upper() + text[1:] + ".")
    restore.add_argument("copy", type=Path, metavar="FOLDER", help="the backup")
    restore.add_argument("data", type=Path, metavar="DATA", help="the target: a new or empty data folder")
    restore.set_defaults(run=_restore)
    for parser in (backup, restore):
        parser.add_argument("--log-level", choices=logs.LEVELS, default="error")


async def _backup(options: argparse.Namespace) -> int:
    status = copied(options.data, options.copy)
    if status == 0:
        print(f"{options.copy} is whole; `rocketlet restore {options.copy} DATA` makes a data folder of it")
        print("it contains the secrets of the data folder: keep it where only the broker's account can read it")
    return status


async def _restore(options: argparse.Namespace) -> int:
    if not options.copy.is_dir():
        complain(f"FOLDER: there is no folder {options.copy}; give the folder that `rocketlet backup` wrote")
        return 1
    status = copied(options.copy, options.data)
    if status == 0:
        print(f"{options.data} is whole; start the broker with the --name that it had")
        print(
            f"and {HANDOVER_LEASE_S:g} s or more after the previous broker ended, because its members may read until then"
        )
    return status


def copied(source: Path, target: Path) -> int:
    """Copy a data folder and check the copy. Return 0 if the copy is complete and undamaged; otherwise print the errors,
    leave what was copied in `.partial` of the target, and return 1."""
    try:
        _copy(source, target)
        copy = partial_of(target)
        _recover(copy)
        faults = [finding for finding in inspect(copy) if finding.fault]
        if not faults:
            finish(target)
            return 0
    except (StoreError, OSError) as error:
        complain(error)
        return 1
    for finding in faults:
        complain(f"{printable(finding.part)}: {printable(finding.fault or '')}")
    complain(f"{source} is not whole: `rocketlet fsck` on the stopped broker's folder says more. The copy is {copy}")
    return 1


def _copy(source: Path, target: Path) -> None:
    copied, printed = 0, 0
    for size in copying(source, target):
        copied += size
        if sys.stderr.isatty() and copied - printed >= 64 * _MIB:
            printed = copied
            print(f"\r{copied / _MIB:,.0f} MiB", end="", file=sys.stderr, flush=True)
    print(f"{copied / _MIB:,.1f} MiB are copied")


def _recover(folder: Path) -> None:
    """Run the recovery of a start on a copy, because the log may end within a message and be newer than the indexes."""
    topics = Topics(Runtime(), BrokerConfig(data_dir=folder, address="127.0.0.1:10911"))
    store = Store(folder, segment_bytes=1 << 28, tag_code_of=partial(tag_code_of, levels_ms=DELAY_LEVELS_MS))
    try:
        store.recover(topics.since(), deleted=topics.deleted, knows_topics=topics.is_current)
        store.checkpoint(closes=True)
    finally:
        store.close()
    shutil.rmtree(folder / "damaged", ignore_errors=True)  # the end that was cut off is in the source
