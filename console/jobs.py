"""Replays of dead letters as jobs of the console's process.

A job starts at a time, resends dead letters with `client/admin/dead_letters.Replay`, and can be stopped. The folder of the
console has all jobs in one file, which is rewritten when a job changes state, and every JOB_SAVE_S while one runs. A console
that starts continues the jobs that had not ended. It may resend the messages of the last JOB_SAVE_S if it was killed. It
locks the folder, and does not run the jobs of another cluster.

A job for all new dead letters has the ends of the queues of its creation, so that it does not resend what becomes a dead
letter again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ..client.admin.admin_client import AdminClient
from ..client.admin.dead_letters import DeadLetterTopic, Replay, dead_letters
from ..client.errors import ConfigError, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..client.message import Message
from ..host.files import locked_beside
from ..protocol import names
from ..protocol.names import Queue, counted
from .config import JOB_POLL_S, JOB_RETRY_S, JOB_SAVE_S, MAX_JOB_AHEAD_S, MAX_JOBS, STOP_S
from .samples import now_ms

log = get_logger("rocketlet.console")
FILE: Final = "jobs.json"


class JobState(StrEnum):
    WAITING = "waiting"  # for its time
    RUNNING = "running"
    DONE = "done"  # all of its messages were sent, or could not be sent
    STOPPED = "stopped"  # by a user
    FAILED = "failed"  # too many of its messages could not be sent, or its dead letters could not be read


_NEXT: Final = {
    JobState.WAITING: (JobState.RUNNING, JobState.STOPPED),
    JobState.RUNNING: (JobState.DONE, JobState.STOPPED, JobState.FAILED),
}
"""The states that may follow a state; none follows the others."""


class DeadLetterPlace(msgspec.Struct, frozen=True):
    """The position of a dead letter."""

    broker: str
    queue: int
    offset: int


class ReplayOrder(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a replay resends.

    Attributes:
        to: `group` to resend to the retry topic of the group, `topic` to resend to the topic of each message.
        topics: with `topic`, the topics that messages may be sent to. A client that can store dead letters can set any topic.
        places: the dead letters to resend; empty for all new ones.
        rate_per_s: the maximum number of messages per second; None for no limit.
        stop_after: the number of failed messages after which the job fails.
        at_ms: the time of the start, in ms since the epoch; 0 to start immediately.
    """

    group: str
    to: str = "group"
    topics: list[str] = []
    places: list[DeadLetterPlace] = []
    rate_per_s: float | None = None
    stop_after: int = 1
    at_ms: int = 0


class ReplayJob(msgspec.Struct, kw_only=True):
    """A replay with its progress.

    Attributes:
        ends: the end of each queue (`broker:queue`) when the job was created.
        clusters: the clusters of these queues.
        is_elsewhere: True if the name server has other clusters, so that the job does not run.
        total: the number of messages when the job was created.
        handled: the number of its `places` that were sent or could not be sent.
        reason: the error of the last message that could not be sent, or the reason why the job failed or waits.
    """

    id: str
    order: ReplayOrder
    ends: dict[str, int]
    total: int
    created_ms: int
    created_by: str = ""
    clusters: list[str] = []
    is_elsewhere: bool = False
    state: JobState = JobState.WAITING
    handled: int = 0
    sent: int = 0
    failed: int = 0
    reason: str = ""
    ended_ms: int = 0

    @property
    def has_ended(self) -> bool:
        return self.state not in _NEXT

    @property
    def left(self) -> int:
        return max(self.total - self.sent - self.failed, 0)

    def move(self, state: JobState) -> None:
        assert state in _NEXT.get(self.state, ()), (self.state, state)
        self.state = state
        self.ended_ms = now_ms() if self.has_ended else 0


class JobNotFound(ConfigError):
    """The console has no job with an id."""


class Jobs:
    """The jobs of a console. Without a `folder` they end with the console."""

    def __init__(
        self,
        admin: AdminClient,
        folder: Path | None = None,
        *,
        poll_s: float = JOB_POLL_S,
        retry_s: float = JOB_RETRY_S,
        stop_s: float = STOP_S,
    ) -> None:
        self._admin = admin
        self._poll_s = poll_s
        self._retry_s = retry_s
        self._stop_s = stop_s
        self._path = None if folder is None else folder / FILE
        self._jobs: dict[str, ReplayJob] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, set[tuple[Queue, int]]] = {}  # places of messages that a running job could not send
        self._lock: BinaryIO | None = None
        self._writing = threading.Lock()  # held while a thread writes the file
        self._saving: asyncio.Task[None] | None = None

    def start(self, *, is_read_only: bool = False) -> None:
        """Read the jobs of an earlier run, and continue those that had not ended, unless `is_read_only`. Raises
        ConfigError."""
        if self._path is not None and self._path.parent.exists():
            if not is_read_only:
                self._lock = _locked(self._path)
            self._jobs = {job.id: job for job in _read(self._path, is_read_only=is_read_only)}
        for job in self._jobs.values():
            if not job.has_ended and not is_read_only:
                self._run(job)

    async def close(self) -> None:
        """Stop working. The jobs continue when the console starts again."""
        running = [*self._running.values()]
        for task in running:
            _cancel(task)
        if running:
            _, left = await asyncio.wait(running, timeout=self._stop_s)
            for task in left:  # its broker does not respond while it marks what was sent
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._save_progress()
        if self._saving is not None:
            await self._saving
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def all(self) -> list[ReplayJob]:
        """Return the jobs, the newest first."""
        return [*self._jobs.values()][::-1]

    def find(self, id_: str) -> ReplayJob:
        """Return a job. Raises JobNotFound."""
        try:
            return self._jobs[id_]
        except KeyError:
            raise JobNotFound(f"no job has the id {id_[:40]!r}; `rocketlet jobs list` shows all") from None

    async def plan(self, order: ReplayOrder, *, by: str = "") -> ReplayJob:
        """Return a new job, which `add` starts. Raises RocketletError; ConfigError if the order is invalid, or if there is
        nothing to resend."""
        if order.to not in ("group", "topic"):
            raise ConfigError(f"to: expected group or topic, got {order.to[:40]!r}")
        if order.to == "topic" and not order.topics:
            raise ConfigError("topics: got none; name the topics that messages may be sent to")
        if not 0 <= order.at_ms <= now_ms() + MAX_JOB_AHEAD_S * 1000:
            days = MAX_JOB_AHEAD_S // 86_400
            raise ConfigError(f"at_ms: got {order.at_ms}; expected ms since the epoch, at most {days} days from now")
        self._replay(order)  # raises if a limit is invalid
        letters = await dead_letters(self._admin, order.group)
        ends = {f"{queue.broker_name}:{queue.queue_id}": span.end for queue, span in letters.ranges.items()}
        brokers = {queue.broker_name for queue in letters.ranges}
        clusters = sorted({broker.cluster for broker in await self._admin.brokers() if broker.name in brokers})
        total = len(order.places) or letters.new
        if not total:
            raise ConfigError(
                f"the group {order.group} has no new dead letters; name the messages to resend them again"
            )
        return ReplayJob(
            id=secrets.token_hex(4),
            order=order,
            ends=ends,
            total=total,
            created_ms=now_ms(),
            created_by=by,
            clusters=clusters,
        )

    async def add(self, job: ReplayJob) -> None:
        """Keep a job, and start it at its time. Raises ConfigError if there are too many that have not ended, and if the
        file cannot be written."""
        ended = [item.id for item in self._jobs.values() if item.has_ended]
        if len(self._jobs) >= MAX_JOBS:
            if not ended:
                raise ConfigError(f"{MAX_JOBS} jobs have not ended (the maximum); stop one, or wait")
            del self._jobs[ended[0]]
        self._jobs[job.id] = job
        try:
            await asyncio.to_thread(self._save)
        except ConfigError:
            self._jobs.pop(job.id, None)
            raise
        if not job.has_ended:  # a user may have stopped it meanwhile
            self._run(job)
        log.info("job_added", job=job.id, group=job.order.group, messages=job.total, user=job.created_by)

    async def stop(self, id_: str) -> ReplayJob:
        """Stop a job that has not ended, and return it. Raises ConfigError."""
        job = self.find(id_)
        if job.has_ended:
            raise ConfigError(f"the job {id_} has ended already: it is {job.state}")
        task = self._running.get(id_)
        if task is not None:
            _cancel(task)
            await asyncio.gather(task, return_exceptions=True)
        if not job.has_ended:
            await self._end(job, JobState.STOPPED)
        return job

    def _run(self, job: ReplayJob) -> None:
        task = self._running[job.id] = asyncio.create_task(self._work(job), name=f"job {job.id}")
        self._failed[job.id] = set()
        task.add_done_callback(lambda _: self._forget(job.id))

    def _forget(self, id_: str) -> None:
        self._running.pop(id_, None)
        self._failed.pop(id_, None)

    async def _work(self, job: ReplayJob) -> None:
        while job.state is JobState.WAITING and now_ms() < job.order.at_ms:  # noqa: ASYNC110 # the clock may be set
            await asyncio.sleep(min((job.order.at_ms - now_ms()) / 1000, self._poll_s))
        replay, reason = self._replay(job.order, failed=job.failed), job.reason
        while True:
            try:
                await self._check_cluster(job)
                if job.state is JobState.WAITING:
                    job.move(JobState.RUNNING)
                    await self._save_progress()
                await self._replay_all(job, replay)
                return
            except (ConnectionFailed, RequestTimeout) as error:  # a broker may be away while it restarts
                reason, job.reason = job.reason, f"{error}; retried in {self._retry_s:.0f} s"
                await self._save_progress()
            except RocketletError as error:
                job.reason = str(error)
                await self._end(job, JobState.FAILED)
                return
            except Exception as error:
                log.exception("job_crashed", job=job.id)
                job.reason = f"a fault of the console: {error!r}; its log has more"
                await self._end(job, JobState.FAILED)
                return
            await asyncio.sleep(self._retry_s)
            job.reason = reason

    async def _check_cluster(self, job: ReplayJob) -> None:
        """Raise ConnectionFailed if the job belongs to another cluster. The clusters of a name server may come back."""
        known = {broker.cluster for broker in await self._admin.brokers()}
        job.is_elsewhere = bool(known) and not known.issuperset(job.clusters)
        if job.is_elsewhere:
            raise ConnectionFailed(
                f"the job belongs to the cluster {', '.join(job.clusters)}, and the name server has "
                f"{', '.join(sorted(known))}; give this folder to a console of that cluster, or stop the job"
            )

    async def _replay_all(self, job: ReplayJob, replay: Replay) -> None:
        saved_s = asyncio.get_running_loop().time()

        def report(message: Message, error: RocketletError | None) -> None:
            nonlocal saved_s
            job.handled += 1
            job.sent += error is None
            job.failed += error is not None
            if error is not None:
                self._failed[job.id].add((message.queue, message.queue_offset))
                job.reason = f"{message.message_id}: {error}"
            if asyncio.get_running_loop().time() - saved_s >= JOB_SAVE_S:
                self._save_soon()
                saved_s = asyncio.get_running_loop().time()

        try:
            await replay.run(self._messages(job), report)
        except RocketletError as error:
            if not _is_cancelling(asyncio.current_task()):
                raise
            # it was cancelled, and then could not mark what was sent
            job.reason = f"the last messages that were sent are not marked as replayed: {error}"
            raise asyncio.CancelledError from error
        await self._end(job, JobState.FAILED if replay.is_stopped else JobState.DONE)

    def _replay(self, order: ReplayOrder, failed: int = 0) -> Replay:
        limits = {} if order.rate_per_s is None else {"rate_per_s": order.rate_per_s}
        stop_after = max(order.stop_after - failed, 1) if failed else order.stop_after
        return Replay(
            self._admin,
            order.group,
            to_group=order.to == "group",
            stop_after=stop_after,
            raises_unreachable=True,
            **limits,
        )

    async def _messages(self, job: ReplayJob) -> AsyncIterator[Message]:
        """Iterate over the messages of a job that it has not handled. Count those that are gone, or that name a topic that
        the job may not send to, as failed."""
        letters = await dead_letters(self._admin, job.order.group)
        known = {f"{queue.broker_name}:{queue.queue_id}" for queue in letters.ranges}
        missing = sorted(queue for queue, end in job.ends.items() if end > 0 and queue not in known)
        if missing:  # the broker or the name server has just started; they are not empty
            raise ConnectionFailed(
                f"the name server has no route to the queues {', '.join(missing)} of {names.dlq_topic(job.order.group)}"
            )
        found = self._chosen(job) if job.order.places else self._new(job, letters)
        async for message in found:
            if job.order.to == "topic" and message.origin not in job.order.topics:
                self._failed[job.id].add((message.queue, message.queue_offset))
                self._skip(job, f"{message.message_id} has the topic {message.origin[:127]}, which was not confirmed")
            else:
                yield message

    async def _new(self, job: ReplayJob, letters: DeadLetterTopic) -> AsyncIterator[Message]:
        for queue, span in letters.ranges.items():
            end = min(span.end, job.ends.get(f"{queue.broker_name}:{queue.queue_id}", 0))
            async for some in self._admin.read(queue, span.begin, end):
                for message in some:
                    is_failed = (message.queue, message.queue_offset) in self._failed[job.id]  # before a retry
                    if letters.state_of(message) == "new" and not is_failed:
                        yield message

    async def _chosen(self, job: ReplayJob) -> AsyncIterator[Message]:
        topic = names.dlq_topic(job.order.group)
        for place in job.order.places[job.handled :]:
            queue = Queue(topic, place.broker, place.queue)
            some = [one async for part in self._admin.read(queue, place.offset, place.offset + 1) for one in part]
            if some:
                yield some[0]
            else:
                self._skip(job, f"there is no message at {queue} {place.offset} any more")

    def _skip(self, job: ReplayJob, reason: str) -> None:
        job.handled += 1
        job.failed += 1
        job.reason = reason

    async def _end(self, job: ReplayJob, state: JobState) -> None:
        job.move(state)
        log.info("job_ended", job=job.id, group=job.order.group, state=state.value, sent=job.sent, failed=job.failed)
        await self._save_progress()

    def _save_soon(self) -> None:
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_progress(), name="progress of jobs")

    async def _save_progress(self) -> None:
        try:
            await asyncio.to_thread(self._save)
        except ConfigError as error:
            log.error(
                "jobs_not_saved", reason=str(error), hint="after a restart they continue from the last saved state"
            )

    def _save(self) -> None:
        """Replace the file, in a thread, because a device may be slow. Raises ConfigError."""
        if self._path is None:
            return
        with self._writing:
            self._replace_file(self._path)

    def _replace_file(self, path: Path) -> None:
        aside = path.with_suffix(".new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                lock = _locked(path)
                if path.exists():
                    lock.close()
                    raise ConfigError(f"{path}: another console has written it; restart this console to read it")
                self._lock = lock
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode([*self._jobs.values()]))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose a folder with --data") from None


def _locked(path: Path) -> BinaryIO:
    """Lock the folder of jobs. Raises ConfigError."""
    try:
        return locked_beside(path)
    except BlockingIOError:
        raise ConfigError(
            f"{path.parent}: another console uses this folder for its jobs; stop it, or choose another with --data"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written: {error.strerror}; choose a folder with --data") from None


def _read(path: Path, *, is_read_only: bool) -> list[ReplayJob]:
    """Return the jobs in a file. Set aside a file that is damaged, or that a newer console has written, unless
    `is_read_only`. Raises ConfigError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[ReplayJob])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; correct its permissions") from None
    except msgspec.MsgspecError as error:
        aside = path.with_name(f"{path.name}.bad")
        log.error("jobs_unreadable", file=str(path if is_read_only else aside), reason=str(error))
        if not is_read_only:
            path.replace(aside)
        return []


def _is_cancelling(task: asyncio.Task[None] | None) -> bool:
    return task is not None and task.cancelling() > 0


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task once. A second time would interrupt the marks of the messages that it has sent."""
    if not _is_cancelling(task):
        task.cancel()


def words_of(job: ReplayJob) -> str:
    """Return a text about what a job resends."""
    order = job.order
    target = f"the retry topic of {order.group}" if order.to == "group" else ", ".join(sorted(order.topics))
    return f"{counted(job.total, 'message')} to {target}"
