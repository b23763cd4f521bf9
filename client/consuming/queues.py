"""Process queues: pull requests, unacknowledged messages, flow control, commits, and the detection of stalled queues."""

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
from ..wire.connection import KeptTask, cancelled, finished

log = get_logger("rocketlet.consumer")
pull_log = get_logger("rocketlet.pull")


# ------------------------------------------------------------------------------
# The pulled, unacknowledged messages of one queue, and the offset that may be committed for it.
#
# Messages are grouped in runs; a run is what one call of the handler gets. A run is acknowledged as a whole, or message by
# message from its front. The offset to commit is that of the first message that is not acknowledged.
#
#     RUNNING <--resume, suspend--> SUSPENDED
#        `------- stop ---------------'---------> STOPPED --drop--> DROPPED
#
# A queue whose lease is lost becomes DROPPED from any state. A pause by the user is a separate flag.


_size_bytes = attrgetter("size_bytes")


class QueueState(Enum):
    RUNNING = "messages are pulled and handled"
    SUSPENDED = "the broker is unreachable or the lease has expired: no pull and no handler starts until it is resumed"
    STOPPED = "this member is releasing the queue: no pull and no handler starts; handled messages are still committed"
    DROPPED = "this member does not own the queue any more: nothing may be committed"


class QueueEvent(Enum):
    SUSPEND = "the broker became unreachable, or the lease expired"
    RESUME = "the broker is reachable, and the lease is renewed"
    STOP = "this member starts to release the queue"
    DROP = "the lease is lost or returned"


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
    (_S.STOPPED, _E.STOP): _S.STOPPED,  # the release of the queue is retried
    **{(state, _E.DROP): _S.DROPPED for state in (_S.RUNNING, _S.SUSPENDED, _S.STOPPED)},
}
_RUNNING: Final = QueueState.RUNNING
_DROPPED: Final = QueueState.DROPPED


class Run:
    """Messages that are passed to the handler in one call.

    Attributes:
        done: the number of messages, from the front, that are acknowledged; all of them if the run was dropped because the
            broker does not have its messages.
        tries: the number of handler calls for this run in an orderly consumer; of retries in one without a handler.
        outcome: the handler's outcome if it is not carried out yet.
        failure: the reason why the last handler call failed.
        is_filling: True while the run waits for more messages.
        size_bytes: the size of the messages that are not acknowledged.
    """

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

    def drop_from(self, offset: int) -> tuple[int, int]:
        """Drop the messages from an offset on. Return how many of them were unacknowledged, and the size of those in
        bytes."""
        kept = sum(message.queue_offset < offset for message in self.messages)
        lost = self.messages[max(kept, self.done) :]
        lost_bytes = sum(map(_size_bytes, lost))
        self.size_bytes -= lost_bytes
        if kept:
            self.messages = self.messages[:kept]  # a new list, because a running handler may use the previous one
            self.done = min(self.done, kept)
        else:
            self.done = len(self.messages)
        return len(lost), lost_bytes


class PullRequest:
    """The state of a queue's pulls, whose fields only `Puller` changes.

    A seek replaces it, so that the response to an earlier pull is recognized as outdated and ignored.

    Attributes:
        request: the header fields, which each pull reuses with new offsets; None before the first pull.
        began_ms: the time when the last pull was sent, in ms since the epoch; 0 before the first pull.
        is_pending: True while a pull is in flight or scheduled.
        is_throttled: True if flow control has stopped pulling.
    """

    __slots__ = ("began_ms", "is_pending", "is_throttled", "request")

    def __init__(self, began_ms: int = 0) -> None:
        self.began_ms = began_ms
        self.request: dict[str, ExtValue] | None = None
        self.is_pending = False
        self.is_throttled = False


class ProcessQueue:
    """One assignment of one queue to this member, with the messages in memory. A queue that is revoked and assigned
    again gets a new object.

    Attributes:
        begin_offset: the offset at which this member started to read the queue.
        next_offset: the offset that the next pull requests.
        committed: the offset that a pull or a commit last sent to the broker; None before the first one, and if it is
            not known whether the broker stored it.
        pull_commits: True while a pull in flight carries an offset to commit.
        moved_to: the offset that the broker named when it last responded that the requested one does not exist.
        idle_s: the loop's time when a pull last returned no messages.
        refused: the code and remark of the last rejected pull that was logged, the loop's time of that log entry, and the
            number of equal rejections since, which were not logged.
        is_paused: True while the user has paused the queue, so that no pull and no handler starts.
        messages, size_bytes: the number and size of unacknowledged messages in memory.
        running: the number of runs that are being handled.
        runs: the runs from the first unacknowledged one on, in the order of their offsets.
        waiting: the runs that no worker has taken yet.
        unreturned: runs that the broker has not accepted back yet, each with a callback that sends it immediately.
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
        self.unreturned: dict[Run, Callable[[], None]] = {}
        self._idle: asyncio.Event | None = None

    def add(self, messages: list[Message], next_offset: int, run_size: int) -> list[Run]:
        """Add the messages of a pull and return them as runs of up to `run_size` messages."""
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
        """Add messages to a run that no worker has taken yet."""
        size_bytes = sum(map(_size_bytes, messages))
        run.messages += messages
        run.size_bytes += size_bytes
        self.messages += len(messages)
        self.size_bytes += size_bytes

    def acknowledge(self, run: Run, count: int | None = None) -> None:
        """Acknowledge the first `count` messages of a run, or all of its messages if None."""
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
        """The offset of the first unacknowledged message, or of the next message if there is none."""
        if not self.runs:
            return self.next_offset
        run = self.runs[0]
        return run.messages[run.done].queue_offset

    def acknowledged(self, committed: int | None) -> int:
        """Return the commit offset, or the offset that the broker has committed, if that is higher and this member has
        nothing to commit: the broker commits offsets of messages that match no subscription while a pull waits."""
        offset = self.commit_offset
        known = self.begin_offset if self.committed is None else self.committed
        return max(offset, committed or 0) if offset == known and not self.runs else offset

    def exceeds(self, limits: PullLimits, unhandled: int | None) -> bool:
        """Return True if flow control must stop pulling: too many messages or bytes in memory, or too wide a span of
        offsets.

        Args:
            unhandled: the offset at which the span starts (`commit_offset`); None if the span is not limited.
        """
        if self.messages > limits.messages or self.size_bytes > limits.size_bytes:
            return True
        return unhandled is not None and self.next_offset - unhandled > limits.span

    @property
    def pulls_may_commit(self) -> bool:
        """True if pulls may carry the offset to commit.

        On an Apache broker the first commit of a queue must be a separate request (`GroupOffsets.store`): if the first
        offsets of a group and topic arrive concurrently, the broker can lose some of them (docs/decisions, 16).
        """
        return self.lease.epoch > 0 or self.committed is not None

    # Permissions

    def transition(self, event: QueueEvent) -> None:
        """Change the state. Raises KeyError for an event that is impossible in the current state."""
        self.state = TRANSITIONS[self.state, event]

    @property
    def is_suspended(self) -> bool:
        return self.state is QueueState.SUSPENDED

    @property
    def is_stopped(self) -> bool:
        """True if no further pull and no further handler starts for this assignment."""
        return self.state in (QueueState.STOPPED, _DROPPED)

    @property
    def is_dropped(self) -> bool:
        return self.state is _DROPPED

    @property
    def is_held(self) -> bool:
        """True if no pull and no handler may start now."""
        return self.state is not _RUNNING or self.is_paused

    @property
    def may_begin(self) -> bool:
        """True if a handler may start now.

        `may_begin` reads the clock each time, because a process that was suspended may have lost the lease to another
        member meanwhile, and must not start a handler then.
        """
        return self.state is _RUNNING and not (self.is_paused or self.lease.is_over)

    def suspend(self) -> None:
        self.transition(QueueEvent.SUSPEND)

    def resume(self) -> None:
        """Resume after a suspension. The next commit repeats the offset, because a broker that was killed may have lost
        it."""
        self.transition(QueueEvent.RESUME)
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
        """Wait until no handler is running on this queue."""
        while self.running:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def stop(self) -> None:
        """Start no more handlers; waiting messages stay unacknowledged. Immediately resend messages that the broker has not
        accepted back yet."""
        self.transition(QueueEvent.STOP)
        self._return_immediately()

    def _return_immediately(self) -> None:
        for send_back in list(self.unreturned.values()):
            send_back()

    def drop(self) -> None:
        """Drop all messages of a queue that this member does not own any more. Results of running handlers have no
        effect."""
        self.transition(QueueEvent.DROP)
        self.clear()
        self._return_immediately()

    def clear(self) -> None:
        """Drop all messages, so that workers skip their runs and results of running handlers have no effect."""
        for run in self.runs:
            run.done = len(run.messages)
        self.runs.clear()
        self.waiting.clear()
        self.messages = self.size_bytes = 0

    def seek(self, offset: int) -> None:
        """Continue from another offset. Drop messages in memory, and ignore the response to a pull in flight."""
        self.clear()
        self.pull = PullRequest(self.pull.began_ms)
        self.next_offset = offset

    def move(self, offset: int) -> None:
        """Continue from another offset because the broker does not have the next one.

        Messages in memory with lower offsets stay. Messages from this offset on are dropped, because they do not exist
        on the broker any more and new messages will have their offsets.
        """
        for run in self.runs:
            messages, size_bytes = run.drop_from(offset)
            self.messages -= messages
            self.size_bytes -= size_bytes
        self.runs = deque(run for run in self.runs if not run.is_done)
        self.pull = PullRequest(self.pull.began_ms)
        self.next_offset = offset
        self.committed = None


def offsets_to_commit(process_queues: Iterable[ProcessQueue]) -> dict[Queue, int]:
    """Return by queue the offsets that have changed since the last commit."""
    return {
        process_queue.queue: process_queue.commit_offset
        for process_queue in process_queues
        if not process_queue.is_dropped and process_queue.commit_offset != process_queue.committed
    }


# ------------------------------------------------------------------------------
# Pull requests: at most one per queue is in flight or scheduled. Callbacks process the responses, so that a pull needs no
# task and no future.


_PULL: Final = int(RequestCode.PULL_MESSAGE)  # Python 3.11 needs 0.2 us to look up an enum member
_WAITS: Final = PULL_SUSPEND | PULL_SUBSCRIPTION
_WAITS_AND_COMMITS: Final = _WAITS | PULL_COMMIT_OFFSET


async def check_filters(
    cluster: ClusterView, client_id: str, group: str, subscriptions: Mapping[str, Subscription]
) -> None:
    """Check SQL filters with the brokers of their topics, or with any broker if the topic does not exist yet.

    Raises BrokerRefused if a broker rejects a filter, and RocketletError if a broker of the topic does not respond.
    """
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
    """Check a filter with the first broker that responds. Check nothing if none responds. Raises BrokerRefused."""
    with suppress(RocketletError):
        await cluster.find_masters()
    for name in cluster.known_masters():
        with suppress(ConnectionFailed, RequestTimeout):
            connection = await cluster.broker(name)
            await connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, body)
            return


class Puller:
    """Keeps one pull in flight for each assigned queue until the queue stops, except while the queue is paused or
    suspended, flow control is in effect, or a retry waits.

    Args:
        span_counts: True if flow control also limits the span of unacknowledged offsets.
        commits: True if pulls carry the offset to commit, so that a member that is killed repeats few messages.
        on_messages: `on_messages(process_queue, messages, next_offset)` is called for each successful response, even if
            it has no messages.
        on_moved: `on_moved(process_queue, offset)` is called when the broker does not have the requested offset and names
            another one.
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
        """Send a pull, unless one is pending, the queue is held or flow control stops it. If the connection to the
        broker is not open, retry later."""
        pull = process_queue.pull
        if pull.is_pending or process_queue.is_held:
            return
        unhandled = process_queue.commit_offset
        if process_queue.exceeds(self._pull_limits, unhandled if self._span_counts else None):
            pull.is_throttled = True  # wait until messages are acknowledged, which calls `resume`
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
        """Return the header fields of the queue's pulls. Each pull sets the offsets and flags; the others are constant."""
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
        """Return `offset` if this pull is to commit it, and record that; otherwise None.

        The broker stores the offset when the pull arrives, even if it then holds the pull. If the pull fails, a later one
        repeats the offset.
        """
        has_changed = offset != (
            process_queue.begin_offset if process_queue.committed is None else process_queue.committed
        )
        if not (has_changed and self._commits and process_queue.pulls_may_commit) or process_queue.lease.is_over:
            return None
        process_queue.committed = offset
        process_queue.pull_commits = True
        return offset

    def resume(self, process_queue: ProcessQueue) -> None:
        """Resume pulling after acknowledgements, if flow control had stopped it."""
        pull = process_queue.pull
        if not pull.is_throttled:
            return
        unhandled = process_queue.commit_offset if self._span_counts else None
        if not process_queue.exceeds(self._pull_limits, unhandled):
            pull.is_throttled = False
            self.pull(process_queue)

    def hold(self, process_queue: ProcessQueue) -> Callable[[int | None], None]:
        """Delay the first pull until the start offset is known.

        Return the function to call then, with the offset, or None to keep the current one. A seek in the meantime takes
        precedence over its argument.
        """
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
        if process_queue.pull is pull:  # otherwise a seek has replaced this pull
            pull.is_pending = False
            self.pull(process_queue)

    def _answered(self, process_queue: ProcessQueue, pull: PullRequest, answer: Frame | Exception) -> None:
        if process_queue.pull is not pull:  # a seek has replaced it
            return
        pull.is_pending = False
        if not isinstance(answer, Exception):
            process_queue.pull_commits = False
        if process_queue.is_stopped or process_queue.is_suspended:  # a paused queue keeps its messages
            return
        if isinstance(answer, Exception):
            process_queue.committed = None  # it is unknown whether the broker stored the pull's offset
            pull_log.info("pull_failed", queue=str(process_queue.queue), reason=str(answer))
            self._later(process_queue, self._limits.pull_error_delay_s)
            return
        try:
            self._process(process_queue, answer)
        except (MessageError, HeaderError) as error:
            pull_log.error("pull_answer_unreadable", queue=str(process_queue.queue), reason=str(error))
            self._later(process_queue, self._limits.pull_error_delay_s)

    def _process(self, process_queue: ProcessQueue, answer: Frame) -> None:
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
            # Two responses without messages in a short time mean that the broker does not hold pulls.
            if next_offset <= asked and now_s < process_queue.idle_s + self._limits.pull_busy_delay_s:
                self._later(process_queue, self._limits.pull_busy_delay_s)
            else:
                self.pull(process_queue)
            process_queue.idle_s = now_s
        elif code == ResponseCode.PULL_OFFSET_MOVED:
            next_offset = read(PullMessageResult, answer.ext).next_begin_offset
            if (
                process_queue.moved_to == process_queue.next_offset
            ):  # the broker does not have the offset either that it named before
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
        """Log a rejected pull. Log equal rejections only at the interval `log_repeat_s`, with the number not logged."""
        now_s, refusal = asyncio.get_running_loop().time(), (answer.code, answer.remark)
        before, written_s, left_out = process_queue.refused
        if before == refusal and now_s < written_s + self._limits.log_repeat_s:
            process_queue.refused = refusal, written_s, left_out + 1
            return
        fields: dict[str, object] = {"repeated": left_out} if before == refusal and left_out else {}
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            expression = self._subscriptions[process_queue.queue.topic].expression
            fields["hint"] = f"correct the filter {expression!r}; no message of the topic is delivered until then"
        pull_log.warning(
            "pull_refused",
            queue=str(process_queue.queue),
            code=code_name(answer.code),
            remark=answer.remark,
            **fields,
        )
        process_queue.refused = refusal, now_s, 0

    def _decoded(self, process_queue: ProcessQueue, body: bytes) -> list[Message]:
        """Return the messages that match the subscription. Brokers compare only hashes of tags, which can be equal for
        different tags."""
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
    """Return True if a record has one of these tags or is unreadable. Unreadable messages are dead-lettered later."""
    try:
        return props.find(properties_in(record), props.TAGS) in tags
    except MessageError:
        return True


# ------------------------------------------------------------------------------
# The queues that a consumer owns: assignment and revocation by the membership (`QueueUser`), the user's listeners, pauses.


class Assignment:
    """The queues that a consumer owns now.

    Args:
        drain_s: the maximum time for which the release of a queue waits for running handlers.
        on_assigned, on_revoked: the user's listeners.
        on_resumed: `on_resumed(process_queue)` is called when messages of the queue may be handled again.
    """

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
        self._ending: dict[Queue, ProcessQueue] = {}  # not owned any more, but handlers are still running
        self._is_paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.queues: dict[Queue, ProcessQueue] = {}

    def some(self, queues: Iterable[Queue] | None) -> list[ProcessQueue]:
        """Return the given process queues, or all if None. Raises ConfigError if this member does not own one of them."""
        if queues is None:
            return list(self.queues.values())
        wanted = list(queues)
        missing = [str(queue) for queue in wanted if queue not in self.queues]
        if missing:
            raise ConfigError(f"this member does not own {', '.join(missing)}")
        return [self.queues[queue] for queue in wanted]

    def pause(self, queues: Iterable[Queue] | None) -> None:
        """Pause the given queues, or if None all queues, including those that are assigned later."""
        self._is_paused = self._is_paused or queues is None
        for process_queue in self.some(queues):
            process_queue.pause()

    def resume(self, queues: Iterable[Queue] | None) -> None:
        self._is_paused = self._is_paused and queues is not None
        for process_queue in self.some(queues):
            process_queue.pause(paused=False)
            self._continue(process_queue)

    def _continue(self, process_queue: ProcessQueue) -> None:
        self._on_resumed(process_queue)
        self._puller.pull(process_queue)

    # Assignment and revocation (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.queues[queue] = process_queue = ProcessQueue(queue, offset, lease, paused=self._is_paused)
        if self._on_assigned is None:
            self._puller.pull(process_queue)
            return
        later = call_assigned_listener(self._on_assigned, queue, self._puller.hold(process_queue))
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
            log.warning("handlers_still_running", queue=str(queue), hint="their messages will be redelivered")
        self._notify_revoked(queue)
        # If the lease was lost while handlers were ending, another member may own the queue: commit nothing.
        return None if process_queue.is_dropped else process_queue.commit_offset

    def is_pull_committing(self, queue: Queue) -> bool:
        process_queue = self.queues.get(queue)
        return process_queue is not None and process_queue.pull_commits

    def lose_queue(self, queue: Queue) -> None:
        process_queue = self.queues.pop(queue, None)
        if process_queue is not None:
            if not process_queue.is_stopped:  # if the queue is being released, `give_queue` calls the listener instead
                self._notify_revoked(queue)
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
            self._continue(process_queue)

    def _notify_revoked(self, queue: Queue) -> None:
        answer = call_listener(self._on_revoked, queue) if self._on_revoked is not None else None
        if answer is not None:
            self.spawn(answer)

    # Background tasks, which only the stop of the consumer waits for

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. `finished` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Wait up to `drain_s` for the background tasks, then cancel those that are still running. A background task
        may run a listener of the user, which may itself wait for the consumer to stop."""
        await finished(self._tasks, self._drain_s)


# ------------------------------------------------------------------------------
# The user's listeners for assigned and revoked queues: plain or async functions, which may raise any exception.


_HINT: Final = "the queue is read from the group's offset"

Listener = Callable[[set[Queue]], Awaitable[None] | None]
Starts = Mapping[Queue, int] | None
Assigned = Callable[[set[Queue]], Awaitable[Starts] | Starts]
"""Called with the set of assigned queues. It may return a mapping from queues to the offsets at which to start, instead of
the group's offsets."""


def call_listener(listener: Listener, queue: Queue) -> Coroutine[None, None, None] | None:
    """Call the listener. If it is async, return a coroutine that awaits it. Exceptions except KeyboardInterrupt are
    logged, not raised."""
    try:
        answer = listener({queue})
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
        return None
    return _awaited(answer, queue) if inspect.isawaitable(answer) else None


def call_assigned_listener(
    listener: Assigned, queue: Queue, begin: Callable[[int | None], None]
) -> Coroutine[None, None, None] | None:
    """Call the listener, then call `begin` with the offset that it returned, or None if it returned none or failed.

    If the listener is async, return a coroutine that awaits it and then calls `begin`.
    """
    offset = None
    try:
        answer = listener({queue})
        if inspect.isawaitable(answer):
            return _begin_later(answer, queue, begin)
        offset = _start(answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)
    return None


async def _begin_later(answer: Awaitable[Starts], queue: Queue, begin: Callable[[int | None], None]) -> None:
    offset = None
    try:
        offset = _start(await answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)


def _start(starts: Starts, queue: Queue) -> int | None:
    """Return the offset for this queue, or None if it has none. Raises ConfigError for a value that is neither None nor
    a mapping from queues to offsets."""
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
# With `batch_wait_s`, messages of a queue are collected until a batch is full, or its first message has waited that long.


class BatchBuffer:
    """Collects messages until they fill a run of `size` messages or `wait_s` seconds have passed.

    `put(runs)` is called with the complete runs of one queue.
    """

    def __init__(self, size: int, wait_s: float, put: Callable[[Sequence[Run]], None]) -> None:
        self._size = size
        self._wait_s = wait_s
        self._put = put
        self._timers: dict[Run, asyncio.TimerHandle] = {}

    def add(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        """Add the messages of a pull, and pass on the runs that are complete."""
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
        if not run.is_done:  # otherwise a seek, or the loss of the queue, has dropped it
            self._put([run])


# ------------------------------------------------------------------------------
# When a consumer commits. Pulls carry most commits (`Puller`); this part sends the others:
#
# - All changed offsets, every `interval_s`, so that a member that is killed repeats few messages even if it pulls nothing.
# - The offset of a queue whose messages are all acknowledged while no new ones arrive, because the broker holds its pull,
#   which was sent before. While new messages keep arriving, the next pull carries the offset instead, so that no separate
#   request is sent, unless the queue's pulls may not commit (`ProcessQueue.pulls_may_commit`).
# - All changed offsets, when the user calls `commit`.


class OffsetCommitter:
    """Commits offsets at an interval, for idle queues, and on request.

    Args:
        store: `store(offsets)` sends offsets to the brokers and returns the queues whose offsets were stored.
        spawn: runs a coroutine in the background.
    """

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
        # idle queues, with the number of checks before each became idle
        self._idle_queues: dict[ProcessQueue, int] = {}
        self._idle_checks = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stalls = StallDetector(group, limits)
        self._limits = limits
        self._tasks: list[KeptTask] = []

    def start(self) -> None:
        self._tasks = [
            KeptTask(self._commit_forever, "commit", self._limits.restart_s),
            KeptTask(self._stalls.watch, "watch the loop", self._limits.restart_s),
        ]

    async def stop(self) -> None:
        """Stop the commits at an interval. Queues that are still owned are committed when they are released."""
        await cancelled(self._tasks)

    def stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def commit(self) -> None:
        """Commit the offsets of acknowledged messages that have changed. Return when `store` has returned."""
        await self._commit(offsets_to_commit(self._queues.values()))

    async def _commit(self, offsets: Mapping[Queue, int]) -> None:
        for queue in await self._store(offsets):
            process_queue = self._queues.get(queue)
            if process_queue is not None:
                process_queue.committed = offsets[queue]

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._stalls.check(self._queues.values())
            try:
                await self.commit()
            except Exception:
                log.exception("commit_failed", group=self._group)

    def queue_is_idle(self, process_queue: ProcessQueue) -> None:
        """Record that all messages of a queue are acknowledged. The queue's offset is committed once the queue has been
        idle for at least one interval `idle_commit_s`, or at the next check if its pulls may not commit."""
        self._idle_queues[process_queue] = self._idle_checks
        if self._idle_timer is None:
            self._schedule_idle_check()

    def _schedule_idle_check(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(self._limits.idle_commit_s, self._commit_idle)

    def _commit_idle(self) -> None:
        quiet = [
            process_queue
            for process_queue, check in self._idle_queues.items()
            if check < self._idle_checks or not process_queue.pulls_may_commit
        ]
        for process_queue in quiet:
            del self._idle_queues[process_queue]
        self._idle_checks += 1
        self._idle_timer = None
        if self._idle_queues:
            self._schedule_idle_check()
        offsets = offsets_to_commit(
            process_queue for process_queue in quiet if not process_queue.messages and not process_queue.is_stopped
        )
        if offsets:
            self._spawn(self._commit(offsets))


# ------------------------------------------------------------------------------
# Reports queues whose oldest message stays unacknowledged for long, and an event loop that was blocked.


@dataclass(slots=True)
class Front:
    """The oldest unacknowledged message of a queue. As long as it is not acknowledged, the queue is logged again each
    time the message's age has doubled."""

    offset: int
    since_s: float
    next_naming_s: float
    was_named: bool = False


class StallDetector:
    """Checks for stalls at an interval, so that there is no cost for each message."""

    def __init__(self, group: str, limits: ClientLimits) -> None:
        self._group = group
        self._limits = limits
        self._fronts: dict[Queue, Front] = {}
        self._blocks = 0  # number of blocks of the event loop since the last log entry
        self._longest_s = 0.0  # duration of the longest of these blocks
        self._next_block_s = -math.inf

    async def watch(self) -> None:
        """Check until cancelled whether the event loop was blocked, by measuring how late a timer fires."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(BLOCKED_POLL_INTERVAL_S)
            now_s = time.monotonic()
            self._blocked(now_s - began_s - BLOCKED_POLL_INTERVAL_S, now_s)

    def _blocked(self, late_s: float, now_s: float) -> None:
        # The block may have started right after the previous check, so it may be one interval longer than the delay.
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
            hint="change a handler that blocks to a plain function, which runs in a thread",
        )
        self._next_block_s, self._blocks, self._longest_s = now_s + BLOCKED_NAMING_S, 0, 0.0

    def check(self, process_queues: Iterable[ProcessQueue]) -> None:
        """Log the queues whose oldest message has been unacknowledged for too long, and those where that has ended."""
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
            stalled_s = now_s - front.since_s
            log.warning(
                "queue_stuck",
                group=self._group,
                queue=str(process_queue.queue),
                offset=offset,
                message=process_queue.runs[0].messages[process_queue.runs[0].done].message_id,
                seconds=round(stalled_s, 1),
                handlers=process_queue.running,
                cached=process_queue.messages,
                hint="its oldest message is not acknowledged",
            )
            front.was_named, front.next_naming_s = True, now_s + stalled_s
        return front

    def _end(self, queue: Queue, now_s: float) -> None:
        front = self._fronts.get(queue)
        if front is not None and front.was_named:
            seconds = round(now_s - front.since_s, 1)
            log.info("queue_unstuck", group=self._group, queue=str(queue), offset=front.offset, seconds=seconds)
