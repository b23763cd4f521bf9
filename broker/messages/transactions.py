"""Transactions: half messages wait in RMQ_SYS_TRANS_HALF_TOPIC until their producer commits or rolls back, or they are set
aside.

An outcome is recorded in RMQ_SYS_TRANS_OP_HALF_TOPIC, in the same append as the committed message. If a producer sends
no outcome, the broker requests it (CHECK_TRANSACTION_STATE) from the session that sent the half message, and once that
session is gone from another producer of the group: first when the message is as old as `transaction_timeout_s` or a
property of the message says, then every `transaction_check_interval_s`. After
`transaction_check_max` requests (15 by default), or after the retention time, the message is moved to
TRANS_CHECK_MAX_TIME_TOPIC. Unlike Apache's broker, this broker stores no new copy with each check, so that a late
outcome still finds its half message, and a second commit stores nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from pathlib import Path

import orjson
import structlog
from msgspec import Struct

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import LOOKS, Work
from ...protocol.codes import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_MASK
from ...protocol.headers import EndTransaction
from ...protocol.message import Record
from ...protocol.names import tag_code
from ..config import MAX_TRANSACTION_TIMEOUT_S
from ..runtime.clock import SingleTimer
from ..runtime.jobs import Job
from ..runtime.live_config import LiveConfig
from ..runtime.runtime import Runtime
from ..sessions.clients import Clients
from ..sessions.events import OutcomeWanted
from ..store.files import Damaged, Save, StoreFull, read_state
from ..store.index import ConsumeQueue
from ..store.store import RetentionTime
from .appender import Appender, real_queue, with_real_queue
from .topics import Topics

log = structlog.get_logger("rocketlet.transactions")

# names of MessageConst; producers set the second property to be checked later or sooner
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"


_COMMITTED, _ROLLED_BACK, _SET_ASIDE = "committed", "rolled back", "set aside"
_OUTCOMES = (_COMMITTED, _ROLLED_BACK, _SET_ASIDE)


@dataclass(frozen=True, slots=True)
class OutcomeFault:
    """The reason why an outcome has no effect.

    Attributes:
        ended: the outcome that the broker has recorded for the half message: "committed", "rolled back" or "set aside"; empty
            if it has recorded none, or if no such half message exists.
    """

    reason: str
    ended: str = ""


def half_properties(text: str, topic: str, queue_id: int) -> str:
    """Return the properties with which a half message is stored: its target queue, and its transaction id, which is the
    unique key (TransactionalMessageBridge.parseHalfMessageInner of 5.x). Consumers see the id after the commit."""
    text = with_real_queue(text, topic, queue_id)
    if unique_key := props.find(text, props.UNIQUE_KEY):
        text = props.appended(props.without(text, props.TRANSACTION_ID), props.TRANSACTION_ID, unique_key)
    return text


class _Progress(Struct):
    """The state file: the first half message and the first outcome to read, and how often half messages were checked, by
    offset."""

    half: int = 0
    op: int = 0
    checks: dict[int, int] = {}


@dataclass(slots=True)
class Half:
    """A half message that waits; times in ms since the epoch."""

    position: int
    stored_ms: int
    checks: int = 0


class Transactions:
    """Half messages without an outcome, by offset in the half queue.

    The state file contains the offset before which all half messages have outcomes, and the number of checks of the
    others.
    """

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
        self._adoption = runtime.adoption
        self._clock = runtime.clock
        self._turns = runtime.turns
        self.most = limits.max_half_messages
        self._path = path
        self._topics = topics
        self._settings = settings
        self._appender = appender
        self._store = appender.store
        self._clients = clients
        self._retention_time = retention_time
        self._halves: dict[int, Half] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()  # latest outcomes by offset
        self._op_begin = 0
        self._dirty = False
        # when halves are checked next, as (clock's seconds, offset); entries of halves with an outcome are dropped later
        self._due: list[tuple[float, int]] = []
        self._is_started = False
        self._timer = SingleTimer(self._clock, partial(self._turns.do_alone, "transactions", self.checking))
        self._load()

    @property
    def waiting(self) -> int:
        """The number of half messages without an outcome."""
        return len(self._halves)

    @property
    def scheduled_checks(self) -> int:
        """The number of checks that are scheduled, including those of half messages that have an outcome meanwhile."""
        return len(self._due)

    @property
    def half_queue(self) -> ConsumeQueue:
        return self._store.queue(names.HALF_TOPIC, 0)

    @property
    def _op_queue(self) -> ConsumeQueue:
        return self._store.queue(names.OP_HALF_TOPIC, 0)

    def _load(self) -> None:
        value = read_state(self._path, is_derivable=True)
        saved = self._adoption.whole("checks of transactions", value, _Progress) or _Progress()
        store, halves, ops = self._store, self.half_queue, self._op_queue
        self._op_begin = min(max(saved.op, ops.begin), ops.next)
        resolved = set(self._resolved(range(self._op_begin, ops.next)))
        last = max(ops.begin, ops.next - self._limits.max_outcomes_read)
        if last < self._op_begin:
            list(self._resolved(range(last, self._op_begin)))
        for offset in range(max(saved.half, halves.begin), halves.next):
            position, size, _ = halves.entry(offset)
            if offset not in resolved and size:
                stored_ms = store.store_time_ms(halves, offset)
                self._halves[offset] = Half(position, stored_ms, saved.checks.get(offset, 0))
        # Their records are not read here, so those that are to be checked later are scheduled again when they are due.
        now_s, now_ms, timeout_s = (
            self._clock.monotonic_s(),
            self._store.now_ms,
            self._settings.now.transaction_timeout_s,
        )
        self._due = [
            (now_s + max(timeout_s - max(now_ms - half.stored_ms, 0) / 1000, 0.0), offset)
            for offset, half in self._halves.items()
        ]
        heapify(self._due)

    def _resolved(self, ops: range) -> Iterator[int]:
        """Yield the offsets of half messages whose outcomes are recorded, and remember the outcomes. Unreadable records are
        logged and skipped."""
        for offset in ops:
            try:
                note = self._store.message(self._op_queue, offset)
                half = int(note.body)
                ended = props.find(note.properties, props.KEYS)
                if ended in _OUTCOMES:
                    self._remember(half, ended)
                yield half
            except (Damaged, ValueError) as error:
                log.error("transaction_outcome_unreadable", offset=offset, reason=str(error))

    def preparing_save(self) -> Job[Save | None]:
        """Return the state file to save; None if nothing has changed."""
        if not self._dirty:
            return None
        self._dirty = False
        yield None
        # All half messages before this one have outcomes, so the next start reads from here (docs/decisions, 11).
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
        return Save(self._path, content, self._save_failed)

    def _save_failed(self) -> None:
        self._dirty = True

    def expect(self, offset: int, position: int, stored_ms: int, text: str) -> None:
        """Record a half message that was just stored, with the properties `text`, and schedule its first check."""
        self._halves[offset] = Half(position, stored_ms)
        self._dirty = True
        delay_ms = self._check_delay_ms(text)
        if len(self._due) > 2 * len(self._halves) + self._limits.max_lapsed_checks:
            self._due = [entry for entry in self._due if entry[1] in self._halves]
            heapify(self._due)
        heappush(self._due, (self._clock.monotonic_s() + delay_ms / 1000, offset))
        if self._due[0][1] == offset:
            self._set_timer()

    # Outcomes

    def end(self, header: EndTransaction, *, shown_id: str = "") -> OutcomeFault | None:
        """Commit or roll back. Return the reason why this is impossible; None on success. If the half message has an outcome
        already, nothing changes, and the reason is None if the outcome is the same or no longer known. Raises StoreFull.

        Args:
            shown_id: the transaction id that consumers of the message see, if it is not the unique key.
        """
        offset = header.tran_state_table_offset
        half = self._halves.get(offset)
        record = self._store.record_at(header.commit_log_offset)
        # EndTransactionProcessor.checkPrepareMessage: the producer group and both positions must match. The id must
        # match as well, because after a power failure another half message may be at this position.
        is_there = record is not None and record.topic == names.HALF_TOPIC and record.queue_offset == offset
        if record is None or not is_there or not record.may_be(header.msg_id):
            return OutcomeFault(f"no half message is at {header.commit_log_offset} with the queue offset {offset}")
        if half is not None and half.position != header.commit_log_offset:
            return OutcomeFault(f"the half message {offset} is at {half.position}, not at {header.commit_log_offset}")
        group = props.find(record.properties, props.PRODUCER_GROUP)
        if group != header.producer_group:
            return OutcomeFault(f"the half message is of the producer group {group}, not {header.producer_group}")
        if half is None:
            return self._contradiction(offset, header.commit_or_rollback == SYS_TRANSACTION_COMMIT)
        if header.commit_or_rollback != SYS_TRANSACTION_COMMIT:
            self._resolve(offset, record, None, _ROLLED_BACK)
            return None
        target = self._target(record)
        if target is None:
            self._set_aside(offset, half, record, "its topic was deleted")
            reason = f"the topic {real_queue(record)[0]} was deleted; the message is in {names.CHECK_MAX_TIME_TOPIC}"
            return OutcomeFault(reason, _SET_ASIDE)
        if shown_id:
            text = props.appended(
                props.without(record.properties, props.TRANSACTION_ID), props.TRANSACTION_ID, shown_id
            )
            record = record._replace(properties=text)
        self._resolve(offset, record, target, _COMMITTED)
        return None

    def _contradiction(self, offset: int, commits: bool) -> OutcomeFault | None:
        """Return an error if an outcome contradicts the recorded one; None if both are equal, or if the recorded one is
        no longer known."""
        ended = self._ended.get(offset)
        wanted = _COMMITTED if commits else _ROLLED_BACK
        if ended is None or ended == wanted:
            return None
        return OutcomeFault(f"the message was {ended} before, so it cannot be {wanted}", ended)

    def _target(self, record: Record) -> tuple[str, int] | None:
        """Return the queue for a committed message; None if its topic no longer exists."""
        topic, wanted = real_queue(record)
        queue_id = self._topics.queue_now(topic, wanted, record.physical_offset)
        if queue_id is None:
            return None
        if queue_id != wanted:
            log.info("message_in_another_queue", topic=topic, queue=queue_id, wanted=wanted)
        return topic, queue_id

    def _set_aside(self, offset: int, half: Half, record: Record, reason: str) -> None:
        """Store a message for inspection instead of delivering it, like
        DefaultTransactionalMessageCheckListener.resolveDiscardMsg."""
        log.warning("transaction_set_aside", topic=real_queue(record)[0], checks=half.checks, hint=reason)
        self._resolve(offset, record, (names.CHECK_MAX_TIME_TOPIC, 0), _SET_ASIDE)

    def _resolve(self, offset: int, record: Record, target: tuple[str, int] | None, ended: str) -> None:
        """Record the outcome of a half message, and store the message in `target`, or nowhere if `target` is None."""
        # "d" is the tag of such records at Apache's broker (TransactionalMessageUtil.REMOVETAG)
        text = f"{props.TAGS}{props.NAME_END}d{props.PAIR_END}{props.KEYS}{props.NAME_END}{ended}"
        with self._appender.batch():  # the message and its outcome in one append
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

    def start(self) -> None:
        self._is_started = True
        self._set_timer()

    def stop(self) -> None:
        self._is_started = False
        self._timer.cancel()

    def _set_timer(self, at_least_s: float = 0.0) -> None:
        self._timer.cancel()
        if self._is_started and self._due:
            self._timer.set(max(self._due[0][0] - self._clock.monotonic_s(), at_least_s))

    def checking(self) -> Work[None]:
        """Request the outcomes of half messages whose check is due, or set them aside after the last check or the retention
        time, one per piece of work. If the disk is full, stop for `transaction_check_interval_s`."""
        interval_s = self._settings.now.transaction_check_interval_s
        at_least_s, began_s = 0.0, self._clock.monotonic_s()
        looked = 0
        try:
            while self._due and self._due[0][0] <= began_s:
                offset = self._due[0][1]
                half = self._halves.get(offset)
                if half is None:
                    heappop(self._due)
                    looked += 1
                    if looked % LOOKS == 0:
                        yield
                    continue
                try:
                    next_s = self._check_one(offset, half)
                except StoreFull as error:
                    log.error("transaction_check_failed", reason=str(error))
                    at_least_s = interval_s
                    return
                except Exception:  # continue with the other half messages
                    log.exception("transaction_check_impossible", offset=offset, position=half.position)
                    next_s = interval_s
                heapreplace(self._due, (self._clock.monotonic_s() + next_s, offset))
                yield
        finally:
            self._set_timer(at_least_s)

    def _check_one(self, offset: int, half: Half) -> float:
        """Check a half message, or set it aside. Return the time in seconds until its next check."""
        config = self._settings.now
        now_ms = int(self._retention_time.now_s() * 1000)  # a wall clock that jumps ahead must not end all transactions
        record = self._store.record_at(half.position)
        if record is None:
            log.warning("half_message_lost", offset=offset, hint="it has expired or is damaged, and had no outcome")
            del self._halves[offset]
            return 0.0
        half.stored_ms = min(half.stored_ms, now_ms)  # the clock was ahead when the message was stored
        rest_ms = half.stored_ms + self._check_delay_ms(record.properties) - now_ms
        if rest_ms > 0 and not half.checks:
            return rest_ms / 1000
        if half.checks >= config.transaction_check_max or now_ms - half.stored_ms > config.retain_hours * 3_600_000:
            self._set_aside(offset, half, record, "it has no outcome")
        else:
            self._request_outcome(half, record)
        return config.transaction_check_interval_s

    def _check_delay_ms(self, text: str) -> float:
        asked = props.find(text, CHECK_IMMUNITY) or ""
        if asked.isdecimal() and len(asked) <= 9:
            # limited, because a half message that retention has deleted counts until it is checked
            return min(int(asked), MAX_TRANSACTION_TIMEOUT_S) * 1000
        return self._settings.now.transaction_timeout_s * 1000

    def _request_outcome(self, half: Half, record: Record) -> None:
        """Request the outcome from the producer that sent the half message, or from another one of its group. If none is
        connected, the check does not count, and the message waits for a producer."""
        group = props.find(record.properties, props.PRODUCER_GROUP) or ""
        session = self._clients.producer_of(group, real_queue(record)[0], record.born_host)
        if session is None:
            return
        # The check is counted before the response, because a producer that crashes on each request must not be queried
        # forever.
        half.checks += 1
        self._dirty = True
        session.send_event(OutcomeWanted(record, half.checks))
