"""Hands a message back to its broker, which delivers it again or keeps it as a dead letter."""

from __future__ import annotations

import asyncio

from ...protocol.admin_answers import decode_groups
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.group_config import decode_group
from ...protocol.headers import GroupOnly, SendBack, write
from ..config import MAX_RECONSUME_TIMES, OFFSET_TIMEOUT_S
from ..errors import BrokerRefused, RocketletError
from ..log import get_logger
from ..message import Message
from ..wire.answers import body_of
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from .reasons import shown

log = get_logger("rocketlet.handler")


class RetryLimit:
    """How often a message is retried in order, which its member counts: `fixed` times, or as often as the group's settings at
    the message's broker say."""

    def __init__(self, cluster: Cluster, group: str, fixed: int | None) -> None:
        self._cluster = cluster
        self._group = group
        self._fixed = fixed
        self._known: dict[str, tuple[int, float]] = {}  # by broker name: the limit, and when it was asked for

    async def at(self, broker_name: str) -> int:
        """Return the limit at a broker. Without an answer, return the last one that is known, or 16."""
        if self._fixed is not None:
            return self._fixed
        known, now_s = self._known.get(broker_name), asyncio.get_running_loop().time()
        if known is not None and now_s - known[1] < self._cluster.limits.group_settings_s:
            return known[0]
        try:
            limit = max(await self._ask(broker_name), 0)
        except RocketletError as error:
            limit = known[0] if known is not None else MAX_RECONSUME_TIMES
            log.warning(
                "group_settings_unknown", group=self._group, broker=broker_name, reason=str(error), retries=limit
            )
        self._known[broker_name] = limit, now_s
        return limit

    async def _ask(self, broker_name: str) -> int:
        connection = await self._cluster.broker(broker_name)
        ext = write(GroupOnly(self._group))
        try:
            answer = await connection.request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, ext, timeout_s=OFFSET_TIMEOUT_S)
        except BrokerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return await self._ask_for_all(connection)
        return body_of(answer, decode_group).retry_max_times

    async def _ask_for_all(self, connection: Connection) -> int:
        """4.9 tells the settings of all groups, not of one."""
        answer = await connection.request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, timeout_s=OFFSET_TIMEOUT_S)
        settings = body_of(answer, decode_groups).get(self._group)
        return settings.retry_max_times if settings is not None else MAX_RECONSUME_TIMES


async def hand_back(
    cluster: Cluster, group: str, message: Message, delay_level: int, reason: str, tries: int | None
) -> None:
    """`tries`: how often it may be retried; None: as often as the group's settings say. Raises RocketletError."""
    connection = await cluster.broker(message.queue.broker_name)
    header = SendBack(
        message.physical_offset,
        group,
        delay_level,
        message.message_id,
        message.topic,
        False,
        tries,
        shown(reason) or None,
    )
    await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


__all__ = ["RetryLimit", "hand_back"]
