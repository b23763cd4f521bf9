"""`rocketlet brokers`: lists brokers, their state and their settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ...client.admin.admin_client import AdminClient
from ...client.errors import ConfigError, ConnectionFailed, RequestTimeout, RocketletError
from ...protocol.names import counted
from ..plumbing.administration import Commands, noun, pairs, verb
from ..plumbing.output import Instant, Output, number_or

_RATES = {"put_per_s": "putTps", "get_per_s": "getTransferedTps"}  # the second is Apache's spelling


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    verbs = noun(commands, "brokers", "list brokers, show their state, change their settings")
    verb(
        verbs, "list", "list the brokers of the cluster; with Rocketlet's name servers also those that are gone", _list
    )
    show = verb(verbs, "show", "show a broker's state and settings", _show)
    show.add_argument("broker", help="the broker's name")
    forget = verb(verbs, "forget", "remove a permanently retired broker from the name servers", _forget)
    forget.add_argument("broker", help="the broker's name")
    set_ = verb(verbs, "set", "change settings of a broker; Rocketlet's brokers keep them until they stop", _set)
    set_.add_argument("broker", help="the broker's name")
    set_.add_argument("setting", nargs="+", metavar="NAME=VALUE", help="such as defaultTopicQueueNums=4")


async def _list(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    rows = []
    for broker in await admin.brokers():
        address = broker.addresses.get(0, "")
        row: dict[str, object] = {"broker": broker.name, "cluster": broker.cluster, "address": address}
        try:
            status = await admin.broker_status(address)
        except RocketletError as error:
            is_away = isinstance(error, ConnectionFailed | RequestTimeout)
            rows.append(row | {"state": "away" if is_away else "unknown", "reason": str(error)})
            continue
        rates = {name: float(next(iter((status.get(key) or "").split()), "0")) for name, key in _RATES.items()}
        used = float(status.get("commitLogDiskRatio") or 0)
        started = Instant(int(status.get("bootTimestamp") or 0))
        row |= {"state": "up", "version": shown_version(status), "started": started}
        shown = round(used, 4) if output.as_json else f"{used:.0%}"
        rows.append(row | {name: round(value, 1) for name, value in rates.items()} | {"disk_used": shown})
    for gone in await admin.departed():
        row = {"broker": gone.name, "address": gone.address, "state": "gone", "topics": gone.topics}
        rows.append(row | {"gone_since": Instant(gone.left_ms)})
    output.records(
        ("broker", "cluster", "address", "state", "version", "put_per_s", "get_per_s", "disk_used", "started"), rows
    )
    for row in rows:
        if row["state"] == "gone":
            output.text(
                f"{row['broker']} has been gone since {row['gone_since']}, with {counted(int(str(row['topics'])), 'topic')}: "
                f"start it, or `rocketlet brokers forget {row['broker']}` if it was retired for good"
            )
    return 0


def shown_version(status: Mapping[str, str]) -> str:
    """Return Rocketlet's version, or for an Apache broker that of RocketMQ, such as 4.9.8 for V4_9_8."""
    of_rocketmq = (status.get("brokerVersionDesc") or "").removeprefix("V").replace("_", ".")
    own = status.get("rocketletVersion")
    return f"Rocketlet {own} (as {of_rocketmq})" if own else of_rocketmq


async def _forget(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    await admin.forget_broker(options.broker)
    output.records(("broker", "state"), [{"broker": options.broker, "state": "forgotten"}])
    return 0


async def _address(admin: AdminClient, name: str) -> str:
    known = {broker.name: broker.addresses[0] for broker in await admin.brokers() if 0 in broker.addresses}
    if name not in known:
        raise ConfigError(f"no broker is named {name}; known: {', '.join(known) or 'none'}")
    return known[name]


async def _show(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    address = await _address(admin, options.broker)
    found = {**await admin.broker_status(address), **await admin.broker_config(address)}
    _show_settings(found, output)
    return 0


def _show_settings(settings: Mapping[str, str], output: Output) -> None:
    """Print a record for each setting, by Apache's name; numbers as such."""
    rows = [
        {"name": name, "value": number_or(value) if output.as_json else value}
        for name, value in sorted(settings.items())
    ]
    output.records(("name", "value"), rows)


async def _set(options: argparse.Namespace, admin: AdminClient, output: Output) -> int:
    settings = pairs("setting", options.setting)
    await admin.update_broker_config(await _address(admin, options.broker), settings)
    _show_settings(settings, output)
    return 0
