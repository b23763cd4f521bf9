"""Reads the answers of brokers and name servers to administration: the counterpart of `admin_bodies`.

Apache's brokers of 4.9 and 5.3 write the same bodies with more fields; fields that are not named here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from .bodies import TopicConfig, read_queue, read_topic
from .group_config import GroupConfig, read_group
from .queue import Queue
from .schema import answers
from .subscription import TAG


class MemberConnection(NamedTuple):
    """A connected client. `address` is `ip:port`, `version` a number such as 409 (V4_9_8)."""

    client_id: str
    address: str
    language: str
    version: int


class GroupConnections(NamedTuple):
    """The members of a consumer group at one broker; `subscriptions` maps topics to filter expressions."""

    members: tuple[MemberConnection, ...]
    subscriptions: Mapping[str, str]
    consume_type: str
    message_model: str
    consume_from: str


@answers("group settings")
def decode_groups(data: Any) -> dict[str, GroupConfig]:
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
    return {str(name): read_group(item) for name, item in (data.get("subscriptionGroupTable") or {}).items()}


@answers("group settings")
def decode_group_tables(data: Any) -> dict[str, dict[str, Any]]:
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG, with the fields of each group as the broker wrote them."""
    return {str(name): dict(item) for name, item in (data.get("subscriptionGroupTable") or {}).items()}


@answers("topic settings")
def decode_topic_config(data: Any) -> TopicConfig:
    """GET_TOPIC_CONFIG."""
    return read_topic(data)


@answers("delay offsets")
def decode_delay_offsets(data: Any) -> dict[int, int]:
    """GET_ALL_DELAY_OFFSET: by level."""
    return {int(level): int(offset) for level, offset in (data.get("offsetTable") or {}).items()}


@answers("group list")
def decode_group_list(data: Any) -> list[str]:
    """QUERY_TOPIC_CONSUME_BY_WHO."""
    return [str(item) for item in data.get("groupList") or ()]


@answers("table")
def decode_table(data: Any) -> dict[str, str]:
    """A KVTable, such as GET_BROKER_RUNTIME_INFO's."""
    return {str(name): str(value) for name, value in (data.get("table") or {}).items()}


def _connection(data: Mapping[str, Any]) -> MemberConnection:
    address = str(data["clientAddr"]).lstrip("/")
    return MemberConnection(str(data["clientId"]), address, str(data["language"]), int(data["version"]))


@answers("consumer connections")
def decode_consumer_connections(data: Any) -> GroupConnections:
    """GET_CONSUMER_CONNECTION_LIST."""
    table = data.get("subscriptionTable") or {}
    return GroupConnections(
        tuple(sorted(map(_connection, data.get("connectionSet") or ()))),
        {str(topic): str(item.get("subString") or "*") for topic, item in table.items()},
        str(data.get("consumeType") or ""),
        str(data.get("messageModel") or ""),
        str(data.get("consumeFromWhere") or ""),
    )


@answers("producers")
def decode_all_producers(data: Any) -> dict[str, tuple[MemberConnection, ...]]:
    """GET_ALL_PRODUCER_INFO: connected producers by group."""
    return {
        str(group): tuple(
            MemberConnection(
                str(item["clientId"]), str(item["remoteIP"]).lstrip("/"), str(item["language"]), int(item["version"])
            )
            for item in items
        )
        for group, items in (data.get("data") or {}).items()
    }


class Running(NamedTuple):
    """A member's report on itself. `commit_offsets` has the queues that it owns, `versions` those of its subscriptions,
    `kinds` TAG or SQL92."""

    subscriptions: Mapping[str, str]
    commit_offsets: Mapping[Queue, int]
    properties: Mapping[str, str]
    versions: Mapping[str, int]
    kinds: Mapping[str, str]


@answers("running consumer")
def decode_running(data: Any) -> Running:
    """GET_CONSUMER_RUNNING_INFO."""
    subscriptions = data.get("subscriptionSet") or ()
    return Running(
        {str(item["topic"]): str(item.get("subString") or "*") for item in subscriptions},
        {
            read_queue(orjson.loads(key)): int(item.get("commitOffset", 0))
            for key, item in (data.get("mqTable") or {}).items()
            if not item.get("droped")
        },
        {str(name): str(value) for name, value in (data.get("properties") or {}).items()},
        {str(item["topic"]): int(item.get("subVersion") or 0) for item in subscriptions},
        {str(item["topic"]): str(item.get("expressionType") or TAG) for item in subscriptions},
    )


@answers("group history")
def decode_report(data: Any) -> dict[str, Any]:
    """GET_GROUP_HISTORY, which only Rocketlet's brokers answer."""
    lists = ("members", "lag", "owners", "disagreements", "events")
    found = {name: list(data[name]) for name in lists}
    return {"full": [], **data, **found, "broker": str(data["broker"])}


@answers("accounts")
def decode_accounts(data: Any) -> dict[str, Any]:
    """GET_BROKER_CLUSTER_ACL_CONFIG."""
    return {**data}
