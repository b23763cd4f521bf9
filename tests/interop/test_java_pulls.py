"""Unmodified Java clients (4.9.8) that pull themselves, and that look for messages by id, key and time, on our broker."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocketlet.broker.messages.filters import FilterError, parse_filter
from rocketlet.protocol.properties import encode

from .conftest import Cluster, Run, filled, missing
from .features import area

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(bool(missing("java", "mvn")), reason=missing("java", "mvn")),
    pytest.mark.timeout(300),
]
feature = area("Pull consumers")


@feature("lite pull by subscription, commit")
async def test_lite_pull_subscribes_and_commits(cluster: Cluster, java: Run) -> None:
    bodies = await filled(cluster)
    async with java("lite", ns=cluster.address, group="g", topic="t", count=len(bodies)) as peer:
        await peer.until(lambda: bool(peer.found("COMMITTED")))
        queues = [(node.broker.offsets, number) for node in cluster.nodes for number in range(2)]
        await peer.until(lambda: all(offsets.get("g", "t", number) == 5 for offsets, number in queues))
    assert Counter(peer.bodies) == Counter(bodies)


@feature("lite pull by assignment, seek, offsets by time")
async def test_lite_pull_assigns_and_seeks(cluster: Cluster, java: Run) -> None:
    bodies = await filled(cluster)
    async with java("assign", ns=cluster.address, group="g", topic="t", count=len(bodies)) as peer:
        await peer.until(lambda: bool(peer.found("BY-TIME")))
    [[_, first, second]] = peer.found("SEEK")
    assert Counter(peer.bodies[: len(bodies)]) == Counter(bodies)
    again = [*(f"{first}-{number}" for number in range(1, 5)), *(f"{second}-{number}" for number in range(5))]
    assert peer.bodies[len(bodies) :] == again
    assert peer.found("COMMITTED") == [["COMMITTED", "5", "5"]]
    assert peer.found("BY-TIME") == [["BY-TIME", "0"]]


@pytest.mark.parametrize("tags", ["*", "odd"])
@feature("the old pull consumer")
async def test_the_old_pull_consumer_reads_queue_by_queue(cluster: Cluster, java: Run, tags: str) -> None:
    bodies = await filled(cluster)
    async with java("pull", ns=cluster.address, group="g", topic="t", tags=tags) as peer:
        await peer.until(lambda: bool(peer.found("ENDED")))
    wanted = [body for body in bodies if tags == "*" or int(body[-1]) % 2]
    assert Counter(peer.bodies) == Counter(wanted)
    assert [line[2:] for line in peer.found("READ")] == [["5", "5", "5"]] * (2 * len(cluster.nodes))
    assert cluster.nodes[0].broker.offsets.get("g", "t", 0) == 5


@pytest.mark.feature("Queries", "by offset id, by unique id, by key and time range; offsets by time")
async def test_java_finds_messages_in_every_way(cluster: Cluster, java: Run) -> None:
    await cluster.create_topic("t", 1)
    async with java("queries", ns=cluster.address, topic="t") as peer:
        await peer.until(lambda: bool(peer.found("OFFSETS")))
    assert peer.found("BY-OFFSET") == [["BY-OFFSET", "query-0", "true"]]
    assert peer.found("BY-UNIQUE") == [["BY-UNIQUE", "query-0", "true"]]
    assert peer.found("BY-KEY") == [["BY-KEY", "3", "1", "1"]]
    assert peer.found("OFFSETS") == [["OFFSETS", "0", "3", "0", "2", "true"]]


# Our SQL92 filter decides as Apache's own classes do.

_name = st.sampled_from(["a", "b", "c"])
_number = st.sampled_from(["0", "1", "2", "-1", "1.5", "10"])
_text = st.sampled_from(["'x'", "'1'", "'it''s'", "'true'"])
_atom = st.one_of(
    st.builds("{} {} {}".format, _name, st.sampled_from([">", ">=", "<", "<=", "=", "<>"]), _number),
    st.builds("{} {} {}".format, _name, st.sampled_from(["=", "<>"]), _text),
    st.builds("{} {} {}".format, _number, st.sampled_from([">", "="]), _name),
    st.builds("{} = {}".format, _name, st.sampled_from(["TRUE", "FALSE"])),
    st.builds("{} IS {}NULL".format, _name, st.sampled_from(["", "NOT "])),
    st.builds("{} {} {}".format, _name, st.sampled_from([">", "=", "<>"]), _name),
    st.builds("({}) > ({})".format, _name, _number),
    st.builds("{} {}IN ({}, {})".format, _name, st.sampled_from(["", "NOT "]), _text, _text),
    st.builds("{} {}BETWEEN {} AND {}".format, _name, st.sampled_from(["", "NOT "]), _number, _number),
    st.sampled_from(["a LIKE 'x'", "a >", "a = b", "a + 1 = 2", "'x' > 1", "a", "a IN (1)", "a == 1", "a != 1"]),
)
_expression = st.recursive(
    _atom,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=6,
)
_ODD = [
    "1_0",
    " 1",
    "1 ",
    "+1",
    "1e1",
    "1d",
    "0x1p1",
    "0x1p99999",
    "-0x1p99999",
    "-0.0",
    ".5",
    "1.",
    "NaN",
    "nan",
    "Infinity",
    "-inf",
    "9223372036854775808",
]
"""Texts that one of the two languages takes for a number, and the other does not."""
_properties = st.dictionaries(
    _name, st.sampled_from(["0", "1", "2", "1.0", "1.5", "x", "it's", "true", "-1", "10", *_ODD])
)


@pytest.mark.feature("Filters", "SQL92 filters decide as Apache's own classes do, compared over 2,000 random filters")
async def test_our_filter_decides_as_apaches_does(java: Run) -> None:
    cases: list[tuple[str, dict[str, str]]] = []

    @settings(max_examples=2000, database=None, derandomize=True)
    @given(_expression, _properties)
    def collect(expression: str, properties: dict[str, str]) -> None:
        cases.append((expression, properties))

    collect()
    async with java("filter") as apache:
        for expression, properties in cases:
            await apache.write("\t".join([expression, *(part for pair in properties.items() for part in pair)]))
        await apache.until(lambda: len(apache.lines) >= len(cases))
        theirs = apache.lines[: len(cases)]
    verdicts = [(*case, ours(*case), verdict) for case, verdict in zip(cases, theirs, strict=True)]
    differing = [item for item in verdicts if item[2] not in (item[3], "refused")]
    assert not differing, differing[:20]
    assert sum(item[2] == "true" for item in verdicts) > 200
    assert sum(item[2] == "refused" != item[3] for item in verdicts) < 400, (
        "some that Apache takes we refuse, by choice"
    )


def ours(expression: str, properties: dict[str, str]) -> str:
    try:
        return str(parse_filter(expression)(encode(properties))).lower()
    except FilterError:
        return "refused"
