"""Names, bodies and properties that are made to hurt, read by a program: none becomes a tag, and no page fails."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser
from urllib.parse import urljoin

import pytest
from rocketlet.client import Producer
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import GroupConfig, TopicConfig

from ..conftest import Node
from .conftest import Site

NAMES = [
    "<script>hacked</script>", '"><img src=hacked onerror=hacked>', "' onload='hacked", "javascript:hacked",
    "{{ hacked }}", "../../hacked", "a/b?c=d#e&f", "%3Cscript%3Ehacked", "hacked\r\nSet-Cookie: hacked", "\x1b]0;hacked\x07",
    "\u202ehacked\u2028\u2029", "<!--hacked", "]]>hacked</title></textarea><svg onload=hacked>", "hacked" * 80, " ", "ü.ö",
    "\x00hacked", "data:text/html,hacked",
]  # fmt: skip


class Seen(HTMLParser):
    """The tags and attributes of a page, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name.startswith("on") or "hacked" in name:
                self.faults.append(f"{tag} {name}")
            if name in ("href", "src", "action", "formaction"):
                if name in ("href", "src"):
                    self.links.append(value or "")
                if ":" in (value or "").split("/")[0].split("?")[0]:
                    self.faults.append(f"{tag} leads to {value!r}")
        if tag == "img" and "hacked" in str(attributes):
            self.faults.append(tag)

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"comment {data[:50]}")


async def test_hostile_names_bodies_and_properties_stay_text_on_every_page(
    node: Node, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = bodies.decode_topic_list
    monkeypatch.setattr(bodies, "decode_topic_list", lambda body: [*decode(body), *NAMES])
    await _fill(node)
    to_see, seen = ["/", "/topics?system=1", "/groups", "/brokers", "/doctor"], set[str]()
    while to_see:
        path = to_see.pop()
        if path in seen or len(seen) > 300:
            continue
        seen.add(path)
        answer = await site.http.get(urljoin(site.url + "/", path), follow_redirects=True)
        assert answer.status_code in (200, 400, 404, 409, 502), (path, answer.status_code)
        assert "set-cookie" not in answer.headers or "hacked" not in answer.headers["set-cookie"]
        if "html" not in answer.headers.get("content-type", ""):
            continue
        page = Seen()
        page.feed(answer.text)
        assert not page.faults, path
        assert "<script>hacked" not in answer.text and "<svg onload" not in answer.text
        to_see += [link for link in page.links if link.startswith("/") and not link.startswith("/static")]
    assert len(seen) > 60
    for path in ("/topics", "/groups"):
        assert "&lt;script&gt;hacked" in await site.get(path), "the names are there"


async def test_the_page_of_an_error_leads_to_no_other_host(site: Site) -> None:
    for path in (
        "//evil.example/x",
        "/\\evil.example/x",
        "///evil.example",
        "/%5Cevil.example",
        '/"onclick="x',
        "/%1b%22%3e<b>",
    ):
        reader, writer = await asyncio.open_connection(*site.url.removeprefix("http://").split(":"))
        host = site.url.removeprefix("http://")
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        page = Seen()
        page.feed((await reader.read()).decode())
        writer.close()
        assert not page.faults
        assert not [link for link in page.links if link.startswith(("//", "/\\")) or not link.startswith(("/", "#"))], (
            path
        )


async def _fill(node: Node) -> None:
    """As a broker that checks no names would have them."""
    topics, groups = node.broker.topics, node.broker.group_configs
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
        for name in NAMES:
            properties = {f"p{name}": f"v{name}"}
            await producer.send("orders", name.encode(), tag="T", keys="k", properties=properties)
    for name in NAMES:
        topics._topics[name] = TopicConfig(name, 1, 1)
        groups._store(GroupConfig(name))


async def test_a_body_that_inflates_is_inflated_as_far_as_a_page_shows_it(
    node: Node, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 messages of 64 KB that inflate to 63 MiB each took 2.7 GB, and nobody was served for a minute."""
    bomb = b"0123456789" * 400_000
    async with Producer(node.address, compress_over_bytes=100) as producer:
        sent = await producer.send("orders", bomb)
    monkeypatch.setattr("rocketlet.client.message.decompressed", lambda *_: pytest.fail("all of it was inflated"))
    place = f"/messages/orders/broker-a/{sent.queue.queue_id}/{sent.queue_offset}"
    page = await site.text(place)
    assert "more than 64 KiB when decompressed" in page
    assert "bytes beyond 64 KiB are not shown" in page
    assert "bytes beyond 4 KiB are not shown" in await site.text(place + "?as=hex")
    for path in ("/messages?topic=orders", "/topics/orders/tail"):
        assert "0123456789012" in await site.text(path)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a":"\\ud800"}', '"a": "\\ud800"'),
        (b'{"a":"\\udc00\\ud800x"}', "x"),
        (b"[" * 900 + b"0," * 20_000 + b"0" + b"]" * 900, "further lines are not shown"),
        ("é".encode() * 40_000, "more are not shown"),
        (b"x" + "é".encode() * 40_000, "more are not shown"),
    ],
    ids=["half a surrogate pair", "two halves", "deep", "long", "cut inside of a character"],
)
async def test_a_body_that_is_odd_has_its_page(node: Node, site: Site, body: bytes, shown: str) -> None:
    async with Producer(node.address, compress_over_bytes=1_000_000) as producer:
        sent = await producer.send("orders", body)
    place = f"/messages/orders/broker-a/{sent.queue.queue_id}/{sent.queue_offset}"
    assert shown in await site.text(place)
