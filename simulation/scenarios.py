"""What happens in a run: single faults of brokers and members, situations that chance makes rarely, and which a seed plays.

`world.crashed()` notes that messages may be delivered again: they were in handlers of a process that was killed or cut off.
Half of the seeds string events together by chance, the others play a situation. `python -m simulation 0 100 --scenario NAME`
plays one situation only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rocketlet.client import Producer
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from .loop import Transport
from .members import AnyMember, ForeignMember
from .patches import Violation, raise_later
from .plan import LONGEST_HANDLER_S, Plan
from .world import CHAOS_S, Node, World, simulated

LOOK_S = 0.05
WATCHED_S = 80.0
ROLLED = 6  # members
BACKLOG = 5000  # messages
SOME = 1000  # messages that quick handlers get through while members come and go


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


async def lose_end(world: World) -> None:
    """A broker is killed, and the last messages of its log are gone, as after a crash of the machine."""
    node = world.rng.choice(world.nodes)
    if not node.is_up:
        return
    assert node.broker is not None
    queues = node.broker.store.queues.values()
    positions = sorted(queue.entry(offset)[0] for queue in queues for offset in range(queue.begin, queue.next))
    if not positions:
        return
    position = world.rng.choice(positions[-6:])
    world.note(f"{node.name} is killed, and its log ends at {position}")
    world.crashed()
    world.kill_node(node)
    cut_log(node.folder, position)
    await asyncio.sleep(world.rng.uniform(0, 1))
    await world.start_node(node)
    world.lost(node)
    world.crashed()


def cut_log(folder: Path, position: int) -> None:
    for path in (folder / "commitlog").iterdir():
        if int(path.name) >= position:
            path.unlink()
        elif int(path.name) + path.stat().st_size > position:
            os.truncate(path, position - int(path.name))


async def grow(world: World) -> None:
    """A topic gets more queues."""
    grow_at(world, world.rng.choice(world.nodes))


def grow_at(world: World, node: Node) -> None:
    topic = world.rng.choice(world.topics)
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


async def freeze(world: World) -> None:
    member = spare(world)
    if member is not None:
        stood_s = world.rng.choice((1, 10, 25, 45))
        world.spawn(company(world, stood_s))
        await freeze_member(world, member, stood_s)


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


async def freeze_at(world: World, member: AnyMember, code: int, stood_s: float) -> None:
    """Freeze a member between a request and its response."""
    process = member.process
    process.freezes_at = code
    for _ in range(120):  # it renews every 5 s, if it owns a queue
        if process.is_paused or process.is_dead:
            break
        await asyncio.sleep(0.05)
    process.freezes_at = -1
    if not process.is_paused or process.is_dead:
        return
    world.spawn(world.join())
    await freeze_member(world, member, stood_s)


async def silence(world: World) -> None:
    member = spare(world)
    if member is not None:
        silent_s = world.rng.choice((5, 18, 25, 45))
        world.spawn(company(world, silent_s))
        await silence_member(world, member, silent_s)


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


async def broker_stands(world: World) -> None:
    """Shorter than a hand-over waits: nothing is handled twice."""
    stood_s = world.rng.choice((2, 8))
    world.spawn(company(world, stood_s))
    await stand(world, world.rng.choice(world.nodes), stood_s)


async def broker_stands_long(world: World) -> None:
    stood_s = world.rng.choice((18, 25, 45))
    world.crashed()
    world.spawn(company(world, stood_s))
    await stand(world, world.rng.choice(world.nodes), stood_s)
    world.crashed()


async def stand(world: World, node: Node, stood_s: float) -> None:
    if not node.is_up:
        return
    world.note(f"{node.name} freezes")
    node.process.is_paused = True
    await asyncio.sleep(stood_s)
    world.note(f"{node.name} resumes")
    node.process.resume()


async def company(world: World, seconds: float) -> None:
    """Mostly let a member join or leave meanwhile: queues of a frozen member move only if the shares change."""
    if world.rng.random() < 0.8:
        await asyncio.sleep(world.rng.uniform(0, seconds))
        await (join if world.rng.random() < 0.7 else someone_leaves)(world)


async def cut(world: World) -> None:
    member = spare(world)
    if member is not None and member.process.transports:
        await cut_member(world, member, world.rng.choice(member.process.transports))


async def cut_member(world: World, member: AnyMember, transport: Transport) -> None:
    world.note(f"{member.name} loses a connection")
    world.crashed()
    mine_s = world.rng.uniform(0, 2)
    member.blind_until_s = max(member.blind_until_s, world.loop.time() + mine_s)
    transport.cut(mine_s, world.rng.uniform(0, 2))
    await asyncio.sleep(10)
    world.crashed()


Event = Callable[[World], Awaitable[None]]
GENTLE: tuple[Event, ...] = (join, someone_leaves, several, restart, grow, broker_stands)
HARSH: tuple[Event, ...] = (kill, freeze, silence, cut, kill_broker, broker_stands_long)


async def by_chance(world: World, moments_s: list[float]) -> None:
    """One event at each moment, whatever the last one does."""
    for moment_s in moments_s:
        await asyncio.sleep(max(moment_s - world.loop.time(), 0))
        world.spawn(world.rng.choice(GENTLE if world.plan.gentle else GENTLE + HARSH)(world))
        world.check()


# Backlogs


async def send_many(world: World, count: int) -> None:
    """Send messages to all queues alike."""
    async with Producer(world.name_server) as producer:
        topics = [world.topics[number % len(world.topics)] for number in range(count)]
        bodies = [b"backlog-%d" % number for number in range(count)]
        await asyncio.gather(*map(producer.send, topics, bodies))
        world.acknowledged += zip(topics, bodies, strict=True)


async def watch_backlogs(world: World) -> None:
    """Record the longest time in which no foreign member had messages of each queue with a backlog."""
    since_s: dict[Queue, float] = {}
    end_s = world.loop.time() + WATCHED_S
    while (now_s := world.loop.time()) < end_s:
        members = [member for member in world.members if isinstance(member, ForeignMember)]
        idle = {
            queue
            for queue in world.queues_up()
            if _has_backlog(world, queue) and not any(member.will_handle(queue) for member in members)
        }
        since_s = {queue: since_s.get(queue, now_s) for queue in idle}
        for queue, began_s in since_s.items():
            world.unread_s[queue] = max(world.unread_s.get(queue, 0.0), now_s - began_s)
            if now_s - began_s > world.plan.backlog_limit_s:
                raise_later(f"{queue} has a backlog that nobody handles since {began_s:.1f}")
        await asyncio.sleep(LOOK_S)


def _has_backlog(world: World, queue: Queue) -> bool:
    """Whether its last message was not begun yet."""
    broker = next(node.broker for node in world.nodes if node.name == queue.broker_name)
    stored = broker.store.queues.get((queue.topic, queue.queue_id)) if broker is not None else None
    if stored is None or not stored.next:
        return False
    return (queue.topic, queue.broker_name, queue.queue_id, stored.next - 1) not in world.handlings


# Situations


class Scenario(NamedTuple):
    """plan: what of the seed's plan is as the situation needs it."""

    plan: dict[str, Any]
    play: Callable[[World], Awaitable[None]]


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


async def _long_hand_over(world: World) -> None:
    """Queues are given up whose handlers run for longer than a lease lasts."""
    for change in (join, someone_leaves, join):
        await asyncio.sleep(world.rng.uniform(2, 6))
        world.spawn(change(world))


async def _lost_while_handled(world: World) -> None:
    """A member loses its queues while its handlers run on, and would get them back immediately."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(2, 5))
        member = spare(world)
        if member is None:
            return
        if world.rng.random() < 0.3:
            await silence_member(world, member, 22)
        elif member.process.transports:
            await cut_member(world, member, world.rng.choice(member.process.transports))


async def _broker_killed(world: World) -> None:
    """A killed broker has forgotten the last commits, and nothing is sent after that."""
    await asyncio.sleep(world.rng.uniform(37, 39.9))
    await kill_broker(world)


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


async def _handled_out_of_order(world: World) -> None:
    """Members and brokers are killed while messages are in handlers, and later ones of the same queue are done."""
    for _ in range(4):
        await asyncio.sleep(world.rng.uniform(2, 6))
        world.spawn(kill_broker(world) if world.rng.random() < 0.2 else kill(world))
        await world.join()


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
_foreign_of_slow_peers = changes(3, (1, 5), (2, 3, 4), (0, 0.1, 0.2, 0.4), leaving=0.3, foreign=0.8)
_notified_in_turns = changes(4, (1, 4), (2, 3, 4), (0.004, 0.006, 0.008, 0.01), leaving=0.7)
_queues_leave_the_pool = changes(3, (2, 6), (1, 1, 2), (0,), leaving=0.4)


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


async def _foreign_storm(world: World) -> None:
    """Apache's members all start together, while messages of many queues wait."""
    for _ in range(world.rng.randint(3, 8)):
        await asyncio.sleep(world.rng.choice((0, 0, 0.005)))
        world.spawn(world.join(foreign=True))
    await _foreign_members(world)


async def _frozen_at_a_request(world: World) -> None:
    """A member freezes after a request for its leases, and gets the response when another member owns them."""
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(1, 4))
        member = spare(world)
        if member is not None:
            await freeze_at(world, member, RequestCode.LOCK_BATCH_MQ, world.rng.uniform(20.5, 26))


async def _away_in_hand_overs(world: World) -> None:
    """A broker is away for 15 to 30 s while its queues are being released. No process dies, so nothing is redelivered."""
    await asyncio.sleep(world.rng.uniform(1, 3))
    node = world.rng.choice(world.nodes)
    for _ in range(world.rng.randint(1, 2)):
        world.spawn(world.join())
    await asyncio.sleep(world.rng.uniform(0, 0.3))
    await restart_node(world, node, world.rng.uniform(15, 30))


async def _only_a_broker_stands(world: World) -> None:
    """Longer than a lease, and nobody comes or goes: nobody loses anything by it, so it is no excuse."""
    await asyncio.sleep(world.rng.uniform(2, 5))
    await stand(world, world.rng.choice(world.nodes), world.rng.choice((18, 25, 30)))


async def _hasty_members(world: World) -> None:
    """Members come and go without a pause, while their locks are asked for, on brokers that keep them as Apache's do."""
    for _ in range(4):
        count = world.rng.randint(2, 6)
        for _ in range(count):
            await world.join()
            await asyncio.sleep(world.rng.choice((0, 0, 0.01, 0.1)))
        for _ in range(count):
            await someone_leaves(world)
        await asyncio.sleep(world.rng.uniform(0, 4))


async def _end_lost(world: World) -> None:
    """A broker is killed and loses the end of its log, while members are ahead; its offsets are used twice."""
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(8, 14))
        await lose_end(world)


_CALM = {"gentle": True, "long_handlers": 0.0, "lost_notifications": 0.0, "drain_s": 30.0}
_LONG = {"long_handlers": 0.2, "drain_s": LONGEST_HANDLER_S + 5.0}
_PLAIN = {"orderly": False, "sticky": False, "mixed": False}
_FOREIGN = {**_CALM, **_PLAIN, "members": 2}
_SLOW = {**_FOREIGN, "handler_s": 0.2}
_ROLL = {**_CALM, **_PLAIN, "gentle": False, "topics": 1, "members": 1, "handler_s": 0.1}
_OF_TOPICS = {"long_handlers": 0.0, "drain_s": 30.0, "topics": 3, "orderly": False, "sticky": False, "mixed": True}
_HARSH = {"gentle": False, "mixed": False}

SCENARIOS: dict[str, Scenario] = {
    "broker-away": Scenario({**_CALM, "brokers": 2}, _broker_away),
    "member-away": Scenario({**_HARSH, "members": 3, "handler_s": 0.2}, _member_away),
    "lost-while-handled": Scenario({**_LONG, "gentle": False, "members": 3}, _lost_while_handled),
    "foreign-members": Scenario({**_FOREIGN, "brokers": 1}, _foreign_members),
    "foreign-storm": Scenario({**_FOREIGN, "brokers": 1, "members": 1, "queues": 24}, _foreign_storm),
    "foreign-members-of-two": Scenario({**_FOREIGN, "brokers": 2}, _foreign_members),
    "foreign-of-slow-peers": Scenario(
        {**_SLOW, "brokers": 2, "peers_delay_s": 0.3, "unread_limit_s": 35.0}, _foreign_of_slow_peers
    ),
    "foreign-not-reached": Scenario({**_SLOW, "lost_notifications": 0.3, "brokers": 1}, _foreign_members),
    "foreign-of-two-not-reached": Scenario({**_SLOW, "lost_notifications": 0.3, "brokers": 2}, _foreign_members),
    "foreign-of-different-topics": Scenario({**_CALM, **_OF_TOPICS, "members": 2}, _foreign_members),
    "foreign-of-different-topics-killed": Scenario({**_OF_TOPICS, "gentle": False}, _foreign_members_killed),
    "foreign-roll": Scenario({**_ROLL, "brokers": 1, "queues": 16, "backlog_limit_s": 12.0}, _foreign_roll),
    "foreign-roll-of-two": Scenario({**_ROLL, "brokers": 2, "queues": 8, "backlog_limit_s": 24.0}, _foreign_roll),
    "foreign-backlog": Scenario(
        {**_FOREIGN, "brokers": 1, "topics": 1, "queues": 3, "members": 1, "handler_s": 0.02, "unread_limit_s": 35.0},
        _foreign_backlog,
    ),
    "broker-killed": Scenario({**_CALM, "gentle": False, "queues": 8, "brokers": 1}, _broker_killed),
    "killed-at-hand-over": Scenario({**_HARSH, "members": 2}, _killed_at_hand_over),
    "handled-out-of-order": Scenario(
        {**_LONG, **_HARSH, "orderly": False, "members": 4, "queues": 4, "handler_s": 0.02}, _handled_out_of_order
    ),
    "long-hand-over": Scenario({**_CALM, **_LONG, "members": 3}, _long_hand_over),
    "unheard-restart": Scenario({**_HARSH, "members": 3}, _unheard_restart),
    "hasty-members": Scenario({**_FOREIGN, "apache": True, "unread_limit_s": 12.0}, _hasty_members),
    "frozen-at-a-request": Scenario({**_HARSH, "members": 3, "handler_s": 0.2}, _frozen_at_a_request),
    "away-in-hand-overs": Scenario({**_CALM, "handler_s": 0.2, "members": 2}, _away_in_hand_overs),
    "notified-in-turns": Scenario(
        {**_CALM, "turns": True, "members": 14, "queues": 8, "brokers": 1, "mixed": False, "sticky": False},
        _notified_in_turns,
    ),
    "only-a-broker-stands": Scenario({**_CALM, "handler_s": 0.2}, _only_a_broker_stands),
    "end-lost": Scenario({**_PLAIN, "gentle": False, "long_handlers": 0.0, "members": 2, "handler_s": 0.02}, _end_lost),
}


async def _frozen_at_a_receive(world: World) -> None:
    """A member freezes when it has sent a receive, and sees the response when its messages are another's."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(1, 6))
        member = spare(world)
        if member is not None:
            await freeze_at(world, member, RequestCode.POP_MESSAGE, world.rng.choice((2, 5, 12, 25)))


async def _extended_and_killed(world: World) -> None:
    """Clients of 5.x whose messages brokers extend, or those brokers, are killed, cut off and restarted."""
    for _ in range(world.plan.events):
        await asyncio.sleep(world.rng.uniform(0.5, 8))
        event = world.rng.choice((join, someone_leaves, kill, cut, kill_broker, restart))
        world.spawn(event(world))


SHARED: dict[str, Scenario] = {
    "frozen-at-a-receive": Scenario({"gentle": False, "members": 3, "kinds": ("pops",)}, _frozen_at_a_receive),
    "queues-leave-the-pool": Scenario(
        {"gentle": True, "members": 3, "orderly": False, "kinds": ("five", "five", "ours", "foreign")},
        _queues_leave_the_pool,
    ),
    "extended-and-killed": Scenario(
        {"gentle": False, "orderly": False, "kinds": ("five", "pops")}, _extended_and_killed
    ),
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
        is_orderly = not is_mixed and rng.random() < 0.4
        plan = replace(plan, mixed=False, long_handlers=0.0, drain_s=30.0, orderly=is_orderly, kinds=kinds)
        known = SHARED
    played = rng.choice((*known, *[""] * len(known))) if scenario is None else scenario
    return replace(plan, scenario=played, **(SCENARIOS | SHARED)[played].plan) if played else plan


async def play(world: World) -> None:
    """Start the situation of the plan, or let events happen by chance."""
    if world.plan.scenario:
        world.spawn((SCENARIOS | SHARED)[world.plan.scenario].play(world))
        return
    moments_s = sorted(world.loop.time() + world.rng.uniform(1, CHAOS_S) for _ in range(world.plan.events))
    await by_chance(world, moments_s)


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
