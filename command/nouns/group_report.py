"""`rocketlet groups show`: a report on a consumer group from all brokers, as text or JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from ...client.admin.admin_client import AdminClient, LiteGroup
from ...client.errors import BrokerRefused
from ...protocol.codes import ResponseCode
from ...protocol.group_bodies import SHARED_OWNER
from ...protocol.names import counted
from ...protocol.settings import group_report, listed_settings
from ..plumbing.output import Output

FOLLOW_S = 0.5
Settings = Mapping[str, Mapping[str, str | int]]
"""The settings of a group by broker name, as `group_report` returns them."""

LONGEST = 10  # lite topics that the report lists


async def report(
    admin: AdminClient, group: str, output: Output, *, timeline: bool = False, follow: bool = False
) -> None:
    """Print the report: with `timeline` also the group's events, and with `follow`, too, new events until interrupted.

    Raises RocketletError.
    """
    try:
        reports = await admin.history(group)
    except BrokerRefused as error:
        if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise
        await _foreign_report(admin, group, output)
        return
    if not any(item.get(what) for item in reports for what in ("members", "events", "lag")):
        await admin.group(group)  # raises if the group does not exist
    lite = await _lite_report(admin, group, (member["clientId"] for item in reports for member in item["members"]))
    _show(group, reports, await _settings(admin, group), lite, output, timeline=timeline)
    while follow and timeline:
        seen = {orjson.dumps(event) for event in _events(reports)}
        await asyncio.sleep(FOLLOW_S)
        reports = await admin.history(group)
        _show_events([event for event in _events(reports) if orjson.dumps(event) not in seen], output)


async def handlers(admin: AdminClient, group: str, output: Output) -> None:
    """Print the handlers of a group's members that are running, with their stacks, longest first. Raises RocketletError."""
    connections = await admin.connections(group)
    running = await admin.running(group, connections=connections)
    silent = {member.client_id for known in connections.values() for member in known.members} - running.keys()
    calls = [(client_id, handler) for client_id, member in running.items() for handler in member.handlers]
    for client_id, handler in sorted(calls, key=lambda call: -call[1].age_ms):
        if output.as_json:
            output.json({"member": client_id, **msgspec.to_builtins(handler)})
        output.text(f"{client_id}: {handler.named()}", *(f"    at {place}" for place in reversed(handler.stack)))
    for client_id in sorted(silent):
        if output.as_json:
            output.json({"member": client_id, "error": "no response"})
        output.text(
            f"{client_id}: no response; the member has left, or its event loop is blocked, such as by a handler"
        )
    if not calls and not silent:
        output.text("no handler of a Rocketlet member is running; other clients do not report theirs")


class _LiteReport(NamedTuple):
    """The unfinished messages of a lite group, and the number of lite topics that each member is subscribed to."""

    group: LiteGroup
    subscriptions: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.group.topic,
            "wildcard": self.group.is_wildcard,
            "messages": self.group.messages,
            "inFlight": self.group.in_flight,
            "oldestMs": self.group.oldest_ms,
            "subscriptions": self.subscriptions,
            "longest": [
                {
                    "liteTopic": item.name,
                    "messages": item.messages,
                    "inFlight": item.in_flight,
                    "oldestMs": item.oldest_ms,
                }
                for item in self.group.longest[:LONGEST]
            ],
        }


async def _lite_report(admin: AdminClient, group: str, client_ids: Iterable[str]) -> _LiteReport | None:
    lite = await admin.lite_group(group, most=LONGEST)
    if lite is None:
        return None
    return _LiteReport(lite, await admin.lite_subscriptions(group, lite.topic, dict.fromkeys(client_ids)))


async def _foreign_report(admin: AdminClient, group: str, output: Output) -> None:
    """Print the report with Apache's brokers: without events, and with the owners that members report."""
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
    lite = await _lite_report(admin, group, members)
    settings = await _settings(admin, group)
    if output.as_json:
        listed = [{"client_id": client_id, **member} for client_id, member in members.items()]
        value = {"group": group, "settings": settings, "members": listed, "owners": owners, "lag": lag, "events": []}
        output.json(value if lite is None else value | {"lite": lite.as_json()})
    _show_members(group, members, owners, lite, output)
    _show_settings(settings, output)
    _show_lag(lag, output)
    _show_lite(lite, output)


def _events(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of all brokers, oldest first."""
    return sorted(
        ({"broker": item["broker"], **event} for item in reports for event in item["events"]),
        key=lambda event: event["ms"],
    )


async def _settings(admin: AdminClient, group: str) -> Settings:
    return {broker: group_report(config) for broker, config in sorted((await admin.group_configs(group)).items())}


def _show(
    group: str,
    reports: list[dict[str, Any]],
    settings: Settings,
    lite: _LiteReport | None,
    output: Output,
    *,
    timeline: bool,
) -> None:
    events = _events(reports) if timeline else []
    if output.as_json:
        summary = [{name: value for name, value in item.items() if name != "events"} for item in reports]
        value = {"group": group, "settings": settings, "brokers": summary, "events": events}
        output.json(value if lite is None else value | {"lite": lite.as_json()})
        return
    members = {member["clientId"]: member for item in reports for member in item["members"]}
    _show_members(group, members, [owner for item in reports for owner in item["owners"]], lite, output)
    _show_settings(settings, output)
    _show_lag([entry for item in reports for entry in item.get("lag", ())], output)
    _show_lite(lite, output)
    for queue in sorted({queue for item in reports for queue in item["full"]}):
        output.text(f"  {queue}: brokers return no new messages, because too many are popped and not acknowledged")
    for topic in sorted({topic for item in reports for topic in item["limited"]}):
        output.text(f"  {topic}: limited by the rate of the group")
    for fault in sorted({fault for item in reports for fault in item["disagreements"]}):
        output.text(f"  disagreement: {fault}")
    _show_events(events, output)


def _show_members(
    group: str, members: dict[str, Any], owners: list[dict[str, Any]], lite: _LiteReport | None, output: Output
) -> None:
    shared = [owner for owner in owners if owner["clientId"] == SHARED_OWNER]
    held = (
        [counted(len(owners) - len(shared), "queue locked", "queues locked")]
        if len(owners) > len(shared) or not shared
        else []
    )
    held += [counted(len(shared), "queue shared", "queues shared")] if shared else []
    if lite is not None:  # its members share no queues
        every = "every lite topic" if lite.group.is_wildcard else "lite topics"
        held = [f"{every} of {lite.group.topic}"]
    output.text(f"group {group}: {', '.join([counted(len(members), 'member'), *held])}")
    for client_id, member in sorted(members.items()):
        mine = sorted(
            f"{owner['topic']}@{owner['brokerName']}:{owner['queueId']}"
            for owner in owners
            if owner["clientId"] == client_id
        )
        topics = ", ".join(f"{topic} [{expression}]" for topic, expression in member["subscriptions"].items())
        own = f"  Rocketlet {member['rocketletVersion']}" if member.get("rocketletVersion") else ""
        output.text(f"  {client_id}  {member['peer'] or '-'}  {member['strategy'] or '-'}  {topics}{own}")
        if lite is not None:
            count = lite.subscriptions.get(client_id, 0)
            output.text(f"    {'every lite topic' if lite.group.is_wildcard else counted(count, 'lite topic')}")
        elif member.get("pops") and not mine:
            output.text("    shares messages")
        else:
            output.text(f"    {counted(len(mine), 'queue')}: {' '.join(mine) or '-'}")


def _show_settings(settings: Settings, output: Output) -> None:
    """Print the settings of a group, with the names of their brokers if these differ."""
    brokers: dict[str, list[str]] = {}
    for broker, values in settings.items():
        brokers.setdefault(listed_settings(values), []).append(broker)
    for text, names in brokers.items():
        where = f" at {', '.join(names)}" if len(brokers) > 1 else ""
        output.text(f"  settings{where}: {text}")


def _show_lag(lag: list[dict[str, Any]], output: Output) -> None:
    """Print the lag of the group in each topic, computed from its committed offsets."""
    now_ms = time.time() * 1000
    for topic in sorted({entry["topic"] for entry in lag}):
        entries = [entry for entry in lag if entry["topic"] == topic]
        since_ms = min((entry["oldestMs"] for entry in entries if entry["oldestMs"] is not None), default=None)
        age = _age(since_ms, now_ms)
        in_hand = sum(entry.get("inHand", 0) for entry in entries)
        in_flight = f", {in_hand} of them in flight" if in_hand else ""
        output.text(
            f"  {topic}: {counted(sum(entry['messages'] for entry in entries), 'message')} behind{in_flight}{age}"
        )


def _age(since_ms: int | None, now_ms: float) -> str:
    return "" if since_ms is None else f", the oldest stored {max(now_ms - since_ms, 0) / 1000:.1f} s ago"


def _show_lite(lite: _LiteReport | None, output: Output) -> None:
    """Print the lite topics with most messages that the group has not finished."""
    now_ms = time.time() * 1000
    for item in lite.group.longest[:LONGEST] if lite is not None else ():
        in_flight = f", {item.in_flight} of them in flight" if item.in_flight else ""
        behind = f"{counted(item.messages, 'message')} behind{in_flight}{_age(item.oldest_ms or None, now_ms)}"
        output.text(f"    lite topic {item.name}: {behind}")


def _show_events(events: list[dict[str, Any]], output: Output) -> None:
    for event in events:
        if output.as_json:
            output.json(event)
            continue
        when = time.strftime("%H:%M:%S", time.localtime(event["ms"] / 1000)) + f".{event['ms'] % 1000:03d}"
        known = ("ms", "event", "client", "broker")
        detail = " ".join(f"{key}={value}" for key, value in event.items() if key not in known)
        output.text(f"  {when}  {event['broker']:<12} {event['event']:<14} {event['client']:<36} {detail}")
