"""One range of one queue, read on an executor into Arrow batches. The next pull is on its way while one is converted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import uvloop
from pyspark.sql.datasource import InputPartition

from ..client.connection import Connections
from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError
from ..protocol import properties as props
from ..protocol.bodies import Queue
from ..protocol.codes import PULL_SUBSCRIPTION, RequestCode, ResponseCode, code_name
from ..protocol.compression import decompressed
from ..protocol.frame import Frame
from ..protocol.headers import PullMessage, PullMessageResult, read, write
from ..protocol.message import Record, decode_records
from ..protocol.subscription import Subscription

PULL_MESSAGES = 1024
PULL_TIMEOUT_S = 30.0
ATTEMPTS = 5
RETRY_DELAY_S = 0.5

SCHEMA = (
    "topic STRING, brokerName STRING, queueId INT, queueOffset BIGINT, messageId STRING, keys ARRAY<STRING>, "
    "tags STRING, body BINARY, properties MAP<STRING, STRING>, bornTime TIMESTAMP, storeTime TIMESTAMP"
)
_TIME = pa.timestamp("us", tz="UTC")
ARROW_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("messageId", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("tags", pa.string()),
        ("body", pa.binary()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("bornTime", _TIME),
        ("storeTime", _TIME),
    ]
)


class DataLossError(RuntimeError):
    """Messages of a planned range are gone from the broker."""


@dataclass
class QueueRange(InputPartition):
    """What one task reads: offsets `begin` to `end` of a queue, from the broker at `address`."""

    queue: Queue
    begin: int
    end: int
    address: str
    group: str
    subscription: Subscription
    fail_on_data_loss: bool
    batch_rows: int

    def __post_init__(self) -> None:
        self.value = str(self.queue)


def read_range(span: QueueRange) -> Iterator[pa.RecordBatch]:
    """The range's rows. Raises DataLossError, RocketletError or MessageError; Spark then tries the task again."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pulls = _Pulls(span)
        records: list[Record] = []
        try:
            for found in iter(lambda: runner.run(pulls.next()), None):
                records += found
                if len(records) >= span.batch_rows:
                    yield _batch(span, records)
                    records = []
            if records:
                yield _batch(span, records)
        finally:
            runner.run(pulls.close())


class _Pulls:
    def __init__(self, span: QueueRange) -> None:
        self._span = span
        self._offset = span.begin
        self._connections = Connections(lambda connection, frame: None, lambda connection: None)
        self._pull: asyncio.Task[Frame] | None = None

    async def next(self) -> list[Record] | None:
        """The records of the next pull; None at the end of the range."""
        span = self._span
        if self._offset >= span.end:
            return None
        answer = await (self._pull or self._start())
        self._pull = None
        offset, self._offset = self._offset, read(PullMessageResult, answer.ext).next_begin_offset
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            self._lost(offset)
            return []
        if self._offset <= offset:
            raise RocketletError(f"{span.queue} ends at {offset}, before the planned end {span.end}")
        if self._offset < span.end:
            self._pull = self._start()
        tags = span.subscription.tags
        return [
            record
            for record in decode_records(answer.body)
            if record.queue_offset < span.end and (not tags or props.find(record.properties, props.TAGS) in tags)
        ]

    def _lost(self, offset: int) -> None:
        span = self._span
        remedy = "set failOnDataLoss to false to go on without them, or keep messages longer"
        if self._offset <= offset or span.fail_on_data_loss:
            raise DataLossError(
                f"{span.queue}: the offsets {offset} to {max(min(self._offset, span.end), offset)} of the planned range "
                f"{span.begin} to {span.end} are gone from the broker; {remedy}"
            )

    def _start(self) -> asyncio.Task[Frame]:
        return asyncio.get_running_loop().create_task(self._pull_patiently(self._offset))

    async def _pull_patiently(self, offset: int) -> Frame:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._pull_once(offset)
            except (ConnectionFailed, RequestTimeout):
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_DELAY_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _pull_once(self, offset: int) -> Frame:
        span = self._span
        connection = await self._connections.get(span.address)
        header = PullMessage(
            span.group,
            span.queue.topic,
            span.queue.queue_id,
            offset,
            min(PULL_MESSAGES, span.end - offset),
            PULL_SUBSCRIPTION,
            0,
            0,
            0,
            span.subscription.expression,
            span.subscription.kind,
        )
        answer = await connection.ask(RequestCode.PULL_MESSAGE, write(header), timeout_s=PULL_TIMEOUT_S)
        readable = (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_OFFSET_MOVED,
        )
        if answer.code not in readable:
            remark = f"{code_name(answer.code)}: {answer.remark}"
            raise RocketletError(f"{span.address} refused to read {span.queue} at {offset} with {remark}")
        return answer

    async def close(self) -> None:
        if self._pull is not None:
            self._pull.cancel()
            await asyncio.gather(self._pull, return_exceptions=True)
        await self._connections.close()


def _batch(span: QueueRange, records: list[Record]) -> pa.RecordBatch:
    count = len(records)
    properties = [props.decode(record.properties) for record in records]
    queue = span.queue
    columns = [
        pa.repeat(queue.topic, count),
        pa.repeat(queue.broker_name, count),
        pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
        pa.array([record.queue_offset for record in records], pa.int64()),
        pa.array(
            [item.get(props.UNIQUE_KEY) or record.offset_id for item, record in zip(properties, records, strict=True)],
            pa.string(),
        ),
        pa.array([item.get(props.KEYS, "").split() for item in properties], pa.list_(pa.string())),
        pa.array([item.get(props.TAGS) for item in properties], pa.string()),
        pa.array([decompressed(record.body, record.sys_flag) for record in records], pa.binary()),
        pa.array([list(item.items()) for item in properties], pa.map_(pa.string(), pa.string())),
        pa.array([record.born_ms * 1000 for record in records], pa.int64()).cast(_TIME),
        pa.array([record.store_ms * 1000 for record in records], pa.int64()).cast(_TIME),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)
