"""A dramatiq broker on RocketMQ: each dramatiq queue is a topic, and its workers share messages as members of one group.

    import dramatiq
    from rocketlet.dramatiq import RocketletBroker

    dramatiq.set_broker(RocketletBroker("127.0.0.1:9876"))

    @dramatiq.actor
    def cook(dish: str) -> None: ...

`dramatiq tasks` runs workers. A message is acknowledged when its actor has run, so that another worker runs the message of
a worker that dies. The broker keeps delayed messages and retries until they are due, and dead letters with the exception
and its traceback. The option `broker_priority` counts in topics of the type PRIORITY.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

try:
    import dramatiq
    from dramatiq.common import current_millis
    from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.dramatiq needs dramatiq: pip install '.[dramatiq]'") from missing

from rocketlet.client import Access, ConnectionFailed, Message, RequestTimeout, RetryLater
from rocketlet.sync import AdminClient, Producer, SharedConsumer
from rocketlet.sync.tasks import DelayLimit, is_early, reason_of

FULL_POLL_S: Final = 0.01  # pause at the prefetch limit
FULL_S: Final = 1.0  # time at the prefetch limit after which a member pauses, so that messages go to other workers
JOIN_POLL_S: Final = 0.05  # interval at which `join` queries the lag
FLUSH_POLL_S: Final = 1.0  # time without a message after which a queue counts as empty


class RocketletBroker(dramatiq.Broker):
    """A dramatiq broker that sends the messages of a queue to a topic, and receives them as a member of a group.

    - `name_server`: the name servers, `HOST:PORT;HOST:PORT`.
    - `middleware`: dramatiq's middleware. Default: dramatiq's own.
    - `access`: the account and TLS settings.
    - `prefix`: precedes the names of topics and groups.
    - `options`: options of `rocketlet.SharedConsumer`. Unless `start` is set, a new group starts at its topic's first
      message.
    """

    def __init__(
        self,
        name_server: str,
        *,
        middleware: list[dramatiq.Middleware] | None = None,
        access: Access | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        super().__init__(middleware=middleware)
        self.actor_options |= {"broker_priority"}
        self._name_server, self._access, self._prefix = name_server, access, prefix
        self._options: dict[str, Any] = {"start": "first", **options}
        self.delays = DelayLimit()
        self._producer: Producer | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def name_of(self, queue_name: str) -> str:
        """Return the name of a queue's topic and group. Characters that topics cannot have become `-`."""
        return re.sub(r"[^%|a-zA-Z0-9_-]", "-", self._prefix + queue_name)

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def emit_after(self, signal: str, *arguments: Any, **options: Any) -> None:
        ended = arguments[0] if arguments and isinstance(arguments[0], _Proxy) else _ENDED.get()
        before = _ENDED.set(ended)
        try:
            super().emit_after(signal, *arguments, **options)
        finally:
            _ENDED.reset(before)

    def enqueue(self, message: dramatiq.Message[Any], *, delay: int | None = None) -> dramatiq.Message[Any]:
        """Send a message, to be delivered after `delay` ms. Raises ConnectionClosed if no broker responds, and what
        `rocketlet.Producer.send` raises."""
        if delay is not None:
            message = message.copy(options={"eta": current_millis() + delay})
        try:
            self.emit_before("enqueue", message, delay)
            self.send(message)
        except BaseException:
            if (ended := _ENDED.get()) is not None:
                ended.must_retry = True
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def send(self, message: dramatiq.Message[Any]) -> None:
        """Send a message, to be delivered at its `eta`."""
        eta_ms = message.options.get("eta")
        send = partial(
            self._sender().send,
            self.name_of(message.queue_name),
            message.encode(),
            tag=re.sub(r"\s|\|", "-", message.actor_name),
            keys=message.message_id,
            priority=message.options.get("broker_priority"),
        )
        due = None if eta_ms is None else datetime.fromtimestamp(eta_ms / 1000, UTC)
        try:
            self.delays.send(lambda at: send(at=at), due)
        except (ConnectionFailed, RequestTimeout) as error:
            raise ConnectionClosed(error) from None

    def _sender(self) -> Producer:
        """Return this process's producer, created at the first call and after a fork, which a client does not survive."""
        with self._lock:
            if self._producer is None or self._process != os.getpid():
                producer = Producer(self._name_server, "dramatiq-senders", access=self._access)
                producer.start()
                self._producer, self._process = producer, os.getpid()
            return self._producer

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> dramatiq.Consumer:
        name = self._checked(queue_name)
        member = SharedConsumer(self._name_server, name, name, access=self._access, **self._options)
        try:
            member.start()
        except (ConnectionFailed, RequestTimeout) as error:
            raise ConnectionClosed(error) from None
        return _Consumer(self, queue_name, member, prefetch, timeout / 1000)

    def _checked(self, queue_name: str) -> str:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        return self.name_of(queue_name)

    def flush(self, queue_name: str) -> None:
        """Acknowledge messages until none arrives for `FLUSH_POLL_S`. Messages that other workers hold stay with these."""
        name = self._checked(queue_name)
        with SharedConsumer(self._name_server, name, name, access=self._access, **self._options) as member:
            for _ in member.messages(timeout_s=FLUSH_POLL_S):
                pass

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until the group has acknowledged all messages of a queue that are due. Raises QueueJoinTimeout after `timeout`
        ms."""
        name, until_s = self._checked(queue_name), time.monotonic() + (timeout or 0) / 1000
        with AdminClient(self._name_server, access=self._access) as admin:
            while any(item.lag > 0 for item in admin.call(lambda admin: admin.progress(name)).values()):
                if timeout is not None and time.monotonic() >= until_s:
                    raise QueueJoinTimeout(queue_name)
                time.sleep(JOIN_POLL_S)

    def close(self) -> None:
        if self._producer is not None and self._process == os.getpid():
            self._producer.stop()
        self._producer = None


class _Consumer(dramatiq.Consumer):
    """A member of the group of a queue, with up to `prefetch` messages in flight."""

    def __init__(
        self, broker: RocketletBroker, queue_name: str, member: SharedConsumer, prefetch: int, timeout_s: float
    ) -> None:
        self._broker, self._queue_name, self._member = broker, queue_name, member
        self._prefetch, self._timeout_s = prefetch, timeout_s
        self._held: dict[str, Message] = {}  # by the id of the message at the broker, because dramatiq resends its own
        self._full_since_s: float | None = None
        self._is_paused = False

    def __next__(self) -> dramatiq.MessageProxy | None:
        """Return the next message; None if none arrives within the timeout, and at the prefetch limit."""
        if len(self._held) >= self._prefetch:
            self._wait_for_room()
            return None
        self._full_since_s = None
        if self._is_paused:
            self._is_paused = False
            self._member.resume()
        try:
            stored = self._member.receive(timeout_s=self._timeout_s)
        except TimeoutError:
            return None
        try:
            message, due = self._decoded(stored.body)
        except (DecodeError, TypeError, ValueError, OverflowError, OSError) as error:
            cause = error.__cause__ or error
            reason = f"not a message of this dramatiq queue: {reason_of(cause, str(cause), '')}"
            self._broker.logger.warning("message %s was rejected: %s", stored.message_id, reason)
            self._member.reject(stored, reason=reason)
            return None
        if is_early(due):  # beyond the broker's limit
            self._broker.send(message)
            self._member.ack(stored)
            return None
        message.options.pop("eta", None)
        self._held[stored.offset_id] = stored
        return _Proxy(message, stored.offset_id)

    def _decoded(self, body: bytes) -> tuple[dramatiq.Message[Any], datetime | None]:
        """Return a message, and when it is due. Raises DecodeError, TypeError, ValueError, OverflowError or OSError if no
        dramatiq broker has sent it to this queue."""
        message = dramatiq.Message.decode(body)
        if not isinstance(message.options, dict) or not isinstance(message.actor_name, str):
            raise TypeError("actor_name must be a str, and options a dict")
        if message.queue_name != self._queue_name:
            raise ValueError(f"queue_name: expected {self._queue_name!r}, got {message.queue_name!r}")
        eta_ms = message.options.get("eta")
        return message, None if eta_ms is None else datetime.fromtimestamp(eta_ms / 1000, UTC)

    def _wait_for_room(self) -> None:
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
        elif now_s - self._full_since_s >= FULL_S and not self._is_paused:
            self._is_paused = True
            self._member.pause()
        time.sleep(FULL_POLL_S)

    def ack(self, message: dramatiq.MessageProxy) -> None:
        if (stored := self._taken(message)) is not None:
            self._member.ack(stored)

    def nack(self, message: dramatiq.MessageProxy) -> None:
        """Make a message a dead letter, with the exception of its last attempt."""
        if (stored := self._taken(message)) is not None:
            error, traceback = message._exception, message.options.get("traceback", "")
            self._member.reject(stored, reason="" if error is None else reason_of(error, str(error), traceback))

    def requeue(self, messages: Iterable[dramatiq.MessageProxy]) -> None:
        for message in messages:
            if (stored := self._taken(message)) is not None:
                self._member.retry(stored, RetryLater(delay=0, counts=False))

    def _taken(self, message: dramatiq.MessageProxy) -> Message | None:
        """Remove a message from those in flight, and return it. Return None if it was settled already, and, after returning
        it for a retry, if it must be retried."""
        assert isinstance(message, _Proxy)
        stored = self._held.pop(message.offset_id, None)
        if stored is None or not message.must_retry:
            return stored
        self._member.retry(stored)
        return None

    def close(self) -> None:
        self._member.stop()


class _Proxy(dramatiq.MessageProxy):
    """A message in flight.

    Attributes:
        must_retry: True if middleware could not send a message when this one had run, such as its retry or the next message
            of its pipeline. dramatiq only logs the exception, and would acknowledge this message.
    """

    def __init__(self, message: dramatiq.Message[Any], offset_id: str) -> None:
        super().__init__(message)
        self.offset_id = offset_id
        self.must_retry = False


_ENDED: Final[ContextVar[_Proxy | None]] = ContextVar("ended", default=None)  # the message that middleware handles


__all__ = ["RocketletBroker"]
