"""A Celery broker on RocketMQ: each Celery queue is a topic, and its workers share messages as members of one group.

    import rocketlet.celery  # registers the scheme `rocketlet`
    from celery import Celery

    app = Celery("tasks", broker="rocketlet://127.0.0.1:9876")

`transport_options`:

- `name_server`: the name servers, `HOST:PORT;HOST:PORT`; default: the host and port of the URL.
- `access`: a `rocketlet.Access`, for TLS; the URL's user and password are an account's access key and secret key.
- `queue_name_prefix`: precedes the names of topics and groups.
- `consumer`, `producer`: options of `rocketlet.SharedConsumer` and `rocketlet.Producer`. Unless `start` is set, a new group
  starts at its topic's first message.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Empty
from typing import Any, Final

try:
    from kombu.transport import TRANSPORT_ALIASES, virtual
    from kombu.utils.json import dumps, loads
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.celery needs Celery: pip install '.[celery]'") from missing

from rocketlet import __version__ as version
from rocketlet.client import Access, BrokerRefused, ConfigError, Message, RetryLater, RocketletError
from rocketlet.sync import Producer, SharedConsumer, receive_any

POLL_S: Final = 1.0  # maximum wait for a message, before Celery's loop continues
SETTLE_POLL_S: Final = 0.05  # maximum wait while tasks run, because Celery's loop sends their acknowledgements
FULL_POLL_S: Final = 0.005  # pause at the prefetch limit, before Celery's loop continues
FULL_S: Final = 1.0  # time at the prefetch limit after which members pause, so that messages go to other workers
PURGE_POLL_S: Final = 1.0  # time without a message after which a queue counts as empty
MAX_DELAY: Final = timedelta(days=39)  # below the 40 days of Rocketlet's brokers, because clocks differ
MAX_FOREIGN_DELAY: Final = timedelta(
    days=3
)  # the limit of Apache's brokers, used once a broker has refused a longer delay
REFUSED: Final = 13  # the code MESSAGE_ILLEGAL, with which brokers refuse a delay that is too long
EARLY: Final = timedelta(seconds=1)  # a task that arrives earlier before its time is delayed again


class _QoS(virtual.QoS):
    """Settles messages at the broker instead of sending copies."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, SharedConsumer.ack)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, _requeue if requeue else SharedConsumer.reject)
        super().ack(delivery_tag)


def _requeue(consumer: SharedConsumer, message: Message) -> None:
    consumer.retry(message, RetryLater(delay=0))


class Channel(virtual.Channel):
    """A channel with one member for each queue from which it gets messages. The members leave when the channel is closed, so
    that a worker that stops can still acknowledge the tasks that it lets finish."""

    QoS = _QoS
    do_restore = False  # the broker redelivers what a member has not settled
    connection: Transport

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self._members: dict[str, SharedConsumer] = {}
        self._held: dict[str, tuple[SharedConsumer, Message]] = {}
        self._full_since_s: float | None = None
        self._is_paused = False

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        """Deliver one message. Raises queue.Empty if none arrives within the timeout, or within `POLL_S` (`SETTLE_POLL_S`
        while tasks are running), and if the channel consumes no queue or is at the prefetch limit."""
        callback = callback or self.connection._deliver
        if not self._active_queues:
            raise Empty
        if not self.qos.can_consume():
            self._wait_for_room()
            raise Empty
        self._full_since_s = None
        if self._is_paused:
            self._is_paused = False
            for member in self._members.values():
                member.resume()
        wait_s = SETTLE_POLL_S if self._held else POLL_S
        queue, payload = self._receive(self._active_queues, min(wait_s, POLL_S if timeout is None else timeout))
        callback(payload, queue)

    @property
    def is_busy(self) -> bool:
        """True if deliveries are not settled yet."""
        return bool(self._held)

    def _wait_for_room(self) -> None:
        """Wait `FULL_POLL_S` at the prefetch limit. After `FULL_S` at it, pause the members, so that messages go to other
        workers."""
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
        elif now_s - self._full_since_s >= FULL_S and not self._is_paused:
            self._is_paused = True
            for member in self._members.values():
                member.pause()
        time.sleep(FULL_POLL_S)

    def _receive(self, queues: Sequence[str], timeout_s: float) -> tuple[str, dict[str, Any]]:
        members = {self._member(queue): queue for queue in queues}
        try:
            member, message = receive_any(list(members), timeout_s=timeout_s)
        except TimeoutError:
            raise Empty from None
        payload: dict[str, Any] = loads(message.body)
        properties = payload["properties"]
        properties["delivery_tag"] = tag = self._next_delivery_tag()  # a redelivery is another delivery
        properties["delivery_info"]["redelivered"] = message.attempt > 1
        self._held[tag] = member, message
        due = _due(payload["headers"].get("eta"))
        if due is not None and due - datetime.now(UTC) > EARLY:  # its time was beyond the broker's limit
            self._put(members[member], payload)
            self.settle(tag, SharedConsumer.ack)
            raise Empty
        return members[member], payload

    def _member(self, queue: str) -> SharedConsumer:
        if queue not in self._members:
            name, transport = self.connection.name_of(queue), self.connection
            member = SharedConsumer(transport.name_server, name, name, access=transport.access, **transport.consumer)
            member.start()
            self._members[queue] = member
        return self._members[queue]

    def settle(self, tag: str, action: Callable[[SharedConsumer, Message], None]) -> None:
        if (held := self._held.pop(tag, None)) is not None:
            action(*held)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if no_ack:  # the message is acknowledged before its callback runs
            deliver = self.connection._callbacks[queue]

            def settled(payload: dict[str, Any]) -> None:
                self.settle(payload["properties"]["delivery_tag"], SharedConsumer.ack)
                deliver(payload)

            self.connection._callbacks[queue] = settled

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        found = super().basic_get(queue, no_ack=no_ack, **options)
        if found is not None and no_ack:
            self.settle(found.delivery_tag, SharedConsumer.ack)
        return found

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        return self._receive([queue], PURGE_POLL_S if timeout is None else timeout)[1]

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        headers, priority = message["headers"], message["properties"].get("priority")
        send = partial(
            self.connection.producer().send,
            self.connection.name_of(queue),
            dumps(message).encode(),
            tag=None if (task := headers.get("task")) is None else re.sub(r"\s|\|", "-", str(task)),
            keys=() if (task_id := headers.get("id")) is None else str(task_id),
            priority=priority or None,
        )
        due, now = _due(headers.get("eta")), datetime.now(UTC)
        limit = self.connection.max_delay
        try:
            send(at=due and min(due, now + limit))
        except BrokerRefused as error:
            if due is None or error.code != REFUSED or due - now <= MAX_FOREIGN_DELAY:
                raise
            send(at=now + MAX_FOREIGN_DELAY)
            self.connection.max_delay = MAX_FOREIGN_DELAY

    def _purge(self, queue: str) -> int:
        """Acknowledge messages until none arrives for `PURGE_POLL_S`, and return their number. Tasks that other workers hold
        stay with these."""
        count = 0
        while True:
            try:
                payload = self._get(queue)
            except Empty:
                return count
            self.settle(payload["properties"]["delivery_tag"], SharedConsumer.ack)
            count += 1

    def _delete(self, queue: str, *args: Any, **options: Any) -> None:
        """Leave the queue's group. The topic stays, because its messages are kept for their retention time."""
        if (member := self._members.pop(queue, None)) is not None:
            member.stop()

    def close(self) -> None:
        super().close()
        self._held.clear()
        for queue in list(self._members):
            self._delete(queue)


def _due(eta: str | None) -> datetime | None:
    """Return when a task is due; None for immediately."""
    if eta is None:
        return None
    due = datetime.fromisoformat(eta)
    now = datetime.now(UTC)
    due = due if due.tzinfo is not None else due.replace(tzinfo=UTC)
    return None if due <= now else due


class Transport(virtual.Transport):
    """The transport of URLs such as `rocketlet://HOST:PORT`."""

    Channel = Channel
    default_port = 9876
    driver_type = driver_name = "rocketlet"
    polling_interval = 0.01  # pause in seconds after a drain that found no message
    connection_errors = (*virtual.Transport.connection_errors, RocketletError)
    channel_errors = (*virtual.Transport.channel_errors, RocketletError)

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        given = client.transport_options
        self.name_server: str = given.get("name_server") or f"{client.hostname or '127.0.0.1'}:{client.port or 9876}"
        self.access: Access | None = given.get("access")
        if client.userid:
            if self.access is not None:
                raise ConfigError("access: the broker URL has an account, too; give one of them")
            self.access = Access(client.userid, client.password or "")
        self.consumer: dict[str, Any] = {"start": "first", **given.get("consumer", {})}
        self._prefix: str = given.get("queue_name_prefix", "")
        self._options: dict[str, Any] = given.get("producer", {})
        self._producer: Producer | None = None
        self._process = os.getpid()
        self.max_delay = MAX_DELAY

    def driver_version(self) -> str:
        return version

    def name_of(self, queue: str) -> str:
        """Return the name of a queue's topic and group. Characters that topics cannot have become `-`."""
        return re.sub(r"[^%|a-zA-Z0-9_-]", "-", self._prefix + queue)

    def producer(self) -> Producer:
        """Return this process's producer, created at the first call and after a fork, which a client does not survive."""
        if self._producer is None or self._process != os.getpid():
            producer = Producer(self.name_server, "celery-senders", access=self.access, **self._options)
            producer.start()
            self._producer, self._process = producer, os.getpid()
        return self._producer

    def establish_connection(self) -> Transport:
        self.producer()
        established: Transport = super().establish_connection()
        return established

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        if self._producer is not None and self._process == os.getpid():
            self._producer.stop()
        self._producer = None

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError after the timeout, if there is one, or before it while tasks are running,
        so that Celery sends the acknowledgements of those that have ended."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self.cycle.get(self._deliver, timeout=timeout)
            except Empty:
                is_busy = any(channel.is_busy for channel in self.channels)
                if until_s is not None and (is_busy or time.monotonic() >= until_s):
                    raise TimeoutError from None
                time.sleep(self.polling_interval)
            else:
                return


TRANSPORT_ALIASES["rocketlet"] = "rocketlet.celery:Transport"

__all__ = ["Channel", "Transport"]
