"""Finds where the members of a group disagree with each other or with the broker, in words that name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ...protocol.names import RETRY_PREFIX
from ...protocol.work import SLICE, Work
from ..config import MAX_NAMED_CHARS, MAX_NAMED_MEMBERS
from .member import Member


def finding_faults(members: list[Member], broker_name: str, queues_of: Callable[[str], int]) -> Work[frozenset[str]]:
    """Makes texts that name the members that disagree, in pieces."""
    topics, expressions = Counter[str](), dict[str, dict[str, list[str]]]()
    settings: dict[str, dict[str, list[str]]] = {"message models": {}, "allocation strategies": {}}
    ids = Counter[str]()
    stale: list[str] = []
    for number, member in enumerate(members, 1):
        for topic, subscription in member.subscriptions.items():
            topics[topic] += 1
            expressions.setdefault(topic, {}).setdefault(subscription.summary, []).append(member.client_id)
        settings["message models"].setdefault(member.data.message_model, []).append(member.client_id)
        if member.data.strategy:
            settings["allocation strategies"].setdefault(member.data.strategy, []).append(member.client_id)
        ids[member.client_id] += 1
        if len(stale) < MAX_NAMED_MEMBERS:
            stale += (
                f"{member.client_id} sees {count} queues of {topic} at {broker_name}, there are {queues_of(topic)}"
                for _, topic, count in stale_counts([member], broker_name, queues_of)
            )
        if number % SLICE == 0:
            yield
    doubled = [item for item in ids.most_common(MAX_NAMED_MEMBERS) if item[1] > 1]
    return frozenset(
        (
            *_differing_topics(members, topics, expressions),
            *_differing("message models", settings["message models"]),
            *_differing("allocation strategies", settings["allocation strategies"]),
            *(f"{count} live connections with the client id {name}" for name, count in doubled),
            *stale,
        )
    )


def _differing_topics(
    members: list[Member], topics: Counter[str], expressions: dict[str, dict[str, list[str]]]
) -> Iterator[str]:
    retrying = sum(not member.pops for member in members)
    wanted = {topic: retrying if topic.startswith(RETRY_PREFIX) else len(members) for topic in topics}
    differing = [topic for topic, count in topics.items() if count < wanted[topic] or len(expressions[topic]) > 1]
    for topic in sorted(differing)[:MAX_NAMED_MEMBERS]:
        count = topics[topic]
        if count < wanted[topic]:
            without = [member.client_id for member in members if topic not in member.subscriptions]
            subscribed = [name for names in expressions[topic].values() for name in names]
            yield f"{_named(without)} not subscribed to {topic}, while {_named(subscribed)} are"
        if len(expressions[topic]) > 1:
            kinds = [f"{name}: {text}" for text, names in expressions[topic].items() for name in names]
            yield f"different tag expressions for {topic}: {_named(kinds, '; ')}"


def _differing(what: str, values: dict[str, list[str]]) -> Iterator[str]:
    if len(values) > 1:
        yield f"different {what}: " + _named(
            [f"{name}: {value}" for value, ids in values.items() for name in ids], "; "
        )


def stale_counts(
    members: Iterable[Member], broker_name: str, queues_of: Callable[[str], int]
) -> Iterator[tuple[Member, str, int]]:
    """The members that see a wrong number of queues here, with the topic and that number."""
    for member in members:
        for topic, count in member.data.queue_counts.get(broker_name, {}).items():
            if topic in member.subscriptions and count != queues_of(topic):
                yield member, topic, count


def _named(names: list[str], between: str = ", ") -> str:
    """The first of very many."""
    more = len(names) - MAX_NAMED_MEMBERS
    first = (name[:MAX_NAMED_CHARS] for name in names[:MAX_NAMED_MEMBERS])
    return between.join(first) + (f" and {more} more" if more > 0 else "")
