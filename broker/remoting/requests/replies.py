"""Request-reply: SEND_REPLY_MESSAGE takes a reply to the client that waits for it, and keeps it in the reply topic."""

from __future__ import annotations

from functools import partial

from ....protocol import properties as props
from ....protocol.codes import RequestCode, ResponseCode
from ....protocol.config import MAX_BODY_BYTES
from ....protocol.frame import Ext, Frame
from ....protocol.headers import PushReply, SendMessage, read, read_send_v2
from ....protocol.message import decode_host, offset_id
from ....protocol.names import reply_topic
from ...broker import Broker
from ...config import REGION
from ...messages.properties import property_bytes
from ...messages.sending import too_large
from ...sessions.events import Answer, ReplyWanted
from ..answers import Buffers, answer, small
from ..connection import Connection

REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"


def send_reply(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    """Answers when the waiting client has: 0, or 1 if it is gone or does not take the reply. Raises Refused for a body or
    properties that no message may have."""
    is_v2 = frame.code == RequestCode.SEND_REPLY_MESSAGE_V2
    header = read_send_v2(frame.ext) if is_v2 else read(SendMessage, frame.ext)
    client_id = props.find(header.properties, REPLY_TO_CLIENT)
    if client_id is None:
        remark = f"the reply has no property {REPLY_TO_CLIENT}, so nobody can receive it"
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
    body, frame = frame.body, small(frame)  # the answer may be long in coming
    broker.clients.ask(waiting, ReplyWanted(push, body), answered, by=connection)
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
