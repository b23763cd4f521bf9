"""The clients that messages are in the hands of, of those for which the broker prolongs the time."""

from __future__ import annotations

from collections.abc import Iterator

from ..clock import Clock
from ..config import MAX_RENEWED_S, POP_CLIENT_SILENT_S, RENEWAL_STEPS_S
from .deliveries import QueueDeliveries
from .states import Delivery, DeliveryState


class Hands:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[str, dict[Delivery, QueueDeliveries]] = {}
        self._heard_s: dict[str, float] = {}

    def heard(self, client_id: str) -> None:
        """Anything was heard of the client."""
        if client_id in self._of:
            self._heard_s[client_id] = self._clock.monotonic_s()

    def give(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        client_id = delivery.client_id
        if client_id not in self._of:
            self._of[client_id] = {}
            self._heard_s[client_id] = self._clock.monotonic_s()
        self._of[client_id][delivery] = deliveries

    def take(self, delivery: Delivery) -> None:
        """Takes a delivery out of its client's hands, or ends its prolonging."""
        delivery.renewals = -1
        held = self._of.get(delivery.client_id)
        if held is not None and held.pop(delivery, None) is not None and not held:
            del self._of[delivery.client_id], self._heard_s[delivery.client_id]

    def prolonged_s(self, delivery: Delivery) -> float | None:
        """The new deadline of a delivery whose time is over; None if it is not prolonged."""
        if delivery.renewals < 0 or not self._is_heard(delivery.client_id):
            return None
        now_s, end_s = self._clock.monotonic_s(), delivery.since_s + MAX_RENEWED_S
        if now_s >= end_s:
            return None
        step_s = RENEWAL_STEPS_S[min(delivery.renewals, len(RENEWAL_STEPS_S) - 1)]
        delivery.renewals += 1
        return min(now_s + step_s, end_s)

    def _is_heard(self, client_id: str) -> bool:
        heard_s = self._heard_s.get(client_id)
        return heard_s is not None and self._clock.monotonic_s() - heard_s < POP_CLIENT_SILENT_S

    def silent(self) -> list[str]:
        """The clients that nothing was heard of for too long."""
        return [client_id for client_id in self._of if not self._is_heard(client_id)]

    def of(self, client_id: str) -> Iterator[tuple[QueueDeliveries, Delivery]]:
        """The deliveries that the broker prolongs for a client."""
        for delivery, deliveries in list(self._of.get(client_id, {}).items()):
            if delivery.state is DeliveryState.IN_FLIGHT:
                yield deliveries, delivery
