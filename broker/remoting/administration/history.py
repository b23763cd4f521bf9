"""GET_GROUP_HISTORY, Rocketlet's own request: the members, owners and events of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson

from ....protocol.bodies import LOOKS, SLICE, Work, listed
from ....protocol.frame import Frame
from ....protocol.group_bodies import SHARED_OWNER
from ....protocol.headers import GroupHistory, read
from ....protocol.names import Subscription
from ...broker import BrokerController
from ...groups.group import ConsumerGroup as Group
from ...groups.members import Member, shown
from ..connection import RemotingConnection
from ..responses import Buffers, answer


def group_history(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_GROUP_HISTORY, Rocketlet's own request: return the members, owners and events of a group."""
    name, since_ms, lag = read(GroupHistory, frame.ext)
    value = yield from history_of(broker, name, since_ms, lag=lag)
    parts: list[bytes] = []
    for key, item in value.items():
        if isinstance(item, list):
            parts.append(b"%b:[%b]" % (orjson.dumps(key), (yield from listed(map(orjson.dumps, item)))))
        else:
            parts.append(b"%b:%b" % (orjson.dumps(key), orjson.dumps(item)))
    return answer(frame, body=b"{%b}" % (yield from listed(parts)))


def history_of(broker: BrokerController, name: str, since_ms: int = 0, *, lag: bool = True) -> Work[dict[str, object]]:
    """Return the broker's report about a group, with events from `since_ms` on. Without `lag`, the report has no
    progress, and no message is read from the disk."""
    group = broker.groups.get(name)
    members: list[dict[str, object]] = []
    popping = broker.pops.pools.clients_of(name)
    for number, member in enumerate(list(group.members.values()) if group else (), 1):
        if not member.is_grpc_client:  # the client of this pop member is added below
            members.append(_member(member, pops=popping.pop(member.client_id, None) is not None))
        if number % SLICE == 0:
            yield
    members += [_popper(client_id, wanted) for client_id, wanted in popping.items()]
    owned = yield from _owners(broker, name, group)
    owners = [
        {"topic": topic, "brokerName": broker.config.name, "queueId": queue_id, "clientId": client_id}
        for (topic, queue_id), client_id in owned.items()
    ]
    progress: list[dict[str, object]] = []
    for topic in broker.progress.topics_of(name) if lag else ():
        messages, oldest_ms, in_hand = yield from broker.progress.lag(name, topic)
        progress.append({"topic": topic, "messages": messages, "oldestMs": oldest_ms, "inHand": in_hand})
    events: list[Mapping[str, object]] = []
    for number, event in enumerate(broker.history.since(name, since_ms), 1):
        events.append(shown(event))
        if number % SLICE == 0:
            yield
    return {
        "broker": broker.config.name,
        "members": members,
        "lag": progress,
        "owners": owners,
        "draining": broker.draining.is_pending(name),
        "full": [f"{topic}:{label}" for topic, label in broker.pops.pools.full(name)],
        "limited": broker.rates.limited(name),
        "queues": {topic: broker.topics.queues_of(topic) for topic in _subscribed(group)},
        "disagreements": sorted(group.reported) if group else [],
        "events": events,
    }


def _member(member: Member, *, pops: bool) -> dict[str, object]:
    return {
        "clientId": member.client_id,
        "peer": member.session.peer,
        "strategy": member.data.strategy,
        "rocketletVersion": member.data.own_version,
        "messageModel": member.data.message_model,
        "leaving": member.data.leaving,
        "subscriptions": {item.topic: item.expression for item in member.subscriptions.values()},
        "pops": pops,
    }


def _popper(client_id: str, wanted: Iterable[Subscription]) -> dict[str, object]:
    """Return the description of a client that pops and is no member, such as a gRPC client."""
    return {
        "clientId": client_id,
        "peer": "",
        "strategy": None,
        "messageModel": "CLUSTERING",
        "leaving": False,
        "subscriptions": {item.topic: item.expression for item in wanted},
        "pops": True,
    }


def _owners(broker: BrokerController, name: str, group: Group | None) -> Work[dict[tuple[str, int], str]]:
    """Return the client id of the owner of each owned queue, by topic and queue id: the client that has locked the queue, or
    the foreign member that reads it without a lock; `SHARED_OWNER` for queues of a topic that clients pop."""
    owners = broker.groups.owners(name)
    looks = 0
    found, now_s = broker.groups.get(name), broker.clock.monotonic_s()
    for topic in found.pools if found is not None else ():
        is_apart = found is not None and found.is_apart(topic, now_s)
        for queue_id in range(broker.topics.queues_of(topic) if is_apart else 0):
            owners.setdefault((topic, queue_id), SHARED_OWNER)
    for topic in _subscribed(group):
        for queue_id in range(broker.topics.queues_of(topic)):
            looks += 1
            if looks % LOOKS == 0:
                yield
            reader = broker.groups.queue(name, topic, queue_id).reader
            member = group.members.get(reader) if group and reader else None
            if member is not None and member.is_foreign:
                owners.setdefault((topic, queue_id), member.client_id)
    return owners


def _subscribed(group: Group | None) -> list[str]:
    return sorted(group.topics) if group else []
