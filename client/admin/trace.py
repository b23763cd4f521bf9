"""Traces of messages: Apache's message trace, and the state of a message in each group."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ...protocol import admin_bodies, names
from ...protocol import properties as props
from ...protocol.admin_bodies import About, Kind, TraceRecord
from ...protocol.message import MessageError
from ...protocol.names import parse_subscription
from ..config import CLIENT_LIMITS, MAX_TRACE_MESSAGES, TRACE_FLUSH_S, ClientLimits, check_group
from ..consuming.handling import Middleware, Outcome, Settled
from ..errors import BrokerRefused, RocketletError, TopicNotFound, get_logger
from ..message import Message, Outgoing, SendResult
from ..producer import Producer
from ..sending.accumulator import Sending, SendMiddleware, check_topic
from ..sending.requests import TransactionEnd
from ..wire.connection import Access, cancelled
from .admin_client import AdminClient
from .messages import parsed_offset_id

log = get_logger("rocketlet.message_trace")


# ------------------------------------------------------------------------------
# Apache's message trace: for each message its sender, the consumers that handled it, and their outcomes.
#
# `mqadmin queryMsgTraceById` and RocketMQ's dashboard read it. Middleware records events, and many records are sent in
# one message to the trace topic. If records of the trace cannot be written, that is logged and has no effect on the
# traced messages.


GROUP = "rocketlet-trace"
Note = Callable[[Iterable[tuple[About, str]]], None]


class MessageTrace:
    """Writes Apache's message trace. Pass its middleware to producers and consumers, and close it after them:

        async with MessageTrace("host:port") as trace, Producer("host:port", "shop", middleware=[trace.sends("shop")]):
            ...

    The trace has successful sends, outcomes of transactions that were sent to a broker, and the start and end of each
    handler call, except for messages of a broker whose tracing is switched off. Records beyond
    `ClientLimits.trace_waiting` that wait to be written are dropped and counted in the log.

    - `topic`: the trace topic. Default: RMQ_SYS_TRACE_TOPIC, as with Apache's clients.
    """

    def __init__(
        self,
        name_server: str,
        *,
        topic: str = admin_bodies.TOPIC,
        access: Access | None = None,
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        check_topic(topic)
        self._producer = Producer(name_server, GROUP, access=access, limits=limits)
        self._limits = limits
        self._topic = topic
        self._waiting: list[tuple[About, str]] = []
        self._dropped = 0
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start to write the trace. Raises ConnectionFailed if no name server can be reached."""
        await self._producer.start()
        self._task = asyncio.create_task(self._write_on(), name="message trace")
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Write the remaining records and stop."""
        try:
            async with self._writing:  # wait for a write in flight
                if self._task is not None:
                    await cancelled([self._task])
                await self._write()
        finally:
            await self._producer.stop()

    # Recording

    def sends(self, group: str) -> SendMiddleware:
        """Return middleware for a producer of this group. Failed sends are not recorded, as with Apache's client."""
        check_group(group)
        return _Sends(group, self._note)

    def handlers(self, group: str) -> Middleware:
        """Return middleware for a consumer of this group, with or without a handler."""
        check_group(group)
        return _Handlers(group, self._note)

    def _note(self, records: Iterable[tuple[About, str]]) -> None:
        for record in records:
            if len(self._waiting) >= self._limits.trace_waiting:
                self._dropped += 1
            else:
                self._waiting.append(record)
        self._news.set()

    # Writing

    async def _write_on(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TRACE_FLUSH_S)
            self._news.clear()
            async with self._writing:
                await self._write()

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning(
                "trace_dropped", records=dropped, hint="brokers store the trace more slowly than records arrive"
            )
        messages = list(_packed(waiting, self._limits))
        answers = await asyncio.gather(*map(self._send, messages), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, RocketletError):
                log.warning("trace_not_written", reason=str(answer), messages=len(messages))
                return
            if isinstance(answer, BaseException):
                raise answer

    async def _send(self, message: Outgoing) -> None:
        await self._producer.send(self._topic, message.body, keys=message.keys)


class _Sends:
    def __init__(self, group: str, note: Note) -> None:
        self._group = group
        self._note = note

    async def __call__(self, sending: Sending, call: Callable[[Sending], Awaitable[SendResult]]) -> SendResult:
        began_ms = _now_ms()
        result = await call(sending)
        self._note(_sent(sending, result, self._group, began_ms))
        return result

    def transaction_ended(self, end: TransactionEnd) -> None:
        about = About(end.message_id, end.keys)
        record = admin_bodies.transaction_ended(
            about, time_ms=_now_ms(), group=self._group, topic=end.topic, tag=end.tag or "", store_host=end.broker,
            commits=end.commits, is_check=end.is_check,
        )  # fmt: skip
        self._note([(about, record)])


class _Handlers:
    def __init__(self, group: str, note: Note) -> None:
        self._group = group
        self._note = note

    async def __call__(self, given: Any, call: Callable[[Any], Awaitable[Outcome]]) -> Outcome:
        noted = self._begin(given if isinstance(given, list) else (given,))
        how = admin_bodies.ConsumeReturnType.EXCEPTION
        try:
            outcome = await call(given)
            how = _how(outcome)
            return outcome
        finally:
            noted(how)

    def begins(self, messages: Sequence[Message]) -> Settled:
        noted = self._begin(messages)
        return lambda outcome: noted(_how(outcome))

    def _begin(self, messages: Sequence[Message]) -> Callable[[admin_bodies.ConsumeReturnType], None]:
        # the broker sets this property
        messages = [one for one in messages if one.properties.get(props.TRACE_ON) != "false"]
        handling_id, began_ms = os.urandom(16).hex().upper(), _now_ms()
        self._note(_before(messages, self._group, handling_id, began_ms))
        return lambda how: self._note(_after(messages, self._group, handling_id, began_ms, how))


def _how(outcome: Outcome) -> admin_bodies.ConsumeReturnType:
    return admin_bodies.ConsumeReturnType.SUCCESS if outcome is None else admin_bodies.ConsumeReturnType.FAILED


def _packed(records: Iterable[tuple[About, str]], limits: ClientLimits) -> Iterator[Outgoing]:
    """Combine records into messages up to the limits. A record that exceeds them gets a message of its own."""
    keys: dict[str, None] = {}
    texts: list[bytes] = []
    size = keys_size = 0
    for about, text in records:
        record = text.encode()
        mine = dict.fromkeys((*about.keys.split(), about.message_id))
        fresh = sum(len(key.encode()) + 1 for key in mine if key not in keys)
        if texts and (size + len(record) > limits.trace_bytes or keys_size + fresh > limits.trace_keys_bytes):
            yield Outgoing(b"".join(texts), keys=tuple(keys))
            keys, texts, size, keys_size = {}, [], 0, 0
            fresh = sum(len(key.encode()) + 1 for key in mine)
        keys |= mine
        texts.append(record)
        size += len(record)
        keys_size += fresh
    if texts:
        yield Outgoing(b"".join(texts), keys=tuple(keys))


def _sent(sending: Sending, result: SendResult, group: str, began_ms: int) -> Iterator[tuple[About, str]]:
    ids, offset_ids = result.message_id.split(","), result.offset_id.split(",")
    if len(ids) != len(sending.messages):  # an id that the sender has chosen contains a comma
        ids = [result.message_id] * len(sending.messages)
    took_ms = (_now_ms() - began_ms) // len(sending.messages)
    for number, message in enumerate(sending.messages):
        offset_id = offset_ids[min(number, len(offset_ids) - 1)]
        host, port = parsed_offset_id(offset_id)[:2] if offset_id else (result.queue.broker_name, 0)
        keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
        about = About(ids[number], keys)
        is_late = message.delay_level or message.delay or message.at
        kind = Kind.HALF if sending.kind == "half" else Kind.DELAYED if is_late else Kind.NORMAL
        yield about, admin_bodies.sent(
            about, time_ms=began_ms, group=group, topic=sending.topic, tag=message.tag or "", store_host=f"{host}:{port}",
            size=len(message.body), took_ms=took_ms, kind=kind, offset_id=offset_id,
        )  # fmt: skip


def _before(messages: Sequence[Message], group: str, handling_id: str, began_ms: int) -> Iterator[tuple[About, str]]:
    for message in messages:
        about = _about(message)
        yield (
            about,
            admin_bodies.before_handling(
                about, time_ms=began_ms, group=group, handling_id=handling_id, retries=message.reconsume_times
            ),
        )


def _after(
    messages: Sequence[Message], group: str, handling_id: str, began_ms: int, outcome: admin_bodies.ConsumeReturnType
) -> Iterator[tuple[About, str]]:
    now_ms = _now_ms()
    for message in messages:
        about = _about(message)
        yield about, admin_bodies.after_handling(
            about, time_ms=now_ms, group=group, handling_id=handling_id, outcome=outcome,
            took_ms=(now_ms - began_ms) // len(messages),
        )  # fmt: skip


def _about(message: Message) -> About:
    return About(message.message_id, message.properties.get(props.KEYS, ""))


def _now_ms() -> int:
    return int(time.time() * 1000)


# ------------------------------------------------------------------------------
# Reads the trace of a message, whichever client wrote it.


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A send, an outcome of a transaction, or a handler call in the trace of a message.

    Attributes:
        what: `sent`, `transaction ended` or `handled`.
        time_ms: its start, in ms since the epoch; 0 if it is unknown.
        took_ms: its duration; None for a transaction, and for a handler without a record of its end.
        outcome: `success`, `failed`, the outcome of the transaction, or `running` for a handler without a record of its end.
        attempt: the number of the handler's attempt, from 1; 0 for other events.
    """

    what: Literal["sent", "transaction ended", "handled"]
    time_ms: int
    group: str
    took_ms: int | None
    outcome: str
    attempt: int = 0
    store_host: str = ""


async def trace_of(admin: AdminClient, message_id: str, *, topic: str = admin_bodies.TOPIC) -> list[TraceEvent]:
    """Return the events of a message in the trace, oldest first; an empty list if no client has traced it. Raises
    RocketletError."""
    messages = await admin.messages_with_key(topic, message_id, limit=MAX_TRACE_MESSAGES)
    records = [record for message in messages for record in _records(message) if record.message_id == message_id]
    began = {record.handling_id: record for record in records if record.kind == "SubBefore"}
    ended = {record.handling_id: record for record in records if record.kind == "SubAfter"}
    events = [_event_of(record) for record in dict.fromkeys(records) if record.kind in ("Pub", "EndTransaction")]
    events += [_handled(record, ended.get(key)) for key, record in began.items()]
    events += [_handled_without_start(record) for key, record in ended.items() if key not in began]
    return sorted(events, key=lambda event: event.time_ms)


def _event_of(record: TraceRecord) -> TraceEvent:
    if record.kind == "Pub":
        return TraceEvent(
            "sent", record.time_ms, record.group, record.took_ms, _outcome(record), store_host=record.store_host
        )
    state = record.state.removesuffix("_MESSAGE").lower()
    return TraceEvent("transaction ended", record.time_ms, record.group, None, state, store_host=record.store_host)


def _handled(began: TraceRecord, ended: TraceRecord | None) -> TraceEvent:
    took_ms, outcome = (None, "running") if ended is None else (ended.took_ms, _outcome(ended))
    return TraceEvent("handled", began.time_ms, began.group, took_ms, outcome, began.attempt + 1)


def _handled_without_start(ended: TraceRecord) -> TraceEvent:
    begin_ms = max(ended.time_ms - ended.took_ms, 0)
    return TraceEvent("handled", begin_ms, ended.group, ended.took_ms, _outcome(ended))


def _outcome(record: TraceRecord) -> str:
    return "success" if record.is_success else "failed"


def _records(message: Message) -> list[TraceRecord]:
    try:
        return admin_bodies.decode_trace(message.body)
    except MessageError:  # any client may write to the topic
        return []


# ------------------------------------------------------------------------------
# Determines the state of a message in each group that reads its topic, with requests that Apache's brokers support, too.


State = Literal["consumed", "waiting", "retry", "dead", "filtered", "unknown"]


@dataclass(frozen=True, slots=True)
class Track:
    """The state of a message in a group. The values of `state` are:

    - `consumed`: the group has committed an offset after the message and after its retries, if there are any.
    - `waiting`: the group has not; `lag` is the number of messages from the committed offset to before the message.
    - `retry`: a handler failed, and the message will be redelivered; `retries` is the number of retries so far.
    - `dead`: the message is in the group's dead-letter topic.
    - `filtered`: the group's subscription does not match the message's tag.
    - `unknown`: the group has no offset in the message's queue.
    """

    group: str
    state: State
    lag: int = 0
    retries: int = 0


async def tracks(admin: AdminClient, message: Message) -> list[Track]:
    """Return the state of a message in each group that reads its topic. Raises RocketletError."""
    groups = await admin.consumed_by(message.topic)
    return list(await asyncio.gather(*(_track(admin, message, group) for group in groups)))


async def _track(admin: AdminClient, message: Message, group: str) -> Track:
    if await _find(admin, message, names.dlq_topic(group)):
        return Track(group, "dead")
    progress = (await admin.progress(group, message.queue.topic, times=False)).get(message.queue)
    if progress is None:
        return Track(group, "unknown")
    if progress.consumer_offset <= message.queue_offset:
        return Track(group, "waiting", lag=message.queue_offset - progress.consumer_offset)
    retried = await _retried(admin, message, group)
    if retried is not None:
        return retried
    connections = await admin.connections(group)
    expressions = {
        known.subscriptions[message.topic] for known in connections.values() if message.topic in known.subscriptions
    }
    if expressions and not any(_takes(message, text) for text in expressions):
        return Track(group, "filtered")
    return Track(group, "consumed")


def _takes(message: Message, expression: str) -> bool:
    """Return True if a message's tag matches a filter. An SQL filter counts as matching, because only brokers evaluate
    it."""
    try:
        tags = parse_subscription(message.topic, expression).tags
    except ValueError:
        return True
    return not tags or message.tag in tags


async def _retried(admin: AdminClient, message: Message, group: str) -> Track | None:
    """Return the state of a message that was returned for a retry, which first waits in the broker's schedule and then
    in the retry topic; None if it was not returned."""
    topic = names.retry_topic(group)
    tries = await _find(admin, message, topic)
    waits = [
        item
        for item in await _find(admin, message, names.SCHEDULE_TOPIC)
        if item.properties.get(props.REAL_TOPIC) == topic
    ]
    if not tries and not waits:
        return None
    newest = max(tries, key=lambda item: item.reconsume_times, default=None)
    count = max(item.reconsume_times for item in (*tries, *waits))
    if newest is None or newest.reconsume_times < count:
        return Track(group, "retry", retries=count)
    progress = (await admin.progress(group, topic, times=False)).get(newest.queue)
    if progress is None or progress.consumer_offset <= newest.queue_offset:
        return Track(group, "retry", retries=count)
    return Track(group, "consumed", retries=count)


async def _find(admin: AdminClient, message: Message, topic: str) -> list[Message]:
    """Return the message's copies in a topic; an empty list if the topic does not exist."""
    try:
        return await admin.copies(message.message_id, topic)
    except (TopicNotFound, BrokerRefused):
        return []
