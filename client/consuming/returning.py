"""Hands a message back to its broker, which delivers it again or keeps it as a dead letter."""

from __future__ import annotations

from ...protocol.codes import RequestCode
from ...protocol.headers import SendBack, write
from ..config import MAX_RECONSUME_TIMES, OFFSET_TIMEOUT_S
from ..message import Message
from ..wire.cluster import Cluster
from .reasons import shown


async def hand_back(
    cluster: Cluster, group: str, message: Message, delay_level: int, reason: str, tries: int | None
) -> None:
    """`tries`: how often it may be tried; None: as often as Apache's clients say. Raises RocketletError."""
    connection = await cluster.broker(message.queue.broker_name)
    header = SendBack(
        message.physical_offset,
        group,
        delay_level,
        message.message_id,
        message.topic,
        False,
        MAX_RECONSUME_TIMES if tries is None else tries,
        shown(reason) or None,
    )
    await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


__all__ = ["hand_back"]
