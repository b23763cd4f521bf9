"""The only path of messages into the store: stage, then commit once per socket read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...protocol import properties as props
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record, tried
from ..sessions import Reason, Refusal
from ..store.index import ConsumeQueue
from ..store.store import Store
from .topics import MessageChanges

# ------------------------------------------------------------------------------
# The only way of a message into the store: begin, stage, commit. Then those that wait for it are answered.
#
# Messages are committed in the turn of the event loop in which they were staged, so that nobody reads the store in
# between.


class Appender:
    """Readers use `store` itself."""

    def __init__(self, store: Store, changes: MessageChanges) -> None:
        self.store = store
        self._appended = changes.appended
        self.begin = store.begin_batch
        self.stage = store.stage  # the store's own: a call between would cost every message
        self.stage_batch = store.stage_batch

    def commit(self) -> None:
        """Writes everything that is staged. If this raises, such as StoreFull, nothing of it is kept."""
        if self.store.staged:
            self._appended(self.store.commit())

    @contextmanager
    def batch(self) -> Iterator[int]:
        """Commits the messages that the block stages. If the block raises, nothing is kept. Yields the store time in ms."""
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
        """A stored message once more, in another queue: a delayed one that is due, a half one that is committed, one that a
        consumer sent back."""
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
# The properties of a message: their limit, and where a message that waits is meant to go.


def property_bytes(text: str, limit: int = MAX_PROPERTY_BYTES) -> bytes:
    """Raises Refusal beyond the limit. A message that is sent leaves room for what retries add."""
    data = text.encode()
    if len(data) > limit:
        raise Refusal(
            Reason.ILLEGAL_MESSAGE,
            f"the properties have {len(data)} bytes with the broker's own; {limit} are allowed",
        )
    return data


def with_real_queue(text: str, topic: str, queue_id: int) -> str:
    """The properties of a delayed or half message: where it is meant to go."""
    text = props.without(props.without(text, props.REAL_TOPIC), props.REAL_QUEUE_ID)
    return props.appended(props.appended(text, props.REAL_TOPIC, topic), props.REAL_QUEUE_ID, str(queue_id))


def real_queue(record: Record) -> tuple[str, int]:
    topic = props.find(record.properties, props.REAL_TOPIC) or ""
    return topic, int(props.find(record.properties, props.REAL_QUEUE_ID) or 0)
