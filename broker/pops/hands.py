"""The clients that messages are in the hands of, of those for which the broker prolongs the time."""

from __future__ import annotations

from collections.abc import Iterator

from ..clock import Clock
from ..config import MAX_RENEWED_S, POP_CLIENT_SILENT_S, RENEWAL_STEPS_S
from .deliveries import QueueDeliveries
from .states import Delivery, DeliveryState
from .values import PopClient


class Hands:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[PopClient, dict[Delivery, QueueDeliveries]] = {}
        self._heard_s: dict[PopClient, float] = {}

    def heard(self, client: PopClient) -> None:
        """Anything was heard of the client."""
        if client in self._of:
            self._heard_s[client] = self._clock.monotonic_s()

    def give(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        client = delivery.client
        assert client is not None, "only a client's delivery is prolonged"
        if client not in self._of:
            self._of[client] = {}
            self._heard_s[client] = self._clock.monotonic_s()
        self._of[client][delivery] = deliveries

    def take(self, delivery: Delivery) -> None:
        """Takes a delivery out of its client's hands, or ends its prolonging."""
        delivery.renewals = -1
        client = delivery.client
        held = self._of.get(client) if client is not None else None
        if client is not None and held is not None and held.pop(delivery, None) is not None and not held:
            del self._of[client], self._heard_s[client]

    def prolonged_s(self, delivery: Delivery) -> float | None:
        """The new deadline of a delivery whose time is over; None if it is not prolonged."""
        if delivery.renewals < 0 or delivery.client is None or not self._is_heard(delivery.client):
            return None
        now_s, end_s = self._clock.monotonic_s(), delivery.since_s + MAX_RENEWED_S
        if now_s >= end_s:
            return None
        step_s = RENEWAL_STEPS_S[min(delivery.renewals, len(RENEWAL_STEPS_S) - 1)]
        delivery.renewals += 1
        return min(now_s + step_s, end_s)

    def _is_heard(self, client: PopClient) -> bool:
        heard_s = self._heard_s.get(client)
        return heard_s is not None and self._clock.monotonic_s() - heard_s < POP_CLIENT_SILENT_S

    def silent(self) -> list[PopClient]:
        """The clients that nothing was heard of for too long."""
        return [client for client in self._of if not self._is_heard(client)]

    def stop_renewing(self, client: PopClient, given_since_s: float) -> None:
        """Messages that were given since then may not have reached the client: their deadlines stay."""
        for delivery in self._of.get(client, ()):
            if delivery.since_s >= given_since_s:
                delivery.since_s = float("-inf")  # as if it had been extended for as long as may be

    def of(self, client: PopClient) -> Iterator[tuple[QueueDeliveries, Delivery]]:
        """The deliveries that the broker prolongs for a client."""
        for delivery, deliveries in list(self._of.get(client, {}).items()):
            if delivery.state is DeliveryState.IN_FLIGHT:
                yield deliveries, delivery
