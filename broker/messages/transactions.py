"""Transactions: half messages wait in RMQ_SYS_TRANS_HALF_TOPIC until their producer commits or rolls back.

An outcome is noted in RMQ_SYS_TRANS_OP_HALF_TOPIC, in the same append as the committed message. If a producer stays silent,
it or another one of its group is asked (CHECK_TRANSACTION_STATE). After 15 times the message is moved to
TRANS_CHECK_MAX_TIME_TOPIC. Unlike Apache's broker, this one does not store a new copy with each check, so a late answer still
finds its half message, and a second commit stores nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import LOOKS, Work
from ...protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_MASK
from ...protocol.headers import EndTransaction
from ...protocol.message import Record
from ...protocol.names import tag_code
from ..runtime import Job, LiveConfig, Runtime
from ..sessions import Clients, OutcomeWanted
from ..store.files import Damaged, Save, StoreFull, read_state
from ..store.index import ConsumeQueue
from ..store.store import RetentionTime
from .appender import Appender, real_queue, with_real_queue
from .topics import Topics

log = structlog.get_logger("rocketlet.transactions")

# MessageConst's names; producers set the second to be asked later, or sooner
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"


_COMMITTED, _ROLLED_BACK, _SET_ASIDE = "committed", "rolled back", "set aside"
_OUTCOMES = (_COMMITTED, _ROLLED_BACK, _SET_ASIDE)


def half_properties(text: str, topic: str, queue_id: int) -> str:
    """Return the properties with which a half message is stored: its real queue, and its transaction id, which is the unique
    key (TransactionalMessageBridge.parseHalfMessageInner of 5.x). Consumers see the id once the message is committed."""
    text = with_real_queue(text, topic, queue_id)
    if unique_key := props.find(text, props.UNIQUE_KEY):
        text = props.appended(props.without(text, props.TRANSACTION_ID), props.TRANSACTION_ID, unique_key)
    return text


@dataclass(slots=True)
class Half:
    """A half message that waits; times in ms since the epoch."""

    position: int
    stored_ms: int
    checks: int = 0


class Transactions:
    """The half messages without an outcome, by offset in the half queue. The state file has how far everything is
    resolved, and how often the rest was asked for."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        settings: LiveConfig,
        topics: Topics,
        appender: Appender,
        clients: Clients,
        retention_time: RetentionTime,
    ) -> None:
        limits = self._limits = runtime.limits
        self.most = limits.max_half_messages
        self._path = path
        self._topics = topics
        self._settings = settings
        self._appender = appender
        self._store = appender.store
        self._clients = clients
        self._retention_time = retention_time
        self._halves: dict[int, Half] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()  # the latest outcomes
        self._op_begin = 0
        self._dirty = False
        self._load()

    @property
    def waiting(self) -> int:
        """How many half messages have no outcome."""
        return len(self._halves)

    @property
    def half_queue(self) -> ConsumeQueue:
        return self._store.queue(names.HALF_TOPIC, 0)

    @property
    def _op_queue(self) -> ConsumeQueue:
        return self._store.queue(names.OP_HALF_TOPIC, 0)

    def _load(self) -> None:
        state = read_state(self._path, is_derivable=True) or {}
        checks = {int(offset): int(count) for offset, count in state.get("checks", {}).items()}
        store, halves, ops = self._store, self.half_queue, self._op_queue
        self._op_begin = min(max(int(state.get("op", 0)), ops.begin), ops.next)
        resolved = set(self._resolved(range(self._op_begin, ops.next)))
        last = max(ops.begin, ops.next - self._limits.max_outcomes_read)
        if last < self._op_begin:
            list(self._resolved(range(last, self._op_begin)))
        for offset in range(max(int(state.get("half", 0)), halves.begin), halves.next):
            position, size, _ = halves.entry(offset)
            if offset not in resolved and size:
                stored_ms = store.store_time_ms(halves, offset)
                self._halves[offset] = Half(position, stored_ms, checks.get(offset, 0))

    def _resolved(self, ops: range) -> Iterator[int]:
        """The offsets of half messages whose outcome is noted, which are remembered."""
        for offset in ops:
            try:
                note = self._store.message(self._op_queue, offset)
                half = int(note.body)
                ended = props.find(note.properties, props.KEYS)  # notes of older releases do not say
                if ended in _OUTCOMES:
                    self._remember(half, ended)
                yield half
            except (Damaged, ValueError) as error:
                log.error("transaction_outcome_unreadable", offset=offset, reason=str(error))

    def saving(self) -> Job[Save | None]:
        """How to save what has changed; None if nothing has."""
        if not self._dirty:
            return None
        self._dirty = False
        yield None
        # Everything before is decided, so the next start reads from here (decision 11).
        first = min(self._halves, default=self.half_queue.next)
        if not self._halves:
            self._op_begin = self._op_queue.next
        checks: dict[str, int] = {}
        for number, (offset, half) in enumerate(list(self._halves.items()), 1):
            if half.checks:
                checks[str(offset)] = half.checks
            if number % LOOKS == 0:
                yield None
        content = orjson.dumps({"half": first, "op": self._op_begin, "checks": checks})
        return Save(self._path, content, self._again)

    def _again(self) -> None:
        self._dirty = True

    def expect(self, offset: int, position: int, stored_ms: int) -> None:
        """A half message was stored."""
        self._halves[offset] = Half(position, stored_ms)
        self._dirty = True

    # Outcomes

    def end(self, header: EndTransaction) -> str | None:
        """Commits or rolls back; returns why it cannot. An outcome that is known already changes nothing.
        Raises StoreFull."""
        offset = header.tran_state_table_offset
        half = self._halves.get(offset)
        record = self._store.record_at(header.commit_log_offset)
        # EndTransactionProcessor.checkPrepareMessage: a producer ends only what its own group has prepared, and both
        # positions must fit. The id must, too: after a power cut another half message may be there.
        is_there = record is not None and record.topic == names.HALF_TOPIC and record.queue_offset == offset
        if record is None or not is_there or not record.may_be(header.msg_id):
            return f"no half message is at {header.commit_log_offset} with the queue offset {offset}"
        if half is not None and half.position != header.commit_log_offset:
            return f"the half message {offset} is at {half.position}, not at {header.commit_log_offset}"
        group = props.find(record.properties, props.PRODUCER_GROUP)
        if group != header.producer_group:
            return f"the half message is of the producer group {group}, not {header.producer_group}"
        if half is None:
            return self._contradiction(offset, header.commit_or_rollback == SYS_TRANSACTION_COMMIT)
        if header.commit_or_rollback != SYS_TRANSACTION_COMMIT:
            self._resolve(offset, record, None, _ROLLED_BACK)
            return None
        target = self._target(record)
        if target is None:
            self._set_aside(offset, half, record, "its topic was deleted")
            return f"the topic {real_queue(record)[0]} was deleted; the message is in {names.CHECK_MAX_TIME_TOPIC}"
        self._resolve(offset, record, target, _COMMITTED)
        return None

    def _contradiction(self, offset: int, commits: bool) -> str | None:
        """Why an outcome is not the one that the message has had; None if it is, or if that was too long ago."""
        ended = self._ended.get(offset)
        if ended is None or ended == (_COMMITTED if commits else _ROLLED_BACK):
            return None
        return f"the message was {ended} before: it cannot be {_COMMITTED if commits else _ROLLED_BACK} any more"

    def _target(self, record: Record) -> tuple[str, int] | None:
        """The queue for a committed message; None if its topic is gone."""
        topic, wanted = real_queue(record)
        queue_id = self._topics.queue_now(topic, wanted)
        if queue_id is None:
            return None
        if queue_id != wanted:
            log.info("message_in_another_queue", topic=topic, queue=queue_id, wanted=wanted)
        return topic, queue_id

    def _set_aside(self, offset: int, half: Half, record: Record, why: str) -> None:
        """Keep a message for inspection, and do not deliver it, like
        DefaultTransactionalMessageCheckListener.resolveDiscardMsg."""
        log.warning("transaction_set_aside", topic=real_queue(record)[0], checks=half.checks, hint=why)
        self._resolve(offset, record, (names.CHECK_MAX_TIME_TOPIC, 0), _SET_ASIDE)

    def _resolve(self, offset: int, record: Record, target: tuple[str, int] | None, ended: str) -> None:
        """target: the queue in which the message is stored; None rolls back."""
        # TransactionalMessageUtil.REMOVETAG: Apache's tools read these notes
        text = f"{props.TAGS}{props.NAME_END}d{props.PAIR_END}{props.KEYS}{props.NAME_END}{ended}"
        with self._appender.batch():  # the message and the note of its outcome: both or none
            if target is not None:
                self._stage_real(record, target)
            self._appender.stage(
                self._op_queue,
                str(offset).encode(),
                text.encode(),
                tag_code(text),
                0,
                0,
                record.born_ms,
                record.born_host,
            )
        del self._halves[offset]
        self._remember(offset, ended)
        self._dirty = True

    def _remember(self, offset: int, ended: str) -> None:
        self._ended[offset] = ended
        if len(self._ended) > self._limits.max_outcomes:
            self._ended.popitem(last=False)

    def _stage_real(self, record: Record, target: tuple[str, int]) -> None:
        self._appender.stage_again(
            record,
            self._store.queue(*target),
            record.properties.encode(),
            tag_code(record.properties),
            sys_flag=record.sys_flag & ~SYS_TRANSACTION_MASK | SYS_TRANSACTION_COMMIT,
            prepared_offset=record.physical_offset,
        )

    # Checks

    def checking(self) -> Work[None]:
        """Asks for the outcome of every half message that is old enough, a message a piece."""
        now_ms = int(self._retention_time.now_s() * 1000)  # a wall clock set ahead must not end all of them
        keep_ms = self._settings.now.retain_hours * 3_600_000
        for offset, half in sorted(self._halves.items()):
            if self._halves.get(offset) is not half:  # ended meanwhile
                continue
            try:
                self._check_one(offset, half, now_ms, keep_ms)
            except StoreFull as error:
                log.error("transaction_check_failed", reason=str(error))
                return
            except Exception:  # the others are asked about all the same
                log.exception("transaction_check_impossible", offset=offset, position=half.position)
            yield

    def _check_one(self, offset: int, half: Half, now_ms: int, keep_ms: float) -> None:
        record = self._store.record_at(half.position)
        if record is None:
            log.warning("half_message_lost", offset=offset, hint="it has expired or is damaged, and had no outcome")
            del self._halves[offset]
            return
        half.stored_ms = min(half.stored_ms, now_ms)  # it was stored when the clock was ahead
        if now_ms - half.stored_ms < self._patience_ms(record):
            return
        if half.checks >= self._settings.now.transaction_check_max or now_ms - half.stored_ms > keep_ms:
            self._set_aside(offset, half, record, "it has no outcome")
        else:
            self._ask(half, record)

    def _patience_ms(self, record: Record) -> float:
        asked = props.find(record.properties, CHECK_IMMUNITY) or ""
        if asked.isdecimal() and len(asked) <= 9:
            return int(asked) * 1000
        return self._settings.now.transaction_timeout_s * 1000

    def _ask(self, half: Half, record: Record) -> None:
        """Asks a producer of the group for the outcome. Without one the check does not count: the message waits until one
        is back."""
        session = self._clients.any_producer(
            props.find(record.properties, props.PRODUCER_GROUP) or "", real_queue(record)[0]
        )
        if session is None:
            return
        # Counted before the answer: a producer that dies of each question must not be asked for ever.
        half.checks += 1
        self._dirty = True
        session.tell(OutcomeWanted(record, half.checks))
