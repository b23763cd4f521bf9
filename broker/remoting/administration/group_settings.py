"""Requests that read, change and delete the settings of groups."""

from __future__ import annotations

import structlog

from ....protocol import admin_bodies, bodies, names
from ....protocol.bodies import SLICE, Work, encode_group
from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import GroupName, GroupOnly, read
from ....protocol.settings import changed_group, decode_group_change, decode_group_changes
from ...broker import BrokerController
from ..connection import RemotingConnection
from ..responses import Buffers, answer

log = structlog.get_logger("rocketlet.admin")


def all_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    table = ((group.name, group) for group in broker.group_configs)
    body = yield from admin_bodies.encode_versioned(broker.group_configs.version, "subscriptionGroupTable", table)
    return answer(frame, body=body)


def one_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_SUBSCRIPTIONGROUP_CONFIG: return the settings of one group, for tools of 5.x."""
    name = read(GroupOnly, frame.ext).group
    settings = next((group for group in broker.group_configs if group.name == name), None)
    if settings is None:
        remark = f"No group in this broker. group: {name}"
        return answer(frame, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
    return answer(frame, body=encode_group(settings))


def update_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    group = changed_group(decode_group_change(frame.body), broker.group_configs.get)
    fault = names.group_fault(group.name)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    _put_group(broker, connection, group)
    log.info("group_settings_changed", group=group.name)
    return answer(frame)


def update_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST of 5.x: create or change the groups of a list; none if a name is
    invalid."""
    wanted: list[bodies.GroupConfig] = []
    for change in decode_group_changes(frame.body):
        group = changed_group(change, broker.group_configs.get)
        fault = names.group_fault(group.name)
        if fault:
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
        wanted.append(group)
    for number, group in enumerate(wanted, 1):
        _put_group(broker, connection, group)
        if number % SLICE == 0:
            yield
    log.info("group_settings_changed", count=len(wanted), first=wanted[0].name if wanted else "")
    return answer(frame)


def _put_group(broker: BrokerController, connection: RemotingConnection, group: bodies.GroupConfig) -> None:
    former = broker.group_configs.get(group.name)
    if former is not None and former.lite_topic and former.lite_topic != group.lite_topic:
        broker.pops.check_unbinding(group.name, former.lite_topic)
        broker.group_configs.put(group)
        broker.pops.lite_group_unbound(group.name, former.lite_topic)
    else:
        broker.group_configs.put(group)
    if group.lite_topic:  # other groups get their retry topic later, for example when their first member joins
        broker.ensure_retry_topic(group, connection)


def delete_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(GroupName, frame.ext)
    _delete_group(broker, header.group_name, offsets=header.remove_offset)
    return answer(frame)


def delete_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """DELETE_SUBSCRIPTIONGROUP_LIST: delete several groups, for tools of 5.5.1."""
    wanted, offsets = bodies.decode_group_names(frame.body)
    for name in wanted:
        _delete_group(broker, name, offsets=offsets)
        yield
    return answer(frame)


def _delete_group(broker: BrokerController, name: str, *, offsets: bool) -> None:
    broker.group_configs.delete(name)
    if offsets:
        broker.offsets.group_deleted(name)
        broker.pops.group_deleted(name)
    else:
        broker.pops.end_receives(name)
    log.info("group_deleted", group=name, offsets=offsets)
