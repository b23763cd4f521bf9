"""Reads of a task's ranges on an executor, into Arrow batches. The next pull is in flight while the last one is
converted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import uvloop
from pyspark.sql.datasource import InputPartition

from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError
from ..client.wire.cluster import pull_header
from ..client.wire.connection import Access, Connection, Connections, header_of
from ..host.memory import keep_freed
from ..protocol.codes import RequestCode, ResponseCode, code_name
from ..protocol.frame import Frame
from ..protocol.group_bodies import TOPIC_RECREATED
from ..protocol.headers import PullMessageResult
from ..protocol.message import MessageError
from ..protocol.names import Queue, Subscription
from .checkpoint import UNMARKED, Fingerprint, TopicSnapshot
from .config import FIRST_RETRY_S, LAST_RETRY_S, PULL_BYTES, PULL_MESSAGES, READ_BATCH_BYTES
from .data_loss import WITHOUT, log, shown
from .extents import found_at
from .patience import FailureTimeout
from .worker import DataLossError

_RECREATED_LATER = "stored after the batch was planned: the topic was recreated meanwhile"
_READABLE = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_OFFSET_MOVED,
)


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Offsets `begin` to `end` (exclusive) of a queue, and everything that a task needs to read them.

    Attributes:
        address: address of the queue's broker
        columns: columns of the rows
        mark: the topic's mark when the range was planned
        message: fingerprint of a message in one of the topic's queues on this broker
    """

    queue: Queue
    begin: int
    end: int
    address: str
    access: Access
    group: str
    subscription: Subscription
    fail_on_data_loss: bool
    batch_rows: int
    timeout_s: float
    columns: tuple[str, ...]
    mark: TopicSnapshot = UNMARKED
    message: tuple[Queue, Fingerprint] | None = None

    def __str__(self) -> str:
        return f"{shown(self.queue)} {self.begin} to {self.end}"


@dataclass
class Task(InputPartition):
    """A task of one range, or of several short ones."""

    ranges: tuple[QueueRange, ...]

    def __post_init__(self) -> None:
        self.value = ", ".join(map(str, self.ranges))


def read_task(task: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task. Raises DataLossError, RocketletError or MessageError; Spark then fails the task, and may
    retry it."""
    if not isinstance(task, Task):  # Spark's own partition, for a batch read without tasks
        return
    keep_freed()
    # asyncio.Runner would format each result as text: it looks up its signal handler in an enum, whose error contains
    # the value.
    loop = uvloop.new_event_loop()
    reader = _Reader(task.ranges)
    try:
        loop.run_until_complete(reader.open())
        for span, pulls in reader.pulls:
            while (found := loop.run_until_complete(pulls.next())) is not None:
                yield from _batches(span, found, lambda pulls=pulls: loop.run_until_complete(pulls.is_of_another()))  # type: ignore[misc]
    finally:
        loop.run_until_complete(reader.close())
        loop.close()


class _Reader:
    """The pulls of a task's ranges. The first pulls of all ranges are sent concurrently."""

    def __init__(self, ranges: tuple[QueueRange, ...]) -> None:
        self._ranges = ranges
        self.pulls: list[tuple[QueueRange, _Pulls]] = []

    async def open(self) -> None:
        self._connections = Connections(self._ranges[0].access, lambda connection, frame: None, lambda connection: None)
        self.pulls = [(span, _Pulls(span, self._connections)) for span in self._ranges]
        for _, pulls in self.pulls:
            pulls.start()

    async def close(self) -> None:
        for _, pulls in self.pulls:
            await pulls.stop()
        await self._connections.close()


def _batches(span: QueueRange, data: bytes, is_of_another: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """Yield the non-empty batches of a response: one, or several if the bodies are much larger after decompression.

    Args:
        span: the range
        data: records of the response
        is_of_another: returns True if the records belong to another topic than the planned one
    """
    from .columns import TooLarge  # imports numpy and Arrow's functions, which the driver does not need

    begin = span.begin
    while begin < span.end:
        try:
            batch, next_begin = _batch(span, data, begin, span.end, is_of_another), span.end
        except TooLarge as error:
            if error.offset <= begin:  # the records are not in the order of their offsets
                raise
            batch, next_begin = _batch(span, data, begin, error.offset, is_of_another), error.offset
        begin = next_begin
        if batch is not None and batch.num_rows:
            yield batch


def _batch(
    span: QueueRange, data: bytes, begin: int, end: int, is_of_another: Callable[[], bool]
) -> pa.RecordBatch | None:
    from .columns import TooLarge, rows_of

    try:
        tags = sorted(span.subscription.tags)
        rows = rows_of(data, span.queue, begin, end, span.columns, tags=tags, strict=span.fail_on_data_loss)
        # Rocketlet's brokers reject a pull that names another identity. On an Apache broker, a later store time may
        # also mean that its clock was set back, so the fingerprint decides.
        is_later = len(rows.offsets) and rows.stored_ms[0] > span.mark.newest_ms > 0
        if is_later and not span.mark.identity and is_of_another():
            _report_lost(span, f"the messages from offset {rows.offsets[0]} on were {_RECREATED_LATER}")
            return None
        if rows.unreadable:
            _report_lost(span, f"the records at the offsets {rows.unreadable} cannot be read")
        return rows.batch(span.columns)
    except TooLarge:
        raise
    except MessageError as error:
        raise MessageError(f"the range {span} cannot be decoded: {error}") from None


def _report_lost(span: QueueRange, reason: str) -> None:
    """Log lost messages, or raise DataLossError if failOnDataLoss is set."""
    text = f"{shown(span.queue)}: of the planned range {span.begin} to {span.end}, {reason}"
    if span.fail_on_data_loss:
        raise DataLossError(f"{text}; {WITHOUT}")
    log.warning("messages_lost", reason=text)


def _is_missing(answer: Frame) -> bool:
    """Return True if the broker does not have the topic or the queue any more.

    Apache's brokers have no response code for a missing queue (PullMessageProcessor, `queueId[%d] is illegal`), and
    Rocketlet's brokers return the same response.
    """
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return (answer.remark or "").startswith("queueId[")
    return answer.code == ResponseCode.TOPIC_NOT_EXIST


class _Pulls:
    """The pulls of one range, one in flight at a time."""

    def __init__(self, span: QueueRange, connections: Connections) -> None:
        self._span = span
        self._offset = span.begin
        self._rows_left = span.batch_rows  # rows that the current Arrow batch may still get
        self._connections = connections
        self._pull: asyncio.Task[Frame] | None = None

    async def is_of_another(self) -> bool:
        """Return True unless the topic still has a message that it is known to have had when the batch was planned."""
        if self._span.message is None:
            return True
        queue, message = self._span.message
        connection = await self._connections.get(self._span.address)
        header = pull_header(self._span.group, queue, message.offset, 1, Subscription(queue.topic))
        answer = await connection.request_unchecked(RequestCode.PULL_MESSAGE, header, timeout_s=self._span.timeout_s)
        return found_at(answer, message.offset) != message

    async def next(self) -> bytes | None:
        """Return the records of the next Arrow batch, which may be empty; None at the end of the range.

        Small responses are joined. Large ones are not, because joining costs more than a further batch.
        """
        span = self._span
        if self._offset >= span.end:
            return None
        found: list[bytes] = []
        size, is_full = 0, False
        while self._offset < span.end and not is_full:
            answer = await (self._pull or self.start())
            self._pull = None
            if _is_missing(answer):
                self._lost(self._offset, "the topic, or the queue, is no longer there")
                continue
            offset, self._offset = self._offset, header_of(answer, PullMessageResult).next_begin_offset
            if answer.code == ResponseCode.PULL_OFFSET_MOVED or self._offset <= offset:
                self._lost(offset, "the topic was recreated" if answer.remark == TOPIC_RECREATED else "")
                continue
            if answer.body:
                found.append(answer.body)
                size += len(answer.body)
            self._rows_left -= self._offset - offset
            is_full = size >= READ_BATCH_BYTES or self._rows_left <= 0
            if is_full:
                self._rows_left = span.batch_rows
            if self._offset < span.end:
                self.start()
        return found[0] if len(found) == 1 else b"".join(found)

    def _lost(self, offset: int, other: str) -> None:
        """Skip offsets that the broker does not have: up to its next offset, or up to the end of the range.

        Args:
            offset: the offset that was requested
            other: reason why the topic is not the planned one, in which case nothing more of the range is read; empty
                otherwise
        """
        end = self._span.end
        gone = min(self._offset, end) if self._offset > offset and not other else end
        _report_lost(
            self._span, f"the offsets {offset} to {gone} are gone{f': {other}' if other else ' from the broker'}"
        )
        self._offset = gone

    def start(self) -> asyncio.Task[Frame]:
        """Send the next pull."""
        self._pull = asyncio.get_running_loop().create_task(self._pull_with_retries(self._offset))
        return self._pull

    async def _pull_with_retries(self, offset: int) -> Frame:
        failing, delay_s = FailureTimeout(self._span.timeout_s), FIRST_RETRY_S
        while True:
            try:
                return await self._pull_once(offset)
            except (ConnectionFailed, RequestTimeout) as error:
                if failing.is_over():
                    tried = f"tried for {self._span.timeout_s:.0f} s"
                    raise RocketletError(
                        f"{shown(self._span.queue)} cannot be read at {offset}, {tried}: {error}"
                    ) from error
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, LAST_RETRY_S)

    async def _pull_once(self, offset: int) -> Frame:
        span = self._span
        connection = await self._connections.get(span.address)
        answer = await self._answer(connection, offset)
        if answer.code == ResponseCode.PULL_OFFSET_MOVED and not connection.speaks_msgpack:
            answer = await self._repeat_after_reset(connection, offset, answer)
        if answer.code not in _READABLE and not _is_missing(answer):
            remark = f"{code_name(answer.code)}: {answer.remark}"
            raise RocketletError(f"{span.address} refused to read {shown(span.queue)} at {offset} with {remark}")
        return answer

    def _answer(self, connection: Connection, offset: int) -> asyncio.Future[Frame]:
        span = self._span
        header = pull_header(
            span.group,
            span.queue,
            offset,
            min(PULL_MESSAGES, self._rows_left, span.end - offset),
            span.subscription,
            max_bytes=PULL_BYTES,
            identity=span.mark.identity or None,
        )
        return connection.request_unchecked(RequestCode.PULL_MESSAGE, header, timeout_s=span.timeout_s)

    async def _repeat_after_reset(self, connection: Connection, offset: int, moved: Frame) -> Frame:
        """Repeat a pull that was answered with an administrator's reset, because a batch reads exactly its planned
        messages.

        Apache's 5.x brokers report a reset once, to the group's next pull (PullMessageProcessor,
        `useServerSideResetOffset`).
        """
        answer = await self._answer(connection, offset)
        if answer.code != ResponseCode.PULL_OFFSET_MOVED:
            log.warning(
                "reset_not_served",
                queue=str(self._span.queue),
                wanted=moved.ext.get("nextBeginOffset"),
                reason="the broker reported it to a task of a running batch, and reports it once",
                hint="stop the query and reset again",
            )
        return answer

    async def stop(self) -> None:
        if self._pull is not None:
            self._pull.cancel()
            await asyncio.gather(self._pull, return_exceptions=True)
