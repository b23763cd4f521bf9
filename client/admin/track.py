"""Finds out what became of a message in each group that reads its topic, by requests that Apache's brokers have, too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from ...protocol import names
from ...protocol import properties as props
from ...protocol.subscription import parse_subscription
from ..errors import BrokerRefused, TopicNotFound
from ..message import Message
from .admin_client import AdminClient

State = Literal["consumed", "waiting", "retry", "dead", "filtered", "unknown"]


@dataclass(frozen=True, slots=True)
class Track:
    """`state` of a message in a group:

    - `consumed`: the group is past it; `waiting`: it is not, `lag` messages of the queue come first.
    - `retry`: a handler failed, and it will be delivered again; `retries` says how often it was tried again until now.
    - `dead`: it was given up and lies in the group's dead-letter topic.
    - `filtered`: the group's subscription leaves out its tag. `unknown`: the group has no offset in its queue.
    """

    group: str
    state: State
    lag: int = 0
    retries: int = 0


async def tracks(admin: AdminClient, message: Message) -> list[Track]:
    """The tracks of a message, one for each group that reads its topic, by name. Raises RocketletError."""
    groups = await admin.consumed_by(message.topic)
    return list(await asyncio.gather(*(_track(admin, message, group) for group in groups)))


async def _track(admin: AdminClient, message: Message, group: str) -> Track:
    if await _find(admin, message, names.dlq_topic(group)):
        return Track(group, "dead")
    progress = (await admin.progress(group, message.queue.topic, times=False)).get(message.queue)
    if progress is None:
        return Track(group, "unknown")
    if progress.consumer_offset <= message.queue_offset:
        return Track(group, "waiting", lag=message.queue_offset - progress.consumer_offset)
    retried = await _retried(admin, message, group)
    if retried is not None:
        return retried
    connections = await admin.connections(group)
    expressions = {known.subscriptions.get(message.topic) for known in connections.values()} - {None}
    if expressions and not any(_takes(message, str(text)) for text in expressions):
        return Track(group, "filtered")
    return Track(group, "consumed")


def _takes(message: Message, expression: str) -> bool:
    """SQL is the broker's business: it counts as taken."""
    try:
        tags = parse_subscription(message.topic, expression).tags
    except ValueError:
        return True
    return not tags or message.tag in tags


async def _retried(admin: AdminClient, message: Message, group: str) -> Track | None:
    """The fate of a message that was handed back: it waits for its time in the broker's schedule, then in the retry
    topic."""
    topic = names.retry_topic(group)
    tries = await _find(admin, message, topic)
    waits = [
        item
        for item in await _find(admin, message, names.SCHEDULE_TOPIC)
        if item.properties.get(props.REAL_TOPIC) == topic
    ]
    if not tries and not waits:
        return None
    newest = max(tries, key=lambda item: item.reconsume_times, default=None)
    count = max(item.reconsume_times for item in (*tries, *waits))
    if newest is None or newest.reconsume_times < count:
        return Track(group, "retry", retries=count)
    progress = (await admin.progress(group, topic, times=False)).get(newest.queue)
    if progress is None or progress.consumer_offset <= newest.queue_offset:
        return Track(group, "retry", retries=count)
    return Track(group, "consumed", retries=count)


async def _find(admin: AdminClient, message: Message, topic: str) -> list[Message]:
    """The message's copies in a topic of its brokers; none in a topic that is not there."""
    try:
        return await admin.copies(message.message_id, topic)
    except (TopicNotFound, BrokerRefused):
        return []


__all__ = ["State", "Track", "tracks"]
