"""Prolongs messages that are still in our hands, a third of their time after they came or were prolonged last.

A message that nobody has taken by then is given back: another member may be waiting for it. A handler that takes minutes is
named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ...protocol.codes import RequestCode, ResponseCode, code_name
from ...protocol.frame import Frame
from ...protocol.headers import HeaderError, read
from ...protocol.pop_headers import ChangedInvisibleTime
from ...protocol.popped import Receipt
from ..config import OFFSET_TIMEOUT_S, RENEWALS
from ..lease import clock_s
from ..log import get_logger
from ..message import Message
from ..wire.cluster import Cluster
from .deliveries import SharedDelivery
from .settling import change_ext

log = get_logger("rocketlet.sharing")


class Renewing:
    """`in_hand`: by message. `is_unwanted(delivery)`: whether nobody has taken it, so that it was given back."""

    def __init__(
        self, cluster: Cluster, group: str, invisible_s: float, is_unwanted: Callable[[SharedDelivery], bool]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._invisible_s = invisible_s
        self._is_unwanted = is_unwanted
        self.in_hand: dict[Message, SharedDelivery] = {}

    async def run(self) -> None:
        step_s = self._invisible_s / RENEWALS
        while True:
            await asyncio.sleep(step_s / 4)
            due_s = clock_s() + self._invisible_s - step_s
            try:
                for delivery in list(self.in_hand.values()):
                    if delivery.lease.ends_s < due_s and not delivery.is_renewing:
                        self._look_at(delivery)
            except Exception:  # any: without this task every message would come again
                log.exception("renewals_failed", group=self._group)

    def _look_at(self, delivery: SharedDelivery) -> None:
        if self._is_unwanted(delivery):
            self.in_hand.pop(delivery.message, None)
        else:
            self._renew(delivery)
            self._name(delivery)

    def _renew(self, delivery: SharedDelivery) -> None:
        connection = self._cluster.connected(delivery.receipt.broker_name)
        if connection is None:
            return
        delivery.is_renewing = True
        connection.call(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            change_ext(self._group, delivery, self._invisible_s),
            b"",
            partial(self._answered, delivery, clock_s()),
            connection.running_s() + OFFSET_TIMEOUT_S,
        )

    def _answered(self, delivery: SharedDelivery, asked_s: float, answer: Frame | Exception) -> None:
        delivery.is_renewing = False
        settle, delivery.settle = delivery.settle, None
        if isinstance(answer, Frame):
            self._take(delivery, asked_s, answer)
        else:
            log.info("renewal_failed", message=delivery.message.message_id, reason=str(answer))
        if settle is not None:
            settle()

    def _take(self, delivery: SharedDelivery, asked_s: float, answer: Frame) -> None:
        fault = f"{code_name(answer.code)}: {answer.remark}" if answer.code else ""
        if not answer.code:
            try:
                changed = read(ChangedInvisibleTime, answer.ext)
            except HeaderError as error:
                fault = str(error)
            else:
                delivery.renewed(_changed(delivery.receipt, changed), asked_s, self._invisible_s)
                return
        if answer.code == ResponseCode.NO_MESSAGE:  # somebody else has it, or it is done
            delivery.lease.end()
            self.in_hand.pop(delivery.message, None)
        hint = "it is handled a second time, perhaps at the same time"
        log.warning("message_lost", message=delivery.message.message_id, reason=fault, hint=hint)

    def _name(self, delivery: SharedDelivery) -> None:
        stood_s = clock_s() - delivery.since_s
        if stood_s >= self._limits.standing_s and stood_s >= 2 * (delivery.named_s - delivery.since_s):
            delivery.named_s = clock_s()
            message = delivery.message
            log.warning(
                "handler_stands",
                group=self._group, message=message.message_id, queue=str(message.queue), seconds=round(stood_s, 1),
                hint="it holds up nothing but this message",
            )  # fmt: skip


def _changed(receipt: Receipt, to: ChangedInvisibleTime) -> Receipt:
    """Apache's brokers void the old one."""
    return receipt._replace(
        start_offset=receipt.offset, pop_ms=to.pop_time, invisible_ms=to.invisible_time, revive_qid=to.revive_qid
    )
