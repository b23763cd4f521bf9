"""Renewals of visibility timeouts, acknowledgements, retries and rejections of popped messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final

from ...protocol.codes import RequestCode, ResponseCode, code_name
from ...protocol.frame import Frame
from ...protocol.group_bodies import encode_batch_acks
from ...protocol.headers import (
    AckMessage,
    ChangedInvisibleTime,
    ChangeInvisibleTime,
    HeaderError,
    SendBack,
    read,
    write,
)
from ...protocol.message import (
    Receipt,
)
from ..config import (
    ACK_MESSAGES,
    ACK_TIMEOUT_S,
    DEAD_LETTER_LEVEL,
    INVISIBLE_S,
    MAX_RECONSUME_TIMES,
    OFFSET_TIMEOUT_S,
    RENEWALS,
)
from ..consuming.handling import (
    RetryLater,
    delay_of,
    log_dead_letter,
    shown,
)
from ..errors import BrokerRefused, RocketletError, get_logger
from ..message import Message, clock_s
from ..wire.cluster import ClusterView
from ..wire.connection import Connection, header_of
from .receiving import SharedDelivery

log = get_logger("rocketlet.sharing")


# ------------------------------------------------------------------------------
# Extends the visibility timeout of a message in flight when less than two thirds of it are left until the member's
# lease of the message ends. That lease ends earlier than at the broker (`_MARGIN`), so about a quarter of the timeout
# has passed then.
#
# A message that is still waiting for a slot at that time is released, because another member may be free. Handlers that
# run for longer than `standing_s` are logged.


class Renewing:
    """Extends visibility timeouts.

    Args:
        is_unwanted: releases a delivery that waits for a slot and returns True; otherwise returns False.

    Attributes:
        in_flight: the deliveries by message.
    """

    def __init__(
        self, cluster: ClusterView, group: str, invisible_s: float, is_unwanted: Callable[[SharedDelivery], bool]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._invisible_s = invisible_s
        self._is_unwanted = is_unwanted
        self.in_flight: dict[Message, SharedDelivery] = {}

    async def run(self) -> None:
        step_s = self._invisible_s / RENEWALS
        while True:
            await asyncio.sleep(step_s / 4)
            due_s = clock_s() + self._invisible_s - step_s
            try:
                for delivery in list(self.in_flight.values()):
                    if -math.inf < delivery.lease.ends_s < due_s and not delivery.is_renewing:
                        self._renew_or_lose(delivery)
            except Exception:  # any exception, because without this task all messages in flight would be redelivered
                log.exception("renewals_failed", group=self._group)

    def _renew_or_lose(self, delivery: SharedDelivery) -> None:
        if self._is_unwanted(delivery):
            self.in_flight.pop(delivery.message, None)
        elif delivery.lease.is_over:
            self._lost(delivery, "it was not renewed in time")
        else:
            self._renew(delivery)
            self._name(delivery)

    def _renew(self, delivery: SharedDelivery) -> None:
        connection = self._cluster.connected_or_open(delivery.receipt.broker_name)
        if connection is None:
            return
        delivery.is_renewing = True
        connection.call(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            change_ext(self._group, delivery, self._invisible_s, renews=True),
            b"",
            partial(self._answered, delivery, clock_s()),
            connection.running_s() + OFFSET_TIMEOUT_S,
        )

    def _answered(self, delivery: SharedDelivery, asked_s: float, answer: Frame | Exception) -> None:
        delivery.is_renewing = False
        settle, delivery.settle = delivery.settle, None
        if isinstance(answer, Frame):
            self._apply(delivery, asked_s, answer)
        else:
            log.info("renewal_failed", message=delivery.message.message_id, reason=str(answer))
        if settle is not None:
            settle()

    def _apply(self, delivery: SharedDelivery, asked_s: float, answer: Frame) -> None:
        fault = f"{code_name(answer.code)}: {answer.remark}" if answer.code else ""
        if not answer.code:
            try:
                changed = read(ChangedInvisibleTime, answer.ext)
            except HeaderError as error:
                fault = str(error)
            else:
                if not delivery.renewed(_changed(delivery.receipt, changed), asked_s, self._invisible_s):
                    self._lost(delivery, "the response to its renewal came too late")
                return
        if answer.code == ResponseCode.NO_MESSAGE:  # another member has the message, or it is settled
            self.in_flight.pop(delivery.message, None)
            self._lost(delivery, fault)
        else:
            log.warning("renewal_failed", message=delivery.message.message_id, reason=fault)

    def _lost(self, delivery: SharedDelivery, reason: str) -> None:
        """End the lease of a delivery. The outcome of the message is still sent, and counts if the message was not
        redelivered."""
        delivery.lease.end()
        hint = "another member may handle it, too, even at the same time"
        log.warning("message_lost", message=delivery.message.message_id, reason=reason, hint=hint)

    def _name(self, delivery: SharedDelivery) -> None:
        running_s = clock_s() - delivery.since_s
        if running_s >= self._limits.standing_s and running_s >= 2 * (delivery.named_s - delivery.since_s):
            delivery.named_s = clock_s()
            message = delivery.message
            log.warning(
                "handler_stands",
                group=self._group, message=message.message_id, queue=str(message.queue), seconds=round(running_s, 1),
                hint="it occupies one of the concurrent handlers",
            )  # fmt: skip


def _changed(receipt: Receipt, to: ChangedInvisibleTime) -> Receipt:
    """Return the receipt after a renewal. Apache's brokers invalidate the previous one."""
    return receipt._replace(
        start_offset=receipt.offset, pop_ms=to.pop_time, invisible_ms=to.invisible_time, revive_qid=to.revive_qid
    )


# ------------------------------------------------------------------------------
# Sends brokers the outcomes of their messages.
#
# The acknowledgements that one event-loop iteration collects for a broker are sent together, up to 1,024 in one
# request. A message whose extension is in flight is acknowledged after the response to the extension. Acknowledgements
# without a response are resent until `ACK_TIMEOUT_S` after the message's lease has ended. The broker may redeliver the
# message from the end of the visibility timeout on.


_OFFSETS_SPAN: Final = 4096  # offsets that one entry of a batch spans
_GONE: Final = frozenset(
    (
        ResponseCode.NO_MESSAGE,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.INVALID_PARAMETER,
    )
)
"""Response codes after which a retry is useless."""


class Settling:
    """Sends acknowledgements, retries and rejections.

    Args:
        spawn: runs a coroutine in the background.
    """

    def __init__(self, cluster: ClusterView, group: str, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._spawn = spawn
        self._acks: dict[str, list[SharedDelivery]] = {}
        self._open = 0
        self._settled = asyncio.Event()
        self._settled.set()

    # Acknowledgements

    def ack(self, delivery: SharedDelivery) -> None:
        """Acknowledge a message after this event-loop iteration, or after an extension in flight. Without a response,
        repeat that until `ACK_TIMEOUT_S` after the end of its lease."""
        self._open += 1
        self._settled.clear()
        if delivery.is_renewing:  # wait, because the response may contain a new receipt that replaces the current one
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
        deliveries = self._acks.pop(broker_name, [])
        connection = self._cluster.connected_or_open(broker_name)
        if connection is None:
            self._again(deliveries)
            return
        is_lite = bool(deliveries) and deliveries[0].lite_topic is not None
        most = 1 if is_lite else ACK_MESSAGES  # brokers accept no batches for lite topics
        for first in range(0, len(deliveries), most):
            part = deliveries[first : first + most]
            request = self._one(part[0]) if len(part) == 1 else self._batch(connection, broker_name, part)
            connection.call(
                *request, partial(self._answered, connection, part), connection.running_s() + OFFSET_TIMEOUT_S
            )

    def _one(self, delivery: SharedDelivery) -> tuple[int, dict[str, Any], bytes]:
        receipt = delivery.receipt
        topic = receipt.topic(self._group, delivery.message.topic)
        header = AckMessage(self._group, topic, receipt.queue_id, receipt.text, receipt.offset, delivery.lite_topic)
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
        late = [delivery for delivery in deliveries if now_s > delivery.lease.ends_s + ACK_TIMEOUT_S]
        if late:
            log.warning(
                "acks_given_up", messages=len(late), hint="their broker does not respond; the messages are redelivered"
            )
            self._close(len(late))
        for delivery in deliveries:
            if delivery not in late:
                asyncio.get_running_loop().call_later(self._limits.reconnect_s, self._collect, delivery)

    def _close(self, count: int) -> None:
        self._open -= count
        if not self._open:
            self._settled.set()

    async def settled(self) -> None:
        """Wait until the brokers have confirmed all outcomes, or this member has stopped sending them."""
        await self._settled.wait()

    # Retries and rejections

    def retry(self, delivery: SharedDelivery, outcome: RetryLater) -> None:
        delay_s = delay_of(outcome, delivery.message)
        change = partial(self.change, delivery, delay_s, suspend=not outcome.counts)
        self._later(delivery, partial(self._retry_until_confirmed, delivery, change))

    def give_back(self, delivery: SharedDelivery) -> None:
        """Release a message, so that a member can receive it before its visibility timeout ends. At a Rocketlet broker the
        attempt does not count."""
        back = partial(self.change, delivery, 0.0, suspend=True)
        self._later(delivery, partial(self._retry_until_confirmed, delivery, back))

    def reject(self, delivery: SharedDelivery, reason: str, done: Callable[[], None]) -> None:
        """Dead-letter a message. `done` is called when the dead letter is stored, or cannot be stored any more because the
        lease has ended. Until then its visibility timeout must be extended."""
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
        async def reject() -> None:
            if await self._reject_in_one_request(delivery, reason):
                log_dead_letter(self._group, delivery.message, reason, 0)
                return
            await self.dead_letter(delivery, reason)
            log_dead_letter(self._group, delivery.message, reason, 0)
            done()
            self.ack(delivery)

        await self._retry_until_confirmed(delivery, reject)
        done()

    async def _reject_in_one_request(self, delivery: SharedDelivery, reason: str) -> bool:
        """Have the broker store the dead letter and acknowledge the message in one request. Return False if the broker
        does not support that. Raises RocketletError."""
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        if not connection.speaks_msgpack:  # only Rocketlet's brokers support a rejection in one request
            return False
        ext = change_ext(self._group, delivery, INVISIBLE_S, reject=shown(reason))
        answer = await connection.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext, timeout_s=OFFSET_TIMEOUT_S)
        return bool(header_of(answer, ChangedInvisibleTime).rejected)

    async def _retry_until_confirmed(
        self, delivery: SharedDelivery, send: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            try:
                await send()
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
        """Redeliver a message after `delay_s`. Raises RocketletError.

        Args:
            suspend: True if the attempt does not count. At an Apache broker it does count in a lite topic, because the
                broker would also suspend the messages that were popped together with this one.
        """
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        suspend = suspend and (delivery.lite_topic is None or connection.speaks_msgpack)
        ext = change_ext(self._group, delivery, delay_s, suspend=suspend)
        await connection.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext, timeout_s=OFFSET_TIMEOUT_S)

    async def dead_letter(self, delivery: SharedDelivery, reason: str) -> None:
        """Have an Apache broker store a copy in the group's dead-letter topic. Raises RocketletError."""
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


def change_ext(
    group: str,
    delivery: SharedDelivery,
    delay_s: float,
    *,
    suspend: bool = False,
    renews: bool = False,
    reject: str | None = None,
) -> dict[str, Any]:
    receipt = delivery.receipt
    topic = receipt.topic(group, delivery.message.topic)
    delay_ms = round(delay_s * 1000)
    place = topic, receipt.queue_id, receipt.text, receipt.offset
    alone = True if suspend and delivery.lite_topic is not None else None
    return write(ChangeInvisibleTime(group, *place, delay_ms, suspend, renews, reject, delivery.lite_topic, alone))


def _by_pop(deliveries: Sequence[SharedDelivery], *, is_ours: bool) -> Sequence[tuple[str, Receipt, Sequence[int]]]:
    """Group deliveries by receive and queue: return topic, receipt and offsets of each group.

    A Rocketlet broker identifies a delivery by its queue and pop time, so that deliveries of one receive from one queue form
    one entry if their offsets are near each other. Apache's brokers also use the offset at which the receive started.

    Args:
        is_ours: True for a Rocketlet broker.
    """
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
