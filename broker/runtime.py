"""The clock, tasks, deferred work and device thread that all parts of a broker run on.

`Clock` is the source of time for state. `Tasks` owns background tasks. Long work is done in pieces, so that one request does
not block the event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Final, Generic, Protocol, TypeVar

import orjson
import structlog

from ..protocol.bodies import BodyError, Work, shaped
from .config import ADDRESS_SHARE, LIMITS, MAX_NAMED_CHARS, MOMENT_S, TURN_S, BrokerConfig, LimitExceeded, Limits

log = structlog.get_logger("rocketlet.turns")
broker_log = structlog.get_logger("rocketlet.broker")
tasks_log = structlog.get_logger("rocketlet.tasks")


# ------------------------------------------------------------------------------
# The broker's source of time for state, so that tests can move it.
#
# State that expires, becomes due or gets a timestamp, such as messages, leases and members, uses the broker's `Clock`
# and its `call_later`. A test moves a `MovableClock` (`testing/clock.py`) forward, so that delayed messages, leases,
# transaction checks and retention become due immediately. The simulation replaces the time module and the event loop
# instead, which makes the same `Clock` virtual.
#
# Timeouts of requests to another process, such as a name server, use the event loop's own time, and time slices use
# `time.perf_counter`.


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """Return the time for durations, in seconds, which never goes back."""
        return time.monotonic()

    def time_s(self) -> float:
        """Return the seconds since the epoch, for times that are stored or shown."""
        return time.time()

    def time_ms(self) -> int:
        return int(self.time_s() * 1000)

    def call_later(self, delay_s: float, action: Callable[..., object], *arguments: object) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def call_soon(self, action: Callable[..., object], *arguments: object) -> None:
        """Call `action` in the next event-loop iteration."""
        asyncio.get_running_loop().call_soon(action, *arguments)


MACHINE: Final = Clock()


class SingleTimer:
    """A timer that calls an action once. To set it again replaces the time of the call."""

    __slots__ = ("_action", "_clock", "_timer")

    def __init__(self, clock: Clock, action: Callable[[], object]) -> None:
        self._clock = clock
        self._action = action
        self._timer: Timer | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, delay_s: float) -> None:
        self.cancel()
        self._timer = self._clock.call_later(delay_s, self._call)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self._action()


# ------------------------------------------------------------------------------
# Cooperative scheduling: long work is done in pieces, so that other clients wait for a few ms and not for the whole
# work.
#
# Work is a generator that yields after each piece (`protocol.bodies.Work`). It starts immediately if no other work waits and
# the time slice of this event-loop iteration (a turn) is not used up. All waiting work shares one time slice between two
# polls of the sockets, whatever its amount, and runs a piece each in round-robin order: each client address in its turn,
# however many connections it has, and every other piece the broker's own work, if there is some.
#
# Requests that were just read are served immediately for a short time (`Moment`); the remaining ones become such work.


class Turns:
    """
    Args:
        call_soon: Makes a call in the next event-loop iteration.
        limits: say how many pieces `do_some` does immediately.
    """

    def __init__(
        self,
        turn_s: float = TURN_S,
        call_soon: Callable[..., object] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._at_once = limits.affected_at_once
        self.turn_s = turn_s
        self._call_soon = call_soon or MACHINE.call_soon
        self._own: deque[Work[object]] = deque()
        self._of_clients: dict[str, deque[Work[object]]] = {}  # by address, in the order of their turns
        self._is_own_turn = True
        self.waiting = 0
        self._alone: set[str] = set()
        self._is_due = False
        self._end_s = 0.0

    def do(self, work: Work[object], address: str = "") -> None:
        """Do the work. Start immediately if time is left in this turn and no other work waits, otherwise in the next turn.

        Args:
            address: The address of the client whose work it is; empty for the broker's own.
        """
        is_new = not self._is_due
        self.do_later(work, address)
        if is_new:
            self._end_s = time.perf_counter() + self.turn_s
        if self.waiting == 1:
            self._do_pieces()

    def do_later(self, work: Work[object], address: str = "") -> None:
        """Do the work from the next turn on."""
        (self._of_clients.setdefault(address, deque()) if address else self._own).append(work)
        self.waiting += 1
        if not self._is_due:
            self._is_due = True
            self._end_s = 0.0
            self._call_soon(self._turn)

    def do_some(self, work: Work[object], pieces: int = 0) -> None:
        """Do some pieces of the work immediately, whatever other work waits, and the rest from the next turn on. This is for
        what one event does to many clients, groups or messages: a few of them do not have to wait for a turn."""
        for number, _ in enumerate(work, 1):
            if number >= (pieces or self._at_once):
                self.do_later(work)
                return

    def call(self, action: Callable[..., object], *arguments: object) -> None:
        """Make a short call as the broker's own work of one piece, because there may be very many."""
        self.do(_call(action, arguments))

    def call_for(self, address: str, action: Callable[..., object], *arguments: object) -> None:
        """Make a short call as work of a client, from the next turn on."""
        self.do_later(_call(action, arguments), address)

    def do_alone(self, name: str, begin: Callable[[], Work[None]]) -> None:
        """Do the first piece immediately and the rest in turns. Do nothing if earlier work of this name is not done yet."""
        if name not in self._alone:
            self._alone.add(name)
            work = self._ending(name, begin())
            if not _is_over(work):
                self.do(work)

    def _ending(self, name: str, work: Work[None]) -> Work[None]:
        try:
            yield from work
        finally:
            self._alone.discard(name)

    async def done(self) -> None:
        """Return when no work waits."""
        while self.waiting:  # noqa: ASYNC110 (each turn does a piece)
            await asyncio.sleep(0)

    def _turn(self) -> None:
        self._end_s = time.perf_counter() + self.turn_s
        self._do_pieces()
        self._is_due = bool(self.waiting)
        if self._is_due:
            self._call_soon(self._turn)

    def _do_pieces(self) -> None:
        while self.waiting and time.perf_counter() <= self._end_s:
            self._do_piece()

    def _do_piece(self) -> None:
        self._is_own_turn = bool(self._own) and (not self._is_own_turn or not self._of_clients)
        address = "" if self._is_own_turn else next(iter(self._of_clients))
        works = self._own if self._is_own_turn else self._of_clients[address]
        work = works.popleft()
        try:
            next(work)
        except StopIteration:
            self.waiting -= 1
        except Exception:
            log.exception("work_failed")
            self.waiting -= 1
        else:
            works.append(work)
        if address:
            del self._of_clients[address]
            if works:
                self._of_clients[address] = works  # after the other addresses


class Moment:
    """The time spent on the requests of larger reads since the event loop last polled the sockets. Beyond MOMENT_S in all, or
    ADDRESS_SHARE of it for one address, the requests of further larger reads become work in turns."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self._of: dict[str, float] = {}
        self._is_due = False

    def record(self, address: str, used_s: float) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end)
        self.used_s += used_s
        self._of[address] = self._of.get(address, 0.0) + used_s

    def _end(self) -> None:
        self._is_due = False
        self.used_s = 0.0
        self._of.clear()

    def is_over(self, address: str) -> bool:
        return self.used_s > MOMENT_S or self._of.get(address, 0.0) > MOMENT_S * ADDRESS_SHARE


class OnePerIteration:
    """A queue of calls, of which each event-loop iteration makes one. A call is made in the iteration after `call` at the
    earliest, so that other sockets with input at that time are served before."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, action: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(action)

    def _turn(self) -> None:
        action = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        action()


class FairQueue:
    """Long requests of one kind, shared fairly among clients. One request of each client runs at a time, and up to
    `at_once` of all clients. Further requests wait, and the clients are served in round-robin order."""

    def __init__(self, turns: Turns, at_once: int, max_waiting: int) -> None:
        self._turns = turns
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._waiting: dict[object, deque[Work[None]]] = {}
        self._working: set[object] = set()
        self._is_stopped = False

    @property
    def waiting(self) -> int:
        """The number of works that wait, of all clients."""
        return sum(map(len, self._waiting.values()))

    def join(self, client: object, work: Work[None]) -> None:
        """Run the work when it is the client's turn. Raises LimitExceeded if too many requests of this client wait, or after
        `stop`."""
        line = self._waiting.get(client)
        if self._is_stopped:
            raise LimitExceeded("the broker is stopping; retry at another one, or later")
        if line is not None and len(line) >= self._max_waiting:
            raise LimitExceeded(f"{self._max_waiting} requests such as this one wait already; retry later")
        self._waiting.setdefault(client, deque()).append(work)
        self._begin()

    def stop(self) -> None:
        """Drop the waiting work, and start no more. Running work ends after its current piece."""
        self._is_stopped = True
        self._waiting.clear()

    def _begin(self) -> None:
        while len(self._working) < self._at_once:
            client = next((client for client in self._waiting if client not in self._working), None)
            if client is None:
                return
            line = self._waiting.pop(client)
            work = line.popleft()
            if line:
                self._waiting[client] = line  # after the other clients
            self._working.add(client)
            self._turns.do(self._doing(client, work))

    def _doing(self, client: object, work: Work[None]) -> Work[None]:
        try:
            for _ in work:
                if self._is_stopped:
                    return
                yield
        finally:
            self._working.discard(client)
            self._begin()


def _is_over(work: Work[None]) -> bool:
    """Do a piece of the work. Return True if it was the last one."""
    for _ in work:
        return False
    return True


def _call(action: Callable[..., object], arguments: tuple[object, ...]) -> Work[None]:
    action(*arguments)
    return
    yield


# ------------------------------------------------------------------------------
# A broker's background tasks: periodic work, and coroutines. `Tasks` owns them and ends them all.


class Tasks:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: set[asyncio.Task[None]] = set()
        self._timers: dict[str, Timer] = {}

    def every(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        """Call `action` at this interval, even after it raised, so that no timer stops silently."""
        self._timers[name] = self._clock.call_later(interval_s, self._tick, interval_s, name, action)

    def _tick(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        self.every(interval_s, name, action)
        try:
            action()
        except Exception:
            tasks_log.exception("timer_failed", action=name)

    def spawn(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            tasks_log.error("task_failed", exc_info=error)

    async def stop(self) -> None:
        """Stop the timers, cancel the tasks, and return when they have ended."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------
# Work that also waits for the device, for example to save a state file.
#
# A job is a generator. A job yields None after each piece of work, and yields calls that may wait for the device. `Device`
# makes these calls in a thread, so that a slow disk does not block the event loop. `run` makes them immediately.


T = TypeVar("T")

Call = Callable[[], object]
Job = Generator[Call | None, None, T]


def make_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


async def do(job: Job[T], make: Callable[[Call | None], Awaitable[object]]) -> T:
    """Do a job and return its result. `make` makes the calls that the job yields; for None, it may yield to the loop. An
    exception of `make` is raised in the job. Raises the job's exceptions."""
    fault: Exception | None = None
    while True:
        try:
            call = next(job) if fault is None else job.throw(fault)
        except StopIteration as end:
            result: T = end.value
            return result
        fault = None
        try:
            await make(call)
        except Exception as error:
            fault = error


def run(job: Job[T]) -> T:
    """Do a job and return its result, blocking until it is done. Raises the job's exceptions."""
    try:
        do(job, _make_at_once).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a job that runs synchronously waited for the loop")


async def _make_at_once(call: Call | None) -> None:
    if call is not None:
        call()


# ------------------------------------------------------------------------------
# The thread that waits for the device, so that a slow disk does not block the event loop.


class Device:
    """Does jobs one after the other in the event loop, and makes their blocking calls in one thread."""

    def __init__(self) -> None:
        # Not the loop's default executor, because user code in the same loop may have shut that down
        self._thread = ThreadPoolExecutor(1, "device")
        self._jobs = asyncio.Lock()

    async def do(self, job: Job[T]) -> T:
        """Do a job after all earlier ones, and return its result. Raises the job's exceptions."""
        async with self._jobs:
            return await do(job, self._make)

    async def _make(self, call: Call | None) -> None:
        await (asyncio.sleep(0) if call is None else self.make([call]))

    async def make(self, calls: list[Call]) -> None:
        """Make the calls in the thread, after all earlier ones, and return when they are done. Raises the exception of the
        first call that fails; the calls after it are not made. An empty list waits for the earlier calls only."""
        await asyncio.get_running_loop().run_in_executor(self._thread, make_all, calls)

    def end(self) -> None:
        """Cancel the calls that wait for the device thread. A running call is neither interrupted nor awaited."""
        self._thread.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------
# Durations counted in buckets, from which Prometheus computes quantiles, even over many brokers.


class Histogram:
    """`bounds_s` are the upper bounds of the buckets, in seconds; a last bucket has all longer durations."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds_s, duration_s)] += count
        self.sum_s += duration_s * count

    def buckets(self) -> list[tuple[str, int]]:
        """Return each bound as Prometheus writes it, with the number of durations up to it."""
        found: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds_s), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


# ------------------------------------------------------------------------------
# The number by which cached checks are invalidated.
#
# The checks of a request depend on topics, groups and their members, permissions, leases and drains. A change of these that
# may refuse a request that has passed increments the generation. A passed check is valid for the same request until the
# generation differs from the one that was read before the check. Results that depend on the current time are not cached.


class Generation:
    """The number. Call `increment` after such a change; any thread may call it."""

    __slots__ = ("_numbers", "number")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.number = 0

    def increment(self) -> None:
        self.number = next(self._numbers)


class LiveConfig:
    """The current settings, which may be replaced while the broker runs, for example by UPDATE_BROKER_CONFIG."""

    __slots__ = ("_generation", "changes", "now")

    def __init__(self, config: BrokerConfig, generation: Generation) -> None:
        self.now = config
        self.changes = 0
        self._generation = generation

    def change(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes += 1
        self._generation.increment()


# ------------------------------------------------------------------------------
# State files of an earlier run, which may have anything in them: they may be older, restored, or edited by hand. Only one
# entry is lost by one fault, so that the broker starts.


Entry = TypeVar("Entry")
K = TypeVar("K")
Item = TypeVar("Item")
Shape = TypeVar("Shape")


class Adoption:
    """Adopts the entries of state files at a start. Entries that cannot be adopted are kept in a file and reported, and the
    broker continues without them.

    Attributes:
        keep: saves bytes in a file of this name for inspection. The store sets it.
        faults: what was not adopted, for reports.
    """

    def __init__(self) -> None:
        self.keep: Callable[[str, bytes], object] = lambda name, data: None
        self.faults: list[str] = []

    def each(self, part: str, entries: Iterable[Entry], adopt: Callable[[Entry], object]) -> None:
        """Adopt entries one by one.

        Args:
            part: the name of the state, which begins the name of the file.
            adopt: adopts an entry, or raises an error and changes nothing.
        """
        left: list[Entry] = []
        first: Exception | None = None
        for entry in entries:
            try:
                adopt(entry)
            except MemoryError:
                raise  # the entries are intact, and the broker needs more memory
            except Exception as error:
                first = first or error
                left.append(entry)
        if first is not None:
            content = orjson.dumps(left, default=_shown, option=orjson.OPT_NON_STR_KEYS)
            self.set_aside(part, len(left), content, first)

    def whole(self, part: str, value: object, shape: type[Shape]) -> Shape | None:
        """Return the value of a state file in its type; None without a value, or if the value has another type.

        Args:
            part: the name of the state, which begins the name of the file.
            value: the value; None if there is no state file.
            shape: the type that the value must have.
        """
        if value is None:
            return None
        try:
            return shaped(value, shape)
        except BodyError as error:
            self.set_aside(part, 1, orjson.dumps(value), error)
            return None

    def set_aside(self, part: str, count: int, content: bytes, fault: Exception) -> None:
        """Keep and report entries that were not adopted.

        Args:
            count: the number of entries.
            content: the entries as bytes, by which the file is named.
        """
        file = f"{part.replace(' ', '-')}-{zlib.crc32(content):08x}"
        self.keep(file, content)
        reason = f"{type(fault).__name__}: {fault}"
        broker_log.error(
            "state_not_adopted", part=part, count=count, reason=reason, file=f"damaged/{file}", exc_info=fault,
            hint="the broker continues without these entries; messages may be delivered again",
        )  # fmt: skip
        self.faults.append(f"{count} of {part} ({reason[:MAX_NAMED_CHARS]}), kept in damaged/{file}")


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple | set) else repr(value)


# ------------------------------------------------------------------------------
# What every part of a broker runs on, in one object.


class Runtime:
    """The clock, limits, tasks, deferred work and generation of one broker. Each part takes from it what it needs.

    Args:
        clock: the source of time for state that expires, becomes due or gets a timestamp.
        limits: the limits in force.
        generation: the number by which cached checks are invalidated; the accounts' file has it, too.
        tasks: background tasks.
        turns: long work in pieces.
    """

    __slots__ = ("adoption", "clock", "generation", "limits", "tasks", "turns")

    def __init__(
        self,
        clock: Clock = MACHINE,
        limits: Limits = LIMITS,
        generation: Generation | None = None,
        tasks: Tasks | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.adoption = Adoption()
        self.clock = clock
        self.limits = limits
        self.generation = generation if generation is not None else Generation()
        self.tasks = tasks if tasks is not None else Tasks(clock)
        self.turns = turns if turns is not None else Turns(call_soon=clock.call_soon, limits=limits)


# ------------------------------------------------------------------------------
# The ends of waits, of which very many may be due together: those of clients that began to wait together.


_TICK_S: Final = 0.01


class Timeouts:
    """Calls of actions after a time. One timer is for all calls that are due within 10 ms, and the calls are work in turns,
    one per piece."""

    def __init__(self, clock: Clock, turns: Turns) -> None:
        self._clock = clock
        self._turns = turns
        self._began_s = clock.monotonic_s()
        self._ticks: dict[int, _Tick] = {}

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Timer:
        """Call `action` after this time, up to 10 ms later, unless the result is cancelled before."""
        now_s = self._clock.monotonic_s() - self._began_s
        number = ceil((now_s + delay_s) / _TICK_S - 1e-6)
        tick = self._ticks.get(number)
        if tick is None:
            timer = self._clock.call_later(max(number * _TICK_S - now_s, 0.0), self._fire, number)
            tick = self._ticks[number] = _Tick(timer)
        timeout = _Timeout(tick)
        tick.actions[timeout] = action
        return timeout

    def _fire(self, number: int) -> None:
        self._turns.do(self._ticks.pop(number).calling())


class _Tick:
    """The calls that are due together, and their timer. It keeps no action that is cancelled or called: an action usually
    refers to the object that has the timeout, and such a circle would live until the next full garbage collection."""

    __slots__ = ("actions", "timer")

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.actions: dict[_Timeout, Callable[[], object]] = {}

    def calling(self) -> Work[None]:
        for timeout in list(self.actions):
            action = self.actions.pop(timeout, None)
            if action is not None:  # else cancelled meanwhile
                try:
                    action()
                except Exception:  # the others must not miss their calls
                    log.exception("work_failed")
            yield


class _Timeout:
    __slots__ = ("_tick",)

    def __init__(self, tick: _Tick) -> None:
        self._tick = tick

    def cancel(self) -> None:
        self._tick.actions.pop(self, None)


# ------------------------------------------------------------------------------
# Deferred work for clients that wait for messages, which is started when messages arrive.


class Arrivals(Generic[K, Item]):
    """Work for arriving messages. At most one work per key waits, so that the deferred work does not grow with each
    message. Work in progress is repeated for messages that arrive meanwhile.

    Args:
        work: is done for a key, with the queues or lite topics that have new messages.
    """

    def __init__(self, runtime: Runtime, work: Callable[[K, Iterable[Item]], Work[None]]) -> None:
        self._turns = runtime.turns
        self._work = work
        self._new: dict[K, dict[Item, None]] = {}  # by key of the work in progress: items that it has not taken yet

    def add(self, arrived: Iterable[tuple[K, Item]]) -> None:
        """Do the work, some pieces of it immediately."""
        keys: deque[K] = deque()
        for key, item in arrived:
            if key not in self._new:
                self._new[key] = {}
                keys.append(key)
            self._new[key][item] = None
        if keys:
            self._turns.do_some(self._doing(keys))

    def _doing(self, keys: deque[K]) -> Work[None]:
        try:
            while keys:
                while items := self._new[keys[0]]:
                    self._new[keys[0]] = {}
                    yield from self._work(keys[0], items)
                del self._new[keys.popleft()]
        finally:
            for key in keys:  # after an error
                del self._new[key]
