"""What happens in a run: single faults of brokers and members, situations that chance makes rarely, and which a seed plays.

`world.crashed()` notes that messages may be delivered again: they were in handlers of a process that was killed or cut off.
Half of the seeds string events together by chance, the others play a situation. `python -m simulation 0 100 --scenario NAME`
plays one situation only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple

from rocketlet.client import Producer
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from .members import AnyMember, ForeignMember, PoppingMember
from .patches import Violation, check_raised, raise_later
from .world import CHAOS_S, LONGEST_HANDLER_S, Node, Plan, World, simulated

LOOK_S = 0.05
WATCHED_S = 80.0
ROLLED = 6  # members
BACKLOG = 5000  # messages
SOME = 1000  # messages that quick handlers get through while members come and go


FOREIGN_GROWTH_S = 55.0  # Apache's members query routes every 30 s, and rebalance every 20 s
HAND_OVER_S = 10.0  # brokers that are suspended for longer than this may give a queue to another member
Event = Callable[[World], Awaitable[None]]

# Events


def spare(world: World) -> AnyMember | None:
    """A living member other than the first, which subscribes to everything."""
    others = [member for member in world.living()[1:] if member.is_awake]
    return world.rng.choice(others) if others else None


async def join(world: World) -> None:
    await world.join()


async def someone_leaves(world: World) -> None:
    member = spare(world)
    if member is not None:
        await world.leave(member)


async def several(world: World) -> None:
    """Let some members join and some leave at the same time."""
    await asyncio.gather(join(world), someone_leaves(world), join(world), someone_leaves(world))


async def restart(world: World) -> None:
    await restart_node(world, world.rng.choice(world.nodes), world.rng.uniform(0, 2))


async def restart_node(world: World, node: Node, down_s: float, *, moves: bool = False) -> None:
    """moves: it is back at another address."""
    if not node.is_up:
        return
    world.note(f"{node.name} restarts")
    await world.stop_node(node)
    await asyncio.sleep(down_s)
    node.port += moves
    await world.start_node(node)
    world.note(f"{node.name} is back at {node.port}")


async def kill_broker(world: World) -> None:
    node = world.rng.choice(world.nodes)
    if not node.is_up:
        return
    world.note(f"{node.name} is killed")
    world.crashed()
    world.kill_node(node)
    await asyncio.sleep(world.rng.uniform(0, 4))
    world.crashed()
    await world.start_node(node)


async def grow(world: World) -> None:
    """A topic gets more queues at one broker."""
    node, topic = world.rng.choice(world.nodes), world.rng.choice(world.topics)
    if node.is_up:
        assert node.broker is not None
        old = node.broker.topics.get(topic)
        assert old is not None
        count = old.read_queues + world.rng.randint(1, 3)
        world.note(f"{topic} grows to {count} at {node.name}")
        with node.process.running():
            node.broker.topics.put(replace(old, read_queues=count, write_queues=count), 0)


async def kill(world: World) -> None:
    member = spare(world)
    if member is not None:
        world.note(f"{member.name} is killed")
        world.crashed()
        member.process.kill()
        world.interrupted()


async def freeze_member(world: World, member: AnyMember, stood_s: float) -> None:
    world.note(f"{member.name} freezes")
    world.crashed()
    was_unanswered = member.is_unanswered
    member.process.is_paused = True
    await asyncio.sleep(stood_s)
    world.note(f"{member.name} resumes")
    world.crashed()
    member.process.resume()
    if was_unanswered:  # it learns whose its queues are when it has connected again
        member.blind_until_s = max(member.blind_until_s, world.loop.time())
    await asyncio.sleep(10)
    world.crashed()


def freezes_at(code: int, shortest_s: float, longest_s: float) -> Event:
    """Return a situation in which a member freezes between a request with this code and its response, while one joins."""

    async def play(world: World) -> None:
        member = spare(world)
        if member is None:
            return
        process = member.process
        process.freezes_at = code
        for _ in range(120):  # it renews every 5 s, if it owns a queue
            if process.is_paused or process.is_dead:
                break
            await asyncio.sleep(0.05)
        process.freezes_at = -1
        if process.is_paused and not process.is_dead:
            world.spawn(world.join())
            await freeze_member(world, member, world.rng.uniform(shortest_s, longest_s))

    return play


async def silence_member(world: World, member: AnyMember, silent_s: float) -> None:
    """Traffic to and from a member stays on the way; its sockets stay open."""
    world.note(f"{member.name} is cut off")
    world.crashed()
    member.process.silent_until_s = world.loop.time() + silent_s
    await asyncio.sleep(silent_s)
    world.note(f"{member.name} is reachable again")
    world.crashed()
    await asyncio.sleep(10)
    world.crashed()


def stands(*durations_s: float, is_alone: bool = False) -> Event:
    """Return a situation in which a broker is suspended. If it is for longer than a hand-over waits, messages may be handled
    twice, unless it happens while nobody comes or goes (`is_alone`)."""

    async def play(world: World) -> None:
        stood_s, node = world.rng.choice(durations_s), world.rng.choice(world.nodes)
        is_long = stood_s > HAND_OVER_S and not is_alone
        if is_long:
            world.crashed()
        if not is_alone:
            world.spawn(company(world, stood_s))
        if node.is_up:
            world.note(f"{node.name} freezes")
            node.process.is_paused = True
            await asyncio.sleep(stood_s)
            world.note(f"{node.name} resumes")
            node.process.resume()
        if is_long:
            world.crashed()

    return play


async def company(world: World, seconds: float) -> None:
    """Mostly let a member join or leave meanwhile: queues of a frozen member move only if the shares change."""
    if world.rng.random() < 0.8:
        await asyncio.sleep(world.rng.uniform(0, seconds))
        await (join if world.rng.random() < 0.7 else someone_leaves)(world)


def away(leave: Callable[[World, AnyMember, float], Awaitable[None]], *durations_s: float) -> Event:
    """Return an event in which a member is frozen or cut off for one of some durations."""

    async def play(world: World) -> None:
        if (member := spare(world)) is not None:
            seconds = world.rng.choice(durations_s)
            world.spawn(company(world, seconds))
            await leave(world, member, seconds)

    return play


freeze = away(freeze_member, 1, 10, 25, 45)
silence = away(silence_member, 5, 18, 25, 45)


async def cut(world: World) -> None:
    member = spare(world)
    if member is None or not member.process.transports:
        return
    world.note(f"{member.name} loses a connection")
    world.crashed()
    mine_s = world.rng.uniform(0, 2)
    member.blind_until_s = max(member.blind_until_s, world.loop.time() + mine_s)
    world.rng.choice(member.process.transports).cut(mine_s, world.rng.uniform(0, 2))
    await asyncio.sleep(10)
    world.crashed()


GENTLE: tuple[Event, ...] = (join, someone_leaves, several, restart, grow, stands(2, 8))
HARSH: tuple[Event, ...] = (kill, freeze, silence, cut, kill_broker, stands(18, 25, 45))
EXTENDED: tuple[Event, ...] = (join, someone_leaves, kill, cut, kill_broker, restart)


def one_of(*events: Event) -> Event:
    """Return an event that starts one of several, which continues meanwhile."""

    async def play(world: World) -> None:
        world.spawn(world.rng.choice(events)(world))

    return play


def by_chance(*events: Event) -> Event:
    """Return a situation in which one of the events begins at each of some moments, whatever the last one does."""

    async def play(world: World) -> None:
        began_s = world.loop.time()
        for moment_s in sorted(began_s + world.rng.uniform(1, CHAOS_S) for _ in range(world.plan.events)):
            await asyncio.sleep(moment_s - world.loop.time())
            await one_of(*events)(world)
            check_raised()

    return play


def rounds(count: int, pause_s: tuple[float, float], *events: Event) -> Event:
    """Return a situation in which some events happen one after the other, this many times, each time after a pause."""

    async def play(world: World) -> None:
        for _ in range(count):
            await asyncio.sleep(world.rng.uniform(*pause_s))
            for event in events:
                await event(world)

    return play


# Backlogs


async def send_many(world: World, count: int) -> None:
    """Send messages to all queues alike."""
    async with Producer(world.name_server) as producer:
        topics = [world.topics[number % len(world.topics)] for number in range(count)]
        bodies = [b"backlog-%d" % number for number in range(count)]
        await asyncio.gather(*map(producer.send, topics, bodies))
        world.acknowledged += zip(topics, bodies, strict=True)


async def watch_backlogs(world: World) -> None:
    """Record the longest time in which no foreign member had messages of each queue whose last message was not begun."""
    since_s: dict[Queue, float] = {}
    end_s = world.loop.time() + WATCHED_S
    while (now_s := world.loop.time()) < end_s:
        members = [member for member in world.members if isinstance(member, ForeignMember)]
        idle = set[Queue]()
        for queue in world.queues_up():
            broker = world.broker_of(queue)
            stored = broker.store.queues.get((queue.topic, queue.queue_id)) if broker is not None else None
            if stored is not None and stored.next and (queue, stored.next - 1) not in world.handlings:
                idle |= set() if any(member.will_handle(queue) for member in members) else {queue}
        since_s = {queue: since_s.get(queue, now_s) for queue in idle}
        for queue, began_s in since_s.items():
            longest_s = world.measures.unhandled_s
            longest_s[queue] = max(longest_s.get(queue, 0.0), now_s - began_s)
            if now_s - began_s > world.plan.backlog_limit_s:
                raise_later(f"{queue} has a backlog that nobody handles since {began_s:.1f}")
        await asyncio.sleep(LOOK_S)


# Situations


class Scenario(NamedTuple):
    """A situation.

    Attributes:
        plan: what of the seed's plan is as the situation needs it.
        known_fault: why some seeds fail. Such a scenario is played only if it is named, and in a table of all.
    """

    plan: dict[str, Any]
    play: Event
    known_fault: str = ""


async def _broker_away(world: World) -> None:
    """A broker is missing in the route, and just then somebody joins or a topic grows. It may be back at another address."""
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(0, 3))
        node = world.rng.choice(world.nodes)
        down_s = world.rng.uniform(0.5, 6)
        world.spawn(_changes(world, down_s))
        moves = not node.runs_name_server and world.rng.random() < 0.5
        await restart_node(world, node, down_s, moves=moves)
        await asyncio.sleep(4)


async def _changes(world: World, seconds: float) -> None:
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(0, seconds / 2))
        await world.rng.choice((join, grow, join, someone_leaves))(world)


async def _member_away(world: World) -> None:
    """A member is frozen or cut off past its lease, while what it had goes to a member that has just come; before
    or after it began to give it up. The new one may have left again when it is back."""
    await asyncio.sleep(world.rng.uniform(1, 4))
    member = spare(world)
    if member is None:
        return
    away = world.rng.choice((freeze_member, silence_member))
    joins_first = world.rng.random() < 0.5
    if joins_first:
        await world.join()
        await asyncio.sleep(world.rng.uniform(0, 0.1))
    world.spawn(away(world, member, world.rng.uniform(25, 34)))
    if not joins_first:
        await asyncio.sleep(world.rng.uniform(0, 20))
        await world.join()
    if world.rng.random() < 0.5:
        await asyncio.sleep(world.rng.uniform(21, 25))
        await world.leave(world.members[-1])


async def _unheard_restart(world: World) -> None:
    """A broker restarts while a member is cut off, which still takes its lease for valid."""
    await asyncio.sleep(world.rng.uniform(2, 6))
    member = spare(world)
    if member is not None:
        world.spawn(silence_member(world, member, 16))
        await asyncio.sleep(world.rng.uniform(0.1, 1))
        await restart_node(world, world.rng.choice(world.nodes), world.rng.uniform(0, 1))
        await world.join()


async def _killed_at_hand_over(world: World) -> None:
    """A broker is killed just when queues have changed hands, and their new owner may be cut off."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(2, 5))
        world.granting.clear()
        world.spawn(world.join())
        with contextlib.suppress(TimeoutError):  # one queue stays where it is
            async with asyncio.timeout(3):
                await world.granting.wait()
        await asyncio.sleep(world.rng.choice((0, 0.002, 0.02, 0.06)))
        member = spare(world)
        if member is not None and world.rng.random() < 0.7:
            world.spawn(silence_member(world, member, world.rng.uniform(5, 25)))
        await kill_broker(world)


def changes(
    rounds: int,
    pause_s: tuple[float, float],
    counts: tuple[int, ...],
    gaps_s: tuple[float, ...],
    *,
    leaving: float,
    foreign: float = 0.0,
) -> Event:
    """Return a situation in which members join and leave, several shortly after each other.

    Args:
        rounds: The number of times that this happens.
        pause_s: The shortest and the longest pause before each time.
        counts: Numbers of members, of which chance chooses.
        gaps_s: Pauses between two members, of which chance chooses.
        leaving: The share of members that leave.
        foreign: The share of Apache's members in those that join.
    """

    async def play(world: World) -> None:
        for _ in range(rounds):
            await asyncio.sleep(world.rng.uniform(*pause_s))
            for _ in range(world.rng.choice(counts)):
                await asyncio.sleep(world.rng.choice(gaps_s))
                if world.rng.random() < leaving:
                    world.spawn(someone_leaves(world))
                else:
                    world.spawn(world.join(foreign=world.rng.random() < foreign))

    return play


_foreign_members = changes(3, (1, 6), (1, 1, 2, 3), (0, 0.002, 0.02), leaving=0.4, foreign=0.7)
_foreign_storm = rounds(
    1, (0, 0), changes(1, (0, 0), tuple(range(3, 9)), (0, 0, 0.005), leaving=0.0, foreign=1.0), _foreign_members
)
_queues_leave_the_pool = changes(3, (2, 6), (1, 1, 2), (0,), leaving=0.4)


_foreign_growth = rounds(3, (1, 4), grow, changes(1, (0, 1), (1, 1, 2), (0, 0.002, 0.02), leaving=0.3, foreign=0.7))


async def _foreign_restart(world: World) -> None:
    """Brokers restart while Apache's members, which send no heartbeat for up to 30 s, handle messages, and ours join."""
    for _ in range(2):
        await world.join(foreign=True)
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(2, 8))
        node = world.rng.choice(world.nodes)
        world.spawn(restart_node(world, node, world.rng.uniform(0, 1)))
        await asyncio.sleep(world.rng.uniform(0, 2))
        await world.join(foreign=world.rng.random() < 0.3)


async def _poppers_leave(world: World) -> None:
    """All members that pop leave a group in which others pull."""
    for _ in range(3):
        for _ in range(world.rng.randint(1, 2)):
            await world.join(kind="pops")
        await asyncio.sleep(world.rng.uniform(3, 9))
        for member in [member for member in world.living() if isinstance(member, PoppingMember)]:
            world.spawn(world.leave(member))
        await asyncio.sleep(world.rng.uniform(0, 4))


async def _foreign_members_killed(world: World) -> None:
    """The same, and some are killed."""
    world.spawn(_foreign_members(world))
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(1, 8))
        await kill(world)
        await world.join(foreign=world.rng.random() < 0.7)


async def _foreign_roll(world: World) -> None:
    """Apache's members are replaced one after the other, while each queue has a backlog."""
    ours = world.living()[0]
    for _ in range(ROLLED):
        await world.join(foreign=True)
    await world.leave(ours)
    await asyncio.sleep(2)
    await send_many(world, BACKLOG)
    world.spawn(watch_backlogs(world))
    for member in world.living():
        await world.join(foreign=True)
        await asyncio.sleep(world.rng.uniform(0, 2))
        world.spawn(world.leave(member))
        await asyncio.sleep(world.rng.uniform(0, 2))


async def _foreign_backlog(world: World) -> None:
    """Apache's members come and go while they get through a backlog."""
    await world.join(foreign=True)
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(4, 6))
        world.spawn(send_many(world, SOME))
        await asyncio.sleep(world.rng.uniform(0, 0.1))
        await world.join(foreign=True)
        await asyncio.sleep(world.rng.uniform(1, 4))
        await someone_leaves(world)


async def _away_in_hand_overs(world: World) -> None:
    """A broker is away for 15 to 30 s while its queues are being released. No process dies, so nothing is redelivered."""
    await asyncio.sleep(world.rng.uniform(1, 3))
    node = world.rng.choice(world.nodes)
    for _ in range(world.rng.randint(1, 2)):
        world.spawn(world.join())
    await asyncio.sleep(world.rng.uniform(0, 0.3))
    await restart_node(world, node, world.rng.uniform(15, 30))


_CALM = {"gentle": True, "long_handlers": 0.0, "lost_notifications": 0.0, "drain_s": 30.0}
_LONG = {"long_handlers": 0.2, "drain_s": LONGEST_HANDLER_S + 5.0}
_PLAIN = {"orderly": False, "sticky": False, "mixed": False}
_FOREIGN = {**_CALM, **_PLAIN, "members": 2}
_SLOW = {**_FOREIGN, "handler_s": 0.2}
_ROLL = {**_CALM, **_PLAIN, "gentle": False, "topics": 1, "members": 1, "handler_s": 0.1}
_MOVED_BY_ROUTES = "a member of Apache's that drops its own queue by an earlier route is not waited for"
_LITE = {**_PLAIN, "gentle": False, "topics": 1, "kinds": ("lite",), "queues": 3}
_OF_TOPICS = {"long_handlers": 0.0, "drain_s": 30.0, "topics": 3, "orderly": False, "sticky": False, "mixed": True}
_HARSH = {"gentle": False, "mixed": False}

SCENARIOS: dict[str, Scenario] = {
    "broker-away": Scenario({**_CALM, "brokers": 2}, _broker_away),
    "member-away": Scenario({**_HARSH, "members": 3, "handler_s": 0.2}, _member_away),
    "lost-while-handled": Scenario(
        {**_LONG, "gentle": False, "members": 3}, rounds(3, (8, 14), one_of(cut, cut, silence))
    ),
    "foreign-members": Scenario(_FOREIGN, _foreign_members),
    "foreign-storm": Scenario({**_FOREIGN, "brokers": 1, "members": 1, "queues": 24}, _foreign_storm),
    "foreign-not-reached": Scenario({**_SLOW, "lost_notifications": 0.3}, _foreign_members),
    "foreign-of-different-topics": Scenario({**_CALM, **_OF_TOPICS, "members": 2}, _foreign_members),
    "foreign-of-different-topics-killed": Scenario({**_OF_TOPICS, "gentle": False}, _foreign_members_killed),
    "foreign-roll": Scenario({**_ROLL, "brokers": 1, "queues": 16, "backlog_limit_s": 12.0}, _foreign_roll),
    "foreign-roll-of-two": Scenario({**_ROLL, "brokers": 2, "queues": 8, "backlog_limit_s": 24.0}, _foreign_roll),
    "foreign-growth": Scenario({**_SLOW, "unread_limit_s": FOREIGN_GROWTH_S}, _foreign_growth, _MOVED_BY_ROUTES),
    "foreign-growth-not-reached": Scenario({**_SLOW, "lost_notifications": 0.5}, _foreign_growth, _MOVED_BY_ROUTES),
    "foreign-restart": Scenario(
        {**_SLOW, "lost_notifications": 0.3}, _foreign_restart, "a member without a heartbeat is not waited for"
    ),
    "foreign-orderly": Scenario({**_SLOW, "foreign": "locking", "lost_notifications": 0.1}, _foreign_members),
    "foreign-orderly-of-different-topics": Scenario(
        {**_OF_TOPICS, "gentle": True, "members": 2, "foreign": "locking", "lost_notifications": 0.1, "handler_s": 0.2},
        _foreign_members,
    ),
    "foreign-old-peer": Scenario({**_FOREIGN, "brokers": 2, "old_peer": True}, _foreign_members),
    "foreign-backlog": Scenario(
        {**_FOREIGN, "brokers": 1, "topics": 1, "queues": 3, "members": 1, "handler_s": 0.02, "unread_limit_s": 35.0},
        _foreign_backlog,
    ),
    "broker-killed": Scenario(
        {**_CALM, "gentle": False, "queues": 8, "brokers": 1}, rounds(1, (37, 39.9), kill_broker)
    ),
    "killed-at-hand-over": Scenario({**_HARSH, "members": 2}, _killed_at_hand_over),
    "handled-out-of-order": Scenario(
        {**_LONG, **_HARSH, "orderly": False, "members": 4, "queues": 4, "handler_s": 0.02},
        rounds(4, (2, 6), one_of(kill, kill, kill, kill, kill_broker), join),
    ),
    "long-hand-over": Scenario({**_CALM, **_LONG, "members": 3}, changes(3, (2, 6), (1,), (0,), leaving=0.4)),
    "unheard-restart": Scenario({**_HARSH, "members": 3}, _unheard_restart),
    "frozen-at-a-request": Scenario(
        {**_HARSH, "members": 3, "handler_s": 0.2}, rounds(2, (1, 4), freezes_at(RequestCode.LOCK_BATCH_MQ, 20.5, 26))
    ),
    "away-in-hand-overs": Scenario({**_CALM, "handler_s": 0.2, "members": 2}, _away_in_hand_overs),
    "only-a-broker-stands": Scenario({**_CALM, "handler_s": 0.2}, rounds(1, (2, 5), stands(18, 25, 30, is_alone=True))),
}


SHARED: dict[str, Scenario] = {
    "frozen-at-a-receive": Scenario(
        {"gentle": False, "members": 3, "kinds": ("pops",)},
        rounds(3, (1, 6), freezes_at(RequestCode.POP_MESSAGE, 2, 25)),
    ),
    "queues-leave-the-pool": Scenario(
        {"gentle": True, "members": 3, "kinds": ("five", "five", "ours", "foreign")},
        _queues_leave_the_pool,
    ),
    "pulled-and-popped-in-order": Scenario(
        {**_PLAIN, "gentle": True, "members": 3, "orderly": True, "kinds": ("pops", "ours")}, _queues_leave_the_pool
    ),
    "poppers-leave-in-order": Scenario(
        {**_PLAIN, "gentle": True, "members": 1, "orderly": True, "kinds": ("ours",)},
        _poppers_leave,
    ),
    "lite": Scenario({**_LITE, "lite": "shared"}, by_chance(*EXTENDED)),
    "lite-exclusive": Scenario({**_LITE, "lite": "exclusive"}, by_chance(*EXTENDED)),
    "lite-wildcard": Scenario({**_LITE, "lite": "wildcard"}, by_chance(*EXTENDED)),
    "extended-and-killed": Scenario({"gentle": False, "kinds": ("five", "pops")}, by_chance(*EXTENDED)),
    "filter-finds-nothing": Scenario(
        {**_PLAIN, "gentle": True, "members": 2, "queues": 8, "expression": "wanted", "kinds": ("pops", "five")},
        _queues_leave_the_pool,
    ),
}


def plan_of(rng: random.Random, scenario: str | None, *, shares: bool) -> Plan:
    """Return a seed's plan: events by chance, or a situation.

    Args:
        rng: The seed's random numbers.
        scenario: The situation instead of the one that the seed chooses; "" for events by chance.
        shares: True if members share messages, or some do.
    """
    plan, known = Plan.of(rng), SCENARIOS
    if shares:
        is_mixed = rng.random() < 0.5
        kinds = ("pops", "pops", "ours", "foreign") if is_mixed else ("pops",)
        plan = replace(plan, mixed=False, long_handlers=0.0, drain_s=30.0, orderly=False, kinds=kinds)
        known = SHARED
    by_chance = [name for name, item in known.items() if not item.known_fault]
    played = rng.choice((*by_chance, *[""] * len(by_chance))) if scenario is None else scenario
    return replace(plan, scenario=played, **(SCENARIOS | SHARED)[played].plan) if played else plan


async def play(world: World) -> None:
    """Start the situation of the plan, or let events happen by chance."""
    if world.plan.scenario:
        world.spawn((SCENARIOS | SHARED)[world.plan.scenario].play(world))
    else:
        await by_chance(*GENTLE, *(() if world.plan.gentle else HARSH))(world)


def simulate(seed: int, scenario: str | None = None, *, shares: bool = False) -> World:
    """Run one seed. scenario: instead of the one that the seed chooses; "" for events by chance.

    Raises:
        Violation: if something did not hold; its `world` is the run.
    """
    with simulated(seed) as (loop, folder):
        rng = random.Random(seed)
        world = World(rng, plan_of(rng, scenario, shares=shares), loop, folder, shares=shares)
        with world.patched():
            try:
                loop.run_until_complete(world.run(play))
            except Violation as violation:
                violation.world = world  # type: ignore[attr-defined]
                raise
    return world
