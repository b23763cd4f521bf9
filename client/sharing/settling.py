"""Tells brokers the outcomes of their messages.

Acknowledgements of one turn of the loop leave in one request. An acknowledgement without an answer is sent again until
nobody can be waiting for it: the message then comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import SendBack, write
from ...protocol.pop_bodies import encode_batch_acks
from ...protocol.pop_headers import AckMessage, ChangeInvisibleTime
from ...protocol.popped import Receipt
from ..config import (
    ACK_MESSAGES,
    ACK_PATIENCE_S,
    DEAD_LETTER_LEVEL,
    DELAY_LEVELS_S,
    MAX_RECONSUME_TIMES,
    OFFSET_TIMEOUT_S,
)
from ..consuming.handling import RetryLater
from ..consuming.reasons import shown
from ..errors import BrokerRefused, RocketletError
from ..lease import clock_s
from ..log import get_logger
from ..message import Message
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from .deliveries import SharedDelivery

log = get_logger("rocketlet.sharing")

_OFFSETS_SPAN: Final = 4096  # offsets that one entry of a batch spans
_GONE: Final = frozenset(
    (
        ResponseCode.NO_MESSAGE,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.INVALID_PARAMETER,
    )
)
"""Refusals that stay the same."""


class Settling:
    """`spawn` runs what waits for a broker."""

    def __init__(self, cluster: Cluster, group: str, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._spawn = spawn
        self._acks: dict[str, list[SharedDelivery]] = {}
        self._open = 0
        self._settled = asyncio.Event()
        self._settled.set()

    # Done

    def ack(self, delivery: SharedDelivery) -> None:
        """The broker is told at the end of this turn, and until it has heard it."""
        self._open += 1
        self._settled.clear()
        if delivery.is_renewing:  # Apache's brokers answer with another receipt, and the old one counts for nothing
            delivery.settle = partial(self._collect, delivery)
        else:
            self._collect(delivery)

    def _collect(self, delivery: SharedDelivery) -> None:
        name = delivery.receipt.broker_name
        waiting = self._acks.get(name)
        if waiting is None:
            waiting = self._acks[name] = []
            asyncio.get_running_loop().call_soon(self._send, name)
        waiting.append(delivery)

    def _send(self, broker_name: str) -> None:
        deliveries = self._acks.pop(broker_name, ())
        connection = self._cluster.connected(broker_name)
        if connection is None:
            self._again(deliveries)
            return
        for first in range(0, len(deliveries), ACK_MESSAGES):
            part = deliveries[first : first + ACK_MESSAGES]
            request = self._one(part[0]) if len(part) == 1 else self._batch(connection, broker_name, part)
            connection.call(
                *request, partial(self._answered, connection, part), connection.running_s() + OFFSET_TIMEOUT_S
            )

    def _one(self, delivery: SharedDelivery) -> tuple[int, dict[str, Any], bytes]:
        receipt = delivery.receipt
        topic = receipt.topic(self._group, delivery.message.topic)
        header = AckMessage(self._group, topic, receipt.queue_id, receipt.text, receipt.offset)
        return RequestCode.ACK_MESSAGE, write(header), b""

    def _batch(
        self, connection: Connection, broker_name: str, deliveries: Sequence[SharedDelivery]
    ) -> tuple[int, dict[str, Any], bytes]:
        acks = _by_pop(deliveries, is_ours=connection.speaks_msgpack)
        return RequestCode.BATCH_ACK_MESSAGE, {}, encode_batch_acks(broker_name, self._group, acks)

    def _answered(
        self, connection: Connection, deliveries: Sequence[SharedDelivery], answer: Frame | Exception
    ) -> None:
        fault: object = answer
        if isinstance(answer, Frame):
            if answer.code == ResponseCode.SUCCESS:
                self._close(len(deliveries))
                return
            fault = BrokerRefused(RequestCode.ACK_MESSAGE, answer.code, answer.remark, connection.address)
            if answer.code in _GONE:
                log.warning("ack_refused", messages=len(deliveries), reason=str(fault))
                self._close(len(deliveries))
                return
        log.info("ack_failed", messages=len(deliveries), reason=str(fault))
        self._again(deliveries)

    def _again(self, deliveries: Iterable[SharedDelivery]) -> None:
        now_s = clock_s()
        late = [delivery for delivery in deliveries if now_s > delivery.lease.ends_s + ACK_PATIENCE_S]
        if late:
            log.warning("acks_given_up", messages=len(late), hint="their broker does not answer; they come again")
            self._close(len(late))
        for delivery in deliveries:
            if delivery not in late:
                asyncio.get_running_loop().call_later(self._limits.reconnect_s, self._collect, delivery)

    def _close(self, count: int) -> None:
        self._open -= count
        if not self._open:
            self._settled.set()

    async def settled(self) -> None:
        """Returns when each broker has heard what we said."""
        await self._settled.wait()

    # Again, or never

    def retry(self, delivery: SharedDelivery, outcome: RetryLater) -> None:
        delay_s = delay_of(outcome, delivery.message)
        self._later(delivery, partial(self._until_heard, delivery, partial(self.change, delivery, delay_s)))

    def give_back(self, delivery: SharedDelivery) -> None:
        """Another member may have it at once; it was no try."""
        back = partial(self.change, delivery, 0.0, suspend=True)
        self._later(delivery, partial(self._until_heard, delivery, back))

    def reject(self, delivery: SharedDelivery, reason: str, done: Callable[[], None]) -> None:
        """`done` is called when the dead letter is kept. Until then the message is to be prolonged."""
        self._later(delivery, partial(self._reject, delivery, reason, done))

    def _later(self, delivery: SharedDelivery, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._open += 1
        self._settled.clear()

        def begin() -> None:
            self._spawn(self._counted(work()))

        if delivery.is_renewing:
            delivery.settle = begin
        else:
            begin()

    async def _counted(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._close(1)

    async def _reject(self, delivery: SharedDelivery, reason: str, done: Callable[[], None]) -> None:
        async def bury() -> None:
            await self.bury(delivery, reason)
            done()
            self.ack(delivery)

        await self._until_heard(delivery, bury)
        done()

    async def _until_heard(self, delivery: SharedDelivery, say: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await say()
                return
            except BrokerRefused as error:
                if error.code in _GONE:
                    log.info("message_elsewhere", message=delivery.message.message_id, reason=str(error))
                    return
                reason = str(error)
            except RocketletError as error:
                reason = str(error)
            if delivery.lease.is_over:
                log.warning("message_not_settled", message=delivery.message.message_id, reason=reason)
                return
            await asyncio.sleep(self._limits.reconnect_s)

    async def change(self, delivery: SharedDelivery, delay_s: float, *, suspend: bool = False) -> None:
        """The message comes again after that time. Raises RocketletError."""
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        ext = change_ext(self._group, delivery, delay_s, suspend=suspend)
        await connection.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext, timeout_s=OFFSET_TIMEOUT_S)

    async def bury(self, delivery: SharedDelivery, reason: str) -> None:
        """Keeps a copy in the group's dead-letter topic. Raises RocketletError."""
        message = delivery.message
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        header = SendBack(
            message.physical_offset,
            self._group,
            DEAD_LETTER_LEVEL,
            message.message_id,
            message.topic,
            False,
            MAX_RECONSUME_TIMES,
            shown(reason) or None,
        )
        await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


def change_ext(group: str, delivery: SharedDelivery, delay_s: float, *, suspend: bool = False) -> dict[str, Any]:
    receipt = delivery.receipt
    topic = receipt.topic(group, delivery.message.topic)
    delay_ms = round(delay_s * 1000)
    return write(ChangeInvisibleTime(group, topic, receipt.queue_id, receipt.text, receipt.offset, delay_ms, suspend))


def _by_pop(deliveries: Sequence[SharedDelivery], *, is_ours: bool) -> Sequence[tuple[str, Receipt, Sequence[int]]]:
    """Offsets by what they were popped with. Our broker knows a delivery by its queue and time alone, so that those of one
    receive are one entry; Apache's also by where the receive began in the queue."""
    entries: list[tuple[str, Receipt, list[int]]] = []
    newest: dict[object, tuple[str, Receipt, list[int]]] = {}
    for delivery in sorted(deliveries, key=lambda item: item.receipt.offset):
        receipt, topic = delivery.receipt, delivery.message.topic
        of = (topic, receipt.mark, receipt.queue_id, receipt.pop_ms, None if is_ours else receipt.start_offset)
        entry = newest.get(of)
        if entry is None or receipt.offset - entry[1].start_offset >= _OFFSETS_SPAN:
            first = receipt._replace(start_offset=receipt.offset) if is_ours else receipt
            entry = newest[of] = (topic, first, [])
            entries.append(entry)
        entry[2].append(receipt.offset)
    return entries


def delay_of(outcome: RetryLater, message: Message) -> float:
    """The seconds after which a message is to come again."""
    delay = outcome.delay
    if delay is not None:
        return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
    level = outcome.delay_level or 3 + message.reconsume_times  # as brokers do with what consumers send back
    return float(DELAY_LEVELS_S[min(level, len(DELAY_LEVELS_S)) - 1])
