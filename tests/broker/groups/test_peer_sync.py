"""Synchronization of two brokers alone: what one knows of the other, and when it has nothing to say or to wait for."""

from __future__ import annotations

import pytest
from rocketlet.broker.groups.stages import NOBODY

from ...support.agreement import Said


@pytest.fixture
def said() -> Said:
    said = Said()
    said.found("d", "c1")
    return said


def agreed(said: Said) -> None:
    """The other broker has answered, and knows that this one knows."""
    said.hears("d", heard=said.says()[0].number)
    said.hears("d", heard=said.says()[0].number)


def test_without_other_brokers_nobody_is_waited_for(said: Said) -> None:
    assert not said.group.sync.lets_give("c2")
    said.agreement.found(said.group, NOBODY, ["c1"])
    assert said.group.sync.lets_give("c2")
    assert said.group.sync.lets_tell("c2")
    assert said.group.sync.reach()
    assert not said.group.sync.peers


def test_other_brokers_of_a_group_are_known(said: Said) -> None:
    assert {name: peer.address for name, peer in said.group.sync.peers.items()} == {"broker-b": "host:1"}
    assert not said.group.sync.agrees("broker-b")
    said.hears("d", heard=said.says()[0].number)
    assert said.group.sync.agrees("broker-b")
    assert not said.group.sync.agrees("broker-c")


def test_words_of_a_group_that_nobody_has_here_are_not_answered(said: Said) -> None:
    said.agreement.end(said.group)
    assert said.hears("d", heard=1, given="d") == []
    assert said.word() is None
    for change in (said.agreement.opened, said.agreement.progressed, said.agreement.give_up):
        change(said.group)
    said.agreement.gave(said.group, "c1")
    said.agreement.waits(said.group, ())
    assert said.group.sync.reach()


def test_a_word_of_a_broker_that_has_no_topic_of_the_group_changes_nothing(said: Said) -> None:
    said.group.sync.peers.clear()
    assert said.hears("d", heard=1, given="d") == []


def test_nobody_is_waited_for_after_it_was_given_up(said: Said) -> None:
    said.agreement.give_up(said.group)
    assert said.group.sync.lets_give("c1")
    assert said.group.sync.lets_tell("c1")
    assert said.group.sync.reach()
    assert said.word() is not None, "the peer still learns whom it may notify"
    said.agreement.opened(said.group)
    assert not said.group.sync.reach()
    said.agreement.give_up(said.group)
    assert said.group.sync.reach()
    said.hears("d", heard=0)
    assert said.word() is None, "given up before it was known what moves"


def test_a_member_is_notified_when_the_other_broker_knows_that_it_is_drained(said: Said) -> None:
    agreed(said)
    assert said.group.sync.lets_tell("c2")
    said.agreement.waits(said.group, ["c1"])
    assert said.word() is None, "nothing new"
    said.agreement.waits(said.group, ())
    assert not said.group.sync.lets_tell("c1")
    assert said.group.sync.lets_tell("c2")
    number = said.says()[0].number
    assert not said.group.sync.lets_tell("c1")
    said.hears("d", heard=number - 1)
    assert not said.group.sync.lets_tell("c1")
    said.hears("d", heard=number)
    assert said.group.sync.lets_tell("c1")
    assert said.group.sync.reach()


def test_nothing_is_reached_while_the_other_broker_waits_or_asks_for_more(said: Said) -> None:
    said.agreement.waits(said.group, ())
    said.hears("d", "c9", heard=said.says()[0].number)
    said.hears("d", "c9", heard=said.says()[0].number)
    assert not said.group.sync.reach()
    said.hears("other", heard=1 << 62)
    assert not said.group.sync.reach()
    said.hears("d", heard=said.says()[0].number)
    assert not said.group.sync.reach(), "it does not know yet that this one agrees again"
    said.hears("d", heard=said.says()[0].number)
    assert said.group.sync.reach()


def test_lists_that_were_given_are_said_once(said: Said) -> None:
    agreed(said)
    said.agreement.gave(said.group, "c1")
    said.agreement.gave(said.group, "c2")
    assert said.says()[1].given == {"d": ("c1", "c2")}
    assert said.word() is None
    said.agreement.opened(said.group)
    said.agreement.gave(said.group, "c3")
    assert said.word() is None, "it is not known which list is the last"


def test_what_is_known_of_a_broker_outlives_a_change(said: Said) -> None:
    agreed(said)
    said.hears("d", "c9", heard=0, number=7)
    said.agreement.gave(said.group, "c1")
    said.found("d")
    assert not said.group.sync.lets_give("c9"), "it has not been notified of this change"
    word = said.says()
    assert (word.header.heard, word.members.given) == (7, {"d": ("c1",)})


def test_a_broker_that_was_allowed_to_return_lists_may_do_so_until_it_has_been_notified_of_the_next_change(
    said: Said,
) -> None:
    agreed(said)
    assert not said.group.sync.gives_earlier, "it gives those of this change"
    said.agreement.opened(said.group)
    assert said.group.sync.gives_earlier
    said.found("e")
    said.found("f")
    first = said.says()[0].number
    said.hears("d", heard=first - 1)
    assert said.group.sync.gives_earlier
    said.hears("d", heard=first)
    assert not said.group.sync.gives_earlier
    said.agreement.opened(said.group)
    assert not said.group.sync.gives_earlier, "they have not agreed on the last change"


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_broker_that_is_not_waited_for_gives_nothing(said: Said, *, is_given_up: bool) -> None:
    agreed(said)
    said.agreement.opened(said.group)
    if is_given_up:
        said.agreement.give_up(said.group)
    else:
        said.failed(False)
    assert not said.group.sync.gives_earlier


def test_a_broker_that_asks_is_answered_though_there_is_nothing_new(said: Said) -> None:
    agreed(said)
    assert said.word() is None
    said.hears("d", heard=1 << 62, asks=True)
    word = said.says()
    assert not word.header.asks


def test_a_broker_that_fails_is_away_until_it_responds(said: Said) -> None:
    assert said.agreement.away() == []
    said.failed(False)
    said.failed(False)
    assert (said.agreement.away(), said.away) == (["broker-b at host:1"], ["g"])
    said.hears("d", heard=0)
    assert said.agreement.away() == []
    said.failed(True)
    assert (said.agreement.away(), said.away) == ([], ["g", "g"]), "it does not know the request: that is no fault"


def test_a_broker_that_does_not_know_the_request_is_asked_no_more(said: Said) -> None:
    said.failed(True)
    said.found("e")
    assert said.group.sync.lets_give("c1")
    assert not said.group.sync.peers


def test_a_token_is_of_one_listener_and_one_run(said: Said) -> None:
    assert said.agreement.token("broker-b") == said.says().header.token
    assert said.agreement.token("broker-b") != said.agreement.token("broker-c")
    assert said.agreement.token("broker-b") != Said().agreement.token("broker-b")
