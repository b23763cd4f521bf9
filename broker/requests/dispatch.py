"""The table from request code to handler, and the way of the frames of one socket read through it.

A handler is `handler(connection, frame)` and returns the buffers to write, or None if it answers later or never.
Sends are staged one by one and committed together, before any other request of the same read is looked at and before
anything is written: one log append and one socket write per socket read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from ...protocol.bodies import BodyError
from ...protocol.codes import RequestCode, ResponseCode, request_name
from ...protocol.frame import Frame
from ...protocol.headers import HeaderError
from ...protocol.names import IllegalName
from ..config import LimitExceeded
from ..messages import transactions
from ..nameserver import requests as nameserver
from ..net.answers import Buffers, answer
from ..store.files import StoreError, StoreFull
from . import admin, assignments, group_admin, membership, offsets, pulls, replies, searches
from .sends import Sends, send_back

if TYPE_CHECKING:
    from ..broker import Broker
    from ..nameserver.routes import Routes
    from ..net.connection import Connection
    from ..store.flusher import Flusher

log = structlog.get_logger("rocketlet.dispatch")

Handler = Callable[[Any, Frame], Buffers | None]

BROKER_HANDLERS: Mapping[int, Callable[..., Buffers | None]] = {
    RequestCode.PULL_MESSAGE: pulls.pull_message,
    RequestCode.QUERY_CONSUMER_OFFSET: offsets.query_consumer_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: offsets.update_consumer_offset,
    RequestCode.UPDATE_AND_CREATE_TOPIC: offsets.create_topic,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search_offset,
    RequestCode.GET_MAX_OFFSET: offsets.max_offset,
    RequestCode.GET_MIN_OFFSET: offsets.min_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: offsets.earliest_store_time,
    RequestCode.HEART_BEAT: membership.heartbeat,
    RequestCode.UNREGISTER_CLIENT: membership.unregister_client,
    RequestCode.CONSUMER_SEND_MSG_BACK: send_back,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: membership.consumer_list,
    RequestCode.LOCK_BATCH_MQ: membership.lock,
    RequestCode.UNLOCK_BATCH_MQ: membership.unlock,
    RequestCode.CHECK_CLIENT_CONFIG: membership.check_client,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: membership.update_group,
    RequestCode.DELETE_TOPIC_IN_BROKER: offsets.delete_topic,
    RequestCode.END_TRANSACTION: transactions.end_transaction,
    RequestCode.SEND_REPLY_MESSAGE: replies.send_reply,
    RequestCode.SEND_REPLY_MESSAGE_V2: replies.send_reply,
    RequestCode.QUERY_MESSAGE: searches.query_message,
    RequestCode.VIEW_MESSAGE_BY_ID: searches.view_message,
    RequestCode.GET_ALL_TOPIC_CONFIG: admin.all_topics,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: admin.all_groups,
    RequestCode.GET_ALL_CONSUMER_OFFSET: admin.all_consumer_offsets,
    RequestCode.GET_ALL_DELAY_OFFSET: admin.all_delay_offsets,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: admin.system_topics,
    RequestCode.GET_TOPIC_STATS_INFO: admin.topic_stats,
    RequestCode.GET_BROKER_CONFIG: admin.broker_config,
    RequestCode.UPDATE_BROKER_CONFIG: admin.update_broker_config,
    RequestCode.GET_BROKER_RUNTIME_INFO: admin.runtime_info,
    RequestCode.VIEW_BROKER_STATS_DATA: admin.view_stats,
    RequestCode.QUERY_CONSUME_QUEUE: admin.query_consume_queue,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: admin.clean,
    RequestCode.DELETE_EXPIRED_COMMITLOG: admin.clean,
    RequestCode.CLEAN_UNUSED_TOPIC: admin.clean_unused_topics,
    RequestCode.GET_ALL_PRODUCER_INFO: admin.all_producers,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: group_admin.consumer_connections,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: group_admin.producer_connections,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: group_admin.delete_group,
    RequestCode.GET_CONSUME_STATS: group_admin.consume_stats,
    RequestCode.GET_BROKER_CONSUME_STATS: group_admin.all_consume_stats,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: group_admin.consumed_by,
    RequestCode.QUERY_CONSUME_TIME_SPAN: group_admin.time_span,
    RequestCode.QUERY_CORRECTION_OFFSET: group_admin.correction_offset,
    RequestCode.CLONE_GROUP_OFFSET: group_admin.clone_offsets,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: group_admin.reset_offset,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: group_admin.consumer_status,
    RequestCode.GET_CONSUMER_RUNNING_INFO: group_admin.forward,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: group_admin.forward,
    RequestCode.QUERY_ASSIGNMENT: assignments.query_assignment,
    RequestCode.GET_GROUP_HISTORY: membership.group_history,
}
NAME_SERVER_HANDLERS: Mapping[int, Callable[..., Buffers | None]] = {
    RequestCode.REGISTER_BROKER: nameserver.register_broker,
    RequestCode.UNREGISTER_BROKER: nameserver.unregister_broker,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: nameserver.route,
    RequestCode.GET_BROKER_CLUSTER_INFO: nameserver.cluster,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: nameserver.topics,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: nameserver.delete_topic,
    RequestCode.QUERY_DATA_VERSION: nameserver.data_version,
    RequestCode.PUT_KV_CONFIG: nameserver.put_kv,
    RequestCode.GET_KV_CONFIG: nameserver.get_kv,
    RequestCode.DELETE_KV_CONFIG: nameserver.delete_kv,
    RequestCode.GET_KVLIST_BY_NAMESPACE: nameserver.kv_list,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: nameserver.wipe_write,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: nameserver.add_write,
    RequestCode.GET_TOPICS_BY_CLUSTER: nameserver.topics_of_cluster,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: nameserver.system_topics,
    RequestCode.GET_NAMESRV_CONFIG: nameserver.config,
}
SEND_CODES = frozenset((RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE))

LARGE_REPLY_BYTES = 4096

# what a client's request may cause; struct.error is a number too large for its field
_CLIENT_FAULTS = (
    HeaderError,
    BodyError,
    IllegalName,
    StoreError,
    LimitExceeded,
    OverflowError,
    UnicodeError,
    struct.error,
)


class Dispatch:
    """The handlers of what runs in this process: a broker, a name server, or both."""

    def __init__(self, broker: Broker | None, routes: Routes | None, flusher: Flusher | None = None) -> None:
        self._handlers: dict[int, Handler] = {}
        if routes is not None:
            self._handlers |= {code: partial(handler, routes) for code, handler in NAME_SERVER_HANDLERS.items()}
        self._broker = broker
        self._flusher = flusher
        self._sends = Sends(broker) if broker is not None else None
        if broker is not None:
            self._handlers |= {code: partial(handler, broker) for code, handler in BROKER_HANDLERS.items()}

    def serve(self, connection: Connection, frames: list[Frame]) -> None:
        """Answers the requests of one socket read. What a client asks while it does not read waits in its connection."""
        out: Buffers = []
        sends = self._sends
        try:
            for index, frame in enumerate(frames):
                if sends is not None and frame.code in SEND_CODES and not frame.flag & 1:
                    self._stage(sends, connection, frame, out)
                    continue
                if sends is not None and sends.staged:
                    self._settle(sends, connection, out)
                    out = []
                if frame.flag & 1:
                    if self._broker is not None:
                        self._broker.clients.answer(connection, frame)
                    continue
                reply = self._handle(connection, frame)
                if reply is not None and not frame.flag & 2:
                    out += reply
                    if (
                        len(reply[-1]) > LARGE_REPLY_BYTES
                    ):  # a pull's: written at once, so that the client's pace is felt
                        connection.write(out)
                        out = []
                        if connection.is_paused:
                            connection.keep(frames[index + 1 :])
                            break
        finally:  # what is staged belongs to this read: left over, the next client would get its answers
            if sends is not None and sends.staged:
                self._settle(sends, connection, out)
            elif out:
                connection.write(out)

    def _stage(self, sends: Sends, connection: Connection, frame: Frame, out: Buffers) -> None:
        try:
            refusal = sends.stage(connection, frame)
        except _CLIENT_FAULTS as error:
            refusal = answer(frame, _fault_code(error), remark=str(error))
        except Exception as error:
            refusal = self._failed(connection, frame, error)
        if refusal is not None and not frame.flag & 2:
            out += refusal

    def _settle(self, sends: Sends, connection: Connection, out: Buffers) -> None:
        """Commits what is staged and writes the answers, with `--flush sync` when it is on the device."""
        out += sends.settle()
        if self._flusher is None:
            connection.write(out)
        else:
            self._flusher.after_sync(partial(connection.write, out))

    def _handle(self, connection: Connection, frame: Frame) -> Buffers | None:
        handler = self._handlers.get(frame.code)
        if handler is None or (connection.is_vip and frame.code == RequestCode.PULL_MESSAGE):
            remark = f" request type {frame.code} not supported"
            return answer(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            return handler(connection, frame)
        except _CLIENT_FAULTS as error:
            self._forget_staged()
            return answer(frame, _fault_code(error), remark=str(error))
        except Exception as error:
            self._forget_staged()
            return self._failed(connection, frame, error)

    def _forget_staged(self) -> None:
        """A handler that failed between staging and committing leaves nothing for the next one to commit."""
        if self._broker is not None:
            self._broker.store.roll_back()

    def _failed(self, connection: Connection, frame: Frame, error: Exception) -> Buffers:
        log.exception("request failed", request=request_name(frame.code), peer=connection.peer)
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"{type(error).__name__}: {error}")


def _fault_code(error: Exception) -> int:
    full = isinstance(error, StoreFull)
    return ResponseCode.SERVICE_NOT_AVAILABLE if full else ResponseCode.SYSTEM_ERROR
