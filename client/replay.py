"""Sends a stored message again as it is: body, tag, keys, its sender's properties and id.

`Producer.resend` is for services: it sends as any message is sent. This is for administrators: the bytes stay as they are
stored, compressed or not, and it may send to a group's retry topic, which a producer must not.
"""

from __future__ import annotations

import random
import time

from ..protocol import names
from ..protocol import properties as props
from ..protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_MASK, RequestCode
from ..protocol.headers import SendMessage, write
from .cluster import Cluster
from .message import Message

GROUP = "rocketlet-replay"
_KEPT = frozenset((props.KEYS, props.TAGS, props.UNIQUE_KEY))


async def send_again(cluster: Cluster, message: Message, group: str | None) -> str:
    """To the topic that the message was first sent to, or with `group` to its retry topic, which only that group reads.

    Returns the new offset id. Raises RocketletError.
    """
    own = {name: value for name, value in message.properties.items() if name in _KEPT or name not in props.RESERVED}
    if group is not None:
        own[props.RETRY_TOPIC] = message.origin  # by which a consumer knows which topic it stands for
    topic = names.retry_topic(group) if group is not None else message.origin
    queue = random.choice(await cluster.route_to_publish(topic, 1))
    header = SendMessage(
        producer_group=GROUP,
        topic=topic,
        default_topic=names.DEFAULT_TOPIC,
        default_topic_queue_nums=1,
        queue_id=queue.queue_id,
        sys_flag=message.record.sys_flag & (SYS_COMPRESSED | SYS_COMPRESSION_MASK),
        born_timestamp=int(time.time() * 1000),
        flag=message.record.flag,
        properties=props.encode(own),
    )
    connection = await cluster.broker(queue.broker_name)
    answer = await connection.request(RequestCode.SEND_MESSAGE, write(header), message.record.body)
    return str(answer.ext["msgId"])
