"""A service that ships orders: it makes three attempts, ten minutes apart, and rejects unreadable orders."""

from __future__ import annotations

import json
from collections.abc import Callable

from rocketlet import Consumer, Message, Reject, RetryLater

TRIES = 3
TEN_MINUTES = 14  # the delay level


class CarrierDown(Exception):
    pass


class Shipping:
    """`carrier(order)` takes an order, or raises CarrierDown."""

    def __init__(self, carrier: Callable[[str], None]) -> None:
        self.shipped: set[str] = set()
        self._carrier = carrier

    def consumer(self, name_server: str) -> Consumer:
        return Consumer(name_server, "shipping", "orders", self.ship, start="first")

    async def ship(self, message: Message) -> RetryLater | Reject | None:
        try:
            order = str(json.loads(message.body)["id"])
        except (ValueError, KeyError, TypeError):
            return Reject()
        if order in self.shipped:  # delivered again
            return None
        try:
            self._carrier(order)
        except CarrierDown:
            return RetryLater(delay_level=TEN_MINUTES) if message.reconsume_times < TRIES - 1 else Reject()
        self.shipped.add(order)
        return None
