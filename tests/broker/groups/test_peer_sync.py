"""A talk of two brokers by itself: what one knows of the other, and when it has nothing to say or to wait for."""

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
    assert not said.agreement.lets_give("g", "c2")
    said.agreement.found("g", NOBODY, ["c1"])
    assert said.agreement.lets_give("g", "c2")
    assert said.agreement.lets_tell("g", "c2")
    assert said.agreement.is_reached("g")
    assert said.agreement.address("g", "broker-b") is None


def test_other_brokers_of_a_group_are_known(said: Said) -> None:
    assert said.agreement.address("g", "broker-b") == "host:1"
    assert said.agreement.address("g", "broker-c") is said.agreement.address("h", "broker-b") is None
    assert not said.agreement.agrees("g", "broker-b")
    said.hears("d", heard=said.says()[0].number)
    assert said.agreement.agrees("g", "broker-b")
    assert not said.agreement.agrees("g", "broker-c")
    assert not said.agreement.agrees("h", "broker-b")


def test_words_of_a_group_that_nobody_has_here_are_not_answered(said: Said) -> None:
    said.agreement.forget("g")
    assert said.hears("d", heard=1, given="d") == []
    assert said.word() is None
    for change in (said.agreement.opened, said.agreement.progressed, said.agreement.give_up):
        change("g")
    said.agreement.gave("g", "c1")
    said.agreement.waits("g", ())
    assert said.agreement.is_reached("g")


def test_a_word_of_a_broker_that_has_no_topic_of_the_group_changes_nothing(said: Said) -> None:
    said.agreement._groups["g"].peers.clear()
    assert said.hears("d", heard=1, given="d") == []


def test_nobody_is_waited_for_after_it_was_given_up(said: Said) -> None:
    said.agreement.give_up("g")
    assert said.agreement.lets_give("g", "c1")
    assert said.agreement.lets_tell("g", "c1")
    assert said.agreement.is_reached("g")
    assert said.word() is not None, "the other one still hears whom it may tell"
    said.agreement.opened("g")
    assert not said.agreement.is_reached("g")
    said.agreement.give_up("g")
    assert said.agreement.is_reached("g")
    said.hears("d", heard=0)
    assert said.word() is None, "given up before it was known what moves"


def test_a_member_is_told_when_the_other_broker_knows_that_it_is_drained(said: Said) -> None:
    agreed(said)
    assert said.agreement.lets_tell("g", "c2")
    said.agreement.waits("g", ["c1"])
    assert said.word() is None, "nothing new"
    said.agreement.waits("g", ())
    assert not said.agreement.lets_tell("g", "c1")
    assert said.agreement.lets_tell("g", "c2")
    number = said.says()[0].number
    assert not said.agreement.lets_tell("g", "c1")
    said.hears("d", heard=number - 1)
    assert not said.agreement.lets_tell("g", "c1")
    said.hears("d", heard=number)
    assert said.agreement.lets_tell("g", "c1")
    assert said.agreement.is_reached("g")


def test_nothing_is_reached_while_the_other_broker_waits_or_asks_for_more(said: Said) -> None:
    said.agreement.waits("g", ())
    said.hears("d", "c9", heard=said.says()[0].number)
    said.hears("d", "c9", heard=said.says()[0].number)
    assert not said.agreement.is_reached("g")
    said.hears("other", heard=1 << 62)
    assert not said.agreement.is_reached("g")
    said.hears("d", heard=said.says()[0].number)
    assert not said.agreement.is_reached("g"), "it does not know yet that this one agrees again"
    said.hears("d", heard=said.says()[0].number)
    assert said.agreement.is_reached("g")


def test_lists_that_were_given_are_said_once(said: Said) -> None:
    agreed(said)
    said.agreement.gave("g", "c1")
    said.agreement.gave("g", "c2")
    assert said.says()[1].given == {"d": ("c1", "c2")}
    assert said.word() is None
    said.agreement.opened("g")
    said.agreement.gave("g", "c3")
    assert said.word() is None, "it is not known which list is the last"


def test_what_is_known_of_a_broker_outlives_a_change(said: Said) -> None:
    agreed(said)
    said.hears("d", "c9", heard=0, number=7)
    said.agreement.gave("g", "c1")
    said.found("d")
    assert not said.agreement.lets_give("g", "c9"), "it has not heard of this change"
    word = said.says()
    assert (word.header.heard, word.members.given) == (7, {"d": ("c1",)})


def test_a_broker_that_was_let_give_lists_may_do_so_until_it_has_heard_of_the_next_change(said: Said) -> None:
    agreed(said)
    assert not said.agreement.gives_earlier("g"), "it gives those of this change"
    said.agreement.opened("g")
    assert said.agreement.gives_earlier("g")
    said.found("e")
    said.found("f")
    first = said.says()[0].number
    said.hears("d", heard=first - 1)
    assert said.agreement.gives_earlier("g")
    said.hears("d", heard=first)
    assert not said.agreement.gives_earlier("g")
    said.agreement.opened("g")
    assert not said.agreement.gives_earlier("g"), "they have not agreed on the last change"


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_broker_that_is_not_waited_for_gives_nothing(said: Said, *, is_given_up: bool) -> None:
    agreed(said)
    said.agreement.opened("g")
    if is_given_up:
        said.agreement.give_up("g")
    else:
        said.failed(False)
    assert not said.agreement.gives_earlier("g")


def test_a_broker_that_asks_is_answered_though_there_is_nothing_new(said: Said) -> None:
    agreed(said)
    assert said.word() is None
    said.hears("d", heard=1 << 62, asks=True)
    word = said.says()
    assert not word.header.asks


def test_a_broker_that_fails_is_away_until_it_is_heard(said: Said) -> None:
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
    assert said.agreement.lets_give("g", "c1")
    assert said.agreement.address("g", "broker-b") is None


def test_a_token_is_of_one_listener_and_one_run(said: Said) -> None:
    assert said.agreement.token("broker-b") == said.says().header.token
    assert said.agreement.token("broker-b") != said.agreement.token("broker-c")
    assert said.agreement.token("broker-b") != Said().agreement.token("broker-b")
