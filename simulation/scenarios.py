"""Situations that chance makes rarely: a plan that lets them be, and what happens in which order.

Half of the seeds play one. `python -m simulation 0 100 --scenario NAME` plays one only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketlet.protocol.codes import RequestCode

from . import backlogs, chaos
from .plan import LONGEST_HANDLER_S, Plan

if TYPE_CHECKING:
    from .world import World


ROLLED = 6  # members
BACKLOG = 5000  # messages
SOME = 1000  # which quick handlers get through while members come and go


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
        await chaos.restart_node(world, node, down_s, moves=moves)
        await asyncio.sleep(4)


async def _changes(world: World, seconds: float) -> None:
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(0, seconds / 2))
        await world.rng.choice((chaos.join, chaos.grow, chaos.join, chaos.someone_leaves))(world)


async def _member_away(world: World) -> None:
    """A member stands still or is not heard past its lease, while what it had goes to a member that has just come; before
    or after it began to give it up. The new one may have left again when it is back."""
    await asyncio.sleep(world.rng.uniform(1, 4))
    member = chaos.spare(world)
    if member is None:
        return
    away = world.rng.choice((chaos.freeze_member, chaos.silence_member))
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
    """A broker restarts while a member is not heard: it still believes in its lease."""
    await asyncio.sleep(world.rng.uniform(2, 6))
    member = chaos.spare(world)
    if member is not None:
        world.spawn(chaos.silence_member(world, member, 16))
        await asyncio.sleep(world.rng.uniform(0.1, 1))
        await chaos.restart_node(world, world.rng.choice(world.nodes), world.rng.uniform(0, 1))
        await world.join()


async def _long_hand_over(world: World) -> None:
    """Queues are given up whose handlers run for longer than a lease lasts."""
    for change in (chaos.join, chaos.someone_leaves, chaos.join):
        await asyncio.sleep(world.rng.uniform(2, 6))
        world.spawn(change(world))


async def _lost_while_handled(world: World) -> None:
    """A member loses its queues while its handlers run on, and would get them again at once."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(2, 5))
        member = chaos.spare(world)
        if member is None:
            return
        if world.rng.random() < 0.3:
            await chaos.silence_member(world, member, 22)
        elif member.process.transports:
            await chaos.cut_member(world, member, world.rng.choice(member.process.transports))


async def _broker_killed(world: World) -> None:
    """A killed broker has forgotten the last commits, and nothing is sent after that."""
    await asyncio.sleep(world.rng.uniform(37, 39.9))
    await chaos.kill_broker(world)


async def _killed_at_hand_over(world: World) -> None:
    """A broker is killed just when queues have changed hands, and who got them is perhaps not heard any more."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(2, 5))
        world.granting.clear()
        world.spawn(world.join())
        with contextlib.suppress(TimeoutError):  # one queue stays where it is
            async with asyncio.timeout(3):
                await world.granting.wait()
        await asyncio.sleep(world.rng.choice((0, 0.002, 0.02, 0.06)))
        member = chaos.spare(world)
        if member is not None and world.rng.random() < 0.7:
            world.spawn(chaos.silence_member(world, member, world.rng.uniform(5, 25)))
        await chaos.kill_broker(world)


async def _handled_out_of_order(world: World) -> None:
    """Members and brokers are killed while messages are in handlers, and later ones of the same queue are done."""
    for _ in range(4):
        await asyncio.sleep(world.rng.uniform(2, 6))
        world.spawn(chaos.kill_broker(world) if world.rng.random() < 0.2 else chaos.kill(world))
        await world.join()


async def _foreign_members(world: World) -> None:
    """Apache's members come and go beside ours, also several at once: whose handlers are quick, nothing is handled twice."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(1, 6))
        for _ in range(world.rng.choice((1, 1, 2, 3))):
            await asyncio.sleep(world.rng.choice((0, 0.002, 0.02)))
            if world.rng.random() < 0.4:
                world.spawn(chaos.someone_leaves(world))
            else:
                world.spawn(world.join(foreign=world.rng.random() < 0.7))


async def _foreign_members_killed(world: World) -> None:
    """The same, and some are killed."""
    world.spawn(_foreign_members(world))
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(1, 8))
        await chaos.kill(world)
        await world.join(foreign=world.rng.random() < 0.7)


async def _foreign_roll(world: World) -> None:
    """Apache's members are replaced one after the other, while each queue has a backlog."""
    ours = world.living()[0]
    for _ in range(ROLLED):
        await world.join(foreign=True)
    await world.leave(ours)
    await asyncio.sleep(2)
    await backlogs.send_many(world, BACKLOG)
    world.spawn(backlogs.watch(world))
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
        world.spawn(backlogs.send_many(world, SOME))
        await asyncio.sleep(world.rng.uniform(0, 0.1))
        await world.join(foreign=True)
        await asyncio.sleep(world.rng.uniform(1, 4))
        await chaos.someone_leaves(world)


async def _foreign_of_slow_peers(world: World) -> None:
    """Apache's members come and go, several within the time that brokers take to hear from each other."""
    for _ in range(3):
        await asyncio.sleep(world.rng.uniform(1, 5))
        for _ in range(world.rng.choice((2, 3, 4))):
            await asyncio.sleep(world.rng.uniform(0, 0.4))
            if world.rng.random() < 0.3:
                world.spawn(chaos.someone_leaves(world))
            else:
                world.spawn(world.join(foreign=world.rng.random() < 0.8))


async def _foreign_storm(world: World) -> None:
    """Apache's members start all at once, while messages of many queues wait."""
    for _ in range(world.rng.randint(3, 8)):
        await asyncio.sleep(world.rng.choice((0, 0, 0.005)))
        world.spawn(world.join(foreign=True))
    await _foreign_members(world)


async def _frozen_at_a_request(world: World) -> None:
    """A member stands still when it has asked for its leases, and hears the answer when they are another's."""
    for _ in range(2):
        await asyncio.sleep(world.rng.uniform(1, 4))
        member = chaos.spare(world)
        if member is not None:
            await chaos.freeze_at(world, member, RequestCode.LOCK_BATCH_MQ, world.rng.uniform(20.5, 26))


async def _away_in_hand_overs(world: World) -> None:
    """A broker is away for 15 to 30 s, and queues that it has are being given up. Nobody dies, so nothing comes again."""
    await asyncio.sleep(world.rng.uniform(1, 3))
    node = world.rng.choice(world.nodes)
    for _ in range(world.rng.randint(1, 2)):
        world.spawn(world.join())
    await asyncio.sleep(world.rng.uniform(0, 0.3))
    await chaos.restart_node(world, node, world.rng.uniform(15, 30))


async def _told_in_turns(world: World) -> None:
    """A group is so large that its members are told in turns, and changes while they are."""
    for _ in range(4):
        await asyncio.sleep(world.rng.uniform(1, 4))
        for _ in range(world.rng.randint(2, 4)):
            world.spawn((chaos.join if world.rng.random() < 0.3 else chaos.someone_leaves)(world))
            await asyncio.sleep(world.rng.choice((0.004, 0.006, 0.008, 0.01)))


async def _only_a_broker_stands(world: World) -> None:
    """Longer than a lease, and nobody comes or goes: nobody loses anything by it, so it is no excuse."""
    await asyncio.sleep(world.rng.uniform(2, 5))
    await chaos.stand(world, world.rng.choice(world.nodes), world.rng.choice((18, 25, 30)))


async def _hasty_members(world: World) -> None:
    """Members come and go without a pause, while their locks are asked for, on brokers that keep them as Apache's do."""
    for _ in range(4):
        count = world.rng.randint(2, 6)
        for _ in range(count):
            await world.join()
            await asyncio.sleep(world.rng.choice((0, 0, 0.01, 0.1)))
        for _ in range(count):
            await chaos.someone_leaves(world)
        await asyncio.sleep(world.rng.uniform(0, 4))


_CALM = {"gentle": True, "long_handlers": 0.0, "lost_notifications": 0.0, "drain_s": 30.0}
_LONG = {"long_handlers": 0.2, "drain_s": LONGEST_HANDLER_S + 5.0}

SCENARIOS: dict[str, Scenario] = {
    "broker-away": Scenario({**_CALM, "brokers": 2}, _broker_away),
    "member-away": Scenario({"gentle": False, "members": 3, "handler_s": 0.2, "mixed": False}, _member_away),
    "lost-while-handled": Scenario({**_LONG, "gentle": False, "members": 3}, _lost_while_handled),
    "foreign-members": Scenario(
        {**_CALM, "brokers": 1, "orderly": False, "sticky": False, "mixed": False, "members": 2}, _foreign_members
    ),
    "foreign-storm": Scenario(
        {**_CALM, "brokers": 1, "orderly": False, "sticky": False, "mixed": False, "members": 1, "queues": 24},
        _foreign_storm,
    ),
    "foreign-members-of-two": Scenario(
        {**_CALM, "brokers": 2, "orderly": False, "sticky": False, "mixed": False, "members": 2},
        _foreign_members,
    ),
    "foreign-of-slow-peers": Scenario(
        {
            **_CALM,
            "brokers": 2,
            "peers_delay_s": 0.3,
            "unread_limit_s": 35.0,
            "orderly": False,
            "sticky": False,
            "mixed": False,
            "members": 2,
            "handler_s": 0.2,
        },
        _foreign_of_slow_peers,
    ),
    "foreign-not-reached": Scenario(
        {
            **_CALM,
            "lost_notifications": 0.3,
            "brokers": 1,
            "orderly": False,
            "sticky": False,
            "mixed": False,
            "members": 2,
            "handler_s": 0.2,
        },
        _foreign_members,
    ),
    "foreign-of-two-not-reached": Scenario(
        {
            **_CALM,
            "lost_notifications": 0.3,
            "brokers": 2,
            "orderly": False,
            "sticky": False,
            "mixed": False,
            "members": 2,
            "handler_s": 0.2,
        },
        _foreign_members,
    ),
    "foreign-of-different-topics": Scenario(
        {**_CALM, "topics": 3, "orderly": False, "sticky": False, "mixed": True, "members": 2}, _foreign_members
    ),
    "foreign-of-different-topics-killed": Scenario(
        {
            "gentle": False,
            "long_handlers": 0.0,
            "drain_s": 30.0,
            "topics": 3,
            "orderly": False,
            "sticky": False,
            "mixed": True,
        },
        _foreign_members_killed,
    ),
    "foreign-roll": Scenario(
        {
            "gentle": False,
            "long_handlers": 0.0,
            "lost_notifications": 0.0,
            "drain_s": 30.0,
            "brokers": 1,
            "topics": 1,
            "queues": 16,
            "members": 1,
            "backlog_limit_s": 12.0,
            "handler_s": 0.1,
            "orderly": False,
            "sticky": False,
            "mixed": False,
        },
        _foreign_roll,
    ),
    "foreign-roll-of-two": Scenario(
        {
            "gentle": False,
            "long_handlers": 0.0,
            "lost_notifications": 0.0,
            "drain_s": 30.0,
            "brokers": 2,
            "topics": 1,
            "queues": 8,
            "members": 1,
            "backlog_limit_s": 24.0,
            "handler_s": 0.1,
            "orderly": False,
            "sticky": False,
            "mixed": False,
        },
        _foreign_roll,
    ),
    "foreign-backlog": Scenario(
        {
            **_CALM,
            "brokers": 1,
            "topics": 1,
            "queues": 3,
            "members": 1,
            "handler_s": 0.02,
            "unread_limit_s": 35.0,
            "orderly": False,
            "sticky": False,
            "mixed": False,
        },
        _foreign_backlog,
    ),
    "broker-killed": Scenario({**_CALM, "gentle": False, "queues": 8, "brokers": 1}, _broker_killed),
    "killed-at-hand-over": Scenario({"gentle": False, "members": 2, "mixed": False}, _killed_at_hand_over),
    "handled-out-of-order": Scenario(
        {**_LONG, "gentle": False, "orderly": False, "mixed": False, "members": 4, "queues": 4, "handler_s": 0.02},
        _handled_out_of_order,
    ),
    "long-hand-over": Scenario({**_CALM, **_LONG, "members": 3}, _long_hand_over),
    "unheard-restart": Scenario({"gentle": False, "members": 3, "mixed": False}, _unheard_restart),
    "hasty-members": Scenario(
        {
            **_CALM,
            "apache": True,
            "unread_limit_s": 12.0,
            "orderly": False,
            "sticky": False,
            "mixed": False,
            "members": 2,
        },
        _hasty_members,
    ),
    "frozen-at-a-request": Scenario(
        {"gentle": False, "members": 3, "handler_s": 0.2, "mixed": False}, _frozen_at_a_request
    ),
    "away-in-hand-overs": Scenario({**_CALM, "handler_s": 0.2, "members": 2}, _away_in_hand_overs),
    "told-in-turns": Scenario(
        {**_CALM, "turns": True, "members": 14, "queues": 8, "brokers": 1, "mixed": False, "sticky": False},
        _told_in_turns,
    ),
    "only-a-broker-stands": Scenario({**_CALM, "handler_s": 0.2}, _only_a_broker_stands),
}


def scenario_of(name: str, plan: Plan) -> Plan:
    return replace(plan, scenario=name, **SCENARIOS[name].plan)
