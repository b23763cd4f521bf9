"""The settings of a consumer group at a broker, which the wire calls a subscription group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from .schema import Long, Shape, Text, reads, shaped


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A consumer group's settings at a broker (UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 200). `strict` is ours: a member
    whose subscriptions differ from the others' is refused. `consume_orderly`: clients that pop get messages of one message
    group in order."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queues: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    slow_broker_id: int = 1
    notify_enable: bool = True
    strict: bool = False
    consume_orderly: bool = False


def group_json(group: GroupConfig) -> dict[str, Any]:
    return {
        "brokerId": group.broker_id,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "consumeFromMinEnable": group.consume_from_min_enable,
        "consumeMessageOrderly": group.consume_orderly,
        "groupName": group.name,
        "notifyConsumerIdsChangedEnable": group.notify_enable,
        "retryMaxTimes": group.retry_max_times,
        "retryQueueNums": group.retry_queues,
        "strict": group.strict,
        "whichBrokerWhenConsumeSlowly": group.slow_broker_id,
    }


class GroupShape(Shape):
    group_name: Text
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: Long = 1
    retry_max_times: Long = 16
    broker_id: Long = 0
    which_broker_when_consume_slowly: Long = 1
    notify_consumer_ids_changed_enable: bool = True
    strict: bool = False
    consume_message_orderly: bool = False


def read_group(data: Any) -> GroupConfig:
    """Reads a group's JSON object. Raises BodyError."""
    return _group(shaped(data, GroupShape))


def _group(data: GroupShape) -> GroupConfig:
    return GroupConfig(
        data.group_name,
        data.consume_enable,
        data.consume_from_min_enable,
        data.consume_broadcast_enable,
        data.retry_queue_nums,
        data.retry_max_times,
        data.broker_id,
        data.which_broker_when_consume_slowly,
        data.notify_consumer_ids_changed_enable,
        data.strict,
        data.consume_message_orderly,
    )


def encode_group(group: GroupConfig) -> bytes:
    return orjson.dumps(group_json(group))


def encode_altered(table: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """Return a group's JSON object with changes by the field names of GroupConfig. Fields that only other brokers have stay
    as they are. Raises BodyError."""
    return orjson.dumps({**table, **group_json(replace(read_group(table), **changes))})


@reads("subscription group", GroupShape)
def decode_group(data: GroupShape) -> GroupConfig:
    return _group(data)
