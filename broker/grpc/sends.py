"""SendMessage: the messages of all calls of a socket read are staged one by one, and stored together."""

from __future__ import annotations

import random
import zlib
from typing import Any

import structlog

from ...protocol import names
from ...protocol.bodies import TopicConfig
from ...protocol.codes import PERM_WRITE
from ...protocol.compression import Inflater, SpentTooMuch
from ...protocol.config import MAX_CALL_BYTES
from ...protocol.headers import SendMessage
from ...protocol.work import Work
from ..config import MAX_SEND_MESSAGES
from ..messages.sending import Placed
from ..store.files import StoreFull
from .calls import Call, set_status
from .codes import Code, Fault
from .hall import Hall
from .messages import TRANSACTION, TYPE_NAMES, Sent, checked, decompressing, is_gzip
from .names import topic_of
from .routes import accepted_types
from .schema import SendMessageResponse

log = structlog.get_logger("rocketlet.sending")

_Answers = list[tuple[Call, Any]]


class Sends:
    """`staged`: calls with their answers, which are given when their messages are stored."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._sending = hall.broker.sending
        self.staged: _Answers = []

    def stage(self, call: Call, request: Any) -> Work[None] | None:
        """Stage the call's messages, or return the work that does so because their bodies are to be decompressed first.

        Raises:
            Fault: The messages are refused, and nothing of the call is staged.
        """
        broker = self._hall.broker
        if not request.messages or len(request.messages) > MAX_SEND_MESSAGES:
            raise Fault(Code.MESSAGE_CORRUPTED, f"a call sends 1 to {MAX_SEND_MESSAGES} messages")
        name = topic_of(request.messages[0].topic)
        if any(message.topic.name != name for message in request.messages):
            raise Fault(Code.MESSAGE_CORRUPTED, "the messages are of different topics")
        now_ms = broker.clock.time_ms()
        sent = [checked(message, name, now_ms) for message in request.messages]
        topic = self._topic(name, sent)
        if any(map(is_gzip, sent)):
            return self._decompressing(call, name, sent)
        self._stage(call, topic, sent)
        return None

    def _decompressing(self, call: Call, name: str, sent: list[Sent]) -> Work[None]:
        """A body of 4 KB may inflate to 4 MiB, and one that is damaged takes as long: the bodies of a call may have as many
        bytes, decompressed, as a call that is not compressed."""
        inflater = Inflater(MAX_CALL_BYTES)
        for number, item in enumerate(sent):
            if is_gzip(item):
                try:
                    sent[number] = yield from decompressing(item, inflater)
                except SpentTooMuch:
                    reason = f"the bodies of one call inflate to more than {MAX_CALL_BYTES} bytes; send several calls"
                    raise Fault(Code.MESSAGE_BODY_TOO_LARGE, reason) from None
        self._stage(call, self._topic(name, sent), sent)

    def _stage(self, call: Call, topic: TopicConfig, sent: list[Sent]) -> None:
        response = SendMessageResponse()
        set_status(response.status)
        mark = self._sending.mark()
        try:
            for item in sent:
                header = _header(topic, _queue_of(topic, item, len(sent)), item)
                placed = self._sending.stage(header, item.body, call.session.born_host)
                _add_entry(response, item, placed)
        except BaseException:
            self._sending.undo(mark)
            raise
        self.staged.append((call, response))

    def _topic(self, name: str, sent: list[Sent]) -> TopicConfig:
        """Raises Fault."""
        topic = self._hall.broker.topics.get(name)
        if topic is None:
            raise Fault(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
        if not topic.perm & PERM_WRITE or not topic.write_queues:
            raise Fault(Code.FORBIDDEN, f"the topic {name} has no queue that may be written")
        if not name.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
            accepted = accepted_types(topic)
            for item in sent:
                if item.kind not in accepted:
                    reason = (
                        f"the topic {name} takes {topic.message_type} messages, this one is {TYPE_NAMES[item.kind]}"
                    )
                    raise Fault(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, reason)
        return topic

    def settle(self) -> None:
        """Stores the staged messages, and answers: with `--flush sync` when they are on the device."""
        staged, self.staged = self.staged, []
        broker = self._hall.broker
        try:
            self._sending.commit()
        except Exception as error:
            if not isinstance(error, StoreFull):
                log.exception("sends_refused_store_failed")
            _refuse(staged, str(error) or type(error).__name__)
            return
        broker.when_kept(
            lambda: _answer(staged), lambda: _refuse(staged, str(broker.store.fault or "the disk does not keep it"))
        )


def _queue_of(topic: TopicConfig, sent: Sent, count: int) -> int:
    """All messages of a group go to one queue."""
    if sent.group_key and count == 1:
        return zlib.crc32(sent.group_key.encode()) % topic.write_queues
    return random.randrange(topic.write_queues)


def _header(topic: TopicConfig, queue_id: int, sent: Sent) -> SendMessage:
    return SendMessage(
        topic.name, topic.name, names.DEFAULT_TOPIC, 0, queue_id, sent.sys_flag, sent.born_ms, 0, sent.properties
    )


def _add_entry(response: Any, sent: Sent, placed: Placed) -> None:
    entry = response.entries.add()
    set_status(entry.status)
    entry.message_id = sent.message_id
    entry.transaction_id = transaction_id(placed) if sent.kind == TRANSACTION else sent.message_id
    entry.offset = placed.queue_offset
    entry.recall_handle = placed.recall_handle or ""


def transaction_id(placed: Placed) -> str:
    """The id by which a half message is found. Clients do not look into it."""
    return f"{placed.position:016X}{placed.queue_offset:016X}"


def _answer(staged: _Answers) -> None:
    for call, response in staged:
        call.answer(response)


def _refuse(staged: _Answers, reason: str) -> None:
    for call, _ in staged:
        call.refuse(Code.INTERNAL_SERVER_ERROR, f"the messages could not be stored: {reason}")
