"""Messages by id and by key: VIEW_MESSAGE_BY_ID and QUERY_MESSAGE.

A search by a key reads the topic's messages of the times that were asked for, newest first (`store.searching`), in turns. A
send pays nothing for it. A client has one search at a time (`turns.Line`), and goes on with its other requests meanwhile.
"""

from __future__ import annotations

import structlog

from ....protocol import properties as props
from ....protocol.codes import ResponseCode
from ....protocol.frame import Ext, Frame
from ....protocol.headers import LogOffset, QueryMessage, read
from ....protocol.work import Work
from ...broker import Broker
from ...config import (
    KEPT_FRAME_BYTES,
    MAX_QUERY_BYTES,
    MAX_QUERY_MESSAGES,
    SEARCHED_ENTRIES,
    UNIQUE_KEY_MESSAGES,
    LimitExceeded,
)
from ...store.files import StoreError
from ...store.searching import Search
from ..answers import Buffers, answer, answer_pieces, small
from ..connection import Connection

log = structlog.get_logger("rocketlet.searches")

_NO_INDEX: Ext = {"indexLastUpdateTimestamp": 0, "indexLastUpdatePhyoffset": 0}


def view_message(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    position = read(LogOffset, frame.ext).offset
    data = broker.store.record_bytes_at(position)
    if data is None:
        remark = f"can not find message by the offset, {position}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    return answer_pieces(frame, {}, [data], "")


def query_message(broker: Broker, connection: Connection, frame: Frame) -> None:
    """Answers when the search is done."""
    header = read(QueryMessage, frame.ext)
    by_unique_key = str(frame.ext.get("_UNIQUE_KEY_QUERY", "")).lower() == "true"
    limit = UNIQUE_KEY_MESSAGES if by_unique_key else min(max(header.max_num, 1), MAX_QUERY_MESSAGES)
    size = KEPT_FRAME_BYTES + len(header.topic) + len(header.key)
    search = broker.store.search(header.topic)
    connection.charge(size)
    try:
        broker.searches.join(connection, _answering(connection, small(frame), search, header, limit, size))
    except LimitExceeded:
        connection.charge(-size)
        raise


def _answering(
    connection: Connection, frame: Frame, search: Search, header: QueryMessage, limit: int, size: int
) -> Work[None]:
    connection.charge(-size)
    try:
        reply = yield from _found(connection, frame, search, header, limit)
    except StoreError as error:
        reply = answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=str(error))
    except Exception as error:  # a defect of ours: the client is answered all the same
        log.exception("request_failed", request="QUERY_MESSAGE", peer=connection.peer)
        reply = answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=f"{type(error).__name__}: {error}")
    connection.write(reply)


def _found(connection: Connection, frame: Frame, search: Search, header: QueryMessage, limit: int) -> Work[Buffers]:
    """The bytes of up to `limit` messages with the key, oldest first, the newest ones if there are more."""
    found: list[bytes] = []
    total = 0
    if header.key:
        pieces = search.run(
            header.key.encode(), header.begin_timestamp, header.end_timestamp, lambda text: _has_key(text, header.key)
        )
        for piece in pieces:
            for message in piece:
                total += len(message.data)
                if found and (len(found) >= limit or total > MAX_QUERY_BYTES):
                    break
                found.append(message.data)
            if connection.is_closed or len(found) >= limit or total > MAX_QUERY_BYTES:
                break
            yield
    if found:
        return answer_pieces(frame, _NO_INDEX, [*reversed(found)], "")
    if search.is_cut:
        remark = (
            f"none of the newest {SEARCHED_ENTRIES} messages has the key; ask for an earlier time, or a shorter one"
        )
        return answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=remark)
    remark = "can not find message, maybe time range not correct"
    return answer(frame, ResponseCode.QUERY_NOT_FOUND, _NO_INDEX, remark=remark)


def _has_key(properties: str, key: str) -> bool:
    keys = (props.find(properties, props.KEYS) or "").split(" ")
    return key in keys or props.find(properties, props.UNIQUE_KEY) == key
