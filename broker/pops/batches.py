"""The messages that receives in order were given, by attempt. A client that did not get the answer asks again in the same
attempt, and gets the same: otherwise it would wait until the time of messages is over that it never saw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..config import LIMITS, Limits
from .deliveries import QueueDeliveries
from .states import Delivery, DeliveryState
from .values import Delivered, PopClient, PopRequest, PopResult, Why

Give = Callable[[QueueDeliveries, Delivery, PopRequest], Delivered | None]
_Key = tuple[PopClient, str, str, str]  # client, group, topic, attempt


class PopBatches:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._given: OrderedDict[_Key, list[tuple[QueueDeliveries, Delivery, int]]] = OrderedDict()

    def note(self, request: PopRequest, batch: Sequence[tuple[QueueDeliveries, Delivery]]) -> None:
        if request.attempt_id:
            self._given[_key(request)] = [(deliveries, delivery, delivery.pop_ms) for deliveries, delivery in batch]
            if len(self._given) > self._limits.max_attempt_ids:
                self._given.popitem(last=False)

    def again(self, request: PopRequest, give: Give) -> PopResult | None:
        """The messages that the attempt was given and has in flight; None if there are none."""
        given = self._given.pop(_key(request), None) if request.attempt_id else None
        if given is None:
            return None
        still = [
            (deliveries, delivery)
            for deliveries, delivery, pop_ms in given
            if delivery.state is DeliveryState.IN_FLIGHT and delivery.pop_ms == pop_ms
        ]
        found = [message for of, delivery in still if (message := give(of, delivery, request)) is not None]
        if not found:
            return None
        self.note(request, still)
        return PopResult(Why.FOUND, tuple(found), found[0].pop_ms, request.invisible_ms)


def _key(request: PopRequest) -> _Key:
    return request.client, request.group, request.topic, request.attempt_id or ""
