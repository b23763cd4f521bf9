"""`rocketlet groups show`: what every broker knows of a consumer group, as text or JSON."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import orjson

from ..client.admin import AdminClient
from ..client.errors import BrokerRefused
from ..protocol.codes import ResponseCode

FOLLOW_S = 0.5


async def report(admin: AdminClient, group: str, timeline: bool, as_json: bool, *, follow: bool = False) -> int:
    """Prints the report; the exit status. `follow`: and then events as they come, until interrupted.

    Raises RocketletError.
    """
    try:
        reports = await admin.history(group)
    except BrokerRefused as error:
        if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise
        return await _foreign_report(admin, group, as_json)
    status = _print(group, reports, timeline, as_json)
    while follow and timeline:
        seen = {orjson.dumps(event) for event in _events(reports)}
        await asyncio.sleep(FOLLOW_S)
        reports = await admin.history(group)
        fresh = [event for event in _events(reports) if orjson.dumps(event) not in seen]
        if as_json:
            for event in fresh:
                print(orjson.dumps(event).decode())
        else:
            _print_events(fresh)
        sys.stdout.flush()
    return status


async def _foreign_report(admin: AdminClient, group: str, as_json: bool) -> int:
    """What an Apache broker and the members themselves say: no events, and owners by their own account."""
    found, running = await admin.group(group), await admin.running(group)
    members = {
        member.client_id: {
            "peer": member.address,
            "strategy": None,
            "subscriptions": running[member.client_id].subscriptions if member.client_id in running else {},
        }
        for member in found.members
    }
    owners = [
        {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id, "clientId": client_id}
        for queue, client_id in found.owners.items()
    ]
    lag = [
        {"topic": queue.topic, "messages": max(item.lag, 0), "oldestMs": None} for queue, item in found.progress.items()
    ]
    if as_json:
        print(orjson.dumps({"group": group, "members": members, "owners": owners, "lag": lag, "events": []}).decode())
        return 0
    _print_members(group, members, owners)
    _print_lag(lag)
    return 0


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
        print(f"no broker knows the group {group}; `rocketlet groups list` shows all")
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
