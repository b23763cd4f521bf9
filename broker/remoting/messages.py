"""Remoting requests about messages: SEND_MESSAGE, PULL_MESSAGE, replies, recalls, END_TRANSACTION, QUERY_MESSAGE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from typing import Final

import structlog

from ...protocol import properties as props
from ...protocol.bodies import Work
from ...protocol.codes import (
    ONEWAY_FLAG,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_ROLLBACK,
    Language,
    RequestCode,
    ResponseCode,
)
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.fast import EncodedSends
from ...protocol.frame import Ext, Frame, FrameReader
from ...protocol.group_bodies import TOPIC_RECREATED
from ...protocol.headers import (
    FIRST_ID,
    OUTCOME,
    EndTransaction,
    LogOffset,
    PullMessage,
    PullMessageResult,
    PushReply,
    QueryMessage,
    RecallMessage,
    SendBack,
    SendMessage,
    encode_found_head,
    encode_sent,
    read,
    read_send_v2,
    write,
)
from ...protocol.message import decode_host, offset_id
from ...protocol.names import reply_topic
from ..broker import BrokerController
from ..config import (
    FOREIGN_PULL_MESSAGES,
    KEPT_FRAME_BYTES,
    MAX_QUERY_BYTES,
    MAX_QUERY_MESSAGES,
    REGION,
    SEARCHED_ENTRIES,
    UNIQUE_KEY_MESSAGES,
    LimitExceeded,
)
from ..groups.pulling import Pull, Pulled, PullFault, PullStatus
from ..messages.appender import property_bytes
from ..messages.recalls import Recall, RecallFault, recalling
from ..messages.sending import too_large
from ..sessions.events import Answer, ReplyWanted
from ..sessions.refusal import Refusal
from ..store.files import StoreError, StoreFailed, StoreFull
from ..store.index import Search
from .connection import RemotingConnection
from .groups import request_membership
from .responses import Buffers, answer, answer_pieces, reply_type, response_error, small

log = structlog.get_logger("rocketlet.sending")
transactions_log = structlog.get_logger("rocketlet.transactions")
searches_log = structlog.get_logger("rocketlet.searches")


# ------------------------------------------------------------------------------
# SEND_MESSAGE, its V2, SEND_BATCH_MESSAGE and CONSUMER_SEND_MSG_BACK.


REGION_EXT: Final[Ext] = {"MSG_REGION": REGION, "TRACE_ON": "true"}

_SEND_MESSAGE: Final = int(RequestCode.SEND_MESSAGE)  # Python 3.11 takes 0.2 us to find a member of an enum
_FULL: Final = "service not available now, the broker's disk may be full; free space or send to another broker: "
FAILED_REMARK: Final = "service not available now, the broker's disk fails; send to another broker: "
_NO_ROOM: Final = (ENOSPC, EDQUOT, EFBIG)


def not_kept_remark(error: BaseException) -> str:
    """Return the remark for requests whose data the disk did not take. Each refused write raises `StoreFull`, but only a full
    disk needs space."""
    cause = error.__cause__
    is_full = not isinstance(error, StoreFailed) and not (isinstance(cause, OSError) and cause.errno not in _NO_ROOM)
    return (_FULL if is_full else FAILED_REMARK) + (str(error) or type(error).__name__)


Staged = Frame | EncodedSends
"""A staged send, or several consecutive sends that the compiled module has staged."""


class Sends:
    """The consecutive sends of a connection that are committed together. They are staged one by one, or several in one
    call of the compiled module."""

    def __init__(self, broker: BrokerController) -> None:
        self._sending = broker.sending
        self._host_hex = broker.store.store_host.hex().upper()
        self.staged: list[Staged] = []
        self.more = 0  # number of staged sends minus the number of items in `staged`

    def stage(self, connection: RemotingConnection, frame: Frame) -> None:
        """Stage the message of a send. If this raises, for example Refusal or LongBatch, nothing of the send is
        staged."""
        header = read_send_v2(frame.ext) if frame.code != _SEND_MESSAGE else read(SendMessage, frame.ext)
        self._sending.stage(header, frame.body, connection.born_host)
        self.staged.append(frame)

    def stage_run(self, connection: RemotingConnection, account: bytes) -> bool:
        """Stage the next requests as far as they are plain sends, with the compiled module. Return False if the next
        request is no send, or a send that needs `stage`.

        account: the access key of the account that sends; empty if the client may send without an account."""
        requests = connection.requests
        sends = self._sending.stage_run(requests.data, requests.at, account, connection.born_host)
        if sends is None:
            return False
        requests.skip_to(sends.end)
        self.staged.append(sends)
        self.more += sends.sends - 1
        return True

    def pass_queue(self, account: bytes, frame: Frame) -> None:
        """Allow `stage_run` to stage the account's next plain sends to the queue of a send that has passed every
        check, until the generation changes."""
        self._sending.pass_queue(account, _send_header(frame))

    def commit(self) -> Buffers:
        """Commit the staged sends, and return their responses in order; refusals if they cannot be stored. One-way sends
        have no response."""
        staged, self.staged, self.more = self.staged, [], 0
        try:
            placed = self._sending.commit()
        except Exception as error:
            if not isinstance(error, StoreFull):
                log.exception("sends_refused_store_failed")
            remark = not_kept_remark(error)
            return [part for frame in awaited(staged) for part in not_stored(frame, remark)]
        out: Buffers = []
        host_hex = self._host_hex
        for frame, (position, queue_id, queue_offset, positions, _, half, handle, _) in zip(
            staged, placed, strict=True
        ):
            if type(frame) is EncodedSends:
                out.append(frame.responses)
            elif handle or half or frame.flag & ONEWAY_FLAG:
                if not frame.flag & ONEWAY_FLAG:
                    own: Ext = {"recallHandle": handle} if handle else _transaction_ext(frame)
                    out += answer(frame, 0, {**_sent_ext(f"{host_hex}{position:016X}", queue_id, queue_offset), **own})
            else:
                ids = _batch_ids(frame, host_hex, positions) if positions else f"{host_hex}{position:016X}"
                out.append(encode_sent(reply_type(frame), frame.opaque, ids, queue_id, queue_offset, REGION))
        return out


def awaited(staged: Iterable[Staged]) -> Iterator[Frame]:
    """Yield a frame for each send whose sender awaits a response, with the number and encoding that a refusal needs.
    For sends of the compiled module, these frames are their prepared responses."""
    for item in staged:
        if not isinstance(item, Frame):
            yield from FrameReader().feed(item.responses)
        elif not item.flag & ONEWAY_FLAG:
            yield item


def not_stored(frame: Frame, remark: str) -> Buffers:
    return answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, REGION_EXT, remark=remark)


def _send_header(frame: Frame) -> SendMessage:
    return read(SendMessage, frame.ext) if frame.code == _SEND_MESSAGE else read_send_v2(frame.ext)


def store_batch(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """Store a large batch in pieces of work, between which other clients are served, and return the response."""
    pieces = yield from broker.sending.storing_batch(_send_header(frame), frame.body, connection.born_host)
    host_hex = broker.store.store_host.hex().upper()
    ids: list[str] = []
    for placed in pieces[:1] if FIRST_ID in frame.ext else pieces:
        ids.append(_batch_ids(frame, host_hex, placed.positions or []))
        yield
    first = pieces[0]
    sent = encode_sent(reply_type(frame), frame.opaque, ",".join(ids), first.queue_id, first.queue_offset, REGION)
    return [sent]


def _batch_ids(frame: Frame, host_hex: str, positions: list[int]) -> str:
    """Return the ids of a batch's messages, separated by commas; only the first id if the sender does not need the
    others, as with Rocketlet's Spark sink."""
    if FIRST_ID in frame.ext:
        positions = positions[:1]
    return ",".join([f"{host_hex}%016X"] * len(positions)) % tuple(positions)


def _sent_ext(ids: str, queue_id: int, queue_offset: int) -> Ext:
    return {**REGION_EXT, "msgId": ids, "queueId": queue_id, "queueOffset": queue_offset}


def _transaction_ext(frame: Frame) -> Ext:
    """Return the transaction id of a half message, which Java's TransactionSendResult takes from the response.

    Apache's broker of 5.x sends the id for every message. Here only half messages get it, because clients do not read
    the id of other messages, and finding it would cost each send a search.
    """
    header = read(SendMessage, frame.ext) if frame.code == _SEND_MESSAGE else read_send_v2(frame.ext)
    unique_key = props.find(header.properties, props.UNIQUE_KEY)
    return {"transactionId": unique_key} if unique_key else {}


def send_back(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CONSUMER_SEND_MSG_BACK: retry a message that a consumer could not handle, or dead-letter it."""
    broker.retries.send_back(read(SendBack, frame.ext))
    return answer(frame)


# ------------------------------------------------------------------------------
# PULL_MESSAGE: the outcomes of a pull as Apache's response codes.


_PYTHON: Final = int(Language.PYTHON)  # Python 3.11 takes 0.2 us to find a member of an enum
# response code of each outcome, and a remark with Apache's name of the outcome (GetMessageStatus)
_PULL_CODES: Final[Mapping[PullStatus, tuple[int, str]]] = {
    PullStatus.NO_MATCH: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
    PullStatus.AT_END: (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE"),
    PullStatus.EMPTY: (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE"),
    PullStatus.EMPTIED: (ResponseCode.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE"),
    PullStatus.BELOW: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL"),
    PullStatus.BEYOND: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    PullStatus.RECREATED: (ResponseCode.PULL_OFFSET_MOVED, TOPIC_RECREATED),
}


def pull_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    header = read(PullMessage, frame.ext)
    # Apache's broker returns at most 32 messages, even if more are requested (maxTransferCountOnMessageInMemory).
    is_ours = frame.language == _PYTHON
    limit = header.max_msg_nums if is_ours else min(header.max_msg_nums, FOREIGN_PULL_MESSAGES)
    generation = broker.generation.number
    pull = Pull(connection, header, limit, lambda: partial(_pull_response, connection, small(frame)))
    pulled = broker.pulling.pull(pull, lambda: request_membership(broker, connection, frame, header[:3]))
    if pulled is None:
        return None
    if pulled.outcome is PullStatus.FOUND:
        connection.pulls.keep(connection, frame, broker.pulling.kept(pull, generation))
    return _encode_pulled(frame, pulled)


def encode_repeated(kind: int, opaque: int, pulled: Pulled) -> Buffers:
    """Return the response to a pull that repeats a checked one, in the encoding of the pull."""
    return _encode_pulled(Frame(RequestCode.PULL_MESSAGE, opaque, serialize_type=kind), pulled)


def _pull_response(connection: RemotingConnection, frame: Frame, outcome: Pulled | PullFault) -> None:
    """Respond to a pull that was not answered immediately."""
    if isinstance(outcome, Pulled):
        connection.write(_encode_pulled(frame, outcome))
    elif isinstance(outcome, Refusal):
        connection.write(response_error(outcome).answer(frame))
    else:
        connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(outcome)))


def _encode_pulled(frame: Frame, pulled: Pulled) -> Buffers:
    outcome, next_offset, begin, end, pieces = pulled
    if outcome is PullStatus.FOUND:
        size = sum(map(len, pieces))
        return [encode_found_head(reply_type(frame), frame.opaque, (next_offset, begin, end), size), *pieces]
    code, remark = _PULL_CODES[outcome]
    return answer(frame, code, write(PullMessageResult(0, next_offset, begin, end)), remark=remark)


# ------------------------------------------------------------------------------
# Request-reply: SEND_REPLY_MESSAGE stores a reply in the reply topic, and sends it to the client that waits for it, if that
# client is connected.


REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"


def send_reply(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """Store a reply and send it to the client that the property REPLY_TO_CLIENT names. The response follows when that client
    has responded: code 0, or 1 if it fails, disconnects or does not respond in time. A reply without the property is not
    stored. A reply to a client that is gone is stored, and its response is code 1. Raises Refusal for a reply that is too
    large, StoreFull, and LimitExceeded if too many requests are open, although the reply is stored then."""
    is_v2 = frame.code == RequestCode.SEND_REPLY_MESSAGE_V2
    header = read_send_v2(frame.ext) if is_v2 else read(SendMessage, frame.ext)
    client_id = props.find(header.properties, REPLY_TO_CLIENT)
    if client_id is None:
        remark = f"the reply has no property {REPLY_TO_CLIENT}, so no client can receive it"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    if len(frame.body) > MAX_BODY_BYTES:
        raise too_large("reply", frame.body)
    store = broker.store
    queue = store.queue(reply_topic(broker.config.cluster), 0)
    with broker.appender.batch() as now_ms:
        text = props.appended(header.properties, PUSH_REPLY_TIME, str(now_ms))
        born_ms, born_host = header.born_timestamp, connection.born_host
        position, offset = broker.appender.stage(
            queue, frame.body, property_bytes(text), 0, header.flag, header.sys_flag, born_ms, born_host
        )
    ext: Ext = {
        "msgId": offset_id(store.store_host, position),
        "queueId": 0,
        "queueOffset": offset,
        "MSG_REGION": REGION,
        "TRACE_ON": "true",
    }
    waiting = broker.clients.session_of(client_id)
    if waiting is None or waiting.is_closed:
        remark = f"push reply message fail, channel of <{client_id}> not found."
        return answer(frame, ResponseCode.SYSTEM_ERROR, ext, remark=remark)

    def answered(reply: Answer | None) -> None:
        code = ResponseCode.SUCCESS if reply is not None and reply.is_ok else ResponseCode.SYSTEM_ERROR
        remark = None if code == 0 else f"push reply message to {client_id}fail."
        failed = partial(answer, frame, ResponseCode.SERVICE_NOT_AVAILABLE, ext, remark="the reply may not be stored")
        write_answer = partial(connection.write, answer(frame, code, ext, remark=remark))
        broker.when_kept(write_answer, lambda: connection.write(failed()))

    push = _push(header, text, _host(connection.born_host), _host(store.store_host), now_ms)
    body, frame = frame.body, small(frame)  # the client's response may take seconds, so keep only what is needed
    broker.client_requests.send(waiting, ReplyWanted(push, body), answered, by=connection)
    return None


def _push(header: SendMessage, text: str, born_host: str, store_host: str, now_ms: int) -> PushReply:
    return PushReply(
        header.producer_group,
        header.topic,
        header.default_topic,
        header.default_topic_queue_nums,
        header.queue_id,
        header.sys_flag,
        header.born_timestamp,
        header.flag,
        text,
        header.reconsume_times,
        header.unit_mode,
        born_host,
        store_host,
        now_ms,
    )


def _host(data: bytes) -> str:
    host, port = decode_host(data)
    return f"{host}:{port}"


# ------------------------------------------------------------------------------
# RECALL_MESSAGE: a producer cancels a message that waits for its delivery time.


_RECALL_CODES = {
    RecallFault.ILLEGAL_HANDLE: ResponseCode.ILLEGAL_OPERATION,
    RecallFault.NOT_WAITING: ResponseCode.NO_MESSAGE,
}


def recall_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """RECALL_MESSAGE. The response follows when the recall is stored or refused."""
    header = read(RecallMessage, frame.ext)
    if broker.topics.get(header.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{header.topic}] not exist")
    recall = yield from recalling(broker.timers, broker.config.name, header.topic, header.recall_handle)
    return _recall_response(frame, recall)


def _recall_response(frame: Frame, recall: Recall) -> Buffers:
    if recall.fault is not None:
        return answer(frame, _RECALL_CODES[recall.fault], remark=recall.reason)
    return answer(frame, ext={"msgId": recall.unique_key})


# ------------------------------------------------------------------------------
# END_TRANSACTION: the outcome of a half message.


def end_transaction(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    header = read(EndTransaction, frame.ext)
    # the producer does not know the outcome yet, so the broker checks later; no response, as with Apache's broker
    if header.commit_or_rollback == 0:
        return None
    if header.commit_or_rollback not in (SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK):
        remark = f"commitOrRollback is {header.commit_or_rollback}; 8 commits, 12 rolls back, 0 waits"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    fault = broker.transactions.end(header)
    if fault:
        if connection.is_news("transaction_not_ended"):
            transactions_log.warning("transaction_not_ended", peer=connection.peer, reason=fault.reason)
        code = ResponseCode.TRANSACTION_FAILED if fault.ended else ResponseCode.SYSTEM_ERROR
        return answer(frame, code, {OUTCOME: fault.ended} if fault.ended else {}, remark=fault.reason)
    return answer(frame)


# ------------------------------------------------------------------------------
# Messages by id and by key: VIEW_MESSAGE_BY_ID and QUERY_MESSAGE.
#
# A search by a key reads the topic's messages of the requested times, newest first and up to SEARCHED_ENTRIES, in pieces, so
# that sends need no key index. One search of a client runs at a time (`FairQueue`), and its other requests are served
# meanwhile.


_NO_INDEX: Ext = {"indexLastUpdateTimestamp": 0, "indexLastUpdatePhyoffset": 0}


def view_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    position = read(LogOffset, frame.ext).offset
    data = broker.store.record_bytes_at(position)
    if data is None:
        remark = f"can not find message by the offset, {position}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    return answer_pieces(frame, {}, [data], "")


def query_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> None:
    """QUERY_MESSAGE. The response follows when the search has finished. Raises LimitExceeded if too many searches of the
    client wait."""
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
    connection: RemotingConnection, frame: Frame, search: Search, header: QueryMessage, limit: int, size: int
) -> Work[None]:
    connection.charge(-size)
    try:
        reply = yield from _encode_found(connection, frame, search, header, limit)
    except StoreError as error:
        reply = answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=str(error))
    except Exception as error:  # a defect of the broker: log it, and return an error to the client
        searches_log.exception("request_failed", request="QUERY_MESSAGE", peer=connection.peer)
        reply = answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=f"{type(error).__name__}: {error}")
    connection.write(reply)


def _encode_found(
    connection: RemotingConnection, frame: Frame, search: Search, header: QueryMessage, limit: int
) -> Work[Buffers]:
    """Return the response with up to `limit` messages that have the key, oldest first; the newest ones if there are
    more, or if they exceed `MAX_QUERY_BYTES`. It is an error response if no message was found."""
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
    if search.is_partial:
        remark = (
            f"none of the newest {SEARCHED_ENTRIES} messages has the key; request an earlier or shorter range of times"
        )
        return answer(frame, ResponseCode.SYSTEM_ERROR, _NO_INDEX, remark=remark)
    remark = "can not find message, maybe time range not correct"
    return answer(frame, ResponseCode.QUERY_NOT_FOUND, _NO_INDEX, remark=remark)


def _has_key(properties: str, key: str) -> bool:
    keys = (props.find(properties, props.KEYS) or "").split(" ")
    return key in keys or props.find(properties, props.UNIQUE_KEY) == key
