"""A topic that was deleted stays so, wherever a kill comes between the journal's line and the next checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocketlet.broker.broker import Broker
from rocketlet.broker.runtime import run
from rocketlet.broker.store import disk
from rocketlet.broker.store.files import StoreFull
from rocketlet.protocol.bodies import TopicConfig

from campaigns.store import open_broker, put


def filled(folder: Path, *, is_saved: bool) -> Broker:
    broker = open_broker(folder)
    for name in ("gone", "kept"):
        broker.topics.put(TopicConfig(name, 1, 1), broker.store.end)
        for number in range(3):
            put(broker, broker.store.queue(name, 0), b"%s %d" % (name.encode(), number))
    if is_saved:
        broker.persist()
    return broker


def killed(broker: Broker, folder: Path) -> Broker:
    """The broker after the next start. Nothing is saved."""
    broker.store.close()
    return open_broker(folder)


def bodies(broker: Broker, topic: str) -> list[bytes]:
    queue = broker.store.queue(topic, 0)
    return [broker.store.message(queue, offset).body for offset in range(queue.begin, queue.next)]


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("loses", ["nothing", "checkpoint", "topics"])
def test_a_deleted_topic_stays_away_after_a_kill(tmp_path: Path, is_saved: bool, loses: str) -> None:
    broker = filled(tmp_path, is_saved=is_saved)
    if loses == "topics":  # the journal is short again, and the state file has what it had
        broker.topics._save()
    broker.topics.delete("gone", broker.store.end)
    if loses == "topics":
        broker.topics._save()
    if loses == "checkpoint":
        for path in tmp_path.glob("checkpoint.*"):
            path.unlink()
    broker = killed(broker, tmp_path)
    assert broker.topics.get("gone") is None
    assert ("gone", 0) not in broker.store.queues
    assert bodies(broker, "kept") == [b"kept 0", b"kept 1", b"kept 2"]
    assert broker.recovered.lost == ()
    broker = killed(broker, tmp_path)
    assert broker.topics.get("gone") is None
    broker.store.close()


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_topic_that_was_made_anew_has_only_what_came_then(tmp_path: Path, is_removed: bool) -> None:
    broker = filled(tmp_path, is_saved=True)
    broker.topics.delete("gone", broker.store.end)
    removing = broker.store.deleting("gone")
    broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
    put(broker, broker.store.queue("gone", 0), b"new")
    if not is_removed:  # the folder's new name was lost
        (tmp_path / "removed" / "0").rename(tmp_path / "consumequeue" / "gone")
    removing.close()
    broker = killed(broker, tmp_path)
    assert bodies(broker, "gone") == [b"new"]
    assert broker.recovered.lost == ()
    broker.store.close()


def test_deletions_are_forgotten_with_the_part_of_the_log_that_they_are_about(tmp_path: Path) -> None:
    broker = filled(tmp_path, is_saved=True)
    at = broker.store.end
    broker.topics.delete("gone", at)
    assert broker.topics.deleted == {"gone": at}
    broker.topics.forget_deletions(at - 1)
    assert broker.topics.deleted == {"gone": at}
    broker.topics.forget_deletions(at)
    assert broker.topics.deleted == {}
    broker.store.close()


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_offsets_in_a_deleted_topic_are_forgotten_although_nothing_was_saved(
    tmp_path: Path, is_made_anew: bool
) -> None:
    broker = filled(tmp_path, is_saved=False)
    for topic in ("gone", "kept"):
        broker.offsets.put("g", topic, 0, 2)
        broker.offsets.put("g", topic, 0, 1)
    broker.persist()
    broker.topics.delete("gone", broker.store.end)
    broker.offsets.forget_topic("gone")
    if is_made_anew:
        broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
        for number in range(3):
            put(broker, broker.store.queue("gone", 0), b"new %d" % number)
    broker = killed(broker, tmp_path)
    assert broker.offsets.get("g", "gone", 0) is None, "the group has read nothing of this topic"
    assert (broker.offsets.get("g", "kept", 0), broker.offsets.rewinds("g", "kept")) == (1, 1)
    assert broker.offsets.rewinds("g", "gone") == 0
    broker.offsets.put("g", "kept", 0, 3)
    broker.persist()
    broker = killed(broker, tmp_path)
    assert broker.offsets.get("g", "kept", 0) == 3
    assert broker.offsets.get("g", "gone", 0) is None
    broker.store.close()


def test_offsets_that_an_earlier_version_has_saved_are_kept(tmp_path: Path) -> None:
    broker = filled(tmp_path, is_saved=True)
    broker.store.close()
    (tmp_path / "offsets.json").write_bytes(b'{"kept@g":{"0":2},"rewinds":{}}')
    broker = open_broker(tmp_path)
    assert broker.offsets.get("g", "kept", 0) == 2
    broker.store.close()


def not_permitted(source: Path, target: Path) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_topic_made_anew_does_not_open_index_files_that_could_not_be_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = filled(tmp_path, is_saved=True)
    monkeypatch.setattr(disk, "rename_folder", not_permitted)
    broker.topics.delete("gone", broker.store.end)
    removing = broker.store.deleting("gone")
    broker.topics.put(TopicConfig("gone", 1, 1), broker.store.end)
    remove_folder = disk.remove_folder
    monkeypatch.setattr(disk, "remove_folder", lambda path: None)
    with pytest.raises(StoreFull, match="cannot be removed"):
        broker.store.queue("gone", 0)
    monkeypatch.setattr(disk, "remove_folder", remove_folder)
    put(broker, broker.store.queue("gone", 0), b"new")
    run(removing)
    broker.persist()
    assert bodies(broker, "gone") == [b"new"]
    broker = killed(broker, tmp_path)
    assert bodies(broker, "gone") == [b"new"]
    assert broker.recovered.lost == ()
    broker.store.close()


def test_index_files_that_could_not_be_taken_away_are_removed_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = filled(tmp_path, is_saved=True)
    monkeypatch.setattr(disk, "rename_folder", not_permitted)
    broker.topics.delete("gone", broker.store.end)
    broker.store.delete_topic("gone")
    assert not (tmp_path / "consumequeue" / "gone").exists()
    broker.store.close()
