"""The offsets of groups, without a broker: which are kept, by whom they were put, and what is saved of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rocketlet.broker.config import LimitExceeded, Limits
from rocketlet.broker.groups.offsets import Offsets
from rocketlet.broker.runtime import run
from rocketlet.broker.store.files import read_state

from ...support.locks import make_groups


def made(folder: Path, identity: str = "id", **limits: Any) -> Offsets:
    topics: Any = SimpleNamespace(identity=lambda topic: identity)
    return Offsets(folder / "offsets.json", make_groups(), topics, Limits(**limits))


def save(offsets: Offsets) -> dict[str, Any] | None:
    """The text that is written; None if nothing is."""
    path = offsets._path
    path.unlink(missing_ok=True)
    run(offsets.saving())
    saved: dict[str, Any] | None = read_state(path)
    return saved


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
    assert save(offsets) is None
    offsets.put("g", "t", 1, 5)
    offsets.put("g", "t", 1, 4)
    saved = {"t@g": {"1": 4}, "rewinds": {"t@g": 1}, "identities": {"t": "id"}}
    assert save(offsets) == saved
    assert save(offsets) is None
    offsets.put("g", "t", 2, 9)
    assert save(offsets) == saved | {"t@g": {"1": 4, "2": 9}}
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
    save(offsets)
    offsets.topic_deleted("t")
    assert (offsets.rewinds("g", "t"), offsets.topics_of("g")) == (0, [])
    assert save(offsets) == {"rewinds": {}, "identities": {}}


def test_nobody_but_an_owner_goes_back_behind_the_last_owner(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    assert not offsets.is_behind_owner("g", "t", 0, 0)
    offsets.put("g", "t", 0, 5, by_owner=True)
    offsets.put("g", "t", 1, 5)
    assert [offsets.is_behind_owner("g", "t", 0, offset) for offset in (4, 5)] == [True, False]
    assert not offsets.is_behind_owner("g", "t", 1, 0)
    offsets.put("g", "t", 0, 5)
    assert offsets.is_behind_owner("g", "t", 0, 4), "the same offset says nothing new"
    offsets.put("g", "t", 0, 6)
    assert not offsets.is_behind_owner("g", "t", 0, 4), "somebody else has gone on from it"


@pytest.mark.parametrize("by", ["let_go_back", "forget"])
def test_an_owner_s_offset_may_be_given_up(tmp_path: Path, by: str) -> None:
    offsets = made(tmp_path)
    offsets.let_go_back("g", "t", 0)
    offsets.mark("g", "t", 0)
    assert not offsets.is_behind_owner("g", "t", 0, 0)
    offsets.put("g", "t", 0, 5)
    offsets.mark("g", "t", 0)
    assert offsets.is_behind_owner("g", "t", 0, 4)
    if by == "forget":
        offsets.topic_deleted("t")
    else:
        offsets.let_go_back("g", "t", 0)
    assert not offsets.is_behind_owner("g", "t", 0, 4)


@pytest.mark.parametrize(
    ("identity", "deleted", "is_kept"),
    [("id", (), True), ("id", ("t",), True), ("other", (), False), ("", (), True), ("", ("t",), False)],
)
def test_offsets_of_a_topic_that_was_recreated_are_forgotten(
    tmp_path: Path, identity: str, deleted: tuple[str, ...], *, is_kept: bool
) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 5)
    save(offsets)
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
    save(offsets)
    offsets.clamp(ends(5, 5, 9))
    assert save(offsets) is None
    offsets.clamp(ends(5, 4))
    assert offsets.of("g", "t") == {0: 5, 1: 4, 2: 0}
    assert save(offsets) is not None


@pytest.mark.parametrize("by", ["mark", "hand_over"])
def test_the_offset_of_a_queue_that_was_handed_over_is_read_by_the_next_run(tmp_path: Path, by: str) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 5)
    save(offsets)
    offsets.put("g", "t", 0, 7)
    offsets.put("g", "t", 1, 8)
    if by == "mark":
        offsets.mark("g", "t", 0)
    else:
        offsets.hand_over("g", [("t", 0), ("t", 3)])
    offsets.write_handed_over()
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 7}
    assert save(again) == {"t@g": {"0": 7}, "rewinds": {}, "identities": {"t": "id"}}


def test_a_save_leaves_nothing_of_earlier_hand_overs(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 7)
    offsets.hand_over("g", [("t", 0)])
    offsets.write_handed_over()
    offsets.put("g", "t", 0, 9)
    save(offsets)
    offsets.hand_over("g", [("t", 0)])
    offsets.write_handed_over()
    assert (tmp_path / "offsets.journal").read_bytes() == b"", "the file has it"
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 9}


def test_an_offset_that_is_handed_over_during_a_save_is_kept(tmp_path: Path) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 7)
    offsets.hand_over("g", [("t", 0)])
    offsets.write_handed_over()
    saving = offsets.saving()
    for step in saving:
        if step is not None:
            offsets.put("g", "t", 1, 3)
            offsets.hand_over("g", [("t", 1)])
            offsets.write_handed_over()
            step()
    again = made(tmp_path)
    again.apply_journal(())
    assert again.of("g", "t") == {0: 7, 1: 3}


@pytest.mark.parametrize(("identity", "deleted"), [("other", ()), ("", ("t",))])
def test_a_hand_over_in_a_topic_that_was_deleted_since_is_forgotten(
    tmp_path: Path, identity: str, deleted: tuple[str, ...]
) -> None:
    offsets = made(tmp_path)
    offsets.put("g", "t", 0, 5)
    offsets.hand_over("g", [("t", 0)])
    offsets.write_handed_over()
    again = made(tmp_path, identity)
    again.apply_journal(deleted)
    assert not again.knows("g", "t")
