"""gRPC requests of lite consumers: SyncLiteSubscription, and the settings of lite clients."""

from __future__ import annotations

from typing import Any, Final

from ...protocol.bodies import GroupConfig, Work
from ...protocol.config import MAX_LITE_NAME_CHARS, MAX_SYNCED_LITE_TOPICS
from ...protocol.group_bodies import LiteAction, LiteOffset, OffsetPolicy
from ..pops.lite_subscriptions import LiteSync
from .calls import GrpcCall, set_status
from .clients import HandlerContext
from .schema import Code, StatusError, SyncLiteSubscriptionResponse, group_of, topic_of

LITE_PUSH_CONSUMER, LITE_SIMPLE_CONSUMER = 5, 6
LITE_CLIENTS: Final = (LITE_PUSH_CONSUMER, LITE_SIMPLE_CONSUMER)

_POLICIES: Final = (OffsetPolicy.LAST, OffsetPolicy.MIN, OffsetPolicy.MAX)
_OPTIONS: Final = {
    "offset": OffsetPolicy.OFFSET,
    "tail_n": OffsetPolicy.TAIL,
    "timestamp": OffsetPolicy.TIMESTAMP,
}


def sync_lite_subscription(context: HandlerContext, call: GrpcCall, request: Any) -> Work[None]:
    """Change the lite topics that a client is subscribed to. Clients repeat all of them, which may be many thousands. Raises
    StatusError, Refusal."""
    topic, name = topic_of(request.topic), group_of(request.group)
    if not 0 <= request.action < len(LiteAction):
        raise StatusError(Code.BAD_REQUEST, f"action: got {request.action}; expected 0 to {len(LiteAction) - 1}")
    lite = context.broker.pops.lite
    action, names = LiteAction(request.action), dict.fromkeys(request.lite_topic_set).keys()
    offset = _offset(request) if request.HasField("offset_option") else None
    group = lite.group_of(name, topic, action)
    if group is not None:
        client = context.clients.record_call(call)
        context.broker.ensure_retry_topic(group, client)
        client.group = name
        context.broker.pops.pools.clients.record_contact(call.client)
        yield from lite.sync(LiteSync(call.client, client, name, topic, action, names, offset))
    response = SyncLiteSubscriptionResponse()
    set_status(response.status)
    if not call.is_over:
        call.answer(response)


def _offset(request: Any) -> LiteOffset:
    option = request.offset_option
    kind = option.WhichOneof("offset_type")
    if kind is None or kind == "policy":
        return LiteOffset(_POLICIES[option.policy] if 0 <= option.policy < len(_POLICIES) else OffsetPolicy.LAST)
    return LiteOffset(_OPTIONS[kind], getattr(option, kind))


def bind_lite_group(context: HandlerContext, settings: Any) -> GroupConfig:
    """Return the settings of the group of a lite client. Where groups are created automatically, a new group is bound to the
    client's topic. Raises StatusError or Refusal if the client's settings do not fit the group."""
    entries = settings.subscription.subscriptions
    if len(entries) != 1:
        raise StatusError(Code.BAD_REQUEST, f"a lite consumer has one topic, got {len(entries)}")
    return context.broker.pops.lite.bind(group_of(settings.subscription.group), topic_of(entries[0].topic))


def fill_lite(subscription: Any, group: GroupConfig) -> None:
    """Add the limits that lite clients read from their settings."""
    subscription.lite_subscription_quota = group.lite_quota if group.lite_quota >= 0 else MAX_SYNCED_LITE_TOPICS
    subscription.max_lite_topic_size = MAX_LITE_NAME_CHARS
