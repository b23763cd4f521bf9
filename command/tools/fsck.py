"""`rocketlet fsck DIR`: reports undamaged and damaged parts of a data folder, and what a repair would do; with `--repair`
also repairs it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ...broker.config import DELAY_LEVELS_MS, BrokerConfig
from ...broker.groups.group import ConsumerGroups, GroupChanges
from ...broker.groups.members import History
from ...broker.groups.offsets import Offsets
from ...broker.messages.delays import tag_code_of
from ...broker.messages.topics import Topics
from ...broker.runtime.jobs import run
from ...broker.runtime.runtime import Runtime
from ...broker.store.files import StoreError
from ...broker.store.journals import repair_journal
from ...broker.store.recovery import Recovered, RecoveryFinding, inspect
from ...broker.store.store import Store
from ...protocol.names import counted
from ..plumbing import logs
from ..plumbing.output import Output, complain, printable


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "report the undamaged and the damaged parts of a data folder that no broker uses"
    parser = commands.add_parser("fsck", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the data folder")
    parser.add_argument("--repair", action="store_true", help="also repair what can be repaired")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--log-level", choices=logs.LEVELS, default="error")
    parser.set_defaults(run=_fsck)


async def _fsck(options: argparse.Namespace) -> int:
    try:
        return fsck(options.folder, repairs=options.repair, is_json=options.json)
    except StoreError as error:
        complain(error)
        return 1


def fsck(folder: Path, *, repairs: bool, is_json: bool) -> int:
    """Check a data folder, and with `repairs` repair it if it is damaged. Return 0 if it is undamaged or was repaired,
    otherwise 1. Raises StoreError if the folder cannot be used."""
    findings = [_shown(finding) for finding in inspect(folder)]
    faults = [finding for finding in findings if finding.fault]
    recovered = _repair(folder) if repairs and faults else None
    if is_json:
        told = [fault._asdict() for fault in faults]
        Output(as_json=True).json({"whole": not faults, "faults": told, "repaired": recovered is not None})
    else:
        _print(findings, recovered)
    return 1 if faults and recovered is None else 0


def _shown(finding: RecoveryFinding) -> RecoveryFinding:
    """Escape control characters in a finding, because names of files may contain them."""
    fault = finding.fault and printable(finding.fault)
    return RecoveryFinding(printable(finding.part), fault, printable(finding.repair))


def _print(findings: list[RecoveryFinding], recovered: Recovered | None) -> None:
    whole = [finding.part for finding in findings if not finding.fault]
    queues = [part for part in whole if part.startswith("queue ")]
    for part in whole:
        if part not in queues:
            print(f"whole    {part}")
    print(f"whole    {counted(len(queues), 'queue')}")
    for finding in findings:
        if finding.fault:
            print(f"damaged  {finding.part}: {finding.fault}\n         repair: {finding.repair}")
    if recovered is not None:
        print(f"repaired: {counted(recovered.records, 'message is', 'messages are')} in the indexes")
    elif len(whole) < len(findings):
        print("The next start repairs only the parts that it reads; `--repair` repairs all of them now.")


def _repair(folder: Path) -> Recovered:
    """Repair the journals, rebuild all indexes from the log, and limit committed offsets to the queues' offsets."""
    for path in folder.glob("*.journal"):
        repair_journal(path)
    tag_code = partial(tag_code_of, levels_ms=DELAY_LEVELS_MS)
    store = Store(folder, segment_bytes=1 << 28, tag_code_of=tag_code)
    try:
        runtime = Runtime()
        runtime.adoption.keep = store.folder.put_aside
        topics = Topics(runtime, BrokerConfig(data_dir=folder, address="127.0.0.1:10911"))
        found = store.recover(topics.since(), deleted=topics.deleted, knows_topics=False, rebuilds=True)
        if not topics.is_current:
            topics.adopt(found.unknown_topics)
        groups = ConsumerGroups(runtime, History(runtime), "", topics, GroupChanges())
        offsets = Offsets(runtime, folder / "offsets.json", groups, topics)
        offsets.apply_journal(topics.deleted)
        offsets.clamp(store.queues)
        run(offsets.saving())
        store.checkpoint(closes=True)
    finally:
        store.close()
    return found
