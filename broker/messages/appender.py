"""Stages and commits messages, usually once per socket read. All commits to the store are made here; sends that the
compiled module encodes are staged in the store directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...protocol import properties as props
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record, tried
from ..sessions.refusal import Reason, Refusal
from ..store.index import ConsumeQueue
from ..store.store import Store
from .topics import MessageChanges

# ------------------------------------------------------------------------------
# Begin, stage, commit. After a commit, requests that wait for the messages are answered.
#
# Messages are committed in the event-loop iteration in which they were staged, so that nothing reads the store in
# between.


class Appender:
    """Appends messages to the store, and reports the queues that have changed. Reads use `store` directly."""

    def __init__(self, store: Store, changes: MessageChanges) -> None:
        self.store = store
        self._appended = changes.appended
        self.begin = store.begin_batch
        self.stage = store.stage  # the store's own method, because another call per message is expensive
        self.stage_batch = store.stage_batch

    def commit(self) -> None:
        """Write all staged messages, and report their queues. If this raises, for example StoreFull, all of them are
        discarded."""
        if self.store.staged:
            self._appended(self.store.commit())

    @contextmanager
    def batch(self) -> Iterator[int]:
        """Commit the messages that the block stages, or discard them if the block raises. Yields the store time in ms."""
        kept = self.store.staged
        try:
            yield self.begin()
            self.commit()
        except BaseException:
            self.store.roll_back(kept)
            raise

    def stage_again(
        self,
        record: Record,
        queue: ConsumeQueue,
        properties: bytes,
        tag_code: int,
        *,
        sys_flag: int | None = None,
        reconsume_times: int | None = None,
        prepared_offset: int = 0,
    ) -> None:
        """Stage a copy of a stored message in a queue, for example of a delayed message that is due, a half message that was
        committed, or a message that a consumer sent back. Arguments that are None are taken from the message."""
        self.stage(
            queue,
            record.body,
            properties,
            tag_code,
            record.flag,
            record.sys_flag if sys_flag is None else sys_flag,
            record.born_ms,
            record.born_host,
            tried(record.reconsume_times if reconsume_times is None else reconsume_times),
            prepared_offset,
        )


# ------------------------------------------------------------------------------
# Properties of a message: their size limit, and the target queue of a message that waits.


def property_bytes(text: str, limit: int = MAX_PROPERTY_BYTES) -> bytes:
    """Encode properties. Raises Refusal if they exceed the limit. The limit of sent messages leaves space for
    properties that retries add."""
    data = text.encode()
    if len(data) > limit:
        raise Refusal(
            Reason.ILLEGAL_MESSAGE,
            f"the properties have {len(data)} bytes including the broker's own; maximum {limit}",
        )
    return data


def with_real_queue(text: str, topic: str, queue_id: int) -> str:
    """Return the properties of a delayed or half message, with its target queue."""
    text = props.without(props.without(text, props.REAL_TOPIC), props.REAL_QUEUE_ID)
    return props.appended(props.appended(text, props.REAL_TOPIC, topic), props.REAL_QUEUE_ID, str(queue_id))


def real_queue(record: Record) -> tuple[str, int]:
    """Return the target queue of a delayed or half message."""
    topic = props.find(record.properties, props.REAL_TOPIC) or ""
    return topic, int(props.find(record.properties, props.REAL_QUEUE_ID) or 0)
