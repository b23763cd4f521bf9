"""`rocketlet groups`: what every broker knows of a consumer group, as text or JSON."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from typing import Any

import orjson

from ..client.access import Access
from ..client.cluster import Cluster
from ..client.errors import RocketletError
from ..protocol import fastjson_text
from ..protocol.bodies import decode_cluster, encode_group, read_group
from ..protocol.codes import RequestCode
from ..protocol.headers import ConsumerGroup, write

FOLLOW_S = 0.5


async def histories(name_server: str, group: str, access: Access | None = None) -> list[dict[str, Any]]:
    """What each broker of the cluster answers of the group. Raises RocketletError."""
    cluster = Cluster(name_server, access)
    try:
        answer = await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        reports: list[dict[str, Any]] = []
        for broker in decode_cluster(answer.body):
            connection = await cluster.connection(broker.addresses[0])
            found = await connection.request(RequestCode.GET_GROUP_HISTORY, write(ConsumerGroup(group)))
            reports.append(orjson.loads(found.body))
        return reports
    finally:
        await cluster.close()


async def set_strict(group: str, name_server: str, strict: bool, access: Access | None = None) -> int:
    """Sets at every broker whether a group is strict; the exit status."""
    cluster = Cluster(name_server, access)
    try:
        answer = await cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        for broker in decode_cluster(answer.body):
            connection = await cluster.connection(broker.addresses[0])
            found = await connection.request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
            known = fastjson_text.loads(found.body)["subscriptionGroupTable"].get(group, {"groupName": group})
            body = encode_group(replace(read_group(known), strict=strict))
            await connection.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
            print(f"{broker.name}: the group {group} is {'strict' if strict else 'not strict'}")
    except RocketletError as error:
        print(f"rocketlet: {error}", file=sys.stderr)
        return 1
    finally:
        await cluster.close()
    return 0


async def report(
    group: str,
    name_server: str,
    timeline: bool,
    as_json: bool,
    *,
    follow: bool = False,
    access: Access | None = None,
) -> int:
    """Prints the report; the exit status. `follow`: and then events as they come, until interrupted."""
    try:
        reports = await histories(name_server, group, access)
        status = _print(group, reports, timeline, as_json)
        while follow and timeline:
            seen = {orjson.dumps(event) for event in _events(reports)}
            await asyncio.sleep(FOLLOW_S)
            reports = await histories(name_server, group, access)
            fresh = [event for event in _events(reports) if orjson.dumps(event) not in seen]
            if as_json:
                for event in fresh:
                    print(orjson.dumps(event).decode())
            else:
                _print_events(fresh)
            sys.stdout.flush()
    except RocketletError as error:
        print(f"rocketlet: {error}", file=sys.stderr)
        return 1
    return status


def _events(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of all brokers, oldest first."""
    return sorted(
        ({"broker": item["broker"], **event} for item in reports for event in item["events"]),
        key=lambda event: event["ms"],
    )


def _print(group: str, reports: list[dict[str, Any]], timeline: bool, as_json: bool) -> int:
    events = _events(reports)
    summary = [{name: value for name, value in item.items() if name != "events"} for item in reports]
    if as_json:
        print(orjson.dumps({"group": group, "brokers": summary, "events": events if timeline else []}).decode())
        return 0
    members = {member["clientId"]: member for item in reports for member in item["members"]}
    lag = [entry for item in reports for entry in item.get("lag", ())]
    if not members and not events and not lag:
        print(f"no broker knows the group {group}")
        return 1
    _print_members(group, members, [owner for item in reports for owner in item["owners"]])
    _print_lag(lag)
    for fault in sorted({fault for item in reports for fault in item["disagreements"]}):
        print(f"  disagreement: {fault}")
    if timeline:
        _print_events(events)
    return 0


def _print_members(group: str, members: dict[str, Any], owners: list[dict[str, Any]]) -> None:
    print(f"group {group}: {len(members)} members, {len(owners)} queues locked")
    for client_id, member in sorted(members.items()):
        mine = sorted(
            f"{owner['topic']}@{owner['brokerName']}:{owner['queueId']}"
            for owner in owners
            if owner["clientId"] == client_id
        )
        topics = ", ".join(f"{topic} [{expression}]" for topic, expression in member["subscriptions"].items())
        print(f"  {client_id}  {member['peer']}  {member['strategy'] or '-'}  {topics}")
        print(f"    {len(mine)} queues: {' '.join(mine) or '-'}")


def _print_lag(lag: list[dict[str, Any]]) -> None:
    """How far the group is behind in each topic: by its stored offsets, whether it has members or not."""
    now_ms = time.time() * 1000
    for topic in sorted({entry["topic"] for entry in lag}):
        entries = [entry for entry in lag if entry["topic"] == topic]
        since_ms = min((entry["oldestMs"] for entry in entries if entry["oldestMs"] is not None), default=None)
        age = "" if since_ms is None else f", the oldest stored {max(now_ms - since_ms, 0) / 1000:.1f} s ago"
        print(f"  {topic}: {sum(entry['messages'] for entry in entries)} messages behind{age}")


def _print_events(events: list[dict[str, Any]]) -> None:
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event["ms"] / 1000)) + f".{event['ms'] % 1000:03d}"
        known = ("ms", "event", "client", "broker")
        detail = " ".join(f"{key}={value}" for key, value in event.items() if key not in known)
        print(f"  {when}  {event['broker']:<12} {event['event']:<14} {event['client']:<36} {detail}")
