"""A Celery broker on RocketMQ: each Celery queue is a topic, and its workers share messages as members of one group.

    import rocketlet.celery  # registers the scheme `rocketlet`
    from celery import Celery

    app = Celery("tasks", broker="rocketlet://127.0.0.1:9876")

request  the requests of a worker's tasks, by which dead letters have the reason

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from typing import Any, Final

try:
    from kombu.transport import TRANSPORT_ALIASES, virtual
    from kombu.utils.json import dumps, loads

    from celery.signals import worker_init
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.celery needs Celery: pip install '.[celery]'") from missing

from rocketlet import __version__ as version
from rocketlet.client import Access, ConfigError, Message, RetryLater, RocketletError
from rocketlet.client.errors import get_logger
from rocketlet.sync import Consumer, Producer, SharedConsumer, receive_any
from rocketlet.sync.tasks import DelayLimit, is_early, reason_of

log = get_logger("rocketlet.celery")

POLL_S: Final = 1.0  # maximum wait for a message, before Celery's loop continues
SETTLE_POLL_S: Final = 0.05  # maximum wait while tasks run, because Celery's loop sends their acknowledgements
FULL_POLL_S: Final = 0.005  # pause at the prefetch limit, before Celery's loop continues
FULL_S: Final = 1.0  # time at the prefetch limit after which members pause, so that messages go to other workers
PURGE_POLL_S: Final = 1.0  # time without a message after which a queue counts as empty

_REPLIES: Final = re.compile(r"[^.]+\.(reply\..+\.pidbox)").fullmatch  # the names of queues for replies of workers
_Member = SharedConsumer | Consumer


class _QoS(virtual.QoS):
    """Settles messages at the broker instead of sending copies."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, _ack)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, _requeue if requeue else _reject)
        super().ack(delivery_tag)


@dataclass(slots=True)
class _Delivery:
    """A message in flight, the member that has received it, and the reason to give if it is rejected."""

    member: _Member
    message: Message
    reason: str = ""


def _ack(delivery: _Delivery) -> None:
    delivery.member.ack(delivery.message)


def _requeue(delivery: _Delivery) -> None:
    delivery.member.retry(delivery.message, RetryLater(delay=0))


def _reject(delivery: _Delivery) -> None:
    delivery.member.reject(delivery.message, reason=delivery.reason)


class Channel(virtual.Channel):
    """A channel with one member for each queue from which it gets messages. The members leave when the channel is closed, so
    that a worker that stops can still acknowledge the tasks that it lets finish.

    A queue that is bound to a fanout exchange, and a queue for replies of workers, is read by a broadcasting member from the
    topic of the exchange, so that these queues have no topics of their own.
    """

    QoS = _QoS
    supports_fanout = True
    do_restore = False  # the broker redelivers what a member has not settled
    connection: Transport

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self._members: dict[str, _Member] = {}
        self._exchanges: dict[
            str, str
        ] = {}  # the exchange whose topic a queue is read from, without a topic of its own
        self._held: dict[str, _Delivery] = {}
        self._full_since_s: float | None = None
        self._is_paused = False

    @property
    def is_busy(self) -> bool:
        """True if deliveries are not settled yet."""
        return bool(self._held)

    @property
    def is_full(self) -> bool:
        """True at the prefetch limit."""
        return bool(self._active_queues) and not self.qos.can_consume()

    def readable(self) -> Mapping[_Member, str]:
        """Return the members of the consumed queues; none at the prefetch limit. After `FULL_S` at it, pause the members, so
        that messages go to other workers."""
        if self.is_full:
            self._pause_if_full()
            return {}
        self._full_since_s = None
        if self._is_paused:
            self._is_paused = False
            for member in self._members.values():
                member.resume()
        return {self._member(queue): queue for queue in self._active_queues}

    def _pause_if_full(self) -> None:
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
        elif now_s - self._full_since_s >= FULL_S and not self._is_paused:
            self._is_paused = True
            for member in self._members.values():
                member.pause()

    def received(self, member: _Member, message: Message, queue: str) -> dict[str, Any] | None:
        """Return the payload of a message that a member has received. Return None, and settle it, if it is a task that is
        not due yet, a reply to another client, or none of Celery's messages."""
        try:
            payload: dict[str, Any] = loads(message.body)
            properties = payload["properties"]
            info = properties["delivery_info"]
            target = f"{info['routing_key']}.{info['exchange']}"
            due = _due(payload["headers"].get("eta"))
        except Exception as error:  # any, because applications can register decoders of types with kombu
            reason = f"not a message of Celery: {reason_of(error, str(error), '')}"
            log.warning("message_rejected", message=message.message_id, reason=reason)
            member.reject(message, reason=reason)  # a broadcasting consumer skips the message
            return None
        if _REPLIES(queue) and queue != target:
            member.ack(message)
            return None
        if is_early(due):  # its time was beyond the broker's limit
            self._put(queue, payload)
            member.ack(message)
            return None
        properties["delivery_tag"] = tag = self._next_delivery_tag()  # a redelivery is another delivery
        info["redelivered"] = message.attempt > 1
        self._held[tag] = _Delivery(member, message)
        return payload

    def _member(self, queue: str) -> _Member:
        if queue not in self._members:
            transport = self.connection
            name = transport.name_of(self._exchanges.get(queue, queue))
            if queue in self._exchanges:
                reader = Consumer(transport.name_server, name, name, access=transport.access, broadcasting=True)
                reader.start()
                reader.assigned()  # what is sent after that is received
                self._members[queue] = reader
            else:
                options = transport.consumer
                member = SharedConsumer(transport.name_server, name, name, access=transport.access, **options)
                member.start()
                self._members[queue] = member
        return self._members[queue]

    def _queue_bind(self, exchange: str, routing_key: str, pattern: Any, queue: str) -> None:
        """Begin to read a queue of broadcasts or replies, before a request is sent that is replied to."""
        if self.typeof(exchange).type == "fanout" or _REPLIES(queue):
            self._exchanges[queue] = exchange
            self._member(queue)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        """Return the queues of a message. The queues for replies belong to other processes."""
        queue = f"{routing_key}.{exchange}"
        found: list[str] = [queue] if _REPLIES(queue) else super()._lookup(exchange, routing_key, default)
        return found

    def set_reason(self, tag: str, reason: str) -> None:
        """Set why a delivery becomes a dead letter, if it is rejected."""
        if (delivery := self._held.get(tag)) is not None:
            delivery.reason = reason

    def settle(self, tag: str, action: Callable[[_Delivery], None]) -> None:
        if (delivery := self._held.pop(tag, None)) is not None:
            action(delivery)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if no_ack:  # the message is acknowledged before its callback runs
            deliver = self.connection._callbacks[queue]

            def settled(payload: dict[str, Any]) -> None:
                self.settle(payload["properties"]["delivery_tag"], _ack)
                deliver(payload)

            self.connection._callbacks[queue] = settled

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        found = super().basic_get(queue, no_ack=no_ack, **options)
        if found is not None and no_ack:
            self.settle(found.delivery_tag, _ack)
        return found

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        member = self._member(queue)
        try:
            message = member.receive(timeout_s=PURGE_POLL_S if timeout is None else timeout)
        except TimeoutError:
            raise Empty from None
        payload = self.received(member, message, queue)
        if payload is None:
            raise Empty
        return payload

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **options: Any) -> None:
        self.connection.producer().send(self.connection.name_of(exchange), dumps(message).encode())

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        if (reply := _REPLIES(queue)) is not None:
            self._put_fanout(reply[1], message, "")
            return
        headers, priority = message["headers"], message["properties"].get("priority")
        send = partial(
            self.connection.producer().send,
            self.connection.name_of(queue),
            dumps(message).encode(),
            tag=None if (task := headers.get("task")) is None else re.sub(r"\s|\|", "-", str(task)),
            keys=() if (task_id := headers.get("id")) is None else str(task_id),
            priority=priority or None,
        )
        self.connection.delays.send(lambda at: send(at=at), _due(headers.get("eta")))

    def _purge(self, queue: str) -> int:
        """Acknowledge messages until none arrives for `PURGE_POLL_S`, and return their number. Tasks that other workers hold
        stay with these."""
        count = 0
        while True:
            try:
                payload = self._get(queue)
            except Empty:
                return count
            self.settle(payload["properties"]["delivery_tag"], _ack)
            count += 1

    def _delete(self, queue: str, *args: Any, **options: Any) -> None:
        """Leave the queue's group. The topic stays, because its messages are kept for their retention time."""
        self._exchanges.pop(queue, None)
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
    implements = virtual.Transport.implements.extend(exchange_type=frozenset(("direct", "topic", "fanout")))

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
        self.delays = DelayLimit()

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
        while not self._deliver_one(POLL_S if until_s is None else max(until_s - time.monotonic(), 0.0)):
            is_busy = any(channel.is_busy for channel in self.channels)
            if until_s is not None and (is_busy or time.monotonic() >= until_s):
                raise TimeoutError

    def _deliver_one(self, timeout_s: float) -> bool:
        """Deliver a message of any channel, broadcasts first. Return False if none arrives within the timeout or `POLL_S`;
        within `SETTLE_POLL_S` while tasks are running, and within `FULL_POLL_S` at the prefetch limit."""
        members = {
            member: (channel, queue) for channel in self.channels for member, queue in channel.readable().items()
        }
        is_full, is_busy = (
            any(getattr(channel, state) for channel in self.channels) for state in ("is_full", "is_busy")
        )
        timeout_s = min(timeout_s, FULL_POLL_S if is_full else SETTLE_POLL_S if is_busy else POLL_S)
        if not members:
            time.sleep(min(timeout_s, FULL_POLL_S if is_full else self.polling_interval))
            return False
        try:
            member, message = receive_any(
                sorted(members, key=lambda found: isinstance(found, SharedConsumer)), timeout_s=timeout_s
            )
        except TimeoutError:
            return False
        channel, queue = members[member]
        payload = channel.received(member, message, queue)
        if payload is not None:
            self._deliver(payload, queue)
        return payload is not None


@worker_init.connect
def _use_requests(sender: Any, **options: Any) -> None:
    """Have the tasks of a worker whose broker is RocketMQ say why they are rejected, unless the application has requests of
    its own."""
    task = sender.app.Task
    is_ours = sender.app.connection_for_read().transport_cls == "rocketlet"
    if is_ours and task.Request == "celery.worker.request:Request":
        task.Request = "rocketlet.celery.request:TaskRequest"


TRANSPORT_ALIASES["rocketlet"] = "rocketlet.celery:Transport"

__all__ = ["Channel", "Transport"]
