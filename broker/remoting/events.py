"""Events and requests to clients (`sessions`), encoded as remoting requests. The headers are in JSON, which every client
can decode."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ...protocol import admin_bodies, group_bodies
from ...protocol import properties as props
from ...protocol.codes import EXT_PLACES, EXT_SHARES, ONEWAY_FLAG, RequestCode
from ...protocol.frame import Ext, Frame, encode
from ...protocol.headers import CREDENTIALS, CheckTransaction, ConsumerGroupHeader, LiteTopicTaken, write
from ...protocol.message import Record, encode_record
from ..messages.appender import real_queue
from ..messages.transactions import CHECK_TIMES
from ..sessions.events import (
    Answer,
    ClientRequest,
    ForwardedRequest,
    GroupChanged,
    HandlingWanted,
    LiteTaken,
    OffsetsReset,
    OffsetsWanted,
    OutcomeWanted,
    RunningWanted,
    SessionEvent,
)

_opaques = itertools.count(1)
MAX_OPAQUE = 0x7FFF_FFFF  # 32 bits with a sign, as Java clients read it


class Content(NamedTuple):
    code: int
    ext: Ext
    body: bytes = b""


def encode_event(event: SessionEvent) -> bytes:
    """Return the frame of a one-way request."""
    code, ext, body = _event_content(event)
    return encode(Frame(code, next(_opaques) & MAX_OPAQUE, ext, body, ONEWAY_FLAG))


def encode_request(number: int, request: ClientRequest) -> bytes:
    """Return the frame of a request. Its number identifies the client's response."""
    code, ext, body = _request_content(request)
    return encode(Frame(code, number, ext, body))


def read_response(frame: Frame) -> Answer:
    return Answer(frame.code == 0, frame.body, frame)


def _event_content(event: SessionEvent) -> Content:
    match event:
        case GroupChanged():
            return Content(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, _group_changed(event))
        case OutcomeWanted(half, checks):
            key = props.find(half.properties, props.UNIQUE_KEY)
            header = CheckTransaction(half.queue_offset, half.physical_offset, key, key, half.offset_id)
            return Content(RequestCode.CHECK_TRANSACTION_STATE, write(header), _for_producer(half, checks))
        case LiteTaken(group, lite_topic, client_id):
            return Content(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, write(LiteTopicTaken(lite_topic, group, client_id)))
        case OffsetsReset():
            return _offsets_reset(event)


def _group_changed(event: GroupChanged) -> Ext:
    ext = {**write(ConsumerGroupHeader(event.group, event.topic))}
    if event.places is not None:  # only Rocketlet clients read these fields
        ext[EXT_PLACES] = group_bodies.encode_places(event.places)
    if event.shares is not None:
        ext[EXT_SHARES] = group_bodies.encode_shares(event.shares)
    return ext


def _offsets_reset(event: OffsetsReset) -> Content:
    ext: Ext = {
        "topic": event.topic,
        "group": event.group,
        "timestamp": event.timestamp_ms,
        "isForce": event.is_force,
    }
    encode_offsets = admin_bodies.encode_offsets_for_cpp if event.is_for_cpp else admin_bodies.encode_offsets
    return Content(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, encode_offsets(event.offsets))


def _request_content(request: ClientRequest) -> Content:
    match request:
        case RunningWanted(by):
            return Content(RequestCode.GET_CONSUMER_RUNNING_INFO, _handed_on(by))
        case HandlingWanted(by, record):
            return Content(RequestCode.CONSUME_MESSAGE_DIRECTLY, _handed_on(by), record)
        case OffsetsWanted(group, topic):
            return Content(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": topic, "group": group})
        case _:
            return Content(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, write(request.push), request.body)


def _handed_on(by: ForwardedRequest) -> Ext:
    """Return the tool's header fields for the client to which the request is forwarded, with the group and client id, and
    without the tool's credentials, which the client could use."""
    fields: Ext = {name: value for name, value in by.fields.items() if name not in CREDENTIALS}
    return {**fields, "consumerGroup": by.group, "clientId": by.client_id}


def _for_producer(record: Record, checks: int) -> bytes:
    """Return the record of a half message with the topic and queue to which its producer sent it, and with the number
    of checks."""
    topic, queue_id = real_queue(record)
    name = topic.encode()
    text = props.appended(props.without(record.properties, CHECK_TIMES), CHECK_TIMES, str(checks))
    return encode_record(
        queue_id,
        record.flag,
        record.queue_offset,
        record.physical_offset,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.store_ms,
        record.store_host,
        record.reconsume_times,
        record.prepared_offset,
        record.body,
        bytes((len(name),)) + name,
        text.encode(),
    )
