"""The producer: chooses a queue, sends messages, and retries in another queue where that may help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Generic, Never, Unpack, cast

from ..protocol import bodies, names
from ..protocol.bodies import Heartbeat
from ..protocol.codes import SYS_TRANSACTION_PREPARED, RequestCode
from ..protocol.config import MAX_BODY_BYTES
from ..protocol.frame import Frame
from ..protocol.headers import FIRST_ID, RecallMessage, UnregisterClient, write
from ..protocol.message import BatchEntry, encode_batch
from ..protocol.names import Queue
from .config import (
    PRODUCER_GROUP,
    REQUEST_TIMEOUT_S,
    check_callable,
    check_group,
    check_timeout,
    chosen,
    takes,
    unexpected_of_send,
)
from .errors import (
    BrokerRefused,
    ConfigError,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
    TransactionContradicted,
    get_logger,
)
from .message import Message, Outgoing, SendResult
from .sending.accumulator import (
    Body,
    Sending,
    SendMiddleware,
    check_flag,
    check_queue,
    check_topic,
    checked_body,
    checked_id,
    encoded_by,
    outgoing,
    properties_text,
    sent_result,
    with_message_group,
)
from .sending.options import MessageOptions, ProducerOptions, SendOptions
from .sending.requests import ProducerTransactions, Requests, half_properties, reply_properties, request_properties
from .sending.sender import Delay, Sender, checked_handle, is_over, later_text, needs_time, own_text, waits
from .wire.connection import KeptTask, cancelled, running_timeout

log = get_logger("rocketlet.producer")


@takes(ProducerOptions)
class Producer(Sender, Generic[Body]):
    """A client that sends messages: `async with Producer(name_server="host:port") as producer: await
    producer.send("topic", b"")`

    - `encode`: converts a value to a body: bytes, or a str that is sent as UTF-8, for example pydantic's
      `Order.model_dump_json`. Values that are bytes are sent unchanged.
    """

    def __init__(
        self,
        name_server: str,
        group: str = PRODUCER_GROUP,
        *,
        encode: Callable[[Body], bytes | str] | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        check_group(group)
        check_callable("encode", encode, "a value")
        super().__init__(name_server, group, options := chosen(ProducerOptions, options))
        self._encode = encode
        self._middleware, check = tuple(options["middleware"]), options["check"]
        if check is not None and group == PRODUCER_GROUP:
            raise ConfigError(
                "group: `check` needs a group of its own, because brokers send transaction checks to any producer of the "
                "group; name one"
            )
        self._transactions = (
            ProducerTransactions(self._cluster, group, check, self._middleware) if check is not None else None
        )
        self._heartbeats: KeptTask | None = None
        self._requests = Requests(self._cluster)
        self._call: Callable[[Sending], Awaitable[SendResult]] = self._send_plainly
        for layer in reversed(self._middleware):
            self._call = _around(layer, self._call)

    async def _begin(self) -> None:
        await self._cluster.find_route(names.DEFAULT_TOPIC)
        self._heartbeats = KeptTask(self._heartbeat, "producer heartbeat", self._cluster.limits.restart_s)

    async def _undo(self) -> None:
        await self._cluster.close()

    async def _end(self) -> None:
        try:
            await self._leave()
        finally:  # close the connections even if `stop` is cancelled because a broker does not respond
            await self._cluster.close()

    async def _leave(self) -> None:
        """Stop the background tasks, and unregister from the brokers."""
        if self._heartbeats is not None:
            await cancelled([self._heartbeats])
        await cancelled(self._resending)
        if self._transactions is not None:
            await self._transactions.close(self._timeout_s)
        ext = write(UnregisterClient(self.client_id, producer_group=self.group))
        for connection in self._brokers():
            try:
                await connection.request(RequestCode.UNREGISTER_CLIENT, ext)
            except RocketletError as error:
                log.info("unregister_failed", broker=connection.address, reason=str(error))

    async def _heartbeat(self) -> None:
        """Send heartbeats to all connected brokers. With transactions, connect to all brokers of the cluster first,
        because each of them may send transaction checks."""
        body = bodies.encode_heartbeat(Heartbeat(self.client_id, producer_groups=(self.group,)))
        while True:
            if self._transactions is not None:
                await self._connect_to_all()
            await asyncio.sleep(self._cluster.limits.heartbeat_interval_s)
            for connection in self._brokers():
                try:
                    await connection.request(RequestCode.HEART_BEAT, {}, body)
                except RocketletError as error:
                    log.warning("heartbeat_failed", broker=connection.address, reason=str(error))

    async def _connect_to_all(self) -> None:
        try:
            await self._cluster.find_masters()
        except RocketletError as error:
            log.info("brokers_not_found", reason=str(error))
        await asyncio.gather(*map(self._greet, self._cluster.known_masters()), return_exceptions=True)

    async def send(
        self,
        topic: str,
        body: Body | bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        delay_level: int = 0,
        delay: Delay | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        lite_topic: str | None = None,
        message_group: str | None = None,
        queue_key: str | None = None,
        queue: Queue | None = None,
        message_id: str | None = None,
        **unknown: Never,
    ) -> SendResult:
        """Send one message. Return when the broker has stored it.

        - `body`: bytes, or with `encode` a value that `encode` accepts.
        - `tag`: the tag by which consumers can filter messages.
        - `keys`: the keys by which tools find the message: a str for one key, or a sequence of keys. A key has no spaces,
          at which brokers split keys.
        - `properties`: further properties, as str by name.
        - `delay_level`: 1 to 18 for one of the broker's 18 delays; 0 for immediate delivery.
        - `delay`: the delay until delivery, as a `timedelta` or seconds. Rocketlet's brokers support up to 40 days with a
          precision of 1 ms, Apache's brokers of 5.x up to 3 days with a precision of 1 s. Brokers of 4.9 support only
          `delay_level`. `recall` cancels the delivery.
        - `at`: the time of delivery instead of a delay, as a `datetime` with a time zone.
        - `priority`: an int from 0; larger means more urgent. The broker chooses the queue accordingly. In topics of the
          type PRIORITY, consumers that share messages get urgent messages first. Priorities need Rocketlet's brokers,
          or Apache's of 5.4 or later.
        - `lite_topic`: the name of a lite topic in a topic of the type LITE: 1 to 64 letters, digits, `_` and `-`. The
          first message creates the lite topic. Lite topics need Rocketlet's brokers, or Apache's of 5.5 or later.
        - `message_group`: the messages of a group go to one queue, like those with a `queue_key`, and consumers that share
          messages get them one after the other, in groups with order. Topics of the type FIFO need it at Apache's proxies.
        - `queue_key`: messages with the same key go to the same queue, until the topic's writable queues change. Await each
          send if their order matters, because a message that is retried may follow later ones.
        - `queue`: the only queue to which the message may be sent.
        - `message_id`: the id by which consumers recognize a message that is sent twice. Default: a new id.

        Raises:
            MessageIllegal: the message cannot be sent as it is.
            TopicNotFound: the topic does not exist, or has no writable queue.
            ConnectionFailed: no broker of the topic can be reached.
            RequestTimeout: no broker responded in time; the message may be stored.
            BrokerRefused: the broker rejected the message.
            ConfigError: the producer is not running.
        """
        if unknown:
            raise unexpected_of_send(unknown, SendOptions.__annotations__)
        body = self._encoded(body)
        if queue is not None:
            check_queue(topic, queue)
        if message_group is not None:
            properties = with_message_group(properties, message_group)
        if queue_key is None and queue is None:  # messages of a message group, or of a lite topic, go to one queue
            queue_key = message_group if message_group is not None else lite_topic
        if self._middleware:
            message = Outgoing(
                body, tag, keys, properties or {}, delay_level, 0, message_id, delay, at, priority, lite_topic
            )
            return await self._call(Sending(topic, (message,), False, queue_key, queue))
        if not delay_level and delay is None and at is None and priority is None and lite_topic is None:
            future = self._joined(topic, body, tag, keys, properties, queue_key, queue, message_id)
            if future is not None:
                return await future
        later = own_text(
            Outgoing(body, delay_level=delay_level, delay=delay, at=at, priority=priority, lite_topic=lite_topic)
        )
        return await self._send_one(topic, body, tag, keys, properties, later, queue_key, queue, message_id)

    async def recall(self, sent: SendResult | str) -> bool:
        """Cancel the delivery of a message that was sent with `delay` or `at`.

        Return False if the message is delivered or recalled already.

        Args:
            sent: the result of `send`, or its `recall_handle`.

        Raises:
            MessageIllegal: `sent` has no valid recall handle.
            BrokerRefused: the broker does not support it. Apache's brokers do from 5.3 on, with `recallMessageEnable`.
            ConnectionFailed, RequestTimeout: the broker of the message cannot be reached, or did not respond in time.
            ConfigError: the producer is not running.
        """
        self._check_running()
        handle = checked_handle(sent.recall_handle if isinstance(sent, SendResult) else sent)
        header = RecallMessage(handle.topic, handle.encoded(), self.group)
        connection = await self._connect(Queue(handle.topic, handle.broker_name, 0))
        try:
            await connection.request(RequestCode.RECALL_MESSAGE, write(header), timeout_s=self._timeout_s)
        except BrokerRefused as error:
            if is_over(error):
                return False
            raise
        return True

    def _encoded(self, body: Body | bytes) -> bytes:
        return (
            cast("bytes", body) if self._encode is None or isinstance(body, bytes) else encoded_by(self._encode, body)
        )

    async def _send_plainly(self, sending: Sending) -> SendResult:
        if sending.is_batch:
            return await self._send_many(sending.topic, sending.messages, sending.queue_key, sending.queue)
        (one,) = sending.messages
        if sending.kind == "half":
            return await self._send_half(sending, one)
        if sending.kind == "oneway":
            key, target = await self._send_away(sending.topic, one, sending.queue_key)
            return SendResult(key, "", target, -1, "unknown")
        return await self._send_one(
            sending.topic,
            one.body,
            one.tag,
            one.keys,
            one.properties,
            own_text(one),
            sending.queue_key,
            sending.queue,
            one.message_id,
        )

    async def _send_one(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        keys: str | Sequence[str],
        properties: Mapping[str, str] | None,
        later: str,
        queue_key: str | None,
        queue: Queue | None,
        message_id: str | None,
    ) -> SendResult:
        if not later:
            future = self._joined(topic, body, tag, keys, properties, queue_key, queue, message_id)
            if future is not None:
                return await future
        first = None
        if self._accumulator is not None and queue_key is None and queue is None:
            batch = self._accumulator.batch_of_turn.get(topic)
            # This message is sent alone, but to the queue of the current batch, so that it follows earlier messages.
            first = batch.queue if batch is not None else None
        ext, wire_body, key = self._prepared(topic, body, tag, keys, properties, later, message_id)
        code, to_a_time = RequestCode.SEND_MESSAGE_V2, needs_time(later)
        answer, sent_to = await self._send(
            topic, code, ext, wire_body, queue_key, queue, first=first, to_a_time=to_a_time
        )
        result = sent_result(answer, key, sent_to)
        if waits(later):  # the broker returns an offset of the queue in which the message waits
            result = result._replace(queue_offset=-1)
        return result._replace(recall_handle=str(answer.ext.get("recallHandle", ""))) if to_a_time else result

    @asynccontextmanager
    async def transaction(
        self,
        topic: str,
        body: Body | bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_key: str | None = None,
        **unknown: Never,
    ) -> AsyncIterator[SendResult]:
        """Send a message that consumers get when the block ends without an exception. If the block raises, the message
        is rolled back.

            async with producer.transaction("orders", body, keys=order_id):
                await database.commit_order(order_id)

        If the process dies inside the block, or the outcome does not reach the broker, the broker sends a transaction
        check to a producer of the group, whose `check` must return the outcome. This producer responds to checks while the
        block runs, without calling `check`.

        Raises, before the block runs, what `send` raises, and ConfigError for a producer without `check`; after the block,
        TransactionContradicted if the broker has ended the transaction otherwise (Rocketlet's brokers).
        """
        if unknown:
            raise unexpected_of_send(unknown, MessageOptions.__annotations__)
        if self._transactions is None:
            raise ConfigError(
                "check: a producer that sends transactions needs it, because brokers query the outcome of a transaction"
            )
        self._keys.stamp(int(time.time() * 1000))
        message_id = self._keys.next()
        properties_text(tag, keys, properties, message_id, "")  # a resent message could have a tag that is refused here
        message = Outgoing(self._encoded(body), tag, keys, properties or {}, message_id=message_id)
        with self._transactions.running(message_id):
            half = await self._call(Sending(topic, (message,), False, queue_key, None, "half"))
            try:
                yield half._replace(queue_offset=-1)  # the broker returns the half message's offset
            except BaseException as error:
                try:
                    await self._transactions.end(half, message, commits=False)
                except TransactionContradicted as contradiction:
                    if isinstance(error, Exception):
                        raise
                    # A cancelled task must end as such, so the contradiction is only logged.
                    log.error("transaction_contradicted", reason=str(contradiction))
                raise
            await self._transactions.end(half, message, commits=True)

    async def _send_half(self, sending: Sending, one: Outgoing) -> SendResult:
        prepared = self._prepared(sending.topic, one.body, one.tag, one.keys, one.properties, "", one.message_id)
        ext, wire_body, key = prepared
        ext["i"] = half_properties(str(ext["i"]), self.group)
        ext["f"] = int(ext["f"]) | SYS_TRANSACTION_PREPARED
        code = RequestCode.SEND_MESSAGE_V2
        answer, target = await self._send(sending.topic, code, ext, wire_body, sending.queue_key, None)
        return sent_result(answer, key, target)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[Outgoing | Body | bytes],
        *,
        queue_key: str | None = None,
        queue: Queue | None = None,
    ) -> SendResult:
        """Send messages to one queue in one request. The broker stores all of them, at consecutive offsets, or none. A
        Rocketlet broker stores a batch of thousands of messages in pieces; if it is killed or its disk becomes full in
        between, a part of such a batch is stored.

        Raises what `send` raises, including MessageIllegal for messages with a delay or priority, for an empty batch,
        and for more than 4 MiB in total.
        """
        items = outgoing(messages, self._encoded)
        if self._middleware:
            return await self._call(Sending(topic, items, True, queue_key, queue))
        return await self._send_many(topic, items, queue_key, queue)

    async def _send_many(
        self, topic: str, messages: Sequence[Outgoing], queue_key: str | None, queue: Queue | None
    ) -> SendResult:
        check_topic(topic)
        check_queue(topic, queue)
        now_ms = int(time.time() * 1000)
        self._keys.stamp(now_ms)
        ids: list[str] = []
        entries: list[tuple[int, bytes, str]] = []
        for message in messages:
            if later_text(message.delay_level, message.delay, message.at):
                raise MessageIllegal("delay: not supported in a batch; send delayed messages one by one")
            if message.lite_topic is not None:
                raise MessageIllegal("lite_topic: not supported in a batch; send its messages one by one")
            if message.priority is not None:
                raise MessageIllegal(
                    "priority: not supported in a batch, because all of it goes to one queue; send its messages one by one"
                )
            ids.append(checked_id(message.message_id) if message.message_id is not None else self._keys.next())
            is_again = message.message_id is not None
            text = properties_text(message.tag, message.keys, message.properties, ids[-1], "", is_again=is_again)
            check_flag(message.flag)
            entries.append((message.flag, checked_body(message.body), text))
        if not entries:
            raise MessageIllegal("messages: the batch is empty; send at least one message")
        body = encode_batch(entries)
        if len(body) > MAX_BODY_BYTES:
            raise MessageIllegal(
                f"messages: the batch has {len(body)} bytes (maximum {MAX_BODY_BYTES}); send several batches"
            )
        answer, target = await self.send_entries(topic, body, queue_key=queue_key, queue=queue)
        return sent_result(answer, ",".join(ids), target)

    async def send_entries(
        self, topic: str, body: bytes, *, queue_key: str | None = None, queue: Queue | None = None, ids: bool = True
    ) -> tuple[Frame, Queue]:
        """Send an encoded batch, without middleware. Return the broker's response and the queue.

        Args:
            body: the messages as `encode_batch` encodes them.
            ids: False if the response needs only the id of the first message, which Rocketlet's brokers support.

        Raises what `send_batch` raises, except MessageIllegal.
        """
        ext = self._header(topic, "", int(time.time() * 1000))
        ext |= {"m": True} if ids else {"m": True, FIRST_ID: True}
        return await self._send(topic, RequestCode.SEND_BATCH_MESSAGE, ext, body, queue_key, queue)

    async def send_entry(self, topic: str, entry: BatchEntry, *, queue: Queue | None = None) -> tuple[Frame, Queue]:
        """Send one message whose properties are encoded, without middleware, compressed like a message of `send`. Return the
        broker's response and the queue.

        Raises what `send` raises, except MessageIllegal for the message itself.
        """
        ext, wire_body = self._packed(topic, entry.body, entry.properties)
        code, to_a_time = RequestCode.SEND_MESSAGE_V2, needs_time(entry.properties)
        return await self._send(topic, code, ext, wire_body, None, queue, to_a_time=to_a_time)

    async def send_stored(self, queue: Queue, entries: Sequence[BatchEntry], sys_flag: int) -> SendResult:
        """Send messages as another broker has stored them, without middleware.

        Args:
            sys_flag: the system flag of the messages, which has the compression of their bodies.

        Raises what `send_batch` raises, except MessageIllegal.
        """
        ext = self._header(queue.topic, "", int(time.time() * 1000))
        ext["f"] = sys_flag
        code, body = RequestCode.SEND_MESSAGE_V2, entries[0].body
        if len(entries) == 1:
            ext["h"], ext["i"] = entries[0].flag, entries[0].properties
        else:
            code, body, ext["m"] = RequestCode.SEND_BATCH_MESSAGE, encode_batch(entries), True
        answer, _ = await self._send(queue.topic, code, ext, body, None, queue)
        return sent_result(answer, "", queue)

    async def resend(self, message: Message, topic: str | None = None) -> SendResult:
        """Send a copy of a received message, with its original body, tag, keys, user properties, priority, lite topic
        and id.

        Args:
            topic: the target topic. Default: the topic to which the message was first sent, even if it was received from a
                dead-letter or retry topic.

        Raises what `send` raises, and MessageError if the message cannot be read.
        """
        copy = message.outgoing()
        return await self.send(
            topic or message.origin,
            copy.body,
            tag=copy.tag,
            keys=copy.keys,
            properties=copy.properties,
            priority=copy.priority,
            lite_topic=copy.lite_topic,
            queue_key=message.message_group,
            message_id=copy.message_id,
        )

    async def request(
        self,
        topic: str,
        body: Body | bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **unknown: Never,
    ) -> Message:
        """Send a message and return the reply that a consumer sends with `reply`.

        Raises:
            RequestTimeout: no reply arrived within `timeout_s` seconds.
            RequestFailed: the consumer's handler raised or rejected the message.
            RocketletError: what `send` raises.
        """
        if unknown:
            raise unexpected_of_send(unknown, (*MessageOptions.__annotations__, "timeout_s"))
        check_timeout(timeout_s)
        ext, wire_body, key = self._prepared(topic, self._encoded(body), tag, keys, properties, "")
        ext["i"] = request_properties(str(ext["i"]), key, self.client_id, timeout_s)
        with self._requests.expected(key) as reply:
            try:
                async with running_timeout(timeout_s):
                    await self._send(topic, RequestCode.SEND_MESSAGE_V2, ext, wire_body, queue_key, None)
                    return await reply
            except TimeoutError as error:
                if isinstance(error, RequestTimeout):
                    raise
                raise RequestTimeout(
                    f"no consumer replied to the request {key} in the topic {topic} within {timeout_s} s"
                ) from None

    async def reply(self, request: Message, body: Body | bytes, *, properties: Mapping[str, str] | None = None) -> None:
        """Send the reply to a message that `request`, or the request method of Apache's clients, has sent.

        Raises:
            ConfigError: the message is not such a request, or the producer is not running.
            BrokerRefused: the broker rejected the reply, for example because the client that waits for it is not connected
                any more.
            MessageIllegal, ConnectionFailed, RequestTimeout: the reply could not be sent.
        """
        self._check_running()
        topic, text = reply_properties(request, properties)
        ext = self._header(topic, text, int(time.time() * 1000))
        ext["e"] = 0
        connection = await self._connect(request.queue)
        await connection.request(
            RequestCode.SEND_REPLY_MESSAGE_V2, ext, checked_body(self._encoded(body)), timeout_s=self._timeout_s
        )

    async def queue_for(self, topic: str, queue_key: str) -> Queue:
        """Return the queue for messages with this key. The queue stays the same until the writable queues in the
        topic's route change, for example while a broker is down.

        Raises TopicNotFound, and RocketletError if no name server responds.
        """
        return self._choose(await self.queues(topic), queue_key, None)

    async def send_oneway(
        self,
        topic: str,
        body: Body | bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_key: str | None = None,
        **unknown: Never,
    ) -> None:
        """Send a message without waiting for a response: fast, but the message may be lost.

        Raises MessageIllegal, TopicNotFound, ConnectionFailed, and RequestTimeout if the broker does not read from the
        connection for the producer's `timeout_s`.
        """
        if unknown:
            raise unexpected_of_send(unknown, MessageOptions.__annotations__)
        message = Outgoing(self._encoded(body), tag, keys, properties or {})
        if self._middleware:
            await self._call(Sending(topic, (message,), False, queue_key, None, "oneway"))
        else:
            await self._send_away(topic, message, queue_key)


def _around(
    layer: SendMiddleware, call: Callable[[Sending], Awaitable[SendResult]]
) -> Callable[[Sending], Awaitable[SendResult]]:
    return lambda sending: layer(sending, call)


__all__ = ["Producer", "Sending"]
