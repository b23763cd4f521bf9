"""The parts of Apache's broker that matter to hand-overs: RebalanceLockManager, and the threads that carry requests out.

A lock belongs to a client id, whatever becomes of the connection, and lasts 60 s from the last request for it. It has no
epoch. Several threads carry out what one connection asks, so a later request may overtake an earlier one. Pulls have
threads of their own, and the offset that a pull carries is stored when the pull is carried out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS, BrokerHandler
from rocketlet.broker.remoting.responses import Buffers, ResponseError, answer
from rocketlet.client.config import APACHE_LEASE_S
from rocketlet.client.wire.connection import Access
from rocketlet.protocol import group_bodies
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

AS_APACHES = Access(encoding="json")  # clients take brokers that answer in JSON for Apache's
CODES = (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ, RequestCode.QUERY_CONSUMER_OFFSET)

Run = Callable[[int, Callable[[], None]], None]


def at_once(code: int, work: Callable[[], None]) -> None:
    work()


class ApacheLocks:
    """The locks of brokers that start while they are `installed`. `run(code, work)` carries a request out, when it
    likes."""

    def __init__(self, run: Run = at_once) -> None:
        self.run = run
        self._locks: dict[tuple[BrokerController, str, str, int], tuple[str, float]] = {}

    def owners(self) -> dict[tuple[str, int], str]:
        """Client id by topic and queue id."""
        return {key[2:]: client_id for key, (client_id, _) in self._locks.items()}

    @contextmanager
    def installed(self, *more: int) -> Iterator[None]:
        """more: codes of further requests that `run` carries out."""
        codes = (*CODES, *more)
        handlers = {code: (self._later(BROKER_REQUESTS[code][0]), BROKER_REQUESTS[code][1]) for code in codes}
        with mock.patch.dict(BROKER_REQUESTS, handlers):
            yield

    def _later(self, real: BrokerHandler) -> BrokerHandler:
        def handle(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> None:
            self.run(frame.code, lambda: self._carry_out(real, broker, connection, frame))

        return handle

    def _carry_out(
        self, real: BrokerHandler, broker: BrokerController, connection: RemotingConnection, frame: Frame
    ) -> None:
        reply = self._answer(real, broker, connection, frame)
        if reply is not None:  # else a pull is held
            connection.write(reply)

    def _answer(
        self, real: BrokerHandler, broker: BrokerController, connection: RemotingConnection, frame: Frame
    ) -> Buffers | None:
        if frame.code == RequestCode.LOCK_BATCH_MQ:
            request = group_bodies.decode_lock_request(frame.body)
            return answer(frame, body=group_bodies.encode_locked(dict.fromkeys(self._lock(broker, request), 0)))
        if frame.code == RequestCode.UNLOCK_BATCH_MQ:
            self._unlock(broker, group_bodies.decode_lock_request(frame.body))
            return answer(frame)
        try:
            reply = real(broker, connection, frame)
        except ResponseError as refusal:
            return refusal.answer(frame)
        assert reply is None or isinstance(reply, list)
        return reply

    def _lock(self, broker: BrokerController, request: LockRequest) -> Iterator[Queue]:
        now_s = time.monotonic()
        for queue in request.queues:
            key = (broker, request.group, queue.topic, queue.queue_id)
            client_id, locked_s = self._locks.get(key, ("", 0.0))
            if client_id in ("", request.client_id) or now_s - locked_s > APACHE_LEASE_S:
                self._locks[key] = request.client_id, now_s
                yield queue

    def _unlock(self, broker: BrokerController, request: LockRequest) -> None:
        for queue in request.queues:
            key = (broker, request.group, queue.topic, queue.queue_id)
            if self._locks.get(key, ("", 0.0))[0] == request.client_id:
                del self._locks[key]
