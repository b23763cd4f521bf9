"""A broker that was killed, or whose machine was, starts again and knows of its leases."""

from __future__ import annotations

import errno
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rocketlet.broker.config import HANDOVER_LEASE_S, LIMITS, LimitExceeded, Limits
from rocketlet.broker.groups.group import ConsumerGroups
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.offsets import Offsets
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.store import disk, journals
from rocketlet.broker.store.files import read_state
from rocketlet.protocol.bodies import finish
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock

from ...conftest import peer
from ...support.locks import make_groups, make_locks
from ...support.requests import QUEUE

ONE, TWO = LockRequest("c1", "g", (QUEUE,), True), LockRequest("c2", "g", (QUEUE,), True)
OTHER_QUEUE = Queue("t", "broker-a", 1)


def renewal(request: LockRequest, epoch: int) -> LockRequest:
    return LockRequest(request.client_id, "g", (QUEUE,), True, {QUEUE: epoch})


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(stands=True)


def restarted(folder: Path, clock: MovableClock, limits: Limits = LIMITS) -> Locks:
    """Locks over the folder of a broker that was killed."""
    clock.advance(0.1)
    return make_locks(folder, clock, limits=limits)


def handed_over(locks: Locks) -> tuple[RemotingConnection, int, RemotingConnection, int]:
    """A queue goes from one member to another, and nothing is saved beside what was answered."""
    one, two = peer(), peer()
    first = locks.lock(ONE, one)[QUEUE]
    assert locks.unlock(ONE, one) == []
    return one, first, two, locks.lock(TWO, two)[QUEUE]


def test_a_killed_broker_knows_every_lease_that_a_member_was_notified_of(tmp_path: Path, clock: MovableClock) -> None:
    _, first, _, second = handed_over(make_locks(tmp_path, clock))
    again = restarted(tmp_path, clock)
    assert again.lock(ONE, peer()) == {}, "the former owner gets nothing back"
    assert again.lock(renewal(ONE, first), peer()) == {}
    assert again.lock(renewal(TWO, second), peer()) == {QUEUE: second}


def test_a_broker_without_members_is_stopped_without_waiting_for_the_device(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(disk, "sync", syncs.append)
    run(make_locks(tmp_path, clock).saving(closes=True))
    assert syncs == []
    again = restarted(tmp_path, clock)
    again.lock(ONE, peer())
    run(again.saving(closes=True))
    assert syncs


def test_the_first_run_of_a_broker_keeps_what_was_granted_after_its_journal_was_shortened(
    tmp_path: Path, clock: MovableClock
) -> None:
    limits = Limits(journal_lines=0)
    locks, one, two = make_locks(tmp_path, clock, limits=limits), peer(), peer()
    locks.lock(ONE, one)
    locks.unlock(ONE, one)
    run(locks.saving())
    second = locks.lock(TWO, two)[QUEUE]
    run(locks.saving(closes=True))
    again = restarted(tmp_path, clock, limits)
    assert again.lock(ONE, peer()) == {}
    assert again.lock(renewal(TWO, second), peer()) == {QUEUE: second}


@pytest.mark.parametrize("lines", [0, LIMITS.journal_lines])
@pytest.mark.parametrize("closes", [False, True])
def test_where_a_queue_ended_is_known_until_its_owner_has_pulled(
    tmp_path: Path, clock: MovableClock, lines: int, closes: bool
) -> None:
    """Its owner may be as far as the queue was before any of the runs since."""
    limits = Limits(journal_lines=lines)
    place = ("g", "t", 0)
    locks = make_locks(tmp_path, clock, limits=limits)
    first = locks.lock(ONE, peer())[QUEUE]
    assert locks.groups.queue(*place).former_end is None
    for end, known in ((7, 7), (5, 5), (9, 5)):
        run(locks.saving(closes=closes))
        locks = make_locks(tmp_path, clock, end=end, limits=limits)
        assert locks.lock(renewal(ONE, first), peer()) == {QUEUE: first}
        assert locks.groups.queue(*place).former_end == known
    locks.clear_former_end(locks.groups.queue(*place))
    run(locks.saving(closes=closes))
    locks = make_locks(tmp_path, clock, end=11, limits=limits)
    assert locks.groups.queue(*place).former_end == 11
    assert locks.unlock(ONE, peer()) == []
    assert locks.lock(TWO, peer())[QUEUE] > first
    run(locks.saving(closes=closes))
    assert make_locks(tmp_path, clock, end=12, limits=limits).groups.queue(*place).former_end == 12, (
        "11 was of the owner before"
    )


def test_a_queue_whose_line_does_not_fit_is_set_aside_and_granted_when_earlier_leases_have_ended(
    tmp_path: Path, clock: MovableClock
) -> None:
    locks = make_locks(tmp_path, clock)
    epoch = handed_over(locks)[3]
    other = LockRequest("c1", "g", (OTHER_QUEUE,), True)
    kept = locks.lock(other, peer())[OTHER_QUEUE]
    journals.Journal(tmp_path / "locks.json").append([["g", "t", 0, "c3", epoch - 1]])
    runtime = Runtime(clock)
    locks = make_locks(tmp_path, clock, runtime=runtime)
    assert "1 of leases" in runtime.adoption.faults[0]
    assert locks.groups.owners("g") == {("t", 1): "c1"}
    assert locks.lock(replace(other, epochs={OTHER_QUEUE: kept}), peer()) == {OTHER_QUEUE: kept}
    assert locks.lock(ONE, peer()) == {}
    for _ in range(2):
        clock.advance(HANDOVER_LEASE_S / 2)
        locks.renew(())
    assert locks.lock(ONE, peer())[QUEUE] > epoch


def test_what_was_unlocked_is_free_after_a_kill(tmp_path: Path, clock: MovableClock) -> None:
    locks, one = make_locks(tmp_path, clock), peer()
    first = locks.lock(ONE, one)[QUEUE]
    locks.unlock(ONE, one)
    assert restarted(tmp_path, clock).lock(TWO, peer())[QUEUE] > first


def test_an_end_that_is_written_late_ends_no_later_lease(tmp_path: Path, clock: MovableClock) -> None:
    locks, one, two = make_locks(tmp_path, clock), peer(), peer()
    locks.lock(ONE, one)
    locks.connection_gone(one)
    second = locks.lock(TWO, two)[QUEUE]
    run(locks.saving())
    assert restarted(tmp_path, clock).lock(renewal(TWO, second), peer()) == {QUEUE: second}


def test_ends_of_leases_are_saved_soon(tmp_path: Path, clock: MovableClock) -> None:
    locks, one = make_locks(tmp_path, clock), peer()
    locks.lock(ONE, one)
    locks.connection_gone(one)
    run(locks.saving())
    assert QUEUE in restarted(tmp_path, clock).lock(TWO, peer())


def test_a_long_journal_becomes_a_file(tmp_path: Path, clock: MovableClock) -> None:
    locks, one = make_locks(tmp_path, clock), peer()
    kept = locks.lock(LockRequest("c1", "g", (OTHER_QUEUE,), True), one)[OTHER_QUEUE]
    for _ in range(LIMITS.journal_lines):
        locks.lock(ONE, one)
        locks.unlock(ONE, one)
    long = (tmp_path / "locks.journal").stat().st_size
    run(locks.saving())
    last = locks.lock(ONE, one)[QUEUE]
    assert (tmp_path / "locks.journal").stat().st_size < long / 100
    again = restarted(tmp_path, clock)
    asked = LockRequest("c1", "g", (QUEUE, OTHER_QUEUE), True, {QUEUE: last, OTHER_QUEUE: kept})
    assert again.lock(asked, peer()) == {QUEUE: last, OTHER_QUEUE: kept}


@pytest.mark.parametrize("closes", [False, True])
def test_epochs_rise_also_when_the_clock_goes_back(tmp_path: Path, closes: bool) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True))
    epoch = handed_over(locks)[3]
    if closes:
        run(locks.saving(closes=True))
    past = MovableClock(stands=True)
    past.advance(-86_400)
    again = make_locks(tmp_path, past)
    another = Queue("t", "broker-a", 2)
    assert again.lock(LockRequest("c4", "g", (another,), True), peer())[another] > epoch


def nobody_gets_the_queue_for_a_lease(locks: Locks, clock: MovableClock, epoch: int) -> int:
    """The epoch of who gets it then."""
    for _ in range(int(HANDOVER_LEASE_S)):
        assert locks.lock(renewal(TWO, epoch), peer()) == {}, "whether it is current nobody knows"
        assert locks.lock(ONE, peer()) == {}
        clock.advance(1)
        finish(locks.expiring())
    last = locks.lock(ONE, peer())[QUEUE]
    assert last > epoch
    return last


def test_after_the_machine_ended_nothing_is_believed(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = handed_over(make_locks(tmp_path, clock))[3]
    monkeypatch.setattr(journals, "boot_id", lambda: "the next start")
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, epoch)


def test_a_broker_that_was_stopped_is_believed_on_another_machine(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(tmp_path, clock)
    epoch = handed_over(locks)[3]
    run(locks.saving(closes=True))
    assert locks.lock(LockRequest("c3", "g", (OTHER_QUEUE,), True), peer()) == {}, "nothing would be kept of it"
    monkeypatch.setattr(journals, "boot_id", lambda: "another machine")
    assert restarted(tmp_path, clock).lock(renewal(TWO, epoch), peer()) == {QUEUE: epoch}


@pytest.mark.parametrize("name", ["locks.json", "locks.journal"])
def test_with_a_damaged_file_nothing_is_believed(tmp_path: Path, clock: MovableClock, name: str) -> None:
    locks, one = make_locks(tmp_path, clock), peer()
    for _ in range(LIMITS.journal_lines):
        locks.lock(ONE, one)
        locks.unlock(ONE, one)
    run(locks.saving())
    epoch = handed_over(locks)[3]
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, epoch)


@pytest.mark.parametrize(
    "content",
    [b"{}", b'{"a":1}', b"[null]", b"[1.5]", b"[[]]", b"[[1]]", b'[["g","t",0,1.5]]', b'[["g","t",[],"c",5]]',
     b'[["g","t",0,"c","e"]]', b'[["g","t",0,"c",5,"e"]]'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["locks.json", "locks.journal"])
def test_with_a_file_that_holds_something_else_nothing_is_believed(
    tmp_path: Path, clock: MovableClock, name: str, content: bytes
) -> None:
    """Files of earlier releases have no checksum."""
    epoch = handed_over(make_locks(tmp_path, clock))[3]
    line = b"%08x %b\n" % (zlib.crc32(content), content)
    (tmp_path / name).write_bytes(content if name == "locks.json" else line)
    assert nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, epoch if name == "locks.json" else 0)


def test_without_its_journal_a_file_is_not_believed(tmp_path: Path, clock: MovableClock) -> None:
    limits = Limits(journal_lines=0)
    locks = make_locks(tmp_path, clock, limits=limits)
    locks.lock(ONE, peer())
    run(locks.saving())
    (tmp_path / "locks.journal").unlink()
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock, limits), clock, 0)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("has_older", [False, True])
def test_without_its_file_or_with_an_older_one_a_journal_is_not_believed(
    tmp_path: Path, clock: MovableClock, has_older: bool, closes: bool
) -> None:
    limits = Limits(journal_lines=0)
    path = tmp_path / "locks.json"
    locks = make_locks(tmp_path, clock, limits=limits)
    locks.lock(ONE, peer())
    run(locks.saving())
    older = path.read_bytes()
    locks.unlock(ONE, peer())
    locks.lock(LockRequest("c1", "g", (OTHER_QUEUE,), True), peer())
    run(locks.saving(closes=closes))
    path.write_bytes(older) if has_older else path.unlink()
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock, limits), clock, 0)


@pytest.mark.parametrize("is_saved", [False, True])
def test_leases_whose_files_are_gone_are_not_taken_for_none(
    tmp_path: Path, clock: MovableClock, is_saved: bool
) -> None:
    limits = Limits(journal_lines=0 if is_saved else LIMITS.journal_lines)
    locks = make_locks(tmp_path, clock, limits=limits)
    locks.lock(ONE, peer())
    run(locks.saving())
    for name in ("locks.json", "locks.journal"):
        (tmp_path / name).unlink(missing_ok=True)
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock, limits), clock, 0)


@pytest.mark.parametrize("closes", [False, True])
def test_a_file_that_is_saved_again_and_again_is_believed(tmp_path: Path, clock: MovableClock, closes: bool) -> None:
    limits = Limits(journal_lines=0)
    locks = make_locks(tmp_path, clock, limits=limits)
    epoch = locks.lock(ONE, peer())[QUEUE]
    for _ in range(4):
        run(locks.saving(closes=closes))
        locks = restarted(tmp_path, clock, limits)
        assert locks.lock(renewal(ONE, epoch), peer()) == {QUEUE: epoch}


@pytest.mark.parametrize("name", ["locks.json", "locks.journal", "locks.behind"])
def test_a_folder_where_a_file_was_is_no_lease(tmp_path: Path, clock: MovableClock, name: str) -> None:
    epoch = handed_over(make_locks(tmp_path, clock))[3]
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").touch()
    known = 0 if name == "locks.journal" else epoch
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, known)


def handed_over_on_a_full_disk(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> int:
    """The epoch of the new owner."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        return handed_over(locks)[3]


def test_what_a_full_disk_refused_is_remembered(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(tmp_path, clock)
    epoch = handed_over_on_a_full_disk(locks, monkeypatch)
    killed = restarted(tmp_path, clock)
    run(killed.saving(closes=True))  # before anybody can know
    again = restarted(tmp_path, clock)
    last = nobody_gets_the_queue_for_a_lease(again, clock, epoch)
    run(again.saving())
    assert restarted(tmp_path, clock).lock(renewal(ONE, last), peer()) == {QUEUE: last}, "that is over"


def test_a_disk_that_takes_something_again_has_everything(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(tmp_path, clock)
    epoch = handed_over_on_a_full_disk(locks, monkeypatch)
    run(locks.saving())
    assert restarted(tmp_path, clock).lock(renewal(TWO, epoch), peer()) == {QUEUE: epoch}


def test_a_folder_that_takes_nothing_is_not_believed(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = make_locks(tmp_path, clock)

    def refused(*arguments: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open_file", refused)
        epoch = handed_over(locks)[3]
        nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, epoch)


def test_a_process_without_descriptors_leaves_a_mark_for_the_next(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the journal nor a new file can be opened, and the next run can write both."""
    locks = make_locks(tmp_path, clock)

    def refused(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open_file", refused)
        epoch = handed_over(locks)[3]
    again = restarted(tmp_path, clock)
    last = nobody_gets_the_queue_for_a_lease(again, clock, epoch)
    run(again.saving())
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open_file", refused)
        assert again.unlock(ONE, peer()), "its owner has another connection"
        again.lock(LockRequest("c3", "g", (OTHER_QUEUE,), True), peer())
    nobody_gets_the_queue_for_a_lease(restarted(tmp_path, clock), clock, last)


# The offsets of groups, without a broker: which are kept, by whom they were put, and what is saved of them.


def made(folder: Path, identity: str = "id", groups: ConsumerGroups | None = None, **limits: Any) -> Offsets:
    topics: Any = SimpleNamespace(identity=lambda topic: identity)
    return Offsets(Runtime(limits=Limits(**limits)), folder / "offsets.json", groups or make_groups(), topics)


def save(offsets: Offsets, folder: Path) -> Any:
    """The value that is written; None if nothing is."""
    path = folder / "offsets.json"
    path.unlink(missing_ok=True)
    run(offsets.saving())
    return read_state(path)


def test_what_was_put_is_kept_by_group_topic_and_queue(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    assert (offsets.get("g", "t", 0), offsets.knows("g", "t"), offsets.of("g", "t")) == (None, False, {})
    offsets.put("g", "t", 1, 5)
    offsets.put("g", "u", 0, 0)
    offsets.put("h", "t", 1, 7)
    assert (offsets.get("g", "t", 1), offsets.get("g", "t", 0), offsets.knows("g", "t")) == (5, None, True)
    assert (offsets.of("g", "t"), offsets.groups()) == ({1: 5}, {"g", "h"})
    assert (offsets.topics_of("g"), offsets.groups_of("t"), offsets.groups_of("v")) == (["t", "u"], ["g", "h"], [])


def test_offsets_are_saved_once_and_read_by_the_next_run(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    assert save(offsets, tmp_path) is None
    offsets.put("g", "t", 1, 5)
    offsets.put("g", "t", 1, 4)
    saved = {"t@g": {"1": 4}, "rewinds": {"t@g": 1}, "identities": {"t": "id"}}
    assert save(offsets, tmp_path) == saved
    assert save(offsets, tmp_path) is None
    offsets.put("g", "t", 2, 9)
    assert save(offsets, tmp_path) == saved | {"t@g": {"1": 4, "2": 9}}
    again = made(tmp_path, max_offsets=2)
    assert (again.of("g", "t"), again.rewinds("g", "t"), again.topics_of("g")) == ({1: 4, 2: 9}, 1, ["t"])
    again.put("g", "t", 1, 8)
    with pytest.raises(LimitExceeded, match="keeps 2 offsets"):
        again.put("g", "t", 3, 0)


def test_this_many_offsets_are_kept_and_others_may_come_when_some_are_gone(tmp_path: Path) -> None:
    offsets = made(tmp_path, max_offsets=2)
    offsets.put("g", "t", 0, 1)
    offsets.put("h", "t", 0, 1)
    offsets.put("g", "t", 0, 2)
    with pytest.raises(LimitExceeded):
        offsets.put("g", "t", 1, 1)
    with pytest.raises(LimitExceeded):
        offsets.put("i", "t", 1, 1)
    offsets.group_deleted("g")
    assert (offsets.get("g", "t", 0), offsets.groups(), offsets.groups_of("t")) == (None, {"h"}, ["h"])
    offsets.put("i", "t", 1, 1)


def test_what_goes_back_is_counted_until_it_is_forgotten(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    for offset in (5, 5, 4, 6, 3):
        offsets.put("g", "t", 0, offset)
    assert (offsets.rewinds("g", "t"), offsets.rewinds("g", "u")) == (2, 0)
    save(offsets, tmp_path)
    offsets.topic_deleted("t")
    assert (offsets.rewinds("g", "t"), offsets.topics_of("g")) == (0, [])
    assert save(offsets, tmp_path) == {"rewinds": {}, "identities": {}}


def test_nobody_but_an_owner_goes_back_behind_the_last_owner(tmp_path: Path) -> None:
    groups = make_groups()
    offsets, group = made(tmp_path, groups=groups), groups.obtain("g")
    assert not group.is_behind_owner("t", 0, 0)
    offsets.put("g", "t", 0, 5, by_owner=True)
    offsets.put("g", "t", 1, 5)
    assert [group.is_behind_owner("t", 0, offset) for offset in (4, 5)] == [True, False]
    assert not group.is_behind_owner("t", 1, 0)
    offsets.put("g", "t", 0, 5)
    assert group.is_behind_owner("t", 0, 4), "the same offset says nothing new"
    offsets.put("g", "t", 0, 6)
    assert not group.is_behind_owner("t", 0, 4), "somebody else has gone on from it"


@pytest.mark.parametrize("by", ["allow_lower_offset", "forget"])
def test_an_owner_s_offset_may_be_given_up(tmp_path: Path, by: str) -> None:
    groups = make_groups()
    offsets, group = made(tmp_path, groups=groups), groups.obtain("g")
    offsets.allow_lower_offset("g", "t", 0)
    offsets.fence(group, ("t", 0))
    assert not group.is_behind_owner("t", 0, 0)
    offsets.put("g", "t", 0, 5)
    offsets.fence(group, ("t", 0))
    assert group.is_behind_owner("t", 0, 4)
    if by == "forget":
        offsets.topic_deleted("t")
    else:
        offsets.allow_lower_offset("g", "t", 0)
    assert not group.is_behind_owner("t", 0, 4)


@pytest.mark.parametrize(
    ("identity", "deleted", "is_kept"),
    [("id", (), True), ("id", ("t",), True), ("other", (), False), ("", (), True), ("", ("t",), False)],
)
def test_offsets_of_a_topic_that_was_recreated_are_forgotten(
    tmp_path: Path, identity: str, deleted: tuple[str, ...], *, is_kept: bool
) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 5)
    save(offsets, tmp_path)
    again = made(tmp_path, identity)
    again.apply_journal(deleted)
    assert again.knows("g", "t") is is_kept


def ends(*ends: int) -> Any:
    """The queues of the topic, by where each ends."""
    return {("t", number): SimpleNamespace(next=end) for number, end in enumerate(ends)}


def test_offsets_beyond_the_end_of_their_queue_are_set_back_and_saved(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    for number in range(3):
        offsets.put("g", "t", number, 5)
    save(offsets, tmp_path)
    offsets.clamp(ends(5, 5, 9))
    assert save(offsets, tmp_path) is None
    offsets.clamp(ends(5, 4))
    assert offsets.of("g", "t") == {0: 5, 1: 4, 2: 0}
    assert save(offsets, tmp_path) is not None


@pytest.mark.parametrize("by", ["fence", "hand_over"])
def test_the_offset_of_a_queue_that_was_handed_over_is_read_by_the_next_run(tmp_path: Path, by: str) -> None:
    groups = make_groups()
    offsets = made(tmp_path, groups=groups)
    offsets.put("g", "t", 0, 5)
    save(offsets, tmp_path)
    offsets.put("g", "t", 0, 7)
    offsets.put("g", "t", 1, 8)
    if by == "fence":
        offsets.fence(groups.obtain("g"), ("t", 0))
    else:
        offsets.hand_over(groups.obtain("g"), [("t", 0), ("t", 3)])
    offsets.write_handed_over()
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 7}
    assert save(again, tmp_path) == {"t@g": {"0": 7}, "rewinds": {}, "identities": {"t": "id"}}


def test_a_save_leaves_nothing_of_earlier_hand_overs(tmp_path: Path) -> None:
    groups = make_groups()
    offsets = made(tmp_path, groups=groups)
    offsets.put("g", "t", 0, 7)
    offsets.hand_over(groups.obtain("g"), [("t", 0)])
    offsets.write_handed_over()
    offsets.put("g", "t", 0, 9)
    save(offsets, tmp_path)
    offsets.hand_over(groups.obtain("g"), [("t", 0)])
    offsets.write_handed_over()
    assert (tmp_path / "offsets.journal").read_bytes() == b"", "the file has it"
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 9}


def test_an_offset_that_is_handed_over_during_a_save_is_kept(tmp_path: Path) -> None:
    groups = make_groups()
    offsets = made(tmp_path, groups=groups)
    offsets.put("g", "t", 0, 7)
    offsets.hand_over(groups.obtain("g"), [("t", 0)])
    offsets.write_handed_over()
    saving = offsets.saving()
    for step in saving:
        if step is not None:
            offsets.put("g", "t", 1, 3)
            offsets.hand_over(groups.obtain("g"), [("t", 1)])
            offsets.write_handed_over()
            step()
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 7, 1: 3}


@pytest.mark.parametrize(("identity", "deleted"), [("other", ()), ("", ("t",))])
def test_a_hand_over_in_a_topic_that_was_deleted_since_is_forgotten(
    tmp_path: Path, identity: str, deleted: tuple[str, ...]
) -> None:
    groups = make_groups()
    offsets = made(tmp_path, groups=groups)
    offsets.put("g", "t", 0, 5)
    offsets.hand_over(groups.obtain("g"), [("t", 0)])
    offsets.write_handed_over()
    again = made(tmp_path, identity)
    again.apply_journal(deleted)
    assert not again.knows("g", "t")
