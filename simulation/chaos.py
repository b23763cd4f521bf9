"""Misfortunes of brokers and members: single events, which a seed strings together by chance or as a scenario.

`world.crashed()` notes that messages may come again: they were in handlers of somebody who was killed or not heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .foreign import ForeignMember
    from .loop import Transport
    from .member import Member
    from .world import Node, World


def spare(world: World) -> Member | ForeignMember | None:
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
    """Some come and some go at once."""
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


async def freeze(world: World) -> None:
    member = spare(world)
    if member is not None:
        stood_s = world.rng.choice((1, 10, 25, 45))
        world.spawn(company(world, stood_s))
        await freeze_member(world, member, stood_s)


async def freeze_member(world: World, member: Member | ForeignMember, stood_s: float) -> None:
    world.note(f"{member.name} stands still")
    world.crashed()
    was_unanswered = member.is_unanswered
    member.process.is_paused = True
    await asyncio.sleep(stood_s)
    world.note(f"{member.name} goes on")
    world.crashed()
    member.process.resume()
    if was_unanswered:  # it learns whose its queues are when it has connected again
        member.blind_until_s = max(member.blind_until_s, world.loop.time())
    await asyncio.sleep(10)
    world.crashed()


async def freeze_at(world: World, member: Member | ForeignMember, code: int, stood_s: float) -> None:
    """It stands still between a request and its answer."""
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


async def silence_member(world: World, member: Member | ForeignMember, silent_s: float) -> None:
    """Traffic to and from a member stays on the way; its sockets stay open."""
    world.note(f"{member.name} is not heard")
    world.crashed()
    member.process.silent_until_s = world.loop.time() + silent_s
    await asyncio.sleep(silent_s)
    world.note(f"{member.name} is heard again")
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
    world.note(f"{node.name} stands still")
    node.process.is_paused = True
    await asyncio.sleep(stood_s)
    world.note(f"{node.name} goes on")
    node.process.resume()


async def company(world: World, seconds: float) -> None:
    """Mostly somebody comes or goes just then: queues of a member that stands still move only if the shares do."""
    if world.rng.random() < 0.8:
        await asyncio.sleep(world.rng.uniform(0, seconds))
        await (join if world.rng.random() < 0.7 else someone_leaves)(world)


async def cut(world: World) -> None:
    member = spare(world)
    if member is not None and member.process.transports:
        await cut_member(world, member, world.rng.choice(member.process.transports))


async def cut_member(world: World, member: Member | ForeignMember, transport: Transport) -> None:
    world.note(f"{member.name} loses a connection")
    world.crashed()
    mine_s = world.rng.uniform(0, 2)
    member.blind_until_s = max(member.blind_until_s, world.loop.time() + mine_s)
    transport.cut(mine_s, world.rng.uniform(0, 2))
    await asyncio.sleep(10)
    world.crashed()


Event = Callable[["World"], Awaitable[None]]
GENTLE: tuple[Event, ...] = (join, someone_leaves, several, restart, grow, broker_stands)
HARSH: tuple[Event, ...] = (kill, freeze, silence, cut, kill_broker, broker_stands_long)


async def by_chance(world: World, moments_s: list[float]) -> None:
    """One event at each moment, whatever the last one does."""
    for moment_s in moments_s:
        await asyncio.sleep(max(moment_s - world.loop.time(), 0))
        world.spawn(world.rng.choice(GENTLE if world.plan.gentle else GENTLE + HARSH)(world))
        world.check()
