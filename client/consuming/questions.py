"""Answers a broker's questions on behalf of an administrator: state, offsets, new offsets, a trial of a message."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol

from ...protocol import admin_bodies, bodies
from ...protocol.admin_bodies import RunningQueue
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.message import MessageError, decode_record
from ...protocol.queue import Queue
from ...protocol.schema import BodyError
from ...protocol.subscription import Subscription
from ..config import MAX_TRIED_AT_ONCE
from ..log import get_logger
from ..message import Message
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from .handling import Outcome, Reject
from .process_queue import ProcessQueue

log = get_logger("rocketlet.questions")

CLIENT_VERSION: Final = "V4_9_8"  # printed by mqadmin, which knows only Apache's names
_TOPIC: Final = "topic"


class Asked(Protocol):
    """The consumer that answers."""

    group: str
    subscriptions: Mapping[str, Subscription]

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]: ...

    @property
    def settings(self) -> Mapping[str, str]: ...

    def reset(self, offsets: Mapping[Queue, int]) -> None: ...

    async def try_one(self, message: Message) -> Outcome: ...


class Questions:
    """Registers itself for the requests; one for another group is answered with an error. spawn: runs what answers later, and
    ends it when the consumer stops."""

    def __init__(self, cluster: Cluster, asked: Asked, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._asked = asked
        self._spawn = spawn
        self._tried_now = 0
        answers: Mapping[int, Callable[[Connection, Frame], None]] = {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._offsets,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._try,
        }
        for code, answer in answers.items():
            cluster.answer(code, partial(self._checked, answer))

    def _checked(self, answer: Callable[[Connection, Frame], None], connection: Connection, frame: Frame) -> None:
        group = frame.ext.get("group") or frame.ext.get("consumerGroup")
        fault = None if group == self._asked.group else f"this client is not a member of the group {group}"
        try:
            if fault is None:
                answer(connection, frame)
        except (BodyError, MessageError) as error:
            fault = str(error)
        if fault is not None:
            log.warning("request_of_broker_refused", reason=fault)
            if not frame.is_oneway:
                connection.respond(frame, ResponseCode.SYSTEM_ERROR, remark=fault)

    def _reset(self, connection: Connection, frame: Frame) -> None:
        """A queue of ours goes on from the offset that is given; the others are their owners' business."""
        offsets = admin_bodies.decode_offsets(frame.body)
        mine = {queue: offset for queue, offset in offsets.items() if queue in self._asked.queues}
        log.info("offsets_reset", group=self._asked.group, queues=len(mine))
        self._asked.reset(mine)

    def _offsets(self, connection: Connection, frame: Frame) -> None:
        topic = frame.ext.get(_TOPIC)
        offsets = {
            queue: process_queue.commit_offset
            for queue, process_queue in self._asked.queues.items()
            if topic in (None, queue.topic)
        }
        connection.respond(frame, body=admin_bodies.encode_client_status(offsets))

    def _running_info(self, connection: Connection, frame: Frame) -> None:
        asked = self._asked
        queues = {
            queue: RunningQueue(
                process_queue.commit_offset,
                process_queue.messages,
                process_queue.size_bytes,
                process_queue.lease.epoch > 0,
                process_queue.is_dropped,
                process_queue.pull.began_ms,
            )
            for queue, process_queue in asked.queues.items()
        }
        properties = {"PROP_CLIENT_VERSION": CLIENT_VERSION, "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY", **asked.settings}
        subscriptions = map(bodies.encode_subscription, asked.subscriptions.values())
        connection.respond(frame, body=admin_bodies.encode_running_info(properties, subscriptions, queues))

    def _try(self, connection: Connection, frame: Frame) -> None:
        if self._tried_now >= MAX_TRIED_AT_ONCE:
            connection.respond(frame, ResponseCode.SYSTEM_BUSY, remark=f"{MAX_TRIED_AT_ONCE} messages are being tried")
            return
        record = decode_record(frame.body, errors="replace")
        queue = Queue(record.topic, str(frame.ext.get("brokerName", "")), record.queue_id)
        self._tried_now += 1
        self._spawn(self._tried(connection, frame, Message(record, queue, record.topic)))

    async def _tried(self, connection: Connection, frame: Frame, message: Message) -> None:
        began_s = time.monotonic()
        remark = ""
        try:
            outcome = await self._asked.try_one(message)
            result = "CR_SUCCESS" if outcome is None else "CR_LATER"
            if isinstance(outcome, Reject):
                remark = "rejected: it would go to the dead-letter topic"
        except (KeyboardInterrupt, GeneratorExit):  # the latter: the loop is gone
            raise
        except BaseException as error:  # a handler may cancel itself; the administrator waits for the answer
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        finally:
            self._tried_now -= 1
        spent_ms = int((time.monotonic() - began_s) * 1000)
        orderly = self._asked.settings.get("PROP_CONSUMEORDERLY") == "true"
        connection.respond(frame, body=admin_bodies.encode_direct_result(result, remark, spent_ms, orderly=orderly))
