"""How clients are told and asked: each event and each question of `sessions.events` as a request to a client.

These are in JSON, because their receiver may be of any kind.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ...protocol import admin_bodies, group_bodies
from ...protocol import properties as props
from ...protocol.codes import EXT_PLACES, EXT_SHARES, ONEWAY_FLAG, RequestCode
from ...protocol.frame import Ext, Frame, encode
from ...protocol.headers import CheckTransaction, ConsumerGroup, write
from ...protocol.message import Record, encode_record
from ...protocol.signature import CREDENTIALS
from ..messages.properties import real_queue
from ..messages.transactions import CHECK_TIMES
from ..sessions.events import (
    Answer,
    Asked,
    Event,
    GroupChanged,
    HandlingWanted,
    OffsetsReset,
    OffsetsWanted,
    OutcomeWanted,
    Question,
    RunningWanted,
)

_opaques = itertools.count(1)
MAX_OPAQUE = 0x7FFF_FFFF  # 32 bits with a sign, as Java clients read it


class Content(NamedTuple):
    code: int
    ext: Ext
    body: bytes = b""


def told(event: Event) -> bytes:
    """The frame of a one-way request."""
    code, ext, body = _told(event)
    return encode(Frame(code, next(_opaques) & MAX_OPAQUE, ext, body, ONEWAY_FLAG))


def asked(number: int, question: Question) -> bytes:
    """The frame of a request; its answer has the same number."""
    code, ext, body = _asked(question)
    return encode(Frame(code, number, ext, body))


def answered(frame: Frame) -> Answer:
    return Answer(frame.code == 0, frame.body, frame)


def _told(event: Event) -> Content:
    match event:
        case GroupChanged():
            return Content(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, _group_changed(event))
        case OutcomeWanted(half, checks):
            key = props.find(half.properties, props.UNIQUE_KEY)
            header = CheckTransaction(half.queue_offset, half.physical_offset, key, key, half.offset_id)
            return Content(RequestCode.CHECK_TRANSACTION_STATE, write(header), _for_producer(half, checks))
        case OffsetsReset():
            return _offsets_reset(event)


def _group_changed(event: GroupChanged) -> Ext:
    ext = {**write(ConsumerGroup(event.group, event.topic))}
    if event.places is not None:  # only Rocketlet clients look at these
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


def _asked(question: Question) -> Content:
    match question:
        case RunningWanted(by):
            return Content(RequestCode.GET_CONSUMER_RUNNING_INFO, _handed_on(by))
        case HandlingWanted(by, record):
            return Content(RequestCode.CONSUME_MESSAGE_DIRECTLY, _handed_on(by), record)
        case OffsetsWanted(group, topic):
            return Content(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": topic, "group": group})
        case _:
            return Content(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, write(question.push), question.body)


def _handed_on(by: Asked) -> Ext:
    """Leaves out the credentials of the tool, which the receiver could use."""
    fields: Ext = {name: value for name, value in by.fields.items() if name not in CREDENTIALS}
    return {**fields, "consumerGroup": by.group, "clientId": by.client_id}


def _for_producer(record: Record, checks: int) -> bytes:
    """The half message as its producer sent it."""
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
