"""Synchronization of two brokers alone: what one knows of the other, and when it has nothing to say or to wait for."""

from __future__ import annotations

import pytest
from rocketlet.broker.groups.stages import NOBODY

from ...support.agreement import PeerScript


@pytest.fixture
def peer() -> PeerScript:
    found = PeerScript()
    found.announce("d", "c1")
    return found


def agreed(peer: PeerScript) -> None:
    """The other broker has answered, and knows that this one knows."""
    peer.receives("d", heard=peer.sent()[0].number)
    peer.receives("d", heard=peer.sent()[0].number)


def test_without_other_brokers_nobody_is_waited_for(peer: PeerScript) -> None:
    assert not peer.group.sync.allows_list("c2")
    peer.agreement.announce(peer.group, NOBODY, ["c1"])
    assert peer.group.sync.allows_list("c2")
    assert peer.group.sync.allows_notification("c2")
    assert peer.group.sync.reach()
    assert not peer.group.sync.peers


def test_other_brokers_of_a_group_are_known(peer: PeerScript) -> None:
    assert {name: peer.address for name, peer in peer.group.sync.peers.items()} == {"broker-b": "host:1"}
    assert not peer.group.sync.agrees("broker-b")
    peer.receives("d", heard=peer.sent()[0].number)
    assert peer.group.sync.agrees("broker-b")
    assert not peer.group.sync.agrees("broker-c")


def test_words_of_a_group_that_nobody_has_here_are_not_answered(peer: PeerScript) -> None:
    peer.agreement.end(peer.group)
    assert peer.receives("d", heard=1, given="d") == []
    assert peer.message() is None
    for change in (peer.agreement.begin_change, peer.agreement.report_progress, peer.agreement.give_up):
        change(peer.group)
    peer.agreement.record_issued(peer.group, "c1")
    peer.agreement.set_waiting(peer.group, ())
    assert peer.group.sync.reach()


def test_a_word_of_a_broker_that_has_no_topic_of_the_group_changes_nothing(peer: PeerScript) -> None:
    peer.group.sync.peers.clear()
    assert peer.receives("d", heard=1, given="d") == []


def test_nobody_is_waited_for_after_it_was_given_up(peer: PeerScript) -> None:
    peer.agreement.give_up(peer.group)
    assert peer.group.sync.allows_list("c1")
    assert peer.group.sync.allows_notification("c1")
    assert peer.group.sync.reach()
    assert peer.message() is not None, "the peer still learns whom it may notify"
    peer.agreement.begin_change(peer.group)
    assert not peer.group.sync.reach()
    peer.agreement.give_up(peer.group)
    assert peer.group.sync.reach()
    peer.receives("d", heard=0)
    assert peer.message() is None, "given up before it was known what moves"


def test_a_member_is_notified_when_the_other_broker_knows_that_it_is_drained(peer: PeerScript) -> None:
    agreed(peer)
    assert peer.group.sync.allows_notification("c2")
    peer.agreement.set_waiting(peer.group, ["c1"])
    assert peer.message() is None, "nothing new"
    peer.agreement.set_waiting(peer.group, ())
    assert not peer.group.sync.allows_notification("c1")
    assert peer.group.sync.allows_notification("c2")
    number = peer.sent()[0].number
    assert not peer.group.sync.allows_notification("c1")
    peer.receives("d", heard=number - 1)
    assert not peer.group.sync.allows_notification("c1")
    peer.receives("d", heard=number)
    assert peer.group.sync.allows_notification("c1")
    assert peer.group.sync.reach()


def test_nothing_is_reached_while_the_other_broker_waits_or_asks_for_more(peer: PeerScript) -> None:
    peer.agreement.set_waiting(peer.group, ())
    peer.receives("d", "c9", heard=peer.sent()[0].number)
    peer.receives("d", "c9", heard=peer.sent()[0].number)
    assert not peer.group.sync.reach()
    peer.receives("other", heard=1 << 62)
    assert not peer.group.sync.reach()
    peer.receives("d", heard=peer.sent()[0].number)
    assert not peer.group.sync.reach(), "it does not know yet that this one agrees again"
    peer.receives("d", heard=peer.sent()[0].number)
    assert peer.group.sync.reach()


def test_lists_that_were_given_are_said_once(peer: PeerScript) -> None:
    agreed(peer)
    peer.agreement.record_issued(peer.group, "c1")
    peer.agreement.record_issued(peer.group, "c2")
    assert peer.sent()[1].given == {"d": ("c1", "c2")}
    assert peer.message() is None
    peer.agreement.begin_change(peer.group)
    peer.agreement.record_issued(peer.group, "c3")
    assert peer.message() is None, "it is not known which list is the last"


def test_what_is_known_of_a_broker_outlives_a_change(peer: PeerScript) -> None:
    agreed(peer)
    peer.receives("d", "c9", heard=0, number=7)
    peer.agreement.record_issued(peer.group, "c1")
    peer.announce("d")
    assert not peer.group.sync.allows_list("c9"), "it has not been notified of this change"
    word = peer.sent()
    assert (word.header.heard, word.members.given) == (7, {"d": ("c1",)})


def test_a_broker_that_was_allowed_to_return_lists_may_do_so_until_it_has_been_notified_of_the_next_change(
    peer: PeerScript,
) -> None:
    agreed(peer)
    assert not peer.group.sync.may_issue_earlier, "it gives those of this change"
    peer.agreement.begin_change(peer.group)
    assert peer.group.sync.may_issue_earlier
    peer.announce("e")
    peer.announce("f")
    first = peer.sent()[0].number
    peer.receives("d", heard=first - 1)
    assert peer.group.sync.may_issue_earlier
    peer.receives("d", heard=first)
    assert not peer.group.sync.may_issue_earlier
    peer.agreement.begin_change(peer.group)
    assert not peer.group.sync.may_issue_earlier, "they have not agreed on the last change"


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_broker_that_is_not_waited_for_gives_nothing(peer: PeerScript, *, is_given_up: bool) -> None:
    agreed(peer)
    peer.agreement.begin_change(peer.group)
    if is_given_up:
        peer.agreement.give_up(peer.group)
    else:
        peer.failed(False)
    assert not peer.group.sync.may_issue_earlier


def test_a_broker_that_asks_is_answered_though_there_is_nothing_new(peer: PeerScript) -> None:
    agreed(peer)
    assert peer.message() is None
    peer.receives("d", heard=1 << 62, asks=True)
    word = peer.sent()
    assert not word.header.asks


def test_a_broker_that_fails_is_away_until_it_responds(peer: PeerScript) -> None:
    assert peer.agreement.away() == []
    peer.failed(False)
    peer.failed(False)
    assert (peer.agreement.away(), peer.away) == (["broker-b at host:1"], ["g"])
    peer.receives("d", heard=0)
    assert peer.agreement.away() == []
    peer.failed(True)
    assert (peer.agreement.away(), peer.away) == ([], ["g", "g"]), "it does not know the request: that is no fault"


def test_a_broker_that_does_not_know_the_request_is_asked_no_more(peer: PeerScript) -> None:
    peer.failed(True)
    peer.announce("e")
    assert peer.group.sync.allows_list("c1")
    assert not peer.group.sync.peers


def test_a_token_is_of_one_listener_and_one_run(peer: PeerScript) -> None:
    assert peer.agreement.token("broker-b") == peer.sent().header.token
    assert peer.agreement.token("broker-b") != peer.agreement.token("broker-c")
    assert peer.agreement.token("broker-b") != PeerScript().agreement.token("broker-b")
