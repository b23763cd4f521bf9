"""Shares of a topic that the broker divides: what members get one after another are parts of one whole."""

from __future__ import annotations

from rocketlet.broker.config import Limits
from rocketlet.broker.groups.members import StickyShares
from rocketlet.protocol.names import Queue

SEEN = {"broker-a": 8, "broker-b": 8}
MEMBERS = ["c1", "c2", "c3"]


def told(shares: StickyShares, seen: dict[str, int], members: list[str]) -> list[list[Queue]]:
    found = [shares.of(client_id, seen, lambda: members) for client_id in members]
    return [share.of("t") for share in found if share is not None]


def test_what_a_member_still_has_changes_no_share_that_others_got() -> None:
    """A member that is giving queues away still names them in its heartbeat, and who asks may doubt the shares. Shared out
    again, a queue would leave one member and reach nobody: the others have no reason to retry (simulation, seed 79872)."""
    shares = StickyShares("t")
    told(shares, SEEN, MEMBERS[:2])
    shares.forget()
    before = told(shares, SEEN, MEMBERS)
    for number in range(8):
        shares.claim(Queue("t", "broker-b", number), "c2")
    shares.doubt()
    assert told(shares, dict(SEEN), list(MEMBERS)) == before


def test_shares_follow_members_and_queues() -> None:
    shares = StickyShares("t")
    for seen, members in ((SEEN, MEMBERS), (SEEN, MEMBERS[1:]), ({"broker-a": 8}, MEMBERS[1:]), (SEEN, MEMBERS)):
        shares.forget()
        found = told(shares, seen, members)
        assert sorted(queue for share in found for queue in share) == [
            Queue("t", name, number) for name, count in seen.items() for number in range(count)
        ]
        assert len(found) == len(members)
    assert shares.of("c9", SEEN, lambda: MEMBERS) is None


def test_owners_are_kept_for_this_many_queues() -> None:
    shares = StickyShares("t", Limits(max_shared_queues=2))
    one, two, three = (Queue("t", "broker-a", number) for number in range(3))
    for queue in (one, two, three):
        shares.claim(queue, "c1")
    assert shares.owners == {one: "c1", two: "c1"}
    shares.claim(one, "c2")
    assert shares.owners == {one: "c2", two: "c1"}
