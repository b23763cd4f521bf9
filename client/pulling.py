"""Pull requests: one per queue in flight, sent now or later, answered by callbacks. No task and no future per pull."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from ..protocol import properties as props
from ..protocol.bodies import Queue
from ..protocol.codes import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode, code_name
from ..protocol.frame import Ext, Frame
from ..protocol.headers import HeaderError, PullMessage, PullMessageResult, read, write
from ..protocol.message import MessageError, decode_records
from ..protocol.names import RETRY_PREFIX, TOOLS_GROUP
from ..protocol.subscription import Subscription
from .cluster import Cluster
from .config import PULL_BUSY_DELAY_S, PULL_ERROR_DELAY_S, PULL_HOLD_S, PULL_TIMEOUT_S, PullLimits
from .log import get_logger
from .message import Message
from .process_queue import ProcessQueue

log = get_logger("rocketlet.pull")


def pull_header(group: str, queue: Queue, offset: int, count: int, subscription: Subscription) -> Ext:
    """A PULL_MESSAGE that brings its own filter, waits for nothing and commits nothing."""
    return write(
        PullMessage(
            group or TOOLS_GROUP,
            queue.topic,
            queue.queue_id,
            offset,
            count,
            PULL_SUBSCRIPTION,
            0,
            0,
            0,
            subscription.expression,
            subscription.kind,
        )
    )


class Puller:
    """Keeps a pull in flight for each queue that it was given, until the queue stops. Each carries how far the queue is
    handled (`commits`), so that a member that is killed repeats what was in its handlers, and one pull at most.

    `on_messages(process_queue, messages, next_offset)` gets what was found, `on_moved(process_queue, offset)` is told
    when the broker does not have the offset asked for.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        subscriptions: Mapping[str, Subscription],
        limits: PullLimits,
        *,
        span_counts: bool,
        commits: bool,
        on_messages: Callable[[ProcessQueue, list[Message], int], None],
        on_moved: Callable[[ProcessQueue, int], None],
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._subscriptions = subscriptions
        self._limits = limits
        self._span_counts = span_counts
        self._commits = commits
        self._on_messages = on_messages
        self._on_moved = on_moved
        self._loop = asyncio.get_running_loop()

    def pull(self, item: ProcessQueue) -> None:
        """Pulls now, or later where flow control, a pause or a lost connection says so."""
        if item.pulling or item.stopped or item.suspended or item.paused:
            return
        if item.exceeds(self._limits, span_counts=self._span_counts):
            item.throttled = True  # `resume` goes on when messages were acknowledged
            return
        connection = self._cluster.connected(item.queue.broker_name)
        if connection is None:
            self._later(item, PULL_ERROR_DELAY_S)
            return
        item.pulling = True
        item.pulled_ms = int(time.time() * 1000)
        subscription = self._subscriptions[item.queue.topic]
        offset = self._offset_to_commit(item)
        header = PullMessage(
            self._group,
            item.queue.topic,
            item.queue.queue_id,
            item.next_offset,
            self._limits.batch_size,
            PULL_SUSPEND | PULL_SUBSCRIPTION | (PULL_COMMIT_OFFSET if offset is not None else 0),
            offset or 0,
            int(PULL_HOLD_S * 1000),
            subscription.version,
            subscription.expression,
            subscription.kind,
        )
        answered = partial(self._answered, item, item.generation)
        connection.call(RequestCode.PULL_MESSAGE, write(header), b"", answered, PULL_TIMEOUT_S)

    def _offset_to_commit(self, item: ProcessQueue) -> int | None:
        """What this pull commits. The broker takes it as the pull arrives, also one that it holds; if the pull fails it is
        said again. On Apache's broker the first commit of a queue goes alone (`GroupOffsets.store`)."""
        offset = item.commit_offset
        is_known = item.lease.epoch > 0 or item.committed is not None
        is_news = offset != (item.begin_offset if item.committed is None else item.committed)
        if not self._commits or not is_known or not is_news or item.lease.is_over:
            return None
        item.committed = offset
        return offset

    def resume(self, item: ProcessQueue) -> None:
        """Messages of a queue were acknowledged: goes on if flow control had stopped it."""
        if item.throttled and not item.exceeds(self._limits, span_counts=self._span_counts):
            item.throttled = False
            self.pull(item)

    def _later(self, item: ProcessQueue, delay_s: float) -> None:
        item.pulling = True
        self._loop.call_later(delay_s, self._again, item, item.generation)

    def _again(self, item: ProcessQueue, generation: int) -> None:
        if item.generation == generation:
            item.pulling = False
            self.pull(item)

    def _answered(self, item: ProcessQueue, generation: int, answer: Frame | Exception) -> None:
        if item.generation != generation:  # a seek came between
            return
        item.pulling = False
        if item.stopped or item.suspended:
            return
        if isinstance(answer, Exception):
            item.committed = None  # who knows
            log.info("pull_failed", queue=str(item.queue), reason=str(answer))
            self._later(item, PULL_ERROR_DELAY_S)
            return
        try:
            self._take(item, answer)
        except (MessageError, HeaderError) as error:
            log.error("pull_answer_unreadable", queue=str(item.queue), reason=str(error))
            self._later(item, PULL_ERROR_DELAY_S)

    def _take(self, item: ProcessQueue, answer: Frame) -> None:
        code = answer.code
        if code == ResponseCode.SUCCESS:
            messages = self._decoded(item, answer.body)
            next_offset = read(PullMessageResult, answer.ext).next_begin_offset
            self._on_messages(item, messages, next_offset)
            self.pull(item)
        elif code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
            next_offset = read(PullMessageResult, answer.ext).next_begin_offset
            self._on_messages(item, [], next_offset)
            self.pull(item)
        elif code == ResponseCode.PULL_OFFSET_MOVED:
            self._on_moved(item, read(PullMessageResult, answer.ext).next_begin_offset)
        else:
            busy = code == ResponseCode.FLOW_CONTROL
            log.warning("pull_refused", queue=str(item.queue), code=code_name(code), remark=answer.remark)
            self._later(item, PULL_BUSY_DELAY_S if busy else PULL_ERROR_DELAY_S)

    def _decoded(self, item: ProcessQueue, body: bytes) -> list[Message]:
        """The messages that the subscription really wants: a tag's hash may be another tag's too."""
        queue = item.queue
        topic = queue.topic
        subscription = self._subscriptions[topic]
        if topic.startswith(RETRY_PREFIX):
            return [
                Message(record, queue, props.find(record.properties, props.RETRY_TOPIC) or topic, item.lease)
                for record in decode_records(body)
            ]
        if subscription.takes_all or not subscription.tags:
            return [Message(record, queue, topic, item.lease) for record in decode_records(body)]
        tags = subscription.tags
        return [
            Message(record, queue, topic, item.lease)
            for record in decode_records(body)
            if props.find(record.properties, props.TAGS) in tags
        ]
