"""Administration of the broker and its topics: what mqadmin lists and sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import orjson
import structlog

from ....protocol import admin_bodies
from ....protocol.codes import MAX_PERM, ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import ProducerGroup, read
from ....protocol.schema import BodyError
from ....protocol.work import Work
from ...broker import Broker
from ...config import (
    MAX_QUEUES_PER_TOPIC,
    MAX_RETAIN_HOURS,
    MAX_TRANSACTION_TIMEOUT_S,
    BrokerConfig,
    within,
)
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


def clean(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CLEAN_EXPIRED_CONSUMEQUEUE and DELETE_EXPIRED_COMMITLOG: drops expired segments now."""
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
