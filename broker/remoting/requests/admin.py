"""Administration of the broker and its topics: what mqadmin lists and sets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import orjson
import structlog

from ....protocol import admin_bodies
from ....protocol.codes import MAX_PERM, VERSION, ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import ProducerGroup, ViewStats, read
from ....protocol.schema import BodyError
from ....protocol.work import Work
from ...broker import Broker
from ...config import (
    MAX_NAMED_MEMBERS,
    MAX_QUEUES_PER_TOPIC,
    MAX_RETAIN_HOURS,
    MAX_TRANSACTION_TIMEOUT_S,
    BrokerConfig,
    within,
)
from ...messages.statistics import GOT, PUT
from ...running.machine import resident_bytes
from ..answers import Buffers, answer
from ..connection import Connection

log = structlog.get_logger("rocketlet.admin")

# Apache's names of the settings that may be changed while the broker runs, what each sets, and between which values.
_SETTINGS: dict[str, tuple[str, Callable[[str], Any], float, float]] = {
    "brokerPermission": ("permission", int, 0, MAX_PERM),
    "autoCreateTopicEnable": ("auto_create_topics", lambda text: text == "true", 0, 1),
    "autoCreateSubscriptionGroup": ("auto_create_groups", lambda text: text == "true", 0, 1),
    "defaultTopicQueueNums": ("default_queues", int, 1, MAX_QUEUES_PER_TOPIC),
    "fileReservedTime": ("retain_hours", float, 0, MAX_RETAIN_HOURS),
    "transactionTimeOut": ("transaction_timeout_s", lambda text: int(text) / 1000, 0, MAX_TRANSACTION_TIMEOUT_S),
}


def all_delay_offsets(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    table = {str(level): offset for level, offset in broker.delays.progress.items()}
    return answer(frame, body=orjson.dumps({"offsetTable": table}))


def settings(config: BrokerConfig) -> dict[str, Any]:
    """The settings by Apache's names where it has the same, the others by ours."""
    ours = {item.name: getattr(config, item.name) for item in fields(config)}
    apache = {
        "brokerName": config.name,
        "brokerClusterName": config.cluster,
        "brokerId": 0,
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": config.address.rpartition(":")[0].strip("[]"),
        "listenPort": config.address.rpartition(":")[2],
        "flushDiskType": "SYNC_FLUSH" if config.flush == "sync" else "ASYNC_FLUSH",
        "storePathRootDir": config.data_dir,
        "namesrvAddr": ";".join(config.name_servers),
        "maxMessageSize": 4 * 1024 * 1024,
        "enablePropertyFilter": "true",
    }
    for name, (field, *_) in _SETTINGS.items():
        value = ours[field]
        if name == "transactionTimeOut":
            value = int(value * 1000)
        apache[name] = str(value).lower() if isinstance(value, bool) else value
    return apache


def broker_config(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    version = orjson.dumps({"counter": broker.settings.changes, "timestamp": broker.statistics.boot_ms}).decode()
    return answer(frame, ext={"version": version}, body=admin_bodies.encode_properties(settings(broker.config)))


def update_broker_config(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Applies all settings or none. They last until the broker stops."""
    wanted = admin_bodies.decode_properties(frame.body)
    changes: dict[str, Any] = {}
    for name, text in wanted.items():
        if name not in _SETTINGS:
            remark = f"{name} cannot be changed while the broker runs; these can: {', '.join(_SETTINGS)}"
            return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)
        field, convert, low, high = _SETTINGS[name]
        try:
            changes[field] = within(name, convert(text), low, high)
        except (ValueError, OverflowError):
            raise BodyError(f"{name}: {text[:40]!r} is not a number") from None
    broker.change_config(replace(broker.config, **changes))
    log.info("settings_changed", **wanted)
    return answer(frame)


def runtime_info(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """GET_BROKER_RUNTIME_INFO: what clusterList and brokerStatus print."""
    stats, store = broker.statistics, broker.store
    totals = yield from stats.totals()
    got_rates = stats.rates(GOT, totals)
    table: dict[str, Any] = {
        "brokerVersionDesc": "V4_9_8",
        "brokerVersion": VERSION,
        "bootTimestamp": stats.boot_ms,
        "putTps": stats.rates(PUT, totals),
        "getTransferedTps": got_rates,
        "getTransferredTps": got_rates,  # as 5.x spells it
        "getTotalTps": got_rates,
        "getFoundTps": got_rates,
        "getMissTps": "0.0 0.0 0.0",
        "runtime": _spelled(broker.clock.time_ms() - stats.boot_ms),
        "earliestMessageTimeStamp": store.earliest_ms(),
        "commitLogMinOffset": store.begin,
        "commitLogMaxOffset": store.end,
        "commitLogDiskRatio": round(store.disk_ratio(), 4),
        "pageCacheLockTimeMills": 0,
        "remainHowManyDataToFlush": "0 B",
        "dispatchBehindBytes": 0,
        "residentBytes": resident_bytes(),  # from here to `members` they are ours
        "writeFault": store.write_fault() or "",
        "clockAheadSeconds": round(broker.retention_time.ahead_s),
        "leases": len(broker.locks),
        "refusedHeartbeats": _json(broker.refusals.recent()[-MAX_NAMED_MEMBERS:]),
        "refusedRequests": _json(broker.acl.recent()[-MAX_NAMED_MEMBERS:] if broker.acl else []),
        "certificates": _json({path.name: int(at_s) for path, at_s in broker.tls.expires_s.items()}),
        "members": sum(len(group.members) for group in broker.groups),
        "server": f"rocketlet, Python {sys.version.split()[0]}",
    }
    for pool in ("send", "pull", "query", "endTransaction"):
        table[f"{pool}ThreadPoolQueueSize"] = 0
        table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = 0
    for name, key in (("Put", PUT), ("Get", GOT)):
        yesterday, morning, now = stats.sums(key, totals)
        table[f"msg{name}TotalYesterdayMorning"] = yesterday
        table[f"msg{name}TotalTodayMorning"] = morning
        table[f"msg{name}TotalTodayNow"] = now
    return answer(frame, body=admin_bodies.encode_table({name: str(value) for name, value in table.items()}))


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _spelled(duration_ms: int) -> str:
    """As Apache's StoreStatsService.getFormatRuntime."""
    minutes, seconds = divmod(duration_ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def view_stats(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """VIEW_BROKER_STATS_DATA: how many messages were put into a topic, or got by a group."""
    header = read(ViewStats, frame.ext)
    if header.stats_name not in (PUT, GOT):
        remark = f"The stats <{header.stats_name}> not exist; TOPIC_PUT_NUMS and GROUP_GET_NUMS do"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    stats = broker.statistics
    rates = {
        "statsMinute": stats.rate(*header, 60),
        "statsHour": stats.rate(*header, 3600),
        "statsDay": stats.today(*header),
    }
    value = {name: {"avgpt": 0.0, "sum": rate.total, "tps": rate.per_second} for name, rate in rates.items()}
    return answer(frame, body=orjson.dumps(value))


def clean(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CLEAN_EXPIRED_CONSUMEQUEUE and DELETE_EXPIRED_COMMITLOG: drops now what is expired."""
    broker.tasks.spawn(broker.expire_segments())
    return answer(frame)


def all_producers(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    return answer(frame, body=(yield from admin_bodies.encode_all_producers(broker.clients.all_producers())))


def producer_connections(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    name = read(ProducerGroup, frame.ext).producer_group
    infos = broker.clients.producers(name)
    if not infos:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"the producer group[{name}] not exist")
    return answer(frame, body=(yield from admin_bodies.encode_producer_connections(infos)))
