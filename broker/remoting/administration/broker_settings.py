"""The broker's settings, as with mqadmin's getBrokerConfig and updateBrokerConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import orjson
import structlog

from ....protocol import admin_bodies
from ....protocol.bodies import BodyError
from ....protocol.codes import MAX_PERM, ResponseCode
from ....protocol.frame import Frame
from ...broker import BrokerController
from ...config import MAX_QUEUES_PER_TOPIC, MAX_RETAIN_HOURS, MAX_TRANSACTION_TIMEOUT_S, BrokerConfig, within
from ..connection import RemotingConnection
from ..responses import Buffers, answer

log = structlog.get_logger("rocketlet.admin")


# The settings that may be changed while the broker runs: by Apache's name, the field of BrokerConfig, the conversion
# from text, and the minimum and maximum.
_SETTINGS: dict[str, tuple[str, Callable[[str], float], float, float]] = {
    "brokerPermission": ("permission", int, 0, MAX_PERM),
    "autoCreateTopicEnable": ("auto_create_topics", lambda text: text == "true", 0, 1),
    "autoCreateSubscriptionGroup": ("auto_create_groups", lambda text: text == "true", 0, 1),
    "defaultTopicQueueNums": ("default_queues", int, 1, MAX_QUEUES_PER_TOPIC),
    "fileReservedTime": ("retain_hours", float, 0, MAX_RETAIN_HOURS),
    "transactionTimeOut": ("transaction_timeout_s", lambda text: int(text) / 1000, 0, MAX_TRANSACTION_TIMEOUT_S),
}


def settings(config: BrokerConfig) -> dict[str, object]:
    """Return the settings that Apache's broker has, too, by Apache's names."""
    ours = asdict(config)
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


def broker_config(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    version = orjson.dumps({"counter": broker.settings.changes, "timestamp": broker.statistics.boot_ms}).decode()
    return answer(frame, ext={"version": version}, body=admin_bodies.encode_properties(settings(broker.config)))


def update_broker_config(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """UPDATE_BROKER_CONFIG: apply all settings, or none if one is invalid. Changes last until the broker stops."""
    wanted = admin_bodies.decode_properties(frame.body)
    changed = asdict(broker.config)
    for name, text in wanted.items():
        if name not in _SETTINGS:
            remark = f"{name} cannot be changed while the broker runs; these can: {', '.join(_SETTINGS)}"
            return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)
        field, convert, low, high = _SETTINGS[name]
        try:
            changed[field] = within(name, convert(text), low, high)
        except (ValueError, OverflowError):
            raise BodyError(f"{name}: {text[:40]!r} is not a number") from None
    broker.change_config(BrokerConfig(**changed))
    log.info("settings_changed", **wanted)
    return answer(frame)


def clean(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CLEAN_EXPIRED_CONSUMEQUEUE and DELETE_EXPIRED_COMMITLOG: start to delete expired segments now."""
    broker.tasks.spawn(broker.expire_segments())
    return answer(frame)
