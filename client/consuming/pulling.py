"""Pull requests: one per queue in flight, sent now or later, answered by callbacks. No task and no future per pull."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from typing import Final

from ...protocol import properties as props
from ...protocol.codes import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode, code_name
from ...protocol.frame import ExtValue, Frame
from ...protocol.group_bodies import encode_client_check
from ...protocol.headers import HeaderError, PullMessage, PullMessageResult, read, write
from ...protocol.message import MessageError, properties_in, split_records
from ...protocol.names import RETRY_PREFIX, TOOLS_GROUP
from ...protocol.subscription import TAG, Subscription
from ..config import PULL_HOLD_S, PULL_TIMEOUT_S, PullLimits
from ..log import get_logger
from ..message import Message, record_fault
from ..wire.cluster import Cluster
from .process_queue import ProcessQueue, Pull

log = get_logger("rocketlet.pull")

_PULL: Final = int(RequestCode.PULL_MESSAGE)  # Python 3.11 takes 0.2 us to find a member of an enum
_WAITS: Final = PULL_SUSPEND | PULL_SUBSCRIPTION
_WAITS_AND_COMMITS: Final = _WAITS | PULL_COMMIT_OFFSET


async def check_filters(
    cluster: Cluster, client_id: str, group: str, subscriptions: Mapping[str, Subscription]
) -> None:
    """Asks the brokers of each topic that is filtered by more than tags whether they take the filter. Raises
    BrokerRefused."""
    for topic, subscription in subscriptions.items():
        if subscription.kind == TAG:
            continue
        route = await cluster.find_route(topic)
        for broker in route.brokers if route else ():
            body = encode_client_check(client_id, group or TOOLS_GROUP, subscription)
            connection = await cluster.broker(broker.name)
            await connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, body)


class Puller:
    """Keeps a pull in flight for each queue that it was given, until the queue stops. Each carries how far the queue is
    handled (`commits`), so that a member that is killed repeats the messages in its handlers, and one pull at most.

    `on_messages(process_queue, messages, next_offset)` gets the messages, `on_moved(process_queue, offset)` is told when
    the broker does not have the offset asked for.
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
        self._limits = cluster.limits
        self._group = group
        self._subscriptions = subscriptions
        self._pull_limits = limits
        self._span_counts = span_counts
        self._commits = commits
        self._on_messages = on_messages
        self._on_moved = on_moved

    def pull(self, process_queue: ProcessQueue) -> None:
        """Pulls now, or later where flow control, a pause or a lost connection says so."""
        pull = process_queue.pull
        if pull.is_pending or process_queue.is_held:
            return
        unhandled = process_queue.commit_offset
        if process_queue.exceeds(self._pull_limits, unhandled if self._span_counts else None):
            pull.is_throttled = True  # `resume` goes on when messages were acknowledged
            return
        connection = self._cluster.connected(process_queue.queue.broker_name)
        if connection is None:
            self._later(process_queue, self._limits.pull_error_delay_s)
            return
        pull.is_pending = True
        pull.began_ms = int(time.time() * 1000)
        request = pull.request
        if request is None:
            request = pull.request = self._request(process_queue)
        offset = self._offset_to_commit(process_queue, unhandled)
        request["queueOffset"] = process_queue.next_offset
        request["sysFlag"] = _WAITS if offset is None else _WAITS_AND_COMMITS
        request["commitOffset"] = offset or 0
        answered = partial(self._answered, process_queue, pull)
        connection.call(_PULL, request, b"", answered, connection.running_s() + PULL_TIMEOUT_S)

    def _request(self, process_queue: ProcessQueue) -> dict[str, ExtValue]:
        """The fields of the queue's pulls. Offsets and flag follow with each; the others stay as they are."""
        queue = process_queue.queue
        subscription = self._subscriptions[queue.topic]
        return write(
            PullMessage(
                self._group,
                queue.topic,
                queue.queue_id,
                0,
                self._pull_limits.batch_size,
                0,
                0,
                int(PULL_HOLD_S * 1000),
                subscription.version,
                subscription.expression,
                subscription.kind,
            )
        )

    def _offset_to_commit(self, process_queue: ProcessQueue, offset: int) -> int | None:
        """`offset`, if this pull commits it. The broker takes it as the pull arrives, also one that it holds; if the pull
        fails it is said again."""
        is_news = offset != (process_queue.begin_offset if process_queue.committed is None else process_queue.committed)
        if not (is_news and self._commits and process_queue.pulls_may_commit) or process_queue.lease.is_over:
            return None
        process_queue.committed = offset
        process_queue.pull_commits = True
        return offset

    def resume(self, process_queue: ProcessQueue) -> None:
        """Messages of a queue were acknowledged: goes on if flow control had stopped it."""
        pull = process_queue.pull
        if not pull.is_throttled:
            return
        unhandled = process_queue.commit_offset if self._span_counts else None
        if not process_queue.exceeds(self._pull_limits, unhandled):
            pull.is_throttled = False
            self.pull(process_queue)

    def hold(self, process_queue: ProcessQueue) -> Callable[[int | None], None]:
        """Pulls nothing until it is known where to begin: call the returned function then, with an offset or None for where
        the queue is. A seek meanwhile counts for more."""
        pull = process_queue.pull
        pull.is_pending = True

        def begin(offset: int | None) -> None:
            if process_queue.pull is pull and offset is not None:
                process_queue.next_offset = offset
            self._again(process_queue, pull)

        return begin

    def _later(self, process_queue: ProcessQueue, delay_s: float) -> None:
        process_queue.pull.is_pending = True
        asyncio.get_running_loop().call_later(delay_s, self._again, process_queue, process_queue.pull)

    def _again(self, process_queue: ProcessQueue, pull: Pull) -> None:
        if process_queue.pull is pull:  # else a seek came between
            pull.is_pending = False
            self.pull(process_queue)

    def _answered(self, process_queue: ProcessQueue, pull: Pull, answer: Frame | Exception) -> None:
        if process_queue.pull is not pull:  # a seek came between
            return
        pull.is_pending = False
        if not isinstance(answer, Exception):
            process_queue.pull_commits = False
        if process_queue.is_stopped or process_queue.is_suspended:  # messages that come in a pause are kept
            return
        if isinstance(answer, Exception):
            process_queue.committed = None  # the broker may or may not have taken the pull's commit
            log.info("pull_failed", queue=str(process_queue.queue), reason=str(answer))
            self._later(process_queue, self._limits.pull_error_delay_s)
            return
        try:
            self._take(process_queue, answer)
        except (MessageError, HeaderError) as error:
            log.error("pull_answer_unreadable", queue=str(process_queue.queue), reason=str(error))
            self._later(process_queue, self._limits.pull_error_delay_s)

    def _take(self, process_queue: ProcessQueue, answer: Frame) -> None:
        code = answer.code
        if code == ResponseCode.SUCCESS:
            messages = self._decoded(process_queue, answer.body)
            next_offset = read(PullMessageResult, answer.ext).next_begin_offset
            self._on_messages(process_queue, messages, next_offset)
            self.pull(process_queue)
        elif code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
            asked, next_offset = process_queue.next_offset, read(PullMessageResult, answer.ext).next_begin_offset
            self._on_messages(process_queue, [], next_offset)
            now_s = asyncio.get_running_loop().time()
            if (
                next_offset <= asked and now_s < process_queue.idle_s + self._limits.pull_busy_delay_s
            ):  # it holds no pulls
                self._later(process_queue, self._limits.pull_busy_delay_s)
            else:
                self.pull(process_queue)
            process_queue.idle_s = now_s
        elif code == ResponseCode.PULL_OFFSET_MOVED:
            next_offset = read(PullMessageResult, answer.ext).next_begin_offset
            if process_queue.moved_to == process_queue.next_offset:  # it led to there, and there is nothing either
                process_queue.moved_to = None
                log.warning("pull_refused", queue=str(process_queue.queue), code=code_name(code), remark=answer.remark)
                self._later(process_queue, self._limits.pull_error_delay_s)
                return
            process_queue.moved_to = next_offset
            self._on_moved(process_queue, next_offset)
        else:
            busy = code == ResponseCode.FLOW_CONTROL
            log.warning("pull_refused", queue=str(process_queue.queue), code=code_name(code), remark=answer.remark)
            self._later(process_queue, self._limits.pull_busy_delay_s if busy else self._limits.pull_error_delay_s)

    def _decoded(self, process_queue: ProcessQueue, body: bytes) -> list[Message]:
        """The messages that the subscription really wants: a tag's hash may be another tag's too."""
        queue = process_queue.queue
        topic = queue.topic
        subscription = self._subscriptions[topic]
        records = split_records(body)
        if subscription.tags and not subscription.takes_all and not topic.startswith(RETRY_PREFIX):
            records = [record for record in records if _may_have_tag(record, subscription.tags)]
        messages = list(map(Message, records, repeat(queue), repeat(topic), repeat(process_queue.lease)))
        if topic.startswith(RETRY_PREFIX):
            for message in messages:
                if record_fault(message) is None:
                    message.topic = message.origin
        return messages


def _may_have_tag(record: bytes, tags: frozenset[str]) -> bool:
    """True if a record has one of these tags, or cannot be read: it is given up where it is handled."""
    try:
        return props.find(properties_in(record), props.TAGS) in tags
    except MessageError:
        return True
