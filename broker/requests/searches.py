"""Messages by id, by key and by time: VIEW_MESSAGE_BY_ID and QUERY_MESSAGE.

There is no index of keys. A search finds by the queues' times which part of the commit log can hold the topic's messages,
and looks for the key's bytes there, newest part first, 128 KiB per turn of the event loop. A send pays nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate

from ...protocol import properties as props
from ...protocol.codes import ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import LogOffset, QueryMessage, read
from ...protocol.message import MAGIC, MessageError, Record, decode_record, record_size
from ..broker import Broker
from ..config import MAX_QUERY_BYTES, MAX_QUERY_MESSAGES, SEARCH_CHUNK_BYTES, UNIQUE_KEY_MESSAGES
from ..net.answers import Buffers, answer, answer_pieces
from ..net.connection import Connection
from ..store.files import StoreError
from ..store.store import Store

_MAGIC = MAGIC.to_bytes(4, "big")


def view_message(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    position = read(LogOffset, frame.ext).offset
    data = broker.store.record_bytes_at(position)
    if data is None:
        remark = f"can not find message by the offset, {position}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    return answer_pieces(frame, {}, [data], "")


def query_message(broker: Broker, connection: Connection, frame: Frame) -> None:
    """Answers when the search is done."""
    broker.tasks.answer(_answer_query(broker, connection, frame, read(QueryMessage, frame.ext)))


async def _answer_query(broker: Broker, connection: Connection, frame: Frame, header: QueryMessage) -> None:
    by_unique_key = str(frame.ext.get("_UNIQUE_KEY_QUERY", "")).lower() == "true"
    limit = UNIQUE_KEY_MESSAGES if by_unique_key else min(max(header.max_num, 1), MAX_QUERY_MESSAGES)
    ext = {"indexLastUpdateTimestamp": 0, "indexLastUpdatePhyoffset": 0}
    try:
        records = await _search(broker.store, header, limit)
    except StoreError as error:
        connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, ext, remark=str(error)))
        return
    if not records:
        remark = "can not find message, maybe time range not correct"
        connection.write(answer(frame, ResponseCode.QUERY_NOT_FOUND, ext, remark=remark))
        return
    connection.write(answer_pieces(frame, ext, [*records], ""))


async def _search(store: Store, header: QueryMessage, limit: int) -> list[bytes]:
    """The bytes of up to `limit` records with the key, oldest first, the newest ones if there are more."""
    key = header.key.encode()
    begin, end = store.log_range(header.topic, header.begin_timestamp, header.end_timestamp)
    found: list[tuple[int, bytes]] = []
    size = SEARCH_CHUNK_BYTES
    while end > begin and len(found) < limit and key and sum(len(record) for _, record in found) < MAX_QUERY_BYTES:
        start = max(end - size, begin)
        data = store.read_log(start, end - start)
        first = 0 if start == begin else _first_record(data, start)
        if first is None:  # one record is larger than the chunk
            size *= 2
            continue
        found += [
            (record.physical_offset, data[at : at + record.size])
            for at, record in _records_with(data, start, first, key)
            if _is_wanted(record, header)
        ]
        end, size = start + first, SEARCH_CHUNK_BYTES
        await asyncio.sleep(0)
    newest = sorted(found, reverse=True)[:limit]
    sizes = accumulate(len(record) for _, record in newest)
    fitting = sum(1 for size in sizes if size <= MAX_QUERY_BYTES)
    return [record for _, record in reversed(newest[: max(fitting, 1)])]


def _first_record(data: bytes, start: int) -> int | None:
    """Where the first record that begins in this part of the log, read from `start`, does so."""
    at = data.find(_MAGIC, 4)
    while at >= 0 and _record_at(data, at - 4, start) is None:
        at = data.find(_MAGIC, at + 1)
    return at - 4 if at >= 0 else None


def _records_with(data: bytes, start: int, first: int, key: bytes) -> Iterator[tuple[int, Record]]:
    """The records from `first` on that hold the bytes of the key, and where they begin."""
    at = data.find(key, first)
    while at >= 0:
        begin = data.rfind(_MAGIC, first, at) - 4
        while begin >= first and (record := _record_at(data, begin, start)) is None:
            begin = data.rfind(_MAGIC, first, begin + 4) - 4
        if begin < first or record is None or begin + record.size <= at:
            at = data.find(key, at + 1)
            continue
        yield begin, record
        at = data.find(key, begin + record.size)


def _record_at(data: bytes, position: int, start: int) -> Record | None:
    """The record, unless its bytes only look like one: a record knows its place."""
    try:
        record = decode_record(data, position) if record_size(data, position) else None
    except MessageError:
        return None
    return record if record is not None and record.physical_offset == start + position else None


def _is_wanted(record: Record, header: QueryMessage) -> bool:
    if record.topic != header.topic or not header.begin_timestamp <= record.store_ms <= header.end_timestamp:
        return False
    keys = (props.find(record.properties, props.KEYS) or "").split(" ")
    return header.key in keys or props.find(record.properties, props.UNIQUE_KEY) == header.key
