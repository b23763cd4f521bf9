"""Receives: one is under way for each topic and broker, as long as somebody waits for a message.

One that may wait at the broker takes a single place, and brings a single message. If the answer says that there are more,
the next takes as many places as there are and does not wait. In order, each brings one message: the broker gives the
next one of its message group when that is settled.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...protocol import properties as props
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.headers import HeaderError, write
from ...protocol.message import MessageError
from ...protocol.pop_headers import FROM_END, FROM_FIRST, PopMessage
from ...protocol.subscription import Subscription
from ..config import POP_MESSAGES, POP_TIMEOUT_S, POP_TURN_S, POP_WAIT_S
from ..errors import AnswerUnreadable, BrokerRefused, ConnectionFailed, RocketletError
from ..log import get_logger
from ..wire.cluster import Cluster
from .deliveries import Asked, SharedDelivery, deliveries_of
from .handout import Handout

log = get_logger("rocketlet.sharing")

_EMPTY = frozenset((ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_TIMEOUT))


Register = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A member's settings for each topic. from_first: a new group begins with the first message, else behind the last."""

    group: str
    invisible_s: float
    orderly: bool
    from_first: bool


class Source:
    """A topic at a broker. `register(address)` says there who we are. `on_arrived` is told of each message; one whose tag has
    only the hash of a wanted one goes to `on_other`."""

    def __init__(
        self,
        cluster: Cluster,
        wanted: Wanted,
        subscription: Subscription,
        broker_name: str,
        handout: Handout,
        *,
        register: Register,
        on_arrived: Callable[[SharedDelivery], None],
        on_other: Callable[[SharedDelivery], None],
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._wanted = wanted
        self._subscription = subscription
        self.broker_name = broker_name
        self._handout = handout
        self._register = register
        self._on_arrived = on_arrived
        self._on_other = on_other
        self._attempt = uuid.uuid4().hex
        self._is_failing = False
        self.is_asking = False

    @property
    def topic(self) -> str:
        return self._subscription.topic

    async def begin(self) -> None:
        """Asks for the first time: what is sent from now on will be received. Raises RocketletError."""
        self._handout.take_places(1)
        await self._receive(1, 0.0)

    async def run(self) -> None:
        may_wait = False
        while not self._handout.is_closed:
            many = not may_wait and not self._wanted.orderly
            places = await self._handout.reserve(POP_MESSAGES if many else 1)
            wait_s = POP_TURN_S if self._handout.is_short else POP_WAIT_S
            try:
                rest = await self._receive(places, 0.0 if many else wait_s)
            except Exception as error:  # any: without this task nothing more would come
                await asyncio.sleep(self._said(error))
            else:
                may_wait = not rest
                if self._is_failing:
                    self._is_failing = False
                    log.info("broker_back", broker=self.broker_name, topic=self.topic)

    def _said(self, error: Exception) -> float:
        """Names a failure the first time. Returns how long to wait."""
        if not isinstance(error, RocketletError):
            log.exception("pop_failed", broker=self.broker_name, topic=self.topic)
        elif not self._is_failing:
            log.warning("pop_failed", broker=self.broker_name, topic=self.topic, reason=str(error))
        self._is_failing = True
        return self._limits.reconnect_s if isinstance(error, ConnectionFailed) else self._limits.pull_error_delay_s

    async def _receive(self, places: int, wait_s: float) -> int:
        """Sends one receive, for places that were reserved. Returns about how many messages are left. Raises
        RocketletError."""
        found: list[SharedDelivery] = []
        self.is_asking = True
        try:
            found, rest = await self._ask(places, wait_s)
            return rest
        finally:
            self.is_asking = False
            for delivery in found:
                self._on_arrived(delivery)
            self._handout.put(found, places)

    async def _ask(self, places: int, wait_s: float) -> tuple[list[SharedDelivery], int]:
        connection = await self._cluster.broker(self.broker_name)
        await self._register(connection.address)
        asked = Asked(connection)
        answer = await connection.ask(
            RequestCode.POP_MESSAGE, write(self._header(places, wait_s)), timeout_s=wait_s + POP_TIMEOUT_S
        )
        self._attempt = uuid.uuid4().hex
        if answer.code in _EMPTY:
            return [], 0
        if answer.code:
            raise BrokerRefused(RequestCode.POP_MESSAGE, answer.code, answer.remark, connection.address)
        ends_s = asked.ends_s(self._wanted.invisible_s)
        try:
            found, rest = deliveries_of(answer, self.topic, self.broker_name, ends_s)
        except (MessageError, HeaderError) as error:
            raise AnswerUnreadable(str(error)) from error
        others = [delivery for delivery in found if not self._is_wanted(delivery)]
        for delivery in others:
            self._on_other(delivery)
        return [delivery for delivery in found if delivery not in others] if others else found, rest

    def _is_wanted(self, delivery: SharedDelivery) -> bool:
        tags = self._subscription.tags
        if not tags or self._subscription.takes_all:
            return True
        return props.find(delivery.message.record.properties, props.TAGS) in tags

    def _header(self, places: int, wait_s: float) -> PopMessage:
        """The header without its time: a broker would refuse it by its own clock."""
        wanted, subscription = self._wanted, self._subscription
        return PopMessage(
            wanted.group,
            subscription.topic,
            -1,
            places,
            int(wanted.invisible_s * 1000),
            int(wait_s * 1000),
            FROM_FIRST if wanted.from_first else FROM_END,
            0,
            subscription.kind,
            subscription.expression,
            self._attempt if wanted.orderly else None,
            wanted.orderly,
        )
