"""Requests that are let in, and the headers of every answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from urllib.parse import urljoin

import pytest
from rocketlet.client import AdminClient, Producer
from rocketlet.console.config import MAX_FORM_BYTES, MAX_STREAMS
from rocketlet.protocol import bodies
from rocketlet.protocol.bodies import GroupConfig, TopicConfig

from ..conftest import PATIENCE_S, Node
from .conftest import Site, plain, token_of


async def test_every_answer_allows_nothing_but_our_own_scripts_and_styles(site: Site) -> None:
    for path in ("/groups", "/no/such/page", "/static/console.css"):
        answer = await site.http.get(site.url + path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = await site.get("/groups")
    assert "style=" not in page
    assert "onclick" not in page


async def test_the_cookie_is_not_for_scripts_nor_for_other_sites(site: Site) -> None:
    cookie = (await site.http.get(site.url + "/groups")).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "set-cookie" not in (await site.http.get(site.url + "/groups")).headers


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:80", "", "[", "]", "[::1", "[v1.x]"])
async def test_a_name_that_is_not_ours_is_refused(site: Site, host: str) -> None:
    answer = await site.http.get(site.url + "/groups", headers={"host": host})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8080", "10.1.2.3:80"])
async def test_addresses_and_this_machine_are_known(site: Site, host: str) -> None:
    assert (await site.http.get(site.url + "/groups", headers={"host": host})).status_code == 200


async def test_a_form_needs_its_origin_its_cookie_and_its_token(site: Site, node: Node) -> None:
    fields = {"topic": "orders", "queues": "4", "perm": "6", "confirmed": "yes"}
    token = token_of(await site.get("/new/topic"))
    wrong = {
        "another site": ({"origin": "https://evil.example"}, token, 403),
        "a page without an origin": ({"origin": "null"}, token, 403),
        "a frame of another site": ({"origin": "", "sec-fetch-site": "cross-site"}, token, 403),
        "no token": ({}, "", 400),
        "another token": ({}, "0" * 64, 400),
        "a token that is no ASCII": ({}, "é", 400),
    }
    for reason, (headers, given, status) in wrong.items():
        answer = await site.post("/new/topic", fields | {"token": given}, **headers)
        assert answer.status_code == status, reason
    site.http.cookies.clear()
    assert (await site.post("/new/topic", fields | {"token": token})).status_code == 400, "no cookie"
    async with AdminClient(node.address) as admin:
        assert await admin.topics() == []
    token = token_of(await site.get("/new/topic"))
    headers = {"origin": "", "sec-fetch-site": "same-origin"}
    assert (await site.post("/new/topic", fields | {"token": token}, **headers)).status_code == 303
    async with AdminClient(node.address) as admin:
        assert await admin.topics() == ["orders"]


async def test_a_form_has_a_limit(site: Site) -> None:
    token = token_of(await site.get("/new/topic"))
    rest = len(f"token={token}&topic=")
    fits = await site.post("/new/topic", {"token": token, "topic": "x" * (MAX_FORM_BYTES - rest)})
    assert "characters; maximum 127" in plain(fits.text)
    beyond = await site.post("/new/topic", {"token": token, "topic": "x" * (MAX_FORM_BYTES - rest + 1)})
    assert f"more than {MAX_FORM_BYTES} bytes" in plain(beyond.text)


async def test_a_read_only_console_changes_nothing_and_offers_nothing(read_only_site: Site) -> None:
    page = await read_only_site.get("/groups")
    assert "read-only" in page
    assert "/new/group" not in page
    assert (await read_only_site.post("/new/topic", {"topic": "t", "confirmed": "yes"})).status_code == 403


async def test_open_pages_are_limited_and_given_back(site: Site) -> None:
    kept = []
    async with AsyncExitStack() as stack:
        headers = {"accept": "text/event-stream"}
        for _ in range(MAX_STREAMS):
            answer = await stack.enter_async_context(site.http.stream("GET", site.url + "/groups", headers=headers))
            assert answer.status_code == 200
            kept.append(answer.aiter_lines())
            await anext(kept[-1])
        beyond = await site.http.get(site.url + "/groups", headers=headers)
        assert beyond.status_code == 503
        assert str(MAX_STREAMS) in beyond.text
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with site.http.stream("GET", site.url + "/groups", headers=headers) as again:
                if again.status_code == 200:
                    break


async def test_what_is_not_served_is_refused(site: Site) -> None:
    assert (await site.http.request("DELETE", site.url + "/groups")).status_code == 405
    assert "There is no page /nothing" in await site.text("/nothing", 404)


# Names, bodies and properties that are made to hurt, read by a program: none becomes a tag, and no page fails.


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
