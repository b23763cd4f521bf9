"""The broker's topics: their settings, their creation, and the file in which they are stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson
import structlog
from msgspec import Struct

from ...protocol import names
from ...protocol.bodies import DataVersion, TopicConfig, joined, read_topic, shaped, topic_json
from ...protocol.codes import MAX_PERM, PERM_INHERIT, PERM_READ, PERM_READ_WRITE, PERM_WRITE
from ..config import MAX_QUEUES_PER_TOPIC, BrokerConfig, LimitExceeded, within
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..sessions.refusal import Reason, Refusal
from ..store.files import StoreError, StoreFull, find_state, replace_state, write_state
from ..store.index import ConsumeQueue
from ..store.journals import Journal

log = structlog.get_logger("rocketlet.topics")


_OF_GROUPS = (names.RETRY_PREFIX, names.DLQ_PREFIX)  # consumers store messages in them with any properties
PERM_TEMPLATE = PERM_READ_WRITE | PERM_INHERIT  # a send to an unknown topic may create a copy of this topic


def _checked(topic: TopicConfig) -> TopicConfig:
    """Return a topic after a check of its name and settings. Raises IllegalName, LimitExceeded."""
    fault = names.topic_fault(topic.name)
    if fault:
        raise names.IllegalName(fault)
    within("the number of queues to read", topic.read_queues, 0, MAX_QUEUES_PER_TOPIC)
    within("the number of queues to write", topic.write_queues, 0, MAX_QUEUES_PER_TOPIC)
    within("the permission", topic.perm, 0, MAX_PERM)
    within("the system flag", topic.sys_flag, 0, 0x7FFF_FFFF)
    return topic


def _queues(topic: TopicConfig | None) -> int:
    """Return the number of queues of a topic, readable or writable; 0 for None."""
    return max(topic.read_queues, topic.write_queues) if topic is not None else 0


class _SavedTopics(Struct):
    """The state file: topics, and by name the end of the log at the time of each deletion."""

    topics: list[object]
    deleted: dict[str, object] = {}


class _SavedTopic(Struct, rename="camel"):
    """The fields of a topic in the state file and its journal that name servers do not get."""

    since: int
    identity: str
    lite_since: int | None = None


class _DeletedTopic(Struct):
    """The deletion of a topic in the journal."""

    deleted: str
    at: int


class MessageChanges:
    """Events that topics and the log report to the parts above them. The broker overrides the methods that it needs."""

    def topic_changed(self, topic: TopicConfig) -> None:
        """Handle a new topic, or changed settings."""

    def appended(self, queues: list[ConsumeQueue]) -> None:
        """Handle messages that were stored in these queues."""


class Topics:
    """The settings of all topics, by name.

    `deleted` has the end of the log at the time of each deletion, for as long as the topic is not recreated and the log may
    contain its records; the oldest deletions are dropped beyond `max_topics`.
    """

    def __init__(self, runtime: Runtime, config: BrokerConfig, changes: MessageChanges | None = None) -> None:
        clock = runtime.clock
        self._limits = runtime.limits
        self._adoption = runtime.adoption
        self._path: Path = config.data_dir / "topics.json"
        self._config = config
        self._topics: dict[str, TopicConfig] = {}
        self._queues = 0  # number of queues of all topics
        self._since: dict[str, int] = {}
        self._identities: dict[str, str] = {}
        self._lite_since: dict[str, int] = {}  # the end of the log when the topic was first made LITE
        self.deleted: dict[str, int] = {}
        self.journal = Journal(self._path)
        self._is_behind = False  # True if topics are missing in the file and the journal, because a save has failed
        self.is_current = False  # True if the file and the journal contain every topic that exists
        self.version = DataVersion(clock.time_ms())
        self._changes = changes or MessageChanges()
        self.generation = runtime.generation
        self._clock = clock
        self.get = self._topics.get
        for topic in self._built_in():
            fault = names.topic_fault(topic.name)
            if fault:
                raise StoreError(
                    f"the names of the broker and its cluster are also topics, and {fault}; choose another name"
                )
            self._put_in_memory(topic)
        self._load()

    def _built_in(self) -> Iterator[TopicConfig]:
        """Yield the topics that exist from the start: those of Apache's TopicConfigManager, with the same numbers of queues,
        and the broker's own."""
        config, levels = self._config, len(self._config.delay_levels_ms)
        yield TopicConfig(names.SELF_TEST_TOPIC, 1, 1)
        if config.auto_create_topics:
            queues = min(config.default_queues, MAX_QUEUES_PER_TOPIC)
            yield TopicConfig(names.DEFAULT_TOPIC, queues, queues, PERM_TEMPLATE)
        yield TopicConfig(names.BENCHMARK_TOPIC, 1024, 1024)
        yield TopicConfig(config.cluster, 16, 16, PERM_TEMPLATE)
        yield TopicConfig(config.name, 1, 1, PERM_TEMPLATE)
        yield TopicConfig(names.OFFSET_MOVED_TOPIC, 1, 1)
        yield TopicConfig(names.SCHEDULE_TOPIC, levels, levels)
        yield TopicConfig(names.TIMER_TOPIC, 1, 1)
        yield TopicConfig(names.NOTES_TOPIC, 2, 2)
        yield TopicConfig(names.HALF_TOPIC, 1, 1)
        yield TopicConfig(names.OP_HALF_TOPIC, 1, 1)
        yield TopicConfig(names.CHECK_MAX_TIME_TOPIC, 1, 1)
        yield TopicConfig(names.TRACE_TOPIC, 1, 1)
        yield TopicConfig(names.reply_topic(config.cluster), 1, 1)

    def _load(self) -> None:
        state = find_state(self._path, is_derivable=True)
        changes = self.journal.read()
        saved = self._adoption.whole("topics", state.value, _SavedTopics)
        items, deleted = (saved.topics, saved.deleted) if saved is not None else ([], {})
        is_current = state.is_current if state.value is not None else bool(changes)
        self.is_current = self.journal.is_whole and is_current and (saved is not None or state.value is None)
        self._adoption.each("deleted topics", deleted.items(), self._adopt_deletion)
        self._adoption.each("topics", (*items, *changes), self._adopt_item)

    def _adopt_deletion(self, entry: tuple[str, object]) -> None:
        name, position = entry
        self.deleted[name] = shaped(position, int)

    def _adopt_item(self, item: object) -> None:
        if isinstance(item, dict) and "deleted" in item:
            deletion = shaped(item, _DeletedTopic)
            self._forget(deletion.deleted, deletion.at)
            return
        topic, saved = _checked(read_topic(item)), shaped(item, _SavedTopic)
        if saved.lite_since is not None:
            self._lite_since[topic.name] = saved.lite_since
        self._put_in_memory(topic)
        self.deleted.pop(topic.name, None)
        self._since[topic.name] = saved.since
        self._identities[topic.name] = saved.identity

    def queues_of(self, name: str) -> int:
        """Return the number of readable queues of a topic."""
        topic = self._topics.get(name)
        return topic.read_queues if topic else 0

    def queue_now(self, name: str, queue_id: int, position: int) -> int | None:
        """Return the queue for a message that has waited for `queue_id`: the same queue, or another one if the topic now has
        fewer queues. Return None if the topic no longer exists, or if it is the retry topic of a recreated group and the
        message is a retry of the deleted group.

        Args:
            position: the commit log position of the waiting message
        """
        topic = self._topics.get(name)
        if topic is None or (name.startswith(names.RETRY_PREFIX) and position < self._since.get(name, 0)):
            return None
        if queue_id < max(topic.read_queues, topic.write_queues):
            return queue_id
        return queue_id % (topic.read_queues or topic.write_queues or 1)

    def all_queues_of(self, name: str) -> int:
        """Return the number of queues of a topic, readable or writable."""
        return _queues(self._topics.get(name))

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(list(self._topics.values()))

    def since(self) -> list[tuple[str, int]]:
        """Return each topic's name, and the commit log position at which it was created."""
        return [(name, self._since.get(name, 0)) for name in self._topics]

    def adopt(self, topics: Mapping[str, int]) -> None:
        """Add topics that are in the log, but not in the file, which was lost or is older. `topics` has their numbers
        of queues."""
        for name, queues in topics.items():
            log.error(
                "topic_settings_lost", topic=name, queues=queues, hint="the topic was found only in the commit log"
            )
            self._put_in_memory(TopicConfig(name, queues, queues))
            self._since[name] = 0
            self._identities[name] = ""
        if topics:
            self._save_or_log()

    def _save_or_log(self) -> None:
        try:
            self._save()
        except StoreFull as error:
            log.error("topics_save_failed", reason=str(error), hint="the next change retries the save")
            self._is_behind = True

    def identity(self, name: str) -> str:
        """Return the random id that a topic got when it was created, by which a recreated topic differs.

        Empty for built-in and unknown topics, and for topics restored from the commit log alone.
        """
        return self._identities.get(name, "")

    def lite_since(self, name: str) -> int | None:
        """Return the commit log position from which on a topic may have messages of lite topics: the end of the log when the
        topic was first made LITE. Return None for a topic that never was."""
        return self._lite_since.get(name)

    def clamp(self, end: int) -> None:
        """Lower positions beyond the end of the log, which has lost messages. Otherwise the next messages, which get lower
        positions, would not count as messages of their topics after another start."""
        is_lowered = False
        for positions in (self._since, self._lite_since):
            for name, position in positions.items():
                if position > end:
                    positions[name] = end
                    is_lowered = True
        if is_lowered:
            self._save_or_log()

    def is_built_in(self, name: str) -> bool:
        return names.is_system_topic(name) or any(topic.name == name for topic in self._built_in())

    def put(self, topic: TopicConfig, position: int) -> TopicConfig:
        """Create or change a topic, and store it. Raises IllegalName, LimitExceeded, StoreFull.

        Args:
            topic: the settings
            position: end of the commit log
        """
        _checked(topic)
        if topic.is_lite and topic.name.startswith(_OF_GROUPS):
            raise names.IllegalName(
                f"the topic {topic.name} is of a group, and cannot have lite topics; use another topic"
            )
        if topic.name not in self._topics and len(self._topics) >= self._limits.max_topics:
            raise LimitExceeded(
                f"the broker has {self._limits.max_topics} topics, which is the maximum; delete some, or send to another "
                "broker"
            )
        before = self._topics.get(topic.name)
        more = _queues(topic) - _queues(before)
        if more > 0 and self._queues + more > self._limits.max_queues:
            raise LimitExceeded(
                f"the broker has {self._queues} queues of all topics; maximum {self._limits.max_queues}; "
                "delete topics, or use another broker"
            )
        self._put_in_memory(topic)
        self._since.setdefault(topic.name, position)
        self._identities.setdefault(topic.name, secrets.token_hex(8))
        was_never_lite = topic.is_lite and topic.name not in self._lite_since
        if was_never_lite:
            # a topic that was restored from the commit log alone may have been LITE before: all its messages count
            self._lite_since[topic.name] = position if self._identities[topic.name] else 0
        try:
            self._append(self._json(topic))
        except Exception:
            if was_never_lite:
                del self._lite_since[topic.name]
            self._restore(topic.name, before)
            raise
        self.deleted.pop(topic.name, None)
        # Reported only after it is stored, because name servers must not announce a topic that is missing after a
        # restart.
        self._changes.topic_changed(topic)
        return topic

    def ensure(self, topic: TopicConfig, position: int) -> TopicConfig:
        """Return the existing topic of this name, whatever its settings, or create it. Raises the errors of `put`."""
        return self._topics.get(topic.name) or self.put(topic, position)

    def _restore(self, name: str, before: TopicConfig | None) -> None:
        if before is None:
            self._remove_from_memory(name)
            self._since.pop(name, None)
            self._identities.pop(name, None)
        else:
            self._put_in_memory(before)

    def permits(self, topic: TopicConfig, permission: int) -> bool:
        """Return True if both the topic and the broker (`brokerPermission`) have a permission."""
        return bool(topic.perm & self._config.permission & permission)

    def check_reading(self) -> None:
        """Raises Refusal if the broker returns no messages (`brokerPermission`)."""
        if not self._config.permission & PERM_READ:
            raise Refusal(Reason.NOT_PERMITTED, f"the broker[{self._config.name}] pulling message is forbidden")

    def readable(self, name: str, queue_id: int = -1) -> TopicConfig:
        """Return the topic of which a client wants to read a queue, or all if its id is negative. Raises Refusal."""
        topic = self._topics.get(name)
        if topic is None:
            raise Refusal(Reason.NO_TOPIC, f"topic[{name}] not exist, create it or send to it first")
        if not topic.perm & PERM_READ:
            raise Refusal(Reason.NOT_PERMITTED, f"the topic[{name}] pulling message is forbidden")
        if queue_id >= topic.read_queues:
            text = f"queueId[{queue_id}] is illegal, topic:[{name}] topicConfig.readQueueNums:[{topic.read_queues}]"
            raise Refusal(Reason.NO_QUEUE, text)
        return topic

    def forbids_send(self, topic: TopicConfig) -> bool:
        """Return True if a remoting send to the topic is refused: the topic is ordered, and the broker lacks the write
        permission. Clients find all other permissions in routes, as in AbstractSendMessageProcessor.msgCheck."""
        return topic.order and not self._config.permission & PERM_WRITE

    def change_config(self, config: BrokerConfig) -> None:
        """Apply changed settings of the broker: permissions, and the existence and queues of TBW102."""
        self._config = config
        self._increase_version()
        self._remove_from_memory(names.DEFAULT_TOPIC)
        for topic in self._built_in():
            if topic.name == names.DEFAULT_TOPIC:
                self._put_in_memory(topic)

    def _put_in_memory(self, topic: TopicConfig) -> None:
        self._queues += _queues(topic) - _queues(self._topics.get(topic.name))
        self._topics[topic.name] = topic
        self.generation.increment()

    def _remove_from_memory(self, name: str) -> None:
        self._queues -= _queues(self._topics.pop(name, None))
        self.generation.increment()

    def delete(self, name: str, position: int) -> None:
        """Delete a topic. `position` is the end of the commit log. Raises StoreFull if the
        deletion cannot be written; the topic then still exists."""
        self._append({"deleted": name, "at": position})
        self._forget(name, position)

    def forget_deletions(self, begin: int) -> None:
        """Forget deletions before `begin`, the commit log's first position: the log contains no records of these topics
        any more."""
        for name in [name for name, position in self.deleted.items() if position <= begin]:
            del self.deleted[name]

    def _forget(self, name: str, position: int) -> None:
        self.deleted.pop(name, None)
        self.deleted[name] = position
        if len(self.deleted) > self._limits.max_topics:
            del self.deleted[next(iter(self.deleted))]
        self._remove_from_memory(name)
        self._since.pop(name, None)
        self._identities.pop(name, None)
        self._lite_since.pop(name, None)

    def auto_create(self, name: str, template: str, queues: int, position: int) -> TopicConfig | None:
        """Create a topic for a send to an unknown name, as a copy of the template. Return None if the template does not exist
        or lacks the INHERIT permission. Raises the errors of `put`."""
        pattern = self._topics.get(template)
        if pattern is None or not pattern.perm & PERM_INHERIT:
            return None
        # TopicConfigManager.createTopicInSendMessageMethod: as many queues as the client requests, but at most those of
        # the template.
        count = max(min(queues, pattern.write_queues), 1)
        return self.put(
            replace(pattern, name=name, read_queues=count, write_queues=count, perm=PERM_READ_WRITE), position
        )

    def _increase_version(self) -> None:
        """Increase the version, because name servers accept topics only with a new version."""
        self.version = DataVersion(self._clock.time_ms(), self.version.counter + 1)

    def _append(self, change: Mapping[str, object]) -> None:
        if self._is_behind:
            self._save()
        self._increase_version()
        self.journal.append(change)

    def _save(self) -> None:
        self._increase_version()
        stored = [self._json(topic) for topic in self._topics.values() if topic.name in self._since]
        write_state(self._path, {"topics": stored, "deleted": self.deleted})
        self.journal.clear()
        self._is_behind = False

    def saving(self, begin: int) -> Job[None]:
        """Write the whole file if the journal has become long. Raises StoreFull; the write is retried the next time.

        Args:
            begin: start of the commit log
        """
        self.forget_deletions(begin)
        if self.journal.lines > self._limits.journal_lines + len(self._topics):
            yield from self.journal.shortening(self._saving())

    def _saving(self) -> Job[None]:
        stored = [topic for topic in self._topics.values() if topic.name in self._since]
        content = yield from joined(orjson.dumps(self._json(topic)) for topic in stored)
        yield partial(
            replace_state, self._path, b'{"topics":[%b],"deleted":%b}' % (content, orjson.dumps(self.deleted))
        )

    def _json(self, topic: TopicConfig) -> dict[str, object]:
        found = topic_json(topic) | {"since": self._since.get(topic.name, 0), "identity": self.identity(topic.name)}
        lite_since = self._lite_since.get(topic.name)
        return found if lite_since is None else found | {"liteSince": lite_since}
