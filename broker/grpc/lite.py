"""gRPC requests of lite consumers: SyncLiteSubscription, and the settings of lite clients."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import structlog

from ...protocol.bodies import LITE_BIND, GroupConfig
from ...protocol.config import MAX_LITE_NAME_CHARS
from ...protocol.names import lite_name_fault
from ..config import MAX_SYNCED_LITE_TOPICS
from ..pops.lite import LiteAction, LiteOffset, LiteSync, OffsetPolicy, SyncFault
from .clients import GrpcCall, HandlerContext, set_status
from .schema import Code, StatusError, SyncLiteSubscriptionResponse, group_of, topic_of

log = structlog.get_logger("rocketlet.grpc")

LITE_PUSH_CONSUMER, LITE_SIMPLE_CONSUMER = 5, 6
LITE_CLIENTS: Final = (LITE_PUSH_CONSUMER, LITE_SIMPLE_CONSUMER)

_POLICIES: Final = (OffsetPolicy.LAST, OffsetPolicy.MIN, OffsetPolicy.MAX)
_OPTIONS: Final = {
    "offset": OffsetPolicy.OFFSET,
    "tail_n": OffsetPolicy.TAIL,
    "timestamp": OffsetPolicy.TIMESTAMP,
}
_CODES: Final = {
    SyncFault.NOT_BOUND: Code.ILLEGAL_TOPIC,
    SyncFault.OVER_QUOTA: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    SyncFault.BROKER_FULL: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    SyncFault.WILDCARD: Code.BAD_REQUEST,
}


def sync_lite_subscription(context: HandlerContext, call: GrpcCall, request: Any) -> Any:
    """Change the lite topics that a client is subscribed to. A client sends all of them every 30 s."""
    topic, name = topic_of(request.topic), group_of(request.group)
    if not 0 <= request.action < len(LiteAction):
        raise StatusError(Code.BAD_REQUEST, f"action: got {request.action}; expected 0 to {len(LiteAction) - 1}")
    action = LiteAction(request.action)
    names = dict.fromkeys(request.lite_topic_set).keys()
    if len(names) > MAX_SYNCED_LITE_TOPICS:
        reason = f"the request has {len(names)} lite topics; expected up to {MAX_SYNCED_LITE_TOPICS}"
        raise StatusError(Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED, reason)
    if action in (LiteAction.PARTIAL_ADD, LiteAction.COMPLETE_ADD):
        for lite_topic in names:
            if fault := lite_name_fault(lite_topic):
                raise StatusError(Code.ILLEGAL_LITE_TOPIC, fault)
    offset = _offset(request) if request.HasField("offset_option") else None
    group = lite_group(context, name, topic)
    client = context.clients.hear(call)
    client.group = name
    context.broker.pops.pools.record_contact(call.client)
    fault_found = context.broker.pops.lite.sync(group, LiteSync(call.client, client, topic, action, names, offset))
    if fault_found is not None:
        raise StatusError(_CODES[fault_found], f"{fault_found.value}: group {name}, topic {topic}")
    response = SyncLiteSubscriptionResponse()
    set_status(response.status)
    return response


def _offset(request: Any) -> LiteOffset:
    option = request.offset_option
    kind = option.WhichOneof("offset_type")
    if kind is None or kind == "policy":
        return LiteOffset(_POLICIES[option.policy] if 0 <= option.policy < len(_POLICIES) else OffsetPolicy.LAST)
    value = getattr(option, kind)
    if value < 0:
        raise StatusError(Code.ILLEGAL_OFFSET, f"{kind}: got {value}; expected 0 or more")
    return LiteOffset(_OPTIONS[kind], value)


def lite_group(context: HandlerContext, name: str, topic: str) -> GroupConfig:
    """Return the settings of a lite group. Where groups are created automatically, a group that is new is bound to the
    topic. Raises StatusError if it is not bound to it."""
    broker = context.broker
    if broker.topics.get(topic) is None:
        hint = f"create it with `rocketlet topics create {topic} --lite`"
        raise StatusError(Code.TOPIC_NOT_FOUND, f"No topic route info of {topic}: {hint}")
    if not broker.lites.is_parent(topic):
        hint = "lite consumers need a topic of the type LITE, such as `rocketlet topics create NAME --lite` makes"
        raise StatusError(Code.ILLEGAL_TOPIC, f"the topic {topic} is not of the type LITE: {hint}")
    group = broker.group_configs.ensure(name)
    if group is None:
        raise StatusError(Code.CONSUMER_GROUP_NOT_FOUND, f"the group {name} does not exist: create it first")
    if not group.lite_topic and broker.config.auto_create_groups and not _is_used(context, name):
        group = msgspec.structs.replace(group, attributes={**group.attributes, LITE_BIND: topic})
        broker.group_configs.put(group)
        log.info("group_bound", group=name, topic=topic)
    if group.lite_topic != topic:
        now = f"bound to {group.lite_topic}" if group.lite_topic else "not a lite group"
        hint = f"use another group, or set its attribute {LITE_BIND}"
        raise StatusError(Code.ILLEGAL_TOPIC, f"the group {name} is {now}, not bound to {topic}: {hint}")
    return group


def _is_used(context: HandlerContext, name: str) -> bool:
    """Return True if the group has consumed something as a group that is not a lite group."""
    group = context.broker.groups.get(name)
    return group is not None and bool(group.members or group.offsets)


def settle_lite(context: HandlerContext, settings: Any) -> GroupConfig:
    """Return the settings of the group of a lite client. Raises StatusError if the client's settings do not fit it."""
    entries = settings.subscription.subscriptions
    if len(entries) != 1:
        raise StatusError(Code.BAD_REQUEST, f"a lite consumer has one topic, got {len(entries)}")
    return lite_group(context, group_of(settings.subscription.group), topic_of(entries[0].topic))


def fill_lite(subscription: Any, group: GroupConfig) -> None:
    """Add what lite clients read of their group's settings."""
    subscription.lite_subscription_quota = group.lite_quota if group.lite_quota >= 0 else MAX_SYNCED_LITE_TOPICS
    subscription.max_lite_topic_size = MAX_LITE_NAME_CHARS
