"""Process queues: pull requests, messages that are not acknowledged yet, flow control, commits, and stalled queues."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from ...protocol import properties as props
from ...protocol.codes import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode, ResponseCode, code_name
from ...protocol.frame import ExtValue, Frame
from ...protocol.group_bodies import encode_client_check
from ...protocol.headers import HeaderError, PullMessage, PullMessageResult, read, write
from ...protocol.message import MessageError, properties_in, split_records
from ...protocol.names import RETRY_PREFIX, TAG, TOOLS_GROUP, Queue, Subscription
from ..config import (
    BLOCKED_NAMING_S,
    BLOCKED_POLL_INTERVAL_S,
    BLOCKED_S,
    CLIENT_LIMITS,
    PULL_HOLD_S,
    PULL_TIMEOUT_S,
    ClientLimits,
    PullLimits,
    check_starts,
)
from ..errors import ConfigError, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..message import Lease, Message, record_fault
from ..wire.cluster import ClusterView
from ..wire.connection import cancelled, finished

log = get_logger("rocketlet.consumer")
pull_log = get_logger("rocketlet.pull")


# ------------------------------------------------------------------------------
# The messages of one queue that were pulled and are not yet acknowledged, and how far the queue may be committed.
#
# Messages are kept in runs, the units in which the handler gets them. A run is acknowledged whole, or message by
# message from its front; the offset to commit is that of the first message not acknowledged.
#
#     RUNNING <--resume, suspend--> SUSPENDED
#        `------- stop ---------------'---------> STOPPED --drop--> DROPPED
#
# The lease of a queue may be lost in each state: it is dropped then. A pause by the user is apart from this.


_size_bytes = attrgetter("size_bytes")


class QueueState(Enum):
    RUNNING = "messages are pulled and handed out"
    SUSPENDED = "its broker is away: nothing is pulled or handed out until it is back"
    STOPPED = "it is given up: nothing is pulled or handed out; what handlers did is committed"
    DROPPED = "it is not ours: nothing may be committed"


class QueueEvent(Enum):
    SUSPEND = "its broker is away"
    RESUME = "its broker is back"
    STOP = "it goes to another member"
    DROP = "its lease is lost or given back"


_S, _E = QueueState, QueueEvent
TRANSITIONS: Final = {
    (_S.RUNNING, _E.SUSPEND): _S.SUSPENDED,
    (_S.SUSPENDED, _E.SUSPEND): _S.SUSPENDED,
    (_S.STOPPED, _E.SUSPEND): _S.STOPPED,
    (_S.RUNNING, _E.RESUME): _S.RUNNING,
    (_S.SUSPENDED, _E.RESUME): _S.RUNNING,
    (_S.STOPPED, _E.RESUME): _S.STOPPED,
    (_S.RUNNING, _E.STOP): _S.STOPPED,
    (_S.SUSPENDED, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,  # tried again
    **{(state, _E.DROP): _S.DROPPED for state in (_S.RUNNING, _S.SUSPENDED, _S.STOPPED)},
}
_RUNNING: Final = QueueState.RUNNING
_DROPPED: Final = QueueState.DROPPED


class Run:
    """Messages handed to a handler together. `done` of them, from the front, are acknowledged. `outcome`: the handler's, if
    it is still to be carried out. `failure`: why it was not handled the last time. `is_filling`: it waits for more
    messages. `size_bytes`: of those that are not acknowledged."""

    __slots__ = ("done", "failure", "is_filling", "messages", "outcome", "process_queue", "size_bytes", "tries")

    def __init__(self, process_queue: ProcessQueue, messages: list[Message], size_bytes: int) -> None:
        self.process_queue = process_queue
        self.messages = messages
        self.size_bytes = size_bytes
        self.done = self.tries = 0
        self.failure = ""
        self.is_filling = False
        self.outcome: Any = None

    @property
    def is_done(self) -> bool:
        return self.done == len(self.messages)

    def lose_from(self, offset: int) -> tuple[int, int]:
        """The messages from an offset on are gone; how many of them were not acknowledged, and their bytes."""
        kept = sum(message.queue_offset < offset for message in self.messages)
        lost = self.messages[max(kept, self.done) :]
        lost_bytes = sum(map(_size_bytes, lost))
        self.size_bytes -= lost_bytes
        if kept:
            self.messages = self.messages[:kept]  # a new list: the handler may have the other
            self.done = min(self.done, kept)
        else:
            self.done = len(self.messages)
        return len(lost), lost_bytes


class PullRequest:
    """The pull that fills a queue; the puller's own. A seek puts another in its place, so that an answer which is still on
    its way finds that nobody waits for it. `request`: the fields that are sent again and again, with another offset."""

    __slots__ = ("began_ms", "is_pending", "is_throttled", "request")

    def __init__(self, began_ms: int = 0) -> None:
        self.began_ms = began_ms
        self.request: dict[str, ExtValue] | None = None
        self.is_pending = False
        self.is_throttled = False


class ProcessQueue:
    """One assignment of one queue. After a revocation and a new assignment there is another one.

    `untaken`: runs that the broker has not taken back yet, with what to call when the queue stops.
    `is_paused`: nothing is pulled or handed out until the user resumes it. `waiting`: the runs that no worker has yet.
    `committed`: the offset that the broker was last told, None if that is not known.
    `pull_commits`: whether a pull that is not answered carries an offset. `moved_to`: where the broker said last that the
    queue goes on. `idle_s`: when a pull brought nothing last, in the loop's time. `refused`: the code and remark of the last
    refusal that was logged, when that was, and how many like it were left out since.
    """

    def __init__(self, queue: Queue, offset: int, lease: Lease, *, paused: bool = False) -> None:
        self.queue = queue
        self.lease = lease
        self.begin_offset = offset
        self.next_offset = offset
        self.committed: int | None = None
        self.pull_commits = False
        self.pull = PullRequest()
        self.moved_to: int | None = None
        self.idle_s = -math.inf
        self.refused: tuple[tuple[int, str | None] | None, float, int] = (None, -math.inf, 0)
        self.state = QueueState.RUNNING
        self.is_paused = paused
        self.messages = 0
        self.size_bytes = 0
        self.running = 0
        self.runs: deque[Run] = deque()
        self.waiting: deque[Run] = deque()
        self.untaken: dict[Run, Callable[[], None]] = {}
        self._idle: asyncio.Event | None = None

    def add(self, messages: list[Message], next_offset: int, run_size: int) -> list[Run]:
        """Takes the messages of a pull, in runs of up to `run_size`."""
        if run_size == 1:
            runs = [Run(self, [message], message.size_bytes) for message in messages]
        else:
            parts = [messages[begin : begin + run_size] for begin in range(0, len(messages), run_size)]
            runs = [Run(self, part, sum(map(_size_bytes, part))) for part in parts]
        self.runs.extend(runs)
        self.messages += len(messages)
        self.size_bytes += sum(map(_size_bytes, runs))
        self.next_offset = next_offset
        return runs

    def extend(self, run: Run, messages: list[Message]) -> None:
        """More messages for a run that nobody has yet."""
        size_bytes = sum(map(_size_bytes, messages))
        run.messages += messages
        run.size_bytes += size_bytes
        self.messages += len(messages)
        self.size_bytes += size_bytes

    def acknowledge(self, run: Run, count: int | None = None) -> None:
        """The first `count` messages of a run, or all of it, need not be delivered again."""
        before, end = run.done, len(run.messages)
        if self.state is _DROPPED or before == end:
            return
        size_bytes = run.size_bytes
        if count is not None and count < end:
            end, size_bytes = count, sum(map(_size_bytes, run.messages[before:count]))
        run.done = end
        run.size_bytes -= size_bytes
        self.size_bytes -= size_bytes
        self.messages -= end - before
        runs = self.runs
        while runs and (first := runs[0]).done and first.done == len(first.messages):
            runs.popleft()

    @property
    def commit_offset(self) -> int:
        """The first offset that is not acknowledged."""
        if not self.runs:
            return self.next_offset
        run = self.runs[0]
        return run.messages[run.done].queue_offset

    def exceeds(self, limits: PullLimits, unhandled: int | None) -> bool:
        """Whether pulling must wait: too many messages, too many bytes, or too wide a span. unhandled: `commit_offset`, where
        the span begins; None if it does not count."""
        if self.messages > limits.messages or self.size_bytes > limits.size_bytes:
            return True
        return unhandled is not None and self.next_offset - unhandled > limits.span

    @property
    def pulls_may_commit(self) -> bool:
        """Whether its pulls may carry how far it is handled. On Apache's broker the first commit of a queue goes alone
        (`GroupOffsets.store`): offsets of a group that are the first of their topic can be lost if they arrive together
        (decision 16)."""
        return self.lease.epoch > 0 or self.committed is not None

    # Permissions

    def turn(self, event: QueueEvent) -> None:
        """Raises KeyError for what cannot happen."""
        self.state = TRANSITIONS[self.state, event]

    @property
    def is_suspended(self) -> bool:
        return self.state is QueueState.SUSPENDED

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is pulled or handed out any more."""
        return self.state in (QueueState.STOPPED, _DROPPED)

    @property
    def is_dropped(self) -> bool:
        return self.state is _DROPPED

    @property
    def is_held(self) -> bool:
        """Whether nothing of it may be pulled or handed out now."""
        return self.state is not _RUNNING or self.is_paused

    @property
    def may_begin(self) -> bool:
        """Whether something of this queue may be handed out now. The clock is asked each time: a member whose process was
        frozen must not begin a message with a lease that another has had meanwhile."""
        return self.state is _RUNNING and not (self.is_paused or self.lease.is_over)

    def suspend(self) -> None:
        self.turn(QueueEvent.SUSPEND)

    def resume(self) -> None:
        """The broker is back. If it was killed it may have lost the last commits, so that they are said again."""
        self.turn(QueueEvent.RESUME)
        self.committed = None

    def pause(self, *, paused: bool = True) -> None:
        self.is_paused = paused

    # Running handlers

    def enter(self) -> None:
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
        if not self.running and self._idle is not None:
            self._idle.set()
            self._idle = None

    async def idle(self) -> None:
        """Returns when no handler runs on this queue."""
        while self.running:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def stop(self) -> None:
        """Hands out no more messages; those that wait stay unacknowledged. Messages that the broker has not taken back are
        sent back again at once."""
        self.turn(QueueEvent.STOP)
        self._send_back_at_once()

    def _send_back_at_once(self) -> None:
        for send_back in list(self.untaken.values()):
            send_back()

    def drop(self) -> None:
        """The queue is lost: nothing of it counts any more."""
        self.turn(QueueEvent.DROP)
        self.clear()
        self._send_back_at_once()

    def clear(self) -> None:
        for run in self.runs:
            run.done = len(run.messages)  # its holder need not handle it, and its end counts for nothing
        self.runs.clear()
        self.waiting.clear()
        self.messages = self.size_bytes = 0

    def seek(self, offset: int) -> None:
        """Goes on from another offset. Forgets cached messages, and the answer to a pull in flight."""
        self.clear()
        self.pull = PullRequest(self.pull.began_ms)
        self.next_offset = offset

    def move(self, offset: int) -> None:
        """The broker does not have the next offset: goes on from another one. Messages cached from before it stay. Those
        behind it are gone, and others have their offsets, so they are neither handed out nor counted."""
        for run in self.runs:
            messages, size_bytes = run.lose_from(offset)
            self.messages -= messages
            self.size_bytes -= size_bytes
        self.runs = deque(run for run in self.runs if not run.is_done)
        self.pull = PullRequest(self.pull.began_ms)
        self.next_offset = offset
        self.committed = None


def offsets_to_commit(process_queues: Iterable[ProcessQueue]) -> dict[Queue, int]:
    """The offsets that have moved since the last commit, by queue."""
    return {
        process_queue.queue: process_queue.commit_offset
        for process_queue in process_queues
        if not process_queue.is_dropped and process_queue.commit_offset != process_queue.committed
    }


# ------------------------------------------------------------------------------
# Pull requests: one per queue in flight, sent now or later, answered by callbacks. No task and no future per pull.


_PULL: Final = int(RequestCode.PULL_MESSAGE)  # Python 3.11 takes 0.2 us to find a member of an enum
_WAITS: Final = PULL_SUSPEND | PULL_SUBSCRIPTION
_WAITS_AND_COMMITS: Final = _WAITS | PULL_COMMIT_OFFSET


async def check_filters(
    cluster: ClusterView, client_id: str, group: str, subscriptions: Mapping[str, Subscription]
) -> None:
    """Asks the brokers of each topic that is filtered by more than tags whether they take the filter; for a topic that does
    not exist, any broker. Raises BrokerRefused."""
    for topic, subscription in subscriptions.items():
        if subscription.kind == TAG:
            continue
        body = encode_client_check(client_id, group or TOOLS_GROUP, subscription)
        route = await cluster.find_route(topic)
        for broker in route.brokers if route else ():
            connection = await cluster.broker(broker.name)
            await connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, body)
        if route is None:
            await _check_filter_anywhere(cluster, body)


async def _check_filter_anywhere(cluster: ClusterView, body: bytes) -> None:
    """Raises BrokerRefused; without a broker that answers, nothing is checked."""
    with suppress(RocketletError):
        await cluster.find_masters()
    for name in cluster.known_masters():
        with suppress(ConnectionFailed, RequestTimeout):
            connection = await cluster.broker(name)
            await connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, body)
            return


class Puller:
    """Keeps a pull in flight for each queue that it was given, until the queue stops. Each carries how far the queue is
    handled (`commits`), so that a member that is killed repeats the messages in its handlers, and one pull at most.

    `on_messages(process_queue, messages, next_offset)` gets the messages, `on_moved(process_queue, offset)` is told when
    the broker does not have the offset asked for.
    """

    def __init__(
        self,
        cluster: ClusterView,
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

    def _again(self, process_queue: ProcessQueue, pull: PullRequest) -> None:
        if process_queue.pull is pull:  # else a seek came between
            pull.is_pending = False
            self.pull(process_queue)

    def _answered(self, process_queue: ProcessQueue, pull: PullRequest, answer: Frame | Exception) -> None:
        if process_queue.pull is not pull:  # a seek came between
            return
        pull.is_pending = False
        if not isinstance(answer, Exception):
            process_queue.pull_commits = False
        if process_queue.is_stopped or process_queue.is_suspended:  # messages that come in a pause are kept
            return
        if isinstance(answer, Exception):
            process_queue.committed = None  # the broker may or may not have taken the pull's commit
            pull_log.info("pull_failed", queue=str(process_queue.queue), reason=str(answer))
            self._later(process_queue, self._limits.pull_error_delay_s)
            return
        try:
            self._take(process_queue, answer)
        except (MessageError, HeaderError) as error:
            pull_log.error("pull_answer_unreadable", queue=str(process_queue.queue), reason=str(error))
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
                self._log_refusal(process_queue, answer)
                self._later(process_queue, self._limits.pull_error_delay_s)
                return
            process_queue.moved_to = next_offset
            self._on_moved(process_queue, next_offset)
        else:
            busy = code == ResponseCode.FLOW_CONTROL
            self._log_refusal(process_queue, answer)
            self._later(process_queue, self._limits.pull_busy_delay_s if busy else self._limits.pull_error_delay_s)

    def _log_refusal(self, process_queue: ProcessQueue, answer: Frame) -> None:
        """Logs a refusal once, and the same one again each minute, with how many were left out."""
        now_s, refusal = asyncio.get_running_loop().time(), (answer.code, answer.remark)
        before, written_s, left_out = process_queue.refused
        if before == refusal and now_s < written_s + self._limits.log_repeat_s:
            process_queue.refused = refusal, written_s, left_out + 1
            return
        fields: dict[str, object] = {"repeated": left_out} if before == refusal and left_out else {}
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            expression = self._subscriptions[process_queue.queue.topic].expression
            fields["hint"] = f"correct the filter {expression!r}; nothing of the topic is delivered until then"
        pull_log.warning(
            "pull_refused",
            queue=str(process_queue.queue),
            code=code_name(answer.code),
            remark=answer.remark,
            **fields,
        )
        process_queue.refused = refusal, now_s, 0

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


# ------------------------------------------------------------------------------
# The queues that a consumer owns now: membership's news of them (`QueueUser`), the user's listeners, and pauses.


class Assignment:
    """`on_resumed(process_queue)`: cached messages of a queue may be handed out again. `drain_s`: how long a queue that is
    given up waits for running handlers."""

    def __init__(
        self,
        puller: Puller,
        *,
        drain_s: float,
        on_assigned: Assigned | None,
        on_revoked: Listener | None,
        on_resumed: Callable[[ProcessQueue], None],
    ) -> None:
        self._puller = puller
        self._drain_s = drain_s
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_resumed = on_resumed
        self._ending: dict[Queue, ProcessQueue] = {}  # no longer ours, but handlers of them still run
        self._is_paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.queues: dict[Queue, ProcessQueue] = {}

    def some(self, queues: Iterable[Queue] | None) -> list[ProcessQueue]:
        """The given queues, or all. Raises ConfigError for a queue that is not this member's."""
        if queues is None:
            return list(self.queues.values())
        wanted = list(queues)
        missing = [str(queue) for queue in wanted if queue not in self.queues]
        if missing:
            raise ConfigError(f"this member does not own {', '.join(missing)}")
        return [self.queues[queue] for queue in wanted]

    def pause(self, queues: Iterable[Queue] | None) -> None:
        """Pauses the given queues; without queues all, and those that come later."""
        self._is_paused = self._is_paused or queues is None
        for process_queue in self.some(queues):
            process_queue.pause()

    def resume(self, queues: Iterable[Queue] | None) -> None:
        self._is_paused = self._is_paused and queues is not None
        for process_queue in self.some(queues):
            process_queue.pause(paused=False)
            self._go_on(process_queue)

    def _go_on(self, process_queue: ProcessQueue) -> None:
        self._on_resumed(process_queue)
        self._puller.pull(process_queue)

    # Queues that come and go (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.queues[queue] = process_queue = ProcessQueue(queue, offset, lease, paused=self._is_paused)
        if self._on_assigned is None:
            self._puller.pull(process_queue)
            return
        later = placed(self._on_assigned, queue, self._puller.hold(process_queue))
        if later is not None:
            self.spawn(later)

    async def give_queue(self, queue: Queue) -> int | None:
        process_queue = self.queues.get(queue)
        if process_queue is None:
            return None
        process_queue.stop()
        try:
            async with asyncio.timeout(self._drain_s):
                await process_queue.idle()
        except TimeoutError:
            log.warning("handlers_still_running", queue=str(queue), hint="their messages will be delivered again")
        self._tell_revoked(queue)
        # A queue that was lost while its handlers ended is another's: their work is not ours to commit.
        return None if process_queue.is_dropped else process_queue.commit_offset

    def is_pull_committing(self, queue: Queue) -> bool:
        process_queue = self.queues.get(queue)
        return process_queue is not None and process_queue.pull_commits

    def lose_queue(self, queue: Queue) -> None:
        process_queue = self.queues.pop(queue, None)
        if process_queue is not None:
            if not process_queue.is_stopped:  # else it was told when the queue was given up
                self._tell_revoked(queue)
            process_queue.drop()
            if process_queue.running:
                self._ending[queue] = process_queue

    def is_running(self, queue: Queue) -> bool:
        return queue in self._ending

    async def ended(self, queue: Queue) -> None:
        await self._ending[queue].idle()
        del self._ending[queue]

    def suspend_queue(self, queue: Queue) -> None:
        process_queue = self.queues.get(queue)
        if process_queue is not None:
            process_queue.suspend()

    def resume_queue(self, queue: Queue) -> None:
        process_queue = self.queues.get(queue)
        if process_queue is not None:
            process_queue.resume()
            self._go_on(process_queue)

    def _tell_revoked(self, queue: Queue) -> None:
        answer = told(self._on_revoked, queue) if self._on_revoked is not None else None
        if answer is not None:
            self.spawn(answer)

    # Work that only the end waits for

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside; `finished` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Ends what takes longer than a drain: a listener of the user, which may even wait for the end of this."""
        await finished(self._tasks, self._drain_s)


# ------------------------------------------------------------------------------
# The user's functions that hear of queues that come and go: plain or async, and free to raise anything.


_HINT: Final = "the queue begins at the group's offset"

Listener = Callable[[set[Queue]], Awaitable[None] | None]
Starts = Mapping[Queue, int] | None
Assigned = Callable[[set[Queue]], Awaitable[Starts] | Starts]
"""Told of a queue that has come. It may return where to begin, an offset by queue, instead of at the group's offset."""


def told(listener: Listener, queue: Queue) -> Coroutine[None, None, None] | None:
    """Calls the listener. Returns the rest of it to await, which raises nothing."""
    try:
        answer = listener({queue})
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
        return None
    return _awaited(answer, queue) if inspect.isawaitable(answer) else None


def placed(listener: Assigned, queue: Queue, begin: Callable[[int | None], None]) -> Coroutine[None, None, None] | None:
    """Calls the listener, then `begin` with the offset that it names, if any. Returns the rest to await until then. A
    listener that fails names none."""
    offset = None
    try:
        answer = listener({queue})
        if inspect.isawaitable(answer):
            return _placed_later(answer, queue, begin)
        offset = _start(answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)
    return None


async def _placed_later(answer: Awaitable[Starts], queue: Queue, begin: Callable[[int | None], None]) -> None:
    offset = None
    try:
        offset = _start(await answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)


def _start(starts: Starts, queue: Queue) -> int | None:
    """The offset for this queue; None if none is named. Raises ConfigError for anything but a mapping of offsets by
    queue."""
    if starts is None:
        return None
    check_starts(starts)
    return starts.get(queue)


async def _awaited(answer: Awaitable[None], queue: Queue) -> None:
    try:
        await answer
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))


# ------------------------------------------------------------------------------
# Batches that wait for their size: what comes of a queue is kept until a batch is full, or its first message has
# waited long enough.


class Filling:
    """`put(runs)` takes runs of one queue that are ready."""

    def __init__(self, size: int, wait_s: float, put: Callable[[Sequence[Run]], None]) -> None:
        self._size = size
        self._wait_s = wait_s
        self._put = put
        self._timers: dict[Run, asyncio.TimerHandle] = {}

    def take(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        """Messages that a pull has brought."""
        ready: list[Run] = []
        last = process_queue.runs[-1] if process_queue.runs else None
        if last is not None and last.is_filling:
            count = self._size - len(last.messages)
            process_queue.extend(last, messages[:count])
            messages = messages[count:]
            if len(last.messages) >= self._size:
                self._timers.pop(last).cancel()
                last.is_filling = False
                ready.append(last)
        runs = process_queue.add(messages, next_offset, self._size)
        if runs and len(runs[-1].messages) < self._size:
            last = runs.pop()
            last.is_filling = True
            self._timers[last] = asyncio.get_running_loop().call_later(self._wait_s, self._due, last)
        self._put([*ready, *runs])

    def _due(self, run: Run) -> None:
        del self._timers[run]
        run.is_filling = False
        if not run.is_done:  # else a seek has dropped it
            self._put([run])

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


# ------------------------------------------------------------------------------
# When a consumer commits. Most commits ride on pulls (`pulling`); these are the others.
#
# - Every `interval_s` all that has moved, so that a member that is killed repeats little even if it pulls nothing.
# - A queue of which everything is handled and nothing new comes: its pull, which does not say so yet, is held by the
#     broker.
#   Where messages go on coming, the pull behind each says it, and no request is spent, unless it is one that may not.
# - When the user asks.


class OffsetCommitter:
    """`store(offsets)` tells the brokers and returns for which queues that was done; `spawn` runs work that nobody waits
    for."""

    def __init__(
        self,
        group: str,
        queues: Mapping[Queue, ProcessQueue],
        *,
        interval_s: float,
        store: Callable[[Mapping[Queue, int]], Awaitable[set[Queue]]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._limits = limits
        self._group = group
        self._queues = queues
        self._interval_s = interval_s
        self._store = store
        self._spawn = spawn
        self._idle_queues: dict[
            ProcessQueue, int
        ] = {}  # in the order in which they fell idle, and the look before that
        self._looks = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._standing = Standing(group, limits)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._commit_forever(), name="commit"),
            asyncio.create_task(self._standing.watch(), name="watch the loop"),
        ]

    async def stop(self) -> None:
        """Commits nothing more at intervals; queues that are still owned are committed when they are given up."""
        await cancelled(self._tasks)

    def stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def commit(self) -> None:
        """Commits acknowledged messages, and returns when the brokers have answered."""
        await self._commit(offsets_to_commit(self._queues.values()))

    async def _commit(self, offsets: Mapping[Queue, int]) -> None:
        for queue in await self._store(offsets):
            process_queue = self._queues.get(queue)
            if process_queue is not None:
                process_queue.committed = offsets[queue]

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._standing.look(self._queues.values())
            try:
                await self.commit()
            except Exception:
                log.exception("commit_failed", group=self._group)

    def queue_is_idle(self, process_queue: ProcessQueue) -> None:
        """Everything of it is handled. It is committed if nothing comes for a whole interval between two looks."""
        self._idle_queues[process_queue] = self._looks
        if self._idle_timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(self._limits.idle_commit_s, self._commit_idle)

    def _commit_idle(self) -> None:
        quiet = [
            process_queue
            for process_queue, look in self._idle_queues.items()
            if look < self._looks or not process_queue.pulls_may_commit
        ]
        for process_queue in quiet:
            del self._idle_queues[process_queue]
        self._looks += 1
        self._idle_timer = None
        if self._idle_queues:
            self._look_later()
        offsets = offsets_to_commit(
            process_queue for process_queue in quiet if not process_queue.messages and not process_queue.is_stopped
        )
        if offsets:
            self._spawn(self._commit(offsets))


# ------------------------------------------------------------------------------
# Names queues whose oldest message is not acknowledged for long, and an event loop that stood still.


@dataclass(slots=True)
class Front:
    """The oldest message of a queue that is not acknowledged; named again when it has stood twice as long."""

    offset: int
    since_s: float
    next_naming_s: float
    was_named: bool = False


class Standing:
    """Looked at now and then, so that a message costs nothing."""

    def __init__(self, group: str, limits: ClientLimits) -> None:
        self._group = group
        self._limits = limits
        self._fronts: dict[Queue, Front] = {}
        self._blocks = 0  # since they were named last, with the longest of them
        self._longest_s = 0.0
        self._next_block_s = -math.inf

    async def watch(self) -> None:
        """Looks for ever whether the event loop stands still: it can tell only afterwards, by how late a timer is."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(BLOCKED_POLL_INTERVAL_S)
            now_s = time.monotonic()
            self._blocked(now_s - began_s - BLOCKED_POLL_INTERVAL_S, now_s)

    def _blocked(self, late_s: float, now_s: float) -> None:
        """The block may have begun as early as the last look."""
        if late_s + BLOCKED_POLL_INTERVAL_S <= BLOCKED_S:
            return
        self._blocks += 1
        self._longest_s = max(self._longest_s, late_s)
        if now_s < self._next_block_s:
            return
        log.warning(
            "event_loop_blocked",
            group=self._group,
            seconds=round(self._longest_s, 1),
            times=self._blocks,
            hint="make a handler that blocks a plain function; it then runs in a thread",
        )
        self._next_block_s, self._blocks, self._longest_s = now_s + BLOCKED_NAMING_S, 0, 0.0

    def look(self, process_queues: Iterable[ProcessQueue]) -> None:
        now_s = time.monotonic()
        fronts = {
            process_queue.queue: self._front(process_queue, now_s)
            for process_queue in process_queues
            if process_queue.runs and not process_queue.is_held
        }
        for queue in self._fronts.keys() - fronts.keys():
            self._end(queue, now_s)
        self._fronts = fronts

    def _front(self, process_queue: ProcessQueue, now_s: float) -> Front:
        front, offset = self._fronts.get(process_queue.queue), process_queue.commit_offset
        if front is None or front.offset != offset:
            self._end(process_queue.queue, now_s)
            return Front(offset, now_s, now_s + self._limits.standing_s)
        if now_s >= front.next_naming_s:
            standing_s = now_s - front.since_s
            log.warning(
                "queue_stuck",
                group=self._group,
                queue=str(process_queue.queue),
                offset=offset,
                message=process_queue.runs[0].messages[process_queue.runs[0].done].message_id,
                seconds=round(standing_s, 1),
                handlers=process_queue.running,
                cached=process_queue.messages,
                hint="its oldest message is not acknowledged",
            )
            front.was_named, front.next_naming_s = True, now_s + standing_s
        return front

    def _end(self, queue: Queue, now_s: float) -> None:
        front = self._fronts.get(queue)
        if front is not None and front.was_named:
            seconds = round(now_s - front.since_s, 1)
            log.info("queue_unstuck", group=self._group, queue=str(queue), offset=front.offset, seconds=seconds)
